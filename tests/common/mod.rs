//! Runs the program as users do.

use std::path::Path;
use std::process::{Command, Output};

pub(crate) fn ggsmith() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ggsmith"))
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    ggsmith().args(arguments).output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs and expects success; gives stdout.
pub(crate) fn done(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Runs and expects this exit code and nothing on stdout; gives stderr.
pub(crate) fn fails(arguments: &[&str], code: i32) -> String {
    let output = run(arguments);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{arguments:?} printed a result");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

pub(crate) fn borrowed(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

pub(crate) fn nano() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("test-vectors/nano/checkpoint").to_str().unwrap().to_owned()
}

pub(crate) fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}
