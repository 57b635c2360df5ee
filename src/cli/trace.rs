//! `trace`: what caches of experts would make of a recorded sequence.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use runner::trace::{Counted, Outcome, Policy, Trace, chart, replay};
use serde_json::json;

use super::{print, print_json};
use crate::render::table::table;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Replay a trace of `run --trace-experts` against caches of given sizes.
    Replay(ReplayArguments),
}

#[derive(Debug, Args)]
struct ReplayArguments {
    /// The trace.
    file: PathBuf,
    /// Sizes of the cache in experts, over all layers.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', required = true)]
    slots: Vec<usize>,
    /// Visits of a layer after which its scores are halved (decayed frequency).
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    half_life: u32,
    /// Tokens at the start that fill the cache without being counted.
    #[arg(long, value_name = "N", default_value_t = 0)]
    warm_up: usize,
    /// Count generated tokens only; those of the prompt fill the cache.
    #[arg(long)]
    decode_only: bool,
    /// Draw the hit rates to an SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Replay(a) => replay_trace(a),
    }
}

fn replay_trace(arguments: &ReplayArguments) -> anyhow::Result<ExitCode> {
    let context = || format!("cannot replay `{}`", arguments.file.display());
    let file = File::open(&arguments.file).with_context(context)?;
    let trace = Trace::read(BufReader::new(file)).with_context(context)?;
    let policies = [
        Policy::LeastRecentlyUsed,
        Policy::DecayedFrequency { half_life: arguments.half_life },
        Policy::Oracle,
    ];
    let counted = Counted { from_position: arguments.warm_up, decode_only: arguments.decode_only };
    let mut outcomes: Vec<Vec<Outcome>> = Vec::new();
    for &slots in &arguments.slots {
        let of_size = policies.iter().map(|&policy| replay(&trace, policy, slots, counted));
        outcomes.push(of_size.collect::<Result<_, _>>().with_context(context)?);
    }
    let n_counted = outcomes.iter().flatten().map(|o| o.hits + o.misses).max().unwrap_or(0);
    anyhow::ensure!(
        n_counted > 0,
        "no token of `{}` counts: lower --warm-up or drop --decode-only",
        arguments.file.display()
    );
    if let Some(path) = &arguments.svg {
        let title = format!("Hit rate of the expert cache, {} tokens", trace.n_tokens());
        super::imatrix::write_text(path, &chart(&title, &outcomes.concat())?, true)?;
    }
    if arguments.json {
        print_json(&json!({
            "file": arguments.file,
            "layers": trace.n_layers,
            "experts": trace.n_experts,
            "used": trace.n_used,
            "tokens": trace.n_tokens(),
            "distinct_experts": trace.n_distinct(),
            "uses_counted": n_counted,
            "outcomes": outcomes.concat(),
        }))?;
    } else {
        let rate = |o: &Outcome| format!("{:.2} %", 100.0 * o.hit_rate);
        let rows: Vec<_> = outcomes
            .iter()
            .map(|of_size| {
                let share = of_size[0].slots as f64 / (trace.n_layers * trace.n_experts) as f64;
                let first = [of_size[0].slots.to_string(), format!("{:.1} %", 100.0 * share)];
                first.into_iter().chain(of_size.iter().map(rate)).collect()
            })
            .collect();
        let mut columns = vec!["slots", "of all experts"];
        columns.extend(policies.iter().map(|policy| policy.name()));
        print(&format!(
            "{}\n\nhit rates over {n_counted} uses; {} tokens, {} different experts of {} x {} used, {} a layer",
            table(&columns, 0, &rows),
            trace.n_tokens(),
            trace.n_distinct(),
            trace.n_layers,
            trace.n_experts,
            trace.n_used
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
