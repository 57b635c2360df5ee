//! `account`: what a decoded token costs, from headers alone.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use gguf_tools::account::{Account, AccountOptions, CacheType, Headers, Machine, Reading, known_machines};
use gguf_tools::plot::{Bar, BarChart};

use super::{print, print_json, remote};
use crate::render::table::table;
use crate::render::units;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A GGUF file (any shard of a set) or the folder of a checkpoint, of any model family; or one on the hub, as
    /// hf:ORG/NAME/FILE.gguf or hf:ORG/NAME, of which the headers are read.
    model: PathBuf,
    /// Lengths of text to account for, in tokens.
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [4096, 32_768, 131_072, 1_048_576])]
    context: Vec<u64>,
    /// How keys and values are stored.
    #[arg(long, value_name = "TYPE", default_value = "f16", value_parser = ["f16", "f32", "q8_0"])]
    kv_type: String,
    /// A machine of your own: what it reads from memory, in GB/s.
    #[arg(long, value_name = "GB/S", allow_negative_numbers = true)]
    bandwidth: Option<f64>,
    /// Memory of that machine that holds the weights: 24GB.
    #[arg(long, value_name = "SIZE", requires = "bandwidth", value_parser = units::parse_bytes)]
    memory: Option<u64>,
    /// Draw the bytes of a token by component.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Make a contradiction between description and tensors a failure.
    #[arg(long)]
    strict: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let cache_type = CacheType::NAMES.iter().find(|(name, _)| *name == arguments.kv_type);
    let mut machines = known_machines();
    if let Some(gigabytes) = arguments.bandwidth {
        if !(gigabytes.is_finite() && gigabytes > 0.0) {
            let wrong = format!("--bandwidth {gigabytes}: expected a positive number of GB/s");
            return Err(super::UsageError(wrong).into());
        }
        let name = "yours".to_owned();
        machines.push(Machine {
            name,
            bandwidth: gigabytes * 1e9,
            measured: false,
            memory_bytes: arguments.memory,
        });
    }
    let options = AccountOptions {
        contexts: arguments.context.clone(),
        cache_type: cache_type.context("the parser admits known types only")?.1,
        machines,
    };
    let account = account(&arguments.model, &options)?;
    if let Some(path) = &arguments.svg {
        let written = std::fs::write(path, chart(&account).to_svg()?);
        written.with_context(|| format!("cannot write `{}`", path.display()))?;
    }
    if arguments.json {
        print_json(&account)?;
    } else {
        print(&text(&account))?;
    }
    let failed = arguments.strict && !account.findings.is_empty();
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The account of a file or checkpoint, here or on the hub.
fn account(model: &Path, options: &AccountOptions) -> anyhow::Result<Account> {
    if !remote::is_remote(model) {
        return Ok(Account::of(&Headers::open(model)?, options)?);
    }
    let is_file = model.extension().is_some_and(|extension| extension == "gguf");
    let replica = if is_file { remote::gguf(model)? } else { remote::checkpoint(model)? };
    let account = Headers::open(&replica.path).and_then(|mut headers| {
        headers.place = model.display().to_string();
        Account::of(&headers, options)
    });
    account.map_err(|error| replica.rename_error(&error.into()))
}

fn text(account: &Account) -> String {
    let mut text = component_table(account);
    if let Some((all, used)) = account.experts {
        let share = 100.0 * account.token.routed as f64 / account.bytes_per_token.max(1) as f64;
        text += &format!(
            "\n\n{used} of {all} routed experts work on a token: {} ({share:.1} % of its bytes)",
            units::exact_bytes(account.token.routed)
        );
    }
    text += "\n\n";
    text += &cache_tables(account);
    text += "\n\n";
    text += &ceiling_table(account);
    for finding in &account.findings {
        text += &format!("\nwarning: {finding}");
    }
    text
}

