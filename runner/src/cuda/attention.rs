//! Queries, caches and attention on the device, (4.4 to 4.6).

use super::backend::{CudaBackend, CudaChosen, CudaRope, CudaTensor, CudaVector};
use super::cache::{CudaCache, Rows, overlapping};
use super::driver::{Arguments, Launch, View, ViewMut};
use super::error::CudaError;
use super::pool::PoolBuffer;
use crate::error::RunnerError;
use crate::ops::{CompressedRows, Compressor, Numerics, Piece, Queries, RowPlaces, Selection};

/// Keys whose softmax is computed alone, as in the kernels.
const KEYS_PER_PART: usize = 28;
/// Values that a part has besides its channels, as in the kernels.
const PART_HEADER: usize = 4;
/// Most heads of a block of the tensor-core kernels, and of the one that needs less shared memory.
const TILE_HEADS: usize = 64;
const SMALL_TILE_HEADS: usize = 32;
/// Heads of a block of the tensor-core kernels for few tokens.
const PART_HEADS: usize = 16;
/// Keys of a step of all these.
const TILE_KEYS: usize = 32;
/// Heads of a block.
const HEADS_PER_BLOCK: usize = 4;
/// Index rows that a block scores.
const ROWS_PER_BLOCK: usize = 32;
/// Index rows and queries of a block of the tensor-core kernel.
const TILE_ROWS: usize = 256;
const TILE_QUERIES: usize = 32;
/// Most threads of a block that makes a compressed row.
pub(super) const EMITTING_THREADS: usize = 256;
/// Warps of a block whose warps work alone.
pub(super) const WARPS: usize = 8;
/// Tokens up to which the parts of a query are computed by blocks of their own: the bits are the same.
const SPLIT_TOKENS: usize = 4;

/// A kernel's argument that reads rows in whichever type they are stored.
fn read_rows(arguments: Arguments, rows: &Rows) -> Arguments {
    match rows {
        Rows::Half(values) => arguments.read(values.view()),
        Rows::Float(values) => arguments.read(values.view()),
    }
}

fn write_rows(arguments: Arguments, rows: &mut Rows) -> Arguments {
    match rows {
        Rows::Half(values) => arguments.write(&values.view_mut()),
        Rows::Float(values) => arguments.write(&values.view_mut()),
    }
}

/// Factor of the normalised Walsh-Hadamard matrix.
pub(super) fn hadamard_factor(width: usize) -> f32 {
    (1.0 / (width as f64).sqrt()) as f32
}

/// How compressed rows are rounded, as in the kernels.
pub(super) fn rounding_of(numerics: Numerics, target: CompressedRows) -> u32 {
    match (numerics, target) {
        (Numerics::Exact, _) => 0,
        (Numerics::Official, CompressedRows::Attention) => 1,
        (Numerics::Official, CompressedRows::Indexer) => 2,
    }
}

impl CudaBackend {
    pub(super) fn finish_heads(
        &self,
        queries: Queries<'_, Self>,
        rope: &CudaRope,
        places: &RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        let Queries { heads: queries, head_dim, epsilon, index } = queries;
        let (tokens, n_heads) = (queries.tokens, queries.width / head_dim);
        let arguments = Arguments::new().write(&queries.values.view_mut());
        let Some((index_queries, width)) = index else {
            let arguments = arguments
                .read(rope.frequencies.view())
                .read(places.positions())
                .int(tokens)
                .int(n_heads)
                .int(head_dim)
                .int(rope.frequencies.len())
                .float(epsilon);
            let shape = Launch::new((tokens * n_heads).div_ceil(WARPS), 256);
            return self.launch("attention", "q_finish", shape, arguments);
        };
        let n_index_heads = index_queries.width / width;
        let arguments = arguments
            .write(&index_queries.values.view_mut())
            .read(rope.frequencies.view())
            .read(places.positions())
            .int(tokens)
            .int(n_heads)
            .int(head_dim)
            .int(n_index_heads)
            .int(rope.frequencies.len())
            .float(epsilon)
            .int(usize::from(numerics == Numerics::Official))
            .float(hadamard_factor(width));
        let shape = Launch::new((tokens * (n_heads + n_index_heads)).div_ceil(WARPS), 256);
        self.launch("indexer", &format!("finish_queries_{width}"), shape, arguments)
    }

