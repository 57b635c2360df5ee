//! Where weights come from: a GGUF file or an official checkpoint folder, mapped, read row by row; or nowhere, at random.

mod ahead;
mod checkpoint;
mod gguf;
mod memory;
mod synthetic;

pub(crate) use ahead::ReadAhead;
pub(crate) use memory::{available_bytes, host_memory};

pub use checkpoint::CheckpointSource;
pub use gguf::GgufSource;
pub use synthetic::SyntheticSource;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use gguf_tools::block::BlockType;
use gguf_tools::model::HyperParameters;

use crate::error::RunnerError;

/// A tensor of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundTensor {
    /// Index by which the source knows it.
    pub index: usize,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
}

/// All rows of a tensor are random, and a device can make them itself, see [`crate::cuda::matrix::generate::Recipe`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GeneratedRows {
    /// Type that they are made in.
    pub block_type: BlockType,
    /// What they depend on besides type, width and number of the row.
    pub seed: u64,
}

/// Where a tensor's bytes lie in a file, in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileExtent<'a> {
    /// The file.
    pub path: &'a Path,
    /// Where the bytes begin in it.
    pub offset: u64,
}

/// Weights by their GGUF names. All outer dimensions of a tensor are folded into rows.
pub trait WeightSource: Send + Sync {
    /// File or folder, for messages.
    fn path(&self) -> &Path;
    /// The model's hyper-parameters.
    fn hyper_parameters(&self) -> &HyperParameters;
    /// The tensor with this GGUF name.
    fn find(&self, name: &str) -> Option<FoundTensor>;
    /// The block type that the tensor is stored in, if [`WeightSource::blocks`] can give its bytes.
    fn block_type(&self, tensor: usize) -> Option<BlockType>;
    /// How a device makes the tensor's rows itself, if they are random.
    fn generated(&self, tensor: usize) -> Option<GeneratedRows> {
        let _ = tensor;
        None
    }
    /// The blocks of some rows, mapped.
    ///
    /// # Errors
    /// If the data are not in the file or not in blocks.
    fn blocks(&self, tensor: usize, rows: Range<usize>) -> Result<&[u8], RunnerError>;
    /// Widens rows to `f32`. `out`: `rows.len()` times the row's values, overwritten.
    ///
    /// # Errors
    /// If the data are not in the file, cannot be computed with, or (in checkpoints) are not finite.
    fn read_rows(&self, tensor: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), RunnerError>;
    /// All values of an integer tensor.
    ///
    /// # Errors
    /// If it is not stored as integers, or a value does not fit.
    fn read_integers(&self, tensor: usize) -> Result<Vec<i32>, RunnerError>;
    /// Bytes of all weights, if they are mapped.
    fn mapped_bytes(&self) -> u64 {
        0
    }
    /// Where the blocks of rows from `first_row` on lie, for those who read the file themselves; the caller has looked at
    /// them with [`WeightSource::blocks`], which finds a cut-off file.
    fn extent(&self, _tensor: usize, _first_row: usize) -> Option<FileExtent<'_>> {
        None
    }
    /// A tensor as it is mapped; empty where that is not in one piece.
    fn mapped(&self, _tensor: usize) -> &[u8] {
        &[]
    }
    /// Asks the system to read some bytes of [`WeightSource::mapped`], without waiting for them.
    fn read_ahead(&self, _tensor: usize, _bytes: Range<usize>) {}
    /// Lets the system take back the memory of a tensor; it is read again if it is used again.
    fn release(&self, _tensor: usize) {}
}

/// Opens a GGUF file (any file of a split set) or a checkpoint folder.
///
/// # Errors
/// If it cannot be read or its metadata describe no supported model.
pub fn open_source(path: &Path) -> Result<Arc<dyn WeightSource>, RunnerError> {
    Ok(if path.is_dir() {
        Arc::new(CheckpointSource::open(path)?)
    } else {
        Arc::new(GgufSource::open(path)?)
    })
}

/// Compares a tensor with what the hyper-parameters imply.
///
/// Both sides may fold dimensions of one away: `[1, n]` and `[n]` are the same vector.
pub(crate) fn check_shape(
    source: &dyn WeightSource,
    name: &str,
    found: &FoundTensor,
    expected: &[u64],
) -> Result<(), RunnerError> {
    let plain = |shape: &[u64]| shape.iter().copied().filter(|&n| n != 1).collect::<Vec<_>>();
    if plain(&found.shape) == plain(expected) {
        return Ok(());
    }
    Err(RunnerError::WrongShape {
        path: source.path().to_owned(),
        tensor: name.to_owned(),
        found: found.shape.clone(),
        expected: expected.to_vec(),
    })
}
