//! What `verify` and `inspect` say about sound, damaged, incomplete and split files.

use std::path::{Path, PathBuf};

use gguf_tools::block::BlockType;
use gguf_tools::gguf::{Gguf, GgufError, Layout, Metadata, NewTensor, Value};
use gguf_tools::inspect::inspect;
use gguf_tools::model::{Family, HyperParameters, expected_tensors};
use gguf_tools::progress::{Silent, StopFlag};
use gguf_tools::verify::{Severity, VerifyReport, verify};
use sha2::{Digest, Sha256};
use test_vectors::gguf::{GgufBytes, RawValue};

/// A model of three layers that holds every kind of tensor.
struct Tiny {
    metadata: Metadata,
    tensors: Vec<NewTensor>,
}

impl Tiny {
    fn new() -> Self {
        let config = serde_json::from_str(
            r#"{
            "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 256,
            "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 512,
            "qk_rope_head_dim": 64, "q_lora_rank": 256, "o_lora_rank": 128, "o_groups": 2,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 256, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc", "norm_topk_prob": true, "num_hash_layers": 1, "swiglu_limit": 10.0,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "sliding_window": 128, "compress_ratios": [0, 4, 128],
            "index_n_heads": 2, "index_head_dim": 128, "index_topk": 16, "hc_mult": 4,
            "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
            "max_position_embeddings": 65536, "vocab_size": 64, "num_nextn_predict_layers": 0,
            "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                "original_max_position_embeddings": 4096}
        }"#,
        )
        .unwrap();
        let parameters = HyperParameters::from_config(&config).unwrap();
        let mut metadata = parameters.to_metadata();
        metadata.set("tokenizer.ggml.model", "gpt2");
        metadata.set("tokenizer.ggml.pre", "joyai-llm");
        metadata.set("tokenizer.ggml.tokens", (0..64).map(|i| format!("t{i}")).collect::<Vec<_>>());
        metadata.set("tokenizer.ggml.token_type", vec![1_i32; 64]);
        metadata.set("tokenizer.ggml.merges", vec!["a b".to_owned()]);
        metadata.set("tokenizer.ggml.bos_token_id", 0_u32);
        metadata.set("tokenizer.ggml.eos_token_id", 1_u32);
        metadata.set("tokenizer.chat_template", "{{ messages }}");
        metadata.set("ggsmith.checkpoint.label", "tiny");
        let tensors = expected_tensors(&parameters).into_iter().map(|spec| NewTensor {
            block_type: match spec.family {
                Family::RoutedGate | Family::RoutedUp | Family::RoutedDown => BlockType::Q2K,
                Family::Norm => BlockType::F32,
                Family::RoutingTable => BlockType::I32,
                Family::Embedding => BlockType::F16,
                _ => BlockType::Q8_0,
            },
            name: spec.gguf_name,
            shape: spec.shape,
        });
        Self { metadata, tensors: tensors.collect() }
    }

    /// The file with zeros as data, and `changes` of bytes at a place of a tensor.
    fn bytes(&self, changes: &[(&str, usize, &[u8])]) -> Vec<u8> {
        let layout = Layout::new(self.metadata.clone(), self.tensors.clone(), 32).unwrap();
        let mut bytes = layout.header_bytes();
        bytes.resize(layout.file_bytes() as usize, 0);
        for (name, at, change) in changes {
            let tensor = layout.tensors().iter().find(|tensor| tensor.name == *name).unwrap();
            let at = tensor.offset_bytes as usize + at;
            bytes[at..at + change.len()].copy_from_slice(change);
        }
        bytes
    }
}

