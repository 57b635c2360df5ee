//! Case sets in all their forms, whole and broken.

use std::path::{Path, PathBuf};

use quality_testing::cases::{CaseError, CaseSet, NOT_TOLD};

/// The recorded cases that lie beside the repository.
fn official() -> Option<PathBuf> {
    let fixtures = test_vectors::fixtures("official case sets")?;
    Some(fixtures.with_file_name("official-vectors"))
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn put(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, text).unwrap();
    path
}

fn error(path: &Path) -> CaseError {
    CaseSet::open(path, None).expect_err("it must be refused")
}

#[test]
fn the_recorded_official_cases_are_read_in_all_their_forms() {
    let Some(folder) = official() else { return };
    let manifest = CaseSet::open(&folder, None).unwrap();
    assert_eq!(manifest.cases.len(), 5);
    let label = manifest.label.as_ref().unwrap();
    assert_eq!((label.label.as_str(), label.stated), ("DeepSeek-V4-Flash", false), "by API name and date");
    let fact = &manifest.cases[0];
    assert_eq!((fact.id.as_str(), fact.kind.as_deref()), ("short_italian_fact", Some("short")));
    assert_eq!(fact.continuation, b"Ada Lovelace");
    assert_eq!(fact.recorded.len(), 4);
    assert_eq!(fact.recorded[0].top.len(), 20);
    assert!(fact.recorded[0].top[1].log_probability < NOT_TOLD);
    let compact = CaseSet::open(&folder.join("official.vec"), None).unwrap();
    assert_eq!(compact.label, None, "the compact form has no date");
    assert_eq!(compact.sha256(), manifest.sha256(), "the same questions and answers");
    assert_eq!(compact.cases[1].recorded[2].token, b"\n");
    let one = CaseSet::open(&folder.join("official/short_reasoning_plain.official.json"), None).unwrap();
    assert_eq!(one.cases, manifest.cases[2..3]);
}

#[test]
fn a_manifest_in_columns_finds_its_files_as_ds4_writes_them() {
    let folder = folder();
    let root = folder.path();
    put(root, "data/flash/prompts/a.txt", "question");
    put(root, "data/flash/continuations/a.txt", "answer");
    let response = r#"{"model":"deepseek-v4-flash","created":1786000000,"choices":[{"finish_reason":"stop",
        "message":{"content":"answer"},"logprobs":{"content":[{"token":"answer","bytes":[97],"logprob":-0.5,
        "top_logprobs":[{"token":"x","bytes":null,"logprob":-0.5}]}]}}]}"#;
    put(root, "data/flash/responses/a.json", response);
    // From the root of the repository, and from the manifest's folder.
    let rows = "# id\tprompt_file\n\na\tdata/flash/prompts/a.txt\tcontinuations/a.txt\tresponses/a.json\nb\tprompts/a.txt\tcontinuations/a.txt\t\tkind\n";
    let path = put(root, "data/flash/manifest.tsv", rows);
    let set = CaseSet::open(&path, None).unwrap();
    assert_eq!(
        set.cases[0].recorded[0].top[0].token, b"x",
        "bytes are those of the text where they are not given"
    );
    assert_eq!(set.cases[1].kind.as_deref(), Some("kind"));
    assert!(set.cases[1].recorded.is_empty());
    assert_eq!(set.label.unwrap().label, "DeepSeek-V4-Flash-0731", "answered on 2026-08-06");
    let stated = CaseSet::open(&path, Some("Other")).unwrap().label.unwrap();
    assert!(stated.stated && stated.label == "Other", "what the user states goes before a guess by date");
    // The whole set elsewhere: paths are found by their ends.
    std::fs::rename(root.join("data/flash"), root.join("moved")).unwrap();
    assert_eq!(CaseSet::open(&root.join("moved"), None).unwrap().cases.len(), 2);
}

#[test]
fn empty_doubled_and_missing_cases_are_refused_by_name() {
    let folder = folder();
    let root = folder.path();
    put(root, "p.txt", "question");
    put(root, "c.txt", "answer");
    put(root, "empty.txt", "");
    let open = |rows: &str| error(&put(root, "manifest.tsv", rows));
    assert!(matches!(open("# nothing\n"), CaseError::NoCases { .. }));
    assert!(matches!(open("a\tp.txt\tempty.txt\n"), CaseError::ZeroLength { part: "continuation", .. }));
    assert!(matches!(open("a\tempty.txt\tc.txt\n"), CaseError::ZeroLength { part: "prompt", .. }));
    let doubled = open("a\tp.txt\tc.txt\na\tp.txt\tc.txt\n");
    assert!(doubled.to_string().contains("case `a` twice"), "{doubled}");
    let cut = open("a\tp.txt\tc.txt\nb\tp.t").to_string();
    assert!(cut.contains("line 2") && cut.contains("2 columns"), "{cut}");
    let missing = open("a\tp.txt\tgone.txt\n").to_string();
    assert!(missing.contains("`gone.txt`") && missing.contains("line 1"), "{missing}");
    assert!(matches!(error(&root.join("absent")), CaseError::Read { .. }));
    std::fs::create_dir(root.join("bare")).unwrap();
    assert!(error(&root.join("bare")).to_string().contains("manifest"));
    std::fs::write(root.join("manifest.tsv"), [0xff, 0xfe]).unwrap();
    assert!(error(&root.join("manifest.tsv")).to_string().contains("UTF-8"));
}

