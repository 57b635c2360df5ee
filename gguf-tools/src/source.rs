//! Where the weights of a build come from: an official checkpoint, or another GGUF file.

use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;

use crate::block::BlockType;
use crate::checkpoint::{Checkpoint, CheckpointError, SourcePrecision, SourceTensor};
use crate::gguf::{Gguf, GgufError, Metadata, TensorInfo};
use crate::model::{HyperParameters, ModelError, TensorSpec, expected_tensors};

/// Why a source cannot give its weights.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A problem of the safetensors set.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A problem of the GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The model is not one that can be built.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The GGUF file lacks tensors of its model or has others; all are listed.
    #[error("cannot build from `{}`\n  {}", path.display(), problems.join("\n  "))]
    Incomplete {
        /// The file.
        path: PathBuf,
        /// One line a tensor.
        problems: Vec<String>,
    },
    /// A value that no sound model holds.
    #[error("tensor `{tensor}` in `{}`: row {row}, column {column} is {value}; the source is damaged, download or convert it again", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// GGUF name.
        tensor: String,
        /// Row within the stacked tensor.
        row: u64,
        /// Column.
        column: usize,
        /// NaN or infinity.
        value: f32,
    },
}

/// Tensors of a source that stay out of the file: drafting heads, and what no runtime uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct SetAside {
    /// How many.
    pub n_tensors: usize,
    /// Their bytes in the source.
    pub n_bytes: u64,
}

/// Gives the weights of every tensor of one model, a few rows at a time.
pub trait WeightSource: Sync {
    /// The tensors of the file to be, in order.
    fn tensors(&self) -> &[TensorSpec];

    /// Metadata of the model and its tokenizer, without provenance.
    ///
    /// # Errors
    /// If the source's own description is unusable.
    fn metadata(&self) -> Result<Metadata, SourceError>;

    /// Files the weights come from.
    fn files(&self) -> Vec<PathBuf>;

    /// Label of the checkpoint: which release this is.
    fn label(&self) -> String;

    /// Source revision, where it is known.
    fn revision(&self) -> Option<String>;

    /// Type of the source tensor, as users call it.
    fn type_name(&self, tensor: &TensorSpec) -> String;

    /// Bytes of the source tensor, scales included.
    fn n_bytes(&self, tensor: &TensorSpec) -> u64;

    /// Whether `target` holds the source's values without change and without going through `f32`.
    fn is_exact(&self, tensor: &TensorSpec, target: BlockType) -> bool;

    /// Why some of these conversions must not be done; one line each, empty if all may.
    fn refusals(&self, targets: &[(&TensorSpec, BlockType)]) -> Vec<String>;

    /// Tensors that stay out of the file.
    fn set_aside(&self) -> SetAside;

    /// Widens rows of one matrix to `f32`: `out` is `[rows, columns]`. Every value written is finite.
    ///
    /// # Errors
    /// If the source is damaged.
    fn read_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), SourceError>;

    /// Carries rows over exactly, for a target that [`WeightSource::is_exact`] accepts.
    ///
    /// # Errors
    /// If the source is damaged.
    fn copy_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), SourceError>;

    /// Says that a matrix will not be read again, so that its pages need not stay in memory.
    fn release(&self, tensor: &TensorSpec, matrix_index: usize);
}

/// An official checkpoint as a source.
#[derive(Debug)]
pub struct CheckpointSource {
    checkpoint: Checkpoint,
    set_aside: SetAside,
}

impl CheckpointSource {
    /// Checks that every tensor of the model is there with the right shape. No data is read.
    ///
    /// # Errors
    /// With every problem of the checkpoint at once.
    pub fn new(checkpoint: Checkpoint) -> Result<Self, SourceError> {
        let findings = checkpoint.demand_sound()?;
        let set_aside = SetAside { n_tensors: findings.n_draft_tensors, n_bytes: findings.draft_bytes };
        Ok(Self { checkpoint, set_aside })
    }

    /// The safetensors set.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    fn precision(&self, tensor: &TensorSpec) -> SourcePrecision {
        self.checkpoint.source_precision(tensor).expect("checked when the source was made")
    }
}

impl WeightSource for CheckpointSource {
    fn tensors(&self) -> &[TensorSpec] {
        self.checkpoint.table().specs()
    }

