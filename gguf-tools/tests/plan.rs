//! Plans from headers alone: exact sizes of the releases, what a recipe may say and what is refused with which words.

use gguf_tools::block::BlockType;
use gguf_tools::model::{Family, HyperParameters};
use gguf_tools::plan::{Conversion, Plan, PlanError, Recipe, Rule, writable_types};
use gguf_tools::source::WeightSource;
use gguf_tools::synth::{Shape, SynthOptions, SynthSource};

fn source(shape: Shape) -> SynthSource {
    SynthSource::new(&SynthOptions::new(shape)).unwrap()
}

/// The tiny model with experts of 288 columns on the way down: whole blocks of 32, not of 256 values.
fn narrow() -> SynthSource {
    let mut config = SynthOptions::new(Shape::Tiny).config();
    config["moe_intermediate_size"] = 288.into();
    SynthSource::from_config(&config, "narrow", 0).unwrap()
}

fn plan(source: &SynthSource, recipe: &Recipe) -> Result<Plan, PlanError> {
    Plan::new(source, recipe, source.metadata().unwrap())
}

fn built_in(name: &str) -> Recipe {
    Recipe::built_in(name).unwrap()
}

fn with_rules(name: &str, rules: impl IntoIterator<Item = Rule>) -> Recipe {
    Recipe { rules: rules.into_iter().collect(), ..built_in(name) }
}

fn target(plan: &Plan, name: &str) -> BlockType {
    plan.tensors.iter().find(|tensor| tensor.spec.gguf_name == name).unwrap().target
}

#[test]
fn flash_in_q2_has_the_published_bytes_and_tensors_at_any_alignment() {
    let source = source(Shape::Flash);
    for alignment in [32, 4096] {
        let plan = plan(&source, &Recipe { alignment, ..built_in("q2") }).unwrap();
        assert_eq!(plan.tensor_bytes(), 86_714_775_900);
        let padding = plan.file_bytes() - plan.layout.data_offset_bytes() - plan.tensor_bytes();
        assert!(padding < plan.tensors.len() as u64 * u64::from(alignment));
        assert!(plan.tensors.iter().all(|tensor| tensor.offset_bytes.is_multiple_of(u64::from(alignment))));
        assert!(plan.fallbacks.is_empty() && plan.idle_rules.is_empty());
    }
}

#[test]
fn the_families_of_flash_have_their_counts_and_types() {
    let plan = plan(&source(Shape::Flash), &built_in("q2")).unwrap();
    let totals = plan.family_totals();
    let found: Vec<_> = totals
        .iter()
        .map(|t| (t.family.name(), t.n_tensors, t.source_types.join(","), t.target_types.join(",")))
        .collect();
    let expected = [
        ("routed-gate", 43, "FP4", "IQ2_XXS"),
        ("routed-up", 43, "FP4", "IQ2_XXS"),
        ("routed-down", 43, "FP4", "Q2_K"),
        ("shared", 3 * 43, "FP8", "Q8_0"),
        ("attention", 5 * 43, "FP8", "Q8_0"),
        // 41 compressed layers: 21 with an indexer, 20 without.
        ("compressor", 3 * 41, "F32,BF16", "F16"),
        ("indexer", 5 * 21, "FP8,BF16,F32", "F16"),
        ("router", 43, "BF16", "F16"),
        ("routing-table", 3, "I64", "I32"),
        ("hyper-connection", 2 * 43 + 1, "F32", "F16"),
        ("norm", 9 * 43 + 40 + 41 + 21 + 3, "F32,BF16", "F32"),
        ("embedding", 1, "BF16", "F16"),
        ("output", 1, "BF16", "Q8_0"),
    ];
    assert_eq!(found, expected.map(|(f, n, from, to)| (f, n, from.to_owned(), to.to_owned())));
    assert_eq!(totals.iter().map(|t| t.n_bytes).sum::<u64>(), plan.tensor_bytes());
    let of = |family| totals.iter().find(|t| t.family == family).unwrap();
    // Experts: 256 of 2048 x 4096 values, half a byte each and one scale byte for 32.
    assert_eq!(of(Family::RoutedGate).source_bytes, 43 * 256 * 2048 * 4096 / 32 * 17);
    assert!((of(Family::RoutedGate).bits_per_value - 2.0625).abs() < 1e-12);
}

#[test]
fn pro_plans_from_its_configuration_and_its_metadata_says_so() {
    let plan = plan(&source(Shape::Pro), &built_in("q2")).unwrap();
    let model = HyperParameters::from_metadata(plan.layout.metadata()).unwrap();
    assert_eq!((model.num_hidden_layers, model.n_routed_experts, model.index_topk), (61, 384, 1024));
    assert_eq!(model.compress_ratios[..4], [128, 128, 4, 128]);
    let number = |key: &str| plan.layout.metadata().get(key).and_then(gguf_tools::gguf::Value::as_u64);
    assert_eq!(number("deepseek4.block_count"), Some(61));
    assert_eq!(number("deepseek4.expert_count"), Some(384));
    assert_eq!(number("deepseek4.attention.indexer.top_k"), Some(1024));
    assert!(plan.fallbacks.is_empty());
    let experts = plan.tensors.iter().filter(|tensor| tensor.spec.family.is_routed());
    assert_eq!(experts.map(gguf_tools::plan::PlannedTensor::n_matrices).sum::<usize>(), 3 * 61 * 384);
}

