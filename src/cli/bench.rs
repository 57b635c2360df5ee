//! `bench`: how fast a model reads and writes as the context grows.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use gguf_tools::account::{Account, AccountOptions, TokenBytes, bytes_per_token_of};
use runner::bandwidth::read_bandwidth;
use runner::cuda::self_test::kernel_times;
use runner::cuda::{Gpu, KernelChoice};
use runner::logits::argmax;
use runner::ops::Work;
use runner::weights::{WeightSource, open_source};
use runner::{Model, Processor, Session};
use serde::Serialize;
use serde_json::json;

use super::model::{ComputeArguments, SyntheticArguments, print_memory_plan, tokenizer};
use super::{UsageError, print, print_json};
use crate::nano;
use crate::render::progress::interrupted;
use crate::render::table::table;
use crate::render::units;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// A GGUF file (any shard of a split one) or the folder of an official checkpoint.
    #[arg(
        short,
        long,
        value_name = "FILE|DIR",
        required_unless_present_any = ["synthetic", "kernels"],
        help_heading = "Model"
    )]
    model: Option<PathBuf>,
    #[command(flatten)]
    synthetic: SyntheticArguments,
    #[command(flatten)]
    compute: ComputeArguments,
    /// Text to read, repeated until it is long enough; a built-in one if left out.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Context of the first measurement, in tokens.
    #[arg(long, value_name = "N", default_value_t = 2048)]
    ctx_start: usize,
    /// Context of the last measurement; 32768, or what the model is made for if that is less, if left out.
    #[arg(long, value_name = "N")]
    ctx_max: Option<usize>,
    /// Tokens from one measurement to the next.
    #[arg(long, value_name = "N", default_value_t = 2048, conflicts_with = "step_mul")]
    step_incr: usize,
    /// Factor from one context to the next, instead of a number of tokens.
    #[arg(long, value_name = "X")]
    step_mul: Option<f64>,
    /// Tokens to generate at every measurement.
    #[arg(long, value_name = "N", default_value_t = 128)]
    gen_tokens: usize,
    /// Read bandwidth of the memory, for the roofline; measured if left out.
    #[arg(long, value_name = "GB/s")]
    bandwidth: Option<f64>,
    /// Print the time of every kernel instead (on a GPU).
    #[arg(long)]
    profile: bool,
    /// Print the time of every matrix kernel alone as JSON instead (on a GPU), on the whole device and on 48
    /// multiprocessors (half, if there are no more), with random weights at the shapes of Flash; only those whose name contains TEXT, if given.
    #[arg(long, value_name = "TEXT", num_args = 0..=1, default_missing_value = "", conflicts_with_all = ["profile", "model", "synthetic"])]
    kernels: Option<String>,
    /// Write the measurements to a CSV file too, line by line as they come.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One measurement: the first six as ds4-bench names them.
#[derive(Debug, Serialize)]
struct Row {
    ctx_tokens: usize,
    prefill_tokens: usize,
    prefill_tps: f64,
    gen_tokens: usize,
    gen_tps: f64,
    kvcache_bytes: usize,
    load_seconds: f64,
    bytes_per_token: u64,
    roofline_share: f64,
}

const COLUMNS: [&str; 9] = [
    "ctx_tokens",
    "prefill_tokens",
    "prefill_tps",
    "gen_tokens",
    "gen_tps",
    "kvcache_bytes",
    "load_seconds",
    "bytes_per_token",
    "roofline_share",
];

impl Row {
    fn cells(&self) -> Vec<String> {
        vec![
            self.ctx_tokens.to_string(),
            self.prefill_tokens.to_string(),
            format!("{:.2}", self.prefill_tps),
            self.gen_tokens.to_string(),
            format!("{:.2}", self.gen_tps),
            self.kvcache_bytes.to_string(),
            format!("{:.3}", self.load_seconds),
            self.bytes_per_token.to_string(),
            format!("{:.4}", self.roofline_share),
        ]
    }
}

