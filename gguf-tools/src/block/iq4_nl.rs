//! IQ4_NL and IQ4_XS: sixteen values spaced unevenly, read only.

use super::layout::{Block, Blocks, half, not_finite};

pub(super) static IQ4_NL: Blocks<BlockIq4Nl, 32, 18> = Blocks::new();
pub(super) static IQ4_XS: Blocks<BlockIq4Xs, 256, 136> = Blocks::new();

/// `f16 d @0; u8 qs[16] @2`: `d * VALUES[code]`; value `j` in the low nibble of byte `j`, `j + 16` in the high one.
pub(super) struct BlockIq4Nl;
/// `f16 d @0; u16 scales_high @2; u8 scales_low[4] @4; u8 qs[128] @8`: eight IQ4_NL sub-blocks whose scales are
/// `d * (six bits - 32)`.
pub(super) struct BlockIq4Xs;

/// What the sixteen codes stand for.
const VALUES: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

#[inline(always)]
fn widen(scale: f32, nibbles: &[u8], values: &mut [f32]) {
    for j in 0..16 {
        values[j] = scale * VALUES[usize::from(nibbles[j] & 15)];
        values[j + 16] = scale * VALUES[usize::from(nibbles[j] >> 4)];
    }
}

impl Block<32, 18> for BlockIq4Nl {
    #[inline(always)]
    fn dequantize(block: &[u8; 18], values: &mut [f32; 32]) {
        widen(half(block), &block[2..], values);
    }

    fn problem(block: &[u8; 18]) -> Option<String> {
        not_finite([("d", half(block))])
    }
}

impl Block<256, 136> for BlockIq4Xs {
    #[inline(always)]
    fn dequantize(block: &[u8; 136], values: &mut [f32; 256]) {
        let d = half(block);
        let high = u16::from_le_bytes([block[2], block[3]]);
        for b in 0..8 {
            let low_bits = i32::from(block[4 + b / 2] >> (4 * (b % 2)) & 15);
            let high_bits = i32::from(high >> (2 * b) & 3);
            let scale = d * ((low_bits | high_bits << 4) - 32) as f32;
            widen(scale, &block[8 + 16 * b..], &mut values[32 * b..]);
        }
    }

    fn problem(block: &[u8; 136]) -> Option<String> {
        not_finite([("d", half(block))])
    }
}
