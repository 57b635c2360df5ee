//! The walk over the super-blocks of some rows: carries errors forward, tries scales, keeps what ends best.
//!
//! Values lie column by column in the order of the walk, `[columns, stride]` with `stride` the rows rounded up to whole
//! lanes, so that eight rows are worked on side by side and matrix products need no copies.

use std::cell::Cell;

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, MatMut, MatRef, Par};
use half::f16;

use super::Settings;
use super::factor::{Factor, add_carried, carry, inverse_of};
use super::refine::Polish;
use crate::block::{BlockType, Guide};
use crate::quantize::{QuantizeError, RowByRow};
use crate::simd::{Kernel, Lanes};

/// Rows are not raised by more.
const LARGEST_GAIN: f64 = 1.25;

/// Columns of a panel when errors are measured.
const PANEL: usize = 256;

/// A super-block as it is stored, columns as they lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored {
    pub(super) d: f16,
    pub(super) dmin: f16,
    pub(super) scales: [u8; 16],
    pub(super) minimums: [u8; 16],
    pub(super) codes: [u8; 256],
}

/// A format that can be walked.
pub(super) trait Walked: 'static {
    /// The type.
    const TARGET: BlockType;
    /// Columns that share `d`.
    const BLOCK: usize;
    /// Columns that share a scale; divides `BLOCK`.
    const SUB_BLOCK: usize;
    /// Whether a value is `d` times something (minus `dmin` times something), so that both can be fitted.
    const REFIT: bool;

    /// Whether codes stand for several values at once.
    const CODEBOOK: bool;

    /// Reads scales and minimums of a block; codes need not be filled.
    fn read(block: &[u8]) -> Stored;

    /// Lays out a block.
    fn write(stored: &Stored, block: &mut [u8]);

    /// What a column holds, in units of `d` and of `dmin`. `codes`: those of its sub-block in the order of the walk.
    fn units(codes: &[u8; 32], at: usize, scale: u8, minimum: u8) -> (f32, f32);

    /// Chooses scale and codes of one sub-block for eight rows at a time. Marked `#[inline(always)]`.
    fn sub_block<L: Lanes>(sub_block: SubBlock<'_>);

    /// Chooses codes of one sub-block again, scales being kept. Marked `#[inline(always)]`.
    fn polish<L: Lanes>(polish: Polish<'_>);
}

/// One sub-block of all rows.
pub(super) struct SubBlock<'a> {
    /// Rows rounded up to whole lanes.
    pub(super) stride: usize,
    /// Rows and columns of `R` that belong to it.
    pub(super) r: MatRef<'a, f32>,
    /// `[sub-block, stride]`.
    pub(super) weights: &'a [f32],
    /// `S` of its columns, `[sub-block, stride]`.
    pub(super) carried: &'a [f32],
    /// `[stride]`.
    pub(super) d: &'a [f32],
    /// `[stride]`.
    pub(super) dmin: &'a [f32],
    /// Guesses in, choices out, `[stride]`.
    pub(super) scales: &'a mut [u8],
    /// Guesses in, choices out, `[stride]`.
    pub(super) minimums: &'a mut [u8],
    /// `[sub-block, stride]`.
    pub(super) codes: &'a mut [u8],
    /// Weights minus what is stored, `[sub-block, stride]`.
    pub(super) differences: &'a mut [f32],
    /// Full error, added to; `[stride]`.
    pub(super) cost: &'a mut [f64],
    /// How far from the guess scales are sought.
    pub(super) reach: u32,
}

pub(super) struct Run<'a, F>(pub(super) SubBlock<'a>, pub(super) std::marker::PhantomData<F>);

impl<F: Walked> Kernel for Run<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        F::sub_block::<L>(self.0);
    }
}

/// Scales of all rows in one super-block, sub-blocks in the order of the walk.
#[derive(Debug, Clone, Default)]
pub(super) struct Scales {
    /// `[stride]`.
    pub(super) d: Vec<f32>,
    /// `[stride]`.
    pub(super) dmin: Vec<f32>,
    /// Scale indices, `[sub-blocks, stride]`.
    pub(super) indices: Vec<u8>,
    /// Minimum indices, `[sub-blocks, stride]`.
    pub(super) minimums: Vec<u8>,
}

