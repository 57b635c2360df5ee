//! Launches of the kernels for few tokens.

use bytemuck::{Pod, Zeroable};
use gguf_tools::block::BlockType;

use super::super::driver::{Arguments, Launch, View, ViewMut};
use super::super::error::CudaError;
use super::super::module::Gpu;
use super::Matrix;

/// Matrices of one launch, at most.
pub(super) const MOST_PARTS: usize = 8;

/// Threads of a block for one input, of which a multiprocessor has one, and for several, of which it has two.
const THREADS_OF_ONE: u32 = 512;
const THREADS: u32 = 256;
/// Warps of a multiprocessor.
const WARPS: usize = 16;

/// Shared memory that the inputs of one launch may take, and that of one input, which leaves room for the ring of the smallest
/// step on the smallest chip.
const INPUT_BYTES: usize = 96 << 10;
const ONE_INPUT_BYTES: usize = 56 << 10;

/// Values of an input are filled up to this many.
const CHUNK: usize = 512;
/// Rows that a warp has at once, and steps that are on their way for it or used: of single rows as many as shared memory holds,
/// for matrices of few rows, such as the router's, take as long as a row takes.
const STEPS: [(usize, usize); 4] = [(4, 3), (2, 5), (1, 8), (1, 4)];

/// Shared memory of the rings of a block: codes of 16 bytes and scales of 4 for each lane, row and step.
fn ring_bytes((rows, steps): (usize, usize)) -> usize {
    rows * steps * (16 + 4) * THREADS_OF_ONE as usize
}

/// A matrix of a launch, as the kernel declares it.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Part {
    weights: u64,
    scales: u64,
    out: u64,
    rows: u32,
    end: u32,
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Parts {
    part: [Part; MOST_PARTS],
    n: u32,
    forms: u32,
}

/// Forms of an input that matrices need, as in the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Forms(u32);

impl Forms {
    const PLAIN: u32 = 1;
    const DIGITS: u32 = 2;

    fn of<'a>(matrices: impl IntoIterator<Item = &'a Matrix>) -> Self {
        let form = |matrix: &Matrix| if matrix.planes.is_some() { Self::DIGITS } else { Self::PLAIN };
        Self(matrices.into_iter().map(form).fold(0, |all, form| all | form))
    }

    /// Shared memory of one input.
    fn bytes(self, columns: usize) -> usize {
        let columns = columns.next_multiple_of(CHUNK);
        let plain = if self.0 & Self::PLAIN != 0 { columns * size_of::<f32>() } else { 0 };
        // Three bytes a value, and a scale for 16.
        let digits = if self.0 & Self::DIGITS != 0 { columns / 16 * (3 * 16 + size_of::<f32>()) } else { 0 };
        plain + digits
    }
}

/// Columns of an input that the kernels can norm.
const NORMED_COLUMNS: usize = 2048;

/// What an input goes through first.
#[derive(Clone, Copy)]
pub(in super::super) enum Before<'a> {
    /// A norm with weights, one for each column, (3.1).
    Norm { weights: View<'a, f32>, epsilon: f32 },
    /// It is the gate of a SwiGLU network, (3.4): activated and multiplied with another.
    Gate { up: View<'a, f32>, limit: f32 },
}

impl Before<'_> {
    /// Whether one launch for all of these matrices can do that.
    pub(super) fn fits(&self, matrices: &[&Matrix]) -> bool {
        let columns = matrices.first().map_or(0, |matrix| matrix.columns());
        let few = matches!(self, Self::Gate { .. }) || columns <= NORMED_COLUMNS;
        few && columns.is_multiple_of(4) && fit_together(matrices)
    }

    /// Values of the second operand.
    pub(super) fn n_values(&self) -> usize {
        match self {
            Self::Norm { weights: values, .. } | Self::Gate { up: values, .. } => values.len(),
        }
    }

    fn argument(self) -> BeforeArgument {
        match self {
            Self::Norm { weights, epsilon } => {
                BeforeArgument { norm: weights.address(), up: 0, number: epsilon, unused: 0 }
            }
            Self::Gate { up, limit } => {
                BeforeArgument { norm: 0, up: up.address(), number: limit, unused: 0 }
            }
        }
    }
}

