//! Where the weights of a build come from: an official checkpoint, or another GGUF file.

use std::ops::Range;
use std::path::PathBuf;

use crate::block::BlockType;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::gguf::{Gguf, GgufError, Metadata, TensorInfo};
use crate::model::{HyperParameters, ModelError, TensorSpec, expected_tensors};

/// Why a source cannot give its weights.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A problem of the safetensors set.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A problem of the GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The model is not one that can be built.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The GGUF file lacks tensors of its model or has others; all are listed.
    #[error("cannot build from `{}`\n  {}", path.display(), problems.join("\n  "))]
    Incomplete {
        /// The file.
        path: PathBuf,
        /// One line a tensor.
        problems: Vec<String>,
    },
    /// A value that no sound model holds.
    #[error("tensor `{tensor}` in `{}`: row {row}, column {column} is {value}; the source is damaged, download or convert it again", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// GGUF name.
        tensor: String,
        /// Row within the stacked tensor.
        row: u64,
        /// Column.
        column: usize,
        /// NaN or infinity.
        value: f32,
    },
}

/// Gives the weights of every tensor of one model, a few rows at a time.
pub trait WeightSource: Sync {
    /// The tensors of the file to be, in order.
    fn tensors(&self) -> &[TensorSpec];

    /// Metadata of the model and its tokenizer, without provenance.
    ///
    /// # Errors
    /// If the source's own description is unusable.
    fn metadata(&self) -> Result<Metadata, SourceError>;

    /// Files the weights come from.
    fn files(&self) -> Vec<PathBuf>;

    /// Label of the checkpoint: which release this is.
    fn label(&self) -> String;

    /// Source revision, where it is known.
    fn revision(&self) -> Option<String>;

    /// Type of the source tensor, as users call it.
    fn type_name(&self, tensor: &TensorSpec) -> String;

    /// Bytes of the source tensor, scales included.
    fn n_bytes(&self, tensor: &TensorSpec) -> u64;

    /// Whether `target` holds the source's values without change and without going through `f32`.
    fn is_exact(&self, tensor: &TensorSpec, target: BlockType) -> bool;

    /// Why some of these conversions must not be done; one line each, empty if all may.
    fn refusals(&self, targets: &[(&TensorSpec, BlockType)]) -> Vec<String>;

    /// Tensors that stay out of the file, with their bytes.
    fn set_aside(&self) -> Vec<(String, u64)>;

    /// Widens rows of one matrix to `f32`: `out` is `[rows, columns]`. Every value written is finite.
    ///
    /// # Errors
    /// If the source is damaged.
    fn read_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), SourceError>;

    /// Carries rows over exactly, for a target that [`WeightSource::is_exact`] accepts.
    ///
    /// # Errors
    /// If the source is damaged.
    fn copy_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), SourceError>;

    /// Says that a matrix will not be read again, so that its pages need not stay in memory.
    fn release(&self, tensor: &TensorSpec, matrix_index: usize);
}
