//! The same bits whatever the schedule, the batch, the threads or the file; and clear errors.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gguf_tools::block::{BlockType, Guide};
use gguf_tools::gguf::{Layout, NewTensor};
use gguf_tools::model::{Family, TensorSpec, TensorTable};
use gguf_tools::simd::Level;
use runner::forward::Steering;
use runner::logits::{argmax, log_probabilities};
use runner::observe::NoObserver;
use runner::weights::{CheckpointSource, WeightSource};
use runner::{ActivationPrecision, Model, Numerics, Options, RunnerError};
use test_vectors::{fixtures, golden_arrays};

fn prompts(folder: &Path) -> BTreeMap<String, Vec<u32>> {
    serde_json::from_str(&fs::read_to_string(folder.join("golden/prompts.json")).unwrap()).unwrap()
}

fn logits(model: &Model, texts: &[&[u32]]) -> Vec<Vec<Vec<f32>>> {
    let mut logits = vec![Vec::new(); texts.len()];
    model.read_texts(texts, &mut NoObserver, &mut |text, _, row| logits[text].push(row.to_vec())).unwrap();
    logits
}

fn bf16(folder: &Path, options: Options) -> Model {
    Model::open(&folder.join("tiny-bf16"), options).unwrap()
}

#[test]
fn results_do_not_depend_on_batches_chunks_threads_or_instructions() {
    let Some(folder) = fixtures("the tiny models") else { return };
    let prompts = prompts(&folder);
    let texts: Vec<&[u32]> = vec![&prompts["chat"], &prompts["mid150"], &prompts["p5"], &prompts["edge120"]];
    for numerics in [Numerics::Exact, Numerics::Official] {
        let plain = Options { numerics, ..Options::default() };
        let expected = logits(&bf16(&folder, plain.clone()), &texts);
        let others = [
            ("one text at a time", Options { batch_tokens: 1, n_threads: 1, ..plain.clone() }),
            ("odd chunks", Options { batch_tokens: 37, attention_tokens: 5, n_threads: 3, ..plain.clone() }),
            ("scalar", Options { level: Level::Scalar, widen_up_to_bytes: 0, ..plain.clone() }),
        ];
        for (name, options) in others {
            // Bits, not values: -0 is not 0.
            let found = logits(&bf16(&folder, options), &texts);
            for (text, (found, expected)) in found.iter().zip(&expected).enumerate() {
                for (position, (a, b)) in found.iter().zip(expected).enumerate() {
                    let equal = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(equal, "{name}, text {text}, position {position}");
                }
            }
        }
    }
}

#[test]
fn decoding_equals_reading_at_once_and_snapshots_return_to_the_same_state() {
    let Some(folder) = fixtures("the tiny models") else { return };
    let prompts = prompts(&folder);
    let text = &prompts["mid150"];
    let model = bf16(&folder, Options::default());
    let expected = logits(&model, &[text]).swap_remove(0);
    let mut session = model.session();
    let mut snapshots = Vec::new();
    for (position, &token) in text.iter().enumerate() {
        // Around the edges of the window and of both kinds of compressed rows.
        if [0, 3, 4, 5, 126, 127, 128, 129].contains(&position) {
            snapshots.push(session.snapshot().unwrap());
        }
        assert_eq!(session.decode(token).unwrap(), expected[position], "position {position}");
    }
    for snapshot in snapshots {
        session.restore(&snapshot).unwrap();
        let first = session.n_tokens();
        assert_eq!(session.prefill(&text[first..first + 9]).unwrap(), expected[first + 8], "from {first}");
    }
    assert!(session.cache_bytes() > 0);
}

#[test]
fn a_prompt_in_two_parts_equals_one_at_every_boundary() {
    let Some(folder) = fixtures("the tiny models") else { return };
    let prompts = prompts(&folder);
    let text = &prompts["mid150"][..140];
    let model = bf16(&folder, Options::default());
    let expected = model.session().prefill(text).unwrap();
    for first in [1, 3, 4, 7, 127, 128, 129, 139] {
        let mut session = model.session();
        session.prefill(&text[..first]).unwrap();
        assert_eq!(session.prefill(&text[first..]).unwrap(), expected, "first part of {first}");
    }
}

