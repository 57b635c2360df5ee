//! Operations with the roundings and the order of sums of ggml's plain C code, so that a file gives the logits of
//! llama.cpp built without vector instructions, bit for bit. Written for equality, not for speed.
//!
//! Sums of `f32` values run in `f64` there, one after the other, and end rounded to `f32`; divisions by a sum are
//! multiplications with its inverse. Exponentials, logarithms, sines and cosines are those of the system's C library on
//! both sides.

use super::round::sum_and_subtract;
use crate::ops::Rope;

/// Which of two orders of sums an operation takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sums {
    /// Ours: fastest where it matters, most exact elsewhere.
    Own,
    /// That of ggml's plain C code.
    PlainGgml,
}

/// The sum of values.
pub(super) fn sum(values: impl Iterator<Item = f32>) -> f32 {
    values.map(f64::from).sum::<f64>() as f32
}

/// Sum of products, each rounded to `f32`.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    sum(a.iter().zip(b).map(|(a, b)| a * b))
}

/// Products of every row with every input. `rows`: `[n, width]`, `inputs`: `[m, width]`, `out`: `[n, m]`.
pub(super) fn products(rows: &[f32], inputs: &[f32], width: usize, out: &mut [f32]) {
    let n_inputs = inputs.len() / width;
    for (row, out) in rows.chunks_exact(width).zip(out.chunks_exact_mut(n_inputs)) {
        for (input, out) in inputs.chunks_exact(width).zip(out) {
            *out = dot(row, input);
        }
    }
}

/// `1 / sqrt(mean of squares + epsilon)`.
pub(super) fn inverse_rms(values: &[f32], epsilon: f32) -> f32 {
    let sum: f64 = values.iter().map(|v| f64::from(v * v)).sum();
    1.0 / ((sum / values.len() as f64) as f32 + epsilon).sqrt()
}

/// The exponentials of `values` less their maximum, in place, and their sum.
fn exponentials(values: &mut [f32], largest: f32) -> f64 {
    let mut sum = 0.0;
    for value in values {
        *value = (*value - largest).exp();
        sum += f64::from(*value);
    }
    sum
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b))
}

/// Mean of values weighted by the softmax of their gates. At least one gate is finite.
pub(super) fn softmax_mean(slots: &[(f32, f32)]) -> f32 {
    let mut weights: Vec<f32> = slots.iter().map(|slot| slot.0).collect();
    let largest = largest(&weights);
    let factor = (1.0 / exponentials(&mut weights, largest)) as f32;
    sum(slots.iter().zip(&weights).map(|(slot, weight)| slot.1 * (weight * factor)))
}

/// Attention of some heads of one query over `keys`, which are the values too.
///
/// `queries`, `out`: `[heads, width]`; `sinks`: `[heads]`.
pub(super) fn attend_heads(queries: &[f32], keys: &[&[f32]], sinks: &[f32], out: &mut [f32]) {
    let width = queries.len() / sinks.len();
    let scale = 1.0 / (width as f32).sqrt();
    let heads = queries.chunks_exact(width).zip(out.chunks_exact_mut(width));
    for ((query, out), &sink) in heads.zip(sinks) {
        let mut weights: Vec<f32> = keys.iter().map(|key| dot(key, query) * scale).collect();
        let largest = largest(&weights).max(sink);
        let all = exponentials(&mut weights, largest) + f64::from((sink - largest).exp());
        let factor = (1.0 / all) as f32;
        for weight in &mut weights {
            *weight *= factor;
        }
        for (column, out) in out.iter_mut().enumerate() {
            *out = sum(keys.iter().zip(&weights).map(|(key, weight)| key[column] * weight));
        }
    }
}

/// Rotates an indexer's row by the normalised Walsh-Hadamard matrix, as ggml does also where nothing is rounded then.
pub(super) fn hadamard(values: &mut [f32]) {
    let factor = 1.0 / (values.len() as f32).sqrt();
    for value in values.iter_mut() {
        *value *= factor;
    }
    sum_and_subtract(values);
}

/// Indexer scores of one query. `queries`: `[heads, width]`; `rows`: `[n, width]`; `weights`: `[heads]`; `out`: `[n]`.
pub(super) fn index_scores(queries: &[f32], rows: &[f32], weights: &[f32], out: &mut [f32]) {
    let width = queries.len() / weights.len();
    for (row, out) in rows.chunks_exact(width).zip(out) {
        let heads = queries.chunks_exact(width).zip(weights);
        *out = heads.fold(0.0, |score, (query, weight)| score + dot(query, row).max(0.0) * weight);
    }
}

