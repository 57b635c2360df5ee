//! `compare`: a GGUF against the weights it was made from.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use gguf_tools::compare::{Comparison, compare};
use gguf_tools::gguf::Gguf;
use gguf_tools::plan::{Plan, Recipe};

use super::arguments::{SourceArguments, importance_of};
use super::{UsageError, print, print_json};
use crate::render::progress::Reporter;
use crate::render::table::table;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    source: SourceArguments,
    /// The file to compare.
    #[arg(long, value_name = "FILE", visible_alias = "compare-gguf")]
    gguf: PathBuf,
    /// Compare this tensor only; may repeat.
    #[arg(long = "tensor", value_name = "NAME", visible_alias = "compare-tensor")]
    tensors: Vec<String>,
    /// Importance matrix for the weighted error, and for --regenerate.
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Also make every tensor anew and compare it byte for byte; a difference is a failure.
    #[arg(long)]
    regenerate: bool,
    /// Show no progress.
    #[arg(long)]
    quiet: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let source = arguments.source.open()?;
    let gguf = Gguf::open(&arguments.gguf)?;
    let matrix = arguments.imatrix.as_deref().map(imatrix::Imatrix::open).transpose()?;
    let plan = Plan::new(source.as_ref(), &Recipe::of_file(&gguf)?, source.metadata()?)?;
    for name in &arguments.tensors {
        if !plan.tensors.iter().any(|t| t.spec.gguf_name == *name) {
            return Err(
                UsageError(format!("the model has no tensor `{name}`; `plan --tensors` lists them")).into()
            );
        }
    }
    let reporter = Reporter::new("comparing", arguments.quiet);
    let importance = importance_of(matrix.as_ref());
    let result = compare(
        &plan,
        source.as_ref(),
        importance,
        &gguf,
        &arguments.tensors,
        arguments.regenerate,
        &reporter,
    );
    reporter.finish();
    let comparison = result?;
    if arguments.json {
        print_json(&comparison)?;
    } else {
        print(&text(&comparison))?;
    }
    let differs = comparison.tensors.iter().any(|t| t.differing_bytes.is_some_and(|n| n > 0));
    let failed = differs || !comparison.missing.is_empty();
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The comparison as a table.
pub(crate) fn text(comparison: &Comparison) -> String {
    let rows: Vec<_> = comparison
        .tensors
        .iter()
        .map(|t| {
            vec![
                t.tensor.clone(),
                t.source_type.clone(),
                t.file_type.clone(),
                format!("{:.3e}", t.rmse),
                format!("{:.5}", t.relative_error),
                format!("{:.5}", t.weighted_error),
                format!("{:.4}", t.alignment),
                format!("{:.3e}", t.max_error),
                format!("{:.6}", t.cosine),
                match t.differing_bytes {
                    None => "not asked".to_owned(),
                    Some(0) => "equal".to_owned(),
                    Some(n) => format!("{n} differ"),
                },
            ]
        })
        .collect();
    let columns =
        ["tensor", "source", "file", "rmse", "relative", "weighted", "alignment", "max", "cosine", "bytes"];
    let mut text = table(&columns, 3, &rows);
    for name in &comparison.missing {
        text += &format!("\nmissing in the file: {name}");
    }
    text
}
