//! How far a GGUF file is from the weights it was made from, and whether it can be made again byte for byte.

use std::ops::Range;

use rayon::prelude::*;
use serde::Serialize;

use crate::build::{
    BuildError, Calibration, FallbackImportance, LayerBytes, MatrixMoments, Regenerator, Wanted, place_of,
};
use crate::feedback::{ROWS, quadratic};
use crate::gguf::{Gguf, TensorInfo};
use crate::importance::ImportanceSource;
use crate::plan::{Plan, PlannedTensor};
use crate::progress::{Progress, Step};
use crate::source::WeightSource;

/// Error statistics of one tensor against its source.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorComparison {
    /// GGUF name.
    pub tensor: String,
    /// Type of the source, as users call it.
    pub source_type: String,
    /// Type in the file.
    pub file_type: String,
    /// Values compared.
    pub n_values: u64,
    /// Root of the mean squared error.
    pub rmse: f64,
    /// Root of the squared error relative to the squared source.
    pub relative_error: f64,
    /// Importance-weighted squared error relative to the weighted squared source; flat weights without importance.
    pub weighted_error: f64,
    /// Weighted `sum q x / sum x^2`: below 1 the file's weights are shrunk.
    pub alignment: f64,
    /// Squared error of the outputs relative to the squared outputs, on calibration text: `tr(D H D^T) / tr(W H W^T)` with `H`
    /// the second moments of its inputs, of each expert's own; `None` where that was not asked for or the tensor is no matrix of a
    /// product.
    pub full_error: Option<f64>,
    /// Largest absolute error.
    pub max_error: f64,
    /// Cosine of the angle between file and source.
    pub cosine: f64,
    /// Bytes that differ from what this program makes of the source; `None` if not asked for.
    pub differing_bytes: Option<u64>,
}

/// What a comparison found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// One entry a tensor compared, in file order.
    pub tensors: Vec<TensorComparison>,
    /// Tensors of the model that the file lacks.
    pub missing: Vec<String>,
    /// Matrices whose weights in the weighted error are the fallback's.
    pub fallback_importance: Vec<FallbackImportance>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    n_values: u64,
    error: f64,
    source: f64,
    file: f64,
    product: f64,
    weighted_error: f64,
    weighted_source: f64,
    weighted_product: f64,
    max_error: f64,
    differing_bytes: u64,
}

impl Sums {
    fn of_row(&mut self, source: &[f32], file: &[f32], weights: Option<&[f32]>) {
        for (column, (&x, &q)) in source.iter().zip(file).enumerate() {
            let (x, q) = (f64::from(x), f64::from(q));
            let weight = weights.map_or(1.0, |w| f64::from(w[column]));
            let error = x - q;
            self.error += error * error;
            self.source += x * x;
            self.file += q * q;
            self.product += x * q;
            self.weighted_error += weight * error * error;
            self.weighted_source += weight * x * x;
            self.weighted_product += weight * x * q;
            self.max_error = self.max_error.max(error.abs());
        }
        self.n_values += source.len() as u64;
    }

    fn add(mut self, other: &Self) -> Self {
        self.n_values += other.n_values;
        self.error += other.error;
        self.source += other.source;
        self.file += other.file;
        self.product += other.product;
        self.weighted_error += other.weighted_error;
        self.weighted_source += other.weighted_source;
        self.weighted_product += other.weighted_product;
        self.max_error = self.max_error.max(other.max_error);
        self.differing_bytes += other.differing_bytes;
        self
    }

    fn finish(&self, tensor: &PlannedTensor, file_type: String, regenerated: bool) -> TensorComparison {
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        TensorComparison {
            tensor: tensor.spec.gguf_name.clone(),
            source_type: tensor.source_type.clone(),
            file_type,
            n_values: self.n_values,
            rmse: ratio(self.error, self.n_values as f64).sqrt(),
            relative_error: ratio(self.error, self.source).sqrt(),
            weighted_error: ratio(self.weighted_error, self.weighted_source),
            alignment: ratio(self.weighted_product, self.weighted_source),
            full_error: None,
            max_error: self.max_error,
            cosine: ratio(self.product, (self.source * self.file).sqrt()),
            differing_bytes: regenerated.then_some(self.differing_bytes),
        }
    }
}

