//! The search behind Q2_K, Q4_K and Q5_K: `x = d * scale * code - dmin * minimum`.
//!
//! First each sub-block is fitted by itself (real scale and minimum: weighted least squares from a grid of starts), then `d` and
//! `dmin` are chosen by what rounding the sub-blocks' scales and minimums to multiples of them costs, then codes, scales and minimums are
//! chosen for the stored `d` and `dmin`, and these are fitted again to what was chosen as long as the error falls.

use super::super_block::{Stored, SuperBlock, bytes_of, highest, turned_back};
use super::{Guide, exact};
use crate::simd::Lanes;

/// What the format can hold and how long to search.
#[derive(Clone, Copy)]
pub(super) struct AffineFormat {
    /// Highest code.
    pub(super) codes: f32,
    /// Highest scale and minimum.
    pub(super) scales: f32,
    /// Starts of a sub-block's fit: the range of its values is laid over so many steps more than `codes`,
    pub(super) starts: Starts,
    /// from so much of the range above its lowest value: all pairs.
    pub(super) offsets: &'static [f32],
    /// How far from the fitted scale the stored one is sought.
    pub(super) reach: usize,
    /// Times that `d` and `dmin` are fitted again.
    pub(super) refits: usize,
    /// Factor on the stored `d` and `dmin` unless the guide gives one.
    pub(super) gain: f32,
}

/// `first + step * k`, `k` below `n`.
#[derive(Clone, Copy)]
pub(super) struct Starts {
    pub(super) first: f32,
    pub(super) step: f32,
    pub(super) n: usize,
}

/// A sub-block's best fit by itself: `x = scale * code - minimum`, and the sums over its codes.
#[derive(Clone, Copy)]
struct Fit<L> {
    scale: L,
    minimum: L,
    sums: Sums<L>,
}

/// Weighted sums over a sub-block: of the codes, their squares, their products with the values.
#[derive(Clone, Copy)]
struct Sums<L> {
    l: L,
    ll: L,
    lx: L,
}

/// Weighted sums over a sub-block that do not depend on codes.
#[derive(Clone, Copy)]
struct Totals<L> {
    w: L,
    x: L,
}

/// Choice for a sub-block under a given `d` and `dmin`, and its error.
#[derive(Clone, Copy)]
struct Choice<L> {
    scale: L,
    minimum: L,
    error: L,
}

impl AffineFormat {
    /// What to store for a super-block: exact where that is possible (and then without a gain), else the outcome of the search.
    #[inline(always)]
    pub(super) fn quantize<L: Lanes, const N: usize, const ROUNDS: usize, const BLOCKS: usize>(
        self,
        guide: &Guide<'_>,
        values: &[f32; 256],
        importance: Option<&[f32; 256]>,
    ) -> Stored {
        if let Some(stored) = exact::affine::<BLOCKS>(values, self.codes, self.scales as u8) {
            return stored;
        }
        match SuperBlock::<L, N, ROUNDS>::new(guide, values, importance) {
            Some(block) => self.search(&block, guide.scale_gain.unwrap_or(self.gain)),
            None => Stored::zeros(0.0),
        }
    }

