//! Sizes and places of tensor data: checked arithmetic on numbers that come from files.

use super::{Header, HeaderTensor, RegionProblem};
use crate::block::BlockType;

/// Bytes of a tensor, or what was found and what was expected instead.
pub(super) fn tensor_bytes(block_type: BlockType, shape: &[u64]) -> Result<u64, (String, String)> {
    if shape.contains(&0) {
        return Err((format!("shape {shape:?}"), "no dimension of 0".to_owned()));
    }
    let columns = shape.last().copied().unwrap_or(1);
    let values = block_type.values_per_block();
    if !columns.is_multiple_of(values as u64) {
        let expected = format!("rows of a multiple of {values} values, the block of {block_type}");
        return Err((format!("rows of {columns} values (shape {shape:?})"), expected));
    }
    let rows = &shape[..shape.len().saturating_sub(1)];
    block_type
        .row_bytes(columns)
        .and_then(|row_bytes| rows.iter().try_fold(row_bytes, |bytes, &n| bytes.checked_mul(n)))
        // Offsets and sums of sizes must stay representable too, and values countable.
        .filter(|&bytes| i64::try_from(bytes).is_ok() && n_values(shape).is_some())
        .ok_or_else(|| {
            (
                format!("shape {shape:?} in {block_type}, whose size in bytes is not representable"),
                "a size below 2^63 bytes".to_owned(),
            )
        })
}

fn n_values(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1_u64, |product, &n| product.checked_mul(n)).filter(|&n| i64::try_from(n).is_ok())
}

/// Every tensor must be aligned and have the room that its type and shape need before the next one begins.
pub(super) fn check(header: &Header) -> Vec<RegionProblem> {
    let alignment = u64::from(header.alignment);
    let mut by_offset: Vec<&HeaderTensor> = header.tensors.iter().collect();
    by_offset.sort_by_key(|tensor| tensor.offset_bytes);
    let mut problems = Vec::new();
    for (i, tensor) in by_offset.iter().enumerate() {
        let mut problem = |found: String, expected: String| {
            problems.push(RegionProblem { tensor: tensor.name.clone(), found, expected });
        };
        if !tensor.offset_bytes.is_multiple_of(alignment) {
            let found = format!("offset {}", tensor.offset_bytes);
            problem(found, format!("a multiple of the alignment {alignment}"));
        }
        if file_end(header, tensor).is_none() {
            problem(format!("offset {}", tensor.offset_bytes), "data that ends below byte 2^63".to_owned());
            continue;
        }
        let Some(next) = by_offset.get(i + 1) else { continue };
        let room = next.offset_bytes - tensor.offset_bytes;
        if room < tensor.n_bytes {
            problem(
                format!("{room} bytes reserved before `{}`", next.name),
                format!("{} bytes for shape {:?} in {}", tensor.n_bytes, tensor.shape, tensor.block_type),
            );
        }
    }
    problems
}

/// First byte of the file after a tensor's data and the padding behind it, if representable as a file offset.
fn file_end(header: &Header, tensor: &HeaderTensor) -> Option<u64> {
    tensor
        .offset_bytes
        .checked_add(tensor.n_bytes)?
        .checked_next_multiple_of(u64::from(header.alignment))?
        .checked_add(header.data_offset_bytes)
        .filter(|&end| i64::try_from(end).is_ok())
}
