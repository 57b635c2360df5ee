//! Laying out a file to be written: sequential offsets, zero padding, as every reader takes it.

use std::collections::HashSet;

use super::header::tensor_bytes;
use super::value::write_string;
use super::{ALIGNMENTS, DEFAULT_ALIGNMENT, GgufError, MAGIC, MAX_DIMENSIONS, Metadata};
use crate::block::BlockType;

/// A tensor that a file is to hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTensor {
    /// Name, under 64 bytes.
    pub name: String,
    /// Type.
    pub block_type: BlockType,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
}

/// A tensor with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedTensor {
    /// Name.
    pub name: String,
    /// Type.
    pub block_type: BlockType,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// Where the data begins in the file.
    pub offset_bytes: u64,
    /// Size of the data, without padding.
    pub n_bytes: u64,
}

/// Header and places of a file to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    metadata: Metadata,
    tensors: Vec<PlacedTensor>,
    alignment: u32,
    header: Vec<u8>,
    file_bytes: u64,
}

impl Layout {
    /// Places the tensors in order, each at the next multiple of `alignment`.
    ///
    /// `general.alignment` is set in the metadata where it differs from the default of 32, and removed otherwise.
    ///
    /// # Errors
    /// [`GgufError::Layout`] for a bad alignment, a name that is empty, double or too long for llama.cpp, a
    /// rank above 4, rows that the type does not divide, or sizes that are not representable.
    pub fn new(mut metadata: Metadata, tensors: Vec<NewTensor>, alignment: u32) -> Result<Self, GgufError> {
        let wrong = |field: String, problem: String| GgufError::Layout { field, problem };
        if !alignment.is_power_of_two() || !ALIGNMENTS.contains(&alignment) {
            let (from, to) = (ALIGNMENTS.start(), ALIGNMENTS.end());
            let problem = format!("found {alignment}, expected a power of two from {from} to {to}");
            return Err(wrong("alignment".to_owned(), problem));
        }
        if alignment == DEFAULT_ALIGNMENT {
            metadata.remove("general.alignment");
        } else {
            metadata.set("general.alignment", alignment);
        }
        let mut names = HashSet::new();
        let mut placed: Vec<PlacedTensor> = Vec::with_capacity(tensors.len());
        let mut end = 0_u64;
        for tensor in &tensors {
            let wrong = |problem: String| wrong(format!("tensor `{}`", tensor.name), problem);
            if tensor.name.is_empty() || tensor.name.len() >= 64 {
                return Err(wrong(format!("the name has {} bytes, expected 1 to 63", tensor.name.len())));
            }
            if !names.insert(tensor.name.as_str()) {
                return Err(wrong("the name occurs twice".to_owned()));
            }
            if tensor.shape.is_empty() || tensor.shape.len() > MAX_DIMENSIONS as usize {
                let rank = tensor.shape.len();
                return Err(wrong(format!("found {rank} dimensions, expected 1 to {MAX_DIMENSIONS}")));
            }
            let n_bytes = tensor_bytes(tensor.block_type, &tensor.shape).map_err(wrong)?;
            placed.push(PlacedTensor {
                name: tensor.name.clone(),
                block_type: tensor.block_type,
                shape: tensor.shape.clone(),
                offset_bytes: end,
                n_bytes,
            });
            end = end
                .checked_add(n_bytes)
                .and_then(|end| end.checked_next_multiple_of(u64::from(alignment)))
                .filter(|&end| i64::try_from(end).is_ok())
                .ok_or_else(|| wrong("the file would be larger than any file system holds".to_owned()))?;
        }
        let header = header(&metadata, &placed, alignment);
        let data_offset_bytes = header.len() as u64;
        for tensor in &mut placed {
            tensor.offset_bytes += data_offset_bytes;
        }
        Ok(Self { metadata, tensors: placed, alignment, header, file_bytes: data_offset_bytes + end })
    }

    /// The header, padded to the start of the data.
    pub fn header_bytes(&self) -> Vec<u8> {
        self.header.clone()
    }

    /// Where the data section begins in the file.
    pub fn data_offset_bytes(&self) -> u64 {
        self.header.len() as u64
    }

    /// Metadata as written.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors in file order, with offsets from the start of the file.
    pub fn tensors(&self) -> &[PlacedTensor] {
        &self.tensors
    }

    /// Alignment of every tensor.
    pub fn alignment(&self) -> u32 {
        self.alignment
    }

    /// Size of the file, the padding after the last tensor included.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }
}

/// The header's bytes; offsets of `tensors` still count from the data section.
fn header(metadata: &Metadata, tensors: &[PlacedTensor], alignment: u32) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(3_u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        write_string(key, &mut out);
        out.extend(value.type_id().to_le_bytes());
        value.write(&mut out);
    }
    for tensor in tensors {
        write_string(&tensor.name, &mut out);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        out.extend(tensor.shape.iter().rev().flat_map(|n| n.to_le_bytes()));
        out.extend(tensor.block_type.id().to_le_bytes());
        out.extend(tensor.offset_bytes.to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
    out
}
