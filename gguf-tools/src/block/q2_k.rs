//! Q2_K: sixteen sub-blocks of 16 two-bit codes, each with a four-bit scale and a four-bit minimum.

use super::affine::{AffineFormat, Starts};
use super::layout::{Block, Blocks, QuantizeBlock, by_block, half, not_finite};
use super::super_block::{SuperBlock, bytes_of, turned_back};
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

    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        by_block::<Self, 256, 84>(guide)
    }
}

const FORMAT: AffineFormat = AffineFormat {
    codes: 3.0,
    scales: 15.0,
    starts: Starts { first: -0.6, step: 0.3, n: 6 },
    offsets: &[-0.15, -0.05, 0.05, 0.15, 0.25, 0.35],
    reach: 2,
    refits: 3,
};

impl QuantizeBlock<256, 84> for BlockQ2K {
    #[inline(always)]
    fn quantize<L: Lanes>(
        guide: &Guide<'_>,
        values: &[f32; 256],
        importance: Option<&[f32; 256]>,
        block: &mut [u8; 84],
    ) {
        block.fill(0);
        let Some(prepared) = SuperBlock::<L, 16, 2>::new(guide, values, importance) else { return };
        let found = FORMAT.search(&prepared, guide.scale_gain.unwrap_or(1.0));
        let (scales, minimums) = (bytes_of(&found.scales), bytes_of(&found.minimums));
        for b in 0..16 {
            block[b] = scales[b] | minimums[b] << 4;
        }
        pack_pairs(&turned_back(&found.codes), &mut block[16..80]);
        block[80..82].copy_from_slice(&found.d.to_le_bytes());
        block[82..].copy_from_slice(&found.dmin.to_le_bytes());
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
