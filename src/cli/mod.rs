//! The commands. Each file: the arguments of one, and what it prints.

mod account;
mod arguments;
mod bench;
mod calibrate;
mod compare;
mod diff;
mod doctor;
mod download;
mod imatrix;
mod inspect;
mod merge;
mod model;
mod plan;
mod quantize;
mod quickstart;
mod relabel;
mod remote;
mod rewritten;
mod run;
mod score;
mod shell;
mod splice;
mod split;
mod steer;
mod steering;
mod synth;
mod trace;
mod vectors;
mod verify;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde::Serialize;

/// Makes, checks and proves GGUF files of DeepSeek V4. Only `download` and names that begin with hf: use the network.
///
/// Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
#[derive(Debug, Parser)]
#[command(name = "ggsmith", version, propagate_version = true, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the whole job on a small model, end to end, without a download.
    Quickstart(quickstart::Arguments),
    /// Fetch models and checkpoints, whole and right.
    Download(download::Arguments),
    /// What each tensor becomes and how large the file will be, from headers alone.
    Plan(plan::Arguments),
    /// Turn official safetensors, or another GGUF, into a GGUF.
    Quantize(quantize::Arguments),
    /// Show metadata, tensors, types and totals of a GGUF.
    Inspect(inspect::Arguments),
    /// Read a whole GGUF and check everything in it.
    Verify(verify::Arguments),
    /// Compare a GGUF with the checkpoint it was made from.
    Compare(compare::Arguments),
    /// What a decoded token costs: bytes by family, caches, ceilings of machines; from headers alone.
    Account(account::Arguments),
    /// Divide a GGUF into shards or into files by layers.
    Split(split::Arguments),
    /// Put a split set or layer files back into one file.
    Merge(merge::Arguments),
    /// Take some tensors of a file from another.
    Splice(splice::Arguments),
    /// Change metadata without touching tensors.
    Relabel(relabel::Arguments),
    /// Show what distinguishes two GGUF files.
    Diff(diff::Arguments),
    /// Generate text.
    Run(run::Arguments),
    /// Measure how fast a model reads and writes as the context grows.
    Bench(bench::Arguments),
    /// Show what this machine can compute with, and check that it computes right.
    Doctor(doctor::Arguments),
    /// Show the tokens of a text.
    Tokenize(run::TokenizeArguments),
    /// Measure how good a file is: by official answers, and by another file's predictions.
    Score(score::Arguments),
    /// Collect, show, merge, convert and compare importance matrices; build calibration texts.
    Imatrix(imatrix::Arguments),
    /// Replay recorded expert choices against caches.
    Trace(trace::Arguments),
    /// Record, fetch and check predictions behind fixed prompts.
    Vectors(vectors::Arguments),
    /// Find, try, show and convert directions in a model's activations.
    Steer(steer::Arguments),
    /// Write a random but sane model of any shape, as a checkpoint or a GGUF.
    Synth(synth::Arguments),
    /// Print the completion script of a shell.
    Completions(shell::CompletionArguments),
    /// Print the manual page of ggsmith or of one command.
    Man(shell::ManArguments),
}

/// Runs one command.
pub(crate) fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    crate::render::progress::stop_on_signals()?;
    match cli.command {
        Command::Quickstart(a) => quickstart::run(&a),
        Command::Download(a) => download::run(&a),
        Command::Plan(a) => plan::run(&a),
        Command::Quantize(a) => quantize::run(&a),
        Command::Inspect(a) => inspect::run(&a),
        Command::Verify(a) => verify::run(&a),
        Command::Compare(a) => compare::run(&a),
        Command::Account(a) => account::run(&a),
        Command::Split(a) => split::run(&a),
        Command::Merge(a) => merge::run(&a),
        Command::Splice(a) => splice::run(&a),
        Command::Relabel(a) => relabel::run(&a),
        Command::Diff(a) => diff::run(&a),
        Command::Run(a) => run::run(&a),
        Command::Bench(a) => bench::run(&a),
        Command::Doctor(a) => doctor::run(&a),
        Command::Tokenize(a) => run::tokenize(&a),
        Command::Score(a) => score::run(&a),
        Command::Imatrix(a) => imatrix::run(&a),
        Command::Trace(a) => trace::run(&a),
        Command::Vectors(a) => vectors::run(&a),
        Command::Steer(a) => steer::run(&a),
        Command::Synth(a) => synth::run(&a),
        Command::Completions(a) => shell::completions(&a),
        Command::Man(a) => shell::man(&a),
    }
}

/// A mistake in how the program was called, found after parsing.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub String);

/// 2 for a mistake in the call, else 1.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<UsageError>() { 2 } else { 1 }
}

/// The error and its causes, one a line, none said twice.
pub(crate) fn message(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str("\n  ");
            text.push_str(&cause);
        }
    }
    text
}

/// Prints a result; a closed pipe (`| head`) is no failure.
fn print(text: &str) -> anyhow::Result<()> {
    match writeln!(std::io::stdout().lock(), "{text}") {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Prints a result as indented JSON.
fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}