/// That, as the kernel declares it.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct BeforeArgument {
    norm: u64,
    up: u64,
    number: f32,
    unused: u32,
}

/// Whether the kernels know this matrix.
pub(super) fn fits(matrix: &Matrix) -> bool {
    let columns = matrix.columns();
    let aligned = match matrix.block_type() {
        BlockType::Q8_0 => matrix.planes.is_some(),
        BlockType::F16 => columns > 0 && columns.is_multiple_of(8),
        _ => false,
    };
    aligned && Forms::of([matrix]).bytes(columns) <= ONE_INPUT_BYTES
}

/// Whether one launch can take them all.
pub(super) fn fit_together(matrices: &[&Matrix]) -> bool {
    let columns = matrices.first().map_or(0, |matrix| matrix.columns());
    (1..=MOST_PARTS).contains(&matrices.len())
        && matrices.iter().all(|matrix| fits(matrix))
        && Forms::of(matrices.iter().copied()).bytes(columns) <= ONE_INPUT_BYTES
}

/// How many of the kernels' inputs a launch takes for `left` tokens, if there is room for `most`.
fn width(left: usize, most: usize) -> usize {
    [1, 2, 4, 8].into_iter().find(|&n| n >= left || n == most).unwrap_or(most).min(most)
}

/// Products of matrices with a common input; `groups` is 1 unless there is one matrix.
pub(super) fn products(
    gpu: &Gpu,
    input: View<'_, f32>,
    tokens: usize,
    groups: usize,
    matrices: &[(&Matrix, u64)],
) -> Result<(), CudaError> {
    let columns = matrices[0].0.columns();
    let stride = groups * columns;
    // As many inputs at once as there is a kernel for and shared memory.
    let bytes = Forms::of(matrices.iter().map(|(matrix, _)| *matrix)).bytes(columns);
    let most = [8, 4, 2, 1].into_iter().find(|n| n * bytes <= INPUT_BYTES).unwrap_or(1);
    let mut first = 0;
    while first < tokens {
        let width = width(tokens - first, most);
        let n = width.min(tokens - first);
        let input = input.slice(first * stride..(first + n) * stride);
        launch(gpu, input, None, n, width, groups, first, matrices)?;
        first += n;
    }
    Ok(())
}

/// Products with one token's input behind something else that [fits](Before::fits).
pub(super) fn products_behind(
    gpu: &Gpu,
    input: View<'_, f32>,
    before: Before<'_>,
    matrices: &[(&Matrix, u64)],
) -> Result<(), CudaError> {
    launch(gpu, input, Some(before), 1, 1, 1, 0, matrices)
}

