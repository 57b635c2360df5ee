//! Hyper-parameters as GGUF metadata, in the one form that both llama.cpp and ds4 load.
//!
//! Written keys are the union of what either demands, with the value types that ds4 insists on (u32, f32). Reading also
//! takes files of either program alone: what ds4's files leave out has only one possible value.

use super::deepseek4::{ARCHITECTURE, contradictions};
use super::{FieldProblem, HyperParameters, ModelError, RopeScaling};
use crate::gguf::{Array, Metadata, Value};

/// `expert_gating_func` of square root of softplus.
const GATING_SQRT_SOFTPLUS: u32 = 4;
/// llama.cpp's values of the YaRN betas where a file has none; they are also DeepSeek's.
const DEFAULT_BETA_FAST: f32 = 32.0;
const DEFAULT_BETA_SLOW: f32 = 1.0;

/// Field of `config.json` and the key that holds it, without the architecture.
const KEYS: [(&str, &str); 27] = [
    ("num_hidden_layers", "block_count"),
    ("max_position_embeddings", "context_length"),
    ("hidden_size", "embedding_length"),
    ("vocab_size", "vocab_size"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("qk_rope_head_dim", "rope.dimension_count"),
    ("rope_theta", "rope.freq_base"),
    ("compress_rope_theta", "attention.compress_rope_freq_base"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("q_lora_rank", "attention.q_lora_rank"),
    ("o_lora_rank", "attention.output_lora_rank"),
    ("o_groups", "attention.output_group_count"),
    ("sliding_window", "attention.sliding_window"),
    ("compress_ratios", "attention.compress_ratios"),
    ("index_n_heads", "attention.indexer.head_count"),
    ("index_head_dim", "attention.indexer.key_length"),
    ("index_topk", "attention.indexer.top_k"),
    ("n_routed_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("n_shared_experts", "expert_shared_count"),
    ("routed_scaling_factor", "expert_weights_scale"),
    ("num_hash_layers", "hash_layer_count"),
    ("hc_mult", "hyper_connection.count"),
    ("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations"),
];
const HC_EPSILON: &str = "hyper_connection.epsilon";
const SWIGLU_EXPERTS: &str = "swiglu_clamp_exp";
const SWIGLU_SHARED: &str = "swiglu_clamp_shexp";

fn key_of(field: &str) -> String {
    let name = KEYS.iter().find(|(name, _)| *name == field).map_or(field, |(_, key)| key);
    format!("{}.{name}", ARCHITECTURE.gguf_name)
}

pub(super) fn write(h: &HyperParameters) -> Metadata {
    let mut metadata = Metadata::default();
    metadata.set("general.architecture", ARCHITECTURE.gguf_name);
    metadata.set("general.type", "model");
    for (field, count) in counts(h) {
        metadata.set(key_of(field), count as u32);
    }
    for (field, number) in [
        ("rope_theta", h.rope_theta),
        ("compress_rope_theta", h.compress_rope_theta),
        ("rms_norm_eps", h.rms_norm_eps),
        ("routed_scaling_factor", h.routed_scaling_factor),
        (HC_EPSILON, h.hc_eps),
        ("rope.scaling.factor", h.rope_scaling.factor),
        ("rope.scaling.yarn_beta_fast", h.rope_scaling.beta_fast),
        ("rope.scaling.yarn_beta_slow", h.rope_scaling.beta_slow),
    ] {
        metadata.set(key_of(field), number);
    }
    metadata.set(key_of("rope.scaling.type"), "yarn");
    metadata.set(
        key_of("rope.scaling.original_context_length"),
        h.rope_scaling.original_max_position_embeddings as u32,
    );
    metadata.set(key_of("attention.value_length"), h.head_dim as u32);
    metadata.set(key_of("embedding_length_out"), (h.hc_mult * h.hidden_size) as u32);
    metadata.set(key_of("expert_weights_norm"), true);
    metadata.set(key_of("expert_gating_func"), GATING_SQRT_SOFTPLUS);
    let ratios: Vec<i32> = h.compress_ratios.iter().map(|&ratio| ratio as i32).collect();
    metadata.set(key_of("compress_ratios"), ratios);
    let clamps = vec![h.swiglu_limit; h.num_hidden_layers as usize];
    metadata.set(key_of(SWIGLU_EXPERTS), clamps.clone());
    metadata.set(key_of(SWIGLU_SHARED), clamps);
    metadata.set("general.quantization_version", 2_u32);
    metadata
}

/// The whole numbers that are stored as they are.
fn counts(h: &HyperParameters) -> [(&'static str, u64); 22] {
    [
        ("num_hidden_layers", h.num_hidden_layers),
        ("max_position_embeddings", h.max_position_embeddings),
        ("hidden_size", h.hidden_size),
        ("vocab_size", h.vocab_size),
        ("num_attention_heads", h.num_attention_heads),
        ("num_key_value_heads", h.num_key_value_heads),
        ("head_dim", h.head_dim),
        ("qk_rope_head_dim", h.qk_rope_head_dim),
        ("q_lora_rank", h.q_lora_rank),
        ("o_lora_rank", h.o_lora_rank),
        ("o_groups", h.o_groups),
        ("sliding_window", h.sliding_window),
        ("index_n_heads", h.index_n_heads),
        ("index_head_dim", h.index_head_dim),
        ("index_topk", h.index_topk),
        ("n_routed_experts", h.n_routed_experts),
        ("num_experts_per_tok", h.num_experts_per_tok),
        ("moe_intermediate_size", h.moe_intermediate_size),
        ("n_shared_experts", h.n_shared_experts),
        ("num_hash_layers", h.num_hash_layers),
        ("hc_mult", h.hc_mult),
        ("hc_sinkhorn_iters", h.hc_sinkhorn_iters),
    ]
}

pub(super) fn read(metadata: &Metadata) -> Result<HyperParameters, ModelError> {
    let mut keys = Keys { metadata, problems: Vec::new() };
    let rope_scaling = keys.rope_scaling();
    let extended = f64::from(rope_scaling.factor) * rope_scaling.original_max_position_embeddings as f64;
    let tokens =
        metadata.get("tokenizer.ggml.tokens").and_then(Value::as_array).map(|tokens| tokens.len() as u64);
    let h = HyperParameters {
        architecture: &ARCHITECTURE,
        hidden_size: keys.count("hidden_size", 1, None),
        num_hidden_layers: keys.count("num_hidden_layers", 1, None),
        vocab_size: keys.count("vocab_size", 1, tokens),
        max_position_embeddings: keys.count("max_position_embeddings", 1, Some(extended as u64)),
        num_attention_heads: keys.count("num_attention_heads", 1, None),
        num_key_value_heads: keys.count("num_key_value_heads", 1, None),
        head_dim: keys.count("head_dim", 1, None),
        qk_rope_head_dim: keys.count("qk_rope_head_dim", 1, None),
        q_lora_rank: keys.count("q_lora_rank", 1, None),
        o_lora_rank: keys.count("o_lora_rank", 1, None),
        o_groups: keys.count("o_groups", 1, None),
        sliding_window: keys.count("sliding_window", 1, None),
        compress_ratios: keys.ratios(),
        index_n_heads: keys.count("index_n_heads", 1, None),
        index_head_dim: keys.count("index_head_dim", 1, None),
        index_topk: keys.count("index_topk", 1, None),
        n_routed_experts: keys.count("n_routed_experts", 1, None),
        num_experts_per_tok: keys.count("num_experts_per_tok", 1, None),
        n_shared_experts: keys.count("n_shared_experts", 1, None),
        moe_intermediate_size: keys.count("moe_intermediate_size", 1, None),
        routed_scaling_factor: keys.positive("routed_scaling_factor", None),
        num_hash_layers: keys.count("num_hash_layers", 0, None),
        swiglu_limit: keys.swiglu_limit(),
        rms_norm_eps: keys.positive("rms_norm_eps", None),
        hc_mult: keys.count("hc_mult", 1, None),
        hc_sinkhorn_iters: keys.count("hc_sinkhorn_iters", 1, None),
        hc_eps: keys.positive(HC_EPSILON, None),
        rope_theta: keys.positive("rope_theta", None),
        compress_rope_theta: keys.positive("compress_rope_theta", None),
        rope_scaling,
        num_nextn_predict_layers: keys.count("nextn_predict_layers", 0, Some(0)),
        dspark: None,
    };
    keys.demand_the_only_variant(h.head_dim);
    for (involved, problem) in contradictions(&h) {
        if !involved.iter().any(|field| keys.has_problem(field)) {
            keys.problem(involved[0], problem);
        }
    }
    if keys.problems.is_empty() { Ok(h) } else { Err(ModelError::Fields { problems: keys.problems }) }
}

/// Metadata that is being read. A key that cannot be used yields a harmless value and a problem.
struct Keys<'a> {
    metadata: &'a Metadata,
    problems: Vec<FieldProblem>,
}

impl Keys<'_> {
    fn problem(&mut self, field: &str, problem: String) {
        self.problems.push(FieldProblem { field: key_of(field), problem });
    }

    fn has_problem(&self, field: &str) -> bool {
        let key = key_of(field);
        self.problems.iter().any(|problem| problem.field == key)
    }

    fn value(&self, field: &str) -> Option<&Value> {
        self.metadata.get(&key_of(field))
    }

    /// A whole number of at least `least`; `absent` stands in for a missing key.
    fn count(&mut self, field: &str, least: u64, absent: Option<u64>) -> u64 {
        let found = self.value(field).cloned();
        match (found.as_ref().map(Value::as_u64), absent) {
            (Some(Some(n)), _) if (least..=u64::from(u32::MAX)).contains(&n) => n,
            (None, Some(n)) if n >= least => n,
            (None, _) => {
                self.problem(field, "missing; expected a whole number (u32)".to_owned());
                least.max(1)
            }
            (Some(_), _) => {
                let shown = found.map_or_else(String::new, |value| shown(&value));
                self.problem(field, format!("found {shown}, expected a whole number from {least} (u32)"));
                least.max(1)
            }
        }
    }

    /// A finite positive number; `absent` stands in for a missing key.
    fn positive(&mut self, field: &str, absent: Option<f32>) -> f32 {
        let found = self.value(field).cloned();
        match (found.as_ref().map(|value| value.as_f64().map(|x| x as f32)), absent) {
            (Some(Some(x)), _) if x.is_finite() && x > 0.0 => x,
            (None, Some(x)) => x,
            (None, None) => {
                self.problem(field, "missing; expected a positive number (f32)".to_owned());
                1.0
            }
            (Some(_), _) => {
                let shown = found.map_or_else(String::new, |value| shown(&value));
                self.problem(field, format!("found {shown}, expected a positive number (f32)"));
                1.0
            }
        }
    }

    fn rope_scaling(&mut self) -> RopeScaling {
        if let Some(kind) = self.value("rope.scaling.type").cloned()
            && kind.as_str() != Some("yarn")
        {
            self.problem("rope.scaling.type", format!("found {}, only \"yarn\" is supported", shown(&kind)));
        }
        RopeScaling {
            factor: self.positive("rope.scaling.factor", None),
            beta_fast: self.positive("rope.scaling.yarn_beta_fast", Some(DEFAULT_BETA_FAST)),
            beta_slow: self.positive("rope.scaling.yarn_beta_slow", Some(DEFAULT_BETA_SLOW)),
            original_max_position_embeddings: self.count("rope.scaling.original_context_length", 1, None),
        }
    }

    fn ratios(&mut self) -> Vec<u32> {
        let list = self.value("compress_ratios").and_then(Value::as_array).and_then(Array::as_i64s);
        let ratios = list.and_then(|list| {
            list.into_iter().map(|ratio| u32::try_from(ratio).ok()).collect::<Option<Vec<u32>>>()
        });
        ratios.unwrap_or_else(|| {
            self.problem(
                "compress_ratios",
                "missing or not a list of whole numbers; it has no default".to_owned(),
            );
            Vec::new()
        })
    }

    /// One clamp for all layers: a number, or a list of equal ones.
    fn swiglu_limit(&mut self) -> f32 {
        let mut limits = Vec::new();
        for field in [SWIGLU_EXPERTS, SWIGLU_SHARED] {
            let Some(value) = self.value(field) else { continue };
            match value.as_array().map_or_else(|| value.as_f64().map(|x| vec![x]), Array::as_f64s) {
                Some(list) => limits.extend(list.into_iter().map(|x| x as f32)),
                None => self.problem(field, "expected a number or a list of numbers".to_owned()),
            }
        }
        match limits.as_slice() {
            [first, rest @ ..] if *first > 0.0 && first.is_finite() && rest.iter().all(|x| x == first) => {
                *first
            }
            [] => {
                self.problem(SWIGLU_EXPERTS, "missing; expected a list of numbers (f32)".to_owned());
                1.0
            }
            _ => {
                self.problem(
                    SWIGLU_EXPERTS,
                    "expected one positive clamp for all layers and experts".to_owned(),
                );
                1.0
            }
        }
    }

    /// Behaviour that exists in one way only in this architecture.
    fn demand_the_only_variant(&mut self, head_dim: u64) {
        for (field, wanted) in [
            ("attention.value_length", head_dim),
            ("expert_gating_func", u64::from(GATING_SQRT_SOFTPLUS)),
            ("expert_group_count", 0),
            ("expert_group_used_count", 0),
        ] {
            if let Some(found) = self.value(field).cloned()
                && found.as_u64() != Some(wanted)
            {
                self.problem(field, format!("found {}, only {wanted} is supported", shown(&found)));
            }
        }
        if let Some(found) = self.value("expert_weights_norm").cloned()
            && found.as_bool() != Some(true)
        {
            self.problem("expert_weights_norm", format!("found {}, only true is supported", shown(&found)));
        }
    }
}

/// A value for a message.
fn shown(value: &Value) -> String {
    if let Some(text) = value.as_str() {
        format!("\"{}\"", text.chars().take(40).collect::<String>())
    } else if let Some(truth) = value.as_bool() {
        truth.to_string()
    } else if let Some(number) = value.as_f64() {
        number.to_string()
    } else {
        "a list".to_owned()
    }
}