/// The outcome of a walk over one super-block.
#[derive(Debug, Clone, Default)]
pub(super) struct Trial {
    pub(super) scales: Scales,
    /// `[block, stride]`.
    pub(super) codes: Vec<u8>,
    /// `[block, stride]`.
    pub(super) differences: Vec<f32>,
    /// `[stride]`.
    pub(super) cost: Vec<f64>,
}

/// Errors of some rows, summed, in units of the factor, and what they cost.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    pub(super) n_plain_rows: usize,
    pub(super) plain: f64,
    pub(super) chosen: f64,
    pub(super) work: Work,
}

/// Matrix products: operations and the time they took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    /// Multiplications and additions.
    pub operations: f64,
    /// Seconds of processor time.
    pub seconds: f64,
}

impl Work {
    pub(super) fn plus(self, other: Self) -> Self {
        Self { operations: self.operations + other.operations, seconds: self.seconds + other.seconds }
    }
}

impl Sums {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            n_plain_rows: self.n_plain_rows + other.n_plain_rows,
            plain: self.plain + other.plain,
            chosen: self.chosen + other.chosen,
            work: self.work.plus(other.work),
        }
    }
}

pub(super) struct Walk<'a> {
    pub(super) settings: &'a Settings,
    pub(super) plain: RowByRow,
    pub(super) factor: &'a Factor,
    pub(super) work: Cell<Work>,
}

/// Processor time of this thread: what a measurement on a busy machine can go by.
fn thread_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// A matrix `[rows, columns]` in the layout of this module.
pub(super) fn view(values: &[f32], stride: usize) -> MatRef<'_, f32> {
    MatRef::from_column_major_slice(values, stride, values.len() / stride)
}

pub(super) fn view_mut(values: &mut [f32], stride: usize) -> MatMut<'_, f32> {
    let columns = values.len() / stride;
    MatMut::from_column_major_slice_mut(values, stride, columns)
}

/// One super-block of the walk.
pub(super) struct Place<'a> {
    /// First column of the walk.
    pub(super) first: usize,
    pub(super) stride: usize,
    pub(super) n_rows: usize,
    /// `[block, stride]`.
    pub(super) weights: &'a [f32],
    /// `[block, stride]`.
    pub(super) carried: &'a [f32],
}

