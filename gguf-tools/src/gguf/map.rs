//! The one place that maps files.
#![expect(unsafe_code, reason = "a memory map is unsafe to make, since the file may change under it")]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// Maps a file read-only; an empty one has no map.
pub(super) fn map(path: &Path) -> io::Result<Option<Mmap>> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder, give a file"));
    }
    if metadata.len() == 0 {
        return Ok(None);
    }
    // SAFETY: the map is only read. Another process that shortens the file while it is mapped ends this one
    // with a signal, as with every mapped file; nothing here maps a file that this program writes.
    unsafe { Mmap::map(&file) }.map(Some)
}
