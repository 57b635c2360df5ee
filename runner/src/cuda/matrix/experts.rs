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
    n_experts: usize,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
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
        let _ = pass;
        workspace_bytes(&self.generic_parts(tokens * n_used))
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
        self.generic_routed(gpu, workspace, work, output, mids)
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
            .read(&matrix.bytes)
            .long(matrix.row_bytes as u64)
            .read(work.experts)
            .long(input)
            .int(share)
            .int(matrix.columns())
            .int(rows)
            .write(output)
            .int(items);
        let name = format!("routed_{}", matrix.block_type().name());
        gpu.launch("matrix_generic", &name, Launch::new(items, 256).by(rows.div_ceil(8)), arguments)
    }
}
