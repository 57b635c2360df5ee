//! Calibrated builds of the nano model: independence of threads and batches, and resumption at every layer.

use std::path::{Path, PathBuf};

use gguf_tools::block::BlockType;
use gguf_tools::build::{
    BuildError, BuildOptions, BuildReport, ByFeedback, Calibration, CalibrationError, ExpertMoments,
    LayerBytes, MatrixInput, build_calibrated,
};
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::feedback::{Feedback, Settings};
use gguf_tools::importance::NoImportance;
use gguf_tools::plan::{Plan, Recipe, Rule};
use gguf_tools::progress::Silent;
use gguf_tools::source::{CheckpointSource, WeightSource};
use imatrix::calibrate::{CalibrationOptions, LayerPass, Propagate, activations_path, read_documents};
use runner::Options;
use runner::weights::open_source;

const OPTIONS: BuildOptions = BuildOptions { overwrite: true, resume: true, importance_fallback: true };

fn nano() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../test-vectors/nano/checkpoint")
}

/// A plan in which few matrices are walked, so that tests are quick.
fn plan(source: &dyn WeightSource) -> Plan {
    let mut recipe = Recipe::built_in("mxfp4").expect("known");
    for (pattern, target) in [
        ("blk.1.ffn_down_exps", BlockType::Q2K),
        ("blk.2.ffn_gate_exps", BlockType::Q2K),
        ("blk.3.ffn_down_exps", BlockType::Q2K),
    ] {
        recipe.rules.push(Rule::for_tensors(pattern, target));
    }
    Plan::new(source, &recipe, source.metadata().expect("sound")).expect("fits")
}

fn texts() -> Vec<Vec<u32>> {
    // Any tokens will do: what counts is that all runs see the same.
    (0..4u32).map(|k| (0..40 + 30 * k).map(|i| (i * 37 + k * 101) % 1000 + 8).collect()).collect()
}

/// Fewer trials and sweeps than the defaults, so that tests are quick.
fn settings() -> Settings {
    "d-factors=1,refits=1,sweeps=1".parse().expect("sound settings")
}

fn pass(out: &Path, propagate: Propagate, threads: usize, batch_tokens: usize) -> LayerPass {
    let options = CalibrationOptions {
        settings: settings(),
        propagate,
        runner: Options { n_threads: threads, ..Options::default() },
        batch_tokens,
    };
    let source = open_source(&nano()).expect("nano opens");
    LayerPass::new(source, texts(), Some(out), "test", options).expect("sound texts")
}

fn build(calibration: &mut dyn Calibration, out: &Path) -> Result<BuildReport, BuildError> {
    let source = CheckpointSource::new(Checkpoint::open(nano()).expect("opens")).expect("sound");
    let plan = plan(&source);
    let quantizer = Feedback { settings: settings(), ..Feedback::default() };
    let by = ByFeedback { calibration, quantizer: &quantizer };
    build_calibrated(&plan, &source, &NoImportance, by, out, OPTIONS, &Silent)
}

/// A pass that breaks off at one point.
struct Breaking {
    pass: LayerPass,
    at: usize,
    /// Before the layer's experts are made, or when they are written and the next layer is prepared.
    entering: bool,
}

impl Calibration for Breaking {
    fn ready_layer(&self) -> usize {
        self.pass.ready_layer()
    }

    fn restart(&mut self) {
        self.pass.restart();
    }

    fn enter(&mut self, layer: usize, wanted: bool) -> Result<(), CalibrationError> {
        self.pass.enter(layer, wanted)?;
        if layer == self.at && self.entering { Err("broken off".into()) } else { Ok(()) }
    }

    fn moments(&self, input: MatrixInput, expert: usize) -> Result<ExpertMoments, CalibrationError> {
        self.pass.moments(input, expert)
    }

    fn mid_moments(
        &self,
        expert: usize,
        gate: &[f32],
        up: &[f32],
    ) -> Result<ExpertMoments, CalibrationError> {
        self.pass.mid_moments(expert, gate, up)
    }

    fn leave(&mut self, layer: usize, plan: &Plan, bytes: &dyn LayerBytes) -> Result<(), CalibrationError> {
        if layer == self.at && !self.entering {
            return Err("broken off".into());
        }
        self.pass.leave(layer, plan, bytes)
    }

    fn finish(&mut self) {
        self.pass.finish();
    }
}

