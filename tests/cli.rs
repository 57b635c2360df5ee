//! The program as users run it: exit codes, what is printed where, interruptions.

mod common;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{borrowed, done, fails, ggsmith, json, nano, run, text};

struct Setting {
    folder: tempfile::TempDir,
}

impl Setting {
    fn new() -> Self {
        let setting = Self { folder: tempfile::tempdir().unwrap() };
        done(&["synth", "--shape", "tiny", "--out", &setting.path("checkpoint"), "--quiet"]);
        setting
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn quantize(&self, out: &str, more: &[&str]) -> Vec<String> {
        let mut arguments =
            vec!["quantize", "--quiet", "--hf"].into_iter().map(str::to_owned).collect::<Vec<_>>();
        arguments.extend([self.path("checkpoint"), "--out".to_owned(), self.path(out)]);
        arguments.extend(more.iter().map(|&s| s.to_owned()));
        arguments
    }
}

fn sha256_line(report: &str) -> &str {
    report.lines().find(|line| line.starts_with("sha256 ")).expect("a report ends with the hash")
}

#[test]
fn the_plan_promises_exactly_the_size_that_the_build_writes() {
    let setting = Setting::new();
    for recipe in ["q2", "q2-q4", "q4", "mxfp4"] {
        let plan = done(&["plan", "--hf", &setting.path("checkpoint"), "--recipe", recipe, "--json"]);
        let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
        let out = format!("{recipe}.gguf");
        let printed = done(&borrowed(&setting.quantize(&out, &["--recipe", recipe])));
        assert_eq!(printed.lines().last(), Some(setting.path(&out).as_str()), "the path comes last");
        let size = std::fs::metadata(setting.path(&out)).unwrap().len();
        assert_eq!(plan["file_bytes"].as_u64(), Some(size), "{recipe}");
        let dry = run(&borrowed(&setting.quantize("dry.gguf", &["--recipe", recipe, "--dry-run"])));
        assert!(text(&dry.stdout).contains(&size.to_string()));
        assert!(!Path::new(&setting.path("dry.gguf")).exists());
    }
}

#[test]
fn a_recipe_file_that_plan_prints_builds_the_same_file() {
    let setting = Setting::new();
    let recipe = done(&["plan", "--emit-recipe", "--recipe", "q2-q4", "--hf", "unused", "--experts", "Q6_K"]);
    std::fs::write(setting.path("recipe.toml"), recipe).unwrap();
    let by_file = done(&borrowed(&setting.quantize("a.gguf", &["--recipe", &setting.path("recipe.toml")])));
    let by_flags = done(&borrowed(&setting.quantize("b.gguf", &["--recipe", "q2-q4", "--experts", "Q6_K"])));
    assert_eq!(sha256_line(&by_file), sha256_line(&by_flags));
}

#[test]
fn a_killed_build_is_resumed_to_the_same_bytes_wherever_it_was_killed() {
    let setting = Setting::new();
    let whole = done(&borrowed(&setting.quantize("whole.gguf", &[])));
    let out = PathBuf::from(setting.path("killed.gguf"));
    let mut kills = 0;
    for milliseconds in (0..).map(|i| i * 15) {
        let mut child = ggsmith()
            .args(setting.quantize("killed.gguf", &["--threads", "1"]))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        if child.wait().unwrap().success() || out.exists() {
            break;
        }
        kills += 1;
    }
    assert!(kills > 0, "the build was never killed before its end");
    let report = done(&borrowed(&setting.quantize("killed.gguf", &["--overwrite"])));
    assert_eq!(sha256_line(&report), sha256_line(&whole));
    assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(setting.path("whole.gguf")).unwrap());
    assert!(!Path::new(&setting.path("killed.gguf.part")).exists(), "no part file is left");
}