#[test]
fn mxfp4_is_carried_over_exactly_and_everything_else_in_q2_is_quantized() {
    let source = source(Shape::Tiny);
    for (recipe, exact_experts) in [("mxfp4", true), ("q2", false)] {
        for tensor in plan(&source, &built_in(recipe)).unwrap().tensors {
            let exact =
                tensor.spec.family == Family::RoutingTable || exact_experts && tensor.spec.family.is_routed();
            assert_eq!(tensor.conversion == Conversion::Exact, exact, "{recipe} {}", tensor.spec.gguf_name);
        }
    }
}

#[test]
fn rows_that_are_no_whole_number_of_blocks_take_a_listed_wider_type_or_are_refused() {
    let source = narrow();
    let allowed = plan(&source, &built_in("q2")).unwrap();
    let fallbacks: Vec<_> = allowed
        .fallbacks
        .iter()
        .map(|f| (f.tensor.as_str(), f.n_columns, f.wanted.as_str(), f.used.as_str()))
        .collect();
    let down = |layer| format!("blk.{layer}.ffn_down_exps.weight");
    let names = [down(0), down(1), down(2)];
    assert_eq!(fallbacks, names.each_ref().map(|name| (name.as_str(), 288, "Q2_K", "Q8_0")));
    assert_eq!(target(&allowed, &names[0]), BlockType::Q8_0);
    let strict = Recipe { fallback: false, ..built_in("q2") };
    let PlanError::Targets { problems } = plan(&source, &strict).unwrap_err() else { panic!() };
    assert_eq!(problems.len(), 3);
    for (problem, name) in problems.iter().zip(&names) {
        for part in [name.as_str(), "288", "Q2_K", "256"] {
            assert!(problem.contains(part), "{part}: {problem}");
        }
    }
}

#[test]
fn rows_that_not_even_blocks_of_32_divide_become_f16() {
    let mut config = SynthOptions::new(Shape::Tiny).config();
    config["q_lora_rank"] = 72.into();
    let source = SynthSource::from_config(&config, "odd", 0).unwrap();
    let plan = plan(&source, &built_in("q2")).unwrap();
    assert_eq!(target(&plan, "blk.0.attn_q_b.weight"), BlockType::F16);
    assert!(plan.fallbacks.iter().any(|f| f.n_columns == 72 && f.wanted == "Q8_0" && f.used == "F16"));
}

#[test]
fn rules_that_match_nothing_or_nothing_that_can_be_changed_are_reported() {
    let rules = [
        Rule::for_tensors("attn_q_b", BlockType::Q6K),
        Rule::for_tensors("attn_q_bb", BlockType::Q6K),
        Rule::for_tensors("attn_norm", BlockType::Q8_0),
        Rule { layers: Some("90:99".to_owned()), ..Rule::for_tensors("", BlockType::F16) },
        Rule::for_tensors("output_norm", BlockType::F32),
    ];
    assert_eq!(plan(&source(Shape::Tiny), &with_rules("q2", rules)).unwrap().idle_rules, [2, 3, 4]);
}

#[test]
fn norms_and_routing_tables_keep_their_types_whatever_a_rule_says() {
    let source = source(Shape::Tiny);
    let plan = plan(&source, &with_rules("q2", [Rule::for_tensors("", BlockType::Bf16)])).unwrap();
    for tensor in &plan.tensors {
        let expected = match tensor.spec.family {
            Family::Norm => BlockType::F32,
            Family::RoutingTable => BlockType::I32,
            _ => BlockType::Bf16,
        };
        assert_eq!(tensor.target, expected, "{}", tensor.spec.gguf_name);
    }
    let mut recipe = built_in("q2");
    recipe.types.insert("norm".to_owned(), "F16".to_owned());
    recipe.types.insert("routing-table".to_owned(), "I64".to_owned());
    let message = Recipe::from_toml(&recipe.to_toml()).unwrap_err().to_string();
    assert!(message.contains("[types] norm: is always F32"), "{message}");
    assert!(message.contains("[types] routing-table: is always I32"), "{message}");
}

#[test]
fn types_that_cannot_be_written_are_refused_with_the_list_of_those_that_can() {
    let source = source(Shape::Tiny);
    for unwritable in [BlockType::Iq2Xs, BlockType::I32, BlockType::Q8K] {
        let rule = Rule::for_tensors("ffn_(gate|up)_exps", unwritable);
        let PlanError::Targets { problems } = plan(&source, &with_rules("q2", [rule])).unwrap_err() else {
            panic!()
        };
        assert_eq!(problems.len(), 2 * 3, "{unwritable}: one line a tensor");
        let list: Vec<_> = writable_types().map(BlockType::name).collect();
        assert!(list.contains(&"IQ2_XXS") && !list.contains(&unwritable.name()));
        assert!(problems[0].contains("blk.0.ffn_gate_exps.weight"), "{}", problems[0]);
        assert!(problems[0].contains(&format!("{unwritable} cannot be written")), "{}", problems[0]);
        assert!(problems[0].contains(&list.join(", ")), "{}", problems[0]);
    }
}

