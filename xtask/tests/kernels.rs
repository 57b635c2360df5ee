//! `xtask kernels` as it is called.

use std::process::Command;

#[test]
fn a_wrong_name_and_a_missing_compiler_are_explained() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_xtask")).args(["kernels", "--unit", "nothing"]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(output.stdout.is_empty());
    // With NVRTC on the machine and without.
    let named = message.contains("no source has that name") && message.contains("matrix_decode");
    let missing = message.contains("libnvrtc.so.13") && message.contains("pip install");
    assert!(named || missing, "{message}");
}
