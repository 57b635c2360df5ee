//! `split`: one file into several, by llama.cpp's convention or by layers as ds4 does.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use gguf_tools::gguf::Gguf;
use gguf_tools::rewrite::{SplitBy, parse_layer_parts, restores_exactly, split};

use super::rewritten::{WriteArguments, inputs_of, usage_or_failure};
use crate::render::units;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The GGUF file, or any shard of a set that is to be split anew.
    file: PathBuf,
    /// Parts by layers with commas between, as 0:30,31:output: ordinary files, as ds4 loads them.
    #[arg(long, value_name = "PARTS", conflicts_with_all = ["max_size", "max_tensors"])]
    layers: Option<String>,
    /// Shards of at most this size, header included: 48GB, 500M, 4GiB.
    #[arg(long, value_name = "SIZE", visible_alias = "split-max-size", value_parser = units::parse_bytes, conflicts_with = "max_tensors")]
    max_size: Option<u64>,
    /// Shards of at most so many tensors; 128 if nothing else is asked for.
    #[arg(long, value_name = "N", visible_alias = "split-max-tensors")]
    max_tensors: Option<usize>,
    /// Put the metadata alone into the first shard.
    #[arg(long, conflicts_with = "layers")]
    no_tensor_first_split: bool,
    /// What the names of the new files begin with; the file's name if left out.
    #[arg(long, value_name = "PREFIX")]
    out: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArguments,
}

/// Tensors of a shard where nothing is asked for, as llama.cpp's tool has it.
const DEFAULT_TENSORS: usize = 128;

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let gguf = Gguf::open(&arguments.file)?;
    let no_tensor_first = arguments.no_tensor_first_split;
    let by = match (&arguments.layers, arguments.max_size) {
        (Some(parts), _) => SplitBy::Layers(parse_layer_parts(parts).map_err(usage_or_failure)?),
        (None, Some(most)) => SplitBy::Bytes { most, no_tensor_first },
        (None, None) => {
            SplitBy::Tensors { most: arguments.max_tensors.unwrap_or(DEFAULT_TENSORS), no_tensor_first }
        }
    };
    let prefix = arguments.out.clone().unwrap_or_else(|| prefix_of(&gguf, &arguments.file));
    let files = split(&gguf, &by, &prefix).map_err(usage_or_failure)?;
    if let Some(reason) = restores_exactly(&gguf) {
        eprintln!("note: merging will give an equal model, but not these very bytes: {reason}");
    }
    arguments.write.finish(&files, &inputs_of([&gguf]), "splitting")
}

/// The file's name without its ending and without its place in a set.
fn prefix_of(gguf: &Gguf, path: &Path) -> PathBuf {
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let whole = gguf.split_place().and_then(|place| {
        let ending = format!("-{:05}-of-{:05}", place.shard_index + 1, place.n_shards);
        gguf.shards()[0].path.file_stem()?.to_string_lossy().strip_suffix(&ending).map(str::to_owned)
    });
    path.with_file_name(whole.unwrap_or(name))
}
