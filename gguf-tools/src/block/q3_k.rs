//! Q3_K: sixteen sub-blocks of 16 three-bit codes, each with a signed six-bit scale.

use super::affine::Starts;
use super::layout::{Block, Blocks, QuantizeBlock, by_block, half, not_finite};
use super::q2_k::pack_pairs;
use super::symmetric::SymmetricFormat;
use super::{Guide, RowQuantizer};
use crate::simd::Lanes;

pub(super) static Q3_K: Blocks<BlockQ3K, 256, 110> = Blocks::new();

/// `u8 high_bits[32] @0; u8 qs[64] @32; u8 scales[12] @96; f16 d @108`.
///
/// Value `128 h + 32 j + l` has the low two bits of its code in bits `2 j` of `qs[32 h + l]` and the third in
/// bit `4 h + j` of `high_bits[l]`. Value = `d * (scale - 32) * (code - 4)`.
pub(super) struct BlockQ3K;

/// Sixteen six-bit scales: the low four bits of scale `k` in a nibble of byte `k % 8`, the high two in byte `8 + k % 4`.
#[inline(always)]
fn unpack_scale(packed: &[u8], k: usize) -> i32 {
    let low = packed[k % 8] >> (k / 8 * 4) & 15;
    let high = packed[8 + k % 4] >> (k / 4 * 2) & 3;
    i32::from(low | high << 4) - 32
}

impl Block<256, 110> for BlockQ3K {
    #[inline(always)]
    fn dequantize(block: &[u8; 110], values: &mut [f32; 256]) {
        let d = half(&block[108..]);
        for b in 0..16 {
            let scale = d * unpack_scale(&block[96..108], b) as f32;
            let (bit, shift) = (b / 2, b / 2 % 4 * 2);
            let (first, first_high) = (32 + b / 8 * 32 + b % 2 * 16, b % 2 * 16);
            for i in 0..16 {
                let code = block[first + i] >> shift & 3 | (block[first_high + i] >> bit & 1) << 2;
                values[16 * b + i] = scale * (i32::from(code) - 4) as f32;
            }
        }
    }

    fn problem(block: &[u8; 110]) -> Option<String> {
        not_finite([("d", half(&block[108..]))])
    }

    const USES_IMPORTANCE: bool = true;

    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        Some(by_block::<Self, 256, 110>(guide))
    }
}

const FORMAT: SymmetricFormat = SymmetricFormat {
    codes: [-4.0, 3.0],
    scales: [-32.0, 31.0],
    starts: Starts { first: 2.2, step: 0.2, n: 14 },
    both_signs: true,
    refits: 2,
};

impl QuantizeBlock<256, 110> for BlockQ3K {
    #[inline(always)]
    fn quantize<L: Lanes>(
        guide: &Guide<'_>,
        values: &[f32; 256],
        importance: Option<&[f32; 256]>,
        block: &mut [u8; 110],
    ) {
        let stored = FORMAT.quantize::<L, 16, 2, 16>(guide, values, importance);
        let codes = &stored.codes;
        let scales = stored.scales.map(|scale| scale.wrapping_add(32));
        for l in 0..32 {
            block[l] = (0..8).fold(0, |bits, b| bits | (codes[32 * b + l] >> 2) << b);
        }
        pack_pairs(codes, &mut block[32..96]);
        let packed = &mut block[96..108];
        for k in 0..8 {
            packed[k] = scales[k] & 15 | scales[k + 8] << 4;
        }
        for k in 0..4 {
            packed[8 + k] = (0..4).fold(0, |bits, j| bits | (scales[k + 4 * j] >> 4) << (2 * j));
        }
        block[108..].copy_from_slice(&stored.d.to_le_bytes());
    }
}