#[expect(clippy::too_many_arguments, reason = "what a launch needs")]
fn launch(
    gpu: &Gpu,
    input: View<'_, f32>,
    before: Option<Before<'_>>,
    tokens: usize,
    width: usize,
    groups: usize,
    first_token: usize,
    matrices: &[(&Matrix, u64)],
) -> Result<(), CudaError> {
    let columns = matrices[0].0.columns();
    let facts = gpu.device.facts();
    let multiprocessors = facts.n_multiprocessors as usize;
    let rows: usize = matrices.iter().map(|(matrix, _)| matrix.rows() / groups).sum();
    let forms = Forms::of(matrices.iter().map(|(matrix, _)| *matrix));
    let inputs = width * forms.bytes(columns);
    let ((per_warp, steps), shared) = match width {
        1 => rows_of_one(rows * groups, multiprocessors, inputs, facts.shared_bytes as usize),
        _ => ((2, 0), inputs),
    };
    let mut parts = Parts { n: matrices.len() as u32, forms: forms.0, ..Zeroable::zeroed() };
    let mut end = 0;
    for (part, (matrix, out)) in parts.part.iter_mut().zip(matrices) {
        end += (matrix.rows() / groups).div_ceil(per_warp);
        let weights = matrix.bytes.view().address();
        let scales = matrix
            .planes
            .map_or(0, |planes| weights + planes.start(1, matrix.rows(), matrix.row_blocks()) as u64);
        let out = out + (first_token * matrix.rows() * size_of::<f32>()) as u64;
        *part = Part { weights, scales, out, rows: matrix.rows() as u32, end: end as u32 };
    }
    let threads = if width == 1 { THREADS_OF_ONE } else { THREADS };
    let warps = threads as usize / 32;
    let most_blocks = (multiprocessors * WARPS / warps / groups).max(1);
    let blocks = end.div_ceil(warps).max(multiprocessors.min(end)).min(most_blocks);
    let arguments = Arguments::new().structure(&parts).read(input);
    let arguments = if width == 1 {
        arguments.structure(&before.map_or_else(BeforeArgument::zeroed, Before::argument))
    } else {
        arguments.long((groups * columns) as u64)
    };
    let arguments = arguments.int(columns).int(matrices[0].0.rows() / groups);
    let arguments = if width == 1 { arguments } else { arguments.int(tokens) };
    let shape = Launch::new(blocks, threads).by(groups).shared(shared as u32);
    let name = match width {
        1 => format!("products_1_{per_warp}x{steps}"),
        _ => format!("products_{width}_{per_warp}"),
    };
    gpu.launch("matrix_decode", &name, shape, arguments)
}

/// Rows that a warp has at once, and shared memory for it: what leaves the fewest warps without work in the last round; most
/// rows at once, for they share the input, where that is the same.
fn rows_of_one(
    rows: usize,
    multiprocessors: usize,
    input_bytes: usize,
    most_shared: usize,
) -> ((usize, usize), usize) {
    let shared = |step: (usize, usize)| (step, input_bytes + ring_bytes(step));
    let rounds = |per_warp: usize| rows.div_ceil(per_warp).div_ceil(multiprocessors * WARPS) * per_warp;
    let fitting = STEPS.into_iter().map(shared).filter(|&(_, bytes)| bytes <= most_shared);
    fitting.min_by_key(|&((per_warp, _), _)| rounds(per_warp)).unwrap_or_else(|| shared(STEPS[3]))
}

/// One launch for one matrix.
pub(super) fn one(
    gpu: &Gpu,
    matrix: &Matrix,
    input: View<'_, f32>,
    tokens: usize,
    groups: usize,
    output: &ViewMut<'_, f32>,
) -> Result<(), CudaError> {
    products(gpu, input, tokens, groups, &[(matrix, output.address())])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory that a block of an H200, or of an RTX 5080 or GB10, may have.
    const LARGE: usize = 227 << 10;
    const SMALL: usize = 99 << 10;

    #[test]
    fn warps_take_the_rows_that_leave_fewest_of_them_idle() {
        let rows = |rows, multiprocessors| rows_of_one(rows, multiprocessors, 16 << 10, LARGE).0.0;
        // As many warps as pairs of rows; a row a warp would need two rounds.
        assert_eq!(rows(4096, 132), 2);
        // Rounds of four end no later than others.
        assert_eq!(rows(32_768, 132), 4);
        assert_eq!(rows(256, 132), 1);
        assert_eq!(rows(129_280, 132), 2);
    }

    #[test]
    fn every_input_that_fits_has_a_ring_that_fits_beside_it() {
        for forms in [Forms(Forms::PLAIN), Forms(Forms::DIGITS), Forms(Forms::PLAIN | Forms::DIGITS)] {
            for columns in (256..=32_768).step_by(256).filter(|&n| forms.bytes(n) <= ONE_INPUT_BYTES) {
                for (shared, multiprocessors) in [(LARGE, 132), (SMALL, 48), (SMALL, 84)] {
                    for rows in [64, 4096, 129_280] {
                        let input = forms.bytes(columns);
                        let (per_warp, bytes) = rows_of_one(rows, multiprocessors, input, shared);
                        assert!(
                            bytes <= shared,
                            "{columns} columns, {per_warp:?} rows and steps: {bytes} bytes"
                        );
                    }
                }
            }
        }
    }
}
