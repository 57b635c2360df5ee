//! Directional steering as users run it, on the nano model of this repository.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn run(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ggsmith")).current_dir(folder).args(arguments).output().unwrap()
}

fn done(folder: &Path, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn fails(folder: &Path, arguments: &[&str], code: i32) -> String {
    let output = run(folder, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

fn nano() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("test-vectors/nano/checkpoint")
}

#[test]
fn a_direction_is_built_shown_converted_swept_and_used() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let model = nano();
    let nano = model.to_str().unwrap();
    std::fs::write(
        at.join("good.txt"),
        "# commands\nAnswer in one word: who?\nOne word: when?\nOnly a word: why?\n",
    )
    .unwrap();
    std::fs::write(
        at.join("bad.txt"),
        "Explain at length who.\nTell me all about when.\nDescribe in detail why.\n",
    )
    .unwrap();
    let build = [
        "steer",
        "build",
        "-m",
        nano,
        "--backend",
        "cpu",
        "--good",
        "good.txt",
        "--bad",
        "bad.txt",
        "--held-out",
        "0.4",
    ];
    let report = done(at, &[&build[..], &["-o", "d.safetensors", "--json"]].concat());
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["made_from"].as_array().unwrap().len(), 4);
    assert_eq!(report["held_out"].as_array().unwrap().len(), 4);
    let message = fails(at, &[&build[..], &["-o", "d.safetensors"]].concat(), 1);
    assert!(message.contains("--overwrite"), "{message}");
    fails(at, &[&build[..], &["-o", "d.unknown"]].concat(), 2);

    let shown = done(at, &["steer", "show", "d.safetensors", "-m", nano]);
    assert!(
        shown.contains("project") && shown.contains("ffn_out") && shown.contains("good.txt against bad.txt"),
        "{shown}"
    );
    done(at, &["steer", "convert", "d.safetensors", "-o", "d.f32"]);
    let message = fails(at, &["steer", "convert", "d.safetensors", "-o", "d.gguf"], 1);
    assert!(message.contains("layer 0"), "{message}");
    done(at, &["steer", "convert", "d.safetensors", "-o", "d.gguf", "--layers", "1:3"]);
    done(
        at,
        &[
            "steer",
            "convert",
            "d.gguf",
            "-o",
            "added.gguf",
            "--to",
            "control-vector",
            "--as",
            "add",
            "--length",
            "2",
        ],
    );

    let prompt =
        ["-p", "What is the capital of France?", "--nothink", "--temp", "0", "-n", "12", "--backend", "cpu"];
    let with = |more: &[&str]| done(at, &[&["run", "-m", nano][..], &prompt, more].concat());
    let plain = with(&[]);
    let names = ["d.safetensors", "d.f32"];
    for name in names {
        let file = ["--dir-steering-file", name];
        assert_eq!(with(&[&file[..], &["--dir-steering-ffn", "0"]].concat()), plain);
        let steered =
            with(&[&file[..], &["--dir-steering-ffn", "-60", "--dir-steering-attn", "-60"]].concat());
        assert_ne!(steered, plain, "{name}");
    }
    let message =
        fails(at, &[&["run", "-m", nano][..], &prompt, &["--dir-steering-file", "added.gguf"]].concat(), 1);
    assert!(message.contains("control vector"), "{message}");
    let two = ["--dir-steering-file", "d.f32", "--dir-steering-file", "d.gguf"];
    fails(at, &[&["run", "-m", nano][..], &prompt, &two, &["--dir-steering-ffn", "1"]].concat(), 2);
    fails(at, &["run", "-m", nano, "-p", "x", "--dir-steering-ffn", "1"], 2);

    let sweep = [
        "steer",
        "sweep",
        "-m",
        nano,
        "--backend",
        "cpu",
        "--direction",
        "d.safetensors",
        "--prompts",
        "good.txt",
    ];
    let more = ["--scales=-2,0,2", "-n", "8", "--csv", "s.csv", "--svg", "s.svg"];
    let table = done(at, &[&sweep[..], &more].concat());
    assert_eq!(table.lines().count(), 5, "{table}");
    assert_eq!(
        std::fs::read_to_string(at.join("s.csv")).unwrap().lines().filter(|l| l.starts_with("0,")).count(),
        3
    );
    assert!(std::fs::read_to_string(at.join("s.svg")).unwrap().contains("</svg>"));
}

#[test]
fn scores_say_that_the_model_was_steered() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let model = nano();
    let nano = model.to_str().unwrap();
    let build = [
        "steer",
        "build",
        "-m",
        nano,
        "--backend",
        "cpu",
        "--example",
        "formal-casual",
        "--raw",
        "-o",
        "d.safetensors",
    ];
    done(at, &build);
    std::fs::write(at.join("text.txt"), "The committee met on Monday and agreed on the plan.\n").unwrap();
    let kld = [
        "score",
        "kld",
        nano,
        nano,
        "--text",
        "text.txt",
        "--backend",
        "cpu",
        "--json",
        "--dir-steering-file",
        "d.safetensors",
    ];
    let report: serde_json::Value = serde_json::from_str(&done(at, &kld)).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows[0]["comparison"]["kl"]["mean"], 0.0, "the base is not steered: {}", rows[0]);
    assert!(rows[1]["comparison"]["kl"]["mean"].as_f64().unwrap() > 0.0, "{}", rows[1]);
    assert_eq!(rows[1]["model"]["steering"].as_array().unwrap().len(), 1, "{}", rows[1]);
}
