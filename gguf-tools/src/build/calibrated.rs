//! Builds in which routed experts are quantized by the second moments of their inputs, layer by layer.
//!
//! Tensors are written in the order of the plan, like in every build; a layer's routed experts are made expert by expert, so
//! that the gate and up projections of one share a factor, and wait in memory until their tensors' turn comes.

use std::error::Error;
use std::ops::Range;

use rayon::prelude::*;
use serde::Serialize;

use super::unit::{self, Importances};
use super::{
    BuildError, BuildOptions, BuildReport, FallbackImportance, FileSink, Sink, compute_wave, identity,
};
use crate::feedback::{self, Feedback};
use crate::importance::ImportanceSource;
use crate::model::Family;
use crate::plan::{Conversion, Plan, PlannedTensor};
use crate::progress::{Progress, Step};
use crate::quantize::Curvature;
use crate::source::WeightSource;

/// What a matrix reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MatrixInput {
    /// The layer's FFN input: gate and up projections.
    Ffn,
    /// An expert's gated product times its route weight: down projections.
    Mid,
}

impl MatrixInput {
    /// What the matrices of a family read; `None` where no second moments are formed.
    pub fn of(family: Family) -> Option<Self> {
        match family {
            Family::RoutedGate | Family::RoutedUp => Some(Self::Ffn),
            Family::RoutedDown => Some(Self::Mid),
            _ => None,
        }
    }
}

/// Second moments of the inputs of one expert.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertMoments {
    /// `[columns, columns]`, mixed as the settings say.
    pub moments: Vec<f32>,
    /// `[columns]`: its diagonal.
    pub diagonal: Vec<f32>,
    /// Tokens that came to the expert.
    pub n_tokens: usize,
    /// Where the inputs are not those of the source: the mean of the source's times these, `[columns, columns]`, and the second moments
    /// of these as they are.
    pub cross: Option<(Vec<f32>, Vec<f32>)>,
}

impl Curvature for ExpertMoments {
    fn diagonal(&self) -> Option<&[f32]> {
        Some(&self.diagonal)
    }

    fn second_moments(&self) -> Option<&[f32]> {
        Some(&self.moments)
    }
}

/// Any error of a calibration.
pub type CalibrationError = Box<dyn Error + Send + Sync>;

/// The finished tensors of a layer, as they are in the file.
pub trait LayerBytes: Sync {
    /// The bytes of a tensor of the layer that was left last; the place is that in the plan.
    ///
    /// # Errors
    /// The system's own.
    fn read(&self, tensor: &PlannedTensor) -> std::io::Result<Vec<u8>>;
}

/// Gives second moments, one layer after another.
pub trait Calibration: Sync {
    /// The first layer that can be entered: those before are done for good.
    fn ready_layer(&self) -> usize;

    /// Forgets everything kept of an earlier run: layer 0 is the next to be entered.
    fn restart(&mut self);

    /// Runs the calibration tokens through a layer of the source and keeps what its experts read.
    /// Layers come in order, the first being [`Calibration::ready_layer`]. `wanted`: whether moments will be asked for.
    ///
    /// # Errors
    /// If the layer cannot be computed.
    fn enter(&mut self, layer: usize, wanted: bool) -> Result<(), CalibrationError>;

    /// Second moments of what the matrices of an expert of the layer entered last read.
    ///
    /// # Errors
    /// If they cannot be formed.
    fn moments(&self, input: MatrixInput, expert: usize) -> Result<ExpertMoments, CalibrationError>;

    /// [`Calibration::moments`] of an expert's mids when its gate and up projections are these instead of the source's,
    /// each `[inner, hidden]`.
    ///
    /// # Errors
    /// If they cannot be formed.
    fn mid_moments(&self, expert: usize, gate: &[f32], up: &[f32])
    -> Result<ExpertMoments, CalibrationError>;

    /// The layer entered last is in the file for good: the next one can be entered, and so it can after an interruption.
    ///
    /// # Errors
    /// If activations cannot be computed or kept.
    fn leave(&mut self, layer: usize, plan: &Plan, bytes: &dyn LayerBytes) -> Result<(), CalibrationError>;

    /// The file is finished: nothing has to be kept.
    fn finish(&mut self);
}

/// What became of the matrices of a tensor.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FeedbackOutcome {
    /// GGUF name.
    pub tensor: String,
    /// Which matrix of the tensor.
    pub expert_index: usize,
    /// Tokens that came to it.
    pub n_tokens: usize,
    /// What the walk did.
    #[serde(flatten)]
    pub report: feedback::Report,
}

/// What error feedback needs besides a plan.
pub struct ByFeedback<'a> {
    /// Gives second moments.
    pub calibration: &'a mut dyn Calibration,
    /// Uses them.
    pub quantizer: &'a Feedback,
}

