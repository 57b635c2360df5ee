//! Best tokens of llama.cpp, built without vector instructions, on quantized files: written by
//! `tools/plain_ggml_golden.py`. On the machine that made them every logit was equal to the bit; another C library may
//! give exponentials with another last bit.

mod nano_model;

use std::path::Path;

use gguf_tools::plan::{Recipe, sha256_of_file};
use runner::logits::argmax;
use runner::observe::NoObserver;
use runner::{ActivationPrecision, Model, Numerics, Options};
use serde_json::Value;

/// Least share of positions whose best token is the same.
const SAME: f64 = 0.99;
/// At the end of a file, behind its metadata.
const WEIGHT_BYTES: usize = 4 << 20;

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// `texts`: what the golden's text is found in.
fn check(checkpoint: &Path, family: &str, recipe: &str, texts: &Path) {
    let name = format!("{family} {recipe}");
    let golden = json(&nano_model::checkpoint().join("../golden/plain_ggml.json"));
    let golden = &golden[&name];
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    nano_model::write_gguf(checkpoint, &Recipe::built_in(recipe).unwrap(), &file);
    let bytes = std::fs::read(&file).unwrap();
    let weights = folder.path().join("weights");
    std::fs::write(&weights, &bytes[bytes.len() - WEIGHT_BYTES..]).unwrap();
    assert_eq!(
        sha256_of_file(&weights).unwrap(),
        golden["weights_sha256"].as_str().unwrap(),
        "{name}: the golden was made of other weights, so make it again with tools/plain_ggml_golden.py"
    );
    let text = &json(texts)[golden["text"].as_str().unwrap()];
    let text = if text.is_array() { text } else { &text["ids"] };
    let text: Vec<u32> = serde_json::from_value(text.clone()).unwrap();
    let expected: Vec<u32> = serde_json::from_value(golden["best_tokens"].clone()).unwrap();
    assert_eq!(expected.len(), text.len());
    let options = Options {
        activations: ActivationPrecision::PlainGgml,
        numerics: Numerics::Exact,
        ..Options::default()
    };
    let mut n_same = 0;
    Model::open(&file, options)
        .unwrap()
        .read_texts(&[&text], &mut NoObserver, &mut |_, position, logits| {
            n_same += usize::from(argmax(logits) == expected[position]);
        })
        .unwrap();
    let share = n_same as f64 / expected.len() as f64;
    assert!(share >= SAME, "{name}: {n_same} of {} best tokens are the same", expected.len());
}

fn check_nano(recipe: &str) {
    let checkpoint = nano_model::checkpoint();
    check(checkpoint, "nano", recipe, &checkpoint.join("../golden/passages.json"));
}

fn check_tiny(recipe: &str) {
    let Some(folder) = test_vectors::fixtures("llama.cpp's best tokens of the tiny model") else { return };
    check(&folder.join("tiny-native"), "tiny", recipe, &folder.join("golden/prompts.json"));
}

#[test]
fn nano_q2_predicts_what_llama_cpp_predicts() {
    check_nano("q2");
}

#[test]
fn nano_q4_predicts_what_llama_cpp_predicts() {
    check_nano("q4");
}

#[test]
fn tiny_q2_predicts_what_llama_cpp_predicts() {
    check_tiny("q2");
}

#[test]
fn tiny_q4_predicts_what_llama_cpp_predicts() {
    check_tiny("q4");
}
