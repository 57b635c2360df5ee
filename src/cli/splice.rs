//! `splice`: one file with some tensors of another.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use gguf_tools::gguf::Gguf;
use gguf_tools::rewrite::{SpliceOptions, SplicePlan, parse_layer_list, parse_pattern, splice};
use serde_json::json;

use super::rewritten::{WriteArguments, inputs_of, usage_or_failure, written_text};
use super::{print, print_json};
use crate::render::table::table;
use crate::render::units;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The file that gives everything that is not chosen, and the metadata.
    #[arg(long, value_name = "FILE")]
    base: PathBuf,
    /// The file that gives the chosen tensors.
    #[arg(long, value_name = "FILE")]
    donor: PathBuf,
    /// Layers to take from the donor, as 37:42 or 0-2,37-42; all if left out.
    #[arg(long, value_name = "LAYERS", visible_alias = "q4-layers", required_unless_present = "tensors")]
    layers: Option<String>,
    /// Take tensors whose names contain a match; the routed experts if left out.
    #[arg(long, value_name = "REGEX")]
    tensors: Option<String>,
    /// Accept files whose checkpoint labels or revisions differ.
    #[arg(long)]
    any_checkpoint: bool,
    /// The file to write.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    write: WriteArguments,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let pattern = arguments.tensors.as_deref().map(parse_pattern).transpose();
    let options = SpliceOptions {
        layers: match &arguments.layers {
            Some(text) => parse_layer_list(text).map_err(usage_or_failure)?,
            None => Vec::new(),
        },
        tensors: pattern.map_err(usage_or_failure)?,
        any_checkpoint: arguments.any_checkpoint,
    };
    let base = Gguf::open(&arguments.base).context("the base")?;
    let donor = Gguf::open(&arguments.donor).context("the donor")?;
    let plan = splice(&base, &donor, &options, &arguments.out).map_err(usage_or_failure)?;
    for warning in &plan.warnings {
        eprintln!("warning: {warning}");
    }
    let write = &arguments.write;
    let written = if write.dry_run {
        Vec::new()
    } else {
        write.write(std::slice::from_ref(&plan.file), &inputs_of([&base, &donor]), "splicing")?
    };
    if write.json {
        print_json(&json!({
            "taken": plan.taken,
            "n_equal": plan.n_equal,
            "file_bytes": plan.file.layout.file_bytes(),
            "written": written,
        }))?;
    } else {
        print(
            &(text(&plan)
                + &if written.is_empty() {
                    String::new()
                } else {
                    "\n".to_owned() + &written_text(&written)
                }),
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(plan: &SplicePlan<'_>) -> String {
    let rows: Vec<_> = plan
        .taken
        .iter()
        .map(|t| {
            vec![
                t.tensor.clone(),
                t.base_type.to_owned(),
                t.donor_type.to_owned(),
                t.base_bytes.to_string(),
                t.n_bytes.to_string(),
            ]
        })
        .collect();
    let mut text = String::new();
    if !rows.is_empty() {
        text += &table(&["tensor", "base", "donor", "base bytes", "donor bytes"], 3, &rows);
        text += "\n";
    }
    if plan.n_equal > 0 {
        text += &format!("{} chosen tensors are the same in both files\n", plan.n_equal);
    }
    text + &format!("file size  {}", units::exact_bytes(plan.file.layout.file_bytes()))
}
