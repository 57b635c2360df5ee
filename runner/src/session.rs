//! A model that is open, sequences that grow in it, and texts that are scored by it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gguf_tools::model::HyperParameters;
use gguf_tools::simd::Level;
use serde::Serialize;

use crate::cpu::CpuBackend;
use crate::cuda::driver::KernelShare;
use crate::cuda::self_test::read_bandwidth;
use crate::cuda::{CudaBackend, KernelChoice};
use crate::engine::{Engine, SavedSequence, Sequence};
use crate::error::RunnerError;
use crate::forward::Steering;
use crate::load::load;
use crate::observe::{NoObserver, Observer};
use crate::ops::{ActivationPrecision, Backend, Numerics, Work};
use crate::weights::{ReadAhead, WeightSource, available_bytes, open_source};

/// What computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Processor {
    /// The CPU: the reference.
    #[default]
    Cpu,
    /// An NVIDIA GPU that holds the whole model: the one of this number among those that the driver shows.
    Cuda(usize),
}

/// How a model is to be run.
#[derive(Debug, Clone)]
pub struct Options {
    /// What computes.
    pub processor: Processor,
    /// Rounding of activations.
    pub numerics: Numerics,
    /// Precision of the inputs of quantized matrices.
    pub activations: ActivationPrecision,
    /// Worker threads; 0 = one a core. Results do not depend on it.
    pub n_threads: usize,
    /// Most tokens of a sequence; `None`: what the model is made for.
    pub context_limit: Option<usize>,
    /// Tokens that go through a layer together: bounds memory. Results do not depend on it.
    pub batch_tokens: usize,
    /// Tokens whose queries are held at once: bounds memory. Results do not depend on it.
    pub attention_tokens: usize,
    /// Whether every result is looked through for NaN and infinities, to name the first place they come up.
    pub check_finite: bool,
    /// Models whose matrices take at most this many bytes as `f32` are widened at loading. Results do not depend on it.
    pub widen_up_to_bytes: u64,
    /// Whether a layer's weights are given back to the system once a batch has passed it; `None`: where the weights
    /// are more than the memory that is free. For the CPU. Results do not depend on it.
    pub release_weights: Option<bool>,
    /// Most bytes of a device's memory that a model may take; `None`: what is free.
    pub device_bytes: Option<u64>,
    /// Which kernels a GPU uses. Results may depend on it: other instructions add in another order.
    pub kernels: KernelChoice,
    /// Directions that are taken out of activations, one set after the other.
    pub steering: Vec<Arc<Steering>>,
    /// Whether a GPU records the pass over a single token once and repeats it for every next one. Results do not
    /// depend on it.
    pub record_steps: bool,
    /// Instruction set of the CPU. Results do not depend on it.
    pub level: Level,
}

impl Options {
    /// Whether the CPU widens a model's matrices at loading.
    fn widens(&self, model: &HyperParameters) -> bool {
        widened_bytes(model) <= self.widen_up_to_bytes
    }

    /// Bytes that the CPU's own copy of a model's matrices takes: 0 where they are read from the file as they are needed.
    pub fn copied_bytes(&self, model: &HyperParameters) -> u64 {
        if self.widens(model) { widened_bytes(model) } else { 0 }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            processor: Processor::default(),
            numerics: Numerics::default(),
            activations: ActivationPrecision::default(),
            n_threads: 0,
            context_limit: None,
            batch_tokens: 2048,
            attention_tokens: 512,
            check_finite: false,
            widen_up_to_bytes: 512 << 20,
            release_weights: None,
            device_bytes: None,
            kernels: KernelChoice::default(),
            steering: Vec::new(),
            record_steps: true,
            level: Level::detect(),
        }
    }
}

/// What a report must say about how its numbers were made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Provenance {
    /// File or folder.
    pub model: PathBuf,
    /// [`Numerics::name`].
    pub numerics: &'static str,
    /// [`ActivationPrecision::name`].
    pub activations: &'static str,
    /// Directions that were taken out of activations, by [`Steering::name`].
    pub steering: Vec<String>,
    /// Device.
    pub backend: &'static str,
}

/// An open model on the CPU or a GPU.
pub struct Model {
    machine: Machine,
    path: PathBuf,
    context_limit: usize,
    threads: rayon::ThreadPool,
}

