//! A network on its backend, and sequences that grow in it: what sessions and scores are made of.

use std::ops::Range;
use std::sync::Arc;

use crate::error::RunnerError;
use crate::forward::{Batch, Directions, Network, Pass, Steering};
use crate::logits::check_logits;
use crate::observe::{NoObserver, Observer};
use crate::ops::{Backend, Recorded, RowPlaces, Work};
use crate::session::{EachLogits, Options};
use crate::weights::ReadAhead;

/// Positions whose logits are held at once.
const HEAD_TOKENS: usize = 64;

/// A network and the backend that computes it.
pub(crate) struct Engine<B: Backend> {
    pub(crate) backend: B,
    pub(crate) network: Network<B>,
    pub(crate) directions: Vec<Directions<B>>,
    pub(crate) options: Options,
    /// For weights that are used where they are mapped.
    pub(crate) read_ahead: Option<ReadAhead>,
}

/// One sequence: its caches in all layers.
pub(crate) struct Sequence<B: Backend> {
    /// `[layers][1]`.
    caches: Vec<Vec<B::Cache>>,
    pub(crate) n_tokens: usize,
    step: Option<Step<B>>,
}

/// Passes over one token, which are all the same but for what places and caches hold.
struct Step<B: Backend> {
    places: B::Places,
    /// There once a pass was run that took all memory.
    recording: Option<B::Recording>,
}

/// The caches of a sequence at some token.
pub(crate) struct SavedSequence<B: Backend> {
    caches: Vec<B::Cache>,
    n_tokens: usize,
}

impl<B: Backend> Engine<B> {
    fn pass<'a>(&'a self, observer: &'a mut dyn Observer) -> Pass<'a, B> {
        Pass {
            numerics: self.options.numerics,
            attention_tokens: self.options.attention_tokens,
            check_finite: self.options.check_finite,
            steering: &self.directions,
            observer,
        }
    }

    /// Takes these directions out of activations, and no others.
    pub(crate) fn steer(&mut self, steering: Vec<Arc<Steering>>) -> Result<(), RunnerError> {
        let _turn = self.backend.turn(Work::Batch)?;
        self.directions = steering
            .iter()
            .map(|steering| Directions::new(&self.backend, steering))
            .collect::<Result<_, _>>()?;
        self.options.steering = steering;
        Ok(())
    }

    pub(crate) fn sequence(&self) -> Sequence<B> {
        let cache = |layer| vec![self.backend.cache(self.network.cache_shape(layer))];
        Sequence { caches: (0..self.network.n_layers()).map(cache).collect(), n_tokens: 0, step: None }
    }

    pub(crate) fn cache_bytes(&self, sequence: &Sequence<B>) -> usize {
        sequence.caches.iter().flatten().map(|cache| self.backend.cache_bytes(cache)).sum()
    }

    /// One batch of texts through all layers. Only one layer's caches exist at a time.
    /// `first_text`: the number of the first of them, for observers and `each`; without `each` no logits are computed.
    pub(crate) fn read_batch(
        &self,
        first_text: usize,
        texts: &[&[u32]],
        observer: &mut dyn Observer,
        each: Option<&mut EachLogits<'_>>,
    ) -> Result<(), RunnerError> {
        let _turn = self.backend.turn(Work::Batch)?;
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
        let mut prepared = Vec::with_capacity(parts.len());
        for batch in &mut parts {
            batch.places.iter_mut().for_each(|place| place.sequence += first_text);
            let places = b.places(&batch.tokens, &batch.positions)?;
            let streams = network.embed(b, row_places(&places, 0..batch.tokens.len()))?;
            prepared.push((places, streams));
        }
        let mut pass = self.pass(observer);
        let n_tokens = parts.iter().map(|batch| batch.tokens.len()).sum();
        let reading = self.read_ahead.as_ref().and_then(|ahead| ahead.begin(n_tokens));
        for layer in 0..network.n_layers() {
            if let Some(reading) = &reading {
                reading.enter(layer);
            }
            let mut caches = Vec::with_capacity(texts.len());
            for text in texts {
                let mut cache = b.cache(network.cache_shape(layer));
                b.reserve(&mut cache, text.len())?;
                caches.push(cache);
            }
            for (batch, (places, streams)) in parts.iter().zip(&mut prepared) {
                network.layer(b, layer, streams, None, false, batch, places, &mut caches, &mut pass)?;
            }
        }
        let Some(each) = each else { return Ok(()) };
        if let Some(reading) = &reading {
            reading.enter(network.n_layers());
        }
        for (batch, (_, streams)) in parts.iter().zip(&prepared) {
            for first in (0..batch.tokens.len()).step_by(HEAD_TOKENS) {
                let rows = first..batch.tokens.len().min(first + HEAD_TOKENS);
                let places = &batch.places[rows.clone()];
                let logits = network.head(b, &b.rows(streams, rows)?, places, &mut pass)?;
                let width = network.hyper_parameters().vocab_size as usize;
                for (logits, place) in b.read(&logits)?.chunks_exact(width).zip(places) {
                    check_logits(logits, place.position)?;
                    each(place.sequence, place.position, logits);
                }
            }
        }
        Ok(())
    }

