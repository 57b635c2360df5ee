//! `synth`: random but sane models of any shape.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use gguf_tools::synth::{Shape, SynthOptions, write_checkpoint};
use serde_json::json;

use super::{print, print_json};
use crate::render::progress::Reporter;
use crate::render::units;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Whose widths to take.
    #[arg(long, value_name = "SHAPE", default_value = "tiny", value_parser = ["tiny", "flash", "pro"])]
    shape: String,
    /// Layers; all of the shape if left out.
    #[arg(long, value_name = "N")]
    layers: Option<u64>,
    /// Routed experts of a layer; all of the shape if left out.
    #[arg(long, value_name = "N", visible_alias = "n-experts")]
    experts: Option<u64>,
    /// Seed of every value: the same seed gives the same bytes everywhere.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The folder to make.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Show no progress.
    #[arg(long)]
    quiet: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let shape = Shape::NAMES.iter().find(|(name, _)| *name == arguments.shape);
    let (_, shape) = *shape.context("the parser admits known shapes only")?;
    let options = SynthOptions {
        layers: arguments.layers,
        experts: arguments.experts,
        seed: arguments.seed,
        ..SynthOptions::new(shape)
    };
    let reporter = Reporter::new("writing", arguments.quiet);
    let result = write_checkpoint(&arguments.out, &options, &reporter);
    reporter.finish();
    let summary = result?;
    if arguments.json {
        print_json(&json!({
            "path": arguments.out,
            "tensors": summary.n_tensors,
            "data_bytes": summary.data_bytes,
            "shards": summary.n_shards,
        }))?;
    } else {
        print(&format!(
            "{} tensors, {} in {} shards\n{}",
            summary.n_tensors,
            units::exact_bytes(summary.data_bytes),
            summary.n_shards,
            arguments.out.display()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
