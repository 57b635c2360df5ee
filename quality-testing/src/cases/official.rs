//! ds4's official JSON files, a JSON manifest of them, and the raw responses of a chat API.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Alternative, Case, CaseError, Gathering, Position, label_by_date};
use crate::label::SetLabel;
use crate::time::utc_text;

/// `schema` of a manifest.
pub const MANIFEST_SCHEMA: &str = "ds4-test-vector-manifest-v1";
/// `schema` of one case.
pub const CASE_SCHEMA: &str = "ds4-official-logprobs-v1";

#[derive(Debug, Deserialize)]
struct Manifest {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    label: Option<String>,
    prompts: Vec<Listed>,
}

#[derive(Debug, Deserialize)]
struct Listed {
    id: String,
    #[serde(default)]
    prompt_file: Option<String>,
    official_file: String,
    #[serde(default)]
    steps: Option<usize>,
}

#[derive(Debug, Deserialize)]
struct Official {
    id: String,
    #[serde(default)]
    kind: Option<String>,
    model: String,
    #[serde(default)]
    created_at: Option<String>,
    #[serde(default)]
    label: Option<String>,
    prompt: String,
    #[serde(default)]
    request: Value,
    steps: Vec<Step>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Step {
    #[serde(rename = "step")]
    index: usize,
    token: Token,
    logprob: f64,
    top_logprobs: Vec<Top>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Top {
    token: Token,
    logprob: f64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Token {
    text: String,
    #[serde(default)]
    bytes: Option<Vec<u8>>,
}

/// The part of a chat API's response that is used.
#[derive(Debug, Deserialize)]
struct Response {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    created: Option<u64>,
    choices: Vec<Choice>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    message: Message,
    #[serde(default)]
    logprobs: Option<LogProbabilities>,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Message {
    #[serde(default)]
    content: Option<String>,
}

#[derive(Debug, Deserialize)]
struct LogProbabilities {
    #[serde(default)]
    content: Option<Vec<Item>>,
}

#[derive(Debug, Deserialize)]
struct Item {
    token: String,
    #[serde(default)]
    bytes: Option<Vec<u8>>,
    logprob: f64,
    #[serde(default)]
    top_logprobs: Vec<Item>,
}

/// What a raw response says.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The API's name of the model that answered.
    pub model: Option<String>,
    /// When, as `YYYY-MM-DDThh:mm:ssZ`.
    pub created_at: Option<String>,
    /// The text.
    pub content: String,
    /// Why it ended: `stop`, `length`, ...
    pub finish_reason: Option<String>,
    /// Token by token; empty if not asked for.
    pub recorded: Vec<Position>,
}

impl Answer {
    /// The checkpoint that must have answered, where it is known.
    pub fn label(&self) -> Option<SetLabel> {
        label_by_date(self.model.as_deref()?, self.created_at.as_deref()?)
    }
}

/// Reads a raw response of a chat API.
///
/// # Errors
/// If it is no JSON, cut off, or holds no answer; `path` is for the message.
pub fn read_response(text: &str, path: &Path) -> Result<Answer, CaseError> {
    let response: Response = parse(text, path)?;
    let choice = response.choices.into_iter().next().ok_or_else(|| CaseError::Malformed {
        path: path.to_owned(),
        place: "`choices`".into(),
        found: "none".into(),
        expected: "an answer".into(),
    })?;
    let items = choice.logprobs.and_then(|l| l.content).unwrap_or_default();
    let bytes = |item: &mut Item| item.bytes.take().unwrap_or_else(|| item.token.clone().into_bytes());
    let recorded = items.into_iter().map(|mut item| {
        let alternatives = item.top_logprobs.iter_mut();
        let top = alternatives.map(|t| Alternative { token: bytes(t), log_probability: t.logprob }).collect();
        Position { token: bytes(&mut item), log_probability: item.logprob, top }
    });
    Ok(Answer {
        model: response.model,
        created_at: response.created.map(utc_text),
        content: choice.message.content.unwrap_or_default(),
        finish_reason: choice.finish_reason,
        recorded: recorded.collect(),
    })
}

/// A manifest, or one case alone.
pub(super) fn read(text: &str, set: &mut Gathering) -> Result<(), CaseError> {
    let value: Value = parse(text, &set.path)?;
    match value.get("schema").and_then(Value::as_str) {
        Some(MANIFEST_SCHEMA) => read_manifest(&parse(text, &set.path)?, set),
        Some(CASE_SCHEMA) => {
            let path = set.path.clone();
            read_case(&parse(text, &path)?, &path, set)
        }
        found => Err(CaseError::Malformed {
            path: set.path.clone(),
            place: "`schema`".into(),
            found: found.map_or("none".into(), |schema| format!("`{schema}`")),
            expected: format!("`{MANIFEST_SCHEMA}` or `{CASE_SCHEMA}`"),
        }),
    }
}

fn read_manifest(manifest: &Manifest, set: &mut Gathering) -> Result<(), CaseError> {
    if let Some(label) = &manifest.label {
        set.state_label(label)?;
    }
    for listed in &manifest.prompts {
        let place = format!("case `{}`", listed.id);
        let (path, text) = set.read_named(&place, &listed.official_file)?;
        let case: Official = parse(&text, &path)?;
        let differs = |place: &str, found: String, expected: String| CaseError::Malformed {
            path: path.clone(),
            place: place.to_owned(),
            found,
            expected,
        };
        if case.id != listed.id {
            return Err(differs("`id`", format!("`{}`", case.id), format!("`{}`", listed.id)));
        }
        if let Some(model) = manifest.model.as_ref().filter(|model| **model != case.model) {
            return Err(CaseError::MixedLabels {
                path,
                id: case.id,
                found: case.model,
                before: model.clone(),
            });
        }
        if let Some(steps) = listed.steps.filter(|&steps| steps != case.steps.len()) {
            return Err(CaseError::Truncated {
                path,
                place: "`steps`".into(),
                found: format!("{} steps", case.steps.len()),
                expected: format!("{steps}, as the manifest says"),
            });
        }
        if let Some(file) = &listed.prompt_file {
            let (_, prompt) = set.read_named(&place, file)?;
            if prompt != case.prompt {
                let text = |text: &str| format!("{} bytes of another text", text.len());
                return Err(differs(
                    "`prompt`",
                    text(&case.prompt),
                    format!("the {} of `{file}`", prompt.len()),
                ));
            }
        }
        read_case(&case, &path, set)?;
    }
    Ok(())
}

fn read_case(case: &Official, path: &Path, set: &mut Gathering) -> Result<(), CaseError> {
    if case.request.pointer("/thinking/type").and_then(Value::as_str) == Some("enabled") {
        return Err(CaseError::Malformed {
            path: path.to_owned(),
            place: "`request.thinking`".into(),
            found: "enabled".into(),
            expected: "disabled: cases are scored without thinking".into(),
        });
    }
    let mut recorded = Vec::new();
    for (i, step) in case.steps.iter().enumerate() {
        if step.index != i {
            return Err(CaseError::Malformed {
                path: path.to_owned(),
                place: format!("`steps[{i}].step`"),
                found: step.index.to_string(),
                expected: i.to_string(),
            });
        }
        let top = step.top_logprobs.iter();
        let top = top.map(|t| Alternative { token: bytes_of(&t.token), log_probability: t.logprob });
        recorded.push(Position {
            token: bytes_of(&step.token),
            log_probability: step.logprob,
            top: top.collect(),
        });
    }
    let label = match (&case.label, &case.created_at) {
        (Some(label), _) => Some(SetLabel { label: label.clone(), stated: true }),
        (None, Some(day)) => label_by_date(&case.model, day),
        (None, None) => None,
    };
    let continuation = recorded.iter().flat_map(|p| p.token.iter().copied()).collect();
    let case = Case {
        id: case.id.clone(),
        kind: case.kind.clone(),
        prompt: case.prompt.clone(),
        continuation,
        recorded,
    };
    set.add(case, label)
}

fn bytes_of(token: &Token) -> Vec<u8> {
    token.bytes.clone().unwrap_or_else(|| token.text.clone().into_bytes())
}

/// A case in the form of ds4's official files, with the label as one more key. `source`: who answered.
pub fn to_json(case: &Case, label: &str, source: &str, details: &Value) -> Value {
    let token = |bytes: &[u8]| Token {
        text: String::from_utf8_lossy(bytes).into_owned(),
        bytes: Some(bytes.to_vec()),
    };
    let steps: Vec<Step> = case
        .recorded
        .iter()
        .enumerate()
        .map(|(index, position)| Step {
            index,
            token: token(&position.token),
            logprob: position.log_probability,
            top_logprobs: position
                .top
                .iter()
                .map(|t| Top { token: token(&t.token), logprob: t.log_probability })
                .collect(),
        })
        .collect();
    json!({
        "schema": CASE_SCHEMA,
        "source": source,
        "model": label,
        "label": label,
        "details": details,
        "id": case.id,
        "kind": case.kind,
        "prompt": case.prompt,
        "request": { "temperature": 0, "thinking": { "type": "disabled" } },
        "message": { "role": "assistant", "content": String::from_utf8_lossy(&case.continuation) },
        "logits_available": false,
        "steps": steps,
    })
}

/// Parses JSON; an end that comes too early is told apart from other faults.
fn parse<T: serde::de::DeserializeOwned>(text: &str, path: &Path) -> Result<T, CaseError> {
    serde_json::from_str(text).map_err(|e| {
        let place = format!("line {} column {}", e.line(), e.column());
        if e.is_eof() {
            let found = format!("the end after {} bytes", text.len());
            return CaseError::Truncated {
                path: path.to_owned(),
                place,
                found,
                expected: "more JSON".into(),
            };
        }
        CaseError::Malformed {
            path: path.to_owned(),
            place,
            found: e.to_string(),
            expected: "JSON of a recorded case".into(),
        }
    })
}
