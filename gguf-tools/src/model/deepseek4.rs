//! DeepSeek V4 (Flash, PRO and their re-releases): configuration and tensors.
//!
//! Names and shapes: safetensors headers of the release; GGUF names as llama.cpp and ds4 agree on them.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::metadata;
use super::{
    Architecture, DSpark, Family, HyperParameters, LayerKind, MatrixInput, ModelError, RopeScaling, TensorRow,
};

pub(super) static ARCHITECTURE: Architecture = Architecture {
    model_type: "deepseek_v4",
    gguf_name: "deepseek4",
    read_config,
    read_metadata: metadata::read,
    write_metadata: metadata::write,
    before_layers: BEFORE_LAYERS,
    in_layers: IN_LAYERS,
    after_layers: AFTER_LAYERS,
    draft_prefixes: &["mtp."],
    refused_prefixes: &[
        ("vision.", "the vision tower of V4-Flash-Vision-Exp"),
        ("aligner.", "the vision aligner of V4-Flash-Vision-Exp"),
        ("image_", "image embeddings of V4-Flash-Vision-Exp"),
    ],
    unused_in_layers: &["ffn.gate.bias"],
};

/// Compression ratios that exist in this architecture.
const RATIOS: [u32; 3] = [0, 4, 128];
/// The ratio whose layers have overlapping windows and an indexer.
const OVERLAPPING: u32 = 4;
/// Residual streams; llama.cpp refuses any other number.
const STREAMS: u64 = 4;
/// Longest list of per-layer values that llama.cpp reads, and so the most layers.
const MAX_LAYERS: u64 = 512;
/// Bound on a count from an untrusted file: a name is made for every expert of every layer.
const MAX_EXPERTS: u64 = 4096;
/// Bound on the vocabulary: a text is made for every token.
const MAX_VOCABULARY: u64 = 1 << 22;
/// Values that share a scale in the FP4 experts, and in MXFP4 and Q8_0 blocks.
const BLOCK_VALUES: u64 = 32;

const fn row(
    source: &'static str,
    gguf: &'static str,
    family: Family,
    shape: fn(&HyperParameters, LayerKind) -> Vec<u64>,
    present: fn(LayerKind) -> bool,
) -> TensorRow {
    TensorRow { source, gguf, family, shape, present, reads: None }
}

const fn every(_: LayerKind) -> bool {
    true
}
const fn compressed(kind: LayerKind) -> bool {
    kind.ratio != 0
}
const fn indexed(kind: LayerKind) -> bool {
    kind.ratio == OVERLAPPING
}
const fn hash_routed(kind: LayerKind) -> bool {
    kind.hash_routed
}
const fn learned_routing(kind: LayerKind) -> bool {
    !kind.hash_routed
}

/// Width of the compressor's projections: both halves of overlapping windows, or one.
const fn compressor_width(kind: LayerKind, width: u64) -> u64 {
    if kind.ratio == OVERLAPPING { 2 * width } else { width }
}

/// Rows of a hyper-connection's mixing matrix: pre, post and the square of streams.
const fn mixes(h: &HyperParameters) -> u64 {
    (2 + h.hc_mult) * h.hc_mult
}

use Family::{
    Attention, Compressor, Embedding, HyperConnection, Indexer, Norm, Output, RoutedDown, RoutedGate,
    RoutedUp, Router, RoutingTable, SharedExpert,
};

const BEFORE_LAYERS: &[TensorRow] =
    &[row("embed.weight", "token_embd.weight", Embedding, |h, _| vec![h.vocab_size, h.hidden_size], every)];

const AFTER_LAYERS: &[TensorRow] = &[
    row("norm.weight", "output_norm.weight", Norm, |h, _| vec![h.hidden_size], every),
    row("hc_head_base", "output_hc_base.weight", Norm, |h, _| vec![h.hc_mult], every),
    row(
        "hc_head_fn",
        "output_hc_fn.weight",
        HyperConnection,
        |h, _| vec![h.hc_mult, h.hc_mult * h.hidden_size],
        every,
    ),
    row("hc_head_scale", "output_hc_scale.weight", Norm, |_, _| vec![1], every),
    row("head.weight", "output.weight", Output, |h, _| vec![h.vocab_size, h.hidden_size], every)
        .reading(MatrixInput::Final),
];

