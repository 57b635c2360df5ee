//! A direction with everything that it needs to be used rightly.

use std::path::{Path, PathBuf};

use runner::forward::Steering;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::component::Component;
use crate::error::SteeringError;
use crate::model::ModelIdentity;

/// What a vector does to an activation `y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// `y -= scale * v * (v . y)`, `|v| = 1`: the strength is in the scale alone.
    Project,
    /// `y += scale * v` behind a layer, as llama.cpp's control vectors: the length of `v` is part of the strength.
    Add,
}

impl Operation {
    /// The name files store.
    pub fn name(self) -> &'static str {
        match self {
            Self::Project => "project",
            Self::Add => "add",
        }
    }
}

/// How a direction was made, as far as its file says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Origin {
    /// The checkpoint that the activations came from.
    pub label: Option<String>,
    /// What identifies the model file: see [`ModelIdentity::sha256`].
    pub model_sha256: Option<String>,
    /// Method and settings, in words.
    pub method: Option<String>,
    /// The prompts told apart, in words.
    pub contrast: Option<String>,
}

/// One direction a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Direction {
    /// What it does.
    pub operation: Operation,
    /// The place it was made for; `None`: the file does not say.
    pub component: Option<Component>,
    /// Values a layer.
    pub width: usize,
    /// `[layers of the model]`, each `[width]`, or empty where a layer has none.
    #[serde(skip)]
    pub layers: Vec<Vec<f32>>,
    /// Whether `layers` covers exactly the model's layers: false for files that list only layers with a direction.
    pub states_n_layers: bool,
    /// How it was made.
    pub origin: Origin,
    /// The file it was read from.
    #[serde(skip)]
    pub path: PathBuf,
}

/// A unit vector's length may be off by this much: what rounding to `f32` and other tools leave.
const NORM_TOLERANCE: f64 = 1e-3;

impl Direction {
    /// Layers that have a direction.
    pub fn layer_ids(&self) -> Vec<usize> {
        (0..self.layers.len()).filter(|&layer| !self.layers[layer].is_empty()).collect()
    }

    /// SHA-256 of all values, little-endian, layers ascending: the same in every file format that holds the same direction.
    pub fn content_sha256(&self) -> String {
        let mut hash = Sha256::new();
        for value in self.layers.iter().flatten() {
            hash.update(value.to_le_bytes());
        }
        hex(&hash.finalize())
    }

    /// Length of a layer's vector.
    pub fn norm(&self, layer: usize) -> f64 {
        norm(&self.layers[layer])
    }

    /// Scales every vector to length 1.
    ///
    /// # Errors
    /// If one has no length.
    pub fn normalize(&mut self) -> Result<(), SteeringError> {
        for (layer, vector) in self.layers.iter_mut().enumerate().filter(|(_, vector)| !vector.is_empty()) {
            let length = norm(vector);
            if !length.is_normal() {
                return Err(SteeringError::NoLength { path: self.path.clone(), layer, length });
            }
            for value in vector {
                *value = (f64::from(*value) / length) as f32;
            }
        }
        Ok(())
    }

    /// Keeps the directions of layers `first..=last` alone.
    ///
    /// # Errors
    /// If none is left.
    pub fn keep_layers(&mut self, first: usize, last: usize) -> Result<(), SteeringError> {
        let had = self.layer_ids();
        for (layer, vector) in self.layers.iter_mut().enumerate() {
            if !(first..=last).contains(&layer) {
                vector.clear();
            }
        }
        if self.layer_ids().is_empty() {
            return Err(SteeringError::NoLayerLeft { path: self.path.clone(), first, last, had });
        }
        Ok(())
    }

