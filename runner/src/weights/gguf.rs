//! Weights of a GGUF file, mapped.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use gguf_tools::block::BlockType;
use gguf_tools::gguf::Gguf;
use gguf_tools::model::HyperParameters;

use super::{FileExtent, FoundTensor, WeightSource};
use crate::error::RunnerError;

/// A GGUF file (or split set) as a source of weights, in any block type that can be computed with.
#[derive(Debug)]
pub struct GgufSource {
    path: PathBuf,
    file: Gguf,
    hyper_parameters: HyperParameters,
    by_name: HashMap<String, usize>,
}

impl GgufSource {
    /// Opens the file and its siblings; reads headers only.
    ///
    /// # Errors
    /// If it is no sound GGUF file, or its metadata describe no supported model.
    pub fn open(path: &Path) -> Result<Self, RunnerError> {
        Self::new(Gguf::open(path)?, path)
    }

    /// Takes a file that is already open.
    ///
    /// # Errors
    /// If its metadata describe no supported model.
    pub fn new(file: Gguf, path: &Path) -> Result<Self, RunnerError> {
        let hyper_parameters = HyperParameters::from_metadata(file.metadata())
            .map_err(|source| RunnerError::Model { path: path.to_owned(), source })?;
        let by_name = file.tensors().iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Self { path: path.to_owned(), file, hyper_parameters, by_name })
    }

    /// The file.
    pub fn file(&self) -> &Gguf {
        &self.file
    }

    fn uncomputable(&self, tensor: usize) -> RunnerError {
        let info = &self.file.tensors()[tensor];
        RunnerError::UncomputableType {
            path: self.path.clone(),
            tensor: info.name.clone(),
            block_type: info.block_type,
        }
    }
}

impl WeightSource for GgufSource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn hyper_parameters(&self) -> &HyperParameters {
        &self.hyper_parameters
    }

    fn find(&self, name: &str) -> Option<FoundTensor> {
        let index = *self.by_name.get(name)?;
        Some(FoundTensor { index, shape: self.file.tensors()[index].shape.clone() })
    }

    fn block_type(&self, tensor: usize) -> Option<BlockType> {
        Some(self.file.tensors()[tensor].block_type)
    }

    fn blocks(&self, tensor: usize, rows: Range<usize>) -> Result<&[u8], RunnerError> {
        let info = &self.file.tensors()[tensor];
        let columns = info.shape.last().copied().unwrap_or(1);
        let row_bytes = info.block_type.row_bytes(columns).ok_or_else(|| self.uncomputable(tensor))? as usize;
        Ok(&self.file.data(info)?[rows.start * row_bytes..rows.end * row_bytes])
    }

    fn read_rows(&self, tensor: usize, rows: Range<usize>, out: &mut [f32]) -> Result<(), RunnerError> {
        let format =
            self.file.tensors()[tensor].block_type.format().ok_or_else(|| self.uncomputable(tensor))?;
        format.dequantize(self.blocks(tensor, rows)?, out);
        Ok(())
    }

    fn read_integers(&self, tensor: usize) -> Result<Vec<i32>, RunnerError> {
        let info = &self.file.tensors()[tensor];
        if info.block_type != BlockType::I32 {
            return Err(self.uncomputable(tensor));
        }
        let bytes = self.file.data(info)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect())
    }

    fn mapped_bytes(&self) -> u64 {
        self.file.tensors().iter().map(|tensor| tensor.n_bytes).fold(0, u64::saturating_add)
    }

    fn extent(&self, tensor: usize, first_row: usize) -> Option<FileExtent<'_>> {
        let info = &self.file.tensors()[tensor];
        let row_bytes = info.block_type.row_bytes(info.shape.last().copied().unwrap_or(1))?;
        let (path, start) = self.file.location(info);
        Some(FileExtent { path, offset: start.checked_add(row_bytes.checked_mul(first_row as u64)?)? })
    }

    fn mapped(&self, tensor: usize) -> &[u8] {
        self.file.data(&self.file.tensors()[tensor]).unwrap_or_default()
    }

    fn read_ahead(&self, tensor: usize, bytes: Range<usize>) {
        self.file.read_ahead(&self.file.tensors()[tensor], bytes);
    }

    fn release(&self, tensor: usize) {
        self.file.release(&self.file.tensors()[tensor]);
    }
}
