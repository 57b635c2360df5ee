//! Q6_K: sixteen sub-blocks of 16 six-bit codes, each with a signed eight-bit scale.

use super::layout::{Block, Blocks, half, not_finite};

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
}
