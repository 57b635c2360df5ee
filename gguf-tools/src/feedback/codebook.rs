//! IQ2_XXS: eight columns at a time, under their full quadratic form.
//!
//! For targets `t` of eight columns, form `M = R_gg R_gg^T`, an entry of magnitudes `g` and scale `s`, with signs those of
//! `t` moved into `M` and `u = |t|`, the error is `u M u - 2 s P + s^2 Q`, `P = (M u) g`, `Q = g M g`. Both are sums
//! over the halves of an entry, `Q` with a cross term. Where the number of negatives is odd one sign has to be wrong: entries
//! are chosen with the cost of the cheapest by the diagonal, then that sign is chosen under the full form.

use half::f16;

use super::affine::{bytes, store_bytes};
use super::factor::upper_factor;
use super::refine::Polish;
use super::walk::{Stored, SubBlock, Walked};
use crate::block::BlockType;
use crate::block::parts::{self, ENTRIES, HALVES, MAGNITUDES, N_HALVES, N_LOW};
use crate::simd::{Lanes, to_array};

/// The format.
pub(super) struct Iq2Xxs;

/// Eight columns of the walk.
#[derive(Clone, Copy)]
struct Group {
    r: [[f32; 8]; 8],
    inverse: [[f32; 8]; 8],
    form: [[f32; 8]; 8],
}

impl Group {
    fn new(r: impl Fn(usize, usize) -> f32) -> Self {
        let mut group = Self { r: [[0.0; 8]; 8], inverse: [[0.0; 8]; 8], form: [[0.0; 8]; 8] };
        let mut inverse = [[0.0f64; 8]; 8];
        for i in 0..8 {
            for j in i..8 {
                group.r[i][j] = r(i, j);
            }
        }
        let wide = |i: usize, j: usize| f64::from(group.r[i][j]);
        for j in 0..8 {
            inverse[j][j] = 1.0 / wide(j, j);
            for i in (0..j).rev() {
                let sum: f64 = (i + 1..=j).map(|k| wide(i, k) * inverse[k][j]).sum();
                inverse[i][j] = -sum / wide(i, i);
            }
        }
        for i in 0..8 {
            for j in 0..8 {
                group.inverse[i][j] = inverse[i][j] as f32;
                group.form[i][j] = (i.max(j)..8).map(|k| wide(i, k) * wide(j, k)).sum::<f64>() as f32;
            }
        }
        group
    }
}

/// What was chosen for eight columns of eight rows.
#[derive(Clone, Copy)]
struct Eight<L> {
    /// Number of the entry.
    entry: L,
    /// Bit `i` set where value `i` is negative.
    negative: L,
    values: [L; 8],
}

/// `P`, cost of parity and `Q` of one half of an entry.
#[derive(Clone, Copy)]
struct Half<L> {
    p: L,
    parity: L,
    q: L,
    /// Products of the form with a second half, for the four values of a first.
    cross: [L; 4],
}

impl Walked for Iq2Xxs {
    const TARGET: BlockType = BlockType::Iq2Xxs;
    const BLOCK: usize = 256;
    const SUB_BLOCK: usize = 32;
    const REFIT: bool = true;
    const CODEBOOK: bool = true;

    fn read(block: &[u8]) -> Stored {
        let (d, scales) = parts::read_iq2_xxs(block);
        Stored { d, dmin: f16::ZERO, scales, minimums: [0; 16], codes: [0; 256] }
    }

    fn write(s: &Stored, block: &mut [u8]) {
        // An entry is kept in the first of its eight columns, signs in the second.
        let eight = |index: usize| (s.codes[8 * index], s.codes[8 * index + 1]);
        parts::write_iq2_xxs(s.d, &s.scales, eight, block);
    }

    fn units(codes: &[u8; 32], at: usize, scale: u8, _: u8) -> (f32, f32) {
        let (eight, i) = (at / 8 * 8, at % 8);
        let magnitude = parts::magnitude(codes[eight], i);
        let sign = if codes[eight + 1] >> i & 1 == 1 { -1.0 } else { 1.0 };
        ((f32::from(scale) + 0.5) * 0.25 * magnitude * sign, 0.0)
    }