#[rustfmt::skip]
const IN_LAYERS: &[TensorRow] = &[
    row("layers.{L}.hc_attn_base", "blk.{L}.hc_attn_base.weight", Norm, |h, _| vec![mixes(h)], every),
    row("layers.{L}.hc_attn_fn", "blk.{L}.hc_attn_fn.weight", HyperConnection, |h, _| vec![mixes(h), h.hc_mult * h.hidden_size], every),
    row("layers.{L}.hc_attn_scale", "blk.{L}.hc_attn_scale.weight", Norm, |_, _| vec![3], every),
    row("layers.{L}.attn_norm.weight", "blk.{L}.attn_norm.weight", Norm, |h, _| vec![h.hidden_size], every),
    row("layers.{L}.attn.attn_sink", "blk.{L}.attn_sinks.weight", Norm, |h, _| vec![h.num_attention_heads], every),
    row("layers.{L}.attn.wq_a.weight", "blk.{L}.attn_q_a.weight", Attention, |h, _| vec![h.q_lora_rank, h.hidden_size], every).reading(MatrixInput::Attention),
    row("layers.{L}.attn.q_norm.weight", "blk.{L}.attn_q_a_norm.weight", Norm, |h, _| vec![h.q_lora_rank], every),
    row("layers.{L}.attn.wq_b.weight", "blk.{L}.attn_q_b.weight", Attention, |h, _| vec![h.num_attention_heads * h.head_dim, h.q_lora_rank], every).reading(MatrixInput::QueryLora),
    row("layers.{L}.attn.wkv.weight", "blk.{L}.attn_kv.weight", Attention, |h, _| vec![h.head_dim, h.hidden_size], every).reading(MatrixInput::Attention),
    row("layers.{L}.attn.kv_norm.weight", "blk.{L}.attn_kv_a_norm.weight", Norm, |h, _| vec![h.head_dim], every),
    row("layers.{L}.attn.wo_a.weight", "blk.{L}.attn_output_a.weight", Attention, |h, _| vec![h.o_groups * h.o_lora_rank, h.num_attention_heads * h.head_dim / h.o_groups], every).reading(MatrixInput::Heads),
    row("layers.{L}.attn.wo_b.weight", "blk.{L}.attn_output_b.weight", Attention, |h, _| vec![h.hidden_size, h.o_groups * h.o_lora_rank], every).reading(MatrixInput::OutputLora),
    row("layers.{L}.attn.compressor.ape", "blk.{L}.attn_compressor_ape.weight", Compressor, |h, k| vec![u64::from(k.ratio), compressor_width(k, h.head_dim)], compressed),
    row("layers.{L}.attn.compressor.wkv.weight", "blk.{L}.attn_compressor_kv.weight", Compressor, |h, k| vec![compressor_width(k, h.head_dim), h.hidden_size], compressed).reading(MatrixInput::Attention),
    row("layers.{L}.attn.compressor.wgate.weight", "blk.{L}.attn_compressor_gate.weight", Compressor, |h, k| vec![compressor_width(k, h.head_dim), h.hidden_size], compressed).reading(MatrixInput::Attention),
    row("layers.{L}.attn.compressor.norm.weight", "blk.{L}.attn_compressor_norm.weight", Norm, |h, _| vec![h.head_dim], compressed),
    row("layers.{L}.attn.indexer.wq_b.weight", "blk.{L}.indexer.attn_q_b.weight", Indexer, |h, _| vec![h.index_n_heads * h.index_head_dim, h.q_lora_rank], indexed).reading(MatrixInput::QueryLora),
    row("layers.{L}.attn.indexer.weights_proj.weight", "blk.{L}.indexer.proj.weight", Indexer, |h, _| vec![h.index_n_heads, h.hidden_size], indexed).reading(MatrixInput::Attention),
    row("layers.{L}.attn.indexer.compressor.ape", "blk.{L}.indexer_compressor_ape.weight", Indexer, |h, k| vec![u64::from(k.ratio), compressor_width(k, h.index_head_dim)], indexed),
    row("layers.{L}.attn.indexer.compressor.wkv.weight", "blk.{L}.indexer_compressor_kv.weight", Indexer, |h, k| vec![compressor_width(k, h.index_head_dim), h.hidden_size], indexed).reading(MatrixInput::Attention),
    row("layers.{L}.attn.indexer.compressor.wgate.weight", "blk.{L}.indexer_compressor_gate.weight", Indexer, |h, k| vec![compressor_width(k, h.index_head_dim), h.hidden_size], indexed).reading(MatrixInput::Attention),
    row("layers.{L}.attn.indexer.compressor.norm.weight", "blk.{L}.indexer_compressor_norm.weight", Norm, |h, _| vec![h.index_head_dim], indexed),
    row("layers.{L}.hc_ffn_base", "blk.{L}.hc_ffn_base.weight", Norm, |h, _| vec![mixes(h)], every),
    row("layers.{L}.hc_ffn_fn", "blk.{L}.hc_ffn_fn.weight", HyperConnection, |h, _| vec![mixes(h), h.hc_mult * h.hidden_size], every),
    row("layers.{L}.hc_ffn_scale", "blk.{L}.hc_ffn_scale.weight", Norm, |_, _| vec![3], every),
    row("layers.{L}.ffn_norm.weight", "blk.{L}.ffn_norm.weight", Norm, |h, _| vec![h.hidden_size], every),
    row("layers.{L}.ffn.gate.weight", "blk.{L}.ffn_gate_inp.weight", Router, |h, _| vec![h.n_routed_experts, h.hidden_size], every).reading(MatrixInput::Ffn),
    row("layers.{L}.ffn.gate.bias", "blk.{L}.exp_probs_b.bias", Norm, |h, _| vec![h.n_routed_experts], learned_routing),
    row("layers.{L}.ffn.gate.tid2eid", "blk.{L}.ffn_gate_tid2eid.weight", RoutingTable, |h, _| vec![h.vocab_size, h.num_experts_per_tok], hash_routed),
    row("layers.{L}.ffn.experts.{E}.w1.weight", "blk.{L}.ffn_gate_exps.weight", RoutedGate, |h, _| vec![h.moe_intermediate_size, h.hidden_size], every).reading(MatrixInput::Ffn),
    row("layers.{L}.ffn.experts.{E}.w3.weight", "blk.{L}.ffn_up_exps.weight", RoutedUp, |h, _| vec![h.moe_intermediate_size, h.hidden_size], every).reading(MatrixInput::Ffn),
    row("layers.{L}.ffn.experts.{E}.w2.weight", "blk.{L}.ffn_down_exps.weight", RoutedDown, |h, _| vec![h.hidden_size, h.moe_intermediate_size], every).reading(MatrixInput::RoutedMid),
    row("layers.{L}.ffn.shared_experts.w1.weight", "blk.{L}.ffn_gate_shexp.weight", SharedExpert, |h, _| vec![h.n_shared_experts * h.moe_intermediate_size, h.hidden_size], every).reading(MatrixInput::Ffn),
    row("layers.{L}.ffn.shared_experts.w3.weight", "blk.{L}.ffn_up_shexp.weight", SharedExpert, |h, _| vec![h.n_shared_experts * h.moe_intermediate_size, h.hidden_size], every).reading(MatrixInput::Ffn),
    row("layers.{L}.ffn.shared_experts.w2.weight", "blk.{L}.ffn_down_shexp.weight", SharedExpert, |h, _| vec![h.hidden_size, h.n_shared_experts * h.moe_intermediate_size], every).reading(MatrixInput::SharedMid),
];

