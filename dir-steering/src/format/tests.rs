use std::path::{Path, PathBuf};

use super::{Format, open, read, write};
use crate::component::Component;
use crate::direction::{Direction, Operation, Origin};
use crate::error::SteeringError;
use crate::model::ModelIdentity;

const WIDTH: usize = 8;
const N_LAYERS: usize = 5;

/// Unit vectors for layers 1, 2 and 4 of five.
fn direction() -> Direction {
    let unit = |layer: usize| {
        (0..WIDTH).map(move |i| {
            if i == layer {
                0.6
            } else if i == layer + 1 {
                -0.8
            } else {
                0.0
            }
        })
    };
    let layers = (0..N_LAYERS)
        .map(|layer| if [0, 3].contains(&layer) { Vec::new() } else { unit(layer).collect() })
        .collect();
    Direction {
        operation: Operation::Project,
        component: Some(Component::FfnOut),
        width: WIDTH,
        layers,
        states_n_layers: true,
        origin: Origin {
            label: Some("Flash-Test".into()),
            model_sha256: Some("ab".repeat(32)),
            method: Some("mean".into()),
            contrast: Some("a against b".into()),
        },
        path: PathBuf::new(),
    }
}

fn model() -> ModelIdentity {
    ModelIdentity {
        width: WIDTH,
        n_layers: N_LAYERS,
        label: Some("Flash-Test".into()),
        sha256: String::new(),
    }
}

fn refused(direction: &Direction, model: &ModelIdentity) -> String {
    direction.for_model(model, 1.0, 0.0, false).expect_err("a direction that does not fit").to_string()
}

#[test]
fn every_format_gives_back_what_it_states() {
    let folder = tempfile::tempdir().expect("a folder");
    for (format, name) in
        [(Format::Safetensors, "d.safetensors"), (Format::Raw, "d.f32"), (Format::Glp, "d.gguf")]
    {
        let path = folder.path().join(name);
        let written = direction();
        write(&written, format, &path).expect("a writable direction");
        let (found, found_format) = open(&path).expect("what was written");
        assert_eq!(found_format, format);
        assert_eq!(found.layers, written.layers, "{name}");
        assert_eq!((found.operation, found.component), (Operation::Project, Some(Component::FfnOut)));
        assert_eq!(found.origin.label, written.origin.label);
        assert_eq!(found.origin.contrast, written.origin.contrast);
        assert_eq!(found.content_sha256(), written.content_sha256());
        let steering = found.for_model(&model(), 1.0, 0.5, false).expect("a direction of this model");
        assert_eq!(steering.directions, written.layers);
    }
}

#[test]
fn additive_and_projective_never_change_into_each_other_silently() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("control.gguf");
    let error = write(&direction(), Format::ControlVector, &path).expect_err("a projection");
    assert!(error.to_string().contains("--as add"), "{error}");
    assert!(!path.exists());

    let added = direction().reinterpret(Operation::Add, 2.5).expect("vectors with a length");
    write(&added, Format::ControlVector, &path).expect("an additive direction");
    let (found, format) = open(&path).expect("what was written");
    assert_eq!((format, found.operation), (Format::ControlVector, Operation::Add));
    assert!((found.norm(1) - 2.5).abs() < 1e-6);
    assert!(refused(&found, &model()).contains("added behind a layer"));
    for format in [Format::Raw, Format::Glp] {
        write(&found, format, &folder.path().join("wrong.f32")).expect_err("an additive direction");
    }

    let back = found.reinterpret(Operation::Project, 1.0).expect("vectors with a length");
    assert!((back.norm(4) - 1.0).abs() < 1e-6);
}

#[test]
fn containers_without_a_place_for_layer_0_say_so() {
    let mut all = direction();
    all.layers[0] = all.layers[1].clone();
    let folder = tempfile::tempdir().expect("a folder");
    let error = write(&all, Format::Glp, &folder.path().join("d.gguf")).expect_err("a direction for layer 0");
    assert!(error.to_string().contains("--layers 1:LAST"), "{error}");
    all.keep_layers(1, 4).expect("layers to keep");
    write(&all, Format::Glp, &folder.path().join("d.gguf")).expect("layers from 1 on");
    let error = all.keep_layers(3, 3).expect_err("no direction there");
    assert!(error.to_string().contains("[1, 2, 4]"), "{error}");
}

