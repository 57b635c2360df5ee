//! The CPU: the oracle of every other backend.
//!
//! Work is divided over threads in pieces whose bounds depend on the sizes alone, and every result is
//! computed whole by one thread, so bits do not depend on the number of threads.

mod attention;
mod cache;
pub(crate) mod experts;
mod hyper;
mod int8;
mod kernels;
mod matrix;
mod plain;
mod round;

pub use attention::CpuRope;
pub use cache::CpuCache;
pub use int8::{FloatDot, InputRounding, Int8Dot, Int8Rows};
pub use matrix::CpuMatrix;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, MutexGuard};

use gguf_tools::simd::Level;
use rayon::prelude::*;

use self::cache::CompressorRun;
use self::hyper::TokenMix;
use self::matrix::{Inputs, Job, transposed};
use self::plain::Sums;
use crate::error::RunnerError;
use crate::ops::{
    ActivationPrecision, Backend, CacheShape, CompressedRows, Compressor, ExpertTap, GatedFfn,
    HyperConnection, HyperConstants, MatrixPlace, Mix, Numerics, Piece, Queries, Recorded, Rope, RouterRule,
    Routing, RowPlaces, Selection, SharedTap, SublayerInput, Work,
};
use crate::weights::WeightSource;

/// Multiplications below which waking other threads costs more than it saves.
const PARALLEL_WORK: usize = 1 << 17;

/// The CPU as a backend.
#[derive(Debug, Clone)]
pub struct CpuBackend {
    /// Instruction set. Results do not depend on it.
    pub level: Level,
    /// Precision of the inputs of quantized matrices.
    pub activations: ActivationPrecision,
    /// Whether matrices are widened to `f32` once at loading: for small models. Results do not depend on it.
    pub widen: bool,
}

/// Activations, `[tokens, width]`.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuTensor {
    width: usize,
    values: Vec<f32>,
}

impl CpuTensor {
    /// Rows of `width` values.
    pub fn new(width: usize, values: Vec<f32>) -> Self {
        assert_eq!(values.len() % width, 0, "whole rows");
        Self { width, values }
    }

    fn zeros(tokens: usize, width: usize) -> Self {
        Self { width, values: vec![0.0; tokens * width] }
    }

    fn len(&self) -> usize {
        self.values.len() / self.width
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }
}

/// Calls `f` with each row of `values`, in parallel if that pays. `work`: multiplications a row, roughly.
fn for_rows(values: &mut [f32], width: usize, work: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if values.len() / width * work < PARALLEL_WORK {
        values.chunks_mut(width).enumerate().for_each(|(row, values)| f(row, values));
    } else {
        values.par_chunks_mut(width).enumerate().for_each(|(row, values)| f(row, values));
    }
}

impl CpuBackend {
    /// The order of sums.
    fn sums(&self) -> Sums {
        match self.activations {
            ActivationPrecision::PlainGgml => Sums::PlainGgml,
            _ => Sums::Own,
        }
    }

    /// Products of the mixer with every token's streams, each to be multiplied by its factor: the streams' inverse RMS.
    ///
    /// Where inputs are rounded, the streams are normed before, as in ggml, and the factors are one.
    fn mixes(
        &self,
        streams: &CpuTensor,
        weights: &HyperConnection<Self>,
        epsilon: f32,
    ) -> Result<(Vec<f32>, Vec<f32>), RunnerError> {
        let mut factors = vec![0.0; streams.len()];
        for_rows(&mut factors, 1, streams.width, |token, factor| {
            factor[0] = hyper::inverse_rms(streams.row(token), epsilon, self.sums());
        });
        let mut values = Cow::Borrowed(&streams.values);
        if self.activations.rounds_as_ggml() {
            for (row, factor) in values.to_mut().chunks_exact_mut(streams.width).zip(&mut factors) {
                for value in row {
                    *value *= *factor;
                }
                *factor = 1.0;
            }
        }
        let inputs = Inputs::new(&values, streams.width);
        let mixes = self.multiply_many(&inputs, &[&weights.mixer])?.swap_remove(0);
        Ok((mixes, factors))
    }
}

/// Token ids and positions of a batch.
#[derive(Debug, Clone)]
pub struct CpuPlaces {
    tokens: Vec<u32>,
    positions: Vec<usize>,
}

