//! Recorded continuations: what a hosted model answered to a prompt, and the log-probabilities it gave.
//!
//! Three forms are read as they are, told apart by content: ds4's manifest in tab-separated columns with one file a prompt,
//! continuation and raw response ([`tsv`]); its official JSON files, alone or listed in a JSON manifest ([`official`]); and its
//! compact `.vec` file ([`mod@vec`]). A folder is read by the `manifest.tsv` or `manifest.json` in it.

pub mod official;
pub mod tsv;
pub mod vec;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::label::{SetLabel, is_same};

/// Largest file of a case set that is read, bytes.
const LARGEST_FILE: u64 = 256 << 20;

/// Log-probabilities at or below this stand for "not told": at temperature 0 the official API gives the chosen token 0
/// and every other -9999.
pub const NOT_TOLD: f64 = -9000.0;

/// One recorded answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// Name, unique in its set.
    pub id: String,
    /// What sort of prompt it is, where the set says.
    pub kind: Option<String>,
    /// The user's turn.
    pub prompt: String,
    /// The answer, thinking off. Not whole UTF-8 where the token limit cut a character.
    pub continuation: Vec<u8>,
    /// Token by token, where it was recorded.
    pub recorded: Vec<Position>,
}

/// One recorded token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Bytes of the token.
    pub token: Vec<u8>,
    /// Its natural-log probability.
    pub log_probability: f64,
    /// The most probable tokens, best first.
    pub top: Vec<Alternative>,
}

/// A token that a recorded position lists.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// Bytes of the token; empty where the recording does not give them.
    pub token: Vec<u8>,
    /// Natural-log probability; see [`NOT_TOLD`].
    pub log_probability: f64,
}

/// A set of cases of one checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseSet {
    /// The file it was opened by.
    pub path: PathBuf,
    /// Which checkpoint answered, where it is known.
    pub label: Option<SetLabel>,
    /// At least one, in the set's order.
    pub cases: Vec<Case>,
}

/// Why a case set cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaseError {
    /// A file cannot be read.
    #[error("cannot read `{path}`")]
    Read {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A file that a manifest names is not where the manifest says, nor beside it.
    #[error(
        "`{path}` {place} names `{file}`, which is neither under `{folder}` nor under a folder above it; keep the set's files together"
    )]
    MissingFile {
        /// The manifest.
        path: PathBuf,
        /// Where in it.
        place: String,
        /// The name there.
        file: String,
        /// The manifest's folder.
        folder: PathBuf,
    },
    /// Nothing in it.
    #[error("`{path}` holds no cases")]
    NoCases {
        /// Which.
        path: PathBuf,
    },
    /// Something is not what it must be.
    #[error("`{path}` {place}: found {found}, expected {expected}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Line or field.
        place: String,
        /// What is there.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// The end is missing.
    #[error("`{path}` {place} is cut off: found {found}, expected {expected}; get the file again")]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Line or field.
        place: String,
        /// What is there.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// Two cases have one name.
    #[error("`{path}` has case `{id}` twice; every case counts once, so remove one")]
    Duplicate {
        /// The file.
        path: PathBuf,
        /// The name.
        id: String,
    },
    /// A prompt or an answer is empty.
    #[error(
        "`{path}`: the {part} of case `{id}` is empty; nothing can be scored by it, so record it again or remove it"
    )]
    ZeroLength {
        /// The file.
        path: PathBuf,
        /// The case.
        id: String,
        /// Prompt or continuation.
        part: &'static str,
    },
    /// The cases are of several checkpoints.
    #[error(
        "`{path}` mixes checkpoints: case `{id}` is of `{found}`, those before of `{before}`; split the set by checkpoint"
    )]
    MixedLabels {
        /// The file.
        path: PathBuf,
        /// The first case of another checkpoint.
        id: String,
        /// Its label.
        found: String,
        /// The label of the others.
        before: String,
    },
}

impl CaseSet {
    /// Opens a case set in any of the forms. `label`: the checkpoint, where the user states it.
    ///
    /// # Errors
    /// If a file cannot be read, is malformed or cut off, or cases are empty, doubled, or of several checkpoints.
    pub fn open(path: &Path, label: Option<&str>) -> Result<Self, CaseError> {
        let path = if path.is_dir() {
            let names = ["manifest.tsv", "manifest.json"];
            let found = names.iter().map(|name| path.join(name)).find(|path| path.is_file());
            found.ok_or_else(|| CaseError::Malformed {
                path: path.to_owned(),
                place: "as a folder".into(),
                found: "no manifest".into(),
                expected: "`manifest.tsv` or `manifest.json`".into(),
            })?
        } else {
            path.to_owned()
        };
        let text = read_text(&path)?;
        let mut gathering = Gathering::new(&path);
        if text.trim_start().starts_with('{') {
            official::read(&text, &mut gathering)?;
        } else if text.starts_with(vec::FIRST_LINE_PREFIX) {
            vec::read(&text, &mut gathering)?;
        } else {
            tsv::read(&text, &mut gathering)?;
        }
        gathering.finish(label)
    }

