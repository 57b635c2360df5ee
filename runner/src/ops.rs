//! The boundary between the model and the machine: about twenty coarse operations.
//!
//! [`crate::forward`] is written against [`Backend`] and knows no device; a backend knows no tensor names
//! and no layers. Every operation works on rows, one a token, and **a row's result depends on that row
//! alone** (and on the sequence's cache): never on its neighbours in the batch, on how a prompt was cut
//! into parts, or on the number of threads. Tests demand equal bits.
//!
//! Section numbers are those of the model's description in the documentation of [`crate::forward`].

use std::ops::Range;
use std::sync::Arc;

use crate::error::RunnerError;
use crate::weights::WeightSource;

/// Whether the rounding that the official code simulates takes place.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Numerics {
    /// No activation is rounded: the float reference, for comparison with other float implementations.
    Exact,
    /// Key-value rows rounded to FP8, indexer queries and rows rotated and rounded to FP4,
    /// as in the official code, with which the model was trained.
    #[default]
    Official,
}

impl Numerics {
    /// Every mode with the name users type and reports store.
    pub const NAMES: [(&'static str, Self); 2] = [("exact", Self::Exact), ("official", Self::Official)];

    /// The name users type and reports store.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

/// Precision of a matrix's input where the matrix is quantized.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ActivationPrecision {
    /// Inputs stay `f32`, and weights are widened to `f32`: the reference.
    #[default]
    F32,
    /// Inputs of quantized matrices are rounded to 8 bits, which makes the products integer: faster, less exact.
    /// Rounding takes place where ggml's CPU code does it: inputs of F16 and BF16 matrices are rounded to those types,
    /// those of F32 matrices stay as they are.
    Int8,
}

impl ActivationPrecision {
    /// Every precision with the name users type and reports store.
    pub const NAMES: [(&'static str, Self); 2] = [("f32", Self::F32), ("int8", Self::Int8)];

    /// The name users type and reports store.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }
}

/// Rotary frequencies of a layer, (3.2): `[rotary width / 2]`, radians per position.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// `f_i` of pair `i`.
    pub frequencies: Vec<f32>,
}

/// Tokens of one sequence that follow each other, as rows of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Rows of the tensors at hand.
    pub rows: Range<usize>,
    /// Index of the sequence, and so of its cache.
    pub sequence: usize,
    /// Position of the first row's token in the sequence.
    pub position: usize,
}

/// Which compressed rows each query attends to besides its window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// None: a window-only layer.
    None,
    /// All that are visible.
    Visible,
    /// For each query of the piece its rows, ascending.
    Rows(Vec<Vec<u32>>),
}

/// What [`Backend::index_topk`] found.
#[derive(Debug, Clone)]
pub struct Indexed {
    /// Chosen rows of each query, ascending.
    pub chosen: Vec<Vec<u32>>,
    /// If asked for: scores of all rows of the cache, `[queries, rows]`; invisible rows are minus infinity.
    pub scores: Vec<f32>,
}

/// The router's choice for every token, in its own order: descending score, or the table's.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Routing {
    /// Experts a token.
    pub n_used: usize,
    /// `[tokens, n_used]`.
    pub experts: Vec<u32>,
    /// Weights with which their outputs are summed, scaling factor included, same shape.
    pub weights: Vec<f32>,
}

/// How a layer picks experts, (4.7.2).
#[derive(Debug, Clone)]
pub enum RouterRule {
    /// By token id: `[vocabulary, n_used]`.
    Hash(Arc<[i32]>),
    /// The largest scores plus these biases, `[n_experts]`.
    Bias(Arc<[f32]>),
}

/// Widths of one layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Tokens per compressed row: 0 (none), 4 (overlapping, with indexer rows) or 128.
    pub ratio: usize,
    /// Tokens that stay in the window.
    pub window: usize,
    /// Width of key-value rows.
    pub head_dim: usize,
    /// Width of indexer rows.
    pub index_head_dim: usize,
}

/// The two compressors of a ratio-4 layer keep separate states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompressedRows {
    /// Rows that attention reads.
    Attention,
    /// Rows that the indexer scores.
    Indexer,
}

/// Weights of a hyper-connection, (3.6). `n` is `(2 + M) * M`, or `M` for the head's.
pub struct HyperConnection<B: Backend + ?Sized> {
    /// Mixing matrix, `[n, M * D]`.
    pub mixer: B::Matrix,
    /// Factors of the pre, post and comb parts, `[3]`, or `[1]` for the head's.
    pub scale: B::Vector,
    /// `[n]`.
    pub base: B::Vector,
}

