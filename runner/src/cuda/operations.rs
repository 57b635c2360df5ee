//! The model's operations, queued on the device.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use super::backend::{
    CudaBackend, CudaChosen, CudaPlaces, CudaRecording, CudaRope, CudaRouterRule, CudaRouting, CudaTensor,
    CudaVector, Rule, row_threads,
};
use super::cache::CudaCache;
use super::driver::{Arguments, Beside, Launch};
use super::hyper::turns;
use super::matrix::{Before, ExpertMatrices, Matrix, Pass, Routed};
use super::taps::show_experts;
use crate::error::RunnerError;
use crate::ops::{
    Backend, CacheShape, CompressedRows, Compressor, ExpertTap, GatedFfn, HyperConnection, HyperConstants,
    MatrixPlace, Mix, NewRows, Numerics, Piece, Queries, Recorded, Rope, RouterRule, Routing, RowPlaces,
    Selection, SharedTap, SublayerInput, Work,
};
use crate::weights::WeightSource;

/// Threads of a block that chooses experts, as in the kernel.
const ROUTING_THREADS: u32 = 128;

impl Backend for CudaBackend {
    const NAME: &'static str = "cuda";
    type Tensor = CudaTensor;
    type Matrix = Matrix;
    type Experts = ExpertMatrices;
    type Vector = CudaVector;
    type Rope = CudaRope;
    type RouterRule = CudaRouterRule;
    type Places = CudaPlaces;
    type Chosen = CudaChosen;
    type Routing = CudaRouting;
    type Cache = CudaCache;
    type Recording = CudaRecording;

