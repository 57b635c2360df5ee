//! Collecting, against sums made by independent code and against itself in other batches.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gguf_tools::importance::{Found, ImportanceSource, Matrix};
use imatrix::collect::{CollectError, CollectOptions, Collected, DownInput, collect};
use imatrix::{Imatrix, Target};
use runner::{Model, Numerics, Options};
use test_vectors::{fixtures, golden_arrays};

use crate::common::Scratch;

fn nano_checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../test-vectors/nano/checkpoint")
}

fn model(path: &Path, n_threads: usize, batch_tokens: usize) -> Model {
    let options = Options { numerics: Numerics::Exact, n_threads, batch_tokens, ..Options::default() };
    Model::open(path, options).unwrap()
}

fn options(state: Option<PathBuf>) -> CollectOptions {
    CollectOptions {
        dense: true,
        down_input: DownInput::Weighted,
        batch_tokens: 4096,
        state,
        save_every: 2,
        model_fingerprint: "model".into(),
        datasets: vec!["test".into()],
        chunk_size: 64,
    }
}

fn run(model: &Model, prompts: &[Vec<u32>], options: &CollectOptions) -> Collected {
    collect(model, prompts, options, &mut |_| true).unwrap()
}

/// The bytes of the file that would be written.
fn bytes(collected: &Collected, scratch: &Scratch) -> Vec<u8> {
    let path = scratch.path("written.gguf");
    collected.imatrix.write(&path, Target::Gguf, true).unwrap();
    std::fs::read(path).unwrap()
}

/// Prompts of the nano model's vocabulary, of different lengths.
fn prompts() -> Vec<Vec<u32>> {
    (0..5_u32)
        .map(|i| (0..30 + 13 * i).map(|t| if t == 0 { 0 } else { 3 + (t * t * 7 + i * 31) % 250 }).collect())
        .collect()
}

/// Largest difference of a mean from `sums / counts`, relative to the largest mean of its matrix.
fn worst(imatrix: &Imatrix, folder: &Path, kind: &str, sums: &str) -> f64 {
    let arrays = golden_arrays(&folder.join("imatrix.safetensors"));
    let (shape, counts) = (arrays[sums].shape.clone(), arrays["count"].i32());
    let (n_experts, n_columns, sums) = (shape[1], shape[2], arrays[sums].f32());
    let mut worst = 0.0_f64;
    for (index, sums) in sums.chunks_exact(n_columns).enumerate() {
        let tensor = format!("blk.{}.ffn_{kind}_exps.weight", index / n_experts);
        let expert_index = index % n_experts;
        let matrix = Matrix { tensor: &tensor, source: None, expert_index, n_experts, n_columns };
        let entry = imatrix.entry(&tensor).unwrap();
        assert_eq!(entry.counts()[expert_index], f64::from(counts[index]), "{tensor} expert {expert_index}");
        match imatrix.importance(&matrix) {
            Found::Values(means) => {
                let largest = sums.iter().fold(0.0_f64, |a, &b| a.max(f64::from(b)));
                for (&mean, &sum) in means.iter().zip(sums) {
                    let found = f64::from(mean) * f64::from(counts[index]);
                    worst = worst.max((found - f64::from(sum)).abs() / largest);
                }
            }
            Found::Unseen => assert_eq!(counts[index], 0),
            other => panic!("{tensor} expert {expert_index}: {other:?}"),
        }
    }
    worst
}

#[test]
fn sums_and_counts_equal_those_of_independent_code() {
    let Some(fixtures) = fixtures("golden imatrix") else { return };
    let golden = fixtures.join("golden");
    let prompts = std::fs::read(golden.join("prompts.json")).unwrap();
    let prompts: BTreeMap<String, Vec<u32>> = serde_json::from_slice(&prompts).unwrap();
    let prompts = ["mid150", "long620"].map(|name| prompts[name].clone());
    for variant in ["tiny-native", "tiny-bf16"] {
        let model = model(&fixtures.join(variant), 0, 2048);
        let folder = golden.join(variant);
        let weighted = run(&model, &prompts, &CollectOptions { dense: false, ..options(None) });
        assert_eq!(weighted.n_tokens, 770);
        for (kind, sums) in [("gate", "gate_up_sum2"), ("up", "gate_up_sum2"), ("down", "down_sum2_weighted")]
        {
            let worst = worst(&weighted.imatrix, &folder, kind, sums);
            assert!(worst < 1e-4, "{variant} {kind}: {worst}");
        }
        let unweighted = CollectOptions { dense: false, down_input: DownInput::Unweighted, ..options(None) };
        let worst =
            worst(&run(&model, &prompts, &unweighted).imatrix, &folder, "down", "down_sum2_unweighted");
        assert!(worst < 1e-4, "{variant} unweighted: {worst}");
    }
}

