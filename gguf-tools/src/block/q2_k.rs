//! Q2_K: sixteen sub-blocks of 16 two-bit codes, each with a four-bit scale and a four-bit minimum.

use super::layout::{Block, Blocks, half, not_finite};

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
}