/// Compares the tensors of a file with their source.
///
/// `plan`: made from `source` with the types of the file ([`crate::plan::Recipe::of_file`]). `only`: names of
/// the tensors to compare, all if empty. `regenerate`: also make each tensor anew and compare bytes.
///
/// # Errors
/// If source or file are damaged.
pub fn compare(
    plan: &Plan,
    source: &dyn WeightSource,
    importance: &dyn ImportanceSource,
    gguf: &Gguf,
    only: &[String],
    regenerate: bool,
    progress: &dyn Progress,
) -> Result<Comparison, BuildError> {
    let mut regenerator = Regenerator::new(plan, source, importance);
    let mut result = Comparison { tensors: Vec::new(), missing: Vec::new(), fallback_importance: Vec::new() };
    let mut done_bytes = 0;
    for (index, tensor) in plan.tensors.iter().enumerate() {
        if !only.is_empty() && !only.contains(&tensor.spec.gguf_name) {
            continue;
        }
        let Some(found) = gguf.tensor(&tensor.spec.gguf_name) else {
            result.missing.push(tensor.spec.gguf_name.clone());
            continue;
        };
        let bytes = gguf.data(found).map_err(crate::source::SourceError::from)?;
        let sums = tensor_sums(&mut regenerator, index, tensor, found, bytes, regenerate)?;
        result.tensors.push(sums.finish(tensor, found.block_type.name().to_owned(), regenerate));
        done_bytes += tensor.n_bytes;
        progress.step(&Step {
            item: &tensor.spec.gguf_name,
            done_bytes,
            total_bytes: plan.tensor_bytes(),
            done_items: index + 1,
            total_items: plan.tensors.len(),
        });
        if progress.interrupted() {
            break;
        }
    }
    result.fallback_importance = regenerator.into_notes();
    Ok(result)
}

/// Errors of the outputs of matrices ([`TensorComparison::full_error`]) by tensor, in file order.
///
/// # Errors
/// If source or file are damaged, or the calibration fails.
pub fn judge(
    plan: &Plan,
    source: &dyn WeightSource,
    gguf: &Gguf,
    only: &[String],
    calibration: &mut dyn Calibration,
    progress: &dyn Progress,
) -> Result<Vec<(String, f64)>, BuildError> {
    let n_layers = plan.tensors.iter().filter_map(|t| t.spec.layer).max().map_or(0, |last| last as usize + 1);
    let wanted: Vec<&PlannedTensor> = plan
        .tensors
        .iter()
        .filter(|t| t.spec.reads.is_some() && (only.is_empty() || only.contains(&t.spec.gguf_name)))
        .collect();
    let mut judged = Vec::new();
    for layer in (0..n_layers).map(Some).chain([None]) {
        let here = |t: &&&PlannedTensor| t.spec.layer.map(|l| l as usize) == layer;
        let tensors: Vec<_> = wanted.iter().filter(here).copied().collect();
        let failed = |source| BuildError::Calibration { place: place_of(layer), source };
        match layer {
            Some(layer) => {
                calibration.enter(layer, &Wanted::by(tensors.iter().copied())).map_err(failed)?;
            }
            None if tensors.is_empty() => break,
            None => calibration.enter_head().map_err(failed)?,
        }
        for tensor in tensors {
            let Some(found) = gguf.tensor(&tensor.spec.gguf_name) else { continue };
            let bytes = gguf.data(found).map_err(crate::source::SourceError::from)?;
            judged.push((
                tensor.spec.gguf_name.clone(),
                tensor_full_error(tensor, source, found, bytes, &*calibration)?,
            ));
            progress.step(&Step {
                item: &tensor.spec.gguf_name,
                done_bytes: layer.map_or(n_layers, |layer| layer + 1) as u64,
                total_bytes: n_layers as u64,
                done_items: judged.len(),
                total_items: wanted.len(),
            });
        }
        if let Some(layer) = layer {
            calibration.leave(layer, plan, &NoBytes).map_err(failed)?;
        }
        if progress.interrupted() {
            break;
        }
    }
    calibration.finish();
    Ok(judged)
}

/// Judging goes on with what the source makes of its inputs: nobody asks for bytes.
struct NoBytes;

impl LayerBytes for NoBytes {
    fn read(&self, _: &PlannedTensor) -> std::io::Result<Vec<u8>> {
        Err(std::io::Error::other("judging writes no layer"))
    }
}

