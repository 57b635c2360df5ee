//! Launches of the kernels for many tokens.

use gguf_tools::block::BlockType;

use super::super::driver::{Arguments, Launch, View, ViewMut};
use super::super::error::CudaError;
use super::super::module::Gpu;
use super::{ExpertMatrices, GRID_LIMIT, Matrix, Routed, Workspace, workspace_bytes};

/// What a block, which has a multiprocessor for itself, takes at once, as in the kernels.
struct Tiling {
    threads: usize,
    /// Rows and inputs of a dense matrix.
    dense: (usize, usize),
    /// Rows and inputs of an expert.
    expert: (usize, usize),
    /// Which of a format's two numbers counts.
    variant: usize,
}

impl Tiling {
    fn of(gpu: &Gpu) -> &'static Self {
        const GROUPS: Tiling = Tiling { threads: 512, dense: (256, 128), expert: (512, 64), variant: 1 };
        const WARPS: Tiling = Tiling { threads: 256, dense: (256, 64), expert: (256, 64), variant: 0 };
        if gpu.kernels.has_warp_groups() { &GROUPS } else { &WARPS }
    }
}

/// Threads of `sort_by_expert`.
const SORTING_THREADS: u32 = 256;

/// Experts whose tiles can be counted in shared memory.
const MOST_EXPERTS: usize = 1024;

/// What the kernels of `matrix_prefill.cu` say about a format.
#[derive(Debug, Clone, Copy)]
struct Format {
    name: &'static str,
    /// Columns of a step.
    step_columns: usize,
    /// Where each piece of eight columns goes among those of its step, a hexadecimal digit each.
    pieces: u64,
    /// Bytes of a row in shared memory.
    row_bytes: usize,
    /// Bytes of an input there, steps, and bytes of a table: on any chip, and where there is more of it.
    input_bytes: [usize; 2],
    stages: [usize; 2],
    table_bytes: [usize; 2],
    /// Whether there are kernels for routed experts.
    experts: bool,
}

/// Digits for `n` pieces.
fn pieces(n: u64, place: fn(u64) -> u64) -> u64 {
    (0..n).fold(0, |digits, piece| digits | place(piece) << (4 * piece))
}

impl Format {
    /// `None` if the kernels do not know this matrix.
    fn of(matrix: &Matrix) -> Option<Self> {
        let divided = matrix.planes.is_some();
        // Columns of a step, how far rows lie apart in shared memory, steps and bytes of a table there.
        let (step_columns, pitch, stages, table_bytes, pieces) = match matrix.block_type() {
            BlockType::Iq2Xxs if divided => {
                (128, 32, [2, 4], [(24 << 10) + 256, (48 << 10) + 256], pieces(16, |p| p % 4 * 4 + p / 4))
            }
            BlockType::Q2K if divided => {
                (128, 48, [2, 4], [0; 2], pieces(16, |p| p / 4 * 4 + p / 2 % 2 + p % 2 * 2))
            }
            BlockType::Q4K if divided => {
                let place = |p| (p / 4 % 2 * 2 + p % 2) * 4 + p / 8 * 2 + p / 2 % 2;
                (128, 80, [2, 3], [0; 2], pieces(16, place))
            }
            BlockType::Mxfp4 if divided => (128, 64, [2, 4], [0; 2], pieces(16, |p| p % 4 * 4 + p / 4)),
            BlockType::Q8_0 if divided => (64, 64, [3, 4], [0; 2], pieces(8, |p| p % 2 * 4 + p / 2)),
            BlockType::F16 => (64, 128, [2, 4], [0; 2], pieces(8, |p| p)),
            _ => return None,
        };
        let columns = matrix.columns();
        let fits = columns > 0 && columns.is_multiple_of(step_columns);
        // Places of scales are counted in 32 bits, rows in 31.
        let small = u32::try_from(matrix.rows().saturating_mul(columns / 32)).is_ok()
            && i32::try_from(matrix.rows()).is_ok()
            && matrix.rows() / 256 < GRID_LIMIT;
        let input_bytes = [step_columns * 2 + 64, step_columns * 2];
        let scale_bytes = if matches!(matrix.block_type(), BlockType::Q4K | BlockType::F16) { 0 } else { 4 };
        let row_bytes = pitch + scale_bytes;
        let experts = !matches!(matrix.block_type(), BlockType::Q8_0 | BlockType::F16);
        let name = matrix.block_type().name();
        (fits && small).then_some(Self {
            name,
            step_columns,
            pieces,
            row_bytes,
            input_bytes,
            stages,
            table_bytes,
            experts,
        })
    }

    /// Shared memory of a block.
    fn shared_bytes(&self, tiling: &Tiling, (rows, tokens): (usize, usize)) -> usize {
        // Stages begin at a multiple of 1,024 bytes.
        let variant = tiling.variant;
        let stage_bytes = rows * self.row_bytes + tokens * self.input_bytes[variant];
        1024 + self.stages[variant] * stage_bytes + self.table_bytes[variant]
    }

