//! DeepSeek V4 in plain sight: the one forward pass, for every device, schedule and size.
//!
//! Notation of the comments, as in the model's papers and code:
//! `T` tokens of the batch, `D` hidden size, `M` residual streams, `H` heads of width `d`, `G` output groups,
//! `E` routed experts, `F` their inner width. Matrices are `[rows, columns]`, products `y = A x`.
//!
//! The state of a token is `M` streams of width `D`. A layer reads them twice, for attention and for its experts:
//! a *hyper-connection* merges the streams to one input (`hc_pre`) and mixes the output back into them (`hc_post`).
//! Attention sees a window of recent tokens and, in most layers, *compressed rows* of everything before:
//! one for 128 tokens, or one for 4, of which an *indexer* picks the best.
//!
//! Numbers in parentheses, (3.6) or (4.4.2), are those of the operations in [`crate::ops`]:
//! 3.1 norm, 3.2 rotary frequencies, 3.3 rotation, 3.4 clamped SwiGLU, 3.6 hyper-connections, 4.4 attention,
//! 4.5 compressor, 4.6 indexer, 4.7 experts, 5 state, 7 rounding.

use std::ops::Range;

use gguf_tools::model::HyperParameters;

use crate::error::RunnerError;
use crate::layer::Layer;
use crate::observe::{
    ExpertObservation, IndexObservation, Observation, Observer, RouteObservation, Site, TokenPlace,
};
use crate::ops::{
    Backend, CacheShape, CompressedRows, ExpertTap, HyperConnection, HyperConstants, NewCompressed, NewRows,
    Numerics, Piece, Queries, RowPlaces, Selection, SharedTap, SublayerInput,
};

/// Tokens that go through the layers together, of one or several sequences.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// Where each token belongs.
    pub places: Vec<TokenPlace>,
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Positions in their sequences.
    pub positions: Vec<usize>,
    /// Runs of tokens of one sequence, in row order, covering all rows.
    pub pieces: Vec<Piece>,
}

impl Batch {
    /// Appends tokens of a sequence, the first of them at `position`.
    pub fn push(&mut self, sequence: usize, position: usize, tokens: &[u32]) {
        let first_row = self.tokens.len();
        self.pieces.push(Piece { rows: first_row..first_row + tokens.len(), sequence, position });
        for (i, &token) in tokens.iter().enumerate() {
            self.places.push(TokenPlace { sequence, position: position + i, token });
            self.positions.push(position + i);
            self.tokens.push(token);
        }
    }

    /// Some of the rows, as a batch of their own.
    fn part(&self, rows: &Range<usize>) -> Self {
        let pieces = self.pieces.iter().filter_map(|piece| {
            let first = piece.rows.start.max(rows.start);
            let end = piece.rows.end.min(rows.end);
            (first < end).then(|| Piece {
                rows: first - rows.start..end - rows.start,
                sequence: piece.sequence,
                position: piece.position + first - piece.rows.start,
            })
        });
        Self {
            places: self.places[rows.clone()].to_vec(),
            tokens: self.tokens[rows.clone()].to_vec(),
            positions: self.positions[rows.clone()].to_vec(),
            pieces: pieces.collect(),
        }
    }
}

/// Directions that are taken out of activations on the way.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Steering {
    /// What reports call it: tells it from any other direction and scale.
    pub name: String,
    /// For each layer a direction `[D]`, or an empty one for none.
    pub directions: Vec<Vec<f32>>,
    /// How much of it is taken out of the attention output; 0 = nothing.
    pub attention_scale: f32,
    /// How much of it is taken out of the FFN output; 0 = nothing.
    pub ffn_scale: f32,
}

impl Steering {
    /// Whether it changes anything.
    pub fn acts(&self) -> bool {
        (self.attention_scale != 0.0 || self.ffn_scale != 0.0)
            && self.directions.iter().any(|d| !d.is_empty())
    }
}

