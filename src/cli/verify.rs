//! `verify`: reads a whole file and checks everything in it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use gguf_tools::verify::{Severity, VerifyReport, verify};

use super::{print, print_json};
use crate::render::progress::Reporter;
use crate::render::units;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The GGUF file, or any shard of a split set.
    file: PathBuf,
    /// Make warnings a failure.
    #[arg(long)]
    strict: bool,
    /// Show no progress.
    #[arg(long)]
    quiet: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let reporter = Reporter::new("checking", arguments.quiet);
    let result = verify(&arguments.file, &reporter);
    reporter.finish();
    let report = result?;
    if arguments.json {
        print_json(&report)?;
    } else {
        print(&text(&report))?;
    }
    let passed = report.is_sound() && (report.findings.is_empty() || !arguments.strict);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(report: &VerifyReport) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        let kind = match finding.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        let tensor = finding.tensor.as_ref().map_or_else(String::new, |name| format!("`{name}`: "));
        text += &format!("{kind}: {tensor}{}\n", finding.message);
    }
    if !report.only_sized.is_empty() {
        text += &format!("sizes only, values not checked: {}\n", report.only_sized.join(", "));
    }
    if let Some(layers) = &report.layers {
        text += &format!("a part of a model: layers {} to {} of {}\n", layers.first, layers.last, layers.of);
    }
    for runtime in &report.runtimes {
        let verdict = if runtime.loads { "should load it" } else { "will not load it" };
        text += &format!("{} {verdict}\n", runtime.name);
        for reason in runtime.reasons.iter().chain(&runtime.warnings) {
            text += &format!("  {reason}\n");
        }
    }
    for file in &report.files {
        text += &format!("sha256 {}  {} ({})\n", file.sha256, file.path, units::bytes(file.file_bytes));
    }
    let verdict = if report.is_sound() { "sound" } else { "BROKEN" };
    text + &format!(
        "{verdict}: {} of {} tensors checked value by value, {}",
        report.n_checked_tensors,
        report.n_tensors,
        units::bytes(report.tensor_bytes)
    )
}
