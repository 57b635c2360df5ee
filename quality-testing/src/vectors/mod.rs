//! Test vectors: what a model predicts behind fixed prompts, recorded from a trusted run and checked on another build of it.
//!
//! A set is a folder in the form of ds4's: `manifest.json`, `prompts/ID.txt`, `official/ID.official.json`; and `SHA256SUMS` over all of
//! them, by which [`fetch`] gets a set from elsewhere.

mod fetch;

use std::path::{Path, PathBuf};

use runner::chat::{Message, render};
use runner::logits::{argmax, log_probability, top_log_probabilities};
use runner::tokenizer::Tokenizer;
use runner::{Model, RunnerError};
use serde::Serialize;
use serde_json::json;

pub use fetch::{FetchError, fetch};

use crate::cases::official::{MANIFEST_SCHEMA, to_json};
use crate::cases::{Alternative, Case, NOT_TOLD, Position};
use crate::collect::Prompt;
use crate::files::write_whole;
use crate::hash::sha256;
use crate::scoring::{Prepared, Vocabulary, read};

/// Name of the file that lists the hashes of a set.
pub const SUMS: &str = "SHA256SUMS";

/// How far predictions may lie from the recorded ones.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bounds {
    /// Largest difference of a log-probability, nats.
    pub log_probability: f64,
    /// Alternatives that were recorded as less probable than this are not compared: in the tail nothing hangs on them.
    pub least_probability: f64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { log_probability: 0.05, least_probability: 1e-3 }
    }
}

/// One case checked.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckedCase {
    /// Name.
    pub id: String,
    /// Recorded tokens.
    pub n_steps: usize,
    /// Log-probabilities that were compared.
    pub n_compared: usize,
    /// Largest difference among them, nats.
    pub largest_difference: f64,
    /// Everything out of bounds, one line each; the case passes without any.
    pub faults: Vec<String>,
}

