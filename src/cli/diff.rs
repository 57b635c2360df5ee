//! `diff`: what distinguishes two files.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use gguf_tools::diff::{Difference, diff};
use gguf_tools::gguf::Gguf;

use super::{print, print_json};
use crate::render::progress::Reporter;
use crate::render::table::table;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The first GGUF file, or any shard of a set.
    first: PathBuf,
    /// The second.
    second: PathBuf,
    /// Compare the headers only.
    #[arg(long)]
    headers: bool,
    /// Show no progress.
    #[arg(long)]
    quiet: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (first, second) = (Gguf::open(&arguments.first)?, Gguf::open(&arguments.second)?);
    let reporter = Reporter::new("comparing", arguments.quiet);
    let result = diff(&first, &second, !arguments.headers, &reporter);
    reporter.finish();
    let difference = result?;
    if arguments.json {
        print_json(&difference)?;
    } else {
        print(&text(&difference))?;
    }
    Ok(if difference.is_nothing() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(difference: &Difference) -> String {
    let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".to_owned());
    let mut text = String::new();
    if !difference.metadata.is_empty() {
        let rows: Vec<_> = difference
            .metadata
            .iter()
            .map(|d| vec![d.key.clone(), shown(&d.first), shown(&d.second)])
            .collect();
        text += &table(&["key", "first", "second"], 3, &rows);
        text += "\n\n";
    }
    if !difference.tensors.is_empty() {
        let rows: Vec<_> = difference
            .tensors
            .iter()
            .map(|d| {
                let bytes = d.differing_bytes.map_or_else(|| "not compared".to_owned(), |n| n.to_string());
                vec![d.tensor.clone(), shown(&d.first), shown(&d.second), bytes]
            })
            .collect();
        text += &table(&["tensor", "first", "second", "differing bytes"], 3, &rows);
        text += "\n\n";
    }
    if !difference.same_order {
        text += "the tensors stand in another order\n";
    }
    let compared = if difference.compared_bytes { "in type, shape and bytes" } else { "in type and shape" };
    text + &format!(
        "{} tensors are equal {compared}, {} differ; {} keys differ",
        difference.n_equal_tensors,
        difference.tensors.len(),
        difference.metadata.len()
    )
}
