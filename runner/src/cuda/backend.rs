//! A device as a backend: what it holds, and products with its matrices.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use gguf_tools::block::BlockType;
use gguf_tools::model::HyperParameters;

use super::cache::Storage;
use super::driver::{Arguments, Beside, Graph, KernelShare, Launch, PinnedBuffer, View};
use super::error::CudaError;
use super::loading::Loading;
use super::matrix::{Matrix, Pass, Workspace};
use super::module::Gpu;
use super::plan::halved_rows;
use super::pool::{InUse, Pool, PoolBuffer};
use crate::error::RunnerError;
use crate::ops::{ActivationPrecision, MatrixPlace, RowPlaces};
use crate::session::Options;
use crate::weights::{GeneratedRows, WeightSource};

/// A GPU as a backend. One caller computes at a time.
pub struct CudaBackend {
    pub(super) gpu: Gpu,
    /// Activations.
    pub(super) pool: Pool,
    /// What keeps its content between passes: caches, token ids and positions.
    pub(super) kept: Pool,
    /// Page-locked, for the logits of a token: from other memory they take longer to come than to compute.
    pub(super) staging: Mutex<PinnedBuffer<f32>>,
    /// Numbers from 0 on, more than a mixer has rows.
    pub(super) counting: PoolBuffer<u32>,
    pub(super) storage: Storage,
    activations: ActivationPrecision,
    pub(super) turn: Mutex<()>,
    /// Whether single tokens are computed now, see [`Work`].
    pub(super) single_tokens: AtomicBool,
    workspaces: Mutex<Workspaces>,
    /// While weights are loaded.
    pub(super) loading: Mutex<Option<Loading>>,
}

/// Memory for matrix products. Recorded passes hold the addresses of earlier ones, so none is given back while there are any
/// and memory does not run out.
struct Workspaces {
    now: Workspace,
    n_bytes: usize,
    earlier: Vec<Workspace>,
}

/// Activations on the device, `[tokens, width]`.
pub struct CudaTensor {
    pub(super) tokens: usize,
    pub(super) width: usize,
    pub(super) values: PoolBuffer<f32>,
}

impl CudaTensor {
    pub(super) fn rows(&self, rows: &Range<usize>) -> View<'_, f32> {
        self.values.slice(rows.start * self.width..rows.end * self.width)
    }
}

/// A few weights on the device.
pub struct CudaVector {
    pub(super) values: PoolBuffer<f32>,
}

/// Rotary frequencies on the device.
pub struct CudaRope {
    pub(super) frequencies: PoolBuffer<f32>,
}

/// A router's rule on the device.
pub struct CudaRouterRule(pub(super) Rule);

pub(super) enum Rule {
    /// `[vocabulary, n_used]`.
    Hash(PoolBuffer<u32>),
    /// `[n_experts]`.
    Bias(PoolBuffer<f32>),
}

/// Token ids and positions on the device.
pub struct CudaPlaces {
    pub(super) tokens: PoolBuffer<u32>,
    pub(super) positions: PoolBuffer<u32>,
}

/// Rows that the indexer chose, on the device.
pub struct CudaChosen {
    /// `[queries, top_k]`, of queries that see more rows than `top_k`; nothing if none does.
    pub(super) rows: Option<PoolBuffer<u32>>,
    pub(super) top_k: usize,
    /// Rows that each query sees.
    pub(super) n_visible: Vec<usize>,
}

/// The router's choice on the device.
pub struct CudaRouting {
    pub(super) n_used: usize,
    /// `[tokens, n_used]`.
    pub(super) experts: PoolBuffer<u32>,
    pub(super) weights: PoolBuffer<f32>,
}

/// A recorded pass, and where its result is.
pub struct CudaRecording {
    pub(super) graph: Graph,
    pub(super) result: CudaTensor,
    pub(super) _memory: InUse,
}

/// Threads of a block that works on a row of `width` values. Sums depend on it, so it depends on the width alone.
pub(super) fn row_threads(width: usize) -> u32 {
    (width / 4).next_power_of_two().clamp(32, 1024) as u32
}

impl RowPlaces<'_, CudaBackend> {
    pub(super) fn tokens(&self) -> View<'_, u32> {
        self.batch.tokens.slice(self.rows.clone())
    }

    pub(super) fn positions(&self) -> View<'_, u32> {
        self.batch.positions.slice(self.rows.clone())
    }
}

