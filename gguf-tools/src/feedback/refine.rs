//! Sweeps after the walk: every choice is made again, given all the others.
//!
//! The walk chooses codes when later columns are still free. Once all are chosen, the full error of a row is a quadratic form in
//! what any few columns change, the rest being fixed: `|d R_ss + G R_ss^-T - D_s R_ss|^2` for the columns `s`, with
//! `G = (D H)_s` and `H_ss = R_ss R_ss^T`. So each sub-block is walked once more for that form, then each code is chosen alone, then
//! `d` and `dmin` are fitted. Nothing is taken over that does not lower the error (coordinate descent).

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatRef, Par};

use super::factor::{carry, inverse_of, upper_factor};
use super::walk::{Place, SubBlock, Trial, Walk, Walked, fit, to_f16, view, view_mut};
use crate::simd::{Kernel, Lanes};

/// What must be gained for a choice to be replaced, as a share of the error of the columns in question.
const LEAST_GAIN: f64 = 1e-6;

/// One sub-block of all rows whose codes are chosen again, scales being kept.
pub(super) struct Polish<'a> {
    /// Rows rounded up to whole lanes.
    pub(super) stride: usize,
    /// Rows and columns of `H` that belong to it.
    pub(super) form: MatRef<'a, f32>,
    /// `[sub-block, stride]`.
    pub(super) weights: &'a [f32],
    /// `[stride]`.
    pub(super) d: &'a [f32],
    /// `[stride]`.
    pub(super) dmin: &'a [f32],
    /// `[stride]`.
    pub(super) scales: &'a [u8],
    /// `[stride]`.
    pub(super) minimums: &'a [u8],
    /// `[sub-block, stride]`.
    pub(super) codes: &'a mut [u8],
    /// `D`, weights minus what is stored, `[sub-block, stride]`.
    pub(super) differences: &'a mut [f32],
    /// `D H` of its columns, `[sub-block, stride]`.
    pub(super) gradient: &'a mut [f32],
}

struct Run<'a, F>(Polish<'a>, std::marker::PhantomData<F>);

impl<F: Walked> Kernel for Run<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        F::polish::<L>(self.0);
    }
}

