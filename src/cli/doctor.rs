//! `doctor`: what this machine can compute with, and whether it computes right.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use runner::cuda::check::{Check, Group, SelfTest, self_test};
use runner::cuda::compiler::compiler;
use runner::cuda::{CudaError, Device, Kernels, Plan, Room};
use runner::weights::open_source;
use serde_json::json;

use super::model::{ComputeArguments, memory_sum, tokenizer};
use super::{print, print_json};
use crate::nano;
use crate::render::units;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Tell whether this model fits the device.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    compute: ComputeArguments,
    /// Compare the device with the CPU: everything, or one group.
    #[arg(long, value_name = "GROUP", num_args = 0..=1, default_missing_value = "all",
          value_parser = ["all", "rows", "attention", "matrices", "model", "equalities", "steering"])]
    self_test: Option<String>,
    /// Number of the device.
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let Some(group) = &arguments.self_test {
        return check(arguments, group);
    }
    // A model that cannot be read is an error whatever the device.
    let options = arguments.compute.options()?;
    let plan = arguments
        .model
        .as_ref()
        .map(|path| -> anyhow::Result<Plan> { Ok(Plan::new(open_source(path)?.as_ref(), &options)) });
    let plan = plan.transpose()?;
    let device = match Device::open(arguments.device) {
        Ok(device) => device,
        Err(error) => return report_none(arguments, plan, &error),
    };
    let facts = device.facts();
    let (free, total) = device.memory()?;
    let kernels = Kernels::load(&device, arguments.compute.kernels());
    let room = Room::of(&device, options.device_bytes)?;
    let fits = |plan: &Plan| plan.total() <= room.bytes;
    let compiler = compiler().map(|(major, minor)| format!("{major}.{minor}"));
    if arguments.json {
        print_json(&json!({
            "device": facts.name,
            "compute_capability": format!("{}.{}", facts.capability.0, facts.capability.1),
            "multiprocessors": facts.n_multiprocessors,
            "cuda_of_driver": format!("{}.{}", facts.driver / 1000, facts.driver % 1000 / 10),
            "nvrtc": compiler.as_ref().ok(),
            "nvrtc_problem": compiler.as_ref().err(),
            "kernels": kernels.as_ref().ok().map(Kernels::origin),
            "problem": kernels.as_ref().err().map(ToString::to_string),
            "memory_bytes": { "free": free, "total": total },
            "room": { "bytes": room.bytes, "why": room.why },
            "model": plan.map(|plan| numbers(&plan, Some(fits(&plan)))),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = format!(
        "device       {} (number {}, compute capability {}.{}, {} multiprocessors)\n\
         driver       CUDA {}.{}\n\
         kernels      {}\n\
         compiler     {}\n\
         memory       {} free of {}",
        facts.name,
        arguments.device,
        facts.capability.0,
        facts.capability.1,
        facts.n_multiprocessors,
        facts.driver / 1000,
        facts.driver % 1000 / 10,
        kernels.map_or_else(|error| format!("none: {error}"), |kernels| kernels.origin()),
        compiler.map_or_else(|problem| format!("no NVRTC: {problem}"), |version| format!("NVRTC {version}")),
        units::bytes(free as u64),
        units::bytes(total as u64),
    );
    if let Some(plan) = plan {
        let verdict = if fits(&plan) { "fits" } else { "does not fit" };
        let room = units::bytes(room.bytes) + " (" + room.why + ")";
        text += &format!("\nmodel        {verdict} into {room}: needs {}", memory_sum(&plan));
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// What a model takes, as JSON. `fits`: nothing where there is no device.
fn numbers(plan: &Plan, fits: Option<bool>) -> serde_json::Value {
    json!({
        "weights_bytes": plan.weights, "cache_bytes": plan.cache, "cache_tokens": plan.tokens,
        "scratch_bytes": plan.scratch, "reserve_bytes": plan.reserve, "fits": fits,
    })
}

/// Says why no device can be used: a finding, not a failure. What a model would take is said all the same.
fn report_none(arguments: &Arguments, plan: Option<Plan>, error: &CudaError) -> anyhow::Result<ExitCode> {
    if arguments.json {
        let model = plan.map(|plan| numbers(&plan, None));
        print_json(&json!({ "device": null, "problem": error.to_string(), "model": model }))?;
    } else {
        let model = plan.map(|plan| format!("\nmodel        needs {} on a device", memory_sum(&plan)));
        let model = model.unwrap_or_default();
        print(&format!(
            "device       none that can be used: {error}\nbackend      `auto` is the CPU{model}"
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs groups of checks with the built-in model.
fn check(arguments: &Arguments, wanted: &str) -> anyhow::Result<ExitCode> {
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let model = folder.path().join("nano");
    nano::write_checkpoint(&model).context("cannot write the built-in model")?;
    let text = nano::HELD_OUT.map(|(_, text)| text).concat();
    let tokens = tokenizer(&model)?.encode_plain(&text)?;
    let test = SelfTest {
        ordinal: arguments.device,
        kernels: arguments.compute.kernels(),
        model: &model,
        tokens: &tokens,
    };
    let (mut n_passed, mut failed) = (0, Vec::new());
    for (name, group) in Group::NAMES.into_iter().filter(|(name, _)| wanted == "all" || wanted == *name) {
        let mut each = |check: &Check| {
            let Check { name: what, passed, detail, seconds } = check;
            if *passed {
                n_passed += 1;
            } else {
                failed.push(check.clone());
            }
            if !arguments.json {
                let mark = if *passed { "ok  " } else { "FAIL" };
                println!("{mark} {name}: {what} ({seconds:.2} s) {detail}");
            }
        };
        self_test(&test, group, &mut each).with_context(|| format!("the checks of `{name}` ended early"))?;
    }
    if arguments.json {
        print_json(&json!({ "passed": n_passed, "failed": failed }))?;
    } else {
        print(&format!("{n_passed} checks passed, {} failed", failed.len()))?;
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
