//! Whether the files will fit, before the first byte is asked for.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::DownloadError;
use crate::part::{PART_SUFFIX, beside};

/// Unit of `st_blocks`, whatever the file system's own is.
const STAT_BLOCK_BYTES: u64 = 512;

/// Compares what is still to be written with the free space of each file system concerned.
pub(crate) fn check<'a>(files: impl Iterator<Item = (&'a Path, Option<u64>)>) -> Result<(), DownloadError> {
    let mut needs: BTreeMap<u64, (PathBuf, u64)> = BTreeMap::new();
    for (target, n_bytes) in files {
        let folder = existing_folder(target);
        let device = folder.metadata().map_err(DownloadError::io("look at", &folder))?.dev();
        let reserved = beside(target, PART_SUFFIX)
            .metadata()
            .map_or(0, |part| part.blocks().saturating_mul(STAT_BLOCK_BYTES));
        let needed = n_bytes.unwrap_or(0).saturating_sub(reserved);
        let (_, sum) = needs.entry(device).or_insert((folder, 0));
        *sum = sum.saturating_add(needed);
    }
    for (folder, needed_bytes) in needs.into_values() {
        let free_bytes = free(&folder).map_err(DownloadError::io("ask for the free space of", &folder))?;
        if needed_bytes > free_bytes {
            return Err(DownloadError::NoSpace { folder, needed_bytes, free_bytes });
        }
    }
    Ok(())
}

fn free(folder: &Path) -> std::io::Result<u64> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// The nearest folder above a path that exists.
fn existing_folder(path: &Path) -> PathBuf {
    let above = path.ancestors().skip(1).map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p });
    above.clone().find(|folder| folder.is_dir()).unwrap_or(Path::new("/")).to_owned()
}
