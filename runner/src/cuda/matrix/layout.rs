//! Orders in which weights lie on the device.
//!
//! Blocks of 18 to 144 bytes are bad for a GPU, whose lanes want 16 aligned bytes each. For the types that have fast
//! kernels the bytes of a matrix are therefore divided into planes: first the codes of all rows, then the scales of all
//! rows. Within a plane the order is that of the file, but for the scales of Q2_K, of which the four that one lane needs
//! are put side by side. The bytes are the same, and the way back is exact.

use bytemuck::{Pod, Zeroable};
use gguf_tools::block::BlockType;

/// Bytes of the largest block that is divided.
const MOST_BLOCK_BYTES: usize = 144;

/// Where each byte of a block goes. Passed to the kernel as it is.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Planes {
    block_bytes: u32,
    used: u32,
    plane_bytes: [u32; 3],
    unused: u32,
    plane: [u8; MOST_BLOCK_BYTES],
    offset: [u8; MOST_BLOCK_BYTES],
}

impl Planes {
    /// The planes of a type whose rows have `columns` values; `None` if its matrices stay as in the file.
    pub fn of(block_type: BlockType, columns: usize) -> Option<Self> {
        let place: fn(usize) -> (usize, usize) = match block_type {
            // The scale comes first, then the codes.
            BlockType::Q8_0 | BlockType::Iq2Xxs => |byte| if byte < 2 { (1, byte) } else { (0, byte - 2) },
            BlockType::Mxfp4 => |byte| if byte < 1 { (1, byte) } else { (0, byte - 1) },
            BlockType::Q4K => |byte| if byte < 16 { (1, byte) } else { (0, byte - 16) },
            BlockType::Q2K => |byte| match byte {
                // Scale 8h + 2j + s to place 8h + 4s + j.
                0..16 => (1, byte / 8 * 8 + byte % 2 * 4 + byte / 2 % 4),
                16..80 => (0, byte - 16),
                _ => (2, byte - 80),
            },
            _ => return None,
        };
        if columns == 0 || !columns.is_multiple_of(256) {
            return None;
        }
        let block_bytes = block_type.bytes_per_block();
        let mut planes = Self { block_bytes: block_bytes as u32, used: 0, ..Zeroable::zeroed() };
        for byte in 0..block_bytes {
            let (plane, offset) = place(byte);
            planes.plane[byte] = plane as u8;
            planes.offset[byte] = offset as u8;
            planes.plane_bytes[plane] += 1;
            planes.used = planes.used.max(plane as u32 + 1);
        }
        Some(planes)
    }

    /// Offset of plane `plane` in a matrix of `rows` rows of `row_blocks` blocks.
    pub fn start(&self, plane: usize, rows: usize, row_blocks: usize) -> usize {
        self.plane_bytes[..plane].iter().map(|&bytes| rows * row_blocks * bytes as usize).sum()
    }

    /// For each byte of whole rows in the file's order its place in the planes of a matrix that has just these rows.
    fn places(&self, n_bytes: usize, row_blocks: usize) -> impl Iterator<Item = usize> + '_ {
        let rows = n_bytes / (row_blocks * self.block_bytes as usize);
        (0..n_bytes).map(move |i| {
            let (block, byte) = (i / self.block_bytes as usize, i % self.block_bytes as usize);
            let plane = self.plane[byte] as usize;
            self.start(plane, rows, row_blocks)
                + block * self.plane_bytes[plane] as usize
                + self.offset[byte] as usize
        })
    }

    /// Divides whole rows: what the device's kernel does.
    pub fn divide(&self, blocks: &[u8], row_blocks: usize) -> Vec<u8> {
        let mut planes = vec![0; blocks.len()];
        for (&byte, place) in blocks.iter().zip(self.places(blocks.len(), row_blocks)) {
            planes[place] = byte;
        }
        planes
    }

    /// The way back.
    pub fn join(&self, planes: &[u8], row_blocks: usize) -> Vec<u8> {
        self.places(planes.len(), row_blocks).map(|place| planes[place]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_place_of_its_own_and_comes_back() {
        for block_type in
            [BlockType::Q8_0, BlockType::Iq2Xxs, BlockType::Q2K, BlockType::Q4K, BlockType::Mxfp4]
        {
            let columns = 768;
            let planes = Planes::of(block_type, columns).unwrap();
            let row_blocks = columns / block_type.values_per_block();
            let n = 5 * row_blocks * block_type.bytes_per_block();
            let mut places: Vec<usize> = planes.places(n, row_blocks).collect();
            let blocks: Vec<u8> = (0..n).map(|i| (i * 7 + i / 251) as u8).collect();
            assert_eq!(planes.join(&planes.divide(&blocks, row_blocks), row_blocks), blocks);
            places.sort_unstable();
            assert!(places.into_iter().eq(0..n), "{block_type}");
        }
    }

    #[test]
    fn planes_hold_codes_and_scales_where_kernels_expect_them() {
        // Two rows of one block each: codes of both rows, scales of both rows, d and dmin of both rows.
        let planes = Planes::of(BlockType::Q2K, 256).unwrap();
        assert_eq!([0, 1, 2].map(|plane| planes.start(plane, 2, 1)), [0, 128, 160]);
        let mut blocks = vec![0; 168];
        blocks[84 + 16] = 1; // First code byte of row 1.
        blocks[84 + 8 + 2 * 3 + 1] = 2; // Row 1, h = 1, j = 3, s = 1.
        blocks[80] = 3; // d of row 0.
        let divided = planes.divide(&blocks, 1);
        let found: Vec<usize> = (0..168).filter(|&i| divided[i] != 0).collect();
        assert_eq!(found, [64, 128 + 16 + 8 + 4 + 3, 160]);
    }
}
