//! Weights of an official checkpoint folder, under their GGUF names.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use gguf_tools::block::BlockType;
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::model::{HyperParameters, TensorSpec};

use super::{FoundTensor, WeightSource};
use crate::error::RunnerError;

/// An official checkpoint folder as a source of weights: FP8 and FP4 are widened without loss.
#[derive(Debug)]
pub struct CheckpointSource {
    checkpoint: Checkpoint,
    specs: Vec<TensorSpec>,
    by_name: HashMap<String, usize>,
}

impl CheckpointSource {
    /// Opens the folder; reads headers only.
    ///
    /// # Errors
    /// If it is no checkpoint of a supported model.
    pub fn open(folder: &Path) -> Result<Self, RunnerError> {
        Self::new(Checkpoint::open(folder)?)
    }

    /// Takes a checkpoint that is already open.
    ///
    /// # Errors
    /// If tensors are missing or have other shapes than the configuration implies.
    pub fn new(checkpoint: Checkpoint) -> Result<Self, RunnerError> {
        checkpoint.demand_sound()?;
        let specs = checkpoint.table().specs().to_vec();
        let by_name = specs.iter().enumerate().map(|(i, spec)| (spec.gguf_name.clone(), i)).collect();
        Ok(Self { checkpoint, specs, by_name })
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Rows of one source tensor of `spec`.
    fn rows_per_source(spec: &TensorSpec) -> usize {
        let shape = spec.source_shape();
        shape[..shape.len().saturating_sub(1)].iter().product::<u64>() as usize
    }
}

impl WeightSource for CheckpointSource {
    fn path(&self) -> &Path {
        self.checkpoint.folder()
    }

    fn hyper_parameters(&self) -> &HyperParameters {
        self.checkpoint.hyper_parameters()
    }

    fn find(&self, name: &str) -> Option<FoundTensor> {
        let index = *self.by_name.get(name)?;
        Some(FoundTensor { index, shape: self.specs[index].shape.clone() })
    }

    fn block_type(&self, _: usize) -> Option<BlockType> {
        None
    }

    fn blocks(&self, tensor: usize, _: Range<usize>) -> Result<&[u8], RunnerError> {
        unreachable!("tensor {tensor} of a checkpoint has no block type")
    }

    fn read_rows(&self, tensor: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), RunnerError> {
        let spec = &self.specs[tensor];
        let per_source = Self::rows_per_source(spec).max(1);
        let columns = spec.columns() as usize;
        let mut row = rows.start;
        let mut out = out;
        while row < rows.end {
            let (source, first) = (row / per_source, row % per_source);
            let n = (rows.end - row).min(per_source - first);
            let (now, later) = out.split_at_mut(n * columns);
            self.checkpoint.read_rows_f32(&spec.sources[source], first..first + n, now)?;
            (row, out) = (row + n, later);
        }
        Ok(())
    }

    fn read_integers(&self, tensor: usize) -> Result<Vec<i32>, RunnerError> {
        let spec = &self.specs[tensor];
        let rows = Self::rows_per_source(spec).max(1);
        let mut values = vec![0; spec.n_values() as usize];
        self.checkpoint.read_i64_as_i32(&spec.sources[0], 0..rows, &mut values)?;
        Ok(values)
    }
}
