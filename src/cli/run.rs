//! `run` and `tokenize`: text in, text out.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use runner::Model;
use runner::chat::{Message, render};
use runner::logits::top_log_probabilities;
use runner::sample::{Sampler, Sampling};
use runner::tokenizer::{TextStream, Tokenizer};
use runner::trace::{Phase, Tracer};
use serde_json::json;

use super::model::ModelArguments;
use super::{UsageError, print, print_json};
use crate::render::progress::interrupted;

/// Where the prompt comes from.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prompt")]
struct PromptArguments {
    /// The prompt; standard input if neither it nor a file is given.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// A file with the prompt.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Instructions in front of the conversation.
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Let the model answer without thinking first.
    #[arg(long, conflicts_with_all = ["raw", "think"])]
    nothink: bool,
    /// Let the model think first; the default.
    #[arg(long, conflicts_with = "raw")]
    think: bool,
    /// Take the prompt as it is, with control tokens written out, instead of as a user's turn.
    #[arg(long)]
    raw: bool,
}

impl PromptArguments {
    fn text(&self) -> anyhow::Result<String> {
        if let Some(text) = &self.prompt {
            return Ok(text.clone());
        }
        if let Some(path) = &self.prompt_file {
            return std::fs::read_to_string(path)
                .with_context(|| format!("cannot read `{}`", path.display()));
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read the prompt from standard input")?;
        Ok(text)
    }

    fn tokens(&self, tokenizer: &Tokenizer) -> anyhow::Result<Vec<u32>> {
        let text = self.text()?;
        if text.is_empty() {
            return Err(UsageError("the prompt is empty".to_owned()).into());
        }
        if self.raw {
            return Ok(tokenizer.encode(&text)?);
        }
        let system = self.system.as_deref().map(Message::System);
        let messages: Vec<_> = system.into_iter().chain([Message::User(&text)]).collect();
        Ok(tokenizer.encode_chat(&render(&messages, !self.nothink, true))?)
    }
}

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    prompt: PromptArguments,
    /// Most tokens to generate.
    #[arg(short = 'n', long = "tokens", value_name = "N", default_value_t = 512)]
    tokens: usize,
    /// Temperature; 0 always takes the most probable token.
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    temp: f64,
    /// Keep the most probable tokens that together reach this share.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f64,
    /// Drop tokens below this share of the best one's probability.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f64,
    /// Seed: the same seed gives the same text everywhere.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Record which experts every token is sent to, as JSON lines for `trace replay`.
    #[arg(long, value_name = "FILE")]
    trace_experts: Option<PathBuf>,
    /// Write the log-probabilities of every generated token to a JSON file.
    #[arg(long, value_name = "FILE")]
    dump_logprobs: Option<PathBuf>,
    /// How many alternatives each position of that file lists.
    #[arg(long, value_name = "N", default_value_t = 20, visible_alias = "logprobs-top-k")]
    top_logprobs: usize,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let tokenizer = arguments.model.tokenizer()?;
    let prompt = arguments.prompt.tokens(&tokenizer)?;
    let sampling = Sampling {
        temperature: arguments.temp,
        top_p: arguments.top_p,
        min_p: arguments.min_p,
        seed: arguments.seed,
    };
    let mut sampler = Sampler::new(sampling)?;
    let opening = Instant::now();
    let model = arguments.model.open()?;
    let opened = opening.elapsed().as_secs_f64();
    let mut session = model.session();
    let reading = Instant::now();
    let mut tracing =
        arguments.trace_experts.as_deref().map(|path| Tracing::start(path, &model)).transpose()?;
    let mut logits = match &mut tracing {
        Some(tracing) => session.prefill_observed(&prompt, &mut tracing.tracer)?,
        None => session.prefill(&prompt)?,
    };
    if let Some(tracing) = &mut tracing {
        tracing.tracer.set_phase(Phase::Decode);
    }
    let read = reading.elapsed().as_secs_f64();
    let (mut stream, mut out) = (TextStream::default(), std::io::stdout().lock());
    let (mut generated, mut steps) = (Vec::new(), Vec::new());
    let writing = Instant::now();
    while generated.len() < arguments.tokens && !interrupted() {
        let token = sampler.pick(&logits);
        if arguments.dump_logprobs.is_some() {
            steps.push(step(&tokenizer, &logits, token, arguments.top_logprobs));
        }
        generated.push(token);
        if Some(token) == tokenizer.eos() {
            break;
        }
        write!(out, "{}", stream.push(&tokenizer.token_bytes(token)))?;
        out.flush()?;
        if generated.len() < arguments.tokens {
            // What is looked at goes layer by layer; a device repeats a recorded step for all other tokens.
            let next = match &mut tracing {
                Some(tracing) => session.prefill_observed(&[token], &mut tracing.tracer),
                None => session.decode(token),
            };
            // What was written so far stays readable, apart from the error.
            logits = next.inspect_err(|_| drop(writeln!(out, "{}", std::mem::take(&mut stream).finish())))?;
        }
    }
    writeln!(out, "{}", stream.finish())?;
    let wrote = writing.elapsed().as_secs_f64();
    if let Some(tracing) = tracing {
        tracing.finish()?;
    }
    if let Some(path) = &arguments.dump_logprobs {
        let report = json!({
            "provenance": model.provenance(),
            "prompt_tokens": prompt,
            "generated_tokens": generated,
            "steps": steps,
        });
        write_json(path, &report)?;
    }
    eprintln!(
        "loaded in {opened:.2} s; prompt {} tokens at {:.1} t/s; generated {} at {:.1} t/s ({} numerics, {} activations)",
        prompt.len(),
        prompt.len() as f64 / read,
        generated.len(),
        generated.len().saturating_sub(1) as f64 / wrote,
        model.provenance().numerics,
        model.provenance().activations,
    );
    Ok(if interrupted() { ExitCode::from(130) } else { ExitCode::SUCCESS })
}

