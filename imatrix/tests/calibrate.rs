//! Calibrated builds of the nano model: independence of threads and batches, and resumption at every layer.

use std::path::{Path, PathBuf};

use gguf_tools::block::BlockType;
use gguf_tools::build::{
    BuildError, BuildOptions, BuildReport, ByFeedback, Calibration, CalibrationError, LayerBytes,
    MatrixMoments, Wanted, build_calibrated,
};
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::feedback::{Feedback, Settings};
use gguf_tools::importance::NoImportance;
use gguf_tools::model::MatrixInput;
use gguf_tools::plan::{Plan, Recipe, Rule};
use gguf_tools::progress::Silent;
use gguf_tools::source::{CheckpointSource, WeightSource};
use imatrix::calibrate::{CalibrationOptions, LayerPass, Propagate, activations_path, read_documents};
use runner::Options;
use runner::observe::{Observation, Observer, Site};
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
    // Most dense matrices too wide for a walk, some in each type that has one.
    for (pattern, target) in [
        (r"(attn_(q|kv|output)|shexp)", BlockType::F16),
        (r"blk\.1\.attn_(q_a|output_[ab])", BlockType::Q4K),
        (r"blk\.(2\.attn_q_b|2\.attn_kv|3\.ffn_down_shexp)\.", BlockType::Q8_0),
        (r"blk\.2\.(indexer|attn_compressor_kv)", BlockType::Q8_0),
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
    build_with(calibration, out, false)
}