    /// Refuses values that no operation can use: not finite, or of wrong length for a projection.
    ///
    /// # Errors
    /// Names layer, value and what was expected.
    pub fn check_values(&self) -> Result<(), SteeringError> {
        let path = || self.path.clone();
        if self.layer_ids().is_empty() {
            return Err(SteeringError::Empty { path: path() });
        }
        for layer in self.layer_ids() {
            let vector = &self.layers[layer];
            if vector.len() != self.width {
                return Err(SteeringError::Width {
                    path: path(),
                    layer,
                    found: vector.len(),
                    expected: self.width,
                });
            }
            if let Some(index) = vector.iter().position(|value| !value.is_finite()) {
                return Err(SteeringError::NotFinite { path: path(), layer, index, found: vector[index] });
            }
            let length = norm(vector);
            if self.operation == Operation::Project && (length - 1.0).abs() > NORM_TOLERANCE {
                return Err(SteeringError::NotUnit { path: path(), layer, length });
            }
        }
        Ok(())
    }

    /// What the runner takes: checks that the direction is a projection made for this model.
    ///
    /// # Errors
    /// If the operation is another, the values are unusable, width, layers or checkpoint differ from the model's.
    /// `allow_other_checkpoint` lets a different label pass.
    pub fn for_model(
        &self,
        model: &ModelIdentity,
        ffn_scale: f32,
        attention_scale: f32,
        allow_other_checkpoint: bool,
    ) -> Result<Steering, SteeringError> {
        for (option, scale) in [("ffn", ffn_scale), ("attn", attention_scale)] {
            if !scale.is_finite() {
                return Err(SteeringError::Scale { option, found: scale });
            }
        }
        if self.operation != Operation::Project {
            return Err(SteeringError::Additive { path: self.path.clone() });
        }
        if let Some(component) = self.component.filter(|component| !component.can_be_steered()) {
            return Err(SteeringError::Place { path: self.path.clone(), component: component.name() });
        }
        if self.width != model.width {
            let (found, expected) = (self.width, model.width);
            return Err(SteeringError::ModelWidth { path: self.path.clone(), found, expected });
        }
        let fits = if self.states_n_layers {
            self.layers.len() == model.n_layers
        } else {
            self.layers.len() <= model.n_layers
        };
        if !fits {
            let (found, expected) = (self.layers.len(), model.n_layers);
            return Err(SteeringError::ModelLayers { path: self.path.clone(), found, expected });
        }
        self.check_values()?;
        if let (Some(found), Some(expected)) = (&self.origin.label, &model.label)
            && found != expected
            && !allow_other_checkpoint
        {
            return Err(SteeringError::Checkpoint {
                path: self.path.clone(),
                found: found.clone(),
                expected: expected.clone(),
            });
        }
        let mut directions = self.layers.clone();
        directions.resize(model.n_layers, Vec::new());
        let content = self.content_sha256();
        let name = format!("{} ffn {ffn_scale} attn {attention_scale}", &content[..16]);
        Ok(Steering { name, directions, attention_scale, ffn_scale })
    }

    /// The same vectors read as another operation: an explicit change of meaning.
    ///
    /// A projection needs unit vectors, so they are normalized; an addition gets `length` times the unit vector.
    ///
    /// # Errors
    /// If a vector has no length.
    pub fn reinterpret(&self, operation: Operation, length: f32) -> Result<Self, SteeringError> {
        let mut other = Self { operation, ..self.clone() };
        other.normalize()?;
        if operation == Operation::Add {
            other.layers.iter_mut().flatten().for_each(|value| *value *= length);
            other.component = None;
        }
        Ok(other)
    }

    /// With the path that messages name.
    pub(crate) fn at(mut self, path: &Path) -> Self {
        path.clone_into(&mut self.path);
        self
    }
}

/// Euclidean length.
pub(crate) fn norm(vector: &[f32]) -> f64 {
    vector.iter().map(|&value| f64::from(value) * f64::from(value)).sum::<f64>().sqrt()
}

/// Hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = |byte: &u8| [byte >> 4, byte & 15].map(|digit| char::from(DIGITS[usize::from(digit)]));
    bytes.iter().flat_map(digits).collect()
}