fn read_config(config: &Map<String, Value>) -> Result<HyperParameters, ModelError> {
    let mut fields = Fields::new(config);
    refuse_other_variants(&mut fields);
    let scaling = fields.nested("rope_scaling", "rope_scaling.", read_rope_scaling);
    let h = HyperParameters {
        architecture: &ARCHITECTURE,
        hidden_size: fields.count("hidden_size", 1),
        num_hidden_layers: fields.count("num_hidden_layers", 1),
        vocab_size: fields.count("vocab_size", 1),
        max_position_embeddings: fields.count("max_position_embeddings", 1),
        num_attention_heads: fields.count("num_attention_heads", 1),
        num_key_value_heads: fields.count("num_key_value_heads", 1),
        head_dim: fields.count("head_dim", 1),
        qk_rope_head_dim: fields.count("qk_rope_head_dim", 1),
        q_lora_rank: fields.count("q_lora_rank", 1),
        o_lora_rank: fields.count("o_lora_rank", 1),
        o_groups: fields.count("o_groups", 1),
        sliding_window: fields.count("sliding_window", 1),
        compress_ratios: fields.counts("compress_ratios"),
        index_n_heads: fields.count("index_n_heads", 1),
        index_head_dim: fields.count("index_head_dim", 1),
        index_topk: fields.count("index_topk", 1),
        n_routed_experts: fields.count("n_routed_experts", 1),
        num_experts_per_tok: fields.count("num_experts_per_tok", 1),
        n_shared_experts: fields.count("n_shared_experts", 1),
        moe_intermediate_size: fields.count("moe_intermediate_size", 1),
        routed_scaling_factor: fields.positive("routed_scaling_factor"),
        num_hash_layers: fields.count("num_hash_layers", 0),
        swiglu_limit: fields.positive("swiglu_limit"),
        rms_norm_eps: fields.positive("rms_norm_eps"),
        hc_mult: fields.count("hc_mult", 1),
        hc_sinkhorn_iters: fields.count("hc_sinkhorn_iters", 1),
        hc_eps: fields.positive("hc_eps"),
        rope_theta: fields.positive("rope_theta"),
        compress_rope_theta: fields.positive("compress_rope_theta"),
        rope_scaling: scaling.unwrap_or(RopeScaling {
            factor: 1.0,
            beta_fast: 1.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 1,
        }),
        num_nextn_predict_layers: fields.count_or("num_nextn_predict_layers", 0, 0),
        dspark: read_dspark(&mut fields),
    };
    for (involved, problem) in contradictions(&h) {
        // A field that could not be read has a stand-in value, about which nothing is to be said.
        if !involved.iter().any(|field| fields.has_problem(field)) {
            fields.problem(involved[0], problem);
        }
    }
    fields.finish()?;
    Ok(h)
}

