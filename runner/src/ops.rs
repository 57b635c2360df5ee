//! The boundary between the model and the machine: about twenty coarse operations.
//!
//! [`crate::forward`] is written against [`Backend`] and knows no device; a backend knows no tensor names
//! and no layers. Every operation works on rows, one a token, and **a row's result depends on that row
//! alone** (and on the sequence's cache): never on its neighbours in the batch, on how a prompt was cut
//! into parts, or on the number of threads. Tests demand equal bits.
//!
//! Section numbers are those of the model's description in the documentation of [`crate::forward`].

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, MutexGuard};

use crate::error::RunnerError;
use crate::weights::WeightSource;

pub use crate::operands::{
    ActivationPrecision, CacheShape, CompressedRows, Compressor, ExpertTap, GatedFfn, HyperConnection,
    HyperConstants, MatrixPlace, Mix, NewCompressed, NewRows, Numerics, Piece, Queries, Recorded, Rope,
    RouterRule, Routing, RowPlaces, Selection, SharedTap, SlowedPairs, SublayerInput, Work,
};

/// A machine that computes the model's operations.
///
/// Tensors are `f32`, `[tokens, width]`. Numeric contract: multiplications and additions in `f32`, in an order
/// that depends on the widths alone; sums of squares, softmax denominators and the like may be wider.
///
/// What depends on the data (token ids, positions, the router's and the indexer's choice) stays where the backend
/// computes: a pass over one token can be recorded once and repeated for every next one, see [`Backend::record`].
///
/// Operations that read weights fail if the source cannot give them: data that are not in the file, or values in a
/// checkpoint that are not finite. Any operation fails if the device does.
#[expect(clippy::missing_errors_doc, reason = "one reason for all, in the trait's documentation")]
pub trait Backend: Send + Sync {
    /// Name for reports.
    const NAME: &'static str;
    /// Activations, `[tokens, width]`.
    type Tensor: Send;
    /// Weights `[rows, columns]` in whatever type the source holds.
    type Matrix: Send + Sync;
    /// The routed experts of a layer.
    type Experts: Send + Sync;
    /// A few `f32` weights.
    type Vector: Send + Sync;
    /// Rotary frequencies.
    type Rope: Send + Sync;
    /// [`RouterRule`].
    type RouterRule: Send + Sync;
    /// Token ids and positions of a batch.
    type Places: Send;
    /// Compressed rows that the indexer chose for each query.
    type Chosen: Send;
    /// [`Routing`].
    type Routing: Send;
    /// What one layer keeps of one sequence, (5.1).
    type Cache: Send;
    /// A pass that can be repeated.
    type Recording: Send;

    // Loading and moving.