    /// SHA-256 of names, prompts and continuations: two sets with the same one ask the same.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        for case in &self.cases {
            for part in [case.id.as_bytes(), case.prompt.as_bytes(), &case.continuation] {
                hash.update((part.len() as u64).to_le_bytes());
                hash.update(part);
            }
        }
        crate::hash::hex(&hash.finalize())
    }
}

/// A case set while it is read.
pub(crate) struct Gathering {
    pub(crate) path: PathBuf,
    /// As the set itself states it.
    stated: Option<String>,
    /// What the cases say, with the first that says so.
    by_case: Option<SetLabel>,
    cases: Vec<Case>,
    ids: BTreeSet<String>,
}

impl Gathering {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), stated: None, by_case: None, cases: Vec::new(), ids: BTreeSet::new() }
    }

    /// Takes the label that the whole set states.
    pub(crate) fn state_label(&mut self, label: &str) -> Result<(), CaseError> {
        match &self.stated {
            Some(before) if !is_same(before, label) => Err(CaseError::MixedLabels {
                path: self.path.clone(),
                id: "(the set's own label)".into(),
                found: label.to_owned(),
                before: before.clone(),
            }),
            _ => {
                self.stated = Some(label.to_owned());
                Ok(())
            }
        }
    }

    /// Takes a case and what it says about its checkpoint.
    pub(crate) fn add(&mut self, case: Case, label: Option<SetLabel>) -> Result<(), CaseError> {
        for (part, is_empty) in
            [("prompt", case.prompt.is_empty()), ("continuation", case.continuation.is_empty())]
        {
            if is_empty {
                return Err(CaseError::ZeroLength { path: self.path.clone(), id: case.id, part });
            }
        }
        if !self.ids.insert(case.id.clone()) {
            return Err(CaseError::Duplicate { path: self.path.clone(), id: case.id });
        }
        if let Some(label) = label {
            match &self.by_case {
                Some(before) if !is_same(&before.label, &label.label) => {
                    return Err(CaseError::MixedLabels {
                        path: self.path.clone(),
                        id: case.id,
                        found: label.label,
                        before: before.label.clone(),
                    });
                }
                Some(_) => {}
                None => self.by_case = Some(label),
            }
        }
        self.cases.push(case);
        Ok(())
    }

    fn finish(self, by_user: Option<&str>) -> Result<CaseSet, CaseError> {
        if self.cases.is_empty() {
            return Err(CaseError::NoCases { path: self.path });
        }
        let stated = |label: &str| SetLabel { label: label.to_owned(), stated: true };
        // What cases say of themselves stands against what is said of the whole set, whoever says it.
        let of_set = by_user.or(self.stated.as_deref());
        if let (Some(of_set), Some(of_case)) = (of_set, &self.by_case)
            && of_case.stated
            && !is_same(of_set, &of_case.label)
        {
            return Err(CaseError::MixedLabels {
                id: self.cases[0].id.clone(),
                path: self.path,
                found: of_case.label.clone(),
                before: of_set.to_owned(),
            });
        }
        Ok(CaseSet { label: of_set.map(stated).or(self.by_case), path: self.path, cases: self.cases })
    }

    /// Reads a file that the set names: as given, under the set's folder or a folder above it, or by the end of its name
    /// under the set's folder, as ds4 writes paths from the root of its own repository.
    pub(crate) fn read_named(&self, place: &str, name: &str) -> Result<(PathBuf, String), CaseError> {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let name_path = Path::new(name);
        let parts: Vec<_> = name_path.components().collect();
        let ends = (1..parts.len()).map(|n| folder.join(parts[n..].iter().collect::<PathBuf>()));
        let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let above: Vec<PathBuf> = absolute.ancestors().map(|folder| folder.join(name_path)).collect();
        let found = above.into_iter().chain(ends).find(|path| path.is_file());
        let path = found.ok_or_else(|| CaseError::MissingFile {
            path: self.path.clone(),
            place: place.to_owned(),
            file: name.to_owned(),
            folder: folder.to_owned(),
        })?;
        let text = read_text(&path)?;
        Ok((path, text))
    }
}

/// The label that an API model and a date imply.
pub(crate) fn label_by_date(model: &str, day: &str) -> Option<SetLabel> {
    let label = crate::label::served(model, day)?;
    Some(SetLabel { label: label.to_owned(), stated: false })
}

/// The text of a file of a set.
pub(crate) fn read_text(path: &Path) -> Result<String, CaseError> {
    let io = |source| CaseError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(CaseError::Malformed {
            path: path.to_owned(),
            place: "as a whole".into(),
            found: format!("more than {LARGEST_FILE} bytes"),
            expected: "a file of a case set".into(),
        });
    }
    String::from_utf8(bytes).map_err(|e| CaseError::Malformed {
        path: path.to_owned(),
        place: format!("byte {}", e.utf8_error().valid_up_to()),
        found: "bytes that are no UTF-8".into(),
        expected: "text".into(),
    })
}
