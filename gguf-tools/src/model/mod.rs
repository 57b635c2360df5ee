//! What a model is: its hyper-parameters, and the one table of its tensors with their names and shapes.
//!
//! Nothing about a particular size is fixed here: widths, counts and layer kinds come from `config.json` or from
//! GGUF metadata. A new architecture is one file (see `deepseek4.rs`) and one line in [`ARCHITECTURES`].

mod architecture;
mod deepseek4;
mod error;
mod fields;
mod input;
mod metadata;
mod table;

use std::fmt;

use crate::gguf::Metadata;

pub use architecture::{ARCHITECTURES, Architecture, LayerKind, TensorRow};
pub use error::{FieldProblem, ModelError};
pub use input::MatrixInput;
pub use table::{SourceRole, TensorSpec, TensorTable, expected_tensors};

/// The hyper-parameters of a DeepSeek V4 model, as in its `config.json`.
///
/// Values have been checked: counts are at least 1 (unless said), ratios are 0, 4 or 128, widths divide as they must.
#[derive(Debug, Clone, PartialEq)]
pub struct HyperParameters {
    /// The architecture that these values describe.
    pub architecture: &'static Architecture,
    /// Width of the residual stream (`hidden_size`).
    pub hidden_size: u64,
    /// Main layers, drafting layers not counted.
    pub num_hidden_layers: u64,
    /// Tokens in the vocabulary, rows of embedding and output.
    pub vocab_size: u64,
    /// Longest context.
    pub max_position_embeddings: u64,
    /// Query heads.
    pub num_attention_heads: u64,
    /// Shared key-value heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rotated components at the end of a head.
    pub qk_rope_head_dim: u64,
    /// Width of the query bottleneck.
    pub q_lora_rank: u64,
    /// Width of the output bottleneck, a group.
    pub o_lora_rank: u64,
    /// Groups of the output projection.
    pub o_groups: u64,
    /// Window of plain attention.
    pub sliding_window: u64,
    /// Tokens per compressed row of each layer (0, 4 or 128); entries past the main layers belong to drafting layers.
    pub compress_ratios: Vec<u32>,
    /// Heads of the lightning indexer.
    pub index_n_heads: u64,
    /// Width of an indexer head.
    pub index_head_dim: u64,
    /// Compressed rows that the indexer keeps.
    pub index_topk: u64,
    /// Routed experts of a layer.
    pub n_routed_experts: u64,
    /// Routed experts that work on a token.
    pub num_experts_per_tok: u64,
    /// Shared experts.
    pub n_shared_experts: u64,
    /// Inner width of one expert.
    pub moe_intermediate_size: u64,
    /// Factor on the routing weights.
    pub routed_scaling_factor: f32,
    /// Leading layers that route by token id (may be 0).
    pub num_hash_layers: u64,
    /// Clamp in front of the gated activation.
    pub swiglu_limit: f32,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f32,
    /// Residual streams of the hyper-connections.
    pub hc_mult: u64,
    /// Sinkhorn iterations of the hyper-connections.
    pub hc_sinkhorn_iters: u64,
    /// Epsilon of the hyper-connections.
    pub hc_eps: f32,
    /// Rotary base of window-only layers.
    pub rope_theta: f32,
    /// Rotary base of compressed layers.
    pub compress_rope_theta: f32,
    /// Context extension of compressed layers.
    pub rope_scaling: RopeScaling,
    /// Drafting layers that the checkpoint announces (may be 0).
    pub num_nextn_predict_layers: u64,
    /// The block drafter of the 0731 release; `None` for others and for values read from GGUF metadata.
    pub dspark: Option<DSpark>,
}

/// YaRN context extension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeScaling {
    /// Extension factor.
    pub factor: f32,
    /// Rotations above which a frequency is left as it is.
    pub beta_fast: f32,
    /// Rotations below which a frequency is divided by the factor.
    pub beta_slow: f32,
    /// Context before extension.
    pub original_max_position_embeddings: u64,
}

/// The DSpark block drafter that ships inside the 0731 checkpoints. Its tensors are set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DSpark {
    /// Tokens drafted at once.
    pub block_size: u64,
    /// Layers whose outputs it reads.
    pub target_layer_ids: Vec<u32>,
}

