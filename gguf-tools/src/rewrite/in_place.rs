//! A new header over the old one, where it fits exactly, safe against being killed in the middle.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::write::{folder_of, with_suffix};
use super::{NewFile, RewriteError};
use crate::gguf::{Gguf, PlacedTensor, TensorInfo};

/// What the record beside a file says while its header is being replaced; the new header follows it.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Size of the file, which does not change.
    file_bytes: u64,
    /// Size of the header, which does not change.
    header_bytes: u64,
}

const RECORD_SUFFIX: &str = ".relabel";

/// A header that fits in the place of a file's own. Holds no map of the file, which is about to change.
#[derive(Debug)]
pub struct InPlace {
    path: PathBuf,
    record: Record,
    header: Vec<u8>,
}

impl InPlace {
    /// The new header, if it fits over that of the file that `new` was made from without moving data.
    pub fn fitting(gguf: &Gguf, new: &NewFile<'_>) -> Option<Self> {
        let [shard] = gguf.shards() else { return None };
        let header = new.layout.header_bytes();
        let stays = |(placed, tensor): (&PlacedTensor, &TensorInfo)| {
            placed.offset_bytes == shard.data_offset_bytes + tensor.offset_bytes
        };
        let data_stays = new.layout.tensors().iter().zip(gguf.tensors()).all(stays);
        let record = Record { file_bytes: shard.file_bytes, header_bytes: header.len() as u64 };
        let fits = record.header_bytes == shard.data_offset_bytes && data_stays;
        fits.then(|| Self { path: shard.path.clone(), record, header })
    }

    /// Replaces the header. The file must not be mapped any more.
    ///
    /// The new header is on disk beside the file before the first byte is replaced, and
    /// [`finish_interrupted_relabel`] finishes what was begun.
    ///
    /// # Errors
    /// [`RewriteError::Output`] with the system's own words.
    pub fn write(&self) -> Result<(), RewriteError> {
        replace(&self.path, &self.record, &self.header).map_err(|e| output(&self.path, &e))
    }
}

/// Finishes the replacement of a header that was cut off; `Ok(false)`: there is none.
///
/// # Errors
/// [`RewriteError::Output`] if the record does not fit the file, with what to do.
pub fn finish_interrupted_relabel(path: &Path) -> Result<bool, RewriteError> {
    let Ok(bytes) = std::fs::read(with_suffix(path, RECORD_SUFFIX)) else { return Ok(false) };
    let parsed = bytes.iter().position(|&b| b == b'\n').and_then(|end| {
        let record: Record = serde_json::from_slice(&bytes[..end]).ok()?;
        Some((record, &bytes[end + 1..]))
    });
    let present = std::fs::metadata(path).map_err(|e| output(path, &e))?.len();
    let fits = |record: &Record, header: &[u8]| {
        record.file_bytes == present && record.header_bytes == header.len() as u64
    };
    let Some((_, header)) = parsed.filter(|(record, header)| fits(record, header)) else {
        let name = with_suffix(path, RECORD_SUFFIX);
        return Err(RewriteError::Output {
            path: path.to_owned(),
            problem: format!(
                "`{}` says that a new header was being written, but does not fit this file; if the file is another one by now, remove that record",
                name.display()
            ),
        });
    };
    overwrite(path, header).map_err(|e| output(path, &e))?;
    Ok(true)
}

fn output(path: &Path, error: &io::Error) -> RewriteError {
    RewriteError::Output { path: path.to_owned(), problem: error.to_string() }
}

fn replace(path: &Path, record: &Record, header: &[u8]) -> io::Result<()> {
    let (name, new) = record_names(path);
    let mut file = File::create(&new)?;
    serde_json::to_writer(&mut file, record)?;
    file.write_all(b"\n")?;
    file.write_all(header)?;
    file.sync_all()?;
    std::fs::rename(&new, &name)?;
    File::open(folder_of(path))?.sync_all()?;
    overwrite(path, header)
}

fn record_names(path: &Path) -> (PathBuf, PathBuf) {
    let name = with_suffix(path, RECORD_SUFFIX);
    let new = with_suffix(&name, ".new");
    (name, new)
}

fn overwrite(path: &Path, header: &[u8]) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    file.write_all_at(header, 0)?;
    file.sync_all()?;
    std::fs::remove_file(with_suffix(path, RECORD_SUFFIX))
}
