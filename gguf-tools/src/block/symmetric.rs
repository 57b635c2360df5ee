//! The search behind Q3_K and Q6_K: `x = d * scale * code`, scales and codes signed.
//!
//! As for the affine formats: each sub-block by itself, then `d`, then scales and codes under the stored `d`, which is fitted
//! again to them as long as the error falls.

use super::affine::Starts;
use super::super_block::{Stored, SuperBlock, bytes_of, highest, turned_back};
use super::{Guide, exact};
use crate::simd::Lanes;

/// What the format can hold and how long to search.
#[derive(Clone, Copy)]
pub(super) struct SymmetricFormat {
    /// Lowest and highest code.
    pub(super) codes: [f32; 2],
    /// Lowest and highest scale.
    pub(super) scales: [f32; 2],
    /// Starts of a sub-block's fit: the magnitude of the code on which its largest magnitude is laid.
    pub(super) starts: Starts,
    /// Whether the starts are tried with both signs of the scale.
    pub(super) both_signs: bool,
    /// Times that `d` is fitted again.
    pub(super) refits: usize,
}

/// Scale of a sub-block, and the weighted squares of its codes.
#[derive(Clone, Copy)]
struct Fit<L> {
    scale: L,
    squares: L,
}

impl SymmetricFormat {
    /// What to store for a super-block: exact where that is possible (and then without a gain), else the outcome of the search.
    #[inline(always)]
    pub(super) fn quantize<L: Lanes, const N: usize, const ROUNDS: usize, const BLOCKS: usize>(
        self,
        guide: &Guide<'_>,
        values: &[f32; 256],
        importance: Option<&[f32; 256]>,
    ) -> Stored {
        if let Some(stored) = exact::symmetric::<BLOCKS>(values, self.codes, self.scales[1] as u8) {
            return stored;
        }
        match SuperBlock::<L, N, ROUNDS>::new(guide, values, importance) {
            Some(block) => self.search(&block, guide.scale_gain.unwrap_or(1.0)),
            None => Stored::zeros(self.codes[0]),
        }
    }

    /// `gain`: factor on the stored scale in the end.
    #[inline(always)]
    fn search<L: Lanes, const N: usize, const ROUNDS: usize>(
        self,
        block: &SuperBlock<L, N, ROUNDS>,
        gain: f32,
    ) -> Stored {
        let zero = L::splat(0.0);
        let mut fits = [Fit { scale: zero, squares: zero }; ROUNDS];
        for r in 0..ROUNDS {
            fits[r] = self.fit(&block.x[r], &block.w[r]);
        }
        let mut d = block.rounded(self.choose_d(&fits));
        let mut best = (f32::INFINITY, d, [zero; ROUNDS]);
        for refit in 0..=self.refits {
            let mut scales = [zero; ROUNDS];
            let mut error = zero;
            for r in 0..ROUNDS {
                let (scale, its_error) = self.choose(&block.x[r], &block.w[r], fits[r].scale, d.1);
                scales[r] = scale;
                error = error + its_error;
            }
            let error = error.sum();
            if error < best.0 {
                best = (error, d, scales);
            } else if refit > 0 {
                break;
            }
            if refit < self.refits {
                d = block.rounded(self.refitted(block, &scales, d.1));
            }
        }

        let (_, d, scales) = best;
        let mut codes = [[zero; N]; ROUNDS];
        for r in 0..ROUNDS {
            let inverse = inverse(L::splat(d.1) * scales[r]);
            for i in 0..N {
                codes[r][i] = self.code(block.x[r][i], inverse) - L::splat(self.codes[0]);
            }
        }
        Stored {
            d: block.rounded(d.1 * gain).0,
            scales: bytes_of(&scales),
            codes: turned_back(&codes),
            ..Stored::zeros(self.codes[0])
        }
    }

    #[inline(always)]
    fn code<L: Lanes>(self, x: L, inverse: L) -> L {
        (x * inverse).round().max(L::splat(self.codes[0])).min(L::splat(self.codes[1]))
    }

    /// Weighted sums of the squared codes and of their products with the values.
    #[inline(always)]
    fn sums<L: Lanes, const N: usize>(self, x: &[L; N], w: &[L; N], inverse: L) -> (L, L) {
        let mut sums = (L::splat(0.0), L::splat(0.0));
        for i in 0..N {
            let code = self.code(x[i], inverse);
            let weighted = w[i] * code;
            sums = (sums.0 + weighted * code, sums.1 + weighted * x[i]);
        }
        sums
    }

