//! The tokenizer and chat template of a checkpoint, as GGUF metadata has them.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::{Checkpoint, CheckpointError, read_json};
use crate::gguf::Metadata;

/// `tokenizer.ggml.model` of byte-level BPE.
const MODEL: &str = "gpt2";
/// `tokenizer.ggml.pre` of the release's pre-tokenizer.
const PRE_TOKENIZER: &str = "joyai-llm";
/// File of a checkpoint with the tokenizer's special tokens and, in some, the chat template.
const SETTINGS: &str = "tokenizer_config.json";
/// The template that is used where a release ships none.
const OWN_TEMPLATE: &str = include_str!("chat_template.jinja");

/// What a token is, by the numbers of `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum TokenType {
    /// Part of ordinary text.
    Normal = 1,
    /// Steers the model and stands for no text.
    Control = 3,
    /// Added to the vocabulary as a whole.
    UserDefined = 4,
    /// Fills the vocabulary up to its size.
    Unused = 5,
}

/// A vocabulary with its merges and special tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokenizer {
    /// Text of each token, bytes as byte-level BPE writes them.
    pub tokens: Vec<String>,
    /// Type of each token.
    pub token_types: Vec<TokenType>,
    /// Merges by rank, each two pieces with a space between.
    pub merges: Vec<String>,
    /// First token of a text.
    pub bos_token_id: Option<u32>,
    /// Last token of an answer.
    pub eos_token_id: Option<u32>,
    /// Token that fills batches.
    pub padding_token_id: Option<u32>,
    /// Whether encoding puts the first token in front by itself.
    pub add_bos_token: Option<bool>,
    /// Whether encoding puts the last token behind by itself.
    pub add_eos_token: Option<bool>,
}

/// A Jinja chat template and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTemplate {
    /// The template.
    pub text: String,
    /// File of the checkpoint, or `ggsmith` for the one that comes with this program.
    pub source: &'static str,
}

/// The pre-tokenizer of the release, as its `tokenizer.json` states it.
pub fn release_pre_tokenizer() -> Value {
    serde_json::from_str(include_str!("pre_tokenizer.json"))
        .expect("the file that comes with this program is JSON")
}

impl Tokenizer {
    /// Reads `tokenizer.json` and, for special tokens, `tokenizer_config.json` and `config.json`.
    ///
    /// # Errors
    /// If a file does not parse, the tokenizer is not byte-level BPE with the release's pre-tokenizer, ids clash, or there
    /// are more tokens than the model has. Fewer are filled up with unused ones.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let path = checkpoint.folder().join("tokenizer.json");
        let json = read_json(&path)?;
        let settings = optional_json(&checkpoint.folder().join(SETTINGS))?.unwrap_or(Value::Null);
        let n_tokens = checkpoint.hyper_parameters().vocab_size;
        Self::from_json(&json, &settings, checkpoint.config(), n_tokens)
            .map_err(|problem| CheckpointError::Tokenizer { path, problem })
    }

    /// From the JSON of `tokenizer.json`, `tokenizer_config.json` and `config.json`, or what is wrong with the first.
    pub(crate) fn from_json(
        json: &Value,
        settings: &Value,
        config: &Value,
        n_tokens: u64,
    ) -> Result<Self, String> {
        let model = json.get("model").and_then(Value::as_object).ok_or("has no `model` object")?;
        if model.get("type").and_then(Value::as_str) != Some("BPE") {
            return Err(format!("has model type {}, expected \"BPE\"", json["model"]["type"]));
        }
        check_pre_tokenizer(json.get("pre_tokenizer").unwrap_or(&Value::Null))?;
        let added = json.get("added_tokens").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let (tokens, token_types) = vocabulary(model, added, n_tokens)?;
        let id_of = |text: &str| tokens.iter().position(|token| token == text).map(|id| id as u32);
        let special = |name: &str| {
            let setting = &settings[name];
            let text = setting.as_str().or_else(|| setting["content"].as_str());
            text.and_then(id_of).or_else(|| {
                let id = config.get(format!("{name}_id")).and_then(Value::as_u64)?;
                u32::try_from(id).ok().filter(|id| u64::from(*id) < n_tokens)
            })
        };
        Ok(Self {
            merges: merges(model)?,
            bos_token_id: special("bos_token"),
            eos_token_id: special("eos_token"),
            padding_token_id: special("pad_token"),
            add_bos_token: settings["add_bos_token"].as_bool(),
            add_eos_token: settings["add_eos_token"].as_bool(),
            tokens,
            token_types,
        })
    }
}