    pub(super) fn finish_rows(
        &self,
        rows: &mut CudaTensor,
        rope: &CudaRope,
        places: &RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        let arguments = Arguments::new()
            .write(&rows.values.view_mut())
            .read(rope.frequencies.view())
            .read(places.positions())
            .int(rows.width)
            .int(rope.frequencies.len())
            .int(usize::from(numerics == Numerics::Official));
        self.launch("attention", "kv_finish", Launch::new(rows.tokens, 256), arguments)
    }

    pub(super) fn append_rows(
        &self,
        cache: &mut CudaCache,
        rows: &CudaTensor,
        piece: &Piece,
        places: &RowPlaces<'_, Self>,
    ) -> Result<(), RunnerError> {
        let window = &mut cache.stores_mut().window;
        let name = format!("append_window_{}", window.suffix());
        let arguments = write_rows(Arguments::new().read(rows.rows(&piece.rows)), window)
            .read(places.positions())
            .int(rows.width)
            .int(self.storage.ring_slots - 1);
        self.launch("attention", &name, Launch::new(piece.rows.len(), 128), arguments)
    }

    /// (4.5) Rows whose windows the piece completes.
    #[expect(clippy::too_many_arguments, reason = "the operation's arguments")]
    pub(super) fn emit_rows(
        &self,
        cache: &mut CudaCache,
        target: CompressedRows,
        values: &CudaTensor,
        gates: &CudaTensor,
        piece: &Piece,
        places: &RowPlaces<'_, Self>,
        weights: &Compressor<Self>,
        rope: &CudaRope,
        epsilon: f32,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        let ratio = cache.shape.ratio;
        let store = cache.compressor_mut(target);
        let name = format!("emit_rows_{}", store.rows.suffix());
        let width = store.width;
        let threads = width.next_multiple_of(32).min(EMITTING_THREADS) as u32;
        let most_windows = piece.rows.len() / ratio + 1;
        let shape = Launch::new(most_windows, threads).shared((width * size_of::<f32>()) as u32);
        let arguments = Arguments::new()
            .read(values.rows(&piece.rows))
            .read(gates.rows(&piece.rows))
            .read(store.values.view())
            .read(store.gates.view())
            .read(weights.position_bias.values.view())
            .read(weights.norm.values.view())
            .read(rope.frequencies.view())
            .read(places.positions());
        let arguments = write_rows(arguments, &mut store.rows)
            .int(piece.rows.len())
            .int(ratio)
            .int(values.width)
            .int(usize::from(overlapping(ratio)))
            .int(rope.frequencies.len())
            .float(epsilon)
            .int(rounding_of(numerics, target) as usize)
            .float(hadamard_factor(width));
        self.launch("compressor", &name, shape, arguments)
    }

    /// Keeps the piece's last tokens for the windows that follow.
    pub(super) fn keep_tokens(
        &self,
        cache: &mut CudaCache,
        target: CompressedRows,
        values: &CudaTensor,
        gates: &CudaTensor,
        piece: &Piece,
        places: &RowPlaces<'_, Self>,
    ) -> Result<(), RunnerError> {
        let store = cache.compressor_mut(target);
        let arguments = Arguments::new()
            .read(values.rows(&piece.rows))
            .read(gates.rows(&piece.rows))
            .write(&store.values.view_mut())
            .write(&store.gates.view_mut())
            .read(places.positions())
            .int(piece.rows.len())
            .int(store.n_slots)
            .int(values.width);
        let shape = Launch::new(piece.rows.len().min(store.n_slots), 256);
        self.launch("compressor", "keep_tokens", shape, arguments)
    }

