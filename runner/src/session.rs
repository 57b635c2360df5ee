//! A model that is open, sequences that grow in it, and texts that are scored by it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gguf_tools::model::HyperParameters;
use gguf_tools::simd::Level;
use serde::Serialize;

use crate::cpu::{CpuBackend, CpuCache};
use crate::error::RunnerError;
use crate::forward::{Batch, Network, Pass, Steering};
use crate::load::load;
use crate::logits::check_logits;
use crate::observe::{NoObserver, Observer};
use crate::ops::{ActivationPrecision, Backend, Numerics};
use crate::weights::{ReadAhead, WeightSource, available_bytes, open_source};

/// How a model is to be run.
#[derive(Debug, Clone)]
pub struct Options {
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
    /// are more than the memory that is free. Results do not depend on it.
    pub release_weights: Option<bool>,
    /// Directions that are taken out of activations.
    pub steering: Option<Arc<Steering>>,
    /// Instruction set. Results do not depend on it.
    pub level: Level,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            numerics: Numerics::default(),
            activations: ActivationPrecision::default(),
            n_threads: 0,
            context_limit: None,
            batch_tokens: 2048,
            attention_tokens: 512,
            check_finite: false,
            widen_up_to_bytes: 512 << 20,
            release_weights: None,
            steering: None,
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
    /// Whether directions were taken out of activations.
    pub steered: bool,
    /// Device.
    pub backend: &'static str,
}

/// An open model on the CPU.
pub struct Model {
    backend: CpuBackend,
    network: Network<CpuBackend>,
    /// Not for models that are widened.
    read_ahead: Option<ReadAhead>,
    path: PathBuf,
    options: Options,
    context_limit: usize,
    threads: rayon::ThreadPool,
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
        let n_threads = options.n_threads;
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads)
            .thread_name(|i| format!("runner-{i}"))
            .build()
            .map_err(|source| RunnerError::Threads { n_threads, source })?;
        let backend = CpuBackend {
            level: options.level,
            activations: options.activations,
            widen: widened_bytes(h) <= options.widen_up_to_bytes,
        };
        let network = threads.install(|| load(&backend, source))?;
        let release = options
            .release_weights
            .unwrap_or_else(|| available_bytes().is_some_and(|available| source.mapped_bytes() > available));
        let read_ahead = (!backend.widen).then(|| ReadAhead::new(source, release));
        Ok(Self {
            backend,
            network,
            read_ahead,
            path: source.path().to_owned(),
            options,
            context_limit,
            threads,
        })
    }

    /// The model's hyper-parameters.
    pub fn hyper_parameters(&self) -> &HyperParameters {
        self.network.hyper_parameters()
    }

    /// Most tokens of a sequence.
    pub fn context_limit(&self) -> usize {
        self.context_limit
    }

    /// How this model's numbers are made.
    pub fn provenance(&self) -> Provenance {
        Provenance {
            model: self.path.clone(),
            numerics: self.options.numerics.name(),
            activations: self.options.activations.name(),
            steered: self.options.steering.is_some(),
            backend: "cpu",
        }
    }

    /// An empty sequence.
    pub fn session(&self) -> Session<'_> {
        Session { model: self, caches: self.empty_caches(), n_tokens: 0 }
    }

    /// One cache a layer.
    fn empty_caches(&self) -> Vec<Vec<CpuCache>> {
        (0..self.network.n_layers())
            .map(|layer| vec![self.backend.cache(self.network.cache_shape(layer))])
            .collect()
    }

    fn pass<'a>(&'a self, observer: &'a mut dyn Observer) -> Pass<'a> {
        Pass {
            numerics: self.options.numerics,
            attention_tokens: self.options.attention_tokens,
            check_finite: self.options.check_finite,
            steering: self.options.steering.as_deref(),
            observer,
        }
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
        for text in texts {
            self.check_tokens(0, text)?;
        }
        self.threads.install(|| {
            let mut first = 0;
            while first < texts.len() {
                // Whole texts until the batch is full; a text that is longer goes through in parts.
                let mut n_tokens = texts[first].len();
                let mut end = first + 1;
                while end < texts.len() && n_tokens + texts[end].len() <= self.options.batch_tokens {
                    n_tokens += texts[end].len();
                    end += 1;
                }
                self.read_batch(first, &texts[first..end], observer, each)?;
                first = end;
            }
            Ok(())
        })
    }

    /// One batch of texts through all layers. Only one layer's caches exist at a time.
    fn read_batch(
        &self,
        first_text: usize,
        texts: &[&[u32]],
        observer: &mut dyn Observer,
        each: &mut (dyn FnMut(usize, usize, &[f32]) + Send),
    ) -> Result<(), RunnerError> {
        let (b, network) = (&self.backend, &self.network);
        // A single long text is cut; several together fit one part.
        let mut parts = Vec::new();
        if let [text] = texts {
            for (i, tokens) in text.chunks(self.options.batch_tokens).enumerate() {
                let mut batch = Batch::default();
                batch.push(0, i * self.options.batch_tokens, tokens);
                parts.push(batch);
            }
        } else {
            let mut batch = Batch::default();
            texts.iter().enumerate().for_each(|(i, text)| batch.push(i, 0, text));
            parts.push(batch);
        }
        for batch in &mut parts {
            batch.places.iter_mut().for_each(|place| place.sequence += first_text);
        }
        let mut pass = self.pass(observer);
        let mut streams = parts.iter().map(|batch| network.embed(b, batch)).collect::<Result<Vec<_>, _>>()?;
        let n_tokens = parts.iter().map(|batch| batch.tokens.len()).sum();
        let reading = self.read_ahead.as_ref().and_then(|ahead| ahead.begin(n_tokens));
        for layer in 0..network.n_layers() {
            reading.iter().for_each(|reading| reading.enter(layer));
            let mut caches = vec![b.cache(network.cache_shape(layer)); texts.len()];
            for (batch, streams) in parts.iter().zip(&mut streams) {
                network.layer(b, layer, streams, batch, &mut caches, &mut pass)?;
            }
        }
        reading.iter().for_each(|reading| reading.enter(network.n_layers()));
        for (batch, streams) in parts.iter().zip(&streams) {
            for first in (0..batch.tokens.len()).step_by(HEAD_TOKENS) {
                let rows = first..batch.tokens.len().min(first + HEAD_TOKENS);
                let places = &batch.places[rows.clone()];
                let logits = network.head(b, &b.rows(streams, rows), places, &mut pass)?;
                let width = self.hyper_parameters().vocab_size as usize;
                for (logits, place) in b.read(&logits).chunks_exact(width).zip(places) {
                    check_logits(logits, place.position)?;
                    each(place.sequence, place.position, logits);
                }
            }
        }
        Ok(())
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

/// Positions whose logits are held at once.
const HEAD_TOKENS: usize = 64;

/// Bytes of all weights as `f32`.
fn widened_bytes(h: &HyperParameters) -> u64 {
    let table = gguf_tools::model::TensorTable::new(h);
    table.specs().iter().map(|spec| spec.n_values().saturating_mul(4)).fold(0, u64::saturating_add)
}

/// One sequence: its caches in all layers. They grow with its tokens.
pub struct Session<'a> {
    model: &'a Model,
    /// `[layers][1]`.
    caches: Vec<Vec<CpuCache>>,
    n_tokens: usize,
}