/// Key that says where the chat template comes from.
const TEMPLATE_SOURCE_KEY: &str = "ggsmith.chat_template_source";

/// `tokenizer.*` metadata of a checkpoint: vocabulary, merges, special tokens, chat template and where that comes from.
///
/// # Errors
/// As [`Tokenizer::of`] and [`ChatTemplate::of`].
pub fn metadata(checkpoint: &Checkpoint) -> Result<Metadata, CheckpointError> {
    Ok(to_metadata(Tokenizer::of(checkpoint)?, ChatTemplate::of(checkpoint)?))
}

/// The keys of [`metadata`].
pub(crate) fn to_metadata(tokenizer: Tokenizer, template: ChatTemplate) -> Metadata {
    let mut metadata = Metadata::default();
    metadata.set("tokenizer.ggml.model", MODEL);
    metadata.set("tokenizer.ggml.pre", PRE_TOKENIZER);
    metadata.set("tokenizer.ggml.tokens", tokenizer.tokens);
    let types: Vec<i32> = tokenizer.token_types.iter().map(|kind| *kind as i32).collect();
    metadata.set("tokenizer.ggml.token_type", types);
    metadata.set("tokenizer.ggml.merges", tokenizer.merges);
    for (key, id) in [
        ("tokenizer.ggml.bos_token_id", tokenizer.bos_token_id),
        ("tokenizer.ggml.eos_token_id", tokenizer.eos_token_id),
        ("tokenizer.ggml.padding_token_id", tokenizer.padding_token_id),
    ] {
        if let Some(id) = id {
            metadata.set(key, id);
        }
    }
    for (key, adds) in [
        ("tokenizer.ggml.add_bos_token", tokenizer.add_bos_token),
        ("tokenizer.ggml.add_eos_token", tokenizer.add_eos_token),
    ] {
        if let Some(adds) = adds {
            metadata.set(key, adds);
        }
    }
    metadata.set("tokenizer.chat_template", template.text);
    metadata.set(TEMPLATE_SOURCE_KEY, template.source);
    metadata
}

/// The sampling that a checkpoint recommends in `generation_config.json`, as `general.sampling.*`.
///
/// # Errors
/// If the file is there but does not parse.
pub fn sampling_metadata(checkpoint: &Checkpoint) -> Result<Metadata, CheckpointError> {
    let settings = optional_json(&checkpoint.folder().join("generation_config.json"))?.unwrap_or(Value::Null);
    let mut metadata = Metadata::default();
    for (field, key) in [("top_p", "general.sampling.top_p"), ("temperature", "general.sampling.temp")] {
        if let Some(number) = settings[field].as_f64().map(|x| x as f32).filter(|x| x.is_finite()) {
            metadata.set(key, number);
        }
    }
    Ok(metadata)
}

impl ChatTemplate {
    /// The checkpoint's own template (`chat_template.jinja`, else `chat_template` in `tokenizer_config.json`), or this
    /// program's where the release ships none.
    ///
    /// # Errors
    /// If a file is there but cannot be read.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        const FILE: &str = "chat_template.jinja";
        let path = checkpoint.folder().join(FILE);
        if path.exists() {
            let text = fs::read_to_string(&path).map_err(|source| CheckpointError::Io { path, source })?;
            return Ok(Self { text, source: FILE });
        }
        let settings = optional_json(&checkpoint.folder().join(SETTINGS))?;
        Ok(Self::from_settings(&settings.unwrap_or(Value::Null)))
    }

    /// The template in the JSON of `tokenizer_config.json`, or this program's.
    pub(crate) fn from_settings(settings: &Value) -> Self {
        match template_in(&settings["chat_template"]) {
            Some(text) => Self { text: text.to_owned(), source: SETTINGS },
            None => Self { text: OWN_TEMPLATE.to_owned(), source: "ggsmith" },
        }
    }
}

/// The template in a setting that is text, or a list of named templates.
fn template_in(setting: &Value) -> Option<&str> {
    setting.as_str().or_else(|| {
        let list = setting.as_array()?;
        list.iter().find(|entry| entry["name"] == "default")?["template"].as_str()
    })
}