impl CudaBackend {
    /// Opens device `ordinal` for a model, after a look at whether it fits.
    ///
    /// # Errors
    /// If there is no such device, its driver is too old, the model has shapes without kernels, or memory is too small.
    pub fn open(
        ordinal: usize,
        source: &Arc<dyn WeightSource>,
        options: &Options,
    ) -> Result<Self, RunnerError> {
        let h = source.hyper_parameters();
        check_shapes(h)?;
        let gpu = Gpu::open(ordinal, options.kernels)?;
        super::plan::Plan::new(source.as_ref(), options).check(&gpu.device, options.device_bytes)?;
        let (kept, pool) = Pool::both(&gpu.device);
        let most_rows = options.attention_tokens.min(options.batch_tokens);
        let storage = Storage {
            halves: halved_rows(options),
            ring_slots: (h.sliding_window as usize + most_rows).next_power_of_two(),
        };
        let now = Workspace::new(&gpu, 0)?;
        let mut counting = kept.take(MOST_MIXES, "numbers of rows")?;
        gpu.device.write(&mut counting.view_mut(), &std::array::from_fn::<_, MOST_MIXES, _>(|i| i as u32))?;
        let staging = Mutex::new(gpu.device.pinned(h.vocab_size as usize)?);
        Ok(Self {
            staging,
            counting,
            pool,
            kept,
            storage,
            activations: options.activations,
            turn: Mutex::new(()),
            single_tokens: AtomicBool::new(false),
            workspaces: Mutex::new(Workspaces { now, n_bytes: 0, earlier: Vec::new() }),
            loading: Mutex::default(),
            gpu,
        })
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Measures the kernels that `work` queues.
    pub(crate) fn profile<R>(
        &self,
        work: impl FnOnce() -> Result<R, RunnerError>,
    ) -> Result<(R, Vec<KernelShare>), RunnerError> {
        let gpu = self.gpu.clone();
        self.gpu.device.profile(|| {
            // Long enough for everything after it to be queued before it ends.
            gpu.launch(
                "matrix_generate",
                "wait",
                Launch::new(1, 1),
                Arguments::new().long(WAIT_NANOSECONDS),
            )?;
            work()
        })
    }

    /// Queues `work` beside what follows.
    pub(super) fn queue_beside(
        &self,
        which: Beside,
        work: &mut dyn FnMut() -> Result<(), RunnerError>,
    ) -> Result<(), RunnerError> {
        // Batches fill the device, and what they give back is wanted at once.
        if !self.single_tokens() {
            return work();
        }
        self.pool.hold();
        self.gpu.device.beside(which, work)
    }

    pub(super) fn single_tokens(&self) -> bool {
        self.single_tokens.load(Ordering::Relaxed)
    }

    /// Whether inputs may be rounded on the way.
    pub(super) fn rounds_inputs(&self) -> bool {
        self.pass() != Pass::Exact
    }

    pub(super) fn pass(&self) -> Pass {
        match (self.activations, self.single_tokens()) {
            (ActivationPrecision::Mixed, true) => Pass::Decode,
            (ActivationPrecision::Mixed, false) => Pass::Prefill,
            _ => Pass::Exact,
        }
    }

    pub(super) fn tensor(&self, tokens: usize, width: usize) -> Result<CudaTensor, CudaError> {
        Ok(CudaTensor { tokens, width, values: self.pool.take(tokens * width, "activations")? })
    }

    pub(super) fn launch(
        &self,
        unit: &'static str,
        name: &str,
        shape: Launch,
        arguments: Arguments,
    ) -> Result<(), RunnerError> {
        Ok(self.gpu.launch(unit, name, shape, arguments)?)
    }

    /// Runs `work` with at least so many bytes to work with.
    pub(super) fn with_workspace<R>(
        &self,
        n_bytes: usize,
        work: impl FnOnce(&mut Workspace) -> Result<R, CudaError>,
    ) -> Result<R, CudaError> {
        let mut workspaces = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if n_bytes > workspaces.n_bytes {
            let n_bytes = n_bytes.next_power_of_two().max(1 << 20);
            let new = match Workspace::new(&self.gpu, n_bytes) {
                Err(CudaError::OutOfMemory { .. }) => {
                    if self.pool.is_free() {
                        workspaces.earlier.clear();
                    }
                    self.pool.give_back()?;
                    Workspace::new(&self.gpu, n_bytes)?
                }
                new => new?,
            };
            let earlier = std::mem::replace(&mut workspaces.now, new);
            workspaces.earlier.push(earlier);
            workspaces.n_bytes = n_bytes;
        }
        work(&mut workspaces.now)
    }

    pub(super) fn product(
        &self,
        input: &CudaTensor,
        matrix: &Matrix,
        groups: usize,
    ) -> Result<CudaTensor, CudaError> {
        let mut output = self.tensor(input.tokens, matrix.rows())?;
        let pass = self.pass();
        self.with_workspace(matrix.workspace_bytes(input.tokens, groups, pass), |workspace| {
            let (input, tokens, output) = (input.values.view(), input.tokens, &mut output.values.view_mut());
            matrix.grouped_products(&self.gpu, workspace, input, tokens, groups, pass, output)
        })?;
        Ok(output)
    }

    pub(super) fn kept_values<T: super::pool::Pooled>(
        &self,
        values: &[T],
        what: &str,
    ) -> Result<PoolBuffer<T>, CudaError> {
        let mut buffer = self.kept.take(values.len(), what)?;
        self.gpu.device.write(&mut buffer.view_mut(), values)?;
        Ok(buffer)
    }

    /// Matrices of the same shape, one after the other in one matrix.
    pub(super) fn stack(
        &self,
        source: &Arc<dyn WeightSource>,
        places: &[MatrixPlace],
    ) -> Result<Matrix, RunnerError> {
        let Some(&first) = places.first() else {
            let what = "a layer's experts".to_owned();
            return Err(
                CudaError::Shape { what, found: "none".into(), expected: "at least one".into() }.into()
            );
        };
        let rows = first.rows * places.len();
        let follows = |pair: &[MatrixPlace]| {
            pair[0].tensor == pair[1].tensor && pair[0].first_row + pair[0].rows == pair[1].first_row
        };
        debug_assert!(places.windows(2).all(follows), "a stack lies in one piece");
        self.load_matrix(source, MatrixPlace { rows, ..first })
    }

    pub(super) fn load_matrix(
        &self,
        source: &Arc<dyn WeightSource>,
        place: MatrixPlace,
    ) -> Result<Matrix, RunnerError> {
        let MatrixPlace { tensor, first_row, rows, columns } = place;
        if let Some(GeneratedRows { block_type, seed }) = source.generated(tensor)
            && first_row == 0
        {
            return Ok(Matrix::generate(&self.gpu, block_type, rows, columns, seed)?);
        }
        if let Some(block_type) = source.block_type(tensor) {
            let bytes = source.blocks(tensor, first_row..first_row + rows)?;
            let mut matrix = Matrix::empty(&self.gpu, block_type, rows, columns)?;
            let extent = source.extent(tensor, first_row).filter(|_| bytes.len() >= READ_BYTES);
            if let Some(extent) = extent {
                let mut loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
                let loading = match &mut *loading {
                    Some(loading) => loading,
                    none => none.insert(Loading::new(&self.gpu)?),
                };
                if loading.fill(&self.gpu, &mut matrix, &extent)? {
                    return Ok(matrix);
                }
            }
            matrix.load_rows(&self.gpu, 0, bytes)?;
            return Ok(matrix);
        }
        // A checkpoint folder: widened.
        let mut matrix = Matrix::empty(&self.gpu, BlockType::F32, rows, columns)?;
        let step = (WIDENED_VALUES / columns.max(1)).max(1);
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            let mut values = vec![0.0; n * columns];
            source.read_rows(tensor, first_row + first..first_row + first + n, &mut values)?;
            matrix.load_rows(&self.gpu, first, bytemuck::cast_slice(&values))?;
        }
        Ok(matrix)
    }
}