    /// Waits for the caller's turn, if one caller at a time may compute, and readies the calling thread.
    fn turn(&self, work: Work) -> Result<Option<MutexGuard<'_, ()>>, RunnerError>;
    /// Makes a matrix of the source usable.
    fn matrix(&self, source: &Arc<dyn WeightSource>, place: MatrixPlace)
    -> Result<Self::Matrix, RunnerError>;
    /// Makes the routed experts of a layer usable; each list has one place an expert.
    fn experts(
        &self,
        source: &Arc<dyn WeightSource>,
        places: &GatedFfn<Vec<MatrixPlace>>,
    ) -> Result<Self::Experts, RunnerError>;
    /// Makes a vector usable.
    fn vector(&self, values: Vec<f32>) -> Result<Self::Vector, RunnerError>;
    /// Makes rotary frequencies usable.
    fn rope(&self, rope: Rope) -> Result<Self::Rope, RunnerError>;
    /// Makes a router's rule usable.
    fn router_rule(&self, rule: RouterRule) -> Result<Self::RouterRule, RunnerError>;
    /// Token ids and positions of a batch.
    fn places(&self, tokens: &[u32], positions: &[usize]) -> Result<Self::Places, RunnerError>;
    /// Overwrites places with others of as many rows, where they are.
    fn set_places(
        &self,
        places: &mut Self::Places,
        tokens: &[u32],
        positions: &[usize],
    ) -> Result<(), RunnerError>;
    /// An empty cache, without room.
    fn cache(&self, shape: CacheShape) -> Self::Cache;
    /// Makes room for `n_tokens` in all. Says whether the cache moved, which ends recordings that use it.
    fn reserve(&self, cache: &mut Self::Cache, n_tokens: usize) -> Result<bool, RunnerError>;
    /// A copy of a cache that `n_tokens` went into.
    fn copy_cache(&self, cache: &Self::Cache, n_tokens: usize) -> Result<Self::Cache, RunnerError>;
    /// Overwrites a cache with a copy. Says whether the cache moved.
    fn restore_cache(
        &self,
        cache: &mut Self::Cache,
        copy: &Self::Cache,
        n_tokens: usize,
    ) -> Result<bool, RunnerError>;
    /// Keeps what a batch that follows `n_tokens` tokens overwrites, for the case that it fails.
    fn keep(&self, _cache: &mut Self::Cache, _n_tokens: usize) -> Result<(), RunnerError> {
        Ok(())
    }
    /// Makes the cache what it was at the latest [`Backend::keep`]. Nothing is done where no batch can fail that might
    /// succeed another time.
    fn return_to_kept(&self, _cache: &mut Self::Cache) -> Result<(), RunnerError> {
        Ok(())
    }
    /// Bytes that the cache takes.
    fn cache_bytes(&self, cache: &Self::Cache) -> usize;
    /// Records what `pass` would do, or runs it, if this backend records nothing. All memory that `pass` takes must
    /// have been taken by a pass of the same shape before.
    fn record(
        &self,
        pass: &mut dyn FnMut() -> Result<Self::Tensor, RunnerError>,
    ) -> Result<Recorded<Self::Tensor, Self::Recording>, RunnerError>;
    /// Does what was recorded, with what places and caches hold now; gives the pass's result.
    fn repeat<'a>(&self, recording: &'a Self::Recording) -> Result<&'a Self::Tensor, RunnerError>;
    /// Values of the host, `[tokens, width]`.
    fn host_values(&self, width: usize, values: Vec<f32>) -> Result<Self::Tensor, RunnerError>;
    /// Does work that may run beside what is queued after it, until [`Backend::together`]. It must not touch what that
    /// other work writes.
    fn beside(&self, work: &mut dyn FnMut() -> Result<(), RunnerError>) -> Result<(), RunnerError> {
        work()
    }
    /// What comes after this sees the results of all work before.
    fn together(&self) -> Result<(), RunnerError> {
        Ok(())
    }
    /// Zeros, `[tokens, width]`.
    fn zeros(&self, tokens: usize, width: usize) -> Result<Self::Tensor, RunnerError>;
    /// `[tokens, width]`, every value of which will be written before any is read.
    fn room(&self, tokens: usize, width: usize) -> Result<Self::Tensor, RunnerError> {
        self.zeros(tokens, width)
    }
    /// The values on the host.
    fn read<'a>(&self, tensor: &'a Self::Tensor) -> Result<Cow<'a, [f32]>, RunnerError>;
    /// The routing on the host.
    fn read_routing<'a>(&self, routing: &'a Self::Routing) -> Result<Cow<'a, Routing>, RunnerError>;
    /// The chosen rows of each query on the host, ascending.
    fn read_chosen<'a>(&self, chosen: &'a Self::Chosen) -> Result<Cow<'a, [Vec<u32>]>, RunnerError>;
    /// A copy of some rows.
    fn rows(&self, tensor: &Self::Tensor, rows: Range<usize>) -> Result<Self::Tensor, RunnerError>;
    /// Writes all rows of `part` over those of `tensor` from `first` on.
    fn put_rows(
        &self,
        tensor: &mut Self::Tensor,
        first: usize,
        part: &Self::Tensor,
    ) -> Result<(), RunnerError>;
    /// The first value that is NaN or infinite: row, column, value.
    fn first_not_finite(&self, tensor: &Self::Tensor) -> Result<Option<(usize, usize, f32)>, RunnerError>;

    // The residual streams.

    /// (4.1) Rows of the table, each copied to all streams: `[tokens, M * D]`.
    fn embed(
        &self,
        table: &Self::Matrix,
        places: RowPlaces<'_, Self>,
        n_streams: usize,
    ) -> Result<Self::Tensor, RunnerError>;
    /// (3.6) `hc_pre`, then (3.1) the norm: the sub-layer's input `[tokens, D]` before and behind the norm, and how its
    /// output will be mixed in.
    fn hc_pre(
        &self,
        streams: &Self::Tensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &Self::Vector,
    ) -> Result<SublayerInput<Self>, RunnerError>;
    /// (3.6) `hc_post`: mixes the sub-layer's output, the sum of `output` and `second`, into the streams.
    fn hc_post(
        &self,
        streams: &mut Self::Tensor,
        output: &Self::Tensor,
        second: Option<&Self::Tensor>,
        mix: &Mix<Self>,
    ) -> Result<(), RunnerError>;
    /// [`Backend::hc_post`], then [`Backend::hc_pre`] of the sub-layer that follows.
    #[expect(clippy::too_many_arguments, reason = "those of two operations")]
    fn hc_turn(
        &self,
        streams: &mut Self::Tensor,
        output: &Self::Tensor,
        second: Option<&Self::Tensor>,
        mix: &Mix<Self>,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &Self::Vector,
    ) -> Result<SublayerInput<Self>, RunnerError> {
        self.hc_post(streams, output, second, mix)?;
        self.hc_pre(streams, weights, constants, norm)
    }
    /// (3.6) `hc_head`, then (3.1) the norm: the streams merged, before and behind the norm, `[tokens, D]`.
    fn hc_head(
        &self,
        streams: &Self::Tensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &Self::Vector,
    ) -> Result<(Self::Tensor, Self::Tensor), RunnerError>;

    // Matrices and norms.

    /// (3.1) RMS norm with weights.
    fn rms_norm(
        &self,
        input: &Self::Tensor,
        weights: &Self::Vector,
        epsilon: f32,
    ) -> Result<Self::Tensor, RunnerError>;
    /// All products `matrix x` of matrices that share an input.
    fn linear_many(
        &self,
        input: &Self::Tensor,
        matrices: &[&Self::Matrix],
    ) -> Result<Vec<Self::Tensor>, RunnerError>;
    /// [`Backend::rms_norm`], then [`Backend::linear_many`], with their bits.
    fn normed_linear_many(
        &self,
        input: &Self::Tensor,
        weights: &Self::Vector,
        epsilon: f32,
        matrices: &[&Self::Matrix],
    ) -> Result<Vec<Self::Tensor>, RunnerError> {
        self.linear_many(&self.rms_norm(input, weights, epsilon)?, matrices)
    }
    /// (4.4.7) The input's columns and the matrix's rows cut into `groups`; group by group one product.
    fn linear_grouped(
        &self,
        input: &Self::Tensor,
        matrix: &Self::Matrix,
        groups: usize,
    ) -> Result<Self::Tensor, RunnerError>;
    /// Adds `other` to `tensor`.
    fn add(&self, tensor: &mut Self::Tensor, other: &Self::Tensor) -> Result<(), RunnerError>;
    /// Steering: `y -= scale * d * (d . y)` for each row `y`.
    fn project_out(
        &self,
        tensor: &mut Self::Tensor,
        direction: &Self::Vector,
        scale: f32,
    ) -> Result<(), RunnerError>;

    // Attention.

    /// (4.4.2) Unweighted RMS norm of each head, then rotation; (4.6) of the indexer's rotation, then Hadamard rotation and
    /// rounding.
    fn finish_queries(
        &self,
        queries: Queries<'_, Self>,
        rope: &Self::Rope,
        places: RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError>;
    /// (4.4.3) Rotation of key-value rows, then rounding (section 7).
    fn kv_finish(
        &self,
        rows: &mut Self::Tensor,
        rope: &Self::Rope,
        places: RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError>;
    /// Appends the piece's key-value rows to the window of its cache.
    fn append_window(
        &self,
        cache: &mut Self::Cache,
        rows: &Self::Tensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
    ) -> Result<(), RunnerError>;
    /// (4.5) Pushes the piece's tokens into a compressor and emits every row that is complete.
    #[expect(clippy::too_many_arguments, reason = "one coarse operation")]
    fn compress(
        &self,
        cache: &mut Self::Cache,
        target: CompressedRows,
        values: &Self::Tensor,
        gates: &Self::Tensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        weights: &Compressor<Self>,
        rope: &Self::Rope,
        epsilon: f32,
        numerics: Numerics,
    ) -> Result<(), RunnerError>;
    /// [`Backend::finish_queries`], and all that a piece adds to its cache, [`Backend::rms_norm`] and
    /// [`Backend::kv_finish`] of its key-value rows, [`Backend::append_window`] and each [`Backend::compress`], in one step
    /// with the same bits, if the backend has one for such a piece. Says whether it was done.
    ///
    /// # Errors
    /// If the backend fails.
    #[expect(clippy::too_many_arguments, reason = "one coarse operation")]
    fn finish_at_once(
        &self,
        queries: Queries<'_, Self>,
        cache: &mut Self::Cache,
        rows: &NewRows<'_, Self>,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        rope: &Self::Rope,
        numerics: Numerics,
    ) -> Result<bool, RunnerError> {
        let _ = (queries, cache, rows, piece, places, rope, numerics);
        Ok(false)
    }
    /// (4.6.6, 4.6.7) Scores the visible rows and picks the best `top_k`: higher score first, then lower index.
    /// `head_weights`: `[tokens, heads]`, unscaled. With `keep_scores` the scores of all rows of the cache come
    /// along, `[queries, rows]`, minus infinity where a row is not visible.
    #[expect(clippy::too_many_arguments, reason = "one coarse operation")]
    fn index_topk(
        &self,
        cache: &Self::Cache,
        queries: &Self::Tensor,
        head_weights: &Self::Tensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        top_k: usize,
        keep_scores: bool,
    ) -> Result<(Self::Chosen, Vec<f32>), RunnerError>;
    /// (4.4.4 to 4.4.6) Attention of the piece's queries over window and chosen rows, with sinks and inverse rotation.
    /// Writes the piece's rows of `output`, `[tokens, heads * head_dim]`.
    #[expect(clippy::too_many_arguments, reason = "one coarse operation")]
    fn attend(
        &self,
        cache: &Self::Cache,
        queries: &Self::Tensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        selection: &Selection<Self::Chosen>,
        sinks: &Self::Vector,
        rope: &Self::Rope,
        output: &mut Self::Tensor,
    ) -> Result<(), RunnerError>;
    /// Drops window rows that no later query sees. Called once a piece was attended to.
    fn trim_window(&self, cache: &mut Self::Cache);

    // Experts.

    /// (4.7.1 to 4.7.3) Chooses experts and their weights from the router's logits.
    fn route(
        &self,
        logits: &Self::Tensor,
        rule: &Self::RouterRule,
        places: RowPlaces<'_, Self>,
        n_used: usize,
        scaling_factor: f32,
    ) -> Result<Self::Routing, RunnerError>;
    /// (4.7.4) Weighted sum of the routed experts, in the router's order. The route weight is applied before `down`.
    fn routed_experts(
        &self,
        input: &Self::Tensor,
        routing: &Self::Routing,
        experts: &Self::Experts,
        limit: f32,
        tap: Option<&mut ExpertTap<'_>>,
    ) -> Result<Self::Tensor, RunnerError>;
    /// (4.7.5) The shared expert. `tap` is shown the input of `down`.
    fn shared_expert(
        &self,
        input: &Self::Tensor,
        expert: &GatedFfn<Self::Matrix>,
        limit: f32,
        tap: Option<&mut SharedTap<'_>>,
    ) -> Result<Self::Tensor, RunnerError>;
}
