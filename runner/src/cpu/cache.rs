//! What a layer keeps of a sequence, (5.1), and the compressors that fill it, (4.5).

use super::attention::{CpuRope, rotate};
use super::hyper::inverse_rms;
use super::plain::{self, Sums};
use super::round::{rotate_and_round_to_fp4, round_to_fp8};
use crate::ops::{CacheShape, CompressedRows, Numerics};

/// One layer's cache of one sequence. Grows with the tokens; a clone is a snapshot.
#[derive(Debug, Clone)]
pub struct CpuCache {
    shape: CacheShape,
    n_tokens: usize,
    /// Key-value rows of the latest positions, ascending, `[.., head_dim]`; the last is that of position `n_tokens - 1`.
    window: Vec<f32>,
    attention: CompressorState,
    indexer: CompressorState,
}

/// A compressor on its way through a sequence, and the rows it has emitted.
#[derive(Debug, Clone, Default)]
struct CompressorState {
    n_tokens: usize,
    /// Values and gates of the window under way, `[ratio, width]`; before it, where windows overlap,
    /// those of the previous window. Empty until the first token comes.
    values: Vec<f32>,
    gates: Vec<f32>,
    /// `[rows, e]`.
    rows: Vec<f32>,
}

/// Weights and settings of one push.
pub(super) struct CompressorRun<'a> {
    pub(super) position_bias: &'a [f32],
    pub(super) norm: &'a [f32],
    pub(super) rope: &'a CpuRope,
    pub(super) epsilon: f32,
    pub(super) numerics: Numerics,
}

impl CpuCache {
    pub(super) fn new(shape: CacheShape) -> Self {
        Self {
            shape,
            n_tokens: 0,
            window: Vec::new(),
            attention: CompressorState::default(),
            indexer: CompressorState::default(),
        }
    }

    pub(super) fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    pub(super) fn n_bytes(&self) -> usize {
        let state = |s: &CompressorState| s.values.len() + s.gates.len() + s.rows.len();
        size_of::<f32>() * (self.window.len() + state(&self.attention) + state(&self.indexer))
    }

    pub(super) fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Appends rows of the next positions.
    pub(super) fn append_window(&mut self, rows: &[f32]) {
        self.window.extend_from_slice(rows);
        self.n_tokens += rows.len() / self.shape.head_dim;
    }

    /// The window of a query at `position`: itself and what is left of the positions before it, ascending.
    pub(super) fn window_rows(&self, position: usize) -> impl Iterator<Item = &[f32]> {
        let width = self.shape.head_dim;
        let first_kept = self.n_tokens - self.window.len() / width;
        let first = (position + 1).saturating_sub(self.shape.window);
        self.window[(first - first_kept) * width..(position + 1 - first_kept) * width].chunks_exact(width)
    }

    /// Drops rows that no later query sees. Moves memory only once a window's worth has gathered.
    pub(super) fn trim_window(&mut self) {
        let (width, keep) = (self.shape.head_dim, self.shape.window - 1);
        let n_rows = self.window.len() / width;
        if n_rows > 2 * keep {
            self.window.drain(..(n_rows - keep) * width);
        }
    }

    /// Compressed rows that a query at `position` may see: `(w + 1) ratio <= position + 1`.
    pub(super) fn n_visible(&self, position: usize) -> usize {
        (position + 1).checked_div(self.shape.ratio).unwrap_or(0)
    }

    /// Compressed rows so far, `[rows, e]`.
    pub(super) fn compressed(&self, target: CompressedRows) -> &[f32] {
        match target {
            CompressedRows::Attention => &self.attention.rows,
            CompressedRows::Indexer => &self.indexer.rows,
        }
    }

    /// Pushes one token into a compressor. `values`, `gates`: `[width]`, without position bias.
    pub(super) fn push(
        &mut self,
        target: CompressedRows,
        values: &[f32],
        gates: &[f32],
        run: &CompressorRun<'_>,
    ) {
        let ratio = self.shape.ratio;
        let state = match target {
            CompressedRows::Attention => &mut self.attention,
            CompressedRows::Indexer => &mut self.indexer,
        };
        let width = values.len();
        // Overlapping windows: twice the width, and as many slots again for the previous window.
        let overlapping = ratio == 4;
        let first_slot = if overlapping { ratio } else { 0 };
        if state.values.is_empty() {
            state.values = vec![0.0; (first_slot + ratio) * width];
            state.gates = vec![f32::NEG_INFINITY; (first_slot + ratio) * width];
        }
        let place = state.n_tokens % ratio;
        let slot = (first_slot + place) * width..(first_slot + place + 1) * width;
        state.values[slot.clone()].copy_from_slice(values);
        let bias = &run.position_bias[place * width..(place + 1) * width];
        for ((out, gate), bias) in state.gates[slot].iter_mut().zip(gates).zip(bias) {
            *out = gate + bias;
        }
        state.n_tokens += 1;
        if state.n_tokens.is_multiple_of(ratio) {
            let mean = match run.rope.sums {
                Sums::Own => softmax_mean,
                Sums::PlainGgml => plain::softmax_mean,
            };
            let mut row = if overlapping {
                state.merge_overlapping(ratio, width, mean)
            } else {
                state.merge(width, mean)
            };
            finish_row(&mut row, state.n_tokens - ratio, target, run);
            state.rows.extend_from_slice(&row);
            if overlapping {
                state.values.copy_within(ratio * width.., 0);
                state.gates.copy_within(ratio * width.., 0);
            }
        }
    }
}