fn write(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join("tiny.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

fn report(bytes: &[u8]) -> VerifyReport {
    let folder = tempfile::tempdir().unwrap();
    verify(write(folder.path(), bytes), &Silent).unwrap()
}

/// Tensors (empty for none) and messages of the errors.
fn errors(report: &VerifyReport) -> Vec<(&str, &str)> {
    let errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
    errors.map(|finding| (finding.tensor.as_deref().unwrap_or(""), finding.message.as_str())).collect()
}

fn sha256(bytes: &[u8]) -> String {
    let digits: Vec<_> = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    digits.concat()
}

const NAN: [u8; 2] = [0, 0x7e];

#[test]
fn a_sound_file_has_no_findings_and_loads_in_llama_cpp() {
    let tiny = Tiny::new();
    let bytes = tiny.bytes(&[]);
    let report = report(&bytes);
    assert_eq!(report.findings, []);
    assert!(report.is_sound());
    assert_eq!(report.only_sized, ["blk.0.ffn_gate_tid2eid.weight"]);
    assert_eq!(report.n_checked_tensors + 1, report.n_tensors);
    assert_eq!(report.n_tensors, tiny.tensors.len());
    let digest = sha256(&bytes);
    assert_eq!((report.files[0].file_bytes, &report.files[0].sha256), (bytes.len() as u64, &digest));
    let [llama_cpp, ds4] = &report.runtimes[..] else { panic!() };
    assert_eq!((llama_cpp.name, llama_cpp.loads), ("llama.cpp", true), "{:?}", llama_cpp.reasons);
    assert_eq!((ds4.name, ds4.loads), ("ds4", false));
    let wanted = "key `deepseek4.embedding_length`: found 256 as u32, expected Flash's 4096 as u32";
    assert!(ds4.reasons.iter().any(|reason| reason == wanted), "{:?}", ds4.reasons);
    assert!(serde_json::to_string(&report).unwrap().contains("\"runtimes\""));
}

#[test]
fn bad_blocks_are_counted_and_the_first_is_placed() {
    // Q2_K's scale `d` is at byte 80 of 84; one block a row and 256 rows an expert here.
    let at = |expert: usize, row: usize| (expert * 256 + row) * 84 + 80;
    let name = "blk.1.ffn_down_exps.weight";
    let bytes = Tiny::new().bytes(&[
        (name, at(3, 7), &NAN),
        (name, at(2, 17), &NAN),
        (name, at(3, 255), &NAN),
        ("blk.0.attn_kv.weight", 34 * (8 * 5 + 2), &NAN),
        ("output_norm.weight", 4 * 9, &f32::INFINITY.to_le_bytes()),
    ]);
    let report = report(&bytes);
    let errors = errors(&report);
    assert_eq!(errors.len(), 3, "{errors:?}");
    let message = |name: &str| errors.iter().find(|(tensor, _)| *tensor == name).unwrap().1;
    assert!(message(name).contains("block 529 (expert 2, row 17)"), "{}", message(name));
    assert!(message(name).contains("3 blocks are bad"), "{}", message(name));
    assert!(message("blk.0.attn_kv.weight").contains("block 42 (row 5)"), "{errors:?}");
    assert!(!report.is_sound());
}

#[test]
fn an_expert_id_that_does_not_exist_is_placed() {
    let name = "blk.0.ffn_gate_tid2eid.weight";
    let bytes = Tiny::new().bytes(&[(name, 4 * (2 * 5 + 1), &4_i32.to_le_bytes()), (name, 400, &[0xff; 4])]);
    let report = report(&bytes);
    let [(tensor, message)] = errors(&report)[..] else { panic!("{:?}", report.findings) };
    assert_eq!(tensor, name);
    assert!(message.contains("token 5, entry 1: found expert 4, expected 0 to 3; 2 of"), "{message}");
}

#[test]
fn a_routing_table_of_another_type_is_refused() {
    let mut tiny = Tiny::new();
    let table = tiny.tensors.iter_mut().find(|tensor| tensor.name.contains("tid2eid")).unwrap();
    table.block_type = BlockType::I64;
    assert!(errors(&report(&tiny.bytes(&[])))[0].1.contains("found type I64, expected I32"));
}

#[test]
fn missing_misshapen_and_extra_tensors_are_all_named() {
    let mut tiny = Tiny::new();
    tiny.tensors.retain(|tensor| tensor.name != "blk.1.ffn_norm.weight");
    tiny.tensors.iter_mut().find(|tensor| tensor.name == "token_embd.weight").unwrap().shape = vec![63, 256];
    let extra =
        NewTensor { name: "rope_freqs.weight".to_owned(), block_type: BlockType::F32, shape: vec![8] };
    tiny.tensors.push(extra);
    let report = report(&tiny.bytes(&[]));
    let mut named: Vec<_> = errors(&report).into_iter().map(|(tensor, _)| tensor).collect();
    named.sort_unstable();
    assert_eq!(named, ["blk.1.ffn_norm.weight", "token_embd.weight"]);
    let warning = report.findings.last().unwrap();
    assert_eq!((warning.severity, warning.tensor.as_deref()), (Severity::Warning, Some("rope_freqs.weight")));
    assert_eq!(report.runtimes[0].reasons.len(), 3);
}

#[test]
fn lists_of_wrong_length_and_token_ids_out_of_range_are_named() {
    let mut tiny = Tiny::new();
    tiny.metadata.set("tokenizer.ggml.token_type", vec![1_i32; 63]);
    tiny.metadata.set("deepseek4.swiglu_clamp_exp", vec![10_f32; 4]);
    tiny.metadata.set("tokenizer.ggml.eos_token_id", 64_u32);
    tiny.metadata.remove("tokenizer.chat_template");
    let report = report(&tiny.bytes(&[]));
    let text = format!("{:?}", report.findings);
    for key in ["token_type`: found 63", "swiglu_clamp_exp`: found 4", "eos_token_id`", "chat_template`"] {
        assert!(text.contains(key), "{key}: {text}");
    }
    assert_eq!(errors(&report).len(), 3);
    assert!(!report.runtimes[0].loads);
}

#[test]
fn metadata_that_cannot_be_understood_is_one_error_a_key() {
    let mut tiny = Tiny::new();
    tiny.metadata.remove("deepseek4.expert_count");
    tiny.metadata.set("deepseek4.attention.compress_ratios", vec![0_i32, 4]);
    let report = report(&tiny.bytes(&[]));
    assert_eq!(errors(&report).len(), 2, "{:?}", report.findings);
    assert!(report.runtimes.iter().all(|runtime| !runtime.loads));
}

#[test]
fn a_file_that_is_cut_off_names_the_tensors_that_are_not_there() {
    let bytes = Tiny::new().bytes(&[]);
    let report = report(&bytes[..bytes.len() - 1000]);
    let errors = errors(&report);
    assert_eq!(errors[0].0, "output.weight");
    assert!(errors[0].1.contains("resume"), "{errors:?}");
    assert!(report.runtimes.iter().all(|runtime| !runtime.loads));
}

#[test]
fn a_tensor_whose_region_is_too_short_is_named_and_no_other() {
    let mut file = GgufBytes::default().key("general.architecture", RawValue::String("llama".to_owned()));
    for i in 0..3 {
        file = file.tensor(&format!("blk.{i}.ffn_gate_exps.weight"), 16, &[256, 8, 8], 64 * 66, 0);
    }
    file.tensors[0].data.truncate(63 * 66);
    let report = report(&file.make().bytes);
    let [(tensor, message)] = errors(&report)[..] else { panic!("{:?}", report.findings) };
    assert_eq!(tensor, "blk.0.ffn_gate_exps.weight");
    assert!(message.contains("4160 bytes reserved") && message.contains("4224 bytes"), "{message}");
    assert_eq!((report.only_sized.len(), report.runtimes.len()), (0, 0));
}

#[test]
fn bytes_between_tensors_that_are_not_zero_are_a_warning_with_their_place() {
    let mut bytes = Tiny::new().bytes(&[]);
    let sound = report(&bytes);
    let at = bytes.len();
    bytes.push(7);
    let report = report(&bytes);
    let new: Vec<_> = report.findings.iter().filter(|f| !sound.findings.contains(f)).collect();
    assert_eq!(new.len(), 1, "{new:?}");
    assert!(new[0].message.contains("is 7, expected zero padding"), "{new:?}");
    assert!(new[0].message.contains(&at.to_string()), "{new:?}");
}

#[test]
fn a_layer_file_is_recognised_and_needs_its_own_layers_only() {
    let mut tiny = Tiny::new();
    tiny.tensors.retain(|tensor| !tensor.name.starts_with("blk.0.") && tensor.name != "token_embd.weight");
    let report = report(&tiny.bytes(&[]));
    let layers = report.layers.unwrap();
    assert_eq!((layers.first, layers.last, layers.of), (1, 2, 3));
    assert_eq!(errors(&report), []);
    assert!(report.runtimes[0].reasons.iter().any(|reason| reason.contains("only layers 1 to 2 of 3")));
    tiny.tensors.retain(|tensor| tensor.name != "output.weight");
    assert_eq!(errors(&self::report(&tiny.bytes(&[])))[0].0, "output.weight");
}

#[test]
fn a_split_set_is_verified_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Tiny::new();
    let half = tiny.tensors.len() / 2;
    for (i, tensors) in [&tiny.tensors[..half], &tiny.tensors[half..]].into_iter().enumerate() {
        let mut metadata = if i == 0 { tiny.metadata.clone() } else { Metadata::default() };
        metadata.set("split.no", i as u16);
        metadata.set("split.count", 2_u16);
        metadata.set("split.tensors.count", tiny.tensors.len() as i32);
        let shard = Tiny { metadata, tensors: tensors.to_vec() };
        std::fs::write(folder.path().join(format!("t-0000{}-of-00002.gguf", i + 1)), shard.bytes(&[]))
            .unwrap();
    }
    let report = verify(folder.path().join("t-00002-of-00002.gguf"), &Silent).unwrap();
    assert_eq!((report.files.len(), report.n_tensors), (2, tiny.tensors.len()));
    assert_eq!(report.findings, []);
    assert!(report.runtimes[0].loads, "{:?}", report.runtimes[0].reasons);
    assert!(report.runtimes[1].reasons[0].contains("split in 2"));
}

#[test]
fn verifying_stops_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), &Tiny::new().bytes(&[]));
    let stop = StopFlag::default();
    stop.stop();
    assert!(matches!(verify(path, &stop), Err(GgufError::Interrupted { .. })));
}

