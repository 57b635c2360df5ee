//! `synth`: random but sane models of any shape, as a checkpoint or as a GGUF.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::builder::Resettable;
use clap::{Arg, Args};
use gguf_tools::build::{BuildOptions, build};
use gguf_tools::importance::NoImportance;
use gguf_tools::source::WeightSource;
use gguf_tools::synth::{Shape, SynthOptions, SynthSource, write_checkpoint};
use serde_json::json;

use super::arguments::{RECIPE_HEADING, RecipeArguments, make_plan};
use super::quantize::{print_report, warn_of};
use super::{print, print_json};
use crate::render::progress::Reporter;
use crate::render::units;

#[derive(Debug, Args)]
#[command(mut_args(recipe_argument))]
pub(crate) struct Arguments {
    /// Whose widths to take.
    #[arg(long, value_name = "SHAPE", default_value = "tiny", value_parser = ["tiny", "flash", "pro"])]
    shape: String,
    /// Layers; all of the shape if left out.
    #[arg(long, value_name = "N")]
    layers: Option<u64>,
    /// Routed experts of a layer; all of the shape if left out.
    #[arg(long = "experts", value_name = "N", visible_alias = "n-experts")]
    n_experts: Option<u64>,
    /// Seed of every value: the same seed gives the same bytes everywhere.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// The folder of the checkpoint to make, or the GGUF.
    #[arg(long, value_name = "DIR|FILE")]
    out: PathBuf,
    /// Write a GGUF, quantized as the recipe says, without a checkpoint on disk.
    #[arg(long)]
    gguf: bool,
    /// Replace an existing GGUF.
    #[arg(long, visible_alias = "force", requires = "gguf")]
    overwrite: bool,
    /// Start again instead of going on from the part file of an interrupted run.
    #[arg(long, requires = "gguf")]
    no_resume: bool,
    /// Show no progress.
    #[arg(long)]
    quiet: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    recipe: RecipeArguments,
}

/// A recipe is for a GGUF. `--experts` counts experts here, so their type goes by its other name.
fn recipe_argument(argument: Arg) -> Arg {
    if argument.get_help_heading() != Some(RECIPE_HEADING) {
        return argument;
    }
    let argument = argument.requires("gguf");
    if argument.get_id() == "experts" {
        argument.long("routed").visible_alias(Resettable::Reset)
    } else {
        argument
    }
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let shape = Shape::NAMES.iter().find(|(name, _)| *name == arguments.shape);
    let (_, shape) = *shape.context("the parser admits known shapes only")?;
    let options = SynthOptions {
        layers: arguments.layers,
        experts: arguments.n_experts,
        seed: arguments.seed,
        ..SynthOptions::new(shape)
    };
    if arguments.gguf { write_gguf(arguments, &options) } else { write_folder(arguments, &options) }
}

fn write_gguf(arguments: &Arguments, options: &SynthOptions) -> anyhow::Result<ExitCode> {
    let source = SynthSource::new(options)?;
    let plan = make_plan(&source, &arguments.recipe, source.label(), None, true)?;
    warn_of(&plan);
    let options = BuildOptions {
        overwrite: arguments.overwrite,
        resume: !arguments.no_resume,
        importance_fallback: true,
    };
    let reporter = Reporter::new("quantizing", arguments.quiet);
    let result = build(&plan, &source, &NoImportance, &arguments.out, options, &reporter);
    reporter.finish();
    print_report(&result?, arguments.json)?;
    Ok(ExitCode::SUCCESS)
}

fn write_folder(arguments: &Arguments, options: &SynthOptions) -> anyhow::Result<ExitCode> {
    let reporter = Reporter::new("writing", arguments.quiet);
    let result = write_checkpoint(&arguments.out, options, &reporter);
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