    fn metadata(&self) -> Result<Metadata, SourceError> {
        let mut metadata = self.checkpoint.hyper_parameters().to_metadata();
        for (key, value) in crate::checkpoint::tokenizer::metadata(&self.checkpoint)?.iter() {
            metadata.set(key, value.clone());
        }
        Ok(metadata)
    }

    fn files(&self) -> Vec<PathBuf> {
        self.checkpoint.shard_paths().to_vec()
    }

    fn label(&self) -> String {
        self.checkpoint.label().to_owned()
    }

    fn revision(&self) -> Option<String> {
        self.checkpoint.revision().map(str::to_owned)
    }

    fn type_name(&self, tensor: &TensorSpec) -> String {
        self.precision(tensor).name().to_owned()
    }

    fn n_bytes(&self, tensor: &TensorSpec) -> u64 {
        let of = |name: &String| {
            let scale = self.checkpoint.scale_of(name).map_or(0, SourceTensor::n_bytes);
            self.checkpoint.tensor(name).map_or(0, SourceTensor::n_bytes) + scale
        };
        tensor.sources.iter().map(of).sum()
    }

    fn is_exact(&self, tensor: &TensorSpec, target: BlockType) -> bool {
        match self.precision(tensor) {
            SourcePrecision::I64 | SourcePrecision::I32 => target == BlockType::I32,
            SourcePrecision::Fp4 => target == BlockType::Mxfp4 && self.checkpoint.repacks_exactly(tensor),
            _ => false,
        }
    }

    fn refusals(&self, _: &[(&TensorSpec, BlockType)]) -> Vec<String> {
        Vec::new()
    }

    fn set_aside(&self) -> SetAside {
        self.set_aside
    }

    fn read_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), SourceError> {
        Ok(self.checkpoint.read_rows_f32(&tensor.sources[matrix_index], rows, out)?)
    }

    fn copy_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), SourceError> {
        let name = &tensor.sources[matrix_index];
        if self.precision(tensor) == SourcePrecision::Fp4 {
            return Ok(self.checkpoint.read_fp4_as_mxfp4(name, rows, out)?);
        }
        let mut integers = vec![0; out.len() / 4];
        self.checkpoint.read_i64_as_i32(name, rows, &mut integers)?;
        for (bytes, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(integers) {
            *bytes = value.to_le_bytes();
        }
        Ok(())
    }

    fn release(&self, tensor: &TensorSpec, matrix_index: usize) {
        self.checkpoint.release(&tensor.sources[matrix_index]);
    }
}

/// A GGUF file as a source.
#[derive(Debug)]
pub struct GgufSource {
    gguf: Gguf,
    tensors: Vec<TensorSpec>,
    allow_requantize: bool,
}

impl GgufSource {
    /// Checks that every tensor of the model is there with the right shape. No data is read.
    ///
    /// # Errors
    /// With every missing or misshapen tensor at once.
    pub fn new(gguf: Gguf, allow_requantize: bool) -> Result<Self, SourceError> {
        let tensors = expected_tensors(&HyperParameters::from_metadata(gguf.metadata())?);
        let mut problems = Vec::new();
        for spec in &tensors {
            match gguf.tensor(&spec.gguf_name) {
                None => problems.push(format!("tensor `{}` is missing", spec.gguf_name)),
                Some(found) if found.shape != spec.shape => problems.push(format!(
                    "tensor `{}` has shape {:?}, the metadata asks for {:?}",
                    spec.gguf_name, found.shape, spec.shape
                )),
                Some(_) => {}
            }
        }
        if problems.is_empty() {
            return Ok(Self { gguf, tensors, allow_requantize });
        }
        Err(SourceError::Incomplete { path: gguf.shards()[0].path.clone(), problems })
    }

    fn found(&self, tensor: &TensorSpec) -> &TensorInfo {
        self.gguf.tensor(&tensor.gguf_name).expect("checked when the source was made")
    }

    /// The bytes of some rows of one matrix, and the index of the first of them in the whole stack.
    fn row_bytes(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: &Range<usize>,
    ) -> Result<(&[u8], u64), SourceError> {
        let found = self.found(tensor);
        let rows_per_matrix = tensor.shape.len().checked_sub(2).map_or(1, |i| tensor.shape[i]);
        let row_bytes =
            found.block_type.row_bytes(tensor.columns()).expect("checked when the file was opened") as usize;
        let first = matrix_index as u64 * rows_per_matrix + rows.start as u64;
        let start = first as usize * row_bytes;
        Ok((&self.gguf.data(found)?[start..start + rows.len() * row_bytes], first))
    }
}