enum Machine {
    Cpu(Box<Engine<CpuBackend>>),
    Cuda(Box<Engine<CudaBackend>>),
}

/// The same expression for whichever engine it is.
macro_rules! with_engine {
    ($machine:expr, $engine:ident => $work:expr) => {
        match $machine {
            Machine::Cpu($engine) => $work,
            Machine::Cuda($engine) => $work,
        }
    };
}

impl Model {
    /// Opens a GGUF file (any file of a split set) or an official checkpoint folder.
    ///
    /// # Errors
    /// If it is no sound and complete model, or an option makes no sense for it.
    pub fn open(path: &Path, options: Options) -> Result<Self, RunnerError> {
        Self::new(&open_source(path)?, options)
    }

    /// Takes a source of weights.
    ///
    /// # Errors
    /// If tensors are missing or unusable, or an option makes no sense for the model.
    pub fn new(source: &Arc<dyn WeightSource>, options: Options) -> Result<Self, RunnerError> {
        let h = source.hyper_parameters();
        let longest = h.max_position_embeddings as usize;
        let context_limit = options.context_limit.unwrap_or(longest);
        if context_limit > longest {
            return Err(RunnerError::ContextTooLong { wanted: context_limit, limit: longest });
        }
        for (option, value) in [
            ("context_limit", context_limit),
            ("batch_tokens", options.batch_tokens),
            ("attention_tokens", options.attention_tokens),
        ] {
            if value == 0 {
                return Err(RunnerError::BadOption { option, found: "0".into(), expected: "at least 1" });
            }
        }
        let fits = match options.processor {
            Processor::Cpu => options.activations.runs_on_cpu(),
            Processor::Cuda(_) => !options.activations.rounds_as_ggml(),
        };
        if !fits {
            return Err(RunnerError::BadOption {
                option: "activations",
                found: options.activations.name().into(),
                expected: "f32, int8 or plain-ggml on a CPU, f32 or mixed on a GPU",
            });
        }
        let n_threads = options.n_threads;
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads)
            .thread_name(|i| format!("runner-{i}"))
            .build()
            .map_err(|source| RunnerError::Threads { n_threads, source })?;
        let machine = match options.processor {
            Processor::Cpu => {
                let backend = CpuBackend {
                    level: options.level,
                    activations: options.activations,
                    widen: options.widens(h),
                };
                let read_ahead = (!backend.widen).then(|| ReadAhead::new(source, releases(source, &options)));
                let engine = threads.install(|| open_engine(backend, source, &options))?;
                Machine::Cpu(Box::new(Engine { read_ahead, ..engine }))
            }
            Processor::Cuda(ordinal) => {
                let backend = CudaBackend::open(ordinal, source, &options)?;
                Machine::Cuda(Box::new(threads.install(|| open_engine(backend, source, &options))?))
            }
        };
        Ok(Self { machine, path: source.path().to_owned(), context_limit, threads })
    }

    fn options(&self) -> &Options {
        with_engine!(&self.machine, engine => &engine.options)
    }

    /// The model's hyper-parameters.
    pub fn hyper_parameters(&self) -> &HyperParameters {
        with_engine!(&self.machine, engine => engine.network.hyper_parameters())
    }

    /// Most tokens of a sequence.
    pub fn context_limit(&self) -> usize {
        self.context_limit
    }

    /// How this model's numbers are made.
    pub fn provenance(&self) -> Provenance {
        let options = self.options();
        Provenance {
            model: self.path.clone(),
            numerics: options.numerics.name(),
            activations: options.activations.name(),
            steering: options.steering.iter().filter(|s| s.acts()).map(|s| s.name.clone()).collect(),
            backend: match &self.machine {
                Machine::Cpu(_) => CpuBackend::NAME,
                Machine::Cuda(_) => CudaBackend::NAME,
            },
        }
    }

    /// Bytes a second that the device's memory gives to a kernel that only reads; `None` on a CPU.
    ///
    /// # Errors
    /// If the device fails.
    pub fn device_bandwidth(&self) -> Result<Option<f64>, RunnerError> {
        match &self.machine {
            Machine::Cpu(_) => Ok(None),
            Machine::Cuda(engine) => Ok(Some(read_bandwidth(engine.backend.gpu())?)),
        }
    }

    /// Takes other directions out of activations from now on.
    ///
    /// # Errors
    /// If the device fails.
    pub fn set_steering(&mut self, steering: Vec<Arc<Steering>>) -> Result<(), RunnerError> {
        with_engine!(&mut self.machine, engine => engine.steer(steering))
    }

    /// An empty sequence.
    pub fn session(&self) -> Session<'_> {
        let running = match &self.machine {
            Machine::Cpu(engine) => Running::Cpu(engine, engine.sequence()),
            Machine::Cuda(engine) => Running::Cuda(engine, engine.sequence()),
        };
        Session { model: self, running }
    }

    /// Refuses what cannot be computed, before anything is.
    fn check_tokens(&self, n_before: usize, tokens: &[u32]) -> Result<(), RunnerError> {
        if tokens.is_empty() {
            return Err(RunnerError::EmptyPrompt);
        }
        let wanted = n_before + tokens.len();
        if wanted > self.context_limit {
            return Err(RunnerError::ContextFull { wanted, limit: self.context_limit });
        }
        let vocabulary = self.hyper_parameters().vocab_size as usize;
        match tokens.iter().position(|&token| token as usize >= vocabulary) {
            Some(index) => Err(RunnerError::TokenOutOfRange { index, found: tokens[index], vocabulary }),
            None => Ok(()),
        }
    }

    /// Reads whole texts, layer by layer: all tokens of a batch of texts pass a layer before the next, so the weights of
    /// a file that does not fit memory are read once a batch. Gives `each` the logits `[vocab_size]` of every
    /// position: text, position, logits; texts in order within a batch, positions ascending.
    ///
    /// # Errors
    /// If a text is empty, too long or holds unknown tokens (nothing is computed then), or computing fails.
    pub fn read_texts(
        &self,
        texts: &[&[u32]],
        observer: &mut dyn Observer,
        each: &mut (dyn FnMut(usize, usize, &[f32]) + Send),
    ) -> Result<(), RunnerError> {
        self.read_batches(texts, observer, Some(each))
    }

    /// [`Model::read_texts`] for what the observer sees in the layers alone: no logits are computed.
    ///
    /// # Errors
    /// As [`Model::read_texts`].
    pub fn observe_texts(&self, texts: &[&[u32]], observer: &mut dyn Observer) -> Result<(), RunnerError> {
        self.read_batches(texts, observer, None)
    }

    /// Cuts texts into batches and reads them; with logits where `each` asks for them.
    fn read_batches(
        &self,
        texts: &[&[u32]],
        observer: &mut dyn Observer,
        mut each: Option<&mut EachLogits<'_>>,
    ) -> Result<(), RunnerError> {
        for text in texts {
            self.check_tokens(0, text)?;
        }
        self.threads.install(|| {
            let mut first = 0;
            while first < texts.len() {
                // Whole texts until the batch is full; a text that is longer goes through in parts.
                let mut n_tokens = texts[first].len();
                let mut end = first + 1;
                while end < texts.len() && n_tokens + texts[end].len() <= self.options().batch_tokens {
                    n_tokens += texts[end].len();
                    end += 1;
                }
                let texts = &texts[first..end];
                with_engine!(&self.machine, engine => engine.read_batch(first, texts, observer, each.as_deref_mut()))?;
                first = end;
            }
            Ok(())
        })
    }

    /// Natural-log probability of every token after the first, given those before it: `[tokens - 1]`.
    ///
    /// # Errors
    /// As [`Model::read_texts`].
    pub fn score(&self, tokens: &[u32]) -> Result<Vec<f64>, RunnerError> {
        Ok(self.score_texts(&[tokens])?.swap_remove(0))
    }

    /// [`Model::score`] of several texts, batched.
    ///
    /// # Errors
    /// As [`Model::read_texts`].
    pub fn score_texts(&self, texts: &[&[u32]]) -> Result<Vec<Vec<f64>>, RunnerError> {
        let mut scores: Vec<Vec<f64>> = texts.iter().map(|text| Vec::with_capacity(text.len())).collect();
        self.read_texts(texts, &mut NoObserver, &mut |text, position, logits| {
            if let Some(&next) = texts[text].get(position + 1) {
                scores[text].push(crate::logits::log_probability(logits, next));
            }
        })?;
        Ok(scores)
    }
}

