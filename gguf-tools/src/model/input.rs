//! What matrices are multiplied with.

use super::HyperParameters;

/// The input of a matrix: matrices with one input share its second moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MatrixInput {
    /// The layer's attention input, `[hidden]`: low-rank query, key-value, compressors, weights of the indexer's heads.
    Attention,
    /// The low-rank query, `[q_lora_rank]`: queries of attention and indexer.
    QueryLora,
    /// What the heads give, `[heads * head_dim]`, in groups: the first output projection.
    Heads,
    /// The low-rank attention output, `[groups * o_lora_rank]`: the second output projection.
    OutputLora,
    /// The layer's FFN input, `[hidden]`: gate and up projections, router. Of a routed expert those of its tokens.
    Ffn,
    /// A routed expert's gated product times its route weight, `[moe_intermediate_size]`: its down projection.
    RoutedMid,
    /// The shared expert's gated product, `[n_shared_experts * moe_intermediate_size]`: its down projection.
    SharedMid,
    /// What the output matrix reads, `[hidden]`.
    Final,
}

impl MatrixInput {
    /// Parts of the input that groups of rows read apart.
    pub fn n_groups(self, model: &HyperParameters) -> usize {
        if self == Self::Heads { model.o_groups as usize } else { 1 }
    }

    /// Values of the whole input.
    pub fn width(self, model: &HyperParameters) -> u64 {
        match self {
            Self::Attention | Self::Ffn | Self::Final => model.hidden_size,
            Self::QueryLora => model.q_lora_rank,
            Self::Heads => model.num_attention_heads * model.head_dim,
            Self::OutputLora => model.o_groups * model.o_lora_rank,
            Self::RoutedMid => model.moe_intermediate_size,
            Self::SharedMid => model.n_shared_experts * model.moe_intermediate_size,
        }
    }
}
