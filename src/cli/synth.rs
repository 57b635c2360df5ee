//! `synth`: random but sane models of any shape, as a checkpoint or as a GGUF.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use clap::builder::Resettable;
use clap::{Arg, Args};
use gguf_tools::build::{BuildOptions, build};
use gguf_tools::importance::NoImportance;
use gguf_tools::source::WeightSource;
use gguf_tools::synth::{Shape, SynthOptions, SynthSource, write_checkpoint};
use runner::cuda::check::check_synthetic;
use runner::{ActivationPrecision, Model, Options, Processor};
use serde_json::json;

use super::arguments::{RECIPE_HEADING, RecipeArguments, make_plan};
use super::model::{print_memory_plan, synthetic};
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
    #[arg(
        long,
        value_name = "DIR|FILE",
        required_unless_present = "on_device",
        conflicts_with = "on_device"
    )]
    out: Option<PathBuf>,
    /// Write a GGUF, quantized as the recipe says, without a checkpoint on disk.
    #[arg(long, group = "typed")]
    gguf: bool,
    /// Write nothing: fill the GPU with random weights of the types that the recipe says, run a few tokens, and compare
    /// what layers of every kind compute with rows that the CPU makes again. `bench --synthetic` measures such models.
    #[arg(long, group = "typed")]
    on_device: bool,
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

/// A recipe is for a GGUF or a device. `--experts` counts experts here, so their type goes by its other name.
fn recipe_argument(argument: Arg) -> Arg {
    if argument.get_help_heading() != Some(RECIPE_HEADING) {
        return argument;
    }
    let argument = argument.requires("typed");
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
    if arguments.on_device {
        return fill_device(arguments, &options);
    }
    let out = arguments.out.as_deref().context("the parser demands --out")?;
    if arguments.gguf { write_gguf(arguments, out, &options) } else { write_folder(arguments, out, &options) }
}

fn fill_device(arguments: &Arguments, options: &SynthOptions) -> anyhow::Result<ExitCode> {
    let source = synthetic(options, &arguments.recipe.recipe()?)?;
    let weights: Arc<dyn runner::weights::WeightSource> = source.clone();
    let settings = Options {
        processor: Processor::Cuda(0),
        activations: ActivationPrecision::Mixed,
        ..Options::default()
    };
    print_memory_plan(weights.as_ref(), &settings);
    let started = Instant::now();
    let model = Model::new(&weights, settings)?;
    let load_seconds = started.elapsed().as_secs_f64();
    let n_bytes: u64 = source.headers().data_bytes();
    let mut checks = Vec::new();
    check_synthetic(&model, &source, &mut |check| {
        if !arguments.quiet {
            let mark = if check.passed { "ok  " } else { "FAIL" };
            eprintln!("{mark} {} ({:.2} s) {}", check.name, check.seconds, check.detail);
        }
        checks.push(check.clone());
    })?;
    let failed: Vec<_> = checks.iter().filter(|check| !check.passed).collect();
    if arguments.json {
        print_json(&json!({
            "tensor_bytes": n_bytes, "load_seconds": load_seconds, "checks": checks.len(), "failed": failed,
        }))?;
    } else {
        print(&format!(
            "{} of weights in {}; {} checks, {} failed",
            units::exact_bytes(n_bytes),
            units::seconds(load_seconds),
            checks.len(),
            failed.len()
        ))?;
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write_gguf(arguments: &Arguments, out: &Path, options: &SynthOptions) -> anyhow::Result<ExitCode> {
    let source = SynthSource::new(options)?;
    let plan = make_plan(&source, &arguments.recipe, source.label(), None, true)?;
    warn_of(&plan);
    let options = BuildOptions {
        overwrite: arguments.overwrite,
        resume: !arguments.no_resume,
        importance_fallback: true,
    };
    let reporter = Reporter::new("quantizing", arguments.quiet);
    let result = build(&plan, &source, &NoImportance, out, options, &reporter);
    reporter.finish();
    print_report(&result?, arguments.json)?;
    Ok(ExitCode::SUCCESS)
}

fn write_folder(arguments: &Arguments, out: &Path, options: &SynthOptions) -> anyhow::Result<ExitCode> {
    let reporter = Reporter::new("writing", arguments.quiet);
    let result = write_checkpoint(out, options, &reporter);
    reporter.finish();
    let summary = result?;
    if arguments.json {
        print_json(&json!({
            "path": out,
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
            out.display()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