fn open_engine<B: Backend>(
    backend: B,
    source: &Arc<dyn WeightSource>,
    options: &Options,
) -> Result<Engine<B>, RunnerError> {
    let turn = backend.turn(Work::Batch)?;
    let network = load(&backend, source)?;
    drop(turn);
    let (directions, read_ahead) = (Vec::new(), None);
    let mut engine = Engine { backend, network, directions, options: options.clone(), read_ahead };
    engine.steer(options.steering.clone())?;
    Ok(engine)
}

/// Whether layers that are done with are given back.
fn releases(source: &Arc<dyn WeightSource>, options: &Options) -> bool {
    options
        .release_weights
        .unwrap_or_else(|| available_bytes().is_some_and(|available| source.mapped_bytes() > available))
}

/// Takes the logits of one position: text, position, logits.
pub(crate) type EachLogits<'a> = dyn FnMut(usize, usize, &[f32]) + Send + 'a;

/// One layer at a time over many texts, for work that reads a model's weights once.
impl Model {
    /// Number of layers.
    pub fn n_layers(&self) -> usize {
        with_engine!(&self.machine, engine => engine.network.n_layers())
    }

    /// Values of the residual streams of one token.
    pub fn streams_width(&self) -> usize {
        let h = self.hyper_parameters();
        (h.hc_mult * h.hidden_size) as usize
    }

