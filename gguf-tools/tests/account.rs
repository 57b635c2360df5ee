//! What a token costs: figures worked out by hand and published, for many families, from names and shapes.

use gguf_tools::account::*;
use gguf_tools::gguf::{Gguf, Metadata};
use gguf_tools::plan::{Plan, Recipe};
use gguf_tools::progress::Silent;
use gguf_tools::rewrite::{SplitBy, split, write_files};
use gguf_tools::source::WeightSource;
use gguf_tools::synth::{Shape, SynthOptions, SynthSource, write_checkpoint};
use serde_json::{Value, json};

fn account(headers: &Headers) -> Account {
    let account = Account::of(headers, &AccountOptions::default()).unwrap();
    let sum: u64 = account.components.iter().map(|c| c.n_bytes).sum();
    assert_eq!(sum, account.data_bytes, "the table sums to the data");
    assert_eq!(account.data_bytes + account.overhead_bytes, account.file_bytes);
    let token: u64 = account.components.iter().map(|c| c.bytes_per_token).sum();
    assert_eq!(token, account.bytes_per_token);
    account
}

fn component(account: &Account, component: Component) -> (u64, u64) {
    let found = account.components.iter().find(|c| c.component == component);
    found.map_or((0, 0), |c| (c.n_bytes, c.bytes_per_token))
}

fn flash_plan(recipe: &str) -> Plan {
    let source = SynthSource::new(&SynthOptions::new(Shape::Flash)).unwrap();
    Plan::new(&source, &Recipe::built_in(recipe).unwrap(), source.metadata().unwrap()).unwrap()
}

#[test]
fn the_flash_q2_plan_costs_what_was_worked_out_by_hand() {
    let plan = flash_plan("q2");
    assert_eq!(plan.tensor_bytes(), 86_714_775_900);
    let account = account(&Headers::of_plan(&plan));
    assert_eq!(account.data_bytes, 86_714_775_900);
    assert_eq!(account.file_bytes, plan.file_bytes());
    assert_eq!(account.bytes_per_token, 9_559_077_284);
    assert_eq!(account.cache_bytes_per_token, 6_880.0);
    // Family by family; the final norm is counted with the hyper-connections there, with the norms here.
    let by_hand = [
        (Component::RoutedDown, 30_299_652_096, 710_148_096),
        (Component::SharedExpert, 1_149_763_584, 1_149_763_584),
        (Component::Output, 562_626_560, 562_626_560),
        (Component::Compressor, 522_971_136, 522_971_136),
        (Component::Indexer, 451_465_728, 451_465_728),
        (Component::Router, 90_177_536, 90_177_536),
        (Component::SelectionBias, 40_960, 0),
        (Component::HyperConnection, 67_789_916 - 16_384, 67_789_916 - 16_384),
        (Component::Norm, 1_684_224 + 16_384, 1_684_224 + 16_384),
        (Component::RoutingTable, 9_308_160, 72),
        (Component::Embedding, 1_059_061_760, 8_192),
        (
            Component::Attention,
            3 * 1_533_018_112 + 191_627_264 + 95_813_632,
            3 * 1_533_018_112 + 191_627_264 + 95_813_632,
        ),
    ];
    for (family, n_bytes, per_token) in by_hand {
        assert_eq!(component(&account, family), (n_bytes, per_token), "{family}");
    }
    let (gate, up) = (component(&account, Component::RoutedGate), component(&account, Component::RoutedUp));
    assert_eq!((gate.0 + up.0, gate.1 + up.1), (47_613_739_008, 1_115_947_008));
    assert_eq!((account.token.routed, account.experts), (1_826_095_104, Some((256, 6))));
    assert!(account.findings.is_empty(), "{:?}", account.findings);
}

