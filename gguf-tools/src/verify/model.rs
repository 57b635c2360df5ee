//! Metadata against tensors: what the architecture's table expects and what the file holds.

use std::collections::{BTreeSet, HashMap};

use super::Findings;
use crate::block::BlockType;
use crate::gguf::{Array, Gguf, Metadata, TensorInfo, Value};
use crate::model::{ARCHITECTURES, Family, HyperParameters, ModelError, TensorSpec, expected_tensors};

/// The layers of a file that holds only some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct LayerRange {
    /// First layer.
    pub first: u32,
    /// Last layer.
    pub last: u32,
    /// Layers of the whole model.
    pub of: u32,
}

/// What is known of the model, and how the tensors differ from it.
pub(super) struct Model {
    pub(super) architecture: Option<String>,
    /// Whether the architecture's rules are known here.
    pub(super) is_known: bool,
    /// Whether the metadata could be understood; otherwise tensors were not compared.
    pub(super) is_understood: bool,
    pub(super) layers: Option<LayerRange>,
    /// Names that the model has and the file has not.
    pub(super) missing: Vec<String>,
    /// Tensors of other shapes than the model's.
    pub(super) misshapen: Vec<String>,
    /// Names that the file has and the model has not.
    pub(super) extra: Vec<String>,
    /// Families of the file's tensors by name.
    pub(super) families: HashMap<String, Family>,
}

pub(super) fn check(gguf: &Gguf, findings: &mut Findings) -> Model {
    let metadata = gguf.metadata();
    let architecture = metadata.get("general.architecture").and_then(Value::as_str).map(str::to_owned);
    let is_known = ARCHITECTURES.iter().any(|known| Some(known.gguf_name) == architecture.as_deref());
    let mut model = Model {
        architecture,
        is_known,
        is_understood: false,
        layers: None,
        missing: Vec::new(),
        misshapen: Vec::new(),
        extra: Vec::new(),
        families: HashMap::new(),
    };
    match HyperParameters::from_metadata(metadata) {
        Ok(parameters) => {
            model.is_understood = true;
            model.compare(gguf, &parameters, findings);
            check_lists(metadata, &parameters, findings);
            check_routing_tables(gguf, &parameters, findings);
        }
        Err(ModelError::Fields { problems }) => {
            for problem in problems {
                findings.error(None, format!("metadata {problem}"));
            }
        }
        Err(error) => {
            findings.warning(None, format!("only the container and the blocks were checked: {error}"));
        }
    }
    model
}

impl Model {
    fn compare(&mut self, gguf: &Gguf, parameters: &HyperParameters, findings: &mut Findings) {
        self.layers = layer_range(gguf, parameters.num_hidden_layers as u32);
        let mut expected = expected_tensors(parameters);
        if let Some(layers) = self.layers {
            expected.retain(|spec| belongs_to(spec, layers));
        }
        for spec in &expected {
            match gguf.tensor(&spec.gguf_name) {
                None => {
                    findings.error(Some(&spec.gguf_name), "missing; the model needs it".to_owned());
                    self.missing.push(spec.gguf_name.clone());
                }
                Some(tensor) if tensor.shape != spec.shape => {
                    let (found, wanted) = (&tensor.shape, &spec.shape);
                    let message = format!("found shape {found:?}, expected {wanted:?} by the metadata");
                    findings.error(Some(&spec.gguf_name), message);
                    self.misshapen.push(spec.gguf_name.clone());
                }
                Some(_) => {}
            }
        }
        self.families = expected.into_iter().map(|spec| (spec.gguf_name, spec.family)).collect();
        for tensor in gguf.tensors().iter().filter(|tensor| !self.families.contains_key(&tensor.name)) {
            findings.warning(Some(&tensor.name), "extra; the model has no such tensor".to_owned());
            self.extra.push(tensor.name.clone());
        }
    }
}

