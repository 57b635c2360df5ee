//! Hyper-connections, (3.6), for one token.

use super::plain::{self, Sums};
use crate::ops::HyperConstants;

/// Weights with which one token's streams are merged and mixed.
pub(super) struct TokenMix<'a> {
    /// `[M]`.
    pub(super) pre: &'a mut [f32],
    /// `[M]`.
    pub(super) post: &'a mut [f32],
    /// `[M, M]`, `[old, new]`.
    pub(super) comb: &'a mut [f32],
}

/// `1 / sqrt(mean of squares + epsilon)`.
pub(super) fn inverse_rms(values: &[f32], epsilon: f32, sums: Sums) -> f32 {
    if sums == Sums::PlainGgml {
        return plain::inverse_rms(values, epsilon);
    }
    let sum: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    (1.0 / (sum / values.len() as f64 + f64::from(epsilon)).sqrt()) as f32
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Weights of the streams in their merger; `mixes`: `[M]`, already normalised.
pub(super) fn pre_weights(mixes: &[f32], scale: f32, base: &[f32], epsilon: f32, pre: &mut [f32]) {
    for ((pre, &mix), &base) in pre.iter_mut().zip(mixes).zip(base) {
        *pre = sigmoid(mix * scale + base) + epsilon;
    }
}

/// All weights from the mixer's products. `mixes`, `base`: `[(2 + M) * M]`; `scale`: `[3]`.
pub(super) fn mix_weights(
    mixes: &[f32],
    inverse_rms: f32,
    scale: &[f32],
    base: &[f32],
    constants: HyperConstants,
    out: TokenMix<'_>,
    sums: Sums,
) {
    let m = constants.n_streams;
    let mixes: Vec<f32> = mixes.iter().map(|mix| mix * inverse_rms).collect();
    pre_weights(&mixes[..m], scale[0], &base[..m], constants.epsilon, out.pre);
    for ((post, &mix), &base) in out.post.iter_mut().zip(&mixes[m..]).zip(&base[m..]) {
        *post = 2.0 * sigmoid(mix * scale[1] + base);
    }
    for ((comb, &mix), &base) in out.comb.iter_mut().zip(&mixes[2 * m..]).zip(&base[2 * m..]) {
        *comb = mix * scale[2] + base;
    }
    let sinkhorn = match sums {
        Sums::Own => sinkhorn,
        Sums::PlainGgml => plain::sinkhorn,
    };
    sinkhorn(out.comb, m, constants.sinkhorn_iterations, constants.epsilon);
}

/// Makes rows and columns sum to nearly one: a softmax of the rows, then columns and rows in turn, columns last.
fn sinkhorn(comb: &mut [f32], m: usize, iterations: usize, epsilon: f32) {
    for row in comb.chunks_exact_mut(m) {
        let largest = row.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let mut sum = 0.0;
        for value in row.iter_mut() {
            *value = (*value - largest).exp();
            sum += *value;
        }
        for value in row {
            *value = *value / sum + epsilon;
        }
    }
    normalise_columns(comb, m, epsilon);
    for _ in 1..iterations {
        for row in comb.chunks_exact_mut(m) {
            let sum = row.iter().sum::<f32>() + epsilon;
            for value in row {
                *value /= sum;
            }
        }
        normalise_columns(comb, m, epsilon);
    }
}

fn normalise_columns(comb: &mut [f32], m: usize, epsilon: f32) {
    for column in 0..m {
        let sum = (0..m).map(|row| comb[row * m + column]).sum::<f32>() + epsilon;
        for row in 0..m {
            comb[row * m + column] /= sum;
        }
    }
}

/// `x = sum of pre_j X[j]`. `streams`: `[M, D]`.
pub(super) fn merge(streams: &[f32], pre: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for (stream, &weight) in streams.chunks_exact(out.len()).zip(pre) {
        for (out, &value) in out.iter_mut().zip(stream) {
            *out += weight * value;
        }
    }
}

/// `X'[k] = post_k y + sum over j of C[j, k] X[j]`, in place. `streams`: `[M, D]`, `output`: `[D]`.
pub(super) fn mix_in(streams: &mut [f32], output: &[f32], post: &[f32], comb: &[f32]) {
    let (m, d) = (post.len(), output.len());
    let mut old = vec![0.0; m];
    for (i, &y) in output.iter().enumerate() {
        for (j, old) in old.iter_mut().enumerate() {
            *old = streams[j * d + i];
        }
        for k in 0..m {
            let mixed = old.iter().enumerate().fold(post[k] * y, |sum, (j, &x)| sum + comb[j * m + k] * x);
            streams[k * d + i] = mixed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinkhorn_ends_with_columns_that_sum_to_one() {
        let mut comb: Vec<f32> = (0..16).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        sinkhorn(&mut comb, 4, 20, 1e-6);
        for column in 0..4 {
            let sum: f32 = (0..4).map(|row| comb[row * 4 + column]).sum();
            assert!((sum - 1.0).abs() < 1e-5, "{sum}");
        }
        for row in comb.chunks(4) {
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-3);
        }
    }

    #[test]
    fn the_first_index_of_the_mixing_matrix_is_the_old_stream() {
        let mut streams = [1.0, 2.0, 10.0, 20.0];
        mix_in(&mut streams, &[0.5, 0.25], &[1.0, 0.0], &[0.0, 1.0, 0.0, 0.0]);
        assert_eq!(streams, [0.5, 0.25, 1.0, 2.0]);
    }
}
