//! Makes importance matrix files byte by byte, independent of the crate's writers.

use std::path::PathBuf;

use imatrix::{Imatrix, ImatrixError};
use tempfile::TempDir;

pub(crate) const GATE: &str = "blk.0.ffn_gate_exps.weight";
pub(crate) const DOWN: &str = "blk.0.ffn_down_exps.weight";

/// A legacy file of `(name, calls, stored values)`.
pub(crate) fn legacy(entries: &[(&str, i32, &[f32])], chunks: Option<i32>, dataset: Option<&str>) -> Vec<u8> {
    let mut bytes = (entries.len() as i32).to_le_bytes().to_vec();
    for (name, calls, values) in entries {
        bytes.extend((name.len() as i32).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(calls.to_le_bytes());
        bytes.extend((values.len() as i32).to_le_bytes());
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
    bytes.extend(chunks.iter().flat_map(|n| n.to_le_bytes()));
    if let Some(dataset) = dataset {
        bytes.extend((dataset.len() as i32).to_le_bytes());
        bytes.extend(dataset.as_bytes());
    }
    bytes
}

/// `(name, [matrices, columns], sums, counts)` of one entry.
type Pair<'a> = (&'a str, [usize; 2], &'a [f32], &'a [f32]);

/// A GGUF imatrix.
pub(crate) fn gguf(entries: &[Pair<'_>]) -> Vec<u8> {
    let tensors: Vec<_> = entries
        .iter()
        .flat_map(|&(name, shape, sums, counts)| {
            [(format!("{name}.in_sum2"), shape, sums), (format!("{name}.counts"), [counts.len(), 1], counts)]
        })
        .collect();
    gguf_of(&default_keys(), &tensors)
}

/// The four keys of an imatrix, each with its type and value as bytes.
pub(crate) fn default_keys() -> Vec<(&'static str, Vec<u8>)> {
    let mut datasets = 9_u32.to_le_bytes().to_vec();
    datasets.extend(8_u32.to_le_bytes());
    datasets.extend(2_u64.to_le_bytes());
    datasets.extend(text("a.txt"));
    datasets.extend(text("b.txt"));
    vec![
        ("general.type", [8_u32.to_le_bytes().to_vec(), text("imatrix")].concat()),
        ("imatrix.datasets", datasets),
        ("imatrix.chunk_count", [4_u32.to_le_bytes(), 7_u32.to_le_bytes()].concat()),
        ("imatrix.chunk_size", [4_u32.to_le_bytes(), 512_u32.to_le_bytes()].concat()),
    ]
}

fn text(text: &str) -> Vec<u8> {
    [(text.len() as u64).to_le_bytes().as_slice(), text.as_bytes()].concat()
}

/// Any GGUF file of F32 tensors.
pub(crate) fn gguf_of(keys: &[(&str, Vec<u8>)], tensors: &[(String, [usize; 2], &[f32])]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        bytes.extend(text(key));
        bytes.extend(value);
    }
    let mut offset = 0_u64;
    for (name, shape, values) in tensors {
        bytes.extend(text(name));
        bytes.extend(2_u32.to_le_bytes());
        bytes.extend((shape[1] as u64).to_le_bytes());
        bytes.extend((shape[0] as u64).to_le_bytes());
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset += (4 * values.len() as u64).next_multiple_of(32);
    }
    for (_, _, values) in tensors {
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

/// A folder with one file in it.
pub(crate) struct Scratch {
    pub(crate) folder: TempDir,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// Opens `bytes` as a file of some name.
pub(crate) fn open(bytes: &[u8]) -> Result<Imatrix, ImatrixError> {
    open_with_columns(bytes, &|_| None)
}

pub(crate) fn open_with_columns(
    bytes: &[u8],
    columns: &dyn Fn(&str) -> Option<usize>,
) -> Result<Imatrix, ImatrixError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, bytes).unwrap();
    // The open file outlives its name.
    Imatrix::open_with_columns(file.path(), columns)
}

/// The whole chain of an error's messages.
pub(crate) fn message(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
