//! What identifies the model a direction is for.

use std::path::Path;

use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::gguf::Gguf;
use gguf_tools::model::HyperParameters;
use sha2::{Digest, Sha256};

use crate::error::SteeringError;

/// Sizes and origin of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelIdentity {
    /// Hidden width.
    pub width: usize,
    /// Layers, without draft layers.
    pub n_layers: usize,
    /// Checkpoint label, where the file states one.
    pub label: Option<String>,
    /// SHA-256 of a GGUF's header (metadata and tensor directory), or of a checkpoint's `config.json` and index:
    /// kilobytes that differ as soon as the file does in type, shape or origin.
    pub sha256: String,
}

impl ModelIdentity {
    /// Reads the headers of a GGUF file or a checkpoint folder.
    ///
    /// # Errors
    /// If it cannot be read or describes no supported model.
    pub fn open(path: &Path) -> Result<Self, SteeringError> {
        if path.is_dir() { Self::of_checkpoint(path) } else { Self::of_gguf(path) }
    }

    fn of_gguf(path: &Path) -> Result<Self, SteeringError> {
        let gguf = Gguf::open(path)?;
        let h = HyperParameters::from_metadata(gguf.metadata())
            .map_err(|source| SteeringError::Model { path: path.to_owned(), source: Box::new(source) })?;
        let label = ["ggsmith.checkpoint.label", "general.base_model.0.name"]
            .iter()
            .find_map(|key| gguf.metadata().get(key)?.as_str())
            .map(str::to_owned);
        let mut hash = Sha256::new();
        for (index, shard) in gguf.shards().iter().enumerate() {
            hash.update(&gguf.shard_bytes(index)[..shard.data_offset_bytes as usize]);
        }
        Ok(Self::new(&h, label, hash))
    }

    fn of_checkpoint(path: &Path) -> Result<Self, SteeringError> {
        let checkpoint = Checkpoint::open(path)?;
        let mut hash = Sha256::new();
        for name in ["config.json", "model.safetensors.index.json"] {
            let file = path.join(name);
            match std::fs::read(&file) {
                Ok(bytes) => hash.update(bytes),
                // A checkpoint of one file has no index.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(source) => return Err(SteeringError::Read { path: file, source }),
            }
        }
        Ok(Self::new(checkpoint.hyper_parameters(), Some(checkpoint.label().to_owned()), hash))
    }

    fn new(h: &HyperParameters, label: Option<String>, hash: Sha256) -> Self {
        Self {
            width: h.hidden_size as usize,
            n_layers: h.num_hidden_layers as usize,
            label,
            sha256: crate::direction::hex(&hash.finalize()),
        }
    }
}
