//! `imatrix collect`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use gguf_tools::gguf::Gguf;
use imatrix::collect::{CollectOptions, CollectStep, Collected, DownInput, collect, fingerprint};
use imatrix::dataset::{Dataset, Limits, prompts};
use runner::Options;
use runner::weights::open_source;
use serde_json::json;

use super::super::model::{ComputeArguments, tokenizer};
use super::super::{UsageError, print, print_json};
use crate::render::progress::interrupted;
use crate::render::units;

/// Longest prompt where nothing else is asked for: long enough for every kind of layer to compress rows.
const DEFAULT_CONTEXT: usize = 4096;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// A GGUF file (any shard of a split one) or the folder of an official checkpoint.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: PathBuf,
    /// Calibration texts: JSON lines as `imatrix dataset` writes them, or plain text; may repeat.
    #[arg(long = "dataset", value_name = "FILE", required = true, visible_alias = "imatrix-dataset")]
    datasets: Vec<PathBuf>,
    /// The file to write; a name that ends in `.dat` stands for ds4's legacy format.
    #[arg(short, long, value_name = "FILE", visible_alias = "imatrix-out")]
    out: PathBuf,
    /// Format of the file, whatever its name.
    #[arg(long, value_name = "NAME", value_parser = ["gguf", "legacy"])]
    format: Option<String>,
    /// Most prompts.
    #[arg(long, value_name = "N", visible_alias = "imatrix-max-prompts")]
    max_prompts: Option<usize>,
    /// Most tokens of all prompts.
    #[arg(long, value_name = "N", visible_alias = "imatrix-max-tokens")]
    max_tokens: Option<u64>,
    /// Prompts between two savings of the state (OUT.state).
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    save_every: u32,
    /// Start over instead of going on from the state of an interrupted run.
    #[arg(long)]
    no_resume: bool,
    /// Collect the dense matrices too, not only the routed experts.
    #[arg(long)]
    dense: bool,
    /// What is squared for the down projections: `weighted` by the route as ds4 does, or `unweighted` as llama.cpp does.
    #[arg(long, value_name = "WHAT", default_value = "weighted", value_parser = ["weighted", "unweighted"])]
    down_input: String,
    /// Share of the routed experts that each layer must reach without a warning.
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    min_coverage: f64,
    /// Tokens that pass a layer together: more need more memory and read a large model less often.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    batch_tokens: u32,
    /// Replace an existing output.
    #[arg(long, visible_alias = "force")]
    overwrite: bool,
    /// Show no progress.
    #[arg(long)]
    quiet: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    // `-c`: longer prompts are cut; `DEFAULT_CONTEXT` if left out.
    #[command(flatten)]
    compute: ComputeArguments,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if !(0.0..=1.0).contains(&arguments.min_coverage) {
        return Err(UsageError("--min-coverage: expected a share from 0 to 1".to_owned()).into());
    }
    anyhow::ensure!(
        arguments.overwrite || !arguments.out.exists(),
        "`{}` exists; pass `--overwrite` to replace it",
        arguments.out.display()
    );
    let datasets =
        arguments.datasets.iter().map(|path| Dataset::open(path)).collect::<Result<Vec<_>, _>>()?;
    let asked = arguments.compute.context();
    if asked.is_some_and(|context| context < 2) {
        return Err(UsageError("--ctx: a prompt needs at least 2 tokens".to_owned()).into());
    }
    let options = Options { batch_tokens: arguments.batch_tokens as usize, ..arguments.compute.options()? };
    let (model, _) = arguments.compute.open(&open_source(&arguments.model)?, options)?;
    let context = asked.unwrap_or_else(|| DEFAULT_CONTEXT.min(model.context_limit()));
    let limits = Limits {
        context,
        max_prompts: arguments.max_prompts.unwrap_or(usize::MAX),
        max_tokens: arguments.max_tokens.unwrap_or(u64::MAX),
    };
    let records: Vec<_> = datasets.iter().flat_map(|dataset| dataset.records.iter().cloned()).collect();
    let prompts = prompts(&records, &tokenizer(&arguments.model)?, limits)?;
    let state = state_path(&arguments.out);
    if arguments.no_resume && state.exists() {
        std::fs::remove_file(&state).with_context(|| format!("cannot remove `{}`", state.display()))?;
    }
    let options = CollectOptions {
        dense: arguments.dense,
        down_input: if arguments.down_input == "unweighted" {
            DownInput::Unweighted
        } else {
            DownInput::Weighted
        },
        batch_tokens: arguments.batch_tokens as usize,
        state: Some(state.clone()),
        save_every: arguments.save_every as usize,
        model_fingerprint: fingerprint(&model_files(&arguments.model)?)?,
        datasets: datasets.iter().map(|dataset| dataset.name.clone()).collect(),
        chunk_size: context as u64,
    };
    let mut lines = Lines::new(arguments.quiet);
    let collected = match collect(&model, &prompts, &options, &mut |step| lines.step(step)) {
        Ok(collected) => collected,
        Err(imatrix::collect::CollectError::NoPrompts) => {
            anyhow::bail!("the data sets hold no prompt of at least two tokens")
        }
        Err(error) => return Err(error.into()),
    };
    let target = super::target(arguments.format.as_deref(), &arguments.out)?;
    collected.imatrix.write(&arguments.out, target, arguments.overwrite)?;
    // The result is safe, so the state has served.
    match std::fs::remove_file(&state) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            eprintln!("warning: cannot remove `{}`: {e}", state.display());
        }
        _ => {}
    }
    report(arguments, &collected, &datasets)
}

