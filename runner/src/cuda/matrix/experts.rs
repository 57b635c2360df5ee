//! The routed experts of a layer.

use gguf_tools::block::BlockType;

use super::super::driver::{Arguments, Launch, View, ViewMut};
use super::super::error::CudaError;
use super::super::module::Gpu;
use super::{Matrix, Pass, Workspace, workspace_bytes};

/// Gate, up and down matrices of all experts of a layer, each kind in one allocation: expert `e` has rows
/// `e * width ..` of gate and up, and `e * outputs ..` of down.
#[derive(Debug)]
pub struct ExpertMatrices {
    pub(super) n_experts: usize,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
}

/// What the routed experts are applied to.
#[derive(Debug, Clone, Copy)]
pub struct Routed<'a> {
    /// `[tokens, D]`.
    pub input: View<'a, f32>,
    /// Experts of each token in the router's order, `[tokens, n_used]`, each below the number of experts.
    pub experts: View<'a, u32>,
    /// Their weights, `[tokens, n_used]`.
    pub weights: View<'a, f32>,
    /// Tokens.
    pub tokens: usize,
    /// Experts a token.
    pub n_used: usize,
    /// Limit of the activation.
    pub limit: f32,
    /// Numerics.
    pub pass: Pass,
}

/// Widest input for the kernels that keep it in shared memory.
const DECODE_COLUMNS: usize = 16_384;

/// Lanes of a warp.
const WARP: usize = 32;
/// Shared memory in front of the inputs, as in the kernels.
const INPUTS_AT: usize = 4 * WARP * 4;
/// Bytes of what `down` keeps for each stretch of a row.
const STRETCH_BYTES: usize = 16;
/// Shared memory of a multiprocessor from which on there is room for a copy of each table entry for every lane.
const FULL_TABLE_BYTES: u32 = 200 << 10;

/// What the kernels of `matrix_experts.cu` say about their formats.
struct Format {
    name: &'static str,
    /// Values of a chunk of 16 bytes.
    values: usize,
    /// Chunks that a lane takes at a time of gate and up.
    chunks: usize,
    /// Whether sums of codes are needed, for minima.
    sums: bool,
    /// Whether there is a table in shared memory, with copies of each entry so that lanes do not meet in a bank.
    table: bool,
}

impl Format {
    fn of(matrix: &Matrix) -> Option<Self> {
        matrix.planes?;
        let (values, chunks, sums, table) = match matrix.block_type() {
            BlockType::Iq2Xxs => (64, 2, false, true),
            BlockType::Q2K => (64, 1, true, false),
            BlockType::Q4K => (32, 1, true, false),
            BlockType::Mxfp4 => (32, 2, false, false),
            _ => return None,
        };
        Some(Self { name: matrix.block_type().name(), values, chunks, sums, table })
    }

    /// The kernel of this format.
    fn kernel(&self, operation: &str, gpu: &Gpu) -> String {
        let copies = match (self.table, gpu.device.facts().shared_bytes >= FULL_TABLE_BYTES) {
            (false, _) => "",
            (true, true) => "_32",
            (true, false) => "_16",
        };
        format!("{operation}_{}{copies}", self.name)
    }

    /// Shared memory of a rounded input: codes, scales and sums of pieces of 16 values, in groups of chunks.
    fn input_bytes(&self, columns: usize, group: usize) -> usize {
        let pieces = (columns / self.values).next_multiple_of(group) * (self.values / 16);
        pieces * if self.sums { 24 } else { 20 }
    }
}

impl ExpertMatrices {
    /// Matrices of which each holds `n_experts` of the same shape, one after the other.
    ///
    /// # Errors
    /// If the shapes do not belong together.
    pub fn new(n_experts: usize, gate: Matrix, up: Matrix, down: Matrix) -> Result<Self, CudaError> {
        let shape = |m: &Matrix| (m.rows(), m.columns());
        let per_expert = |rows: usize| rows.checked_div(n_experts).filter(|n| n * n_experts == rows);
        let fits = shape(&gate) == shape(&up)
            && per_expert(gate.rows()) == Some(down.columns())
            && per_expert(down.rows()) == Some(gate.columns());
        if fits {
            return Ok(Self { n_experts, gate, up, down });
        }
        Err(CudaError::Shape {
            what: format!("matrices of {n_experts} experts"),
            found: format!("gate {:?}, up {:?}, down {:?}", shape(&gate), shape(&up), shape(&down)),
            expected: "gate and up [experts * width, D], down [experts * D, width]".to_owned(),
        })
    }

