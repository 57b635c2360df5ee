//! Calibration texts: reading a data set, cutting it into prompts, and building one.
//!
//! A data set is JSON lines, one record a line: `{"kind": "code", "id": "code-000017", "text": "..."}`. A text that
//! begins with the model's beginning-of-sentence token is a rendered conversation, its control tokens written out; any
//! other text is plain, and nothing in it is taken for a control token. `tokens` (a list of ids) may stand in place of
//! `text`. A file that does not begin with such a record is one plain text.

mod build;
mod error;
mod generate;
mod sources;

use std::path::Path;

use runner::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::collect::hex;

pub use build::{BuildOptions, Built, KindReport, Manifest, Share, build};
pub use error::DatasetError;
pub use generate::GENERATED;
pub use sources::{Source, SourceKind, SourceReport};

/// The token that a rendered conversation begins with.
const BOS: &str = "<｜begin▁of▁sentence｜>";

/// One text of a data set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// What sort of text it is, for reports.
    #[serde(default = "plain")]
    pub kind: String,
    /// Name of the record, for messages.
    #[serde(default)]
    pub id: String,
    /// The text, rendered or plain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The text as token ids, taken as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<u32>>,
}

fn plain() -> String {
    "text".to_owned()
}

impl Record {
    /// The record's tokens, beginning of sentence first.
    ///
    /// # Errors
    /// If the text cannot be cut into tokens.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, DatasetError> {
        if let Some(tokens) = &self.tokens {
            return Ok(tokens.clone());
        }
        let text = self.text.as_deref().unwrap_or_default();
        if text.starts_with(BOS) && tokenizer.token(BOS).is_some() {
            return Ok(tokenizer.encode(text)?);
        }
        let bos = tokenizer.bos().into_iter();
        Ok(bos.chain(tokenizer.encode_plain(text)?).collect())
    }
}

/// The records of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dataset {
    /// The file's name without its folder.
    pub name: String,
    /// SHA-256 of its bytes.
    pub sha256: String,
    /// In file order.
    pub records: Vec<Record>,
}

impl Dataset {
    /// Reads a data set.
    ///
    /// # Errors
    /// If the file cannot be read, is no UTF-8, or a line of it is no record.
    pub fn open(path: &Path) -> Result<Self, DatasetError> {
        let bytes =
            std::fs::read(path).map_err(|source| DatasetError::Read { path: path.to_owned(), source })?;
        let text = std::str::from_utf8(&bytes)
            .map_err(|e| DatasetError::NotUtf8 { path: path.to_owned(), offset: e.valid_up_to() })?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let records = if holds_records(path, text) {
            read_lines(path, text)?
        } else {
            vec![Record { kind: plain(), id: name.clone(), text: Some(text.to_owned()), tokens: None }]
        };
        Ok(Self { name, sha256: hex(&Sha256::digest(&bytes)), records })
    }
}

/// By its name, or because its first line is an object with a text or tokens.
fn holds_records(path: &Path, text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let object = serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(first);
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl"))
        || object.is_ok_and(|o| o.contains_key("text") || o.contains_key("tokens"))
}

fn read_lines(path: &Path, text: &str) -> Result<Vec<Record>, DatasetError> {
    let mut records = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let bad = |problem: String| DatasetError::BadLine { path: path.to_owned(), line: number, problem };
        let record: Record = serde_json::from_str(line).map_err(|e| bad(e.to_string()))?;
        if record.text.is_some() == record.tokens.is_some() {
            return Err(bad("found neither or both of `text` and `tokens`, expected one of them".to_owned()));
        }
        records.push(record);
    }
    Ok(records)
}

/// Limits on what is read of a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens of a prompt; longer texts are cut.
    pub context: usize,
    /// Most prompts.
    pub max_prompts: usize,
    /// Most tokens of all prompts; the last one is cut to fit.
    pub max_tokens: u64,
}

/// Cuts the records into prompts of at most [`Limits::context`] tokens, in order. Every part of a text that is cut
/// begins with the beginning-of-sentence token, as every prompt of the model does. A rest of a single token is dropped.
///
/// # Errors
/// If a text cannot be cut into tokens, or a record holds a token that the vocabulary lacks.
pub fn prompts(
    records: &[Record],
    tokenizer: &Tokenizer,
    limits: Limits,
) -> Result<Vec<Vec<u32>>, DatasetError> {
    let mut prompts = Vec::new();
    let mut left = limits.max_tokens;
    for record in records {
        let tokens = record.tokens(tokenizer)?;
        if let Some(&found) = tokens.iter().find(|&&token| token as usize >= tokenizer.n_tokens()) {
            let (id, vocabulary) = (record.id.clone(), tokenizer.n_tokens());
            return Err(DatasetError::UnknownToken { id, found, vocabulary });
        }
        let bos = tokens.first().copied().filter(|&first| Some(first) == tokenizer.bos());
        for mut prompt in cut(&tokens, bos, limits.context.max(2)) {
            if prompts.len() >= limits.max_prompts || left < 2 {
                return Ok(prompts);
            }
            prompt.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            left -= prompt.len() as u64;
            prompts.push(prompt);
        }
    }
    Ok(prompts)
}

/// Parts of at most `context` tokens, each with `bos` in front.
fn cut(tokens: &[u32], bos: Option<u32>, context: usize) -> Vec<Vec<u32>> {
    let body = &tokens[usize::from(bos.is_some())..];
    let room = context - usize::from(bos.is_some());
    let parts = body.chunks(room.max(1)).map(|part| bos.into_iter().chain(part.iter().copied()).collect());
    parts.filter(|prompt: &Vec<u32>| prompt.len() > 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_and_every_part_begins_anew() {
        let tokens = [0, 1, 2, 3, 4, 5];
        assert_eq!(cut(&tokens, Some(0), 3), [vec![0, 1, 2], vec![0, 3, 4], vec![0, 5]]);
        assert_eq!(cut(&tokens, None, 4), [vec![0, 1, 2, 3], vec![4, 5]]);
        assert_eq!(cut(&[0], Some(0), 4), Vec::<Vec<u32>>::new());
    }

    #[test]
    fn records_are_told_from_plain_text_and_bad_lines_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let records =
            Dataset::open(&write("a.txt", "\n{\"text\": \"x\"}\n{\"kind\": \"k\", \"tokens\": [1, 2]}\n"))
                .unwrap();
        assert_eq!(records.records.len(), 2);
        assert_eq!(
            (records.records[0].kind.as_str(), &records.records[1].tokens),
            ("text", &Some(vec![1, 2]))
        );
        let code = Dataset::open(&write("b.c", "{\n  int x;\n}\n")).unwrap();
        assert_eq!((code.records.len(), code.records[0].id.as_str()), (1, "b.c"));
        for (line, expected) in [
            ("{\"text\": 1}", "line 2"),
            ("{}", "neither or both"),
            ("{\"text\": \"x\", \"tokens\": [1]}", "neither or both"),
            ("{\"txt\": \"x\"}", "unknown field `txt`"),
            ("nonsense", "line 2"),
        ] {
            let path = write("c.jsonl", &format!("{{\"text\": \"x\"}}\n{line}\n"));
            let message = Dataset::open(&path).unwrap_err().to_string();
            assert!(message.contains(expected) && message.contains("c.jsonl"), "{message}");
        }
        std::fs::write(folder.path().join("d.txt"), b"ab\xff").unwrap();
        let message = Dataset::open(&folder.path().join("d.txt")).unwrap_err().to_string();
        assert!(message.contains("byte at 2"), "{message}");
    }
}
