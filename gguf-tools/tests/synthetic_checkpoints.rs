//! Models from the generator: sane, reproducible, small on the way, the same with and without a checkpoint.

use std::fs;
use std::path::Path;

use gguf_tools::build::{BuildOptions, build};
use gguf_tools::checkpoint::tokenizer::{ChatTemplate, TokenType, Tokenizer};
use gguf_tools::checkpoint::{Checkpoint, SourcePrecision};
use gguf_tools::importance::NoImportance;
use gguf_tools::model::Family;
use gguf_tools::plan::{Plan, Recipe};
use gguf_tools::progress::{Silent, StopFlag};
use gguf_tools::source::{CheckpointSource, WeightSource};
use gguf_tools::synth::{Shape, SynthError, SynthOptions, SynthSource, write_checkpoint};
use sha2::{Digest, Sha256};
use test_vectors::hex;

/// SHA-256 over names and bytes of all files of a folder.
fn folder_hash(folder: &Path) -> String {
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    let mut hasher = Sha256::new();
    for path in names {
        hasher.update(path.file_name().unwrap().as_encoded_bytes());
        hasher.update(fs::read(&path).unwrap());
    }
    hex(&hasher.finalize())
}

fn folder_bytes(folder: &Path) -> u64 {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn the_tiny_checkpoint_is_small_has_every_layer_kind_and_no_findings() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("tiny");
    let summary = write_checkpoint(&folder, &SynthOptions::new(Shape::Tiny), &Silent).unwrap();
    assert!(folder_bytes(&folder) < 12_000_000, "{}", folder_bytes(&folder));
    assert!(summary.n_shards > 1);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    checkpoint.demand_sound().unwrap();
    let model = checkpoint.hyper_parameters();
    let kinds: Vec<_> = (0..model.num_hidden_layers as u32).map(|layer| model.layer_kind(layer)).collect();
    assert!([0, 4, 128].iter().all(|ratio| kinds.iter().any(|kind| kind.ratio == *ratio)));
    assert!(kinds.iter().any(|kind| kind.hash_routed) && kinds.iter().any(|kind| !kind.hash_routed));
}

#[test]
fn a_seed_gives_the_recorded_bytes_and_another_seed_other_bytes() {
    let place = tempfile::tempdir().unwrap();
    let hash = |name: &str, seed: u64| {
        let folder = place.path().join(name);
        write_checkpoint(&folder, &SynthOptions { seed, ..SynthOptions::new(Shape::Tiny) }, &Silent).unwrap();
        folder_hash(&folder)
    };
    assert_eq!(hash("a", 7), "57ec21f01224d8a5e46a050352ff16ee9731ff7279e84c037aef3c19f11f85b6");
    assert_ne!(hash("b", 8), "57ec21f01224d8a5e46a050352ff16ee9731ff7279e84c037aef3c19f11f85b6");
}

#[test]
fn weights_keep_the_variance_of_their_inputs() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("tiny");
    write_checkpoint(&folder, &SynthOptions::new(Shape::Tiny), &Silent).unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    for spec in checkpoint.table().specs().iter().filter(|spec| spec.shape.len() > 1 && spec.layer.is_some())
    {
        if matches!(spec.family, Family::RoutingTable) || spec.gguf_name.ends_with("ape.weight") {
            continue;
        }
        let (rows, columns) = (spec.source_shape()[0] as usize, spec.columns() as usize);
        let mut values = vec![0.0; rows * columns];
        checkpoint.read_rows_f32(&spec.sources[0], 0..rows, &mut values).unwrap();
        let variance =
            values.iter().map(|x| f64::from(x * x)).sum::<f64>() / values.len() as f64 * columns as f64;
        assert!((0.3..3.5).contains(&variance), "{}: {variance}", spec.gguf_name);
        let mean =
            values.iter().map(|x| f64::from(*x)).sum::<f64>() / values.len() as f64 * (columns as f64).sqrt();
        assert!(mean.abs() < 0.1, "{}: {mean}", spec.gguf_name);
    }
}

