//! Every step inside the layers, and what an observer sums up, against results of independent code.

use std::collections::BTreeMap;
use std::path::Path;

use runner::observe::{ExpertObservation, IndexObservation, Observation, Observer, RouteObservation, Site};
use runner::{Model, Numerics, Options};
use test_vectors::{GoldenArray, fixtures, golden_arrays};

type Key = (Site, Option<usize>);

/// Keeps everything, one row a token.
#[derive(Default)]
struct Recorder {
    rows: BTreeMap<String, Vec<Vec<f32>>>,
    experts: BTreeMap<usize, Vec<Vec<(u32, f32)>>>,
    chosen: BTreeMap<usize, Vec<Vec<u32>>>,
}

fn key((site, layer): Key) -> String {
    format!("{site} {layer:?}")
}

impl Observer for Recorder {
    fn wants(&self, _: Site, _: Option<usize>) -> bool {
        true
    }

    fn rows(&mut self, seen: Observation<'_>) {
        let rows = seen.values.chunks_exact(seen.values.len() / seen.tokens.len()).map(<[f32]>::to_vec);
        self.rows.entry(key((seen.site, seen.layer))).or_default().extend(rows);
    }

    fn routes(&mut self, seen: RouteObservation<'_>) {
        let n_used = seen.experts.len() / seen.tokens.len();
        for (experts, weights) in seen.experts.chunks(n_used).zip(seen.weights.chunks(n_used)) {
            let mut pairs: Vec<(u32, f32)> = experts.iter().copied().zip(weights.iter().copied()).collect();
            pairs.sort_by_key(|pair| pair.0);
            self.experts.entry(seen.layer).or_default().push(pairs);
        }
    }

    fn index(&mut self, seen: IndexObservation<'_>) {
        self.chosen.entry(seen.layer).or_default().extend(seen.chosen.iter().cloned());
    }
}

fn model(folder: &Path, variant: &str) -> Model {
    let options = Options { numerics: Numerics::Exact, ..Options::default() };
    Model::open(&folder.join(variant), options).unwrap()
}

fn prompt(folder: &Path, name: &str) -> Vec<u32> {
    let text = std::fs::read_to_string(folder.join("golden/prompts.json")).unwrap();
    let mut prompts: BTreeMap<String, Vec<u32>> = serde_json::from_str(&text).unwrap();
    prompts.remove(name).unwrap()
}

fn record(model: &Model, tokens: &[u32]) -> Recorder {
    let mut recorder = Recorder::default();
    model.read_texts(&[tokens], &mut recorder, &mut |_, _, _| {}).unwrap();
    recorder
}

/// Arrays of the golden trace and where they are seen.
const SITES: [(&str, Site); 17] = [
    ("attn_in_collapsed", Site::AttentionCollapsed),
    ("attn_hc_post", Site::AttentionPost),
    ("attn_hc_comb", Site::AttentionComb),
    ("attn_norm", Site::AttentionInput),
    ("q_lora_norm", Site::QueryLora),
    ("kv_norm_prerope", Site::KeyValueNorm),
    ("attn_o_lora", Site::OutputLora),
    ("attn_out", Site::AttentionOutput),
    ("ffn_in_collapsed", Site::FfnCollapsed),
    ("ffn_hc_post", Site::FfnPost),
    ("ffn_hc_comb", Site::FfnComb),
    ("ffn_norm", Site::FfnInput),
    ("router_logits", Site::RouterLogits),
    ("routed_out", Site::RoutedOutput),
    ("shared_out", Site::SharedOutput),
    ("ffn_out", Site::FfnOutput),
    ("streams_out", Site::Streams),
];

/// Largest difference allowed, as a share of the array's root mean square.
const TOLERANCE: f32 = 2e-4;

