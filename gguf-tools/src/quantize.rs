//! Quantizing whole matrices. One trait, so that error feedback is one more implementation.

use crate::block::{BlockType, Guide, Objective};
use crate::simd::Level;

/// What is known about the inputs of one matrix.
pub trait Curvature: Sync {
    /// Mean of the squared input of each column, `[columns]`: the diagonal of the second moments.
    fn diagonal(&self) -> Option<&[f32]>;

    /// The mean of `x x^T` over the inputs, `[columns, columns]`, where it is known.
    fn second_moments(&self) -> Option<&[f32]> {
        None
    }
}

/// Importance alone.
#[derive(Debug, Clone, Copy)]
pub struct Diagonal<'a>(pub Option<&'a [f32]>);

impl Curvature for Diagonal<'_> {
    fn diagonal(&self) -> Option<&[f32]> {
        self.0
    }
}

/// Turns whole matrices into blocks.
pub trait MatrixQuantizer: Sync {
    /// Quantizes `weights` (`[rows, columns]`, finite) to rows of blocks of type `target`.
    ///
    /// # Errors
    /// If the target cannot be written.
    fn quantize(
        &self,
        target: BlockType,
        weights: &[f32],
        columns: usize,
        curvature: &dyn Curvature,
        out: &mut [u8],
    ) -> Result<(), QuantizeError>;
}

/// Why a matrix was not quantized.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// The format is only read.
    #[error("{0} can be read but not written; choose another type")]
    NotWritable(BlockType),
}

/// Each row by itself, with the diagonal as weights.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RowByRow {
    /// Which weighted error is minimised.
    pub objective: Objective,
    /// Factor on the stored scale; `None`: the format's default.
    pub scale_gain: Option<f32>,
    /// Instruction set.
    pub level: Level,
}

impl MatrixQuantizer for RowByRow {
    fn quantize(
        &self,
        target: BlockType,
        weights: &[f32],
        columns: usize,
        curvature: &dyn Curvature,
        out: &mut [u8],
    ) -> Result<(), QuantizeError> {
        let guide = Guide {
            importance: curvature.diagonal(),
            objective: self.objective,
            scale_gain: self.scale_gain,
            level: self.level,
        };
        let quantizer = target
            .format()
            .and_then(|format| format.quantizer(guide))
            .ok_or(QuantizeError::NotWritable(target))?;
        let row_bytes = out.len() / (weights.len() / columns).max(1);
        for (row, blocks) in weights.chunks_exact(columns).zip(out.chunks_exact_mut(row_bytes)) {
            quantizer.quantize_row(row, blocks);
        }
        Ok(())
    }
}