#[test]
fn wrong_usage_exits_with_2_and_says_what_is_expected() {
    let setting = Setting::new();
    let checkpoint = setting.path("checkpoint");
    assert!(fails(&["quantize", "--out", "x.gguf"], 2).contains("--hf"));
    assert!(fails(&["plan", "--hf", &checkpoint, "--experts", "Q9_K"], 2).contains("IQ2_XXS"));
    assert!(fails(&["plan", "--hf", &checkpoint, "--tensor-type", "oops"], 2).contains("REGEX=TYPE"));
    assert!(fails(&["plan", "--hf", &checkpoint, "--imatrix-strict"], 2).contains("--imatrix"));
    for flag in [&["--recipe", "q2"][..], &["--routed", "Q4_K"], &["--overwrite"]] {
        let alone = [&["synth", "--out", "x"], flag].concat();
        assert!(fails(&alone, 2).contains("--gguf"), "{flag:?} is for a GGUF");
    }
    assert!(fails(&["frobnicate"], 2).contains("frobnicate"));
    assert!(fails(&["man", "frobnicate"], 2).contains("frobnicate"));
}

#[test]
fn unusable_input_exits_with_1_and_names_file_and_cause() {
    let setting = Setting::new();
    let checkpoint = setting.path("checkpoint");
    assert!(fails(&["plan", "--hf", &setting.path("absent")], 1).contains("absent"));
    let bad_recipe = fails(&["plan", "--hf", &checkpoint, "--tensor-type", "(=Q4_K"], 1);
    assert!(bad_recipe.contains("rule 1"), "{bad_recipe}");
    let cannot = fails(&["plan", "--hf", &checkpoint, "--experts", "IQ2_XS"], 1);
    assert!(cannot.contains("blk.0.ffn_gate_exps.weight") && cannot.contains("IQ2_XXS"), "{cannot}");
    std::fs::write(setting.path("page.gguf"), "<!DOCTYPE html><html></html>").unwrap();
    for command in ["inspect", "verify"] {
        assert!(fails(&[command, &setting.path("page.gguf")], 1).contains("web page"), "{command}");
    }
    std::fs::write(setting.path("matrix.dat"), [7; 100]).unwrap();
    let matrix = fails(&["plan", "--hf", &checkpoint, "--imatrix", &setting.path("matrix.dat")], 1);
    assert!(matrix.contains("matrix.dat"), "{matrix}");
    let shard = Path::new(&checkpoint).join("model-00001-of-00003.safetensors");
    let shard = if shard.exists() { shard } else { first_shard(&checkpoint) };
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    let cut = fails(&borrowed(&setting.quantize("cut.gguf", &[])), 1);
    assert!(
        cut.contains("incomplete") && cut.contains(shard.file_name().unwrap().to_str().unwrap()),
        "{cut}"
    );
    assert!(!Path::new(&setting.path("cut.gguf")).exists());
}

fn first_shard(checkpoint: &str) -> PathBuf {
    let mut shards: Vec<_> = std::fs::read_dir(checkpoint)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    shards.sort();
    shards[0].clone()
}

#[test]
fn synth_writes_a_gguf_without_a_checkpoint_whose_tensors_are_those_of_the_quantized_one() {
    let setting = Setting::new();
    let made = setting.path("made.gguf");
    let synth = |more: &[&str]| {
        run(&[&["synth", "--quiet", "--gguf", "--out", &made, "--recipe", "q4", "--routed", "Q2_K"], more]
            .concat())
    };
    let first = synth(&["--json"]);
    assert_eq!(first.status.code(), Some(0), "{}", text(&first.stderr));
    let report: serde_json::Value = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!(report["file_bytes"].as_u64(), Some(std::fs::metadata(&made).unwrap().len()));
    done(&borrowed(&setting.quantize("built.gguf", &["--recipe", "q4", "--experts", "Q2_K"])));
    let open = |path: &str| gguf_tools::gguf::Gguf::open(path).unwrap();
    let (made_file, built) = (open(&made), open(&setting.path("built.gguf")));
    assert_eq!(made_file.tensors().len(), built.tensors().len());
    for tensor in built.tensors() {
        let other = made_file.tensor(&tensor.name).unwrap();
        assert_eq!(tensor.block_type, other.block_type, "{}", tensor.name);
        assert!(built.data(tensor).unwrap() == made_file.data(other).unwrap(), "{}", tensor.name);
    }
    done(&["verify", &made]);
    let refused = synth(&[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("--overwrite"));
    let again = synth(&["--overwrite", "--experts", "4"]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stderr));
    assert!(std::fs::metadata(&made).unwrap().len() < report["file_bytes"].as_u64().unwrap());
}

