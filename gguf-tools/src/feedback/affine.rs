//! Formats whose codes are one a value: within a sub-block errors are carried from each column to the next.

use half::f16;

use super::refine::Polish;
use super::walk::{Stored, SubBlock, Walked};
use crate::block::BlockType;
use crate::block::parts;
use crate::simd::{Lanes, to_array};

/// A format with one code a value.
pub(super) trait ScalarFormat: 'static {
    const TARGET: BlockType;
    const BLOCK: usize;
    const SUB_BLOCK: usize;
    /// Highest scale index; 0 where a sub-block has none.
    const HIGHEST_SCALE: f32;
    /// Whether sub-blocks have minimums, with the same range of indices.
    const MINIMUMS: bool;
    /// Whether values are multiples of `d`.
    const REFIT: bool;

    fn read(block: &[u8]) -> Stored;
    fn write(stored: &Stored, block: &mut [u8]);

    /// The factor of the codes.
    #[inline(always)]
    fn scale<L: Lanes>(d: L, index: L) -> L {
        d * index
    }

    /// The nearest code of `x` and what it stands for, minimum left out; the code as it is kept in [`Stored`].
    fn nearest<L: Lanes>(x: L, scale: L, inverse: L) -> (L, L);

    /// What a kept code stands for in units of the factor.
    fn level(code: u8) -> f32;
}

/// A [`ScalarFormat`] as one that can be walked.
pub(super) struct Scalars<F>(std::marker::PhantomData<F>);

impl<F: ScalarFormat> Walked for Scalars<F> {
    const TARGET: BlockType = F::TARGET;
    const BLOCK: usize = F::BLOCK;
    const SUB_BLOCK: usize = F::SUB_BLOCK;
    const REFIT: bool = F::REFIT;
    const CODEBOOK: bool = false;

    fn read(block: &[u8]) -> Stored {
        F::read(block)
    }

    fn write(stored: &Stored, block: &mut [u8]) {
        F::write(stored, block);
    }

    fn units(codes: &[u8; 32], at: usize, scale: u8, minimum: u8) -> (f32, f32) {
        let scale = if F::HIGHEST_SCALE > 0.0 { f32::from(scale) } else { 1.0 };
        (scale * F::level(codes[at]), f32::from(minimum))
    }

    #[inline(always)]
    fn sub_block<L: Lanes>(s: SubBlock<'_>) {
        let (n, stride, reach) = (F::SUB_BLOCK, s.stride, s.reach as i32);
        let zero = L::splat(0.0);
        let top = L::splat(F::HIGHEST_SCALE);
        let mut r = [[0.0; 32]; 32];
        let mut inverses = [0.0; 32];
        for i in 0..n {
            for j in i..n {
                r[i][j] = s.r[(i, j)];
            }
            inverses[i] = 1.0 / r[i][i];
        }
        for row in (0..stride).step_by(8) {
            let (mut w, mut start) = ([zero; 32], [zero; 32]);
            for j in 0..n {
                w[j] = L::load(&s.weights[j * stride + row..]);
                start[j] = L::load(&s.carried[j * stride + row..]);
            }
            let (d, dmin) = (L::load(&s.d[row..]), L::load(&s.dmin[row..]));
            let guessed_scale = bytes::<L>(&s.scales[row..]);
            let guessed_minimum = bytes::<L>(&s.minimums[row..]);
            let mut best_cost = L::splat(f32::INFINITY);
            let (mut best_scale, mut best_minimum) = (guessed_scale, guessed_minimum);
            let (mut best_codes, mut best_differences) = ([zero; 32], w);
            let minimum_reach = if F::MINIMUMS { reach } else { 0 };
            let scale_reach = if F::HIGHEST_SCALE > 0.0 { reach } else { 0 };
            for scale_shift in -scale_reach..=scale_reach {
                let index = (guessed_scale + L::splat(scale_shift as f32)).max(zero).min(top);
                let scale = F::scale(d, index);
                let inverse = L::select(zero.less(scale), L::splat(1.0) / scale, zero);
                for minimum_shift in -minimum_reach..=minimum_reach {
                    let minimum = (guessed_minimum + L::splat(minimum_shift as f32)).max(zero).min(top);
                    let offset = dmin * minimum;
                    let (mut carried, mut codes, mut differences) = (start, [zero; 32], [zero; 32]);
                    let mut cost = zero;
                    for j in 0..n {
                        let target = w[j] + carried[j] * L::splat(inverses[j]);
                        let (code, value) = F::nearest(target + offset, scale, inverse);
                        let difference = w[j] - (value - offset);
                        let y = carried[j] + difference * L::splat(r[j][j]);
                        cost = cost + y * y;
                        (codes[j], differences[j]) = (code, difference);
                        for k in j + 1..n {
                            carried[k] = carried[k] + difference * L::splat(r[j][k]);
                        }
                    }
                    let better = cost.less(best_cost);
                    best_cost = L::select(better, cost, best_cost);
                    best_scale = L::select(better, index, best_scale);
                    best_minimum = L::select(better, minimum, best_minimum);
                    for j in 0..n {
                        best_codes[j] = L::select(better, codes[j], best_codes[j]);
                        best_differences[j] = L::select(better, differences[j], best_differences[j]);
                    }
                }
            }
            for j in 0..n {
                best_differences[j].store(&mut s.differences[j * stride + row..]);
                store_bytes(best_codes[j], &mut s.codes[j * stride + row..]);
            }
            store_bytes(best_scale, &mut s.scales[row..]);
            store_bytes(best_minimum, &mut s.minimums[row..]);
            for (sum, cost) in s.cost[row..].iter_mut().zip(to_array(best_cost)) {
                *sum += f64::from(cost);
            }
        }
    }