    /// Rounds inputs to `f16` in the order that this format wants.
    fn round(&self, gpu: &Gpu, input: View<'_, f32>, halves: &ViewMut<'_, u8>) -> Result<(), CudaError> {
        let arguments = Arguments::new()
            .read(input)
            .long(input.len() as u64)
            .long(self.pieces)
            .int(self.step_columns)
            .write(halves);
        gpu.launch("matrix_prefill", "to_halves", Launch::over(input.len() / 8), arguments)
    }
}

/// Whether the kernels know this matrix.
pub(super) fn fits(matrix: &Matrix) -> bool {
    Format::of(matrix).is_some()
}

/// Bytes of workspace for inputs of so many values in all.
pub(super) fn input_bytes(values: usize) -> usize {
    workspace_bytes(&[values * size_of::<u16>()])
}

/// Products of matrices with a common input, each with the address of its output; `groups` is 1 unless there is one
/// matrix.
pub(super) fn products(
    gpu: &Gpu,
    workspace: &mut Workspace,
    input: View<'_, f32>,
    tokens: usize,
    groups: usize,
    matrices: &[(&Matrix, u64)],
) -> Result<(), CudaError> {
    let [halves] = workspace.parts([input.len() * size_of::<u16>()])?;
    let mut rounded_for = None;
    for (matrix, output) in matrices {
        let Some(format) = Format::of(matrix) else { return Err(unknown(&[matrix])) };
        if rounded_for != Some(format.name) {
            format.round(gpu, input, &halves)?;
            rounded_for = Some(format.name);
        }
        let group_rows = matrix.rows() / groups;
        let arguments = Arguments::new()
            .structure(&matrix.address_and_rows())
            .read(halves.as_view())
            .long((groups * matrix.columns()) as u64)
            .int(matrix.columns())
            .int(group_rows)
            .int(tokens)
            .long(*output);
        let tiling = Tiling::of(gpu);
        let shape = Launch::new(tokens.div_ceil(tiling.dense.1), tiling.threads as u32)
            .by(group_rows.div_ceil(tiling.dense.0))
            .deep(groups)
            .shared(format.shared_bytes(tiling, tiling.dense) as u32);
        gpu.launch("matrix_prefill", &format!("dense_{}", format.name), shape, arguments)?;
    }
    Ok(())
}

fn unknown(matrices: &[&Matrix]) -> CudaError {
    let types: Vec<_> = matrices.iter().map(|matrix| matrix.block_type()).collect();
    CudaError::Shape {
        what: "matrices for many tokens".to_owned(),
        found: format!("{types:?}"),
        expected: "types with kernels of their own".to_owned(),
    }
}

/// What lies in the workspace while routed experts are computed.
pub(in super::super) struct Parts<'a> {
    /// Inputs as `f16`, `[tokens, D]`.
    input: ViewMut<'a, u8>,
    /// At which place the items of each expert begin, and where those of the last end.
    starts: ViewMut<'a, u8>,
    /// Item at each place.
    order: ViewMut<'a, u8>,
    /// Weighted mids as `f16`, `[places, F]`.
    mids: ViewMut<'a, u8>,
    /// Down products, `[items, D]`.
    products: ViewMut<'a, u8>,
}

impl ExpertMatrices {
    /// Whether the kernels for many tokens know these types and shapes.
    pub(in super::super) fn fits_prefill(&self) -> bool {
        let formats = [&self.gate, &self.up, &self.down].map(Format::of);
        let known = formats.iter().all(|format| format.is_some_and(|format| format.experts));
        known && self.gate.block_type() == self.up.block_type() && self.n_experts <= MOST_EXPERTS
    }

    pub(super) fn prefill_lengths(&self, tokens: usize, n_used: usize) -> [usize; 5] {
        let items = tokens * n_used;
        [
            tokens * self.outputs() * size_of::<u16>(),
            (self.n_experts + 1) * size_of::<u32>(),
            items * size_of::<u32>(),
            items * self.width() * size_of::<u16>(),
            items * self.outputs() * size_of::<f32>(),
        ]
    }