    /// (4.6.6, 4.6.7)
    #[expect(clippy::too_many_arguments, reason = "the operation's arguments")]
    pub(super) fn choose_rows(
        &self,
        cache: &CudaCache,
        queries: &CudaTensor,
        head_weights: &CudaTensor,
        piece: &Piece,
        places: &RowPlaces<'_, Self>,
        top_k: usize,
        keep_scores: bool,
    ) -> Result<(CudaChosen, Vec<f32>), RunnerError> {
        let (ratio, width) = (cache.shape.ratio, cache.shape.index_head_dim);
        let n_queries = piece.rows.len();
        let store = cache.compressor(CompressedRows::Indexer);
        let n_visible: Vec<usize> = (1..=n_queries).map(|n| (piece.position + n) / ratio).collect();
        let last = n_visible.last().copied().unwrap_or(0);
        // A recorded pass is repeated when there are more rows.
        let n_rows = if self.single_tokens() && !keep_scores { store.capacity } else { last };
        let mut chosen = CudaChosen { rows: None, top_k, n_visible };
        if n_rows == 0 || (n_rows <= top_k && !keep_scores) {
            return Ok((chosen, Vec::new()));
        }
        let n_heads = head_weights.width;
        let mut scores = self.pool.take::<f32>(n_queries * n_rows, "index scores")?;
        let factor = (1.0 / ((width * n_heads) as f64).sqrt()) as f32;
        let skip = if keep_scores { u32::MAX as usize } else { top_k };
        let queries = queries.rows(&piece.rows);
        let numbers =
            |arguments: Arguments| arguments.int(n_heads).int(n_rows).int(ratio).int(skip).float(factor);
        match &store.rows {
            Rows::Half(rows) if self.rounds_inputs() && n_heads <= TILE_HEADS => {
                // Many blocks read the queries of many tokens: they are rounded first.
                let mut halves = None;
                let (arguments, kind) = if n_queries < TILE_QUERIES {
                    (Arguments::new().read(queries), "float")
                } else {
                    let halves = halves.insert(self.pool.take::<u16>(queries.len(), "index queries")?);
                    let arguments =
                        Arguments::new().read(queries).write(&halves.view_mut()).int(queries.len());
                    self.launch("indexer", "index_halves", Launch::over(queries.len() / 4), arguments)?;
                    (Arguments::new().read(halves.view()), "half")
                };
                let arguments = arguments
                    .read(head_weights.rows(&piece.rows))
                    .read(rows.view())
                    .read(places.positions())
                    .write(&scores.view_mut())
                    .int(n_queries);
                let shared = (2 * TILE_HEADS * (width + 8) * size_of::<u16>()) as u32;
                let shape = Launch::new(n_rows.div_ceil(TILE_ROWS), 256).by(n_queries.div_ceil(TILE_QUERIES));
                let name = format!("index_tiles_{kind}_{width}");
                self.launch("indexer", &name, shape.shared(shared), numbers(arguments))?;
            }
            rows => {
                let arguments = Arguments::new().read(queries).read(head_weights.rows(&piece.rows));
                let arguments = read_rows(arguments, rows).read(places.positions()).write(&scores.view_mut());
                let shared = (n_heads * width * size_of::<f32>()) as u32;
                let shape = Launch::new(n_rows.div_ceil(ROWS_PER_BLOCK), 256).by(n_queries).shared(shared);
                let name = format!("index_scores_{}_{width}", rows.suffix());
                self.launch("indexer", &name, shape, numbers(arguments))?;
            }
        }
        if n_rows > top_k {
            let mut rows = self.pool.take::<u32>(n_queries * top_k, "chosen rows")?;
            let arguments = Arguments::new()
                .read(scores.view())
                .read(places.positions())
                .write(&rows.view_mut())
                .int(n_rows)
                .int(ratio)
                .int(top_k);
            self.launch("indexer", "choose_rows", Launch::new(n_queries, 1024), arguments)?;
            chosen.rows = Some(rows);
        }
        let scores = if keep_scores { self.gpu.device.download(scores.view())? } else { Vec::new() };
        Ok((chosen, scores))
    }