impl Walk<'_> {
    /// Sweeps over the super-blocks of rows that were walked.
    pub(super) fn refine<F: Walked>(
        &self,
        w: &[f32],
        differences: &mut [f32],
        blocks: &mut [Trial],
        stride: usize,
    ) {
        if self.settings.sweeps == 0 {
            return;
        }
        let columns = self.factor.columns();
        let mut y = vec![0.0; columns * stride];
        for first in (0..columns).step_by(F::BLOCK) {
            let end = first + F::BLOCK;
            let r = self.factor.part(0..end, first..end);
            self.timed(stride * end * F::BLOCK, || {
                let known = view(&differences[..end * stride], stride);
                carry(view_mut(&mut y[first * stride..end * stride], stride), known, r, Accum::Replace);
            });
        }
        for _ in 0..self.settings.sweeps {
            let mut changed = false;
            for (index, block) in blocks.iter_mut().enumerate() {
                let first = index * F::BLOCK;
                let range = first * stride..(first + F::BLOCK) * stride;
                let r = self.factor.part(first..first + F::BLOCK, first..columns);
                let y = &mut y[first * stride..];
                let mut gradient = vec![0.0; F::BLOCK * stride];
                self.timed(stride * F::BLOCK * (columns - first), || {
                    let to = view_mut(&mut gradient, stride);
                    matmul(to, Accum::Replace, view(y, stride), r.transpose(), 1.0, Par::Seq);
                });
                let place = Place { first, stride, n_rows: stride, weights: &w[range.clone()], carried: &[] };
                let before = differences[range.clone()].to_vec();
                let now = &mut differences[range];
                self.refine_block::<F>(&place, self.factor.form(index), now, &mut gradient, block);
                let change: Vec<f32> = now.iter().zip(&before).map(|(now, before)| now - before).collect();
                if change.iter().any(|&v| v != 0.0) {
                    changed = true;
                    self.timed(stride * F::BLOCK * (columns - first), || {
                        carry(view_mut(y, stride), view(&change, stride), r, Accum::Add);
                    });
                }
            }
            if !changed {
                break;
            }
        }
    }

    /// Everything of one super-block again. `form`: its part of `H`; `gradient`: its part of `D H`.
    fn refine_block<F: Walked>(
        &self,
        place: &Place<'_>,
        form: MatRef<'_, f32>,
        differences: &mut [f32],
        gradient: &mut [f32],
        block: &mut Trial,
    ) {
        let stride = place.stride;
        for sub_block in 0..F::BLOCK / F::SUB_BLOCK {
            let start = sub_block * F::SUB_BLOCK;
            let range = start * stride..(start + F::SUB_BLOCK) * stride;
            let own = form.submatrix(start, start, F::SUB_BLOCK, F::SUB_BLOCK);
            let before = differences[range.clone()].to_vec();
            self.walk_again::<F>(place, own, differences, gradient, block, sub_block);
            let mut own_gradient = gradient[range.clone()].to_vec();
            self.add_product(&mut own_gradient, &before, &differences[range.clone()], own, stride);
            let row = sub_block * stride..(sub_block + 1) * stride;
            let task = Polish {
                stride,
                form: own,
                weights: &place.weights[range.clone()],
                d: &block.scales.d,
                dmin: &block.scales.dmin,
                scales: &block.scales.indices[row.clone()],
                minimums: &block.scales.minimums[row],
                codes: &mut block.codes[range.clone()],
                differences: &mut differences[range.clone()],
                gradient: &mut own_gradient,
            };
            self.plain.level.run(Run::<F>(task, std::marker::PhantomData));
            let rows = form.subrows(start, F::SUB_BLOCK);
            self.add_product(gradient, &before, &differences[range], rows, stride);
        }
        if F::REFIT {
            self.refit::<F>(place, form, differences, gradient, block);
        }
    }

    /// `to += (now - before) rows`.
    fn add_product(&self, to: &mut [f32], before: &[f32], now: &[f32], rows: MatRef<'_, f32>, stride: usize) {
        let change: Vec<f32> = now.iter().zip(before).map(|(now, before)| now - before).collect();
        self.timed(stride * rows.nrows() * rows.ncols(), || {
            carry(view_mut(to, stride), view(&change, stride), rows, Accum::Add);
        });
    }

    /// Walks one sub-block once more, all other columns being fixed; rows that gain take over what is found.
    fn walk_again<F: Walked>(
        &self,
        place: &Place<'_>,
        form: MatRef<'_, f32>,
        differences: &mut [f32],
        gradient: &[f32],
        block: &mut Trial,
        sub_block: usize,
    ) {
        let (stride, start) = (place.stride, sub_block * F::SUB_BLOCK);
        let range = start * stride..(start + F::SUB_BLOCK) * stride;
        let row = sub_block * stride..(sub_block + 1) * stride;
        let wide = Mat::from_fn(F::SUB_BLOCK, F::SUB_BLOCK, |i, j| f64::from(form[(i, j)]));
        let Some(r) = upper_factor(wide) else { return };
        let inverse = inverse_of(r.as_ref());
        let inverse = Mat::from_fn(F::SUB_BLOCK, F::SUB_BLOCK, |i, j| inverse[(i, j)] as f32);
        let r = Mat::from_fn(F::SUB_BLOCK, F::SUB_BLOCK, |i, j| r[(i, j)] as f32);
        let mut carried = vec![0.0; F::SUB_BLOCK * stride];
        self.timed(2 * stride * F::SUB_BLOCK * F::SUB_BLOCK, || {
            let to = view_mut(&mut carried, stride);
            matmul(
                to,
                Accum::Replace,
                view(&gradient[range.clone()], stride),
                inverse.transpose(),
                1.0,
                Par::Seq,
            );
        });
        let mut cost_now = vec![0.0f64; stride];
        for column in carried.chunks_exact(stride) {
            cost_now.iter_mut().zip(column).for_each(|(sum, &v)| *sum += f64::from(v) * f64::from(v));
        }
        let own = &mut differences[range.clone()];
        matmul(view_mut(&mut carried, stride), Accum::Add, view(own, stride), r.as_ref(), -1.0, Par::Seq);
        let mut scales = block.scales.indices[row.clone()].to_vec();
        let mut minimums = block.scales.minimums[row.clone()].to_vec();
        let (mut codes, mut found) = (vec![0; own.len()], vec![0.0; own.len()]);
        let mut cost = vec![0.0; stride];
        let task = SubBlock {
            stride,
            r: r.as_ref(),
            weights: &place.weights[range.clone()],
            carried: &carried,
            d: &block.scales.d,
            dmin: &block.scales.dmin,
            scales: &mut scales,
            minimums: &mut minimums,
            codes: &mut codes,
            differences: &mut found,
            cost: &mut cost,
            reach: self.settings.reach.min(1),
        };
        self.plain.level.run(super::walk::Run::<F>(task, std::marker::PhantomData));
        for lane in 0..stride {
            if cost[lane] < cost_now[lane] * (1.0 - LEAST_GAIN) {
                block.scales.indices[row.start + lane] = scales[lane];
                block.scales.minimums[row.start + lane] = minimums[lane];
                for at in (lane..own.len()).step_by(stride) {
                    block.codes[range.start + at] = codes[at];
                    own[at] = found[at];
                }
            }
        }
    }

    /// Fits `d` and `dmin` of a super-block to its codes, all else being fixed.
    fn refit<F: Walked>(
        &self,
        place: &Place<'_>,
        form: MatRef<'_, f32>,
        differences: &mut [f32],
        gradient: &[f32],
        block: &mut Trial,
    ) {
        let stride = place.stride;
        let (a, b) = super::walk::units::<F>(block, stride);
        let product = |values: &[f32]| {
            let mut product = vec![0.0; values.len()];
            self.timed(stride * F::BLOCK * F::BLOCK, || {
                carry(view_mut(&mut product, stride), view(values, stride), form, Accum::Replace);
            });
            product
        };
        let (ah, bh, dh) = (product(&a), product(&b), product(differences));
        for lane in 0..stride {
            let dot = |x: &[f32], y: &[f32]| {
                let places = (lane..x.len()).step_by(stride);
                places.map(|at| f64::from(x[at]) * f64::from(y[at])).sum::<f64>()
            };
            let (aa, ab, bb) = (dot(&a, &ah), dot(&a, &bh), dot(&b, &bh));
            // With `D = w - d a + dmin b` and `c = G - D H`, the error is least where `d a - dmin b` is nearest to
            // `w + c H^-1`, whose products with `a H` need no inverse: `q H + G`, `q = w - D`.
            let target =
                |x: &[f32], xh: &[f32]| dot(place.weights, xh) - dot(differences, xh) + dot(gradient, x);
            let (ac, bc) = (target(&a, &ah), target(&b, &bh));
            let Some((d, dmin)) = fit(aa, ab, bb, ac, bc) else { continue };
            let (d, dmin) = (to_f16(d as f32).to_f32(), to_f16(dmin as f32).to_f32());
            let (old_d, old_dmin) = (block.scales.d[lane], block.scales.dmin[lane]);
            let (dd, dm) = (f64::from(d - old_d), f64::from(dmin - old_dmin));
            // The change `e = -dd a + dm b` of the differences costs `e H e + 2 e G`.
            let quadratic = dd * dd * aa - 2.0 * dd * dm * ab + dm * dm * bb;
            let linear = -dd * dot(&a, gradient) + dm * dot(&b, gradient);
            let cost_now = dot(differences, &dh);
            if quadratic + 2.0 * linear < -LEAST_GAIN * cost_now {
                block.scales.d[lane] = d;
                block.scales.dmin[lane] = dmin;
                for at in (lane..a.len()).step_by(stride) {
                    differences[at] = place.weights[at] - (d * a[at] - dmin * b[at]);
                }
            }
        }
    }
}