/// Places of the `top_k` highest scores, ascending. Of equal scores those are taken that a partial sort by a heap
/// leaves, as the C++ library does it: the best so far form a heap with the lowest on top, which a higher score replaces.
pub(super) fn best(scores: &[f32], top_k: usize) -> Vec<u32> {
    let n = top_k.min(scores.len());
    let mut heap: Vec<u32> = (0..n as u32).collect();
    for place in (0..n / 2).rev() {
        let moved = heap[place];
        sink_into_heap(&mut heap, place, moved, scores);
    }
    for place in n..scores.len() {
        if n > 0 && scores[place] > scores[heap[0] as usize] {
            sink_into_heap(&mut heap, 0, place as u32, scores);
        }
    }
    heap.sort_unstable();
    heap
}

/// Puts `moved` in at `place`, whose value is dropped: the lower child moves up until there is none, then `moved` rises
/// from there while it is lower than its parent.
fn sink_into_heap(heap: &mut [u32], place: usize, moved: u32, scores: &[f32]) {
    let score = |item: u32| scores[item as usize];
    let mut hole = place;
    while 2 * hole + 1 < heap.len() {
        let (left, right) = (2 * hole + 1, 2 * hole + 2);
        let lower = if right < heap.len() && score(heap[right]) <= score(heap[left]) { right } else { left };
        heap[hole] = heap[lower];
        hole = lower;
    }
    while hole > place && score(heap[(hole - 1) / 2]) > score(moved) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = moved;
}

/// `sqrt(softplus(x))`; above 20 the softplus is `x` itself.
pub(super) fn score(logit: f32) -> f32 {
    if logit > 20.0 { logit.sqrt() } else { (1.0 + logit.exp()).ln().sqrt() }
}

/// The mixing matrix `[m, m]` of hyper-connections from its products: a softmax of the rows, then columns and rows in
/// turn, columns last.
pub(super) fn sinkhorn(comb: &mut [f32], m: usize, iterations: usize, epsilon: f32) {
    for row in comb.chunks_exact_mut(m) {
        let largest = largest(row);
        let mut sum = 0.0;
        for value in row.iter_mut() {
            *value = (*value - largest).exp();
            sum += *value;
        }
        let inverse = 1.0 / sum;
        for value in row {
            *value = *value * inverse + epsilon;
        }
    }
    normalise(comb, m, 1, m, epsilon);
    for _ in 1..iterations {
        normalise(comb, m, m, 1, epsilon);
        normalise(comb, m, 1, m, epsilon);
    }
}

/// Divides `m` lines of `m` values by their sums: lines begin `between` apart, their values lie `along` apart.
fn normalise(comb: &mut [f32], m: usize, between: usize, along: usize, epsilon: f32) {
    for line in 0..m {
        let places = (0..m).map(|i| line * between + i * along);
        let inverse = 1.0 / places.clone().fold(epsilon, |sum, at| sum + comb[at]);
        places.for_each(|at| comb[at] *= inverse);
    }
}

/// Cosine and sine of each pair. The angle of a pair is that of the pair before it times a factor, in `f32`.
pub(super) fn angles(rope: &Rope, position: usize) -> Vec<(f32, f32)> {
    let n_pairs = rope.frequencies.len();
    let step = rope.base.powf(-2.0 / (2 * n_pairs) as f32);
    let mut angle = position as f32;
    (0..n_pairs)
        .map(|pair| {
            let plain = angle;
            angle *= step;
            let Some(slowed) = rope.slowed else { return (plain.cos(), plain.sin()) };
            let scale = 1.0 / slowed.factor;
            let ramp =
                (pair as f32 - slowed.first_slowed) / (slowed.all_slowed - slowed.first_slowed).max(0.001);
            // Of the plain angle.
            let share = 1.0 - ramp.clamp(0.0, 1.0);
            let angle = scale * plain * (1.0 - share) + plain * share;
            // The length is scaled by a factor and back.
            let length = 1.0 + 0.1 * (1.0 / scale).ln();
            let length = (1.0 / length) * length;
            (angle.cos() * length, angle.sin() * length)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `std::partial_sort` of GCC 12 leaves in front of scores of four values, compared by score alone.
    #[test]
    fn of_equal_scores_those_of_a_partial_sort_are_taken() {
        let cases: [(u32, usize, &[u32]); 4] = [
            (2, 23, &[4, 11, 14, 16, 17, 18, 19]),
            (3, 23, &[2, 3, 6, 7, 12]),
            (4, 40, &[2, 7, 8, 9, 11, 14, 15, 16, 17, 20, 21, 24, 27, 29, 38, 39]),
            (5, 40, &[1, 4, 6, 12, 17, 21, 23]),
        ];
        for (seed, n, expected) in cases {
            let mut state = seed;
            let scores: Vec<f32> = (0..n)
                .map(|_| {
                    state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                    (state >> 24) as f32 % 4.0
                })
                .collect();
            assert_eq!(best(&scores, expected.len()), expected, "seed {seed}");
        }
        assert_eq!(best(&[0.0; 23], 16), (0..16).collect::<Vec<_>>());
        assert_eq!(best(&[1.0, 2.0], 3), [0, 1]);
        assert!(best(&[], 3).is_empty() && best(&[1.0], 0).is_empty());
    }
}