    /// The streams of some texts' tokens before the first layer, `[tokens, M * D]`.
    ///
    /// # Errors
    /// If a text is empty, too long or holds unknown tokens, or the embedding cannot be read.
    pub fn embed_texts(&self, texts: &[&[u32]]) -> Result<Vec<f32>, RunnerError> {
        texts.iter().try_for_each(|text| self.check_tokens(0, text))?;
        self.threads.install(|| with_engine!(&self.machine, engine => engine.embed_texts(texts)))
    }

    /// One layer over whole texts. `streams`: `[tokens, M * D]`, those before the layer in, those behind it out.
    /// `first_text` is the number of the first text for `observer`.
    ///
    /// # Errors
    /// If weights cannot be read or a result is not finite and the options say to look.
    pub fn layer_of_texts(
        &self,
        layer: usize,
        first_text: usize,
        texts: &[&[u32]],
        streams: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<f32>, RunnerError> {
        self.threads.install(|| {
            with_engine!(&self.machine, engine => engine.layer_of_texts(layer, first_text, texts, streams, observer))
        })
    }

    /// What whole texts give the output matrix to read, for `observer` to see; no logits are computed. `streams`:
    /// `[tokens, M * D]`, those behind the last layer. `first_text` is the number of the first text for `observer`.
    ///
    /// # Errors
    /// If weights cannot be read or a result is not finite and the options say to look.
    pub fn head_input_of_texts(
        &self,
        first_text: usize,
        texts: &[&[u32]],
        streams: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunnerError> {
        self.threads.install(|| {
            with_engine!(&self.machine, engine => engine.head_input_of_texts(first_text, texts, streams, observer))
        })
    }
}

/// Bytes of all weights as `f32`.
fn widened_bytes(h: &HyperParameters) -> u64 {
    let table = gguf_tools::model::TensorTable::new(h);
    table.specs().iter().map(|spec| spec.n_values().saturating_mul(4)).fold(0, u64::saturating_add)
}

/// One sequence: its caches in all layers. They grow with its tokens.
pub struct Session<'a> {
    model: &'a Model,
    running: Running<'a>,
}

enum Running<'a> {
    Cpu(&'a Engine<CpuBackend>, Sequence<CpuBackend>),
    Cuda(&'a Engine<CudaBackend>, Sequence<CudaBackend>),
}

/// The same expression for whichever engine and sequence it is.
macro_rules! with_sequence {
    ($running:expr, ($engine:pat, $sequence:ident) => $work:expr) => {
        match $running {
            Running::Cpu($engine, $sequence) => $work,
            Running::Cuda($engine, $sequence) => $work,
        }
    };
}

/// The state of a [`Session`] at some token, to return to.
pub struct Snapshot(Saved);

enum Saved {
    Cpu(SavedSequence<CpuBackend>),
    Cuda(SavedSequence<CudaBackend>),
}

impl Session<'_> {
    /// Tokens read so far.
    pub fn n_tokens(&self) -> usize {
        with_sequence!(&self.running, (_, sequence) => sequence.n_tokens)
    }

    /// Bytes that the caches take now.
    pub fn cache_bytes(&self) -> usize {
        with_sequence!(&self.running, (engine, sequence) => engine.cache_bytes(sequence))
    }

    /// Reads tokens layer by layer and continues the caches. Returns the logits `[vocab_size]` behind the last one.
    ///
    /// # Errors
    /// If there are no tokens, unknown ones, or more than the context allows (the session is unchanged then);
    /// or if computing fails. Where the memory of a device ran out ([`CudaError::is_about_memory`](crate::cuda::CudaError)),
    /// the session holds the tokens that [`Session::n_tokens`] counts, which are those before the call or some whole
    /// batches more, and the rest can be read once there is memory. After any other failure it is unusable.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<Vec<f32>, RunnerError> {
        self.prefill_observed(tokens, &mut NoObserver)
    }

