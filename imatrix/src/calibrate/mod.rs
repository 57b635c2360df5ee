//! The layer-major pass over calibration text that gives error feedback its second moments.
//!
//! All tokens pass one layer before the next is touched, so that each layer's weights are read once. Of a layer the inputs of its
//! experts are kept in half precision, and every expert's second moments are formed from them when they are asked for; those of
//! dense matrices are summed while the tokens pass. None is ever stored. The residual streams before a layer lie in a file beside the output: they are what a killed run goes on from.

mod dataset;
mod dense;
mod gather;
mod half_rows;
mod patched;
mod streams;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gguf_tools::build::{Calibration, CalibrationError, LayerBytes, MatrixMoments, Wanted};
use gguf_tools::feedback::Settings;
use gguf_tools::model::{HyperParameters, MatrixInput};
use gguf_tools::plan::Plan;
use runner::observe::{NoObserver, Observer};
use runner::weights::WeightSource;
use runner::{Model, Options, RunnerError};
use sha2::{Digest, Sha256};

pub use dataset::{DatasetError, Document, read_documents};
use dense::{Both, Dense};
use gather::Gathered;
use half_rows::HalfRows;
use patched::PatchedSource;
use streams::{Kept, StreamFile};

/// What the next layer sees of a layer that is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Propagate {
    /// What the source's weights make of it.
    #[default]
    Source,
    /// What the quantized weights make of it.
    Quantized,
}