impl RowPlaces<'_, CpuBackend> {
    fn tokens(&self) -> &[u32] {
        &self.batch.tokens[self.rows.clone()]
    }

    fn positions(&self) -> &[usize] {
        &self.batch.positions[self.rows.clone()]
    }
}

impl Backend for CpuBackend {
    const NAME: &'static str = "cpu";
    type Tensor = CpuTensor;
    type Matrix = CpuMatrix;
    type Experts = GatedFfn<Vec<CpuMatrix>>;
    type Vector = Vec<f32>;
    type Rope = CpuRope;
    type RouterRule = RouterRule;
    type Places = CpuPlaces;
    type Chosen = Vec<Vec<u32>>;
    type Routing = Routing;
    type Cache = CpuCache;
    /// Nothing is recorded: a call costs nothing beside the work.
    type Recording = std::convert::Infallible;

    fn turn(&self, _: Work) -> Result<Option<MutexGuard<'_, ()>>, RunnerError> {
        Ok(None)
    }

    fn matrix(&self, source: &Arc<dyn WeightSource>, place: MatrixPlace) -> Result<CpuMatrix, RunnerError> {
        CpuMatrix::new(self, source, place)
    }

    fn experts(
        &self,
        source: &Arc<dyn WeightSource>,
        places: &GatedFfn<Vec<MatrixPlace>>,
    ) -> Result<GatedFfn<Vec<CpuMatrix>>, RunnerError> {
        let stack = |places: &[MatrixPlace]| {
            places.iter().map(|&place| self.matrix(source, place)).collect::<Result<Vec<_>, _>>()
        };
        Ok(GatedFfn { gate: stack(&places.gate)?, up: stack(&places.up)?, down: stack(&places.down)? })
    }

    fn vector(&self, values: Vec<f32>) -> Result<Vec<f32>, RunnerError> {
        Ok(values)
    }

    fn rope(&self, rope: Rope) -> Result<CpuRope, RunnerError> {
        Ok(CpuRope { rope, sums: self.sums() })
    }

    fn router_rule(&self, rule: RouterRule) -> Result<RouterRule, RunnerError> {
        Ok(rule)
    }

    fn places(&self, tokens: &[u32], positions: &[usize]) -> Result<CpuPlaces, RunnerError> {
        Ok(CpuPlaces { tokens: tokens.to_vec(), positions: positions.to_vec() })
    }

    fn set_places(
        &self,
        places: &mut CpuPlaces,
        tokens: &[u32],
        positions: &[usize],
    ) -> Result<(), RunnerError> {
        places.tokens.copy_from_slice(tokens);
        places.positions.copy_from_slice(positions);
        Ok(())
    }

    fn cache(&self, shape: CacheShape) -> CpuCache {
        CpuCache::new(shape)
    }

    fn reserve(&self, _: &mut CpuCache, _: usize) -> Result<bool, RunnerError> {
        Ok(false)
    }

    fn copy_cache(&self, cache: &CpuCache, _: usize) -> Result<CpuCache, RunnerError> {
        Ok(cache.clone())
    }

    fn restore_cache(&self, cache: &mut CpuCache, copy: &CpuCache, _: usize) -> Result<bool, RunnerError> {
        cache.clone_from(copy);
        Ok(false)
    }

    fn cache_bytes(&self, cache: &CpuCache) -> usize {
        cache.n_bytes()
    }

    fn record(
        &self,
        pass: &mut dyn FnMut() -> Result<CpuTensor, RunnerError>,
    ) -> Result<Recorded<CpuTensor, Self::Recording>, RunnerError> {
        Ok(Recorded::Ran(pass()?))
    }

    fn repeat<'a>(&self, recording: &'a Self::Recording) -> Result<&'a CpuTensor, RunnerError> {
        match *recording {}
    }

    fn host_values(&self, width: usize, values: Vec<f32>) -> Result<CpuTensor, RunnerError> {
        Ok(CpuTensor::new(width, values))
    }

    fn zeros(&self, tokens: usize, width: usize) -> Result<CpuTensor, RunnerError> {
        Ok(CpuTensor::zeros(tokens, width))
    }

    fn read<'a>(&self, tensor: &'a CpuTensor) -> Result<Cow<'a, [f32]>, RunnerError> {
        Ok(Cow::Borrowed(&tensor.values))
    }

    fn read_routing<'a>(&self, routing: &'a Routing) -> Result<Cow<'a, Routing>, RunnerError> {
        Ok(Cow::Borrowed(routing))
    }

    fn read_chosen<'a>(&self, chosen: &'a Vec<Vec<u32>>) -> Result<Cow<'a, [Vec<u32>]>, RunnerError> {
        Ok(Cow::Borrowed(chosen))
    }

    fn rows(&self, tensor: &CpuTensor, rows: Range<usize>) -> Result<CpuTensor, RunnerError> {
        let width = tensor.width;
        Ok(CpuTensor { width, values: tensor.values[rows.start * width..rows.end * width].to_vec() })
    }

    fn put_rows(&self, tensor: &mut CpuTensor, first: usize, part: &CpuTensor) -> Result<(), RunnerError> {
        let start = first * tensor.width;
        tensor.values[start..start + part.values.len()].copy_from_slice(&part.values);
        Ok(())
    }

    fn first_not_finite(&self, tensor: &CpuTensor) -> Result<Option<(usize, usize, f32)>, RunnerError> {
        let at = tensor.values.iter().position(|v| !v.is_finite());
        Ok(at.map(|at| (at / tensor.width, at % tensor.width, tensor.values[at])))
    }

    fn embed(
        &self,
        table: &CpuMatrix,
        places: RowPlaces<'_, Self>,
        n_streams: usize,
    ) -> Result<CpuTensor, RunnerError> {
        let (width, tokens) = (table.columns(), places.tokens());
        let mut streams = CpuTensor::zeros(tokens.len(), n_streams * width);
        for (&token, row) in tokens.iter().zip(streams.values.chunks_exact_mut(n_streams * width)) {
            let token = token as usize;
            table.read_rows(token..token + 1, &mut row[..width])?;
            for stream in 1..n_streams {
                row.copy_within(..width, stream * width);
            }
        }
        Ok(streams)
    }

    fn hc_pre(
        &self,
        streams: &CpuTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &Self::Vector,
    ) -> Result<SublayerInput<Self>, RunnerError> {
        let m = constants.n_streams;
        let (mixes, factors) = self.mixes(streams, weights, constants.rms_epsilon)?;
        let n_mixes = (2 + m) * m;
        // One row a token: pre, post and comb weights.
        let mut all = vec![0.0; factors.len() * n_mixes];
        for_rows(&mut all, n_mixes, n_mixes * constants.sinkhorn_iterations, |token, out| {
            let (pre, rest) = out.split_at_mut(m);
            let (post, comb) = rest.split_at_mut(m);
            let mixes = &mixes[token * n_mixes..][..n_mixes];
            let out = TokenMix { pre, post, comb };
            hyper::mix_weights(
                mixes,
                factors[token],
                &weights.scale,
                &weights.base,
                constants,
                out,
                self.sums(),
            );
        });
        let mut x = CpuTensor::zeros(factors.len(), streams.width / m);
        let width = x.width;
        for_rows(&mut x.values, width, streams.width, |token, x| {
            hyper::merge(streams.row(token), &all[token * n_mixes..][..m], x);
        });
        let part = |columns: Range<usize>| CpuTensor {
            width: columns.len(),
            values: all.chunks_exact(n_mixes).flat_map(|row| &row[columns.clone()]).copied().collect(),
        };
        let normed = self.rms_norm(&x, norm, constants.rms_epsilon)?;
        let mix = Mix { post: part(m..2 * m), comb: part(2 * m..n_mixes) };
        Ok(SublayerInput { merged: x, normed, mix })
    }

    fn hc_post(
        &self,
        streams: &mut CpuTensor,
        output: &CpuTensor,
        second: Option<&CpuTensor>,
        mix: &Mix<Self>,
    ) -> Result<(), RunnerError> {
        let width = streams.width;
        for_rows(&mut streams.values, width, width * mix.post.width, |token, streams| {
            let (mut y, (post, comb)) =
                (Cow::from(output.row(token)), (mix.post.row(token), mix.comb.row(token)));
            if let Some(second) = second {
                y.to_mut().iter_mut().zip(second.row(token)).for_each(|(y, second)| *y += second);
            }
            hyper::mix_in(streams, &y, post, comb);
        });
        Ok(())
    }

    fn hc_head(
        &self,
        streams: &CpuTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &Self::Vector,
    ) -> Result<(CpuTensor, CpuTensor), RunnerError> {
        let m = constants.n_streams;
        let (mixes, factors) = self.mixes(streams, weights, constants.rms_epsilon)?;
        let mut x = CpuTensor::zeros(factors.len(), streams.width / m);
        let width = x.width;
        for_rows(&mut x.values, width, streams.width, |token, x| {
            let mixes: Vec<f32> = mixes[token * m..][..m].iter().map(|mix| mix * factors[token]).collect();
            let mut pre = vec![0.0; m];
            hyper::pre_weights(&mixes, weights.scale[0], &weights.base, constants.epsilon, &mut pre);
            hyper::merge(streams.row(token), &pre, x);
        });
        let normed = self.rms_norm(&x, norm, constants.rms_epsilon)?;
        Ok((x, normed))
    }

    fn rms_norm(
        &self,
        input: &CpuTensor,
        weights: &Vec<f32>,
        epsilon: f32,
    ) -> Result<CpuTensor, RunnerError> {
        let mut out = CpuTensor::zeros(input.len(), input.width);
        for_rows(&mut out.values, input.width, 2 * input.width, |token, out| {
            let row = input.row(token);
            let factor = hyper::inverse_rms(row, epsilon, self.sums());
            for ((out, value), weight) in out.iter_mut().zip(row).zip(weights) {
                *out = value * factor * weight;
            }
        });
        Ok(out)
    }

    fn linear_many(&self, input: &CpuTensor, matrices: &[&CpuMatrix]) -> Result<Vec<CpuTensor>, RunnerError> {
        let products = self.multiply_many(&Inputs::new(&input.values, input.width), matrices)?;
        let tensors = products.into_iter().zip(matrices);
        Ok(tensors.map(|(values, matrix)| CpuTensor { width: matrix.rows(), values }).collect())
    }

    fn linear_grouped(
        &self,
        input: &CpuTensor,
        matrix: &CpuMatrix,
        groups: usize,
    ) -> Result<CpuTensor, RunnerError> {
        let n = input.len();
        let (rows, columns) = (matrix.rows() / groups, matrix.columns());
        let parts: Vec<Vec<f32>> = (0..groups)
            .map(|group| {
                let tokens = input.values.chunks_exact(input.width);
                tokens.flat_map(|row| &row[group * columns..][..columns]).copied().collect()
            })
            .collect();
        let inputs: Vec<Inputs<'_>> = parts.iter().map(|part| Inputs::new(part, columns)).collect();
        let mut out = vec![0.0; matrix.rows() * n];
        let jobs = inputs.iter().zip(out.chunks_exact_mut((rows * n).max(1))).enumerate();
        let jobs = jobs.map(|(group, (inputs, out))| {
            let rows = group * rows..(group + 1) * rows;
            Job { matrix, rows, inputs, out }
        });
        self.run_jobs(jobs.collect())?;
        Ok(CpuTensor { width: matrix.rows(), values: transposed(out, n) })
    }

    fn add(&self, tensor: &mut CpuTensor, other: &CpuTensor) -> Result<(), RunnerError> {
        tensor.values.iter_mut().zip(&other.values).for_each(|(a, b)| *a += b);
        Ok(())
    }

    fn project_out(
        &self,
        tensor: &mut CpuTensor,
        direction: &Vec<f32>,
        scale: f32,
    ) -> Result<(), RunnerError> {
        let width = tensor.width;
        for_rows(&mut tensor.values, width, 2 * width, |_, row| {
            let along: f64 = row.iter().zip(direction).map(|(&y, &d)| f64::from(y) * f64::from(d)).sum();
            let factor = scale * along as f32;
            row.iter_mut().zip(direction).for_each(|(y, d)| *y -= factor * d);
        });
        Ok(())
    }

    fn finish_queries(
        &self,
        queries: Queries<'_, Self>,
        rope: &CpuRope,
        places: RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        let Queries { heads: queries, head_dim, epsilon, index } = queries;
        let width = queries.width;
        for_rows(&mut queries.values, width, 2 * width, |token, row| {
            let angles = rope.angles(places.positions()[token]);
            for head in row.chunks_exact_mut(head_dim) {
                let factor = hyper::inverse_rms(head, epsilon, self.sums());
                for value in head.iter_mut() {
                    *value *= factor;
                }
                attention::rotate_by(head, &angles, false);
            }
        });
        let Some((queries, head_dim)) = index else { return Ok(()) };
        let width = queries.width;
        for_rows(&mut queries.values, width, 8 * width, |token, row| {
            let angles = rope.angles(places.positions()[token]);
            for head in row.chunks_exact_mut(head_dim) {
                attention::rotate_by(head, &angles, false);
                if numerics == Numerics::Official {
                    round::rotate_and_round_to_fp4(head);
                } else if self.sums() == Sums::PlainGgml {
                    plain::hadamard(head);
                }
            }
        });
        Ok(())
    }

    fn kv_finish(
        &self,
        rows: &mut CpuTensor,
        rope: &CpuRope,
        places: RowPlaces<'_, Self>,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        let width = rows.width;
        let plain = width - rope.width();
        for_rows(&mut rows.values, width, 2 * width, |token, row| {
            attention::rotate(row, rope, places.positions()[token], false);
            if numerics == Numerics::Official {
                round::round_to_fp8(&mut row[..plain]);
            }
        });
        Ok(())
    }

    fn append_window(
        &self,
        cache: &mut CpuCache,
        rows: &CpuTensor,
        piece: &Piece,
        _: RowPlaces<'_, Self>,
    ) -> Result<(), RunnerError> {
        debug_assert_eq!(cache.n_tokens(), piece.position, "pieces of a sequence come in order");
        cache.append_window(&rows.values[piece.rows.start * rows.width..piece.rows.end * rows.width]);
        Ok(())
    }

    fn compress(
        &self,
        cache: &mut CpuCache,
        target: CompressedRows,
        values: &CpuTensor,
        gates: &CpuTensor,
        piece: &Piece,
        _: RowPlaces<'_, Self>,
        weights: &Compressor<Self>,
        rope: &CpuRope,
        epsilon: f32,
        numerics: Numerics,
    ) -> Result<(), RunnerError> {
        let run = CompressorRun {
            position_bias: &weights.position_bias,
            norm: &weights.norm,
            rope,
            epsilon,
            numerics,
        };
        for row in piece.rows.clone() {
            cache.push(target, values.row(row), gates.row(row), &run);
        }
        Ok(())
    }

    fn index_topk(
        &self,
        cache: &CpuCache,
        queries: &CpuTensor,
        head_weights: &CpuTensor,
        piece: &Piece,
        _: RowPlaces<'_, Self>,
        top_k: usize,
        keep_scores: bool,
    ) -> Result<(Vec<Vec<u32>>, Vec<f32>), RunnerError> {
        let (level, sums) = (self.level, self.sums());
        Ok(attention::index_topk(level, cache, queries, head_weights, piece, top_k, keep_scores, sums))
    }

    fn attend(
        &self,
        cache: &CpuCache,
        queries: &CpuTensor,
        piece: &Piece,
        _: RowPlaces<'_, Self>,
        selection: &Selection<Vec<Vec<u32>>>,
        sinks: &Vec<f32>,
        rope: &CpuRope,
        output: &mut CpuTensor,
    ) -> Result<(), RunnerError> {
        attention::attend(self.level, cache, queries, piece, selection, sinks, rope, output);
        Ok(())
    }

    fn trim_window(&self, cache: &mut CpuCache) {
        cache.trim_window();
    }

    fn route(
        &self,
        logits: &CpuTensor,
        rule: &RouterRule,
        places: RowPlaces<'_, Self>,
        n_used: usize,
        scaling_factor: f32,
    ) -> Result<Routing, RunnerError> {
        Ok(experts::route(logits, rule, places.tokens(), n_used, scaling_factor, self.sums()))
    }

    fn routed_experts(
        &self,
        input: &CpuTensor,
        routing: &Routing,
        experts: &GatedFfn<Vec<CpuMatrix>>,
        limit: f32,
        tap: Option<&mut ExpertTap<'_>>,
    ) -> Result<CpuTensor, RunnerError> {
        self.routed(input, routing, experts, limit, tap)
    }

    fn shared_expert(
        &self,
        input: &CpuTensor,
        expert: &GatedFfn<CpuMatrix>,
        limit: f32,
        tap: Option<&mut SharedTap<'_>>,
    ) -> Result<CpuTensor, RunnerError> {
        self.shared(input, expert, limit, tap)
    }
}