#[test]
fn cases_of_several_checkpoints_are_refused() {
    let folder = folder();
    let root = folder.path();
    put(root, "p.txt", "question");
    put(root, "c.txt", "answer");
    let response = |name: &str, created: u64| {
        let text = format!(
            r#"{{"model":"deepseek-v4-flash","created":{created},"choices":[{{"message":{{"content":"answer"}}}}]}}"#
        );
        put(root, name, &text);
    };
    response("may.json", 1_778_105_373);
    response("august.json", 1_786_000_000);
    let rows = "a\tp.txt\tc.txt\tmay.json\nb\tp.txt\tc.txt\taugust.json\n";
    let mixed = error(&put(root, "manifest.tsv", rows)).to_string();
    assert!(
        mixed.contains("case `b` is of `DeepSeek-V4-Flash-0731`, those before of `DeepSeek-V4-Flash`"),
        "{mixed}"
    );
    let twice = "# label: One\n# label: Two\na\tp.txt\tc.txt\n";
    assert!(matches!(error(&put(root, "manifest.tsv", twice)), CaseError::MixedLabels { .. }));
    // A set of JSON files: the label in a file stands against that of the manifest, and a model against another.
    let case = |label: &str, model: &str| {
        format!(
            r#"{{"schema":"ds4-official-logprobs-v1","model":"{model}","label":"{label}","id":"a","prompt":"q",
            "steps":[{{"step":0,"token":{{"text":"x"}},"logprob":0,"top_logprobs":[]}}]}}"#
        )
    };
    let manifest = |model: &str| {
        format!(
            r#"{{"schema":"ds4-test-vector-manifest-v1","model":"{model}","label":"One",
            "prompts":[{{"id":"a","official_file":"a.json","steps":1}}]}}"#
        )
    };
    put(root, "a.json", &case("Two", "m"));
    assert!(matches!(error(&put(root, "manifest.json", &manifest("m"))), CaseError::MixedLabels { .. }));
    put(root, "a.json", &case("One", "other"));
    assert!(matches!(error(&put(root, "manifest.json", &manifest("m"))), CaseError::MixedLabels { .. }));
    put(root, "a.json", &case("One", "m"));
    let set = CaseSet::open(&put(root, "manifest.json", &manifest("m")), None).unwrap();
    assert_eq!(set.label.unwrap().label, "One");
    assert!(
        CaseSet::open(&root.join("manifest.json"), Some("Two")).is_err(),
        "the user's label stands against it, too"
    );
}

#[test]
fn cut_off_files_of_every_form_are_told_apart_from_broken_ones() {
    let Some(official) = official() else { return };
    let folder = folder();
    let root = folder.path();
    for name in [
        "short_italian_fact",
        "short_code_completion",
        "short_reasoning_plain",
        "long_memory_archive",
        "long_code_audit",
    ] {
        let from = official.join(format!("prompts/{name}.txt"));
        put(root, &format!("prompts/{name}.txt"), &std::fs::read_to_string(from).unwrap());
    }
    let json =
        std::fs::read_to_string(official.join("official/short_reasoning_plain.official.json")).unwrap();
    for cut in [json.len() / 2, json.trim_end().len() - 1] {
        let refused = error(&put(root, "case.json", &json[..cut]));
        assert!(matches!(refused, CaseError::Truncated { .. }), "cut at {cut}: {refused}");
    }
    let compact = std::fs::read_to_string(official.join("official.vec")).unwrap();
    let whole = CaseSet::open(&put(root, "official.vec", &compact), None).unwrap();
    let mut n_whole = 0;
    for cut in (0..compact.len()).filter(|&cut| compact.is_char_boundary(cut)) {
        match CaseSet::open(&put(root, "official.vec", &compact[..cut]), None) {
            // Only behind a whole case can a cut not be seen.
            Ok(set) => {
                assert!(compact[..cut].trim_end().ends_with("end"), "cut at {cut}");
                assert_eq!(set.cases, whole.cases[..set.cases.len()]);
                n_whole += 1;
            }
            Err(refused) => assert!(!refused.to_string().is_empty()),
        }
    }
    assert!(n_whole >= 5);
    let fewer = compact.replacen("step 3 616365 1\ntop 616365 0\n", "", 1);
    let refused = error(&put(root, "official.vec", &fewer));
    assert!(matches!(refused, CaseError::Truncated { .. }), "{refused}");
    for (good, bad) in [
        ("step 0 416461 1", "step 9 416461 1"),
        ("top 416461 0", "top 41646 0"),
        ("top 416461 0", "top 416461 x"),
    ] {
        let refused = error(&put(root, "official.vec", &compact.replacen(good, bad, 1)));
        assert!(matches!(refused, CaseError::Malformed { .. }), "{refused}");
    }
    let manifest = std::fs::read_to_string(official.join("manifest.json")).unwrap();
    for name in [
        "short_italian_fact",
        "short_code_completion",
        "short_reasoning_plain",
        "long_memory_archive",
        "long_code_audit",
    ] {
        let from = official.join(format!("official/{name}.official.json"));
        put(root, &format!("official/{name}.official.json"), &std::fs::read_to_string(from).unwrap());
    }
    let refused = error(&put(root, "manifest.json", &manifest.replacen("\"steps\": 4", "\"steps\": 5", 1)));
    assert!(matches!(refused, CaseError::Truncated { .. }), "{refused}");
    put(root, "prompts/short_italian_fact.txt", "Another question?");
    let refused = error(&put(root, "manifest.json", &manifest)).to_string();
    assert!(refused.contains("`prompt`"), "{refused}");
}
