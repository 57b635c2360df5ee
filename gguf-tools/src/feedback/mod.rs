//! Error feedback: quantizes a matrix so that what the first columns lose the later ones make good.
//!
//! The error that counts is that of the product with the inputs, `tr(D H D^T)` with `H` the second moments of the
//! inputs and `D` what quantization changes. Columns are walked in blocks; before each block the weights become the
//! values that suit the errors made so far best (`factor.rs`), and codes and scales are chosen for those. The bytes are
//! those of the format: every reader of it gains.
//!
//! Each row is independent given `H`. A row whose walk ends worse than the plain search, judged by the full error, keeps the plain
//! search's bytes.

mod affine;
mod codebook;
mod factor;
mod moments;
mod refine;
mod settings;
mod walk;

#[cfg(test)]
mod tests;

use rayon::prelude::*;

pub use factor::{Factor, Order};
pub use moments::{CrossMoments, SecondMoments, corrected, mixed, products, quadratic, shrunk_to_diagonal};
pub use settings::{Settings, UnknownSetting};
pub use walk::Work;

use crate::block::BlockType;
use crate::quantize::{Curvature, Diagonal, MatrixQuantizer, QuantizeError, RowByRow};

/// Rows that are walked together. Part of the result: sums of a row are formed in an order that may depend on it.
pub const ROWS: usize = 256;

/// Quantizes with error feedback where second moments are known and the format has a walk, else row by row.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Feedback {
    /// How the walk is done.
    pub settings: Settings,
    /// The plain search, which also guesses scales.
    pub plain: RowByRow,
}

/// What became of one matrix.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Report {
    /// Whether there was a walk.
    pub walked: bool,
    /// Rows in all.
    pub n_rows: usize,
    /// Rows that kept the plain search's bytes.
    pub n_plain_rows: usize,
    /// Damping used, as a multiple of the mean diagonal.
    pub damping: f64,
    /// Whether the matrix was not positive definite with the damping asked for.
    pub damping_raised: bool,
    /// Full error `tr(D H D^T)` of the plain search, `H` damped and scaled to a mean diagonal of one.
    pub plain_error: f64,
    /// Full error of the bytes written, likewise.
    pub error: f64,
    /// The walk's matrix products.
    #[serde(skip)]
    pub work: Work,
}

impl Report {
    /// That of two parts of a matrix.
    #[must_use]
    pub fn plus(self, other: &Self) -> Self {
        Self {
            walked: self.walked || other.walked,
            n_rows: self.n_rows + other.n_rows,
            n_plain_rows: self.n_plain_rows + other.n_plain_rows,
            damping: self.damping.max(other.damping),
            damping_raised: self.damping_raised || other.damping_raised,
            plain_error: self.plain_error + other.plain_error,
            error: self.error + other.error,
            work: self.work.plus(other.work),
        }
    }
}

/// Whether a format has a walk.
pub fn has_walk(target: BlockType) -> bool {
    shape_of(target).is_some()
}

/// Columns that share `d`, and columns that share a scale.
fn shape_of(target: BlockType) -> Option<(usize, usize)> {
    match target {
        BlockType::Iq2Xxs | BlockType::Q4K => Some((256, 32)),
        BlockType::Q2K => Some((256, 16)),
        BlockType::Q8_0 | BlockType::Mxfp4 => Some((32, 32)),
        _ => None,
    }
}

impl Feedback {
    /// Factors second moments for a target; `None` where there is no walk or nothing to walk by.
    /// `damping`: a multiple of the mean diagonal.
    pub fn factor(&self, target: BlockType, moments: &[f32], columns: usize, damping: f64) -> Option<Factor> {
        let (block, sub_block) = shape_of(target)?;
        Factor::new(moments, columns, self.settings.order, block, sub_block, damping)
    }

    /// Quantizes by a factor that several matrices may share. `diagonal`: importance for the plain search.
    ///
    /// # Errors
    /// If the target cannot be written.
    pub fn quantize_by(
        &self,
        target: BlockType,
        weights: &[f32],
        diagonal: &[f32],
        factor: &Factor,
        out: &mut [u8],
    ) -> Result<Report, QuantizeError> {
        let columns = factor.columns();
        self.plain.quantize(target, weights, columns, &Diagonal(Some(diagonal)), out)?;
        let n_rows = weights.len() / columns;
        let base = Report {
            n_rows,
            damping: factor.damping(),
            damping_raised: factor.raises() > 0,
            ..Report::default()
        };
        if factor.is_diagonal() {
            // No column can make good what another lost: the plain search is the answer.
            return Ok(Report { n_plain_rows: n_rows, ..base });
        }
        let row_bytes = out.len() / n_rows.max(1);
        let parts = weights.par_chunks(ROWS * columns).zip(out.par_chunks_mut(ROWS * row_bytes));
        let sums: Vec<walk::Sums> =
            parts.map(|(weights, out)| self.walk(target, weights, factor, out)).collect::<Result<_, _>>()?;
        let sum = sums.into_iter().fold(walk::Sums::default(), walk::Sums::plus);
        Ok(Report {
            walked: true,
            n_plain_rows: sum.n_plain_rows,
            plain_error: sum.plain,
            error: sum.chosen,
            work: sum.work,
            ..base
        })
    }

    fn walk(
        &self,
        target: BlockType,
        weights: &[f32],
        factor: &Factor,
        out: &mut [u8],
    ) -> Result<walk::Sums, QuantizeError> {
        let work = std::cell::Cell::default();
        let walk = walk::Walk { settings: &self.settings, plain: self.plain, factor, work };
        match target {
            BlockType::Iq2Xxs => walk.run::<codebook::Iq2Xxs>(weights, out),
            BlockType::Q2K => walk.run::<affine::Scalars<affine::Q2K>>(weights, out),
            BlockType::Q4K => walk.run::<affine::Scalars<affine::Q4K>>(weights, out),
            BlockType::Q8_0 => walk.run::<affine::Scalars<affine::Q8_0>>(weights, out),
            BlockType::Mxfp4 => walk.run::<affine::Scalars<affine::Mxfp4>>(weights, out),
            _ => Err(QuantizeError::NotWritable(target)),
        }
    }

    /// [`MatrixQuantizer::quantize`], and what became of the matrix.
    ///
    /// # Errors
    /// If the target cannot be written.
    pub fn quantize_reporting(
        &self,
        target: BlockType,
        weights: &[f32],
        columns: usize,
        curvature: &dyn Curvature,
        out: &mut [u8],
    ) -> Result<Report, QuantizeError> {
        let moments = curvature.second_moments();
        let damping = self.settings.damping;
        if let Some(factor) = moments.and_then(|h| self.factor(target, h, columns, damping)) {
            let h = moments.unwrap_or_default();
            let diagonal: Vec<f32> = (0..columns).map(|i| h[i * columns + i].max(0.0)).collect();
            return self.quantize_by(target, weights, &diagonal, &factor, out);
        }
        self.plain.quantize(target, weights, columns, curvature, out)?;
        let n_rows = weights.len() / columns.max(1);
        Ok(Report { n_rows, n_plain_rows: n_rows, ..Report::default() })
    }
}

impl MatrixQuantizer for Feedback {
    fn quantize(
        &self,
        target: BlockType,
        weights: &[f32],
        columns: usize,
        curvature: &dyn Curvature,
        out: &mut [u8],
    ) -> Result<(), QuantizeError> {
        self.quantize_reporting(target, weights, columns, curvature, out).map(drop)
    }
}
