//! Golden loader, makers of hostile files and a scripted HTTP server, for the tests of the other crates.
//!
//! Depends on none of them, so that every crate can use it in its tests.

pub mod gguf;
pub mod hub;
pub mod server;
pub mod tls;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

/// The folder of goldens made by independent code, or `None` (with a printed reason) where it is absent.
///
/// It lies beside the repository as `shared/fixtures`. A test that needs it returns early on `None`.
/// With `CI` set in the environment the folder must be there.
///
/// # Panics
/// If `CI` is set and the folder is absent: a test that must run may not skip itself there.
pub fn fixtures(needed_for: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/fixtures");
    if folder.is_dir() {
        return Some(folder);
    }
    assert!(
        std::env::var_os("CI").is_none(),
        "{needed_for}: the fixtures folder is absent, and CI must run this test"
    );
    report_skip(&format!("{needed_for}: the fixtures folder is absent"));
    None
}

/// Prints why a test skipped itself.
#[expect(clippy::print_stderr, reason = "the printed reason is this function's purpose")]
pub fn report_skip(reason: &str) {
    eprintln!("skipped: {reason}");
}

/// One array of a golden file, as stored.
#[derive(Debug, Clone)]
pub struct GoldenArray {
    /// Shape, outermost first.
    pub shape: Vec<usize>,
    /// Little-endian bytes.
    pub bytes: Vec<u8>,
}

impl GoldenArray {
    /// The array as `f32` values.
    pub fn f32(&self) -> Vec<f32> {
        self.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    /// The array as `i32` values.
    pub fn i32(&self) -> Vec<i32> {
        self.bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

/// Every array of a golden `.safetensors` file, by name.
///
/// # Panics
/// If the file cannot be read: a golden is part of the test.
pub fn golden_arrays(path: &Path) -> BTreeMap<String, GoldenArray> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
    let set =
        SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("cannot parse {}: {e}", path.display()));
    set.tensors()
        .into_iter()
        .map(|(name, view)| (name, GoldenArray { shape: view.shape().to_vec(), bytes: view.data().to_vec() }))
        .collect()
}

/// Lower-case hexadecimal digits of bytes.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| char::from(DIGITS[digit as usize]))
        .collect()
}