fn tensor_full_error(
    tensor: &PlannedTensor,
    source: &dyn WeightSource,
    found: &TensorInfo,
    bytes: &[u8],
    calibration: &dyn Calibration,
) -> Result<f64, BuildError> {
    let (Some(input), Some(format)) = (tensor.spec.reads, found.block_type.format()) else { return Ok(0.0) };
    let (n_matrices, n_groups, columns) = (tensor.n_matrices(), tensor.spec.n_groups, tensor.n_columns());
    let (n_rows, row_bytes) = (tensor.n_rows(), bytes.len() / (n_matrices * tensor.n_rows()).max(1));
    let failed = |source| {
        let place = place_of(tensor.spec.layer.map(|layer| layer as usize));
        BuildError::Calibration { place, source }
    };
    // Error and size of the outputs of some rows.
    let part = |matrix_index: usize, rows: Range<usize>, moments: &MatrixMoments| {
        let first = matrix_index * n_rows + rows.start;
        let in_file = &bytes[first * row_bytes..][..rows.len() * row_bytes];
        let mut values = vec![0.0; rows.len() * columns];
        source.read_rows(&tensor.spec, matrix_index, rows, &mut values)?;
        let mut differences = vec![0.0; values.len()];
        format.dequantize(in_file, &mut differences);
        differences.iter_mut().zip(&values).for_each(|(q, x)| *q = x - *q);
        let whole = quadratic(&values, &moments.moments, columns);
        Ok::<_, BuildError>((quadratic(&differences, &moments.moments, columns), whole))
    };
    let parts: Vec<(f64, f64)> = if tensor.spec.family.is_routed() {
        (0..n_matrices)
            .into_par_iter()
            .map(|expert| {
                let moments = calibration.moments(input, expert).map_err(failed)?;
                part(expert, 0..n_rows, &moments)
            })
            .collect::<Result<_, BuildError>>()?
    } else {
        let mut parts = Vec::new();
        for group in 0..n_groups {
            let moments = calibration.dense_moments(input, group).map_err(failed)?;
            let end = (group + 1) * (n_rows / n_groups);
            let starts: Vec<usize> = (group * (n_rows / n_groups)..end).step_by(ROWS).collect();
            parts.extend(
                starts
                    .into_par_iter()
                    .map(|start| part(0, start..end.min(start + ROWS), &moments))
                    .collect::<Result<Vec<_>, BuildError>>()?,
            );
        }
        parts
    };
    let (error, whole) = parts.iter().fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
    Ok(if whole > 0.0 { error / whole } else { 0.0 })
}

fn tensor_sums(
    regenerator: &mut Regenerator<'_>,
    index: usize,
    tensor: &PlannedTensor,
    found: &TensorInfo,
    bytes: &[u8],
    regenerate: bool,
) -> Result<Sums, BuildError> {
    let columns = tensor.n_columns();
    let row_bytes = bytes.len() / (tensor.n_matrices() * tensor.n_rows()).max(1);
    let mut total = Sums::default();
    for matrix_index in 0..tensor.n_matrices() {
        regenerator.prepare(index, matrix_index)?;
        let regenerator = &*regenerator;
        let parts: Vec<Sums> = regenerator
            .row_ranges(index)
            .into_par_iter()
            .map(|rows| {
                let first = matrix_index * tensor.n_rows() + rows.start;
                let in_file = &bytes[first * row_bytes..][..rows.len() * row_bytes];
                let mut sums = Sums::default();
                if regenerate {
                    let again = regenerator.bytes(index, matrix_index, rows.clone())?;
                    let differing = again.iter().zip(in_file).filter(|(a, b)| a != b).count();
                    sums.differing_bytes = differing as u64 + again.len().abs_diff(in_file.len()) as u64;
                }
                // The routing table holds numbers of experts, not weights: bytes are all there is to compare.
                if let Some(format) =
                    found.block_type.format().filter(|_| tensor.target != crate::block::BlockType::I32)
                {
                    let values = regenerator.source_values(index, matrix_index, rows.clone())?;
                    let mut file = vec![0.0; values.len()];
                    format.dequantize(in_file, &mut file);
                    let weights = regenerator.importance(index, matrix_index);
                    for (x, q) in values.chunks_exact(columns).zip(file.chunks_exact(columns)) {
                        sums.of_row(x, q, weights);
                    }
                }
                Ok(sums)
            })
            .collect::<Result<_, BuildError>>()?;
        total = parts.iter().fold(total, Sums::add);
    }
    Ok(total)
}
