//! The prompts that are asked: a folder of text files, or lines of JSON as ds4's `prompts.jsonl`.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;

use super::CollectError;

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Name, which becomes that of files.
    pub id: String,
    /// What sort of prompt it is, where that is said.
    pub kind: Option<String>,
    /// The user's turn.
    pub text: String,
}

#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    kind: Option<String>,
    prompt: String,
}

/// Reads a folder of `ID.txt` files in the order of their names, or a file with a line of JSON for each prompt:
/// `{"prompt": ..., "id": ..., "kind": ...}`; without `id` they are called `case_000` and so on, as ds4 does.
///
/// # Errors
/// If something cannot be read, is empty, has an unusable name or a name twice.
pub fn read_prompts(path: &Path) -> Result<Vec<Prompt>, CollectError> {
    let prompts = if path.is_dir() { read_folder(path)? } else { read_lines(path)? };
    let wrong = |place: String, reason: &str| CollectError::Prompt { place, reason: reason.to_owned() };
    if prompts.is_empty() {
        return Err(wrong(format!("`{}`", path.display()), "holds no prompts"));
    }
    let mut seen = BTreeSet::new();
    for Prompt { id, kind, text } in &prompts {
        let place = format!("`{}`, prompt `{id}`", path.display());
        if text.trim().is_empty() {
            return Err(wrong(place, "it is empty"));
        }
        if kind.as_ref().is_some_and(|kind| kind.chars().any(char::is_control)) {
            return Err(wrong(place, "its kind holds tabs or line ends"));
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if id.is_empty() || id.starts_with('.') || id.len() > 100 || !id.chars().all(is_plain) {
            return Err(wrong(place, "a name is up to 100 letters, digits, `_`, `-` and `.`, no `.` first"));
        }
        if !seen.insert(id.to_ascii_lowercase()) {
            return Err(wrong(place, "there are two of this name"));
        }
    }
    Ok(prompts)
}

fn read_folder(folder: &Path) -> Result<Vec<Prompt>, CollectError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| CollectError::Io { path, source }
    };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io(folder))? {
        let path = entry.map_err(io(folder))?.path();
        paths.extend(path.extension().is_some_and(|suffix| suffix == "txt").then_some(path));
    }
    paths.sort();
    let read = |path: &std::path::PathBuf| {
        let text = std::fs::read_to_string(path).map_err(io(path))?;
        let id = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Prompt { id, kind: None, text })
    };
    paths.iter().map(read).collect()
}

fn read_lines(path: &Path) -> Result<Vec<Prompt>, CollectError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| CollectError::Io { path: path.to_owned(), source })?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .enumerate()
        .map(|(n, (i, line))| {
            let line: Line = serde_json::from_str(line).map_err(|e| CollectError::Prompt {
                place: format!("`{}` line {}", path.display(), i + 1),
                reason: format!("{e}; expected {{\"prompt\": \"...\"}}"),
            })?;
            let id = line.id.unwrap_or_else(|| format!("case_{n:03}"));
            Ok(Prompt { id, kind: line.kind, text: line.prompt })
        })
        .collect()
}
