//! The forward pass against results of independent code, for both tiny checkpoints, all prompts and both modes; on a GPU as
//! well, if there is one.

use std::collections::BTreeMap;
use std::path::Path;

use runner::cuda::Device;
use runner::logits::{argmax, log_probabilities};
use runner::observe::NoObserver;
use runner::{ActivationPrecision, Model, Numerics, Options, Processor};
use test_vectors::{GoldenArray, fixtures, golden_arrays};

const PROMPTS: [&str; 5] = ["p5", "chat", "edge120", "mid150", "long620"];

/// The model on the CPU, and on a GPU with each precision of activations that is asked for.
fn models(folder: &Path, numerics: Numerics, on_gpu: &[ActivationPrecision]) -> Vec<(String, Model)> {
    let plain = Options { numerics, ..Options::default() };
    let mut all = vec![("cpu".to_owned(), plain.clone())];
    match Device::open(0) {
        Ok(_) => {
            let cuda = |&activations: &ActivationPrecision| {
                let processor = Processor::Cuda(0);
                let name = format!("cuda, {} activations", activations.name());
                (name, Options { processor, activations, ..plain.clone() })
            };
            all.extend(on_gpu.iter().map(cuda));
        }
        #[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
        Err(error) => eprintln!("skipped: goldens on a GPU: {error}"),
    }
    all.into_iter().map(|(name, options)| (name, Model::open(folder, options).unwrap())).collect()
}

