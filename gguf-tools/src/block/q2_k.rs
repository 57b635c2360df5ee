//! Q2_K: sixteen sub-blocks of 16 two-bit codes, each with a four-bit scale and a four-bit minimum.

use super::affine::{AffineFormat, Starts};
use super::layout::{Block, Blocks, QuantizeBlock, by_block, half, not_finite};
use super::{Guide, RowQuantizer};
use crate::simd::Lanes;

pub(super) static Q2_K: Blocks<BlockQ2K, 256, 84> = Blocks::new();

/// `u8 scales[16] @0; u8 qs[64] @16; f16 d @80; f16 dmin @82`.
///
/// Low nibble of `scales[b]`: scale, high nibble: minimum of sub-block `b`. Value `128 h + 32 j + l` has its code in
/// bits `2 j` of `qs[32 h + l]`. Value = `d * scale * code - dmin * minimum`.
pub(super) struct BlockQ2K;

impl Block<256, 84> for BlockQ2K {
    #[inline(always)]
    fn dequantize(block: &[u8; 84], values: &mut [f32; 256]) {
        let (d, dmin) = (half(&block[80..]), half(&block[82..]));
        for b in 0..16 {
            let scale = d * f32::from(block[b] & 15);
            let minimum = dmin * f32::from(block[b] >> 4);
            let (shift, first) = (b / 2 % 4 * 2, 16 + b / 8 * 32 + b % 2 * 16);
            for i in 0..16 {
                values[16 * b + i] = scale * f32::from(block[first + i] >> shift & 3) - minimum;
            }
        }
    }

    fn problem(block: &[u8; 84]) -> Option<String> {
        not_finite([("d", half(&block[80..])), ("dmin", half(&block[82..]))])
    }

    const USES_IMPORTANCE: bool = true;

    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        Some(by_block::<Self, 256, 84>(guide))
    }
}

/// Least squares with so few codes leaves the weights 4 % too small (the product with the source, not the error). The gain
/// takes half of that back for 1 % more error: both are then closer to the source than with ggml's search.
const FORMAT: AffineFormat = AffineFormat {
    codes: 3.0,
    scales: 15.0,
    starts: Starts { first: -0.6, step: 0.3, n: 6 },
    offsets: &[-0.15, -0.05, 0.05, 0.15, 0.25, 0.35],
    reach: 2,
    refits: 3,
    gain: 1.02,
};

impl QuantizeBlock<256, 84> for BlockQ2K {
    #[inline(always)]
    fn quantize<L: Lanes>(
        guide: &Guide<'_>,
        values: &[f32; 256],
        importance: Option<&[f32; 256]>,
        block: &mut [u8; 84],
    ) {
        let stored = FORMAT.quantize::<L, 16, 2, 16>(guide, values, importance);
        for b in 0..16 {
            block[b] = stored.scales[b] | stored.minimums[b] << 4;
        }
        pack_pairs(&stored.codes, &mut block[16..80]);
        block[80..82].copy_from_slice(&stored.d.to_le_bytes());
        block[82..].copy_from_slice(&stored.dmin.to_le_bytes());
    }
}

/// Two bits a code, four codes 32 apart in one byte.
#[inline(always)]
pub(super) fn pack_pairs(codes: &[u8; 256], packed: &mut [u8]) {
    for (packed, codes) in packed.chunks_exact_mut(32).zip(codes.chunks_exact(128)) {
        for l in 0..32 {
            packed[l] =
                codes[l] & 3 | (codes[l + 32] & 3) << 2 | (codes[l + 64] & 3) << 4 | (codes[l + 96] & 3) << 6;
        }
    }
}
