//! Launches of the kernels for few tokens.

use bytemuck::{Pod, Zeroable};
use gguf_tools::block::BlockType;

use super::super::driver::{Arguments, Launch, View, ViewMut};
use super::super::error::CudaError;
use super::super::module::Gpu;
use super::Matrix;

/// Matrices of one launch, at most.
pub(super) const MOST_PARTS: usize = 8;

/// Threads of a block of `products_*`, and blocks that a multiprocessor has at once.
const THREADS: u32 = 256;
const WARPS: usize = 8;

/// Shared memory that the inputs of one launch may take; fits three blocks on a multiprocessor of the smallest chip for
/// the widest hidden size.
const INPUT_BYTES: usize = 96 << 10;

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
    unused: u32,
}

/// Shared memory of one input.
fn input_bytes(columns: usize) -> usize {
    columns.next_multiple_of(32) * size_of::<f32>()
}

/// Whether the kernels know this matrix.
pub(super) fn fits(matrix: &Matrix) -> bool {
    let columns = matrix.columns();
    let aligned = match matrix.block_type() {
        BlockType::Q8_0 => matrix.planes.is_some(),
        BlockType::F16 => columns > 0 && columns.is_multiple_of(8),
        _ => false,
    };
    aligned && input_bytes(columns) <= INPUT_BYTES
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
    let most = [8, 4, 2, 1].into_iter().find(|n| n * input_bytes(columns) <= INPUT_BYTES).unwrap_or(1);
    let mut first = 0;
    while first < tokens {
        let width = width(tokens - first, most);
        let n = width.min(tokens - first);
        let input = input.slice(first * stride..(first + n) * stride);
        launch(gpu, input, n, width, groups, first, matrices)?;
        first += n;
    }
    Ok(())
}

fn launch(
    gpu: &Gpu,
    input: View<'_, f32>,
    tokens: usize,
    width: usize,
    groups: usize,
    first_token: usize,
    matrices: &[(&Matrix, u64)],
) -> Result<(), CudaError> {
    let columns = matrices[0].0.columns();
    let multiprocessors = gpu.device.facts().n_multiprocessors as usize;
    let rows: usize = matrices.iter().map(|(matrix, _)| matrix.rows() / groups).sum();
    let row_bytes = matrices.iter().map(|(matrix, _)| matrix.row_bytes).min().unwrap_or(0);
    let (per_warp, blocks_each) = match width {
        1 => rows_per_warp(rows * groups, multiprocessors, row_bytes),
        _ => (2, 2),
    };
    let mut parts = Parts { n: matrices.len() as u32, ..Zeroable::zeroed() };
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
    let most_blocks = (multiprocessors * blocks_each / groups).max(1);
    let blocks = end.div_ceil(WARPS).max(multiprocessors.min(end)).min(most_blocks);
    let arguments = Arguments::new()
        .structure(&parts)
        .read(input)
        .long((groups * columns) as u64)
        .int(columns)
        .int(matrices[0].0.rows() / groups)
        .int(tokens);
    let shape = Launch::new(blocks, THREADS).by(groups).shared((width * input_bytes(columns)) as u32);
    gpu.launch("matrix_decode", &format!("products_{width}_{per_warp}"), shape, arguments)
}

/// Rows that a warp has at once, and blocks that a multiprocessor has: what leaves the fewest warps without work in the
/// last round. One row a warp leaves registers for three blocks; of short rows four are loaded at once.
fn rows_per_warp(rows: usize, multiprocessors: usize, row_bytes: usize) -> (usize, usize) {
    let many = if row_bytes <= 2048 { 4 } else { 2 };
    [(many, 2), (1, 3)]
        .into_iter()
        .min_by_key(|&(per_warp, blocks)| {
            let warps = multiprocessors * blocks * WARPS;
            // Rows that a multiprocessor has time for until all are done.
            rows.div_ceil(per_warp).div_ceil(warps) * per_warp * blocks
        })
        .unwrap_or((1, 3))
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
