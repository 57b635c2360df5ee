//! The model's operations, queued on the device.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gguf_tools::block::BlockType;
use gguf_tools::model::HyperParameters;

use super::cache::{CudaCache, Storage};
use super::driver::{Arguments, Graph, KernelShare, Launch, PinnedBuffer, View};
use super::error::CudaError;
use super::loading::Loading;
use super::matrix::{ExpertMatrices, Matrix, Pass, Routed, Workspace};
use super::module::Gpu;
use super::plan::halved_rows;
use super::pool::{Pool, PoolBuffer};
use crate::error::RunnerError;
use crate::ops::{
    ActivationPrecision, Backend, CacheShape, CompressedRows, Compressor, ExpertTap, GatedFfn,
    HyperConnection, HyperConstants, MatrixPlace, Mix, Numerics, Piece, Recorded, Rope, RouterRule, Routing,
    RowPlaces, Selection, SharedTap, SublayerInput, Work,
};
use crate::session::Options;
use crate::weights::{GeneratedRows, WeightSource};

/// A GPU as a backend. One caller computes at a time.
pub struct CudaBackend {
    pub(super) gpu: Gpu,
    /// Activations.
    pub(super) pool: Pool,
    /// What keeps its content between passes: caches, token ids and positions.
    kept: Pool,
    /// Page-locked, for the logits of a token: from other memory they take longer to come than to compute.
    staging: Mutex<PinnedBuffer<f32>>,
    /// Numbers from 0 on, more than a mixer has rows.
    counting: PoolBuffer<u32>,
    pub(super) storage: Storage,
    activations: ActivationPrecision,
    turn: Mutex<()>,
    /// Whether single tokens are computed now, see [`Work`].
    single_tokens: AtomicBool,
    workspaces: Mutex<Workspaces>,
    /// While weights are loaded.
    loading: Mutex<Option<Loading>>,
}

/// Memory for matrix products. Recorded passes hold the addresses of earlier ones, so none is ever given back.
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
pub struct CudaRouterRule(Rule);

enum Rule {
    /// `[vocabulary, n_used]`.
    Hash(PoolBuffer<u32>),
    /// `[n_experts]`.
    Bias(PoolBuffer<f32>),
}

/// Token ids and positions on the device.
pub struct CudaPlaces {
    tokens: PoolBuffer<u32>,
    positions: PoolBuffer<u32>,
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
    n_used: usize,
    /// `[tokens, n_used]`.
    experts: PoolBuffer<u32>,
    weights: PoolBuffer<f32>,
}

/// A recorded pass, and where its result is.
pub struct CudaRecording {
    graph: Graph,
    result: CudaTensor,
}

/// Threads of a block that works on a row of `width` values. Sums depend on it, so it depends on the width alone.
pub(super) fn row_threads(width: usize) -> u32 {
    (width / 4).next_power_of_two().clamp(32, 1024) as u32
}

