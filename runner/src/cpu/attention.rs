//! Rotation, attention over window and compressed rows, and the indexer's choice, (3.3, 4.4, 4.6).

use rayon::prelude::*;

use super::plain::{self, Sums};
use super::{CpuCache, CpuTensor, PARALLEL_WORK, kernels};
use crate::ops::{CompressedRows, Piece, Rope, Selection};
use gguf_tools::simd::Level;

/// Most heads that one task works on.
const HEADS_PER_TASK: usize = 8;

/// (3.3) Rotates the adjacent pairs at the end of a vector by `position` times their frequency, or back.
pub(super) fn rotate(vector: &mut [f32], rope: &CpuRope, position: usize, back: bool) {
    rotate_by(vector, &rope.angles(position), back);
}

/// Rotary frequencies, and how angles are made of them.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuRope {
    pub(super) rope: Rope,
    pub(super) sums: Sums,
}

impl CpuRope {
    /// Cosine and sine of each pair.
    pub(super) fn angles(&self, position: usize) -> Vec<(f32, f32)> {
        if self.sums == Sums::PlainGgml {
            return plain::angles(&self.rope, position);
        }
        let angle = |frequency: &f32| {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            (cos, sin)
        };
        self.rope.frequencies.iter().map(angle).collect()
    }

    /// Values that are rotated, at the end of a vector.
    pub(super) fn width(&self) -> usize {
        2 * self.rope.frequencies.len()
    }
}

pub(super) fn rotate_by(vector: &mut [f32], angles: &[(f32, f32)], back: bool) {
    let plain = vector.len() - 2 * angles.len();
    for (pair, &(cos, sin)) in vector[plain..].as_chunks_mut::<2>().0.iter_mut().zip(angles) {
        let sin = if back { -sin } else { sin };
        *pair = [pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos];
    }
}

/// (4.4.4 to 4.4.6) for the piece's rows.
#[expect(clippy::too_many_arguments, reason = "the operation's arguments")]
pub(super) fn attend(
    level: Level,
    cache: &CpuCache,
    queries: &CpuTensor,
    piece: &Piece,
    selection: &Selection<Vec<Vec<u32>>>,
    sinks: &[f32],
    rope: &CpuRope,
    output: &mut CpuTensor,
) {
    let head_dim = cache.shape().head_dim;
    let n_heads = sinks.len();
    let heads = (1..=HEADS_PER_TASK.min(n_heads)).rev().find(|n| n_heads.is_multiple_of(*n)).unwrap_or(1);
    let compressed = cache.compressed(CompressedRows::Attention);
    let row = |w: usize| &compressed[w * head_dim..][..head_dim];
    let tasks_per_token = n_heads / heads;
    let width = output.width;
    let first = piece.rows.start;
    let out = &mut output.values[first * width..piece.rows.end * width];
    let task = |(task, out): (usize, &mut [f32])| {
        let (token, first_head) = (task / tasks_per_token, task % tasks_per_token * heads);
        let position = piece.position + token;
        let mut keys: Vec<&[f32]> = cache.window_rows(position).collect();
        match selection {
            Selection::None => {}
            Selection::Visible => keys.extend((0..cache.n_visible(position)).map(row)),
            Selection::Rows(chosen) => keys.extend(chosen[token].iter().map(|&w| row(w as usize))),
        }
        let q = &queries.row(first + token)[first_head * head_dim..][..heads * head_dim];
        let sinks = &sinks[first_head..first_head + heads];
        match rope.sums {
            Sums::Own => kernels::attend_heads(level, q, &keys, sinks, out),
            Sums::PlainGgml => plain::attend_heads(q, &keys, sinks, out),
        }
        let angles = rope.angles(position);
        for head in out.chunks_exact_mut(head_dim) {
            rotate_by(head, &angles, true);
        }
    };
    let tasks = out.chunks_mut(heads * head_dim).enumerate();
    let work = 2 * piece.rows.len() * width * cache.shape().window.min(cache.n_tokens());
    if work < PARALLEL_WORK {
        tasks.for_each(task);
    } else {
        tasks.collect::<Vec<_>>().into_par_iter().for_each(task);
    }
}