#[test]
fn the_caches_of_flash_are_those_worked_out_by_hand() {
    let headers = Headers::of_plan(&flash_plan("q2"));
    let contexts = vec![2048, 4096, 32_768, 65_536, 131_072, 1_048_576];
    let options = AccountOptions { contexts, ..AccountOptions::default() };
    let account = Account::of(&headers, &options).unwrap();
    let kinds: Vec<_> =
        account.caches.iter().map(|k| (k.n_layers, k.bytes_per_token, k.cache.fixed_bytes())).collect();
    assert_eq!(kinds, [(2, 0.0, 131_072), (21, 320.0, 131_072), (20, 8.0, 131_072)]);
    let megabytes = |bytes: u64| (bytes as f64 / 1e6).round() as u64;
    let grown: Vec<_> = account.contexts.iter().map(|at| megabytes(at.grown_bytes)).collect();
    assert_eq!(grown, [14, 28, 225, 451, 902, 7214]);
    let read: Vec<_> = account.contexts.iter().map(|at| megabytes(at.read_bytes)).collect();
    assert_eq!([read[0], read[2], read[3], read[4]], [20, 66, 115, 214]);
    let wide = AccountOptions { cache_type: CacheType::F32, ..AccountOptions::default() };
    assert_eq!(Account::of(&headers, &wide).unwrap().cache_bytes_per_token, 13_760.0);
    // At 231 GB/s the floor is near 24 tokens a second.
    let gb10 = account.ceilings.iter().find(|c| c.machine.name == "GB10" && c.machine.measured).unwrap();
    assert_eq!(gb10.fits, Some(true));
    assert!(
        (gb10.tokens_per_second[0] - 231e9 / (9_559_077_284.0 + account.contexts[0].read_bytes as f64)).abs()
            < 1e-9
    );
    assert!((24.0..24.2).contains(&gb10.tokens_per_second[0]));
    assert!(account.ceilings.iter().any(|c| c.machine.name == "RTX 5080" && c.fits == Some(false)));
}

#[test]
fn a_checkpoint_a_file_and_its_shards_on_disk_sum_to_their_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_checkpoint(&at("checkpoint"), &SynthOptions::new(Shape::Tiny), &Silent).unwrap();
    let of_checkpoint = account(&Headers::open(&at("checkpoint")).unwrap());
    let sizes = |ending: &str, within: &std::path::Path| -> u64 {
        let files = std::fs::read_dir(within).unwrap().map(|e| e.unwrap().path());
        files.filter(|p| p.to_string_lossy().ends_with(ending)).map(|p| p.metadata().unwrap().len()).sum()
    };
    assert_eq!(of_checkpoint.file_bytes, sizes(".safetensors", &at("checkpoint")));
    assert!(of_checkpoint.findings.is_empty(), "{:?}", of_checkpoint.findings);
    assert_eq!(of_checkpoint.experts, Some((8, 2)));

    let source = SynthSource::new(&SynthOptions::new(Shape::Tiny)).unwrap();
    let plan = Plan::new(&source, &Recipe::built_in("q4").unwrap(), source.metadata().unwrap()).unwrap();
    let options =
        gguf_tools::build::BuildOptions { overwrite: false, resume: false, importance_fallback: true };
    let none = gguf_tools::importance::NoImportance;
    gguf_tools::build::build(&plan, &source, &none, &at("whole.gguf"), options, &Silent).unwrap();
    let whole = account(&Headers::open(&at("whole.gguf")).unwrap());
    assert_eq!(whole.file_bytes, at("whole.gguf").metadata().unwrap().len());
    assert_eq!(whole.token, account(&Headers::of_plan(&plan)).token);
    assert_eq!(whole.token, bytes_per_token_of(&at("whole.gguf")).unwrap());

    let gguf = Gguf::open(at("whole.gguf")).unwrap();
    let files = split(&gguf, &SplitBy::Tensors { most: 30, no_tensor_first: false }, &at("s")).unwrap();
    let written = write_files(&files, &[], gguf_tools::rewrite::WriteOptions::default(), &Silent).unwrap();
    let set = account(&Headers::open(&written[1].path).unwrap());
    assert_eq!(set.token, whole.token);
    assert_eq!(set.file_bytes, written.iter().map(|w| w.file_bytes).sum::<u64>());
    // Cut off: the header alone cannot tell that the data is there.
    let cut = std::fs::read(at("whole.gguf")).unwrap();
    std::fs::write(at("cut.gguf"), &cut[..cut.len() / 2]).unwrap();
    let refused = Headers::open(&at("cut.gguf")).unwrap_err().to_string();
    assert!(refused.contains("cut.gguf") && refused.contains("incomplete"), "{refused}");
}

