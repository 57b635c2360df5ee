//! `vectors`: predictions behind fixed prompts, recorded, fetched and checked.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use quality_testing::cases::CaseSet;
use quality_testing::collect::{Prompt, read_prompts};
use quality_testing::label;
use quality_testing::scoring::{Vocabulary, prepare};
use quality_testing::vectors::{Bounds, CheckedCase, check, fetch, record};
use runner::Model;
use serde_json::json;

use super::model::{ModelArguments, tokenizer};
use super::{UsageError, print, print_json};
use crate::render::table::table;

/// The prompts that ship with the program.
const PROMPTS: [(&str, &str, &str); 5] = [
    ("short_fact", "short", include_str!("../../test-vectors/prompts/short_fact.txt")),
    ("code_completion", "short", include_str!("../../test-vectors/prompts/code_completion.txt")),
    ("reasoning", "short", include_str!("../../test-vectors/prompts/reasoning.txt")),
    ("long_audit", "long", include_str!("../../test-vectors/prompts/long_audit.txt")),
    ("long_memory", "long", include_str!("../../test-vectors/prompts/long_memory.txt")),
];

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Record what a model predicts behind the prompts.
    Record(RecordArguments),
    /// Check a model against a recorded set; exit code 1 if it is out of bounds.
    Check(CheckArguments),
    /// Get a recorded set from a web address or a folder, every file checked by its SHA-256.
    Fetch(FetchArguments),
}

#[derive(Debug, Args)]
struct RecordArguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Folder for the set; it must not exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// A folder of prompts as text files, or lines of JSON; the five of this program if left out.
    #[arg(long, value_name = "DIR|FILE.jsonl")]
    prompts: Option<PathBuf>,
    /// Tokens behind every prompt.
    #[arg(short = 'n', long = "tokens", value_name = "N", default_value_t = 8)]
    tokens: usize,
    /// Alternatives of every token.
    #[arg(long, value_name = "N", default_value_t = 20)]
    top_logprobs: usize,
    /// The checkpoint, if the model does not say.
    #[arg(long, value_name = "NAME")]
    label: Option<String>,
}

#[derive(Debug, Args)]
struct CheckArguments {
    #[command(flatten)]
    model: ModelArguments,
    /// The set: a folder with a manifest, or any case set with recorded log-probabilities.
    #[arg(long, value_name = "DIR|FILE")]
    vectors: PathBuf,
    /// Largest difference of a log-probability, nats.
    #[arg(long, value_name = "NATS", default_value_t = Bounds::default().log_probability)]
    bound: f64,
    /// Alternatives recorded as less probable than this are not compared.
    #[arg(long, value_name = "P", default_value_t = Bounds::default().least_probability)]
    least_probability: f64,
    /// Check against the predictions of another checkpoint, too.
    #[arg(long)]
    allow_other_checkpoint: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct FetchArguments {
    /// Web address or folder that holds SHA256SUMS and the files it lists.
    source: String,
    /// SHA-256 of the SHA256SUMS file, which vouches for all others.
    #[arg(long, value_name = "HEX")]
    sha256: String,
    /// Folder for the set; it must not exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Record(arguments) => record_set(arguments),
        Command::Check(arguments) => check_set(arguments),
        Command::Fetch(arguments) => fetch_set(arguments),
    }
}

fn record_set(arguments: &RecordArguments) -> anyhow::Result<ExitCode> {
    if arguments.tokens == 0 || arguments.top_logprobs == 0 {
        return Err(UsageError("--tokens and --top-logprobs: at least 1".to_owned()).into());
    }
    let prompts = match &arguments.prompts {
        Some(path) => read_prompts(path)?,
        None => own_prompts(),
    };
    let path = arguments.model.path();
    let label = arguments.label.clone().or(label::of_model(path)?).ok_or_else(|| {
        UsageError("the model does not say which checkpoint it is of; give --label NAME".to_owned())
    })?;
    let (tokens, top) = (arguments.tokens, arguments.top_logprobs);
    record(&arguments.model.open()?, &tokenizer(path)?, &prompts, tokens, top, &label, &arguments.out)?;
    print(&arguments.out.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}

fn own_prompts() -> Vec<Prompt> {
    let prompt = |(id, kind, text): (&str, &str, &str)| Prompt {
        id: id.to_owned(),
        kind: Some(kind.to_owned()),
        text: text.to_owned(),
    };
    PROMPTS.map(prompt).to_vec()
}

fn check_set(arguments: &CheckArguments) -> anyhow::Result<ExitCode> {
    let bounds = Bounds { log_probability: arguments.bound, least_probability: arguments.least_probability };
    if !(bounds.log_probability >= 0.0 && (0.0..=1.0).contains(&bounds.least_probability)) {
        return Err(UsageError("--bound: at least 0; --least-probability: 0 to 1".to_owned()).into());
    }
    let set = CaseSet::open(&arguments.vectors, None)?;
    let path = arguments.model.path();
    let found = label::of_model(path)?;
    let allow = arguments.allow_other_checkpoint;
    label::check(&set.path, set.label.as_ref(), path, found.as_deref(), allow)?;
    let tokenizer = tokenizer(path)?;
    let model: Model = arguments.model.open()?;
    let vocabulary = Vocabulary::new(&tokenizer);
    let prepared = prepare(&set.cases, &tokenizer, &vocabulary, model.context_limit())?;
    let checked = check(&model, &prepared, &tokenizer, &vocabulary, bounds)?;
    let passed = checked.iter().all(|case| case.faults.is_empty());
    if arguments.json {
        print_json(&json!({
            "passed": passed,
            "bounds": bounds,
            "checkpoint": found,
            "vectors_label": set.label,
            "provenance": model.provenance(),
            "cases": checked,
        }))?;
    } else {
        let of = set.label.map_or("not stated".to_owned(), |label| label.label);
        let found = found.unwrap_or_else(|| "not stated".to_owned());
        print(&format!("{}\n{}", text(&checked, bounds), labels(&found, &of, passed)))?;
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn labels(found: &str, of: &str, passed: bool) -> String {
    let verdict = if passed { "passed" } else { "FAILED" };
    format!("model of checkpoint {found}, vectors of {of}: {verdict}")
}

fn text(checked: &[CheckedCase], bounds: Bounds) -> String {
    const MOST_FAULTS: usize = 5;
    let rows: Vec<Vec<String>> = checked
        .iter()
        .map(|case| {
            vec![
                case.id.clone(),
                if case.faults.is_empty() { "ok" } else { "OUT OF BOUNDS" }.to_owned(),
                case.n_steps.to_string(),
                case.n_compared.to_string(),
                format!("{:.6}", case.largest_difference),
            ]
        })
        .collect();
    let mut text = table(&["case", "", "tokens", "log-probabilities", "largest difference, nats"], 2, &rows);
    for case in checked {
        for fault in case.faults.iter().take(MOST_FAULTS) {
            text += &format!("\n{}: {fault}", case.id);
        }
        if case.faults.len() > MOST_FAULTS {
            text += &format!("\n{}: and {} more", case.id, case.faults.len() - MOST_FAULTS);
        }
    }
    text + &format!(
        "\nbounds: same best token; {} nats for alternatives recorded with a probability of at least {}",
        bounds.log_probability, bounds.least_probability
    )
}

fn fetch_set(arguments: &FetchArguments) -> anyhow::Result<ExitCode> {
    let n_files = fetch(&arguments.source, &arguments.sha256, &arguments.out)?;
    eprintln!("{n_files} files, all as listed");
    print(&arguments.out.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}