    #[inline(always)]
    fn sub_block<L: Lanes>(s: SubBlock<'_>) {
        let (stride, reach) = (s.stride, s.reach as i32);
        let zero = L::splat(0.0);
        let mut r = [[0.0; 32]; 32];
        for i in 0..32 {
            for j in i..32 {
                r[i][j] = s.r[(i, j)];
            }
        }
        let groups: [Group; 4] = std::array::from_fn(|g| Group::new(|i, j| r[8 * g + i][8 * g + j]));
        for row in (0..stride).step_by(8) {
            let (mut w, mut start) = ([zero; 32], [zero; 32]);
            for j in 0..32 {
                w[j] = L::load(&s.weights[j * stride + row..]);
                start[j] = L::load(&s.carried[j * stride + row..]);
            }
            let d = L::load(&s.d[row..]);
            let guess = bytes::<L>(&s.scales[row..]);
            let nothing = Eight { entry: zero, negative: zero, values: [zero; 8] };
            let (mut best_cost, mut best_index) = (L::splat(f32::INFINITY), guess);
            let mut best = [nothing; 4];
            for shift in -reach..=reach {
                let index = (guess + L::splat(shift as f32)).max(zero).min(L::splat(15.0));
                let scale = d * (L::splat(0.5) + index) * L::splat(0.25);
                let mut carried = start;
                let mut cost = zero;
                let mut found = [nothing; 4];
                for (g, group) in groups.iter().enumerate() {
                    let at = 8 * g;
                    let mut targets = [zero; 8];
                    for i in 0..8 {
                        targets[i] = w[at + i];
                        for j in 0..=i {
                            targets[i] = targets[i] + carried[at + j] * L::splat(group.inverse[j][i]);
                        }
                    }
                    found[g] = choose(&targets, &group.form, scale);
                    let mut y: [L; 8] = std::array::from_fn(|i| carried[at + i]);
                    for j in 0..8 {
                        let difference = w[at + j] - found[g].values[j];
                        for i in j..8 {
                            y[i] = y[i] + difference * L::splat(group.r[j][i]);
                        }
                        for k in at + 8..32 {
                            carried[k] = carried[k] + difference * L::splat(r[at + j][k]);
                        }
                    }
                    for y in y {
                        cost = cost + y * y;
                    }
                }
                let better = cost.less(best_cost);
                best_cost = L::select(better, cost, best_cost);
                best_index = L::select(better, index, best_index);
                for g in 0..4 {
                    best[g].entry = L::select(better, found[g].entry, best[g].entry);
                    best[g].negative = L::select(better, found[g].negative, best[g].negative);
                    for i in 0..8 {
                        best[g].values[i] = L::select(better, found[g].values[i], best[g].values[i]);
                    }
                }
            }
            for (g, eight) in best.iter().enumerate() {
                for i in 0..8 {
                    let at = (8 * g + i) * stride + row;
                    (w[8 * g + i] - eight.values[i]).store(&mut s.differences[at..]);
                }
                store_bytes(eight.entry, &mut s.codes[8 * g * stride + row..]);
                store_bytes(eight.negative, &mut s.codes[(8 * g + 1) * stride + row..]);
            }
            store_bytes(best_index, &mut s.scales[row..]);
            for (sum, cost) in s.cost[row..].iter_mut().zip(to_array(best_cost)) {
                *sum += f64::from(cost);
            }
        }
    }