/// `blk.7.attn_q_a.weight` -> 7.
fn layer_of(tensor: &TensorInfo) -> Option<u32> {
    tensor.name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// The layers of a ds4 layer file: no split keys, and a beginning or an end of the layers, but not all.
fn layer_range(gguf: &Gguf, n_layers: u32) -> Option<LayerRange> {
    let present: BTreeSet<u32> =
        gguf.tensors().iter().filter_map(layer_of).filter(|&layer| layer < n_layers).collect();
    let (&first, &last) = (present.first()?, present.last()?);
    let is_contiguous = present.len() as u64 == u64::from(last - first) + 1;
    let at_one_end = (first == 0) != (last + 1 == n_layers);
    let fits = gguf.split_place().is_none() && is_contiguous && at_one_end;
    fits.then_some(LayerRange { first, last, of: n_layers })
}

/// Whether a layer file must hold the tensor: the embedding goes with the first layer, the output with the last.
fn belongs_to(spec: &TensorSpec, layers: LayerRange) -> bool {
    match spec.layer {
        Some(layer) => (layers.first..=layers.last).contains(&layer),
        None if spec.family == Family::Embedding => layers.first == 0,
        None => layers.last + 1 == layers.of,
    }
}

/// Lists in the metadata that must be as long as something else.
fn check_lists(metadata: &Metadata, parameters: &HyperParameters, findings: &mut Findings) {
    let mut check = |key: &str, wanted: u64, what: &str| {
        let Some(found) = metadata.get(key).and_then(Value::as_array).map(Array::len) else { return };
        if found as u64 != wanted {
            findings
                .error(None, format!("metadata `{key}`: found {found} entries, expected {wanted}, {what}"));
        }
    };
    let vocabulary = "one for each token of the vocabulary";
    check("tokenizer.ggml.tokens", parameters.vocab_size, vocabulary);
    check("tokenizer.ggml.token_type", parameters.vocab_size, vocabulary);
    check("tokenizer.ggml.scores", parameters.vocab_size, vocabulary);
    let layers = "one for each layer";
    let prefix = parameters.architecture.gguf_name;
    check(&format!("{prefix}.swiglu_clamp_exp"), parameters.num_hidden_layers, layers);
    check(&format!("{prefix}.swiglu_clamp_shexp"), parameters.num_hidden_layers, layers);
    for key in ["bos", "eos", "padding"].map(|name| format!("tokenizer.ggml.{name}_token_id")) {
        let Some(id) = metadata.get(&key) else { continue };
        if id.as_u64().is_none_or(|id| id >= parameters.vocab_size) {
            let message = format!("metadata `{key}`: expected a token id below {}", parameters.vocab_size);
            findings.error(None, message);
        }
    }
    if metadata.get("tokenizer.chat_template").is_none() {
        findings.warning(
            None,
            "there is no `tokenizer.chat_template`; runtimes fall back to their own".to_owned(),
        );
    }
}

/// Every expert id in the tables from token to experts must exist: nothing else checks it before it is used.
fn check_routing_tables(gguf: &Gguf, parameters: &HyperParameters, findings: &mut Findings) {
    for tensor in gguf.tensors().iter().filter(|tensor| tensor.name.ends_with(".ffn_gate_tid2eid.weight")) {
        if tensor.block_type != BlockType::I32 {
            let message = format!("found type {}, expected I32 (a table of expert ids)", tensor.block_type);
            findings.error(Some(&tensor.name), message);
            continue;
        }
        let Ok(data) = gguf.data(tensor) else { continue };
        let ids = data.as_chunks::<4>().0.iter().map(|&bytes| i64::from(i32::from_le_bytes(bytes)));
        let is_wrong = |id: i64| id < 0 || id as u64 >= parameters.n_routed_experts;
        let wrong: Vec<(usize, i64)> = ids.enumerate().filter(|&(_, id)| is_wrong(id)).collect();
        if let Some((at, id)) = wrong.first() {
            let columns = tensor.shape.last().copied().unwrap_or(1) as usize;
            let message = format!(
                "token {}, entry {}: found expert {id}, expected 0 to {}; {} of the table's ids are wrong",
                at / columns,
                at % columns,
                parameters.n_routed_experts - 1,
                wrong.len()
            );
            findings.error(Some(&tensor.name), message);
        }
    }
}
