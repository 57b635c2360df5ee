//! The matrices of one layer that are quantized with error feedback, and the writing of its tensors.
//!
//! Routed experts are made expert by expert, so that the gate and up projections of one share a factor; dense matrices input by
//! input, so that all that read the same share one.

use std::collections::BTreeSet;
use std::ops::Range;

use rayon::prelude::*;

use super::calibrated::{FeedbackOutcome, Writer, end_of, place_of};
use super::calibration::{Calibration, MatrixMoments, Wanted};
use super::unit::{self, Importances};
use super::{BuildError, Sink, compute_wave};
use crate::block::BlockType;
use crate::feedback::{self, Factor, Feedback};
use crate::model::{Family, MatrixInput};
use crate::plan::{Plan, PlannedTensor};
use crate::quantize::Diagonal;
use crate::source::WeightSource;

/// The tensors of one segment.
pub(super) struct Job<'a> {
    pub(super) plan: &'a Plan,
    pub(super) source: &'a dyn WeightSource,
    pub(super) quantizer: &'a Feedback,
    pub(super) segment: Range<usize>,
    /// Those quantized with feedback.
    pub(super) walked: Vec<usize>,
}

/// One expert's bytes in each of the walked tensors.
type ExpertBytes = Vec<(usize, Vec<u8>, FeedbackOutcome)>;

/// Finished tensors: place in the plan, bytes.
type TensorBytes = Vec<(usize, Vec<u8>)>;