#[test]
fn requantizing_a_lossy_file_needs_to_be_allowed_but_mxfp4_is_expanded_exactly() {
    let setting = Setting::new();
    done(&borrowed(&setting.quantize("exact.gguf", &["--recipe", "mxfp4", "--label", "x"])));
    done(&borrowed(&setting.quantize("direct.gguf", &["--recipe", "q4", "--label", "x"])));
    let from = |file: &str, out: &str, more: &[&str]| {
        let mut all = vec!["quantize", "--quiet", "--recipe", "q4", "--from"];
        let (file, out) = (setting.path(file), setting.path(out));
        all.extend([file.as_str(), "--out", out.as_str()]);
        all.extend(more);
        run(&all)
    };
    let again = from("exact.gguf", "again.gguf", &[]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stderr));
    let open = |name: &str| gguf_tools::gguf::Gguf::open(setting.path(name)).unwrap();
    let (direct, indirect) = (open("direct.gguf"), open("again.gguf"));
    for tensor in direct.tensors() {
        let other = indirect.tensor(&tensor.name).unwrap();
        assert_eq!(direct.data(tensor).unwrap(), indirect.data(other).unwrap(), "{}", tensor.name);
    }
    let lossy = from("direct.gguf", "worse.gguf", &["--experts", "Q2_K"]);
    assert_eq!(lossy.status.code(), Some(1));
    assert!(text(&lossy.stderr).contains("--allow-requantize"));
    // What else is wrong with the file comes first.
    let whole = std::fs::read(setting.path("direct.gguf")).unwrap();
    std::fs::write(setting.path("cut.gguf"), &whole[..whole.len() - 1000]).unwrap();
    let cut = from("cut.gguf", "worse.gguf", &["--experts", "Q2_K"]);
    assert_eq!(cut.status.code(), Some(1));
    let told = text(&cut.stderr);
    assert!(told.find("is truncated").unwrap() < told.find("--allow-requantize").unwrap(), "{told}");
    let allowed = from("direct.gguf", "worse.gguf", &["--experts", "Q2_K", "--allow-requantize"]);
    assert_eq!(allowed.status.code(), Some(0), "{}", text(&allowed.stderr));
}

#[test]
fn quickstart_ends_with_sound_files_that_can_be_made_again() {
    let report = done(&["quickstart", "--tokens", "60"]);
    for word in
        ["q2", "q4", "mxfp4", "sound", "equal", "llama.cpp", "KL", "q2-imatrix", "Importance collected"]
    {
        assert!(report.contains(word), "{word} is missing in:\n{report}");
    }
    assert!(!report.contains("BROKEN") && !report.contains("DIFFER"), "{report}");
}

#[test]
fn completions_and_manual_pages_cover_every_command() {
    let bash = done(&["completions", "bash"]);
    let page = done(&["man"]);
    for command in ["quantize", "plan", "verify", "inspect", "compare", "synth", "quickstart", "run", "bench"]
    {
        assert!(bash.contains(command) && page.contains(command), "{command}");
        assert!(done(&["man", command]).contains("SYNOPSIS"));
    }
}

/// The trained model that ships inside.
#[test]
fn the_nano_model_knows_the_capital_of_france() {
    let question = "What is the capital of France?";
    let nano = nano();
    let answer = done(&["run", "-m", &nano, "--nothink", "--temp", "0", "-p", question]);
    assert_eq!(answer, "The capital of France is Paris.\n");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("question.txt");
    std::fs::write(&file, question).unwrap();
    let file = file.to_str().unwrap();
    assert_eq!(done(&["run", "-m", &nano, "--nothink", "--temp", "0", "--prompt-file", file]), answer);
    let int8 = ["run", "-m", &nano, "--nothink", "--temp", "0", "--activations", "int8", "-p", question];
    assert_eq!(done(&int8), answer);
}

#[test]
fn a_seed_fixes_the_text_at_any_number_of_threads() {
    let nano = nano();
    let sampled = |seed: &str, threads: &str| {
        let text =
            ["run", "-m", &nano, "--raw", "-p", "The", "-n", "24", "--seed", seed, "--threads", threads];
        done(&text)
    };
    let first = sampled("7", "1");
    assert_eq!(sampled("7", "2"), first);
    assert_ne!(sampled("8", "1"), first);
}

