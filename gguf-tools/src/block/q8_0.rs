//! Q8_0: 32 eight-bit codes with one scale.

use half::f16;

use super::layout::{Block, Blocks, QuantizeBlock, by_block, half, not_finite};
use super::mxfp4::largest_magnitude;
use super::{Guide, RowQuantizer};
use crate::simd::Lanes;

pub(super) static Q8_0: Blocks<BlockQ8_0, 32, 34> = Blocks::new();

/// `f16 d @0; i8 codes[32] @2`: `d * code`.
pub(super) struct BlockQ8_0;

impl Block<32, 34> for BlockQ8_0 {
    #[inline(always)]
    fn dequantize(block: &[u8; 34], values: &mut [f32; 32]) {
        let d = half(block);
        for (value, code) in values.iter_mut().zip(&block[2..]) {
            *value = d * f32::from(*code as i8);
        }
    }

    fn problem(block: &[u8; 34]) -> Option<String> {
        not_finite([("d", half(block))])
    }

    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        Some(by_block::<Self, 32, 34>(guide))
    }
}

/// ggml's bytes: scale = largest magnitude / 127, codes rounded half away from zero with the scale before it is
/// rounded to half precision. Importance plays no part.
impl QuantizeBlock<32, 34> for BlockQ8_0 {
    #[inline(always)]
    fn quantize<L: Lanes>(_: &Guide<'_>, values: &[f32; 32], _: Option<&[f32; 32]>, block: &mut [u8; 34]) {
        let d = largest_magnitude::<L>(values) / 127.0;
        // The inverse of a scale below 2^-128 is not finite; half precision stores that scale as zero anyway.
        let inverse = if d >= f32::MIN_POSITIVE { 1.0 / d } else { 0.0 };
        let stored = f16::from_f32(d.min(f16::MAX.to_f32()));
        block[..2].copy_from_slice(&stored.to_le_bytes());
        for (code, value) in block[2..].iter_mut().zip(values) {
            // The integer conversion knows that the value fits: |value * inverse| is at most 127 and a bit.
            *code = (value * inverse).round() as i32 as u8;
        }
    }
}
