//! `score collect`: recorded continuations of the official API.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use quality_testing::collect::{Retry, Settings, collect, read_prompts};
use quality_testing::label;

use super::super::{UsageError, print, print_json};
use crate::render::progress::Reporter;

/// The variable that the vendor's documentation and users' other tools put the key into.
const KEY_VARIABLE: &str = "DEEPSEEK_API_KEY";

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// A folder of prompts as text files, or lines of JSON: {"prompt": ..., "id": ..., "kind": ...}.
    #[arg(long, value_name = "DIR|FILE.jsonl")]
    prompts: PathBuf,
    /// Folder for what is recorded. The same command goes on in it.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The checkpoint that answers under the model's name now, as `DeepSeek-V4-Pro-0813`. Names of the API move on: only you can know.
    #[arg(long, value_name = "NAME")]
    label: String,
    /// The API's name of the model.
    #[arg(long, value_name = "NAME", default_value = "deepseek-v4-pro")]
    model: String,
    /// Address of the chat completions.
    #[arg(long, value_name = "URL", default_value = "https://api.deepseek.com/chat/completions")]
    endpoint: String,
    /// A file with the API key; the variable DEEPSEEK_API_KEY if left out.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Most tokens of a continuation.
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Alternatives that are recorded of every token; 0 for no log-probabilities.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=20))]
    top_logprobs: u32,
    /// Use the first N prompts.
    #[arg(long, value_name = "N")]
    count: Option<usize>,
    /// Most requests a minute.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    per_minute: Option<u32>,
    /// Attempts at every case.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..))]
    attempts: u32,
    /// Wait after the first failed attempt, in milliseconds; it doubles each time.
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    first_wait: u64,
    /// Seconds for one whole answer.
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// No progress.
    #[arg(short, long)]
    quiet: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let key = key(arguments)?;
    let mut prompts = read_prompts(&arguments.prompts)?;
    prompts.truncate(arguments.count.unwrap_or(usize::MAX));
    if prompts.is_empty() {
        return Err(UsageError("--count: at least 1".to_owned()).into());
    }
    if let Some(warning) = label::moved(&arguments.model) {
        eprintln!("warning: {warning}; this set will say it is of `{}`", arguments.label);
    }
    let retry = Retry {
        attempts: arguments.attempts,
        first_wait: Duration::from_millis(arguments.first_wait),
        ..Retry::default()
    };
    let settings = Settings {
        endpoint: arguments.endpoint.clone(),
        model: arguments.model.clone(),
        label: arguments.label.clone(),
        max_tokens: arguments.max_tokens,
        top_logprobs: arguments.top_logprobs,
        per_minute: arguments.per_minute,
        timeout: Duration::from_secs(arguments.timeout),
        retry,
    };
    let reporter = Reporter::new("recording", arguments.quiet);
    let collected =
        collect(&settings, &prompts, &arguments.out, &key, &reporter, &mut |note| eprintln!("{note}"));
    reporter.finish();
    let collected = collected?;
    if arguments.json {
        print_json(&collected)?;
    } else {
        eprintln!(
            "{} cases of checkpoint {}: {} asked for, {} from responses of an interrupted run",
            collected.n_cases, arguments.label, collected.n_asked, collected.n_adopted
        );
        print(&collected.manifest.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn key(arguments: &Arguments) -> anyhow::Result<String> {
    let key = match &arguments.key_file {
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the key in `{}`", path.display()))?,
        None => std::env::var(KEY_VARIABLE).unwrap_or_default(),
    };
    let key = key.trim().to_owned();
    anyhow::ensure!(
        !key.is_empty(),
        "no API key: set {KEY_VARIABLE}, or give --key-file FILE with the key in it"
    );
    Ok(key)
}