#[test]
fn dumped_log_probabilities_are_ranked_and_sum_to_at_most_1() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("logprobs.json");
    let file = path.to_str().unwrap();
    let nano = nano();
    done(&["run", "-m", &nano, "--temp", "0", "-n", "5", "--raw", "-p", "The", "--dump-logprobs", file]);
    let report = json(&std::fs::read_to_string(&path).unwrap());
    assert_eq!(report["provenance"]["numerics"], "official");
    let steps = report["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 5, "as many as generated tokens");
    for (step, generated) in steps.iter().zip(report["generated_tokens"].as_array().unwrap()) {
        let top = step["top"].as_array().unwrap();
        let logprobs: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert_eq!(logprobs.len(), 20);
        assert!(logprobs.is_sorted_by(|a, b| a >= b), "{logprobs:?}");
        let sum: f64 = logprobs.iter().map(|p| p.exp()).sum();
        assert!(sum > 20.0 / 1024.0 && sum <= 1.0 + 1e-12, "{sum}");
        assert_eq!(&top[0]["token"], generated, "temperature 0 takes the best");
        assert_eq!((&step["token"], &step["logprob"]), (generated, &top[0]["logprob"]));
    }
}

#[test]
fn prompts_that_are_empty_or_too_long_are_refused_and_limits_hold() {
    let nano = nano();
    assert!(fails(&["run", "-m", &nano, "-p", ""], 2).contains("empty"));
    let words = "one two three four five six seven eight";
    let long = fails(&["run", "-m", &nano, "--raw", "-p", words, "--ctx", "4"], 1);
    assert!(long.contains('4') && long.contains("context"), "{long}");
    let beyond = fails(&["run", "-m", &nano, "-p", "x", "--ctx", "99999999"], 1);
    assert!(beyond.contains("99999999"), "{beyond}");
    assert_eq!(done(&["run", "-m", &nano, "--raw", "-p", "The", "-n", "0"]), "\n", "no token, no text");
    assert!(fails(&["tokenize", "-m", &nano, "-p", ""], 2).contains("empty"));
}

#[test]
fn tokens_put_together_are_the_text() {
    let text = "Größe: 3.14 \u{1f600}\n\tdef f(x): return  x";
    let rows = json(&done(&["tokenize", "-m", &nano(), "--raw", "--json", "-p", text]));
    let rows = rows.as_array().unwrap();
    assert!(rows.len() > 1 && rows.iter().all(|row| row["token"].is_u64()));
    let whole = gguf_tools::checkpoint::Checkpoint::open(nano()).unwrap();
    let metadata = gguf_tools::checkpoint::tokenizer::metadata(&whole).unwrap();
    let tokenizer = runner::tokenizer::Tokenizer::from_metadata(&metadata).unwrap();
    let tokens: Vec<u32> = rows.iter().map(|row| row["token"].as_u64().unwrap() as u32).collect();
    assert_eq!(tokenizer.decode(&tokens), text);
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text.txt");
    std::fs::write(&path, "The capital of France is Paris. One two three four five six.").unwrap();
    let nano = nano();
    let result = json(&done(&["score", "kld", &nano, &nano, "--text", path.to_str().unwrap(), "--json"]));
    for row in result["rows"].as_array().unwrap() {
        let comparison = &row["comparison"];
        assert_eq!(comparison["kl"]["mean"], 0.0, "{comparison}");
        assert_eq!(comparison["nll_difference"]["mean"], 0.0);
        assert_eq!(comparison["same_top"]["mean"], 1.0);
        assert!(comparison["nll"]["mean"].as_f64().unwrap() > 0.5, "the text is no certainty");
    }
}

