//! Why no new file was written.

use std::path::PathBuf;

use crate::gguf::GgufError;

/// Why files were not split, merged, spliced or relabelled. Nothing incomplete lies under a final name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RewriteError {
    /// A source cannot be read, or the result would break a rule of the container.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// What was asked for makes no sense for these files; all mistakes are listed.
    #[error("{}", problems.join("\n  "))]
    Request {
        /// One line a mistake.
        problems: Vec<String>,
    },
    /// The files do not belong together; everything that differs is listed.
    #[error("{what}\n  {}\n  {advice}", problems.join("\n  "))]
    Mismatch {
        /// What was tried.
        what: String,
        /// One line a difference.
        problems: Vec<String>,
        /// What to do.
        advice: &'static str,
    },
    /// The output or its folder cannot be used.
    #[error("cannot write `{}`: {problem}", path.display())]
    Output {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Too little room.
    #[error(
        "not enough room in `{}`\n  needs {needed_bytes} bytes more, {free_bytes} are free; nothing was written", folder.display()
    )]
    NoRoom {
        /// The folder of the output.
        folder: PathBuf,
        /// Bytes still to be written.
        needed_bytes: u64,
        /// Bytes free on that file system.
        free_bytes: u64,
    },
    /// Reading or writing failed in the middle.
    #[error(
        "cannot write `{}` at byte {offset_bytes} ({item}): {source}\n  what is done is kept as part file; make room or mend the cause and run the same command again to go on", path.display()
    )]
    Copy {
        /// The part file.
        path: PathBuf,
        /// Where it stopped.
        offset_bytes: u64,
        /// The tensor being copied, or the header.
        item: String,
        /// The system's own words.
        source: std::io::Error,
    },
    /// The caller asked to stop.
    #[error("stopped with {done_bytes} of {total_bytes} bytes written; run the same command again to go on")]
    Interrupted {
        /// Bytes that are done.
        done_bytes: u64,
        /// Bytes of all files.
        total_bytes: u64,
    },
}

impl RewriteError {
    /// A single mistake in what was asked for.
    pub(super) fn request(problem: impl Into<String>) -> Self {
        Self::Request { problems: vec![problem.into()] }
    }

    /// Whether the mistake is in how the command was called, rather than in the files.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Request { .. })
    }
}
