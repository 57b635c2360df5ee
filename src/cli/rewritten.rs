//! What the commands share that write new files out of the tensors of others.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use gguf_tools::gguf::Gguf;
use gguf_tools::rewrite::{NewFile, RewriteError, WriteOptions, Written, write_files};
use serde_json::json;

use super::{UsageError, print, print_json};
use crate::render::progress::Reporter;
use crate::render::table::table;
use crate::render::units;

/// How files are written and reported.
#[derive(Debug, Args)]
#[group(skip)]
pub(crate) struct WriteArguments {
    /// List the new files with their exact sizes and stop.
    #[arg(long)]
    pub dry_run: bool,
    /// Replace existing outputs.
    #[arg(long, visible_alias = "force")]
    pub overwrite: bool,
    /// Read and write in large pieces instead of asking the system to copy or to share blocks.
    #[arg(long)]
    pub no_copy_offload: bool,
    /// Show no progress.
    #[arg(long)]
    pub quiet: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl WriteArguments {
    /// Writes the files, with a bar that says `verb`.
    pub(crate) fn write(
        &self,
        files: &[NewFile<'_>],
        inputs: &[PathBuf],
        verb: &'static str,
    ) -> anyhow::Result<Vec<Written>> {
        let reporter = Reporter::new(verb, self.quiet);
        let options = WriteOptions { overwrite: self.overwrite, through_buffer: self.no_copy_offload };
        let result = write_files(files, inputs, options, &reporter);
        reporter.finish();
        result.map_err(usage_or_failure)
    }

    /// Writes or, for a dry run, lists the files, and prints what was done.
    pub(crate) fn finish(
        &self,
        files: &[NewFile<'_>],
        inputs: &[PathBuf],
        verb: &'static str,
    ) -> anyhow::Result<ExitCode> {
        if self.dry_run {
            if self.json {
                print_json(&files_json(files))?;
            } else {
                print(&files_table(files))?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let written = self.write(files, inputs, verb)?;
        if self.json {
            print_json(&written)?;
        } else {
            print(&written_text(&written))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// What was written: sizes, and the paths last.
pub(crate) fn written_text(written: &[Written]) -> String {
    let total = written.iter().map(|w| w.file_bytes).sum();
    let mut text = String::new();
    let resumed: u64 = written.iter().map(|w| w.resumed_bytes).sum();
    if resumed > 0 {
        text += &format!("{} were there already and are right\n", units::exact_bytes(resumed));
    }
    text += &format!("wrote {}", units::exact_bytes(total));
    if written.len() > 1 {
        text += &format!(" in {} files", written.len());
    }
    for file in written {
        text += &format!("\n{}", file.path.display());
    }
    text
}

/// The files that must not be written over.
pub(crate) fn inputs_of<'a>(sources: impl IntoIterator<Item = &'a Gguf>) -> Vec<PathBuf> {
    sources.into_iter().flat_map(Gguf::shards).map(|shard| shard.path.clone()).collect()
}

/// A mistake in the call as such, else the failure.
pub(crate) fn usage_or_failure(error: RewriteError) -> anyhow::Error {
    if error.is_usage() { UsageError(error.to_string()).into() } else { error.into() }
}

/// What would be written.
pub(crate) fn files_json(files: &[NewFile<'_>]) -> serde_json::Value {
    let file = |file: &NewFile<'_>| {
        let names: Vec<_> = file.layout.tensors().iter().map(|t| t.name.as_str()).collect();
        json!({ "path": file.path, "file_bytes": file.layout.file_bytes(), "tensors": names })
    };
    json!({ "files": files.iter().map(file).collect::<Vec<_>>() })
}

fn files_table(files: &[NewFile<'_>]) -> String {
    let row = |file: &NewFile<'_>| {
        let tensors = file.layout.tensors();
        let name =
            |t: Option<&gguf_tools::gguf::PlacedTensor>| t.map_or("none", |t| t.name.as_str()).to_owned();
        vec![
            file.path.display().to_string(),
            name(tensors.first()),
            name(tensors.last()),
            tensors.len().to_string(),
            file.layout.file_bytes().to_string(),
            units::bytes(file.layout.file_bytes()),
        ]
    };
    let rows: Vec<_> = files.iter().map(row).collect();
    table(&["file", "first tensor", "last tensor", "tensors", "bytes", "size"], 3, &rows)
}