    #[inline(always)]
    fn polish<L: Lanes>(s: Polish<'_>) {
        let (n, stride) = (F::SUB_BLOCK, s.stride);
        let zero = L::splat(0.0);
        for row in (0..stride).step_by(8) {
            let index = bytes::<L>(&s.scales[row..]);
            let scale = F::scale(L::load(&s.d[row..]), index);
            let inverse = L::select(zero.less(scale), L::splat(1.0) / scale, zero);
            let offset = L::load(&s.dmin[row..]) * bytes::<L>(&s.minimums[row..]);
            for j in 0..n {
                let at = j * stride + row;
                let (w, old) = (L::load(&s.weights[at..]), L::load(&s.differences[at..]));
                let gradient = L::load(&s.gradient[at..]);
                let own = L::splat(s.form[(j, j)]);
                let target = w - old + gradient / own;
                let (code, value) = F::nearest(target + offset, scale, inverse);
                let change = w - (value - offset) - old;
                let cost = change * (change * own + gradient + gradient);
                let better = cost.less(zero);
                if L::bits(better) == 0 {
                    continue;
                }
                let change = L::select(better, change, zero);
                (old + change).store(&mut s.differences[at..]);
                let kept = bytes::<L>(&s.codes[at..]);
                store_bytes(L::select(better, code, kept), &mut s.codes[at..]);
                for k in 0..n {
                    let to = &mut s.gradient[k * stride + row..];
                    (L::load(to) + change * L::splat(s.form[(j, k)])).store(to);
                }
            }
        }
    }
}

/// Eight bytes as lanes.
#[inline(always)]
pub(super) fn bytes<L: Lanes>(from: &[u8]) -> L {
    let values: [f32; 8] = std::array::from_fn(|i| f32::from(from[i]));
    L::load(&values)
}

/// Lanes that hold whole numbers from 0 to 255.
#[inline(always)]
pub(super) fn store_bytes<L: Lanes>(lanes: L, to: &mut [u8]) {
    for (to, value) in to.iter_mut().zip(lanes.to_i32()) {
        *to = value as u8;
    }
}

#[inline(always)]
fn clamped<L: Lanes>(x: L, lowest: f32, highest: f32) -> L {
    x.round().max(L::splat(lowest)).min(L::splat(highest))
}

/// `d * scale * code - dmin * minimum`, codes 0 to 3.
pub(super) struct Q2K;

impl ScalarFormat for Q2K {
    const TARGET: BlockType = BlockType::Q2K;
    const BLOCK: usize = 256;
    const SUB_BLOCK: usize = 16;
    const HIGHEST_SCALE: f32 = 15.0;
    const MINIMUMS: bool = true;
    const REFIT: bool = true;

    fn read(block: &[u8]) -> Stored {
        let (d, dmin, scales, minimums) = parts::read_q2_k(block);
        Stored { d, dmin, scales, minimums, codes: [0; 256] }
    }

    fn write(s: &Stored, block: &mut [u8]) {
        parts::write_q2_k(s.d, s.dmin, &s.scales, &s.minimums, &s.codes, block);
    }

    #[inline(always)]
    fn nearest<L: Lanes>(x: L, scale: L, inverse: L) -> (L, L) {
        let code = clamped(x * inverse, 0.0, 3.0);
        (code, scale * code)
    }

    fn level(code: u8) -> f32 {
        f32::from(code)
    }
}

/// `d * scale * code - dmin * minimum`, codes 0 to 15.
pub(super) struct Q4K;