/// [`Steering`] where the backend reads it.
pub struct Directions<B: Backend> {
    /// For each layer a direction `[D]`, or none.
    pub(crate) by_layer: Vec<Option<B::Vector>>,
    /// See [`Steering::attention_scale`].
    pub(crate) attention_scale: f32,
    /// See [`Steering::ffn_scale`].
    pub(crate) ffn_scale: f32,
}

impl<B: Backend> Directions<B> {
    /// Makes directions usable on a backend.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(backend: &B, steering: &Steering) -> Result<Self, RunnerError> {
        let direction = |d: &Vec<f32>| (!d.is_empty()).then(|| backend.vector(d.clone())).transpose();
        Ok(Self {
            by_layer: steering.directions.iter().map(direction).collect::<Result<_, _>>()?,
            attention_scale: steering.attention_scale,
            ffn_scale: steering.ffn_scale,
        })
    }
}

/// How one pass is to be run.
pub struct Pass<'a, B: Backend> {
    /// Rounding of activations.
    pub numerics: Numerics,
    /// Tokens whose queries are held at once.
    pub attention_tokens: usize,
    /// Whether results are looked through for NaN and infinities.
    pub check_finite: bool,
    /// Directions to take out, one set after the other.
    pub steering: &'a [Directions<B>],
    /// Who looks on.
    pub observer: &'a mut dyn Observer,
}

impl<B: Backend> Pass<'_, B> {
    /// Shows a result to the observer, and checks it.
    fn see(
        &mut self,
        backend: &B,
        site: Site,
        layer: Option<usize>,
        places: &[TokenPlace],
        tensor: &B::Tensor,
    ) -> Result<(), RunnerError> {
        if self.check_finite
            && let Some((row, value_index, found)) = backend.first_not_finite(tensor)?
        {
            let place = layer.map_or_else(|| "behind the layers".into(), |n| format!("of layer {n}"));
            let position = places[row].position;
            return Err(RunnerError::NotFinite { site, place, position, value_index, found });
        }
        if self.observer.wants(site, layer) {
            let values = backend.read(tensor)?;
            self.observer.rows(Observation { site, layer, tokens: places, values: &values });
        }
        Ok(())
    }

    /// Whether a result is looked at, or may be changed, before it goes on.
    fn touches(&self, site: Site, layer: Option<usize>) -> bool {
        self.check_finite || !self.steering.is_empty() || self.observer.wants(site, layer)
    }

    fn steer(
        &self,
        backend: &B,
        layer: usize,
        scale: fn(&Directions<B>) -> f32,
        y: &mut B::Tensor,
    ) -> Result<(), RunnerError> {
        for steering in self.steering {
            if let Some(Some(direction)) = steering.by_layer.get(layer)
                && scale(steering) != 0.0
            {
                backend.project_out(y, direction, scale(steering))?;
            }
        }
        Ok(())
    }
}

/// The model: weights of all layers and the constants they are used with.
pub struct Network<B: Backend> {
    pub(crate) hyper_parameters: HyperParameters,
    /// `[vocabulary, D]`.
    pub(crate) embedding: B::Matrix,
    pub(crate) layers: Vec<Layer<B>>,
    pub(crate) head_mix: HyperConnection<B>,
    pub(crate) output_norm: B::Vector,
    /// `[vocabulary, D]`.
    pub(crate) output: B::Matrix,
}

impl<B: Backend> Network<B> {
    /// The model's hyper-parameters.
    pub fn hyper_parameters(&self) -> &HyperParameters {
        &self.hyper_parameters
    }

    /// Number of layers.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Widths of the cache of a layer, (5.1).
    pub fn cache_shape(&self, layer: usize) -> CacheShape {
        let h = &self.hyper_parameters;
        CacheShape {
            ratio: h.compress_ratio(layer as u32) as usize,
            window: h.sliding_window as usize,
            head_dim: h.head_dim as usize,
            index_head_dim: h.index_head_dim as usize,
        }
    }