#[test]
fn the_shapes_of_the_releases_are_made_layer_by_layer_and_expert_by_expert() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("flash");
    let options = SynthOptions { layers: Some(1), experts: Some(1), ..SynthOptions::new(Shape::Flash) };
    // The two tables of the vocabulary are 2 GB, so only the plan of the larger shapes is tried, not their bytes.
    let stop = StopFlag::default();
    stop.stop();
    assert!(matches!(write_checkpoint(&folder, &options, &stop), Err(SynthError::Interrupted)));
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_file_built_without_a_checkpoint_equals_the_file_built_from_the_written_one() {
    let place = tempfile::tempdir().unwrap();
    let options = SynthOptions { seed: 5, ..SynthOptions::new(Shape::Tiny) };
    write_checkpoint(&place.path().join("checkpoint"), &options, &Silent).unwrap();
    let written = CheckpointSource::new(Checkpoint::open(place.path().join("checkpoint")).unwrap()).unwrap();
    let made = SynthSource::new(&options).unwrap();
    for name in ["q2", "mxfp4"] {
        let recipe = Recipe::built_in(name).unwrap();
        let file = |source: &dyn WeightSource, out: &str| {
            let plan = Plan::new(source, &recipe, source.metadata().unwrap()).unwrap();
            let options = BuildOptions { overwrite: false, resume: false, importance_fallback: true };
            let out = place.path().join(format!("{name}-{out}"));
            build(&plan, source, &NoImportance, &out, options, &Silent).unwrap();
            (plan.tensors, fs::read(out).unwrap())
        };
        let (from_disk, from_nothing) = (file(&written, "disk.gguf"), file(&made, "nothing.gguf"));
        assert_eq!(from_disk.0, from_nothing.0, "{name}");
        assert!(from_disk.1 == from_nothing.1, "{name}: bytes differ");
    }
}

#[test]
fn a_vocabulary_too_small_for_the_tokenizer_is_refused() {
    let mut config = SynthOptions::new(Shape::Tiny).config();
    config["vocab_size"] = 100.into();
    let refused = SynthSource::from_config(&config, "small", 0).unwrap_err();
    assert!(matches!(refused, SynthError::Tokenizer(_)), "{refused}");
    assert!(refused.to_string().contains("100 tokens"), "{refused}");
    config["vocab_size"] = 0.into();
    assert!(matches!(SynthSource::from_config(&config, "none", 0), Err(SynthError::Options(_))));
}

#[test]
fn an_existing_folder_is_not_touched() {
    let place = tempfile::tempdir().unwrap();
    let refused = write_checkpoint(place.path(), &SynthOptions::new(Shape::Tiny), &Silent);
    assert!(matches!(refused, Err(SynthError::Exists(_))), "{refused:?}");
}

#[test]
fn the_small_tokenizer_fills_the_vocabulary_and_has_the_tokens_of_a_conversation() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("tiny");
    write_checkpoint(&folder, &SynthOptions { experts: Some(2), ..SynthOptions::new(Shape::Tiny) }, &Silent)
        .unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let tokenizer = Tokenizer::of(&checkpoint).unwrap();
    assert_eq!(tokenizer.tokens.len(), 512);
    for special in [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
    ] {
        assert!(tokenizer.tokens.iter().any(|token| token == special), "{special}");
    }
    assert_eq!(tokenizer.tokens[511], "[PAD511]");
    assert_eq!(tokenizer.token_types[511], TokenType::Unused);
    assert_eq!((tokenizer.bos_token_id, tokenizer.eos_token_id), (Some(0), Some(1)));
    assert_eq!(ChatTemplate::of(&checkpoint).unwrap().source, "ggsmith");
    let spec = checkpoint.table().by_gguf_name("blk.1.ffn_up_exps.weight").unwrap();
    assert_eq!(checkpoint.source_precision(spec).unwrap(), SourcePrecision::Fp4);
}
