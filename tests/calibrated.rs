//! Calibrated builds as users run them: kills, sources, dense matrices, wrong options.

mod common;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use common::{borrowed, done, fails, ggsmith, json, nano};

#[test]
fn a_killed_calibrated_build_is_resumed_to_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("test-vectors/nano/calibration/code.txt");
    let (checkpoint, text) = (nano(), text.to_str().unwrap().to_owned());
    let arguments = |out: &str, propagate: &'static str| {
        let types = "blk.1.ffn_down_exps=Q2_K,blk.2.ffn_down_exps=Q2_K,blk.3.ffn_up_exps=Q2_K";
        let fixed = ["quantize", "--quiet", "--hf", &checkpoint, "--recipe", "mxfp4", "--tensor-type", types];
        let quick = ["--feedback", "d-factors=1,refits=1,sweeps=1"];
        let more =
            ["--calibrate", &text, "--calibrate-tokens", "300", "--propagate", propagate, "--out", out];
        fixed.iter().chain(&quick).chain(&more).map(|&s| s.to_owned()).collect::<Vec<_>>()
    };
    for propagate in ["source", "quantized"] {
        let whole = done(&borrowed(&arguments(&path("whole.gguf"), propagate)));
        assert!(whole.contains("blk.3.ffn_up_exps.weight"), "{whole}");
        let out = path("killed.gguf");
        let mut kills = 0;
        for millis in (50..).step_by(350) {
            let mut child = ggsmith()
                .args(arguments(&out, propagate))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            std::thread::sleep(Duration::from_millis(millis));
            child.kill().unwrap();
            let ended = child.wait().unwrap().success();
            if Path::new(&out).exists() {
                // Killed between naming the file and cleaning up, activations stay.
                assert!(!ended || !Path::new(&path("killed.gguf.part.activations")).exists());
                break;
            }
            kills += 1;
        }
        assert!(kills > 0, "the build was never killed before its end");
        assert_eq!(
            std::fs::read(&out).unwrap(),
            std::fs::read(path("whole.gguf")).unwrap(),
            "{propagate}: {kills} kills"
        );
        assert!(!Path::new(&path("killed.gguf.part")).exists(), "no part file is left");
        std::fs::remove_file(&out).unwrap();
        std::fs::remove_file(path("whole.gguf")).unwrap();
    }
}

#[test]
fn a_gguf_is_calibrated_like_a_checkpoint_and_the_plan_states_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("test-vectors/nano/calibration/code.txt");
    let (checkpoint, text) = (nano(), text.to_str().unwrap().to_owned());
    let (source, out) = (path("source.gguf"), path("out.gguf"));
    done(&["quantize", "--quiet", "--hf", &checkpoint, "--recipe", "mxfp4", "--out", &source]);
    let fixed = ["quantize", "--quiet", "--from", &source, "--recipe", "mxfp4", "--out", &out];
    let types = ["--tensor-type", "blk.1.ffn_down_exps=Q2_K"];
    let calibrated = ["--calibrate", &text, "--calibrate-tokens", "200"];
    let all = [&fixed[..], &types, &calibrated].concat();
    assert!(done(&all).contains("blk.1.ffn_down_exps.weight"));
    assert!(done(&["verify", "--quiet", &out]).contains("sound"), "a sound file");
    let memory = |arguments: &[&str]| {
        let report = json(&done(&[arguments, &["--dry-run", "--json"]].concat()));
        report["peak_memory_bytes"].as_u64().unwrap()
    };
    assert!(memory(&all) > memory(&[&fixed[..], &types].concat()));
    // On the text it was made with the outputs are nearer to the source's than those of the plain search.
    let plain = path("plain.gguf");
    done(&[
        "quantize", "--quiet", "--from", &source, "--recipe", "mxfp4", "--out", &plain, types[0], types[1],
    ]);
    let error = |file: &str| {
        let only = ["--tensor", "blk.1.ffn_down_exps.weight", "--json"];
        let fixed = ["compare", "--quiet", "--from", &source, "--gguf", file];
        json(&done(&[&fixed[..], &calibrated, &only].concat()))["tensors"][0]["full_error"].as_f64().unwrap()
    };
    let (fed_back, plain) = (error(&out), error(&plain));
    assert!(fed_back > 0.0 && fed_back < 0.5 * plain, "{fed_back} of {plain}");
    let parts = [&all[..], &["--shard", "1/2"]].concat();
    assert!(fails(&parts, 2).contains("--calibrate makes whole files"));
}

