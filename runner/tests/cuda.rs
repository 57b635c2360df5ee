//! The device against the CPU, and the nano model on it against transformers. Skipped, with the reason, where there is no
//! device.

use std::fs;
use std::path::Path;

use gguf_tools::checkpoint::{Checkpoint, tokenizer as source};
use runner::cuda::check::{Check, Group, SelfTest, self_test};
use runner::cuda::{Gpu, KernelChoice};
use runner::logits::argmax;
use runner::tokenizer::Tokenizer;
use runner::{Model, Numerics, Options, Processor};
use serde_json::Value;

/// Folder of the nano model's checkpoint.
fn checkpoint() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../test-vectors/nano/checkpoint"))
}

/// Whether a device can be used; says why not.
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
fn device_is_there(what: &str) -> bool {
    match Gpu::open(0, KernelChoice::default()) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: {what}: {error}");
            false
        }
    }
}

fn check(group: Group) {
    check_with(group, KernelChoice::default());
}

fn check_with(group: Group, kernels: KernelChoice) {
    let name = Group::NAMES.iter().find(|(_, found)| *found == group).map_or("", |(name, _)| name);
    if !device_is_there(name) {
        return;
    }
    let metadata = source::metadata(&Checkpoint::open(checkpoint()).unwrap()).unwrap();
    let text = fs::read_to_string(checkpoint().join("../heldout/prose.txt")).unwrap();
    let tokens = Tokenizer::from_metadata(&metadata).unwrap().encode_plain(&text).unwrap();
    let mut failed = Vec::new();
    let mut each = |check: &Check| {
        if !check.passed {
            failed.push(format!("{}: {}", check.name, check.detail));
        }
    };
    self_test(&SelfTest { ordinal: 0, kernels, model: checkpoint(), tokens: &tokens }, group, &mut each)
        .unwrap();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn operations_on_rows_equal_the_cpu() {
    check(Group::Rows);
}

#[test]
fn attention_equals_the_cpu_in_pieces_of_any_size() {
    check(Group::Attention);
}

#[test]
fn products_equal_the_cpu_in_every_block_type() {
    check(Group::Matrices);
}

#[test]
fn the_nano_model_equals_the_cpu() {
    check(Group::Model);
}

#[test]
fn recording_cutting_batching_and_restoring_change_no_bit() {
    check(Group::Equalities);
}

#[test]
fn steering_and_what_observers_see_equal_the_cpu() {
    check(Group::Steering);
}

#[test]
fn kernels_for_any_chip_equal_the_cpu() {
    let portable = KernelChoice { portable: true, ..KernelChoice::default() };
    for group in [Group::Attention, Group::Matrices, Group::Model, Group::Equalities] {
        check_with(group, portable);
    }
}

#[test]
fn greedy_answers_equal_transformers() {
    if !device_is_there("greedy answers") {
        return;
    }
    let options = Options { numerics: Numerics::Exact, processor: Processor::Cuda(0), ..Options::default() };
    let model = Model::open(checkpoint(), options).unwrap();
    let answers = fs::read(checkpoint().join("../golden/answers.json")).unwrap();
    let answers: Vec<Value> = serde_json::from_slice(&answers).unwrap();
    for answer in answers {
        let ids = |key: &str| serde_json::from_value::<Vec<u32>>(answer[key].clone()).unwrap();
        let margins: Vec<f64> = serde_json::from_value(answer["margins"].clone()).unwrap();
        let mut session = model.session();
        let mut logits = session.prefill(&ids("prompt_ids")).unwrap();
        for (step, (&token, &margin)) in ids("answer_ids").iter().zip(&margins).enumerate() {
            if margin > 2e-3 {
                assert_eq!(argmax(&logits), token, "step {step} of {}", answer["question"]);
            }
            logits = session.decode(token).unwrap();
        }
    }
}