#[test]
fn the_result_depends_neither_on_batches_nor_on_threads() {
    let scratch = Scratch::new();
    let nano = nano_checkpoint();
    let whole = run(&model(&nano, 2, 2048), &prompts(), &options(None));
    let expected = bytes(&whole, &scratch);
    // Batches of single prompts, prompts cut in the middle, one thread.
    for (n_threads, part, batch_tokens) in [(1, 2048, 1), (2, 17, 4096), (1, 64, 100)] {
        let options = CollectOptions { batch_tokens, save_every: 1000, ..options(None) };
        let other = run(&model(&nano, n_threads, part), &prompts(), &options);
        assert!(
            bytes(&other, &scratch) == expected,
            "{n_threads} threads, parts of {part}, batches of {batch_tokens}"
        );
        assert_eq!(other.mean_nll.to_bits(), whole.mean_nll.to_bits());
    }
}

#[test]
fn dense_matrices_have_an_entry_each_with_the_width_of_what_they_read() {
    let nano = nano_checkpoint();
    let model = model(&nano, 0, 2048);
    let collected = run(&model, &prompts(), &options(None));
    let table = gguf_tools::model::TensorTable::new(model.hyper_parameters());
    let mut dense = 0;
    for spec in table.specs().iter().filter(|spec| spec.shape.len() >= 2) {
        use gguf_tools::model::Family;
        let left_out =
            matches!(spec.family, Family::Embedding | Family::HyperConnection | Family::RoutingTable)
                || spec.gguf_name.contains("_ape");
        let entry = collected.imatrix.entry(&spec.gguf_name);
        assert_eq!(entry.is_none(), left_out, "{}", spec.gguf_name);
        if let (Some(entry), false) = (entry, spec.family.is_routed()) {
            dense += 1;
            assert_eq!(
                (entry.n_columns(), entry.n_values()),
                (Some(spec.columns() as usize), spec.columns() as usize)
            );
            let groups =
                if spec.gguf_name.contains("attn_output_a") { model.hyper_parameters().o_groups } else { 1 };
            assert_eq!(entry.counts(), [(collected.n_tokens * groups) as f64], "{}", spec.gguf_name);
        }
    }
    assert!(dense > 30, "{dense}");
}

#[test]
fn an_interrupted_collection_goes_on_to_the_same_bytes() {
    let scratch = Scratch::new();
    let nano = nano_checkpoint();
    let model = model(&nano, 0, 2048);
    let expected = bytes(&run(&model, &prompts(), &options(None)), &scratch);
    for stop_after in 1..prompts().len() {
        let state = scratch.path(&format!("state-{stop_after}"));
        let kept = CollectOptions { batch_tokens: 1, ..options(Some(state.clone())) };
        let stopped = collect(&model, &prompts(), &kept, &mut |step| step.n_prompts < stop_after);
        assert!(
            matches!(stopped, Err(CollectError::Interrupted { n_prompts, .. }) if n_prompts == stop_after)
        );
        let resumed = run(&model, &prompts(), &kept);
        assert_eq!(resumed.resumed_prompts, stop_after);
        assert!(bytes(&resumed, &scratch) == expected, "stopped after {stop_after}");
    }
}

#[test]
fn a_process_killed_between_two_savings_goes_on_from_the_last_one() {
    let scratch = Scratch::new();
    let nano = nano_checkpoint();
    let model = model(&nano, 0, 2048);
    let expected = bytes(&run(&model, &prompts(), &options(None)), &scratch);
    let state = scratch.path("killed");
    let kept = CollectOptions { batch_tokens: 1, ..options(Some(state.clone())) };
    // A panic inside is what a kill looks like to the state file: nothing is saved on the way out.
    let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        collect(&model, &prompts(), &kept, &mut |step| {
            assert!(step.n_prompts < 4, "killed here");
            true
        })
    }));
    assert!(killed.is_err());
    let resumed = run(&model, &prompts(), &kept);
    assert_eq!(resumed.resumed_prompts, 2, "the state was saved after two prompts");
    assert!(bytes(&resumed, &scratch) == expected);
}

#[test]
fn a_state_of_another_run_or_a_damaged_one_is_refused_by_name() {
    let scratch = Scratch::new();
    let model = model(&nano_checkpoint(), 0, 2048);
    let state = scratch.path("state");
    let kept = options(Some(state.clone()));
    assert!(collect(&model, &prompts(), &kept, &mut |_| false).is_err());
    let refused = |options: &CollectOptions, prompts: &[Vec<u32>]| {
        collect(&model, prompts, options, &mut |_| true).unwrap_err().to_string()
    };
    let other_model = CollectOptions { model_fingerprint: "other".into(), ..kept.clone() };
    assert!(refused(&other_model, &prompts()).contains("model: found model, expected other"));
    assert!(refused(&CollectOptions { dense: false, ..kept.clone() }, &prompts()).contains("settings"));
    assert!(refused(&kept, &prompts()[1..]).contains("prompts"));
    let whole = std::fs::read(&state).unwrap();
    for n_bytes in [0, 15, 40, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&state, &whole[..n_bytes]).unwrap();
        let message = refused(&kept, &prompts());
        assert!(message.contains("state"), "{n_bytes} bytes: {message}");
    }
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    std::fs::write(&state, &flipped).unwrap();
    assert!(refused(&kept, &prompts()).contains("SHA-256"));
    assert!(matches!(collect(&model, &[], &kept, &mut |_| true), Err(CollectError::NoPrompts)));
}