impl Propagate {
    /// Every choice with the name users type.
    pub const NAMES: [(&'static str, Self); 2] = [("source", Self::Source), ("quantized", Self::Quantized)];
}

/// A device that runs one layer over whole texts.
pub trait LayerRunner: Sync {
    /// Layers of the model.
    fn n_layers(&self) -> usize;

    /// Values of the residual streams of one token.
    fn streams_width(&self) -> usize;

    /// Streams before the first layer, `[tokens, width]`.
    ///
    /// # Errors
    /// If tokens are unknown or weights cannot be read.
    fn embed(&self, texts: &[&[u32]]) -> Result<Vec<f32>, RunnerError>;

    /// Streams behind a layer, from those before it.
    ///
    /// # Errors
    /// If weights cannot be read or something is not finite.
    fn layer(
        &self,
        layer: usize,
        first_text: usize,
        texts: &[&[u32]],
        streams: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<f32>, RunnerError>;

    /// Shows an observer what the output matrix reads, from the streams behind the last layer.
    ///
    /// # Errors
    /// If weights cannot be read or something is not finite.
    fn head_input(
        &self,
        first_text: usize,
        texts: &[&[u32]],
        streams: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunnerError>;
}

impl LayerRunner for Model {
    fn n_layers(&self) -> usize {
        Self::n_layers(self)
    }

    fn streams_width(&self) -> usize {
        Self::streams_width(self)
    }

    fn embed(&self, texts: &[&[u32]]) -> Result<Vec<f32>, RunnerError> {
        self.embed_texts(texts)
    }

    fn layer(
        &self,
        layer: usize,
        first_text: usize,
        texts: &[&[u32]],
        streams: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<f32>, RunnerError> {
        self.layer_of_texts(layer, first_text, texts, streams, observer)
    }

    fn head_input(
        &self,
        first_text: usize,
        texts: &[&[u32]],
        streams: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunnerError> {
        self.head_input_of_texts(first_text, texts, streams, observer)
    }
}

/// How calibration is done.
#[derive(Debug, Clone)]
pub struct CalibrationOptions {
    /// How second moments are mixed.
    pub settings: Settings,
    /// What the next layer sees.
    pub propagate: Propagate,
    /// How the model is run.
    pub runner: Options,
    /// Tokens that pass a layer together: bounds memory. Results do not depend on it.
    pub batch_tokens: usize,
}

/// Calibration tokens on their way through the layers of a model.
pub struct LayerPass {
    source: Arc<dyn WeightSource>,
    model: Box<dyn LayerRunner>,
    options: CalibrationOptions,
    texts: Vec<Vec<u32>>,
    kept: Kept,
    ready: usize,
    /// What the experts of the layer entered last read.
    gathered: Option<Gathered>,
    /// What its dense matrices read.
    dense: Option<Dense>,
}

impl LayerPass {
    /// Opens the source on the CPU. `texts`: sequences of tokens. `beside`: the output, beside which activations are kept.
    /// `identity` tells which texts, source and settings they belong to.
    ///
    /// # Errors
    /// If the source is no complete model, or there are no texts.
    pub fn new(
        source: Arc<dyn WeightSource>,
        texts: Vec<Vec<u32>>,
        beside: Option<&Path>,
        identity: &str,
        options: CalibrationOptions,
    ) -> Result<Self, CalibrationError> {
        if texts.is_empty() {
            return Err("the calibration texts hold no two tokens; give more text".into());
        }
        let model = Box::new(Model::new(&source, options.runner.clone())?);
        let identity = identity_of(identity, &texts, &options);
        let kept = Kept::new(beside, identity, &texts, model.streams_width());
        let ready = kept.ready_layer();
        Ok(Self { source, model, options, texts, kept, ready, gathered: None, dense: None })
    }

    /// Tokens of all texts.
    pub fn n_tokens(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }

    /// The most that calibration holds at once besides the build's own buffers, in bytes: inputs of the experts of a layer in half
    /// precision, the layer's mean second moments, those of its dense matrices, and the streams of a batch.
    pub fn memory_bytes(model: &HyperParameters, n_tokens: u64, wanted: &Wanted, batch: u64) -> u64 {
        let (hidden, inner) = (model.hidden_size, model.moe_intermediate_size);
        let n_used = model.num_experts_per_tok;
        let halves = HalfRows::memory_bytes(hidden, n_tokens, 1)
            + HalfRows::memory_bytes(inner, n_tokens * n_used, model.n_routed_experts);
        // Row, weight and sensitivity of each: vectors that may have grown to twice their size.
        let gathered = halves + 2 * n_tokens * (n_used * 8 + 4) + 4 * (hidden * hidden + inner * inner);
        let experts = if wanted.experts { gathered } else { 0 };
        experts + Dense::memory_bytes(&wanted.dense, model, batch) + 4 * 4 * batch * model.hc_mult * hidden
    }

    /// Gives the streams before a layer to `each`, a few texts at a time: number of the first, texts, streams.
    fn batches(
        &self,
        layer: usize,
        mut each: impl FnMut(usize, &[&[u32]], Vec<f32>) -> Result<(), CalibrationError>,
    ) -> Result<(), CalibrationError> {
        let mut reader = self.kept.reader(layer)?;
        let mut first = 0;
        while first < self.texts.len() {
            let mut n_tokens = self.texts[first].len();
            let mut end = first + 1;
            while end < self.texts.len() && n_tokens + self.texts[end].len() <= self.options.batch_tokens {
                n_tokens += self.texts[end].len();
                end += 1;
            }
            let texts: Vec<&[u32]> = self.texts[first..end].iter().map(Vec::as_slice).collect();
            let streams = match &mut reader {
                Some(reader) => reader.read(n_tokens)?,
                None => self.model.embed(&texts)?,
            };
            each(first, &texts, streams)?;
            first = end;
        }
        Ok(())
    }

    /// Runs all texts through a layer. `store`: whether the streams behind it are kept as those before the next one.
    fn run(
        &self,
        model: &dyn LayerRunner,
        layer: usize,
        observer: &mut dyn Observer,
        mut store: Option<&mut StreamFile>,
    ) -> Result<(), CalibrationError> {
        self.batches(layer, |first, texts, streams| {
            let streams = model.layer(layer, first, texts, streams, observer)?;
            store.as_mut().map_or(Ok(()), |store| store.write(&streams))
        })
    }
}

/// What must be equal for kept activations to be those of this run.
fn identity_of(given: &str, texts: &[Vec<u32>], options: &CalibrationOptions) -> String {
    let mut hasher = Sha256::new();
    hasher.update(env!("CARGO_PKG_VERSION"));
    hasher.update(given);
    hasher.update(format!("{} {:?} {:?}", options.settings, options.propagate, options.runner.numerics));
    for text in texts {
        hasher.update((text.len() as u64).to_le_bytes());
        for token in text {
            hasher.update(token.to_le_bytes());
        }
    }
    streams::hex(hasher)
}

impl Calibration for LayerPass {
    fn ready_layer(&self) -> usize {
        self.ready
    }

    fn restart(&mut self) {
        self.kept.remove();
        self.ready = 0;
    }

    fn enter(&mut self, layer: usize, wanted: &Wanted) -> Result<(), CalibrationError> {
        let h = self.source.hyper_parameters();
        let (hidden, inner) = (h.hidden_size as usize, h.moe_intermediate_size as usize);
        let settings = &self.options.settings;
        let mut gathered =
            wanted.experts.then(|| Gathered::new(layer, h.n_routed_experts as usize, hidden, inner));
        let mut dense = (!wanted.dense.is_empty())
            .then(|| Dense::new(Some(layer), &wanted.dense, h, settings.sensitivity_power));
        let mut behind = match self.options.propagate {
            Propagate::Source => Some(self.kept.writer(layer + 1)?),
            Propagate::Quantized => None,
        };
        let (mut nobody, mut nobody_else) = (NoObserver, NoObserver);
        let mut observer = Both(
            gathered.as_mut().map_or(&mut nobody as &mut dyn Observer, |gathered| gathered),
            dense.as_mut().map_or(&mut nobody_else as &mut dyn Observer, |dense| dense),
        );
        self.run(self.model.as_ref(), layer, &mut observer, behind.as_mut())?;
        if let Some(behind) = behind {
            Kept::hold(behind)?;
        }
        if let Some(gathered) = &mut gathered {
            gathered.finish(settings);
        }
        if let Some(dense) = &mut dense {
            dense.finish();
        }
        (self.gathered, self.dense) = (gathered, dense);
        Ok(())
    }

    fn enter_head(&mut self) -> Result<(), CalibrationError> {
        let wanted = [MatrixInput::Final].into();
        let mut dense = Dense::new(None, &wanted, self.source.hyper_parameters(), 0.0);
        self.batches(self.model.n_layers(), |first, texts, streams| {
            Ok(self.model.head_input(first, texts, streams, &mut dense)?)
        })?;
        dense.finish();
        self.dense = Some(dense);
        Ok(())
    }

    fn moments(&self, input: MatrixInput, expert: usize) -> Result<MatrixMoments, CalibrationError> {
        let gathered = self.gathered.as_ref().ok_or("no expert's inputs were gathered")?;
        Ok(gathered.moments(input, expert, &self.options.settings))
    }

    fn dense_moments(&self, input: MatrixInput, group: usize) -> Result<MatrixMoments, CalibrationError> {
        self.dense.as_ref().ok_or("no dense matrix's inputs were gathered")?.moments(input, group)
    }

    fn mid_moments(
        &self,
        expert: usize,
        gate: &[f32],
        up: &[f32],
    ) -> Result<MatrixMoments, CalibrationError> {
        let gathered = self.gathered.as_ref().ok_or("no expert's inputs were gathered")?;
        let limit = self.source.hyper_parameters().swiglu_limit;
        Ok(gathered.changed_mid_moments(expert, [gate, up], limit, &self.options.settings))
    }

    fn leave(&mut self, layer: usize, plan: &Plan, bytes: &dyn LayerBytes) -> Result<(), CalibrationError> {
        (self.gathered, self.dense) = (None, None);
        if self.options.propagate == Propagate::Quantized {
            let patched: Arc<dyn WeightSource> =
                Arc::new(PatchedSource::new(self.source.clone(), layer, plan, bytes)?);
            let model = Model::new(&patched, self.options.runner.clone())?;
            let mut behind = self.kept.writer(layer + 1)?;
            self.run(&model, layer, &mut NoObserver, Some(&mut behind))?;
            Kept::hold(behind)?;
        }
        self.kept.advance(layer + 1)?;
        self.ready = layer + 1;
        Ok(())
    }

    fn finish(&mut self) {
        self.kept.remove();
    }
}

/// Where activations of an output are kept.
pub fn activations_path(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".part.activations");
    PathBuf::from(name)
}
