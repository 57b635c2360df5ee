//! Q6_K: sixteen sub-blocks of 16 six-bit codes, each with a signed eight-bit scale.

use super::affine::Starts;
use super::layout::{Block, Blocks, QuantizeBlock, by_block, half, not_finite};
use super::symmetric::SymmetricFormat;
use super::{Guide, RowQuantizer};
use crate::simd::Lanes;

pub(super) static Q6_K: Blocks<BlockQ6K, 256, 210> = Blocks::new();

/// `u8 low_bits[128] @0; u8 high_bits[64] @128; i8 scales[16] @192; f16 d @208`.
///
/// Value `128 h + 32 j + l`: the low four bits of its code in nibble `j / 2` of `low_bits[64 h + 32 (j % 2) + l]`,
/// the high two in bits `2 j` of `high_bits[32 h + l]`. Value = `d * scale * (code - 32)`.
pub(super) struct BlockQ6K;

impl Block<256, 210> for BlockQ6K {
    #[inline(always)]
    fn dequantize(block: &[u8; 210], values: &mut [f32; 256]) {
        let d = half(&block[208..]);
        for b in 0..16 {
            let scale = d * f32::from(block[192 + b] as i8);
            let (h, j, part) = (b / 8, b / 2 % 4, b % 2 * 16);
            let (low, high) = (64 * h + j % 2 * 32 + part, 128 + 32 * h + part);
            for i in 0..16 {
                let code = block[low + i] >> (j / 2 * 4) & 15 | (block[high + i] >> (2 * j) & 3) << 4;
                values[16 * b + i] = scale * (i32::from(code) - 32) as f32;
            }
        }
    }

    fn problem(block: &[u8; 210]) -> Option<String> {
        not_finite([("d", half(&block[208..]))])
    }

    const USES_IMPORTANCE: bool = true;

    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        Some(by_block::<Self, 256, 210>(guide))
    }
}

const FORMAT: SymmetricFormat = SymmetricFormat {
    codes: [-32.0, 31.0],
    scales: [-128.0, 127.0],
    starts: Starts { first: 29.5, step: 0.3, n: 12 },
    both_signs: false,
    refits: 1,
};

impl QuantizeBlock<256, 210> for BlockQ6K {
    #[inline(always)]
    fn quantize<L: Lanes>(
        guide: &Guide<'_>,
        values: &[f32; 256],
        importance: Option<&[f32; 256]>,
        block: &mut [u8; 210],
    ) {
        let stored = FORMAT.quantize::<L, 16, 2, 16>(guide, values, importance);
        for h in 0..2 {
            let codes = &stored.codes[128 * h..][..128];
            for l in 0..64 {
                block[64 * h + l] = codes[l] & 15 | codes[l + 64] << 4;
            }
            for l in 0..32 {
                block[128 + 32 * h + l] =
                    (0..4).fold(0, |bits, j| bits | (codes[32 * j + l] >> 4) << (2 * j));
            }
        }
        block[192..208].copy_from_slice(&stored.scales);
        block[208..].copy_from_slice(&stored.d.to_le_bytes());
    }
}