#[test]
fn bench_measures_every_context_in_the_columns_that_ds4_bench_has() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bench.csv");
    let nano = nano();
    let with = |more: &[&str]| {
        let mut all = vec!["bench", "-m", &nano, "--gen-tokens", "2", "--bandwidth", "10"];
        all.extend(more);
        done(&all)
    };
    let csv = path.to_str().unwrap();
    let table = with(&["--ctx-start", "8", "--ctx-max", "30", "--step-incr", "8", "--csv", csv]);
    let written = std::fs::read_to_string(&path).unwrap();
    let mut lines = written.lines();
    let header = lines.next().unwrap();
    assert!(
        header.starts_with("ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,kvcache_bytes,"),
        "{header}"
    );
    let rows: Vec<Vec<f64>> =
        lines.map(|line| line.split(',').map(|cell| cell.parse().unwrap()).collect()).collect();
    let column = |i: usize| rows.iter().map(|row| row[i]).collect::<Vec<_>>();
    assert_eq!(column(0), [8.0, 16.0, 24.0, 30.0], "the last context is the largest asked for");
    assert_eq!(column(1), [8.0, 8.0, 8.0, 6.0], "only new tokens are read");
    assert_eq!(column(3), [2.0; 4]);
    assert!(column(5).is_sorted() && column(5)[0] > 0.0);
    assert!(rows.iter().all(|row| row.len() == header.split(',').count() && row.iter().all(|v| *v > 0.0)));
    assert!(table.contains("roofline_share") && table.contains("the given read bandwidth"), "{table}");

    let report = json(&with(&["--ctx-start", "8", "--ctx-max", "32", "--step-mul", "2", "--json"]));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|r| r["ctx_tokens"].as_u64().unwrap()).collect::<Vec<_>>(), [8, 16, 32]);
    let bytes = &report["bytes_per_token"];
    for row in rows {
        let expected = bytes["total"].as_f64().unwrap() * row["gen_tps"].as_f64().unwrap() / 10e9;
        assert!((row["roofline_share"].as_f64().unwrap() / expected - 1.0).abs() < 1e-9);
    }
    // 4 of 16 experts: FP4 codes and scales as tools/nano/README.md counts them.
    assert_eq!(bytes["parts"]["routed"], 6_684_672 / 4);
    let base = ["bench", "-m", &nano, "--ctx-start"];
    assert!(fails(&[&base[..], &["20", "--ctx-max", "10"]].concat(), 2).contains("--ctx-max"));
    assert!(fails(&[&base[..], &["8", "--step-mul", "1"]].concat(), 2).contains("--step-mul"));
}

