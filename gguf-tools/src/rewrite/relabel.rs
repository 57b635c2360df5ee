//! Relabelling: another header over the same tensor bytes.

use std::path::Path;

use super::{NewFile, Origin, RewriteError};
use crate::gguf::{Array, Gguf, Metadata, NewTensor, Value};
use crate::model::HyperParameters;

/// One change of metadata or names.
#[derive(Debug, Clone, PartialEq)]
pub enum Edit {
    /// Sets a key, where it stands or at the end.
    Set(String, Value),
    /// Removes a key; one that is not there is an error.
    Unset(String),
    /// Takes all keys of another file but those that describe how the tensors were made, which stay.
    Template(Metadata),
    /// Adds what llama.cpp or ds4 demand and the file lacks, as far as its other keys determine it, and gives tensors of
    /// the old community files the names that both know.
    Dialect,
}

/// What an edit changes.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Edited {
    /// Keys that are new.
    pub added: Vec<String>,
    /// Keys that have another value.
    pub changed: Vec<String>,
    /// Keys that are gone.
    pub removed: Vec<String>,
    /// Tensors with another name, old and new.
    pub renamed: Vec<(String, String)>,
}

impl Edited {
    /// Whether the header stays as it is.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// A value that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{given}`: {problem}; expected KEY=TYPE:VALUE with TYPE str, bool, u8, i8, u16, i16, u32, i32, u64, i64, f32 or f64, or one of them in [] for a list with commas"
)]
pub struct EditError {
    /// The text as given.
    pub given: String,
    /// What is wrong with it.
    pub problem: String,
}

/// Keys that describe how the tensors were made and lie, not the model: a template never replaces them.
const ABOUT_THE_TENSORS: [&str; 6] = [
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
    "quantize.",
    "ggsmith.",
    "split.",
];

/// Reads `KEY=TYPE:VALUE`; lists as `KEY=[i32]:1,2,3`.
///
/// # Errors
/// [`EditError`] with what is expected.
pub fn parse_value(text: &str) -> Result<(String, Value), EditError> {
    let wrong = |problem: &str| EditError { given: text.to_owned(), problem: problem.to_owned() };
    let (key, typed) = text.split_once('=').ok_or_else(|| wrong("no `=`"))?;
    let (kind, value) = typed.split_once(':').ok_or_else(|| wrong("no `:` behind the type"))?;
    if key.is_empty() {
        return Err(wrong("an empty key"));
    }
    let parsed = match kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) {
        Some(kind) => list(kind, value),
        None => single(kind, value),
    };
    parsed.map(|value| (key.to_owned(), value)).map_err(|problem| wrong(&problem))
}

fn single(kind: &str, text: &str) -> Result<Value, String> {
    fn number<T: std::str::FromStr>(text: &str) -> Result<Value, String>
    where
        T::Err: std::fmt::Display,
        Value: From<T>,
    {
        text.parse::<T>().map(Value::from).map_err(|e| format!("value `{text}`: {e}"))
    }
    match kind {
        "str" | "string" => Ok(Value::String(text.to_owned())),
        "bool" => number::<bool>(text),
        "u8" => number::<u8>(text),
        "i8" => number::<i8>(text),
        "u16" => number::<u16>(text),
        "i16" => number::<i16>(text),
        "u32" => number::<u32>(text),
        "i32" | "int" => number::<i32>(text),
        "u64" => number::<u64>(text),
        "i64" => number::<i64>(text),
        "f32" | "float" => number::<f32>(text),
        "f64" => number::<f64>(text),
        _ => Err(format!("no type is called `{kind}`")),
    }
}

