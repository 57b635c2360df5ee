//! Reading in pieces, and the runtimes' rules on headers of the real size: files of holes, whose data is not read.

use std::fs::File;
use std::io::Write;

use super::{Findings, RuntimeVerdict, Severity, data, ds4, llama_cpp, model};
use crate::block::BlockType;
use crate::gguf::{Gguf, Layout, Metadata, NewTensor};
use crate::model::{Family, HyperParameters, expected_tensors};
use crate::progress::Silent;

fn flash() -> HyperParameters {
    let mut ratios: Vec<u32> = (0..43).map(|l| if l < 2 { 0 } else { [4, 128][l % 2] }).collect();
    ratios.push(0);
    let text = r#"{
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
        "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        "norm_topk_prob": true, "num_hash_layers": 3, "swiglu_limit": 10.0, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "sliding_window": 128, "compress_ratios": RATIOS, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "rope_theta": 10000, "compress_rope_theta": 160000, "max_position_embeddings": 1048576,
        "vocab_size": 129280, "num_nextn_predict_layers": 1,
        "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 65536}
    }"#;
    let config = serde_json::from_str(&text.replace("RATIOS", &format!("{ratios:?}"))).unwrap();
    HyperParameters::from_config(&config).unwrap()
}

fn published_type(family: Family) -> BlockType {
    match family {
        Family::RoutedGate | Family::RoutedUp => BlockType::Iq2Xxs,
        Family::RoutedDown => BlockType::Q2K,
        Family::SharedExpert | Family::Attention | Family::Output => BlockType::Q8_0,
        Family::Norm => BlockType::F32,
        Family::RoutingTable => BlockType::I32,
        _ => BlockType::F16,
    }
}

fn published() -> (Metadata, Vec<NewTensor>) {
    let parameters = flash();
    let mut metadata = parameters.to_metadata();
    let mut tokens: Vec<String> = (0..129_280).map(|i| format!("t{i}")).collect();
    let specials = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"];
    for (i, special) in specials.into_iter().chain(["<think>", "</think>", "｜DSML｜"]).enumerate() {
        special.clone_into(&mut tokens[i]);
    }
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", "joyai-llm");
    metadata.set("tokenizer.ggml.tokens", tokens);
    metadata.set("tokenizer.ggml.token_type", vec![1_i32; 129_280]);
    metadata.set("tokenizer.ggml.merges", vec!["a b".to_owned()]);
    metadata.set("tokenizer.ggml.bos_token_id", 0_u32);
    metadata.set("tokenizer.ggml.eos_token_id", 1_u32);
    metadata.set("tokenizer.chat_template", "{{ messages }}");
    let tensors = expected_tensors(&parameters).into_iter().map(|spec| NewTensor {
        block_type: published_type(spec.family),
        name: spec.gguf_name,
        shape: spec.shape,
    });
    (metadata, tensors.collect())
}

/// llama.cpp's and ds4's verdicts, and the findings; `None` where the file system holds no such file.
fn verdicts(metadata: Metadata, tensors: Vec<NewTensor>) -> Option<([RuntimeVerdict; 2], Findings)> {
    let layout = Layout::new(metadata, tensors, 32).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flash.gguf");
    let mut file = File::create(&path).unwrap();
    file.write_all(&layout.header_bytes()).unwrap();
    if file.set_len(layout.file_bytes()).is_err() {
        test_vectors::report_skip("this file system holds no file of 90 GB of holes");
        return None;
    }
    let (gguf, regions) = Gguf::open_collecting(&path).unwrap();
    let mut findings = Findings::default();
    let model = model::check(&gguf, &mut findings);
    Some(([llama_cpp::judge(&gguf, &model, &regions), ds4::judge(&gguf, &model, &regions)], findings))
}

#[test]
fn a_file_of_the_published_layout_loads_in_both() {
    let (metadata, tensors) = published();
    let Some(([llama_cpp, ds4], findings)) = verdicts(metadata, tensors) else { return };
    assert_eq!((llama_cpp.reasons, llama_cpp.warnings), (vec![], vec![]));
    assert_eq!((ds4.reasons, ds4.warnings), (vec![], vec![]));
    assert!(llama_cpp.loads && ds4.loads);
    assert_eq!(findings.0, []);
}

