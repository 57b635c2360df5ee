//! The tensors of one model, made from its architecture's table, with lookups by either name.

use std::collections::HashMap;

use super::{Family, HyperParameters, LayerKind, MatrixInput, TensorRow};

/// One tensor of the GGUF file and where its values come from.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TensorSpec {
    /// Name in the GGUF file.
    pub gguf_name: String,
    /// Family that a recipe addresses.
    pub family: Family,
    /// Layer, or `None` for tensors outside the layers.
    pub layer: Option<u32>,
    /// Shape, outermost first; a stacked tensor has its experts first.
    pub shape: Vec<u64>,
    /// Names in the checkpoint: one, or one for each expert in expert order.
    pub sources: Vec<String>,
    /// What it is multiplied with, where that is gathered.
    #[serde(skip)]
    pub reads: Option<MatrixInput>,
    /// Groups of rows, each of which reads a part of the input of its own; 1 for all but grouped projections.
    #[serde(skip)]
    pub n_groups: usize,
}

impl TensorSpec {
    /// Shape of one source matrix, outermost first.
    pub fn source_shape(&self) -> &[u64] {
        if self.family.is_routed() { &self.shape[1..] } else { &self.shape }
    }

    /// Length of a row: the innermost dimension.
    pub fn columns(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of values.
    pub fn n_values(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// What a tensor of a checkpoint is to the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceRole<'a> {
    /// A weight of the model: the tensor it belongs to and which expert it is (0 for a dense one).
    Weight(&'a TensorSpec, usize),
    /// Part of a drafting module, set aside.
    Draft,
    /// Carried by some exports and used by nobody.
    Unused,
    /// Part of something that cannot be handled: what it is.
    Refused(&'static str),
    /// Not known.
    Unknown,
}

/// Every tensor of a model in file order, found by either name.
#[derive(Debug, Clone)]
pub struct TensorTable {
    specs: Vec<TensorSpec>,
    by_gguf_name: HashMap<String, usize>,
    by_source: HashMap<String, (usize, usize)>,
    hyper_parameters: HyperParameters,
}

/// The tensors that a model has, in the order in which files are written:
/// embedding, each layer's attention, then its feed-forward part, final norm and output.
pub fn expected_tensors(hyper_parameters: &HyperParameters) -> Vec<TensorSpec> {
    let architecture = hyper_parameters.architecture;
    let no_layer = LayerKind { ratio: 0, hash_routed: false };
    let mut specs = Vec::new();
    specs.extend(architecture.before_layers.iter().map(|row| spec(row, hyper_parameters, None, no_layer)));
    for layer in 0..hyper_parameters.num_hidden_layers as u32 {
        let kind = hyper_parameters.layer_kind(layer);
        let rows = architecture.in_layers.iter().filter(|row| (row.present)(kind));
        specs.extend(rows.map(|row| spec(row, hyper_parameters, Some(layer), kind)));
    }
    specs.extend(architecture.after_layers.iter().map(|row| spec(row, hyper_parameters, None, no_layer)));
    specs
}

fn spec(row: &TensorRow, model: &HyperParameters, layer: Option<u32>, kind: LayerKind) -> TensorSpec {
    let in_layer = |name: &str| match layer {
        Some(layer) => name.replace("{L}", &layer.to_string()),
        None => name.to_owned(),
    };
    let mut shape = (row.shape)(model, kind);
    let source = in_layer(row.source);
    let sources = if row.family.is_routed() {
        shape.insert(0, model.n_routed_experts);
        (0..model.n_routed_experts).map(|expert| source.replace("{E}", &expert.to_string())).collect()
    } else {
        vec![source]
    };
    TensorSpec {
        gguf_name: in_layer(row.gguf),
        family: row.family,
        layer,
        shape,
        sources,
        reads: row.reads,
        n_groups: row.reads.map_or(1, |input| input.n_groups(model)),
    }
}

impl TensorTable {
    /// The tensors of a model.
    pub fn new(hyper_parameters: &HyperParameters) -> Self {
        let specs = expected_tensors(hyper_parameters);
        let by_gguf_name = specs.iter().enumerate().map(|(i, spec)| (spec.gguf_name.clone(), i)).collect();
        let by_source = specs
            .iter()
            .enumerate()
            .flat_map(|(i, spec)| {
                spec.sources.iter().enumerate().map(move |(e, name)| (name.clone(), (i, e)))
            })
            .collect();
        Self { specs, by_gguf_name, by_source, hyper_parameters: hyper_parameters.clone() }
    }

    /// Every tensor, in file order.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// The tensor with this name in the GGUF file.
    pub fn by_gguf_name(&self, name: &str) -> Option<&TensorSpec> {
        self.by_gguf_name.get(name).map(|&i| &self.specs[i])
    }

    /// The tensor that a checkpoint tensor goes into, and as which expert.
    pub fn by_source(&self, name: &str) -> Option<(&TensorSpec, usize)> {
        self.by_source.get(name).map(|&(i, expert)| (&self.specs[i], expert))
    }

    /// What a tensor of a checkpoint is. Scales are to be looked up by their weight's name.
    pub fn role(&self, name: &str) -> SourceRole<'_> {
        if let Some((spec, expert)) = self.by_source(name) {
            return SourceRole::Weight(spec, expert);
        }
        let architecture = self.hyper_parameters.architecture;
        if architecture.draft_prefixes.iter().any(|prefix| name.starts_with(prefix)) {
            return SourceRole::Draft;
        }
        if let Some((_, what)) =
            architecture.refused_prefixes.iter().find(|(prefix, _)| name.starts_with(prefix))
        {
            return SourceRole::Refused(what);
        }
        let inside = layer_and_rest(name);
        if inside.is_some_and(|(layer, rest)| {
            layer < self.hyper_parameters.num_hidden_layers && architecture.unused_in_layers.contains(&rest)
        }) {
            return SourceRole::Unused;
        }
        SourceRole::Unknown
    }
}

/// `layers.7.ffn.gate.bias` -> 7 and `ffn.gate.bias`.
fn layer_and_rest(name: &str) -> Option<(u64, &str)> {
    let (layer, rest) = name.strip_prefix("layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}