    fn hyper_constants(&self) -> HyperConstants {
        let h = &self.hyper_parameters;
        HyperConstants {
            n_streams: h.hc_mult as usize,
            sinkhorn_iterations: h.hc_sinkhorn_iters as usize,
            epsilon: h.hc_eps,
            rms_epsilon: h.rms_norm_eps,
        }
    }

    /// (4.1) The streams of the batch's tokens, `[T, M * D]`.
    ///
    /// # Errors
    /// If the embedding cannot be read.
    pub fn embed(&self, backend: &B, places: RowPlaces<'_, B>) -> Result<B::Tensor, RunnerError> {
        backend.embed(&self.embedding, places, self.hyper_parameters.hc_mult as usize)
    }

    /// (4.2) One layer over the batch. `streams`: `[T, M * D]`, changed in place.
    /// `on_device`: tokens and positions of the batch; `caches`: this layer's cache of every sequence, read and continued.
    /// With `go_on` the next layer's first step is taken as well: give the result to it as `begun`.
    ///
    /// # Errors
    /// If weights cannot be read, or a result is not finite and [`Pass::check_finite`] is set.
    #[expect(clippy::too_many_arguments, reason = "a layer, a batch and how to run it")]
    pub fn layer(
        &self,
        backend: &B,
        index: usize,
        streams: &mut B::Tensor,
        begun: Option<SublayerInput<B>>,
        go_on: bool,
        batch: &Batch,
        on_device: &B::Places,
        caches: &mut [B::Cache],
        pass: &mut Pass<'_, B>,
    ) -> Result<Option<SublayerInput<B>>, RunnerError> {
        let (b, constants) = (backend, self.hyper_constants());
        let layer = &self.layers[index];
        let (at, places) = (Some(index), &batch.places[..]);

        // x [T, D], post [T, M], comb [T, M, M]
        let SublayerInput { merged, normed: x, mix } = match begun {
            Some(input) => input,
            None => b.hc_pre(streams, &layer.attention_mix, constants, &layer.attention_norm)?,
        };
        pass.see(b, Site::AttentionCollapsed, at, places, &merged)?;
        pass.see(b, Site::AttentionPost, at, places, &mix.post)?;
        pass.see(b, Site::AttentionComb, at, places, &mix.comb)?;
        pass.see(b, Site::AttentionInput, at, places, &x)?;
        let row_places = RowPlaces { batch: on_device, rows: 0..batch.tokens.len() };
        let mut y = self.attention(b, index, &x, batch, &row_places, caches, pass)?;
        pass.steer(b, index, |s| s.attention_scale, &mut y)?;
        pass.see(b, Site::AttentionOutput, at, places, &y)?;

        let SublayerInput { merged, normed: x, mix } =
            b.hc_turn(streams, &y, None, &mix, &layer.ffn_mix, constants, &layer.ffn_norm)?;
        pass.see(b, Site::FfnCollapsed, at, places, &merged)?;
        pass.see(b, Site::FfnPost, at, places, &mix.post)?;
        pass.see(b, Site::FfnComb, at, places, &mix.comb)?;
        pass.see(b, Site::FfnInput, at, places, &x)?;
        let (mut y, mut shared) = self.ffn(b, index, &x, batch, &row_places, pass)?;
        if pass.touches(Site::FfnOutput, at)
            && let Some(shared) = shared.take()
        {
            // (4.7.6)
            b.add(&mut y, &shared)?;
        }
        pass.steer(b, index, |s| s.ffn_scale, &mut y)?;
        pass.see(b, Site::FfnOutput, at, places, &y)?;

        let next = self.layers.get(index + 1).filter(|_| go_on);
        let begun = if let Some(next) = next {
            let (weights, norm) = (&next.attention_mix, &next.attention_norm);
            Some(b.hc_turn(streams, &y, shared.as_ref(), &mix, weights, constants, norm)?)
        } else {
            b.hc_post(streams, &y, shared.as_ref(), &mix)?;
            None
        };
        pass.see(b, Site::Streams, at, places, streams)?;
        Ok(begun)
    }

