//! `imatrix show`, `merge`, `convert` and `diff`: what is done with the files.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use imatrix::Imatrix;
use imatrix::routing::{LayerRouting, RoutingFigures, picture};
use serde_json::json;

use super::super::{print, print_json};
use crate::render::table::table;

#[derive(Debug, Args)]
pub(super) struct ShowArguments {
    /// The matrix.
    file: PathBuf,
    /// The model it was collected from; legacy files do not say how many experts there are.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: Option<PathBuf>,
    /// Draw which experts were reached, and how often, to an SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn show(arguments: &ShowArguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.as_deref().map(super::hyper_parameters).transpose()?;
    let matrix = super::open(&arguments.file, model.as_ref())?;
    let layers = matrix.routing(model.as_ref().map(|h| h.n_routed_experts as usize))?;
    let figures: Vec<_> = layers.iter().map(LayerRouting::figures).collect();
    if let Some(path) = &arguments.svg {
        let title = format!("Routed experts reached by {}", matrix.file_name());
        super::write_text(path, &picture(&title, &layers)?, true)?;
    }
    if arguments.json {
        print_json(&json!({
            "file": arguments.file,
            "format": matrix.format(),
            "datasets": matrix.datasets(),
            "chunks": matrix.n_chunks(),
            "chunk_size": matrix.chunk_size(),
            "entries": matrix.entries().len(),
            "problems": matrix.problems(),
            "layers": layers.iter().zip(&figures).map(|(layer, figures)| json!({
                "figures": figures,
                "rows": layer.rows,
                "unseen": unseen(layer),
            })).collect::<Vec<_>>(),
        }))?;
    } else {
        print(&show_text(&matrix, &layers, &figures))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn unseen(layer: &LayerRouting) -> Vec<usize> {
    (0..layer.seen.len()).filter(|&expert| !layer.seen[expert]).collect()
}

fn show_text(matrix: &Imatrix, layers: &[LayerRouting], figures: &[RoutingFigures]) -> String {
    let number = |n: Option<u64>| n.map_or_else(|| "unknown".to_owned(), |n| n.to_string());
    let mut text = format!(
        "{}: {}, {} entries, {} chunks of at most {} tokens, data sets: {}\n\n",
        matrix.file_name(),
        matrix.format(),
        matrix.entries().len(),
        number(matrix.n_chunks()),
        number(matrix.chunk_size()),
        matrix.datasets().join(", ")
    );
    let rows: Vec<_> = layers.iter().zip(figures).map(|(layer, figures)| row(layer, figures)).collect();
    let columns = [
        "layer",
        "experts",
        "never reached",
        "rows min",
        "median",
        "max",
        "entropy, bits",
        "of",
        "like",
        "which",
    ];
    text += &table(&columns, 0, &rows);
    text += "\n\nrows: tokens that reached an expert. entropy: of the shares of the rows, of at most log2(experts); like: so many experts\nused alike would be as even";
    let dense = matrix.entries().iter().filter(|entry| !entry.name().contains("_exps")).count();
    text += &format!("\n{dense} dense matrices");
    let n_unseen: usize = figures.iter().map(|f| f.n_unseen).sum();
    let n_experts: usize = figures.iter().map(|f| f.n_experts).sum();
    text += &format!("; {n_unseen} of {n_experts} routed experts were never reached");
    for problem in matrix.problems() {
        text += &format!("\nproblem: {problem}");
    }
    text
}

fn row(layer: &LayerRouting, figures: &RoutingFigures) -> Vec<String> {
    const MOST_NAMED: usize = 8;
    let whole = |n: Option<f64>| n.map_or_else(|| "?".to_owned(), |n| format!("{n:.0}"));
    let fine = |n: Option<f64>| n.map_or_else(|| "?".to_owned(), |n| format!("{n:.2}"));
    let unseen = unseen(layer);
    let named: Vec<_> = unseen.iter().take(MOST_NAMED).map(usize::to_string).collect();
    let more = if unseen.len() > named.len() { ", ..." } else { "" };
    vec![
        figures.layer.to_string(),
        figures.n_experts.to_string(),
        figures.n_unseen.to_string(),
        whole(figures.min),
        whole(figures.median),
        whole(figures.max),
        fine(figures.entropy_bits),
        format!("{:.2}", (figures.n_experts as f64).log2()),
        figures.effective_experts.map_or_else(|| "?".to_owned(), |n| format!("{n:.1}")),
        named.join(", ") + more,
    ]
}

#[derive(Debug, Args)]
pub(super) struct MergeArguments {
    /// The matrices to add up.
    #[arg(required = true, num_args = 1..)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    output: OutputArguments,
}

/// Where and how a matrix is written.
#[derive(Debug, Args)]
struct OutputArguments {
    /// The file to write; a name that ends in `.dat` stands for ds4's legacy format.
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Format of the file, whatever its name.
    #[arg(long, value_name = "NAME", value_parser = ["gguf", "legacy"])]
    format: Option<String>,
    /// The model that was collected from: tells unseen experts of legacy files.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: Option<PathBuf>,
    /// Replace an existing output.
    #[arg(long, visible_alias = "force")]
    overwrite: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl OutputArguments {
    fn read(&self, files: &[&Path]) -> anyhow::Result<Vec<Imatrix>> {
        let model = self.model.as_deref().map(super::hyper_parameters).transpose()?;
        for file in files {
            let same = || Some(file.canonicalize().ok()? == self.out.canonicalize().ok()?);
            anyhow::ensure!(
                same() != Some(true),
                "`{}` is an input; write to another file",
                self.out.display()
            );
        }
        files.iter().map(|file| super::open(file, model.as_ref())).collect()
    }

    fn write(&self, matrix: &Imatrix) -> anyhow::Result<ExitCode> {
        let target = super::target(self.format.as_deref(), &self.out)?;
        let losses = matrix.write(&self.out, target, self.overwrite)?;
        if self.json {
            print_json(&json!({ "out": self.out, "entries": matrix.entries().len(), "losses": losses }))?;
        } else {
            for loss in &losses {
                eprintln!("note: {loss}");
            }
            print(&format!("{} entries\n{}", matrix.entries().len(), self.out.display()))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

pub(super) fn merge(arguments: &MergeArguments) -> anyhow::Result<ExitCode> {
    let files: Vec<_> = arguments.files.iter().map(PathBuf::as_path).collect();
    let merged = Imatrix::merge(&arguments.output.read(&files)?)?;
    arguments.output.write(&merged)
}

#[derive(Debug, Args)]
pub(super) struct ConvertArguments {
    /// The matrix, in either format.
    file: PathBuf,
    #[command(flatten)]
    output: OutputArguments,
}

pub(super) fn convert(arguments: &ConvertArguments) -> anyhow::Result<ExitCode> {
    let matrix = arguments.output.read(&[&arguments.file])?.pop().context("one file was given")?;
    arguments.output.write(&matrix)
}

#[derive(Debug, Args)]
pub(super) struct DiffArguments {
    /// The first matrix.
    first: PathBuf,
    /// The second.
    second: PathBuf,
    /// The model that both were collected from: tells unseen experts of legacy files.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn diff(arguments: &DiffArguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.as_deref().map(super::hyper_parameters).transpose()?;
    let first = super::open(&arguments.first, model.as_ref())?;
    let second = super::open(&arguments.second, model.as_ref())?;
    let difference = first.diff(&second);
    let noise = first.diff(&first);
    if arguments.json {
        print_json(&json!({ "difference": difference, "first_against_itself": noise }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let shown = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.6}"));
    let rows: Vec<_> = difference
        .entries
        .iter()
        .map(|e| {
            vec![
                e.name.clone(),
                e.shapes_differ.map_or_else(|| "same".to_owned(), |(a, b)| format!("{a} and {b} values")),
                shown(e.mean_ratio),
                shown(e.cosine),
                shown(e.max_ratio),
                e.n_zero_in_one.to_string(),
                e.seen_only_in_first.to_string(),
                e.seen_only_in_second.to_string(),
            ]
        })
        .collect();
    let columns = [
        "entry",
        "shape",
        "mean ratio",
        "cosine",
        "largest ratio",
        "zero in one",
        "only in first",
        "only in second",
    ];
    let mut text = table(&columns, 2, &rows);
    for (names, which) in [(&difference.only_in_first, "first"), (&difference.only_in_second, "second")] {
        for name in names {
            text += &format!("\nonly in the {which}: {name}");
        }
    }
    let still =
        noise.entries.iter().all(|e| e.max_ratio.is_none_or(|ratio| ratio == 1.0) && e.n_zero_in_one == 0);
    text += &format!("\nthe first against itself: {}", if still { "no difference" } else { "DIFFERENT" });
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}
