//! Q4_K and Q5_K: eight sub-blocks of 32 codes, each with a six-bit scale and a six-bit minimum.

use half::f16;

use super::affine::{AffineFormat, Starts};
use super::layout::{Block, Blocks, QuantizeBlock, by_block, half, not_finite};
use super::{Guide, RowQuantizer};
use crate::simd::Lanes;

pub(super) static Q4_K: Blocks<BlockQ4K, 256, 144> = Blocks::new();
pub(super) static Q5_K: Blocks<BlockQ5K, 256, 176> = Blocks::new();

/// `f16 d @0; f16 dmin @2; u8 scales[12] @4; u8 qs[128] @16`.
///
/// Value `64 c + l` has its code in the low nibble of `qs[32 c + l]`, value `64 c + 32 + l` in the high one.
/// Value = `d * scale * code - dmin * minimum`.
pub(super) struct BlockQ4K;
/// `f16 d @0; f16 dmin @2; u8 scales[12] @4; u8 fifth_bits[32] @16; u8 qs[128] @48`.
///
/// As Q4_K, with the fifth bit of value `32 b + l` in bit `b` of `fifth_bits[l]`.
pub(super) struct BlockQ5K;

/// Scale and minimum of sub-block `b`: whole bytes' low six bits for the first four, the others in nibbles and spare bits.
#[inline(always)]
pub(super) fn unpack_scale(packed: &[u8], b: usize) -> (u8, u8) {
    if b < 4 {
        return (packed[b] & 63, packed[b + 4] & 63);
    }
    (packed[b + 4] & 15 | packed[b - 4] >> 6 << 4, packed[b + 4] >> 4 | packed[b] >> 6 << 4)
}

#[inline(always)]
fn widen(head: &[u8], nibbles: &[u8], values: &mut [f32; 256], fifth: impl Fn(usize, usize) -> u8) {
    let (d, dmin) = (half(head), half(&head[2..]));
    for b in 0..8 {
        let (scale, minimum) = unpack_scale(&head[4..16], b);
        let (scale, minimum) = (d * f32::from(scale), dmin * f32::from(minimum));
        let (first, shift) = (b / 2 * 32, b % 2 * 4);
        for l in 0..32 {
            let code = nibbles[first + l] >> shift & 15 | fifth(b, l) << 4;
            values[32 * b + l] = scale * f32::from(code) - minimum;
        }
    }
}

fn problem(head: &[u8]) -> Option<String> {
    not_finite([("d", half(head)), ("dmin", half(&head[2..]))])
}

impl Block<256, 144> for BlockQ4K {
    #[inline(always)]
    fn dequantize(block: &[u8; 144], values: &mut [f32; 256]) {
        widen(&block[..16], &block[16..], values, |_, _| 0);
    }

    fn problem(block: &[u8; 144]) -> Option<String> {
        problem(block)
    }

    const USES_IMPORTANCE: bool = true;

    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        Some(by_block::<Self, 256, 144>(guide))
    }
}

impl Block<256, 176> for BlockQ5K {
    #[inline(always)]
    fn dequantize(block: &[u8; 176], values: &mut [f32; 256]) {
        widen(&block[..16], &block[48..], values, |b, l| block[16 + l] >> b & 1);
    }

    fn problem(block: &[u8; 176]) -> Option<String> {
        problem(block)
    }

    const USES_IMPORTANCE: bool = true;

    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        Some(by_block::<Self, 256, 176>(guide))
    }
}

const Q4_K_FORMAT: AffineFormat = AffineFormat {
    codes: 15.0,
    scales: 63.0,
    starts: Starts { first: -2.0, step: 0.4, n: 9 },
    offsets: &[-0.02, 0.0, 0.02, 0.04, 0.06],
    reach: 1,
    refits: 2,
    gain: 1.0,
};
const Q5_K_FORMAT: AffineFormat = AffineFormat { codes: 31.0, ..Q4_K_FORMAT };

impl QuantizeBlock<256, 144> for BlockQ4K {
    #[inline(always)]
    fn quantize<L: Lanes>(
        guide: &Guide<'_>,
        values: &[f32; 256],
        importance: Option<&[f32; 256]>,
        block: &mut [u8; 144],
    ) {
        let stored = Q4_K_FORMAT.quantize::<L, 32, 1, 8>(guide, values, importance);
        pack_head(stored.d, stored.dmin, &stored.scales, &stored.minimums, &mut block[..16]);
        pack_nibbles(&stored.codes, &mut block[16..]);
    }
}

impl QuantizeBlock<256, 176> for BlockQ5K {
    #[inline(always)]
    fn quantize<L: Lanes>(
        guide: &Guide<'_>,
        values: &[f32; 256],
        importance: Option<&[f32; 256]>,
        block: &mut [u8; 176],
    ) {
        let stored = Q5_K_FORMAT.quantize::<L, 32, 1, 8>(guide, values, importance);
        pack_head(stored.d, stored.dmin, &stored.scales, &stored.minimums, &mut block[..16]);
        let codes = &stored.codes;
        for l in 0..32 {
            block[16 + l] = (0..8).fold(0, |bits, b| bits | (codes[32 * b + l] >> 4) << b);
        }
        pack_nibbles(codes, &mut block[48..]);
    }
}

#[inline(always)]
pub(super) fn pack_head(d: f16, dmin: f16, scales: &[u8; 16], minimums: &[u8; 16], head: &mut [u8]) {
    head[..2].copy_from_slice(&d.to_le_bytes());
    head[2..4].copy_from_slice(&dmin.to_le_bytes());
    let packed = &mut head[4..];
    for b in 0..4 {
        packed[b] = scales[b] | scales[b + 4] >> 4 << 6;
        packed[b + 4] = minimums[b] | minimums[b + 4] >> 4 << 6;
        packed[b + 8] = scales[b + 4] & 15 | minimums[b + 4] << 4;
    }
}

/// The low four bits of each code, two codes 32 apart in one byte.
#[inline(always)]
pub(super) fn pack_nibbles(codes: &[u8; 256], packed: &mut [u8]) {
    for (packed, codes) in packed.chunks_exact_mut(32).zip(codes.chunks_exact(64)) {
        for l in 0..32 {
            packed[l] = codes[l] & 15 | codes[l + 32] << 4;
        }
    }
}