#[test]
#[cfg(unix)]
fn an_interrupted_bench_prints_what_it_has_measured() {
    let mut child = ggsmith()
        .args(["bench", "-m", &nano(), "--gen-tokens", "1", "--bandwidth", "10", "--json"])
        .args(["--ctx-start", "4", "--step-incr", "4", "--ctx-max", "4000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut messages = BufReader::new(child.stderr.take().unwrap()).lines();
    messages.next().unwrap().unwrap();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    // Read on, or the child may wait for room in the pipe.
    let told: Vec<String> = messages.map_while(Result::ok).collect();
    let answers = told.iter().filter(|line| line.contains("once more ends the program")).count();
    assert_eq!(answers, 1, "{told:?}");
    let n_steps = 1 + told.len() - answers;
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report = json(&text(&output.stdout));
    assert_eq!(report["rows"].as_array().unwrap().len(), n_steps);
    assert!(n_steps < 1000, "it did not stop");
}

const NANO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/test-vectors/nano/checkpoint");

/// A small calibration set of generated tasks for the nano model.
fn calibration(folder: &Path) -> String {
    let out = folder.join("set.jsonl").to_str().unwrap().to_owned();
    done(&["imatrix", "dataset", "-m", NANO, "-o", &out, "--tokens", "3000", "--share", "long_context=0"]);
    out
}

#[test]
fn a_data_set_is_the_same_for_the_same_seed_and_its_manifest_accounts_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("own.txt"), "One paragraph about bridges.\n\nAnother with a <think> in it.\n")
        .unwrap();
    let chat =
        r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}"#;
    std::fs::write(path("chat.jsonl"), format!("{chat}\n{chat}\n{chat}\n")).unwrap();
    std::fs::write(path("talk.txt"), "System: Be kind.\nUser: Why?\nAssistant: Because.\n").unwrap();
    let build = |out: &str, seed: &str| {
        let (own, chat, talk) = (path("own.txt"), path("chat.jsonl"), path("talk.txt"));
        let own = ["--text", own.as_str(), "--chat", &chat, "--transcript", &talk, "--piece-tokens", "20"];
        let out = path(out);
        let arguments =
            [&["imatrix", "dataset", "-m", NANO, "-o", &out, "--tokens", "6000", "--seed", seed][..], &own];
        let output = run(&[&arguments.concat()[..], &["--json"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("spell control tokens"));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let manifest = build("a.jsonl", "3");
    assert_eq!(manifest, build("b.jsonl", "3"));
    assert_eq!(std::fs::read(path("a.jsonl")).unwrap(), std::fs::read(path("b.jsonl")).unwrap());
    assert_ne!(manifest["sha256"], build("c.jsonl", "4")["sha256"]);
    let kinds = manifest["kinds"].as_array().unwrap();
    let kind = |name: &str| kinds.iter().find(|k| k["kind"] == name).unwrap();
    assert_eq!((&kind("chat")["n_texts"], &kind("chat")["n_duplicates"]), (&2.into(), &1.into()));
    assert_eq!(kind("transcript")["n_texts"], 1);
    let shares: f64 = kinds.iter().map(|k| k["share"].as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-9, "{shares}");
    let n_lines = std::fs::read_to_string(path("a.jsonl")).unwrap().lines().count();
    assert_eq!(manifest["n_texts"], n_lines);
    let tokens = |key: &str| manifest[key].as_u64().unwrap();
    assert!(tokens("n_tokens") <= 6000 && tokens("n_tokens") > 1000, "{}", tokens("n_tokens"));

    let wrong = |more: &[&str], code: i32| {
        fails(&[&["imatrix", "dataset", "-m", NANO, "-o", &path("x.jsonl")][..], more].concat(), code)
    };
    assert!(wrong(&["--share", "poems=1"], 1).contains("code_review"));
    assert!(wrong(&["--share", "code_review"], 2).contains("KIND=WEIGHT"));
    assert!(wrong(&["--chat", &path("own.txt")], 1).contains("line 1"));
    assert!(wrong(&["--transcript", &path("own.txt")], 1).contains("`User:`"));
    assert!(!Path::new(&path("x.jsonl")).exists());
}

#[test]
fn a_killed_collection_goes_on_to_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let set = calibration(folder.path());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let collect = |out: &str| {
        let arguments = [
            "imatrix",
            "collect",
            "-m",
            NANO,
            "--dataset",
            &set,
            "-o",
            &path(out),
            "--save-every",
            "1",
            "--quiet",
        ];
        arguments.map(str::to_owned).to_vec()
    };
    let report = done(&borrowed(&collect("whole.gguf")));
    assert!(
        report.contains("12 entries") && report.ends_with(&format!("{}\n", path("whole.gguf"))),
        "{report}"
    );
    let mut child =
        ggsmith().args(collect("killed.gguf")).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let state = path("killed.gguf.state");
    while !Path::new(&state).exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success(), "the collection ended before it was killed");
    assert!(!Path::new(&path("killed.gguf")).exists());
    let resumed = done(&[&borrowed(&collect("killed.gguf"))[..], &["--json"]].concat());
    let resumed: serde_json::Value = serde_json::from_str(&resumed).unwrap();
    assert!(resumed["resumed_prompts"].as_u64().unwrap() > 0);
    assert_eq!(std::fs::read(path("killed.gguf")).unwrap(), std::fs::read(path("whole.gguf")).unwrap());
    assert!(!Path::new(&state).exists(), "the state is removed at the end");
    assert!(fails(&borrowed(&collect("whole.gguf")), 1).contains("--overwrite"));
}

