//! Caches, compressors, the indexer and attention over whole sequences, on both machines and in pieces of any size.

use super::operations::{CLOSE, Lab, Machines, Results, rope};
use super::source::noise;
use super::{Report, SelfTest, Tolerance, Verdict, compare, same_bits};
use crate::error::RunnerError;
use crate::ops::{
    ActivationPrecision, Backend, CacheShape, CompressedRows, Compressor, NewCompressed, NewRows, Numerics,
    Piece, Queries, RowPlaces, Selection, Work,
};

/// Rows stored as `f16`.
const HALVES: Tolerance = Tolerance { rms: 2e-3, largest: 3e-2 };
/// Queries and softmax weights rounded to halves.
const ROUNDED_QUERIES: Tolerance = Tolerance { rms: 3e-3, largest: 3e-2 };

/// A layer's attention without its matrices, over a sequence that comes in pieces.
#[derive(Debug, Clone)]
struct SequenceOf {
    ratio: usize,
    heads: usize,
    width: usize,
    top_k: usize,
    numerics: Numerics,
    /// Tokens of each piece.
    pieces: Vec<usize>,
    /// Tokens at the end whose queries attend; whole pieces.
    attending: usize,
    work: Work,
    /// Whether all index queries are zero, so that all scores are the same.
    level_scores: bool,
}

const WINDOW: usize = 128;
const INDEX_HEADS: usize = 16;
const INDEX_WIDTH: usize = 128;

impl SequenceOf {
    fn n_tokens(&self) -> usize {
        self.pieces.iter().sum()
    }