#[test]
fn types_that_ds4_does_not_take_are_named_by_family() {
    let (metadata, mut tensors) = published();
    for tensor in &mut tensors {
        match tensor.name.as_str() {
            "blk.5.attn_q_a.weight" => tensor.block_type = BlockType::Q4K,
            "blk.6.ffn_up_exps.weight" => tensor.block_type = BlockType::Q2K,
            "token_embd.weight" => tensor.block_type = BlockType::Bf16,
            _ => {}
        }
    }
    let Some(([llama_cpp, ds4], _)) = verdicts(metadata, tensors) else { return };
    assert!(llama_cpp.loads, "{:?}", llama_cpp.reasons);
    let reasons = ds4.reasons.join("\n");
    assert_eq!(ds4.reasons.len(), 3, "{reasons}");
    assert!(reasons.contains("1 attention tensors are Q4_K (first `blk.5.attn_q_a.weight`), expected Q8_0"));
    assert!(reasons.contains("embedding tensors are BF16"), "{reasons}");
    assert!(
        reasons.contains("`blk.6.ffn_gate_exps.weight` is IQ2_XXS, but `blk.6.ffn_up_exps.weight` is Q2_K")
    );
}

#[test]
fn a_missing_routing_bias_stops_llama_cpp_only() {
    let (metadata, mut tensors) = published();
    tensors.retain(|tensor| tensor.name != "blk.9.exp_probs_b.bias");
    let Some(([llama_cpp, ds4], findings)) = verdicts(metadata, tensors) else { return };
    assert_eq!(llama_cpp.reasons, ["tensor `blk.9.exp_probs_b.bias` is missing"]);
    assert!(ds4.loads, "{:?}", ds4.reasons);
    assert_eq!(findings.0[0].severity, Severity::Error);
}

#[test]
fn keys_that_one_of_them_needs_are_named_for_that_one() {
    let (mut metadata, tensors) = published();
    metadata.remove("deepseek4.vocab_size");
    metadata.remove("deepseek4.expert_gating_func");
    metadata.remove("deepseek4.rope.scaling.type");
    metadata.remove("tokenizer.ggml.pre");
    metadata.set("deepseek4.expert_used_count", 6_i32);
    let Some(([llama_cpp, ds4], _)) = verdicts(metadata, tensors) else { return };
    assert_eq!(llama_cpp.reasons, ["key `deepseek4.expert_gating_func` is missing"]);
    assert_eq!(llama_cpp.warnings.len(), 2, "{:?}", llama_cpp.warnings);
    let expected = [
        "key `deepseek4.vocab_size` is missing",
        "key `deepseek4.expert_used_count`: found 6 as i32, expected Flash's 6 as u32",
    ];
    assert_eq!(ds4.reasons, expected);
}

#[test]
fn a_tensor_too_many_stops_llama_cpp_only() {
    let (metadata, mut tensors) = published();
    tensors.push(NewTensor {
        name: "rope_freqs.weight".to_owned(),
        block_type: BlockType::F32,
        shape: vec![32],
    });
    let Some(([llama_cpp, ds4], findings)) = verdicts(metadata, tensors) else { return };
    assert!(llama_cpp.reasons[0].contains("`rope_freqs.weight` is extra"), "{:?}", llama_cpp.reasons);
    assert!(ds4.loads);
    assert_eq!(findings.0[0].severity, Severity::Warning);
}

#[test]
fn findings_do_not_depend_on_where_pieces_of_the_file_end() {
    let made = test_vectors::gguf::GgufBytes::default()
        .tensor("a", 8, &[64, 3], 6 * 34, 0)
        .tensor("b", 10, &[256, 2, 3], 6 * 84, 0)
        .make();
    let mut bytes = made.bytes;
    // Q8_0 has its scale first, Q2_K at byte 80; tensor `b` begins at 224, the next multiple of 32.
    for at in [3 * 34, 4 * 34, 224 + 2 * 84 + 80, 224 + 5 * 84 + 80] {
        bytes[made.data_start + at..][..2].copy_from_slice(&[0, 0x7e]);
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pieces.gguf");
    std::fs::write(&path, &bytes).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let read = |piece_bytes: usize| {
        let mut findings = Findings::default();
        let read = data::read_in_pieces(&gguf, piece_bytes, &Silent, &mut findings).unwrap();
        (findings.0, read.files)
    };
    let whole = read(bytes.len());
    let messages: Vec<_> = whole.0.iter().map(|finding| finding.message.as_str()).collect();
    assert_eq!(messages.len(), 2, "{messages:?}");
    assert!(
        messages[0].starts_with("Q8_0: block 3 (row 1)") && messages[0].contains("2 blocks"),
        "{messages:?}"
    );
    assert!(messages[1].starts_with("Q2_K: block 2 (expert 1, row 0)"), "{messages:?}");
    for piece_bytes in [1, 2, 33, 34, 35, 83, 84, 100, 512] {
        assert_eq!(read(piece_bytes), whole, "pieces of {piece_bytes} bytes");
    }
}
