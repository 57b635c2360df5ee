//! The nano model of this repository, which has learned something, against transformers: always run, nothing is fetched.
//!
//! The goldens come from `tools/nano/golden.py`: float arithmetic on the widened weights, no activation is rounded.

mod nano_model;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use gguf_tools::block::BlockType;
use gguf_tools::checkpoint::{Checkpoint, tokenizer as source};
use gguf_tools::gguf::Gguf;
use gguf_tools::plan::{Recipe, sha256_of_file};
use nano_model::{checkpoint, write_gguf};
use runner::chat::{Message, render};
use runner::logits::{argmax, log_probabilities, top_log_probabilities};
use runner::observe::NoObserver;
use runner::tokenizer::Tokenizer;
use runner::{Model, Numerics, Options};
use serde_json::Value;
use test_vectors::{GoldenArray, golden_arrays};

/// Most that a logit or log probability may differ by.
const TOLERANCE: f64 = 1e-3;
/// The best token is the same where the golden logits of the two best ones are farther apart than this.
const TOP1_MARGIN: f32 = 2e-3;
/// Choices of experts and of index rows are the same where the golden scores are farther apart than these.
const ROUTER_MARGIN: f32 = 1e-5;
const INDEX_MARGIN: f32 = 3e-5;

/// Passage and number of its tokens.
const PASSAGES: [(&str, usize); 5] =
    [("prose", 300), ("code", 300), ("tables", 300), ("chat", 150), ("long", 1000)];

fn golden_path(name: &str) -> PathBuf {
    checkpoint().join("../golden").join(name)
}

fn golden_json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(golden_path(name)).unwrap()).unwrap()
}

fn tokens(values: &Value) -> Vec<u32> {
    serde_json::from_value(values.clone()).unwrap()
}

fn open(numerics: Numerics) -> Model {
    Model::open(checkpoint(), Options { numerics, ..Options::default() }).unwrap()
}

/// Logits of every position of every text.
fn logits(model: &Model, texts: &[&[u32]]) -> Vec<Vec<Vec<f32>>> {
    let mut logits = vec![Vec::new(); texts.len()];
    model.read_texts(texts, &mut NoObserver, &mut |text, _, row| logits[text].push(row.to_vec())).unwrap();
    logits
}

/// The largest difference seen, and where.
#[derive(Debug, Default)]
struct Worst {
    difference: f64,
    place: String,
    n_compared: usize,
}

impl Worst {
    fn compare(&mut self, found: f64, expected: f64, place: impl Fn() -> String) {
        self.n_compared += 1;
        let difference = (found - expected).abs();
        // A NaN is no small difference.
        if difference.is_nan() || difference > self.difference {
            *self = Self { difference, place: place(), n_compared: self.n_compared };
        }
    }

    fn check(&self, what: &str) {
        let Self { difference, place, n_compared } = self;
        assert!(
            *difference < TOLERANCE,
            "{what}: the worst of {n_compared} differs by {difference:e} (at most {TOLERANCE:e}), {place}"
        );
    }
}

#[test]
fn the_files_are_the_ones_that_were_trained() {
    let sums = fs::read_to_string(checkpoint().join("SHA256SUMS")).unwrap();
    let mut listed = BTreeSet::from(["SHA256SUMS".to_owned()]);
    for line in sums.lines() {
        let (expected, name) = line.split_once("  ").unwrap();
        assert_eq!(sha256_of_file(&checkpoint().join(name)).unwrap(), expected, "{name}");
        listed.insert(name.to_owned());
    }
    let entries = fs::read_dir(checkpoint()).unwrap();
    let present: BTreeSet<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(present, listed);
}

#[test]
fn passages_equal_transformers() {
    let golden = golden_arrays(&golden_path("golden.safetensors"));
    let report = golden_json("passages.json");
    let texts = PASSAGES.map(|(name, n_tokens)| {
        let text = tokens(&report[name]["ids"]);
        assert_eq!(text.len(), n_tokens, "{name}");
        text
    });
    let all = logits(&open(Numerics::Exact), &texts.each_ref().map(Vec::as_slice));
    let [mut last, mut nll, mut top8, mut mean_nll] = [(); 4].map(|()| Worst::default());
    let mut n_clear = 0;
    for (((name, _), text), rows) in PASSAGES.into_iter().zip(&texts).zip(&all) {
        let get = |key: &str| &golden[&format!("{name}.{key}")];
        assert_eq!(get("ids").i32(), text.iter().map(|&id| id as i32).collect::<Vec<_>>(), "{name}");
        check_margins(name, get("router_margin"), get("index_margin"));
        for (token, (&found, expected)) in
            rows.last().unwrap().iter().zip(get("last_logits").f32()).enumerate()
        {
            last.compare(found.into(), expected.into(), || format!("token {token} behind passage {name}"));
        }
        let (margins, best) = (get("margin").f32(), get("argmax").i32());
        let (ids, probabilities) = (get("top8_ids").i32(), get("top8_log_probabilities").f32());
        let golden_nll = get("nll").f32();
        let mut sum = 0.0;
        for (position, row) in rows.iter().enumerate() {
            let at = || format!("position {position} of passage {name}");
            let found = log_probabilities(row);
            if let Some(&next) = text.get(position + 1) {
                nll.compare(-found[next as usize], golden_nll[position].into(), at);
                sum -= found[next as usize];
            }
            for i in position * 8..position * 8 + 8 {
                let (token, expected) = (ids[i] as usize, probabilities[i].into());
                top8.compare(found[token], expected, || format!("token {token} at {}", at()));
            }
            if margins[position] > TOP1_MARGIN {
                n_clear += 1;
                assert_eq!(
                    argmax(row),
                    best[position] as u32,
                    "best token at {}, whose margin is {}",
                    at(),
                    margins[position]
                );
            }
        }
        let expected = report[name]["mean_nll"].as_f64().unwrap();
        mean_nll.compare(sum / golden_nll.len() as f64, expected, || format!("passage {name}"));
    }
    last.check("logits of the last positions");
    nll.check("negative log-likelihood of the next tokens");
    top8.check("log probabilities of the eight best tokens");
    mean_nll.check("mean negative log-likelihood");
    let n_positions: usize = PASSAGES.iter().map(|(_, n_tokens)| n_tokens).sum();
    assert!(n_clear * 100 >= n_positions * 99, "only {n_clear} of {n_positions} margins are clear");
    let golden_n = [last.n_compared, nll.n_compared, top8.n_compared];
    assert_eq!(golden_n, [5 * 1024, n_positions - 5, n_positions * 8]);
}