/// The state of a [`Session`] at some token, to return to.
#[derive(Clone)]
pub struct Snapshot {
    caches: Vec<Vec<CpuCache>>,
    n_tokens: usize,
}

impl Session<'_> {
    /// Tokens read so far.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Bytes that the caches take now.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().flatten().map(|cache| self.model.backend.cache_bytes(cache)).sum()
    }

    /// Reads tokens layer by layer and continues the caches. Returns the logits `[vocab_size]` behind the last one.
    ///
    /// # Errors
    /// If there are no tokens, unknown ones, or more than the context allows (the session is unchanged then);
    /// or if computing fails (the session is unusable then).
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
        let model = self.model;
        model.check_tokens(self.n_tokens, tokens)?;
        model.threads.install(|| {
            let (b, network) = (&model.backend, &model.network);
            let mut pass = model.pass(observer);
            let mut logits = Vec::new();
            let n_parts = tokens.len().div_ceil(model.options.batch_tokens);
            for (part, tokens) in tokens.chunks(model.options.batch_tokens).enumerate() {
                let mut batch = Batch::default();
                batch.push(0, self.n_tokens, tokens);
                let mut streams = network.embed(b, &batch)?;
                let reading = model.read_ahead.as_ref().and_then(|ahead| ahead.begin(tokens.len()));
                for (layer, caches) in self.caches.iter_mut().enumerate() {
                    reading.iter().for_each(|reading| reading.enter(layer));
                    network.layer(b, layer, &mut streams, &batch, caches, &mut pass)?;
                }
                self.n_tokens += tokens.len();
                if part + 1 == n_parts {
                    let last = tokens.len() - 1..tokens.len();
                    let places = &batch.places[last.clone()];
                    let row = network.head(b, &b.rows(&streams, last), places, &mut pass)?;
                    logits = b.read(&row).into_owned();
                    check_logits(&logits, self.n_tokens - 1)?;
                }
            }
            Ok(logits)
        })
    }

    /// Reads one token. Returns the logits `[vocab_size]` behind it.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, token: u32) -> Result<Vec<f32>, RunnerError> {
        self.prefill(&[token])
    }

    /// The state now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { caches: self.caches.clone(), n_tokens: self.n_tokens }
    }

    /// Returns to a state of this or another session of the same model.
    pub fn restore(&mut self, snapshot: &Snapshot) {
        self.caches.clone_from(&snapshot.caches);
        self.n_tokens = snapshot.n_tokens;
    }
}