/// Constants of the hyper-connections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperConstants {
    /// `M`.
    pub n_streams: usize,
    /// Passes of the Sinkhorn normalisation.
    pub sinkhorn_iterations: usize,
    /// Added to weights and sums.
    pub epsilon: f32,
    /// Added to the mean square.
    pub rms_epsilon: f32,
}

/// What [`Backend::hc_pre`] leaves for [`Backend::hc_post`].
pub struct Mix<B: Backend + ?Sized> {
    /// `[tokens, M]`.
    pub post: B::Tensor,
    /// `[tokens, M * M]`, `[old, new]`.
    pub comb: B::Tensor,
}

/// Weights of a compressor, (4.5), without its two projections.
pub struct Compressor<B: Backend + ?Sized> {
    /// Added to the gates by position in the window, `[ratio, width]`.
    pub position_bias: B::Vector,
    /// Norm of the finished row.
    pub norm: B::Vector,
}

/// A SwiGLU network, or one of them for every expert, (3.4).
pub struct GatedFfn<M> {
    /// `[width, D]`.
    pub gate: M,
    /// `[width, D]`.
    pub up: M,
    /// `[D, width]`.
    pub down: M,
}

/// Where a matrix lies in its source: rows of a tensor whose outer dimensions are folded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixPlace {
    /// Index that [`WeightSource::find`] gave.
    pub tensor: usize,
    /// First row of the tensor.
    pub first_row: usize,
    /// Rows of the matrix.
    pub rows: usize,
    /// Values a row.
    pub columns: usize,
}

/// Called with one expert's work, see [`crate::observe::ExpertObservation`]:
/// expert, rows, route weights, gathered inputs, mids.
pub type ExpertTap<'a> = dyn FnMut(usize, &[usize], &[f32], &[f32], &[f32]) + 'a;

/// A machine that computes the model's operations.
///
/// Tensors are `f32`, `[tokens, width]`. Numeric contract: multiplications and additions in `f32`, in an order
/// that depends on the widths alone; sums of squares, softmax denominators and the like may be wider.
///
/// Operations that read weights fail if the source cannot give them: data that are not in the file, or values in a
/// checkpoint that are not finite.
#[expect(clippy::missing_errors_doc, reason = "one reason for all, in the trait's documentation")]
pub trait Backend: Send + Sync {
    /// Activations, `[tokens, width]`.
    type Tensor: Send;
    /// Weights `[rows, columns]` in whatever type the source holds.
    type Matrix: Send + Sync;
    /// A few `f32` weights.
    type Vector: Send + Sync;
    /// What one layer keeps of one sequence, (5.1).
    type Cache: Clone + Send;

    // Loading and moving.

