//! What the kernels should give, computed plainly.

use gguf_tools::block::BlockType;
use rayon::prelude::*;

use super::super::matrix::generate::Recipe;
use super::{recipe, row_bytes};

pub(super) const GATE_SEED: u64 = 11;
pub(super) const UP_SEED: u64 = 12;
pub(super) const DOWN_SEED: u64 = 13;

/// Rows of a random matrix.
pub(super) struct Rows {
    block_type: BlockType,
    columns: usize,
    recipe: Recipe,
}

impl Rows {
    pub(super) fn new(block_type: BlockType, columns: usize, seed: u64) -> Self {
        Self { block_type, columns, recipe: recipe(block_type, columns, seed) }
    }

    pub(super) fn bytes(&self, row: u64) -> Vec<u8> {
        let mut bytes = vec![0; row_bytes(self.block_type, self.columns)];
        self.recipe.row(row, &mut bytes);
        bytes
    }

    pub(super) fn values(&self, row: u64) -> Vec<f32> {
        let mut values = vec![0.0; self.columns];
        if let Some(format) = self.block_type.format() {
            format.dequantize(&self.bytes(row), &mut values);
        }
        values
    }
}

/// Inputs of unequal size, a few of them large, some zero.
pub(super) fn inputs(tokens: usize, columns: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..tokens * columns)
        .map(|i| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let uniform = ((state >> 40) as f32 / (1 << 24) as f32 - 0.5) * 3.4;
            match i % 97 {
                0 => uniform * 9.0,
                5 => 0.0,
                _ => uniform,
            }
        })
        .collect()
}

/// First, last and some rows between.
pub(super) fn sample(rows: usize) -> Vec<usize> {
    if rows <= 96 {
        return (0..rows).collect();
    }
    let between = (1..32).map(|i| i * rows / 32 + i % 7);
    let mut chosen: Vec<usize> = (0..20).chain(between).chain(rows - 20..rows).collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen.retain(|&row| row < rows);
    chosen
}

pub(super) fn dot(weights: &[f32], x: &[f32]) -> f64 {
    weights.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()
}

/// Relative root mean square of the differences, and where the largest is.
pub(super) fn relative_error(found: &[f32], expected: &[f64]) -> (f64, usize) {
    let difference = |i: usize| f64::from(found[i]) - expected[i];
    let (mut sum, mut scale, mut worst) = (0.0, 0.0, 0);
    for i in 0..expected.len() {
        sum += difference(i) * difference(i);
        scale += expected[i] * expected[i];
        if difference(i).is_nan() || difference(i).abs() > difference(worst).abs() {
            worst = i;
        }
    }
    ((sum / scale.max(f64::MIN_POSITIVE)).sqrt(), worst)
}

/// Values as the kernels round them: 8 bits, 32 sharing a scale.
pub(super) fn rounded(values: &[f32]) -> Vec<f32> {
    values
        .chunks(32)
        .flat_map(|group| {
            let scale = group.iter().fold(0f32, |most, v| most.max(v.abs())) / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            group.iter().map(move |v| (v * inverse).round_ties_even() * scale).collect::<Vec<_>>()
        })
        .collect()
}

/// A case of routed experts.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertShape {
    pub(super) gate: BlockType,
    pub(super) down: BlockType,
    pub(super) outputs: usize,
    pub(super) width: usize,
    pub(super) n_experts: usize,
    pub(super) n_used: usize,
    pub(super) tokens: usize,
}

impl ExpertShape {
    pub(super) fn name(&self) -> String {
        let Self { gate, down, outputs, width, n_experts, n_used, tokens } = self;
        format!("{n_used} of {n_experts} experts, {gate} + {down}, {outputs} -> {width}, {tokens} tokens")
    }

    /// Different experts for each token, and their weights.
    pub(super) fn routing(&self) -> (Vec<u32>, Vec<f32>) {
        let n = self.tokens * self.n_used;
        let ids = (0..n).map(|i| ((i / self.n_used * 3 + i % self.n_used * 5 + 1) % self.n_experts) as u32);
        (ids.collect(), (0..n).map(|i| 0.15 + 0.1 * (i % 7) as f32).collect())
    }

    /// Places of some mids, and their values, `[tokens, n_used, width]`.
    pub(super) fn expected_mids(
        &self,
        x: &[f32],
        ids: &[u32],
        limit: f32,
        round: bool,
    ) -> (Vec<usize>, Vec<f64>) {
        let gate = Rows::new(self.gate, self.outputs, GATE_SEED);
        let up = Rows::new(self.gate, self.outputs, UP_SEED);
        let wanted: Vec<(usize, usize)> = (0..ids.len())
            .flat_map(|item| sample(self.width).into_iter().step_by(2).map(move |row| (item, row)))
            .collect();
        wanted
            .par_iter()
            .map(|&(item, row)| {
                let x = &x[item / self.n_used * self.outputs..][..self.outputs];
                let x = if round { rounded(x) } else { x.to_vec() };
                let matrix_row = u64::from(ids[item]) * self.width as u64 + row as u64;
                let g = dot(&gate.values(matrix_row), &x).min(f64::from(limit));
                let u = dot(&up.values(matrix_row), &x).clamp(-f64::from(limit), f64::from(limit));
                (item * self.width + row, g / (1.0 + (-g).exp()) * u)
            })
            .unzip()
    }

    /// Places of some outputs, and their values, from mids `[tokens, n_used, width]`.
    pub(super) fn expected_outputs(
        &self,
        mids: &[f32],
        ids: &[u32],
        weights: &[f32],
        round: bool,
    ) -> (Vec<usize>, Vec<f64>) {
        let down = Rows::new(self.down, self.width, DOWN_SEED);
        let weighted: Vec<Vec<f32>> = mids
            .chunks(self.width)
            .zip(weights)
            .map(|(mid, weight)| {
                let mid: Vec<f32> = mid.iter().map(|v| v * weight).collect();
                if round { rounded(&mid) } else { mid }
            })
            .collect();
        let wanted: Vec<(usize, usize)> = (0..self.tokens)
            .flat_map(|token| sample(self.outputs).into_iter().step_by(2).map(move |row| (token, row)))
            .collect();
        wanted
            .par_iter()
            .map(|&(token, row)| {
                let sum: f64 = (token * self.n_used..(token + 1) * self.n_used)
                    .map(|item| {
                        let matrix_row = u64::from(ids[item]) * self.outputs as u64 + row as u64;
                        dot(&down.values(matrix_row), &weighted[item])
                    })
                    .sum();
                (token * self.outputs + row, sum)
            })
            .unzip()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_keeps_the_largest_and_never_leaves_half_a_step() {
        let values: Vec<f32> = (0..64).map(|i| (i as f32 - 20.0) * 0.37).collect();
        let found = rounded(&values);
        for (group, found) in values.chunks(32).zip(found.chunks(32)) {
            let most = group.iter().fold(0f32, |most, v| most.max(v.abs()));
            for (value, found) in group.iter().zip(found) {
                assert!((value - found).abs() <= most / 254.0 * 1.0001);
            }
        }
        assert_eq!(rounded(&[0.0; 32]), [0.0; 32]);
    }

    #[test]
    fn samples_hold_both_ends_and_no_row_twice() {
        for rows in [1, 96, 97, 129_280] {
            let chosen = sample(rows);
            assert_eq!((chosen[0], chosen[chosen.len() - 1]), (0, rows - 1));
            assert!(chosen.is_sorted_by(|a, b| a < b));
        }
    }
}
