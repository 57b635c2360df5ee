//! `score` and `vectors` as users run them, on the nano model.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use test_vectors::server::{Request, Response, Server};

fn ggsmith(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ggsmith"))
        .args(arguments)
        .env_remove("DEEPSEEK_API_KEY")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs and expects success; gives stdout.
fn done(arguments: &[&str]) -> String {
    let output = ggsmith(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs and expects this exit code; gives stderr.
fn fails(arguments: &[&str], code: i32) -> String {
    let output = ggsmith(arguments);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A folder with the nano checkpoint under its name, which becomes its label, and a case set that it has recorded itself.
struct Setting {
    folder: tempfile::TempDir,
}

impl Setting {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let nano = folder.path().join("nano");
        std::fs::create_dir(&nano).unwrap();
        for entry in std::fs::read_dir(repository("test-vectors/nano/checkpoint")).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), nano.join(entry.file_name())).unwrap();
        }
        Self { folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.path(name), text).unwrap();
        self.path(name)
    }

    /// A set in ds4's columns with answers that the nano model finds natural, and odd ones.
    fn cases(&self, label: &str) -> String {
        let questions = [
            ("fact", "What is the capital of France?", "The capital of France is Paris."),
            ("fact", "What is 12 plus 30?", "12 + 30 = 42"),
            ("odd", "Who are you?", "zebra 77 |||"),
        ];
        let mut manifest = format!("# label: {label}\n# id\tprompt_file\tcontinuation_file\n");
        for (i, (kind, question, answer)) in questions.iter().enumerate() {
            self.write(&format!("p{i}.txt"), question);
            self.write(&format!("c{i}.txt"), answer);
            manifest += &format!("case_{i}\tp{i}.txt\tc{i}.txt\t\t{kind}\n");
        }
        self.write("manifest.tsv", &manifest)
    }

    fn quantized(&self) -> String {
        let out = self.path("nano-q2.gguf");
        done(&["quantize", "--quiet", "--hf", &self.path("nano"), "--recipe", "q2", "--out", &out]);
        out
    }
}

#[test]
fn scores_equal_those_of_an_independent_computation_and_do_not_depend_on_threads() {
    let setting = Setting::new();
    let (nano, cases) = (setting.path("nano"), setting.cases("nano"));
    let report = json(&done(&["score", "run", &nano, "--cases", &cases, "--json", "-q"]));
    assert_eq!(report["same_checkpoint"], true);
    assert_eq!(report["model"]["checkpoint"], "nano");
    assert_eq!(report["cases"]["label"]["label"], "nano");
    let scores = report["scores"].as_array().unwrap();
    // Once more, token by token through the session that generates text.
    let checkpoint = gguf_tools::checkpoint::Checkpoint::open(&nano).unwrap();
    let metadata = gguf_tools::checkpoint::tokenizer::metadata(&checkpoint).unwrap();
    let tokenizer = runner::tokenizer::Tokenizer::from_metadata(&metadata).unwrap();
    let model = runner::Model::open(Path::new(&nano), runner::Options::default()).unwrap();
    for (i, score) in scores.iter().enumerate() {
        let read = |name: &str| std::fs::read_to_string(setting.path(&format!("{name}{i}.txt"))).unwrap();
        let rendered = format!("<｜begin▁of▁sentence｜><｜User｜>{}<｜Assistant｜></think>", read("p"));
        let target = tokenizer.encode_plain(&read("c")).unwrap();
        let mut session = model.session();
        let mut logits = session.prefill(&tokenizer.encode(&rendered).unwrap()).unwrap();
        let (mut nll, mut lcp, mut matching) = (0.0, 0, true);
        for &token in &target {
            let exponentials: Vec<f64> = logits.iter().map(|&l| f64::from(l).exp()).collect();
            nll -= (exponentials[token as usize] / exponentials.iter().sum::<f64>()).ln();
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            matching &= best == token as usize;
            lcp += u64::from(matching);
            logits = session.decode(token).unwrap();
        }
        assert!((score["nll"].as_f64().unwrap() - nll).abs() < 1e-6 * nll.max(1.0), "{score} {nll}");
        assert_eq!(score["target_tokens"].as_u64(), Some(target.len() as u64));
        assert_eq!(score["greedy_lcp"].as_u64(), Some(lcp));
        assert_eq!(score["first_match"].as_bool(), Some(lcp > 0));
    }
    assert!(scores[0]["nll"].as_f64().unwrap() < 1.0, "the model knows this: {}", scores[0]);
    assert!(scores[2]["nll"].as_f64().unwrap() > 10.0);
    // Twice, with other threads: the same bytes, and a difference of exactly nothing.
    let (one, three) = (setting.path("one.tsv"), setting.path("three.tsv"));
    done(&["score", "run", &nano, "--cases", &cases, "--out", &one, "-q", "--threads", "1"]);
    done(&["score", "run", &nano, &cases, &three, "4096", "-q", "--threads", "3"]);
    assert_eq!(std::fs::read(&one).unwrap(), std::fs::read(&three).unwrap());
    let compared = json(&done(&["score", "compare", &one, &three, "--again", &three, "--json"]));
    let all = &compared["comparison"]["all"];
    assert_eq!(all["difference"], serde_json::json!({ "mean": 0.0, "low": 0.0, "high": 0.0 }));
    assert_eq!((&all["ties"], &all["sign_test_p"]), (&3.into(), &1.0.into()));
    assert_eq!(compared["comparison"]["noise"]["mean"], 0.0);
    assert_eq!(compared["comparison"]["kinds"][1]["kind"], "odd");
    let header = std::fs::read_to_string(&one).unwrap();
    assert!(header.starts_with(
        "id\tprompt_tokens\ttarget_tokens\tnll\tavg_nll\tfirst_match\tgreedy_lcp\tapi_ref_tokens\t"
    ));
    assert!(done(&["score", "compare", &one, &three]).contains("noise floor: 0.000000"));
}

