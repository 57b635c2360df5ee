//! The source with the tensors of one layer as they are in the file.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use gguf_tools::block::BlockType;
use gguf_tools::build::{CalibrationError, LayerBytes};
use gguf_tools::model::HyperParameters;
use gguf_tools::plan::Plan;
use runner::RunnerError;
use runner::weights::{FoundTensor, WeightSource};

/// One quantized tensor.
struct Patch {
    shape: Vec<u64>,
    block_type: BlockType,
    bytes: Vec<u8>,
}

/// The source, but for one layer.
pub(super) struct PatchedSource {
    source: Arc<dyn WeightSource>,
    patches: Vec<Patch>,
    by_name: HashMap<String, usize>,
}

/// Indices from here on are those of patches.
const FIRST_PATCH: usize = usize::MAX / 2;

impl PatchedSource {
    pub(super) fn new(
        source: Arc<dyn WeightSource>,
        layer: usize,
        plan: &Plan,
        bytes: &dyn LayerBytes,
    ) -> Result<Self, CalibrationError> {
        let (mut patches, mut by_name) = (Vec::new(), HashMap::new());
        for tensor in plan.tensors.iter().filter(|t| t.spec.layer == Some(layer as u32)) {
            by_name.insert(tensor.spec.gguf_name.clone(), patches.len());
            patches.push(Patch {
                shape: tensor.spec.shape.clone(),
                block_type: tensor.target,
                bytes: bytes.read(tensor)?,
            });
        }
        Ok(Self { source, patches, by_name })
    }

    fn patch(&self, tensor: usize) -> Option<&Patch> {
        self.patches.get(tensor.checked_sub(FIRST_PATCH)?)
    }
}

impl Patch {
    fn rows(&self, rows: &Range<usize>) -> &[u8] {
        let columns = self.shape.last().copied().unwrap_or(1);
        let row_bytes = self.block_type.row_bytes(columns).unwrap_or(0) as usize;
        &self.bytes[rows.start * row_bytes..rows.end * row_bytes]
    }
}

impl WeightSource for PatchedSource {
    fn path(&self) -> &Path {
        self.source.path()
    }

    fn hyper_parameters(&self) -> &HyperParameters {
        self.source.hyper_parameters()
    }

    fn find(&self, name: &str) -> Option<FoundTensor> {
        match self.by_name.get(name) {
            Some(&index) => {
                Some(FoundTensor { index: FIRST_PATCH + index, shape: self.patches[index].shape.clone() })
            }
            None => self.source.find(name),
        }
    }

    fn block_type(&self, tensor: usize) -> Option<BlockType> {
        self.patch(tensor).map_or_else(|| self.source.block_type(tensor), |patch| Some(patch.block_type))
    }

    fn blocks(&self, tensor: usize, rows: Range<usize>) -> Result<&[u8], RunnerError> {
        self.patch(tensor).map_or_else(|| self.source.blocks(tensor, rows.clone()), |p| Ok(p.rows(&rows)))
    }

    fn read_rows(&self, tensor: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), RunnerError> {
        let Some(patch) = self.patch(tensor) else { return self.source.read_rows(tensor, rows, out) };
        let format = patch.block_type.format().ok_or_else(|| RunnerError::UncomputableType {
            path: self.path().to_owned(),
            tensor: "of the layer just quantized".to_owned(),
            block_type: patch.block_type,
        })?;
        format.dequantize(patch.rows(&rows), out);
        Ok(())
    }

    fn read_integers(&self, tensor: usize) -> Result<Vec<i32>, RunnerError> {
        let Some(patch) = self.patch(tensor) else { return self.source.read_integers(tensor) };
        Ok(patch.bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect())
    }
}