fn component_table(account: &Account) -> String {
    let row = |name: &str, types: String, n_tensors: String, n_bytes: u64, token: String| {
        vec![name.to_owned(), types, n_tensors, n_bytes.to_string(), units::bytes(n_bytes), token]
    };
    let mut rows: Vec<_> = account
        .components
        .iter()
        .map(|total| {
            let token = match total.component.reading() {
                Reading::Apart => "apart".to_owned(),
                _ => total.bytes_per_token.to_string(),
            };
            let tied = if total.n_tensors == 0 { " (tied)" } else { "" };
            let name = format!("{}{tied}", total.component);
            row(&name, total.types.join(", "), total.n_tensors.to_string(), total.n_bytes, token)
        })
        .collect();
    let n_tensors: usize = account.components.iter().map(|total| total.n_tensors).sum();
    let total = account.bytes_per_token.to_string();
    rows.push(row("total", String::new(), n_tensors.to_string(), account.data_bytes, total));
    let none = String::new;
    rows.push(row("headers and padding", none(), none(), account.overhead_bytes, none()));
    rows.push(row("files", none(), none(), account.file_bytes, none()));
    table(&["component", "types", "tensors", "bytes", "size", "bytes a token"], 2, &rows)
}

fn cache_tables(account: &Account) -> String {
    let mut rows: Vec<_> = account
        .caches
        .iter()
        .map(|kind| {
            vec![
                kind.cache.kind.clone(),
                kind.n_layers.to_string(),
                kind.bytes_per_token.to_string(),
                (kind.bytes_per_token * kind.n_layers as f64).to_string(),
                kind.cache.fixed_bytes().to_string(),
            ]
        })
        .collect();
    rows.push(vec![
        "all layers".to_owned(),
        account.caches.iter().map(|kind| kind.n_layers).sum::<usize>().to_string(),
        String::new(),
        account.cache_bytes_per_token.to_string(),
        account.cache_fixed_bytes.to_string(),
    ]);
    let columns =
        ["layers keep", "layers", "bytes a token and layer", "bytes a token", "fixed bytes a layer"];
    let kinds = table(&columns, 1, &rows);
    let rows: Vec<_> = account
        .contexts
        .iter()
        .map(|at| {
            vec![
                at.context.to_string(),
                units::bytes(at.grown_bytes),
                units::bytes(at.held_bytes),
                units::bytes(at.read_bytes),
            ]
        })
        .collect();
    let contexts =
        table(&["context", "grown", "held with windows and states", "read by the next token"], 0, &rows);
    format!("{kinds}\n\n{contexts}")
}

fn ceiling_table(account: &Account) -> String {
    let rows: Vec<_> = account
        .ceilings
        .iter()
        .map(|ceiling| {
            let machine = &ceiling.machine;
            let kind = if machine.measured { "measured" } else { "nominal" };
            let fits = match ceiling.fits {
                Some(true) => "fits",
                Some(false) => "too large",
                None => "not known",
            };
            let mut row = vec![
                machine.name.clone(),
                format!("{:.0} GB/s {kind}", machine.bandwidth / 1e9),
                fits.to_owned(),
            ];
            row.extend(ceiling.tokens_per_second.iter().map(|rate| format!("{rate:.1}")));
            row
        })
        .collect();
    let contexts: Vec<String> = account.contexts.iter().map(|at| format!("t/s at {}", at.context)).collect();
    let mut columns = vec!["machine", "memory reads", "weights"];
    columns.extend(contexts.iter().map(String::as_str));
    let ceilings = table(&columns, 3, &rows);
    format!("{ceilings}\nCeilings by memory alone, one sequence, all weights resident: no program is faster.")
}

/// The bytes of a token by component, and of its caches at each context.
fn chart(account: &Account) -> BarChart {
    let gigabytes = |n: u64| n as f64 / 1e9;
    let read = account.components.iter().filter(|total| total.bytes_per_token > 0);
    let mut bars: Vec<Bar> = read
        .map(|total| Bar {
            name: total.component.name().to_owned(),
            value: gigabytes(total.bytes_per_token),
            interval: None,
        })
        .collect();
    bars.extend(account.contexts.iter().map(|at| Bar {
        name: format!("cache at {}", at.context),
        value: gigabytes(at.read_bytes),
        interval: None,
    }));
    let name = PathBuf::from(&account.place);
    let name = name.file_name().map_or_else(|| account.place.clone(), |n| n.to_string_lossy().into_owned());
    BarChart {
        title: format!("{name}: {:.3} GB of weights a decoded token", gigabytes(account.bytes_per_token)),
        y_label: "GB read".to_owned(),
        bars,
    }
}
