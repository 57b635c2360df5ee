//! Our form: a safetensors file with tensors `direction.N` (`F32`, `[width]`) whose metadata say what they mean.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::field;
use crate::component::Component;
use crate::direction::{Direction, Operation, Origin};
use crate::error::SteeringError;

const FORMAT: &str = "ggsmith-steering-1";
/// More layers than any model has.
const MAX_LAYERS: usize = 4096;

/// Whether the bytes begin as a safetensors file does: the length of a JSON object, and the object.
pub(super) fn recognises(bytes: &[u8]) -> bool {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else { return false };
    rest.first() == Some(&b'{') && usize::try_from(u64::from_le_bytes(*length)).is_ok_and(|n| n <= rest.len())
}

pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Direction, SteeringError> {
    let wrong =
        |e: &dyn std::fmt::Display| field(path, "content", format!("no sound safetensors file ({e})"), "one");
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| wrong(&e))?;
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| wrong(&e))?;
    let empty = HashMap::new();
    let metadata = header.metadata().as_ref().unwrap_or(&empty);
    let get = |key: &str| metadata.get(key).map(String::as_str);
    let text = |key: &str| get(key).map(str::to_owned);
    let shown = |key: &str| get(key).map_or_else(|| "absent".to_owned(), |found| format!("\"{found}\""));
    if get("format") != Some(FORMAT) {
        return Err(field(path, "metadata `format`", shown("format"), format!("\"{FORMAT}\"")));
    }
    let operation = match get("operation") {
        Some("project") => Operation::Project,
        Some("add") => Operation::Add,
        _ => return Err(field(path, "metadata `operation`", shown("operation"), "\"project\" or \"add\"")),
    };
    let component = match get("component") {
        None => None,
        Some(name) => Some(Component::from_name(name).ok_or_else(|| {
            let names = Component::NAMES.map(|(name, _)| name).join(", ");
            field(path, "metadata `component`", shown("component"), format!("one of {names}"))
        })?),
    };
    let number = |key: &'static str, most: usize| {
        get(key).and_then(|value| value.parse().ok()).filter(|&n: &usize| n > 0 && n <= most).ok_or_else(
            || field(path, format!("metadata `{key}`"), shown(key), format!("a number from 1 to {most}")),
        )
    };
    let (n_layers, width) = (number("n_layers", MAX_LAYERS)?, number("width", bytes.len())?);
    let mut layers = vec![Vec::new(); n_layers];
    for (name, tensor) in tensors.tensors() {
        let layer = name.strip_prefix("direction.").and_then(|layer| layer.parse::<usize>().ok());
        let Some(slot) = layer.and_then(|layer| layers.get_mut(layer)) else {
            let expected = format!("direction.0 to direction.{}", n_layers - 1);
            return Err(field(path, "a tensor's name", format!("`{name}`"), expected));
        };
        if tensor.dtype() != Dtype::F32 || tensor.shape() != [width] {
            let found = format!("{:?} {:?}", tensor.dtype(), tensor.shape());
            return Err(field(path, format!("tensor `{name}`"), found, format!("F32 [{width}]")));
        }
        *slot = tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    }
    let direction = Direction {
        operation,
        component,
        width,
        layers,
        states_n_layers: true,
        origin: Origin {
            label: text("label"),
            model_sha256: text("model_sha256"),
            method: text("method"),
            contrast: text("contrast"),
        },
        path: path.to_owned(),
    };
    let sum = direction.content_sha256();
    if get("content_sha256").is_some_and(|stated| stated != sum) {
        return Err(field(
            path,
            "the values' SHA-256",
            sum,
            format!("{} as its metadata say", shown("content_sha256")),
        ));
    }
    Ok(direction)
}

pub(super) fn bytes(direction: &Direction) -> Result<Vec<u8>, SteeringError> {
    let cannot = |reason: String| SteeringError::CannotHold { format: "safetensors", reason };
    if !direction.states_n_layers {
        return Err(cannot(
            "the file it comes from does not say how many layers the model has; pass --model".to_owned(),
        ));
    }
    let mut metadata = HashMap::from([
        ("format".to_owned(), FORMAT.to_owned()),
        ("operation".to_owned(), direction.operation.name().to_owned()),
        ("n_layers".to_owned(), direction.layers.len().to_string()),
        ("width".to_owned(), direction.width.to_string()),
        ("content_sha256".to_owned(), direction.content_sha256()),
    ]);
    let origin = &direction.origin;
    let component = direction.component.map(|component| component.name().to_owned());
    for (key, value) in [
        ("component", &component),
        ("label", &origin.label),
        ("model_sha256", &origin.model_sha256),
        ("method", &origin.method),
        ("contrast", &origin.contrast),
    ] {
        metadata.extend(value.clone().map(|value| (key.to_owned(), value)));
    }
    let rows: Vec<(String, Vec<u8>)> = direction
        .layer_ids()
        .into_iter()
        .map(|layer| {
            let bytes = direction.layers[layer].iter().flat_map(|value| value.to_le_bytes()).collect();
            (format!("direction.{layer}"), bytes)
        })
        .collect();
    let views = rows
        .iter()
        .map(|(name, bytes)| Ok((name.clone(), TensorView::new(Dtype::F32, vec![direction.width], bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>()
        .map_err(|e| cannot(e.to_string()))?;
    safetensors::serialize(views, Some(metadata)).map_err(|e| cannot(e.to_string()))
}