/// (4.6.5 to 4.6.7) for the piece's rows.
#[expect(clippy::too_many_arguments, reason = "the operation's arguments")]
pub(super) fn index_topk(
    level: Level,
    cache: &CpuCache,
    queries: &CpuTensor,
    head_weights: &CpuTensor,
    piece: &Piece,
    top_k: usize,
    keep_scores: bool,
    sums: Sums,
) -> (Vec<Vec<u32>>, Vec<f32>) {
    let width = cache.shape().index_head_dim;
    let n_heads = head_weights.width;
    let rows = cache.compressed(CompressedRows::Indexer);
    let n_rows = rows.len() / width;
    let factor = (1.0 / ((width * n_heads) as f64).sqrt()) as f32;
    let task = |token: usize| {
        let n_visible = cache.n_visible(piece.position + token).min(n_rows);
        if n_visible <= top_k && !keep_scores {
            return ((0..n_visible as u32).collect(), Vec::new());
        }
        let weights: Vec<f32> =
            head_weights.row(piece.rows.start + token).iter().map(|w| w * factor).collect();
        let mut scores = vec![f32::NEG_INFINITY; n_rows];
        let q = queries.row(piece.rows.start + token);
        let rows = &rows[..n_visible * width];
        let chosen = match sums {
            Sums::Own => {
                kernels::index_scores(level, q, rows, &weights, &mut scores);
                best(&scores[..n_visible], top_k)
            }
            Sums::PlainGgml => {
                plain::index_scores(q, rows, &weights, &mut scores);
                plain::best(&scores[..n_visible], top_k)
            }
        };
        (chosen, scores)
    };
    let work = piece.rows.len() * n_rows * width * n_heads;
    let found: Vec<(Vec<u32>, Vec<f32>)> = if work < PARALLEL_WORK {
        (0..piece.rows.len()).map(task).collect()
    } else {
        (0..piece.rows.len()).into_par_iter().map(task).collect()
    };
    let (chosen, scores): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    (chosen, if keep_scores { scores.concat() } else { Vec::new() })
}

/// Places of the `top_k` highest scores, ascending; of equal scores the lower place wins.
fn best(scores: &[f32], top_k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    if top_k < order.len() {
        order.select_nth_unstable_by(top_k, |&a, &b| {
            scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b))
        });
        order.truncate(top_k);
        order.sort_unstable();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_turns_adjacent_pairs_at_the_end_and_back_again() {
        let rope = Rope { frequencies: vec![1.0, 0.5], base: 4.0, slowed: None };
        let rope = CpuRope { rope, sums: Sums::Own };
        let vector = [9.0, 1.0, 0.0, 0.0, 1.0];
        let mut turned = vector;
        rotate(&mut turned, &rope, 2, false);
        let expected = [9.0, 2.0_f32.cos(), 2.0_f32.sin(), -(1.0_f32.sin()), 1.0_f32.cos()];
        for (a, b) in turned.iter().zip(expected) {
            assert!((a - b).abs() < 1e-6, "{turned:?}");
        }
        rotate(&mut turned, &rope, 2, true);
        for (a, b) in turned.iter().zip(vector) {
            assert!((a - b).abs() < 1e-6, "{turned:?}");
        }
    }

    #[test]
    fn of_equal_scores_the_lower_row_is_chosen() {
        assert_eq!(best(&[1.0, 3.0, 2.0, 2.0, 2.0], 3), [1, 2, 3]);
        assert_eq!(best(&[0.0; 6], 4), [0, 1, 2, 3]);
    }

    #[test]
    fn exactly_as_many_rows_as_wanted_are_all_taken() {
        assert_eq!(best(&[3.0, 1.0, 2.0], 3), [0, 1, 2]);
        assert_eq!(best(&[3.0, 1.0, 2.0], 2), [0, 2]);
        assert!(best(&[], 3).is_empty());
    }
}