    /// (4.4.4 to 4.4.6)
    #[expect(clippy::too_many_arguments, reason = "the operation's arguments")]
    pub(super) fn attend_rows(
        &self,
        cache: &CudaCache,
        queries: &CudaTensor,
        piece: &Piece,
        places: &RowPlaces<'_, Self>,
        selection: &Selection<CudaChosen>,
        sinks: &CudaVector,
        rope: &CudaRope,
        output: &mut CudaTensor,
    ) -> Result<(), RunnerError> {
        let (kind, top_k, chosen) = match selection {
            Selection::None => (0, 0, None),
            Selection::Visible => (1, 0, None),
            Selection::Rows(chosen) => (2, chosen.top_k, chosen.rows.as_ref()),
        };
        let compressed = (kind != 0).then(|| cache.compressor(CompressedRows::Attention));
        // Most keys of any query that this launch, or a repetition of it, works on.
        let most_rows = match (selection, compressed) {
            (Selection::Rows(chosen), Some(store)) => chosen.top_k.min(store.capacity),
            (_, store) => store.map_or(0, |store| store.capacity),
        };
        let range = piece.rows.start * output.width..piece.rows.end * output.width;
        let attention = Attention {
            queries: queries.rows(&piece.rows),
            window: &cache.stores().window,
            compressed: compressed.map(|store| &store.rows),
            chosen: chosen.map(PoolBuffer::view),
            positions: places.positions(),
            sinks,
            rope,
            n_tokens: piece.rows.len(),
            head_dim: cache.shape.head_dim,
            most_keys: cache.shape.window + most_rows,
            kind,
            ring_mask: self.storage.ring_slots - 1,
            window_tokens: cache.shape.window,
            ratio: cache.shape.ratio,
            top_k,
        };
        let output = output.values.slice_mut(range);
        match (self.rounds_inputs(), attention.window) {
            (true, Rows::Half(_)) if self.single_tokens() => self.attend_by_parts(&attention, output),
            (true, Rows::Half(_)) => self.attend_by_tiles(&attention, output),
            _ => self.attend_plainly(&attention, output),
        }
    }

    /// Many tokens by tensor cores: a block has all keys of some heads.
    fn attend_by_tiles(&self, a: &Attention<'_>, output: ViewMut<'_, f32>) -> Result<(), RunnerError> {
        let bytes = |heads: usize, stages: usize| {
            2 * (heads + stages * TILE_KEYS) * (a.head_dim + 8) + 4 * heads * (TILE_KEYS + 1)
        };
        let (heads, stages, end) = if bytes(TILE_HEADS, 2) <= self.gpu.device.facts().shared_bytes as usize {
            (TILE_HEADS, 2, "")
        } else {
            (SMALL_TILE_HEADS, 1, "_small")
        };
        let arguments = a.finish(a.keys(), &output);
        let arguments = a.numbers(arguments.int(a.n_heads()).int(a.rope.frequencies.len())).float(a.scale());
        let shape = Launch::new(a.n_tokens, 256).by(a.n_heads().div_ceil(heads));
        let name = format!("attend_tiles_{}{end}", a.head_dim);
        self.launch("attention_tiles", &name, shape.shared(bytes(heads, stages) as u32), arguments)
    }

    /// Few tokens by tensor cores: the keys are shared out among blocks.
    fn attend_by_parts(&self, a: &Attention<'_>, output: ViewMut<'_, f32>) -> Result<(), RunnerError> {
        let n_parts = a.most_keys.div_ceil(TILE_KEYS);
        let mut parts = self.parts_of(a, n_parts)?;
        let arguments = a.keys().read(a.positions).write(&parts.view_mut()).int(a.n_heads());
        let arguments = a.numbers(arguments).int(n_parts).float(a.scale());
        let bytes = 2 * (PART_HEADS + TILE_KEYS) * (a.head_dim + 8) + 4 * 8 * PART_HEADS * (TILE_KEYS + 4);
        let mut shape =
            Launch::new(a.n_tokens, 256).by(a.n_heads().div_ceil(PART_HEADS)).shared(bytes as u32);
        shape.grid.2 = n_parts as u32;
        self.launch("attention_tiles", &format!("attend_parts_{}", a.head_dim), shape, arguments)?;
        self.join_parts(a, &parts, n_parts, TILE_KEYS, output)
    }

