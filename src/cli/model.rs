//! Arguments and steps that the commands which run a model share.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::gguf::Gguf;
use gguf_tools::plan::Recipe;
use gguf_tools::source::WeightSource as _;
use gguf_tools::synth::{Shape, SynthOptions, SynthSource};
use runner::cuda::{CudaError, Device, KernelChoice, Origin, Plan as MemoryPlan};
use runner::tokenizer::Tokenizer;
use runner::weights::{SyntheticSource, WeightSource, open_source};
use runner::{ActivationPrecision, Model, Numerics, Options, Processor, RunnerError};

use super::UsageError;
use super::arguments::recipe_named;
use super::steering::SteeringArguments;
use crate::render::units;

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

/// Which kernels a GPU uses.
#[derive(Debug, Args)]
struct KernelArguments {
    /// Where a GPU's kernels come from: `nvrtc`, the run-time compiler, `ptx`, code in this program that the driver
    /// finishes, or `any`: compiled before and kept, else by NVRTC, else PTX.
    #[arg(long, value_name = "ORIGIN", default_value = "any", value_parser = ["any", "nvrtc", "ptx"])]
    kernels_from: String,
    /// Use no instruction and no more shared memory than every kind of GPU has: an H100 or H200 then computes as an RTX 50
    /// or GB10 does.
    #[arg(long)]
    portable_kernels: bool,
}

impl KernelArguments {
    fn choice(&self) -> KernelChoice {
        let origin = Origin::NAMES.iter().find(|(name, _)| *name == self.kernels_from);
        KernelChoice { origin: origin.map_or(Origin::Any, |found| found.1), portable: self.portable_kernels }
    }
}

/// How a model is computed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(super) struct ComputeArguments {
    /// What computes: `cuda`, an NVIDIA GPU that holds the whole model, or `cpu`; `auto` takes a GPU if there is one that
    /// does, and says why it does not.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = ["auto", "cpu", "cuda"])]
    backend: String,
    /// Rounding of activations: `official` as the model was trained, `exact` as a float reference.
    #[arg(long, value_name = "MODE", default_value = "official", value_parser = ["official", "exact"])]
    numerics: String,
    /// Inputs of quantized matrices: `f32` is exact, `int8` fast on a CPU, `mixed` fast on a GPU, `plain-ggml` bit for
    /// bit llama.cpp without vector instructions. If left out: `f32` on a CPU, `mixed` on a GPU.
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "int8", "plain-ggml", "mixed"])]
    activations: Option<String>,
    /// Most tokens of a sequence; what the model is made for if left out.
    #[arg(short = 'c', long = "ctx", value_name = "N")]
    context: Option<usize>,
    /// Threads; all processors if left out. Results do not depend on it.
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Most memory of the GPU that the model may take, in GiB; what is free if left out. On a GPU that shares the machine's
    /// memory: all of it less 12 GiB, and no more than is available.
    #[arg(long, value_name = "GiB")]
    device_memory: Option<f64>,
    #[command(flatten)]
    kernels: KernelArguments,
    /// Look through every result for NaN and infinities and name the first layer and operation with one.
    #[arg(long)]
    check_finite: bool,
}

impl ComputeArguments {
    /// Most tokens of a sequence, if asked for.
    pub(super) fn context(&self) -> Option<usize> {
        self.context
    }

    /// Threads as asked for: 0 for all processors.
    pub(super) fn n_threads(&self) -> usize {
        self.threads
    }

    /// Kernels of a GPU.
    pub(super) fn kernels(&self) -> KernelChoice {
        self.kernels.choice()
    }

    fn device_bytes(&self) -> Result<Option<u64>, UsageError> {
        match self.device_memory {
            Some(gib) if !(gib > 0.0 && gib.is_finite()) => {
                Err(UsageError("--device-memory: GiB must be more than 0".to_owned()))
            }
            gib => Ok(gib.map(|gib| (gib * (1_u64 << 30) as f64) as u64)),
        }
    }

    pub(super) fn options(&self) -> anyhow::Result<Options> {
        let numerics = Numerics::NAMES.iter().find(|(name, _)| *name == self.numerics);
        let options = Options {
            numerics: numerics.context("the parser admits known modes only")?.1,
            n_threads: self.threads,
            context_limit: self.context,
            check_finite: self.check_finite,
            device_bytes: self.device_bytes()?,
            kernels: self.kernels.choice(),
            ..Options::default()
        };
        let processor = match &*self.backend {
            "cuda" => Processor::Cuda(0),
            "auto" => match Device::open(0) {
                Ok(_) => Processor::Cuda(0),
                Err(error) => {
                    // A machine without a driver is not meant to compute on a GPU: there is nothing to tell.
                    if !matches!(error, CudaError::NoDriver) {
                        tell_fallback(&error);
                    }
                    Processor::Cpu
                }
            },
            _ => Processor::Cpu,
        };
        self.on(processor, options)
    }

