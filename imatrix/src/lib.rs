//! Importance matrices: collecting them ([`collect`]) from calibration texts ([`dataset`]), and their files: reading,
//! checking, coverage of a plan, merging, converting and comparing.
//!
//! For a matrix multiplied with input rows `a`, the importance of input column `c` is the mean of `a_c^2`.
//! [`Imatrix::open`] reads llama.cpp's GGUF form and the legacy `.dat` form in all its generations, told apart by
//! their bytes. Only headers stay in memory: values are checked once on opening and read again when asked for.

pub mod calibrate;
pub mod collect;
mod coverage;
pub mod dataset;
mod diff;
mod entry;
mod error;
mod gguf_file;
mod legacy;
mod lookup;
mod merge;
pub mod routing;
mod write;

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

pub use coverage::{CountRange, Coverage, Finding, MissingPolicy, StackedTensor, TensorCoverage, Totals};
pub use diff::{Difference, EntryDifference};
pub use entry::{CountUnit, Entry};
pub use error::{ImatrixError, Problem};
pub use write::{Loss, Target};

use entry::Bytes;

/// How a file was found to be laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// The binary `.dat` form.
    Legacy(Generation),
    /// Pairs of tensors in a GGUF file.
    Gguf,
}

/// How much follows the entries of a legacy file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Generation {
    /// Nothing.
    EntriesOnly,
    /// The number of chunks.
    ChunkCount,
    /// The number of chunks and the name of the data set.
    Dataset,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Legacy(Generation::EntriesOnly) => "legacy .dat, entries only",
            Self::Legacy(Generation::ChunkCount) => "legacy .dat with chunk count",
            Self::Legacy(Generation::Dataset) => "legacy .dat with chunk count and dataset name",
            Self::Gguf => "GGUF imatrix",
        })
    }
}

/// Gives the number of columns of a tensor, where the caller knows it.
pub(crate) type Columns<'a> = &'a dyn Fn(&str) -> Option<usize>;

/// What a file holds, whatever its format.
#[derive(Debug, Clone)]
pub(crate) struct Contents {
    format: Format,
    entries: Vec<Entry>,
    datasets: Vec<String>,
    n_chunks: Option<u64>,
    /// Tokens in a chunk; legacy files do not say.
    chunk_size: Option<u64>,
}

impl Contents {
    fn empty(format: Format) -> Self {
        Self { format, entries: Vec::new(), datasets: Vec::new(), n_chunks: None, chunk_size: None }
    }
}

#[derive(Debug, Clone)]
struct Origin {
    path: PathBuf,
    sha256: String,
}

/// An importance matrix: one [`Entry`] a tensor, with the record of how it was collected.
#[derive(Debug, Clone)]
pub struct Imatrix {
    contents: Contents,
    by_name: HashMap<String, usize>,
    problems: Vec<Problem>,
    origin: Option<Origin>,
}