impl Walk<'_> {
    /// Walks rows that hold the plain search's bytes in `out`, and replaces those of every row that gains.
    pub(super) fn run<F: Walked>(&self, weights: &[f32], out: &mut [u8]) -> Result<Sums, QuantizeError> {
        let columns = self.factor.columns();
        let n_rows = weights.len() / columns;
        let stride = n_rows.next_multiple_of(8);
        let w = self.turned(weights, n_rows, stride);
        let mut differences = vec![0.0; columns * stride];
        let mut cost = vec![0.0; stride];
        let mut bytes = vec![0; out.len()];
        let mut carried = vec![0.0; F::BLOCK * stride];
        let mut blocks = Vec::new();
        for first in (0..columns).step_by(F::BLOCK) {
            if first > 0 {
                let r = self.factor.part(0..first, first..first + F::BLOCK);
                let done = view(&differences[..first * stride], stride);
                self.timed(stride * first * F::BLOCK, || {
                    carry(view_mut(&mut carried, stride), done, r, Accum::Replace);
                });
            }
            let weights = &w[first * stride..][..F::BLOCK * stride];
            let place = Place { first, stride, n_rows, weights, carried: &carried };
            let best = self.block::<F>(&place)?;
            differences[first * stride..][..F::BLOCK * stride].copy_from_slice(&best.differences);
            cost.iter_mut().zip(&best.cost).for_each(|(sum, cost)| *sum += cost);
            blocks.push(Trial { differences: Vec::new(), ..best });
        }
        if self.settings.sweeps > 0 {
            self.refine::<F>(&w, &mut differences, &mut blocks, stride);
            cost = self.full_errors(&differences, stride);
        }
        let gains = self.gains::<F>(&w, &differences, stride);
        if gains.iter().any(|&gain| gain != 1.0) {
            for (difference, w) in differences.chunks_exact_mut(stride).zip(w.chunks_exact(stride)) {
                for row in 0..stride {
                    difference[row] = w[row] - gains[row] * (w[row] - difference[row]);
                }
            }
            cost = self.full_errors(&differences, stride);
        }
        for (index, mut block) in blocks.into_iter().enumerate() {
            for row in 0..n_rows {
                block.scales.d[row] *= gains[row];
                block.scales.dmin[row] *= gains[row];
            }
            self.write::<F>(index * F::BLOCK, stride, &block, n_rows, &mut bytes);
        }
        let plain = self.plain_errors::<F>(&w, n_rows, stride, out)?;
        let row_bytes = out.len() / n_rows;
        let mut sums = Sums::default();
        for row in 0..n_rows {
            let keeps = cost[row].is_nan() || cost[row] >= plain[row];
            let range = row * row_bytes..(row + 1) * row_bytes;
            if !keeps {
                out[range.clone()].copy_from_slice(&bytes[range]);
            }
            sums = sums.plus(Sums {
                n_plain_rows: usize::from(keeps),
                plain: plain[row],
                chosen: if keeps { plain[row] } else { cost[row] },
                work: Work::default(),
            });
        }
        sums.work = self.work.get();
        Ok(sums)
    }

    /// Factors that give back what least squares takes from the size of a row. The inputs for which a row's output is large look
    /// like the row: its output for them shrinks by more than the mean over all inputs tells, by about the alignment under the diagonal.
    fn gains<F: Walked>(&self, w: &[f32], differences: &[f32], stride: usize) -> Vec<f32> {
        let wanted = if F::CODEBOOK { self.settings.alignment } else { self.settings.scalar_alignment };
        if wanted <= 0.0 || !F::REFIT {
            return vec![1.0; stride];
        }
        let (mut whole, mut left) = (vec![0.0f64; stride], vec![0.0f64; stride]);
        for (column, (w, difference)) in
            w.chunks_exact(stride).zip(differences.chunks_exact(stride)).enumerate()
        {
            let weight = self.factor.diagonal(column);
            for row in 0..stride {
                let (w, difference) = (f64::from(w[row]), f64::from(difference[row]));
                whole[row] += weight * w * w;
                left[row] += weight * w * (w - difference);
            }
        }
        let gain = |(whole, left): (&f64, &f64)| {
            let gain = wanted * whole / left;
            if gain.is_finite() { gain.clamp(1.0, LARGEST_GAIN) as f32 } else { 1.0 }
        };
        whole.iter().zip(&left).map(gain).collect()
    }

    /// A matrix product of so many multiplications, noted.
    pub(super) fn timed(&self, multiplications: usize, product: impl FnOnce()) {
        let start = thread_seconds();
        product();
        let seconds = thread_seconds() - start;
        self.work.set(self.work.get().plus(Work { operations: 2.0 * multiplications as f64, seconds }));
    }

    /// Rows to columns in the order of the walk.
    fn turned(&self, values: &[f32], n_rows: usize, stride: usize) -> Vec<f32> {
        let columns = self.factor.columns();
        let mut turned = vec![0.0; columns * stride];
        for (to, &column) in turned.chunks_exact_mut(stride).zip(self.factor.order()) {
            for row in 0..n_rows {
                to[row] = values[row * columns + column];
            }
        }
        turned
    }

    /// Full error of each row's plain bytes.
    fn plain_errors<F: Walked>(
        &self,
        w: &[f32],
        n_rows: usize,
        stride: usize,
        plain: &[u8],
    ) -> Result<Vec<f64>, QuantizeError> {
        let format = F::TARGET.format().ok_or(QuantizeError::NotWritable(F::TARGET))?;
        let columns = self.factor.columns();
        let mut decoded = vec![0.0; n_rows * columns];
        format.dequantize(plain, &mut decoded);
        let mut differences = self.turned(&decoded, n_rows, stride);
        differences.iter_mut().zip(w).for_each(|(q, w)| *q = w - *q);
        Ok(self.full_errors(&differences, stride))
    }

    /// `|D R|^2` of each row.
    fn full_errors(&self, differences: &[f32], stride: usize) -> Vec<f64> {
        let columns = self.factor.columns();
        let mut errors = vec![0.0; stride];
        let mut product = vec![0.0; PANEL * stride];
        for first in (0..columns).step_by(PANEL) {
            let end = columns.min(first + PANEL);
            let product = &mut product[..(end - first) * stride];
            let r = self.factor.part(0..end, first..end);
            let known = view(&differences[..end * stride], stride);
            self.timed(stride * end * (end - first), || {
                carry(view_mut(product, stride), known, r, Accum::Replace);
            });
            for column in product.chunks_exact(stride) {
                for (error, &y) in errors.iter_mut().zip(column) {
                    *error += f64::from(y) * f64::from(y);
                }
            }
        }
        errors
    }

    /// The best of all trials of one super-block, row by row.
    fn block<F: Walked>(&self, place: &Place<'_>) -> Result<Trial, QuantizeError> {
        let guess = self.guess::<F>(place)?;
        let mut best: Option<Trial> = None;
        for &factor in if F::REFIT { &self.settings.d_factors[..] } else { &[1.0] } {
            let scaled = |v: &Vec<f32>| v.iter().map(|v| to_f16(v * factor).to_f32()).collect();
            let scales = Scales { d: scaled(&guess.d), dmin: scaled(&guess.dmin), ..guess.clone() };
            keep_better(&mut best, self.trial::<F>(place, scales), place.stride);
        }
        for _ in 0..if F::REFIT { self.settings.refits } else { 0 } {
            let Some(found) = &best else { break };
            let scales = self.refitted::<F>(place, found);
            keep_better(&mut best, self.trial::<F>(place, scales), place.stride);
        }
        Ok(best.unwrap_or_default())
    }

    /// Scales that the plain search finds for the targets.
    fn guess<F: Walked>(&self, place: &Place<'_>) -> Result<Scales, QuantizeError> {
        let (first, stride) = (place.first, place.stride);
        let r = self.factor.part(first..first + F::BLOCK, first..first + F::BLOCK);
        let mut targets = place.weights.to_vec();
        if first > 0 {
            let inverse = inverse_of(r);
            self.timed(stride * F::BLOCK * F::BLOCK, || {
                add_carried(view_mut(&mut targets, stride), view(place.carried, stride), inverse.as_ref());
            });
        }
        let places = self.places::<F>(first);
        let mut importance = vec![0.0; F::BLOCK];
        for (i, &at) in places.iter().enumerate() {
            importance[at] = (i..F::BLOCK).map(|j| r[(i, j)] * r[(i, j)]).sum();
        }
        let guide = Guide {
            importance: Some(&importance),
            scale_gain: Some(1.0),
            level: self.plain.level,
            ..Guide::default()
        };
        let format = F::TARGET.format().and_then(|f| f.quantizer(guide));
        let quantizer = format.ok_or(QuantizeError::NotWritable(F::TARGET))?;
        let n_sub_blocks = F::BLOCK / F::SUB_BLOCK;
        let mut guess = Scales {
            d: vec![0.0; stride],
            dmin: vec![0.0; stride],
            indices: vec![0; n_sub_blocks * stride],
            minimums: vec![0; n_sub_blocks * stride],
        };
        let mut row_values = vec![0.0; F::BLOCK];
        let mut block = vec![0; F::TARGET.bytes_per_block()];
        for row in 0..place.n_rows {
            for (i, &at) in places.iter().enumerate() {
                let target = targets[i * stride + row];
                row_values[at] = if target.is_finite() { target } else { 0.0 };
            }
            quantizer.quantize_row(&row_values, &mut block);
            let stored = F::read(&block);
            guess.d[row] = stored.d.to_f32();
            guess.dmin[row] = stored.dmin.to_f32();
            for sub_block in 0..n_sub_blocks {
                let at = places[sub_block * F::SUB_BLOCK] / F::SUB_BLOCK;
                guess.indices[sub_block * stride + row] = stored.scales[at];
                guess.minimums[sub_block * stride + row] = stored.minimums[at];
            }
        }
        Ok(guess)
    }

    /// Where the columns of a super-block of the walk lie in the block.
    fn places<F: Walked>(&self, first: usize) -> Vec<usize> {
        self.factor.order()[first..first + F::BLOCK].iter().map(|column| column % F::BLOCK).collect()
    }

    /// One walk over a super-block.
    fn trial<F: Walked>(&self, place: &Place<'_>, scales: Scales) -> Trial {
        let stride = place.stride;
        let mut carried = place.carried.to_vec();
        let mut trial = Trial {
            scales,
            codes: vec![0; F::BLOCK * stride],
            differences: vec![0.0; F::BLOCK * stride],
            cost: vec![0.0; stride],
        };
        for sub_block in 0..F::BLOCK / F::SUB_BLOCK {
            let start = sub_block * F::SUB_BLOCK;
            let (range, end) = (start * stride..(start + F::SUB_BLOCK) * stride, start + F::SUB_BLOCK);
            let row = sub_block * stride..(sub_block + 1) * stride;
            let at = place.first + start..place.first + end;
            let (now, later) = carried.split_at_mut(range.end);
            let task = SubBlock {
                stride,
                r: self.factor.part(at.clone(), at.clone()),
                weights: &place.weights[range.clone()],
                carried: &now[range.start..],
                d: &trial.scales.d,
                dmin: &trial.scales.dmin,
                scales: &mut trial.scales.indices[row.clone()],
                minimums: &mut trial.scales.minimums[row],
                codes: &mut trial.codes[range.clone()],
                differences: &mut trial.differences[range.clone()],
                cost: &mut trial.cost,
                reach: self.settings.reach,
            };
            self.plain.level.run(Run::<F>(task, std::marker::PhantomData));
            if !later.is_empty() {
                let r = self.factor.part(at, place.first + end..place.first + F::BLOCK);
                self.timed(stride * F::SUB_BLOCK * (F::BLOCK - end), || {
                    carry(view_mut(later, stride), view(&trial.differences[range], stride), r, Accum::Add);
                });
            }
        }
        trial
    }

    /// `d` and `dmin` that suit the codes of a trial best, later columns being free.
    fn refitted<F: Walked>(&self, place: &Place<'_>, trial: &Trial) -> Scales {
        let stride = place.stride;
        let units = units::<F>(trial, stride);
        let at = place.first..place.first + F::BLOCK;
        let r = self.factor.part(at.clone(), at);
        let product = |values: &[f32]| {
            let mut product = Mat::<f32>::zeros(stride, F::BLOCK);
            self.timed(stride * F::BLOCK * F::BLOCK, || {
                matmul(product.as_mut(), Accum::Replace, view(values, stride), r, 1.0, Par::Seq);
            });
            product
        };
        let (a, b, mut c) = (product(&units.0), product(&units.1), product(place.weights));
        c += view(place.carried, stride);
        let mut scales = trial.scales.clone();
        for row in 0..stride {
            let dot = |x: &Mat<f32>, y: &Mat<f32>| {
                (0..F::BLOCK).map(|j| f64::from(x[(row, j)]) * f64::from(y[(row, j)])).sum::<f64>()
            };
            let fitted = fit(dot(&a, &a), dot(&a, &b), dot(&b, &b), dot(&a, &c), dot(&b, &c));
            if let Some((d, dmin)) = fitted {
                scales.d[row] = to_f16(d as f32).to_f32();
                scales.dmin[row] = to_f16(dmin as f32).to_f32();
            }
        }
        scales
    }

    /// Lays out the blocks of one super-block.
    fn write<F: Walked>(&self, first: usize, stride: usize, trial: &Trial, n_rows: usize, bytes: &mut [u8]) {
        let places = self.places::<F>(first);
        let row_bytes = bytes.len() / n_rows;
        let block_bytes = F::TARGET.bytes_per_block();
        let index = self.factor.order()[first] / F::BLOCK;
        for (row, bytes) in bytes.chunks_exact_mut(row_bytes).enumerate() {
            let mut stored = Stored {
                d: to_f16(trial.scales.d[row]),
                dmin: to_f16(trial.scales.dmin[row]),
                scales: [0; 16],
                minimums: [0; 16],
                codes: [0; 256],
            };
            for (i, &at) in places.iter().enumerate() {
                stored.codes[at] = trial.codes[i * stride + row];
            }
            for sub_block in 0..F::BLOCK / F::SUB_BLOCK {
                let at = places[sub_block * F::SUB_BLOCK] / F::SUB_BLOCK;
                stored.scales[at] = trial.scales.indices[sub_block * stride + row];
                stored.minimums[at] = trial.scales.minimums[sub_block * stride + row];
            }
            F::write(&stored, &mut bytes[index * block_bytes..][..block_bytes]);
        }
    }
}

