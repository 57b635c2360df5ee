//! IQ2_XXS: 256 values in 66 bytes. Magnitudes eight at a time from a codebook of 256 entries, signs with a
//! parity rule, a 4-bit scale index every 32 values.
//!
//! `f16 d`; then two 32-bit words for each 32 values: four entry numbers of one byte; four 7-bit sign indices
//! with the scale index in the top four bits. Value = `d (0.5 + scale index) / 4 * magnitude * sign`.

mod quantizer;
mod search;

pub(crate) use search::{ENTRIES, HALVES, MAGNITUDES, N_HALVES, N_LOW};

use super::codebook::{self, Codebook, Eight};
use super::{BadBlock, BlockFormat, Guide, RowQuantizer, grids};
use crate::simd::Level;

/// The format's functions.
pub(super) struct Iq2Xxs;

pub(super) static CODES: [u32; 256] = codebook::spread_all(&grids::IQ2_XXS);

impl Codebook for Iq2Xxs {
    const BLOCK_BYTES: usize = 66;
    const MAGNITUDES: [f32; 8] = [8.0, 25.0, 43.0, 43.0, 43.0, 43.0, 43.0, 43.0];

    #[inline(always)]
    fn group(block: &[u8], group: usize, d: f32) -> [Eight; 4] {
        let word = codebook::read_u32(block, 6 + 8 * group);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.25;
        std::array::from_fn(|k| {
            let entry = block[2 + 8 * group + k];
            Eight { scale, codes: CODES[entry as usize], sign_index: word >> (7 * k) }
        })
    }
}

impl BlockFormat for Iq2Xxs {
    fn dequantize(&self, blocks: &[u8], row: &mut [f32]) {
        codebook::dequantize::<Self>(Level::detect(), blocks, row);
    }

    fn quantizer<'a>(&self, guide: Guide<'a>) -> Option<Box<dyn RowQuantizer + 'a>> {
        Some(Box::new(quantizer::Quantizer::new(guide)))
    }

    fn uses_importance(&self) -> bool {
        true
    }

    fn needs_importance(&self) -> bool {
        true
    }

    fn first_bad_block(&self, blocks: &[u8]) -> Option<BadBlock> {
        codebook::first_bad_block::<Self>(blocks)
    }
}

#[cfg(test)]
mod oracle;
#[cfg(test)]
mod tests;
