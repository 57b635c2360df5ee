//! NVFP4: E2M1 values with one E4M3 scale every 16, read only.

use super::layout::{Block, Blocks};
use super::mxfp4::DOUBLED_E2M1;

pub(super) static NVFP4: Blocks<BlockNvfp4, 64, 36> = Blocks::new();

/// `u8 d[4] @0; u8 qs[32] @4`: four sub-blocks of 16, each eight bytes with value `j` in the low nibble of byte `j`
/// and `j + 8` in the high one.
pub(super) struct BlockNvfp4;

/// Half the value of an E4M3 scale whose sign is ignored (the doubled E2M1 table takes the other factor of two).
/// As in ggml the positive NaN code counts as zero, and the negative one as the number that its bits would be.
#[inline(always)]
fn half_scale(byte: u8) -> f32 {
    let (exponent, mantissa) = (byte >> 3 & 15, byte & 7);
    match byte {
        0x7F => 0.0,
        _ if exponent == 0 => f32::from(mantissa) / 1024.0,
        _ => f32::from(8 + mantissa) * f32::from_bits((u32::from(exponent) + 116) << 23),
    }
}

impl Block<64, 36> for BlockNvfp4 {
    #[inline(always)]
    fn dequantize(block: &[u8; 36], values: &mut [f32; 64]) {
        for s in 0..4 {
            let scale = half_scale(block[s]);
            for j in 0..8 {
                let byte = block[4 + 8 * s + j];
                values[16 * s + j] = DOUBLED_E2M1[usize::from(byte & 15)] * scale;
                values[16 * s + 8 + j] = DOUBLED_E2M1[usize::from(byte >> 4)] * scale;
            }
        }
    }

    fn problem(block: &[u8; 36]) -> Option<String> {
        let s = block[..4].iter().position(|byte| byte & 0x7F == 0x7F)?;
        Some(format!("scale of sub-block {s} is NaN"))
    }
}
