//! Matrix products: rows are widened (or taken as blocks) tile by tile, and a tile works on all inputs.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use super::int8::{FloatDot, InputRounding, Int8Dot, Int8Rows};
use super::plain::{self, Sums};
use super::{CpuBackend, PARALLEL_WORK, kernels};
use crate::error::RunnerError;
use crate::ops::MatrixPlace;
use crate::weights::WeightSource;

/// Rows that one task widens and multiplies.
const TILE_ROWS: usize = 16;

/// A matrix of a source, `[rows, columns]`.
pub struct CpuMatrix {
    source: Arc<dyn WeightSource>,
    place: MatrixPlace,
    /// All values, if they were widened once at loading.
    widened: Option<Box<[f32]>>,
    /// What happens to the inputs first.
    rounding: Option<InputRounding>,
    /// The product with 8-bit inputs, if it is to be used.
    int8: Option<Int8Dot>,
    /// The product with one `f32` input straight from the blocks, which gives the bits of the widened row's.
    float: Option<FloatDot>,
}

impl CpuMatrix {
    pub(super) fn new(
        backend: &CpuBackend,
        source: &Arc<dyn WeightSource>,
        place: MatrixPlace,
    ) -> Result<Self, RunnerError> {
        let rounds = backend.activations.rounds_as_ggml();
        let block_type = source.block_type(place.tensor).filter(|_| rounds);
        // Whole groups, and for floats whole groups of lanes.
        let rounding = block_type.and_then(InputRounding::of);
        let rounding = rounding.filter(|r| place.columns.is_multiple_of(r.group_values()));
        let int8 = block_type.filter(|_| rounding.is_some()).and_then(Int8Dot::of);
        let plain = backend.sums() == Sums::PlainGgml;
        let int8 = if plain { int8.map(Int8Dot::as_plain_ggml) } else { int8 };
        let float = source.block_type(place.tensor).and_then(FloatDot::of);
        let float = float.filter(|_| place.columns.is_multiple_of(8) && !plain);
        let mut matrix = Self { source: source.clone(), place, widened: None, rounding, int8, float };
        if backend.widen && matrix.int8.is_none() {
            let mut values = vec![0.0; place.rows * place.columns].into_boxed_slice();
            matrix.read_rows(0..place.rows, &mut values)?;
            matrix.widened = Some(values);
        }
        Ok(matrix)
    }

    pub(super) fn rows(&self) -> usize {
        self.place.rows
    }

    pub(super) fn columns(&self) -> usize {
        self.place.columns
    }

    fn source_rows(&self, rows: &Range<usize>) -> Range<usize> {
        self.place.first_row + rows.start..self.place.first_row + rows.end
    }

    /// Widens rows.
    pub(super) fn read_rows(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), RunnerError> {
        if let Some(values) = &self.widened {
            out.copy_from_slice(&values[rows.start * self.columns()..rows.end * self.columns()]);
            return Ok(());
        }
        self.source.read_rows(self.place.tensor, self.source_rows(&rows), out)
    }
}

/// Inputs of matrix products, `[n, width]`; rounded when a matrix first asks.
pub(super) struct Inputs<'a> {
    values: &'a [f32],
    width: usize,
    /// As integers, in groups of 32 and of 256.
    int8: [OnceLock<Int8Rows>; 2],
    /// As `f32`, by the way of rounding.
    rounded: [OnceLock<Vec<f32>>; InputRounding::COUNT],
}

impl<'a> Inputs<'a> {
    pub(super) fn new(values: &'a [f32], width: usize) -> Self {
        Self { values, width, int8: Default::default(), rounded: Default::default() }
    }

    fn len(&self) -> usize {
        self.values.len() / self.width
    }

    fn int8(&self, backend: &CpuBackend, dot: Int8Dot) -> &Int8Rows {
        let place = &self.int8[usize::from(dot.group_values() == 256)];
        place.get_or_init(|| dot.round(backend.level, self.values, self.width))
    }

    /// The values that a matrix is multiplied with.
    fn values(&self, backend: &CpuBackend, matrix: &CpuMatrix) -> &[f32] {
        let Some(rounding) = matrix.rounding else { return self.values };
        self.rounded[rounding as usize].get_or_init(|| rounding.rounded(backend.level, self.values))
    }
}

