//! `score`: how good a file is, by recorded official answers and by how close its predictions are to another's.

mod collect;
mod compare;
mod kld;
mod report;
mod run;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};

pub(super) use kld::{COLUMNS, row};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Score a model by recorded official continuations.
    Run(run::Arguments),
    /// Compare two tables of scores, case by case.
    Compare(compare::Arguments),
    /// Divergence, perplexity and agreement with a base model on a text.
    Kld(kld::Arguments),
    /// Make an HTML page and a Markdown card of results.
    Report(report::Arguments),
    /// Record continuations of the official API.
    Collect(collect::Arguments),
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Run(arguments) => run::run(arguments),
        Command::Compare(arguments) => compare::run(arguments),
        Command::Kld(arguments) => kld::run(arguments),
        Command::Report(arguments) => report::run(arguments),
        Command::Collect(arguments) => collect::run(arguments),
    }
}

/// Refuses to write over a file unless asked to.
fn check_output(path: &Path, overwrite: bool) -> anyhow::Result<()> {
    anyhow::ensure!(
        overwrite || !path.exists(),
        "`{}` exists; choose another name, or add --overwrite",
        path.display()
    );
    Ok(())
}

/// Writes a result whole or not at all.
fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    quality_testing::files::write_whole(path, text.as_bytes())
        .with_context(|| format!("cannot write `{}`", path.display()))
}
