//! Row products of each block format. Layouts are those of ggml; `x` are the inputs rounded to 8 bits.
//!
//! Every format sums 32-bit integers in eight lanes within a block, turns them to `f32`, multiplies by the block's
//! scales and adds up lane by lane, block by block; the lanes are summed at the end.

use std::sync::LazyLock;

use gguf_tools::block::BlockType;
use gguf_tools::simd::Lanes;

use super::wide::{Wide, doubled};
use super::{Group32, Group256};

/// Thirty-two input values from `i * 32` on. (A function: closures are not compiled for the instruction set.)
#[inline(always)]
fn signed<W: Wide>(values: &[i8], i: usize) -> W::Bytes {
    W::load_signed(&values.as_chunks::<32>().0[i])
}

#[inline(always)]
fn half_at<W: Wide>(block: &[u8], at: usize) -> f32 {
    W::half(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Q8_0: scale (f16), 32 signed values.
#[inline(always)]
pub(super) fn q8_0<W: Wide>(blocks: &[[u8; 34]], x: &[Group32]) -> f32 {
    let mut acc = W::Floats::splat(0.0);
    for (block, x) in blocks.iter().zip(x) {
        let scale = half_at::<W>(block, 0) * x.scale;
        let (_, values) = block.split_last_chunk::<32>().expect("34 bytes");
        let sums = W::signed_products(W::load(values), W::load_signed(&x.values));
        acc = acc + W::Floats::splat(scale) * W::floats(sums);
    }
    acc.sum()
}

/// Twice the values of the 16 codes.
pub(super) const E2M1_TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `2^(exponent - 128)`: half of the scale, since the codes count halves. The two smallest are subnormal.
#[inline(always)]
pub(super) fn e8m0_half(exponent: u8) -> f32 {
    let exponent = u32::from(exponent);
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 })
}

/// MXFP4: exponent, 16 bytes of two codes, low halves first.
#[inline(always)]
pub(super) fn mxfp4<W: Wide>(blocks: &[[u8; 17]], x: &[Group32]) -> f32 {
    let mut acc = W::Floats::splat(0.0);
    for (block, x) in blocks.iter().zip(x) {
        let (_, codes) = block.split_last_chunk::<16>().expect("17 bytes");
        let values = W::lookup(&E2M1_TWICE, W::nibbles(codes));
        let sums = W::signed_products(values, W::load_signed(&x.values));
        acc = acc + W::Floats::splat(e8m0_half(block[0]) * x.scale) * W::floats(sums);
    }
    acc.sum()
}

/// Q2_K: 16 bytes of scale (low half) and minimum (high half), 64 bytes of codes, scale and minimum of both (f16).
#[inline(always)]
pub(super) fn q2_k<W: Wide>(blocks: &[[u8; 84]], x: &[Group256]) -> f32 {
    let mut acc = W::Floats::splat(0.0);
    for (block, x) in blocks.iter().zip(x) {
        let (scales, rest) = block.split_first_chunk::<16>().expect("84 bytes");
        let codes = rest.as_chunks::<32>().0;
        let mut factors = [0; 16];
        for (factor, byte) in factors.iter_mut().zip(scales) {
            *factor = (byte & 15) as i8;
        }
        let factors = W::scales(&factors);
        let (first, second) = (W::load(&codes[0]), W::load(&codes[1]));
        // The pairs of bits of 32 bytes, lowest first.
        let sums =
            W::add_scaled::<0, false>(W::zero(), W::field::<0>(first, 3), signed::<W>(&x.values, 0), factors);
        let sums =
            W::add_scaled::<1, false>(sums, W::field::<2>(first, 3), signed::<W>(&x.values, 1), factors);
        let sums =
            W::add_scaled::<2, false>(sums, W::field::<4>(first, 3), signed::<W>(&x.values, 2), factors);
        let sums =
            W::add_scaled::<3, false>(sums, W::field::<6>(first, 3), signed::<W>(&x.values, 3), factors);
        let sums =
            W::add_scaled::<4, false>(sums, W::field::<0>(second, 3), signed::<W>(&x.values, 4), factors);
        let sums =
            W::add_scaled::<5, false>(sums, W::field::<2>(second, 3), signed::<W>(&x.values, 5), factors);
        let sums =
            W::add_scaled::<6, false>(sums, W::field::<4>(second, 3), signed::<W>(&x.values, 6), factors);
        let sums =
            W::add_scaled::<7, false>(sums, W::field::<6>(second, 3), signed::<W>(&x.values, 7), factors);
        let mut minima = [0; 16];
        for (minimum, byte) in minima.iter_mut().zip(scales) {
            *minimum = (byte >> 4) as i8;
        }
        let below = W::floats(W::sixteen::<0>(&minima, &x.sums));
        let scale = W::Floats::splat(half_at::<W>(block, 80) * x.scale);
        let minimum = W::Floats::splat(half_at::<W>(block, 82) * x.scale);
        acc = acc + (scale * W::floats(sums) - minimum * below);
    }
    acc.sum()
}