#[test]
fn scores_are_the_log_probabilities_of_the_next_tokens() {
    let Some(folder) = fixtures("the tiny models") else { return };
    let prompts = prompts(&folder);
    let model = bf16(&folder, Options { numerics: Numerics::Exact, ..Options::default() });
    let golden: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.join("golden/tiny-bf16/exact.json")).unwrap()).unwrap();
    let scores = model.score_texts(&[&prompts["chat"], &prompts["mid150"]]).unwrap();
    for (name, scores) in ["chat", "mid150"].iter().zip(&scores) {
        assert_eq!(scores.len(), prompts[*name].len() - 1);
        let mean = -scores.iter().sum::<f64>() / scores.len() as f64;
        let expected = golden[*name]["mean_nll"].as_f64().unwrap();
        assert!((mean - expected).abs() < 1e-4, "{name}: {mean}, not {expected}");
    }
}

/// Writes the tiny model as a GGUF file with the types that `block_type` says, after `change` had its way.
fn write_gguf(
    source: &CheckpointSource,
    path: &Path,
    block_type: impl Fn(&TensorSpec) -> BlockType,
    leave_out: &str,
    change: impl Fn(&str, &mut [f32]),
) {
    let table = TensorTable::new(source.hyper_parameters());
    let specs: Vec<_> = table.specs().iter().filter(|spec| spec.gguf_name != leave_out).collect();
    let kind = |spec: &TensorSpec| {
        if spec.family == Family::RoutingTable { BlockType::I32 } else { block_type(spec) }
    };
    let tensors = specs.iter().map(|spec| NewTensor {
        name: spec.gguf_name.clone(),
        block_type: kind(spec),
        shape: spec.shape.clone(),
    });
    let layout = Layout::new(source.hyper_parameters().to_metadata(), tensors.collect(), 32).unwrap();
    let mut file = layout.header_bytes();
    for (spec, placed) in specs.iter().zip(layout.tensors()) {
        file.resize(placed.offset_bytes as usize, 0);
        let index = source.find(&spec.gguf_name).unwrap().index;
        if spec.family == Family::RoutingTable {
            file.extend(source.read_integers(index).unwrap().iter().flat_map(|v| v.to_le_bytes()));
            continue;
        }
        let mut values = vec![0.0; spec.n_values() as usize];
        let columns = spec.columns() as usize;
        source.read_rows(index, 0..values.len() / columns, &mut values).unwrap();
        change(&spec.gguf_name, &mut values);
        if placed.block_type == BlockType::F32 {
            file.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            continue;
        }
        let row_bytes = placed.block_type.row_bytes(columns as u64).unwrap() as usize;
        let quantizer = placed.block_type.format().unwrap().quantizer(Guide::default()).unwrap();
        let mut blocks = vec![0; row_bytes];
        for row in values.chunks(columns) {
            quantizer.quantize_row(row, &mut blocks);
            file.extend_from_slice(&blocks);
        }
    }
    file.resize(layout.file_bytes() as usize, 0);
    fs::write(path, file).unwrap();
}

fn gguf_path(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("tiny.gguf")
}

#[test]
fn lossless_gguf_files_give_the_bits_of_the_checkpoint() {
    let Some(folder) = fixtures("the tiny models") else { return };
    let text = &prompts(&folder)["edge120"][..];
    let checkpoint = folder.join("tiny-native");
    let source = CheckpointSource::open(&checkpoint).unwrap();
    let expected = logits(&Model::open(&checkpoint, Options::default()).unwrap(), &[text]);
    let temporary = tempfile::tempdir().unwrap();
    for experts in [BlockType::F32, BlockType::Mxfp4] {
        write_gguf(
            &source,
            &gguf_path(&temporary),
            |spec| if spec.family.is_routed() { experts } else { BlockType::F32 },
            "",
            |_, _| {},
        );
        let options = Options { widen_up_to_bytes: 0, ..Options::default() };
        let model = Model::open(&gguf_path(&temporary), options).unwrap();
        assert_eq!(logits(&model, &[text]), expected, "experts as {experts}");
    }
}

/// The types that llama.cpp's converter gives.
fn converter_type(spec: &TensorSpec) -> BlockType {
    let name = &spec.gguf_name;
    match spec.family {
        family if family.is_routed() => BlockType::Mxfp4,
        Family::Attention | Family::SharedExpert => BlockType::Q8_0,
        Family::Indexer if name.ends_with("attn_q_b.weight") => BlockType::Q8_0,
        Family::Indexer | Family::Compressor if name.ends_with("ape.weight") => BlockType::F32,
        Family::Indexer | Family::Compressor | Family::Router | Family::Embedding | Family::Output => {
            BlockType::Bf16
        }
        _ => BlockType::F32,
    }
}

