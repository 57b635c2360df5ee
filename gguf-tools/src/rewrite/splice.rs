//! Splicing: one file with some tensors of another, such as the last layers' experts in a better type.

use std::path::Path;

use regex::Regex;

use super::split::whole_metadata;
use super::{NewFile, Origin, RewriteError};
use crate::gguf::{Gguf, Metadata, TensorInfo, Value};

/// What is taken from the donor.
#[derive(Debug, Clone, Default)]
pub struct SpliceOptions {
    /// Layers, both ends included; empty: any place.
    pub layers: Vec<(u32, u32)>,
    /// What the names must contain a match of; `None`: routed experts.
    pub tensors: Option<Regex>,
    /// Accept files of which it is known that they come from different checkpoints.
    pub any_checkpoint: bool,
}

/// What a splice will make.
#[derive(Debug)]
pub struct SplicePlan<'a> {
    /// The file to be written.
    pub file: NewFile<'a>,
    /// Tensors that come from the donor and differ from the base's, with both types.
    pub taken: Vec<TakenTensor>,
    /// Tensors that were chosen and are the same in both files.
    pub n_equal: usize,
    /// What could not be checked.
    pub warnings: Vec<String>,
}

/// A tensor that comes from the donor.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TakenTensor {
    /// Its name.
    pub tensor: String,
    /// Type in the base.
    pub base_type: &'static str,
    /// Type in the donor and the result.
    pub donor_type: &'static str,
    /// Bytes in the base.
    pub base_bytes: u64,
    /// Bytes in the result.
    pub n_bytes: u64,
}

/// Keys that name the checkpoint, the surest first.
const LABEL_KEYS: [&str; 2] = ["ggsmith.checkpoint.label", "general.name"];
const REVISION_KEY: &str = "ggsmith.checkpoint.revision";

/// Reads `37:42` or ds4's `0-2,37-42`, both ends included; a number alone is one layer.
///
/// # Errors
/// [`RewriteError::Request`] with what is expected.
pub fn parse_layer_list(text: &str) -> Result<Vec<(u32, u32)>, RewriteError> {
    let range = |part: &str| {
        let part = part.trim();
        let (first, last) = part.split_once([':', '-']).unwrap_or((part, part));
        let range = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (range.0 <= range.1).then_some(range)
    };
    text.split(',')
        .map(|part| {
            range(part).ok_or_else(|| {
                RewriteError::request(format!("layers `{part}`: expected FIRST:LAST, as 37:42 or 0-2,37-42"))
            })
        })
        .collect()
}

/// Reads a pattern of tensor names.
///
/// # Errors
/// [`RewriteError::Request`] with what is wrong in it.
pub fn parse_pattern(text: &str) -> Result<Regex, RewriteError> {
    Regex::new(text).map_err(|e| RewriteError::request(format!("tensor pattern `{text}`: {e}")))
}

/// Plans `base` with the chosen tensors of `donor`. Reads the chosen tensors to leave out those that are equal, so that a
/// splice of a file with itself is the file; everything else is decided from headers.
///
/// # Errors
/// [`RewriteError::Mismatch`] if the files hold other tensors, shapes, hyper-parameters or tokens, or come from different
/// checkpoints; [`RewriteError::Request`] if nothing is chosen.
pub fn splice<'a>(
    base: &'a Gguf,
    donor: &'a Gguf,
    options: &SpliceOptions,
    out: &Path,
) -> Result<SplicePlan<'a>, RewriteError> {
    let mut problems = tensor_differences(base, donor);
    problems.extend(model_differences(base.metadata(), donor.metadata()));
    let (different, warnings) = checkpoint_differences(base.metadata(), donor.metadata());
    if !options.any_checkpoint {
        problems.extend(different);
    }
    if !problems.is_empty() {
        return Err(RewriteError::Mismatch {
            what: "the donor does not fit the base".to_owned(),
            problems,
            advice: "take two files of one checkpoint; where only labels differ and you know better, pass --any-checkpoint",
        });
    }
    let mut taken = Vec::new();
    let (mut n_equal, mut origins) = (0, Vec::with_capacity(base.tensors().len()));
    for tensor in base.tensors() {
        let other = donor.tensor(&tensor.name).filter(|_| chooses(options, &tensor.name));
        let Some(other) = other else {
            origins.push(Origin { gguf: base, tensor });
            continue;
        };
        if other.block_type == tensor.block_type && base.data(tensor)? == donor.data(other)? {
            n_equal += 1;
            origins.push(Origin { gguf: base, tensor });
            continue;
        }
        taken.push(TakenTensor {
            tensor: tensor.name.clone(),
            base_type: tensor.block_type.name(),
            donor_type: other.block_type.name(),
            base_bytes: tensor.n_bytes,
            n_bytes: other.n_bytes,
        });
        origins.push(Origin { gguf: donor, tensor: other });
    }
    if taken.is_empty() && n_equal == 0 {
        return Err(RewriteError::request(
            "no tensor is chosen; `ggsmith inspect --tensors` lists their names, --layers counts from 0",
        ));
    }
    let mut metadata = whole_metadata(base);
    if !taken.is_empty() {
        record(&mut metadata, donor, options);
    }
    let file = NewFile::new(out.to_owned(), metadata, origins, base.alignment())?;
    Ok(SplicePlan { file, taken, n_equal, warnings })
}

