//! Opening files: headers only, data on demand.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::header::parse_collecting;
use super::split::{SplitPlace, shard_paths};
use super::{GgufError, Header, Metadata, PART_PLAN_KEY, RegionProblem};
use crate::block::BlockType;

/// A GGUF file, or all shards of a split one.
#[derive(Debug)]
pub struct Gguf {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    pub(super) shards: Vec<ShardInfo>,
    pub(super) maps: Vec<Option<Mmap>>,
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
    /// Alignment of its tensor data.
    pub alignment: u32,
}

/// One opened file of a set.
struct Shard {
    path: PathBuf,
    map: Option<Mmap>,
    header: Header,
    region_problems: Vec<RegionProblem>,
}

const FETCH_ALL: &str =
    "put every shard of one set into one folder, under the names that they were published with";
const SHARDS_DIFFER: &str = "the shards are of different sets or damaged; fetch the set again";
/// Most absent shards that a message names.
const MAX_NAMED: usize = 8;

impl Gguf {
    /// Opens a file by its header. Any shard of a split set opens the set.
    ///
    /// A file whose data is cut off opens too, so that headers can be looked at; see [`Gguf::missing_data`].
    ///
    /// # Errors
    /// [`GgufError`] naming file and field; for a set, also shards that are absent or do not belong together.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let mut shards = open_set(path.as_ref())?;
        match shards.iter_mut().find(|shard| !shard.region_problems.is_empty()) {
            Some(shard) => Err(GgufError::Regions {
                path: shard.path.clone(),
                problems: std::mem::take(&mut shard.region_problems),
            }),
            None => Self::assemble(shards, path.as_ref()),
        }
    }

    /// Like [`Gguf::open`], but hands back tensors with wrong places, for reports that are to name everything.
    /// Their data must not be used.
    ///
    /// # Errors
    /// As [`Gguf::open`].
    pub fn open_collecting(path: impl AsRef<Path>) -> Result<(Self, Vec<RegionProblem>), GgufError> {
        let mut shards = open_set(path.as_ref())?;
        let problems =
            shards.iter_mut().flat_map(|shard| std::mem::take(&mut shard.region_problems)).collect();
        Ok((Self::assemble(shards, path.as_ref())?, problems))
    }

    fn assemble(shards: Vec<Shard>, given: &Path) -> Result<Self, GgufError> {
        let place = place_of(&shards[0].header.metadata, given)?;
        let mut problems = Vec::new();
        let plan_of = |shard: &Shard| shard.header.metadata.get(PART_PLAN_KEY).cloned();
        let plan = plan_of(&shards[0]);
        for shard in shards.iter().filter(|shard| plan_of(shard) != plan) {
            let (one, other) = (shards[0].path.display(), shard.path.display());
            problems.push(format!(
                "`{one}` and `{other}` were built from different plans (key `{PART_PLAN_KEY}`)"
            ));
        }
        let mut gguf = Self {
            metadata: Metadata::default(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
            shards: Vec::new(),
            maps: Vec::new(),
            alignment: shards[0].header.alignment,
        };
        for Shard { path, map, header, .. } in shards {
            let shard_index = gguf.shards.len();
            if let Some(place) = place {
                check_place(&header.metadata, place, shard_index, &path, &mut problems);
            }
            let first = gguf.tensors.len();
            for tensor in header.tensors {
                if let Some(at) = gguf.by_name.insert(tensor.name.clone(), gguf.tensors.len()) {
                    let other = gguf.shards.get(gguf.tensors[at].shard_index).map_or(&path, |s| &s.path);
                    problems.push(format!(
                        "tensor `{}` is in `{}` and in `{}`",
                        tensor.name,
                        other.display(),
                        path.display()
                    ));
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
                alignment: header.alignment,
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
            Err(GgufError::Split { path: given.to_owned(), problems, advice: SHARDS_DIFFER })
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

    /// The file that a tensor's data is in, and where it begins there, in bytes.
    pub fn location(&self, tensor: &TensorInfo) -> (&Path, u64) {
        let shard = &self.shards[tensor.shard_index];
        (&shard.path, shard.data_offset_bytes.saturating_add(tensor.offset_bytes))
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
            let mut expected = Some(0_u64);
            self.tensors[shard.tensors.clone()].iter().all(|tensor| {
                let here = expected == Some(tensor.offset_bytes);
                expected = tensor
                    .offset_bytes
                    .checked_add(tensor.n_bytes)
                    .and_then(|end| end.checked_next_multiple_of(u64::from(shard.alignment)));
                here
            })
        })
    }

    /// Place in its split set, from the first shard's metadata; `None` for a whole file.
    pub fn split_place(&self) -> Option<SplitPlace> {
        SplitPlace::of(&self.metadata).ok().flatten()
    }
}

/// Opens the file and, if it is a shard, its siblings; in the order of the set.
fn open_set(path: &Path) -> Result<Vec<Shard>, GgufError> {
    let shard = open_shard(path)?;
    let Some(place) = place_of(&shard.header.metadata, path)? else { return Ok(vec![shard]) };
    let split = |problem: String| GgufError::Split {
        path: path.to_owned(),
        problems: vec![problem],
        advice: FETCH_ALL,
    };
    let paths = shard_paths(path, place).map_err(split)?;
    let absent: Vec<&PathBuf> = paths.iter().filter(|p| !p.exists()).collect();
    if !absent.is_empty() {
        return Err(split(describe_absent(&absent, place)));
    }
    let mut given = Some(shard);
    let open = |(index, path): (usize, PathBuf)| match given.take_if(|_| index == place.shard_index) {
        Some(shard) => Ok(shard),
        None => open_shard(&path),
    };
    paths.into_iter().enumerate().map(open).collect()
}

fn place_of(metadata: &Metadata, path: &Path) -> Result<Option<SplitPlace>, GgufError> {
    SplitPlace::of(metadata).map_err(|problem| GgufError::Split {
        path: path.to_owned(),
        problems: vec![problem],
        advice: SHARDS_DIFFER,
    })
}

fn describe_absent(absent: &[&PathBuf], place: SplitPlace) -> String {
    let named: Vec<_> = absent
        .iter()
        .take(MAX_NAMED)
        .map(|path| format!("`{}`", path.file_name().unwrap_or_default().display()))
        .collect();
    let folder = absent[0].parent().filter(|folder| !folder.as_os_str().is_empty());
    let more = absent.len() - named.len();
    format!(
        "this is shard {} of {}; not found in `{}`: {}{}",
        place.shard_index + 1,
        place.n_shards,
        folder.unwrap_or(Path::new(".")).display(),
        named.join(", "),
        if more > 0 { format!(" and {more} more") } else { String::new() }
    )
}

fn open_shard(path: &Path) -> Result<Shard, GgufError> {
    let map = super::map::map(path).map_err(|source| GgufError::Open { path: path.to_owned(), source })?;
    let (header, region_problems) = parse_collecting(map.as_deref().unwrap_or_default(), path)?;
    Ok(Shard { path: path.to_owned(), map, header, region_problems })
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
            problems.push(format!("`{}` does not say that it is part of a split set", path.display()));
        }
        Err(problem) => problems.push(format!("`{}`: {problem}", path.display())),
    }
}