fn compare(name: &str, found: &[&[f32]], golden: &GoldenArray) {
    let golden = golden.f32();
    let found = found.concat();
    assert_eq!(found.len(), golden.len(), "{name}");
    let rms = (golden.iter().map(|v| v * v).sum::<f32>() / golden.len() as f32).sqrt();
    let worst = found.iter().zip(&golden).fold(0.0_f32, |worst, (a, b)| worst.max((a - b).abs()));
    assert!(worst <= TOLERANCE * rms, "{name}: off by {worst}, rms {rms}");
}

/// Router and indexer choices at the tokens of `rows`, except at near ties.
fn check_choices(recorder: &Recorder, layer: usize, golden: &BTreeMap<String, GoldenArray>, rows: &[usize]) {
    let get = |name: &str| golden.get(&format!("L{layer}.{name}"));
    let ids = get("router_ids").unwrap().i32();
    let weights = get("router_w").unwrap().f32();
    let margins = get("router_margin").map(GoldenArray::f32);
    let n_used = ids.len() / rows.len();
    for (i, &row) in rows.iter().enumerate() {
        if margins.as_ref().is_some_and(|margins| margins[i] <= 1e-5) {
            continue;
        }
        for (k, &(expert, weight)) in recorder.experts[&layer][row].iter().enumerate() {
            assert_eq!(expert, ids[i * n_used + k] as u32, "layer {layer} token {row}");
            let difference = (weight - weights[i * n_used + k]).abs();
            assert!(
                difference < 1e-4,
                "layer {layer} token {row} expert {expert}: weight off by {difference}"
            );
        }
    }
    let Some(chosen) = get("index_topk").map(GoldenArray::i32) else { return };
    let margins = get("index_margin").unwrap().f32();
    let scores = get("index_scores").unwrap().f32();
    let (top_k, n_rows) = (chosen.len() / rows.len(), scores.len() / rows.len());
    let found_scores = &recorder.rows[&key((Site::IndexScores, Some(layer)))];
    let rms = (scores.iter().map(|v| v * v).sum::<f32>() / scores.len() as f32).sqrt();
    for (i, &row) in rows.iter().enumerate() {
        for (w, &score) in found_scores[row].iter().enumerate().filter(|(_, score)| score.is_finite()) {
            let difference = (score - scores[i * n_rows + w]).abs();
            assert!(difference <= TOLERANCE * rms, "layer {layer} token {row} row {w}: off by {difference}");
        }
        if margins[i] > 3e-5 {
            let golden = chosen[i * top_k..][..top_k].iter().filter(|&&w| w >= 0).map(|&w| w as u32);
            let golden: Vec<u32> = golden.collect();
            assert_eq!(recorder.chosen[&layer][row], golden, "layer {layer} token {row}");
        }
    }
}

fn trace(variant: &str) {
    let Some(folder) = fixtures("golden traces") else { return };
    let golden = golden_arrays(&folder.join("golden").join(variant).join("trace_mid150.safetensors"));
    let model = model(&folder, variant);
    let tokens = prompt(&folder, "mid150");
    let recorder = record(&model, &tokens);
    let positions: Vec<usize> = golden["positions"].i32().into_iter().map(|p| p as usize).collect();
    let all: Vec<usize> = (0..tokens.len()).collect();
    for layer in 0..model.hyper_parameters().num_hidden_layers as usize {
        for (name, site) in SITES {
            let rows = &recorder.rows[&key((site, Some(layer)))];
            let wanted = if name == "router_logits" { &all } else { &positions };
            let found: Vec<&[f32]> = wanted.iter().map(|&p| &rows[p][..]).collect();
            compare(&format!("L{layer}.{name}"), &found, &golden[&format!("L{layer}.{name}")]);
        }
        let window = &recorder.rows[&key((Site::WindowRow, Some(layer)))];
        let tail: Vec<&[f32]> = window[tokens.len() - 127..].iter().map(|row| &row[..]).collect();
        compare(&format!("L{layer}.window"), &tail, &golden[&format!("L{layer}.kv_window_tail")]);
        check_choices(&recorder, layer, &golden, &all);
    }
    for (name, site) in [("head_collapsed", Site::HeadCollapsed), ("final_norm", Site::FinalNorm)] {
        let rows = &recorder.rows[&key((site, None))];
        let found: Vec<&[f32]> = positions.iter().map(|&p| &rows[p][..]).collect();
        compare(name, &found, &golden[name]);
    }

    let golden = golden_arrays(&folder.join("golden").join(variant).join("trace_long620.safetensors"));
    let recorder = record(&model, &prompt(&folder, "long620"));
    let positions: Vec<usize> = golden["positions"].i32().into_iter().map(|p| p as usize).collect();
    for layer in 0..model.hyper_parameters().num_hidden_layers as usize {
        check_choices(&recorder, layer, &golden, &positions);
    }
}

