//! The build: streams a plan's tensors into a file, in parallel, resumable, atomic.
//!
//! The file grows in order under a part name beside the final one. Work is cut into units of rows
//! whose bytes depend on the unit alone, so neither the number of threads nor an interruption changes
//! the result.

mod calibrated;
mod calibration;
mod layer_job;
mod part;
mod regenerate;
mod unit;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rayon::prelude::*;
use serde::Serialize;
use sha2::{Digest, Sha256};

pub(crate) use calibrated::place_of;
pub use calibrated::{ByFeedback, FeedbackOutcome, build_calibrated, calibrated_memory_bytes, is_walked};
pub use calibration::{Calibration, CalibrationError, LayerBytes, MatrixMoments, Wanted};
pub use part::{FileSink, Journal, Sink, free_bytes};
pub(crate) use regenerate::Regenerator;
use unit::{Importances, Unit, Wave};

use crate::block::BlockType;
use crate::importance::ImportanceSource;
use crate::plan::Plan;
use crate::progress::{Progress, Step};
use crate::quantize::QuantizeError;
use crate::source::{SourceError, WeightSource};

/// Why a build did not end with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The source is damaged.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A target cannot be written.
    #[error("tensor `{tensor}`: {source}")]
    Quantize {
        /// GGUF name.
        tensor: String,
        /// Why.
        source: QuantizeError,
    },
    /// Second moments cannot be had.
    #[error("{place}: calibration failed: {source}")]
    Calibration {
        /// Where, as `layer 3`.
        place: String,
        /// Why.
        source: CalibrationError,
    },
    /// Importance that cannot be used.
    #[error(
        "cannot quantize `{tensor}` to {target}\n  expert {expert_index}: {problem}\n  mend or leave out the importance matrix, or allow the fallback with --imatrix-missing fallback"
    )]
    Importance {
        /// GGUF name.
        tensor: String,
        /// Which matrix of the tensor.
        expert_index: usize,
        /// Its target type.
        target: BlockType,
        /// What is wrong.
        problem: String,
    },
    /// Blocks that no sound file holds came out of the quantizer.
    #[error(
        "tensor `{tensor}`: block {block_index} of expert {expert_index} cannot be stored as {target}: {problem}; choose a type of larger range for it, for example with --tensor-type '{tensor}=BF16'"
    )]
    BadBlock {
        /// GGUF name.
        tensor: String,
        /// Which matrix of the tensor.
        expert_index: usize,
        /// Block within the rows that were worked on together.
        block_index: usize,
        /// Its target type.
        target: BlockType,
        /// What is wrong.
        problem: String,
    },
    /// The output file or its folder cannot be used.
    #[error("cannot write `{}`: {problem}", path.display())]
    Output {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Too little room.
    #[error(
        "not enough room in the output folder for `{}`\n  needs {needed_bytes} bytes more, {free_bytes} are free; nothing was written", path.display()
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes still to be written.
        needed_bytes: u64,
        /// Bytes free on that file system.
        free_bytes: u64,
    },
    /// Writing failed in the middle.
    #[error(
        "cannot write `{}` at byte {offset_bytes} (tensor `{tensor}`): {source}\n  the part file is kept; make room or mend the cause and run the same command again to go on", path.display()
    )]
    Write {
        /// The part file.
        path: PathBuf,
        /// Where writing stopped.
        offset_bytes: u64,
        /// The tensor being written.
        tensor: String,
        /// The system's own words.
        source: std::io::Error,
    },
    /// A part file that does not belong to this plan, or is damaged.
    #[error(
        "cannot resume `{}`: {problem}\n  run with --no-resume to start again, or remove the part file", path.display()
    )]
    Resume {
        /// The part file.
        path: PathBuf,
        /// What does not fit.
        problem: String,
    },
    /// The caller asked to stop.
    #[error(
        "stopped with {done_bytes} of {total_bytes} bytes written to `{}`; run the same command again to go on", path.display()
    )]
    Interrupted {
        /// The part file.
        path: PathBuf,
        /// Bytes that are done.
        done_bytes: u64,
        /// Bytes of the whole file.
        total_bytes: u64,
    },
}

/// How a build treats what it finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildOptions {
    /// Replace an existing output.
    pub overwrite: bool,
    /// Go on from a part file that fits the plan.
    pub resume: bool,
    /// Use the fallback where importance is missing; `false` makes it an error.
    pub importance_fallback: bool,
}