    /// Any number of tokens in `f32`; for few of them the keys are shared out among blocks.
    fn attend_plainly(&self, a: &Attention<'_>, output: ViewMut<'_, f32>) -> Result<(), RunnerError> {
        let n_parts = a.most_keys.div_ceil(KEYS_PER_PART);
        let mut parts = (a.n_tokens <= SPLIT_TOKENS).then(|| self.parts_of(a, n_parts)).transpose()?;
        let arguments = a.finish(a.keys(), &output);
        let arguments = match &mut parts {
            Some(parts) => arguments.write(&parts.view_mut()),
            None => arguments.null(),
        };
        let arguments = a.numbers(arguments.int(a.n_heads()).int(a.rope.frequencies.len()));
        let arguments = arguments.int(n_parts).float(a.scale());
        let heads = HEADS_PER_BLOCK.min(a.n_heads());
        let mut shape = Launch::new(a.n_tokens, 32 * heads as u32).by(a.n_heads().div_ceil(heads));
        if parts.is_some() {
            shape.grid.2 = n_parts as u32;
        }
        let name = format!("attend_{}_{}", a.window.suffix(), a.head_dim);
        self.launch("attention", &name, shape, arguments)?;
        match parts {
            Some(parts) => self.join_parts(a, &parts, n_parts, KEYS_PER_PART, output),
            None => Ok(()),
        }
    }

    fn parts_of(&self, a: &Attention<'_>, n_parts: usize) -> Result<PoolBuffer<f32>, CudaError> {
        let n_values = a.n_tokens * a.n_heads() * n_parts * (PART_HEADER + a.head_dim);
        self.pool.take(n_values, "parts of attention")
    }

    fn join_parts(
        &self,
        a: &Attention<'_>,
        parts: &PoolBuffer<f32>,
        n_parts: usize,
        keys_per_part: usize,
        output: ViewMut<'_, f32>,
    ) -> Result<(), RunnerError> {
        let arguments = a.finish(Arguments::new().read(parts.view()), &output);
        let arguments = arguments
            .int(a.head_dim)
            .int(a.n_heads())
            .int(a.rope.frequencies.len())
            .int(a.kind)
            .int(a.window_tokens)
            .int(a.ratio)
            .int(a.top_k)
            .int(n_parts)
            .int(keys_per_part);
        let shape = Launch::new(a.n_tokens * a.n_heads(), (a.head_dim / 2) as u32);
        self.launch("attention", "join_parts", shape, arguments)
    }
}

/// What attention reads.
struct Attention<'a> {
    queries: View<'a, f32>,
    window: &'a Rows,
    compressed: Option<&'a Rows>,
    chosen: Option<View<'a, u32>>,
    positions: View<'a, u32>,
    sinks: &'a CudaVector,
    rope: &'a CudaRope,
    n_tokens: usize,
    head_dim: usize,
    /// Keys of any query, at most.
    most_keys: usize,
    /// 0: no compressed rows, 1: all that are visible, 2: those chosen.
    kind: usize,
    ring_mask: usize,
    window_tokens: usize,
    ratio: usize,
    top_k: usize,
}

impl Attention<'_> {
    fn n_heads(&self) -> usize {
        self.sinks.values.len()
    }

    fn scale(&self) -> f32 {
        (1.0 / (self.head_dim as f64).sqrt()) as f32
    }

    /// Queries, window, compressed rows, choice.
    fn keys(&self) -> Arguments {
        let arguments = read_rows(Arguments::new().read(self.queries), self.window);
        let arguments = match self.compressed {
            Some(rows) => read_rows(arguments, rows),
            None => arguments.null(),
        };
        match self.chosen {
            Some(rows) => arguments.read(rows),
            None => arguments.null(),
        }
    }

    /// What is needed behind the softmax, and where the result goes.
    fn finish(&self, arguments: Arguments, output: &ViewMut<'_, f32>) -> Arguments {
        arguments
            .read(self.sinks.values.view())
            .read(self.rope.frequencies.view())
            .read(self.positions)
            .write(output)
    }

    /// Which keys there are.
    fn numbers(&self, arguments: Arguments) -> Arguments {
        arguments.int(self.kind).int(self.ring_mask).int(self.window_tokens).int(self.ratio).int(self.top_k)
    }
}