#[test]
fn the_converted_file_gives_what_llama_cpp_computes_from_it_in_f32() {
    let Some(folder) = fixtures("results of llama.cpp") else { return };
    let golden = golden_arrays(&folder.join("golden/llamacpp.safetensors"));
    let source = CheckpointSource::open(&folder.join("tiny-native")).unwrap();
    let temporary = tempfile::tempdir().unwrap();
    write_gguf(&source, &gguf_path(&temporary), converter_type, "", |_, _| {});
    let options = Options { numerics: Numerics::Exact, ..Options::default() };
    let model = Model::open(&gguf_path(&temporary), options).unwrap();
    for name in ["chat", "edge120", "mid150"] {
        let rows = logits(&model, &[&prompts(&folder)[name]]).swap_remove(0);
        let expected = golden[&format!("{name}.asconv_f32.last_logits")].f32();
        let pairs = rows.last().unwrap().iter().zip(&expected);
        let worst = pairs.fold(0.0_f32, |worst, (a, b)| worst.max((a - b).abs()));
        assert!(worst < 1e-3, "{name}: last logits differ by {worst}");
        let best = golden[&format!("{name}.asconv_f32.argmax")].i32();
        assert_eq!(rows.len(), best.len());
        let n_equal = rows.iter().zip(best).filter(|(row, best)| argmax(row) == *best as u32).count();
        assert!(n_equal + 1 >= rows.len(), "{name}: {n_equal} of {} best tokens", rows.len());
    }
}

#[test]
fn eight_bit_inputs_stay_near_and_do_not_depend_on_schedule_or_instructions() {
    let Some(folder) = fixtures("the tiny models") else { return };
    let text = &prompts(&folder)["edge120"][..];
    let source = CheckpointSource::open(&folder.join("tiny-native")).unwrap();
    let temporary = tempfile::tempdir().unwrap();
    let quantized = |spec: &TensorSpec| match spec.family {
        Family::RoutedGate => BlockType::Mxfp4,
        Family::RoutedUp => BlockType::Q4K,
        Family::RoutedDown => BlockType::Q6K,
        _ => converter_type(spec),
    };
    write_gguf(&source, &gguf_path(&temporary), quantized, "", |_, _| {});
    let open = |options: Options| {
        let options = Options { numerics: Numerics::Exact, ..options };
        Model::open(&gguf_path(&temporary), options).unwrap()
    };
    for activations in [ActivationPrecision::Int8, ActivationPrecision::PlainGgml] {
        let rounded = Options { activations, ..Options::default() };
        let expected = logits(&open(rounded.clone()), &[text]).swap_remove(0);
        // Weights that are read ahead and given back are the same weights.
        let others = Options {
            level: Level::Scalar,
            batch_tokens: 50,
            attention_tokens: 7,
            n_threads: 3,
            widen_up_to_bytes: 0,
            release_weights: Some(true),
            ..rounded.clone()
        };
        assert_eq!(logits(&open(others), &[text]).swap_remove(0), expected, "{activations:?}");
        let model = open(rounded);
        let mut session = model.session();
        for (position, &token) in text.iter().enumerate() {
            assert_eq!(session.decode(token).unwrap(), expected[position], "position {position}");
        }
        // The random network amplifies every rounding; a wrong product would leave nothing in common.
        let reference = logits(&open(Options::default()), &[text]).swap_remove(0);
        let divergence = |(p, q): (&Vec<f32>, &Vec<f32>)| {
            let (p, q) = (log_probabilities(p), log_probabilities(q));
            p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>()
        };
        let mean = reference.iter().zip(&expected).map(divergence).sum::<f64>() / text.len() as f64;
        assert!(mean < 0.1, "mean divergence {mean}");
        assert!(mean > 0.0, "inputs were rounded");
    }
}

#[test]
fn broken_models_are_refused_by_name() {
    let Some(folder) = fixtures("the tiny models") else { return };
    let source = CheckpointSource::open(&folder.join("tiny-bf16")).unwrap();
    let temporary = tempfile::tempdir().unwrap();
    let path = gguf_path(&temporary);
    let f32 = |_: &TensorSpec| BlockType::F32;
    let text = [0, 64, 805, 651];

    let missing = "blk.1.attn_q_a.weight";
    write_gguf(&source, &path, f32, missing, |_, _| {});
    let found = Model::open(&path, Options::default()).err().unwrap();
    assert!(matches!(&found, RunnerError::MissingTensors { first, .. } if first == missing), "{found}");

    write_gguf(&source, &path, f32, "", |name, values| {
        if name == "blk.1.ffn_down_shexp.weight" {
            values[300] = f32::NAN;
        }
    });
    let model = Model::open(&path, Options { check_finite: true, ..Options::default() }).unwrap();
    let message = model.session().prefill(&text).err().unwrap().to_string();
    assert!(message.contains("shared output of layer 1 at position 0"), "{message}");
    let model = Model::open(&path, Options::default()).unwrap();
    assert!(matches!(model.session().prefill(&text), Err(RunnerError::NotFinite { .. })));

    write_gguf(&source, &path, f32, "", |name, values| {
        if name == "output.weight" {
            values.fill(0.0);
        }
    });
    let model = Model::open(&path, Options::default()).unwrap();
    assert!(matches!(model.session().prefill(&text), Err(RunnerError::ConstantLogits { .. })));

    write_gguf(&source, &path, f32, "", |name, values| {
        if name == "blk.0.attn_norm.weight" {
            values[2] = f32::INFINITY;
        }
    });
    let message = Model::open(&path, Options::default()).err().unwrap().to_string();
    assert!(message.contains("blk.0.attn_norm.weight") && message.contains("inf"), "{message}");
}

