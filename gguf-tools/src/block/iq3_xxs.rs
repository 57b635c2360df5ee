//! IQ3_XXS: magnitudes four at a time from a codebook of 256 entries with eight levels. Only read.
//!
//! `f16 d`; 64 entry numbers of one byte, one for each four values; then a 32-bit word for each 32 values:
//! four 7-bit sign indices, each for eight values, and the scale index in the top four bits.
//! Value = `d (0.5 + scale index) / 2 * magnitude * sign`.

use super::codebook::{self, Codebook, Eight};
use super::{BadBlock, BlockFormat, grids};
use crate::simd::Level;

/// The format's functions.
pub(super) struct Iq3Xxs;

impl Codebook for Iq3Xxs {
    const BLOCK_BYTES: usize = 98;
    const MAGNITUDES: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];

    #[inline(always)]
    fn group(block: &[u8], group: usize, d: f32) -> [Eight; 4] {
        let word = codebook::read_u32(block, 66 + 4 * group);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
        std::array::from_fn(|k| {
            let at = 2 + 8 * group + 2 * k;
            let four = |at: usize| u32::from(grids::IQ3_XXS[block[at] as usize]);
            Eight { scale, codes: four(at) | four(at + 1) << 12, sign_index: word >> (7 * k) }
        })
    }
}

impl BlockFormat for Iq3Xxs {
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
    fn iq3_xxs_equals_the_golden_blocks_bit_for_bit() {
        codebook::tests::check_golden::<Iq3Xxs>(crate::block::BlockType::Iq3Xxs);
    }
}
