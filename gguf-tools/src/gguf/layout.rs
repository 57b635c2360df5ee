//! Laying out a file to be written: sequential offsets, zero padding, as every reader takes it.

use std::collections::HashSet;

use super::regions::tensor_bytes;
use super::value::write_string;
use super::{ALIGNMENTS, DEFAULT_ALIGNMENT, GgufError, MAGIC, MAX_DIMENSIONS, MAX_HEADER_BYTES, Metadata};
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
    /// `general.alignment` is written where it differs from the default of 32, and where the metadata has it already.
    ///
    /// # Errors
    /// [`GgufError::Layout`] for a bad alignment, an empty key, a name that is empty, double or too long for
    /// llama.cpp, a rank above 4, rows that the type does not divide, and sizes that no reader would take.
    pub fn new(mut metadata: Metadata, tensors: Vec<NewTensor>, alignment: u32) -> Result<Self, GgufError> {
        check_alignment(alignment)?;
        if alignment != DEFAULT_ALIGNMENT || metadata.get("general.alignment").is_some() {
            metadata.set("general.alignment", alignment);
        }
        if metadata.get("").is_some() {
            return Err(wrong("metadata", "an empty key", "a name"));
        }
        let mut names = HashSet::with_capacity(tensors.len());
        let mut placed: Vec<PlacedTensor> = Vec::with_capacity(tensors.len());
        let mut end = 0_u64;
        for tensor in &tensors {
            let n_bytes = check_tensor(tensor)?;
            if !names.insert(tensor.name.as_str()) {
                return Err(wrong_tensor(tensor, "the name a second time", "each name once"));
            }
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
                .filter(|&end| end < MAX_DATA_BYTES)
                .ok_or_else(|| {
                    wrong_tensor(tensor, "an end past what file systems hold", "a file below 2^62 bytes")
                })?;
        }
        let header = header(&metadata, &placed, alignment);
        if header.len() > MAX_HEADER_BYTES {
            let found = format!("{} bytes", header.len());
            return Err(wrong("header", found, format!("at most {MAX_HEADER_BYTES}")));
        }
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

/// Bound on the data section, so that every offset in a file stays representable.
const MAX_DATA_BYTES: u64 = 1 << 62;
/// llama.cpp's bound on a tensor's name, its closing zero included.
const MAX_NAME_BYTES: usize = 64;

fn wrong(field: impl Into<String>, found: impl Into<String>, expected: impl Into<String>) -> GgufError {
    GgufError::Layout { field: field.into(), found: found.into(), expected: expected.into() }
}

fn wrong_tensor(tensor: &NewTensor, found: impl Into<String>, expected: impl Into<String>) -> GgufError {
    wrong(format!("tensor `{}`", tensor.name), found, expected)
}

fn check_alignment(alignment: u32) -> Result<(), GgufError> {
    if alignment.is_power_of_two() && ALIGNMENTS.contains(&alignment) {
        return Ok(());
    }
    let (from, to) = (ALIGNMENTS.start(), ALIGNMENTS.end());
    Err(wrong("alignment", alignment.to_string(), format!("a power of two from {from} to {to}")))
}

/// Checks a tensor by itself and gives the size of its data.
fn check_tensor(tensor: &NewTensor) -> Result<u64, GgufError> {
    let (name_bytes, rank) = (tensor.name.len(), tensor.shape.len());
    if !(1..MAX_NAME_BYTES).contains(&name_bytes) {
        let expected = format!("1 to {}", MAX_NAME_BYTES - 1);
        return Err(wrong_tensor(tensor, format!("a name of {name_bytes} bytes"), expected));
    }
    if !(1..=MAX_DIMENSIONS as usize).contains(&rank) {
        return Err(wrong_tensor(tensor, format!("{rank} dimensions"), format!("1 to {MAX_DIMENSIONS}")));
    }
    tensor_bytes(tensor.block_type, &tensor.shape)
        .map_err(|(found, expected)| wrong_tensor(tensor, found, expected))
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
