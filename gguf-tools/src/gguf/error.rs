//! What can be wrong with a GGUF file.

use std::path::PathBuf;

/// Why a GGUF file cannot be used. Every message names file and field, what was found and what was expected.
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
    #[error("`{}` is no GGUF file: {found}", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// What it looks like and what to do.
        found: String,
    },
    /// A field of the header breaks a rule of the format.
    #[error("cannot read the header of `{}`\n  {field}: {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Key, tensor or part of the header.
        field: String,
        /// What was found, expected, and what to do.
        problem: String,
    },
    /// Tensors whose place in the file is too small or overlaps another; all are listed.
    #[error("the tensors of `{}` do not fit their places\n  {}", path.display(), problems.join("\n  "))]
    Regions {
        /// The file.
        path: PathBuf,
        /// One line a tensor.
        problems: Vec<String>,
    },
    /// Data that lies past the end of the file.
    #[error(
        "`{}` is truncated\n  tensor `{tensor}`: needs bytes {start_bytes}..{end_bytes}, the file ends at {file_bytes}; the download or copy is incomplete, resume it", path.display()
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
    #[error("cannot open the split set of `{}`\n  {}", path.display(), problems.join("\n  "))]
    Split {
        /// The shard that was given.
        path: PathBuf,
        /// One line a problem.
        problems: Vec<String>,
    },
    /// A file that cannot be laid out as asked.
    #[error("cannot lay out the file: {field}: {problem}")]
    Layout {
        /// Key or tensor.
        field: String,
        /// What was found and what was expected.
        problem: String,
    },
}