/// What the columns of a super-block hold in units of `d` and of `dmin`, `[block, stride]` each.
pub(super) fn units<F: Walked>(trial: &Trial, stride: usize) -> (Vec<f32>, Vec<f32>) {
    let mut units = (vec![0.0; F::BLOCK * stride], vec![0.0; F::BLOCK * stride]);
    let mut codes = [0; 32];
    for sub_block in 0..F::BLOCK / F::SUB_BLOCK {
        let start = sub_block * F::SUB_BLOCK;
        for row in 0..stride {
            for (i, code) in codes.iter_mut().take(F::SUB_BLOCK).enumerate() {
                *code = trial.codes[(start + i) * stride + row];
            }
            let scale = trial.scales.indices[sub_block * stride + row];
            let minimum = trial.scales.minimums[sub_block * stride + row];
            for i in 0..F::SUB_BLOCK {
                let at = (start + i) * stride + row;
                (units.0[at], units.1[at]) = F::units(&codes, i, scale, minimum);
            }
        }
    }
    units
}

/// Least squares of `c - d a + dmin b` from the products of its parts; neither scale is negative.
pub(super) fn fit(aa: f64, ab: f64, bb: f64, ac: f64, bc: f64) -> Option<(f64, f64)> {
    let determinant = aa * bb - ab * ab;
    if determinant > 1e-9 * aa * bb {
        let d = (bb * ac - ab * bc) / determinant;
        let dmin = (ab * ac - aa * bc) / determinant;
        if d > 0.0 && dmin >= 0.0 {
            return Some((d, dmin));
        }
    }
    (aa > 0.0 && ac > 0.0).then(|| (ac / aa, 0.0))
}

/// Takes over every row that a trial does better.
fn keep_better(best: &mut Option<Trial>, trial: Trial, stride: usize) {
    let Some(best) = best else {
        *best = Some(trial);
        return;
    };
    for row in 0..stride {
        if trial.cost[row].is_nan() || trial.cost[row] >= best.cost[row] {
            continue;
        }
        fn copy<T: Copy>(to: &mut [T], from: &[T], row: usize, stride: usize) {
            for at in (row..to.len()).step_by(stride) {
                to[at] = from[at];
            }
        }
        copy(&mut best.scales.d, &trial.scales.d, row, stride);
        copy(&mut best.scales.dmin, &trial.scales.dmin, row, stride);
        copy(&mut best.scales.indices, &trial.scales.indices, row, stride);
        copy(&mut best.scales.minimums, &trial.scales.minimums, row, stride);
        copy(&mut best.codes, &trial.codes, row, stride);
        copy(&mut best.differences, &trial.differences, row, stride);
        best.cost[row] = trial.cost[row];
    }
}

/// The nearest half-precision number that is neither negative nor infinite.
pub(super) fn to_f16(value: f32) -> f16 {
    f16::from_f32(value.max(0.0).min(f16::MAX.to_f32()))
}
