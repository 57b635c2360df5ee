//! Calibration text: plain text, or one JSON object a line with `text` and, if known, `kind` and `id`.

use std::path::{Path, PathBuf};

/// A piece of calibration text.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct Document {
    /// What it is: prose, code.
    #[serde(default)]
    pub kind: String,
    /// What it is called.
    #[serde(default)]
    pub id: String,
    /// The text.
    pub text: String,
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatasetError {
    /// It cannot be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's own words.
        source: std::io::Error,
    },
    /// It is neither text nor JSON lines.
    #[error("`{}`, line {line}: {problem}; expected UTF-8 text, or in every line an object with a string `text`", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
}

/// Reads a file: JSON lines if its first line is an object with a string `text`, else one document of plain text.
///
/// # Errors
/// If it cannot be read, is no UTF-8, or a later line is no such object.
pub fn read_documents(path: &Path) -> Result<Vec<Document>, DatasetError> {
    let bytes = std::fs::read(path).map_err(|source| DatasetError::Read { path: path.to_owned(), source })?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let line = 1 + e.as_bytes()[..e.utf8_error().valid_up_to()].split(|&b| b == b'\n').skip(1).count();
        DatasetError::Line { path: path.to_owned(), line, problem: "it is not UTF-8".to_owned() }
    })?;
    let is_lines = text.lines().next().is_some_and(|line| serde_json::from_str::<Document>(line).is_ok());
    if !is_lines {
        let id = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Ok(vec![Document { kind: String::new(), id, text }]);
    }
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(i, line)| {
            serde_json::from_str(line).map_err(|e| DatasetError::Line {
                path: path.to_owned(),
                line: i + 1,
                problem: e.to_string(),
            })
        })
        .collect()
}