/// What a build did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BuildReport {
    /// The finished file.
    pub path: PathBuf,
    /// Its size.
    pub file_bytes: u64,
    /// Its SHA-256.
    pub sha256: String,
    /// Bytes that an earlier run had already written.
    pub resumed_bytes: u64,
    /// Matrices quantized with weights of the fallback, in file order.
    pub fallback_importance: Vec<FallbackImportance>,
    /// What error feedback did, matrix by matrix, in file order; layers that an earlier run wrote are missing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub feedback: Vec<FeedbackOutcome>,
}

/// A matrix whose importance was not known although its tensor could have used it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FallbackImportance {
    /// GGUF name.
    pub tensor: String,
    /// Which matrix of the tensor.
    pub expert_index: usize,
    /// Why: no entry, never reached in calibration, unusable.
    pub reason: String,
    /// What was used: `weight energy` or `none`.
    pub used: &'static str,
}

/// Builds the file of a plan.
///
/// Ends with the finished file under `out`, or with an error and nothing new under that name. After
/// an interruption or a write error the part file stays, and the same call goes on from it.
///
/// # Errors
/// [`BuildError`], which says whether a part file is left.
pub fn build(
    plan: &Plan,
    source: &dyn WeightSource,
    importance: &dyn ImportanceSource,
    out: &Path,
    options: BuildOptions,
    progress: &dyn Progress,
) -> Result<BuildReport, BuildError> {
    let header = plan.layout.header_bytes();
    let identity = identity(plan, &header, source, importance, options);
    let mut sink = FileSink::open(out, plan.file_bytes(), &identity, &source.files(), options)?;
    let report = build_into(plan, source, importance, &header, &mut sink, options, progress)?;
    sink.finish(options.overwrite)?;
    Ok(BuildReport { path: out.to_owned(), ..report })
}

/// What must be equal for a part file to be continued: the header (which holds recipe, origin and
/// importance hash) and everything else that decides bytes. A shard without the hashes of its sources goes by their
/// sizes and times instead.
fn identity(
    plan: &Plan,
    header: &[u8],
    source: &dyn WeightSource,
    importance: &dyn ImportanceSource,
    options: BuildOptions,
) -> String {
    let mut hasher = Sha256::new();
    hasher.update(env!("CARGO_PKG_VERSION"));
    hasher.update(header);
    hasher.update(format!("{:?} {:?}", plan.objective, options.importance_fallback));
    hasher.update(importance.provenance().map(|p| p.sha256).unwrap_or_default());
    if plan.part.is_some_and(|part| !part.names_source_sums()) {
        for file in source.files() {
            let seen = std::fs::metadata(&file).map(|m| (m.len(), m.modified().ok()));
            hasher.update(format!("{} {:?}", file.display(), seen.ok()));
        }
    }
    crate::plan::hex(&hasher.finalize())
}

/// Streams the plan into any sink; [`build`] uses a file, tests one that fails.
///
/// # Errors
/// As [`build`].
pub fn build_into(
    plan: &Plan,
    source: &dyn WeightSource,
    importance: &dyn ImportanceSource,
    header: &[u8],
    sink: &mut dyn Sink,
    options: BuildOptions,
    progress: &dyn Progress,
) -> Result<BuildReport, BuildError> {
    let resumed_bytes = sink.done_bytes();
    let mut importances = Importances::new(plan, source, importance, options.importance_fallback);
    let waves = unit::waves(plan, rayon::current_num_threads());
    let (to_writer, from_workers) = sync_channel::<Chunk>(1);
    let (total, n_tensors) = (plan.file_bytes(), plan.tensors.len());
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || write_chunks(sink, &from_workers, plan, progress));
        let computed: Result<(), BuildError> = (|| {
            let padding_to = plan.tensors.first().map_or(total, |t| t.offset_bytes);
            if resumed_bytes < padding_to {
                send(&to_writer, 0, padded(header.to_vec(), padding_to), "header", 0);
            }
            for wave in &waves {
                if wave.end_bytes <= resumed_bytes {
                    importances.note_done(wave);
                    continue;
                }
                if progress.interrupted() {
                    break;
                }
                let bytes = compute_wave(plan, source, &mut importances, wave)?;
                let name = &plan.tensors[wave.units[0].tensor_index].spec.gguf_name;
                let first_tensor = wave.units.last().map_or(n_tensors, |u| u.tensor_index);
                if !send(&to_writer, wave.start_bytes, padded_to(bytes, wave), name, first_tensor) {
                    break;
                }
            }
            Ok(())
        })();
        drop(to_writer);
        let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // A write error explains itself; what the workers did meanwhile does not matter.
        let (sha256, done_bytes, path) = written?;
        computed?;
        if done_bytes < total {
            return Err(BuildError::Interrupted { path, done_bytes, total_bytes: total });
        }
        Ok(BuildReport {
            path,
            file_bytes: total,
            sha256,
            resumed_bytes,
            fallback_importance: importances.into_notes(),
            feedback: Vec::new(),
        })
    })
}

