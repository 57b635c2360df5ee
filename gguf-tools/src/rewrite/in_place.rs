//! A new header over the old one, where it fits exactly, safe against being killed in the middle.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::write::{folder_of, with_suffix};
use super::{NewFile, RewriteError};
use crate::gguf::Gguf;

/// What the record beside a file says while its header is being replaced; the new header follows it.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Size of the file, which does not change.
    file_bytes: u64,
    /// Size of the header, which does not change.
    header_bytes: u64,
}

const RECORD_SUFFIX: &str = ".relabel";

/// Replaces the header of the file that `new` was made from. `Ok(false)`: it does not fit, and nothing was done.
///
/// The new header is on disk beside the file before the first byte is replaced, and
/// [`finish_interrupted_relabel`] finishes what was begun.
///
/// # Errors
/// [`RewriteError::Output`] with the system's own words.
pub fn relabel_in_place(gguf: &Gguf, new: &NewFile<'_>) -> Result<bool, RewriteError> {
    let [shard] = gguf.shards() else { return Ok(false) };
    let header = new.layout.header_bytes();
    let data_stays = new.layout.tensors().iter().zip(gguf.tensors()).all(|(placed, tensor)| {
        placed.offset_bytes == shard.data_offset_bytes + tensor.offset_bytes
    });
    if header.len() as u64 != shard.data_offset_bytes || !data_stays {
        return Ok(false);
    }
    let record = Record { file_bytes: shard.file_bytes, header_bytes: header.len() as u64 };
    replace(&shard.path, &record, &header).map_err(|e| output(&shard.path, &e))?;
    Ok(true)
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
