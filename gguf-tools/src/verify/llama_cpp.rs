//! llama.cpp's loader as static rules (October 2026).

use super::RuntimeVerdict;
use super::model::Model;
use crate::gguf::{Array, Gguf, RegionProblem, Value};

/// Keys of the architecture that the loader demands.
const REQUIRED: [&str; 30] = [
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "attention.compress_rope_freq_base",
    "attention.layer_norm_rms_epsilon",
    "attention.q_lora_rank",
    "attention.output_lora_rank",
    "attention.output_group_count",
    "attention.sliding_window",
    "attention.compress_ratios",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_weights_scale",
    "expert_weights_norm",
    "expert_gating_func",
    "hash_layer_count",
    "swiglu_clamp_exp",
    "hyper_connection.count",
    "hyper_connection.sinkhorn_iterations",
    "hyper_connection.epsilon",
];

const REQUIRED_TOKENIZER: [&str; 5] = [
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
];

/// Keys whose absence is not noticed and changes the result, with what happens then.
const SILENT: [(&str, &str); 3] = [
    ("tokenizer.ggml.pre", "the default text splitter is used, which is another"),
    ("tokenizer.ggml.token_type", "special tokens are taken for plain text"),
    ("tokenizer.chat_template", "a built-in chat format is used"),
];

/// Numbers of the gating functions that the loader knows.
const GATING_FUNCTIONS: std::ops::RangeInclusive<u64> = 1..=4;
const MAX_NAME_BYTES: usize = 63;

pub(super) fn judge(gguf: &Gguf, model: &Model, regions: &[RegionProblem]) -> RuntimeVerdict {
    let mut reasons = container(gguf, regions);
    let prefix = model.architecture.as_deref().unwrap_or_default();
    let key = |name: &str| format!("{prefix}.{name}");
    let value = |name: &str| gguf.metadata().get(&key(name));
    let required = REQUIRED.iter().map(|name| key(name));
    let required = required.chain(REQUIRED_TOKENIZER.map(str::to_owned));
    reasons.extend(
        required
            .filter(|key| gguf.metadata().get(key).is_none())
            .map(|key| format!("key `{key}` is missing")),
    );
    if let Some(n) = value("hyper_connection.count").and_then(Value::as_u64).filter(|&n| n != 4) {
        reasons.push(format!("key `{}`: found {n}, expected 4", key("hyper_connection.count")));
    }
    if let Some(n) =
        value("expert_gating_func").and_then(Value::as_u64).filter(|n| !GATING_FUNCTIONS.contains(n))
    {
        reasons.push(format!("key `{}`: function {n} is not known", key("expert_gating_func")));
    }
    let n_layers = value("block_count").and_then(Value::as_u64);
    let ratios = value("attention.compress_ratios").and_then(Value::as_array).and_then(Array::as_i64s);
    if let (Some(ratios), Some(n_layers)) = (&ratios, n_layers) {
        let found = ratios.len() as u64;
        if found < n_layers || found > 512 {
            let key = key("attention.compress_ratios");
            reasons.push(format!("key `{key}`: found {found} entries, expected {n_layers} to 512"));
        }
        if let Some(ratio) = ratios.iter().find(|ratio| ![0, 4, 128].contains(*ratio)) {
            let key = key("attention.compress_ratios");
            reasons.push(format!("key `{key}`: found ratio {ratio}, expected 0, 4 or 128"));
        }
    }
    if let Some(clamps) = value("swiglu_clamp_exp").and_then(Value::as_array)
        && Some(clamps.len() as u64) != n_layers
    {
        let (found, wanted) = (clamps.len(), n_layers.unwrap_or_default());
        reasons.push(format!("key `{}`: found {found} entries, expected {wanted}", key("swiglu_clamp_exp")));
    }
    reasons.extend(tensors(model));
    let mut warnings: Vec<String> = SILENT
        .iter()
        .filter(|(key, _)| gguf.metadata().get(key).is_none())
        .map(|(key, effect)| format!("key `{key}` is missing: {effect}"))
        .collect();
    for name in ["rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"] {
        if value(name).is_none() {
            warnings.push(format!("key `{}` is missing: compressed layers rotate wrongly", key(name)));
        }
    }
    if gguf.shards().len() > 1 {
        warnings.push("only the first shard opens the set".to_owned());
    }
    RuntimeVerdict { name: "llama.cpp", loads: reasons.is_empty(), reasons, warnings }
}

fn container(gguf: &Gguf, regions: &[RegionProblem]) -> Vec<String> {
    let mut reasons: Vec<String> = regions.iter().map(ToString::to_string).collect();
    if regions.is_empty() && !gguf.sequential_offsets() {
        reasons.push(
            "offsets are not the running sum of sizes in directory order; write the file again to repair it"
                .to_owned(),
        );
    }
    let missing = gguf.missing_data();
    if let Some(first) = missing.first() {
        reasons.push(format!("data of {} tensors is not in the file, first `{}`", missing.len(), first.name));
    }
    let long = gguf.tensors().iter().filter(|tensor| tensor.name.len() > MAX_NAME_BYTES);
    reasons.extend(long.map(|tensor| format!("tensor `{}`: the name has more than 63 bytes", tensor.name)));
    reasons
}

/// Every tensor of the model must be there with its shape, and no other.
fn tensors(model: &Model) -> Vec<String> {
    let mut reasons = Vec::new();
    if !model.is_understood {
        reasons.push("the metadata could not be understood, so tensors were not compared".to_owned());
    }
    if let Some(layers) = model.layers {
        reasons.push(format!("holds only layers {} to {} of {}", layers.first, layers.last, layers.of));
    }
    reasons.extend(model.missing.iter().map(|name| format!("tensor `{name}` is missing")));
    reasons.extend(model.misshapen.iter().map(|name| format!("tensor `{name}` has another shape")));
    reasons.extend(
        model.extra.iter().map(|name| format!("tensor `{name}` is extra, and extra ones are refused")),
    );
    reasons
}