    /// Makes a matrix of the source usable.
    fn matrix(&self, source: &Arc<dyn WeightSource>, place: MatrixPlace)
    -> Result<Self::Matrix, RunnerError>;
    /// Makes a vector usable.
    fn vector(&self, values: Vec<f32>) -> Self::Vector;
    /// An empty cache.
    fn cache(&self, shape: CacheShape) -> Self::Cache;
    /// Tokens that went into the cache.
    fn cached_tokens(&self, cache: &Self::Cache) -> usize;
    /// Bytes that the cache takes.
    fn cache_bytes(&self, cache: &Self::Cache) -> usize;
    /// Zeros, `[tokens, width]`.
    fn zeros(&self, tokens: usize, width: usize) -> Self::Tensor;
    /// The values on the host.
    fn read<'a>(&self, tensor: &'a Self::Tensor) -> std::borrow::Cow<'a, [f32]>;
    /// A copy of some rows.
    fn rows(&self, tensor: &Self::Tensor, rows: Range<usize>) -> Self::Tensor;
    /// Writes all rows of `part` over those of `tensor` from `first` on.
    fn put_rows(&self, tensor: &mut Self::Tensor, first: usize, part: &Self::Tensor);
    /// The first value that is NaN or infinite: row, column, value.
    fn first_not_finite(&self, tensor: &Self::Tensor) -> Option<(usize, usize, f32)>;

    // The residual streams.

    /// (4.1) Rows of the table, each copied to all streams: `[tokens, M * D]`.
    fn embed(
        &self,
        table: &Self::Matrix,
        tokens: &[u32],
        n_streams: usize,
    ) -> Result<Self::Tensor, RunnerError>;
    /// (3.6) `hc_pre`: the sub-layer's input `[tokens, D]`, and how its output will be mixed in.
    fn hc_pre(
        &self,
        streams: &Self::Tensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
    ) -> Result<(Self::Tensor, Mix<Self>), RunnerError>;
    /// (3.6) `hc_post`: mixes the sub-layer's output into the streams.
    fn hc_post(&self, streams: &mut Self::Tensor, output: &Self::Tensor, mix: &Mix<Self>);
    /// (3.6) `hc_head`: the streams merged, `[tokens, D]`.
    fn hc_head(
        &self,
        streams: &Self::Tensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
    ) -> Result<Self::Tensor, RunnerError>;

    // Matrices and norms.

    /// (3.1) RMS norm with weights.
    fn rms_norm(&self, input: &Self::Tensor, weights: &Self::Vector, epsilon: f32) -> Self::Tensor;
    /// All products `matrix x` of matrices that share an input.
    fn linear_many(
        &self,
        input: &Self::Tensor,
        matrices: &[&Self::Matrix],
    ) -> Result<Vec<Self::Tensor>, RunnerError>;
    /// (4.4.7) The input's columns and the matrix's rows cut into `groups`; group by group one product.
    fn linear_grouped(
        &self,
        input: &Self::Tensor,
        matrix: &Self::Matrix,
        groups: usize,
    ) -> Result<Self::Tensor, RunnerError>;
    /// Adds `other` to `tensor`.
    fn add(&self, tensor: &mut Self::Tensor, other: &Self::Tensor);
    /// Steering: `y -= scale * d * (d . y)` for each row `y`.
    fn project_out(&self, tensor: &mut Self::Tensor, direction: &[f32], scale: f32);

    // Attention.

    /// (4.4.2) Unweighted RMS norm of each head, then rotation. `positions`: one a row.
    fn q_finish(
        &self,
        queries: &mut Self::Tensor,
        head_dim: usize,
        epsilon: f32,
        rope: &Rope,
        positions: &[usize],
    );
    /// (4.4.3) Rotation of key-value rows, then rounding (section 7).
    fn kv_finish(&self, rows: &mut Self::Tensor, rope: &Rope, positions: &[usize], numerics: Numerics);
    /// (4.6) Rotation of indexer queries, then Hadamard rotation and rounding.
    fn index_finish(
        &self,
        queries: &mut Self::Tensor,
        head_dim: usize,
        rope: &Rope,
        positions: &[usize],
        numerics: Numerics,
    );
    /// Appends the piece's key-value rows to the window of its cache.
    fn append_window(&self, cache: &mut Self::Cache, rows: &Self::Tensor, piece: &Piece);
    /// (4.5) Pushes the piece's tokens into a compressor and emits every row that is complete.
    #[expect(clippy::too_many_arguments, reason = "one coarse operation")]
    fn compress(
        &self,
        cache: &mut Self::Cache,
        target: CompressedRows,
        values: &Self::Tensor,
        gates: &Self::Tensor,
        piece: &Piece,
        weights: &Compressor<Self>,
        rope: &Rope,
        epsilon: f32,
        numerics: Numerics,
    );
    /// (4.6.6, 4.6.7) Scores the visible rows and picks the best `top_k`: higher score first, then lower index.
    /// `head_weights`: `[tokens, heads]`, unscaled.
    fn index_topk(
        &self,
        cache: &Self::Cache,
        queries: &Self::Tensor,
        head_weights: &Self::Tensor,
        piece: &Piece,
        top_k: usize,
        keep_scores: bool,
    ) -> Indexed;
    /// (4.4.4 to 4.4.6) Attention of the piece's queries over window and chosen rows, with sinks and inverse rotation.
    /// Writes the piece's rows of `output`, `[tokens, heads * head_dim]`.
    #[expect(clippy::too_many_arguments, reason = "one coarse operation")]
    fn attend(
        &self,
        cache: &Self::Cache,
        queries: &Self::Tensor,
        piece: &Piece,
        selection: &Selection,
        sinks: &Self::Vector,
        rope: &Rope,
        output: &mut Self::Tensor,
    );
    /// Drops window rows that no later query sees. Called once a piece was attended to.
    fn trim_window(&self, cache: &mut Self::Cache);

    // Experts.

    /// (4.7.1 to 4.7.3) Chooses experts and their weights from the router's logits.
    fn route(
        &self,
        logits: &Self::Tensor,
        rule: &RouterRule,
        tokens: &[u32],
        n_used: usize,
        scaling_factor: f32,
    ) -> Routing;
    /// (4.7.4) Weighted sum of the routed experts, in the router's order. The route weight is applied before `down`.
    fn routed_experts(
        &self,
        input: &Self::Tensor,
        routing: &Routing,
        experts: &GatedFfn<Vec<Self::Matrix>>,
        limit: f32,
        tap: Option<&mut ExpertTap<'_>>,
    ) -> Result<Self::Tensor, RunnerError>;
    /// (4.7.5) The shared expert.
    fn shared_expert(
        &self,
        input: &Self::Tensor,
        expert: &GatedFfn<Self::Matrix>,
        limit: f32,
    ) -> Result<Self::Tensor, RunnerError>;
}