/// Some rows of a matrix times all inputs.
pub(super) struct Job<'a> {
    pub(super) matrix: &'a CpuMatrix,
    pub(super) rows: Range<usize>,
    pub(super) inputs: &'a Inputs<'a>,
    /// `[rows, inputs]`, overwritten.
    pub(super) out: &'a mut [f32],
}

impl CpuBackend {
    /// Does all jobs, in parallel over tiles of rows.
    pub(super) fn run_jobs(&self, jobs: Vec<Job<'_>>) -> Result<(), RunnerError> {
        let mut work = 0;
        let mut tiles = Vec::new();
        for job in jobs {
            let n_inputs = job.inputs.len();
            if n_inputs == 0 {
                continue;
            }
            work += job.rows.len() * job.matrix.columns() * n_inputs;
            // Before the work is divided, so that no thread waits for another to round.
            match job.matrix.int8 {
                Some(dot) => _ = job.inputs.int8(self, dot),
                None => _ = job.inputs.values(self, job.matrix),
            }
            let mut first = job.rows.start;
            for out in job.out.chunks_mut(TILE_ROWS * n_inputs) {
                let end = first + out.len() / n_inputs;
                tiles.push(Job { matrix: job.matrix, rows: first..end, inputs: job.inputs, out });
                first = end;
            }
        }
        if work < PARALLEL_WORK {
            let mut scratch = Vec::new();
            return tiles.into_iter().try_for_each(|tile| self.run_tile(tile, &mut scratch));
        }
        tiles.into_par_iter().try_for_each_init(Vec::new, |scratch, tile| self.run_tile(tile, scratch))
    }

    fn run_tile(&self, tile: Job<'_>, scratch: &mut Vec<f32>) -> Result<(), RunnerError> {
        let matrix = tile.matrix;
        let width = matrix.columns();
        if let Some(dot) = matrix.int8 {
            let blocks = matrix.source.blocks(matrix.place.tensor, matrix.source_rows(&tile.rows))?;
            dot.products(self.level, blocks, tile.inputs.int8(self, dot), tile.out);
            return Ok(());
        }
        if let Some(dot) = matrix.float
            && matrix.widened.is_none()
            && tile.inputs.len() == 1
        {
            let blocks = matrix.source.blocks(matrix.place.tensor, matrix.source_rows(&tile.rows))?;
            dot.products(self.level, blocks, tile.inputs.values(self, matrix), tile.out);
            return Ok(());
        }
        let rows = if let Some(values) = &matrix.widened {
            &values[tile.rows.start * width..tile.rows.end * width]
        } else {
            scratch.resize(tile.rows.len() * width, 0.0);
            matrix.read_rows(tile.rows, scratch)?;
            &scratch[..]
        };
        let inputs = tile.inputs.values(self, matrix);
        match self.sums() {
            Sums::Own => kernels::products(self.level, rows, inputs, width, tile.out),
            Sums::PlainGgml => plain::products(rows, inputs, width, tile.out),
        }
        Ok(())
    }

    /// Products of several matrices with the same inputs, each `[n, rows]`.
    pub(super) fn multiply_many(
        &self,
        inputs: &Inputs<'_>,
        matrices: &[&CpuMatrix],
    ) -> Result<Vec<Vec<f32>>, RunnerError> {
        let n = inputs.len();
        let mut outs: Vec<Vec<f32>> = matrices.iter().map(|m| vec![0.0; m.rows() * n]).collect();
        let jobs = matrices.iter().zip(&mut outs);
        self.run_jobs(
            jobs.map(|(matrix, out)| Job { matrix, rows: 0..matrix.rows(), inputs, out }).collect(),
        )?;
        Ok(outs.into_iter().map(|out| transposed(out, n)).collect())
    }
}

/// `[rows, columns]` to `[columns, rows]`.
pub(super) fn transposed(values: Vec<f32>, columns: usize) -> Vec<f32> {
    const SIDE: usize = 32;
    let rows = values.len() / columns.max(1);
    if columns <= 1 || rows <= 1 {
        return values;
    }
    let mut out = vec![0.0; values.len()];
    for row in (0..rows).step_by(SIDE) {
        for column in (0..columns).step_by(SIDE) {
            for r in row..rows.min(row + SIDE) {
                for c in column..columns.min(column + SIDE) {
                    out[c * rows + r] = values[r * columns + c];
                }
            }
        }
    }
    out
}
