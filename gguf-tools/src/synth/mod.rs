//! Random but sane models, for trials and tests without a download: as a checkpoint in the layout of the official
//! releases, or as a source that a build takes its weights from directly.
//!
//! The bytes depend on the options alone. Weights keep the variance of their inputs, so that activations neither explode
//! nor vanish. Tensors are made row by row: memory stays small whatever the shape.

mod config;
mod random;
mod source;
mod tokenizer;
mod values;

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

pub use source::SynthSource;

use crate::model::{HyperParameters, ModelError, expected_tensors};
use crate::progress::{Progress, Step};
use values::Stored;

/// Which model's widths are used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Shape {
    /// Under 12 MB with every kind of layer.
    #[default]
    Tiny,
    /// V4 Flash.
    Flash,
    /// V4 PRO.
    Pro,
}

impl Shape {
    /// Every shape with the name that users type.
    pub const NAMES: [(&'static str, Self); 3] =
        [("tiny", Self::Tiny), ("flash", Self::Flash), ("pro", Self::Pro)];
}

/// What model to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthOptions {
    /// Widths, and the defaults of the other numbers.
    pub shape: Shape,
    /// Layers; `None`: as many as the shape's model has.
    pub layers: Option<u64>,
    /// Routed experts of a layer; `None`: as many as the shape's model has.
    pub experts: Option<u64>,
    /// Seed of every value.
    pub seed: u64,
    /// A shard is closed before it grows beyond this.
    pub shard_bytes: u64,
}

impl SynthOptions {
    /// The options of a shape with all its layers and experts.
    pub fn new(shape: Shape) -> Self {
        let shard_bytes = if shape == Shape::Tiny { 4 << 20 } else { 4 << 30 };
        Self { shape, layers: None, experts: None, seed: 0, shard_bytes }
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthSummary {
    /// Stored tensors, scales included.
    pub n_tensors: usize,
    /// Bytes of tensor data.
    pub data_bytes: u64,
    /// Safetensors files.
    pub n_shards: usize,
}

/// Why no model was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    /// There is something at the place already.
    #[error("{} exists already; name a folder that does not", .0.display())]
    Exists(PathBuf),
    /// The options make no model.
    #[error("these options make no model: {0}")]
    Options(#[from] ModelError),
    /// The vocabulary does not hold the small tokenizer.
    #[error("the synthetic tokenizer does not fit: {0}")]
    Tokenizer(String),
    /// A file could not be written.
    #[error("{}: cannot be written: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The caller asked to stop; nothing is left behind.
    #[error("interrupted; nothing was written")]
    Interrupted,
}

/// Writes a checkpoint into the folder `folder`, which must not exist: it is made beside and renamed when it is complete.
///
/// # Errors
/// [`SynthError`]; nothing is left behind then.
pub fn write_checkpoint(
    folder: &Path,
    options: &SynthOptions,
    progress: &dyn Progress,
) -> Result<SynthSummary, SynthError> {
    if folder.exists() {
        return Err(SynthError::Exists(folder.to_owned()));
    }
    let config = options.config();
    let model = HyperParameters::from_config(&config)?;
    let tensors: Vec<Stored> = expected_tensors(&model)
        .iter()
        .flat_map(|spec| {
            spec.sources
                .iter()
                .flat_map(|name| Stored::of_source(spec, name, &model, options.seed))
                .collect::<Vec<_>>()
        })
        .collect();
    let building = Unfinished::beside(folder)?;
    let shards = shards(&tensors, options.shard_bytes);
    let mut work =
        Work { progress, done_bytes: 0, done_items: 0, total_bytes: 0, total_items: tensors.len() };
    work.total_bytes = tensors.iter().map(Stored::n_bytes).sum();
    let mut weight_map = Map::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", index + 1, shards.len());
        let path = building.path.join(&name);
        write_shard(&path, shard, &mut work)?;
        weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), json!(name))));
    }
    let index = json!({ "metadata": { "total_size": work.total_bytes }, "weight_map": weight_map });
    let generation = json!({
        "bos_token_id": 0,
        "eos_token_id": 1,
        "do_sample": true,
        "temperature": 1.0,
        "top_p": 1.0,
    });
    for (name, value) in [
        ("config.json", config),
        ("generation_config.json", generation),
        ("model.safetensors.index.json", index),
        ("tokenizer.json", tokenizer::tokenizer()),
        ("tokenizer_config.json", tokenizer::tokenizer_config(model.max_position_embeddings)),
    ] {
        write_file(&building.path.join(name), format!("{value:#}\n").as_bytes())?;
    }
    building.finish(folder)?;
    Ok(SynthSummary { n_tensors: tensors.len(), data_bytes: work.total_bytes, n_shards: shards.len() })
}

/// Divides the tensors, in order, into runs that stay within `limit` bytes (or hold one tensor).
fn shards(tensors: &[Stored], limit: u64) -> Vec<&[Stored]> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        if i > start && bytes + tensor.n_bytes() > limit {
            shards.push(&tensors[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes += tensor.n_bytes();
    }
    shards.push(&tensors[start..]);
    shards
}

/// How far the work is.
struct Work<'a> {
    progress: &'a dyn Progress,
    done_bytes: u64,
    total_bytes: u64,
    done_items: usize,
    total_items: usize,
}

impl Work<'_> {
    fn done(&mut self, tensor: &Stored) {
        self.done_bytes += tensor.n_bytes();
        self.done_items += 1;
        self.progress.step(&Step {
            item: &tensor.name,
            done_bytes: self.done_bytes,
            total_bytes: self.total_bytes,
            done_items: self.done_items,
            total_items: self.total_items,
        });
    }
}

fn write_shard(path: &Path, tensors: &[Stored], work: &mut Work<'_>) -> Result<(), SynthError> {
    let failed = |source| SynthError::Io { path: path.to_owned(), source };
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(failed)?);
    file.write_all(&header(tensors)).map_err(failed)?;
    let mut row_bytes = Vec::new();
    for tensor in tensors {
        for row in 0..tensor.rows() {
            tensor.row(row, &mut row_bytes);
            file.write_all(&row_bytes).map_err(failed)?;
            if work.progress.interrupted() {
                return Err(SynthError::Interrupted);
            }
        }
        work.done(tensor);
    }
    file.flush().map_err(failed)
}

/// Length and JSON of a safetensors header, padded to a multiple of eight bytes.
fn header(tensors: &[Stored]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.n_bytes();
        let entry = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end] });
        entries.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    header
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), SynthError> {
    fs::write(path, bytes).map_err(|source| SynthError::Io { path: path.to_owned(), source })
}

/// A folder that is removed unless it is finished.
struct Unfinished {
    path: PathBuf,
    finished: bool,
}

impl Unfinished {
    fn beside(folder: &Path) -> Result<Self, SynthError> {
        let mut name = folder.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        let path = folder.with_file_name(name);
        fs::create_dir_all(&path).map_err(|source| SynthError::Io { path: path.clone(), source })?;
        Ok(Self { path, finished: false })
    }

    fn finish(mut self, folder: &Path) -> Result<(), SynthError> {
        fs::rename(&self.path, folder)
            .map_err(|source| SynthError::Io { path: folder.to_owned(), source })?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.finished {
            // The reason for giving up matters more than a folder that cannot be removed.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
