//! Configurations and metadata: the two releases, what is refused and with which words.

use gguf_tools::checkpoint::{Checkpoint, tokenizer};
use gguf_tools::gguf::{Metadata, Value};
use gguf_tools::model::{Family, HyperParameters, ModelError, SourceRole, TensorTable};
use serde_json::json;
use test_vectors::fixtures;

/// V4 Flash, from the published values, without its compression ratios.
const FLASH: &str = r#"{
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": false,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": true,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": { "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128] },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": false,
    "topk_method": "noaux_tc",
    "vocab_size": 129280
}"#;

/// V4 Flash, from the published values.
fn flash() -> serde_json::Value {
    let mut ratios = vec![0, 0];
    ratios.extend((2..43).map(|layer| if layer % 2 == 0 { 4 } else { 128 }));
    ratios.push(0);
    let mut config: serde_json::Value = serde_json::from_str(FLASH).unwrap();
    config["compress_ratios"] = json!(ratios);
    config
}

/// V4 PRO: other sizes of the same fields.
fn pro() -> serde_json::Value {
    let mut ratios = vec![128, 128];
    ratios.extend((2..61).map(|layer| if layer % 2 == 0 { 4 } else { 128 }));
    ratios.push(0);
    with(&[
        ("compress_ratios", json!(ratios)),
        ("hidden_size", json!(7168)),
        ("index_topk", json!(1024)),
        ("moe_intermediate_size", json!(3072)),
        ("n_routed_experts", json!(384)),
        ("num_attention_heads", json!(128)),
        ("num_hidden_layers", json!(61)),
        ("o_groups", json!(16)),
        ("q_lora_rank", json!(1536)),
        ("routed_scaling_factor", json!(2.5)),
    ])
}

/// Flash with other values; null removes a field.
fn with(changes: &[(&str, serde_json::Value)]) -> serde_json::Value {
    let mut config = flash();
    let fields = config.as_object_mut().unwrap();
    for (field, value) in changes {
        if value.is_null() {
            fields.remove(*field);
        } else {
            fields.insert((*field).to_owned(), value.clone());
        }
    }
    config
}

fn refusal(changes: &[(&str, serde_json::Value)]) -> String {
    HyperParameters::from_config(&with(changes)).unwrap_err().to_string()
}

#[test]
fn flash_has_its_published_layers_tensors_and_sizes() {
    let model = HyperParameters::from_config(&flash()).unwrap();
    let ratios: Vec<u32> = (0..43).map(|layer| model.compress_ratio(layer)).collect();
    let count = |ratio| ratios.iter().filter(|r| **r == ratio).count();
    assert_eq!((count(0), count(4), count(128)), (2, 21, 20));
    let table = TensorTable::new(&model);
    // The release has 69,187 tensors, 1,575 of them in the drafting layer, scales included: every FP8 and FP4 weight has one.
    let weights: usize = table.specs().iter().map(|spec| spec.sources.len()).sum();
    let scales: usize = table
        .specs()
        .iter()
        .filter(|spec| {
            spec.family.is_routed()
                || matches!(spec.family, Family::Attention | Family::SharedExpert)
                || spec.gguf_name.ends_with("indexer.attn_q_b.weight")
        })
        .map(|spec| spec.sources.len())
        .sum();
    assert_eq!(weights + scales, 69_187 - 1_575);
    let shape = |name: &str| table.by_gguf_name(name).unwrap().shape.clone();
    assert_eq!(shape("blk.7.ffn_gate_exps.weight"), [256, 2048, 4096]);
    assert_eq!(shape("blk.7.ffn_down_exps.weight"), [256, 4096, 2048]);
    assert_eq!(shape("blk.2.attn_compressor_ape.weight"), [4, 1024]);
    assert_eq!(shape("blk.3.attn_compressor_ape.weight"), [128, 512]);
    assert_eq!(shape("blk.0.attn_output_a.weight"), [8192, 4096]);
    assert_eq!(shape("blk.4.indexer.attn_q_b.weight"), [8192, 1024]);
    assert_eq!(shape("output_hc_fn.weight"), [4, 16384]);
    assert_eq!(shape("blk.2.ffn_gate_tid2eid.weight"), [129280, 6]);
    assert!(table.by_gguf_name("blk.3.ffn_gate_tid2eid.weight").is_none());
    assert!(table.by_gguf_name("blk.2.exp_probs_b.bias").is_none());
}

