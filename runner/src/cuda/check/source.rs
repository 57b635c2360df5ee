//! Weights in memory, and numbers to fill them with.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use gguf_tools::block::{BlockType, Guide, Objective};
use gguf_tools::model::HyperParameters;
use gguf_tools::simd::Level;

use crate::error::RunnerError;
use crate::ops::MatrixPlace;
use crate::weights::{FoundTensor, WeightSource};

/// Rows that are really quantized; the others repeat them.
const DISTINCT_ROWS: usize = 16;

/// A single matrix.
pub(super) struct OneMatrix {
    hyper_parameters: HyperParameters,
    block_type: BlockType,
    rows: usize,
    columns: usize,
    bytes: Vec<u8>,
}

impl OneMatrix {
    /// Noise whose products are about as large as their inputs; a few rows, repeated. `None` if the type cannot be written
    /// or the columns are no whole blocks.
    pub(super) fn random(
        hyper_parameters: &HyperParameters,
        block_type: BlockType,
        rows: usize,
        columns: usize,
        seed: u64,
    ) -> Option<Self> {
        let mut values = noise(seed, rows.min(DISTINCT_ROWS) * columns);
        let factor = 1.0 / (columns as f32).sqrt();
        for value in &mut values {
            *value *= factor;
        }
        Self::repeated(hyper_parameters, block_type, rows, columns, &values)
    }

    /// A table of these `[rows, columns]` values.
    pub(super) fn table(hyper_parameters: &HyperParameters, columns: usize, values: &[f32]) -> Self {
        let rows = values.len() / columns;
        Self::repeated(hyper_parameters, BlockType::F32, rows, columns, values).expect("F32 holds everything")
    }

    fn repeated(
        hyper_parameters: &HyperParameters,
        block_type: BlockType,
        rows: usize,
        columns: usize,
        values: &[f32],
    ) -> Option<Self> {
        let row_bytes = block_type.row_bytes(columns as u64)? as usize;
        let importance = vec![1.0; columns];
        let guide = Guide {
            importance: Some(&importance),
            objective: Objective::default(),
            scale_gain: None,
            level: Level::detect(),
        };
        let quantizer = block_type.format()?.quantizer(guide)?;
        let mut bytes = vec![0; rows * row_bytes];
        let distinct = values.len() / columns;
        for row in 0..distinct {
            let blocks = &mut bytes[row * row_bytes..(row + 1) * row_bytes];
            quantizer.quantize_row(&values[row * columns..(row + 1) * columns], blocks);
        }
        // Not in their order, so that a mistaken row shows.
        for row in distinct..rows {
            let from = (row * 7 + row / DISTINCT_ROWS) % distinct;
            bytes.copy_within(from * row_bytes..(from + 1) * row_bytes, row * row_bytes);
        }
        let hyper_parameters = hyper_parameters.clone();
        Some(Self { hyper_parameters, block_type, rows, columns, bytes })
    }

    pub(super) fn shared(self) -> (Arc<dyn WeightSource>, MatrixPlace) {
        let place = MatrixPlace { tensor: 0, first_row: 0, rows: self.rows, columns: self.columns };
        (Arc::new(self), place)
    }
}

impl WeightSource for OneMatrix {
    fn path(&self) -> &Path {
        Path::new("a matrix of the self-test")
    }

    fn hyper_parameters(&self) -> &HyperParameters {
        &self.hyper_parameters
    }

    fn find(&self, _: &str) -> Option<FoundTensor> {
        None
    }

    fn block_type(&self, _: usize) -> Option<BlockType> {
        Some(self.block_type)
    }

    fn blocks(&self, _: usize, rows: Range<usize>) -> Result<&[u8], RunnerError> {
        let row_bytes = self.bytes.len() / self.rows;
        Ok(&self.bytes[rows.start * row_bytes..rows.end * row_bytes])
    }

    fn read_rows(&self, tensor: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), RunnerError> {
        let format = self.block_type.format().expect("it was quantized to");
        format.dequantize(self.blocks(tensor, rows)?, out);
        Ok(())
    }

    fn read_integers(&self, _: usize) -> Result<Vec<i32>, RunnerError> {
        Ok(Vec::new())
    }
}

/// `n` values that look random, roughly normal with deviation 1, the same for the same seed.
pub(super) fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678_9abc_def1);
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(|_| (uniform() + uniform() + uniform() + uniform()) * 1.732).collect()
}