/// The passages were chosen so that no choice is a near tie: every position can be compared.
fn check_margins(name: &str, router: &GoldenArray, index: &GoldenArray) {
    let least = |array: &GoldenArray| array.f32().into_iter().fold(f32::INFINITY, f32::min);
    assert!(least(router) > ROUTER_MARGIN, "{name}: the goldens hold a near tie of experts");
    assert!(least(index) > INDEX_MARGIN, "{name}: the goldens hold a near tie of index rows");
}

/// The goldens recompute everything for each token; here the caches of a session go on.
#[test]
fn greedy_answers_equal_transformers() {
    let model = open(Numerics::Exact);
    let metadata = source::metadata(&Checkpoint::open(checkpoint()).unwrap()).unwrap();
    let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
    let mut gaps = Worst::default();
    let answers = golden_json("answers.json");
    let answers = answers.as_array().unwrap();
    assert_eq!(answers.len(), 6);
    for answer in answers {
        let question = answer["question"].as_str().unwrap();
        let prompt = tokenizer.encode_chat(&render(&[Message::User(question)], false, true)).unwrap();
        assert_eq!(prompt, tokens(&answer["prompt_ids"]), "tokens of {question:?}");
        let expected = tokens(&answer["answer_ids"]);
        let margins: Vec<f64> = serde_json::from_value(answer["margins"].clone()).unwrap();
        let mut session = model.session();
        let mut row = session.prefill(&prompt).unwrap();
        for (step, (&token, &margin)) in expected.iter().zip(&margins).enumerate() {
            let at = || format!("step {step} of the answer to {question:?}");
            let two = top_log_probabilities(&row, 2);
            if margin > f64::from(TOP1_MARGIN) {
                assert_eq!(two[0].0, token, "{}, whose margin is {margin}", at());
            }
            gaps.compare(two[0].1 - two[1].1, margin, at);
            row = session.decode(token).unwrap();
        }
        assert_eq!(expected.last().copied(), tokenizer.eos(), "the answer to {question:?} ends");
        assert_eq!(tokenizer.decode(&expected), answer["answer"].as_str().unwrap());
    }
    gaps.check("distance of the two best tokens");
}

/// `mxfp4` with `F32` in place of every type that rounds, and the experts in a type that holds FP4 exactly.
fn exact_recipe(experts: BlockType) -> Recipe {
    let mut recipe = Recipe::built_in("mxfp4").unwrap();
    for target in recipe.types.values_mut().filter(|target| *target != BlockType::I32.name()) {
        let is_expert = *target == BlockType::Mxfp4.name();
        let exact = if is_expert { experts } else { BlockType::F32 };
        exact.name().clone_into(target);
    }
    recipe
}

/// Bits, not values: -0 is not 0.
fn assert_same_bits(found: &[Vec<f32>], expected: &[Vec<f32>], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (position, (a, b)) in found.iter().zip(expected).enumerate() {
        let equal = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(equal && a.len() == b.len(), "{what}: other logits at position {position}");
    }
}

#[test]
fn a_second_run_and_lossless_gguf_files_give_the_same_bits() {
    // Past the window, with more rows of the index than are chosen and rows of the long ratio.
    let text = tokens(&golden_json("passages.json")["prose"]["ids"]);
    let temporary = tempfile::tempdir().unwrap();
    let files: BTreeMap<&str, PathBuf> = [("F32", BlockType::F32), ("MXFP4", BlockType::Mxfp4)]
        .into_iter()
        .map(|(name, experts)| {
            let path = temporary.path().join(format!("{name}.gguf"));
            write_gguf(checkpoint(), &exact_recipe(experts), &path);
            let file = Gguf::open(&path).unwrap();
            let inexact = file
                .tensors()
                .iter()
                .find(|tensor| ![BlockType::F32, BlockType::I32, experts].contains(&tensor.block_type));
            assert_eq!(inexact.map(|tensor| &tensor.name), None);
            (name, path)
        })
        .collect();
    for numerics in [Numerics::Exact, Numerics::Official] {
        let expected = logits(&open(numerics), &[&text]).swap_remove(0);
        let again = logits(&open(numerics), &[&text]).swap_remove(0);
        assert_same_bits(&again, &expected, &format!("second run, {} numerics", numerics.name()));
        for (name, path) in &files {
            // Not widened at loading, as files of the full size.
            let options = Options { numerics, widen_up_to_bytes: 0, ..Options::default() };
            let found = logits(&Model::open(path, options).unwrap(), &[&text]).swap_remove(0);
            let what = format!("file with {name} experts, {} numerics", numerics.name());
            assert_same_bits(&found, &expected, &what);
        }
    }
}
