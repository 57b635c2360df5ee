//! `compare`: a GGUF against the weights it was made from.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use gguf_tools::compare::{Comparison, compare, judge};
use gguf_tools::gguf::Gguf;
use gguf_tools::plan::{Plan, Recipe};

use super::arguments::{SourceArguments, importance_of};
use super::calibrate::TextArguments;
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
    #[command(flatten)]
    text: TextArguments,
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
    let mut comparison = result?;
    if let Some(text) = arguments.text.read_for_judging(arguments.source.path())? {
        let reporter = Reporter::new("judging", arguments.quiet);
        let (mut pass, _) = text.pass(arguments.source.path(), None, "compare", 0)?;
        let judged = judge(&plan, source.as_ref(), &gguf, &arguments.tensors, &mut pass, &reporter);
        reporter.finish();
        for (name, error) in judged? {
            if let Some(tensor) = comparison.tensors.iter_mut().find(|t| t.tensor == name) {
                tensor.full_error = Some(error);
            }
        }
    }
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
                t.full_error.map_or_else(|| "not asked".to_owned(), |error| format!("{error:.5}")),
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
    let columns = [
        "tensor",
        "source",
        "file",
        "rmse",
        "relative",
        "weighted",
        "alignment",
        "outputs",
        "max",
        "cosine",
        "bytes",
    ];
    let mut text = table(&columns, 3, &rows);
    for name in &comparison.missing {
        text += &format!("\nmissing in the file: {name}");
    }
    text
}
