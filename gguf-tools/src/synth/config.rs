//! Configurations of synthetic models.

use serde_json::{Value, json};

use super::{Shape, SynthOptions};

impl SynthOptions {
    /// `config.json` of the model.
    pub fn config(&self) -> Value {
        config(self)
    }
}

fn config(options: &SynthOptions) -> Value {
    let layers = options.layers.unwrap_or(match options.shape {
        Shape::Tiny => 3,
        Shape::Flash => 43,
        Shape::Pro => 61,
    });
    let experts = options.experts.unwrap_or(match options.shape {
        Shape::Tiny => 8,
        Shape::Flash => 256,
        Shape::Pro => 384,
    });
    let ratios: Vec<u32> = (0..layers).map(|layer| ratio(options.shape, layer)).collect();
    let mut config = json!({
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": false,
        "bos_token_id": 0,
        "compress_ratios": ratios,
        "compress_rope_theta": 160_000,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "hidden_act": "silu",
        "index_head_dim": 128,
        "model_type": "deepseek_v4",
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": false,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
    });
    let sizes = sizes(options.shape, layers, experts);
    if let (Some(config), Value::Object(sizes)) = (config.as_object_mut(), sizes) {
        config.extend(sizes);
    }
    config
}

/// What differs between the shapes.
fn sizes(shape: Shape, layers: u64, experts: u64) -> Value {
    match shape {
        Shape::Tiny => json!({
            "hidden_size": 256,
            "index_n_heads": 8,
            "index_topk": 16,
            "max_position_embeddings": 65_536,
            "moe_intermediate_size": 256,
            "num_attention_heads": 2,
            "num_experts_per_tok": experts.min(2),
            "num_hash_layers": layers.min(1),
            "o_groups": 2,
            "o_lora_rank": 128,
            "q_lora_rank": 256,
            "rope_scaling": rope_scaling(4096),
            "routed_scaling_factor": 1.5,
            "vocab_size": 512,
        }),
        Shape::Flash => json!({
            "hidden_size": 4096,
            "index_n_heads": 64,
            "index_topk": 512,
            "max_position_embeddings": 1_048_576,
            "moe_intermediate_size": 2048,
            "num_attention_heads": 64,
            "num_experts_per_tok": experts.min(6),
            "num_hash_layers": layers.min(3),
            "o_groups": 8,
            "o_lora_rank": 1024,
            "q_lora_rank": 1024,
            "rope_scaling": rope_scaling(65_536),
            "routed_scaling_factor": 1.5,
            "vocab_size": 129_280,
        }),
        Shape::Pro => json!({
            "hidden_size": 7168,
            "index_n_heads": 64,
            "index_topk": 1024,
            "max_position_embeddings": 1_048_576,
            "moe_intermediate_size": 3072,
            "num_attention_heads": 128,
            "num_experts_per_tok": experts.min(6),
            "num_hash_layers": layers.min(3),
            "o_groups": 16,
            "o_lora_rank": 1024,
            "q_lora_rank": 1536,
            "rope_scaling": rope_scaling(65_536),
            "routed_scaling_factor": 2.5,
            "vocab_size": 129_280,
        }),
    }
}

fn rope_scaling(original: u64) -> Value {
    json!({
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": original,
        "type": "yarn",
    })
}

/// The kind of each layer: the releases' pattern, and for the tiny shape one that has every kind in three layers.
fn ratio(shape: Shape, layer: u64) -> u32 {
    match (shape, layer) {
        (Shape::Tiny, 0) | (Shape::Flash, 0 | 1) => 0,
        (Shape::Pro, 0 | 1) => 128,
        // Overlapping compression on every other layer: odd ones of the tiny shape, even ones of the releases.
        (shape, layer) if layer.is_multiple_of(2) == (shape != Shape::Tiny) => 4,
        _ => 128,
    }
}
