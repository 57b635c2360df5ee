//! `merge`: a split set or layer files back to one file.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use gguf_tools::rewrite::{merge, open_parts};

use super::rewritten::{WriteArguments, inputs_of, usage_or_failure};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Any shard of a split set, or the layer files of a model (one finds those beside it by their names).
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// The file to write.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    write: WriteArguments,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let parts = open_parts(&arguments.files).map_err(usage_or_failure)?;
    let file = merge(&parts, &arguments.out).map_err(usage_or_failure)?;
    let mut inputs = inputs_of(&parts);
    inputs.extend(arguments.files.iter().cloned());
    arguments.write.finish(&[file], &inputs, "merging")
}