/// Bytes for the writer, with what they belong to.
struct Chunk {
    offset_bytes: u64,
    bytes: Vec<u8>,
    tensor: String,
    done_tensors: usize,
}

fn send(
    to: &SyncSender<Chunk>,
    offset_bytes: u64,
    bytes: Vec<u8>,
    tensor: &str,
    done_tensors: usize,
) -> bool {
    to.send(Chunk { offset_bytes, bytes, tensor: tensor.to_owned(), done_tensors }).is_ok()
}

fn padded(mut bytes: Vec<u8>, n_bytes: u64) -> Vec<u8> {
    bytes.resize(n_bytes as usize, 0);
    bytes
}

fn padded_to(bytes: Vec<u8>, wave: &Wave) -> Vec<u8> {
    padded(bytes, wave.end_bytes - wave.start_bytes)
}

/// The writer's loop: appends, hashes, journals. Returns hash and length of what is written.
fn write_chunks(
    sink: &mut dyn Sink,
    chunks: &Receiver<Chunk>,
    plan: &Plan,
    progress: &dyn Progress,
) -> Result<(String, u64, PathBuf), BuildError> {
    let total_items = plan.tensors.len();
    for chunk in chunks {
        // After a resume the first chunk may begin before the end of the part file.
        let skip = sink.done_bytes().saturating_sub(chunk.offset_bytes) as usize;
        let bytes = &chunk.bytes[skip.min(chunk.bytes.len())..];
        sink.append(bytes).map_err(|source| BuildError::Write {
            path: sink.path(),
            offset_bytes: sink.done_bytes(),
            tensor: chunk.tensor.clone(),
            source,
        })?;
        progress.step(&Step {
            item: &chunk.tensor,
            done_bytes: sink.done_bytes(),
            total_bytes: plan.file_bytes(),
            done_items: chunk.done_tensors,
            total_items,
        });
    }
    Ok((sink.sha256(), sink.done_bytes(), sink.path()))
}

/// The bytes of one wave, computed in parallel and laid one after another.
fn compute_wave(
    plan: &Plan,
    source: &dyn WeightSource,
    importances: &mut Importances<'_>,
    wave: &Wave,
) -> Result<Vec<u8>, BuildError> {
    importances.prepare(wave)?;
    let importances = &*importances;
    let mut bytes = vec![0; (wave.end_bytes - wave.start_bytes) as usize];
    let mut slices: Vec<(&Unit, &mut [u8])> = Vec::with_capacity(wave.units.len());
    let mut rest = bytes.as_mut_slice();
    let mut at = wave.start_bytes;
    for unit in &wave.units {
        let (_, from) = rest.split_at_mut((unit.offset_bytes - at) as usize);
        let (slice, after) = from.split_at_mut(unit.n_bytes);
        slices.push((unit, slice));
        rest = after;
        at = unit.offset_bytes + unit.n_bytes as u64;
    }
    slices
        .into_par_iter()
        .map(|(unit, out)| unit.compute(plan, source, importances, out))
        .collect::<Result<(), _>>()?;
    let mut last_of: HashMap<(usize, usize), usize> = HashMap::new();
    for unit in &wave.units {
        last_of.insert((unit.tensor_index, unit.matrix_index), unit.rows.end);
    }
    for ((tensor_index, matrix_index), end) in last_of {
        let tensor = &plan.tensors[tensor_index];
        if end == tensor.n_rows() {
            source.release(&tensor.spec, matrix_index);
        }
    }
    Ok(bytes)
}

/// Anonymous memory of a build by the sizes of its buffers: one f32 unit a thread, the bytes of the
/// wave being computed and of two being written, the importance of the experts of a wave, and the header.
pub(crate) fn peak_memory_bytes(plan: &Plan, n_threads: usize) -> u64 {
    let threads = n_threads as u64;
    let widest = plan.tensors.iter().map(|t| t.n_columns() as u64).max().unwrap_or(0);
    let unit = 4 * (unit::VALUES_PER_UNIT as u64).max(widest);
    let wave = unit::waves(plan, n_threads).iter().map(|w| w.end_bytes - w.start_bytes).max().unwrap_or(0);
    // Quantizers prepare tables per guide: at most about 128 bytes a column and thread.
    64 * 1024 * 1024 + threads * (unit + 128 * widest) + 3 * wave + 2 * plan.layout.data_offset_bytes()
}