fn chooses(options: &SpliceOptions, name: &str) -> bool {
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')?.0.parse::<u32>().ok());
    let in_layers = options.layers.is_empty()
        || layer
            .is_some_and(|layer| options.layers.iter().any(|&(first, last)| (first..=last).contains(&layer)));
    let by_name = match &options.tensors {
        Some(pattern) => pattern.is_match(name),
        None => {
            ["gate", "up", "down", "gate_up"].iter().any(|p| name.ends_with(&format!(".ffn_{p}_exps.weight")))
        }
    };
    in_layers && by_name
}

/// Tensors that only one file has, or of other shapes.
fn tensor_differences(base: &Gguf, donor: &Gguf) -> Vec<String> {
    let mut problems = Vec::new();
    for tensor in base.tensors() {
        match donor.tensor(&tensor.name) {
            None => problems.push(format!("tensor `{}` is in the base only", tensor.name)),
            Some(other) if other.shape != tensor.shape => problems
                .push(format!("tensor `{}`: base {:?}, donor {:?}", tensor.name, tensor.shape, other.shape)),
            Some(_) => {}
        }
    }
    let missing = |tensor: &&TensorInfo| base.tensor(&tensor.name).is_none();
    problems.extend(
        donor.tensors().iter().filter(missing).map(|t| format!("tensor `{}` is in the donor only", t.name)),
    );
    shorten(problems)
}

/// Hyper-parameters and tokens that differ.
fn model_differences(base: &Metadata, donor: &Metadata) -> Vec<String> {
    let architecture = |metadata: &Metadata| {
        metadata.get("general.architecture").and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let (ours, theirs) = (architecture(base), architecture(donor));
    if ours != theirs {
        return vec![format!("key `general.architecture`: base `{ours}`, donor `{theirs}`")];
    }
    let prefix = format!("{ours}.");
    let matters = |key: &str| key.starts_with(&prefix) || key == "tokenizer.ggml.tokens";
    let differs = |(key, value): &(&str, &Value)| {
        // A key that one of two converters leaves out is no contradiction.
        matters(key) && donor.get(key).is_some_and(|other| format!("{other:?}") != format!("{value:?}"))
    };
    shorten(base.iter().filter(differs).map(|(key, _)| format!("key `{key}` differs")).collect())
}

/// Labels that differ, and labels that are not there.
fn checkpoint_differences(base: &Metadata, donor: &Metadata) -> (Vec<String>, Vec<String>) {
    let text = |metadata: &Metadata, key: &str| metadata.get(key).and_then(Value::as_str).map(str::to_owned);
    let label = |metadata: &Metadata| LABEL_KEYS.iter().find_map(|key| text(metadata, key));
    let (mut problems, mut warnings) = (Vec::new(), Vec::new());
    match (label(base), label(donor)) {
        (Some(ours), Some(theirs)) if ours != theirs => {
            problems.push(format!("checkpoint label: base `{ours}`, donor `{theirs}`"));
        }
        (Some(_), Some(_)) => {}
        _ => warnings
            .push("a file names no checkpoint, so whether both come from the same is not known".to_owned()),
    }
    if let (Some(ours), Some(theirs)) = (text(base, REVISION_KEY), text(donor, REVISION_KEY))
        && ours != theirs
    {
        problems.push(format!("checkpoint revision: base `{ours}`, donor `{theirs}`"));
    }
    (problems, warnings)
}

/// Most problems of one kind that a message lists.
const MAX_LISTED: usize = 10;

fn shorten(mut problems: Vec<String>) -> Vec<String> {
    if problems.len() > MAX_LISTED {
        let more = problems.len() - MAX_LISTED;
        problems.truncate(MAX_LISTED);
        problems.push(format!("and {more} more"));
    }
    problems
}

/// Says in the file where the foreign tensors come from.
fn record(metadata: &mut Metadata, donor: &Gguf, options: &SpliceOptions) {
    let ranges: Vec<_> = options.layers.iter().map(|(first, last)| format!("{first}:{last}")).collect();
    let chosen = match &options.tensors {
        Some(pattern) => pattern.as_str(),
        None => "routed experts",
    };
    metadata
        .set("ggsmith.splice.layers", if ranges.is_empty() { "all".to_owned() } else { ranges.join(",") });
    metadata.set("ggsmith.splice.tensors", chosen);
    let copied = [
        (LABEL_KEYS[0], "label"),
        (REVISION_KEY, "revision"),
        ("ggsmith.recipe", "recipe"),
        ("quantize.imatrix.file", "imatrix.file"),
        ("ggsmith.imatrix.sha256", "imatrix.sha256"),
    ];
    for (key, name) in copied {
        if let Some(value) = donor.metadata().get(key) {
            metadata.set(format!("ggsmith.splice.donor.{name}"), value.clone());
        }
    }
    let file = donor.shards()[0].path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    metadata.set("ggsmith.splice.donor.file", file);
}