/// Types whose values are those of the release, or wider.
fn is_released_precision(block_type: BlockType) -> bool {
    use BlockType::{Bf16, F16, F32, F64, I8, I16, I32, I64, Mxfp4};
    matches!(block_type, F32 | F16 | Bf16 | F64 | I8 | I16 | I32 | I64 | Mxfp4)
}

impl WeightSource for GgufSource {
    fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    fn metadata(&self) -> Result<Metadata, SourceError> {
        let mut metadata = Metadata::default();
        let about_the_file = |key: &str| {
            ["split.", "quantize.", "ggsmith."].iter().any(|prefix| key.starts_with(prefix))
                || key == "general.alignment"
        };
        for (key, value) in self.gguf.metadata().iter().filter(|(key, _)| !about_the_file(key)) {
            metadata.set(key, value.clone());
        }
        Ok(metadata)
    }

    fn files(&self) -> Vec<PathBuf> {
        self.gguf.shards().iter().map(|shard| shard.path.clone()).collect()
    }

    fn label(&self) -> String {
        let text = |key: &str| self.gguf.metadata().get(key).and_then(|v| v.as_str());
        text("ggsmith.checkpoint.label").or_else(|| text("general.name")).unwrap_or("unknown").to_owned()
    }

    fn revision(&self) -> Option<String> {
        self.gguf.metadata().get("ggsmith.checkpoint.revision").and_then(|v| v.as_str()).map(str::to_owned)
    }

    fn type_name(&self, tensor: &TensorSpec) -> String {
        self.found(tensor).block_type.name().to_owned()
    }

    fn n_bytes(&self, tensor: &TensorSpec) -> u64 {
        self.found(tensor).n_bytes
    }

    fn is_exact(&self, tensor: &TensorSpec, target: BlockType) -> bool {
        self.found(tensor).block_type == target
    }

    fn refusals(&self, targets: &[(&TensorSpec, BlockType)]) -> Vec<String> {
        let mut refused = Vec::new();
        for (tensor, target) in targets {
            let from = self.found(tensor).block_type;
            if from == *target {
                continue;
            }
            if from.format().is_none() {
                refused
                    .push(format!("tensor `{}`: {from} cannot be read here, only copied", tensor.gguf_name));
            } else if !is_released_precision(from) && !self.allow_requantize {
                refused.push(format!(
                    "tensor `{}`: making {target} from {from} loses quality twice; start from the official checkpoint, or pass --allow-requantize",
                    tensor.gguf_name
                ));
            }
        }
        // What a file lacks comes first: the rest may be different once it is whole.
        let lacks = |(tensor, _): &(&TensorSpec, BlockType)| self.gguf.data(self.found(tensor)).err();
        if !refused.is_empty()
            && let Some(lacking) = targets.iter().find_map(lacks)
        {
            refused.insert(0, lacking.to_string());
        }
        refused
    }

    fn set_aside(&self) -> SetAside {
        let wanted: HashSet<_> = self.tensors.iter().map(|t| t.gguf_name.as_str()).collect();
        let extra = self.gguf.tensors().iter().filter(|t| !wanted.contains(t.name.as_str()));
        extra.fold(SetAside::default(), |sum, t| SetAside {
            n_tensors: sum.n_tensors + 1,
            n_bytes: sum.n_bytes + t.n_bytes,
        })
    }

    fn read_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), SourceError> {
        let (bytes, first) = self.row_bytes(tensor, matrix_index, &rows)?;
        let found = self.found(tensor);
        found.block_type.format().expect("refused when planned").dequantize(bytes, out);
        let columns = tensor.columns() as usize;
        match out.iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(at) => Err(SourceError::NotFinite {
                path: self.gguf.shards()[found.shard_index].path.clone(),
                tensor: tensor.gguf_name.clone(),
                row: first + (at / columns) as u64,
                column: at % columns,
                value: out[at],
            }),
        }
    }

    fn copy_rows(
        &self,
        tensor: &TensorSpec,
        matrix_index: usize,
        rows: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), SourceError> {
        out.copy_from_slice(self.row_bytes(tensor, matrix_index, &rows)?.0);
        Ok(())
    }

    fn release(&self, _: &TensorSpec, _: usize) {}
}
