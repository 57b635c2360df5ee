//! IQ2_XS: as IQ2_XXS with a codebook of 512 entries and a scale index every 16 values. Only read.
//!
//! `f16 d`; 32 words of 16 bits, one for each eight values: entry in the low nine bits, sign index above;
//! then eight bytes of two 4-bit scale indices, one byte for each 32 values.
//! Value = `d (0.5 + scale index) / 4 * magnitude * sign`.

use super::codebook::{self, Codebook, Eight};
use super::{BadBlock, BlockFormat, grids};
use crate::simd::Level;

/// The format's functions.
pub(super) struct Iq2Xs;

static CODES: [u32; 512] = codebook::spread_all(&grids::IQ2_XS);

impl Codebook for Iq2Xs {
    const BLOCK_BYTES: usize = 74;
    const MAGNITUDES: [f32; 8] = [8.0, 25.0, 43.0, 43.0, 43.0, 43.0, 43.0, 43.0];

    #[inline(always)]
    fn group(block: &[u8], group: usize, d: f32) -> [Eight; 4] {
        let scale_indices = u32::from(block[66 + group]);
        let scales = [scale_indices & 15, scale_indices >> 4].map(|index| d * (0.5 + index as f32) * 0.25);
        std::array::from_fn(|k| {
            let at = 2 + 8 * group + 2 * k;
            let word = u32::from(u16::from_le_bytes([block[at], block[at + 1]]));
            Eight { scale: scales[k / 2], codes: CODES[(word & 511) as usize], sign_index: word >> 9 }
        })
    }
}

impl BlockFormat for Iq2Xs {
    fn dequantize(&self, blocks: &[u8], row: &mut [f32]) {
        codebook::dequantize::<Self>(Level::detect(), blocks, row);
    }

    fn first_bad_block(&self, blocks: &[u8]) -> Option<BadBlock> {
        codebook::first_bad_block::<Self>(blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iq2_xs_equals_the_golden_blocks_bit_for_bit() {
        codebook::tests::check_golden::<Iq2Xs>(crate::block::BlockType::Iq2Xs);
    }
}
