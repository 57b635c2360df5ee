//! Q4_0, Q4_1, Q5_0 and Q5_1: 32 values with one scale, read only.
//!
//! The sixteen bytes of low nibbles hold value `j` in the low half of byte `j` and value `j + 16` in its high half.
//! Q5 formats keep the fifth bits in a 32-bit word, that of value `j` in bit `j`.

use super::layout::{Block, Blocks, half, not_finite};

pub(super) static Q4_0: Blocks<BlockQ4_0, 32, 18> = Blocks::new();
pub(super) static Q4_1: Blocks<BlockQ4_1, 32, 20> = Blocks::new();
pub(super) static Q5_0: Blocks<BlockQ5_0, 32, 22> = Blocks::new();
pub(super) static Q5_1: Blocks<BlockQ5_1, 32, 24> = Blocks::new();

/// `f16 d @0; u8 qs[16] @2`: `d * (code - 8)`.
pub(super) struct BlockQ4_0;
/// `f16 d @0; f16 m @2; u8 qs[16] @4`: `d * code + m`.
pub(super) struct BlockQ4_1;
/// `f16 d @0; u32 qh @2; u8 qs[16] @6`: `d * (code - 16)`.
pub(super) struct BlockQ5_0;
/// `f16 d @0; f16 m @2; u32 qh @4; u8 qs[16] @8`: `d * code + m`.
pub(super) struct BlockQ5_1;

#[inline(always)]
fn widen(nibbles: &[u8], fifth_bits: &[u8], values: &mut [f32; 32], value: impl Fn(i32) -> f32) {
    let high = fifth_bits.iter().rev().fold(0u32, |word, byte| word << 8 | u32::from(*byte));
    for j in 0..16 {
        let low_code = u32::from(nibbles[j] & 15) | (high >> j & 1) << 4;
        let high_code = u32::from(nibbles[j] >> 4) | (high >> (j + 16) & 1) << 4;
        values[j] = value(low_code as i32);
        values[j + 16] = value(high_code as i32);
    }
}

impl Block<32, 18> for BlockQ4_0 {
    #[inline(always)]
    fn dequantize(block: &[u8; 18], values: &mut [f32; 32]) {
        let d = half(block);
        widen(&block[2..], &[], values, |code| d * (code - 8) as f32);
    }

    fn problem(block: &[u8; 18]) -> Option<String> {
        not_finite([("d", half(block))])
    }
}

impl Block<32, 20> for BlockQ4_1 {
    #[inline(always)]
    fn dequantize(block: &[u8; 20], values: &mut [f32; 32]) {
        let (d, m) = (half(block), half(&block[2..]));
        widen(&block[4..], &[], values, |code| d * code as f32 + m);
    }

    fn problem(block: &[u8; 20]) -> Option<String> {
        not_finite([("d", half(block)), ("m", half(&block[2..]))])
    }
}

impl Block<32, 22> for BlockQ5_0 {
    #[inline(always)]
    fn dequantize(block: &[u8; 22], values: &mut [f32; 32]) {
        let d = half(block);
        widen(&block[6..], &block[2..6], values, |code| d * (code - 16) as f32);
    }

    fn problem(block: &[u8; 22]) -> Option<String> {
        not_finite([("d", half(block))])
    }
}

impl Block<32, 24> for BlockQ5_1 {
    #[inline(always)]
    fn dequantize(block: &[u8; 24], values: &mut [f32; 32]) {
        let (d, m) = (half(block), half(&block[2..]));
        widen(&block[8..], &block[4..8], values, |code| d * code as f32 + m);
    }

    fn problem(block: &[u8; 24]) -> Option<String> {
        not_finite([("d", half(block)), ("m", half(&block[2..]))])
    }
}
