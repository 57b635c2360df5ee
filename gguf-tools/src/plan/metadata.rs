//! What a file says about itself beyond the model: name, type, origin.

use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::Recipe;
use crate::block::BlockType;
use crate::gguf::{Array, Metadata, Value};
use crate::importance;
use crate::model::Family;

/// Where a file comes from: enough to make it again and to refuse a wrong pairing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provenance {
    /// Checkpoint label.
    pub label: String,
    /// Source revision, where known.
    pub revision: Option<String>,
    /// Source files by name, with the SHA-256 of each.
    pub files: Vec<(String, String)>,
    /// The importance file, where one is used.
    pub importance: Option<importance::Provenance>,
}

impl Provenance {
    /// Adds name, type numbers and origin to the metadata of a model.
    pub fn add_to(&self, metadata: &mut Metadata, recipe: &Recipe) {
        metadata.set("general.type", Value::String("model".to_owned()));
        metadata.set("general.name", Value::String(self.label.clone()));
        metadata.set("general.file_type", Value::U32(file_type(recipe)));
        metadata.set("general.quantization_version", Value::U32(2));
        metadata.set("ggsmith.version", Value::String(env!("CARGO_PKG_VERSION").to_owned()));
        metadata.set("ggsmith.recipe", Value::String(recipe.to_toml()));
        metadata.set("ggsmith.checkpoint.label", Value::String(self.label.clone()));
        if let Some(revision) = &self.revision {
            metadata.set("ggsmith.checkpoint.revision", Value::String(revision.clone()));
        }
        let (names, sums) = self.files.iter().cloned().unzip();
        metadata.set("ggsmith.source.files", Value::Array(Array::String(names)));
        metadata.set("ggsmith.source.sha256", Value::Array(Array::String(sums)));
        if let Some(importance) = &self.importance {
            metadata.set("quantize.imatrix.file", Value::String(importance.file_name.clone()));
            metadata.set("quantize.imatrix.dataset", Value::String(importance.datasets.join(", ")));
            metadata.set("quantize.imatrix.entries_count", Value::U32(importance.n_entries as u32));
            if let Some(chunks) = importance.n_chunks {
                metadata.set("quantize.imatrix.chunks_count", Value::U32(chunks as u32));
            }
            metadata.set("ggsmith.imatrix.sha256", Value::String(importance.sha256.clone()));
        }
    }
}

/// llama.cpp's number for "mostly this type": the type of the routed gates, which hold most weights.
fn file_type(recipe: &Recipe) -> u32 {
    let gate = recipe.types.get(Family::RoutedGate.name()).and_then(|t| t.parse::<BlockType>().ok());
    match gate {
        Some(BlockType::F32) => 0,
        Some(BlockType::Q8_0) => 7,
        Some(BlockType::Q2K) => 10,
        Some(BlockType::Q3K) => 12,
        Some(BlockType::Q4K) => 15,
        Some(BlockType::Q5K) => 17,
        Some(BlockType::Q6K) => 18,
        Some(BlockType::Iq2Xxs) => 19,
        Some(BlockType::Bf16) => 32,
        Some(BlockType::Mxfp4) => 38,
        _ => 1,
    }
}

/// SHA-256 of a file, lower-case hexadecimal.
///
/// # Errors
/// If the file cannot be read; the error names it.
pub fn sha256_of_file(path: &Path) -> Result<String, (PathBuf, std::io::Error)> {
    let with_path = |e| (path.to_owned(), e);
    let mut file = File::open(path).map_err(with_path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer).map_err(with_path)?;
        if n == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..n]);
    }
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