    /// (4.4) Attention over the whole batch, `pass.attention_tokens` at a time, in order. `x`, result: `[T, D]`.
    #[expect(clippy::too_many_arguments, reason = "a layer, a batch and how to run it")]
    fn attention(
        &self,
        b: &B,
        index: usize,
        x: &B::Tensor,
        batch: &Batch,
        row_places: &RowPlaces<'_, B>,
        caches: &mut [B::Cache],
        pass: &mut Pass<'_, B>,
    ) -> Result<B::Tensor, RunnerError> {
        let n_tokens = batch.tokens.len();
        let step = pass.attention_tokens.max(1);
        if n_tokens <= step {
            return self.attention_part(b, index, x, batch, row_places, caches, pass);
        }
        let mut y = b.zeros(n_tokens, self.hyper_parameters.hidden_size as usize)?;
        for first in (0..n_tokens).step_by(step) {
            let rows = first..n_tokens.min(first + step);
            let part = batch.part(&rows);
            let part_places = row_places.part(&rows);
            let part_x = b.rows(x, rows)?;
            let part_y = self.attention_part(b, index, &part_x, &part, &part_places, caches, pass)?;
            b.put_rows(&mut y, first, &part_y)?;
        }
        Ok(y)
    }

    /// (4.4 to 4.6) Attention of tokens whose predecessors are in the caches. `x`, result: `[C, D]`.
    #[expect(clippy::too_many_arguments, reason = "a layer, a batch and how to run it")]
    fn attention_part(
        &self,
        b: &B,
        index: usize,
        x: &B::Tensor,
        part: &Batch,
        row_places: &RowPlaces<'_, B>,
        caches: &mut [B::Cache],
        pass: &mut Pass<'_, B>,
    ) -> Result<B::Tensor, RunnerError> {
        let h = &self.hyper_parameters;
        let a = &self.layers[index].attention;
        let (at, places) = (Some(index), &part.places[..]);
        let (head_dim, epsilon) = (h.head_dim as usize, h.rms_norm_eps);

        let mut products = b.linear_many(x, &a.inputs())?.into_iter();
        let mut next = || products.next().expect("one product for each matrix");

        let (query, key_value) = (next(), next());
        let compressor = a.compressor.as_ref().map(|c| (&c.rest, next(), next()));
        let indexer = a.indexer.as_ref().map(|i| (&i.compressor.rest, next(), next(), next()));

        // (4.4.1) qr [C, q_lora]; (4.4.2) q [C, H * d]; (4.6.1) index queries [C, index heads * index width]
        let mut matrices = vec![&a.q_b];
        matrices.extend(a.indexer.iter().map(|i| &i.queries));
        let mut products = if pass.touches(Site::QueryLora, at) {
            let qr = b.rms_norm(&query, &a.q_norm, epsilon)?;
            pass.see(b, Site::QueryLora, at, places, &qr)?;
            b.linear_many(&qr, &matrices)?.into_iter()
        } else {
            b.normed_linear_many(&query, &a.q_norm, epsilon, &matrices)?.into_iter()
        };
        let (mut q, mut index_q) = (products.next().expect("one product for each matrix"), products.next());
        let mut compressed = Vec::new();
        if let Some((weights, values, gates)) = &compressor {
            compressed.push(NewCompressed { target: CompressedRows::Attention, weights, values, gates });
        }
        if let Some((weights, values, gates, _)) = &indexer {
            compressed.push(NewCompressed { target: CompressedRows::Indexer, weights, values, gates });
        }
        let rows = NewRows { key_value: &key_value, norm: &a.kv_norm, epsilon, compressed };
        let touched = pass.touches(Site::KeyValueNorm, at) || pass.touches(Site::WindowRow, at);
        let numerics = pass.numerics;
        let mut queries = Queries {
            heads: &mut q,
            head_dim,
            epsilon,
            index: index_q.as_mut().map(|queries| (queries, h.index_head_dim as usize)),
        };
        let at_once = match &part.pieces[..] {
            [piece] if !touched => {
                let (cache, place) = (&mut caches[piece.sequence], row_places.part(&piece.rows));
                b.finish_at_once(queries.again(), cache, &rows, piece, place, &a.rope, numerics)?
            }
            _ => false,
        };
        if !at_once {
            self.append(b, index, &rows, part, row_places, caches, pass)?;
            b.finish_queries(queries, &a.rope, row_places.clone(), numerics)?;
        }

        let mut o = b.room(places.len(), h.num_attention_heads as usize * head_dim)?;
        for piece in &part.pieces {
            let cache = &mut caches[piece.sequence];
            let on_device = row_places.part(&piece.rows);
            let mut selection = if compressor.is_some() { Selection::Visible } else { Selection::None };
            if let (Some((.., head_weights)), Some(index_q)) = (&indexer, &index_q) {
                let wanted = pass.observer.wants(Site::IndexScores, at);
                let (top_k, place) = (h.index_topk as usize, on_device.clone());
                let (rows, scores) =
                    b.index_topk(cache, index_q, head_weights, piece, place, top_k, wanted)?;
                if wanted {
                    let tokens = &places[piece.rows.clone()];
                    let (layer, values) = (index, &scores[..]);
                    pass.observer.rows(Observation { site: Site::IndexScores, layer: at, tokens, values });
                    let chosen = &b.read_chosen(&rows)?[..];
                    pass.observer.index(IndexObservation { layer, tokens, chosen });
                }
                selection = Selection::Rows(rows);
            }
            // (4.4.4 to 4.4.6)
            b.attend(cache, &q, piece, on_device, &selection, &a.sinks, &a.rope, &mut o)?;
            b.trim_window(cache);
        }
        pass.see(b, Site::HeadsOutput, at, places, &o)?;

        // (4.4.7) u [C, G * o_lora]
        let u = b.linear_grouped(&o, &a.output_a, h.o_groups as usize)?;
        pass.see(b, Site::OutputLora, at, places, &u)?;
        linear(b, &u, &a.output_b)
    }