    /// Fits each sub-block by itself: many starts, each followed by the least-squares scale of its codes.
    #[inline(always)]
    fn fit<L: Lanes, const N: usize>(self, x: &[L; N], w: &[L; N]) -> Fit<L> {
        let zero = L::splat(0.0);
        let (mut lowest, mut highest) = (zero, zero);
        for x in x {
            (lowest, highest) = (x.min(lowest), x.max(highest));
        }
        // The lowest code reaches farther than the highest: the largest magnitude is laid on it first.
        let largest = L::select(highest.less(zero - lowest), lowest, highest);
        let largest = L::select(largest.abs().less(L::splat(1e-20)), L::splat(1e-20), largest);
        let one_step = L::splat(-1.0) / largest;
        let mut best = Fit { scale: zero, squares: zero };
        let mut explained = zero;
        for k in 0..self.starts.n {
            let inverse = one_step * L::splat(self.starts.first + self.starts.step * k as f32);
            let both = [inverse, zero - inverse];
            for s in 0..=usize::from(self.both_signs) {
                let inverse = both[s];
                let (squares, products) = self.sums(x, w, inverse);
                let scale = products / squares.max(L::splat(1e-30));
                let gain = scale * products;
                let better = explained.less(gain);
                explained = L::select(better, gain, explained);
                best.scale = L::select(better, scale, best.scale);
                best.squares = L::select(better, squares, best.squares);
            }
        }
        best
    }

    /// The `d` for which rounding the sub-blocks' scales to multiples of it costs least.
    #[inline(always)]
    fn choose_d<L: Lanes, const ROUNDS: usize>(self, fits: &[Fit<L>; ROUNDS]) -> f32 {
        let largest = highest(fits.iter().fold(L::splat(0.0), |largest, fit| fit.scale.abs().max(largest)));
        let mut best = (f32::INFINITY, 0.0);
        if largest > 0.0 {
            for k in 0..24 {
                // From a little under the step that reaches the largest to one that leaves a quarter unused.
                let step = largest / (self.scales[1] * (1.04 - 0.0125 * k as f32));
                let mut cost = L::splat(0.0);
                for fit in fits {
                    let error = L::splat(step) * self.nearest(fit.scale, step) - fit.scale;
                    cost = cost + fit.squares * error * error;
                }
                let cost = cost.sum();
                if cost < best.0 {
                    best = (cost, step);
                }
            }
        }
        best.1
    }

    #[inline(always)]
    fn nearest<L: Lanes>(self, scale: L, d: f32) -> L {
        let inverse = L::splat(if d > 0.0 { 1.0 / d } else { 0.0 });
        (scale * inverse).round().max(L::splat(self.scales[0])).min(L::splat(self.scales[1]))
    }

    /// The scale for a stored `d`, of the three nearest to the fitted one, and its error.
    #[inline(always)]
    fn choose<L: Lanes, const N: usize>(self, x: &[L; N], w: &[L; N], wanted: L, d: f32) -> (L, L) {
        let near = self.nearest(wanted, d);
        let mut best = (near, L::splat(f32::INFINITY));
        for shift in [0.0, -1.0, 1.0] {
            let scale = (near + L::splat(shift)).max(L::splat(self.scales[0])).min(L::splat(self.scales[1]));
            let error = self.error(x, w, L::splat(d) * scale);
            let better = error.less(best.1);
            best = (L::select(better, scale, best.0), L::select(better, error, best.1));
        }
        best
    }

    #[inline(always)]
    fn error<L: Lanes, const N: usize>(self, x: &[L; N], w: &[L; N], scale: L) -> L {
        let inverse = inverse(scale);
        let mut error = L::splat(0.0);
        for i in 0..N {
            let difference = scale * self.code(x[i], inverse) - x[i];
            error = error + w[i] * difference * difference;
        }
        error
    }

    /// `d` by weighted least squares, scales and codes given.
    #[inline(always)]
    fn refitted<L: Lanes, const N: usize, const ROUNDS: usize>(
        self,
        block: &SuperBlock<L, N, ROUNDS>,
        scales: &[L; ROUNDS],
        d: f32,
    ) -> f32 {
        let (mut squares, mut products) = (L::splat(0.0), L::splat(0.0));
        for r in 0..ROUNDS {
            let sums = self.sums(&block.x[r], &block.w[r], inverse(L::splat(d) * scales[r]));
            squares = squares + scales[r] * scales[r] * sums.0;
            products = products + scales[r] * sums.1;
        }
        let (squares, products) = (squares.sum(), products.sum());
        if squares > 0.0 { products / squares } else { 0.0 }
    }
}

/// `1 / scale`, 0 for 0.
#[inline(always)]
fn inverse<L: Lanes>(scale: L) -> L {
    let zero = L::splat(0.0);
    L::select(zero.less(scale.abs()), L::splat(1.0) / scale, zero)
}