#[test]
fn every_step_of_tiny_native_equals_the_reference() {
    trace("tiny-native");
}

#[test]
fn every_step_of_tiny_bf16_equals_the_reference() {
    trace("tiny-bf16");
}

/// Sums of squares for an importance matrix, formed as ds4 forms them.
struct Sums {
    /// For each layer and expert: sums of the inputs, of the mids times and without the route weight, and the count.
    sums: BTreeMap<(usize, usize), [Vec<f64>; 3]>,
    counts: BTreeMap<(usize, usize), i32>,
}

impl Observer for Sums {
    fn wants(&self, site: Site, _: Option<usize>) -> bool {
        site == Site::RoutedMid
    }

    fn expert(&mut self, seen: ExpertObservation<'_>) {
        let place = (seen.layer, seen.expert);
        let n = seen.rows.len();
        let (width, inner) = (seen.inputs.len() / n, seen.mids.len() / n);
        let sums =
            self.sums.entry(place).or_insert_with(|| [vec![0.0; width], vec![0.0; inner], vec![0.0; inner]]);
        *self.counts.entry(place).or_default() += n as i32;
        for ((input, mid), &weight) in
            seen.inputs.chunks(width).zip(seen.mids.chunks(inner)).zip(seen.weights)
        {
            let add = |sums: &mut Vec<f64>, values: &[f32], factor: f32| {
                sums.iter_mut().zip(values).for_each(|(s, &v)| *s += f64::from(v * factor).powi(2));
            };
            add(&mut sums[0], input, 1.0);
            add(&mut sums[1], mid, weight);
            add(&mut sums[2], mid, 1.0);
        }
    }
}

fn importance(variant: &str) {
    let Some(folder) = fixtures("golden importance sums") else { return };
    let golden = golden_arrays(&folder.join("golden").join(variant).join("imatrix.safetensors"));
    let model = model(&folder, variant);
    let texts = [prompt(&folder, "mid150"), prompt(&folder, "long620")];
    let mut sums = Sums { sums: BTreeMap::new(), counts: BTreeMap::new() };
    model.read_texts(&[&texts[0], &texts[1]], &mut sums, &mut |_, _, _| {}).unwrap();
    let n_experts = model.hyper_parameters().n_routed_experts as usize;
    let counts = golden["count"].i32();
    for (i, name) in ["gate_up_sum2", "down_sum2_weighted", "down_sum2_unweighted"].into_iter().enumerate() {
        let expected = golden[name].f32();
        let width = *golden[name].shape.last().unwrap();
        for (at, expected) in expected.chunks(width).enumerate() {
            let place = (at / n_experts, at % n_experts);
            assert_eq!(sums.counts.get(&place).copied().unwrap_or(0), counts[at], "tokens of {place:?}");
            let largest = expected.iter().fold(0.0_f32, |a, &b| a.max(b));
            for (column, &expected) in expected.iter().enumerate() {
                let found = sums.sums.get(&place).map_or(0.0, |sums| sums[i][column]);
                let allowed = 1e-4 * f64::from(expected.max(1e-3 * largest));
                let difference = (found - f64::from(expected)).abs();
                assert!(difference <= allowed, "{name} {place:?} column {column}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn observed_sums_of_tiny_native_equal_the_golden_importance() {
    importance("tiny-native");
}

#[test]
fn observed_sums_of_tiny_bf16_equal_the_golden_importance() {
    importance("tiny-bf16");
}