#[test]
fn pro_follows_from_its_configuration_alone() {
    let model = HyperParameters::from_config(&pro()).unwrap();
    let table = TensorTable::new(&model);
    let shape = |name: &str| table.by_gguf_name(name).unwrap().shape.clone();
    assert_eq!(shape("blk.60.ffn_up_exps.weight"), [384, 3072, 7168]);
    assert_eq!(shape("blk.60.indexer.attn_q_b.weight"), [8192, 1536]);
    assert_eq!(shape("blk.0.attn_compressor_kv.weight"), [512, 7168]);
    assert_eq!(shape("blk.1.attn_output_a.weight"), [16384, 4096]);
    let metadata = model.to_metadata();
    assert_eq!(metadata.get("deepseek4.attention.indexer.top_k"), Some(&Value::U32(1024)));
    assert_eq!(metadata.get("deepseek4.expert_count"), Some(&Value::U32(384)));
    assert_eq!(metadata.get("deepseek4.swiglu_clamp_exp").unwrap().as_array().unwrap().len(), 61);
}

#[test]
fn metadata_gives_the_configuration_back() {
    for config in [flash(), pro()] {
        let model = HyperParameters::from_config(&config).unwrap();
        let mut back = HyperParameters::from_metadata(&model.to_metadata()).unwrap();
        back.num_nextn_predict_layers = model.num_nextn_predict_layers;
        assert_eq!(back, model);
    }
}

#[test]
fn metadata_as_ds4_writes_it_is_enough() {
    let model = HyperParameters::from_config(&flash()).unwrap();
    let mut metadata = model.to_metadata();
    for key in ["rope.scaling.type", "expert_gating_func", "context_length", "swiglu_clamp_shexp"] {
        metadata.remove(&format!("deepseek4.{key}")).unwrap();
    }
    metadata.set("deepseek4.attention.compress_ratios", model.compress_ratios[..43].to_vec());
    let read = HyperParameters::from_metadata(&metadata).unwrap();
    assert_eq!(read.max_position_embeddings, 1_048_576);
}