fn build_with(calibration: &mut dyn Calibration, out: &Path, dense: bool) -> Result<BuildReport, BuildError> {
    let source = CheckpointSource::new(Checkpoint::open(nano()).expect("opens")).expect("sound");
    let plan = plan(&source);
    let quantizer = Feedback { settings: settings(), ..Feedback::default() };
    let by = ByFeedback { calibration, quantizer: &quantizer, dense };
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

    fn enter(&mut self, layer: usize, wanted: &Wanted) -> Result<(), CalibrationError> {
        self.pass.enter(layer, wanted)?;
        if layer == self.at && self.entering { Err("broken off".into()) } else { Ok(()) }
    }

    fn enter_head(&mut self) -> Result<(), CalibrationError> {
        self.pass.enter_head()?;
        if self.at == 4 { Err("broken off".into()) } else { Ok(()) }
    }

    fn dense_moments(&self, input: MatrixInput, group: usize) -> Result<MatrixMoments, CalibrationError> {
        self.pass.dense_moments(input, group)
    }

    fn moments(&self, input: MatrixInput, expert: usize) -> Result<MatrixMoments, CalibrationError> {
        self.pass.moments(input, expert)
    }

    fn mid_moments(
        &self,
        expert: usize,
        gate: &[f32],
        up: &[f32],
    ) -> Result<MatrixMoments, CalibrationError> {
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
fn dense_matrices_are_walked_when_asked_with_the_same_bytes_however_it_is_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let plain = build(&mut pass(&path("plain"), Propagate::Source, 2, 2048), &path("plain")).expect("builds");
    let whole = path("whole");
    let report = build_with(&mut pass(&whole, Propagate::Source, 1, 2048), &whole, true).expect("builds");
    assert_eq!(report.file_bytes, plain.file_bytes);
    let dense: Vec<_> = report.feedback.iter().filter(|o| !o.tensor.contains("_exps")).collect();
    let names: Vec<_> = dense.iter().map(|o| o.tensor.trim_end_matches(".weight")).collect();
    for name in ["blk.1.attn_q_a", "blk.1.attn_output_a", "blk.1.attn_output_b", "blk.2.attn_q_b", "output"] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    assert!(names.iter().any(|name| name.contains("shexp")) && names.iter().any(|name| name.contains("kv")));
    for outcome in &dense {
        let report = &outcome.report;
        assert!(report.walked && report.error < report.plain_error, "{}: {report:?}", outcome.tensor);
        assert_eq!(outcome.n_tokens, texts().iter().map(Vec::len).sum::<usize>(), "{}", outcome.tensor);
    }
    let experts = |report: &BuildReport| {
        report.feedback.iter().filter(|o| o.tensor.contains("_exps")).cloned().collect::<Vec<_>>()
    };
    let key =
        |o: &gguf_tools::build::FeedbackOutcome| (o.tensor.clone(), o.expert_index, o.report.error.to_bits());
    let keys = |report: &BuildReport| experts(report).iter().map(key).collect::<Vec<_>>();
    assert_eq!(keys(&report), keys(&plain), "what experts become does not depend on it");

    let other = path("other");
    let again = build_with(&mut pass(&other, Propagate::Source, 3, 100), &other, true).expect("builds");
    assert_eq!(again.sha256, report.sha256, "other threads and batches");
    for (at, entering) in [(1, true), (2, false), (4, true)] {
        let out = path("broken");
        let mut breaking = Breaking { pass: pass(&out, Propagate::Source, 2, 2048), at, entering };
        let error = build_with(&mut breaking, &out, true).expect_err("breaks off").to_string();
        let place = if at == 4 { "behind the layers".to_owned() } else { format!("layer {at}") };
        assert!(error.starts_with(&place), "{error}");
        drop(breaking);
        let mut resumed = pass(&out, Propagate::Source, 2, 700);
        assert_eq!(resumed.ready_layer(), at);
        let resumed = build_with(&mut resumed, &out, true).expect("goes on");
        assert_eq!(resumed.sha256, report.sha256, "broken off at {at}");
        assert!(!activations_path(&out).exists());
    }
}

/// Keeps every row of some sites.
#[derive(Default)]
struct Rows(Vec<(Site, Vec<f32>)>);

impl Observer for Rows {
    fn wants(&self, site: Site, layer: Option<usize>) -> bool {
        let in_layer = [Site::AttentionInput, Site::QueryLora, Site::HeadsOutput, Site::OutputLora];
        let in_ffn = [Site::FfnInput, Site::SharedMid];
        match layer {
            Some(layer) => layer == 1 && (in_layer.contains(&site) || in_ffn.contains(&site)),
            None => site == Site::FinalNorm,
        }
    }

    fn rows(&mut self, observation: Observation<'_>) {
        match self.0.iter_mut().find(|(site, _)| *site == observation.site) {
            Some((_, rows)) => rows.extend(observation.values),
            None => self.0.push((observation.site, observation.values.to_vec())),
        }
    }
}

#[test]
fn second_moments_of_dense_matrices_are_those_of_what_the_forward_pass_multiplies_them_with() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut options = CalibrationOptions {
        settings: settings(),
        propagate: Propagate::Source,
        runner: Options::default(),
        batch_tokens: 100,
    };
    options.settings.sensitivity_power = 0.0;
    let source = open_source(&nano()).expect("nano opens");
    let model = runner::Model::new(&source, Options::default()).expect("sound");
    let out = folder.path().join("out");
    let mut pass = LayerPass::new(source, texts(), Some(&out), "moments", options).expect("sound texts");

    let mut rows = Rows::default();
    let texts = texts();
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    let mut streams = model.embed_texts(&texts).expect("known tokens");
    for layer in 0..model.n_layers() {
        streams = model.layer_of_texts(layer, 0, &texts, streams, &mut rows).expect("computes");
    }
    model.head_input_of_texts(0, &texts, streams, &mut rows).expect("computes");

    let inputs = [
        (MatrixInput::Attention, Site::AttentionInput, 1),
        (MatrixInput::QueryLora, Site::QueryLora, 1),
        (MatrixInput::Heads, Site::HeadsOutput, 2),
        (MatrixInput::OutputLora, Site::OutputLora, 1),
        (MatrixInput::Ffn, Site::FfnInput, 1),
        (MatrixInput::SharedMid, Site::SharedMid, 1),
        (MatrixInput::Final, Site::FinalNorm, 1),
    ];
    let n_tokens: usize = texts.iter().map(|text| text.len()).sum();
    let plan = {
        let source = CheckpointSource::new(Checkpoint::open(nano()).expect("opens")).expect("sound");
        plan(&source)
    };
    let compare = |pass: &LayerPass, input: MatrixInput, site: Site, n_groups: usize| {
        let values = &rows.0.iter().find(|(seen, _)| *seen == site).expect("seen").1;
        let width = values.len() / n_tokens;
        let columns = width / n_groups;
        for group in 0..n_groups {
            let found = pass.dense_moments(input, group).expect("gathered");
            assert_eq!((found.n_tokens, found.diagonal.len()), (n_tokens, columns), "{input:?}");
            let scale = found.diagonal.iter().copied().fold(0.0, f32::max);
            for (i, j) in [(0, 0), (1, 0), (3, 97), (columns - 1, columns / 2), (columns - 1, columns - 1)] {
                let of =
                    |row: &[f32]| f64::from(row[group * columns + i]) * f64::from(row[group * columns + j]);
                let expected = values.chunks_exact(width).map(of).sum::<f64>() / n_tokens as f64;
                let found = f64::from(found.moments[i * columns + j]);
                assert!((found - expected).abs() < 1e-5 * f64::from(scale), "{input:?} {group} {i} {j}");
            }
        }
        assert!(pass.dense_moments(input, n_groups).is_err(), "no more groups than the model has");
    };
    for layer in 0..2 {
        let mut wanted = Wanted::default();
        wanted.dense.extend(inputs[..6].iter().map(|(input, ..)| *input).filter(|_| layer == 1));
        pass.enter(layer, &wanted).expect("computes");
        if layer == 1 {
            inputs[..6].iter().for_each(|&(input, site, n_groups)| compare(&pass, input, site, n_groups));
        }
        pass.leave(layer, &plan, &NoBytes).expect("kept");
    }
    for layer in 2..4 {
        pass.enter(layer, &Wanted::default()).expect("computes");
        assert!(pass.dense_moments(MatrixInput::Ffn, 0).is_err(), "not wanted in this layer");
        pass.leave(layer, &plan, &NoBytes).expect("kept");
    }
    pass.enter_head().expect("computes");
    let (input, site, n_groups) = inputs[6];
    compare(&pass, input, site, n_groups);
}

/// Nobody asks for bytes where the source is propagated.
struct NoBytes;

impl LayerBytes for NoBytes {
    fn read(&self, _: &gguf_tools::plan::PlannedTensor) -> std::io::Result<Vec<u8>> {
        Err(std::io::Error::other("nothing is written"))
    }
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
