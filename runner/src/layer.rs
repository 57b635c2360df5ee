//! Weights of one layer.

use std::sync::Arc;

use crate::ops::{Backend, Compressor, GatedFfn, HyperConnection};

/// A compressor with its projections, (4.5). `e`: width of its rows, doubled where windows overlap.
pub(crate) struct CompressorWeights<B: Backend> {
    /// `[e or 2e, D]`.
    pub(crate) values: B::Matrix,
    /// `[e or 2e, D]`.
    pub(crate) gates: B::Matrix,
    pub(crate) rest: Compressor<B>,
}

/// The lightning indexer of a ratio-4 layer, (4.6).
pub(crate) struct IndexerWeights<B: Backend> {
    /// `[index heads * index width, q_lora]`.
    pub(crate) queries: B::Matrix,
    /// `[index heads, D]`.
    pub(crate) head_weights: B::Matrix,
    pub(crate) compressor: CompressorWeights<B>,
}

/// Attention of one layer, (4.4).
pub(crate) struct AttentionWeights<B: Backend> {
    /// `[q_lora, D]`.
    pub(crate) q_a: B::Matrix,
    pub(crate) q_norm: B::Vector,
    /// `[H * d, q_lora]`.
    pub(crate) q_b: B::Matrix,
    /// `[d, D]`.
    pub(crate) kv: B::Matrix,
    pub(crate) kv_norm: B::Vector,
    /// `[H]`.
    pub(crate) sinks: B::Vector,
    /// `[G * o_lora, H * d / G]`.
    pub(crate) output_a: B::Matrix,
    /// `[D, G * o_lora]`.
    pub(crate) output_b: B::Matrix,
    pub(crate) compressor: Option<CompressorWeights<B>>,
    pub(crate) indexer: Option<IndexerWeights<B>>,
    pub(crate) rope: Arc<B::Rope>,
}

impl<B: Backend> AttentionWeights<B> {
    /// All matrices that the layer's input is multiplied with.
    pub(crate) fn inputs(&self) -> Vec<&B::Matrix> {
        let mut matrices = vec![&self.q_a, &self.kv];
        matrices.extend(self.compressor.iter().flat_map(|c| [&c.values, &c.gates]));
        matrices.extend(
            self.indexer.iter().flat_map(|i| [&i.compressor.values, &i.compressor.gates, &i.head_weights]),
        );
        matrices
    }
}

/// Router and experts of one layer, (4.7).
pub(crate) struct FfnWeights<B: Backend> {
    /// `[E, D]`.
    pub(crate) router: B::Matrix,
    pub(crate) rule: B::RouterRule,
    /// `E` of `[F, D]`, `[F, D]`, `[D, F]`.
    pub(crate) experts: B::Experts,
    pub(crate) shared: GatedFfn<B::Matrix>,
}

/// One layer.
pub(crate) struct Layer<B: Backend> {
    pub(crate) attention_mix: HyperConnection<B>,
    pub(crate) attention_norm: B::Vector,
    pub(crate) attention: AttentionWeights<B>,
    pub(crate) ffn_mix: HyperConnection<B>,
    pub(crate) ffn_norm: B::Vector,
    pub(crate) ffn: FfnWeights<B>,
}