#[test]
fn an_inspection_sums_families_and_types() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Tiny::new();
    let gguf = Gguf::open(write(folder.path(), &tiny.bytes(&[]))).unwrap();
    let inspection = inspect(&gguf);
    assert_eq!(inspection.total.n_tensors, tiny.tensors.len());
    assert_eq!(inspection.total.n_bytes, gguf.tensors().iter().map(|tensor| tensor.n_bytes).sum::<u64>());
    let sum: u64 = inspection.families.iter().map(|family| family.total.n_bytes).sum();
    assert_eq!(sum, inspection.total.n_bytes);
    assert!(inspection.families.iter().all(|family| family.family != "other"));
    let gate = inspection.families.iter().find(|family| family.family == "routed-gate").unwrap();
    assert_eq!((gate.total.n_tensors, gate.total.n_values), (3, 3 * 4 * 256 * 256));
    assert_eq!((gate.types[0].block_type, gate.total.bits_per_weight), ("Q2_K", 2.625));
    let tokenizer = inspection.tokenizer.unwrap();
    assert_eq!((tokenizer.n_tokens, tokenizer.n_merges), (64, 1));
    let template = inspection.chat_template.unwrap();
    assert_eq!(template.n_bytes, 14);
    let digest = sha256(b"{{ messages }}");
    assert_eq!(template.sha256, digest);
    assert_eq!(inspection.provenance[0].key, "ggsmith.checkpoint.label");
    let tokens = inspection.metadata.iter().find(|entry| entry.key == "tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens.value, "[t0, t1, t2, t3, t4, t5, t6, t7, ... 64 elements]");
    assert_eq!((inspection.truncated, inspection.split), (None, None));
}