/// Groups of tensors that a recipe treats alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Gate projections of the routed experts.
    RoutedGate,
    /// Up projections of the routed experts.
    RoutedUp,
    /// Down projections of the routed experts.
    RoutedDown,
    /// The shared expert's three projections.
    SharedExpert,
    /// Query, key-value and output projections.
    Attention,
    /// Key-value compressor of compressed layers.
    Compressor,
    /// Lightning indexer with its own compressor.
    Indexer,
    /// Expert router.
    Router,
    /// Table from token to experts.
    RoutingTable,
    /// Mixing matrices of the hyper-connections.
    HyperConnection,
    /// Norms, sinks, biases, scales: vectors that stay in full precision.
    Norm,
    /// Token embedding.
    Embedding,
    /// Output projection.
    Output,
}

impl Family {
    /// Every family with the name that users type.
    pub const NAMES: [(&'static str, Self); 13] = [
        ("routed-gate", Self::RoutedGate),
        ("routed-up", Self::RoutedUp),
        ("routed-down", Self::RoutedDown),
        ("shared", Self::SharedExpert),
        ("attention", Self::Attention),
        ("compressor", Self::Compressor),
        ("indexer", Self::Indexer),
        ("router", Self::Router),
        ("routing-table", Self::RoutingTable),
        ("hyper-connection", Self::HyperConnection),
        ("norm", Self::Norm),
        ("embedding", Self::Embedding),
        ("output", Self::Output),
    ];

    /// The families of the routed experts.
    pub const ROUTED: [Self; 3] = [Self::RoutedGate, Self::RoutedUp, Self::RoutedDown];

    /// Every family.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::NAMES.iter().map(|(_, family)| *family)
    }

    /// The family that users call `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, family)| *family)
    }

    /// The name that users type.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, family)| *family == self).map_or("", |(name, _)| name)
    }

    /// Whether the tensors of this family hold one matrix for each routed expert.
    pub fn is_routed(self) -> bool {
        Self::ROUTED.contains(&self)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl HyperParameters {
    /// Reads and checks a checkpoint's `config.json`.
    ///
    /// # Errors
    /// [`ModelError::UnsupportedArchitecture`] for another model family, and one [`ModelError::Fields`] with every field
    /// that is missing or has a value which this family cannot have. Nothing is defaulted that changes the result.
    pub fn from_config(config: &serde_json::Value) -> Result<Self, ModelError> {
        let object = config.as_object().ok_or(ModelError::NotAnObject)?;
        let architecture = architecture::of_config(object)?;
        (architecture.read_config)(object)
    }

    /// Reads and checks the metadata of a GGUF file. What ds4's files leave out (vocabulary size, context length, gating
    /// function, kind of rotary scaling) is derived, for it has one possible value.
    ///
    /// # Errors
    /// As [`HyperParameters::from_config`], with metadata keys in place of fields.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, ModelError> {
        const KEY: &str = "general.architecture";
        let name = metadata.get(KEY).and_then(crate::gguf::Value::as_str).ok_or_else(|| {
            ModelError::NoArchitecture { field: KEY, supported: architecture::supported(|a| a.gguf_name) }
        })?;
        (architecture::of_gguf(name)?.read_metadata)(metadata)
    }

    /// The metadata of a GGUF file that both llama.cpp and ds4 load, without tokenizer and descriptions.
    ///
    /// Drafting layers are not part of the file and not mentioned.
    pub fn to_metadata(&self) -> Metadata {
        (self.architecture.write_metadata)(self)
    }

    /// Tokens per compressed row of a main layer: 0 (window only), 4 or 128.
    pub fn compress_ratio(&self, layer: u32) -> u32 {
        self.compress_ratios.get(layer as usize).copied().unwrap_or(0)
    }

    /// What kind of layer the main layer is.
    pub fn layer_kind(&self, layer: u32) -> LayerKind {
        LayerKind { ratio: self.compress_ratio(layer), hash_routed: u64::from(layer) < self.num_hash_layers }
    }
}
