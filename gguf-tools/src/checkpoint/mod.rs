//! Safetensors checkpoints in the layout of the official DeepSeek V4 releases.
//!
//! [`Checkpoint::open`] reads `config.json` and the headers of all shards; no tensor is read until its rows are asked for,
//! and never more of it than those rows.

mod check;
pub(crate) mod decode;
mod error;
mod layout;
mod read;
mod shard;
pub mod tokenizer;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

pub use check::{Finding, Findings};
pub use error::{CheckpointError, ShardProblem};
pub use layout::SourcePrecision;
pub use shard::{MAX_HEADER_BYTES, SourceTensor};
pub(crate) use shard::{header_entries, header_length};

use crate::model::{HyperParameters, TensorTable};
use shard::Shard;

const INDEX_NAME: &str = "model.safetensors.index.json";
const SINGLE_NAME: &str = "model.safetensors";

/// An opened checkpoint: configuration, headers and mapped shards.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    config: Value,
    table: TensorTable,
    hyper_parameters: HyperParameters,
    shards: Vec<Shard>,
    shard_paths: Vec<PathBuf>,
    tensors: Vec<SourceTensor>,
    by_name: HashMap<String, usize>,
    /// Tensors that the index promises and the shard it names lacks: tensor and shard file.
    broken_promises: Vec<(String, String)>,
    label: String,
    revision: Option<String>,
}

