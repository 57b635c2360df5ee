//! ds4's loader as static rules (May 2026): one model size, exact types.

use std::collections::BTreeMap;

use super::RuntimeVerdict;
use super::model::Model;
use crate::block::BlockType;
use crate::gguf::{Array, Gguf, Metadata, RegionProblem, Value};
use crate::model::Family;

/// Whole numbers that must have Flash's values, as u32.
const COUNTS: [(&str, u32); 22] = [
    ("block_count", 43),
    ("embedding_length", 4096),
    ("vocab_size", 129_280),
    ("attention.head_count", 64),
    ("attention.head_count_kv", 1),
    ("attention.key_length", 512),
    ("attention.value_length", 512),
    ("rope.dimension_count", 64),
    ("attention.q_lora_rank", 1024),
    ("attention.output_lora_rank", 1024),
    ("attention.output_group_count", 8),
    ("attention.sliding_window", 128),
    ("attention.indexer.head_count", 64),
    ("attention.indexer.key_length", 128),
    ("attention.indexer.top_k", 512),
    ("expert_count", 256),
    ("expert_used_count", 6),
    ("expert_feed_forward_length", 2048),
    ("expert_shared_count", 1),
    ("hash_layer_count", 3),
    ("hyper_connection.count", 4),
    ("hyper_connection.sinkhorn_iterations", 20),
];
const ORIGINAL_CONTEXT: (&str, u64) = ("rope.scaling.original_context_length", 65_536);

/// Numbers that must have Flash's values to one part in a million.
const REALS: [(&str, f64); 8] = [
    ("rope.freq_base", 10_000.0),
    ("rope.scaling.factor", 16.0),
    ("rope.scaling.yarn_beta_fast", 32.0),
    ("rope.scaling.yarn_beta_slow", 1.0),
    ("attention.compress_rope_freq_base", 160_000.0),
    ("attention.layer_norm_rms_epsilon", 1e-6),
    ("expert_weights_scale", 1.5),
    ("hyper_connection.epsilon", 1e-6),
];
const TOLERANCE: f64 = 1e-6;

/// Layers of Flash, and the clamp that each must have.
const N_LAYERS: usize = 43;
const CLAMP: f64 = 10.0;

/// Tokens that the program looks up by their text.
const SPECIAL_TOKENS: [&str; 7] = [
    "<\u{ff5c}begin\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "<\u{ff5c}User\u{ff5c}>",
    "<\u{ff5c}Assistant\u{ff5c}>",
    "<think>",
    "</think>",
    "\u{ff5c}DSML\u{ff5c}",
];

pub(super) fn judge(gguf: &Gguf, model: &Model, regions: &[RegionProblem]) -> RuntimeVerdict {
    let mut reasons = Vec::new();
    let prefix = model.architecture.as_deref().unwrap_or_default();
    if gguf.shards().len() > 1 {
        reasons.push(format!("the file is split in {}; it loads single files", gguf.shards().len()));
    }
    if let Some(shard) = gguf.shards().iter().find(|shard| shard.version != 3) {
        reasons.push(format!("version {}, expected 3", shard.version));
    }
    keys(gguf.metadata(), prefix, &mut reasons);
    tokenizer(gguf.metadata(), &mut reasons);
    let missing = gguf.missing_data();
    if let Some(first) = missing.first() {
        reasons.push(format!("data of {} tensors is not in the file, first `{}`", missing.len(), first.name));
    }
    if let Some(layers) = model.layers {
        reasons.push(format!(
            "holds only layers {} to {} of {}; only versions with layer ranges load it, for that range",
            layers.first, layers.last, layers.of
        ));
    }
    // Without a bias the program takes zeros.
    let missing = model.missing.iter().filter(|name| !name.ends_with(".exp_probs_b.bias"));
    reasons.extend(missing.map(|name| format!("tensor `{name}` is missing")));
    reasons.extend(model.misshapen.iter().map(|name| format!("tensor `{name}` has another shape")));
    types(gguf, model, &mut reasons);
    let mut warnings = Vec::new();
    if !regions.is_empty() {
        let n = regions.len();
        warnings
            .push(format!("{n} tensors do not fit their places, which it does not notice: output is wrong"));
    }
    let newer = |tensor: &&crate::gguf::TensorInfo| {
        tensor.block_type == BlockType::Mxfp4
            && model.families.get(&tensor.name).is_some_and(|f| f.is_routed())
    };
    if gguf.tensors().iter().any(|tensor| newer(&tensor)) {
        warnings.push("routed experts in MXFP4 need a version newer than May 2026".to_owned());
    }
    RuntimeVerdict { name: "ds4", loads: reasons.is_empty(), reasons, warnings }
}

