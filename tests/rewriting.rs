//! Splitting, merging, splicing, relabelling and accounting as users run them: exit codes, kills, full disks.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const GGSMITH: &str = env!("CARGO_BIN_EXE_ggsmith");

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A folder with a model in it; commands run there, so that names stay short.
struct Setting {
    folder: tempfile::TempDir,
}

impl Setting {
    fn new(experts: &str) -> Self {
        let setting = Self { folder: tempfile::tempdir().unwrap() };
        setting.done(&["synth", "--quiet", "--shape", "tiny", "--experts", experts, "--out", "checkpoint"]);
        setting.done(&["quantize", "--quiet", "--recipe", "q4", "--hf", "checkpoint", "--out", "whole.gguf"]);
        setting
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(GGSMITH);
        command.current_dir(self.folder.path()).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn done(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn fails(&self, arguments: &[&str], code: i32) -> String {
        let output = self.run(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(output.stdout.is_empty() && !stderr.contains("panicked"), "{stderr}");
        stderr
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

#[test]
fn a_split_set_or_layer_files_merge_to_the_same_file_from_any_part() {
    let setting = Setting::new("8");
    let whole = setting.bytes("whole.gguf");
    let printed = setting.done(&["split", "--quiet", "--max-size", "4MB", "whole.gguf", "--out", "s"]);
    let shards: Vec<&str> =
        printed.lines().filter(|line| Path::new(line).extension().is_some_and(|e| e == "gguf")).collect();
    assert!(shards.len() >= 3 && shards[0].starts_with("s-00001-of-0000"), "{printed}");
    for shard in &shards {
        assert!(setting.bytes(shard).len() <= 4_000_000);
    }
    // The size that the dry run promises is the size that is written, and a dry run writes nothing.
    let before = setting.names();
    let dry =
        setting.done(&["split", "--dry-run", "--json", "--max-size", "4MB", "whole.gguf", "--out", "dry"]);
    let dry: serde_json::Value = serde_json::from_str(&dry).unwrap();
    for (promised, shard) in dry["files"].as_array().unwrap().iter().zip(&shards) {
        assert_eq!(promised["file_bytes"].as_u64(), Some(setting.bytes(shard).len() as u64));
    }
    assert_eq!(setting.names(), before);
    for (i, shard) in shards.iter().enumerate() {
        let out = format!("merged-{i}.gguf");
        setting.done(&["merge", "--quiet", shard, "--out", &out]);
        assert!(setting.bytes(&out) == whole);
    }
    setting.done(&["merge", "--quiet", shards[0], shards[2], "--out", "list.gguf"]);
    assert!(setting.bytes("list.gguf") == whole);
    setting.done(&["split", "--quiet", "--layers", "0:1,2:output", "whole.gguf", "--out", "m"]);
    setting.done(&["merge", "--quiet", "m-Layers-02-output.gguf", "--out", "layers.gguf"]);
    assert!(setting.bytes("layers.gguf") == whole);
    let half = setting.done(&["verify", "--quiet", "m-Layers00-01.gguf"]);
    assert!(half.contains("layers 0 to 1 of 3") && half.contains("sound"), "{half}");
}

#[test]
fn wrong_calls_exit_with_2_and_never_touch_an_input() {
    let setting = Setting::new("4");
    setting.done(&["split", "--quiet", "--max-tensors", "40", "whole.gguf", "--out", "s"]);
    let names = setting.names();
    let before: Vec<_> = names.iter().filter(|n| n.ends_with("gguf")).map(|n| setting.bytes(n)).collect();
    // A shell's glob made the last shard the output of another tool.
    assert!(
        setting
            .fails(&["merge", "s-00001-of-00003.gguf", "s-00002-of-00003.gguf", "out.gguf"], 2)
            .contains("--out")
    );
    let over = ["merge", "--overwrite", "s-00001-of-00003.gguf", "--out", "s-00002-of-00003.gguf"];
    assert!(setting.fails(&over, 1).contains("it is an input"));
    assert!(setting.fails(&["merge", "whole.gguf", "--out", "out.gguf"], 2).contains("whole file already"));
    let layers = |parts: &str, says: &str| {
        let message = setting.fails(&["split", "whole.gguf", "--layers", parts], 2);
        assert!(message.contains(says), "{message}");
    };
    layers("0:1,1:output", "layer 1 is in more than one part");
    layers("0:0,2:output", "layer 1 is in no part");
    layers("0:2", "the output head is in no part");
    layers("0-2", "FIRST:LAST");
    assert!(setting.fails(&["split", "whole.gguf", "--max-size", "many"], 2).contains("48GB"));
    assert!(setting.fails(&["split", "whole.gguf", "--max-size", "10K"], 2).contains("choose larger shards"));
    let quantize = ["quantize", "--hf", "checkpoint", "--out", "q.gguf"];
    for (flag, value, says) in [
        ("--shard", "3/2", "I from 1 to N"),
        ("--shard", "1/999", "number of tensors"),
        ("--layers", "0:9", "layers 0 to 2"),
        ("--layers", "0,1", "expected one part"),
    ] {
        let message = setting.fails(&[&quantize[..], &[flag, value]].concat(), 2);
        assert!(message.contains(says), "{message}");
    }
    assert!(
        setting.fails(&["relabel", "whole.gguf", "--in-place", "--set", "a=b"], 2).contains("KEY=TYPE:VALUE")
    );
    assert!(setting.fails(&["relabel", "whole.gguf", "--in-place"], 2).contains("nothing to do"));
    assert!(
        setting
            .fails(
                &[
                    "splice",
                    "--base",
                    "whole.gguf",
                    "--donor",
                    "whole.gguf",
                    "--layers",
                    "9",
                    "--out",
                    "x.gguf"
                ],
                2
            )
            .contains("no tensor is chosen")
    );
    assert_eq!(setting.names(), names);
    let after: Vec<_> = names.iter().filter(|n| n.ends_with("gguf")).map(|n| setting.bytes(n)).collect();
    assert!(before == after);
    std::fs::remove_file(setting.path("s-00003-of-00003.gguf")).unwrap();
    assert!(
        setting
            .fails(&["merge", "s-00001-of-00003.gguf", "--out", "out.gguf"], 1)
            .contains("s-00003-of-00003.gguf")
    );
}

#[test]
fn a_killed_split_and_merge_go_on_and_leave_nothing_incomplete() {
    let setting = Setting::new("96");
    let whole = setting.bytes("whole.gguf");
    setting.done(&["split", "--quiet", "--max-tensors", "25", "whole.gguf", "--out", "right"]);
    let wanted = |name: &str| match name.strip_prefix("killed") {
        Some("" | ".gguf") | None => whole.clone(),
        Some(shard) => setting.bytes(&format!("right{shard}")),
    };
    let split =
        ["split", "--quiet", "--no-copy-offload", "--max-tensors", "25", "whole.gguf", "--out", "killed"];
    let merge =
        ["merge", "--quiet", "--no-copy-offload", "right-00001-of-00003.gguf", "--out", "killed.gguf"];
    for arguments in [&split[..], &merge[..]] {
        let mut kills = 0;
        for milliseconds in (0..).map(|i: u64| 5 * i * i) {
            let mut child =
                setting.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(milliseconds));
            child.kill().unwrap();
            if child.wait().unwrap().success() {
                break;
            }
            kills += 1;
            for name in setting
                .names()
                .iter()
                .filter(|n| n.starts_with("killed") && Path::new(n).extension().is_some_and(|e| e == "gguf"))
            {
                assert!(setting.bytes(name) == wanted(name), "{name} is incomplete under its final name");
            }
        }
        assert!(kills > 0);
        setting.done(arguments);
    }
    for name in setting.names().iter().filter(|n| n.starts_with("killed")) {
        assert!(setting.bytes(name) == wanted(name), "{name}");
    }
}

/// Runs with a limit on the size of files, which the system enforces as it does a full disk.
fn with_file_limit(setting: &Setting, kilobytes: u64, arguments: &[&str]) -> Output {
    let script = format!("trap '' XFSZ; ulimit -f {kilobytes}; exec \"$@\"");
    let mut bash = Command::new("bash");
    bash.current_dir(setting.folder.path()).args(["-c", &script, "bash", GGSMITH]).args(arguments);
    bash.output().unwrap()
}

#[test]
fn a_disk_that_takes_no_more_is_reported_and_the_same_command_goes_on() {
    let setting = Setting::new("8");
    let whole = setting.bytes("whole.gguf");
    setting.done(&["split", "--quiet", "--max-tensors", "60", "whole.gguf", "--out", "s"]);
    let size = whole.len() as u64 / 1024;
    for limit in [1, size / 3, size / 2, size - 1] {
        for offload in [true, false] {
            let mut arguments = vec!["merge", "--quiet", "s-00001-of-00002.gguf", "--out", "full.gguf"];
            arguments.extend((!offload).then_some("--no-copy-offload"));
            let output = with_file_limit(&setting, limit, &arguments);
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{stderr}");
            assert!(
                stderr.contains("full.gguf.part") && stderr.contains("run the same command again"),
                "{stderr}"
            );
            assert!(!setting.path("full.gguf").exists());
        }
    }
    let resumed = setting.done(&["merge", "--quiet", "s-00001-of-00002.gguf", "--out", "full.gguf"]);
    assert!(resumed.contains("were there already"), "{resumed}");
    assert!(setting.bytes("full.gguf") == whole && !setting.path("full.gguf.part").exists());
}

#[test]
fn splice_relabel_and_diff_do_what_they_print() {
    let setting = Setting::new("8");
    setting.done(&["quantize", "--quiet", "--recipe", "q2", "--hf", "checkpoint", "--out", "q2.gguf"]);
    let splice = [
        "splice",
        "--quiet",
        "--base",
        "q2.gguf",
        "--donor",
        "whole.gguf",
        "--q4-layers",
        "1-2",
        "--out",
        "mixed.gguf",
    ];
    let dry = setting.done(&[&splice[..], &["--dry-run"]].concat());
    assert!(!setting.path("mixed.gguf").exists());
    setting.done(&splice);
    let size = setting.bytes("mixed.gguf").len();
    assert!(dry.contains(&format!("file size  {size} bytes")), "{dry}");
    assert!(setting.done(&["verify", "--quiet", "mixed.gguf"]).contains("sound"));
    let found = setting.run(&["diff", "--quiet", "--json", "q2.gguf", "mixed.gguf"]);
    assert_eq!(found.status.code(), Some(1));
    let found: serde_json::Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!(found["tensors"].as_array().unwrap().len(), 6);
    let same = setting.done(&["diff", "--quiet", "q2.gguf", "q2.gguf"]);
    assert!(same.contains("0 differ; 0 keys differ"), "{same}");
    // A label that differs is refused, and accepted on request.
    setting.done(&[
        "relabel",
        "--quiet",
        "whole.gguf",
        "--set",
        "ggsmith.checkpoint.label=str:other",
        "--out",
        "other.gguf",
    ]);
    let foreign = [
        "splice",
        "--quiet",
        "--base",
        "q2.gguf",
        "--donor",
        "other.gguf",
        "--layers",
        "1",
        "--out",
        "x.gguf",
    ];
    assert!(setting.fails(&foreign, 1).contains("donor `other`"));
    setting.done(&[&foreign[..], &["--any-checkpoint"]].concat());

    let before = setting.bytes("q2.gguf");
    let printed = setting.done(&["relabel", "q2.gguf", "--in-place", "--set", "general.name=str:short"]);
    assert!(printed.contains("changed general.name") && printed.contains("in place"), "{printed}");
    let after = setting.bytes("q2.gguf");
    assert!(after.len() == before.len() && after != before);
    assert!(setting.done(&["inspect", "q2.gguf"]).contains("general.name  short"));
    let long = format!("general.description=str:{}", "x".repeat(9000));
    assert!(setting.fails(&["relabel", "q2.gguf", "--in-place", "--set", &long], 1).contains("--out FILE"));
    // Back by the template of another file, but for what describes the tensors.
    setting.done(&["relabel", "q2.gguf", "--in-place", "--template", "mixed.gguf"]);
    assert!(setting.bytes("q2.gguf") == before);
    // What a runtime lacks is added, and the file stays sound.
    setting.done(&[
        "relabel",
        "--quiet",
        "q2.gguf",
        "--unset",
        "deepseek4.vocab_size",
        "--unset",
        "deepseek4.rope.scaling.type",
        "--out",
        "bare.gguf",
    ]);
    let added = setting.done(&["relabel", "--quiet", "bare.gguf", "--dialect", "--out", "both.gguf"]);
    assert!(
        added.contains("added deepseek4.vocab_size") && added.contains("added deepseek4.rope.scaling.type"),
        "{added}"
    );
    let verdict = setting.done(&["verify", "--quiet", "both.gguf"]);
    assert!(!verdict.contains("llama.cpp will not"), "{verdict}");
}

#[test]
fn account_prints_tables_json_and_a_picture() {
    let setting = Setting::new("8");
    let printed = setting.done(&[
        "account",
        "whole.gguf",
        "--context",
        "1000",
        "--bandwidth",
        "100",
        "--memory",
        "1GB",
        "--svg",
        "cost.svg",
    ]);
    let size = setting.bytes("whole.gguf").len();
    assert!(printed.contains(&size.to_string()) && printed.contains("2 of 8 routed experts"), "{printed}");
    assert!(printed.contains("GB10") && printed.contains("yours"), "{printed}");
    assert!(text(&setting.bytes("cost.svg")).starts_with("<svg"));
    let json = setting.done(&["account", "checkpoint", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let sum: u64 =
        json["components"].as_array().unwrap().iter().map(|c| c["n_bytes"].as_u64().unwrap()).sum();
    assert_eq!(Some(sum), json["data_bytes"].as_u64());
    assert!(setting.fails(&["account", "whole.gguf", "--bandwidth", "-1"], 2).contains("bandwidth"));
    assert!(setting.fails(&["account", "absent.gguf"], 1).contains("absent.gguf"));
    std::fs::write(setting.path("page.gguf"), "<!DOCTYPE html>").unwrap();
    assert!(setting.fails(&["account", "page.gguf"], 1).contains("web page"));
    assert!(Path::new(&setting.path("cost.svg")).exists());
}

#[test]
fn shares_made_apart_merge_to_the_bytes_of_one_machine() {
    let setting = Setting::new("8");
    let share = |arguments: &[&str]| {
        setting
            .done(&[&["quantize", "--quiet", "--recipe", "q4", "--hf", "checkpoint"][..], arguments].concat())
    };
    for number in ["2/2", "1/2"] {
        share(&["--out", "apart.gguf", "--shard", number]);
    }
    setting.done(&["merge", "--quiet", "apart-00002-of-00002.gguf", "--out", "apart.gguf"]);
    assert!(setting.bytes("apart.gguf") == setting.bytes("whole.gguf"));
    share(&["--out", "h-Layers00-00.gguf", "--layers", "0:0"]);
    share(&["--out", "h-Layers-01-output.gguf", "--layers", "1:output"]);
    setting.done(&["merge", "--quiet", "h-Layers00-00.gguf", "--out", "halves.gguf"]);
    assert!(setting.bytes("halves.gguf") == setting.bytes("whole.gguf"));
}
