//! Q6_K: sixteen sub-blocks of 16 six-bit codes, each with a signed eight-bit scale.

use half::f16;

use super::affine::Starts;
use super::layout::{Block, Blocks, QuantizeBlock, by_block, half, not_finite};
use super::super_block::{SuperBlock, bytes_of, turned_back};
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

    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        by_block::<Self, 256, 210>(guide)
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
        let zero = L::splat(0.0);
        let (d, scales, codes) = match SuperBlock::<L, 16, 2>::new(guide, values, importance) {
            Some(prepared) => {
                let found = FORMAT.search(&prepared, guide.scale_gain.unwrap_or(1.0));
                (found.d, found.scales, found.codes)
            }
            None => (f16::ZERO, [zero; 2], [[zero; 16]; 2]),
        };
        let codes = turned_back(&codes.map(|round| round.map(|code| code + L::splat(32.0))));
        for h in 0..2 {
            let codes = &codes[128 * h..][..128];
            for l in 0..64 {
                block[64 * h + l] = codes[l] & 15 | codes[l + 64] << 4;
            }
            for l in 0..32 {
                block[128 + 32 * h + l] =
                    (0..4).fold(0, |bits, j| bits | (codes[32 * j + l] >> 4) << (2 * j));
            }
        }
        block[192..208].copy_from_slice(&bytes_of(&scales));
        block[208..].copy_from_slice(&d.to_le_bytes());
    }
}
