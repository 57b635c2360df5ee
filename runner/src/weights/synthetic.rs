//! Random weights in any shape and recipe, without a file: a device makes the matrices itself, and any row of them can
//! be made again on the CPU. For benches and checks at sizes that no disk at hand holds.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use gguf_tools::account::Headers;
use gguf_tools::block::BlockType;
use gguf_tools::model::HyperParameters;
use gguf_tools::plan::{Plan, PlannedTensor};
use gguf_tools::source::WeightSource as _;
use gguf_tools::synth::SynthSource;

use super::{FoundTensor, GeneratedRows, WeightSource};
use crate::cuda::matrix::generate::Recipe;
use crate::error::RunnerError;

/// A synthetic model with the types of a plan. Matrices are [`Recipe`]s; vectors and routing tables are those of
/// [`SynthSource`].
#[derive(Debug)]
pub struct SyntheticSource {
    label: PathBuf,
    hyper_parameters: HyperParameters,
    tensors: Vec<PlannedTensor>,
    by_name: HashMap<String, usize>,
    small: SynthSource,
    seed: u64,
    headers: Headers,
}

impl SyntheticSource {
    /// The model of `small`, its tensors in the types of `plan`.
    ///
    /// # Errors
    /// If its metadata describe no supported model.
    pub fn new(small: SynthSource, plan: &Plan, seed: u64) -> Result<Self, RunnerError> {
        let label = PathBuf::from(small.label());
        let metadata =
            small.metadata().map_err(|error| RunnerError::Synthetic { problem: error.to_string() })?;
        let hyper_parameters = HyperParameters::from_metadata(&metadata)
            .map_err(|source| RunnerError::Model { path: label.clone(), source })?;
        let tensors = plan.tensors.clone();
        let by_name = tensors.iter().enumerate().map(|(i, t)| (t.spec.gguf_name.clone(), i)).collect();
        let headers = Headers::of_plan(plan);
        Ok(Self { label, hyper_parameters, tensors, by_name, small, seed, headers })
    }

    /// The headers that a file of these weights would have.
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    fn is_matrix(tensor: &PlannedTensor) -> bool {
        tensor.target.format().is_some() && tensor.n_rows() > 1 && tensor.n_columns() > 1
    }

    /// Rows of a tensor that no recipe makes.
    fn read_small(&self, tensor: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), RunnerError> {
        let spec = &self.tensors[tensor].spec;
        let problem = |problem: String| RunnerError::Synthetic { problem };
        self.small
            .read_rows(spec, 0, rows, out)
            .map_err(|error| problem(format!("`{}`: {error}", spec.gguf_name)))
    }
}

impl WeightSource for SyntheticSource {
    fn path(&self) -> &Path {
        &self.label
    }

    fn hyper_parameters(&self) -> &HyperParameters {
        &self.hyper_parameters
    }

    fn find(&self, name: &str) -> Option<FoundTensor> {
        let index = *self.by_name.get(name)?;
        Some(FoundTensor { index, shape: self.tensors[index].spec.shape.clone() })
    }

    fn block_type(&self, _: usize) -> Option<BlockType> {
        None
    }

    fn generated(&self, tensor: usize) -> Option<GeneratedRows> {
        let planned = &self.tensors[tensor];
        let seed = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(tensor as u64);
        Self::is_matrix(planned).then_some(GeneratedRows { block_type: planned.target, seed })
    }

    fn blocks(&self, tensor: usize, _: Range<usize>) -> Result<&[u8], RunnerError> {
        let name = &self.tensors[tensor].spec.gguf_name;
        Err(RunnerError::Synthetic { problem: format!("`{name}` exists nowhere as a whole") })
    }

    fn read_rows(&self, tensor: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), RunnerError> {
        let Some(GeneratedRows { block_type, seed }) = self.generated(tensor) else {
            return self.read_small(tensor, rows, out);
        };
        let planned = &self.tensors[tensor];
        let name = &planned.spec.gguf_name;
        let unknown =
            || RunnerError::Synthetic { problem: format!("no random {block_type} rows for `{name}`") };
        let columns = planned.n_columns();
        let recipe = Recipe::new(block_type, columns, seed).ok_or_else(unknown)?;
        let format = block_type.format().ok_or_else(unknown)?;
        let mut bytes = vec![0; planned.row_bytes()];
        for (row, out) in rows.zip(out.chunks_exact_mut(columns)) {
            recipe.row(row as u64, &mut bytes);
            format.dequantize(&bytes, out);
        }
        Ok(())
    }

    fn read_integers(&self, tensor: usize) -> Result<Vec<i32>, RunnerError> {
        let planned = &self.tensors[tensor];
        let mut values = vec![0.0; planned.n_rows() * planned.n_columns()];
        self.read_small(tensor, 0..planned.n_rows(), &mut values)?;
        Ok(values.iter().map(|&value| value as i32).collect())
    }
}
