//! New GGUF files out of the tensors of others: split, merge, splice, relabel. No tensor is changed.
//!
//! Every command first says what each new file will be ([`NewFile`]: header, places, where each tensor comes from; exact
//! size, no data read) and then writes it ([`write_files`]: beside the final name, resumable, renamed when everything is
//! on disk).

mod copy;
mod error;
mod in_place;
mod layers;
mod merge;
mod part;
mod relabel;
mod splice;
mod split;
mod write;

use std::path::PathBuf;

pub use copy::{CopyMethod, clones_files};
pub use error::RewriteError;
pub use in_place::{InPlace, finish_interrupted_relabel};
pub use layers::{LayerPart, parse_layer_parts};
pub(crate) use layers::{Place, layer_count};
pub use merge::{merge, open_parts};
pub use relabel::{Edit, EditError, Edited, parse_value, relabel};
pub use splice::{SpliceOptions, SplicePlan, parse_layer_list, parse_pattern, splice};
pub(crate) use split::{MAX_SHARDS, shard_metadata};
pub use split::{SplitBy, layer_file_name, restores_exactly, shard_name, split};
pub use write::{WriteOptions, Written, write_files};

use crate::gguf::{Gguf, GgufError, Layout, Metadata, NewTensor, TensorInfo};

/// Key of a layer file that says where its tensors stood in the whole file, where layers alone do not.
pub const POSITIONS_KEY: &str = "ggsmith.part.positions";

/// Keys of llama.cpp's split sets.
pub const SPLIT_KEYS: [&str; 3] = ["split.no", "split.tensors.count", "split.count"];

/// Where the data of a tensor comes from.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// The file or set.
    pub gguf: &'a Gguf,
    /// Which of its tensors.
    pub tensor: &'a TensorInfo,
}

/// A file that is to be written.
#[derive(Debug, Clone)]
pub struct NewFile<'a> {
    /// Its final name.
    pub path: PathBuf,
    /// Its header and places.
    pub layout: Layout,
    /// Where the data of each tensor of the layout comes from.
    pub origins: Vec<Origin<'a>>,
}

impl<'a> NewFile<'a> {
    /// Places tensors in this order behind this metadata.
    ///
    /// # Errors
    /// [`GgufError::Layout`] for what no file may hold, [`GgufError::Truncated`] for data that is not there.
    pub fn new(
        path: PathBuf,
        metadata: Metadata,
        origins: Vec<Origin<'a>>,
        alignment: u32,
    ) -> Result<Self, GgufError> {
        for origin in &origins {
            origin.gguf.data(origin.tensor)?;
        }
        let tensors = origins.iter().map(|origin| NewTensor::from(origin.tensor)).collect();
        Ok(Self { path, layout: Layout::new(metadata, tensors, alignment)?, origins })
    }
}

impl From<&TensorInfo> for NewTensor {
    fn from(tensor: &TensorInfo) -> Self {
        Self { name: tensor.name.clone(), block_type: tensor.block_type, shape: tensor.shape.clone() }
    }
}