    #[inline(always)]
    fn polish<L: Lanes>(s: Polish<'_>) {
        let stride = s.stride;
        let zero = L::splat(0.0);
        let mut h = [[0.0; 32]; 32];
        for i in 0..32 {
            for j in 0..32 {
                h[i][j] = s.form[(i, j)];
            }
        }
        for g in 0..4 {
            let at = 8 * g;
            let Some(alone) = Alone::new(|i, j| h[at + i][at + j]) else { continue };
            for row in (0..stride).step_by(8) {
                let scale =
                    L::load(&s.d[row..]) * (L::splat(0.5) + bytes::<L>(&s.scales[row..])) * L::splat(0.25);
                let (mut w, mut old, mut gradient) = ([zero; 8], [zero; 8], [zero; 8]);
                for i in 0..8 {
                    let from = (at + i) * stride + row;
                    w[i] = L::load(&s.weights[from..]);
                    old[i] = L::load(&s.differences[from..]);
                    gradient[i] = L::load(&s.gradient[from..]);
                }
                let mut targets = [zero; 8];
                for i in 0..8 {
                    targets[i] = w[i] - old[i];
                    for j in 0..8 {
                        targets[i] = targets[i] + gradient[j] * L::splat(alone.inverse[j][i]);
                    }
                }
                let found = choose(&targets, &alone.form, scale);
                let change: [L; 8] = std::array::from_fn(|i| w[i] - found.values[i] - old[i]);
                let mut cost = zero;
                for i in 0..8 {
                    let mut slope = gradient[i] + gradient[i];
                    for j in 0..8 {
                        slope = slope + change[j] * L::splat(alone.form[j][i]);
                    }
                    cost = cost + change[i] * slope;
                }
                let better = cost.less(zero);
                if L::bits(better) == 0 {
                    continue;
                }
                for i in 0..8 {
                    let change = L::select(better, change[i], zero);
                    (old[i] + change).store(&mut s.differences[(at + i) * stride + row..]);
                    for k in 0..32 {
                        let to = &mut s.gradient[k * stride + row..];
                        (L::load(to) + change * L::splat(h[at + i][k])).store(to);
                    }
                }
                let kept = bytes::<L>(&s.codes[at * stride + row..]);
                store_bytes(L::select(better, found.entry, kept), &mut s.codes[at * stride + row..]);
                let kept = bytes::<L>(&s.codes[(at + 1) * stride + row..]);
                store_bytes(L::select(better, found.negative, kept), &mut s.codes[(at + 1) * stride + row..]);
            }
        }
    }
}

/// What eight columns need to be chosen again alone: their form and its inverse.
struct Alone {
    form: [[f32; 8]; 8],
    inverse: [[f32; 8]; 8],
}

impl Alone {
    /// `None` if the form is not positive definite.
    fn new(form: impl Fn(usize, usize) -> f32) -> Option<Self> {
        let r = upper_factor(faer::Mat::from_fn(8, 8, |i, j| f64::from(form(i, j))))?;
        let group = Group::new(|i, j| r[(i, j)] as f32);
        let inverse =
            |i: usize, j: usize| -> f32 { (0..8).map(|k| group.inverse[k][i] * group.inverse[k][j]).sum() };
        Some(Self {
            form: group.form,
            inverse: std::array::from_fn(|i| std::array::from_fn(|j| inverse(i, j))),
        })
    }
}

