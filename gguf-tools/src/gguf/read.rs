//! Opening files: headers only, data on demand.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::split::{SplitPlace, shard_paths};
use super::{GgufError, Header, Metadata, parse_header};
use crate::block::BlockType;

/// A GGUF file, or all shards of a split one.
#[derive(Debug)]
pub struct Gguf {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    shards: Vec<ShardInfo>,
    maps: Vec<Option<Mmap>>,
    alignment: u32,
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// Type.
    pub block_type: BlockType,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// Which shard holds the data.
    pub shard_index: usize,
    /// Where the data begins, from the start of that shard's data section.
    pub offset_bytes: u64,
    /// Size of the data.
    pub n_bytes: u64,
}

/// One file of a set; a file that is whole is a set of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardInfo {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub file_bytes: u64,
    /// Where its data section begins.
    pub data_offset_bytes: u64,
    /// Its tensors, as positions in [`Gguf::tensors`].
    pub tensors: Range<usize>,
    /// Version of its container.
    pub version: u32,
}

impl Gguf {
    /// Opens a file by its header. Any shard of a split set opens the set.
    ///
    /// A file whose data is cut off opens too, so that headers can be looked at; see [`Gguf::missing_data`].
    ///
    /// # Errors
    /// [`GgufError`] naming file and field; for a set, also shards that are absent or do not belong together.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let (map, header) = open_shard(path)?;
        let split = |problems: Vec<String>| GgufError::Split { path: path.to_owned(), problems };
        let place = SplitPlace::of(&header.metadata).map_err(|problem| split(vec![problem]))?;
        let Some(place) = place else {
            return Self::assemble(vec![(path.to_owned(), map, header)], path, None);
        };
        let paths = shard_paths(path, place).map_err(|problem| split(vec![problem]))?;
        let absent: Vec<_> = paths.iter().filter(|p| !p.exists()).map(|p| p.display().to_string()).collect();
        if !absent.is_empty() {
            return Err(split(vec![
                format!(
                    "this is shard {} of {}; {} more must lie beside it",
                    place.shard_index + 1,
                    place.n_shards,
                    place.n_shards - 1
                ),
                format!("not found: {}", absent.join(", ")),
            ]));
        }
        let mut given = Some((map, header));
        let mut files = Vec::with_capacity(paths.len());
        for (index, shard_path) in paths.into_iter().enumerate() {
            let taken = if index == place.shard_index { given.take() } else { None };
            let (map, header) = taken.map_or_else(|| open_shard(&shard_path), Ok)?;
            files.push((shard_path, map, header));
        }
        Self::assemble(files, path, Some(place))
    }

    fn assemble(
        files: Vec<(PathBuf, Option<Mmap>, Header)>,
        given: &Path,
        place: Option<SplitPlace>,
    ) -> Result<Self, GgufError> {
        let mut problems = Vec::new();
        let mut gguf = Self {
            metadata: Metadata::default(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
            shards: Vec::new(),
            maps: Vec::new(),
            alignment: files.first().map_or(0, |(_, _, header)| header.alignment),
        };
        for (shard_index, (path, map, header)) in files.into_iter().enumerate() {
            if let Some(place) = place {
                check_place(&header.metadata, place, shard_index, &path, &mut problems);
            }
            let first = gguf.tensors.len();
            for tensor in header.tensors {
                if gguf.by_name.insert(tensor.name.clone(), gguf.tensors.len()).is_some() {
                    problems.push(format!("tensor `{}` is in two shards", tensor.name));
                }
                gguf.tensors.push(TensorInfo {
                    name: tensor.name,
                    block_type: tensor.block_type,
                    shape: tensor.shape,
                    shard_index,
                    offset_bytes: tensor.offset_bytes,
                    n_bytes: tensor.n_bytes,
                });
            }
            gguf.shards.push(ShardInfo {
                path,
                file_bytes: map.as_ref().map_or(0, |m| m.len() as u64),
                data_offset_bytes: header.data_offset_bytes,
                tensors: first..gguf.tensors.len(),
                version: header.version,
            });
            gguf.maps.push(map);
            if shard_index == 0 {
                gguf.metadata = header.metadata;
            }
        }
        if let Some(place) = place.filter(|place| place.n_tensors != gguf.tensors.len() as u64) {
            let found = gguf.tensors.len();
            problems.push(format!(
                "the shards hold {found} tensors, `split.tensors.count` says {}",
                place.n_tensors
            ));
        }
        if problems.is_empty() {
            Ok(gguf)
        } else {
            Err(GgufError::Split { path: given.to_owned(), problems })
        }
    }

    /// Metadata; that of the first shard for a split set.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors in directory order, shard after shard.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&at| &self.tensors[at])
    }

    /// The files.
    pub fn shards(&self) -> &[ShardInfo] {
        &self.shards
    }

    /// Alignment of tensor data (of the first shard).
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// The bytes of a tensor.
    ///
    /// # Errors
    /// [`GgufError::Truncated`] if they are not all there.
    ///
    /// # Panics
    /// If the tensor belongs to another file.
    pub fn data(&self, tensor: &TensorInfo) -> Result<&[u8], GgufError> {
        let shard = &self.shards[tensor.shard_index];
        let start = shard.data_offset_bytes.saturating_add(tensor.offset_bytes);
        let end = start.saturating_add(tensor.n_bytes);
        let bytes = self.maps[tensor.shard_index].as_deref().unwrap_or_default();
        bytes.get(start as usize..end as usize).ok_or_else(|| GgufError::Truncated {
            path: shard.path.clone(),
            tensor: tensor.name.clone(),
            start_bytes: start,
            end_bytes: end,
            file_bytes: shard.file_bytes,
        })
    }

    /// All bytes of one shard.
    pub fn shard_bytes(&self, shard_index: usize) -> &[u8] {
        self.maps[shard_index].as_deref().unwrap_or_default()
    }

    /// The tensors whose data is not all in the file.
    pub fn missing_data(&self) -> Vec<&TensorInfo> {
        self.tensors.iter().filter(|t| self.data(t).is_err()).collect()
    }

    /// Whether offsets are the running sum of padded sizes in directory order, as llama.cpp demands.
    pub fn sequential_offsets(&self) -> bool {
        self.shards.iter().all(|shard| {
            let mut expected = 0;
            self.tensors[shard.tensors.clone()].iter().all(|tensor| {
                let here = tensor.offset_bytes == expected;
                expected += tensor.n_bytes.next_multiple_of(u64::from(self.alignment));
                here
            })
        })
    }

    /// Place in its split set, from the first shard's metadata; `None` for a whole file.
    pub fn split_place(&self) -> Option<SplitPlace> {
        SplitPlace::of(&self.metadata).ok().flatten()
    }
}

fn open_shard(path: &Path) -> Result<(Option<Mmap>, Header), GgufError> {
    let map = super::map::map(path).map_err(|source| GgufError::Open { path: path.to_owned(), source })?;
    let header = parse_header(map.as_deref().unwrap_or_default(), path)?;
    Ok((map, header))
}

fn check_place(
    metadata: &Metadata,
    place: SplitPlace,
    shard_index: usize,
    path: &Path,
    problems: &mut Vec<String>,
) {
    let expected = SplitPlace { shard_index, ..place };
    match SplitPlace::of(metadata) {
        Ok(Some(found)) if found == expected => {}
        Ok(Some(found)) => problems.push(format!(
            "`{}` says it is shard {} of {} with {} tensors in all, expected shard {} of {} with {}",
            path.display(),
            found.shard_index + 1,
            found.n_shards,
            found.n_tensors,
            shard_index + 1,
            place.n_shards,
            place.n_tensors
        )),
        Ok(None) => {
            problems.push(format!("`{}` does not say that it is part of a split set", path.display()))
        }
        Err(problem) => problems.push(format!("`{}`: {problem}", path.display())),
    }
}