/// Checks a model against recorded positions, the recorded tokens being given.
///
/// A step passes if the most probable token is the recorded one (or one that was recorded as equally probable within twice the
/// bound), and every recorded alternative that is told and probable enough lies within the bound.
///
/// # Errors
/// As [`Model::read_texts`].
pub fn check(
    model: &Model,
    cases: &[Prepared<'_>],
    tokenizer: &Tokenizer,
    vocabulary: &Vocabulary,
    bounds: Bounds,
) -> Result<Vec<CheckedCase>, RunnerError> {
    let mut checked: Vec<CheckedCase> = cases.iter().map(unchecked).collect();
    read(model, cases, &mut |i, step, logits| {
        if cases[i].aligned {
            let position = &cases[i].case.recorded[step];
            check_step(&mut checked[i], step, position, logits, tokenizer, vocabulary, bounds);
        }
    })?;
    Ok(checked)
}

fn unchecked(case: &Prepared<'_>) -> CheckedCase {
    let n_steps = case.case.recorded.len();
    let fault = if n_steps == 0 {
        Some("nothing was recorded of it but the text".to_owned())
    } else if case.aligned {
        None
    } else {
        let found = case.target.len();
        Some(format!("recorded as {n_steps} tokens, this tokenizer makes {found} others of the text"))
    };
    CheckedCase {
        id: case.case.id.clone(),
        n_steps,
        n_compared: 0,
        largest_difference: 0.0,
        faults: fault.into_iter().collect(),
    }
}

fn check_step(
    checked: &mut CheckedCase,
    step: usize,
    position: &Position,
    logits: &[f32],
    tokenizer: &Tokenizer,
    vocabulary: &Vocabulary,
    bounds: Bounds,
) {
    let best = argmax(logits);
    let recorded = |token: u32| {
        position.top.iter().find(|a| vocabulary.token(&a.token) == Some(token)).map(|a| a.log_probability)
    };
    if tokenizer.token_bytes(best) != position.token {
        let is_tie = recorded(best)
            .is_some_and(|other| position.log_probability - other <= 2.0 * bounds.log_probability);
        if !is_tie {
            checked.faults.push(format!(
                "step {step}: most probable is {:?}, recorded is {:?}",
                tokenizer.decode(&[best]),
                String::from_utf8_lossy(&position.token)
            ));
        }
    }
    let told = position
        .top
        .iter()
        .filter(|a| a.log_probability > NOT_TOLD && a.log_probability.exp() >= bounds.least_probability);
    for alternative in told {
        let Some(token) = vocabulary.token(&alternative.token) else { continue };
        let difference = log_probability(logits, token) - alternative.log_probability;
        checked.n_compared += 1;
        checked.largest_difference = checked.largest_difference.max(difference.abs());
        if difference.abs() > bounds.log_probability {
            checked.faults.push(format!(
                "step {step}: log-probability of {:?} is {:.5}, recorded is {:.5}",
                String::from_utf8_lossy(&alternative.token),
                alternative.log_probability + difference,
                alternative.log_probability
            ));
        }
    }
}

/// Why a set was not recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The model cannot be run.
    #[error(transparent)]
    Runner(#[from] RunnerError),
    /// There is a set already.
    #[error(
        "`{path}` exists; recording over a set would lose what it was recorded from: choose another folder"
    )]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The model says nothing.
    #[error("the model ends its answer to prompt `{id}` before it begins; change the prompt")]
    EmptyAnswer {
        /// The prompt.
        id: String,
    },
    /// A file cannot be written.
    #[error("cannot write `{path}`")]
    Io {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// Records a set: `n_steps` greedy tokens behind every prompt, without thinking, with the `n_top` best alternatives of each.
///
/// The folder appears when everything is in it.
///
/// # Errors
/// If it exists or cannot be written, or the model cannot be run or answers nothing.
pub fn record(
    model: &Model,
    tokenizer: &Tokenizer,
    prompts: &[Prompt],
    n_steps: usize,
    n_top: usize,
    label: &str,
    folder: &Path,
) -> Result<(), RecordError> {
    if folder.exists() {
        return Err(RecordError::Exists { path: folder.to_owned() });
    }
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    let provenance = model.provenance();
    let details = json!({ "numerics": provenance.numerics, "activations": provenance.activations });
    let pretty = |value: &serde_json::Value| format!("{value:#}\n").into_bytes();
    let mut listed = Vec::new();
    for prompt in prompts {
        let case = record_case(model, tokenizer, prompt, n_steps, n_top)?;
        let (text, official) =
            (format!("prompts/{}.txt", prompt.id), format!("official/{}.official.json", prompt.id));
        listed.push(json!({
            "id": prompt.id, "kind": prompt.kind, "prompt_file": text, "official_file": official,
            "prompt_chars": prompt.text.chars().count(), "steps": case.recorded.len(),
        }));
        files.push((official, pretty(&to_json(&case, label, "ggsmith", &details))));
        files.push((text, prompt.text.clone().into_bytes()));
    }
    let manifest = json!({
        "schema": MANIFEST_SCHEMA, "source": "ggsmith", "model": label, "label": label,
        "top_logprobs": n_top, "max_tokens": n_steps, "prompts": listed,
    });
    files.push(("manifest.json".to_owned(), pretty(&manifest)));
    files.sort();
    let mut sums = String::new();
    for (name, bytes) in &files {
        sums.push_str(&format!("{}  {name}\n", sha256(bytes)));
    }
    files.push((SUMS.to_owned(), sums.into_bytes()));
    write_folder(folder, &files).map_err(|(path, source)| RecordError::Io { path, source })
}

fn record_case(
    model: &Model,
    tokenizer: &Tokenizer,
    prompt: &Prompt,
    n_steps: usize,
    n_top: usize,
) -> Result<Case, RecordError> {
    let tokens = tokenizer.encode_chat(&render(&[Message::User(&prompt.text)], false, true))?;
    let mut session = model.session();
    let mut logits = session.prefill(&tokens)?;
    let mut recorded = Vec::new();
    while recorded.len() < n_steps {
        let token = argmax(&logits);
        // A control token stands for no text: the end of the answer, or a model that has lost its way.
        if tokenizer.is_control(token) {
            break;
        }
        let best = top_log_probabilities(&logits, n_top).into_iter();
        let top =
            best.map(|(token, p)| Alternative { token: tokenizer.token_bytes(token), log_probability: p });
        recorded.push(Position {
            token: tokenizer.token_bytes(token),
            log_probability: log_probability(&logits, token),
            top: top.collect(),
        });
        if recorded.len() < n_steps {
            logits = session.decode(token)?;
        }
    }
    if recorded.is_empty() {
        return Err(RecordError::EmptyAnswer { id: prompt.id.clone() });
    }
    Ok(Case {
        id: prompt.id.clone(),
        kind: prompt.kind.clone(),
        prompt: prompt.text.clone(),
        continuation: recorded.iter().flat_map(|p| p.token.iter().copied()).collect(),
        recorded,
    })
}

/// Writes a folder beside its name and renames it. `files`: names under it, and contents.
fn write_folder(folder: &Path, files: &[(String, Vec<u8>)]) -> Result<(), (PathBuf, std::io::Error)> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |e| (path, e)
    };
    let parent = folder.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside = tempfile::tempdir_in(parent).map_err(at(parent))?;
    // The folder of a temporary name is for its owner only; what is in it is for everybody.
    let inner = beside.path().join("set");
    for (name, bytes) in files {
        let path = inner.join(name);
        let within = path.parent().unwrap_or(&inner);
        std::fs::create_dir_all(within).map_err(at(within))?;
        write_whole(&path, bytes).map_err(at(&path))?;
    }
    std::fs::rename(&inner, folder).map_err(at(folder))
}
