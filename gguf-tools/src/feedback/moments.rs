//! Second moments of the inputs of a matrix.

use faer::linalg::matmul::triangular::{BlockStructure, matmul};
use faer::linalg::solvers::Solve;
use faer::{Accum, Mat, MatMut, MatRef, Par, Side};

/// Rows that are multiplied together. Part of the result: it decides the order of sums, which must not depend on how inputs
/// are handed over.
const ROWS: usize = 256;

/// Forms the mean of `x x^T` over inputs that come a few at a time.
#[derive(Debug, Clone)]
pub struct SecondMoments {
    columns: usize,
    /// Inputs that wait for others, `[at most ROWS, columns]`.
    waiting: Vec<f32>,
    /// `[columns, columns]`; the half on and below the diagonal, column-major.
    sums: Vec<f32>,
    n_rows: usize,
    /// Sum of the weights.
    total: f64,
}

impl SecondMoments {
    /// No inputs yet.
    pub fn new(columns: usize) -> Self {
        let sums = vec![0.0; columns * columns];
        Self { columns, waiting: Vec::with_capacity(ROWS * columns), sums, n_rows: 0, total: 0.0 }
    }

    /// Adds one input, `[columns]`, that counts `weight` times.
    pub fn add(&mut self, input: impl Iterator<Item = f32>, weight: f32) {
        let root = weight.sqrt();
        let before = self.waiting.len();
        self.waiting.extend(input.map(|x| x * root));
        assert_eq!(self.waiting.len() - before, self.columns, "one value a column");
        self.n_rows += 1;
        self.total += f64::from(weight);
        if self.waiting.len() == ROWS * self.columns {
            self.flush();
        }
    }

    /// Inputs so far.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    fn flush(&mut self) {
        let n = self.columns;
        let x = MatRef::from_row_major_slice(&self.waiting, self.waiting.len() / n, n);
        let sums = MatMut::from_column_major_slice_mut(&mut self.sums, n, n);
        let full = BlockStructure::Rectangular;
        matmul(
            sums,
            BlockStructure::TriangularLower,
            Accum::Add,
            x.transpose(),
            full,
            x,
            full,
            1.0f32,
            Par::Seq,
        );
        self.waiting.clear();
    }

    /// The mean, `[columns, columns]`, symmetric; all zero without inputs.
    pub fn finish(mut self) -> Vec<f32> {
        if !self.waiting.is_empty() {
            self.flush();
        }
        let n = self.columns;
        let factor = if self.total > 0.0 { (1.0 / self.total) as f32 } else { 0.0 };
        for j in 0..n {
            for i in j..n {
                let mean = self.sums[j * n + i] * factor;
                self.sums[j * n + i] = mean;
                self.sums[i * n + j] = mean;
            }
        }
        self.sums
    }
}

/// `(1 - share) a + share b`, value by value.
pub fn mixed(a: &mut [f32], b: &[f32], share: f64) {
    let (own, other) = ((1.0 - share) as f32, share as f32);
    a.iter_mut().zip(b).for_each(|(a, b)| *a = own * *a + other * b);
}

/// Multiplies everything off the diagonal of a `[columns, columns]` matrix by `1 - share`.
pub fn shrunk_to_diagonal(matrix: &mut [f32], columns: usize, share: f64) {
    let factor = (1.0 - share) as f32;
    for (i, row) in matrix.chunks_exact_mut(columns).enumerate() {
        for (j, value) in row.iter_mut().enumerate() {
            if i != j {
                *value *= factor;
            }
        }
    }
}

/// `tr(X H X^T)` of rows `x` (`[rows, columns]`) under a `[columns, columns]` symmetric matrix.
pub fn quadratic(x: &[f32], h: &[f32], columns: usize) -> f64 {
    let h = MatRef::from_column_major_slice(h, columns, columns);
    let mut sum = 0.0;
    for rows in x.chunks(ROWS * columns) {
        let n = rows.len() / columns;
        let mut product = vec![0.0; rows.len()];
        let to = MatMut::from_row_major_slice_mut(&mut product, n, columns);
        let from = MatRef::from_row_major_slice(rows, n, columns);
        faer::linalg::matmul::matmul(to, Accum::Replace, from, h, 1.0f32, Par::Seq);
        sum += product.iter().zip(rows).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    }
    sum
}