/// Headers of a checkpoint in BF16 with these tensors.
fn checkpoint(config: Value, tensors: impl IntoIterator<Item = (String, Vec<u64>)>) -> Headers {
    let stored = |(name, shape): (String, Vec<u64>)| {
        let n_bytes = 2 * shape.iter().product::<u64>();
        StoredTensor { name, stored_type: "BF16".to_owned(), shape, n_bytes }
    };
    let tensors: Vec<_> = tensors.into_iter().map(stored).collect();
    let file_bytes = tensors.iter().map(|t| t.n_bytes).sum();
    Headers {
        place: "a checkpoint".to_owned(),
        description: Description::Config(config),
        tensors,
        file_bytes,
        overhead_bytes: 0,
        only_in_index: Vec::new(),
    }
}

type Tensors = Vec<(String, Vec<u64>)>;

/// Adds tensors of one layer or of the whole: name and shape.
fn add(to: &mut Tensors, prefix: &str, rows: &[(&str, &[u64])]) {
    to.extend(rows.iter().map(|(name, shape)| (format!("{prefix}{name}"), shape.to_vec())));
}

/// Llama 3.1 8B: 8,030,261,248 parameters; 131,072 bytes a token in the caches (32 layers x 2 x 8 heads x 128 x 2).
#[test]
fn a_dense_model_costs_its_parameters_but_for_the_embedding() {
    let mut tensors = Tensors::new();
    add(
        &mut tensors,
        "",
        &[
            ("model.embed_tokens.weight", &[128_256, 4096]),
            ("model.norm.weight", &[4096]),
            ("lm_head.weight", &[128_256, 4096]),
        ],
    );
    for layer in 0..32 {
        add(
            &mut tensors,
            &format!("model.layers.{layer}."),
            &[
                ("input_layernorm.weight", &[4096]),
                ("post_attention_layernorm.weight", &[4096]),
                ("self_attn.q_proj.weight", &[4096, 4096]),
                ("self_attn.k_proj.weight", &[1024, 4096]),
                ("self_attn.v_proj.weight", &[1024, 4096]),
                ("self_attn.o_proj.weight", &[4096, 4096]),
                ("mlp.gate_proj.weight", &[14_336, 4096]),
                ("mlp.up_proj.weight", &[14_336, 4096]),
                ("mlp.down_proj.weight", &[4096, 14_336]),
            ],
        );
    }
    let config = json!({ "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096 });
    let found = account(&checkpoint(config.clone(), tensors.clone()));
    assert_eq!(found.data_bytes, 2 * 8_030_261_248);
    assert_eq!(found.bytes_per_token, 2 * (8_030_261_248 - 128_256 * 4096 + 4096));
    assert_eq!(found.cache_bytes_per_token, 131_072.0);
    assert_eq!((found.experts, found.findings.len()), (None, 0));
    // Tied: the embedding is read whole once more, and stored once.
    let tied: Tensors = tensors.iter().filter(|(name, _)| name != "lm_head.weight").cloned().collect();
    let mut tied_config = config.clone();
    tied_config["tie_word_embeddings"] = json!(true);
    let tied = account(&checkpoint(tied_config, tied));
    assert_eq!(tied.bytes_per_token, found.bytes_per_token);
    assert_eq!(tied.data_bytes, found.data_bytes - 2 * 128_256 * 4096);
    // Packed GPTQ weights: widths come from the heads.
    let packed = tensors.iter().map(|(name, shape)| {
        let is_matrix = name.contains("_proj");
        (
            if is_matrix { name.replace(".weight", ".qweight") } else { name.clone() },
            if is_matrix { vec![shape[1] / 8, shape[0]] } else { shape.clone() },
        )
    });
    assert_eq!(account(&checkpoint(config, packed)).cache_bytes_per_token, 131_072.0);
}

/// Qwen 3 30B A3B: 30,532,122,624 parameters, 98,304 bytes a token in the caches.
#[test]
fn a_mixture_costs_the_experts_that_work() {
    let mut tensors = Tensors::new();
    add(
        &mut tensors,
        "",
        &[
            ("model.embed_tokens.weight", &[151_936, 2048]),
            ("model.norm.weight", &[2048]),
            ("lm_head.weight", &[151_936, 2048]),
        ],
    );
    for layer in 0..48 {
        let prefix = format!("model.layers.{layer}.");
        add(
            &mut tensors,
            &prefix,
            &[
                ("input_layernorm.weight", &[2048]),
                ("post_attention_layernorm.weight", &[2048]),
                ("self_attn.q_proj.weight", &[4096, 2048]),
                ("self_attn.k_proj.weight", &[512, 2048]),
                ("self_attn.v_proj.weight", &[512, 2048]),
                ("self_attn.o_proj.weight", &[2048, 4096]),
                ("self_attn.q_norm.weight", &[128]),
                ("self_attn.k_norm.weight", &[128]),
                ("mlp.gate.weight", &[128, 2048]),
            ],
        );
        for expert in 0..128 {
            add(
                &mut tensors,
                &format!("{prefix}mlp.experts.{expert}."),
                &[
                    ("gate_proj.weight", &[768, 2048]),
                    ("up_proj.weight", &[768, 2048]),
                    ("down_proj.weight", &[2048, 768]),
                ],
            );
        }
    }
    let config = json!({ "model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "head_dim": 128, "sliding_window": null });
    let found = account(&checkpoint(config.clone(), tensors.clone()));
    assert_eq!(found.data_bytes, 2 * 30_532_122_624);
    assert_eq!(found.cache_bytes_per_token, 98_304.0);
    let routed = 2 * 48 * 128 * 3 * 768 * 2048;
    assert_eq!(found.token.routed, routed / 16);
    assert_eq!(found.token.dense, found.data_bytes - routed - 2 * 151_936 * 2048);
    assert!(found.findings.is_empty(), "{:?}", found.findings);
    // A count that is missing is no zero.
    let mut silent = config.clone();
    silent.as_object_mut().unwrap().remove("num_experts_per_tok");
    let refused = Account::of(&checkpoint(silent, tensors.clone()), &AccountOptions::default()).unwrap_err();
    assert!(
        matches!(refused, AccountError::MissingFact { .. })
            && refused.to_string().contains("num_experts_per_tok")
    );
    let mut more = config;
    more["num_experts"] = json!(160);
    let found = account(&checkpoint(more, tensors));
    assert_eq!(found.findings, ["config says 160 routed experts, index has numbers up to 127"]);
}

/// DeepSeek V3: 61 layers keep 576 values each, 70,272 bytes a token.
#[test]
fn latent_attention_keeps_the_latent_row_and_an_indexer_its_key() {
    let tensors = |indexer: bool| {
        let mut tensors = Tensors::new();
        add(&mut tensors, "model.", &[("embed_tokens.weight", &[129_280, 7168])]);
        for layer in 0..61 {
            let prefix = format!("model.layers.{layer}.self_attn.");
            add(
                &mut tensors,
                &prefix,
                &[("kv_a_proj_with_mqa.weight", &[576, 7168]), ("kv_b_proj.weight", &[32_768, 512])],
            );
            if indexer {
                add(
                    &mut tensors,
                    &prefix,
                    &[("indexer.wk.weight", &[128, 7168]), ("indexer.wq_b.weight", &[8192, 1536])],
                );
            }
        }
        tensors
    };
    let config = json!({ "num_hidden_layers": 61, "index_topk": 2048 });
    assert_eq!(account(&checkpoint(config.clone(), tensors(false))).cache_bytes_per_token, 70_272.0);
    let sparse = account(&checkpoint(config, tensors(true)));
    assert_eq!(sparse.cache_bytes_per_token, 61.0 * 2.0 * (576.0 + 128.0));
    // Far out, a token reads all index keys and 2048 latent rows.
    let far = sparse.contexts.iter().find(|at| at.context == 131_072).unwrap();
    assert_eq!(far.read_bytes, 61 * 2 * (2048 * 576 + 131_072 * 128));
}

/// Nemotron-H and Qwen 3 Next: layers with attention are the few, the others carry a state.
#[test]
fn hybrid_layers_are_told_apart_by_their_tensors() {
    let mut tensors = Tensors::new();
    add(
        &mut tensors,
        "",
        &[
            ("backbone.embeddings.weight", &[131_072, 4096]),
            ("backbone.norm_f.weight", &[4096]),
            ("lm_head.weight", &[131_072, 4096]),
        ],
    );
    for (layer, kind) in "M-M-M-M*-M-".chars().enumerate() {
        let prefix = format!("backbone.layers.{layer}.");
        add(&mut tensors, &prefix, &[("norm.weight", &[4096])]);
        let rows: &[(&str, &[u64])] = match kind {
            'M' => &[
                ("mixer.in_proj.weight", &[18_560, 4096]),
                ("mixer.conv1d.weight", &[10_240, 1, 4]),
                ("mixer.A_log", &[128]),
                ("mixer.D", &[128]),
                ("mixer.dt_bias", &[128]),
                ("mixer.norm.weight", &[8192]),
                ("mixer.out_proj.weight", &[4096, 8192]),
            ],
            '*' => &[
                ("mixer.q_proj.weight", &[4096, 4096]),
                ("mixer.k_proj.weight", &[1024, 4096]),
                ("mixer.v_proj.weight", &[1024, 4096]),
                ("mixer.o_proj.weight", &[4096, 4096]),
            ],
            _ => &[("mixer.up_proj.weight", &[21_504, 4096]), ("mixer.down_proj.weight", &[4096, 21_504])],
        };
        add(&mut tensors, &prefix, rows);
    }
    let config = json!({ "model_type": "nemotron_h", "num_hidden_layers": 11, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4 });
    let found = account(&checkpoint(config.clone(), tensors.clone()));
    assert_eq!(found.cache_bytes_per_token, 4096.0);
    let state = 4 * (8192 * 128 + (8192 + 2 * 8 * 128) * 3);
    let kinds: Vec<_> =
        found.caches.iter().map(|k| (k.cache.kind.as_str(), k.n_layers, k.cache.state_bytes)).collect();
    assert_eq!(
        kinds,
        [("recurrent", 5, Some(state)), ("no attention", 5, Some(0)), ("full attention", 1, Some(0))]
    );
    assert!(found.findings.is_empty(), "{:?}", found.findings);
    // Without the sizes of the state nothing is made up.
    let bare = account(&checkpoint(json!({ "num_hidden_layers": 11 }), tensors));
    assert!(bare.findings.iter().any(|f| f.contains("recurrent states")), "{:?}", bare.findings);
}

#[test]
fn windows_bound_what_layers_keep() {
    let mut tensors = Tensors::new();
    add(&mut tensors, "model.", &[("embed_tokens.weight", &[1000, 64])]);
    for layer in 0..4 {
        add(
            &mut tensors,
            &format!("model.layers.{layer}.self_attn."),
            &[("k_proj.weight", &[128, 64]), ("v_proj.weight", &[128, 64])],
        );
    }
    let kinds = json!(["sliding_attention", "full_attention", "sliding_attention", "full_attention"]);
    let config =
        json!({ "text_config": { "num_hidden_layers": 4, "sliding_window": 1024, "layer_types": kinds } });
    let found = account(&checkpoint(config, tensors.clone()));
    assert_eq!(found.cache_bytes_per_token, 2.0 * 512.0);
    assert_eq!(found.cache_fixed_bytes, 2 * 1024 * 512);
    let off = json!({ "num_hidden_layers": 4, "sliding_window": 1024, "use_sliding_window": false });
    assert_eq!(account(&checkpoint(off, tensors)).cache_bytes_per_token, 4.0 * 512.0);
}

#[test]
fn promises_that_the_tensors_do_not_keep_are_reported() {
    let mut tensors = Tensors::new();
    add(&mut tensors, "model.", &[("embed_tokens.weight", &[1000, 64])]);
    for layer in [0, 1, 3] {
        add(
            &mut tensors,
            &format!("model.layers.{layer}."),
            &[("self_attn.k_proj.weight", &[128, 64]), ("mlp.up_proj.weight", &[128, 64])],
        );
    }
    let config = json!({
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": false,
        "vision_config": { "depth": 27 },
        "quantization_config": { "quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp.up_proj", "re:.*vision.*"] },
    });
    let mut headers = checkpoint(config, tensors);
    headers.only_in_index = vec!["model.layers.2.mlp.up_proj.weight".to_owned()];
    let expected = [
        "config says 1 MTP layer, index has 0 tensors",
        "config says a vision tower (`vision_config`), index has 0 tensors",
        "config says 4 layers, index has no tensor of 2",
        "config says that the output head is not tied to the embedding, index has no output head",
        "config says the weights are quantized (`compressed-tensors`), index has no scales",
        "config leaves `lm_head` unquantized (`quantization_config.ignore`), index has no such module",
        "config leaves `re:.*vision.*` unquantized (`quantization_config.ignore`), index has no such module",
        "the index lists 1 tensors that no file holds, the first is `model.layers.2.mlp.up_proj.weight`",
    ];
    assert_eq!(account(&headers).findings, expected);
    // Drafting tensors and towers that are there are counted apart.
    let kept = [
        StoredTensor {
            name: "mtp.0.fc.weight".to_owned(),
            stored_type: "BF16".to_owned(),
            shape: vec![8, 8],
            n_bytes: 128,
        },
        StoredTensor {
            name: "visual.merger.weight".to_owned(),
            stored_type: "BF16".to_owned(),
            shape: vec![8, 8],
            n_bytes: 128,
        },
    ];
    let before = account(&headers).bytes_per_token;
    headers.tensors.extend(kept);
    headers.file_bytes += 256;
    let found = account(&headers);
    assert_eq!(found.bytes_per_token, before);
    assert_eq!(
        (component(&found, Component::Drafting), component(&found, Component::Vision)),
        ((128, 0), (128, 0))
    );
    assert_eq!(found.findings, expected[2..]);
}

#[test]
fn what_cannot_be_told_is_an_error_by_name() {
    let mut tensors = Tensors::new();
    add(
        &mut tensors,
        "model.",
        &[("embed_tokens.weight", &[1000, 64]), ("layers.0.surprise.weight", &[8, 8])],
    );
    let one = json!({ "num_hidden_layers": 1 });
    let refused = Account::of(&checkpoint(one.clone(), tensors), &AccountOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("`model.layers.0.surprise.weight`"), "{refused}");
    let mut tensors = Tensors::new();
    add(&mut tensors, "model.layers.0.", &[("self_attn.strange.weight", &[8, 8])]);
    let refused = Account::of(&checkpoint(one, tensors.clone()), &AccountOptions::default()).unwrap_err();
    assert!(matches!(refused, AccountError::UnknownCache { layer: 0, .. }), "{refused}");
    let refused = Account::of(&checkpoint(json!({}), tensors), &AccountOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("num_hidden_layers"), "{refused}");
}

/// A GGUF header of another family, with heads given by layer.
#[test]
fn a_gguf_of_another_family_is_accounted_for_by_its_metadata() {
    let mut metadata = Metadata::default();
    metadata.set("general.architecture", "qwen3next");
    metadata.set("qwen3next.block_count", 4_u32);
    metadata.set("qwen3next.expert_count", 8_u32);
    metadata.set("qwen3next.expert_used_count", 2_u32);
    metadata.set("qwen3next.ssm.inner_size", 256_u32);
    metadata.set("qwen3next.ssm.state_size", 32_u32);
    metadata.set("qwen3next.ssm.group_count", 2_u32);
    metadata.set("qwen3next.ssm.conv_kernel", 4_u32);
    let mut tensors = Tensors::new();
    add(
        &mut tensors,
        "",
        &[("token_embd.weight", &[1000, 64]), ("output.weight", &[1000, 64]), ("output_norm.weight", &[64])],
    );
    for layer in 0..4 {
        let prefix = format!("blk.{layer}.");
        add(
            &mut tensors,
            &prefix,
            &[
                ("ffn_gate_exps.weight", &[8, 32, 64]),
                ("ffn_gate_inp.weight", &[8, 64]),
                ("ffn_gate_inp_shexp.weight", &[64]),
            ],
        );
        let rows: &[(&str, &[u64])] = if layer == 3 {
            &[("attn_q.weight", &[256, 64]), ("attn_k.weight", &[64, 64]), ("attn_v.weight", &[64, 64])]
        } else {
            &[
                ("attn_qkv.weight", &[384, 64]),
                ("attn_gate.weight", &[256, 64]),
                ("ssm_out.weight", &[64, 256]),
                ("ssm_a", &[8]),
            ]
        };
        add(&mut tensors, &prefix, rows);
    }
    let headers = Headers { description: Description::Metadata(metadata), ..checkpoint(json!({}), tensors) };
    let found = account(&headers);
    assert_eq!(found.cache_bytes_per_token, 256.0);
    assert_eq!(component(&found, Component::RoutedGate), (4 * 2 * 8 * 32 * 64, 4 * 2 * 2 * 32 * 64));
    let state = 4 * (256 * 32 + (256 + 2 * 2 * 32) * 3);
    assert_eq!(found.cache_fixed_bytes, 3 * state);
    assert_eq!(component(&found, Component::Embedding), (128_000, 128));
}