#[test]
fn the_last_matching_rule_decides_within_its_layers_and_families() {
    let source = source(Shape::Flash);
    let experts = |target: BlockType| Rule {
        tensor: None,
        families: vec!["routed-gate".to_owned()],
        ..Rule::for_tensors("", target)
    };
    let last = Rule { last_layers: Some(6), ..experts(BlockType::Q4K) };
    let range = Rule { layers: Some("3:5".to_owned()), ..experts(BlockType::Q6K) };
    let single = Rule::for_tensors(r"^blk\.42\.ffn_gate_exps\.weight$", BlockType::Q8_0);
    let plan = plan(&source, &with_rules("q2", [last, range, single])).unwrap();
    for layer in 0..43 {
        let expected = match layer {
            3..=5 => BlockType::Q6K,
            37..=41 => BlockType::Q4K,
            42 => BlockType::Q8_0,
            _ => BlockType::Iq2Xxs,
        };
        assert_eq!(target(&plan, &format!("blk.{layer}.ffn_gate_exps.weight")), expected, "layer {layer}");
        assert_eq!(target(&plan, &format!("blk.{layer}.ffn_up_exps.weight")), BlockType::Iq2Xxs);
    }
    assert_eq!(target(&plan, "output.weight"), BlockType::Q8_0);
}

#[test]
fn every_mistake_of_a_recipe_is_named_at_once() {
    let text = r#"
        name = "mistaken"
        scale_gain = 3.0
        objective = "beauty"
        alignmnet = 32

        [types]
        routed-gate = "Q9_K"
        routed-up = "IQ2_XXS"
        router = "F16"
        experts = "Q4_K"

        [[rule]]
        tensor = "blk.(3"
        type = "Q4_K"

        [[rule]]
        layers = "3:5"
        last_layers = 2
        familys = ["router"]
        type = "Q4_K"

        [[rule]]
        layers = "5:3"
        families = ["gates"]
        type = "Q4K_M"
    "#;
    let PlanError::Recipe { problems } = Recipe::from_toml(text).unwrap_err() else { panic!() };
    for (start, part) in [
        ("no key is called `alignmnet`", "alignment, objective"),
        ("rule 2: no key is called `familys`", "families"),
        ("[types]: no family is called `experts`", "routed-gate"),
        ("[types] routed-gate: no tensor type is called `Q9_K`", "IQ2_XXS"),
        ("[types]: no type for `attention`", ""),
        ("[types]: no type for `output`", ""),
        ("objective `beauty`", "importance, ggml, flat"),
        ("scale_gain", "from 0.5 to 2"),
        ("rule 1: tensor pattern `blk.(3`", "unclosed group"),
        ("rule 2: give `layers` or `last_layers`, not both", ""),
        ("rule 3: layers `5:3`: expected FIRST:LAST", ""),
        ("rule 3: no family is called `gates`", "router"),
        ("rule 3: no tensor type is called `Q4K_M`", "Q4_K"),
    ] {
        let found = problems.iter().any(|problem| problem.starts_with(start) && problem.contains(part));
        assert!(found, "{start} ... {part} is missing in:\n{}", problems.join("\n"));
    }
}

#[test]
fn a_text_that_is_no_recipe_is_refused_with_its_line() {
    let broken = Recipe::from_toml("name = \"x\"\nalignment = = 3\n").unwrap_err().to_string();
    assert!(broken.contains("line 2"), "{broken}");
    let wrong = Recipe::from_toml("name = \"x\"\nalignment = \"wide\"\n[types]\n").unwrap_err().to_string();
    assert!(wrong.contains("line 2"), "{wrong}");
    let mistyped = Recipe::from_toml("nmae = \"x\"\n[types]\n").unwrap_err().to_string();
    assert!(mistyped.contains("`nmae`") && mistyped.contains("missing field `name`"), "{mistyped}");
}

#[test]
fn a_recipe_survives_being_written_as_toml_and_read_back() {
    for name in ["q2", "q2-q4", "q4", "mxfp4"] {
        assert_eq!(Recipe::from_toml(&built_in(name).to_toml()).unwrap(), built_in(name));
    }
    let everything = Recipe {
        alignment: 32,
        objective: "ggml".to_owned(),
        scale_gain: Some(1.25),
        fallback: false,
        rules: vec![
            Rule { layers: Some("1:2".to_owned()), ..Rule::for_tensors(r"\.attn_\w+$", BlockType::Q6K) },
            Rule {
                last_layers: Some(1),
                families: vec!["shared".to_owned()],
                ..Rule::for_tensors("", BlockType::F16)
            },
        ],
        ..built_in("q2")
    };
    assert_eq!(Recipe::from_toml(&everything.to_toml()).unwrap(), everything);
}