fn keys(metadata: &Metadata, prefix: &str, reasons: &mut Vec<String>) {
    let mut check = |name: &str, wanted: &str, holds: &dyn Fn(&Value) -> bool| {
        let key = format!("{prefix}.{name}");
        match metadata.get(&key) {
            None => reasons.push(format!("key `{key}` is missing")),
            Some(value) if !holds(value) => {
                reasons.push(format!("key `{key}`: found {}, expected Flash's {wanted}", shown(value)));
            }
            Some(_) => {}
        }
    };
    for (name, wanted) in COUNTS {
        check(name, &format!("{wanted} as u32"), &|value| *value == Value::U32(wanted));
    }
    let (name, wanted) = ORIGINAL_CONTEXT;
    check(name, &wanted.to_string(), &|value| {
        matches!(value, Value::U32(_) | Value::U64(_)) && value.as_u64() == Some(wanted)
    });
    for (name, wanted) in REALS {
        check(name, &wanted.to_string(), &|value| {
            matches!(value, Value::F32(_) | Value::F64(_) | Value::U32(_) | Value::I32(_))
                && value.as_f64().is_some_and(|found| (found - wanted).abs() <= TOLERANCE * wanted)
        });
    }
    check("expert_weights_norm", "true", &|value| *value == Value::Bool(true));
    check("attention.compress_ratios", "pattern 0, 0, 4, 128, 4, ... 4 as i32 or u32", &|value| {
        let Value::Array(list @ (Array::I32(_) | Array::U32(_))) = value else { return false };
        list.as_i64s()
            .is_some_and(|ratios| ratios.len() >= N_LAYERS && (0..N_LAYERS).all(|i| ratios[i] == ratio(i)))
    });
    check("swiglu_clamp_exp", "at least 43 clamps of 10 as f32 or f64", &|value| {
        let Value::Array(list @ (Array::F32(_) | Array::F64(_))) = value else { return false };
        list.as_f64s().is_some_and(|clamps| clamps.len() >= N_LAYERS && clamps.iter().all(|&c| c == CLAMP))
    });
    for name in ["expert_group_count", "expert_group_used_count"] {
        let key = format!("{prefix}.{name}");
        if metadata.get(&key).is_some_and(|value| value.as_u64() != Some(0)) {
            reasons.push(format!("key `{key}`: expected to be absent or 0"));
        }
    }
}

/// Tokens per compressed row of a layer of Flash.
fn ratio(layer: usize) -> i64 {
    match layer {
        0 | 1 => 0,
        _ if layer.is_multiple_of(2) => 4,
        _ => 128,
    }
}

fn shown(value: &Value) -> String {
    match (value.as_f64(), value.as_array()) {
        (Some(number), _) => format!("{number} as {}", value.type_name()),
        (None, Some(list)) => format!("{} entries as {}", list.len(), value.type_name()),
        (None, None) => format!("a value of type {}", value.type_name()),
    }
}

fn tokenizer(metadata: &Metadata, reasons: &mut Vec<String>) {
    let strings = |key: &str| metadata.get(key).and_then(Value::as_array).and_then(|list| list.as_strs());
    if strings("tokenizer.ggml.merges").is_none() {
        reasons.push("key `tokenizer.ggml.merges` is missing or no list of texts".to_owned());
    }
    let Some(tokens) = strings("tokenizer.ggml.tokens") else {
        reasons.push("key `tokenizer.ggml.tokens` is missing or no list of texts".to_owned());
        return;
    };
    let absent = SPECIAL_TOKENS.iter().filter(|special| !tokens.iter().any(|token| token == **special));
    reasons.extend(absent.map(|special| format!("token `{special}` is not in the vocabulary")));
}

/// The types that the program takes for a family.
fn demanded(family: Family) -> &'static [BlockType] {
    match family {
        Family::Embedding
        | Family::HyperConnection
        | Family::Compressor
        | Family::Indexer
        | Family::Router => &[BlockType::F16],
        Family::Output | Family::Attention | Family::SharedExpert => &[BlockType::Q8_0],
        Family::Norm => &[BlockType::F32],
        Family::RoutingTable => &[BlockType::I32],
        Family::RoutedGate | Family::RoutedUp | Family::RoutedDown => {
            &[BlockType::Iq2Xxs, BlockType::Q2K, BlockType::Q4K, BlockType::Mxfp4]
        }
    }
}

fn types(gguf: &Gguf, model: &Model, reasons: &mut Vec<String>) {
    let mut wrong: BTreeMap<(Family, BlockType), Vec<&str>> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let Some(&family) = model.families.get(&tensor.name) else { continue };
        if !demanded(family).contains(&tensor.block_type) {
            wrong.entry((family, tensor.block_type)).or_default().push(&tensor.name);
        }
        if family == Family::RoutedGate {
            let up = gguf.tensor(&tensor.name.replace(".ffn_gate_exps.", ".ffn_up_exps."));
            if let Some(up) = up.filter(|up| up.block_type != tensor.block_type) {
                reasons.push(format!(
                    "tensor `{}` is {}, but `{}` is {}; expected the same type",
                    tensor.name, tensor.block_type, up.name, up.block_type
                ));
            }
        }
    }
    for ((family, found), names) in wrong {
        let wanted: Vec<_> = demanded(family).iter().map(|t| t.name()).collect();
        reasons.push(format!(
            "{} {family} tensors are {found} (first `{}`), expected {}",
            names.len(),
            names[0],
            wanted.join(" or ")
        ));
    }
}