#[test]
fn an_inspection_works_for_other_architectures_and_truncated_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = GgufBytes::small();
    file.keys[0].1 = RawValue::String("llama".to_owned());
    let file = file.key("general.description", RawValue::String("\u{fc}".repeat(500)));
    let made = file.make();
    let path = write(folder.path(), &made.bytes[..made.bytes.len() - 100]);
    let inspection = inspect(&Gguf::open(path).unwrap());
    assert_eq!(inspection.architecture.as_deref(), Some("llama"));
    assert_eq!(inspection.families.len(), 1);
    assert_eq!(inspection.families[0].family, "other");
    assert_eq!(inspection.families[0].types.len(), 6);
    let truncated = inspection.truncated.unwrap();
    // 102 bytes of the last tensor, padded to 128.
    assert_eq!((truncated.n_tensors, truncated.missing_bytes), (1, 100 - 26));
    assert_eq!(truncated.first_tensor, "blk.1.ffn_down_exps.weight");
    let description = inspection.metadata.last().unwrap();
    assert!(description.value.ends_with("... (1000 bytes)"), "{}", description.value);
    assert_eq!(inspection.chat_template, None);
}

#[test]
fn every_value_type_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let mut metadata = Metadata::default();
    metadata.set("a", u64::MAX);
    metadata.set("b", -3_i8);
    metadata.set("c", 0.5_f32);
    metadata.set("d", true);
    metadata.set("e", Value::from(Vec::<u8>::new()));
    metadata.set("f", vec![1.5_f64, 2.0]);
    let bytes = Layout::new(metadata, Vec::new(), 32).unwrap().header_bytes();
    let inspection = inspect(&Gguf::open(write(folder.path(), &bytes)).unwrap());
    let shown: Vec<_> = inspection.metadata.iter().map(|entry| entry.value.as_str()).collect();
    assert_eq!(shown, ["18446744073709551615", "-3", "0.5", "true", "[]", "[1.5, 2]"]);
}
