//! Writing a file in either format: beside its final name first, so that nothing incomplete ever bears that name.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::error::ImatrixError;
use crate::{Format, Imatrix, gguf_file, legacy};

/// The format to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The binary `.dat` form that ds4 reads.
    Legacy,
    /// llama.cpp's current form.
    Gguf,
}

impl Target {
    /// Every target with the name users type.
    pub const NAMES: [(&'static str, Self); 2] = [("legacy", Self::Legacy), ("gguf", Self::Gguf)];
}

/// What the written format cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Loss {
    /// Legacy: how many rows reached each expert, and with it the file's weight in a later merge.
    RowCounts,
    /// Legacy: several data set names become one.
    SeparateDatasets,
    /// Legacy: tokens in a chunk.
    ChunkSize,
    /// GGUF from legacy: row counts were never stored, so each is `calls x chunk size`.
    RowCountsInvented {
        /// Tokens in a chunk, as assumed.
        chunk_size: u64,
    },
    /// GGUF from legacy: entries whose number of experts is not known keep one count for all experts.
    CountPerExpert {
        /// How many entries.
        n_entries: usize,
    },
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RowCounts => f.write_str("the legacy format has no room for the row counts of each expert"),
            Self::SeparateDatasets => {
                f.write_str("the legacy format has one data set name; they were joined by `+`")
            }
            Self::ChunkSize => f.write_str("the legacy format does not store the chunk size"),
            Self::RowCountsInvented { chunk_size } => {
                write!(f, "the legacy file stores no row counts; wrote calls x {chunk_size} instead")
            }
            Self::CountPerExpert { n_entries } => write!(
                f,
                "the width of {n_entries} entries is not known; each keeps one count for all its experts (pass the model to split them)"
            ),
        }
    }
}

impl Imatrix {
    /// What writing in `target`'s format would lose or make up.
    pub fn losses(&self, target: Target) -> Vec<Loss> {
        let contents = &self.contents;
        let mut losses = Vec::new();
        match (contents.format, target) {
            (Format::Gguf, Target::Gguf) => {}
            (Format::Gguf, Target::Legacy) => losses.extend([Loss::RowCounts, Loss::ChunkSize]),
            (Format::Legacy(_), Target::Legacy) => {
                if contents.entries.iter().any(|e| e.counts.len() > 1) {
                    losses.push(Loss::RowCounts);
                }
            }
            (Format::Legacy(_), Target::Gguf) => {
                losses.push(Loss::RowCountsInvented { chunk_size: gguf_file::chunk_size(contents) });
                let n_entries = contents.entries.iter().filter(|e| e.n_columns.is_none()).count();
                if n_entries > 0 {
                    losses.push(Loss::CountPerExpert { n_entries });
                }
            }
        }
        if target == Target::Legacy && contents.datasets.len() > 1 {
            losses.push(Loss::SeparateDatasets);
        }
        losses
    }

    /// Writes the file: a temporary file beside it, flushed to the disk, then renamed. Returns what was lost.
    ///
    /// A file written in the format it was read from has the same statistics bit for bit, and a legacy file the same
    /// bytes.
    ///
    /// # Errors
    /// If it holds values that cannot be used, exists and `overwrite` is not set, a number does not fit the format,
    /// or the system refuses. Whatever was under the name before is then still there.
    pub fn write(
        &self,
        path: impl AsRef<Path>,
        target: Target,
        overwrite: bool,
    ) -> Result<Vec<Loss>, ImatrixError> {
        let path = path.as_ref();
        self.refuse_unusable()?;
        if !overwrite && path.exists() {
            return Err(ImatrixError::Exists { path: path.to_owned() });
        }
        write_atomically(path, overwrite, |out| match target {
            Target::Legacy => legacy::write(&self.contents, path, out),
            Target::Gguf => gguf_file::write(&self.contents, path, out),
        })?;
        Ok(self.losses(target))
    }

    pub(crate) fn refuse_unusable(&self) -> Result<(), ImatrixError> {
        if self.problems.is_empty() {
            return Ok(());
        }
        Err(ImatrixError::UnusableValues { file_name: self.file_name(), problems: self.problems.clone() })
    }
}

pub(crate) fn write_atomically(
    path: &Path,
    overwrite: bool,
    contents: impl FnOnce(&mut dyn Write) -> Result<(), ImatrixError>,
) -> Result<(), ImatrixError> {
    let failed = |source| ImatrixError::Write { path: path.to_owned(), source };
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = temporary_file(folder).map_err(failed)?;
    let mut out = BufWriter::with_capacity(1 << 20, temporary);
    contents(&mut out)?;
    let temporary = out.into_inner().map_err(|e| failed(e.into_error()))?;
    temporary.as_file().sync_all().map_err(failed)?;
    let renamed = if overwrite { temporary.persist(path) } else { temporary.persist_noclobber(path) };
    match renamed {
        Ok(_) => {}
        Err(e) if e.error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(ImatrixError::Exists { path: path.to_owned() });
        }
        Err(e) => return Err(failed(e.error)),
    }
    // The rename itself must survive a power cut.
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
}

/// With the permissions of any new file, not the private ones of a temporary one.
fn temporary_file(folder: &Path) -> io::Result<tempfile::NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new()
        .prefix(".imatrix-")
        .suffix(".part")
        .permissions(std::fs::Permissions::from_mode(0o666))
        .tempfile_in(folder)
}
