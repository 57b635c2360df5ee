//! Row products of each block format. Layouts are those of ggml; `x` are the inputs rounded to 8 bits.
//!
//! Every format sums 32-bit integers in eight lanes within a block, turns them to `f32`, multiplies by the block's
//! scales and adds up lane by lane, block by block; the lanes are summed at the end.

use std::sync::LazyLock;

use gguf_tools::block::BlockType;
use gguf_tools::simd::Lanes;

use super::wide::Wide;
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
const E2M1_TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// MXFP4: exponent, 16 bytes of two codes, low halves first.
#[inline(always)]
pub(super) fn mxfp4<W: Wide>(blocks: &[[u8; 17]], x: &[Group32]) -> f32 {
    let mut acc = W::Floats::splat(0.0);
    for (block, x) in blocks.iter().zip(x) {
        // Half of 2^(e - 127), since the codes count halves; the two smallest are subnormal.
        let exponent = u32::from(block[0]);
        let bits = if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 };
        let (_, codes) = block.split_last_chunk::<16>().expect("17 bytes");
        let values = W::lookup(&E2M1_TWICE, W::nibbles(codes));
        let sums = W::signed_products(values, W::load_signed(&x.values));
        acc = acc + W::Floats::splat(f32::from_bits(bits) * x.scale) * W::floats(sums);
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
        let mut sums = W::zero();
        for half in 0..2 {
            let bytes = W::load(&codes[half]);
            let scale = |i: usize| i16::from(scales[8 * half + i] & 15);
            let x = &x.values.as_chunks::<128>().0[half];
            let add = W::add_products;
            sums = add(sums, W::field::<0>(bytes, 3), signed::<W>(x, 0), [scale(0), scale(1)]);
            sums = add(sums, W::field::<2>(bytes, 3), signed::<W>(x, 1), [scale(2), scale(3)]);
            sums = add(sums, W::field::<4>(bytes, 3), signed::<W>(x, 2), [scale(4), scale(5)]);
            sums = add(sums, W::field::<6>(bytes, 3), signed::<W>(x, 3), [scale(6), scale(7)]);
        }
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
fn six_bit_pairs(packed: &[u8]) -> ([u8; 8], [u8; 8]) {
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
            let scale = |i: usize| [i16::from(scales[i]); 2];
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
        let mut sums = W::zero();
        for half in 0..2 {
            let (first, second) = (W::load(&low[2 * half]), W::load(&low[2 * half + 1]));
            let upper = W::load(&high[half]);
            let scale = |i: usize| [i16::from(scales[8 * half + i]), i16::from(scales[8 * half + i + 1])];
            let x = &x.values.as_chunks::<128>().0[half];
            let add = W::add_products;
            sums = add(
                sums,
                W::join(W::field::<0>(first, 15), W::field::<0>(upper, 3)),
                signed::<W>(x, 0),
                scale(0),
            );
            sums = add(
                sums,
                W::join(W::field::<0>(second, 15), W::field::<2>(upper, 3)),
                signed::<W>(x, 1),
                scale(2),
            );
            sums = add(
                sums,
                W::join(W::field::<4>(first, 15), W::field::<4>(upper, 3)),
                signed::<W>(x, 2),
                scale(4),
            );
            sums = add(
                sums,
                W::join(W::field::<4>(second, 15), W::field::<6>(upper, 3)),
                signed::<W>(x, 3),
                scale(6),
            );
        }
        let sums = W::subtract(sums, W::sixteen::<5>(&scales, &x.sums));
        acc = acc + W::Floats::splat(half_at::<W>(block, 208) * x.scale) * W::floats(sums);
    }
    acc.sum()
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

/// IQ2_XXS: scale (f16), then for each 32 values four entries of the grid, four times seven sign bits and a 4-bit scale.
#[inline(always)]
pub(super) fn iq2_xxs<W: Wide>(blocks: &[[u8; 66]], x: &[Group256]) -> f32 {
    let grid = &*IQ2_XXS_GRID;
    let mut acc = W::Floats::splat(0.0);
    for (block, x) in blocks.iter().zip(x) {
        let mut sums = W::zero();
        for (i, group) in block[2..].as_chunks::<8>().0.iter().enumerate() {
            let word = u32::from_le_bytes([group[4], group[5], group[6], group[7]]);
            let entry = |k: usize| grid[group[k] as usize];
            let magnitudes = W::words([entry(0), entry(1), entry(2), entry(3)]);
            // The scale is (2s + 1) / 8 of d.
            let scale = (2 * (word >> 28) + 1) as i16;
            let x = W::negate_where(signed::<W>(&x.values, i), even_signs(word));
            sums = W::add_products(sums, magnitudes, x, [scale; 2]);
        }
        let scale = 0.125 * half_at::<W>(block, 0) * x.scale;
        acc = acc + W::Floats::splat(scale) * W::floats(sums);
    }
    acc.sum()
}

/// Spreads four times seven sign bits over the bytes of a word; the eighth of each makes their number even.
#[inline(always)]
fn even_signs(word: u32) -> u32 {
    let seven = (word & 0x7f) | (word & 0x3f80) << 1 | (word & 0x001f_c000) << 2 | (word & 0x0fe0_0000) << 3;
    let mut parity = seven ^ (seven >> 4);
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    seven | (parity & 0x0101_0101) << 7
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