/// What holds for all rows.
struct Machine {
    load_seconds: f64,
    token_bytes: TokenBytes,
    /// Bytes a second.
    bandwidth: f64,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    arguments.check()?;
    if let Some(wanted) = &arguments.kernels {
        return print_kernels(wanted, arguments.compute.kernels());
    }
    let options = arguments.compute.options()?;
    let (source, token_bytes) = arguments.source()?;
    print_memory_plan(source.as_ref(), &options);
    let started = Instant::now();
    let (model, options) = arguments.compute.open(&source, options)?;
    let load_seconds = started.elapsed().as_secs_f64();
    if options.processor == Processor::Cpu && arguments.synthetic.is_given() {
        eprintln!(
            "the CPU makes synthetic weights anew for every product: this takes long and says nothing about a file; \
             --layers, --experts and --ctx-max make it shorter, `synth` makes a file"
        );
    }
    let contexts = arguments.contexts(model.context_limit())?;
    let prompt = arguments.prompt(&model, contexts.last().copied().unwrap_or_default())?;
    let bandwidth = match arguments.bandwidth {
        Some(given) => 1e9 * given,
        None => match model.device_bandwidth()? {
            Some(measured) => measured,
            None => read_bandwidth(arguments.compute.n_threads())?,
        },
    };
    let machine = Machine { load_seconds, token_bytes, bandwidth };
    if arguments.profile {
        return arguments.print_profile(&model, &contexts, &prompt);
    }
    let rows = arguments.measure(&model, &contexts, &prompt, &machine)?;
    if arguments.json {
        print_json(&json!({
            "provenance": model.provenance(),
            "load_seconds": load_seconds,
            "bytes_per_token": { "parts": token_bytes, "total": token_bytes.total() },
            "bandwidth_bytes_per_second": bandwidth,
            "rows": rows,
        }))?;
    } else {
        let cells: Vec<_> = rows.iter().map(Row::cells).collect();
        print(&format!("{}\n{}", table(&COLUMNS, 0, &cells), machine.legend(arguments.bandwidth.is_some())))?;
    }
    Ok(if interrupted() { ExitCode::from(130) } else { ExitCode::SUCCESS })
}

/// Time of every matrix kernel whose name contains `wanted`.
fn print_kernels(wanted: &str, choice: KernelChoice) -> anyhow::Result<ExitCode> {
    let gpu = Gpu::open(0, choice)?;
    let mut times = Vec::new();
    kernel_times(&gpu, wanted, &mut |time| {
        eprintln!(
            "{:>3} multiprocessors  {:<60} {:>9.2} us {:>7.1} GB/s",
            time.multiprocessors, time.kernel, time.microseconds, time.gigabytes_per_second
        );
        times.push(time.clone());
    })?;
    let facts = gpu.device.facts();
    print_json(&json!({ "device": facts.name, "driver": facts.driver, "kernels": times }))?;
    Ok(ExitCode::SUCCESS)
}

impl Arguments {
    fn check(&self) -> Result<(), UsageError> {
        let wrong = |text: &str| Err(UsageError(text.to_owned()));
        if self.ctx_start == 0 || self.step_incr == 0 || self.gen_tokens == 0 {
            return wrong("--ctx-start, --step-incr and --gen-tokens: each must be at least 1");
        }
        if self.step_mul.is_some_and(|factor| !(factor > 1.0 && factor.is_finite())) {
            return wrong("--step-mul: the factor must be more than 1");
        }
        if self.bandwidth.is_some_and(|bandwidth| !(bandwidth > 0.0 && bandwidth.is_finite())) {
            return wrong("--bandwidth: GB/s must be more than 0");
        }
        Ok(())
    }

    /// The contexts to measure at, ascending; the last is `--ctx-max`.
    fn contexts(&self, limit: usize) -> Result<Vec<usize>, UsageError> {
        let longest = limit.saturating_sub(self.gen_tokens);
        let last = self.ctx_max.unwrap_or_else(|| longest.min(32_768));
        if last > longest || self.ctx_start > last {
            return Err(UsageError(format!(
                "contexts from {} to {last} with {} generated tokens do not fit: \
                 --ctx-start may be at most --ctx-max, and that at most {longest} here",
                self.ctx_start, self.gen_tokens
            )));
        }
        let next = |context: &usize| {
            let next = match self.step_mul {
                Some(factor) => ((*context as f64 * factor) as usize).max(context + 1),
                None => context.saturating_add(self.step_incr),
            };
            (*context < last).then_some(next.min(last))
        };
        Ok(std::iter::successors(Some(self.ctx_start), next).collect())
    }

    /// Weights, and what a token reads of them.
    fn source(&self) -> anyhow::Result<(Arc<dyn WeightSource>, TokenBytes)> {
        if let Some(source) = self.synthetic.source()? {
            let bytes = Account::of(source.headers(), &AccountOptions::default())?.token;
            return Ok((source, bytes));
        }
        let path = self.model.as_deref().context("the parser demands a model")?;
        Ok((open_source(path)?, bytes_per_token_of(path)?))
    }

