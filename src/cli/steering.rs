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
    #[arg(long, value_name = "FILE")]
    dir_steering_file: Vec<PathBuf>,
    /// How much of it is taken out of FFN outputs, one number a file; below 0 amplifies it. If left out: 1, or 0 for a
    /// direction made for attention outputs.
    #[arg(long, value_name = "F", allow_negative_numbers = true, requires = "dir_steering_file")]
    dir_steering_ffn: Vec<f32>,
    /// How much of it is taken out of attention outputs, one number a file. If left out: 0, or 1 for a direction made for
    /// attention outputs and no number for FFN outputs.
    #[arg(long, value_name = "F", allow_negative_numbers = true, requires = "dir_steering_file")]
    dir_steering_attn: Vec<f32>,
    /// Use directions on another checkpoint than they were made on.
    #[arg(long, requires = "dir_steering_file")]
    dir_steering_any_checkpoint: bool,
}

impl SteeringArguments {
    /// The options with these directions, checked against the model.
    pub(super) fn add_to(&self, options: Options, model: &Path) -> anyhow::Result<Options> {
        if self.dir_steering_file.is_empty() {
            return Ok(options);
        }
        let n_files = self.dir_steering_file.len();
        for (option, scales) in [("ffn", &self.dir_steering_ffn), ("attn", &self.dir_steering_attn)] {
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
        for (i, file) in self.dir_steering_file.iter().enumerate() {
            let (direction, _) = dir_steering::open(file)?;
            let of_attention =
                direction.component == Some(Component::AttnOut) && self.dir_steering_ffn.is_empty();
            let (ffn, attention) = if of_attention { (0.0, 1.0) } else { (1.0, 0.0) };
            let ffn = self.dir_steering_ffn.get(i).copied().unwrap_or(ffn);
            let attention = self.dir_steering_attn.get(i).copied().unwrap_or(attention);
            steering.push(Arc::new(direction.for_model(
                &identity,
                ffn,
                attention,
                self.dir_steering_any_checkpoint,
            )?));
        }
        Ok(Options { steering, ..options })
    }
}