#[test]
fn bytes_depend_neither_on_threads_nor_on_batches_and_resume_from_every_layer() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut whole = Vec::new();
    for propagate in [Propagate::Source, Propagate::Quantized] {
        let out = folder.path().join("whole.gguf");
        let report = build(&mut pass(&out, propagate, 1, 2048), &out).expect("builds");
        assert_eq!(report.feedback.len(), 3 * 16);
        assert!(report.feedback.iter().all(|o| o.report.error <= o.report.plain_error));
        assert!(!activations_path(&out).exists(), "activations are of no use to a finished file");

        let other = folder.path().join("other.gguf");
        let again = build(&mut pass(&other, propagate, 3, 100), &other).expect("builds");
        assert_eq!(again.sha256, report.sha256, "{propagate:?}: other threads and batches");

        for (at, entering) in [(1, true), (2, false)] {
            let out = folder.path().join("broken.gguf");
            let mut breaking = Breaking { pass: pass(&out, propagate, 2, 2048), at, entering };
            let error = build(&mut breaking, &out).expect_err("breaks off");
            assert!(error.to_string().contains(&format!("layer {at}")), "{error}");
            drop(breaking);
            let resumed = pass(&out, propagate, 2, 700);
            assert_eq!(resumed.ready_layer(), at, "goes on where the activations end");
            let mut resumed = resumed;
            let report = build(&mut resumed, &out).expect("goes on");
            assert_eq!(report.sha256, again.sha256, "{propagate:?}: broken off at {at}");
            assert!(report.resumed_bytes > 0);
        }
        // Activations without the part file they belong to, and a part file without activations.
        let out = folder.path().join("lost.gguf");
        let breaking = || Breaking { pass: pass(&out, propagate, 2, 2048), at: 2, entering: true };
        build(&mut breaking(), &out).expect_err("breaks off");
        std::fs::remove_file(folder.path().join("lost.gguf.part")).expect("it is there");
        std::fs::remove_file(folder.path().join("lost.gguf.part.json")).expect("it is there");
        assert_eq!(build(&mut pass(&out, propagate, 2, 2048), &out).expect("builds").sha256, again.sha256);
        build(&mut breaking(), &out).expect_err("breaks off");
        std::fs::remove_file(activations_path(&out)).expect("it is there");
        assert_eq!(build(&mut pass(&out, propagate, 2, 2048), &out).expect("builds").sha256, again.sha256);
        whole.push(again.sha256);
    }
    assert_ne!(whole[0], whole[1], "what is propagated makes a difference");
}

#[test]
fn experts_that_no_token_came_to_are_named_and_use_the_mean_of_the_layer() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("few.gguf");
    let options = CalibrationOptions {
        settings: settings(),
        propagate: Propagate::Source,
        runner: Options::default(),
        batch_tokens: 2048,
    };
    let source = open_source(&nano()).expect("nano opens");
    let mut pass = LayerPass::new(source, vec![vec![70, 71]], Some(&out), "few", options).expect("sound");
    let report = build(&mut pass, &out).expect("builds");
    let unseen: Vec<_> = report.feedback.iter().filter(|o| o.n_tokens == 0).collect();
    assert!(unseen.len() > 8, "two tokens reach at most eight experts a layer");
    for outcome in unseen {
        assert!(outcome.report.walked);
        let is_named = |n: &&gguf_tools::build::FallbackImportance| {
            n.tensor == outcome.tensor && n.expert_index == outcome.expert_index
        };
        assert!(report.fallback_importance.iter().any(|n| is_named(&n) && n.used == "mean of the layer"));
    }
}

#[test]
fn calibration_text_is_plain_or_json_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |text: &[u8]| {
        let path = folder.path().join("text");
        std::fs::write(&path, text).expect("written");
        read_documents(&path)
    };
    assert_eq!(file(b"one\n{two}\n").expect("plain")[0].text, "one\n{two}\n");
    let lines =
        file(b"{\"kind\":\"code\",\"id\":\"a\",\"text\":\"x\"}\n\n{\"text\":\"y\"}\n").expect("lines");
    assert_eq!((lines.len(), lines[0].kind.as_str(), lines[1].text.as_str()), (2, "code", "y"));
    let error = file(b"{\"text\":\"x\"}\nnot json\n").expect_err("a bad line").to_string();
    assert!(error.contains("line 2"), "{error}");
    assert!(file(b"fine\n\xff\n").expect_err("not text").to_string().contains("line 2"));
    assert!(
        read_documents(Path::new("/nowhere/at/all")).expect_err("missing").to_string().contains("/nowhere")
    );
}