fn optional_json(path: &Path) -> Result<Option<Value>, CheckpointError> {
    if path.exists() { read_json(path).map(Some) } else { Ok(None) }
}

/// Refuses a pre-tokenizer that splits text in another way than the one that `tokenizer.ggml.pre` will name.
fn check_pre_tokenizer(found: &Value) -> Result<(), String> {
    let steps = |value: &Value| -> Vec<Value> {
        let mut steps = value["pretokenizers"].as_array().cloned().unwrap_or_default();
        for step in steps.iter_mut().filter_map(Value::as_object_mut) {
            // Changes reported offsets, not pieces.
            step.shift_remove("trim_offsets");
        }
        steps
    };
    let (found, wanted) = (steps(found), steps(&release_pre_tokenizer()));
    if found.len() != wanted.len() {
        return Err(format!("has {} pre-tokenizer steps, DeepSeek V4's has {}", found.len(), wanted.len()));
    }
    match found.iter().zip(&wanted).position(|(found, wanted)| found != wanted) {
        None => Ok(()),
        Some(i) => Err(format!(
            "pre-tokenizer step {i} is {}, DeepSeek V4's is {}; is this another model's tokenizer?",
            found[i], wanted[i]
        )),
    }
}

/// Texts and types of all tokens, filled up to `n_tokens`.
fn vocabulary(
    model: &Map<String, Value>,
    added: &[Value],
    n_tokens: u64,
) -> Result<(Vec<String>, Vec<TokenType>), String> {
    let listed = model.get("vocab").and_then(Value::as_object).ok_or("has no `model.vocab` object")?;
    let mut slots: Vec<Option<(String, TokenType)>> = vec![None; n_tokens as usize];
    let mut place = |text: &str, id: Option<u64>, kind: TokenType| -> Result<(), String> {
        let id = id.ok_or_else(|| format!("token `{text}` has no whole number as id"))?;
        let slot = usize::try_from(id).ok().and_then(|id| slots.get_mut(id)).ok_or_else(|| {
            format!("token `{text}` has id {id}, but config.json says that the model has {n_tokens} tokens")
        })?;
        match slot {
            Some((other, _)) if other != text => {
                Err(format!("tokens `{other}` and `{text}` both have id {id}"))
            }
            _ => {
                *slot = Some((text.to_owned(), kind));
                Ok(())
            }
        }
    };
    for (text, id) in listed {
        place(text, id.as_u64(), TokenType::Normal)?;
    }
    for token in added {
        let text = token["content"].as_str().ok_or("an entry of `added_tokens` has no `content`")?;
        let special = token["special"].as_bool().unwrap_or(false) || looks_special(text);
        let kind = if special { TokenType::Control } else { TokenType::UserDefined };
        place(text, token["id"].as_u64(), kind)?;
    }
    let unused = |id: usize| (format!("[PAD{id}]"), TokenType::Unused);
    Ok(slots.into_iter().enumerate().map(|(id, slot)| slot.unwrap_or_else(|| unused(id))).unzip())
}

/// Whether a token that is not marked special is one by its form, as llama.cpp's converter sees it.
fn looks_special(text: &str) -> bool {
    text.starts_with("<|") && text.ends_with("|>") || text.starts_with("<｜") && text.ends_with("｜>")
}

/// Merges in either form: `"a b"` or `["a", "b"]`.
fn merges(model: &Map<String, Value>) -> Result<Vec<String>, String> {
    let list = model.get("merges").and_then(Value::as_array).ok_or("has no `model.merges` list")?;
    list.iter()
        .enumerate()
        .map(|(rank, merge)| {
            let pair = match (merge.as_str(), merge.as_array().map(Vec::as_slice)) {
                (Some(text), _) => text.split_once(' '),
                (_, Some([left, right])) => left.as_str().zip(right.as_str()),
                _ => None,
            };
            pair.filter(|(left, right)| {
                !left.is_empty() && !right.is_empty() && !left.contains(' ') && !right.contains(' ')
            })
            .map(|(left, right)| format!("{left} {right}"))
            .ok_or_else(|| format!("merge {rank} is {merge}, expected two pieces"))
        })
        .collect()
}
