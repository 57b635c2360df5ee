//! ds4's form: `NAME.f32`, values alone, and `NAME.json` that describes them.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::field;
use crate::component::Component;
use crate::direction::{Direction, Operation, Origin};
use crate::error::SteeringError;

const FORMAT: &str = "ds4-directional-steering-v1";

/// `NAME.json` of `NAME.f32`.
pub(super) fn description_path(path: &Path) -> PathBuf {
    path.with_extension("json")
}

pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Direction, SteeringError> {
    let json = description_path(path);
    let text = std::fs::read_to_string(&json).map_err(|source| {
        if source.kind() == std::io::ErrorKind::NotFound {
            SteeringError::NoDescription { path: path.to_owned(), json: json.clone() }
        } else {
            SteeringError::Read { path: json.clone(), source }
        }
    })?;
    let description: Value = serde_json::from_str(&text)
        .map_err(|e| field(&json, "content", format!("no JSON ({e})"), "a JSON object"))?;
    let text_of = |key: &str| description.get(key).and_then(Value::as_str).map(str::to_owned);
    if text_of("format").as_deref() != Some(FORMAT) {
        return Err(field(&json, "\"format\"", description["format"].to_string(), format!("\"{FORMAT}\"")));
    }
    let shape: Option<Vec<u64>> =
        description["shape"].as_array().and_then(|shape| shape.iter().map(Value::as_u64).collect());
    let Some(&[n_layers, width]) = shape.as_deref().filter(|shape| !shape.contains(&0)) else {
        return Err(field(&json, "\"shape\"", description["shape"].to_string(), "[layers, width]"));
    };
    let expected = n_layers.checked_mul(width).and_then(|n| n.checked_mul(4));
    if expected != Some(bytes.len() as u64) {
        let expected = format!("{n_layers} layers x {width} values x 4 bytes, as `{}` says", json.display());
        return Err(field(path, "file size", format!("{} bytes", bytes.len()), expected));
    }
    let component = text_of("component").unwrap_or_default();
    let component = Component::from_name(&component)
        .ok_or_else(|| field(&json, "\"component\"", format!("\"{component}\""), "ffn_out or attn_out"))?;
    let values: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    // A row of zeros is this form's way to say that a layer has none.
    let row = |row: &[f32]| if row.iter().all(|&value| value == 0.0) { Vec::new() } else { row.to_vec() };
    let contrast =
        text_of("good_file").zip(text_of("bad_file")).map(|(good, bad)| format!("{good} against {bad}"));
    Ok(Direction {
        operation: Operation::Project,
        component: Some(component),
        width: width as usize,
        layers: values.chunks_exact(width as usize).map(row).collect(),
        states_n_layers: true,
        origin: Origin {
            label: text_of("label"),
            model_sha256: text_of("model_sha256"),
            method: text_of("method"),
            contrast: text_of("contrast").or(contrast),
        },
        path: path.to_owned(),
    })
}

/// Values and description.
pub(super) fn bytes(direction: &Direction) -> Result<(Vec<u8>, String), SteeringError> {
    let cannot = |reason: &str| SteeringError::CannotHold { format: "f32", reason: reason.to_owned() };
    if direction.operation != Operation::Project {
        return Err(cannot(
            "its vectors are added, and these files are always projected; --as project changes the meaning",
        ));
    }
    let component = direction
        .component
        .filter(|component| component.can_be_steered())
        .ok_or_else(|| cannot("it must belong to ffn_out or attn_out"))?;
    if !direction.states_n_layers {
        return Err(cannot(
            "the file it comes from does not say how many layers the model has; pass --model",
        ));
    }
    let zeros = vec![0.0_f32; direction.width];
    let rows = direction.layers.iter().map(|row| if row.is_empty() { &zeros } else { row });
    let values = rows.flatten().flat_map(|value| value.to_le_bytes()).collect();
    let origin = &direction.origin;
    let description = json!({
        "format": FORMAT,
        "shape": [direction.layers.len(), direction.width],
        "component": component.name(),
        "label": origin.label,
        "model_sha256": origin.model_sha256,
        "method": origin.method,
        "contrast": origin.contrast,
        "content_sha256": direction.content_sha256(),
        "note": "y -= scale * v * (v . y): a positive scale takes the direction out, a negative one amplifies it",
    });
    Ok((values, format!("{description:#}\n")))
}