    /// `gain`: factor on the stored scales in the end.
    #[inline(always)]
    fn search<L: Lanes, const N: usize, const ROUNDS: usize>(
        self,
        block: &SuperBlock<L, N, ROUNDS>,
        gain: f32,
    ) -> Stored {
        let zero = L::splat(0.0);
        let mut totals = [Totals { w: zero, x: zero }; ROUNDS];
        let start = Fit { scale: zero, minimum: zero, sums: Sums { l: zero, ll: zero, lx: zero } };
        let mut fits = [start; ROUNDS];
        for r in 0..ROUNDS {
            for i in 0..N {
                totals[r].w = totals[r].w + block.w[r][i];
                totals[r].x = totals[r].x + block.w[r][i] * block.x[r][i];
            }
            fits[r] = self.fit(&block.x[r], &block.w[r], totals[r]);
        }

        let mut d = block.rounded(self.choose_d(&fits, &totals));
        let mut dmin = block.rounded(self.choose_dmin(&fits, &totals, d.1));
        let mut best = (f32::INFINITY, d, dmin, [Choice { scale: zero, minimum: zero, error: zero }; ROUNDS]);
        for refit in 0..=self.refits {
            let mut choices = best.3;
            let mut error = zero;
            for r in 0..ROUNDS {
                choices[r] = self.choose(&block.x[r], &block.w[r], &fits[r], totals[r], d.1, dmin.1);
                error = error + choices[r].error;
            }
            let error = error.sum();
            if error < best.0 {
                best = (error, d, dmin, choices);
            } else if refit > 0 {
                break;
            }
            if refit < self.refits {
                for r in 0..ROUNDS {
                    let (_, offset, inverse) = realized(&choices[r], d.1, dmin.1);
                    fits[r].sums = self.sums(&block.x[r], &block.w[r], inverse, offset * inverse);
                }
                let (new_d, new_dmin) = refitted(&choices, &fits, &totals);
                (d, dmin) = (block.rounded(new_d), block.rounded(new_dmin));
            }
        }

        let (_, d, dmin, choices) = best;
        let mut codes = [[zero; N]; ROUNDS];
        for r in 0..ROUNDS {
            let (_, offset, inverse) = realized(&choices[r], d.1, dmin.1);
            for i in 0..N {
                codes[r][i] = self.code(block.x[r][i], inverse, offset * inverse);
            }
        }
        Stored {
            d: block.rounded(d.1 * gain).0,
            dmin: block.rounded(dmin.1 * gain).0,
            scales: bytes_of(&choices.map(|choice| choice.scale)),
            minimums: bytes_of(&choices.map(|choice| choice.minimum)),
            codes: turned_back(&codes),
        }
    }

    /// The nearest code of `x`: `x * inverse + shift`, rounded and clamped.
    #[inline(always)]
    fn code<L: Lanes>(self, x: L, inverse: L, shift: L) -> L {
        (x * inverse + shift).round().max(L::splat(0.0)).min(L::splat(self.codes))
    }

    #[inline(always)]
    fn sums<L: Lanes, const N: usize>(self, x: &[L; N], w: &[L; N], inverse: L, shift: L) -> Sums<L> {
        let zero = L::splat(0.0);
        let mut sums = Sums { l: zero, ll: zero, lx: zero };
        for i in 0..N {
            let code = self.code(x[i], inverse, shift);
            let weighted = w[i] * code;
            sums.l = sums.l + weighted;
            sums.ll = sums.ll + weighted * code;
            sums.lx = sums.lx + weighted * x[i];
        }
        sums
    }

    /// Fits each sub-block by itself: a grid of starts, each followed by the least-squares scale and minimum of its codes.
    #[inline(always)]
    fn fit<L: Lanes, const N: usize>(self, x: &[L; N], w: &[L; N], totals: Totals<L>) -> Fit<L> {
        let zero = L::splat(0.0);
        let (mut lowest, mut highest) = (zero, x[0]);
        for x in x {
            (lowest, highest) = (x.min(lowest), x.max(highest));
        }
        // A constant sub-block has no range; the tiny one keeps its codes at zero and the arithmetic finite.
        let range = (highest - lowest).max(L::splat(1e-20));
        let one_step = L::splat(1.0) / range;
        let none = Sums { l: zero, ll: zero, lx: zero };
        let mut best = Fit { scale: zero, minimum: zero - lowest, sums: none };
        let mut explained = zero;
        for start in 0..self.starts.n * self.offsets.len() {
            let (k, j) = (start % self.starts.n, start / self.starts.n);
            let inverse = one_step * L::splat(self.codes + self.starts.first + self.starts.step * k as f32);
            let from = lowest + range * L::splat(self.offsets[j]);
            let sums = self.sums(x, w, inverse, zero - from * inverse);
            let (scale, offset) = solve(sums, totals);
            let gain = scale * sums.lx + offset * totals.x;
            let better = explained.less(gain);
            explained = L::select(better, gain, explained);
            best.scale = L::select(better, scale, best.scale);
            best.minimum = L::select(better, zero - offset, best.minimum);
            best.sums.l = L::select(better, sums.l, best.sums.l);
            best.sums.ll = L::select(better, sums.ll, best.sums.ll);
            best.sums.lx = L::select(better, sums.lx, best.sums.lx);
        }
        best
    }