#[test]
fn metadata_that_cannot_be_used_is_refused_key_by_key() {
    let mut metadata = HyperParameters::from_config(&flash()).unwrap().to_metadata();
    metadata.remove("deepseek4.attention.compress_ratios");
    metadata.set("deepseek4.hyper_connection.count", 3_u32);
    metadata.set("deepseek4.expert_gating_func", 2_u32);
    metadata.set("deepseek4.expert_count", "many");
    let message = HyperParameters::from_metadata(&metadata).unwrap_err().to_string();
    for part in [
        "`deepseek4.attention.compress_ratios`: missing",
        "`deepseek4.hyper_connection.count`: found 3",
        "`deepseek4.expert_gating_func`: found 2, only 4",
        "`deepseek4.expert_count`: found \"many\"",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let mut other = Metadata::default();
    other.set("general.architecture", "glm-dsa");
    let message = HyperParameters::from_metadata(&other).unwrap_err().to_string();
    assert!(message.contains("`glm-dsa`") && message.contains("deepseek4"), "{message}");
}

#[test]
fn other_models_are_refused_by_name() {
    for model_type in ["deepseek_v41", "glm4_moe", "qwen3_moe", "deepseek_v3"] {
        let error = HyperParameters::from_config(&with(&[("model_type", json!(model_type))])).unwrap_err();
        assert!(
            matches!(&error, ModelError::UnsupportedArchitecture { found, .. } if found == model_type),
            "{error}"
        );
        assert!(error.to_string().contains("deepseek_v4"), "{error}");
    }
    assert!(refusal(&[("model_type", json!("deepseek_v41"))]).contains("another architecture"));
    assert!(refusal(&[("vision_config", json!({}))]).contains("`vision_config`"));
    let unnamed = HyperParameters::from_config(&json!({})).unwrap_err();
    assert!(matches!(unnamed, ModelError::NoArchitecture { field: "model_type", .. }));
}

#[test]
fn every_problem_of_a_configuration_is_in_one_message() {
    let message = refusal(&[
        ("compress_ratios", json!(null)),
        ("hc_mult", json!(2)),
        ("scoring_func", json!("softmax")),
        ("topk_method", json!("greedy")),
        ("hidden_act", json!("gelu")),
        ("norm_topk_prob", json!(false)),
        ("attention_bias", json!(true)),
        ("o_groups", json!(7)),
        ("hidden_size", json!(4100)),
        ("rope_scaling", json!({ "type": "linear", "factor": 16 })),
        ("num_experts_per_tok", json!(300)),
        ("index_topk", json!(-5)),
    ]);
    for part in [
        "`compress_ratios`: missing; it is required and has no default",
        "`hc_mult`: found 2, only 4",
        "`scoring_func`: found \"softmax\"",
        "`topk_method`: found \"greedy\"",
        "`hidden_act`: found \"gelu\"",
        "`norm_topk_prob`: found false",
        "`attention_bias`: found true",
        "`o_groups`: 64 heads of width 512 cannot be divided into 7",
        "`hidden_size`: found 4100",
        "`rope_scaling.type`: found \"linear\"",
        "`rope_scaling.beta_fast`: missing",
        "`num_experts_per_tok`: found 300, more than the 256",
        "`index_topk`: found -5",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn ratios_must_be_known_and_enough() {
    assert!(refusal(&[("compress_ratios", json!([0, 4]))]).contains("found 2 entries for 43 layers"));
    let mut ratios = vec![4; 44];
    ratios[9] = 2;
    assert!(refusal(&[("compress_ratios", json!(ratios))]).contains("entry 9 is 2; only 0, 4 and 128"));
}

#[test]
fn counts_that_would_exhaust_memory_are_refused() {
    for (field, value) in
        [("n_routed_experts", 1_u64 << 31), ("num_hidden_layers", 1 << 31), ("vocab_size", 1 << 31)]
    {
        assert!(refusal(&[(field, json!(value))]).contains(field));
    }
    let widest = json!(u32::MAX / 32 * 32);
    assert!(refusal(&[("num_attention_heads", widest.clone()), ("head_dim", widest)]).contains("64 bits"));
}

#[test]
fn the_0731_release_is_accepted_and_its_drafter_noted() {
    let mut ratios: Vec<u32> = HyperParameters::from_config(&flash()).unwrap().compress_ratios[..43].to_vec();
    ratios.extend([0, 0, 0]);
    let config = with(&[
        ("compress_ratios", json!(ratios)),
        ("dspark_block_size", json!(5)),
        ("dspark_markov_rank", json!(256)),
        ("dspark_noise_token_id", json!(128_799)),
        ("dspark_target_layer_ids", json!([40, 41, 42])),
    ]);
    let model = HyperParameters::from_config(&config).unwrap();
    assert_eq!(model.dspark.as_ref().unwrap().target_layer_ids, [40, 41, 42]);
    let table = TensorTable::new(&model);
    assert_eq!(table.role("mtp.2.markov_head.markov_w1.weight"), SourceRole::Draft);
    assert_eq!(table.role("layers.1.ffn.gate.bias"), SourceRole::Unused);
    assert_eq!(table.role("layers.50.ffn.gate.bias"), SourceRole::Unknown);
    assert!(matches!(table.role("vision.blocks.0.weight"), SourceRole::Refused(_)));
}

/// The value of a scalar or short list as the golden header prints it.
fn printed(value: &Value) -> String {
    let number =
        |x: f64| if x.fract() == 0.0 { format!("{x:.1}") } else { format!("{x:?}").replace("e-7", "e-07") };
    let list = |items: Vec<String>| format!("[{}]", items.join(", "));
    match value {
        Value::String(text) => format!("STRING = '{text}'"),
        Value::U32(n) => format!("UINT32 = {n}"),
        Value::F32(x) => format!("FLOAT32 = {}", number(f64::from(*x))),
        Value::Bool(truth) => format!("BOOL = {}", if *truth { "True" } else { "False" }),
        Value::Array(array) => match (array.as_i64s(), array.as_f64s()) {
            (Some(numbers), _) => {
                format!("ARRAY/INT32 = {}", list(numbers.iter().map(ToString::to_string).collect()))
            }
            (_, Some(numbers)) => {
                format!("ARRAY/FLOAT32 = {}", list(numbers.into_iter().map(number).collect()))
            }
            _ => String::new(),
        },
        _ => String::new(),
    }
}

#[test]
fn metadata_is_what_llama_cpp_writes_plus_what_ds4_needs() {
    let Some(folder) = fixtures("golden metadata") else { return };
    let checkpoint = Checkpoint::open(folder.join("tiny-native")).unwrap();
    let header = std::fs::read_to_string(folder.join("golden/llamacpp_header.txt")).unwrap();
    let mut ours = checkpoint.hyper_parameters().to_metadata();
    for (key, value) in tokenizer::sampling_metadata(&checkpoint).unwrap().iter() {
        ours.set(key, value.clone());
    }
    let mut compared = 0;
    for (key, golden) in header.lines().filter_map(|line| line.strip_prefix("KV ")?.split_once(" : ")) {
        let by_the_build = ["general.name", "general.file_type", "general.size_label"].contains(&key);
        if by_the_build || key.starts_with("tokenizer.") {
            continue;
        }
        let value = ours.remove(key).unwrap_or_else(|| panic!("{key} is missing"));
        assert_eq!(printed(&value), golden, "{key}");
        compared += 1;
    }
    assert!(compared > 40, "{compared}");
    let more: Vec<&str> = ours.iter().map(|(key, _)| key).collect();
    assert_eq!(more, ["deepseek4.vocab_size"]);
}
