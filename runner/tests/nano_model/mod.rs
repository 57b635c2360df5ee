//! The nano model of this repository, for tests and benches.

use std::path::Path;

use gguf_tools::build::{BuildOptions, build};
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::importance::NoImportance;
use gguf_tools::plan::{Plan, Recipe};
use gguf_tools::progress::Silent;
use gguf_tools::source::{CheckpointSource, WeightSource};

/// Its checkpoint folder.
pub(crate) fn checkpoint() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../test-vectors/nano/checkpoint"))
}

/// Builds the GGUF file of a checkpoint and a recipe.
pub(crate) fn write_gguf(checkpoint: &Path, recipe: &Recipe, path: &Path) {
    let source = CheckpointSource::new(Checkpoint::open(checkpoint).unwrap()).unwrap();
    let plan = Plan::new(&source, recipe, source.metadata().unwrap()).unwrap();
    let options = BuildOptions { overwrite: true, resume: false, importance_fallback: true };
    build(&plan, &source, &NoImportance, path, options, &Silent).unwrap();
}
