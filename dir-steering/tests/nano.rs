//! Directions on the nano model of this repository: always run, nothing is fetched.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dir_steering::{
    BuildOptions, Captured, Component, Direction, EXAMPLES, Method, ModelIdentity, Position, SweepOptions,
    build, capture, prompts, separation, sweep,
};
use runner::chat::{Message, render};
use runner::forward::Steering;
use runner::observe::{Observation, Observer, Site};
use runner::tokenizer::Tokenizer;
use runner::{Model, Options};

fn checkpoint() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../test-vectors/nano/checkpoint")
}

fn model() -> Model {
    Model::open(&checkpoint(), Options::default()).expect("the nano model")
}

fn tokenizer() -> Tokenizer {
    let checkpoint = gguf_tools::checkpoint::Checkpoint::open(checkpoint()).expect("the nano model");
    let metadata = gguf_tools::checkpoint::tokenizer::metadata(&checkpoint).expect("its tokenizer");
    Tokenizer::from_metadata(&metadata).expect("its tokenizer")
}

/// The prompts as user turns.
fn chats(tokenizer: &Tokenizer, text: &str) -> Vec<Vec<u32>> {
    let chat = |&prompt: &&str| {
        tokenizer.encode_chat(&render(&[Message::User(prompt)], false, true)).expect("a turn")
    };
    // Two of three pairs are enough to tell, and leave the test short.
    prompts(text).iter().take(66).map(chat).collect()
}

/// The captured prompts of some indices.
fn part(captured: &Captured, keep: impl Fn(usize) -> bool) -> Captured {
    let some = |rows: &Vec<Vec<f32>>| {
        rows.iter().enumerate().filter(|(i, _)| keep(*i)).map(|(_, row)| row.clone()).collect()
    };
    Captured { layers: captured.layers.iter().map(some).collect() }
}

fn options(component: Component, position: Position, method: Method) -> BuildOptions {
    BuildOptions {
        component,
        position,
        method,
        orthogonalize: false,
        contrast: "good against bad".to_owned(),
    }
}

#[test]
fn a_direction_separates_prompts_it_was_not_made_from() {
    let (model, tokenizer) = (model(), tokenizer());
    let identity = ModelIdentity::open(&checkpoint()).expect("the nano model");
    for example in EXAMPLES {
        let (good, bad) = (chats(&tokenizer, example.good), chats(&tokenizer, example.bad));
        let component = if example.name == "terse-verbose" { Component::FfnOut } else { Component::AttnOut };
        let position = Position::Mean;
        let good = capture(&model, &good, component, position).expect("prompts that can be read");
        let bad = capture(&model, &bad, component, position).expect("prompts that can be read");
        for method in [Method::DifferenceOfMeans, Method::PrincipalComponent] {
            let made_from = |i: usize| i.is_multiple_of(2);
            let made = build(
                &identity,
                &part(&good, made_from),
                &part(&bad, made_from),
                &options(component, position, method),
            );
            let direction = made.expect("sets that differ");
            let held_out = |i: usize| !i.is_multiple_of(2);
            let found = separation(&direction, &part(&good, held_out), &part(&bad, held_out));
            let best = found.iter().map(|layer| layer.auc).fold(0.0, f64::max);
            assert!(best > 0.9, "{} {} {}: best AUC {best}", example.name, component.name(), method.name());
        }
    }
}

/// Any unit direction.
fn some_direction(identity: &ModelIdentity) -> Direction {
    let row = |seed: usize| {
        (0..identity.width).map(|i| ((i * 37 + seed * 11) % 23) as f32 - 11.0).collect::<Vec<_>>()
    };
    let captured = |seed: usize| Captured {
        layers: (0..identity.n_layers).map(|layer| vec![row(seed + layer)]).collect(),
    };
    let options = options(Component::FfnOut, Position::Last, Method::DifferenceOfMeans);
    build(identity, &captured(0), &captured(5), &options).expect("sets that differ")
}

/// Outputs of the FFN and of attention as the streams take them.
#[derive(Default)]
struct Outputs(Vec<(Site, usize, Vec<f32>)>);

impl Observer for Outputs {
    fn wants(&self, site: Site, layer: Option<usize>) -> bool {
        matches!(site, Site::FfnOutput | Site::AttentionOutput) && layer.is_some()
    }

    fn rows(&mut self, observation: Observation<'_>) {
        let width = observation.values.len() / observation.tokens.len();
        let layer = observation.layer.expect("a site of a layer");
        self.0.extend(
            observation.values.chunks_exact(width).map(|row| (observation.site, layer, row.to_vec())),
        );
    }
}

