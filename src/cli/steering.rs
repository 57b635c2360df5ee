//! Arguments of the commands whose model can be steered.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use dir_steering::{Component, ModelIdentity};
use runner::Options;

use super::UsageError;

/// Directions that are taken out of what layers write: `y -= F * v * (v . y)`.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Steering")]
pub(super) struct SteeringArguments {
    /// A direction to take out; several are taken out one after the other.
    #[arg(id = "dir-steering-file", long = "dir-steering-file", value_name = "FILE")]
    file: Vec<PathBuf>,
    /// How much of it is taken out of FFN outputs, one number a file; below 0 amplifies it. If left out: 1, or 0 for a
    /// direction made for attention outputs.
    #[arg(
        id = "dir-steering-ffn",
        long = "dir-steering-ffn",
        value_name = "F",
        allow_negative_numbers = true,
        requires = "dir-steering-file"
    )]
    ffn: Vec<f32>,
    /// How much of it is taken out of attention outputs, one number a file. If left out: 0, or 1 for a direction made for
    /// attention outputs and no number for FFN outputs.
    #[arg(
        id = "dir-steering-attn",
        long = "dir-steering-attn",
        value_name = "F",
        allow_negative_numbers = true,
        requires = "dir-steering-file"
    )]
    attn: Vec<f32>,
    /// Use directions on another checkpoint than they were made on.
    #[arg(
        id = "dir-steering-any-checkpoint",
        long = "dir-steering-any-checkpoint",
        requires = "dir-steering-file"
    )]
    any_checkpoint: bool,
}

impl SteeringArguments {
    /// The options with these directions, checked against the model.
    pub(super) fn add_to(&self, options: Options, model: &Path) -> anyhow::Result<Options> {
        if self.file.is_empty() {
            return Ok(options);
        }
        let n_files = self.file.len();
        for (option, scales) in [("ffn", &self.ffn), ("attn", &self.attn)] {
            if !scales.is_empty() && scales.len() != n_files {
                let found = scales.len();
                let message = format!(
                    "--dir-steering-{option}: found {found} numbers, expected one for each of {n_files} files"
                );
                return Err(UsageError(message).into());
            }
        }
        let identity = ModelIdentity::open(model)?;
        let mut steering = Vec::with_capacity(n_files);
        for (i, file) in self.file.iter().enumerate() {
            let (direction, _) = dir_steering::open(file)?;
            let of_attention = direction.component == Some(Component::AttnOut) && self.ffn.is_empty();
            let (ffn, attention) = if of_attention { (0.0, 1.0) } else { (1.0, 0.0) };
            let ffn = self.ffn.get(i).copied().unwrap_or(ffn);
            let attention = self.attn.get(i).copied().unwrap_or(attention);
            steering.push(Arc::new(direction.for_model(&identity, ffn, attention, self.any_checkpoint)?));
        }
        Ok(Options { steering, ..options })
    }
}
