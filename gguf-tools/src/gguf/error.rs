//! What can be wrong with a GGUF file.

use std::fmt;
use std::path::PathBuf;

/// Why a GGUF file cannot be used. Every message names file and field, what was found, what was expected and what to
/// do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The system refuses the file.
    #[error("cannot open `{}`", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's own words.
        source: std::io::Error,
    },
    /// The bytes are something else.
    #[error("`{}` is no GGUF file: {found}\n  {advice}", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// What it looks like.
        found: String,
        /// What to do.
        advice: &'static str,
    },
    /// A field of the header breaks a rule of the format.
    #[error("cannot read the header of `{}`\n  {field}: found {found}, expected {expected}\n  {advice}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Key, tensor or part of the header.
        field: String,
        /// What the file holds.
        found: String,
        /// What the format demands.
        expected: String,
        /// What to do.
        advice: &'static str,
    },
    /// Tensors whose place in the file is wrong or too small; all are listed.
    #[error(
        "{} of the tensors of `{}` do not fit their places\n  {}\n  the file was written wrongly, and reading it would mix neighbouring tensors; get a corrected file",
        problems.len(), path.display(), lines(problems)
    )]
    Regions {
        /// The file.
        path: PathBuf,
        /// Every tensor concerned.
        problems: Vec<RegionProblem>,
    },
    /// Data that lies past the end of the file.
    #[error(
        "`{}` is truncated\n  tensor `{tensor}`: needs bytes {start_bytes}..{end_bytes}, the file ends at {file_bytes}\n  the download or copy is incomplete; resume it",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The tensor asked for.
        tensor: String,
        /// First byte of its data.
        start_bytes: u64,
        /// First byte after its data.
        end_bytes: u64,
        /// Bytes that are there.
        file_bytes: u64,
    },
    /// A split set that is not whole or does not belong together.
    #[error("cannot open the split set of `{}`\n  {}\n  {advice}", path.display(), lines(problems))]
    Split {
        /// The shard that was given.
        path: PathBuf,
        /// One line a problem.
        problems: Vec<String>,
        /// What to do.
        advice: &'static str,
    },
    /// A file that cannot be laid out as asked.
    #[error("cannot lay out the file\n  {field}: found {found}, expected {expected}")]
    Layout {
        /// Key or tensor.
        field: String,
        /// What was asked for.
        found: String,
        /// What the format demands.
        expected: String,
    },
    /// The caller asked to stop.
    #[error("reading `{}` was interrupted", path.display())]
    Interrupted {
        /// The file.
        path: PathBuf,
    },
}

/// A tensor whose place in the file is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionProblem {
    /// The tensor.
    pub tensor: String,
    /// What the directory says.
    pub found: String,
    /// What type, shape and alignment demand.
    pub expected: String,
}

impl fmt::Display for RegionProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor `{}`: found {}, expected {}", self.tensor, self.found, self.expected)
    }
}

fn lines<T: ToString>(problems: &[T]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  ")
}
