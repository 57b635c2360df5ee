//! Splitting a file: by llama.cpp's convention, or by layers as ds4 does.

use std::path::{Path, PathBuf};

use super::layers::{Place, cover_problems, layer_count};
use super::{LayerPart, NewFile, Origin, POSITIONS_KEY, RewriteError, SPLIT_KEYS};
use crate::gguf::{
    Array, DEFAULT_ALIGNMENT, Gguf, Layout, Metadata, NewTensor, PART_PLAN_KEY, TensorInfo, Value,
};

/// How a file is divided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SplitBy {
    /// One file for each of these parts, ordinary files with all metadata.
    Layers(Vec<LayerPart>),
    /// llama.cpp's shards, none larger than so many bytes (header included).
    Bytes {
        /// Most bytes of a shard.
        most: u64,
        /// The first shard holds metadata only.
        no_tensor_first: bool,
    },
    /// llama.cpp's shards of so many tensors.
    Tensors {
        /// Most tensors of a shard.
        most: usize,
        /// The first shard holds metadata only.
        no_tensor_first: bool,
    },
}

/// Most shards of a set: their number is a u16 in the files and has five digits in the names.
pub(crate) const MAX_SHARDS: usize = u16::MAX as usize;

/// The files that a split of `gguf` makes, in order. `prefix`: what their names begin with.
///
/// # Errors
/// [`RewriteError::Request`] for a division that is impossible, saying where it fails.
pub fn split<'a>(gguf: &'a Gguf, by: &SplitBy, prefix: &Path) -> Result<Vec<NewFile<'a>>, RewriteError> {
    match by {
        SplitBy::Layers(parts) => by_layers(gguf, parts, prefix),
        SplitBy::Tensors { most: 0, .. } => Err(RewriteError::request("a shard takes at least one tensor")),
        SplitBy::Tensors { most, no_tensor_first } => {
            let groups = gguf.tensors().chunks(*most).map(|group| group.iter().collect()).collect();
            shards(gguf, groups, *no_tensor_first, prefix)
        }
        SplitBy::Bytes { most, no_tensor_first } => {
            let groups = groups_by_size(gguf, *most, *no_tensor_first)?;
            shards(gguf, groups, *no_tensor_first, prefix)
        }
    }
}

/// `PREFIX-00001-of-00003.gguf`, `index` from 0.
pub fn shard_name(prefix: &Path, index: usize, n_shards: usize) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(format!("-{:05}-of-{n_shards:05}.gguf", index + 1));
    PathBuf::from(name)
}

/// ds4's name of a layer file: `PREFIX-Layers00-30.gguf`, `PREFIX-Layers-31-output.gguf`.
pub fn layer_file_name(prefix: &Path, part: &LayerPart, n_layers: u32) -> PathBuf {
    let width = n_layers.saturating_sub(1).to_string().len().max(2);
    let mut name = prefix.as_os_str().to_owned();
    name.push(match (part.first, part.last) {
        (Some(first), Some(last)) => format!("-Layers{first:0width$}-{last:0width$}.gguf"),
        (Some(first), None) => format!("-Layers-{first:0width$}-output.gguf"),
        (None, _) => "-Layers-output.gguf".to_owned(),
    });
    PathBuf::from(name)
}

/// Metadata of the whole model: without the keys of a split set.
pub(super) fn whole_metadata(gguf: &Gguf) -> Metadata {
    let mut metadata = gguf.metadata().clone();
    for key in SPLIT_KEYS.into_iter().chain([POSITIONS_KEY, PART_PLAN_KEY]) {
        metadata.remove(key);
    }
    metadata
}