impl RowPlaces<'_, CudaBackend> {
    fn tokens(&self) -> View<'_, u32> {
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
        let gpu = Gpu::open(ordinal)?;
        super::plan::Plan::new(source.as_ref(), options).check(&gpu, options.device_bytes)?;
        let kept = Pool::new(&gpu.device);
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
            pool: Pool::new(&gpu.device),
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

    pub(super) fn single_tokens(&self) -> bool {
        self.single_tokens.load(Ordering::Relaxed)
    }

    /// Whether inputs may be rounded on the way.
    pub(super) fn rounds_inputs(&self) -> bool {
        self.pass() != Pass::Exact
    }

    fn pass(&self) -> Pass {
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
    fn with_workspace<R>(
        &self,
        n_bytes: usize,
        work: impl FnOnce(&mut Workspace) -> Result<R, CudaError>,
    ) -> Result<R, CudaError> {
        let mut workspaces = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if n_bytes > workspaces.n_bytes {
            let n_bytes = n_bytes.next_power_of_two().max(1 << 20);
            let earlier = std::mem::replace(&mut workspaces.now, Workspace::new(&self.gpu, n_bytes)?);
            workspaces.earlier.push(earlier);
            workspaces.n_bytes = n_bytes;
        }
        work(&mut workspaces.now)
    }

    fn product(&self, input: &CudaTensor, matrix: &Matrix, groups: usize) -> Result<CudaTensor, CudaError> {
        let mut output = self.tensor(input.tokens, matrix.rows())?;
        let pass = self.pass();
        self.with_workspace(matrix.workspace_bytes(input.tokens, groups, pass), |workspace| {
            let (input, tokens, output) = (input.values.view(), input.tokens, &mut output.values.view_mut());
            matrix.grouped_products(&self.gpu, workspace, input, tokens, groups, pass, output)
        })?;
        Ok(output)
    }

    fn kept_values<T: super::pool::Pooled>(
        &self,
        values: &[T],
        what: &str,
    ) -> Result<PoolBuffer<T>, CudaError> {
        let mut buffer = self.kept.take(values.len(), what)?;
        self.gpu.device.write(&mut buffer.view_mut(), values)?;
        Ok(buffer)
    }

    /// Matrices of the same shape, one after the other in one matrix.
    fn stack(&self, source: &Arc<dyn WeightSource>, places: &[MatrixPlace]) -> Result<Matrix, RunnerError> {
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

    fn load_matrix(&self, source: &Arc<dyn WeightSource>, place: MatrixPlace) -> Result<Matrix, RunnerError> {
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

    /// The mixer as the kernels take it: name of the type, and where it is; widened into `room` where it must be.
    fn mixer_values(
        &self,
        mixer: &Matrix,
        room: &mut Option<CudaTensor>,
    ) -> Result<(&'static str, u64), RunnerError> {
        let (n, width) = (mixer.rows(), mixer.columns());
        let values = match mixer.block_type() {
            BlockType::F16 => return Ok(("F16", mixer.values_as_stored().address())),
            BlockType::F32 => return Ok(("F32", mixer.values_as_stored().address())),
            _ => room.insert(self.tensor(n, width)?),
        };
        mixer.take_rows(&self.gpu, self.counting.slice(0..n), 1, &mut values.values.view_mut())?;
        Ok(("F32", values.values.view().address()))
    }

    /// The mixer's products with each slice of the streams, `[tokens, n + 1, slices]`, sums of squares last.
    fn hyper_partials(&self, streams: &CudaTensor, mixer: &Matrix) -> Result<CudaTensor, RunnerError> {
        let (n, width, tokens) = (mixer.rows(), streams.width, streams.tokens);
        let mut room = None;
        let (name, mixer) = self.mixer_values(mixer, &mut room)?;
        let n_slices = width.div_ceil(SLICE);
        let mut partials = self.tensor(tokens, n_slices * (n + 1))?;
        let shape = Launch::new(n_slices, 256).by(tokens.div_ceil(MIX_TOKENS));
        let arguments = Arguments::new()
            .read(streams.values.view())
            .long(mixer)
            .write(&partials.values.view_mut())
            .int(tokens)
            .int(width)
            .int(n)
            .int(n_slices)
            .int(MIX_TOKENS);
        let at_once = if tokens == 1 { 1 } else { 4 };
        self.launch("hyper", &format!("hc_mix_{name}_{at_once}"), shape, arguments)?;
        Ok(partials)
    }

    /// (3.6) `hc_post`, and the products of [`CudaBackend::hyper_partials`] with what comes of it.
    fn turn_streams(
        &self,
        streams: &mut CudaTensor,
        output: &CudaTensor,
        second: Option<&CudaTensor>,
        mix: &Mix<Self>,
        mixer: &Matrix,
    ) -> Result<CudaTensor, RunnerError> {
        let (n, m, tokens) = (mixer.rows(), mix.post.width, streams.tokens);
        let mut room = None;
        let (name, mixer) = self.mixer_values(mixer, &mut room)?;
        let n_slices = streams.width / SLICE;
        let mut partials = self.tensor(tokens, n_slices * (n + 1))?;
        let mut turned = self.tensor(tokens, streams.width)?;
        let shape = Launch::new(n_slices, 256).by(tokens);
        let arguments = Arguments::new().read(streams.values.view()).read(output.values.view());
        let arguments = match second {
            Some(second) => arguments.read(second.values.view()),
            None => arguments.null(),
        };
        let arguments = arguments
            .read(mix.post.values.view())
            .read(mix.comb.values.view())
            .write(&turned.values.view_mut())
            .long(mixer)
            .write(&partials.values.view_mut())
            .int(output.width)
            .int(m)
            .int(n)
            .int(n_slices);
        self.launch("hyper", &format!("hc_turn_{name}"), shape, arguments)?;
        *streams = turned;
        Ok(partials)
    }

    /// (3.6), (3.1) The streams merged, before and behind the norm; `mix`: post and comb weights to be written.
    fn merge_streams(
        &self,
        streams: &CudaTensor,
        partials: &CudaTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
        mix: Option<(&mut CudaTensor, &mut CudaTensor)>,
    ) -> Result<(CudaTensor, CudaTensor), RunnerError> {
        let (m, tokens) = (constants.n_streams, streams.tokens);
        let width = streams.width / m;
        let mut x = self.tensor(tokens, width)?;
        let mut normed = self.tensor(tokens, width)?;
        let arguments = Arguments::new()
            .read(streams.values.view())
            .read(partials.values.view())
            .read(weights.scale.values.view())
            .read(weights.base.values.view())
            .read(norm.values.view())
            .write(&x.values.view_mut())
            .write(&normed.values.view_mut());
        let arguments = match mix {
            Some((post, comb)) => arguments.write(&post.values.view_mut()).write(&comb.values.view_mut()),
            None => arguments.null().null(),
        };
        let arguments = arguments
            .int(width)
            .int(m)
            .int(streams.width.div_ceil(SLICE))
            .int(constants.sinkhorn_iterations)
            .float(constants.epsilon)
            .float(constants.rms_epsilon);
        self.launch("hyper", "hc_pre", Launch::new(tokens, 544), arguments)?;
        Ok((x, normed))
    }

    /// What `hc_pre` gives, from the mixer's products.
    fn sublayer_input(
        &self,
        streams: &CudaTensor,
        partials: &CudaTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
    ) -> Result<SublayerInput<Self>, RunnerError> {
        let (m, tokens) = (constants.n_streams, streams.tokens);
        let mut post = self.tensor(tokens, m)?;
        let mut comb = self.tensor(tokens, m * m)?;
        let parts = Some((&mut post, &mut comb));
        let (merged, normed) = self.merge_streams(streams, partials, weights, constants, norm, parts)?;
        Ok(SublayerInput { merged, normed, mix: Mix { post, comb } })
    }
}

/// Columns of a slice of the hyper-connections' mixer, as in the kernels.
const SLICE: usize = 256;
/// Rows of a mixer, at most: `(2 + M) M`.
const MOST_MIXES: usize = 40;
/// Tokens for which a slice of the mixer stays in registers.
const MIX_TOKENS: usize = 32;

/// Threads of a block that chooses experts, as in the kernel.
const ROUTING_THREADS: u32 = 128;

/// For how long the device waits before kernels are measured.
const WAIT_NANOSECONDS: u64 = 40_000_000;
/// Matrices of fewer bytes are copied from where they are mapped.
const READ_BYTES: usize = 1 << 20;
/// Values of a checkpoint's matrix that are widened at once.
const WIDENED_VALUES: usize = 16 << 20;

/// Refuses shapes that the kernels are not made for.
fn check_shapes(h: &HyperParameters) -> Result<(), RunnerError> {
    let wrong = |what: &str, found: u64, expected: &str| {
        let (what, expected) = (format!("{what} of the model on a CUDA device"), expected.to_owned());
        Err(CudaError::Shape { what, found: found.to_string(), expected }.into())
    };
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

impl Backend for CudaBackend {
    const NAME: &'static str = "cuda";
    type Tensor = CudaTensor;
    type Matrix = Matrix;
    type Experts = ExpertMatrices;
    type Vector = CudaVector;
    type Rope = CudaRope;
    type RouterRule = CudaRouterRule;
    type Places = CudaPlaces;
    type Chosen = CudaChosen;
    type Routing = CudaRouting;
    type Cache = CudaCache;
    type Recording = CudaRecording;

    fn turn(&self, work: Work) -> Result<Option<MutexGuard<'_, ()>>, RunnerError> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Who computes has loaded.
        self.loading.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.single_tokens.store(work == Work::Token, Ordering::Relaxed);
        Ok(Some(turn))
    }

    fn matrix(&self, source: &Arc<dyn WeightSource>, place: MatrixPlace) -> Result<Matrix, RunnerError> {
        self.load_matrix(source, place)
    }

    fn experts(
        &self,
        source: &Arc<dyn WeightSource>,
        places: &GatedFfn<Vec<MatrixPlace>>,
    ) -> Result<ExpertMatrices, RunnerError> {
        let gate = self.stack(source, &places.gate)?;
        let up = self.stack(source, &places.up)?;
        let down = self.stack(source, &places.down)?;
        Ok(ExpertMatrices::new(places.gate.len(), gate, up, down)?)
    }

    fn vector(&self, values: Vec<f32>) -> Result<CudaVector, RunnerError> {
        Ok(CudaVector { values: self.kept_values(&values, "a vector of weights")? })
    }

    fn rope(&self, rope: Rope) -> Result<CudaRope, RunnerError> {
        Ok(CudaRope { frequencies: self.kept_values(&rope.frequencies, "rotary frequencies")? })
    }

    fn router_rule(&self, rule: RouterRule) -> Result<CudaRouterRule, RunnerError> {
        Ok(CudaRouterRule(match rule {
            RouterRule::Hash(table) => {
                let table: Vec<u32> = table.iter().map(|&expert| expert as u32).collect();
                Rule::Hash(self.kept_values(&table, "a table of experts by token")?)
            }
            RouterRule::Bias(bias) => Rule::Bias(self.kept_values(&bias, "router biases")?),
        }))
    }

    fn places(&self, tokens: &[u32], positions: &[usize]) -> Result<CudaPlaces, RunnerError> {
        let positions: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
        let what = "token ids and positions";
        Ok(CudaPlaces {
            tokens: self.kept_values(tokens, what)?,
            positions: self.kept_values(&positions, what)?,
        })
    }

    fn set_places(
        &self,
        places: &mut CudaPlaces,
        tokens: &[u32],
        positions: &[usize],
    ) -> Result<(), RunnerError> {
        let positions: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
        self.gpu.device.write(&mut places.tokens.view_mut(), tokens)?;
        self.gpu.device.write(&mut places.positions.view_mut(), &positions)?;
        Ok(())
    }

    fn cache(&self, shape: CacheShape) -> CudaCache {
        CudaCache::new(shape)
    }

    fn reserve(&self, cache: &mut CudaCache, n_tokens: usize) -> Result<bool, RunnerError> {
        Ok(cache.reserve(&self.gpu.device, &self.kept, self.storage, n_tokens)?)
    }

    fn copy_cache(&self, cache: &CudaCache, n_tokens: usize) -> Result<CudaCache, RunnerError> {
        Ok(cache.copy(&self.gpu.device, &self.kept, self.storage, n_tokens)?)
    }

    fn restore_cache(
        &self,
        cache: &mut CudaCache,
        copy: &CudaCache,
        n_tokens: usize,
    ) -> Result<bool, RunnerError> {
        Ok(cache.restore(&self.gpu.device, &self.kept, self.storage, copy, n_tokens)?)
    }

    fn cache_bytes(&self, cache: &CudaCache) -> usize {
        cache.n_bytes()
    }

    fn record(
        &self,
        pass: &mut dyn FnMut() -> Result<CudaTensor, RunnerError>,
    ) -> Result<Recorded<CudaTensor, CudaRecording>, RunnerError> {
        let mut result = None;
        self.pool.set_closed(true);
        let graph = self.gpu.device.capture(|| {
            result = Some(pass()?);
            Ok::<(), RunnerError>(())
        });
        self.pool.set_closed(false);
        let graph = graph?;
        Ok(Recorded::Kept(CudaRecording { graph, result: result.expect("the pass was recorded") }))
    }

    fn repeat<'a>(&self, recording: &'a CudaRecording) -> Result<&'a CudaTensor, RunnerError> {
        recording.graph.launch()?;
        Ok(&recording.result)
    }

    fn host_values(&self, width: usize, values: Vec<f32>) -> Result<CudaTensor, RunnerError> {
        let mut tensor = self.tensor(values.len() / width, width)?;
        self.gpu.device.write(&mut tensor.values.view_mut(), &values)?;
        Ok(tensor)
    }

    fn zeros(&self, tokens: usize, width: usize) -> Result<CudaTensor, RunnerError> {
        let mut tensor = self.tensor(tokens, width)?;
        self.gpu.device.clear(&mut tensor.values.view_mut())?;
        Ok(tensor)
    }

    fn room(&self, tokens: usize, width: usize) -> Result<CudaTensor, RunnerError> {
        Ok(self.tensor(tokens, width)?)
    }

    fn read<'a>(&self, tensor: &'a CudaTensor) -> Result<Cow<'a, [f32]>, RunnerError> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let n = tensor.values.len();
        if n > staging.as_slice().len() {
            return Ok(Cow::Owned(self.gpu.device.download(tensor.values.view())?));
        }
        self.gpu.device.read_into(tensor.values.view(), &mut staging.as_mut_slice()[..n])?;
        Ok(Cow::Owned(staging.as_slice()[..n].to_vec()))
    }

    fn read_routing<'a>(&self, routing: &'a CudaRouting) -> Result<Cow<'a, Routing>, RunnerError> {
        Ok(Cow::Owned(Routing {
            n_used: routing.n_used,
            experts: self.gpu.device.download(routing.experts.view())?,
            weights: self.gpu.device.download(routing.weights.view())?,
        }))
    }

    fn read_chosen<'a>(&self, chosen: &'a CudaChosen) -> Result<Cow<'a, [Vec<u32>]>, RunnerError> {
        let rows = match &chosen.rows {
            Some(rows) => self.gpu.device.download(rows.view())?,
            None => Vec::new(),
        };
        let of_query = |(query, &n_visible): (usize, &usize)| {
            if n_visible > chosen.top_k {
                rows[query * chosen.top_k..][..chosen.top_k].to_vec()
            } else {
                (0..n_visible as u32).collect()
            }
        };
        Ok(Cow::Owned(chosen.n_visible.iter().enumerate().map(of_query).collect()))
    }

    fn rows(&self, tensor: &CudaTensor, rows: Range<usize>) -> Result<CudaTensor, RunnerError> {
        let mut part = self.tensor(rows.len(), tensor.width)?;
        self.gpu.device.copy(tensor.rows(&rows), &mut part.values.view_mut())?;
        Ok(part)
    }

    fn put_rows(&self, tensor: &mut CudaTensor, first: usize, part: &CudaTensor) -> Result<(), RunnerError> {
        let range = first * tensor.width..(first + part.tokens) * tensor.width;
        self.gpu.device.copy(part.values.view(), &mut tensor.values.slice_mut(range))?;
        Ok(())
    }

    fn first_not_finite(&self, tensor: &CudaTensor) -> Result<Option<(usize, usize, f32)>, RunnerError> {
        let n = tensor.values.len();
        let mut found = self.pool.take::<u32>(1, "a place")?;
        self.gpu.device.write(&mut found.view_mut(), &[i32::MAX as u32])?;
        let arguments = Arguments::new().read(tensor.values.view()).int(n).write(&found.view_mut());
        self.launch("rows", "first_not_finite", Launch::over(n), arguments)?;
        let at = self.gpu.device.download(found.view())?[0] as usize;
        if at == i32::MAX as usize {
            return Ok(None);
        }
        let value = self.gpu.device.download(tensor.values.slice(at..at + 1))?[0];
        Ok(Some((at / tensor.width, at % tensor.width, value)))
    }

    fn embed(
        &self,
        table: &Matrix,
        places: RowPlaces<'_, Self>,
        n_streams: usize,
    ) -> Result<CudaTensor, RunnerError> {
        let mut streams = self.tensor(places.rows.len(), n_streams * table.columns())?;
        table.take_rows(&self.gpu, places.tokens(), n_streams, &mut streams.values.view_mut())?;
        Ok(streams)
    }

    fn beside(&self, work: &mut dyn FnMut() -> Result<(), RunnerError>) -> Result<(), RunnerError> {
        // Batches fill the device, and what they give back is wanted at once.
        if !self.single_tokens() {
            return work();
        }
        self.pool.hold();
        self.gpu.device.beside(work)
    }

    fn together(&self) -> Result<(), RunnerError> {
        self.gpu.device.together()?;
        self.pool.release();
        Ok(())
    }

    fn hc_pre(
        &self,
        streams: &CudaTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
    ) -> Result<SublayerInput<Self>, RunnerError> {
        let partials = self.hyper_partials(streams, &weights.mixer)?;
        self.sublayer_input(streams, &partials, weights, constants, norm)
    }

    fn hc_turn(
        &self,
        streams: &mut CudaTensor,
        output: &CudaTensor,
        second: Option<&CudaTensor>,
        mix: &Mix<Self>,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
    ) -> Result<SublayerInput<Self>, RunnerError> {
        if !self.single_tokens() || !output.width.is_multiple_of(SLICE) {
            self.hc_post(streams, output, second, mix)?;
            return self.hc_pre(streams, weights, constants, norm);
        }
        let partials = self.turn_streams(streams, output, second, mix, &weights.mixer)?;
        self.sublayer_input(streams, &partials, weights, constants, norm)
    }

    fn hc_post(
        &self,
        streams: &mut CudaTensor,
        output: &CudaTensor,
        second: Option<&CudaTensor>,
        mix: &Mix<Self>,
    ) -> Result<(), RunnerError> {
        let arguments = Arguments::new().write(&streams.values.view_mut()).read(output.values.view());
        let arguments = match second {
            Some(second) => arguments.read(second.values.view()),
            None => arguments.null(),
        };
        let arguments = arguments
            .read(mix.post.values.view())
            .read(mix.comb.values.view())
            .int(output.width)
            .int(mix.post.width);
        self.launch("hyper", "hc_post", Launch::over(output.width).by(output.tokens), arguments)
    }

    fn hc_head(
        &self,
        streams: &CudaTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
    ) -> Result<(CudaTensor, CudaTensor), RunnerError> {
        let partials = self.hyper_partials(streams, &weights.mixer)?;
        self.merge_streams(streams, &partials, weights, constants, norm, None)
    }

    fn rms_norm(
        &self,
        input: &CudaTensor,
        weights: &CudaVector,
        epsilon: f32,
    ) -> Result<CudaTensor, RunnerError> {
        let mut output = self.tensor(input.tokens, input.width)?;
        let shape = Launch::new(input.tokens, row_threads(input.width));
        let arguments = Arguments::new()
            .read(input.values.view())
            .read(weights.values.view())
            .write(&output.values.view_mut())
            .int(input.width)
            .float(epsilon);
        self.launch("rows", "rms_norm", shape, arguments)?;
        Ok(output)
    }

    fn linear_many(&self, input: &CudaTensor, matrices: &[&Matrix]) -> Result<Vec<CudaTensor>, RunnerError> {
        let pass = self.pass();
        let mut outputs = Vec::with_capacity(matrices.len());
        for matrix in matrices {
            outputs.push(self.tensor(input.tokens, matrix.rows())?);
        }
        let n_bytes = matrices.iter().map(|m| m.workspace_bytes(input.tokens, 1, pass)).max().unwrap_or(0);
        self.with_workspace(n_bytes, |workspace| {
            let outputs = outputs.iter_mut().map(|output| output.values.view_mut());
            let mut products: Vec<_> = matrices.iter().copied().zip(outputs).collect();
            let (input, tokens) = (input.values.view(), input.tokens);
            Matrix::products_many(&self.gpu, workspace, input, tokens, pass, &mut products)
        })?;
        Ok(outputs)
    }

    fn linear_grouped(
        &self,
        input: &CudaTensor,
        matrix: &Matrix,
        groups: usize,
    ) -> Result<CudaTensor, RunnerError> {
        Ok(self.product(input, matrix, groups)?)
    }

    fn add(&self, tensor: &mut CudaTensor, other: &CudaTensor) -> Result<(), RunnerError> {
        let n = tensor.values.len();
        let arguments = Arguments::new().write(&tensor.values.view_mut()).read(other.values.view()).int(n);
        self.launch("rows", "add_rows", Launch::over(n), arguments)
    }

    fn project_out(
        &self,
        tensor: &mut CudaTensor,
        direction: &CudaVector,
        scale: f32,
    ) -> Result<(), RunnerError> {
        let shape = Launch::new(tensor.tokens, row_threads(tensor.width));
        let arguments = Arguments::new()
            .write(&tensor.values.view_mut())
            .read(direction.values.view())
            .int(tensor.width)
            .float(scale);
        self.launch("rows", "project_out", shape, arguments)
    }

    fn q_finish(
        &self,
        queries: &mut CudaTensor,
        head_dim: usize,
        epsilon: f32,
        rope: &CudaRope,
        places: RowPlaces<'_, Self>,
    ) -> Result<(), RunnerError> {
        self.finish_queries(queries, head_dim, epsilon, rope, &places)
    }

    fn kv_finish(
        &self,
        rows: &mut CudaTensor,
        rope: &CudaRope,
        places: RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        self.finish_rows(rows, rope, &places, numerics)
    }

    fn index_finish(
        &self,
        queries: &mut CudaTensor,
        head_dim: usize,
        rope: &CudaRope,
        places: RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        self.finish_index_queries(queries, head_dim, rope, &places, numerics)
    }

    fn append_window(
        &self,
        cache: &mut CudaCache,
        rows: &CudaTensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
    ) -> Result<(), RunnerError> {
        self.append_rows(cache, rows, piece, &places)
    }

    fn compress(
        &self,
        cache: &mut CudaCache,
        target: CompressedRows,
        values: &CudaTensor,
        gates: &CudaTensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        weights: &Compressor<Self>,
        rope: &CudaRope,
        epsilon: f32,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        self.emit_rows(cache, target, values, gates, piece, &places, weights, rope, epsilon, numerics)?;
        self.keep_tokens(cache, target, values, gates, piece, &places)
    }

    fn index_topk(
        &self,
        cache: &CudaCache,
        queries: &CudaTensor,
        head_weights: &CudaTensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        top_k: usize,
        keep_scores: bool,
    ) -> Result<(CudaChosen, Vec<f32>), RunnerError> {
        self.choose_rows(cache, queries, head_weights, piece, &places, top_k, keep_scores)
    }

    fn attend(
        &self,
        cache: &CudaCache,
        queries: &CudaTensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        selection: &Selection<CudaChosen>,
        sinks: &CudaVector,
        rope: &CudaRope,
        output: &mut CudaTensor,
    ) -> Result<(), RunnerError> {
        self.attend_rows(cache, queries, piece, &places, selection, sinks, rope, output)
    }

    fn trim_window(&self, _: &mut CudaCache) {}

    fn route(
        &self,
        logits: &CudaTensor,
        rule: &CudaRouterRule,
        places: RowPlaces<'_, Self>,
        n_used: usize,
        scaling_factor: f32,
    ) -> Result<CudaRouting, RunnerError> {
        let (tokens, n_experts) = (logits.tokens, logits.width);
        let mut experts = self.pool.take(tokens * n_used, "the router's choice")?;
        let mut weights = self.pool.take(tokens * n_used, "the router's weights")?;
        let arguments = Arguments::new().read(logits.values.view());
        let (name, shape, arguments) = match &rule.0 {
            Rule::Hash(table) => {
                let arguments = arguments.read(table.view()).read(places.tokens());
                ("route_by_table", Launch::new(tokens.div_ceil(8), 256), arguments)
            }
            Rule::Bias(bias) => {
                ("route_by_score", Launch::new(tokens, ROUTING_THREADS), arguments.read(bias.view()))
            }
        };
        let arguments = arguments
            .write(&experts.view_mut())
            .write(&weights.view_mut())
            .int(tokens)
            .int(n_experts)
            .int(n_used)
            .float(scaling_factor);
        self.launch("router", name, shape, arguments)?;
        Ok(CudaRouting { n_used, experts, weights })
    }

    fn routed_experts(
        &self,
        input: &CudaTensor,
        routing: &CudaRouting,
        experts: &ExpertMatrices,
        limit: f32,
        tap: Option<&mut ExpertTap<'_>>,
    ) -> Result<CudaTensor, RunnerError> {
        let (tokens, n_used, pass) = (input.tokens, routing.n_used, self.pass());
        let mut output = self.tensor(tokens, experts.outputs())?;
        let mut mids = tap.is_some().then(|| self.tensor(tokens * n_used, experts.width())).transpose()?;
        self.with_workspace(experts.workspace_bytes(tokens, n_used, pass), |workspace| {
            let work = Routed {
                input: input.values.view(),
                experts: routing.experts.view(),
                weights: routing.weights.view(),
                tokens,
                n_used,
                limit,
                pass,
            };
            let mut mids = mids.as_mut().map(|mids| mids.values.view_mut());
            experts.routed(&self.gpu, workspace, &work, &mut output.values.view_mut(), mids.as_mut())
        })?;
        if let (Some(tap), Some(mids)) = (tap, mids) {
            let (inputs, mids) = (self.read(input)?, self.read(&mids)?);
            let routing = self.read_routing(routing)?;
            show_experts(tap, &routing, &inputs, input.width, &mids, experts.width());
        }
        Ok(output)
    }

    fn shared_expert(
        &self,
        input: &CudaTensor,
        expert: &GatedFfn<Matrix>,
        limit: f32,
        tap: Option<&mut SharedTap<'_>>,
    ) -> Result<CudaTensor, RunnerError> {
        let mut products = self.linear_many(input, &[&expert.gate, &expert.up])?.into_iter();
        let mut mid = products.next().expect("one product a matrix");
        let up = products.next().expect("one product a matrix");
        let n = mid.values.len();
        let arguments =
            Arguments::new().write(&mid.values.view_mut()).read(up.values.view()).int(n).float(limit);
        self.launch("rows", "swiglu_rows", Launch::over(n), arguments)?;
        if let Some(tap) = tap {
            tap(&self.read(&mid)?);
        }
        Ok(self.product(&mid, &expert.down, 1)?)
    }
}

/// Shows each expert's work, experts ascending, rows ascending within. `inputs`: `[tokens, width]`;
/// `mids`: `[tokens, n_used, inner]`.
fn show_experts(
    tap: &mut ExpertTap<'_>,
    routing: &Routing,
    inputs: &[f32],
    width: usize,
    mids: &[f32],
    inner: usize,
) {
    let mut slots_of: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (slot, &expert) in routing.experts.iter().enumerate() {
        slots_of.entry(expert).or_default().push(slot);
    }
    for (expert, slots) in slots_of {
        let rows: Vec<usize> = slots.iter().map(|slot| slot / routing.n_used).collect();
        let weights: Vec<f32> = slots.iter().map(|&slot| routing.weights[slot]).collect();
        let gathered: Vec<f32> =
            rows.iter().flat_map(|row| &inputs[row * width..][..width]).copied().collect();
        let mids: Vec<f32> = slots.iter().flat_map(|slot| &mids[slot * inner..][..inner]).copied().collect();
        tap(expert as usize, &rows, &weights, &gathered, &mids);
    }
}