impl Checkpoint {
    /// Opens the checkpoint in a folder: `config.json`, and `model.safetensors.index.json` with its shards or
    /// `model.safetensors`. Reads headers only.
    ///
    /// # Errors
    /// If the folder holds no checkpoint, the model is not supported ([`CheckpointError::Model`]), or shards are absent,
    /// incomplete or damaged ([`CheckpointError::Shards`] lists all of them). Whether the tensors are those of the model is
    /// for [`Checkpoint::check`] to say.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let folder = folder.as_ref();
        if !folder.is_dir() {
            return Err(CheckpointError::NotACheckpoint {
                folder: folder.to_owned(),
                problem: "is not a folder; expected the folder with config.json and the safetensors files"
                    .to_owned(),
            });
        }
        let config_path = folder.join("config.json");
        let config = read_json(&config_path)?;
        let hyper_parameters = HyperParameters::from_config(&config)
            .map_err(|source| CheckpointError::Model { path: config_path, source })?;
        let (shard_paths, promised) = shard_list(folder)?;
        let (shards, tensors) = open_shards(&shard_paths)?;
        let by_name = index_by_name(&shard_paths, &tensors)?;
        let broken_promises = promised
            .into_iter()
            .filter(|(tensor, shard)| {
                by_name.get(tensor).is_none_or(|&i| shard_paths[tensors[i].shard] != folder.join(shard))
            })
            .collect();
        Ok(Self {
            folder: folder.to_owned(),
            config,
            table: TensorTable::new(&hyper_parameters),
            hyper_parameters,
            shards,
            shard_paths,
            tensors,
            by_name,
            broken_promises,
            label: label_of(folder),
            revision: revision_of(folder),
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// `config.json` as read.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The model's hyper-parameters.
    pub fn hyper_parameters(&self) -> &HyperParameters {
        &self.hyper_parameters
    }

    /// The tensors that a model with these hyper-parameters has.
    pub fn table(&self) -> &TensorTable {
        &self.table
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&SourceTensor> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// Every tensor, shard by shard in file order.
    pub fn tensors(&self) -> &[SourceTensor] {
        &self.tensors
    }

    /// Every tensor's name, shard by shard in file order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str())
    }

    /// The safetensors files, in order of their names.
    pub fn shard_paths(&self) -> &[PathBuf] {
        &self.shard_paths
    }

    /// Which checkpoint this is, for provenance: the hub repository's name in a hub cache, else the folder's name.
    ///
    /// A label that the user states takes precedence; see [`Checkpoint::set_label`].
    pub fn label(&self) -> &str {
        &self.label
    }

    /// States which checkpoint this is.
    pub fn set_label(&mut self, label: impl Into<String>) {
        self.label = label.into();
    }

    /// The hub commit, if the folder is a hub snapshot or was filled by a hub client.
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// The tensor's stored bytes, mapped.
    ///
    /// # Errors
    /// If there is no such tensor.
    pub fn raw_bytes(&self, name: &str) -> Result<&[u8], CheckpointError> {
        let tensor = self.tensor(name).ok_or_else(|| CheckpointError::NoSuchTensor(name.to_owned()))?;
        Ok(self.shards[tensor.shard].bytes(tensor))
    }

    /// Lets the system take back the memory of a tensor (and its scales) that has been used. Unknown names are ignored.
    pub fn release(&self, name: &str) {
        for tensor in [self.tensor(name), self.scale_of(name)].into_iter().flatten() {
            self.shards[tensor.shard].release(tensor);
        }
    }

    /// The scales that belong to a weight: its name with `.weight` replaced by `.scale` or `.weight_scale_inv`.
    /// Either holds multipliers.
    pub fn scale_of(&self, weight: &str) -> Option<&SourceTensor> {
        let stem = weight.strip_suffix(".weight")?;
        SCALE_SUFFIXES.iter().find_map(|suffix| self.tensor(&format!("{stem}{suffix}")))
    }
}

/// Ends of the names of scales, in place of `.weight`.
const SCALE_SUFFIXES: [&str; 2] = [".scale", ".weight_scale_inv"];

/// Reads a JSON file of a checkpoint.
fn read_json(path: &Path) -> Result<Value, CheckpointError> {
    let text = fs::read(path).map_err(|source| CheckpointError::Io { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|e| {
        let pointer = text.starts_with(b"version https://git-lfs");
        let problem = if pointer {
            "is a Git LFS pointer; fetch the content with `git lfs pull`".to_owned()
        } else {
            format!("is not valid JSON: {e}")
        };
        CheckpointError::Json { path: path.to_owned(), problem }
    })
}

/// The shards' paths, and which tensor the index expects in which file.
type ShardList = (Vec<PathBuf>, Vec<(String, String)>);

fn shard_list(folder: &Path) -> Result<ShardList, CheckpointError> {
    let index_path = folder.join(INDEX_NAME);
    if index_path.exists() {
        let index = read_json(&index_path)?;
        let malformed = |problem: String| CheckpointError::Json { path: index_path.clone(), problem };
        let map = index
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| malformed("has no `weight_map` object from tensor to file".to_owned()))?;
        let mut promised = Vec::with_capacity(map.len());
        for (tensor, file) in map {
            match file.as_str() {
                Some(name) if Path::new(name).file_name().is_some_and(|plain| plain == name) => {
                    promised.push((tensor.clone(), name.to_owned()));
                }
                _ => {
                    return Err(malformed(format!(
                        "tensor `{tensor}` is in {file}, expected a plain file name"
                    )));
                }
            }
        }
        let mut names: Vec<&String> = promised.iter().map(|(_, file)| file).collect();
        names.sort_unstable();
        names.dedup();
        return Ok((names.into_iter().map(|name| folder.join(name)).collect(), promised));
    }
    let single = folder.join(SINGLE_NAME);
    if single.exists() {
        return Ok((vec![single], Vec::new()));
    }
    Err(CheckpointError::NotACheckpoint {
        folder: folder.to_owned(),
        problem: format!("has neither {INDEX_NAME} nor {SINGLE_NAME}; finish the download"),
    })
}

/// Opens every shard; the error lists all that fail.
fn open_shards(paths: &[PathBuf]) -> Result<(Vec<Shard>, Vec<SourceTensor>), CheckpointError> {
    let mut shards = Vec::with_capacity(paths.len());
    let mut tensors = Vec::new();
    let mut problems = Vec::new();
    for (index, path) in paths.iter().enumerate() {
        match Shard::open(path, index) {
            Ok((shard, mut found)) => {
                shards.push(shard);
                tensors.append(&mut found);
            }
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() { Ok((shards, tensors)) } else { Err(CheckpointError::Shards { problems }) }
}

fn index_by_name(
    paths: &[PathBuf],
    tensors: &[SourceTensor],
) -> Result<HashMap<String, usize>, CheckpointError> {
    let mut by_name = HashMap::with_capacity(tensors.len());
    let mut problems = Vec::new();
    for (i, tensor) in tensors.iter().enumerate() {
        if let Some(first) = by_name.insert(tensor.name.clone(), i) {
            let first: &SourceTensor = &tensors[first];
            problems.push(ShardProblem {
                path: paths[tensor.shard].clone(),
                problem: format!(
                    "tensor `{}` is also in {}; remove the file that does not belong here",
                    tensor.name,
                    paths[first.shard].display()
                ),
            });
        }
    }
    if problems.is_empty() { Ok(by_name) } else { Err(CheckpointError::Shards { problems }) }
}

/// The name of the hub repository if the folder is a snapshot in a hub cache, else the folder's own name.
fn label_of(folder: &Path) -> String {
    let full = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let repository = snapshot_commit(&full).and_then(|_| {
        let name = full.parent()?.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
        Some(name.rsplit("--").next().unwrap_or(name).to_owned())
    });
    repository
        .or_else(|| full.file_name().map(|name| name.to_string_lossy().into_owned()))
        .unwrap_or_else(|| "checkpoint".to_owned())
}

/// The commit in `.../snapshots/COMMIT`, or the one that a hub client noted beside the files.
fn revision_of(folder: &Path) -> Option<String> {
    let full = folder.canonicalize().ok()?;
    if let Some(commit) = snapshot_commit(&full) {
        return Some(commit);
    }
    let note = fs::read_to_string(full.join(".cache/huggingface/download/config.json.metadata")).ok()?;
    note.lines().next().map(str::trim).filter(|line| is_commit(line)).map(str::to_owned)
}

fn snapshot_commit(folder: &Path) -> Option<String> {
    let inside = folder.parent()?.file_name()? == "snapshots";
    let name = folder.file_name()?.to_str()?;
    (inside && is_commit(name)).then(|| name.to_owned())
}

fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}
