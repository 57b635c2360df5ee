//! Arguments and steps that the commands which run a model share.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::gguf::Gguf;
use runner::cuda::driver::{Device, driver_is_present};
use runner::tokenizer::Tokenizer;
use runner::{ActivationPrecision, Model, Numerics, Options, Processor};

use super::steering::SteeringArguments;

/// Which model, and how it is computed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(super) struct ModelArguments {
    /// A GGUF file (any shard of a split one) or the folder of an official checkpoint.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: PathBuf,
    #[command(flatten)]
    compute: ComputeArguments,
    #[command(flatten)]
    steering: SteeringArguments,
}

/// How a model is computed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(super) struct ComputeArguments {
    /// What computes: `cuda`, an NVIDIA GPU that holds the whole model, or `cpu`; `auto` takes a GPU if there is one.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = ["auto", "cpu", "cuda"])]
    backend: String,
    /// Rounding of activations: `official` as the model was trained, `exact` as a float reference.
    #[arg(long, value_name = "MODE", default_value = "official", value_parser = ["official", "exact"])]
    numerics: String,
    /// Inputs of quantized matrices: `f32` is exact, `int8` fast on a CPU, `mixed` fast on a GPU. If left out: `f32` on
    /// a CPU, `mixed` on a GPU.
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "int8", "mixed"])]
    activations: Option<String>,
    /// Most tokens of a sequence; what the model is made for if left out.
    #[arg(short = 'c', long = "ctx", value_name = "N")]
    context: Option<usize>,
    /// Threads; all processors if left out. Results do not depend on it.
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Look through every result for NaN and infinities and name the first layer and operation with one.
    #[arg(long)]
    check_finite: bool,
}

impl ComputeArguments {
    pub(super) fn options(&self) -> anyhow::Result<Options> {
        let numerics = Numerics::NAMES.iter().find(|(name, _)| *name == self.numerics);
        let processor = match &*self.backend {
            "cuda" => Processor::Cuda(0),
            "auto" if driver_is_present() && Device::open(0).is_ok() => Processor::Cuda(0),
            _ => Processor::Cpu,
        };
        let fast = if processor == Processor::Cpu { "f32" } else { "mixed" };
        let activations = self.activations.as_deref().unwrap_or(fast);
        let activations = ActivationPrecision::NAMES.iter().find(|(name, _)| *name == activations);
        Ok(Options {
            processor,
            numerics: numerics.context("the parser admits known modes only")?.1,
            activations: activations.context("the parser admits known types only")?.1,
            n_threads: self.threads,
            context_limit: self.context,
            check_finite: self.check_finite,
            ..Options::default()
        })
    }
}

impl ModelArguments {
    pub(super) fn open(&self) -> anyhow::Result<Model> {
        let options = self.steering.add_to(self.compute.options()?, &self.model)?;
        Ok(Model::open(&self.model, options)?)
    }

    pub(super) fn path(&self) -> &Path {
        &self.model
    }

    /// Threads as asked for: 0 for all processors.
    pub(super) fn n_threads(&self) -> usize {
        self.compute.threads
    }

    pub(super) fn tokenizer(&self) -> anyhow::Result<Tokenizer> {
        tokenizer(&self.model)
    }
}

/// The tokenizer of a GGUF file or an official checkpoint.
pub(super) fn tokenizer(model: &Path) -> anyhow::Result<Tokenizer> {
    let metadata = if model.is_dir() {
        gguf_tools::checkpoint::tokenizer::metadata(&Checkpoint::open(model)?)?
    } else {
        Gguf::open(model)?.metadata().clone()
    };
    Tokenizer::from_metadata(&metadata).with_context(|| format!("in `{}`", model.display()))
}

/// Tokens of a text, cut into sequences of `context` tokens that each begin with the first token of a text.
pub(super) fn sequences(tokenizer: &Tokenizer, text: &str, context: usize) -> anyhow::Result<Vec<Vec<u32>>> {
    let tokens = tokenizer.encode_plain(text)?;
    let first: Vec<u32> = tokenizer.bos().into_iter().collect();
    let room = context.saturating_sub(first.len()).max(1);
    Ok(tokens.chunks(room).map(|part| [first.as_slice(), part].concat()).filter(|s| s.len() > 1).collect())
}