/// The eight 6-bit scales and minima of Q4_K, one a byte.
#[inline(always)]
pub(super) fn six_bit_pairs(packed: &[u8]) -> ([u8; 8], [u8; 8]) {
    let word = |at: usize| u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]]);
    let (a, b, c) = (word(0), word(4), word(8));
    let low = |w: u32| u64::from(w & 0x3f3f_3f3f);
    let high = |four: u32, w: u32| u64::from((four & 0x0f0f_0f0f) | ((w >> 6) & 0x0303_0303) << 4);
    ((low(a) | high(c, a) << 32).to_le_bytes(), (low(b) | high(c >> 4, b) << 32).to_le_bytes())
}

/// Q4_K: scale and minimum (f16), 12 bytes of 6-bit scales and minima, 128 bytes of codes.
#[inline(always)]
pub(super) fn q4_k<W: Wide>(blocks: &[[u8; 144]], x: &[Group256]) -> f32 {
    let mut acc = W::Floats::splat(0.0);
    for (block, x) in blocks.iter().zip(x) {
        let (scales, minima) = six_bit_pairs(&block[4..16]);
        let codes = block[16..].as_chunks::<32>().0;
        let mut sums = W::zero();
        for (i, codes) in codes.iter().enumerate() {
            let bytes = W::load(codes);
            let scale = |i: usize| doubled(scales[i]);
            let x = &x.values.as_chunks::<64>().0[i];
            sums = W::add_products(sums, W::field::<0>(bytes, 15), signed::<W>(x, 0), scale(2 * i));
            sums = W::add_products(sums, W::field::<4>(bytes, 15), signed::<W>(x, 1), scale(2 * i + 1));
        }
        let mut twice = [0; 16];
        for i in 0..16 {
            twice[i] = minima[i / 2] as i8;
        }
        let below = W::floats(W::sixteen::<0>(&twice, &x.sums));
        let scale = W::Floats::splat(half_at::<W>(block, 0) * x.scale);
        let minimum = W::Floats::splat(half_at::<W>(block, 2) * x.scale);
        acc = acc + (scale * W::floats(sums) - minimum * below);
    }
    acc.sum()
}

/// Q6_K: 128 bytes of low halves, 64 of upper bits, 16 signed scales, scale of all (f16). Codes are 32 too high.
#[inline(always)]
pub(super) fn q6_k<W: Wide>(blocks: &[[u8; 210]], x: &[Group256]) -> f32 {
    let mut acc = W::Floats::splat(0.0);
    for (block, x) in blocks.iter().zip(x) {
        let low = block[..128].as_chunks::<32>().0;
        let high = block[128..192].as_chunks::<32>().0;
        let mut scales = [0; 16];
        for (scale, byte) in scales.iter_mut().zip(&block[192..208]) {
            *scale = *byte as i8;
        }
        let (x_first, x_second) = x.values.split_at(128);
        let factors = W::scales(&scales);
        let [a, b, c, d] = q6_codes::<W>([&low[0], &low[1]], &high[0]);
        let sums = W::add_scaled::<0, true>(W::zero(), a, signed::<W>(x_first, 0), factors);
        let sums = W::add_scaled::<1, true>(sums, b, signed::<W>(x_first, 1), factors);
        let sums = W::add_scaled::<2, true>(sums, c, signed::<W>(x_first, 2), factors);
        let sums = W::add_scaled::<3, true>(sums, d, signed::<W>(x_first, 3), factors);
        let [a, b, c, d] = q6_codes::<W>([&low[2], &low[3]], &high[1]);
        let sums = W::add_scaled::<4, true>(sums, a, signed::<W>(x_second, 0), factors);
        let sums = W::add_scaled::<5, true>(sums, b, signed::<W>(x_second, 1), factors);
        let sums = W::add_scaled::<6, true>(sums, c, signed::<W>(x_second, 2), factors);
        let sums = W::add_scaled::<7, true>(sums, d, signed::<W>(x_second, 3), factors);
        let sums = W::subtract(sums, W::sixteen::<5>(&scales, &x.sums));
        acc = acc + W::Floats::splat(half_at::<W>(block, 208) * x.scale) * W::floats(sums);
    }
    acc.sum()
}

