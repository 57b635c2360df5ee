//! Headers of models, wherever their bytes come from: names, types, shapes and sizes of tensors, and the configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::AccountError;
use crate::checkpoint::{header_entries, header_length};
use crate::gguf::{Gguf, MAGIC, MAX_HEADER_BYTES, Metadata, SplitPlace, parse_header, shard_paths};
use crate::plan::Plan;

/// The files of a model, of which only beginnings are read. A folder on disk is one ([`LocalFiles`]), a repository on a
/// server can be another.
pub trait HeaderFiles {
    /// Names of all files.
    ///
    /// # Errors
    /// The reason why they cannot be listed.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Size of a file in bytes.
    ///
    /// # Errors
    /// The reason why it is not known.
    fn size(&self, name: &str) -> io::Result<u64>;

    /// The bytes of a range, or fewer at the end of the file.
    ///
    /// # Errors
    /// The reason why they cannot be had.
    fn read(&self, name: &str, range: Range<u64>) -> io::Result<Vec<u8>>;

    /// Where a file is, for messages.
    fn place(&self, name: &str) -> String;
}

/// Files of a folder on disk.
#[derive(Debug, Clone)]
pub struct LocalFiles {
    folder: PathBuf,
}

impl LocalFiles {
    /// The files of this folder.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }
}

impl HeaderFiles for LocalFiles {
    fn names(&self) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(&self.folder)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn size(&self, name: &str) -> io::Result<u64> {
        Ok(std::fs::metadata(self.folder.join(name))?.len())
    }

    fn read(&self, name: &str, range: Range<u64>) -> io::Result<Vec<u8>> {
        let file = File::open(self.folder.join(name))?;
        let end = range.end.min(file.metadata()?.len());
        let mut bytes = vec![0; end.saturating_sub(range.start) as usize];
        file.read_exact_at(&mut bytes, range.start)?;
        Ok(bytes)
    }

    fn place(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }
}

/// What describes the model beside its tensors.
#[derive(Debug, Clone, PartialEq)]
pub enum Description {
    /// `config.json` of a checkpoint.
    Config(Json),
    /// Metadata of a GGUF file.
    Metadata(Metadata),
}

/// One tensor as a header describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name.
    pub name: String,
    /// Type, as the format calls it.
    pub stored_type: String,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// Bytes of data.
    pub n_bytes: u64,
}

/// The headers of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Headers {
    /// What was read, for messages.
    pub place: String,
    /// The model's description.
    pub description: Description,
    /// Every tensor.
    pub tensors: Vec<StoredTensor>,
    /// Size of all files.
    pub file_bytes: u64,
    /// Headers of the files, and padding between and behind tensors.
    pub overhead_bytes: u64,
    /// Tensors that the checkpoint's index promises and no header has.
    pub only_in_index: Vec<String>,
}

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
/// First bytes of a GGUF file that are fetched; most headers are longer because of the vocabulary.
const FIRST_BYTES: u64 = 1 << 20;

