//! The registry of architectures, and what one line of a tensor table says.

use std::fmt;

use serde_json::{Map, Value};

use super::{Family, HyperParameters, MatrixInput, ModelError, deepseek4};
use crate::gguf::Metadata;

/// Every architecture that can be built. A new one is one file and one line here.
pub const ARCHITECTURES: &[&Architecture] = &[&deepseek4::ARCHITECTURE];

/// One model architecture: its names, how its configuration is read, and its tensors.
pub struct Architecture {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// `general.architecture` in GGUF metadata.
    pub gguf_name: &'static str,
    /// Reads `config.json`.
    pub(super) read_config: fn(&Map<String, Value>) -> Result<HyperParameters, ModelError>,
    /// Reads GGUF metadata.
    pub(super) read_metadata: fn(&Metadata) -> Result<HyperParameters, ModelError>,
    /// Writes GGUF metadata.
    pub(super) write_metadata: fn(&HyperParameters) -> Metadata,
    /// Tensors in front of the layers, in file order.
    pub before_layers: &'static [TensorRow],
    /// Tensors of one layer, in file order.
    pub in_layers: &'static [TensorRow],
    /// Tensors behind the layers, in file order.
    pub after_layers: &'static [TensorRow],
    /// Prefixes of checkpoint tensors that belong to drafting modules and are set aside.
    pub draft_prefixes: &'static [&'static str],
    /// Prefixes of checkpoint tensors that belong to parts this program cannot handle, with what they are.
    pub refused_prefixes: &'static [(&'static str, &'static str)],
    /// Ends of layer tensors that some exports carry and no implementation uses.
    pub unused_in_layers: &'static [&'static str],
}

impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.gguf_name)
    }
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.gguf_name == other.gguf_name
    }
}

/// What distinguishes one layer from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerKind {
    /// Tokens per compressed row: 0, 4 or 128.
    pub ratio: u32,
    /// Whether the layer routes by token id instead of by a learned bias.
    pub hash_routed: bool,
}

/// One line of a tensor table. `{L}` in a name stands for the layer, `{E}` for the expert.
pub struct TensorRow {
    /// Name in the checkpoint.
    pub source: &'static str,
    /// Name in the GGUF file.
    pub gguf: &'static str,
    /// Family that a recipe addresses.
    pub family: Family,
    /// Shape of one matrix (of one expert, for routed tensors), outermost first.
    pub shape: fn(&HyperParameters, LayerKind) -> Vec<u64>,
    /// Which layers have it.
    pub present: fn(LayerKind) -> bool,
    /// What it is multiplied with; `None` where it is no matrix of a product, or one whose input is not gathered.
    pub reads: Option<MatrixInput>,
}

impl TensorRow {
    /// The row of a matrix with this input.
    pub(super) const fn reading(mut self, input: MatrixInput) -> Self {
        self.reads = Some(input);
        self
    }
}

/// The architecture that a `config.json` is of.
pub(super) fn of_config(config: &Map<String, Value>) -> Result<&'static Architecture, ModelError> {
    let model_type = config.get("model_type").and_then(Value::as_str);
    let class = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let Some(found) = model_type.or(class) else {
        return Err(ModelError::NoArchitecture {
            field: "model_type",
            supported: supported(|a| a.model_type),
        });
    };
    ARCHITECTURES.iter().copied().find(|a| a.model_type == found).ok_or_else(|| {
        ModelError::UnsupportedArchitecture {
            found: found.to_owned(),
            hint: hint(found),
            supported: supported(|a| a.model_type),
        }
    })
}

/// The architecture called `name` in GGUF metadata.
pub(super) fn of_gguf(name: &str) -> Result<&'static Architecture, ModelError> {
    ARCHITECTURES.iter().copied().find(|a| a.gguf_name == name).ok_or_else(|| {
        ModelError::UnsupportedArchitecture {
            found: name.to_owned(),
            hint: hint(name),
            supported: supported(|a| a.gguf_name),
        }
    })
}

/// Names of everything that is supported.
pub(super) fn supported(name: fn(&Architecture) -> &'static str) -> String {
    ARCHITECTURES.iter().map(|a| name(a)).collect::<Vec<_>>().join(", ")
}

fn hint(found: &str) -> &'static str {
    match found {
        "deepseek_v41" | "deepseek41" => {
            " (V4.1 is another architecture than V4, with other layers, tables and a vision tower)"
        }
        "deepseek_v3" | "deepseek_v32" | "deepseek_v2" | "deepseek2" | "deepseek32" => " (older than V4)",
        _ => "",
    }
}