/// Builds the file of a plan with error feedback in its routed experts.
///
/// Output, interruption and resumption are as in [`super::build`].
///
/// # Errors
/// [`BuildError`], which says whether a part file is left.
pub fn build_calibrated(
    plan: &Plan,
    source: &dyn WeightSource,
    importance: &dyn ImportanceSource,
    by: ByFeedback<'_>,
    out: &std::path::Path,
    options: BuildOptions,
    progress: &dyn Progress,
) -> Result<BuildReport, BuildError> {
    let ByFeedback { calibration, quantizer } = by;
    let header = plan.layout.header_bytes();
    let identity = identity(plan, &header, source, importance, options);
    let mut sink = FileSink::open(out, plan.file_bytes(), &identity, &source.files(), options)?;
    let resumed_bytes = sink.done_bytes();
    let ready = calibration.ready_layer();
    let is_before =
        |s: &&Range<usize>| plan.tensors[s.start].spec.layer.is_some_and(|l| (l as usize) < ready);
    if segments(plan).iter().filter(is_before).any(|s| end_of(plan, s) > resumed_bytes) {
        // Activations of a run whose part file is gone.
        calibration.restart();
    }
    let mut importances = Importances::new(plan, source, importance, options.importance_fallback);
    let mut writer = Writer { sink: &mut sink, plan, progress };
    let mut outcomes = Vec::new();
    writer.append(0, &header, "header", 0)?;
    for segment in segments(plan) {
        let layer = plan.tensors[segment.start].spec.layer.map(|layer| layer as usize);
        let walked: Vec<usize> = segment.clone().filter(|&index| is_walked(&plan.tensors[index])).collect();
        let job = Job { plan, source, quantizer, segment: segment.clone(), walked };
        let is_done = end_of(plan, &segment) <= writer.sink.done_bytes();
        match layer.filter(|&layer| layer >= calibration.ready_layer()) {
            None => job.write_plain(&mut importances, &mut writer)?,
            Some(layer) => {
                let failed = |source| BuildError::Calibration { layer, source };
                if progress.interrupted() {
                    return Err(writer.interrupted());
                }
                let wanted = !is_done && !job.walked.is_empty();
                calibration.enter(layer, wanted).map_err(failed)?;
                let experts = if wanted { job.experts(calibration, &mut outcomes)? } else { Vec::new() };
                job.write(&experts, &mut importances, &mut writer)?;
                drop(experts);
                writer.flush()?;
                calibration.leave(layer, plan, &SinkBytes(&*writer.sink)).map_err(failed)?;
            }
        }
        if writer.sink.done_bytes() < end_of(plan, &segment) {
            return Err(writer.interrupted());
        }
    }
    let report = BuildReport {
        path: out.to_owned(),
        file_bytes: plan.file_bytes(),
        sha256: sink.sha256(),
        resumed_bytes,
        fallback_importance: importances.into_notes().into_iter().chain(unseen(&outcomes)).collect(),
        feedback: outcomes,
    };
    sink.finish(options.overwrite)?;
    calibration.finish();
    Ok(report)
}

/// Whether a tensor is quantized with feedback.
pub fn is_walked(tensor: &PlannedTensor) -> bool {
    tensor.conversion == Conversion::Quantize
        && MatrixInput::of(tensor.spec.family).is_some()
        && feedback::has_walk(tensor.target)
}

/// Runs of tensors of one layer, or of none, in the order of the plan.
fn segments(plan: &Plan) -> Vec<Range<usize>> {
    let mut segments: Vec<Range<usize>> = Vec::new();
    for (index, tensor) in plan.tensors.iter().enumerate() {
        match segments.last_mut() {
            Some(last) if plan.tensors[last.start].spec.layer == tensor.spec.layer => last.end = index + 1,
            _ => segments.push(index..index + 1),
        }
    }
    segments
}

/// First byte after a run of tensors, padding included.
fn end_of(plan: &Plan, segment: &Range<usize>) -> u64 {
    plan.tensors.get(segment.end).map_or(plan.file_bytes(), |next| next.offset_bytes)
}

/// Appends in order, leaving out what an earlier run has written.
struct Writer<'a> {
    sink: &'a mut FileSink,
    plan: &'a Plan,
    progress: &'a dyn Progress,
}