impl CompressorState {
    /// Disjoint windows: each channel is the mean of its values, weighted by the softmax of its gates.
    fn merge(&self, width: usize, mean: Mean) -> Vec<f32> {
        let n_slots = self.values.len() / width;
        (0..width)
            .map(|channel| {
                let slots = (0..n_slots).map(|s| {
                    let at = s * width + channel;
                    (self.gates[at], self.values[at])
                });
                mean(&slots.collect::<Vec<_>>())
            })
            .collect()
    }

    /// Overlapping windows: first halves of the previous window's tokens and second halves of this one's.
    fn merge_overlapping(&self, ratio: usize, width: usize, mean: Mean) -> Vec<f32> {
        let half = width / 2;
        (0..half)
            .map(|channel| {
                let slots = (0..2 * ratio).map(|s| {
                    let at = s * width + channel + if s < ratio { 0 } else { half };
                    (self.gates[at], self.values[at])
                });
                mean(&slots.collect::<Vec<_>>())
            })
            .collect()
    }
}

/// Norm, rotation to the window's first position, rounding.
fn finish_row(row: &mut [f32], position: usize, target: CompressedRows, run: &CompressorRun<'_>) {
    let factor = inverse_rms(row, run.epsilon, run.rope.sums);
    for (value, weight) in row.iter_mut().zip(run.norm) {
        *value = *value * factor * weight;
    }
    rotate(row, run.rope, position, false);
    if run.numerics == Numerics::Official {
        match target {
            CompressedRows::Attention => {
                let plain = row.len() - run.rope.width();
                round_to_fp8(&mut row[..plain]);
            }
            CompressedRows::Indexer => rotate_and_round_to_fp4(row),
        }
    } else if run.rope.sums == Sums::PlainGgml && target == CompressedRows::Indexer {
        plain::hadamard(row);
    }
}

/// A weighted mean of gates and values.
type Mean = fn(&[(f32, f32)]) -> f32;

