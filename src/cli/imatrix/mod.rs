//! `imatrix`: importance matrices and the texts they are collected from.

mod collect;
mod dataset;
mod files;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use gguf_tools::model::{HyperParameters, TensorTable};
use imatrix::{Imatrix, Target};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run texts through a model and sum the squares of what its matrices are multiplied with.
    Collect(Box<collect::Arguments>),
    /// Show which experts a calibration reached, layer by layer.
    Show(files::ShowArguments),
    /// Add up matrices that were collected from one model.
    Merge(files::MergeArguments),
    /// Write a matrix in the other format.
    Convert(files::ConvertArguments),
    /// Compare two matrices.
    Diff(files::DiffArguments),
    /// Build a calibration data set from your own files and generated tasks.
    Dataset(dataset::Arguments),
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Collect(a) => collect::run(a),
        Command::Show(a) => files::show(a),
        Command::Merge(a) => files::merge(a),
        Command::Convert(a) => files::convert(a),
        Command::Diff(a) => files::diff(a),
        Command::Dataset(a) => dataset::run(a),
    }
}

/// The format that is asked for, or the one that the name of the file stands for.
fn target(format: Option<&str>, out: &Path) -> anyhow::Result<Target> {
    let by_name =
        if out.extension().is_some_and(|e| e.eq_ignore_ascii_case("dat")) { "legacy" } else { "gguf" };
    let name = format.unwrap_or(by_name);
    let target = Target::NAMES.iter().find(|(known, _)| *known == name);
    Ok(target.context("the parser admits known formats only")?.1)
}

/// A matrix, read with the help of the model it was collected from where one is given.
fn open(path: &Path, model: Option<&HyperParameters>) -> anyhow::Result<Imatrix> {
    let table = model.map(TensorTable::new);
    let columns = |name: &str| Some(table.as_ref()?.by_gguf_name(name)?.columns() as usize);
    Ok(Imatrix::open_with_columns(path, &columns)?)
}

/// The hyper-parameters of a GGUF file or a checkpoint, from headers alone.
fn hyper_parameters(model: &Path) -> anyhow::Result<HyperParameters> {
    Ok(runner::weights::open_source(model)?.hyper_parameters().clone())
}

/// Writes a text beside its final name and renames it.
pub(super) fn write_text(path: &Path, text: &str, overwrite: bool) -> anyhow::Result<()> {
    use std::io::Write as _;
    let context = || format!("cannot write `{}`", path.display());
    anyhow::ensure!(
        overwrite || !path.exists(),
        "`{}` exists; pass `--overwrite` to replace it",
        path.display()
    );
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).with_context(context)?;
    file.write_all(text.as_bytes()).with_context(context)?;
    file.as_file().sync_all().with_context(context)?;
    file.persist(path).with_context(context)?;
    Ok(())
}
