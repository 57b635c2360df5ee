//! The user's own files: text, code, conversations and transcripts.

use std::path::{Path, PathBuf};

use runner::chat::{Message, render, to_text};
use runner::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};

use super::{BOS, DatasetError};

/// What a file of the user holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceKind {
    /// Prose, cut at empty lines.
    Text,
    /// Source code, cut at lines.
    Code,
    /// JSON lines, each `{"messages": [{"role": "...", "content": "..."}]}`.
    Chat,
    /// Turns in plain text, each begun by a line `User:`, `Assistant:` or `System:`.
    Transcript,
}

impl SourceKind {
    /// Every kind with its name.
    pub const NAMES: [(&'static str, Self); 4] =
        [("text", Self::Text), ("code", Self::Code), ("chat", Self::Chat), ("transcript", Self::Transcript)];

    /// The kind's name.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

/// A file of the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// What it holds.
    pub kind: SourceKind,
    /// The file.
    pub path: PathBuf,
}

/// What was found in a file of the user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SourceReport {
    /// The file, as given.
    pub path: PathBuf,
    /// What it holds.
    pub kind: SourceKind,
    /// SHA-256 of its bytes.
    pub sha256: String,
    /// Texts in it.
    pub n_texts: usize,
    /// Texts left out because they spell control tokens, which would steer the model.
    pub n_with_control_tokens: usize,
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Turn>,
}

#[derive(Debug, Clone, Deserialize)]
struct Turn {
    role: String,
    #[serde(default)]
    content: String,
    #[serde(default)]
    reasoning_content: String,
}

/// The texts of a file, each at most about `piece_tokens` long where it can be cut. Conversations are rendered with and
/// without thinking in turn.
pub(super) fn texts(
    source: &Source,
    tokenizer: &Tokenizer,
    piece_tokens: usize,
) -> Result<(Vec<String>, SourceReport), DatasetError> {
    let path = &source.path;
    let bytes = std::fs::read(path).map_err(|source| DatasetError::Read { path: path.clone(), source })?;
    let text = std::str::from_utf8(&bytes)
        .map_err(|e| DatasetError::NotUtf8 { path: path.clone(), offset: e.valid_up_to() })?;
    let mut n_with_control_tokens = 0;
    let mut texts = Vec::new();
    match source.kind {
        SourceKind::Text | SourceKind::Code => {
            let separator = if source.kind == SourceKind::Text { "\n\n" } else { "\n" };
            for piece in pieces(text, separator, tokenizer, piece_tokens)? {
                if spells_control_tokens(&piece) {
                    n_with_control_tokens += 1;
                } else {
                    texts.push(piece);
                }
            }
        }
        SourceKind::Chat | SourceKind::Transcript => {
            let conversations = match source.kind {
                SourceKind::Chat => read_chat(path, text)?,
                _ => vec![(1, read_transcript(path, text)?)],
            };
            for (index, (line, turns)) in conversations.into_iter().enumerate() {
                if turns
                    .iter()
                    .any(|t| spells_control_tokens(&t.content) || spells_control_tokens(&t.reasoning_content))
                {
                    n_with_control_tokens += 1;
                    continue;
                }
                let thinking = index % 2 == 0;
                texts.push(to_text(&render(&messages(path, line, &turns)?, thinking, false)));
            }
        }
    }
    let report = SourceReport {
        path: path.clone(),
        kind: source.kind,
        sha256: crate::collect::hex(&<sha2::Sha256 as sha2::Digest>::digest(&bytes)),
        n_texts: texts.len(),
        n_with_control_tokens,
    };
    Ok((texts, report))
}

/// Whether a text spells a token that steers the model.
pub(super) fn spells_control_tokens(text: &str) -> bool {
    text.contains("<｜")
        || text.contains("｜>")
        || text.contains("<think>")
        || text.contains("</think>")
        || text.contains(BOS)
}

/// Cuts at `separator` into pieces of at most `most` tokens; a part that is longer by itself stays whole.
fn pieces(
    text: &str,
    separator: &str,
    tokenizer: &Tokenizer,
    most: usize,
) -> Result<Vec<String>, DatasetError> {
    let mut pieces: Vec<String> = Vec::new();
    let mut n_tokens = 0;
    for part in text.split_inclusive(separator) {
        let n = tokenizer.encode_plain(part)?.len();
        match pieces.last_mut() {
            Some(last) if n_tokens + n <= most => {
                last.push_str(part);
                n_tokens += n;
            }
            _ => {
                pieces.push(part.to_owned());
                n_tokens = n;
            }
        }
    }
    pieces.retain(|piece| !piece.trim().is_empty());
    Ok(pieces)
}

fn read_chat(path: &Path, text: &str) -> Result<Vec<(usize, Vec<Turn>)>, DatasetError> {
    let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(number, line)| match serde_json::from_str::<Conversation>(line) {
            Ok(conversation) => Ok((number, conversation.messages)),
            Err(e) => {
                Err(DatasetError::BadLine { path: path.to_owned(), line: number, problem: e.to_string() })
            }
        })
        .collect()
}

/// Turns begun by `User:`, `Assistant:` or `System:` at the start of a line.
fn read_transcript(path: &Path, text: &str) -> Result<Vec<Turn>, DatasetError> {
    let mut turns: Vec<Turn> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let speaker = line.split_once(':').and_then(|(name, rest)| {
            let role = name.trim().to_ascii_lowercase();
            matches!(role.as_str(), "user" | "assistant" | "system").then_some((role, rest.trim_start()))
        });
        match (speaker, turns.last_mut()) {
            (Some((role, rest)), _) => {
                turns.push(Turn { role, content: rest.to_owned(), reasoning_content: String::new() });
            }
            (None, Some(turn)) => {
                turn.content.push('\n');
                turn.content.push_str(line);
            }
            (None, None) if line.trim().is_empty() => {}
            (None, None) => {
                let problem = "found text before the first turn, expected `User:`, `Assistant:` or `System:`"
                    .to_owned();
                return Err(DatasetError::BadLine { path: path.to_owned(), line: number, problem });
            }
        }
    }
    for turn in &mut turns {
        turn.content.truncate(turn.content.trim_end().len());
    }
    Ok(turns)
}

fn messages<'a>(path: &Path, line: usize, turns: &'a [Turn]) -> Result<Vec<Message<'a>>, DatasetError> {
    let bad = |problem: String| DatasetError::BadLine { path: path.to_owned(), line, problem };
    if turns.is_empty() {
        return Err(bad("found no messages, expected at least one".to_owned()));
    }
    turns
        .iter()
        .map(|turn| match turn.role.as_str() {
            "system" | "developer" => Ok(Message::System(&turn.content)),
            "user" => Ok(Message::User(&turn.content)),
            "assistant" => {
                Ok(Message::Assistant { reasoning: &turn.reasoning_content, content: &turn.content })
            }
            role => Err(bad(format!("found role `{role}`, expected system, user or assistant"))),
        })
        .collect()
}