/// Rows of a mixer, at most: `(2 + M) M`.
const MOST_MIXES: usize = 40;

/// For how long the device waits before kernels are measured.
const WAIT_NANOSECONDS: u64 = 40_000_000;
/// Matrices of fewer bytes are copied from where they are mapped.
const READ_BYTES: usize = 1 << 20;
/// Values of a checkpoint's matrix that are widened at once.
const WIDENED_VALUES: usize = 16 << 20;

/// Refuses shapes that the kernels are not made for.
fn check_shapes(h: &HyperParameters) -> Result<(), RunnerError> {
    let wrong = |what, found, expected| Err(CudaError::Unsuitable { what, found, expected }.into());
    if ![64, 128, 256, 512].contains(&h.head_dim) {
        return wrong("head_dim", h.head_dim, "64, 128, 256 or 512");
    }
    if ![64, 128].contains(&h.index_head_dim) {
        return wrong("index_head_dim", h.index_head_dim, "64 or 128");
    }
    if h.n_routed_experts > 512 {
        return wrong("n_routed_experts", h.n_routed_experts, "at most 512");
    }
    if h.num_experts_per_tok > 32 {
        return wrong("num_experts_per_tok", h.num_experts_per_tok, "at most 32");
    }
    if !h.hidden_size.is_multiple_of(8) {
        return wrong("hidden_size", h.hidden_size, "a multiple of 8");
    }
    if h.hc_mult == 0 || h.hc_mult > 5 {
        return wrong("hc_mult", h.hc_mult, "1 to 5");
    }
    Ok(())
}