    /// Types of gate, up and down.
    pub fn block_types(&self) -> [BlockType; 3] {
        [self.gate.block_type(), self.up.block_type(), self.down.block_type()]
    }

    /// Number of experts.
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// Inputs and outputs, `D`.
    pub fn outputs(&self) -> usize {
        self.gate.columns()
    }

    /// Width between, `F`.
    pub fn width(&self) -> usize {
        self.down.columns()
    }

    /// Bytes on the device.
    pub fn n_bytes(&self) -> usize {
        self.gate.n_bytes() + self.up.n_bytes() + self.down.n_bytes()
    }

    /// Bytes of workspace that [`ExpertMatrices::routed`] needs.
    pub fn workspace_bytes(&self, tokens: usize, n_used: usize, pass: Pass) -> usize {
        match pass {
            Pass::Decode if self.fits_decode() => workspace_bytes(&self.decode_parts(tokens * n_used)),
            Pass::Prefill if self.fits_prefill() => workspace_bytes(&self.prefill_lengths(tokens, n_used)),
            _ => workspace_bytes(&self.generic_parts(tokens * n_used)),
        }
    }

    fn generic_parts(&self, items: usize) -> [usize; 3] {
        let mids = items * self.width() * size_of::<f32>();
        [mids, mids, items * self.outputs() * size_of::<f32>()]
    }

    /// `output[token, .]` = sum over the token's experts, in the router's order, of `down (weight * mid)` with
    /// `mid = swiglu(gate x, up x)`. `output`: `[tokens, D]`; `mids`, if given: the unweighted mids,
    /// `[tokens, n_used, F]`.
    ///
    /// # Errors
    /// If lengths do not belong together, the workspace is too small, or the driver refuses.
    pub fn routed(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        work: &Routed<'_>,
        output: &mut ViewMut<'_, f32>,
        mids: Option<&mut ViewMut<'_, f32>>,
    ) -> Result<(), CudaError> {
        let items = work.tokens * work.n_used;
        let gate = &self.gate;
        gate.check("input", work.input.len(), work.tokens * self.outputs())?;
        gate.check("experts", work.experts.len(), items)?;
        gate.check("weights", work.weights.len(), items)?;
        self.down.check("output", output.len(), work.tokens * self.outputs())?;
        if let Some(mids) = &mids {
            self.down.check("mids", mids.len(), items * self.width())?;
        }
        if work.tokens == 0 {
            return Ok(());
        }
        match work.pass {
            Pass::Decode if self.fits_decode() => self.decode_routed(gpu, workspace, work, output, mids),
            Pass::Prefill if self.fits_prefill() => self.prefill_routed(gpu, workspace, work, output, mids),
            _ => self.generic_routed(gpu, workspace, work, output, mids),
        }
    }

    /// Whether the kernels for few tokens know these types and shapes.
    pub(in super::super) fn fits_decode(&self) -> bool {
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(Format::of);
        gate.is_some()
            && gate.map(|format| format.name) == up.map(|format| format.name)
            && down.is_some()
            && self.outputs() <= DECODE_COLUMNS
            && self.width() <= DECODE_COLUMNS / 2
    }

    /// Codes and scales of the rounded mids.
    pub(in super::super) fn decode_parts(&self, items: usize) -> [usize; 2] {
        [items * self.width(), items * self.width() / 32 * size_of::<f32>()]
    }

    fn decode_routed(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        work: &Routed<'_>,
        output: &mut ViewMut<'_, f32>,
        mids: Option<&mut ViewMut<'_, f32>>,
    ) -> Result<(), CudaError> {
        let rounded = workspace.parts(self.decode_parts(work.tokens * work.n_used))?;
        self.decode_gate_up(gpu, work, &rounded, mids)?;
        self.decode_down(gpu, work, &rounded, output)
    }