    /// (4.4.3) kv `[C, d]`, key and value of all heads, and (4.5) compressed rows go to the caches, (5.1): a row is there before
    /// its own query attends to it, and so is one that it completes.
    #[expect(clippy::too_many_arguments, reason = "a layer, a batch and how to run it")]
    fn append(
        &self,
        b: &B,
        index: usize,
        rows: &NewRows<'_, B>,
        part: &Batch,
        row_places: &RowPlaces<'_, B>,
        caches: &mut [B::Cache],
        pass: &mut Pass<'_, B>,
    ) -> Result<(), RunnerError> {
        let (a, epsilon, numerics) = (&self.layers[index].attention, rows.epsilon, pass.numerics);
        let (at, places) = (Some(index), &part.places[..]);
        let mut kv = b.rms_norm(rows.key_value, rows.norm, epsilon)?;
        pass.see(b, Site::KeyValueNorm, at, places, &kv)?;
        b.kv_finish(&mut kv, &a.rope, row_places.clone(), numerics)?;
        pass.see(b, Site::WindowRow, at, places, &kv)?;
        for piece in &part.pieces {
            let (cache, on_device) = (&mut caches[piece.sequence], row_places.part(&piece.rows));
            b.append_window(cache, &kv, piece, on_device.clone())?;
            for &NewCompressed { target, weights, values, gates } in &rows.compressed {
                let place = on_device.clone();
                b.compress(cache, target, values, gates, piece, place, weights, &a.rope, epsilon, numerics)?;
            }
        }
        Ok(())
    }