/// Metadata of one shard. llama.cpp's tool puts everything into the first, and its three keys in this order; a later
/// shard says its alignment too, where it is not the one that readers assume.
pub(crate) fn shard_metadata(
    whole: &Metadata,
    index: usize,
    n_shards: usize,
    n_tensors: usize,
    alignment: u32,
) -> Metadata {
    let mut metadata = if index == 0 { whole.clone() } else { Metadata::default() };
    if alignment != DEFAULT_ALIGNMENT {
        metadata.set("general.alignment", alignment);
    }
    metadata.set(SPLIT_KEYS[0], index as u16);
    metadata.set(SPLIT_KEYS[1], n_tensors as i32);
    metadata.set(SPLIT_KEYS[2], n_shards as u16);
    metadata
}

fn shards<'a>(
    gguf: &'a Gguf,
    mut groups: Vec<Vec<&'a TensorInfo>>,
    no_tensor_first: bool,
    prefix: &Path,
) -> Result<Vec<NewFile<'a>>, RewriteError> {
    if no_tensor_first || groups.is_empty() {
        groups.insert(0, Vec::new());
    }
    let (n_shards, n_tensors) = (groups.len(), gguf.tensors().len());
    if n_shards > MAX_SHARDS {
        return Err(RewriteError::request(format!(
            "this makes {n_shards} shards, the most that the format can number is {MAX_SHARDS}; choose larger ones"
        )));
    }
    let whole = whole_metadata(gguf);
    let shard = |(index, group): (usize, Vec<&'a TensorInfo>)| {
        let metadata = shard_metadata(&whole, index, n_shards, n_tensors, gguf.alignment());
        let origins = group.into_iter().map(|tensor| Origin { gguf, tensor }).collect();
        Ok(NewFile::new(shard_name(prefix, index, n_shards), metadata, origins, gguf.alignment())?)
    };
    groups.into_iter().enumerate().map(shard).collect()
}

/// Fills shard after shard, in the order of the file.
fn groups_by_size(
    gguf: &Gguf,
    most: u64,
    no_tensor_first: bool,
) -> Result<Vec<Vec<&TensorInfo>>, RewriteError> {
    let alignment = u64::from(gguf.alignment());
    let header_of = |index: usize| {
        let metadata = shard_metadata(&whole_metadata(gguf), index, MAX_SHARDS, 0, gguf.alignment());
        Ok::<_, RewriteError>(Layout::new(metadata, Vec::new(), gguf.alignment())?.data_offset_bytes())
    };
    // Padded to the alignment, so never less than the keys take.
    let (first_header, later_header) = (header_of(0)?, header_of(1)?);
    if no_tensor_first && first_header > most {
        return Err(too_small(most, "the metadata alone", first_header));
    }
    let mut groups: Vec<Vec<&TensorInfo>> = Vec::new();
    let (mut header, mut data) = (0, 0);
    for tensor in gguf.tensors() {
        let entry = directory_entry_bytes(tensor);
        let padded = tensor.n_bytes.next_multiple_of(alignment);
        let size = |header: u64, data: u64| (header + entry).next_multiple_of(alignment) + data + padded;
        match groups.last_mut() {
            Some(group) if size(header, data) <= most => group.push(tensor),
            _ => {
                let is_first = groups.is_empty() && !no_tensor_first;
                header = if is_first { first_header } else { later_header };
                data = 0;
                if size(header, data) > most {
                    return Err(too_small(most, &format!("tensor `{}`", tensor.name), size(header, data)));
                }
                groups.push(vec![tensor]);
            }
        }
        header += entry;
        data += padded;
    }
    Ok(groups)
}

fn too_small(most: u64, what: &str, needs: u64) -> RewriteError {
    RewriteError::request(format!(
        "a shard of at most {most} bytes is too small: {what} takes a file of {needs} bytes; choose larger shards"
    ))
}

/// Bytes of a tensor in the directory: length and name, rank, dimensions, type, offset.
fn directory_entry_bytes(tensor: &TensorInfo) -> u64 {
    (8 + tensor.name.len() + 4 + 8 * tensor.shape.len() + 4 + 8) as u64
}