fn list(kind: &str, text: &str) -> Result<Value, String> {
    fn numbers<T: std::str::FromStr>(parts: &[&str]) -> Result<Value, String>
    where
        T::Err: std::fmt::Display,
        Value: From<Vec<T>>,
    {
        let parse = |part: &&str| part.parse::<T>().map_err(|e| format!("element `{part}`: {e}"));
        parts.iter().map(parse).collect::<Result<Vec<T>, _>>().map(Value::from)
    }
    let parts: Vec<&str> = text.split(',').map(str::trim).filter(|_| !text.is_empty()).collect();
    match kind {
        "str" | "string" => {
            Ok(Value::Array(Array::String(parts.iter().map(|part| (*part).to_owned()).collect())))
        }
        "bool" => numbers::<bool>(&parts),
        "u8" => numbers::<u8>(&parts),
        "i8" => numbers::<i8>(&parts),
        "u16" => numbers::<u16>(&parts),
        "i16" => numbers::<i16>(&parts),
        "u32" => numbers::<u32>(&parts),
        "i32" => numbers::<i32>(&parts),
        "u64" => numbers::<u64>(&parts),
        "i64" => numbers::<i64>(&parts),
        "f32" => numbers::<f32>(&parts),
        "f64" => numbers::<f64>(&parts),
        _ => Err(format!("no type is called `{kind}`")),
    }
}