fn state_path(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".state");
    PathBuf::from(name)
}

/// The files that make up a model.
fn model_files(model: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !model.is_dir() {
        return Ok(Gguf::open(model)?.shards().iter().map(|shard| shard.path.clone()).collect());
    }
    let context = || format!("cannot read folder `{}`", model.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(model).with_context(context)? {
        let path = entry.with_context(context)?.path();
        if path.is_file() && path.extension().is_some_and(|e| e == "safetensors" || e == "json") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Progress, one line every two seconds.
struct Lines {
    quiet: bool,
    started: Instant,
    last: Option<Instant>,
}

impl Lines {
    fn new(quiet: bool) -> Self {
        Self { quiet, started: Instant::now(), last: None }
    }

    /// Whether to go on.
    fn step(&mut self, step: &CollectStep) -> bool {
        let now = Instant::now();
        let due = self.last.is_none_or(|last| now - last >= Duration::from_secs(2));
        if !self.quiet && (due || step.n_prompts == step.total_prompts) {
            self.last = Some(now);
            let rate =
                (step.n_tokens - step.resumed_tokens) as f64 / (now - self.started).as_secs_f64().max(1e-9);
            let left = (step.total_tokens - step.n_tokens) as f64 / rate;
            eprintln!(
                "collecting: {} of {} prompts, {} of {} tokens, {rate:.0} t/s, ETA {}",
                step.n_prompts,
                step.total_prompts,
                step.n_tokens,
                step.total_tokens,
                units::seconds(left)
            );
        }
        !interrupted()
    }
}

fn report(arguments: &Arguments, collected: &Collected, datasets: &[Dataset]) -> anyhow::Result<ExitCode> {
    let below: Vec<_> =
        (0..).zip(&collected.shares_seen).filter(|(_, share)| **share < arguments.min_coverage).collect();
    if let Some((layer, share)) = below.iter().copied().min_by(|a, b| a.1.total_cmp(b.1)) {
        eprintln!(
            "warning: {} of {} layers reached less than {:.1} % of their routed experts, worst layer {layer} with {:.1} %; \
             `quantize --imatrix-strict` will refuse what was never reached: collect more or other text, and see \
             `imatrix show`",
            below.len(),
            collected.shares_seen.len(),
            100.0 * arguments.min_coverage,
            100.0 * share
        );
    }
    let least = collected.shares_seen.iter().copied().fold(1.0, f64::min);
    if arguments.json {
        let datasets: Vec<_> = datasets
            .iter()
            .map(|d| json!({ "name": d.name, "sha256": d.sha256, "records": d.records.len() }))
            .collect();
        print_json(&json!({
            "out": arguments.out,
            "entries": collected.imatrix.entries().len(),
            "prompts": collected.n_prompts,
            "tokens": collected.n_tokens,
            "resumed_prompts": collected.resumed_prompts,
            "mean_nll": collected.mean_nll,
            "perplexity": collected.mean_nll.exp(),
            "shares_seen": collected.shares_seen,
            "layers_below_min_coverage": below.iter().map(|(layer, _)| *layer).collect::<Vec<usize>>(),
            "datasets": datasets,
        }))?;
    } else {
        let resumed = match collected.resumed_prompts {
            0 => String::new(),
            n => format!(" ({n} of them in earlier runs)"),
        };
        print(&format!(
            "{} entries from {} prompts{resumed}, {} tokens; the texts' perplexity is {:.3}\nleast share of experts reached in a layer: {:.1} %\n{}",
            collected.imatrix.entries().len(),
            collected.n_prompts,
            collected.n_tokens,
            collected.mean_nll.exp(),
            100.0 * least,
            arguments.out.display()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