/// Behaviour that this program, like llama.cpp and ds4, implements in one way only.
fn refuse_other_variants(fields: &mut Fields<'_>) {
    fields.exactly("scoring_func", &json!("sqrtsoftplus"));
    fields.exactly("topk_method", &json!("noaux_tc"));
    fields.exactly("norm_topk_prob", &json!(true));
    fields.exactly("hidden_act", &json!("silu"));
    fields.absent_or("attention_bias", &json!(false));
    fields.absent_or("tie_word_embeddings", &json!(false));
    let foreign: Vec<&str> = fields
        .names()
        .filter(|name| {
            name.starts_with("vision")
                || name.starts_with("image_")
                || matches!(*name, "aligner" | "text_config")
        })
        .collect();
    for name in foreign {
        fields.problem(
            name,
            "belongs to a model with a vision tower, which is not supported; use a text checkpoint",
        );
    }
    if let Some(method) = fields.optional("quantization_config").and_then(|q| q.get("quant_method"))
        && method != "fp8"
    {
        fields.problem(
            "quantization_config.quant_method",
            format!("found {method}, only \"fp8\" (or none) can be read; use the official release"),
        );
    }
}

fn read_rope_scaling(fields: &mut Fields<'_>) -> RopeScaling {
    let kind = if fields.optional("type").is_some() { "type" } else { "rope_type" };
    fields.exactly(kind, &json!("yarn"));
    RopeScaling {
        factor: fields.positive("factor"),
        beta_fast: fields.positive("beta_fast"),
        beta_slow: fields.positive("beta_slow"),
        original_max_position_embeddings: fields.count("original_max_position_embeddings", 1),
    }
}

fn read_dspark(fields: &mut Fields<'_>) -> Option<DSpark> {
    let present = fields.names().any(|name| name.starts_with("dspark_"));
    present.then(|| DSpark {
        block_size: fields.count("dspark_block_size", 1),
        target_layer_ids: fields.counts("dspark_target_layer_ids"),
    })
}