    /// Gate and up products, activated, weighted and rounded.
    pub(in super::super) fn decode_gate_up(
        &self,
        gpu: &Gpu,
        work: &Routed<'_>,
        [codes, scales]: &[ViewMut<'_, u8>; 2],
        mids: Option<&mut ViewMut<'_, f32>>,
    ) -> Result<(), CudaError> {
        let Some(gate) = Format::of(&self.gate) else { return Err(self.unknown()) };
        let arguments = Arguments::new()
            .structure(&self.gate.plane_starts())
            .structure(&self.up.plane_starts())
            .read(work.experts)
            .read(work.weights)
            .read(work.input)
            .int(work.n_used)
            .int(self.outputs())
            .int(self.width())
            .float(work.limit)
            .write(codes)
            .write(scales);
        let arguments = match mids {
            Some(mids) => arguments.write(mids),
            None => arguments.null(),
        };
        let shared = INPUTS_AT + gate.input_bytes(self.outputs(), gate.chunks * WARP);
        let shape =
            Launch::new(self.width() / 32, 256).by(work.n_used).deep(work.tokens).shared(shared as u32);
        gpu.launch("matrix_experts", &gate.kernel("gate_up", gpu), shape, arguments)
    }

    /// Down products of the rounded mids, summed.
    pub(in super::super) fn decode_down(
        &self,
        gpu: &Gpu,
        work: &Routed<'_>,
        [codes, scales]: &[ViewMut<'_, u8>; 2],
        output: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let Some(down) = Format::of(&self.down) else { return Err(self.unknown()) };
        let arguments = Arguments::new()
            .structure(&self.down.plane_starts())
            .read(work.experts)
            .read(codes.as_view())
            .read(scales.as_view())
            .int(work.n_used)
            .int(self.width())
            .int(self.outputs())
            .write(output);
        let stretches = (self.width() / down.values).div_ceil(WARP);
        let each = down.input_bytes(self.width(), WARP) + stretches * STRETCH_BYTES;
        let shared = INPUTS_AT + work.n_used * each;
        let most = 2 * gpu.device.facts().n_multiprocessors as usize;
        let blocks = self.outputs().div_ceil(16).min(most);
        let shape = Launch::new(blocks, 512).by(work.tokens).shared(shared as u32);
        gpu.launch("matrix_experts", &down.kernel("down", gpu), shape, arguments)
    }

    fn unknown(&self) -> CudaError {
        CudaError::Shape {
            what: "experts for few tokens".to_owned(),
            found: format!("{:?}", self.block_types()),
            expected: "types with kernels of their own".to_owned(),
        }
    }

    fn generic_routed(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        work: &Routed<'_>,
        output: &mut ViewMut<'_, f32>,
        mids: Option<&mut ViewMut<'_, f32>>,
    ) -> Result<(), CudaError> {
        let items = work.tokens * work.n_used;
        let [gates, ups, parts] = workspace.parts(self.generic_parts(items))?;
        self.generic_product(&self.gate, gpu, work, work.input.address(), work.n_used, &gates)?;
        self.generic_product(&self.up, gpu, work, work.input.address(), work.n_used, &ups)?;
        let n = items * self.width();
        let arguments = Arguments::new()
            .read(gates.as_view())
            .read(ups.as_view())
            .read(work.weights)
            .float(work.limit)
            .int(self.width())
            .long(n as u64);
        let arguments = match mids {
            Some(mids) => arguments.write(mids),
            None => arguments.null(),
        };
        gpu.launch("matrix_generic", "activate", Launch::over(n), arguments.write(&gates))?;
        self.generic_product(&self.down, gpu, work, gates.address(), 1, &parts)?;
        self.sum_slots(gpu, work, &parts, output)
    }

    /// Sums `parts[token, slot, .]` in the order of the slots.
    pub(super) fn sum_slots(
        &self,
        gpu: &Gpu,
        work: &Routed<'_>,
        parts: &ViewMut<'_, u8>,
        output: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let n = work.tokens * self.outputs();
        let arguments = Arguments::new()
            .read(parts.as_view())
            .int(work.n_used)
            .int(self.outputs())
            .long(n as u64)
            .write(output);
        gpu.launch("matrix_generic", "sum_slots", Launch::over(n), arguments)
    }

    /// `output[item, .]` = the matrix of the item's expert times an input that `share` items share.
    fn generic_product(
        &self,
        matrix: &Matrix,
        gpu: &Gpu,
        work: &Routed<'_>,
        input: u64,
        share: usize,
        output: &ViewMut<'_, u8>,
    ) -> Result<(), CudaError> {
        let rows = matrix.rows() / self.n_experts;
        let items = work.tokens * work.n_used;
        let arguments = Arguments::new()
            .structure(&matrix.generic_weights())
            .read(work.experts)
            .long(input)
            .long(matrix.columns() as u64)
            .int(share)
            .int(matrix.columns())
            .int(rows)
            .int(rows)
            .write(output);
        let launch = Launch::new(items, 256).by(rows.div_ceil(8));
        gpu.launch("matrix_generic", &matrix.generic_name("products"), launch, arguments)
    }
}