impl Imatrix {
    /// Opens an importance matrix, in the format that its first bytes show.
    ///
    /// Reads the whole file once, to check every value and to hash it.
    ///
    /// # Errors
    /// If the file cannot be read, is no importance matrix, or its structure is damaged (cut, bytes left over,
    /// lengths that do not fit, names twice, missing pairs). Values that cannot be used do not fail here, because the
    /// other experts may still be fine: see [`Imatrix::problems`] and [`Coverage::judge`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ImatrixError> {
        Self::open_with_columns(path, &|_| None)
    }

    /// Like [`Imatrix::open`], for a caller who knows the model: `columns` gives the number of columns of a tensor.
    ///
    /// A legacy file does not store it. Knowing it, problems name expert and column, and merging and converting can
    /// tell unseen experts.
    ///
    /// # Errors
    /// As [`Imatrix::open`].
    pub fn open_with_columns(
        path: impl AsRef<Path>,
        columns: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<Self, ImatrixError> {
        let path = path.as_ref();
        let read_error = |source| ImatrixError::Read { path: path.to_owned(), source };
        let bytes = Arc::new(Bytes::File(File::open(path).map_err(read_error)?));
        let n_bytes = bytes.n_bytes().map_err(read_error)?;
        let mut first = vec![0; n_bytes.min(64) as usize];
        bytes.read_exact_at(0, &mut first).map_err(read_error)?;
        if let Some(found) = recognise_other(&first) {
            return Err(ImatrixError::NotAnImatrix { path: path.to_owned(), found });
        }
        let mut problems = Vec::new();
        let contents = if first.starts_with(b"GGUF") {
            gguf_file::read(path, &bytes, columns, &mut problems)?
        } else {
            legacy::read(&bytes, columns, &mut problems).map_err(read_error)?
        };
        if !problems.is_empty() {
            return Err(ImatrixError::Damaged { path: path.to_owned(), format: contents.format, problems });
        }
        for entry in &contents.entries {
            entry.check(&mut problems).map_err(read_error)?;
        }
        let sha256 = hash(&bytes, n_bytes).map_err(read_error)?;
        let mut imatrix = Self::from_contents(contents);
        imatrix.problems = problems;
        imatrix.origin = Some(Origin { path: path.to_owned(), sha256 });
        Ok(imatrix)
    }

    /// An importance matrix made in memory, by a collector. `chunk_size`: tokens in a chunk.
    ///
    /// # Panics
    /// If two entries have one name: a collector has one for each tensor.
    pub fn from_entries(entries: Vec<Entry>, datasets: Vec<String>, n_chunks: u64, chunk_size: u64) -> Self {
        let n_entries = entries.len();
        let mut contents = Contents::empty(Format::Gguf);
        contents.entries = entries;
        contents.datasets = datasets;
        contents.n_chunks = Some(n_chunks);
        contents.chunk_size = Some(chunk_size);
        let imatrix = Self::from_contents(contents);
        assert_eq!(imatrix.by_name.len(), n_entries, "entries have different names");
        imatrix
    }

    fn from_contents(contents: Contents) -> Self {
        let by_name = contents.entries.iter().enumerate().map(|(i, e)| (e.name.clone(), i)).collect();
        Self { contents, by_name, problems: Vec::new(), origin: None }
    }

    /// How the file was found to be laid out; of a matrix made in memory, how it is counted.
    pub fn format(&self) -> Format {
        self.contents.format
    }

    /// Whether this is ds4's form: a legacy file of means (one call), all of them stacks of routed experts.
    pub fn is_packed_by_expert(&self) -> bool {
        matches!(self.contents.format, Format::Legacy(_))
            && self.entries().iter().all(|e| e.counts == [1.0] && e.name.contains("_exps"))
    }

    /// Every entry, in file order.
    pub fn entries(&self) -> &[Entry] {
        &self.contents.entries
    }

    /// The entry of that very name.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|&index| &self.contents.entries[index])
    }

    /// Names of the calibration data sets.
    pub fn datasets(&self) -> &[String] {
        &self.contents.datasets
    }

    /// Number of calibration chunks, where recorded.
    pub fn n_chunks(&self) -> Option<u64> {
        self.contents.n_chunks
    }

    /// Tokens in a chunk, where recorded.
    pub fn chunk_size(&self) -> Option<u64> {
        self.contents.chunk_size
    }

    /// Values and counts that cannot be used: at most the first thousand.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// The file's name without its folder; `(in memory)` for one that was never read.
    pub fn file_name(&self) -> String {
        let name = self.origin.as_ref().and_then(|origin| origin.path.file_name());
        name.map_or_else(|| "(in memory)".to_owned(), |name| name.to_string_lossy().into_owned())
    }
}

/// Names what the first bytes of a file show, if that is surely no importance matrix.
fn recognise_other(first: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(first).trim_start().to_ascii_lowercase();
    let what = if first.is_empty() {
        "an empty file"
    } else if text.starts_with("<!doctype") || text.starts_with("<html") {
        "a web page (`<!DOCTYPE` or `<html`)"
    } else if text.starts_with("version https://git-lfs") {
        "a Git LFS pointer"
    } else {
        return None;
    };
    Some(what.to_owned())
}

fn hash(bytes: &Bytes, n_bytes: u64) -> io::Result<String> {
    const STEP: u64 = 1 << 20;
    let mut digest = Sha256::new();
    let mut part = Vec::new();
    for start in (0..n_bytes).step_by(STEP as usize) {
        part.resize((n_bytes - start).min(STEP) as usize, 0);
        bytes.read_exact_at(start, &mut part)?;
        digest.update(&part);
    }
    Ok(digest.finalize().iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    }))
}
