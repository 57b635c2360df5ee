//! The triangular factor of a second-moment matrix: everything the walk needs to know about the inputs.
//!
//! `H = R R^T` with `R` upper triangular, columns in the order of the walk. The squared error of a matrix whose
//! quantized values differ from the weights by `D` is `tr(D H D^T) = |D R|^2`, and column `j` of `D R` depends on
//! columns up to `j` of `D` alone. So the walk makes each new column of `D R` small, given those before:
//! the weights `w_b` of the next columns become the targets `w_b + S_b R_bb^-1` with `S_b = D_f R_fb`, `f` being the
//! columns that are done. That is the conditional update of GPTQ (Frantar et al. 2022), without the inverse of `H`:
//! `S_b R_bb^-1 = D_f H_fr (H_rr^-1)_.b`, `r` being the columns that are not done yet.

use std::sync::OnceLock;

use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::cholesky::llt::factor::{LltParams, cholesky_in_place, cholesky_in_place_scratch};
use faer::linalg::matmul::matmul;
use faer::prelude::default;
use faer::traits::ComplexField;
use faer::{Accum, Mat, MatMut, MatRef, Par, Spec};

/// In which order columns are walked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// As they lie.
    Natural,
    /// Super-blocks, and sub-blocks within each, by descending sum of the diagonal.
    #[default]
    Descending,
}

impl Order {
    /// Every order with the name users type.
    pub const NAMES: [(&'static str, Self); 2] =
        [("natural", Self::Natural), ("descending", Self::Descending)];
}

/// Times that damping is raised tenfold before a matrix is given up.
const MOST_RAISES: u32 = 12;

/// Values between columns, so that those of a power of two do not share the same lines of the cache.
const SPREAD: usize = 16;

/// `R` of `H = R R^T`.
#[derive(Debug, Clone)]
pub struct Factor {
    columns: usize,
    /// Column of the matrix at each step of the walk.
    order: Vec<usize>,
    /// `[columns, columns]`, column-major with `stride` values from column to column; zero below the diagonal.
    r: Vec<f32>,
    stride: usize,
    /// Diagonal blocks of the factored matrix, made when they are first asked for.
    forms: OnceLock<Vec<Mat<f32>>>,
    block: usize,
    damping: f64,
    raises: u32,
}

impl Factor {
    /// Factors `h` (`[columns, columns]`, symmetric) plus `damping` times its mean diagonal.
    ///
    /// `block` columns share a scale `d`, `sub_block` columns a scale of their own: both stay together in any order.
    /// Damping is raised tenfold where the matrix is not positive definite in spite of it. `None`: the matrix is not finite, has
    /// no positive diagonal, or nothing helps.
    pub fn new(
        h: &[f32],
        columns: usize,
        order: Order,
        block: usize,
        sub_block: usize,
        damping: f64,
    ) -> Option<Self> {
        assert_eq!(h.len(), columns * columns, "a square matrix");
        let diagonal: Vec<f64> = (0..columns).map(|i| f64::from(h[i * columns + i])).collect();
        let mean = diagonal.iter().sum::<f64>() / columns as f64;
        let finite = h.iter().all(|v| v.is_finite());
        if !finite || mean.is_nan() || mean <= 0.0 {
            return None;
        }
        let order = walk_order(&diagonal, order, block, sub_block);
        let mut damping = damping;
        for raises in 0..=MOST_RAISES {
            // Scaled to a mean diagonal of one: errors of all matrices are of one size. Both triangles are averaged,
            // so that rounding in `h` cannot decide which of them counts.
            let matrix = Mat::<f64>::from_fn(columns, columns, |i, j| {
                let (a, b) = (order[i], order[j]);
                let value = 0.5 * (f64::from(h[a * columns + b]) + f64::from(h[b * columns + a])) / mean;
                if i == j { value + damping } else { value }
            });
            if let Some(r) = upper_factor(matrix) {
                let stride = columns + SPREAD;
                let mut flat = vec![0.0; columns * stride];
                for j in 0..columns {
                    for (i, value) in flat[j * stride..][..=j].iter_mut().enumerate() {
                        *value = r[(i, j)] as f32;
                    }
                }
                let forms = OnceLock::new();
                return Some(Self { columns, order, r: flat, stride, forms, block, damping, raises });
            }
            damping = (damping * 10.0).max(1e-8);
        }
        None
    }

    /// Width of the matrix.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Damping in the end, as a multiple of the mean diagonal.
    pub fn damping(&self) -> f64 {
        self.damping
    }

    /// How often damping had to be raised.
    pub fn raises(&self) -> u32 {
        self.raises
    }

    /// Column of the matrix at each step of the walk.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// Rows `rows`, columns `columns` of `R`.
    pub(super) fn part(
        &self,
        rows: std::ops::Range<usize>,
        columns: std::ops::Range<usize>,
    ) -> MatRef<'_, f32> {
        MatRef::from_column_major_slice_with_stride(&self.r, self.columns, self.columns, self.stride)
            .submatrix(rows.start, columns.start, rows.len(), columns.len())
    }

    /// Rows and columns of the factored matrix that belong to a super-block.
    pub(super) fn form(&self, index: usize) -> MatRef<'_, f32> {
        let forms = self.forms.get_or_init(|| {
            let form = |first: usize| {
                let r = self.part(first..first + self.block, first..self.columns);
                let mut form = Mat::zeros(self.block, self.block);
                matmul(form.as_mut(), Accum::Replace, r, r.transpose(), 1.0f32, Par::Seq);
                form
            };
            (0..self.columns).step_by(self.block).map(form).collect()
        });
        forms[index].as_ref()
    }