fn outputs(model: &Model, text: &[u32]) -> Vec<(Site, usize, Vec<f32>)> {
    let mut outputs = Outputs::default();
    model.observe_texts(&[text], &mut outputs).expect("a text that can be read");
    outputs.0
}

fn along(row: &[f32], direction: &[f32]) -> f64 {
    row.iter().zip(direction).map(|(&y, &v)| f64::from(y) * f64::from(v)).sum()
}

fn size(row: &[f32]) -> f64 {
    along(row, row).sqrt()
}

fn logits(model: &Model, text: &[u32]) -> Vec<f32> {
    let mut all = Vec::new();
    model
        .read_texts(&[text], &mut runner::observe::NoObserver, &mut |_, _, logits| {
            all.extend_from_slice(logits);
        })
        .expect("a text that can be read");
    all
}

#[test]
fn the_scale_says_how_much_is_taken_out_and_its_sign_which_way() {
    let identity = ModelIdentity::open(&checkpoint()).expect("the nano model");
    let direction = some_direction(&identity);
    let text = tokenizer().encode_plain("The quick brown fox jumps over the lazy dog.").expect("a text");
    let mut model = model();
    let (plain, plain_logits) = (outputs(&model, &text), logits(&model, &text));
    let steer =
        |ffn, attention| Arc::new(direction.for_model(&identity, ffn, attention, false).expect("it fits"));

    model.set_steering(vec![steer(0.0, 0.0)]).expect("a CPU");
    assert_eq!(logits(&model, &text), plain_logits, "a scale of zero is no steering, bit for bit");
    assert!(model.provenance().steering.is_empty());

    model.set_steering(vec![steer(1.0, 1.0)]).expect("a CPU");
    assert_eq!(model.provenance().steering.len(), 1);
    for (site, layer, row) in outputs(&model, &text) {
        let left = along(&row, &direction.layers[layer]);
        assert!(left.abs() <= 1e-5 * size(&row).max(1.0), "{left} is left at {site} of layer {layer}");
    }

    // In the first layer the input is the unsteered one, so the output differs by the operation alone.
    for scale in [-1.0, 0.5, 2.0] {
        model.set_steering(vec![steer(scale, 0.0)]).expect("a CPU");
        for ((site, layer, row), (_, _, before)) in outputs(&model, &text).into_iter().zip(&plain) {
            if layer > 0 {
                break;
            }
            let taken = if site == Site::FfnOutput { f64::from(scale) } else { 0.0 };
            let (now, then) = (along(&row, &direction.layers[0]), along(before, &direction.layers[0]));
            assert!(
                (now - (1.0 - taken) * then).abs() < 1e-5 * size(before).max(1.0),
                "scale {scale}: {then} to {now}"
            );
        }
    }

    // Two files one after the other: the second sees what the first left.
    let double = Steering { ffn_scale: 1.0, ..(*steer(0.0, 0.0)).clone() };
    model.set_steering(vec![steer(2.0, 0.0), Arc::new(double)]).expect("a CPU");
    for (site, layer, row) in outputs(&model, &text) {
        let left = along(&row, &direction.layers[layer]);
        assert!(site != Site::FfnOutput || left.abs() <= 1e-5 * size(&row).max(1.0), "{left} is left");
    }
}

#[test]
fn a_sweep_measures_no_change_at_zero_and_some_elsewhere() {
    let (mut model, tokenizer) = (model(), tokenizer());
    let identity = ModelIdentity::open(&checkpoint()).expect("the nano model");
    let direction = some_direction(&identity);
    let prompts = chats(&tokenizer, "What is the capital of France?\nWrite a list.\n");
    let options = SweepOptions { scales: vec![-4.0, 0.0, 4.0], n_tokens: 24, end: tokenizer.eos() };
    let steering = |scale| direction.for_model(&identity, scale, 0.0, false);
    let mut seen = 0;
    let rows = sweep(&mut model, &prompts, &options, &steering, &mut |_, _| seen += 1).expect("a sweep");
    assert_eq!((rows.len(), seen), (6, 6));
    for row in &rows {
        if row.scale == 0.0 {
            assert_eq!(row.cosine_drift, 0.0, "{row:?}");
        } else {
            assert!(row.cosine_drift > 0.0, "{row:?}");
        }
        let unsteered =
            rows.iter().find(|other| other.prompt == row.prompt && other.scale == 0.0).expect("scale 0");
        assert!(row.perplexity >= unsteered.perplexity * 0.9, "{row:?} against {unsteered:?}");
    }
    assert!(model.provenance().steering.is_empty(), "a sweep leaves the model as it was");
}