    /// Time of every kernel in reading up to each context, and in generating one token there.
    fn print_profile(&self, model: &Model, contexts: &[usize], prompt: &[u32]) -> anyhow::Result<ExitCode> {
        let mut all = Vec::new();
        for &context in contexts {
            let mut session = model.session();
            let logits = session.prefill(&prompt[..context])?;
            let token = [argmax(&logits)];
            // Memory is taken by the first step and the first batch, graphs are recorded by the second step.
            session.decode(token[0])?;
            let decode = session.profile(&token, Work::Token)?;
            let prefill = model.session().profile(&prompt[..context], Work::Batch)?;
            for (what, shares) in [("decode", decode), ("prefill", prefill)] {
                let total: f64 = shares.iter().map(|share| share.microseconds).sum();
                eprintln!("{what} at {context} tokens: {:.3} ms in all kernels", total / 1e3);
                for share in &shares {
                    eprintln!(
                        "  {:<28} {:>6} launches {:>10.1} us {:>8.2} us each {:>5.1} %",
                        share.kernel,
                        share.launches,
                        share.microseconds,
                        share.microseconds / share.launches as f64,
                        100.0 * share.microseconds / total
                    );
                }
                all.push(
                    json!({ "work": what, "ctx_tokens": context, "microseconds": total, "kernels": shares }),
                );
            }
        }
        if self.json {
            print_json(&json!({ "provenance": model.provenance(), "profiles": all }))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The text's tokens, repeated up to `n`; for a synthetic model, which speaks no language, tokens spread evenly.
    fn prompt(&self, model: &Model, n: usize) -> anyhow::Result<Vec<u32>> {
        let Some(path) = &self.model else {
            let vocabulary = model.hyper_parameters().vocab_size;
            return Ok((0..n as u64).map(|i| (i * 7919 % vocabulary) as u32).collect());
        };
        let tokenizer = tokenizer(path)?;
        let text = match &self.prompt_file {
            Some(path) => {
                std::fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))?
            }
            None => nano::HELD_OUT.map(|(_, text)| text).concat(),
        };
        let tokens = tokenizer.encode_plain(&text)?;
        if tokens.is_empty() {
            return Err(UsageError("the prompt is empty".to_owned()).into());
        }
        Ok(tokenizer.bos().into_iter().chain(tokens.into_iter().cycle()).take(n).collect())
    }

    /// One row a context, until Ctrl-C.
    fn measure(
        &self,
        model: &Model,
        contexts: &[usize],
        prompt: &[u32],
        machine: &Machine,
    ) -> anyhow::Result<Vec<Row>> {
        let mut csv = COLUMNS.join(",") + "\n";
        let mut rows = Vec::new();
        let mut session = model.session();
        for &context in contexts {
            if interrupted() {
                break;
            }
            let tokens = &prompt[session.n_tokens()..context];
            let row = row(&mut session, tokens, self.gen_tokens, machine)?;
            let cells = row.cells();
            eprintln!("{} tokens: read at {} t/s, written at {} t/s", cells[0], cells[2], cells[4]);
            rows.push(row);
            if let Some(path) = &self.csv {
                csv += &(cells.join(",") + "\n");
                std::fs::write(path, &csv).with_context(|| format!("cannot write `{}`", path.display()))?;
            }
        }
        Ok(rows)
    }
}

/// Reads `tokens`, then generates and takes that back.
fn row(
    session: &mut Session<'_>,
    tokens: &[u32],
    n_generated: usize,
    machine: &Machine,
) -> anyhow::Result<Row> {
    let reading = Instant::now();
    let mut logits = session.prefill(tokens)?;
    let read = reading.elapsed().as_secs_f64();
    let (ctx_tokens, kvcache_bytes, here) = (session.n_tokens(), session.cache_bytes(), session.snapshot()?);
    // A GPU takes memory in the first step and records the second: once a session, not a token.
    for _ in 0..2 {
        session.decode(argmax(&logits))?;
    }
    session.restore(&here)?;
    let writing = Instant::now();
    for _ in 0..n_generated {
        logits = session.decode(argmax(&logits))?;
    }
    let gen_tps = n_generated as f64 / writing.elapsed().as_secs_f64();
    session.restore(&here)?;
    let bytes_per_token = machine.token_bytes.total();
    Ok(Row {
        ctx_tokens,
        prefill_tokens: tokens.len(),
        prefill_tps: tokens.len() as f64 / read,
        gen_tokens: n_generated,
        gen_tps,
        kvcache_bytes,
        load_seconds: machine.load_seconds,
        bytes_per_token,
        roofline_share: bytes_per_token as f64 * gen_tps / machine.bandwidth,
    })
}

impl Machine {
    fn legend(&self, given: bool) -> String {
        let bytes = self.token_bytes;
        format!(
            "\nLoaded in {}. A token reads {}: dense tensors {}, routed experts {}, looked-up rows {} (bytes in the file, without the cache).\n\
             roofline_share = bytes a token x tokens a second / {:.1} GB/s, the {} read bandwidth; \
             a model that the processor's own cache holds may pass 1.",
            units::seconds(self.load_seconds),
            units::exact_bytes(bytes.total()),
            units::bytes(bytes.dense),
            units::bytes(bytes.routed),
            units::bytes(bytes.looked_up),
            self.bandwidth / 1e9,
            if given { "given" } else { "measured" },
        )
    }
}