impl Headers {
    /// The headers of a GGUF file (any shard of a set) or of a checkpoint folder on disk.
    ///
    /// # Errors
    /// [`AccountError`] naming the file and what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, AccountError> {
        if path.is_dir() {
            return Self::of_checkpoint(&LocalFiles::new(path));
        }
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self::of_gguf(&LocalFiles::new(folder), &name)
    }

    /// The headers of a GGUF file; any shard stands for its set.
    ///
    /// # Errors
    /// As [`Headers::open`].
    pub fn of_gguf(files: &dyn HeaderFiles, name: &str) -> Result<Self, AccountError> {
        let first = gguf_header(files, name)?;
        let place = SplitPlace::of(&first.metadata).map_err(|problem| damaged(files, name, problem))?;
        let names = match place {
            None => vec![name.to_owned()],
            Some(place) => shard_paths(Path::new(name), place)
                .map_err(|problem| damaged(files, name, problem))?
                .into_iter()
                .map(|path| path.to_string_lossy().into_owned())
                .collect(),
        };
        let mut headers = Self {
            place: files.place(name),
            description: Description::Metadata(Metadata::default()),
            tensors: Vec::new(),
            file_bytes: 0,
            overhead_bytes: 0,
            only_in_index: Vec::new(),
        };
        for (index, shard) in names.iter().enumerate() {
            let header = if shard == name { first.clone() } else { gguf_header(files, shard)? };
            let size = files.size(shard).map_err(|e| io_error(files, shard, e))?;
            let data: u64 = header.tensors.iter().map(|t| t.n_bytes).sum();
            headers.tensors.extend(header.tensors.into_iter().map(|t| StoredTensor {
                name: t.name,
                stored_type: t.block_type.name().to_owned(),
                shape: t.shape,
                n_bytes: t.n_bytes,
            }));
            headers.file_bytes += size;
            headers.overhead_bytes += size.checked_sub(data).ok_or_else(|| {
                damaged(
                    files,
                    shard,
                    format!("tensors take {data} bytes, the file has {size}; it is incomplete"),
                )
            })?;
            if index == 0 {
                headers.description = Description::Metadata(header.metadata);
            }
        }
        Ok(headers)
    }

    /// The headers of the safetensors files of a checkpoint.
    ///
    /// # Errors
    /// As [`Headers::open`].
    pub fn of_checkpoint(files: &dyn HeaderFiles) -> Result<Self, AccountError> {
        let config = json_file(files, CONFIG)?;
        let listed = files.names().map_err(|e| io_error(files, "", e))?;
        let index =
            if listed.iter().any(|name| name == INDEX) { Some(json_file(files, INDEX)?) } else { None };
        let weight_map = index.as_ref().and_then(|index| index.get("weight_map")).and_then(Json::as_object);
        let names: BTreeSet<String> = match weight_map {
            Some(map) => map.values().filter_map(Json::as_str).map(str::to_owned).collect(),
            None => listed.into_iter().filter(|name| name.ends_with(".safetensors")).collect(),
        };
        if names.is_empty() {
            return Err(damaged(files, "", "holds no safetensors file".to_owned()));
        }
        let mut tensors = BTreeMap::new();
        let (mut file_bytes, mut overhead_bytes) = (0, 0);
        for name in &names {
            let (entries, size, header_bytes) = safetensors_header(files, name)?;
            for tensor in entries {
                if let Some(other) = tensors.insert(tensor.name.clone(), tensor) {
                    return Err(damaged(
                        files,
                        name,
                        format!("tensor `{}` is in another file too", other.name),
                    ));
                }
            }
            file_bytes += size;
            overhead_bytes += header_bytes;
        }
        let promised = weight_map.into_iter().flat_map(|map| map.keys());
        let only_in_index = promised.filter(|name| !tensors.contains_key(*name)).cloned().collect();
        Ok(Self {
            place: files.place(""),
            description: Description::Config(config),
            tensors: tensors.into_values().collect(),
            file_bytes,
            overhead_bytes,
            only_in_index,
        })
    }

    /// The headers that a file will have.
    pub fn of_plan(plan: &Plan) -> Self {
        let tensors: Vec<_> = plan
            .tensors
            .iter()
            .map(|t| StoredTensor {
                name: t.spec.gguf_name.clone(),
                stored_type: t.target.name().to_owned(),
                shape: t.spec.shape.clone(),
                n_bytes: t.n_bytes,
            })
            .collect();
        Self {
            place: "the plan".to_owned(),
            description: Description::Metadata(plan.layout.metadata().clone()),
            file_bytes: plan.file_bytes(),
            overhead_bytes: plan.file_bytes() - plan.tensor_bytes(),
            tensors,
            only_in_index: Vec::new(),
        }
    }

    /// The headers of an opened file or set.
    pub fn of_opened(gguf: &Gguf) -> Self {
        let file_bytes = gguf.shards().iter().map(|shard| shard.file_bytes).sum();
        let data: u64 = gguf.tensors().iter().map(|t| t.n_bytes).sum();
        let stored = |t: &crate::gguf::TensorInfo| StoredTensor {
            name: t.name.clone(),
            stored_type: t.block_type.name().to_owned(),
            shape: t.shape.clone(),
            n_bytes: t.n_bytes,
        };
        Self {
            place: gguf.shards()[0].path.display().to_string(),
            description: Description::Metadata(gguf.metadata().clone()),
            tensors: gguf.tensors().iter().map(stored).collect(),
            file_bytes,
            overhead_bytes: file_bytes.saturating_sub(data),
            only_in_index: Vec::new(),
        }
    }

    /// Bytes of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.n_bytes).sum()
    }
}

fn io_error(files: &dyn HeaderFiles, name: &str, source: io::Error) -> AccountError {
    AccountError::Io { place: files.place(name), source }
}

fn damaged(files: &dyn HeaderFiles, name: &str, problem: String) -> AccountError {
    AccountError::Damaged { place: files.place(name), problem }
}

fn json_file(files: &dyn HeaderFiles, name: &str) -> Result<Json, AccountError> {
    let size = files.size(name).map_err(|e| io_error(files, name, e))?;
    if size > MAX_HEADER_BYTES as u64 {
        return Err(damaged(files, name, format!("has {size} bytes, the limit is {MAX_HEADER_BYTES}")));
    }
    let bytes = files.read(name, 0..size).map_err(|e| io_error(files, name, e))?;
    serde_json::from_slice(&bytes).map_err(|e| damaged(files, name, format!("is no JSON: {e}")))
}

/// The header of one file; more and more of its beginning is fetched until the header is whole.
fn gguf_header(files: &dyn HeaderFiles, name: &str) -> Result<crate::gguf::Header, AccountError> {
    let size = files.size(name).map_err(|e| io_error(files, name, e))?;
    let most = size.min(MAX_HEADER_BYTES as u64);
    let mut bytes: Vec<u8> = Vec::new();
    loop {
        let wanted = if bytes.is_empty() { FIRST_BYTES } else { 4 * bytes.len() as u64 }.min(most);
        let more = files.read(name, bytes.len() as u64..wanted).map_err(|e| io_error(files, name, e))?;
        let got_less = (bytes.len() + more.len()) as u64 != wanted;
        bytes.extend(more);
        let parsed = parse_header(&bytes, Path::new(&files.place(name)));
        // Only a header that may go on behind what was fetched is worth another try.
        if parsed.is_ok() || wanted >= most || got_less || !bytes.starts_with(&MAGIC) {
            return Ok(parsed?);
        }
    }
}

/// Tensors of one file, its size, and the bytes of its header.
fn safetensors_header(
    files: &dyn HeaderFiles,
    name: &str,
) -> Result<(Vec<StoredTensor>, u64, u64), AccountError> {
    let refuse = |problem: String| damaged(files, name, problem);
    let size = files.size(name).map_err(|e| io_error(files, name, e))?;
    let start = files.read(name, 0..size.min(8)).map_err(|e| io_error(files, name, e))?;
    let header_bytes = header_length(&start, size).map_err(refuse)?;
    let json = files.read(name, 8..8 + header_bytes).map_err(|e| io_error(files, name, e))?;
    let entries = header_entries(&json, size - 8 - header_bytes).map_err(refuse)?;
    let tensors = entries
        .into_iter()
        .map(|entry| StoredTensor {
            name: entry.name,
            stored_type: entry.dtype.to_string(),
            shape: entry.shape,
            n_bytes: entry.n_bytes,
        })
        .collect();
    Ok((tensors, size, 8 + header_bytes))
}