    /// The streams of whole texts before the first layer.
    pub(crate) fn embed_texts(&self, texts: &[&[u32]]) -> Result<Vec<f32>, RunnerError> {
        let _turn = self.backend.turn(Work::Batch)?;
        let batch = whole_texts(0, texts);
        let places = self.backend.places(&batch.tokens, &batch.positions)?;
        let streams = self.network.embed(&self.backend, row_places(&places, 0..batch.tokens.len()))?;
        Ok(self.backend.read(&streams)?.into_owned())
    }

    /// One layer over whole texts: the streams before it in, those behind it out.
    pub(crate) fn layer_of_texts(
        &self,
        layer: usize,
        first_text: usize,
        texts: &[&[u32]],
        streams: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<Vec<f32>, RunnerError> {
        let _turn = self.backend.turn(Work::Batch)?;
        let (b, network) = (&self.backend, &self.network);
        let batch = whole_texts(first_text, texts);
        let places = b.places(&batch.tokens, &batch.positions)?;
        let mut caches = Vec::with_capacity(texts.len());
        for text in texts {
            let mut cache = b.cache(network.cache_shape(layer));
            b.reserve(&mut cache, text.len())?;
            caches.push(cache);
        }
        let mut streams = b.host_values(streams.len() / batch.tokens.len(), streams)?;
        let pass = &mut self.pass(observer);
        network.layer(b, layer, &mut streams, None, false, &batch, &places, &mut caches, pass)?;
        Ok(b.read(&streams)?.into_owned())
    }

    /// What the output matrix reads of whole texts whose streams behind the last layer are given.
    pub(crate) fn head_input_of_texts(
        &self,
        first_text: usize,
        texts: &[&[u32]],
        streams: Vec<f32>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunnerError> {
        let _turn = self.backend.turn(Work::Batch)?;
        let b = &self.backend;
        let batch = whole_texts(first_text, texts);
        let streams = b.host_values(streams.len() / batch.tokens.len(), streams)?;
        self.network.head_input(b, &streams, &batch.places, &mut self.pass(observer))?;
        Ok(())
    }

    /// Continues a sequence. Returns the logits behind the last token.
    pub(crate) fn prefill(
        &self,
        sequence: &mut Sequence<B>,
        tokens: &[u32],
        observer: &mut dyn Observer,
    ) -> Result<Vec<f32>, RunnerError> {
        let _turn = self.backend.turn(Work::Batch)?;
        self.reserve(sequence, sequence.n_tokens + tokens.len())?;
        let b = &self.backend;
        let mut pass = self.pass(observer);
        let mut logits = Vec::new();
        let n_parts = tokens.len().div_ceil(self.options.batch_tokens);
        for (part, tokens) in tokens.chunks(self.options.batch_tokens).enumerate() {
            let mut batch = Batch::default();
            batch.push(0, sequence.n_tokens, tokens);
            let places = b.places(&batch.tokens, &batch.positions)?;
            let is_last = part + 1 == n_parts;
            // Nothing of an empty sequence is overwritten, and a single token overwrites nothing that it needs itself.
            let keeps = sequence.n_tokens > 0 && tokens.len() > 1;
            if keeps {
                let n_tokens = sequence.n_tokens;
                sequence.caches.iter_mut().flatten().try_for_each(|cache| b.keep(cache, n_tokens))?;
            }
            let row = self.continue_by(&mut sequence.caches, &batch, &places, is_last, &mut pass);
            if row.is_err() && keeps {
                // If this fails, the device is lost, and the first error says how.
                let _ = sequence.caches.iter_mut().flatten().try_for_each(|cache| b.return_to_kept(cache));
            }
            let row = row?;
            sequence.n_tokens += tokens.len();
            if let Some(row) = row {
                logits = b.read(&row)?.into_owned();
                check_logits(&logits, sequence.n_tokens - 1)?;
            }
        }
        Ok(logits)
    }

    /// Continues a sequence by one token, repeating the recorded pass where the backend can and `record` is set.
    pub(crate) fn decode(
        &self,
        sequence: &mut Sequence<B>,
        token: u32,
        record: bool,
    ) -> Result<Vec<f32>, RunnerError> {
        if self.options.check_finite {
            return self.prefill(sequence, &[token], &mut NoObserver);
        }
        let _turn = self.backend.turn(Work::Token)?;
        let b = &self.backend;
        let position = sequence.n_tokens;
        self.reserve(sequence, position + 1)?;
        let mut batch = Batch::default();
        batch.push(0, position, &[token]);
        let Sequence { caches, step, n_tokens } = sequence;
        let mut run = |places: &B::Places| {
            let mut observer = NoObserver;
            let row = self.continue_by(caches, &batch, places, true, &mut self.pass(&mut observer))?;
            Ok(row.expect("the last part gives logits"))
        };
        let row;
        let logits = if let Some(step) = step {
            b.set_places(&mut step.places, &batch.tokens, &batch.positions)?;
            if !record {
                row = Some(run(&step.places)?);
            } else if step.recording.is_none() {
                match b.record(&mut || run(&step.places))? {
                    Recorded::Ran(result) => row = Some(result),
                    Recorded::Kept(recording) => {
                        step.recording = Some(recording);
                        row = None;
                    }
                }
            } else {
                row = None;
            }
            match (&row, &step.recording) {
                (None, Some(recording)) => b.read(b.repeat(recording)?)?,
                (row, _) => b.read(row.as_ref().expect("it was run or recorded"))?,
            }
        } else {
            let places = b.places(&batch.tokens, &batch.positions)?;
            row = Some(run(&places)?);
            *step = Some(Step { places, recording: None });
            b.read(row.as_ref().expect("just run"))?
        };
        let logits = logits.into_owned();
        *n_tokens += 1;
        check_logits(&logits, position)?;
        Ok(logits)
    }

    /// All layers over tokens that continue one sequence; with `with_head`, logits of the last.
    fn continue_by(
        &self,
        caches: &mut [Vec<B::Cache>],
        batch: &Batch,
        places: &B::Places,
        with_head: bool,
        pass: &mut Pass<'_, B>,
    ) -> Result<Option<B::Tensor>, RunnerError> {
        let (b, network) = (&self.backend, &self.network);
        let n_tokens = batch.tokens.len();
        let mut streams = network.embed(b, row_places(places, 0..n_tokens))?;
        let reading = self.read_ahead.as_ref().and_then(|ahead| ahead.begin(n_tokens));
        let mut begun = None;
        for (layer, caches) in caches.iter_mut().enumerate() {
            if let Some(reading) = &reading {
                reading.enter(layer);
            }
            begun = network.layer(b, layer, &mut streams, begun, true, batch, places, caches, pass)?;
        }
        if !with_head {
            return Ok(None);
        }
        let last = n_tokens - 1..n_tokens;
        let at = &batch.places[last.clone()];
        network.head(b, &b.rows(&streams, last)?, at, pass).map(Some)
    }

    /// Makes room for `n_tokens` in all. Where that fails, some caches have room and all have what they had.
    fn reserve(&self, sequence: &mut Sequence<B>, n_tokens: usize) -> Result<(), RunnerError> {
        for cache in sequence.caches.iter_mut().flatten() {
            match self.backend.reserve(cache, n_tokens) {
                Ok(false) => {}
                // It uses the cache that moved.
                Ok(true) => sequence.step = None,
                // It may be what holds memory that is wanted; it is soon recorded again.
                Err(_) if sequence.step.take().is_some() => {
                    self.backend.reserve(cache, n_tokens)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(crate) fn save(&self, sequence: &Sequence<B>) -> Result<SavedSequence<B>, RunnerError> {
        let _turn = self.backend.turn(Work::Batch)?;
        let n_tokens = sequence.n_tokens;
        let copies = sequence.caches.iter().flatten().map(|cache| self.backend.copy_cache(cache, n_tokens));
        Ok(SavedSequence { caches: copies.collect::<Result<_, _>>()?, n_tokens })
    }

    pub(crate) fn restore(
        &self,
        sequence: &mut Sequence<B>,
        saved: &SavedSequence<B>,
    ) -> Result<(), RunnerError> {
        let _turn = self.backend.turn(Work::Batch)?;
        // Where that fails, nothing is overwritten yet.
        self.reserve(sequence, saved.n_tokens)?;
        for (cache, copy) in sequence.caches.iter_mut().flatten().zip(&saved.caches) {
            if self.backend.restore_cache(cache, copy, saved.n_tokens)? {
                // It uses the cache that moved.
                sequence.step = None;
            }
        }
        sequence.n_tokens = saved.n_tokens;
        Ok(())
    }
}

fn row_places<B: Backend>(batch: &B::Places, rows: Range<usize>) -> RowPlaces<'_, B> {
    RowPlaces { batch, rows }
}

/// Whole texts as one batch; the first one is called `first_text` in its places.
fn whole_texts(first_text: usize, texts: &[&[u32]]) -> Batch {
    let mut batch = Batch::default();
    texts.iter().enumerate().for_each(|(i, text)| batch.push(i, 0, text));
    batch.places.iter_mut().for_each(|place| place.sequence += first_text);
    batch
}
