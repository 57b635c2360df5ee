//! MXFP4: E2M1 values with one power-of-two scale (E8M0) every 32. OCP Microscaling Formats 1.0.

use super::layout::{Block, Blocks, QuantizeBlock, by_block};
use super::{Guide, RowQuantizer};
use crate::simd::{Lanes, to_array};

pub(super) static MXFP4: Blocks<BlockMxfp4, 32, 17> = Blocks::new();

/// `u8 e @0; u8 qs[16] @1`: value `j` in the low nibble of byte `j`, value `j + 16` in the high one.
/// Value = E2M1(code) x 2^(e - 127); `e` = 255 is NaN and refused.
pub(super) struct BlockMxfp4;

/// Twice the value of each E2M1 code. Code 8 reads as `+0`, as in ggml.
pub(super) const DOUBLED_E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// The values halfway between neighbouring E2M1 magnitudes; a value on one takes the lower code.
const HALFWAY: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];

/// 2^(e - 128), which is subnormal for `e` below 2.
#[inline(always)]
pub(super) fn half_scale(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 })
}

impl Block<32, 17> for BlockMxfp4 {
    #[inline(always)]
    fn dequantize(block: &[u8; 17], values: &mut [f32; 32]) {
        let scale = half_scale(block[0]);
        for j in 0..16 {
            values[j] = DOUBLED_E2M1[usize::from(block[1 + j] & 15)] * scale;
            values[j + 16] = DOUBLED_E2M1[usize::from(block[1 + j] >> 4)] * scale;
        }
    }

    fn problem(block: &[u8; 17]) -> Option<String> {
        (block[0] == 255).then(|| "scale byte is 255, which is NaN".to_owned())
    }

    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        Some(by_block::<Self, 32, 17>(guide))
    }
}

/// The scale puts the largest magnitude in [4, 8), each value takes the nearest code: values that already are
/// E2M1 times a common power of two come back exactly. Importance plays no part.
impl QuantizeBlock<32, 17> for BlockMxfp4 {
    #[inline(always)]
    fn quantize<L: Lanes>(_: &Guide<'_>, values: &[f32; 32], _: Option<&[f32; 32]>, block: &mut [u8; 17]) {
        let e = scale_byte(largest_magnitude::<L>(values));
        block[0] = e;
        let inverse = f32::from_bits((254 - u32::from(e)) << 23);
        let mut codes = [0u8; 32];
        for (code, value) in codes.iter_mut().zip(values) {
            let magnitude = value.abs() * inverse;
            let level: u32 = HALFWAY.iter().map(|&halfway| u32::from(magnitude > halfway)).sum();
            let sign = value.to_bits() >> 28 & u32::from(level > 0) << 3;
            *code = (level | sign) as u8;
        }
        for j in 0..16 {
            block[1 + j] = codes[j] | codes[j + 16] << 4;
        }
    }
}

/// `floor(log2(largest)) - 2` with the bias of E8M0, at least 0; 0 for a block of zeros.
#[inline(always)]
fn scale_byte(largest: f32) -> u8 {
    (largest.to_bits() >> 23).saturating_sub(2) as u8
}

#[inline(always)]
pub(super) fn largest_magnitude<L: Lanes>(values: &[f32]) -> f32 {
    let start = L::splat(0.0);
    let lanes = values.chunks_exact(8).fold(start, |largest, eight| L::load(eight).abs().max(largest));
    to_array(lanes).into_iter().fold(0.0, f32::max)
}