    /// The `d` for which rounding the sub-blocks' scales to multiples of it costs least, minimums following freely.
    #[inline(always)]
    fn choose_d<L: Lanes, const ROUNDS: usize>(
        self,
        fits: &[Fit<L>; ROUNDS],
        totals: &[Totals<L>; ROUNDS],
    ) -> f32 {
        let zero = L::splat(0.0);
        let scales: [L; ROUNDS] = std::array::from_fn(|r| fits[r].scale);
        // Moving the scale by 1 costs the codes' weighted variance (their squares, where the minimum is stuck at zero).
        let costs: [L; ROUNDS] = std::array::from_fn(|r| {
            let spread = fits[r].sums.ll - fits[r].sums.l * fits[r].sums.l / totals[r].w;
            L::select(zero.less(fits[r].minimum), spread.max(zero), fits[r].sums.ll)
        });
        self.choose_step(&scales, &costs)
    }

    /// The same for `dmin`, given `d`.
    #[inline(always)]
    fn choose_dmin<L: Lanes, const ROUNDS: usize>(
        self,
        fits: &[Fit<L>; ROUNDS],
        totals: &[Totals<L>; ROUNDS],
        d: f32,
    ) -> f32 {
        let minimums: [L; ROUNDS] = std::array::from_fn(|r| {
            let scale = L::splat(d) * self.nearest(fits[r].scale, d);
            wanted_minimum(scale, fits[r].sums, totals[r])
        });
        self.choose_step(&minimums, &totals.map(|totals| totals.w))
    }

    /// The step of which `wanted` can best be expressed as multiples from 0 to the highest scale.
    #[inline(always)]
    fn choose_step<L: Lanes, const ROUNDS: usize>(self, wanted: &[L; ROUNDS], costs: &[L; ROUNDS]) -> f32 {
        let largest = highest(wanted.iter().fold(L::splat(0.0), |largest, wanted| wanted.max(largest)));
        let mut best = (f32::INFINITY, 0.0);
        if largest > 0.0 {
            for k in 0..24 {
                // From a little under the step that reaches the largest to one that leaves a third of the multiples unused.
                let step = largest / (self.scales * (1.06 - 0.016 * k as f32));
                let mut cost = L::splat(0.0);
                for (wanted, weight) in wanted.iter().zip(costs) {
                    let error = L::splat(step) * self.nearest(*wanted, step) - *wanted;
                    cost = cost + *weight * error * error;
                }
                let cost = cost.sum();
                if cost < best.0 {
                    best = (cost, step);
                }
            }
        }
        best.1
    }

    /// The multiple of `step` nearest to `value`, among those that can be stored.
    #[inline(always)]
    fn nearest<L: Lanes>(self, value: L, step: f32) -> L {
        let inverse = L::splat(if step > 0.0 { 1.0 / step } else { 0.0 });
        (value * inverse).round().max(L::splat(0.0)).min(L::splat(self.scales))
    }

    /// The scale and minimum for stored `d` and `dmin`: each scale about the fitted one with the two nearest minimums.
    #[inline(always)]
    fn choose<L: Lanes, const N: usize>(
        self,
        x: &[L; N],
        w: &[L; N],
        fit: &Fit<L>,
        totals: Totals<L>,
        d: f32,
        dmin: f32,
    ) -> Choice<L> {
        let zero = L::splat(0.0);
        let one = L::splat(1.0);
        let near = self.nearest(fit.scale, d);
        let mut best = Choice { scale: zero, minimum: zero, error: L::splat(f32::INFINITY) };
        for shift in 0..=2 * self.reach {
            // 0, -1, 1, -2, 2
            let shift = if shift % 2 == 0 { shift as f32 / 2.0 } else { (shift as f32 + 1.0) / -2.0 };
            let scale = (near + L::splat(shift)).max(zero).min(L::splat(self.scales));
            let wanted = wanted_minimum(L::splat(d) * scale, fit.sums, totals);
            let minimum = self.nearest(wanted, dmin);
            let other = L::select((L::splat(dmin) * minimum).less(wanted), minimum + one, minimum - one);
            for minimum in [minimum, other.max(zero).min(L::splat(self.scales))] {
                let choice = Choice { scale, minimum, error: zero };
                let error = self.error(x, w, &choice, d, dmin);
                let better = error.less(best.error);
                best.scale = L::select(better, scale, best.scale);
                best.minimum = L::select(better, minimum, best.minimum);
                best.error = L::select(better, error, best.error);
            }
        }
        best
    }