#[test]
fn another_checkpoint_is_refused_unless_allowed_and_every_report_says_so() {
    let setting = Setting::new();
    let nano = setting.path("nano");
    let cases = setting.cases("Other-Checkpoint");
    let out = setting.path("scores.tsv");
    let run = ["score", "run", &nano, "--cases", &cases, "--out", &out, "-q"];
    let refused = fails(&run, 1);
    assert!(refused.contains("`Other-Checkpoint`") && refused.contains("`nano`"), "{refused}");
    assert!(!Path::new(&out).exists());
    let allowed = done(&[&run[..], &["--allow-other-checkpoint"]].concat());
    assert!(allowed.contains("Other-Checkpoint") && allowed.contains("DIFFERENT checkpoints"), "{allowed}");
    assert!(std::fs::read_to_string(&out).unwrap().contains("\tnano\tOther-Checkpoint\n"));
    assert!(fails(&run, 1).contains("--overwrite"));
    let unlabelled = setting.write("bare.tsv", "a\tp0.txt\tc0.txt\n");
    let bare = ["score", "run", &nano, "--cases", &unlabelled, "-q"];
    assert!(fails(&bare, 1).contains("--cases-label"));
    done(&[&bare[..], &["--cases-label", "nano"]].concat());
    assert!(fails(&["score", "run", &nano], 2).contains("--cases"));
    assert!(fails(&[&bare[..], &["--cases-label", "nano", "--ctx", "10"]].concat(), 1).contains("needs"));
    // Tables of several checkpoints do not compare.
    let own = setting.path("own.tsv");
    done(&["score", "run", &nano, &setting.cases("nano"), &own, "-q"]);
    let refused = fails(&["score", "compare", &own, &out], 1);
    assert!(refused.contains("cases are of different checkpoints"), "{refused}");
    done(&["score", "compare", &own, &out, "--allow-other-checkpoint"]);
}

