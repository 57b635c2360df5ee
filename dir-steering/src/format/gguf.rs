//! GGUF files with tensors `direction.N`: llama.cpp's control vectors, which are added, and GLP files, which say that they
//! are projected. Both begin with layer 1: the container has no place for layer 0.

use std::path::Path;

use gguf_tools::block::BlockType;
use gguf_tools::gguf::{Gguf, Layout, Metadata, NewTensor, Value};

use super::{Format, field};
use crate::component::Component;
use crate::direction::{Direction, Operation, Origin};
use crate::error::SteeringError;

const ARCHITECTURE: &str = "controlvector";
/// More layers than any model has.
const MAX_LAYERS: usize = 4096;

pub(super) fn read(path: &Path) -> Result<(Direction, Format), SteeringError> {
    let gguf = Gguf::open(path)?;
    let metadata = gguf.metadata();
    let text = |key: &str| metadata.get(key).and_then(Value::as_str);
    let shown = |key: &str| text(key).map_or_else(|| "absent".to_owned(), |found| format!("\"{found}\""));
    if text("general.architecture") != Some(ARCHITECTURE) {
        let expected = format!("\"{ARCHITECTURE}\"; this is no direction file");
        return Err(field(path, "`general.architecture`", shown("general.architecture"), expected));
    }
    let projected = match text("glp.mode") {
        Some("project") => true,
        None => false,
        Some(_) => return Err(field(path, "`glp.mode`", shown("glp.mode"), "\"project\"")),
    };
    let component = match text("glp.hook_point") {
        Some(hook) if projected => Some(Component::from_hook(hook).ok_or_else(|| {
            field(
                path,
                "`glp.hook_point`",
                shown("glp.hook_point"),
                "ffn_out_pre_residual or attn_out_pre_residual, where this runner acts",
            )
        })?),
        None if projected => {
            return Err(field(path, "`glp.hook_point`", "absent", "the place the direction is for"));
        }
        _ => None,
    };
    let mut layers: Vec<Vec<f32>> = Vec::new();
    for tensor in gguf.tensors() {
        let layer = tensor.name.strip_prefix("direction.").and_then(|layer| layer.parse::<usize>().ok());
        let Some(layer) = layer.filter(|&layer| layer > 0 && layer < MAX_LAYERS) else {
            return Err(field(
                path,
                "a tensor's name",
                format!("`{}`", tensor.name),
                "direction.N with N from 1 on",
            ));
        };
        let &[width] = tensor.shape.as_slice() else {
            return Err(field(
                path,
                format!("shape of `{}`", tensor.name),
                format!("{:?}", tensor.shape),
                "one dimension",
            ));
        };
        if tensor.block_type != BlockType::F32 {
            return Err(field(
                path,
                format!("type of `{}`", tensor.name),
                tensor.block_type.to_string(),
                "F32",
            ));
        }
        if layers.len() <= layer {
            layers.resize(layer + 1, Vec::new());
        }
        let data = gguf.data(tensor)?;
        layers[layer] = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        if layers[layer].len() as u64 != width {
            return Err(field(
                path,
                format!("`{}`", tensor.name),
                format!("{} values", layers[layer].len()),
                width.to_string(),
            ));
        }
    }
    let width = layers.iter().map(Vec::len).max().unwrap_or(0);
    let direction = Direction {
        operation: if projected { Operation::Project } else { Operation::Add },
        component,
        width,
        layers,
        states_n_layers: false,
        origin: Origin {
            label: text("general.base_model.0.name").map(str::to_owned),
            model_sha256: None,
            method: text("glp.method").map(str::to_owned),
            contrast: text("glp.contrast").map(str::to_owned),
        },
        path: path.to_owned(),
    };
    if let Some(stated) = text("glp.content_sha256") {
        let sum = direction.content_sha256();
        if stated != sum {
            return Err(field(path, "the values' SHA-256", sum, format!("{stated}, as its metadata say")));
        }
    }
    Ok((direction, if projected { Format::Glp } else { Format::ControlVector }))
}

pub(super) fn bytes(direction: &Direction, format: Format) -> Result<Vec<u8>, SteeringError> {
    let cannot =
        |reason: &str| SteeringError::CannotHold { format: format.name(), reason: reason.to_owned() };
    let layers = direction.layer_ids();
    if layers.first() == Some(&0) {
        return Err(cannot(
            "it has a direction for layer 0, for which the container has no place; --layers 1:LAST leaves it out",
        ));
    }
    let mut metadata = Metadata::default();
    let mut set = |key: &str, value: &str| metadata.set(key, Value::String(value.to_owned()));
    set("general.architecture", ARCHITECTURE);
    set("general.type", ARCHITECTURE);
    let origin = &direction.origin;
    if format == Format::Glp {
        if direction.operation != Operation::Project {
            return Err(cannot(
                "its vectors are added, and GLP files are projected; --as project changes the meaning",
            ));
        }
        let hook = direction.component.and_then(Component::hook);
        set("glp.mode", "project");
        set("glp.hook_point", hook.ok_or_else(|| cannot("it must belong to ffn_out or attn_out"))?);
        set("glp.content_sha256", &direction.content_sha256());
        let ids: Vec<String> = layers.iter().map(ToString::to_string).collect();
        set("glp.layer_ids_zero_based", &ids.join(","));
        set("glp.method", origin.method.as_deref().unwrap_or("unknown"));
        if let Some(contrast) = &origin.contrast {
            set("glp.contrast", contrast);
        }
    } else if direction.operation != Operation::Add {
        return Err(cannot(
            "it is projected, and control vectors are added behind a layer; --as add writes it so, which does something else",
        ));
    }
    if let Some(label) = &origin.label {
        set("general.base_model.0.name", label);
        metadata.set("general.base_model.count", 1_u32);
    }
    if format == Format::Glp {
        metadata.set("glp.spec_version", 1_u32);
        metadata.set("glp.rank", 1_u32);
        metadata.set("glp.alpha_default", 1.0_f32);
        metadata.set("glp.orthonormal", true);
    } else {
        metadata.set("controlvector.model_hint", Value::String("deepseek4".to_owned()));
        metadata.set("controlvector.layer_count", layers.len() as u32);
    }
    let new = |&layer: &usize| NewTensor {
        name: format!("direction.{layer}"),
        block_type: BlockType::F32,
        shape: vec![direction.width as u64],
    };
    let layout = Layout::new(metadata, layers.iter().map(new).collect(), 32)?;
    let mut bytes = layout.header_bytes();
    for (&layer, place) in layers.iter().zip(layout.tensors()) {
        bytes.resize(place.offset_bytes as usize, 0);
        bytes.extend(direction.layers[layer].iter().flat_map(|value| value.to_le_bytes()));
    }
    bytes.resize(layout.file_bytes() as usize, 0);
    Ok(bytes)
}