    #[inline(always)]
    fn error<L: Lanes, const N: usize>(
        self,
        x: &[L; N],
        w: &[L; N],
        choice: &Choice<L>,
        d: f32,
        dmin: f32,
    ) -> L {
        let (scale, offset, inverse) = realized(choice, d, dmin);
        let shift = offset * inverse;
        let mut error = L::splat(0.0);
        for i in 0..N {
            let code = self.code(x[i], inverse, shift);
            let difference = scale * code - offset - x[i];
            error = error + w[i] * difference * difference;
        }
        error
    }
}

/// Scale, minimum and inverse scale as they are decoded.
#[inline(always)]
fn realized<L: Lanes>(choice: &Choice<L>, d: f32, dmin: f32) -> (L, L, L) {
    let zero = L::splat(0.0);
    let scale = L::splat(d) * choice.scale;
    let inverse = L::select(zero.less(scale), L::splat(1.0) / scale, zero);
    (scale, L::splat(dmin) * choice.minimum, inverse)
}

/// Least-squares scale and offset (not positive) of given codes.
#[inline(always)]
fn solve<L: Lanes>(sums: Sums<L>, totals: Totals<L>) -> (L, L) {
    let zero = L::splat(0.0);
    let tiny = L::splat(1e-30);
    let determinant = totals.w * sums.ll - sums.l * sums.l;
    // Codes that are all alike leave rounding noise for a determinant.
    let sound = (totals.w * sums.ll * L::splat(1e-6)).less(determinant);
    let inverse = L::splat(1.0) / determinant.max(tiny);
    let scale = (totals.w * sums.lx - totals.x * sums.l) * inverse;
    let offset = (sums.ll * totals.x - sums.l * sums.lx) * inverse;
    let free = L::and(sound, offset.less(zero));
    let alone = (sums.lx / sums.ll.max(tiny)).max(zero);
    (L::select(free, scale.max(zero), alone), L::select(free, offset, zero))
}

/// The minimum that suits a scale best, codes given; not negative.
#[inline(always)]
fn wanted_minimum<L: Lanes>(scale: L, sums: Sums<L>, totals: Totals<L>) -> L {
    ((scale * sums.l - totals.x) / totals.w).max(L::splat(0.0))
}

/// `d` and `dmin` by weighted least squares, everything else given.
#[inline(always)]
fn refitted<L: Lanes, const ROUNDS: usize>(
    choices: &[Choice<L>; ROUNDS],
    fits: &[Fit<L>; ROUNDS],
    totals: &[Totals<L>; ROUNDS],
) -> (f32, f32) {
    let zero = L::splat(0.0);
    let (mut ll, mut lm, mut mm, mut lx, mut mx) = (zero, zero, zero, zero, zero);
    for r in 0..ROUNDS {
        let (scale, minimum, sums) = (choices[r].scale, choices[r].minimum, fits[r].sums);
        ll = ll + scale * scale * sums.ll;
        lm = lm + scale * minimum * sums.l;
        mm = mm + minimum * minimum * totals[r].w;
        lx = lx + scale * sums.lx;
        mx = mx + minimum * totals[r].x;
    }
    let [ll, lm, mm, lx, mx] = [ll, lm, mm, lx, mx].map(|lanes| f64::from(lanes.sum()));
    let determinant = ll * mm - lm * lm;
    if determinant > 1e-9 * ll * mm {
        let d = (mm * lx - lm * mx) / determinant;
        let dmin = (lm * lx - ll * mx) / determinant;
        if d > 0.0 && dmin > 0.0 {
            return (d as f32, dmin as f32);
        }
    }
    if ll > 0.0 { ((lx / ll) as f32, 0.0) } else { (0.0, (-mx / mm.max(1e-30)) as f32) }
}
