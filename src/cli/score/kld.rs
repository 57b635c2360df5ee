//! `score kld`: how close a file's predictions are to those of a base.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use quality_testing::base_cache::Identity;
use quality_testing::report::{KLD_SCHEMA, KldReport, KldRow, ModelFacts, file_name};
use quality_testing::{Base, Comparison, Interval};
use runner::Model;
use runner::weights::open_source;

use super::super::model::{ComputeArguments, sequences, tokenizer};
use super::super::steering::SteeringArguments;
use super::super::{UsageError, print, print_json};
use crate::render::progress::Reporter;
use crate::render::table::table;
use crate::render::units;

/// Tokens on which the base is compared with itself where its predictions come from a file: reading it whole again is what the file saves.
const NOISE_TOKENS: usize = 2048;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
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
    /// Keep the base's predictions in this file, or take them from it. Two bytes a position and token of the vocabulary.
    #[arg(long, value_name = "FILE")]
    base_cache: Option<PathBuf>,
    /// Largest such file: bytes, or a number with MB, MiB, GB or GiB.
    #[arg(long, value_name = "SIZE", default_value = "20GB", value_parser = units::parse_bytes)]
    max_cache: u64,
    /// No progress.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    compute: ComputeArguments,
    #[command(flatten)]
    steering: SteeringArguments,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let texts = texts(arguments)?;
    let options = arguments.compute.options()?;
    // What the base is computed on, the others are, too.
    let (base_model, options) = arguments.compute.open(&open_source(&arguments.base)?, options)?;
    let facts = ModelFacts::of(&arguments.base, &base_model.provenance())?;
    let identity = Identity::new(&base_model, &texts, facts.checkpoint.clone(), facts.fingerprint.clone());
    let base = base(arguments, &base_model, texts, &identity)?;
    let mut rows: Vec<KldRow> = Vec::new();
    let n_noise = if arguments.base_cache.is_some() { noise_texts(base.texts()) } else { base.texts().len() };
    rows.push(KldRow {
        model: facts.clone(),
        is_noise: true,
        comparison: base.compare_first(&base_model, n_noise)?,
        kl_above_line_before: None,
    });
    drop(base_model);
    for path in &arguments.models {
        let options = arguments.steering.add_to(options.clone(), path)?;
        let (model, _) = arguments.compute.open(&open_source(path)?, options)?;
        let comparison = base.compare(&model)?;
        let before = rows.last().filter(|row| row.comparison.n_positions == comparison.n_positions);
        rows.push(KldRow {
            model: ModelFacts::of(path, &model.provenance())?,
            is_noise: false,
            kl_above_line_before: before.map(|row| comparison.kl_above(&row.comparison)),
            comparison,
        });
    }
    let report = KldReport {
        schema: KLD_SCHEMA.to_owned(),
        base: facts,
        texts: arguments.texts.iter().map(|path| file_name(path)).collect(),
        texts_sha256: identity.texts_sha256,
        sequence: arguments.sequence,
        rounded: arguments.base_cache.is_some(),
        rows,
    };
    if arguments.json {
        print_json(&report)?;
    } else {
        print(&text(arguments, &report))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The texts as sequences of tokens.
fn texts(arguments: &Arguments) -> anyhow::Result<Vec<Vec<u32>>> {
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
    Ok(texts)
}

fn base(
    arguments: &Arguments,
    model: &Model,
    texts: Vec<Vec<u32>>,
    identity: &Identity,
) -> anyhow::Result<Base> {
    let Some(path) = &arguments.base_cache else { return Ok(Base::new(model, texts)?) };
    let reporter = Reporter::new("reading", arguments.quiet);
    let base = Base::cached(model, texts, path, identity, arguments.max_cache, &reporter);
    reporter.finish();
    Ok(base?)
}

/// The first texts that together have [`NOISE_TOKENS`] tokens, at least one.
fn noise_texts(texts: &[Vec<u32>]) -> usize {
    let mut n_tokens = 0;
    let fitting = texts.iter().take_while(|text| {
        n_tokens += text.len();
        n_tokens <= NOISE_TOKENS
    });
    fitting.count().max(1)
}

fn text(arguments: &Arguments, report: &KldReport) -> String {
    let mut before: Option<&Comparison> = None;
    let mut rows = Vec::new();
    for row_of in &report.rows {
        let path = if row_of.is_noise { &arguments.base } else { &arguments.models[rows.len() - 1] };
        let above = before.filter(|before| before.n_positions == row_of.comparison.n_positions);
        rows.push(row(&path.display().to_string(), &row_of.comparison, above));
        before = Some(&row_of.comparison);
    }
    let label = |facts: &ModelFacts| facts.checkpoint.clone().unwrap_or_else(|| "not stated".to_owned());
    let labels: Vec<String> =
        report.rows.iter().map(|row| format!("{} {}", row.model.name, label(&row.model))).collect();
    let cache = arguments.base_cache.as_deref().map_or_else(String::new, |path: &Path| {
        format!("\nThe base's log-probabilities are those of `{}`, in half precision.", path.display())
    });
    format!(
        "{}\nThe first line is the base against itself: the noise of the measurement. Intervals are 95 %, differences paired\nposition by position. {} numerics.{cache}\nCheckpoints: {}.",
        table(&COLUMNS, 1, &rows),
        report.base.numerics,
        labels[1..].iter().fold(labels[0].clone(), |all, label| all + ", " + label),
    )
}

/// Columns of [`row`].
pub(in super::super) const COLUMNS: [&str; 12] = [
    "model",
    "tokens",
    "NLL",
    "perplexity",
    "NLL - base",
    "KL",
    "KL - line above",
    "KL 50 %",
    "KL 90 %",
    "KL 99 %",
    "RMS dp",
    "same top-1",
];

/// One comparison as a row of a table; `before` is the one in the row above it.
pub(in super::super) fn row(name: &str, comparison: &Comparison, before: Option<&Comparison>) -> Vec<String> {
    let spread = |i: &Interval, digits: usize| {
        format!("{:.digits$} [{:.digits$}, {:.digits$}]", i.mean, i.low, i.high)
    };
    let same = &comparison.same_top;
    let [median, p90, p99] = comparison.kl_percentiles;
    vec![
        name.to_owned(),
        comparison.n_positions.to_string(),
        format!("{:.4}", comparison.nll.mean),
        format!("{:.3}", comparison.perplexity),
        spread(&comparison.nll_difference, 4),
        spread(&comparison.kl, 5),
        before.map_or_else(String::new, |before| spread(&comparison.kl_above(before), 5)),
        format!("{median:.5}"),
        format!("{p90:.4}"),
        format!("{p99:.4}"),
        format!("{:.2} %", 100.0 * comparison.rms_delta_p),
        format!("{:.2} % [{:.2}, {:.2}]", 100.0 * same.mean, 100.0 * same.low, 100.0 * same.high),
    ]
}