/// Products of rows `x` (`[n, columns]`) with every row of a matrix `[rows, columns]`: `[n, rows]`.
pub fn products(x: &[f32], matrix: &[f32], columns: usize) -> Vec<f32> {
    let (n, rows) = (x.len() / columns, matrix.len() / columns);
    let mut out = vec![0.0; n * rows];
    let matrix = MatRef::from_row_major_slice(matrix, rows, columns);
    for (out, x) in out.chunks_mut(ROWS * rows).zip(x.chunks(ROWS * columns)) {
        let n = x.len() / columns;
        let to = MatMut::from_row_major_slice_mut(out, n, rows);
        let from = MatRef::from_row_major_slice(x, n, columns);
        faer::linalg::matmul::matmul(to, Accum::Replace, from, matrix.transpose(), 1.0f32, Par::Seq);
    }
    out
}

/// Forms the mean of `a b^T` over pairs of rows that come some at a time.
#[derive(Debug, Clone)]
pub struct CrossMoments {
    columns: usize,
    /// `[columns, columns]`, row-major.
    sums: Vec<f32>,
    n_rows: usize,
}

impl CrossMoments {
    /// Pairs that are best handed over together.
    pub const ROWS: usize = ROWS;

    /// No pairs yet.
    pub fn new(columns: usize) -> Self {
        Self { columns, sums: vec![0.0; columns * columns], n_rows: 0 }
    }

    /// Adds pairs of rows, both `[n, columns]`.
    pub fn add(&mut self, a: &[f32], b: &[f32]) {
        let (n, columns) = (a.len() / self.columns, self.columns);
        let to = MatMut::from_row_major_slice_mut(&mut self.sums, columns, columns);
        let (a, b) =
            (MatRef::from_row_major_slice(a, n, columns), MatRef::from_row_major_slice(b, n, columns));
        faer::linalg::matmul::matmul(to, Accum::Add, a.transpose(), b, 1.0f32, Par::Seq);
        self.n_rows += n;
    }

    /// The mean, `[columns, columns]` row-major; all zero without pairs.
    pub fn finish(mut self) -> Vec<f32> {
        let factor = 1.0 / self.n_rows.max(1) as f32;
        for sum in &mut self.sums {
            *sum *= factor;
        }
        self.sums
    }
}

/// Weights that come nearest to what `weights` (`[rows, columns]`) make of the right inputs `x` when they are given the inputs
/// `y` instead: `W + W (C - H) (H + r m I)^-1` with `C` the mean of `x y^T`, `H` that of `y y^T`, `m` the mean of its diagonal and
/// `r` = `ridge`, which holds them near the weights. `None` where the system cannot be solved.
pub fn corrected(
    weights: &[f32],
    cross: &[f32],
    moments: &[f32],
    columns: usize,
    ridge: f64,
) -> Option<Vec<f32>> {
    let mean = (0..columns).map(|i| f64::from(moments[i * columns + i])).sum::<f64>() / columns as f64;
    if mean.is_nan() || mean <= 0.0 {
        return None;
    }
    let h = |i: usize, j: usize| f64::from(moments[i * columns + j]);
    let damped = Mat::from_fn(columns, columns, |i, j| if i == j { h(i, j) + ridge * mean } else { h(i, j) });
    let missing = Mat::from_fn(columns, columns, |i, j| f64::from(cross[j * columns + i]) - h(j, i));
    let solved = damped.llt(Side::Lower).ok()?.solve(&missing);
    let change = Mat::from_fn(columns, columns, |i, j| solved[(j, i)] as f32);
    let rows = weights.len() / columns;
    let mut out = weights.to_vec();
    let to = MatMut::from_row_major_slice_mut(&mut out, rows, columns);
    let from = MatRef::from_row_major_slice(weights, rows, columns);
    faer::linalg::matmul::matmul(to, Accum::Add, from, change.as_ref(), 1.0f32, Par::Seq);
    out.iter().all(|v| v.is_finite()).then_some(out)
}