#[test]
fn an_interrupted_scoring_goes_on_and_ends_with_the_same_bytes() {
    let setting = Setting::new();
    let (nano, cases) = (setting.path("nano"), setting.cases("nano"));
    let whole = setting.path("whole.tsv");
    done(&["score", "run", &nano, &cases, &whole, "-q"]);
    let report = json(&done(&["score", "run", &nano, "--cases", &cases, "--json", "-q"]));
    // The part file as an interruption behind the first case leaves it, a second record cut off.
    let work = serde_json::json!({
        "schema": "ggsmith-score-part-v1", "model": report["model"], "cases": report["cases"],
    });
    let first = report["scores"][0].to_string();
    let part = format!("{work}\n{first}\n{}", &first[..first.len() / 2]);
    let resumed = setting.path("resumed.tsv");
    setting.write("resumed.tsv.part", &part);
    let output = ggsmith(&["score", "run", &nano, &cases, &resumed, "-q"]);
    assert!(text(&output.stderr).contains("going on after 1 of 3 cases"), "{}", text(&output.stderr));
    assert_eq!(std::fs::read(&resumed).unwrap(), std::fs::read(&whole).unwrap());
    assert!(!Path::new(&setting.path("resumed.tsv.part")).exists());
    let other = part.replacen("\"numerics\":\"official\"", "\"numerics\":\"exact\"", 1);
    setting.write("other.tsv.part", &other);
    let refused = fails(&["score", "run", &nano, &cases, &setting.path("other.tsv"), "-q"], 1);
    assert!(refused.contains("belongs to other work"), "{refused}");
}

#[test]
fn broken_tables_are_refused_by_line_and_column() {
    let setting = Setting::new();
    let header = "id\ttarget_tokens\tnll\tfirst_match\tgreedy_lcp\n";
    let good = setting.write("good.tsv", &format!("{header}a\t4\t1.5\t1\t2\nb\t2\t0.5\t0\t0\n"));
    let compare = |rows: &str| {
        let bad = setting.write("bad.tsv", rows);
        fails(&["score", "compare", &good, &bad], 1)
    };
    assert!(compare("").contains("no column `id`"));
    assert!(compare(header).contains("holds no scores"));
    assert!(compare(&format!("{header}a\t4\t1.5\t1\t2\na\t4\t1.5\t1\t2\n")).contains("a second time"));
    assert!(compare(&format!("{header}a\t4\tNaN\t1\t2\n")).contains("column `nll`"));
    assert!(compare(&format!("{header}a\t0\t0\t1\t2\n")).contains("at least 1"));
    assert!(compare(&format!("{header}a\t4\t1.5\n")).contains("cut off"));
    assert!(compare(&format!("{header}a\t4\t1.5\t1\t2\n")).contains("only in the first"));
    assert!(compare(&format!("{header}a\t4\t1.5\t1\t2\nb\t3\t0.5\t0\t0\n")).contains("3 in the second"));
    let new = setting.write("new.tsv", &format!("{header}a\t4\t1.1\t1\t2\nb\t2\t0.7\t0\t0\n"));
    let compared = json(&done(&["score", "compare", &good, &new, "--json"]));
    let all = &compared["comparison"]["all"];
    assert_eq!((&all["wins"], &all["losses"]), (&1.into(), &1.into()));
    let mean = all["difference"]["mean"].as_f64().unwrap();
    assert!((mean - (1.1 + 0.7 - 2.0) / 6.0).abs() < 1e-12);
}