/// The file with another header, and what changes. The tensors lie in the order of their directory.
///
/// # Errors
/// [`RewriteError::Request`] for a set that is split (merge it first), a key to remove that is not there, an alignment
/// that would move data without being asked for as such, and a dialect that the metadata do not determine.
pub fn relabel<'a>(
    gguf: &'a Gguf,
    edits: &[Edit],
    out: &Path,
) -> Result<(NewFile<'a>, Edited), RewriteError> {
    if gguf.split_place().is_some() {
        return Err(RewriteError::request(
            "this is a shard of a split set; `ggsmith merge` it first, or split the relabelled file again",
        ));
    }
    let mut metadata = gguf.metadata().clone();
    let mut renamed = Vec::new();
    for edit in edits {
        match edit {
            Edit::Set(key, value) => metadata.set(key.clone(), value.clone()),
            Edit::Unset(key) => drop(metadata.remove(key).ok_or_else(|| {
                RewriteError::request(format!(
                    "key `{key}`: not in the file; `ggsmith inspect --metadata` lists its keys"
                ))
            })?),
            Edit::Template(template) => metadata = from_template(template, &metadata),
            Edit::Dialect => {
                complete(&mut metadata)?;
                renamed = community_names(gguf);
            }
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => crate::gguf::DEFAULT_ALIGNMENT,
        Some(&Value::U32(alignment)) => alignment,
        Some(other) => {
            let found = other.type_name();
            return Err(RewriteError::request(format!(
                "key `general.alignment`: found a value of type {found}, expected u32"
            )));
        }
    };
    let origins: Vec<_> = gguf.tensors().iter().map(|tensor| Origin { gguf, tensor }).collect();
    let edited = differences(gguf.metadata(), &metadata, &renamed);
    let mut file = NewFile::new(out.to_owned(), metadata.clone(), origins, alignment)?;
    if !renamed.is_empty() {
        let new_name = |tensor: &NewTensor| {
            renamed
                .iter()
                .find(|(old, _)| *old == tensor.name)
                .map_or_else(|| tensor.name.clone(), |(_, new)| new.clone())
        };
        let tensors =
            gguf.tensors().iter().map(NewTensor::from).map(|t| NewTensor { name: new_name(&t), ..t });
        file.layout = crate::gguf::Layout::new(metadata, tensors.collect(), alignment)?;
    }
    Ok((file, edited))
}

/// The template's keys, but this file's own about its tensors; what both have stays in this file's order.
fn from_template(template: &Metadata, own: &Metadata) -> Metadata {
    let about = |key: &str| ABOUT_THE_TENSORS.iter().any(|start| key.starts_with(start));
    let mut metadata = Metadata::default();
    for (key, value) in own.iter() {
        match template.get(key) {
            _ if about(key) => metadata.set(key, value.clone()),
            Some(theirs) => metadata.set(key, theirs.clone()),
            None => {}
        }
    }
    for (key, value) in template.iter().filter(|(key, _)| !about(key)) {
        metadata.set(key, value.clone());
    }
    metadata
}

/// Adds the keys that either runtime demands, and gives present ones the type that ds4 insists on.
fn complete(metadata: &mut Metadata) -> Result<(), RewriteError> {
    let parameters = HyperParameters::from_metadata(metadata)
        .map_err(|e| RewriteError::request(format!("the dialect cannot be completed: {e}")))?;
    for (key, value) in parameters.to_metadata().iter() {
        let same_type = metadata.get(key).is_some_and(|found| found.type_name() == value.type_name());
        let same_length = match (metadata.get(key), value) {
            (Some(Value::Array(found)), Value::Array(wanted)) => found.len() == wanted.len(),
            _ => true,
        };
        if !(same_type && same_length) {
            metadata.set(key, value.clone());
        }
    }
    Ok(())
}

/// Ends of names in files of early forks, and what llama.cpp and ds4 call those tensors.
const COMMUNITY_NAMES: [(&str, &str); 22] = [
    ("hc_head_base", "output_hc_base.weight"),
    ("hc_head_fn", "output_hc_fn.weight"),
    ("hc_head_scale", "output_hc_scale.weight"),
    (".hc_attn_fn", ".hc_attn_fn.weight"),
    (".hc_attn_scale", ".hc_attn_scale.weight"),
    (".hc_attn_base", ".hc_attn_base.weight"),
    (".hc_ffn_fn", ".hc_ffn_fn.weight"),
    (".hc_ffn_scale", ".hc_ffn_scale.weight"),
    (".hc_ffn_base", ".hc_ffn_base.weight"),
    (".attn_sinks", ".attn_sinks.weight"),
    (".attn_kv_latent.weight", ".attn_kv.weight"),
    (".exp_probs_b", ".exp_probs_b.bias"),
    (".ffn_gate_tid2eid", ".ffn_gate_tid2eid.weight"),
    (".attn_compress_ape", ".attn_compressor_ape.weight"),
    (".attn_compress_kv.weight", ".attn_compressor_kv.weight"),
    (".attn_compress_gate.weight", ".attn_compressor_gate.weight"),
    (".attn_compress_norm.weight", ".attn_compressor_norm.weight"),
    (".indexer.compress_ape", ".indexer_compressor_ape.weight"),
    (".indexer.compress_kv.weight", ".indexer_compressor_kv.weight"),
    (".indexer.compress_gate.weight", ".indexer_compressor_gate.weight"),
    (".indexer.compress_norm.weight", ".indexer_compressor_norm.weight"),
    (".indexer.compress_norm", ".indexer_compressor_norm.weight"),
];

fn community_names(gguf: &Gguf) -> Vec<(String, String)> {
    let new_name = |name: &str| {
        COMMUNITY_NAMES.iter().find_map(|(old, new)| {
            let stem = name.strip_suffix(old)?;
            // The head's names stand alone; the layers' ends follow `blk.N`.
            (stem.is_empty() != old.starts_with('.')).then(|| format!("{stem}{new}"))
        })
    };
    gguf.tensors().iter().filter_map(|t| Some((t.name.clone(), new_name(&t.name)?))).collect()
}

fn differences(old: &Metadata, new: &Metadata, renamed: &[(String, String)]) -> Edited {
    let mut edited = Edited { renamed: renamed.to_vec(), ..Edited::default() };
    for (key, value) in new.iter() {
        match old.get(key) {
            None => edited.added.push(key.to_owned()),
            // As text, since NaN is not equal to itself.
            Some(before) if format!("{before:?}") != format!("{value:?}") => {
                edited.changed.push(key.to_owned());
            }
            Some(_) => {}
        }
    }
    edited.removed =
        old.iter().map(|(key, _)| key).filter(|key| new.get(key).is_none()).map(str::to_owned).collect();
    edited
}