    fn run<B: Backend>(&self, lab: &Lab<'_, B>) -> Result<Results, RunnerError> {
        let b = lab.backend;
        let _turn = b.turn(self.work)?;
        let (n, width, ratio) = (self.n_tokens(), self.width, self.ratio);
        let doubled = if ratio == 4 { 2 } else { 1 };
        let shape = CacheShape { ratio, window: WINDOW, head_dim: width, index_head_dim: INDEX_WIDTH };
        let mut cache = b.cache(shape);
        b.reserve(&mut cache, n)?;
        let rope = b.rope(rope(32))?;
        let kv = lab.noise(1, n, width)?;
        let (values, gates) = (lab.noise(2, n, doubled * width)?, lab.noise(3, n, doubled * width)?);
        let index_values = lab.noise(4, n, 2 * INDEX_WIDTH)?;
        let index_gates = lab.noise(5, n, 2 * INDEX_WIDTH)?;
        let compressor = Compressor {
            position_bias: b.vector(noise(6, ratio.max(1) * doubled * width))?,
            norm: b.vector(noise(7, width))?,
        };
        let index_compressor = Compressor {
            position_bias: b.vector(noise(8, ratio.max(1) * 2 * INDEX_WIDTH))?,
            norm: b.vector(noise(9, INDEX_WIDTH))?,
        };
        let kv_norm = b.vector(noise(14, width))?;
        let sinks = b.vector(noise(10, self.heads))?;
        let queries = noise(11, self.attending * self.heads * width);
        let index_noise = noise(12, self.attending * INDEX_HEADS * INDEX_WIDTH);
        let index_queries = if self.level_scores { vec![0.0; index_noise.len()] } else { index_noise };
        let head_weights = noise(13, self.attending * INDEX_HEADS);
        let (mut attended, mut chosen, mut scores) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0;
        for &len in &self.pieces {
            let range = first..first + len;
            let positions: Vec<usize> = range.clone().collect();
            let places = b.places(&vec![0; len], &positions)?;
            let at = RowPlaces { batch: &places, rows: 0..len };
            let piece = Piece { rows: 0..len, sequence: 0, position: first };
            let part = |tensor: &B::Tensor| b.rows(tensor, range.clone());
            let (key_value, values, gates) = (part(&kv)?, part(&values)?, part(&gates)?);
            let (index_values, index_gates) = (part(&index_values)?, part(&index_gates)?);
            let mut compressed = Vec::new();
            if ratio != 0 {
                let (target, weights) = (CompressedRows::Attention, &compressor);
                compressed.push(NewCompressed { target, weights, values: &values, gates: &gates });
            }
            if ratio == 4 {
                let (target, weights) = (CompressedRows::Indexer, &index_compressor);
                let (values, gates) = (&index_values, &index_gates);
                compressed.push(NewCompressed { target, weights, values, gates });
            }
            let rows = NewRows { key_value: &key_value, norm: &kv_norm, epsilon: 1e-6, compressed };

            let attends = first >= n - self.attending;
            let from = first.saturating_sub(n - self.attending);
            let queries_of = |values: &[f32], width: usize| {
                if attends {
                    lab.tensor(&values[from * width..(from + len) * width], width)
                } else {
                    b.zeros(len, width)
                }
            };
            let mut q = queries_of(&queries, self.heads * width)?;
            let mut index_q =
                (ratio == 4).then(|| queries_of(&index_queries, INDEX_HEADS * INDEX_WIDTH)).transpose()?;
            let mut finishing = Queries {
                heads: &mut q,
                head_dim: width,
                epsilon: 1e-6,
                index: index_q.as_mut().map(|queries| (queries, INDEX_WIDTH)),
            };
            let (place, numerics) = (at.clone(), self.numerics);
            if !b.finish_at_once(finishing.again(), &mut cache, &rows, &piece, place, &rope, numerics)? {
                let mut kv = b.rms_norm(&key_value, &kv_norm, rows.epsilon)?;
                b.kv_finish(&mut kv, &rope, at.clone(), numerics)?;
                b.append_window(&mut cache, &kv, &piece, at.clone())?;
                for &NewCompressed { target, weights, values, gates } in &rows.compressed {
                    let (place, cache) = (at.clone(), &mut cache);
                    b.compress(
                        cache,
                        target,
                        values,
                        gates,
                        &piece,
                        place,
                        weights,
                        &rope,
                        rows.epsilon,
                        numerics,
                    )?;
                }
                b.finish_queries(finishing, &rope, at.clone(), numerics)?;
            }
            if attends {
                let cut = |values: &[f32], width: usize| values[from * width..(from + len) * width].to_vec();
                let selection = match (ratio, index_q) {
                    (0, _) => Selection::None,
                    (_, Some(q)) => {
                        let weights = lab.tensor(&cut(&head_weights, INDEX_HEADS), INDEX_HEADS)?;
                        let (rows, _) =
                            b.index_topk(&cache, &q, &weights, &piece, at.clone(), self.top_k, false)?;
                        let (again, kept) =
                            b.index_topk(&cache, &q, &weights, &piece, at.clone(), self.top_k, true)?;
                        chosen.extend(b.read_chosen(&rows)?.iter().flatten().map(|&row| row as f32));
                        chosen.extend(b.read_chosen(&again)?.iter().flatten().map(|&row| row as f32));
                        scores.extend(kept.into_iter().map(|score| score.max(-1e3)));
                        Selection::Rows(rows)
                    }
                    _ => Selection::Visible,
                };
                let mut out = b.zeros(len, self.heads * width)?;
                b.attend(&cache, &q, &piece, at, &selection, &sinks, &rope, &mut out)?;
                attended.extend(lab.read(&out)?);
            }
            b.trim_window(&mut cache);
            first += len;
        }
        Ok(vec![
            ("attended", self.heads * width, attended),
            ("chosen", self.top_k.max(1), chosen),
            ("scores", 1, scores),
        ])
    }
}

/// Caches, compressors, the indexer and attention.
pub(super) fn attention(test: &SelfTest<'_>, report: &mut Report<'_>) -> Result<(), RunnerError> {
    for (numerics, activations, attended) in [
        (Numerics::Exact, ActivationPrecision::F32, CLOSE),
        (Numerics::Official, ActivationPrecision::F32, HALVES),
        (Numerics::Official, ActivationPrecision::Mixed, ROUNDED_QUERIES),
    ] {
        let machines = Machines::open(test, numerics, activations)?;
        for (ratio, heads, width) in
            [(0, 64, 512), (4, 64, 512), (128, 64, 512), (0, 4, 128), (4, 4, 128), (128, 4, 128), (4, 3, 64)]
        {
            for (pieces, attending, top_k, level_scores) in [
                (vec![3], 3, 16, false),
                (vec![130, 7], 7, 16, false),
                (vec![100, 33, 400, 20], 20, 32, false),
                (vec![512, 512, 512, 512, 300, 20], 20, 512, false),
                (vec![300, 9], 9, 16, true),
            ] {
                let sequence = SequenceOf {
                    ratio,
                    heads,
                    width,
                    top_k,
                    numerics,
                    pieces,
                    attending,
                    work: Work::Batch,
                    level_scores,
                };
                check_sequence(&machines, report, &sequence, activations, attended);
            }
        }
    }
    Ok(())
}

