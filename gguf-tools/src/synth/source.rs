//! A synthetic model as a source of weights, without a checkpoint on disk.

use std::ops::Range;
use std::path::PathBuf;

use serde_json::Value;

use super::values::{FP8_TILE, Stored};
use super::{Shape, SynthError, SynthOptions, tokenizer};
use crate::block::BlockType;
use crate::checkpoint::tokenizer::{ChatTemplate, Tokenizer, to_metadata};
use crate::checkpoint::{SourcePrecision, decode};
use crate::gguf::Metadata;
use crate::model::{HyperParameters, TensorSpec, expected_tensors};
use crate::source::{SetAside, SourceError, WeightSource};

/// Weights that are made when they are asked for, row by row: those of the checkpoint that
/// [`super::write_checkpoint`] writes, at no cost in disk or memory.
#[derive(Debug)]
pub struct SynthSource {
    model: HyperParameters,
    tensors: Vec<TensorSpec>,
    metadata: Metadata,
    label: String,
    seed: u64,
}

impl SynthSource {
    /// The model of some options; `shard_bytes` does not matter.
    ///
    /// # Errors
    /// [`SynthError::Options`] if there is no such model.
    pub fn new(options: &SynthOptions) -> Result<Self, SynthError> {
        let shape = Shape::NAMES.iter().find(|(_, shape)| *shape == options.shape);
        let label = shape.map_or_else(|| "synthetic".to_owned(), |(name, _)| format!("synthetic-{name}"));
        Self::from_config(&options.config(), label, options.seed)
    }

    /// A model of any `config.json`, with the small tokenizer.
    ///
    /// # Errors
    /// [`SynthError::Options`] if the configuration cannot be built, [`SynthError::Tokenizer`] if its vocabulary is too
    /// small.
    pub fn from_config(config: &Value, label: impl Into<String>, seed: u64) -> Result<Self, SynthError> {
        let model = HyperParameters::from_config(config)?;
        let settings = tokenizer::tokenizer_config(model.max_position_embeddings);
        let vocabulary = Tokenizer::from_json(&tokenizer::tokenizer(), &settings, config, model.vocab_size)
            .map_err(SynthError::Tokenizer)?;
        let mut metadata = model.to_metadata();
        for (key, value) in to_metadata(vocabulary, ChatTemplate::from_settings(&settings)).iter() {
            metadata.set(key, value.clone());
        }
        Ok(Self { tensors: expected_tensors(&model), model, metadata, label: label.into(), seed })
    }

    /// One matrix of a tensor and, where it has them, its scales.
    fn stored(&self, tensor: &TensorSpec, matrix_index: usize) -> (Stored, Option<Stored>) {
        let name = &tensor.sources[matrix_index];
        let mut stored = Stored::of_source(tensor, name, &self.model, self.seed).into_iter();
        (stored.next().expect("every source has a weight"), stored.next())
    }

    fn precision(&self, tensor: &TensorSpec) -> SourcePrecision {
        self.stored(tensor, 0).0.precision().expect("a weight comes before its scales")
    }
}

impl WeightSource for SynthSource {
    fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    fn metadata(&self) -> Result<Metadata, SourceError> {
        Ok(self.metadata.clone())
    }

    fn files(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn label(&self) -> String {
        self.label.clone()
    }

    fn revision(&self) -> Option<String> {
        Some(format!("seed {}", self.seed))
    }

    fn type_name(&self, tensor: &TensorSpec) -> String {
        self.precision(tensor).name().to_owned()
    }

    fn n_bytes(&self, tensor: &TensorSpec) -> u64 {
        // Experts are all alike.
        let (weight, scales) = self.stored(tensor, 0);
        let one = weight.n_bytes() + scales.map_or(0, |scales| scales.n_bytes());
        one * tensor.sources.len() as u64
    }

    fn is_exact(&self, tensor: &TensorSpec, target: BlockType) -> bool {
        matches!(
            (self.precision(tensor), target),
            (SourcePrecision::I64, BlockType::I32) | (SourcePrecision::Fp4, BlockType::Mxfp4)
        )
    }

    fn refusals(&self, _: &[(&TensorSpec, BlockType)]) -> Vec<String> {
        Vec::new()
    }

    fn set_aside(&self) -> SetAside {
        SetAside::default()
    }

    fn read_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), SourceError> {
        let (weight, scales) = self.stored(tensor, matrix_index);
        let precision = weight.precision();
        let rows_per_scale = if precision == Some(SourcePrecision::Fp8) { FP8_TILE } else { 1 };
        let (mut bytes, mut scale_bytes, mut factors) = (Vec::new(), Vec::new(), Vec::new());
        for (row, out) in rows.zip(out.chunks_exact_mut(tensor.columns() as usize)) {
            weight.row(row as u64, &mut bytes);
            if let Some(scales) = &scales {
                scales.row(row as u64 / rows_per_scale, &mut scale_bytes);
                factors.resize(scale_bytes.len(), 0.0);
                decode::exponents(&scale_bytes, &mut factors);
            }
            match precision {
                Some(SourcePrecision::Fp8) => decode::fp8_row(&bytes, &factors, FP8_TILE as usize, out),
                Some(SourcePrecision::Fp4) => decode::fp4_row(&bytes, &factors, out),
                Some(SourcePrecision::Bf16) => decode::bf16s(&bytes, out),
                Some(SourcePrecision::F32) => decode::f32s(&bytes, out),
                _ => out.iter_mut().zip(expert_ids(&bytes)).for_each(|(out, id)| *out = id as f32),
            }
        }
        Ok(())
    }

    fn copy_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), SourceError> {
        let (weight, scales) = self.stored(tensor, matrix_index);
        let (mut bytes, mut scale_bytes) = (Vec::new(), Vec::new());
        let row_bytes = out.len() / rows.len().max(1);
        for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes.max(1))) {
            weight.row(row as u64, &mut bytes);
            if let Some(scales) = &scales {
                scales.row(row as u64, &mut scale_bytes);
                decode::fp4_row_to_mxfp4(&bytes, &scale_bytes, out);
            } else {
                for (out, id) in out.as_chunks_mut::<4>().0.iter_mut().zip(expert_ids(&bytes)) {
                    *out = id.to_le_bytes();
                }
            }
        }
        Ok(())
    }

    fn release(&self, _: &TensorSpec, _: usize) {}
}

/// A row of a routing table; ids are small.
fn expert_ids(bytes: &[u8]) -> impl Iterator<Item = i32> {
    bytes.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as i32)
}