#[test]
fn predictions_kept_in_a_file_give_the_same_comparison_and_refuse_others() {
    let setting = Setting::new();
    let (nano, q2) = (setting.path("nano"), setting.quantized());
    let held_out = std::fs::read_to_string(repository("test-vectors/nano/heldout/prose.txt")).unwrap();
    let passage: String = held_out.chars().take(3000).collect();
    let passage = setting.write("prose.txt", &passage);
    let base = ["score", "kld", &nano, &q2, "--text", &passage, "--sequence", "128", "--json", "-q"];
    let plain = json(&done(&base));
    let cache = setting.path("base.cache");
    let cached = [&base[..], &["--base-cache", &cache]].concat();
    let fresh = json(&done(&cached));
    let size = std::fs::metadata(&cache).unwrap().len();
    let again = json(&done(&cached));
    assert_eq!(fresh, again, "computed or read, the predictions are the same");
    let row = |report: &serde_json::Value, i: usize| report["rows"][i]["comparison"].clone();
    assert_eq!(row(&fresh, 0)["kl"]["mean"], 0.0, "the base does not differ from itself");
    assert_eq!(row(&plain, 0)["kl"]["mean"], 0.0);
    assert_eq!(row(&fresh, 0)["same_top"]["mean"], 1.0);
    let (exact, kept) = (row(&plain, 1), row(&fresh, 1));
    for field in ["nll", "base_nll", "same_top", "rms_delta_p"] {
        assert_eq!(exact[field], kept[field], "{field} is not rounded");
    }
    let kl = |row: &serde_json::Value| row["kl"]["mean"].as_f64().unwrap();
    let error = (kl(&kept) / kl(&exact) - 1.0).abs();
    assert!(error < 2e-4, "half precision moves KL {} by {error:e} of itself", kl(&exact));
    let n_positions = exact["n_positions"].as_u64().unwrap();
    let per_position = size / n_positions;
    assert_eq!(per_position, 8 + 2 * 1024, "bytes a position, and a short header");
    // An interrupted writing: the whole texts are kept, a torn row is not.
    let bytes = std::fs::read(&cache).unwrap();
    for (cut, torn) in [(bytes.len() / 2, false), (bytes.len() / 3, true), (9, false)] {
        let mut part = bytes[..cut].to_vec();
        if torn {
            let n = part.len();
            part[n - 4096..].fill(0);
        }
        std::fs::remove_file(&cache).unwrap();
        std::fs::write(format!("{cache}.part"), part).unwrap();
        assert_eq!(json(&done(&cached)), fresh);
        assert_eq!(std::fs::read(&cache).unwrap(), bytes, "cut at {cut}");
    }
    // Other models, texts, numerics, sizes.
    let other = fails(
        &["score", "kld", &q2, &nano, "--text", &passage, "--sequence", "128", "--base-cache", &cache, "-q"],
        1,
    );
    assert!(other.contains("fingerprint"), "{other}");
    let other = fails(&[&cached[..], &["--max-tokens", "200"]].concat(), 1);
    assert!(other.contains("tokens of text"), "{other}");
    let other = fails(&[&cached[..], &["--numerics", "exact"]].concat(), 1);
    assert!(other.contains("numerics is official there and exact now"), "{other}");
    std::fs::write(&cache, &bytes[..bytes.len() - 1]).unwrap();
    assert!(fails(&cached, 1).contains("damaged"));
    std::fs::write(&cache, b"something else").unwrap();
    assert!(fails(&cached, 1).contains("no base predictions"));
    let small = setting.path("small.cache");
    let refused = fails(&[&base[..], &["--base-cache", &small, "--max-cache", "100kB"]].concat(), 1);
    assert!(refused.contains("--max-cache") && refused.contains("48 tokens"), "{refused}");
    assert!(!Path::new(&small).exists());
    // The page and the card of these numbers.
    let result = setting.write("kld.json", &plain.to_string());
    let run = done(&["score", "run", &nano, "--cases", &setting.cases("nano"), "--json", "-q"]);
    let run = setting.write("run.json", &run);
    let (html, card) = (setting.path("page.html"), setting.path("card.md"));
    let page =
        ["score", "report", &run, &result, "--html", &html, "--card", &card, "--title", "Nano <q2> & more"];
    done(&page);
    let html = std::fs::read_to_string(&html).unwrap();
    assert!(html.contains("<h1>Nano &lt;q2&gt; &amp; more</h1>") && html.contains("<svg"));
    assert!(
        !html.contains("<script") && !html.contains("src=") && !html.contains("href="),
        "nothing from outside"
    );
    let card = std::fs::read_to_string(&card).unwrap();
    for page in [&html, &card] {
        assert!(page.contains("the base against itself") && page.contains("nano-q2.gguf"), "{page}");
        assert!(page.contains("the same checkpoint"));
        assert!(
            !page.contains(setting.folder.path().to_str().unwrap()),
            "a page that is published names no folder"
        );
    }
    assert!(fails(&page, 1).contains("--overwrite"));
    let none = setting.write("none.json", "{}");
    assert!(fails(&["score", "report", &none], 1).contains("`schema` is absent"));
}