fn prompts(folder: &Path) -> BTreeMap<String, Vec<u32>> {
    let text = std::fs::read_to_string(folder.join("golden/prompts.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Logits of every position of every prompt, read in one batch.
fn all_logits(model: &Model, prompts: &BTreeMap<String, Vec<u32>>) -> Vec<Vec<Vec<f32>>> {
    let texts: Vec<&[u32]> = PROMPTS.iter().map(|name| &prompts[*name][..]).collect();
    let mut logits: Vec<Vec<Vec<f32>>> = vec![Vec::new(); texts.len()];
    model
        .read_texts(&texts, &mut NoObserver, &mut |text, position, row| {
            assert_eq!(logits[text].len(), position, "positions come in order");
            logits[text].push(row.to_vec());
        })
        .unwrap();
    logits
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |worst, (a, b)| worst.max((a - b).abs()))
}

fn exact_mode(variant: &str) {
    let Some(folder) = fixtures("the exact goldens") else { return };
    let golden = golden_arrays(&folder.join("golden").join(variant).join("exact.safetensors"));
    let prompts = prompts(&folder);
    for (on, model) in models(&folder.join(variant), Numerics::Exact, &[ActivationPrecision::F32]) {
        exact(&format!("{variant} on {on}:"), &golden, &prompts, &model);
    }
}

fn exact(
    variant: &str,
    golden: &BTreeMap<String, GoldenArray>,
    prompts: &BTreeMap<String, Vec<u32>>,
    model: &Model,
) {
    let logits = all_logits(model, prompts);
    for (name, rows) in PROMPTS.iter().zip(&logits) {
        let get = |key: &str| &golden[&format!("{name}.{key}")];
        let worst = largest_difference(rows.last().unwrap(), &get("last_logits_f64oracle").f32());
        assert!(worst < 1e-3, "{variant} {name}: last logits differ by {worst}");
        let margins = get("margin_per_pos").f32();
        for ((position, row), expected) in rows.iter().enumerate().zip(get("argmax").i32()) {
            assert!(
                margins[position] <= 2e-3 || argmax(row) == expected as u32,
                "{variant} {name} position {position}: another best token"
            );
        }
        check_top20(variant, name, rows, get("top20_pos"), get("top20_ids"), get("top20_logprobs"));
        check_greedy(variant, name, model, &prompts[*name], golden);
    }
}

fn check_top20(
    variant: &str,
    name: &str,
    rows: &[Vec<f32>],
    positions: &GoldenArray,
    ids: &GoldenArray,
    expected: &GoldenArray,
) {
    for ((position, ids), expected) in
        positions.i32().into_iter().zip(ids.i32().chunks(20)).zip(expected.f32().chunks(20))
    {
        let all = log_probabilities(&rows[position as usize]);
        for (&id, &expected) in ids.iter().zip(expected) {
            let found = all[id as usize];
            let difference = (found - f64::from(expected)).abs();
            assert!(
                difference < 1e-3,
                "{variant} {name} position {position} token {id}: off by {difference}"
            );
        }
    }
}

/// Decoding token by token with the cache.
fn check_greedy(
    variant: &str,
    name: &str,
    model: &Model,
    prompt: &[u32],
    golden: &BTreeMap<String, GoldenArray>,
) {
    let get = |key: &str| &golden[&format!("{name}.{key}")];
    let expected = get("greedy_ids").i32();
    let step_logits = get("greedy_step_logits").f32();
    let mut steps = [0, 1, 7, 15, 31].iter().zip(step_logits.chunks(step_logits.len() / 5));
    let mut next_step = steps.next();
    let mut session = model.session();
    let mut logits = session.prefill(prompt).unwrap();
    for (step, &expected) in expected.iter().enumerate() {
        if let Some((&at, golden)) = next_step
            && at == step
        {
            let worst = largest_difference(&logits, golden);
            assert!(worst < 1e-3, "{variant} {name} greedy step {step}: logits differ by {worst}");
            next_step = steps.next();
        }
        assert_eq!(argmax(&logits), expected as u32, "{variant} {name} greedy step {step}");
        logits = session.decode(expected as u32).unwrap();
    }
}

#[test]
fn tiny_native_equals_the_float_reference() {
    exact_mode("tiny-native");
}

#[test]
fn tiny_bf16_equals_the_float_reference() {
    exact_mode("tiny-bf16");
}

fn official_mode(variant: &str) {
    let Some(folder) = fixtures("the goldens with official rounding") else { return };
    let golden = golden_arrays(&folder.join("golden").join(variant).join("qat.safetensors"));
    let prompts = prompts(&folder);
    let on_gpu = [ActivationPrecision::F32, ActivationPrecision::Mixed];
    for (on, model) in models(&folder.join(variant), Numerics::Official, &on_gpu) {
        // Inputs rounded to halves fall on the other side of a threshold more often.
        let bounds = if on.contains("mixed") { (0.3, 0.9) } else { (0.1, 0.95) };
        official(&format!("{variant} on {on}"), &golden, &prompts, &model, bounds);
    }
}

/// A rounding that falls the other way moves logits by hundredths, a changed top-k by more: the median is bounded.
fn official(
    variant: &str,
    golden: &BTreeMap<String, GoldenArray>,
    prompts: &BTreeMap<String, Vec<u32>>,
    model: &Model,
    (most_difference, least_agreement): (f64, f64),
) {
    let logits = all_logits(model, prompts);
    let (mut n_equal, mut n_all) = (0, 0);
    let mut differences = Vec::new();
    for (name, rows) in PROMPTS.iter().zip(&logits) {
        let get = |key: &str| &golden[&format!("{name}.{key}")];
        n_all += rows.len();
        n_equal += rows.iter().zip(get("argmax").i32()).filter(|(row, id)| argmax(row) == *id as u32).count();
        let ids = get("top20_ids").i32();
        let expected = get("top20_logprobs").f32();
        for ((position, ids), expected) in
            get("top20_pos").i32().into_iter().zip(ids.chunks(20)).zip(expected.chunks(20))
        {
            let all = log_probabilities(&rows[position as usize]);
            let worst = ids.iter().zip(expected).fold(0.0_f64, |worst, (&id, &expected)| {
                worst.max((all[id as usize] - f64::from(expected)).abs())
            });
            differences.push(worst);
        }
        differences.push(f64::from(largest_difference(rows.last().unwrap(), &get("last_logits").f32())));
    }
    differences.sort_by(f64::total_cmp);
    let median = differences[differences.len() / 2];
    let agreement = n_equal as f64 / n_all as f64;
    #[expect(clippy::print_stderr, reason = "what was measured, for those who ask with --nocapture")]
    {
        eprintln!(
            "{variant}: median difference {median:.4}, {:.2} % of the best tokens the same",
            100.0 * agreement
        );
    }
    assert!(median < most_difference, "{variant}: median difference {median}");
    assert!(agreement >= least_agreement, "{variant}: only {agreement} of the best tokens are the same");
}

#[test]
fn tiny_native_equals_the_official_rounding() {
    official_mode("tiny-native");
}

#[test]
fn tiny_bf16_equals_the_official_rounding() {
    official_mode("tiny-bf16");
}