/// The entry and signs that suit eight targets best.
#[inline(always)]
fn choose<L: Lanes>(targets: &[L; 8], form: &[[f32; 8]; 8], scale: L) -> Eight<L> {
    let (zero, one) = (L::splat(0.0), L::splat(1.0));
    let mut signs = [one; 8];
    let mut u = [zero; 8];
    let mut product = one;
    for i in 0..8 {
        signs[i] = L::select(targets[i].less(zero), zero - one, one);
        u[i] = targets[i].abs();
        product = product * signs[i];
    }
    // 1 where the number of negatives is odd.
    let odd = (one - product) * L::splat(0.5);
    let mut m = [[zero; 8]; 8];
    for i in 0..8 {
        for j in i..8 {
            m[i][j] = L::splat(form[i][j]) * (signs[i] * signs[j]);
            m[j][i] = m[i][j];
        }
    }
    let mut p = [zero; 8];
    let mut parity = [zero; 8];
    for i in 0..8 {
        for j in 0..8 {
            p[i] = p[i] + m[i][j] * u[j];
        }
        parity[i] = m[i][i] * u[i] * (odd + odd);
    }
    let entry = best_entry(&m, &p, &parity, scale);
    let mut numbers = [[0.0; 8]; 8];
    for (lane, number) in to_array(entry).into_iter().enumerate() {
        for (i, magnitudes) in numbers.iter_mut().enumerate() {
            magnitudes[lane] = parts::magnitude(number as u8, i);
        }
    }
    let scaled: [L; 8] = std::array::from_fn(|i| scale * L::load(&numbers[i]));
    // The cheapest wrong sign under the full form.
    let (mut least, mut wrong) = (L::splat(f32::INFINITY), zero);
    for i in 0..8 {
        let mut left = p[i] + m[i][i] * scaled[i];
        for j in 0..8 {
            left = left - m[i][j] * scaled[j];
        }
        let cost = scaled[i] * left;
        let better = cost.less(least);
        least = L::select(better, cost, least);
        wrong = L::select(better, L::splat(i as f32), wrong);
    }
    let mut eight = Eight { entry, negative: zero, values: [zero; 8] };
    let half = L::splat(0.5);
    for i in 0..8 {
        let number = L::splat(i as f32);
        let here = L::and(L::and((wrong - half).less(number), number.less(wrong + half)), half.less(odd));
        let sign = L::select(here, zero - signs[i], signs[i]);
        eight.values[i] = scaled[i] * sign;
        let bit = L::splat((1 << i) as f32);
        eight.negative = eight.negative + L::select(sign.less(zero), bit, zero);
    }
    eight
}

/// The entry of largest `P - s / 2 Q`.
#[inline(always)]
fn best_entry<L: Lanes>(m: &[[L; 8]; 8], p: &[L; 8], parity: &[L; 8], scale: L) -> L {
    let zero = L::splat(0.0);
    let none = Half { p: zero, parity: zero, q: zero, cross: [zero; 4] };
    let mut halves = [none; N_HALVES];
    for (number, (half, &codes)) in halves.iter_mut().zip(&HALVES).enumerate() {
        let at = if number < N_LOW { 0 } else { 4 };
        let g: [L; 4] = std::array::from_fn(|i| L::splat(MAGNITUDES[usize::from(codes >> (2 * i) & 3)]));
        half.p = p[at] * g[0] + p[at + 1] * g[1] + (p[at + 2] * g[2] + p[at + 3] * g[3]);
        let first = (parity[at] * g[0]).min(parity[at + 1] * g[1]);
        half.parity = first.min((parity[at + 2] * g[2]).min(parity[at + 3] * g[3]));
        for i in 0..4 {
            let mut product = m[at + i][at] * g[0];
            for j in 1..4 {
                product = product + m[at + i][at + j] * g[j];
            }
            half.q = half.q + product * g[i];
        }
        if at == 4 {
            for i in 0..4 {
                let mut product = m[i][4] * g[0];
                for j in 1..4 {
                    product = product + m[i][4 + j] * g[j];
                }
                half.cross[i] = product + product;
            }
        }
    }
    let half_scale = scale * L::splat(0.5);
    let (mut best, mut chosen) = (L::splat(f32::NEG_INFINITY), zero);
    for entry in &ENTRIES {
        let (low, high) = (&halves[usize::from(entry.low)], &halves[usize::from(entry.high)]);
        let codes = HALVES[usize::from(entry.low)];
        let mut q = low.q + high.q;
        for i in 0..4 {
            q = q + high.cross[i] * L::splat(MAGNITUDES[usize::from(codes >> (2 * i) & 3)]);
        }
        let gain = low.p + high.p - low.parity.min(high.parity) - half_scale * q;
        let better = best.less(gain);
        best = L::select(better, gain, best);
        chosen = L::select(better, L::splat(entry.number), chosen);
    }
    chosen
}