/// Mean of values weighted by the softmax of their gates. At least one gate is finite.
fn softmax_mean(slots: &[(f32, f32)]) -> f32 {
    let largest = slots.iter().fold(f32::NEG_INFINITY, |a, &(gate, _)| a.max(gate));
    let (mut sum, mut weighted) = (0.0_f64, 0.0_f64);
    for &(gate, value) in slots {
        let weight = f64::from((gate - largest).exp());
        sum += weight;
        weighted += weight * f64::from(value);
    }
    (weighted / sum) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Rope;

    static ROPE: CpuRope =
        CpuRope { rope: Rope { frequencies: Vec::new(), base: 1.0, slowed: None }, sums: Sums::Own };

    fn run<'a>(bias: &'a [f32], norm: &'a [f32]) -> CompressorRun<'a> {
        CompressorRun { position_bias: bias, norm, rope: &ROPE, epsilon: 0.0, numerics: Numerics::Exact }
    }

    fn shape(ratio: usize, window: usize) -> CacheShape {
        CacheShape { ratio, window, head_dim: 1, index_head_dim: 1 }
    }

    #[test]
    fn the_window_of_a_query_ends_with_itself_and_holds_at_most_its_length() {
        let mut cache = CpuCache::new(shape(0, 4));
        for position in 0..40_usize {
            cache.append_window(&[position as f32]);
            let rows: Vec<f32> = cache.window_rows(position).map(|row| row[0]).collect();
            let expected: Vec<f32> = (position.saturating_sub(3)..=position).map(|p| p as f32).collect();
            assert_eq!(rows, expected);
            cache.trim_window();
            assert!(cache.window.len() < 8, "the window stays small");
        }
    }

    #[test]
    fn rows_appended_together_give_every_query_its_own_window() {
        let mut cache = CpuCache::new(shape(0, 4));
        let rows: Vec<f32> = (0..10).map(|p| p as f32).collect();
        cache.append_window(&rows[..3]);
        cache.trim_window();
        cache.append_window(&rows[3..]);
        for position in 3..10_usize {
            let rows: Vec<f32> = cache.window_rows(position).map(|row| row[0]).collect();
            let expected: Vec<f32> = (position.saturating_sub(3)..=position).map(|p| p as f32).collect();
            assert_eq!(rows, expected);
        }
    }

    #[test]
    fn a_row_becomes_visible_to_the_token_that_completes_it() {
        let cache = CpuCache::new(shape(4, 4));
        let visible: Vec<usize> = (0..9).map(|position| cache.n_visible(position)).collect();
        assert_eq!(visible, [0, 0, 0, 1, 1, 1, 1, 2, 2]);
        assert_eq!(CpuCache::new(shape(0, 4)).n_visible(1000), 0);
        assert_eq!(CpuCache::new(shape(128, 4)).n_visible(127), 1);
    }

    #[test]
    fn the_first_overlapping_row_reads_its_own_window_alone() {
        // Width 4 = two halves of 2. Gates are level, so a row is the plain mean of its slots.
        let (bias, norm) = ([0.0; 16], [1.0; 2]);
        let mut cache = CpuCache::new(shape(4, 4));
        for token in 0..8 {
            let t = token as f32;
            let values = [t, 10.0 * t, 100.0 + t, 1.0];
            cache.push(CompressedRows::Attention, &values, &[0.0; 4], &run(&bias, &norm));
        }
        let normed = |a: f32, b: f32| {
            let factor = inverse_rms(&[a, b], 0.0, Sums::Own);
            [a * factor, b * factor]
        };
        let rows = cache.compressed(CompressedRows::Attention);
        assert_eq!(rows.len(), 4, "two rows of width 2");
        // Window 0: second halves of tokens 0 to 3.
        assert_eq!(rows[..2], normed(101.5, 1.0));
        // Window 1: first halves of tokens 0 to 3, second halves of tokens 4 to 7.
        assert_eq!(rows[2..], normed((6.0 + 422.0) / 8.0, (60.0 + 4.0) / 8.0));
    }

    #[test]
    fn disjoint_rows_forget_the_window_before() {
        let (bias, norm) = (vec![0.0; 128 * 2], [1.0; 2]);
        let mut cache = CpuCache::new(shape(128, 4));
        for token in 0..300 {
            let values = if token < 128 { [1.0, -1.0] } else { [3.0, 4.0] };
            cache.push(CompressedRows::Attention, &values, &[0.0; 2], &run(&bias, &norm));
        }
        let rows = cache.compressed(CompressedRows::Attention);
        assert_eq!(rows.len(), 4, "the third window is not complete");
        assert_eq!(rows[..2], [1.0, -1.0]);
        assert_eq!(rows[2] / rows[3], 0.75);
    }

    #[test]
    fn the_position_bias_belongs_to_the_place_in_the_window() {
        // Only the last place of each window has weight.
        let mut bias = vec![-1e30; 128];
        bias[127] = 0.0;
        let mut cache = CpuCache::new(shape(128, 4));
        for token in 0..256 {
            let value = if token % 128 == 127 { -(token as f32) } else { 1.0 };
            cache.push(CompressedRows::Attention, &[value], &[0.0], &run(&bias, &[1.0]));
        }
        assert_eq!(cache.compressed(CompressedRows::Attention), [-1.0, -1.0]);
    }

    #[test]
    fn a_hundred_thousand_tokens_leave_the_rows_they_must_and_a_small_window() {
        for ratio in [4, 128] {
            let width = if ratio == 4 { 2 } else { 1 };
            let (bias, norm) = (vec![0.0; ratio * width], [1.0]);
            let mut cache = CpuCache::new(shape(ratio, 128));
            for token in 0..100_000_usize {
                // The sign of a window's values is the sign of its row, since rows are normed to magnitude 1.
                let value = if (token / ratio).is_multiple_of(3) { -2.0 } else { 1.0 };
                let values = if ratio == 4 { vec![0.0, value] } else { vec![value] };
                cache.append_window(&[token as f32]);
                cache.push(CompressedRows::Attention, &values, &vec![0.0; width], &run(&bias, &norm));
                assert_eq!(cache.compressed(CompressedRows::Attention).len(), cache.n_visible(token));
                assert_eq!(cache.window_rows(token).next().unwrap(), [token.saturating_sub(127) as f32]);
                cache.trim_window();
                assert!(cache.window.len() < 2 * 128);
            }
            for (w, row) in cache.compressed(CompressedRows::Attention).iter().enumerate() {
                assert_eq!(*row, if w.is_multiple_of(3) { -1.0 } else { 1.0 }, "ratio {ratio} row {w}");
            }
        }
    }
}