#[test]
fn a_matrix_is_shown_converted_merged_and_used() {
    let folder = tempfile::tempdir().unwrap();
    let set = calibration(folder.path());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (one, legacy, sum, picture) = (path("one.gguf"), path("one.dat"), path("sum.gguf"), path("seen.svg"));
    // Two prompts reach only some of the experts.
    let few =
        ["imatrix", "collect", "-m", NANO, "--dataset", &set, "-o", &one, "--max-prompts", "1", "-c", "12"];
    let output = run(&few);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("warning") && text(&output.stderr).contains("--imatrix-strict"));
    let shown = done(&["imatrix", "show", &one, "--svg", &picture]);
    assert!(shown.contains("never reached") && shown.contains("entropy"), "{shown}");
    assert!(std::fs::read_to_string(&picture).unwrap().contains("never reached"));
    done(&["imatrix", "convert", &one, "-o", &legacy]);
    assert!(fails(&["imatrix", "show", &legacy], 1).contains("pass the model"));
    let both = [&one, &legacy].map(|file| {
        let shown = done(&["imatrix", "show", file, "-m", NANO, "--json"]);
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        shown["layers"].as_array().unwrap().iter().map(|layer| layer["unseen"].clone()).collect::<Vec<_>>()
    });
    assert_eq!(both[0], both[1], "the same experts are unseen in both formats");
    done(&["imatrix", "merge", &one, &one, "-o", &sum]);
    let difference = done(&["imatrix", "diff", &one, &sum, "--json"]);
    let difference: serde_json::Value = serde_json::from_str(&difference).unwrap();
    for entry in difference["difference"]["entries"].as_array().unwrap() {
        assert_eq!(entry["max_ratio"], 1.0, "twice the sums over twice the rows");
    }
    assert!(fails(&["imatrix", "merge", &one, "-o", &one, "--overwrite"], 1).contains("is an input"));
    let quantize = |more: &[&str]| {
        let out = path("q.gguf");
        let arguments =
            ["quantize", "--hf", NANO, "--out", &out, "--quiet", "--overwrite", "--imatrix", &one];
        run(&[&arguments[..], more].concat())
    };
    let strict = quantize(&["--imatrix-strict"]);
    assert_eq!(strict.status.code(), Some(1));
    assert!(text(&strict.stderr).contains("never reached by the calibration"));
    let lenient = quantize(&[]);
    assert_eq!(lenient.status.code(), Some(0));
    assert!(text(&lenient.stdout).contains("quantized without importance of their own"));
}

#[test]
fn a_trace_is_recorded_and_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (trace, picture) = (path("trace.jsonl"), path("hits.svg"));
    done(&[
        "run",
        "-m",
        NANO,
        "-p",
        "def f(x):",
        "--raw",
        "-n",
        "9",
        "--temp",
        "0",
        "--trace-experts",
        &trace,
    ]);
    let lines = std::fs::read_to_string(&trace).unwrap();
    let visits: Vec<serde_json::Value> =
        lines.lines().skip(1).map(|l| serde_json::from_str(l).unwrap()).collect();
    let decoded = visits.iter().filter(|v| v["phase"] == "decode").count();
    assert_eq!(decoded, 8 * 4, "eight decoded tokens in four layers");
    let replay = |more: &[&str]| {
        let replayed =
            done(&[&["trace", "replay", &trace, "--slots", "4,16,64", "--json"][..], more].concat());
        serde_json::from_str::<serde_json::Value>(&replayed).unwrap()
    };
    let all = replay(&["--svg", &picture]);
    assert_eq!(all["uses_counted"], visits.len() * 4);
    let of = |name: &str, slots: u64| {
        let outcomes = all["outcomes"].as_array().unwrap();
        outcomes.iter().find(|o| o["name"] == name && o["slots"] == slots).unwrap()["hits"].as_u64().unwrap()
    };
    for slots in [4, 16, 64] {
        assert!(of("LRU", slots) <= of("oracle (Belady)", slots), "{slots}");
    }
    let distinct = all["distinct_experts"].as_u64().unwrap();
    assert_eq!(of("LRU", 64), all["uses_counted"].as_u64().unwrap() - distinct);
    assert_eq!(replay(&["--decode-only"])["uses_counted"], 8 * 4 * 4);
    assert!(std::fs::read_to_string(&picture).unwrap().contains("decayed frequency"));
    assert!(fails(&["trace", "replay", &trace, "--slots", "3"], 1).contains("4 experts at once"));
    std::fs::write(&trace, lines.replace("\"layer\":2", "\"layer\":9")).unwrap();
    assert!(fails(&["trace", "replay", &trace, "--slots", "16"], 1).contains("layer 9, but the model has 4"));
    std::fs::write(&trace, &lines[..lines.len() / 2]).unwrap();
    assert!(fails(&["trace", "replay", &trace, "--slots", "16"], 1).contains("line "));
}

#[test]
fn synthetic_models_on_the_cpu_are_no_measure_and_that_is_said() {
    let ended = run(&[
        "bench",
        "--synthetic",
        "tiny",
        "--layers",
        "2",
        "--backend",
        "cpu",
        "--ctx-start",
        "8",
        "--ctx-max",
        "8",
        "--gen-tokens",
        "2",
        "--bandwidth",
        "1",
    ]);
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    assert!(text(&ended.stderr).contains("anew for every product"), "{}", text(&ended.stderr));
}