    pub(in super::super) fn prefill_parts<'a>(
        &self,
        workspace: &'a mut Workspace,
        work: &Routed<'_>,
    ) -> Result<Parts<'a>, CudaError> {
        let [input, starts, order, mids, products] =
            workspace.parts(self.prefill_lengths(work.tokens, work.n_used))?;
        Ok(Parts { input, starts, order, mids, products })
    }

    pub(super) fn prefill_routed(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        work: &Routed<'_>,
        output: &mut ViewMut<'_, f32>,
        mids: Option<&mut ViewMut<'_, f32>>,
    ) -> Result<(), CudaError> {
        let parts = self.prefill_parts(workspace, work)?;
        self.prefill_prepare(gpu, work, &parts)?;
        self.prefill_gate_up(gpu, work, &parts, mids)?;
        self.prefill_down(gpu, work, &parts)?;
        self.sum_slots(gpu, work, &parts.products, output)
    }

    fn formats(&self) -> Result<[Format; 2], CudaError> {
        let unknown = || unknown(&[&self.gate, &self.up, &self.down]);
        let format = |matrix| Format::of(matrix).ok_or_else(unknown);
        Ok([format(&self.gate)?, format(&self.down)?])
    }

    /// Rounds the inputs and sorts the items by expert.
    pub(in super::super) fn prefill_prepare(
        &self,
        gpu: &Gpu,
        work: &Routed<'_>,
        parts: &Parts<'_>,
    ) -> Result<(), CudaError> {
        let [gate, _] = self.formats()?;
        gate.round(gpu, work.input, &parts.input)?;
        let arguments = Arguments::new()
            .read(work.experts)
            .int(work.experts.len())
            .int(self.n_experts)
            .write(&parts.starts)
            .write(&parts.order);
        gpu.launch(
            "matrix_prefill",
            "sort_by_expert",
            Launch::new(self.n_experts, SORTING_THREADS),
            arguments,
        )
    }

    /// As many blocks as can run, but none without work whatever the choices. `rows`: those of one expert's tiles.
    fn prefill_launch(&self, gpu: &Gpu, work: &Routed<'_>, rows: usize, format: &Format) -> Launch {
        let (items, tiling) = (work.experts.len(), Tiling::of(gpu));
        let row_tiles = rows.div_ceil(tiling.expert.0);
        let most_tiles = (items / tiling.expert.1 + self.n_experts.min(items)) * row_tiles;
        let blocks = most_tiles.min(gpu.device.facts().n_multiprocessors as usize);
        let shared = format.shared_bytes(tiling, tiling.expert) + self.n_experts * size_of::<u32>();
        Launch::new(blocks, tiling.threads as u32).shared(shared as u32)
    }

    fn sorted(&self, parts: &Parts<'_>) -> [u64; 3] {
        [parts.starts.address(), parts.order.address(), self.n_experts as u64]
    }

    /// Gate and up products, activated and weighted.
    pub(in super::super) fn prefill_gate_up(
        &self,
        gpu: &Gpu,
        work: &Routed<'_>,
        parts: &Parts<'_>,
        mids: Option<&mut ViewMut<'_, f32>>,
    ) -> Result<(), CudaError> {
        let [gate, down] = self.formats()?;
        let arguments = Arguments::new()
            .structure(&self.gate.address_and_rows())
            .structure(&self.up.address_and_rows())
            .structure(&self.sorted(parts))
            .read(parts.input.as_view())
            .int(work.n_used)
            .read(work.weights)
            .int(self.outputs())
            .int(self.width())
            .float(work.limit)
            .long(down.pieces)
            .int(down.step_columns)
            .write(&parts.mids);
        let arguments = match mids {
            Some(mids) => arguments.write(mids),
            None => arguments.null(),
        };
        let shape = self.prefill_launch(gpu, work, 2 * self.width(), &gate);
        gpu.launch("matrix_prefill", &format!("gate_up_{}", gate.name), shape, arguments)
    }

    /// Down products of the weighted mids.
    pub(in super::super) fn prefill_down(
        &self,
        gpu: &Gpu,
        work: &Routed<'_>,
        parts: &Parts<'_>,
    ) -> Result<(), CudaError> {
        let [_, down] = self.formats()?;
        let arguments = Arguments::new()
            .structure(&self.down.address_and_rows())
            .structure(&self.sorted(parts))
            .read(parts.mids.as_view())
            .int(self.width())
            .int(self.outputs())
            .write(&parts.products);
        let shape = self.prefill_launch(gpu, work, self.outputs(), &down);
        gpu.launch("matrix_prefill", &format!("down_{}", down.name), shape, arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_has_a_place_of_its_own() {
        let orders = [
            pieces(16, |p| p % 4 * 4 + p / 4),
            pieces(16, |p| p / 4 * 4 + p / 2 % 2 + p % 2 * 2),
            pieces(16, |p| (p / 4 % 2 * 2 + p % 2) * 4 + p / 8 * 2 + p / 2 % 2),
        ];
        for digits in orders {
            let mut places: Vec<u64> = (0..16).map(|piece| digits >> (4 * piece) & 15).collect();
            places.sort_unstable();
            assert!(places.into_iter().eq(0..16), "{digits:016x}");
        }
        assert_eq!(pieces(8, |p| p % 2 * 4 + p / 2), 0x7362_5140);
    }
}
