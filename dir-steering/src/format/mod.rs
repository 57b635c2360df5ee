//! Files that hold directions. The content decides which format a file has, not its name.

mod gguf;
mod raw;
mod safetensors;

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::direction::Direction;
use crate::error::SteeringError;

/// A file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Ours: states operation, place, layers, width, checkpoint and hash.
    Safetensors,
    /// ds4's: `[layers, width]` little-endian `f32` without a header, and a JSON description beside it.
    Raw,
    /// GGUF layer projection: llama.cpp's tensors `direction.N` with `glp.*` keys that say that they are projected.
    Glp,
    /// llama.cpp's control vector: the same tensors, added behind a layer.
    ControlVector,
}

impl Format {
    /// Every format with the name that users type.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("safetensors", Self::Safetensors),
        ("f32", Self::Raw),
        ("glp", Self::Glp),
        ("control-vector", Self::ControlVector),
    ];

    /// The name that users type.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

/// No direction file is larger: 128 layers of 65,536 values are 32 MiB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Reads a direction file of any known format and checks its values.
///
/// # Errors
/// If it cannot be read, is of no known format, contradicts itself, or holds values that cannot be used.
pub fn open(path: &Path) -> Result<(Direction, Format), SteeringError> {
    let (direction, format) = read(path)?;
    direction.check_values()?;
    Ok((direction, format))
}

/// [`open`] without the check of the values: to normalize a file that fails it.
///
/// # Errors
/// As [`open`], less the values.
pub fn read(path: &Path) -> Result<(Direction, Format), SteeringError> {
    let failed = |source| SteeringError::Read { path: path.to_owned(), source };
    let n_bytes = std::fs::metadata(path).map_err(failed)?.len();
    if n_bytes > MAX_FILE_BYTES {
        return Err(field(
            path,
            "file size",
            format!("{n_bytes} bytes"),
            format!("at most {MAX_FILE_BYTES}"),
        ));
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let (direction, format) = if bytes.starts_with(b"GGUF") {
        gguf::read(path)?
    } else if safetensors::recognises(&bytes) {
        (safetensors::read(path, &bytes)?, Format::Safetensors)
    } else if extension == "f32" {
        (raw::read(path, &bytes)?, Format::Raw)
    } else {
        let found = bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ");
        let found = if found.is_empty() { "nothing (the file is empty)".to_owned() } else { found };
        return Err(SteeringError::UnknownFormat { path: path.to_owned(), found });
    };
    Ok((direction.at(path), format))
}

/// Writes a direction, whole or not at all. `label`s and the like are kept where the format has a place for them.
///
/// # Errors
/// If the values are unusable, the format cannot hold the direction, or the file cannot be written.
pub fn write(direction: &Direction, format: Format, path: &Path) -> Result<(), SteeringError> {
    direction.check_values()?;
    match format {
        Format::Safetensors => put(path, &safetensors::bytes(direction)?),
        Format::Raw => {
            let (values, description) = raw::bytes(direction)?;
            // The description first: values without one are refused.
            put(&raw::description_path(path), description.as_bytes())?;
            put(path, &values)
        }
        Format::Glp | Format::ControlVector => put(path, &gguf::bytes(direction, format)?),
    }
}

/// Writes beside the final name, then renames.
fn put(path: &Path, bytes: &[u8]) -> Result<(), SteeringError> {
    let failed = |source| SteeringError::Write { path: path.to_owned(), source };
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    File::sync_all(file.as_file()).map_err(failed)?;
    file.persist(path).map_err(|e| failed(e.error))?;
    Ok(())
}

/// An error about one field.
fn field(
    path: &Path,
    field: impl Into<String>,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> SteeringError {
    SteeringError::Field {
        path: path.to_owned(),
        field: field.into(),
        found: found.into(),
        expected: expected.into(),
    }
}

#[cfg(test)]
mod tests;