fn by_layers<'a>(
    gguf: &'a Gguf,
    parts: &[LayerPart],
    prefix: &Path,
) -> Result<Vec<NewFile<'a>>, RewriteError> {
    let n_layers = layer_count(gguf.metadata())?;
    let problems = cover_problems(parts, n_layers);
    if !problems.is_empty() {
        return Err(RewriteError::Request { problems });
    }
    let mut placed = Vec::with_capacity(gguf.tensors().len());
    let mut unknown = Vec::new();
    for (position, tensor) in gguf.tensors().iter().enumerate() {
        match Place::of(&tensor.name, n_layers) {
            Some(place) => placed.push((place, position, tensor)),
            None => unknown.push(format!(
                "tensor `{}` belongs to no layer, embedding or output head; split by size or count instead",
                tensor.name
            )),
        }
    }
    if !unknown.is_empty() {
        return Err(RewriteError::Request { problems: unknown });
    }
    let mut in_order: Vec<&LayerPart> = parts.iter().collect();
    in_order.sort_by_key(|part| part.first.unwrap_or(u32::MAX));
    let of_part = |part: &LayerPart| -> Vec<(usize, &TensorInfo)> {
        placed.iter().filter(|p| part.holds(p.0)).map(|&(_, position, tensor)| (position, tensor)).collect()
    };
    let merged: Vec<usize> = in_order.iter().flat_map(|part| of_part(part)).map(|(at, _)| at).collect();
    let positions_needed = !merged.is_sorted();
    let whole = whole_metadata(gguf);
    let file = |part: &LayerPart| {
        let tensors = of_part(part);
        let mut metadata = whole.clone();
        if positions_needed {
            let positions = tensors.iter().map(|&(position, _)| position as u32).collect();
            metadata.set(POSITIONS_KEY, Value::Array(Array::U32(positions)));
        }
        let origins = tensors.into_iter().map(|(_, tensor)| Origin { gguf, tensor }).collect();
        Ok(NewFile::new(layer_file_name(prefix, part, n_layers), metadata, origins, gguf.alignment())?)
    };
    parts.iter().map(file).collect()
}

/// What keeps a merge of the parts from giving back the very bytes of this file; `None` if nothing does.
///
/// Files that follow the rules of llama.cpp's reader come back exactly: sequential places, zero padding, version 3.
pub fn restores_exactly(gguf: &Gguf) -> Option<String> {
    let [shard] = gguf.shards() else { return None };
    if shard.version != 3 {
        return Some(format!("it is of container version {}, written is version 3", shard.version));
    }
    if let Some(key) = SPLIT_KEYS.iter().find(|key| gguf.metadata().get(key).is_some()) {
        return Some(format!("its key `{key}` belongs to split sets and is not in a merged file"));
    }
    let tensors = gguf.tensors().iter().map(NewTensor::from).collect();
    let Ok(layout) = Layout::new(whole_metadata(gguf), tensors, gguf.alignment()) else {
        return Some("its header cannot be written again".to_owned());
    };
    let bytes = gguf.shard_bytes(0);
    if !bytes.starts_with(&layout.header_bytes()) {
        return Some("its tensors do not lie in the order of their directory without gaps".to_owned());
    }
    if bytes.len() as u64 != layout.file_bytes() {
        let (found, expected) = (bytes.len(), layout.file_bytes());
        return Some(format!("it has {found} bytes, its header accounts for {expected}"));
    }
    let mut end = layout.data_offset_bytes() as usize;
    for tensor in layout.tensors() {
        if bytes[end..tensor.offset_bytes as usize].iter().any(|&b| b != 0) {
            return Some(format!("the padding before tensor `{}` is not zero", tensor.name));
        }
        end = (tensor.offset_bytes + tensor.n_bytes) as usize;
    }
    bytes[end..].iter().any(|&b| b != 0).then(|| "the padding at its end is not zero".to_owned())
}