    fn turn(&self, work: Work) -> Result<Option<MutexGuard<'_, ()>>, RunnerError> {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Who computes has loaded.
        self.loading.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.single_tokens.store(work == Work::Token, Ordering::Relaxed);
        // A pass that failed may have left two streams apart.
        self.together()?;
        Ok(Some(turn))
    }

    fn matrix(&self, source: &Arc<dyn WeightSource>, place: MatrixPlace) -> Result<Matrix, RunnerError> {
        self.load_matrix(source, place)
    }

    fn experts(
        &self,
        source: &Arc<dyn WeightSource>,
        places: &GatedFfn<Vec<MatrixPlace>>,
    ) -> Result<ExpertMatrices, RunnerError> {
        let gate = self.stack(source, &places.gate)?;
        let up = self.stack(source, &places.up)?;
        let down = self.stack(source, &places.down)?;
        Ok(ExpertMatrices::new(places.gate.len(), gate, up, down)?)
    }

    fn vector(&self, values: Vec<f32>) -> Result<CudaVector, RunnerError> {
        Ok(CudaVector { values: self.kept_values(&values, "a vector of weights")? })
    }

    fn rope(&self, rope: Rope) -> Result<CudaRope, RunnerError> {
        Ok(CudaRope { frequencies: self.kept_values(&rope.frequencies, "rotary frequencies")? })
    }

    fn router_rule(&self, rule: RouterRule) -> Result<CudaRouterRule, RunnerError> {
        Ok(CudaRouterRule(match rule {
            RouterRule::Hash(table) => {
                let table: Vec<u32> = table.iter().map(|&expert| expert as u32).collect();
                Rule::Hash(self.kept_values(&table, "a table of experts by token")?)
            }
            RouterRule::Bias(bias) => Rule::Bias(self.kept_values(&bias, "router biases")?),
        }))
    }

    fn places(&self, tokens: &[u32], positions: &[usize]) -> Result<CudaPlaces, RunnerError> {
        let positions: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
        let what = "token ids and positions";
        Ok(CudaPlaces {
            tokens: self.kept_values(tokens, what)?,
            positions: self.kept_values(&positions, what)?,
        })
    }

    fn set_places(
        &self,
        places: &mut CudaPlaces,
        tokens: &[u32],
        positions: &[usize],
    ) -> Result<(), RunnerError> {
        let positions: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
        self.gpu.device.write(&mut places.tokens.view_mut(), tokens)?;
        self.gpu.device.write(&mut places.positions.view_mut(), &positions)?;
        Ok(())
    }

    fn cache(&self, shape: CacheShape) -> CudaCache {
        CudaCache::new(shape)
    }

    fn reserve(&self, cache: &mut CudaCache, n_tokens: usize) -> Result<bool, RunnerError> {
        Ok(cache.reserve(&self.gpu.device, &self.kept, self.storage, n_tokens)?)
    }

    fn copy_cache(&self, cache: &CudaCache, n_tokens: usize) -> Result<CudaCache, RunnerError> {
        Ok(cache.copy(&self.gpu.device, &self.kept, self.storage, n_tokens)?)
    }

    fn restore_cache(
        &self,
        cache: &mut CudaCache,
        copy: &CudaCache,
        n_tokens: usize,
    ) -> Result<bool, RunnerError> {
        Ok(cache.restore(&self.gpu.device, &self.kept, self.storage, copy, n_tokens)?)
    }

    fn keep(&self, cache: &mut CudaCache, n_tokens: usize) -> Result<(), RunnerError> {
        Ok(cache.keep(&self.gpu.device, &self.kept, self.storage, n_tokens)?)
    }

    fn return_to_kept(&self, cache: &mut CudaCache) -> Result<(), RunnerError> {
        Ok(cache.return_to_kept(&self.gpu.device, self.storage)?)
    }

    fn cache_bytes(&self, cache: &CudaCache) -> usize {
        cache.n_bytes()
    }

    fn record(
        &self,
        pass: &mut dyn FnMut() -> Result<CudaTensor, RunnerError>,
    ) -> Result<Recorded<CudaTensor, CudaRecording>, RunnerError> {
        let mut result = None;
        self.pool.set_closed(true);
        let graph = self.gpu.device.capture(|| {
            result = Some(pass()?);
            Ok::<(), RunnerError>(())
        });
        self.pool.set_closed(false);
        match graph {
            Ok(graph) => {
                let result = result.expect("the pass was recorded");
                Ok(Recorded::Kept(CudaRecording { graph, result, _memory: self.pool.in_use() }))
            }
            // Memory of the pass before was given back since, or there is none for the graph: nothing was run yet.
            Err(RunnerError::Cuda(error)) if error.is_about_memory() => {
                self.together()?;
                Ok(Recorded::Ran(pass()?))
            }
            Err(error) => Err(error),
        }
    }

    fn repeat<'a>(&self, recording: &'a CudaRecording) -> Result<&'a CudaTensor, RunnerError> {
        recording.graph.launch()?;
        Ok(&recording.result)
    }

    fn host_values(&self, width: usize, values: Vec<f32>) -> Result<CudaTensor, RunnerError> {
        let mut tensor = self.tensor(values.len() / width, width)?;
        self.gpu.device.write(&mut tensor.values.view_mut(), &values)?;
        Ok(tensor)
    }

    fn zeros(&self, tokens: usize, width: usize) -> Result<CudaTensor, RunnerError> {
        let mut tensor = self.tensor(tokens, width)?;
        self.gpu.device.clear(&mut tensor.values.view_mut())?;
        Ok(tensor)
    }

    fn room(&self, tokens: usize, width: usize) -> Result<CudaTensor, RunnerError> {
        Ok(self.tensor(tokens, width)?)
    }

    fn read<'a>(&self, tensor: &'a CudaTensor) -> Result<Cow<'a, [f32]>, RunnerError> {
        // It may have been computed beside.
        self.gpu.device.together()?;
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let n = tensor.values.len();
        if n > staging.as_slice().len() {
            return Ok(Cow::Owned(self.gpu.device.download(tensor.values.view())?));
        }
        self.gpu.device.read_into(tensor.values.view(), &mut staging.as_mut_slice()[..n])?;
        Ok(Cow::Owned(staging.as_slice()[..n].to_vec()))
    }

    fn read_routing<'a>(&self, routing: &'a CudaRouting) -> Result<Cow<'a, Routing>, RunnerError> {
        Ok(Cow::Owned(Routing {
            n_used: routing.n_used,
            experts: self.gpu.device.download(routing.experts.view())?,
            weights: self.gpu.device.download(routing.weights.view())?,
        }))
    }

    fn read_chosen<'a>(&self, chosen: &'a CudaChosen) -> Result<Cow<'a, [Vec<u32>]>, RunnerError> {
        let rows = match &chosen.rows {
            Some(rows) => self.gpu.device.download(rows.view())?,
            None => Vec::new(),
        };
        let of_query = |(query, &n_visible): (usize, &usize)| {
            if n_visible > chosen.top_k {
                rows[query * chosen.top_k..][..chosen.top_k].to_vec()
            } else {
                (0..n_visible as u32).collect()
            }
        };
        Ok(Cow::Owned(chosen.n_visible.iter().enumerate().map(of_query).collect()))
    }

    fn rows(&self, tensor: &CudaTensor, rows: Range<usize>) -> Result<CudaTensor, RunnerError> {
        let mut part = self.tensor(rows.len(), tensor.width)?;
        self.gpu.device.copy(tensor.rows(&rows), &mut part.values.view_mut())?;
        Ok(part)
    }

    fn put_rows(&self, tensor: &mut CudaTensor, first: usize, part: &CudaTensor) -> Result<(), RunnerError> {
        let range = first * tensor.width..(first + part.tokens) * tensor.width;
        self.gpu.device.copy(part.values.view(), &mut tensor.values.slice_mut(range))?;
        Ok(())
    }

    fn first_not_finite(&self, tensor: &CudaTensor) -> Result<Option<(usize, usize, f32)>, RunnerError> {
        self.gpu.device.together()?;
        let n = tensor.values.len();
        let mut found = self.pool.take::<u32>(1, "a place")?;
        self.gpu.device.write(&mut found.view_mut(), &[i32::MAX as u32])?;
        let arguments = Arguments::new().read(tensor.values.view()).int(n).write(&found.view_mut());
        self.launch("rows", "first_not_finite", Launch::over(n), arguments)?;
        let at = self.gpu.device.download(found.view())?[0] as usize;
        if at == i32::MAX as usize {
            return Ok(None);
        }
        let value = self.gpu.device.download(tensor.values.slice(at..at + 1))?[0];
        Ok(Some((at / tensor.width, at % tensor.width, value)))
    }

    fn embed(
        &self,
        table: &Matrix,
        places: RowPlaces<'_, Self>,
        n_streams: usize,
    ) -> Result<CudaTensor, RunnerError> {
        let mut streams = self.tensor(places.rows.len(), n_streams * table.columns())?;
        table.take_rows(&self.gpu, places.tokens(), n_streams, &mut streams.values.view_mut())?;
        Ok(streams)
    }

    fn beside(&self, work: &mut dyn FnMut() -> Result<(), RunnerError>) -> Result<(), RunnerError> {
        self.queue_beside(Beside::Branch, work)
    }

    fn together(&self) -> Result<(), RunnerError> {
        self.gpu.device.together()?;
        self.pool.release();
        Ok(())
    }

    fn hc_pre(
        &self,
        streams: &CudaTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
    ) -> Result<SublayerInput<Self>, RunnerError> {
        let partials = self.hyper_partials(streams, &weights.mixer)?;
        self.sublayer_input(streams, &partials, weights, constants, norm)
    }

    fn hc_turn(
        &self,
        streams: &mut CudaTensor,
        output: &CudaTensor,
        second: Option<&CudaTensor>,
        mix: &Mix<Self>,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
    ) -> Result<SublayerInput<Self>, RunnerError> {
        let mixer = &weights.mixer;
        let partials = if turns(output, mix, mixer) {
            // The mix may have been computed beside.
            self.gpu.device.together()?;
            self.turn_streams(streams, output, second, mix, mixer)?
        } else {
            self.hc_post(streams, output, second, mix)?;
            self.hyper_partials(streams, mixer)?
        };
        self.sublayer_input(streams, &partials, weights, constants, norm)
    }

    fn hc_post(
        &self,
        streams: &mut CudaTensor,
        output: &CudaTensor,
        second: Option<&CudaTensor>,
        mix: &Mix<Self>,
    ) -> Result<(), RunnerError> {
        self.gpu.device.together()?;
        let arguments = Arguments::new().write(&streams.values.view_mut()).read(output.values.view());
        let arguments = match second {
            Some(second) => arguments.read(second.values.view()),
            None => arguments.null(),
        };
        let arguments = arguments
            .read(mix.post.values.view())
            .read(mix.comb.values.view())
            .int(output.width)
            .int(mix.post.width);
        self.launch("hyper", "hc_post", Launch::over(output.width).by(output.tokens), arguments)
    }

    fn hc_head(
        &self,
        streams: &CudaTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
    ) -> Result<(CudaTensor, CudaTensor), RunnerError> {
        let partials = self.hyper_partials(streams, &weights.mixer)?;
        self.merge_streams(streams, &partials, weights, constants, norm)
    }

    fn rms_norm(
        &self,
        input: &CudaTensor,
        weights: &CudaVector,
        epsilon: f32,
    ) -> Result<CudaTensor, RunnerError> {
        let mut output = self.tensor(input.tokens, input.width)?;
        let shape = Launch::new(input.tokens, row_threads(input.width));
        let arguments = Arguments::new()
            .read(input.values.view())
            .read(weights.values.view())
            .write(&output.values.view_mut())
            .int(input.width)
            .float(epsilon);
        self.launch("rows", "rms_norm", shape, arguments)?;
        Ok(output)
    }

    fn linear_many(&self, input: &CudaTensor, matrices: &[&Matrix]) -> Result<Vec<CudaTensor>, RunnerError> {
        let pass = self.pass();
        let mut outputs = Vec::with_capacity(matrices.len());
        for matrix in matrices {
            outputs.push(self.tensor(input.tokens, matrix.rows())?);
        }
        let n_bytes = matrices.iter().map(|m| m.workspace_bytes(input.tokens, 1, pass)).max().unwrap_or(0);
        self.with_workspace(n_bytes, |workspace| {
            let outputs = outputs.iter_mut().map(|output| output.values.view_mut());
            let mut products: Vec<_> = matrices.iter().copied().zip(outputs).collect();
            let (input, tokens) = (input.values.view(), input.tokens);
            Matrix::products_many(&self.gpu, workspace, input, tokens, pass, &mut products)
        })?;
        Ok(outputs)
    }

    fn normed_linear_many(
        &self,
        input: &CudaTensor,
        weights: &CudaVector,
        epsilon: f32,
        matrices: &[&Matrix],
    ) -> Result<Vec<CudaTensor>, RunnerError> {
        if self.pass() == Pass::Decode && input.tokens == 1 {
            let mut outputs = Vec::with_capacity(matrices.len());
            for matrix in matrices {
                outputs.push(self.tensor(1, matrix.rows())?);
            }
            let views = outputs.iter_mut().map(|output| output.values.view_mut());
            let products: Vec<_> = matrices.iter().copied().zip(views).collect();
            let before = Before::Norm { weights: weights.values.view(), epsilon };
            if Matrix::products_behind(&self.gpu, input.values.view(), before, &products)? {
                return Ok(outputs);
            }
        }
        self.linear_many(&self.rms_norm(input, weights, epsilon)?, matrices)
    }

    fn linear_grouped(
        &self,
        input: &CudaTensor,
        matrix: &Matrix,
        groups: usize,
    ) -> Result<CudaTensor, RunnerError> {
        Ok(self.product(input, matrix, groups)?)
    }

    fn add(&self, tensor: &mut CudaTensor, other: &CudaTensor) -> Result<(), RunnerError> {
        let n = tensor.values.len();
        let arguments = Arguments::new().write(&tensor.values.view_mut()).read(other.values.view()).int(n);
        self.launch("rows", "add_rows", Launch::over(n), arguments)
    }

    fn project_out(
        &self,
        tensor: &mut CudaTensor,
        direction: &CudaVector,
        scale: f32,
    ) -> Result<(), RunnerError> {
        let shape = Launch::new(tensor.tokens, row_threads(tensor.width));
        let arguments = Arguments::new()
            .write(&tensor.values.view_mut())
            .read(direction.values.view())
            .int(tensor.width)
            .float(scale);
        self.launch("rows", "project_out", shape, arguments)
    }

    fn finish_queries(
        &self,
        queries: Queries<'_, Self>,
        rope: &CudaRope,
        places: RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        self.finish_heads(queries, rope, &places, numerics)
    }

    fn kv_finish(
        &self,
        rows: &mut CudaTensor,
        rope: &CudaRope,
        places: RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        self.finish_rows(rows, rope, &places, numerics)
    }

    fn append_window(
        &self,
        cache: &mut CudaCache,
        rows: &CudaTensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
    ) -> Result<(), RunnerError> {
        self.append_rows(cache, rows, piece, &places)
    }

    fn compress(
        &self,
        cache: &mut CudaCache,
        target: CompressedRows,
        values: &CudaTensor,
        gates: &CudaTensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        weights: &Compressor<Self>,
        rope: &CudaRope,
        epsilon: f32,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        self.emit_rows(cache, target, values, gates, piece, &places, weights, rope, epsilon, numerics)?;
        self.keep_tokens(cache, target, values, gates, piece, &places)
    }

    fn finish_at_once(
        &self,
        queries: Queries<'_, Self>,
        cache: &mut CudaCache,
        rows: &NewRows<'_, Self>,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        rope: &CudaRope,
        numerics: Numerics,
    ) -> Result<bool, RunnerError> {
        self.finish_token(queries, cache, rows, piece, &places, rope, numerics)
    }

    fn index_topk(
        &self,
        cache: &CudaCache,
        queries: &CudaTensor,
        head_weights: &CudaTensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        top_k: usize,
        keep_scores: bool,
    ) -> Result<(CudaChosen, Vec<f32>), RunnerError> {
        self.choose_rows(cache, queries, head_weights, piece, &places, top_k, keep_scores)
    }

    fn attend(
        &self,
        cache: &CudaCache,
        queries: &CudaTensor,
        piece: &Piece,
        places: RowPlaces<'_, Self>,
        selection: &Selection<CudaChosen>,
        sinks: &CudaVector,
        rope: &CudaRope,
        output: &mut CudaTensor,
    ) -> Result<(), RunnerError> {
        self.attend_rows(cache, queries, piece, &places, selection, sinks, rope, output)
    }

    fn trim_window(&self, _: &mut CudaCache) {}

    fn route(
        &self,
        logits: &CudaTensor,
        rule: &CudaRouterRule,
        places: RowPlaces<'_, Self>,
        n_used: usize,
        scaling_factor: f32,
    ) -> Result<CudaRouting, RunnerError> {
        let (tokens, n_experts) = (logits.tokens, logits.width);
        let mut experts = self.pool.take(tokens * n_used, "the router's choice")?;
        let mut weights = self.pool.take(tokens * n_used, "the router's weights")?;
        let arguments = Arguments::new().read(logits.values.view());
        let (name, shape, arguments) = match &rule.0 {
            Rule::Hash(table) => {
                let arguments = arguments.read(table.view()).read(places.tokens());
                ("route_by_table", Launch::new(tokens.div_ceil(8), 256), arguments)
            }
            Rule::Bias(bias) => {
                ("route_by_score", Launch::new(tokens, ROUTING_THREADS), arguments.read(bias.view()))
            }
        };
        let arguments = arguments
            .write(&experts.view_mut())
            .write(&weights.view_mut())
            .int(tokens)
            .int(n_experts)
            .int(n_used)
            .float(scaling_factor);
        self.launch("router", name, shape, arguments)?;
        Ok(CudaRouting { n_used, experts, weights })
    }

    fn routed_experts(
        &self,
        input: &CudaTensor,
        routing: &CudaRouting,
        experts: &ExpertMatrices,
        limit: f32,
        tap: Option<&mut ExpertTap<'_>>,
    ) -> Result<CudaTensor, RunnerError> {
        let (tokens, n_used, pass) = (input.tokens, routing.n_used, self.pass());
        let mut output = self.tensor(tokens, experts.outputs())?;
        let mut mids = tap.is_some().then(|| self.tensor(tokens * n_used, experts.width())).transpose()?;
        self.with_workspace(experts.workspace_bytes(tokens, n_used, pass), |workspace| {
            let work = Routed {
                input: input.values.view(),
                experts: routing.experts.view(),
                weights: routing.weights.view(),
                tokens,
                n_used,
                limit,
                pass,
            };
            let mut mids = mids.as_mut().map(|mids| mids.values.view_mut());
            experts.routed(&self.gpu, workspace, &work, &mut output.values.view_mut(), mids.as_mut())
        })?;
        if let (Some(tap), Some(mids)) = (tap, mids) {
            let (inputs, mids) = (self.read(input)?, self.read(&mids)?);
            let routing = self.read_routing(routing)?;
            show_experts(tap, &routing, &inputs, input.width, &mids, experts.width());
        }
        Ok(output)
    }

    fn shared_expert(
        &self,
        input: &CudaTensor,
        expert: &GatedFfn<Matrix>,
        limit: f32,
        tap: Option<&mut SharedTap<'_>>,
    ) -> Result<CudaTensor, RunnerError> {
        let mut products = self.linear_many(input, &[&expert.gate, &expert.up])?.into_iter();
        let mut mid = products.next().expect("one product a matrix");
        let up = products.next().expect("one product a matrix");
        if tap.is_none() && self.pass() == Pass::Decode && mid.tokens == 1 {
            let mut output = self.tensor(1, expert.down.rows())?;
            let before = Before::Gate { up: up.values.view(), limit };
            let products = [(&expert.down, output.values.view_mut())];
            if Matrix::products_behind(&self.gpu, mid.values.view(), before, &products)? {
                return Ok(output);
            }
        }
        let n = mid.values.len();
        let arguments =
            Arguments::new().write(&mid.values.view_mut()).read(up.values.view()).int(n).float(limit);
        self.launch("rows", "swiglu_rows", Launch::over(n), arguments)?;
        if let Some(tap) = tap {
            tap(&self.read(&mid)?);
        }
        Ok(self.product(&mid, &expert.down, 1)?)
    }
}