    /// [`Session::prefill`] with somebody looking on.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn prefill_observed(
        &mut self,
        tokens: &[u32],
        observer: &mut dyn Observer,
    ) -> Result<Vec<f32>, RunnerError> {
        self.model.check_tokens(self.n_tokens(), tokens)?;
        let running = &mut self.running;
        self.model.threads.install(
            || with_sequence!(running, (engine, sequence) => engine.prefill(sequence, tokens, observer)),
        )
    }

    /// Reads one token. Returns the logits `[vocab_size]` behind it.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, token: u32) -> Result<Vec<f32>, RunnerError> {
        self.model.check_tokens(self.n_tokens(), &[token])?;
        let running = &mut self.running;
        self.model.threads.install(|| {
            with_sequence!(running, (engine, sequence) => {
                engine.decode(sequence, token, engine.options.record_steps)
            })
        })
    }

    /// [`Session::prefill`], or [`Session::decode`] of a single token (if `work` says so), with the time of every kernel,
    /// the longest first. Kernels run one after the other then.
    ///
    /// # Errors
    /// As these, or if the model is not on a GPU.
    pub fn profile(&mut self, tokens: &[u32], work: Work) -> Result<Vec<KernelShare>, RunnerError> {
        self.model.check_tokens(self.n_tokens(), tokens)?;
        let Running::Cuda(engine, sequence) = &mut self.running else {
            return Err(RunnerError::BadOption {
                option: "profile",
                found: CpuBackend::NAME.into(),
                expected: "a model on a GPU",
            });
        };
        let ((), shares) = self.model.threads.install(|| {
            engine.backend.profile(|| match (work, tokens) {
                (Work::Token, &[token]) => engine.decode(sequence, token, false).map(drop),
                _ => engine.prefill(sequence, tokens, &mut NoObserver).map(drop),
            })
        })?;
        Ok(shares)
    }

    /// The state now.
    ///
    /// # Errors
    /// If the device has no room for it.
    pub fn snapshot(&self) -> Result<Snapshot, RunnerError> {
        Ok(Snapshot(match &self.running {
            Running::Cpu(engine, sequence) => Saved::Cpu(engine.save(sequence)?),
            Running::Cuda(engine, sequence) => Saved::Cuda(engine.save(sequence)?),
        }))
    }

    /// Returns to a state of this or another session of the same model.
    ///
    /// # Errors
    /// If the device has no room for it, or it is a state of a model on another processor.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), RunnerError> {
        match (&mut self.running, &snapshot.0) {
            (Running::Cpu(engine, sequence), Saved::Cpu(saved)) => engine.restore(sequence, saved),
            (Running::Cuda(engine, sequence), Saved::Cuda(saved)) => engine.restore(sequence, saved),
            _ => Err(RunnerError::BadOption {
                option: "snapshot",
                found: "a state of a model on another processor".into(),
                expected: "a state of this model",
            }),
        }
    }
}