impl Writer<'_> {
    /// Bytes that begin at `offset` of the file; what lies between is padding.
    fn append(&mut self, offset: u64, bytes: &[u8], item: &str, done_items: usize) -> Result<(), BuildError> {
        let done = self.sink.done_bytes();
        let wrong = |sink: &FileSink, source| BuildError::Write {
            path: sink.path(),
            offset_bytes: sink.done_bytes(),
            tensor: item.to_owned(),
            source,
        };
        if done < offset {
            let padding = vec![0; (offset - done) as usize];
            self.sink.append(&padding).map_err(|e| wrong(self.sink, e))?;
        }
        let skip = (self.sink.done_bytes() - offset).min(bytes.len() as u64) as usize;
        if skip < bytes.len() {
            self.sink.append(&bytes[skip..]).map_err(|e| wrong(self.sink, e))?;
        }
        self.progress.step(&Step {
            item,
            done_bytes: self.sink.done_bytes(),
            total_bytes: self.plan.file_bytes(),
            done_items,
            total_items: self.plan.tensors.len(),
        });
        Ok(())
    }

    fn flush(&mut self) -> Result<(), BuildError> {
        self.sink.flush().map_err(|source| BuildError::Write {
            path: self.sink.path(),
            offset_bytes: self.sink.done_bytes(),
            tensor: "journal".to_owned(),
            source,
        })
    }

    fn interrupted(&self) -> BuildError {
        BuildError::Interrupted {
            path: self.sink.path(),
            done_bytes: self.sink.done_bytes(),
            total_bytes: self.plan.file_bytes(),
        }
    }
}

struct SinkBytes<'a>(&'a FileSink);

impl LayerBytes for SinkBytes<'_> {
    fn read(&self, tensor: &PlannedTensor) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; tensor.n_bytes as usize];
        self.0.read_at(tensor.offset_bytes, &mut bytes)?;
        Ok(bytes)
    }
}

/// The tensors of one segment.
struct Job<'a> {
    plan: &'a Plan,
    source: &'a dyn WeightSource,
    quantizer: &'a Feedback,
    segment: Range<usize>,
    /// Those quantized with feedback.
    walked: Vec<usize>,
}

/// One expert's bytes in each of the walked tensors.
type ExpertBytes = Vec<(usize, Vec<u8>, FeedbackOutcome)>;

