//! `score`: how close a file's predictions are to another's.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use quality_testing::{Base, Comparison, Interval};
use runner::Model;
use serde_json::json;

use super::model::{ComputeArguments, sequences, tokenizer};
use super::{UsageError, print, print_json};
use crate::render::table::table;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Divergence, perplexity and agreement with a base model on a text.
    Kld(KldArguments),
}

#[derive(Debug, Args)]
struct KldArguments {
    /// The model that the others are compared with: a GGUF file or the folder of an official checkpoint.
    base: PathBuf,
    /// The models to compare.
    #[arg(required = true)]
    models: Vec<PathBuf>,
    /// Text files.
    #[arg(long = "text", value_name = "FILE", required = true)]
    texts: Vec<PathBuf>,
    /// Tokens of each sequence that the texts are cut into.
    #[arg(long, value_name = "N", default_value_t = 512)]
    sequence: usize,
    /// Use at most so many tokens of each text.
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    #[command(flatten)]
    compute: ComputeArguments,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Kld(arguments) => kld(arguments),
    }
}

fn kld(arguments: &KldArguments) -> anyhow::Result<ExitCode> {
    if arguments.sequence < 2 {
        return Err(UsageError("--sequence: a sequence needs at least 2 tokens".to_owned()).into());
    }
    let tokenizer = tokenizer(&arguments.base)?;
    let mut texts = Vec::new();
    for path in &arguments.texts {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))?;
        let mut left = arguments.max_tokens.unwrap_or(usize::MAX);
        for mut sequence in sequences(&tokenizer, &text, arguments.sequence)? {
            sequence.truncate(left);
            left -= sequence.len();
            texts.extend((sequence.len() > 1).then_some(sequence));
        }
    }
    anyhow::ensure!(!texts.is_empty(), "the texts hold no two tokens");
    let options = arguments.compute.options()?;
    let base_model = Model::open(&arguments.base, options.clone())?;
    let base = Base::new(&base_model, texts)?;
    let mut rows = Vec::new();
    let mut results = Vec::new();
    let mut before: Option<Comparison> = None;
    for path in [&arguments.base].into_iter().chain(&arguments.models) {
        let model = Model::open(path, options.clone())?;
        let comparison = base.compare(&model)?;
        rows.push(row(&path.display().to_string(), &comparison, before.as_ref()));
        results.push(json!({
            "model": path,
            "provenance": model.provenance(),
            "comparison": comparison,
            "kl_above_line_before": before.as_ref().map(|before| comparison.kl_above(before)),
        }));
        before = Some(comparison);
    }
    if arguments.json {
        print_json(&results)?;
    } else {
        print(&format!(
            "{}\nThe first line is the base against itself: the noise of the measurement. Intervals are 95 %, differences paired\nposition by position. {} numerics.",
            table(&COLUMNS, 1, &rows),
            base_model.provenance().numerics
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Columns of [`row`].
pub(super) const COLUMNS: [&str; 9] =
    ["model", "tokens", "NLL", "perplexity", "NLL - base", "KL", "KL - line above", "KL 99 %", "same top-1"];

/// One comparison as a row of a table; `before` is the one in the row above it.
pub(super) fn row(name: &str, comparison: &Comparison, before: Option<&Comparison>) -> Vec<String> {
    let spread = |i: &Interval, digits: usize| {
        format!("{:.digits$} [{:.digits$}, {:.digits$}]", i.mean, i.low, i.high)
    };
    let same = &comparison.same_top;
    vec![
        name.to_owned(),
        comparison.n_positions.to_string(),
        format!("{:.4}", comparison.nll.mean),
        format!("{:.3}", comparison.perplexity),
        spread(&comparison.nll_difference, 4),
        spread(&comparison.kl, 5),
        before.map_or_else(String::new, |before| spread(&comparison.kl_above(before), 5)),
        format!("{:.4}", comparison.kl_percentiles[2]),
        format!("{:.2} % [{:.2}, {:.2}]", 100.0 * same.mean, 100.0 * same.low, 100.0 * same.high),
    ]
}
