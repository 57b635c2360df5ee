//! The CPU: the oracle of every other backend.
//!
//! Work is divided over threads in pieces whose bounds depend on the sizes alone, and every result is
//! computed whole by one thread, so bits do not depend on the number of threads.

mod attention;
mod cache;
mod experts;
mod hyper;
mod int8;
mod kernels;
mod matrix;
mod round;

pub use cache::CpuCache;
pub use int8::{FloatDot, InputRounding, Int8Dot, Int8Rows};
pub use matrix::CpuMatrix;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use gguf_tools::simd::Level;
use rayon::prelude::*;

use self::cache::CompressorRun;
use self::hyper::TokenMix;
use self::matrix::{Inputs, Job, transposed};
use crate::error::RunnerError;
use crate::ops::{
    ActivationPrecision, Backend, CacheShape, CompressedRows, Compressor, ExpertTap, GatedFfn,
    HyperConnection, HyperConstants, Indexed, MatrixPlace, Mix, Numerics, Piece, Rope, RouterRule, Routing,
    Selection,
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
            factor[0] = hyper::inverse_rms(streams.row(token), epsilon);
        });
        let mut values = Cow::Borrowed(&streams.values);
        if self.activations == ActivationPrecision::Int8 {
            for (row, factor) in values.to_mut().chunks_exact_mut(streams.width).zip(&mut factors) {
                row.iter_mut().for_each(|value| *value *= *factor);
                *factor = 1.0;
            }
        }
        let inputs = Inputs::new(&values, streams.width);
        let mixes = self.multiply_many(&inputs, &[&weights.mixer])?.swap_remove(0);
        Ok((mixes, factors))
    }
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Matrix = CpuMatrix;
    type Vector = Vec<f32>;
    type Cache = CpuCache;

    fn matrix(&self, source: &Arc<dyn WeightSource>, place: MatrixPlace) -> Result<CpuMatrix, RunnerError> {
        CpuMatrix::new(self, source, place)
    }

    fn vector(&self, values: Vec<f32>) -> Vec<f32> {
        values
    }

    fn cache(&self, shape: CacheShape) -> CpuCache {
        CpuCache::new(shape)
    }

    fn cached_tokens(&self, cache: &CpuCache) -> usize {
        cache.n_tokens()
    }

    fn cache_bytes(&self, cache: &CpuCache) -> usize {
        cache.n_bytes()
    }

    fn zeros(&self, tokens: usize, width: usize) -> CpuTensor {
        CpuTensor::zeros(tokens, width)
    }

    fn read<'a>(&self, tensor: &'a CpuTensor) -> Cow<'a, [f32]> {
        Cow::Borrowed(&tensor.values)
    }

    fn rows(&self, tensor: &CpuTensor, rows: Range<usize>) -> CpuTensor {
        let width = tensor.width;
        CpuTensor { width, values: tensor.values[rows.start * width..rows.end * width].to_vec() }
    }

    fn put_rows(&self, tensor: &mut CpuTensor, first: usize, part: &CpuTensor) {
        let start = first * tensor.width;
        tensor.values[start..start + part.values.len()].copy_from_slice(&part.values);
    }

    fn first_not_finite(&self, tensor: &CpuTensor) -> Option<(usize, usize, f32)> {
        let at = tensor.values.iter().position(|v| !v.is_finite())?;
        Some((at / tensor.width, at % tensor.width, tensor.values[at]))
    }

    fn embed(&self, table: &CpuMatrix, tokens: &[u32], n_streams: usize) -> Result<CpuTensor, RunnerError> {
        let width = table.columns();
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
    ) -> Result<(CpuTensor, Mix<Self>), RunnerError> {
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
            hyper::mix_weights(mixes, factors[token], &weights.scale, &weights.base, constants, out);
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
        Ok((x, Mix { post: part(m..2 * m), comb: part(2 * m..n_mixes) }))
    }

    fn hc_post(&self, streams: &mut CpuTensor, output: &CpuTensor, mix: &Mix<Self>) {
        let width = streams.width;
        for_rows(&mut streams.values, width, width * mix.post.width, |token, streams| {
            hyper::mix_in(streams, output.row(token), mix.post.row(token), mix.comb.row(token));
        });
    }

    fn hc_head(
        &self,
        streams: &CpuTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
    ) -> Result<CpuTensor, RunnerError> {
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
        Ok(x)
    }

    fn rms_norm(&self, input: &CpuTensor, weights: &Vec<f32>, epsilon: f32) -> CpuTensor {
        let mut out = CpuTensor::zeros(input.len(), input.width);
        for_rows(&mut out.values, input.width, 2 * input.width, |token, out| {
            let row = input.row(token);
            let factor = hyper::inverse_rms(row, epsilon);
            for ((out, value), weight) in out.iter_mut().zip(row).zip(weights) {
                *out = value * factor * weight;
            }
        });
        out
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

    fn add(&self, tensor: &mut CpuTensor, other: &CpuTensor) {
        tensor.values.iter_mut().zip(&other.values).for_each(|(a, b)| *a += b);
    }

    fn project_out(&self, tensor: &mut CpuTensor, direction: &[f32], scale: f32) {
        let width = tensor.width;
        for_rows(&mut tensor.values, width, 2 * width, |_, row| {
            let along: f64 = row.iter().zip(direction).map(|(&y, &d)| f64::from(y) * f64::from(d)).sum();
            let factor = scale * along as f32;
            row.iter_mut().zip(direction).for_each(|(y, d)| *y -= factor * d);
        });
    }

    fn q_finish(
        &self,
        queries: &mut CpuTensor,
        head_dim: usize,
        epsilon: f32,
        rope: &Rope,
        positions: &[usize],
    ) {
        let width = queries.width;
        for_rows(&mut queries.values, width, 2 * width, |token, row| {
            let angles = attention::angles(rope, positions[token]);
            for head in row.chunks_exact_mut(head_dim) {
                let factor = hyper::inverse_rms(head, epsilon);
                for value in head.iter_mut() {
                    *value *= factor;
                }
                attention::rotate_by(head, &angles, false);
            }
        });
    }

    fn kv_finish(&self, rows: &mut CpuTensor, rope: &Rope, positions: &[usize], numerics: Numerics) {
        let width = rows.width;
        let plain = width - 2 * rope.frequencies.len();
        for_rows(&mut rows.values, width, 2 * width, |token, row| {
            attention::rotate(row, rope, positions[token], false);
            if numerics == Numerics::Official {
                round::round_to_fp8(&mut row[..plain]);
            }
        });
    }

    fn index_finish(
        &self,
        queries: &mut CpuTensor,
        head_dim: usize,
        rope: &Rope,
        positions: &[usize],
        numerics: Numerics,
    ) {
        let width = queries.width;
        for_rows(&mut queries.values, width, 8 * width, |token, row| {
            let angles = attention::angles(rope, positions[token]);
            for head in row.chunks_exact_mut(head_dim) {
                attention::rotate_by(head, &angles, false);
                if numerics == Numerics::Official {
                    round::rotate_and_round_to_fp4(head);
                }
            }
        });
    }

    fn append_window(&self, cache: &mut CpuCache, rows: &CpuTensor, piece: &Piece) {
        debug_assert_eq!(cache.n_tokens(), piece.position, "pieces of a sequence come in order");
        cache.append_window(&rows.values[piece.rows.start * rows.width..piece.rows.end * rows.width]);
    }

    fn compress(
        &self,
        cache: &mut CpuCache,
        target: CompressedRows,
        values: &CpuTensor,
        gates: &CpuTensor,
        piece: &Piece,
        weights: &Compressor<Self>,
        rope: &Rope,
        epsilon: f32,
        numerics: Numerics,
    ) {
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
    }

    fn index_topk(
        &self,
        cache: &CpuCache,
        queries: &CpuTensor,
        head_weights: &CpuTensor,
        piece: &Piece,
        top_k: usize,
        keep_scores: bool,
    ) -> Indexed {
        attention::index_topk(self.level, cache, queries, head_weights, piece, top_k, keep_scores)
    }

    fn attend(
        &self,
        cache: &CpuCache,
        queries: &CpuTensor,
        piece: &Piece,
        selection: &Selection,
        sinks: &Vec<f32>,
        rope: &Rope,
        output: &mut CpuTensor,
    ) {
        attention::attend(self.level, cache, queries, piece, selection, sinks, rope, output);
    }

    fn trim_window(&self, cache: &mut CpuCache) {
        cache.trim_window();
    }

    fn route(
        &self,
        logits: &CpuTensor,
        rule: &RouterRule,
        tokens: &[u32],
        n_used: usize,
        scaling_factor: f32,
    ) -> Routing {
        experts::route(logits, rule, tokens, n_used, scaling_factor)
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
    ) -> Result<CpuTensor, RunnerError> {
        self.shared(input, expert, limit)
    }
}