    /// (4.7) Routed experts and the shared one, whose outputs are still to be added. `x`, results: `[T, D]`.
    fn ffn(
        &self,
        b: &B,
        index: usize,
        x: &B::Tensor,
        batch: &Batch,
        row_places: &RowPlaces<'_, B>,
        pass: &mut Pass<'_, B>,
    ) -> Result<(B::Tensor, Option<B::Tensor>), RunnerError> {
        let h = &self.hyper_parameters;
        let f = &self.layers[index].ffn;
        let (at, places) = (Some(index), &batch.places[..]);

        // (4.7.5)
        let mut shared = None;
        b.beside(&mut || {
            let tapped = pass.observer.wants(Site::SharedMid, at);
            let observer = &mut pass.observer;
            let mut show = |values: &[f32]| {
                observer.rows(Observation { site: Site::SharedMid, layer: at, tokens: places, values });
            };
            let tap = tapped.then_some(&mut show as &mut SharedTap<'_>);
            shared = Some(b.shared_expert(x, &f.shared, h.swiglu_limit, tap)?);
            Ok(())
        })?;

        // (4.7.1 to 4.7.3)
        let logits = linear(b, x, &f.router)?;
        pass.see(b, Site::RouterLogits, at, places, &logits)?;
        let n_used = h.num_experts_per_tok as usize;
        let routing = b.route(&logits, &f.rule, row_places.clone(), n_used, h.routed_scaling_factor)?;
        if pass.observer.wants(Site::RouterLogits, at) {
            let routing = b.read_routing(&routing)?;
            let (experts, weights) = (&routing.experts[..], &routing.weights[..]);
            pass.observer.routes(RouteObservation { layer: index, tokens: places, experts, weights });
        }

        // (4.7.4)
        let tapped = pass.observer.wants(Site::RoutedMid, at);
        let observer = &mut pass.observer;
        let mut show = |expert: usize, rows: &[usize], weights: &[f32], inputs: &[f32], mids: &[f32]| {
            observer.expert(ExpertObservation { layer: index, expert, rows, weights, inputs, mids });
        };
        let tap = tapped.then_some(&mut show as &mut ExpertTap<'_>);
        let y = b.routed_experts(x, &routing, &f.experts, h.swiglu_limit, tap)?;
        pass.see(b, Site::RoutedOutput, at, places, &y)?;

        b.together()?;
        let shared = shared.expect("computed above");
        pass.see(b, Site::SharedOutput, at, places, &shared)?;
        Ok((y, Some(shared)))
    }

    /// (4.3) Logits of the tokens whose streams are given, `[T, vocabulary]`.
    ///
    /// # Errors
    /// If weights cannot be read, or a result is not finite and [`Pass::check_finite`] is set.
    pub fn head(
        &self,
        backend: &B,
        streams: &B::Tensor,
        places: &[TokenPlace],
        pass: &mut Pass<'_, B>,
    ) -> Result<B::Tensor, RunnerError> {
        let x = self.head_input(backend, streams, places, pass)?;
        let logits = linear(backend, &x, &self.output)?;
        pass.see(backend, Site::Logits, None, places, &logits)?;
        Ok(logits)
    }

    /// (4.3) What the output matrix reads, `[T, D]`.
    ///
    /// # Errors
    /// As [`Network::head`].
    pub fn head_input(
        &self,
        b: &B,
        streams: &B::Tensor,
        places: &[TokenPlace],
        pass: &mut Pass<'_, B>,
    ) -> Result<B::Tensor, RunnerError> {
        let (merged, x) = b.hc_head(streams, &self.head_mix, self.hyper_constants(), &self.output_norm)?;
        pass.see(b, Site::HeadCollapsed, None, places, &merged)?;
        pass.see(b, Site::FinalNorm, None, places, &x)?;
        Ok(x)
    }
}

/// One matrix product.
fn linear<B: Backend>(b: &B, x: &B::Tensor, matrix: &B::Matrix) -> Result<B::Tensor, RunnerError> {
    Ok(b.linear_many(x, &[matrix])?.pop().expect("one product for one matrix"))
}