impl Job<'_> {
    /// Whose second moments are needed.
    pub(super) fn wanted(&self) -> Wanted {
        Wanted::by(self.walked.iter().map(|&index| &self.plan.tensors[index]))
    }

    /// The walked tensors of routed experts, or the others.
    fn walked(&self, routed: bool) -> Vec<usize> {
        let is = |&index: &usize| self.plan.tensors[index].spec.family.is_routed() == routed;
        self.walked.iter().copied().filter(is).collect()
    }

    /// Bytes of all walked tensors of routed experts, experts one after another.
    pub(super) fn experts(
        &self,
        calibration: &dyn Calibration,
        outcomes: &mut Vec<FeedbackOutcome>,
    ) -> Result<TensorBytes, BuildError> {
        let walked = self.walked(true);
        let n_experts = walked.iter().map(|&index| self.plan.tensors[index].n_matrices()).max();
        let experts: Vec<ExpertBytes> = (0..n_experts.unwrap_or(0))
            .into_par_iter()
            .map(|expert| self.expert(calibration, &walked, expert))
            .collect::<Result<_, _>>()?;
        let mut tensors: TensorBytes = walked.iter().map(|&index| (index, Vec::new())).collect();
        let mut found: Vec<Vec<FeedbackOutcome>> = vec![Vec::new(); tensors.len()];
        for expert in experts {
            for (index, bytes, outcome) in expert {
                let at = walked.iter().position(|&walked| walked == index).unwrap_or(0);
                tensors[at].1.extend(bytes);
                found[at].push(outcome);
            }
        }
        outcomes.extend(found.into_iter().flatten());
        Ok(tensors)
    }

    fn expert(
        &self,
        calibration: &dyn Calibration,
        walked: &[usize],
        expert: usize,
    ) -> Result<ExpertBytes, BuildError> {
        let mut results = Vec::new();
        for input in [MatrixInput::Ffn, MatrixInput::RoutedMid] {
            let indices = self.readers(walked, input);
            let Some(&first) = indices.first() else { continue };
            let layer = self.plan.tensors[first].spec.layer.unwrap_or(0) as usize;
            let quantized =
                (input == MatrixInput::RoutedMid).then(|| self.gate_and_up(expert, layer, &results));
            let moments = match quantized.transpose()?.flatten() {
                Some([gate, up]) => calibration.mid_moments(expert, &gate, &up),
                None => calibration.moments(input, expert),
            }
            .map_err(|source| BuildError::Calibration { place: place_of(Some(layer)), source })?;
            let mut factors = Factors::new(self.quantizer, &moments, input);
            for index in indices {
                let tensor = &self.plan.tensors[index];
                let n_rows = tensor.n_rows();
                let (bytes, report) = self.rows(tensor, expert, 0..n_rows, &moments, factors.of(tensor))?;
                self.source.release(&tensor.spec, expert);
                let (name, n_tokens) = (tensor.spec.gguf_name.clone(), moments.n_tokens);
                let outcome = FeedbackOutcome { tensor: name, expert_index: expert, n_tokens, report };
                results.push((index, bytes, outcome));
            }
        }
        Ok(results)
    }

    /// Those of some tensors that read an input.
    fn readers(&self, walked: &[usize], input: MatrixInput) -> Vec<usize> {
        walked.iter().copied().filter(|&index| self.plan.tensors[index].spec.reads == Some(input)).collect()
    }

    /// Bytes of the walked dense tensors that read one of these inputs.
    pub(super) fn dense(
        &self,
        calibration: &dyn Calibration,
        inputs: &BTreeSet<MatrixInput>,
        outcomes: &mut Vec<FeedbackOutcome>,
    ) -> Result<TensorBytes, BuildError> {
        let walked = self.walked(false);
        let mut made = TensorBytes::new();
        for &input in inputs {
            let indices = self.readers(&walked, input);
            let Some(&first) = indices.first() else { continue };
            let layer = self.plan.tensors[first].spec.layer.map(|layer| layer as usize);
            let mut results: Vec<(usize, Vec<u8>, FeedbackOutcome)> = indices
                .iter()
                .map(|&index| {
                    let tensor = self.plan.tensors[index].spec.gguf_name.clone();
                    let report = feedback::Report::default();
                    (index, Vec::new(), FeedbackOutcome { tensor, expert_index: 0, n_tokens: 0, report })
                })
                .collect();
            for group in 0..self.plan.tensors[first].spec.n_groups {
                let moments = calibration
                    .dense_moments(input, group)
                    .map_err(|source| BuildError::Calibration { place: place_of(layer), source })?;
                let mut factors = Factors::new(self.quantizer, &moments, input);
                for (index, bytes, outcome) in &mut results {
                    let tensor = &self.plan.tensors[*index];
                    let n_rows = tensor.n_rows() / tensor.spec.n_groups;
                    let rows = group * n_rows..(group + 1) * n_rows;
                    let report = self.dense_rows(tensor, rows, &moments, factors.of(tensor), bytes)?;
                    outcome.n_tokens = moments.n_tokens;
                    outcome.report = outcome.report.plus(&report);
                }
            }
            for (index, bytes, outcome) in results {
                self.source.release(&self.plan.tensors[index].spec, 0);
                made.push((index, bytes));
                outcomes.push(outcome);
            }
        }
        Ok(made)
    }

    /// Appends some rows of a dense tensor, which share a factor, as many at once as the walk takes together.
    fn dense_rows(
        &self,
        tensor: &PlannedTensor,
        rows: Range<usize>,
        moments: &MatrixMoments,
        factor: Option<&Factor>,
        bytes: &mut Vec<u8>,
    ) -> Result<feedback::Report, BuildError> {
        let starts: Vec<usize> = rows.clone().step_by(feedback::ROWS).collect();
        let mut sum = feedback::Report::default();
        // A thread's share at a time, so that the values of a large matrix are never all in memory.
        for starts in starts.chunks(4 * rayon::current_num_threads()) {
            let parts: Vec<_> = starts
                .par_iter()
                .map(|&start| {
                    let part = start..rows.end.min(start + feedback::ROWS);
                    self.rows(tensor, 0, part, moments, factor)
                })
                .collect::<Result<_, _>>()?;
            for (part, report) in parts {
                bytes.extend(part);
                sum = sum.plus(&report);
            }
        }
        Ok(sum)
    }

    /// An expert's gate and up projections as they are in the file; `None` if both are the source's, or corrections are not wanted.
    fn gate_and_up(
        &self,
        expert: usize,
        layer: usize,
        made: &ExpertBytes,
    ) -> Result<Option<[Vec<f32>; 2]>, BuildError> {
        if made.is_empty() || !self.quantizer.settings.corrected_mids {
            return Ok(None);
        }
        let mut matrices = [Vec::new(), Vec::new()];
        for (matrix, family) in matrices.iter_mut().zip([Family::RoutedGate, Family::RoutedUp]) {
            let belongs = |t: &PlannedTensor| t.spec.family == family && t.spec.layer == Some(layer as u32);
            let Some(index) = self.plan.tensors.iter().position(belongs) else { return Ok(None) };
            let tensor = &self.plan.tensors[index];
            matrix.resize(tensor.n_rows() * tensor.n_columns(), 0.0);
            match (made.iter().find(|(made, ..)| *made == index), tensor.target.format()) {
                (Some((_, bytes, _)), Some(format)) => format.dequantize(bytes, matrix),
                _ => self.source.read_rows(&tensor.spec, expert, 0..tensor.n_rows(), matrix)?,
            }
        }
        Ok(Some(matrices))
    }

    /// Quantizes some rows of a matrix.
    fn rows(
        &self,
        tensor: &PlannedTensor,
        matrix_index: usize,
        rows: Range<usize>,
        moments: &MatrixMoments,
        factor: Option<&Factor>,
    ) -> Result<(Vec<u8>, feedback::Report), BuildError> {
        let columns = tensor.n_columns();
        let mut values = vec![0.0; rows.len() * columns];
        let mut bytes = vec![0; rows.len() * tensor.row_bytes()];
        let first_row = rows.start;
        self.source.read_rows(&tensor.spec, matrix_index, rows, &mut values)?;
        if let Some((cross, own)) = &moments.cross
            && let Some(better) =
                feedback::corrected(&values, cross, own, columns, self.quantizer.settings.ridge)
        {
            values = better;
        }
        let report = if let Some(factor) = factor {
            self.quantizer.quantize_by(tensor.target, &values, &moments.diagonal, factor, &mut bytes)
        } else {
            // Nothing to walk by: the diagonal is all there is.
            let diagonal = Diagonal(Some(&moments.diagonal));
            self.quantizer.quantize_reporting(tensor.target, &values, columns, &diagonal, &mut bytes)
        };
        let report = report
            .map_err(|source| BuildError::Quantize { tensor: tensor.spec.gguf_name.clone(), source })?;
        if let Some(bad) = tensor.target.format().and_then(|format| format.first_bad_block(&bytes)) {
            let row_blocks = tensor.row_bytes() / tensor.target.bytes_per_block().max(1);
            return Err(BuildError::BadBlock {
                tensor: tensor.spec.gguf_name.clone(),
                expert_index: matrix_index,
                block_index: first_row * row_blocks + bad.block_index,
                target: tensor.target,
                problem: bad.problem,
            });
        }
        Ok((bytes, report))
    }

    /// Writes every tensor of the segment; `made`: those that are made already.
    pub(super) fn write(
        &self,
        made: &[(usize, Vec<u8>)],
        importances: &mut Importances<'_>,
        writer: &mut Writer<'_>,
    ) -> Result<(), BuildError> {
        for index in self.segment.clone() {
            let tensor = &self.plan.tensors[index];
            if let Some((_, bytes)) = made.iter().find(|(made, _)| *made == index) {
                writer.append(tensor.offset_bytes, bytes, &tensor.spec.gguf_name, index + 1)?;
            } else if !self.walked.contains(&index) {
                self.write_tensor(index, importances, writer)?;
            }
        }
        let end = end_of(self.plan, &self.segment);
        let last = &self.plan.tensors[self.segment.end - 1];
        writer.append(end, &[], &last.spec.gguf_name, self.segment.end)
    }

    fn write_tensor(
        &self,
        index: usize,
        importances: &mut Importances<'_>,
        writer: &mut Writer<'_>,
    ) -> Result<(), BuildError> {
        let name = &self.plan.tensors[index].spec.gguf_name;
        for wave in unit::waves_of(self.plan, index..index + 1, rayon::current_num_threads()) {
            if wave.end_bytes <= writer.sink.done_bytes() {
                importances.note_done(&wave);
                continue;
            }
            if writer.progress.interrupted() {
                return Err(writer.interrupted());
            }
            let bytes = compute_wave(self.plan, self.source, importances, &wave)?;
            writer.append(wave.start_bytes, &bytes, name, index)?;
        }
        Ok(())
    }
}

/// Factors of one input's second moments, by type: their order depends on it.
struct Factors<'a> {
    quantizer: &'a Feedback,
    moments: &'a MatrixMoments,
    damping: f64,
    latest: Option<(BlockType, Option<Factor>)>,
}

impl<'a> Factors<'a> {
    fn new(quantizer: &'a Feedback, moments: &'a MatrixMoments, input: MatrixInput) -> Self {
        let settings = &quantizer.settings;
        let damping = match input {
            MatrixInput::RoutedMid | MatrixInput::SharedMid => settings.mid_damping,
            _ => settings.damping,
        };
        Self { quantizer, moments, damping, latest: None }
    }

    /// The factor for a tensor; `None` where there is nothing to walk by.
    fn of(&mut self, tensor: &PlannedTensor) -> Option<&Factor> {
        let target = tensor.target;
        if !matches!(&self.latest, Some((made, _)) if *made == target) {
            // The one before goes first: it may be large.
            self.latest = None;
            let (moments, columns) = (&self.moments.moments, tensor.n_columns());
            self.latest = Some((target, self.quantizer.factor(target, moments, columns, self.damping)));
        }
        self.latest.as_ref().and_then(|(_, factor)| factor.as_ref())
    }
}