#[test]
fn what_does_not_fit_is_refused_with_numbers() {
    let model = model();
    let message = refused(&Direction { width: 7, ..direction() }, &model);
    assert!(message.contains("width 7") && message.contains('8'), "{message}");
    let mut shallow = direction();
    shallow.layers.pop();
    let message = refused(&shallow, &model);
    assert!(message.contains("covers 4 layers") && message.contains("has 5"), "{message}");
    let mut other = direction();
    other.origin.label = Some("Flash-Other".into());
    let message = refused(&other, &model);
    assert!(message.contains("Flash-Other") && message.contains("Flash-Test"), "{message}");
    other.for_model(&model, 1.0, 0.0, true).expect("a label that the user lets pass");
    let mut long = direction();
    long.layers[2].iter_mut().for_each(|value| *value *= 2.0);
    let message = refused(&long, &model);
    assert!(message.contains("layer 2 has length 2.0"), "{message}");
    let mut unsound = direction();
    unsound.layers[4][3] = f32::NAN;
    let message = refused(&unsound, &model);
    assert!(message.contains("layer 4 has NaN at 3"), "{message}");
    let looked_at = Direction { component: Some(Component::FfnIn), ..direction() };
    assert!(refused(&looked_at, &model).contains("ffn_in"));
    direction().for_model(&model, f32::INFINITY, 0.0, false).expect_err("no scale");
}

/// A raw file of `n` values with a description of `[layers, width]`.
fn raw(folder: &Path, n: usize, shape: &str) -> PathBuf {
    let path = folder.join("raw.f32");
    let values: Vec<u8> =
        (0..n).flat_map(|i| if i % WIDTH == 0 { 1.0_f32 } else { 0.0 }.to_le_bytes()).collect();
    std::fs::write(&path, values).expect("a file");
    let json =
        format!(r#"{{"format": "ds4-directional-steering-v1", "shape": {shape}, "component": "ffn_out"}}"#);
    std::fs::write(path.with_extension("json"), json).expect("a file");
    path
}

#[test]
fn raw_files_need_exactly_the_bytes_they_describe() {
    let folder = tempfile::tempdir().expect("a folder");
    let n = N_LAYERS * WIDTH;
    open(&raw(folder.path(), n, "[5, 8]")).expect("a sound file");
    for (n, shape) in
        [(n - 1, "[5, 8]"), (n - WIDTH, "[5, 8]"), (n, "[0, 8]"), (n, "[18446744073709551615, 8]"), (n, "5")]
    {
        let error = open(&raw(folder.path(), n, shape)).expect_err("sizes that differ");
        assert!(matches!(error, SteeringError::Field { .. }), "{error}");
    }
    let path = raw(folder.path(), n, "[5, 8]");
    std::fs::remove_file(path.with_extension("json")).expect("a file");
    assert!(matches!(open(&path), Err(SteeringError::NoDescription { .. })));
}

#[test]
fn damaged_files_are_errors_not_panics() {
    let folder = tempfile::tempdir().expect("a folder");
    for (format, name) in [(Format::Safetensors, "d.safetensors"), (Format::Glp, "d.gguf")] {
        let path = folder.path().join(name);
        write(&direction(), format, &path).expect("a writable direction");
        let whole = std::fs::read(&path).expect("the file");
        for n in (0..whole.len()).step_by(5) {
            std::fs::write(&path, &whole[..n]).expect("a file");
            // The container's padding behind the last tensor may be cut off; anything else may not.
            if let Ok((found, _)) = read(&path) {
                assert_eq!(found.layers, direction().layers, "{name} cut to {n}");
            }
        }
        for n in (0..whole.len()).step_by(7) {
            let mut bytes = whole.clone();
            bytes[n] ^= 0x55;
            std::fs::write(&path, &bytes).expect("a file");
            let _ = open(&path);
        }
        let mut bytes = whole.clone();
        let last = bytes.windows(4).rposition(|b| b == (-0.8_f32).to_le_bytes()).expect("the last value");
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).expect("a file");
        let error = open(&path).expect_err("a changed value");
        assert!(error.to_string().contains("SHA-256"), "{error}");
    }
    let path = folder.path().join("page.html");
    std::fs::write(&path, "<html>").expect("a file");
    assert!(matches!(open(&path), Err(SteeringError::UnknownFormat { .. })));
}
