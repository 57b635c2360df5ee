//! Builds in which matrices are quantized by the second moments of their inputs, layer by layer.
//!
//! Tensors are written in the order of the plan, like in every build; a layer's matrices are made before (`layer_job.rs`), and
//! wait in memory until their tensors' turn comes.

use std::ops::Range;

use serde::Serialize;

use super::calibration::{Calibration, LayerBytes, Wanted};
use super::layer_job::Job;
use super::unit::Importances;
use super::{BuildError, BuildOptions, BuildReport, FallbackImportance, FileSink, Sink, identity};
use crate::feedback::{self, Feedback};
use crate::importance::ImportanceSource;
use crate::plan::{Conversion, Plan, PlannedTensor};
use crate::progress::{Progress, Step};
use crate::source::WeightSource;

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
    /// Whether dense matrices are quantized by them as well, not routed experts alone.
    pub dense: bool,
}

/// Builds the file of a plan with error feedback.
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
    let ByFeedback { calibration, quantizer, dense } = by;
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
        let walked: Vec<usize> =
            segment.clone().filter(|&index| is_walked(&plan.tensors[index], dense)).collect();
        let job = Job { plan, source, quantizer, segment: segment.clone(), walked };
        let is_done = end_of(plan, &segment) <= writer.sink.done_bytes();
        let is_left = layer.is_some_and(|layer| layer < calibration.ready_layer());
        let wanted = if is_done || is_left { Wanted::default() } else { job.wanted() };
        if progress.interrupted() {
            return Err(writer.interrupted());
        }
        let failed = |source| BuildError::Calibration { place: place_of(layer), source };
        match layer {
            Some(layer) if !is_left => calibration.enter(layer, &wanted).map_err(failed)?,
            None if !wanted.is_empty() => calibration.enter_head().map_err(failed)?,
            _ => {}
        }
        let mut made = job.dense(calibration, &wanted.dense, &mut outcomes)?;
        if wanted.experts {
            made.extend(job.experts(calibration, &mut outcomes)?);
        }
        job.write(&made, &mut importances, &mut writer)?;
        drop(made);
        if let Some(layer) = layer
            && !is_left
        {
            writer.flush()?;
            calibration.leave(layer, plan, &SinkBytes(&*writer.sink)).map_err(failed)?;
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

/// Whether a tensor is quantized with feedback. `dense`: whether those outside routed experts are.
pub fn is_walked(tensor: &PlannedTensor, dense: bool) -> bool {
    tensor.conversion == Conversion::Quantize
        && tensor.spec.reads.is_some()
        && (dense || tensor.spec.family.is_routed())
        && feedback::has_walk(tensor.target)
}

/// A layer as errors name it.
pub(crate) fn place_of(layer: Option<usize>) -> String {
    layer.map_or_else(|| "behind the layers".to_owned(), |layer| format!("layer {layer}"))
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
pub(super) fn end_of(plan: &Plan, segment: &Range<usize>) -> u64 {
    plan.tensors.get(segment.end).map_or(plan.file_bytes(), |next| next.offset_bytes)
}

/// Appends in order, leaving out what an earlier run has written.
pub(super) struct Writer<'a> {
    pub(super) sink: &'a mut FileSink,
    plan: &'a Plan,
    pub(super) progress: &'a dyn Progress,
}

impl Writer<'_> {
    /// Bytes that begin at `offset` of the file; what lies between is padding.
    pub(super) fn append(
        &mut self,
        offset: u64,
        bytes: &[u8],
        item: &str,
        done_items: usize,
    ) -> Result<(), BuildError> {
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

    pub(super) fn interrupted(&self) -> BuildError {
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

/// Memory of a calibrated build besides that of a plain one. For each thread that makes an expert: its second moments in single
/// precision, twice in double while they are factored, the factor with its diagonal blocks, and the values of a matrix with what
/// the walk keeps of them. Dense matrices are made one factor at a time, some rows a thread. And the bytes of a layer's matrices.
pub fn calibrated_memory_bytes(plan: &Plan, n_threads: usize, dense: bool) -> u64 {
    let walked: Vec<_> = plan.tensors.iter().filter(|t| is_walked(t, dense)).collect();
    let factor = |columns: u64| columns * columns * (4 + 16 + 4) + columns * 256 * 4;
    let most = |routed: bool, of: &dyn Fn(&PlannedTensor) -> u64| {
        walked.iter().filter(|t| t.spec.family.is_routed() == routed).map(|t| of(t)).max().unwrap_or(0)
    };
    let n_threads = n_threads as u64;
    let experts = n_threads
        * (most(true, &|t| factor(t.n_columns() as u64))
            + most(true, &|t| (t.n_rows() * t.n_columns()) as u64) * 4 * 7);
    let rows = feedback::ROWS as u64;
    let others = most(false, &|t| factor(t.n_columns() as u64))
        + n_threads * most(false, &|t| rows * t.n_columns() as u64) * 4 * 7;
    let mut layer_bytes = std::collections::HashMap::<Option<u32>, u64>::new();
    for tensor in &walked {
        *layer_bytes.entry(tensor.spec.layer).or_default() += tensor.n_bytes;
    }
    experts.max(others) + 2 * layer_bytes.values().copied().max().unwrap_or(0)
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