impl ScalarFormat for Q4K {
    const TARGET: BlockType = BlockType::Q4K;
    const BLOCK: usize = 256;
    const SUB_BLOCK: usize = 32;
    const HIGHEST_SCALE: f32 = 63.0;
    const MINIMUMS: bool = true;
    const REFIT: bool = true;

    fn read(block: &[u8]) -> Stored {
        let (d, dmin, scales, minimums) = parts::read_q4_k(block);
        Stored { d, dmin, scales, minimums, codes: [0; 256] }
    }

    fn write(s: &Stored, block: &mut [u8]) {
        parts::write_q4_k(s.d, s.dmin, &s.scales, &s.minimums, &s.codes, block);
    }

    #[inline(always)]
    fn nearest<L: Lanes>(x: L, scale: L, inverse: L) -> (L, L) {
        let code = clamped(x * inverse, 0.0, 15.0);
        (code, scale * code)
    }

    fn level(code: u8) -> f32 {
        f32::from(code)
    }
}

/// `d * code`, codes -127 to 127, kept with 128 added.
pub(super) struct Q8_0;

impl ScalarFormat for Q8_0 {
    const TARGET: BlockType = BlockType::Q8_0;
    const BLOCK: usize = 32;
    const SUB_BLOCK: usize = 32;
    const HIGHEST_SCALE: f32 = 0.0;
    const MINIMUMS: bool = false;
    const REFIT: bool = true;

    fn read(block: &[u8]) -> Stored {
        let d = f16::from_le_bytes([block[0], block[1]]);
        Stored { d, dmin: f16::ZERO, scales: [0; 16], minimums: [0; 16], codes: [0; 256] }
    }

    fn write(s: &Stored, block: &mut [u8]) {
        block[..2].copy_from_slice(&s.d.to_le_bytes());
        for (byte, code) in block[2..].iter_mut().zip(s.codes) {
            *byte = code.wrapping_sub(128);
        }
    }

    #[inline(always)]
    fn scale<L: Lanes>(d: L, _: L) -> L {
        d
    }

    #[inline(always)]
    fn nearest<L: Lanes>(x: L, scale: L, inverse: L) -> (L, L) {
        let code = clamped(x * inverse, -127.0, 127.0);
        (code + L::splat(128.0), scale * code)
    }

    fn level(code: u8) -> f32 {
        f32::from(code) - 128.0
    }
}

/// `2^(e - 128)` times 0, 1, 2, 3, 4, 6, 8 or 12 of either sign, kept with 12 added.
pub(super) struct Mxfp4;

impl ScalarFormat for Mxfp4 {
    const TARGET: BlockType = BlockType::Mxfp4;
    const BLOCK: usize = 32;
    const SUB_BLOCK: usize = 32;
    const HIGHEST_SCALE: f32 = 254.0;
    const MINIMUMS: bool = false;
    const REFIT: bool = false;

    fn read(block: &[u8]) -> Stored {
        let mut scales = [0; 16];
        scales[0] = block[0];
        Stored { d: f16::ONE, dmin: f16::ZERO, scales, minimums: [0; 16], codes: [0; 256] }
    }

    fn write(s: &Stored, block: &mut [u8]) {
        let code = |kept: u8| {
            let value = i32::from(kept) - 12;
            let level = [0, 1, 2, 3, 4, 6, 8, 12].iter().position(|&l| l == value.abs()).unwrap_or(0) as u8;
            level | if value < 0 { 8 } else { 0 }
        };
        block[0] = s.scales[0];
        for j in 0..16 {
            block[1 + j] = code(s.codes[j]) | code(s.codes[j + 16]) << 4;
        }
    }

    #[inline(always)]
    fn scale<L: Lanes>(_: L, index: L) -> L {
        L::load(&to_array(index).map(|e| parts::mxfp4_half_scale(e as u8)))
    }

    #[inline(always)]
    fn nearest<L: Lanes>(x: L, scale: L, inverse: L) -> (L, L) {
        let zero = L::splat(0.0);
        let x = x * inverse;
        let magnitude = x.abs();
        let fine = magnitude.round();
        let middle = (magnitude * L::splat(0.5)).round() * L::splat(2.0);
        let coarse = ((magnitude * L::splat(0.25)).round() * L::splat(4.0)).min(L::splat(12.0));
        let level = L::select(magnitude.less(L::splat(8.0)), middle, coarse);
        let level = L::select(magnitude.less(L::splat(4.0)), fine, level);
        let value = L::select(x.less(zero), zero - level, level);
        (value + L::splat(12.0), value * scale)
    }

    fn level(code: u8) -> f32 {
        f32::from(code) - 12.0
    }
}