/// Half a super-block of Q6_K: low halves of 64 bytes, then their high halves, joined by pairs of upper bits.
#[inline(always)]
fn q6_codes<W: Wide>(low: [&[u8; 32]; 2], high: &[u8; 32]) -> [W::Bytes; 4] {
    let (first, second, upper) = (W::load(low[0]), W::load(low[1]), W::load(high));
    [
        W::join(W::field::<0>(first, 15), W::field::<0>(upper, 3)),
        W::join(W::field::<0>(second, 15), W::field::<2>(upper, 3)),
        W::join(W::field::<4>(first, 15), W::field::<4>(upper, 3)),
        W::join(W::field::<4>(second, 15), W::field::<6>(upper, 3)),
    ]
}

/// The 256 entries of IQ2_XXS, eight magnitudes in the bytes of a word: read off by widening blocks of scale 1.
static IQ2_XXS_GRID: LazyLock<[u64; 256]> = LazyLock::new(|| {
    let format = BlockType::Iq2Xxs.format().expect("the table of formats has it");
    let mut grid = [0; 256];
    for (first, eights) in grid.chunks_mut(32).enumerate() {
        // d = 8 and a stored scale of 0: 8 (0 + 1/2) / 4 = 1. All signs are plus.
        let mut block = [0; 66];
        block[..2].copy_from_slice(&half::f16::from_f32(8.0).to_le_bytes());
        for group in 0..8 {
            for i in 0..4 {
                block[2 + 8 * group + i] = (32 * first + 4 * group + i) as u8;
            }
        }
        let mut values = [0.0; 256];
        format.dequantize(&block, &mut values);
        for (word, values) in eights.iter_mut().zip(values.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(values.map(|v| v as u8));
        }
    }
    grid
});

/// The entries of IQ2_XXS.
pub(super) fn iq2_xxs_grid() -> &'static [u64; 256] {
    &IQ2_XXS_GRID
}

/// IQ2_XXS: scale (f16), then for each 32 values four entries of the grid, four times seven sign bits and a 4-bit scale.
#[inline(always)]
pub(super) fn iq2_xxs<W: Wide>(blocks: &[[u8; 66]], x: &[Group256]) -> f32 {
    let grid = &*IQ2_XXS_GRID;
    let mut acc = W::Floats::splat(0.0);
    for (block, x) in blocks.iter().zip(x) {
        let (_, groups) = block.split_last_chunk::<64>().expect("66 bytes");
        // Through memory, from where each is spread over a register by its load: a compiler that knows the words takes
        // them from registers, at three shuffles each.
        let [signs, scales] = *std::hint::black_box(&W::signs_and_scales(groups));
        let mut sums = W::zero();
        for (i, group) in groups.as_chunks::<8>().0.iter().enumerate() {
            let entry = |k: usize| grid[group[k] as usize];
            let magnitudes = W::words([entry(0), entry(1), entry(2), entry(3)]);
            let x = W::negate_where(signed::<W>(&x.values, i), signs[i]);
            sums = W::add_products(sums, magnitudes, x, scales[i]);
        }
        // The scales are 2s + 1, and (2s + 1) / 8 is meant.
        let scale = 0.125 * half_at::<W>(block, 0) * x.scale;
        acc = acc + W::Floats::splat(scale) * W::floats(sums);
    }
    acc.sum()
}

/// Products of float rows with `f32` inputs, in the order of the dot product of widened rows.
macro_rules! float_row {
    ($(#[$doc:meta])* $name:ident, $load:ident) => {
        $(#[$doc])*
        #[inline(always)]
        pub(super) fn $name<W: Wide>(row: &[[u8; 16]], x: &[f32]) -> f32 {
            let (mut even, mut odd) = (W::Floats::splat(0.0), W::Floats::splat(0.0));
            let (pairs, last) = row.as_chunks::<2>();
            let (x_pairs, x_last) = x.as_chunks::<8>().0.as_chunks::<2>();
            for (row, x) in pairs.iter().zip(x_pairs) {
                even = even + W::$load(&row[0]) * W::Floats::load(&x[0]);
                odd = odd + W::$load(&row[1]) * W::Floats::load(&x[1]);
            }
            for (row, x) in last.iter().zip(x_last) {
                even = even + W::$load(row) * W::Floats::load(x);
            }
            (even + odd).sum()
        }
    };
}

float_row! {
    /// F16.
    f16, halves
}
float_row! {
    /// BF16.
    bf16, brains
}