fn check_sequence(
    machines: &Machines,
    report: &mut Report<'_>,
    sequence: &SequenceOf,
    activations: ActivationPrecision,
    tolerance: Tolerance,
) {
    let SequenceOf { ratio, heads, width, top_k, numerics, .. } = *sequence;
    let n = sequence.n_tokens();
    let name = format!(
        "attention of {n} tokens, ratio {ratio}, {heads} x {width}, top {top_k}, {} numerics, {} activations{}",
        numerics.name(),
        activations.name(),
        if sequence.level_scores { ", level scores" } else { "" }
    );
    let (cpu, cuda) =
        (Lab { backend: &machines.cpu, h: &machines.h }, Lab { backend: &machines.cuda, h: &machines.h });
    let mut found = Vec::new();
    report.run(format!("{name}: against the CPU"), || {
        let expected = sequence.run(&cpu)?;
        found = sequence.run(&cuda)?;
        let mut verdict = Verdict { passed: true, detail: String::new() };
        for ((what, width, expected), (_, _, found)) in expected.iter().zip(&found) {
            if expected.is_empty() && found.is_empty() {
                continue;
            }
            let part = if *what == "chosen" {
                let differing = expected.iter().zip(found).filter(|(a, b)| a != b).count();
                let share = differing as f64 / expected.len().max(1) as f64;
                // Official rounding of queries may fall the other way, and a choice with it.
                let allowed = if numerics == Numerics::Exact { 0.0 } else { 0.1 };
                let detail = format!("{differing} of {} choices differ", expected.len());
                Verdict { passed: share <= allowed && expected.len() == found.len(), detail }
            } else {
                let scores = *what == "scores" && numerics == Numerics::Official;
                let tolerance = if scores { Tolerance { rms: 2e-2, largest: 1.0 } } else { tolerance };
                compare(expected, found, *width, tolerance)
            };
            verdict.passed &= part.passed;
            verdict.detail += &format!("{what}: {}; ", part.detail);
        }
        Ok(verdict)
    });
    if found.is_empty() {
        return;
    }
    // Other pieces, and the attending tokens one by one: the same bits.
    let before = n - sequence.attending;
    let ones = || vec![1; sequence.attending];
    let cut = |step: usize| {
        let mut pieces: Vec<usize> = std::iter::repeat_n(step, before / step).collect();
        pieces.extend((!before.is_multiple_of(step)).then_some(before % step));
        pieces
    };
    let variants = [
        ("in pieces of 37", [cut(37), vec![sequence.attending]].concat(), Work::Batch),
        ("in pieces of 5, then one by one", [cut(5), ones()].concat(), Work::Batch),
        ("as single tokens", [cut(64), ones()].concat(), Work::Token),
    ];
    for (how, pieces, work) in variants {
        // Single tokens are not rounded as batches are.
        if work == Work::Token && activations == ActivationPrecision::Mixed {
            continue;
        }
        report.run(format!("{name}: {how} the same bits"), || {
            let again = SequenceOf { pieces, work, ..sequence.clone() }.run(&cuda)?;
            let mut verdict = Verdict { passed: true, detail: String::new() };
            for ((what, width, expected), (_, _, found)) in found.iter().zip(&again) {
                // Scores come with as many rows as each piece sees, chosen rows twice a piece.
                if *what != "attended" {
                    continue;
                }
                let part = same_bits(expected, found, *width);
                verdict.passed &= part.passed;
                verdict.detail += &format!("{what}: {}; ", part.detail);
            }
            Ok(verdict)
        });
    }
}
