//! Q3_K: sixteen sub-blocks of 16 three-bit codes, each with a signed six-bit scale.

use super::layout::{Block, Blocks, half, not_finite};

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
}