    /// Diagonal of the factored matrix at a step of the walk.
    pub(super) fn diagonal(&self, step: usize) -> f64 {
        let row = (step..self.columns).map(|j| f64::from(self.r[j * self.stride + step]));
        row.map(|r| r * r).sum()
    }

    /// Whether no column says anything about another.
    pub(super) fn is_diagonal(&self) -> bool {
        (0..self.columns).all(|j| self.r[j * self.stride..][..j].iter().all(|&v| v == 0.0))
    }
}

/// The columns in the order of the walk.
fn walk_order(diagonal: &[f64], order: Order, block: usize, sub_block: usize) -> Vec<usize> {
    let mut columns: Vec<usize> = (0..diagonal.len()).collect();
    if order == Order::Natural {
        return columns;
    }
    let sum = |columns: &[usize]| columns.iter().map(|&c| diagonal[c]).sum::<f64>();
    let descending = |columns: &mut [usize], size: usize| {
        let mut parts: Vec<Vec<usize>> = columns.chunks(size).map(<[usize]>::to_vec).collect();
        // Stable: equal sums stay in their order.
        parts.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
        columns.copy_from_slice(&parts.concat());
    };
    descending(&mut columns, block);
    for part in columns.chunks_mut(block) {
        descending(part, sub_block);
    }
    columns
}

/// Upper triangular `R` with `R R^T` = `matrix`: Cholesky's factor of the matrix read backwards. `None` if it is not positive definite.
pub(super) fn upper_factor(matrix: Mat<f64>) -> Option<Mat<f64>> {
    let n = matrix.nrows();
    let mut backwards = matrix.reverse_rows_and_cols().to_owned();
    let params: Spec<LltParams, f64> = default();
    let mut memory = MemBuffer::new(cholesky_in_place_scratch::<f64>(n, Par::Seq, params));
    let stack = MemStack::new(&mut memory);
    cholesky_in_place(backwards.as_mut(), default(), Par::Seq, stack, params).ok()?;
    let lower = |i: usize, j: usize| if i >= j { backwards[(i, j)] } else { 0.0 };
    let r = Mat::from_fn(n, n, |i, j| lower(n - 1 - i, n - 1 - j));
    (0..n).all(|i| r[(i, i)].is_finite() && r[(i, i)] > 0.0).then_some(r)
}

/// `S_b = D_f R_fb`, what the errors of finished columns mean for the next ones. `differences`: `[rows, f]`.
pub(super) fn carry<T: ComplexField>(
    carried: MatMut<'_, T>,
    differences: MatRef<'_, T>,
    r: MatRef<'_, T>,
    accumulate: Accum,
) {
    matmul(carried, accumulate, differences, r, T::one_impl(), Par::Seq);
}

/// `R_bb^-1` of a small diagonal block.
pub(super) fn inverse_of<T: ComplexField>(r: MatRef<'_, T>) -> Mat<T> {
    let mut inverse = Mat::zeros(r.nrows(), r.ncols());
    faer::linalg::triangular_inverse::invert_upper_triangular(inverse.as_mut(), r, Par::Seq);
    inverse
}

/// Targets `w_b + S_b R_bb^-1`. `targets` holds the weights before. `[rows, b]`.
pub(super) fn add_carried<T: ComplexField>(
    targets: MatMut<'_, T>,
    carried: MatRef<'_, T>,
    inverse: MatRef<'_, T>,
) {
    matmul(targets, Accum::Add, carried, inverse, T::one_impl(), Par::Seq);
}