    /// The options with this processor, and what depends on it.
    fn on(&self, processor: Processor, options: Options) -> anyhow::Result<Options> {
        let plain = Options::default();
        let on_cpu = processor == Processor::Cpu;
        let activations = self.activations.as_deref().unwrap_or(if on_cpu { "f32" } else { "mixed" });
        let activations = ActivationPrecision::NAMES.iter().find(|(name, _)| *name == activations);
        Ok(Options {
            processor,
            activations: activations.context("the parser admits known types only")?.1,
            // Kernels for many tokens want many, and a GPU that holds the model has room for their queries.
            attention_tokens: if on_cpu { plain.attention_tokens } else { plain.batch_tokens },
            ..options
        })
    }

    /// Opens a model; on the CPU after all if the choice is ours and the device cannot take it. Gives the options that
    /// serve, too.
    pub(super) fn open(
        &self,
        source: &Arc<dyn WeightSource>,
        options: Options,
    ) -> anyhow::Result<(Model, Options)> {
        match Model::new(source, options.clone()) {
            Err(RunnerError::Cuda(error)) if self.backend == "auto" && error.is_refusal() => {
                tell_fallback(&error);
                let options = self.on(Processor::Cpu, options)?;
                Ok((Model::new(source, options.clone())?, options))
            }
            model => Ok((model?, options)),
        }
    }
}

/// Says why a device is not used that the user may count on.
fn tell_fallback(error: &CudaError) {
    eprintln!("computing on the CPU: {error}");
}

/// A model without a file, in place of one.
#[derive(Debug, Args)]
#[command(next_help_heading = "Synthetic model")]
pub(super) struct SyntheticArguments {
    /// Instead of a model random weights of this shape, made by the device.
    #[arg(long, value_name = "SHAPE", conflicts_with = "model", value_parser = ["tiny", "flash", "pro"])]
    synthetic: Option<String>,
    /// Types of the synthetic model: a recipe, or a file of one.
    #[arg(long, value_name = "NAME|FILE", default_value = "q2", requires = "synthetic")]
    recipe: String,
    /// Layers of the synthetic model; all of the shape if left out.
    #[arg(long, value_name = "N", requires = "synthetic")]
    layers: Option<u64>,
    /// Routed experts of a layer of the synthetic model; all of the shape if left out.
    #[arg(long = "experts", value_name = "N", requires = "synthetic")]
    n_experts: Option<u64>,
    /// Seed of the synthetic model.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "synthetic")]
    seed: u64,
}

impl SyntheticArguments {
    /// Whether one was asked for.
    pub(super) fn is_given(&self) -> bool {
        self.synthetic.is_some()
    }

    /// The model that was asked for, if one was.
    pub(super) fn source(&self) -> anyhow::Result<Option<Arc<SyntheticSource>>> {
        let Some(shape) = &self.synthetic else { return Ok(None) };
        let shape = Shape::NAMES.iter().find(|(name, _)| name == shape);
        let (_, shape) = *shape.context("the parser admits known shapes only")?;
        let options = SynthOptions {
            layers: self.layers,
            experts: self.n_experts,
            seed: self.seed,
            ..SynthOptions::new(shape)
        };
        synthetic(&options, &recipe_named(&self.recipe)?).map(Some)
    }
}

/// A synthetic model in the types of a recipe.
pub(super) fn synthetic(options: &SynthOptions, recipe: &Recipe) -> anyhow::Result<Arc<SyntheticSource>> {
    let source = SynthSource::new(options)?;
    let plan = gguf_tools::plan::Plan::new(&source, recipe, source.metadata()?)?;
    Ok(Arc::new(SyntheticSource::new(source, &plan, options.seed)?))
}

/// Says what of the device's memory a model takes.
pub(super) fn print_memory_plan(source: &dyn WeightSource, options: &Options) {
    if options.processor == Processor::Cpu {
        return;
    }
    eprintln!("memory of the device: {}", memory_sum(&MemoryPlan::new(source, options)));
}

/// The parts of a model's memory, and their sum.
pub(super) fn memory_sum(plan: &MemoryPlan) -> String {
    format!(
        "{} = weights {} + cache {} ({} tokens) + scratch {} + reserve {}",
        units::bytes(plan.total()),
        units::bytes(plan.weights),
        units::bytes(plan.cache),
        plan.tokens,
        units::bytes(plan.scratch),
        units::bytes(plan.reserve),
    )
}

impl ModelArguments {
    pub(super) fn open(&self) -> anyhow::Result<Model> {
        let options = self.steering.add_to(self.compute.options()?, &self.model)?;
        let source = open_source(&self.model)?;
        print_memory_plan(source.as_ref(), &options);
        Ok(self.compute.open(&source, options)?.0)
    }

    pub(super) fn path(&self) -> &Path {
        &self.model
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