/// Values that do not fit each other, or that no implementation accepts: the fields involved and what is wrong.
pub(super) fn contradictions(h: &HyperParameters) -> Vec<(&'static [&'static str], String)> {
    let mut found = Vec::new();
    let mut demand = |holds: bool, involved: &'static [&'static str], problem: String| {
        if !holds {
            found.push((involved, problem));
        }
    };
    demand(
        h.hc_mult == STREAMS,
        &["hc_mult"],
        format!("found {}, only {STREAMS} is supported (llama.cpp refuses other values)", h.hc_mult),
    );
    demand(
        h.num_key_value_heads == 1,
        &["num_key_value_heads"],
        format!("found {}, expected the one shared head", h.num_key_value_heads),
    );
    demand(
        h.num_hidden_layers <= MAX_LAYERS,
        &["num_hidden_layers"],
        format!("found {}, at most {MAX_LAYERS} are supported", h.num_hidden_layers),
    );
    demand(
        h.n_routed_experts <= MAX_EXPERTS,
        &["n_routed_experts"],
        format!("found {}, at most {MAX_EXPERTS} are supported", h.n_routed_experts),
    );
    demand(
        h.vocab_size <= MAX_VOCABULARY,
        &["vocab_size"],
        format!("found {}, at most {MAX_VOCABULARY} tokens are supported", h.vocab_size),
    );
    demand(
        (h.compress_ratios.len() as u64) >= h.num_hidden_layers
            && h.compress_ratios.len() as u64 <= MAX_LAYERS,
        &["compress_ratios", "num_hidden_layers"],
        format!(
            "found {} entries for {} layers; expected one for each layer (and drafting layer), at most {MAX_LAYERS}",
            h.compress_ratios.len(),
            h.num_hidden_layers
        ),
    );
    if let Some((layer, ratio)) = h.compress_ratios.iter().enumerate().find(|(_, r)| !RATIOS.contains(r)) {
        demand(
            false,
            &["compress_ratios"],
            format!("entry {layer} is {ratio}; only 0, 4 and 128 exist in V4"),
        );
    }
    demand(
        h.num_experts_per_tok <= h.n_routed_experts,
        &["num_experts_per_tok", "n_routed_experts"],
        format!("found {}, more than the {} routed experts", h.num_experts_per_tok, h.n_routed_experts),
    );
    demand(
        h.num_hash_layers <= h.num_hidden_layers,
        &["num_hash_layers", "num_hidden_layers"],
        format!("found {}, more than the {} layers", h.num_hash_layers, h.num_hidden_layers),
    );
    let heads_width = h.num_attention_heads.checked_mul(h.head_dim);
    demand(
        heads_width.is_some_and(|width| width.is_multiple_of(h.o_groups)),
        &["o_groups", "num_attention_heads", "head_dim"],
        format!(
            "{} heads of width {} cannot be divided into {} output groups",
            h.num_attention_heads, h.head_dim, h.o_groups
        ),
    );
    demand(
        h.qk_rope_head_dim.is_multiple_of(2)
            && h.qk_rope_head_dim <= h.head_dim
            && h.qk_rope_head_dim <= h.index_head_dim,
        &["qk_rope_head_dim", "head_dim", "index_head_dim"],
        format!(
            "found {}, expected an even number not above head_dim {} and index_head_dim {}",
            h.qk_rope_head_dim, h.head_dim, h.index_head_dim
        ),
    );
    for (field, value) in
        [(&["hidden_size"], h.hidden_size), (&["moe_intermediate_size"], h.moe_intermediate_size)]
    {
        demand(
            value.is_multiple_of(BLOCK_VALUES),
            field,
            format!("found {value}, expected a multiple of {BLOCK_VALUES} (values that share one scale)"),
        );
    }
    if sizes_overflow(h) {
        demand(false, &["hidden_size"], "with the other widths, tensor sizes do not fit 64 bits".to_owned());
    }
    found
}

/// Whether the largest products of widths leave the range in which sizes are computed.
fn sizes_overflow(h: &HyperParameters) -> bool {
    let product = |factors: &[u64]| {
        factors
            .iter()
            .try_fold(8_u64, |total, &factor| total.checked_mul(factor))
            .is_none_or(|n| n > i64::MAX as u64)
    };
    product(&[h.vocab_size, h.hidden_size])
        || product(&[h.vocab_size, h.num_experts_per_tok])
        || product(&[h.n_routed_experts, h.moe_intermediate_size, h.hidden_size])
        || product(&[h.n_shared_experts, h.moe_intermediate_size, h.hidden_size])
        || product(&[h.num_attention_heads, h.head_dim, h.q_lora_rank])
        || product(&[h.o_lora_rank, h.num_attention_heads, h.head_dim])
        || product(&[h.o_groups, h.o_lora_rank, h.hidden_size])
        || product(&[2, h.head_dim, h.hidden_size])
        || product(&[h.index_n_heads, h.index_head_dim, h.q_lora_rank])
        || product(&[h.index_n_heads, h.hidden_size])
        || product(&[2, h.index_head_dim, h.hidden_size])
        || product(&[8, h.hc_mult, h.hc_mult, h.hidden_size])
}
