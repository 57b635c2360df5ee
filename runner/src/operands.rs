//! What operations are given: rules, shapes, places and weights that belong together.

use std::ops::Range;
use std::sync::Arc;

use crate::ops::Backend;

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
    /// As `Int8`, and every sum in the order of ggml's plain C code: gives the logits of llama.cpp built without vector
    /// instructions, bit for bit. For comparisons: slow.
    PlainGgml,
    /// As the GPU does it fastest: in batches inputs and weights are rounded to `f16`; for single tokens inputs of
    /// routed experts are rounded to 8 bits and those of dense Q8_0 matrices to 23 below the largest of 16; all others stay
    /// `f32`.
    Mixed,
}

impl ActivationPrecision {
    /// Every precision with the name users type and reports store.
    pub const NAMES: [(&'static str, Self); 4] =
        [("f32", Self::F32), ("int8", Self::Int8), ("plain-ggml", Self::PlainGgml), ("mixed", Self::Mixed)];

    /// Whether a CPU computes in this precision.
    pub fn runs_on_cpu(self) -> bool {
        matches!(self, Self::F32 | Self::Int8 | Self::PlainGgml)
    }

    /// Whether the inputs of matrices are rounded where ggml's CPU code rounds them.
    pub fn rounds_as_ggml(self) -> bool {
        matches!(self, Self::Int8 | Self::PlainGgml)
    }

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
    /// What they were made of: pair `i` makes `base^(-i / pairs)` radians a position.
    pub base: f32,
    /// Which pairs were slowed.
    pub slowed: Option<SlowedPairs>,
}

/// YaRN's slowing of the pairs that turn slowest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlowedPairs {
    /// How much slower.
    pub factor: f32,
    /// Up to here pairs keep their frequency.
    pub first_slowed: f32,
    /// From here on all are slower by the whole factor.
    pub all_slowed: f32,
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

/// Which compressed rows each query attends to besides its window. `C`: the backend's [`Backend::Chosen`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection<C> {
    /// None: a window-only layer.
    None,
    /// All that are visible.
    Visible,
    /// For each query of the piece those that the indexer chose.
    Rows(C),
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
    /// Added to the mean square, by the norms too.
    pub rms_epsilon: f32,
}

/// What [`Backend::hc_pre`] leaves for [`Backend::hc_post`].
pub struct Mix<B: Backend + ?Sized> {
    /// `[tokens, M]`.
    pub post: B::Tensor,
    /// `[tokens, M * M]`, `[old, new]`.
    pub comb: B::Tensor,
}

/// What [`Backend::hc_pre`] gives.
pub struct SublayerInput<B: Backend + ?Sized> {
    /// The streams merged, `[tokens, D]`.
    pub merged: B::Tensor,
    /// That behind the norm.
    pub normed: B::Tensor,
    /// How the sub-layer's output will be mixed in.
    pub mix: Mix<B>,
}

/// Weights of a compressor, (4.5), without its two projections.
pub struct Compressor<B: Backend + ?Sized> {
    /// Added to the gates by position in the window, `[ratio, width]`.
    pub position_bias: B::Vector,
    /// Norm of the finished row.
    pub norm: B::Vector,
}

/// Queries behind their products.
pub struct Queries<'a, B: Backend + ?Sized> {
    /// `[tokens, H * head_dim]`.
    pub heads: &'a mut B::Tensor,
    /// Values of a head.
    pub head_dim: usize,
    /// Of the norm.
    pub epsilon: f32,
    /// Those of the indexer, if there is one, with the width of their heads.
    pub index: Option<(&'a mut B::Tensor, usize)>,
}

impl<B: Backend + ?Sized> Queries<'_, B> {
    /// The same for a shorter time.
    pub fn again(&mut self) -> Queries<'_, B> {
        let index = self.index.as_mut().map(|(queries, width)| (&mut **queries, *width));
        Queries { heads: self.heads, head_dim: self.head_dim, epsilon: self.epsilon, index }
    }
}

/// What a layer's cache gets of one token, (4.4.3), (4.5): products of the layer's input, `[tokens, ..]`, with what turns
/// them into rows.
pub struct NewRows<'a, B: Backend + ?Sized> {
    /// `[tokens, d]`.
    pub key_value: &'a B::Tensor,
    /// Norm of those.
    pub norm: &'a B::Vector,
    /// Of this norm and those of compressors.
    pub epsilon: f32,
    /// What goes through the layer's compressors.
    pub compressed: Vec<NewCompressed<'a, B>>,
}

/// What a compressor gets of new tokens.
pub struct NewCompressed<'a, B: Backend + ?Sized> {
    /// What its rows are for.
    pub target: CompressedRows,
    /// Its weights.
    pub weights: &'a Compressor<B>,
    /// `[tokens, width]`.
    pub values: &'a B::Tensor,
    /// As wide.
    pub gates: &'a B::Tensor,
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
    /// Index that [`WeightSource::find`](crate::weights::WeightSource::find) gave.
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

/// Token ids and positions of the rows at hand, where the device reads them.
pub struct RowPlaces<'a, B: Backend + ?Sized> {
    /// Token ids and positions of the whole batch.
    pub batch: &'a B::Places,
    /// The rows of the batch that are at hand.
    pub rows: Range<usize>,
}

impl<B: Backend + ?Sized> Clone for RowPlaces<'_, B> {
    fn clone(&self) -> Self {
        Self { batch: self.batch, rows: self.rows.clone() }
    }
}

impl<'a, B: Backend + ?Sized> RowPlaces<'a, B> {
    /// Some of the rows; `rows` counts from the first of these.
    #[must_use]
    pub fn part(&self, rows: &Range<usize>) -> RowPlaces<'a, B> {
        RowPlaces { batch: self.batch, rows: self.rows.start + rows.start..self.rows.start + rows.end }
    }
}

/// What a caller is about to compute. Backends may round differently for the two, but never by the number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Texts and prompts, in parts of any size.
    Batch,
    /// One token after the other.
    Token,
}

/// What became of a pass that was to be recorded.
pub enum Recorded<T, R> {
    /// It was run, with this result.
    Ran(T),
    /// It was not run: it waits to be repeated.
    Kept(R),
}
/// Called with the inputs of the shared expert's down projection, one row a token.
pub type SharedTap<'a> = dyn FnMut(&[f32]) + 'a;