#[test]
fn calibration_that_would_change_nothing_or_is_set_wrongly_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.gguf").to_str().unwrap().to_owned();
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("test-vectors/nano/calibration/code.txt");
    let (checkpoint, text) = (nano(), text.to_str().unwrap().to_owned());
    let common = ["quantize", "--quiet", "--hf", &checkpoint, "--out", &out, "--calibrate", &text];
    let with = |more: &[&'static str]| [&common[..], more].concat();
    assert!(fails(&with(&["--recipe", "mxfp4"]), 1).contains("--calibrate changes nothing"));
    assert!(fails(&with(&["--feedback", "damping=7"]), 2).contains("damping=7"));
    assert!(fails(&with(&["--feedback", "colour=red"]), 2).contains("known are damping"));
    assert!(fails(&with(&["--calibrate-sequence", "1"]), 2).contains("at least 2 tokens"));
    assert!(
        fails(&["quantize", "--hf", &checkpoint, "--out", &out, "--propagate", "source"], 2)
            .contains("--calibrate")
    );
}

#[test]
fn dense_matrices_are_calibrated_when_asked_and_come_nearer_to_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("test-vectors/nano/calibration/code.txt");
    let (checkpoint, text) = (nano(), text.to_str().unwrap().to_owned());
    let (plain, out) = (path("plain.gguf"), path("out.gguf"));
    let fixed = ["quantize", "--quiet", "--hf", &checkpoint, "--recipe", "mxfp4", "--attention-proj", "Q4_K"];
    let calibrated = ["--calibrate", &text, "--calibrate-tokens", "300"];
    let quick = ["--calibrate-dense", "--feedback", "d-factors=1,refits=1,sweeps=1"];
    done(&[&fixed[..], &["--out", &plain]].concat());
    let all = [&fixed[..], &calibrated, &quick, &["--out", &out]].concat();
    let report = done(&all);
    for tensor in ["blk.0.attn_q_a", "blk.1.attn_output_a", "blk.3.ffn_down_shexp", "output"] {
        assert!(report.contains(&format!("{tensor}.weight ")), "{tensor} in {report}");
    }
    assert!(!report.contains("_exps.weight"), "experts are carried over as they are");
    assert!(done(&["verify", "--quiet", &out]).contains("sound"));
    let shown = done(&["inspect", &out, "--json"]);
    assert!(shown.contains("ggsmith.calibration.dense"), "the file says how it was made");
    let errors = |file: &str| -> Vec<(String, f64)> {
        let mut arguments = vec!["compare", "--quiet", "--json", "--hf", &checkpoint, "--gguf", file];
        for name in ["blk.1.attn_output_a.weight", "blk.2.attn_q_b.weight", "output.weight"] {
            arguments.extend(["--tensor", name]);
        }
        arguments.extend(calibrated);
        let tensors = json(&done(&arguments))["tensors"].clone();
        let of = |t: &serde_json::Value| {
            (t["tensor"].as_str().unwrap().to_owned(), t["full_error"].as_f64().unwrap())
        };
        tensors.as_array().unwrap().iter().map(of).collect()
    };
    let (fed_back, plain) = (errors(&out), errors(&plain));
    assert_eq!(fed_back.len(), 3);
    for ((name, error), (_, plain)) in fed_back.iter().zip(&plain) {
        assert!(*error > 0.0 && *error < 0.8 * plain, "{name}: {error} of {plain}");
    }
    let plan = |arguments: &[&str]| {
        let report = json(&done(&[arguments, &["--dry-run", "--json"]].concat()));
        report["peak_memory_bytes"].as_u64().unwrap()
    };
    assert!(plan(&all) > plan(&[&fixed[..], &["--out", &out]].concat()), "the plan states its memory");
    let alone = [&fixed[..], &["--calibrate-dense", "--out", &out]].concat();
    assert!(fails(&alone, 2).contains("--calibrate <DATASET>"));
}
