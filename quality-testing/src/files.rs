//! Whole files or none.

use std::fs::File;
use std::io::{Result, Write};
use std::path::Path;

/// Writes beside the final name, forces the bytes to the disk, renames, and forces the rename.
///
/// # Errors
/// The system's own.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    // A temporary file is for its owner only; a result is for everybody whom the folder lets in.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    }
    file.persist(path).map_err(|e| e.error)?;
    File::open(folder)?.sync_all()
}