#[test]
fn threads_do_not_change_a_divergence() {
    let setting = Setting::new();
    let q2 = setting.quantized();
    let passage = setting.write("text.txt", "The capital of France is Paris. One two three four five six.");
    let with = |threads: &str| {
        json(&done(&[
            "score",
            "kld",
            &setting.path("nano"),
            &q2,
            "--text",
            &passage,
            "--json",
            "--threads",
            threads,
        ]))
    };
    let one = with("1");
    assert_eq!(one, with("3"));
    assert_eq!(one["rows"][0]["is_noise"], true);
    assert_eq!(one["rows"][0]["comparison"]["kl"]["high"], 0.0);
    assert!(one["rows"][1]["comparison"]["kl"]["mean"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_recorded_vectors_of_the_nano_model_hold_and_a_coarser_file_fails_them() {
    let setting = Setting::new();
    let nano = setting.path("nano");
    let vectors = repository("test-vectors/vectors/nano");
    let vectors = vectors.to_str().unwrap();
    for entry in std::fs::read_dir(repository("test-vectors/prompts")).unwrap() {
        let path = entry.unwrap().path();
        let recorded = Path::new(vectors).join("prompts").join(path.file_name().unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(recorded).unwrap(), "{}", path.display());
    }
    let checked =
        json(&done(&["vectors", "check", "-m", &nano, "--vectors", vectors, "--bound", "0.001", "--json"]));
    assert_eq!(checked["passed"], true);
    assert_eq!(checked["cases"].as_array().unwrap().len(), 5);
    assert!(checked["cases"].as_array().unwrap().iter().all(|case| case["n_compared"].as_u64().unwrap() > 8));
    // One case alone is a set, too.
    let q2 = setting.quantized();
    let one = format!("{vectors}/official/reasoning.official.json");
    let scored = json(&done(&["score", "run", &nano, "--cases", &one, "--json", "-q"]));
    let agreement = &scored["summary"]["agreement"];
    assert_eq!((&agreement["top1_count"], &agreement["top1_match"]), (&8.into(), &8.into()));
    assert_eq!(agreement["pair_agree"], agreement["pair_total"]);
    assert!(agreement["top_abs_delta"].as_f64().unwrap() < 1e-6, "{agreement}");
    let check = ["vectors", "check", "-m", &q2, "--vectors", &one];
    let failed = ggsmith(&check);
    assert_eq!(failed.status.code(), Some(1));
    let printed = text(&failed.stdout);
    assert!(printed.contains("OUT OF BOUNDS") && printed.contains("recorded is"), "{printed}");
    assert!(
        fails(&["vectors", "check", "-m", &nano, "--vectors", vectors, "--bound=-1"], 2).contains("--bound")
    );
}

#[test]
fn vectors_are_fetched_whole_and_right_or_not_at_all() {
    let setting = Setting::new();
    let prompts = setting.write(
        "prompts.jsonl",
        "{\"prompt\": \"Who are you?\", \"id\": \"who\"}\n{\"prompt\": \"2 plus 3?\"}\n",
    );
    let set = setting.path("set");
    let record =
        ["vectors", "record", "-m", &setting.path("nano"), "--prompts", &prompts, "-n", "3", "--out", &set];
    done(&record);
    assert!(fails(&record, 1).contains("exists"));
    done(&["vectors", "check", "-m", &setting.path("nano"), "--vectors", &set, "--bound", "1e-9"]);
    let sums = std::fs::read(Path::new(&set).join("SHA256SUMS")).unwrap();
    let hash = quality_testing::hash::sha256(&sums);
    let copy = setting.path("copy");
    done(&["vectors", "fetch", &set, "--sha256", &hash, "--out", &copy]);
    assert_eq!(
        std::fs::read(Path::new(&copy).join("manifest.json")).unwrap(),
        std::fs::read(Path::new(&set).join("manifest.json")).unwrap()
    );
    assert!(fails(&["vectors", "fetch", &set, "--sha256", &hash, "--out", &copy], 1).contains("exists"));
    let root = PathBuf::from(&set);
    let file =
        move |request: &Request| match std::fs::read(root.join(request.path.trim_start_matches("/v1/"))) {
            Ok(bytes) => Response::ok(bytes),
            Err(_) => Response::status(404),
        };
    let server = Server::start(file.clone());
    let web = setting.path("web");
    done(&["vectors", "fetch", &format!("{}/v1", server.url()), "--sha256", &hash, "--out", &web]);
    assert_eq!(
        std::fs::read(Path::new(&web).join("official/who.official.json")).unwrap(),
        std::fs::read(Path::new(&set).join("official/who.official.json")).unwrap()
    );
    // Wrong list, changed file, cut file, missing file, a list that leads out of the folder.
    let out = setting.path("out");
    let refused = |url: &str, hash: &str, part: &str| {
        let message = fails(&["vectors", "fetch", url, "--sha256", hash, "--out", &out], 1);
        assert!(message.contains(part), "{message}");
        assert!(!Path::new(&out).exists());
    };
    refused(&format!("{}/v1", server.url()), &"0".repeat(64), "SHA256SUMS` has SHA-256");
    refused(&format!("{}/v2", server.url()), &hash, "404");
    let changed = file.clone();
    let server = Server::start(move |request| {
        if request.path.ends_with("who.txt") { Response::ok("Who am I?") } else { changed(request) }
    });
    refused(&format!("{}/v1/", server.url()), &hash, "changed or damaged");
    let server = Server::start(move |request| {
        if request.path.ends_with("who.txt") {
            Response::ok("Who are you?").cut_after(4)
        } else {
            file(request)
        }
    });
    refused(&format!("{}/v1", server.url()), &hash, "cannot get");
    let outside = format!("{}  ../outside\n", "0".repeat(64));
    let list = setting.path("bad");
    std::fs::create_dir(&list).unwrap();
    std::fs::write(Path::new(&list).join("SHA256SUMS"), &outside).unwrap();
    refused(&list, &quality_testing::hash::sha256(outside.as_bytes()), "under the folder");
}

#[test]
fn collecting_asks_for_a_key_and_a_label_and_warns_of_names_that_moved() {
    let setting = Setting::new();
    let prompts = setting.write("prompts.jsonl", "{\"prompt\": \"Who are you?\"}\n");
    let server = Server::scripted(vec![Response::status(401).body("{\"error\":{\"message\":\"bad key\"}}")]);
    let (out, endpoint) = (setting.path("set"), format!("{}/chat", server.url()));
    let base = ["score", "collect", "--prompts", &prompts, "--out", &out, "--endpoint", &endpoint, "-q"];
    assert!(fails(&base, 2).contains("--label"));
    let labelled = [&base[..], &["--label", "Flash-4.1"]].concat();
    let no_key = fails(&labelled, 1);
    assert!(no_key.contains("DEEPSEEK_API_KEY") && no_key.contains("--key-file"), "{no_key}");
    assert!(server.requests().is_empty());
    let key = setting.write("key", "sk-from-file\n");
    let refused = fails(&[&labelled[..], &["--key-file", &key, "--model", "deepseek-v4-flash"]].concat(), 1);
    assert!(
        refused.contains("warning: the API's `deepseek-v4-flash`") && refused.contains("401: bad key"),
        "{refused}"
    );
    assert_eq!(server.requests()[0].header("authorization"), Some("Bearer sk-from-file"));
    let doubled =
        setting.write("doubled.jsonl", "{\"prompt\":\"a\",\"id\":\"x\"}\n{\"prompt\":\"b\",\"id\":\"X\"}\n");
    let bad = |prompts: &str, part: &str| {
        let message = fails(
            &["score", "collect", "--prompts", prompts, "--out", &out, "--label", "x", "--key-file", &key],
            1,
        );
        assert!(message.contains(part), "{message}");
    };
    bad(&doubled, "two of this name");
    bad(&setting.write("empty.jsonl", "{\"prompt\":\" \"}\n"), "it is empty");
    bad(&setting.write("name.jsonl", "{\"prompt\":\"a\",\"id\":\"../x\"}\n"), "a name is up to");
    bad(&setting.write("broken.jsonl", "{\"prompt\":\n"), "line 1");
}