/// A trace on its way to the file: written beside the final name, renamed at the end.
struct Tracing {
    tracer: Tracer<BufWriter<tempfile::NamedTempFile>>,
    path: PathBuf,
}

impl Tracing {
    fn start(path: &Path, model: &Model) -> anyhow::Result<Self> {
        let context = || format!("cannot write `{}`", path.display());
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = tempfile::NamedTempFile::new_in(folder).with_context(context)?;
        let tracer = Tracer::new(BufWriter::new(file), model.hyper_parameters()).with_context(context)?;
        Ok(Self { tracer, path: path.to_owned() })
    }

    fn finish(self) -> anyhow::Result<()> {
        let context = || format!("cannot write `{}`", self.path.display());
        let file = self.tracer.finish().with_context(context)?;
        let file = file.into_inner().map_err(std::io::IntoInnerError::into_error).with_context(context)?;
        file.as_file().sync_all().with_context(context)?;
        file.persist(&self.path).with_context(context)?;
        Ok(())
    }
}

/// One position as the log-probability file has it.
fn step(tokenizer: &Tokenizer, logits: &[f32], token: u32, n: usize) -> serde_json::Value {
    let named = |token: u32| json!({ "token": token, "text": tokenizer.decode(&[token]) });
    let top: Vec<_> = top_log_probabilities(logits, n)
        .into_iter()
        .map(|(token, logprob)| json!({ "token": token, "text": tokenizer.decode(&[token]), "logprob": logprob }))
        .collect();
    let mut step = named(token);
    step["logprob"] = json!(runner::logits::log_probability(logits, token));
    step["top"] = json!(top);
    step
}

/// Writes JSON beside the final name and renames it.
fn write_json(path: &Path, value: &serde_json::Value) -> anyhow::Result<()> {
    let context = || format!("cannot write `{}`", path.display());
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::NamedTempFile::new_in(folder).with_context(context)?;
    serde_json::to_writer_pretty(BufWriter::new(file.as_file()), value).with_context(context)?;
    File::sync_all(file.as_file()).with_context(context)?;
    file.persist(path).with_context(context)?;
    Ok(())
}

#[derive(Debug, Args)]
pub(super) struct TokenizeArguments {
    /// A GGUF file or the folder of an official checkpoint.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: PathBuf,
    #[command(flatten)]
    prompt: PromptArguments,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn tokenize(arguments: &TokenizeArguments) -> anyhow::Result<ExitCode> {
    let tokenizer = super::model::tokenizer(&arguments.model)?;
    let tokens = arguments.prompt.tokens(&tokenizer)?;
    if arguments.json {
        let rows: Vec<_> =
            tokens.iter().map(|&t| json!({ "token": t, "text": tokenizer.decode(&[t]) })).collect();
        print_json(&rows)?;
    } else {
        let rows: Vec<_> = tokens.iter().map(|&t| format!("{t}\t{:?}", tokenizer.decode(&[t]))).collect();
        print(&rows.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}