impl Job<'_> {
    /// Bytes of all walked tensors of the layer, `[tensor]`, experts one after another.
    fn experts(
        &self,
        calibration: &dyn Calibration,
        outcomes: &mut Vec<FeedbackOutcome>,
    ) -> Result<Vec<(usize, Vec<u8>)>, BuildError> {
        let n_experts = self.walked.iter().map(|&index| self.plan.tensors[index].n_matrices()).max();
        let experts: Vec<ExpertBytes> = (0..n_experts.unwrap_or(0))
            .into_par_iter()
            .map(|expert| self.expert(calibration, expert))
            .collect::<Result<_, _>>()?;
        let mut tensors: Vec<(usize, Vec<u8>)> =
            self.walked.iter().map(|&index| (index, Vec::new())).collect();
        let mut found: Vec<Vec<FeedbackOutcome>> = vec![Vec::new(); tensors.len()];
        for expert in experts {
            for (index, bytes, outcome) in expert {
                let at = self.walked.iter().position(|&walked| walked == index).unwrap_or(0);
                tensors[at].1.extend(bytes);
                found[at].push(outcome);
            }
        }
        outcomes.extend(found.into_iter().flatten());
        Ok(tensors)
    }

    fn expert(&self, calibration: &dyn Calibration, expert: usize) -> Result<ExpertBytes, BuildError> {
        let mut results = Vec::new();
        for input in [MatrixInput::Ffn, MatrixInput::Mid] {
            let indices: Vec<usize> = self
                .walked
                .iter()
                .copied()
                .filter(|&index| MatrixInput::of(self.plan.tensors[index].spec.family) == Some(input))
                .collect();
            let Some(&first) = indices.first() else { continue };
            let layer = self.plan.tensors[first].spec.layer.unwrap_or(0) as usize;
            let quantized = (input == MatrixInput::Mid).then(|| self.gate_and_up(expert, layer, &results));
            let moments = match quantized.transpose()?.flatten() {
                Some([gate, up]) => calibration.mid_moments(expert, &gate, &up),
                None => calibration.moments(input, expert),
            }
            .map_err(|source| BuildError::Calibration { layer, source })?;
            let damping = match input {
                MatrixInput::Ffn => self.quantizer.settings.damping,
                MatrixInput::Mid => self.quantizer.settings.mid_damping,
            };
            let mut factor = None;
            for index in indices {
                let tensor = &self.plan.tensors[index];
                if !matches!(&factor, Some((target, _)) if *target == tensor.target) {
                    let new =
                        self.quantizer.factor(tensor.target, &moments.moments, tensor.n_columns(), damping);
                    factor = Some((tensor.target, new));
                }
                let by = factor.as_ref().and_then(|(_, factor)| factor.as_ref());
                results.push(self.matrix(index, expert, &moments, by)?);
            }
        }
        Ok(results)
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

    fn matrix(
        &self,
        index: usize,
        expert: usize,
        moments: &ExpertMoments,
        factor: Option<&feedback::Factor>,
    ) -> Result<(usize, Vec<u8>, FeedbackOutcome), BuildError> {
        let tensor = &self.plan.tensors[index];
        let (rows, columns) = (tensor.n_rows(), tensor.n_columns());
        let mut values = vec![0.0; rows * columns];
        self.source.read_rows(&tensor.spec, expert, 0..rows, &mut values)?;
        if let Some((cross, own)) = &moments.cross
            && let Some(better) =
                feedback::corrected(&values, cross, own, columns, self.quantizer.settings.ridge)
        {
            values = better;
        }
        let mut bytes = vec![0; rows * tensor.row_bytes()];
        let name = || tensor.spec.gguf_name.clone();
        let report = if let Some(factor) = factor {
            self.quantizer.quantize_by(tensor.target, &values, &moments.diagonal, factor, &mut bytes)
        } else {
            // Nothing to walk by: the diagonal is all there is.
            let diagonal = crate::quantize::Diagonal(Some(&moments.diagonal));
            self.quantizer.quantize_reporting(tensor.target, &values, columns, &diagonal, &mut bytes)
        };
        let report = report.map_err(|source| BuildError::Quantize { tensor: name(), source })?;
        self.source.release(&tensor.spec, expert);
        if let Some(bad) = tensor.target.format().and_then(|format| format.first_bad_block(&bytes)) {
            return Err(BuildError::BadBlock {
                tensor: name(),
                expert_index: expert,
                block_index: bad.block_index,
                target: tensor.target,
                problem: bad.problem,
            });
        }
        let outcome =
            FeedbackOutcome { tensor: name(), expert_index: expert, n_tokens: moments.n_tokens, report };
        Ok((index, bytes, outcome))
    }

    /// Writes every tensor of the segment; `experts`: those that are made already.
    fn write(
        &self,
        experts: &[(usize, Vec<u8>)],
        importances: &mut Importances<'_>,
        writer: &mut Writer<'_>,
    ) -> Result<(), BuildError> {
        for index in self.segment.clone() {
            let tensor = &self.plan.tensors[index];
            if let Some((_, bytes)) = experts.iter().find(|(made, _)| *made == index) {
                writer.append(tensor.offset_bytes, bytes, &tensor.spec.gguf_name, index + 1)?;
            } else if !self.walked.contains(&index) {
                self.write_tensor(index, importances, writer)?;
            }
        }
        let end = end_of(self.plan, &self.segment);
        let last = &self.plan.tensors[self.segment.end - 1];
        writer.append(end, &[], &last.spec.gguf_name, self.segment.end)
    }

    /// Writes a segment that needs no moments.
    fn write_plain(
        &self,
        importances: &mut Importances<'_>,
        writer: &mut Writer<'_>,
    ) -> Result<(), BuildError> {
        self.write(&[], importances, writer)
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

/// Memory of a calibrated build besides that of a plain one: for each thread one expert's second moments in single precision, twice
/// in double while they are factored, the factor with its diagonal blocks, and the values of a matrix with what the walk keeps of
/// them; and the bytes of a layer's experts.
pub fn calibrated_memory_bytes(plan: &Plan, n_threads: usize) -> u64 {
    let walked: Vec<_> = plan.tensors.iter().filter(|t| is_walked(t)).collect();
    let columns = walked.iter().map(|t| t.n_columns() as u64).max().unwrap_or(0);
    let values = walked.iter().map(|t| (t.n_rows() * t.n_columns()) as u64).max().unwrap_or(0);
    let mut layer_bytes = std::collections::HashMap::<Option<u32>, u64>::new();
    for tensor in &walked {
        *layer_bytes.entry(tensor.spec.layer).or_default() += tensor.n_bytes;
    }
    let layer = layer_bytes.values().copied().max().unwrap_or(0);
    n_threads as u64 * (columns * columns * (4 + 16 + 4) + columns * 256 * 4 + values * 4 * 7) + 2 * layer
}

/// Experts that no token came to, as notes for the report.
fn unseen(outcomes: &[FeedbackOutcome]) -> impl Iterator<Item = FallbackImportance> + '_ {
    outcomes.iter().filter(|outcome| outcome.n_tokens == 0).map(|outcome| FallbackImportance {
        tensor: outcome.tensor.clone(),
        expert_index: outcome.expert_index,
        reason: "never reached in calibration".to_owned(),
        used: "mean of the layer",
    })
}