#[test]
fn wrong_shapes_are_refused_by_name() {
    let Some(folder) = fixtures("the tiny models") else { return };
    /// A source whose `attn_kv` of layer 2 has lost a row.
    struct Short(CheckpointSource);
    impl WeightSource for Short {
        fn path(&self) -> &Path {
            self.0.path()
        }
        fn hyper_parameters(&self) -> &gguf_tools::model::HyperParameters {
            self.0.hyper_parameters()
        }
        fn find(&self, name: &str) -> Option<runner::weights::FoundTensor> {
            let mut found = self.0.find(name)?;
            if name == "blk.2.attn_kv.weight" {
                found.shape[0] -= 1;
            }
            Some(found)
        }
        fn block_type(&self, tensor: usize) -> Option<BlockType> {
            self.0.block_type(tensor)
        }
        fn blocks(&self, tensor: usize, rows: std::ops::Range<usize>) -> Result<&[u8], RunnerError> {
            self.0.blocks(tensor, rows)
        }
        fn read_rows(
            &self,
            tensor: usize,
            rows: std::ops::Range<usize>,
            out: &mut [f32],
        ) -> Result<(), RunnerError> {
            self.0.read_rows(tensor, rows, out)
        }
        fn read_integers(&self, tensor: usize) -> Result<Vec<i32>, RunnerError> {
            self.0.read_integers(tensor)
        }
    }
    let source: Arc<dyn WeightSource> =
        Arc::new(Short(CheckpointSource::open(&folder.join("tiny-bf16")).unwrap()));
    let message = Model::new(&source, Options::default()).err().unwrap().to_string();
    assert!(message.contains("blk.2.attn_kv.weight") && message.contains("[511, 256]"), "{message}");
}

#[test]
fn senseless_prompts_are_refused_before_anything_is_computed() {
    let Some(folder) = fixtures("the tiny models") else { return };
    let model = bf16(&folder, Options { context_limit: Some(8), ..Options::default() });
    let mut session = model.session();
    assert!(matches!(session.prefill(&[]), Err(RunnerError::EmptyPrompt)));
    let found = session.prefill(&[0, 5, 1024]).err().unwrap();
    assert!(matches!(found, RunnerError::TokenOutOfRange { index: 2, found: 1024, vocabulary: 1024 }));
    session.prefill(&[0; 7]).unwrap();
    assert!(matches!(session.prefill(&[1, 2]), Err(RunnerError::ContextFull { wanted: 9, limit: 8 })));
    session.decode(1).unwrap();
    assert_eq!(session.n_tokens(), 8, "a refusal leaves the session as it was");
    let too_long = Options { context_limit: Some(1 << 30), ..Options::default() };
    let found = Model::open(&folder.join("tiny-bf16"), too_long).err().unwrap();
    assert!(matches!(found, RunnerError::ContextTooLong { .. }), "{found}");
}

#[test]
fn steering_takes_its_direction_out_of_the_outputs() {
    let Some(folder) = fixtures("the tiny models") else { return };
    let width = 256;
    let direction: Vec<f32> = (0..width).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 } / 16.0).collect();
    let steer = |attention_scale, ffn_scale| {
        let directions = vec![Vec::new(), direction.clone()];
        let steering =
            vec![Arc::new(Steering { name: "some".into(), directions, attention_scale, ffn_scale })];
        bf16(&folder, Options { steering, ..Options::default() })
    };
    let text: &[u32] = &[0, 64, 805, 651];
    let plain = logits(&bf16(&folder, Options::default()), &[text]);
    assert_eq!(logits(&steer(0.0, 0.0), &[text]), plain, "a scale of zero changes nothing");
    assert_ne!(logits(&steer(1.0, 0.0), &[text]), plain);
    assert_ne!(logits(&steer(0.0, 1.0), &[text]), plain);
}
