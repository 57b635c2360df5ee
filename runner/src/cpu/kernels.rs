//! Inner loops in `f32`, eight lanes at a time, written once for every instruction set.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "calls of functions compiled for an instruction set that was detected")
)]

use gguf_tools::simd::{Lanes, Level, Scalar};

/// Defines a function that runs the generic one compiled for the instruction set of `level`.
macro_rules! for_levels {
    ($(#[$doc:meta])* $name:ident = $generic:ident ( $($arg:ident : $type:ty),* $(,)? ) $(-> $result:ty)?) => {
        $(#[$doc])*
        pub(super) fn $name(level: Level, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            fn avx2($($arg: $type),*) $(-> $result)? {
                $generic::<gguf_tools::simd::Avx2>($($arg),*)
            }
            match level {
                Level::Scalar => $generic::<Scalar>($($arg),*),
                // SAFETY: `Level::detect` gives these levels only on machines with AVX2 and F16C.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 | Level::Avx512 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "aarch64")]
                Level::Neon => $generic::<gguf_tools::simd::Neon>($($arg),*),
            }
        }
    };
}

for_levels! {
    /// Products of every row with every input. `rows`: `[n, width]`, `inputs`: `[m, width]`, `out`: `[n, m]`.
    ///
    /// Each product is one [`dot`]: its bits depend on its two vectors alone.
    products = products_in(rows: &[f32], inputs: &[f32], width: usize, out: &mut [f32])
}

for_levels! {
    /// Attention of some heads of one query over `keys` (which are the values too), (4.4.5, 4.4.6).
    ///
    /// `queries`, `out`: `[heads, width]`; `sinks`: `[heads]`.
    attend_heads = attend_heads_in(queries: &[f32], keys: &[&[f32]], sinks: &[f32], out: &mut [f32])
}

for_levels! {
    /// Indexer scores (4.6.6) of one query: `sum over heads of weight * max(0, query . row)`.
    ///
    /// `queries`: `[heads, width]`; `rows`: `[n, width]`; `weights`: `[heads]`; `out`: `[n]`.
    index_scores = index_scores_in(queries: &[f32], rows: &[f32], weights: &[f32], out: &mut [f32])
}

/// Rows and inputs of one tile: each loaded vector is used several times.
const TILE_INPUTS: usize = 3;
const TILE_ROWS: usize = 2;

#[inline(always)]
fn products_in<L: Lanes>(rows: &[f32], inputs: &[f32], width: usize, out: &mut [f32]) {
    let (n, m) = (rows.len() / width, inputs.len() / width);
    let row = |r: usize| &rows[r * width..][..width];
    let input = |i: usize| &inputs[i * width..][..width];
    let mut put = |r: usize, i: usize, value: f32| out[r * m + i] = value;
    let mut i = 0;
    while i < m {
        let wide = i + TILE_INPUTS <= m;
        let mut r = 0;
        while r < n {
            if wide && r + TILE_ROWS <= n {
                let tile = dots::<L, TILE_ROWS, TILE_INPUTS>(
                    [row(r), row(r + 1)],
                    [input(i), input(i + 1), input(i + 2)],
                );
                for (a, line) in tile.iter().enumerate() {
                    for (b, &value) in line.iter().enumerate() {
                        put(r + a, i + b, value);
                    }
                }
                r += TILE_ROWS;
            } else if !wide && r + 4 <= n {
                let tile = dots::<L, 4, 1>([row(r), row(r + 1), row(r + 2), row(r + 3)], [input(i)]);
                for (a, line) in tile.iter().enumerate() {
                    put(r + a, i, line[0]);
                }
                r += 4;
            } else {
                for b in 0..if wide { TILE_INPUTS } else { 1 } {
                    put(r, i + b, dot::<L>(row(r), input(i + b)));
                }
                r += 1;
            }
        }
        i += if wide { TILE_INPUTS } else { 1 };
    }
}

/// `a . b`: two accumulators of eight lanes over alternate groups of eight, then the rest one by one.
#[inline(always)]
fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    dots::<L, 1, 1>([a], [b])[0][0]
}

/// Every product of `R` rows with `T` inputs, each summed in the order of [`dot`].
#[inline(always)]
fn dots<L: Lanes, const R: usize, const T: usize>(rows: [&[f32]; R], inputs: [&[f32]; T]) -> [[f32; T]; R] {
    let width = rows[0].len();
    let rows_in_eights = rows.map(|row| &row[..width].as_chunks::<8>().0[..width / 8]);
    let inputs_in_eights = inputs.map(|input| &input[..width].as_chunks::<8>().0[..width / 8]);
    let mut even = [[L::splat(0.0); T]; R];
    let mut odd = [[L::splat(0.0); T]; R];
    let eights = width / 8;
    for pair in 0..eights / 2 {
        add_eight(&mut even, &rows_in_eights, &inputs_in_eights, 2 * pair);
        add_eight(&mut odd, &rows_in_eights, &inputs_in_eights, 2 * pair + 1);
    }
    if eights % 2 == 1 {
        add_eight(&mut even, &rows_in_eights, &inputs_in_eights, eights - 1);
    }
    let mut out = [[0.0; T]; R];
    for r in 0..R {
        for t in 0..T {
            let mut sum = (even[r][t] + odd[r][t]).sum();
            for i in eights * 8..width {
                sum += rows[r][i] * inputs[t][i];
            }
            out[r][t] = sum;
        }
    }
    out
}

/// Adds the products of one group of eight. A function, not a closure: closures are not compiled for the instruction set.
#[inline(always)]
fn add_eight<L: Lanes, const R: usize, const T: usize>(
    sums: &mut [[L; T]; R],
    rows: &[&[[f32; 8]]; R],
    inputs: &[&[[f32; 8]]; T],
    i: usize,
) {
    for r in 0..R {
        let a = L::load(&rows[r][i]);
        for t in 0..T {
            sums[r][t] = sums[r][t] + a * L::load(&inputs[t][i]);
        }
    }
}

#[inline(always)]
fn attend_heads_in<L: Lanes>(queries: &[f32], keys: &[&[f32]], sinks: &[f32], out: &mut [f32]) {
    let n_heads = sinks.len();
    let width = queries.len() / n_heads;
    let scale = 1.0 / (width as f32).sqrt();
    // `[heads, keys]`: scores, then weights.
    let mut weights = vec![0.0_f32; n_heads * keys.len()];
    let head = |h: usize| &queries[h * width..][..width];
    for (s, key) in keys.iter().enumerate() {
        let mut h = 0;
        while h < n_heads {
            if h + 4 <= n_heads {
                let four = dots::<L, 4, 1>([head(h), head(h + 1), head(h + 2), head(h + 3)], [key]);
                for (i, value) in four.iter().enumerate() {
                    weights[(h + i) * keys.len() + s] = value[0] * scale;
                }
                h += 4;
            } else {
                weights[h * keys.len() + s] = dot::<L>(head(h), key) * scale;
                h += 1;
            }
        }
    }
    for h in 0..n_heads {
        let weights = &mut weights[h * keys.len()..][..keys.len()];
        softmax_with_sink(weights, sinks[h]);
        weighted_sum::<L>(weights, keys, &mut out[h * width..][..width]);
    }
}

/// The sink enters the denominator only. One score at least, so the result is finite for finite input.
fn softmax_with_sink(scores: &mut [f32], sink: f32) {
    let largest = scores.iter().fold(sink, |a, &b| a.max(b));
    let mut sum = f64::from((sink - largest).exp());
    for score in scores.iter_mut() {
        *score = (*score - largest).exp();
        sum += f64::from(*score);
    }
    let factor = (1.0 / sum) as f32;
    for weight in scores {
        *weight *= factor;
    }
}

/// `out = sum of weight * row`, in the order of the rows.
#[inline(always)]
fn weighted_sum<L: Lanes>(weights: &[f32], rows: &[&[f32]], out: &mut [f32]) {
    const COLUMNS: usize = 64;
    let wide = out.len() / COLUMNS * COLUMNS;
    for first in (0..wide).step_by(COLUMNS) {
        let mut sums = [L::splat(0.0); COLUMNS / 8];
        for (&weight, row) in weights.iter().zip(rows) {
            let weight = L::splat(weight);
            let eights = row[first..first + COLUMNS].as_chunks::<8>().0;
            for (sum, values) in sums.iter_mut().zip(eights) {
                *sum = *sum + weight * L::load(values);
            }
        }
        for (sum, out) in sums.into_iter().zip(out[first..].chunks_exact_mut(8)) {
            sum.store(out);
        }
    }
    for column in wide..out.len() {
        out[column] = weights.iter().zip(rows).fold(0.0, |sum, (&weight, row)| sum + weight * row[column]);
    }
}

#[inline(always)]
fn index_scores_in<L: Lanes>(queries: &[f32], rows: &[f32], weights: &[f32], out: &mut [f32]) {
    let n_heads = weights.len();
    let width = queries.len() / n_heads;
    let head = |h: usize| &queries[h * width..][..width];
    for (row, out) in rows.chunks_exact(width).zip(out) {
        let mut score = 0.0;
        let mut h = 0;
        while h < n_heads {
            if h + 4 <= n_heads {
                let four = dots::<L, 4, 1>([head(h), head(h + 1), head(h + 2), head(h + 3)], [row]);
                for (i, value) in four.iter().enumerate() {
                    score += weights[h + i] * value[0].max(0.0);
                }
                h += 4;
            } else {
                score += weights[h] * dot::<L>(head(h), row).max(0.0);
                h += 1;
            }
        }
        *out = score;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                (state >> 8) as f32 / 8388608.0 - 1.0
            })
            .collect()
    }

    #[test]
    fn a_product_does_not_depend_on_its_neighbours_or_the_instruction_set() {
        for width in [8, 24, 64, 100] {
            let rows = numbers(11 * width, 1);
            let inputs = numbers(7 * width, 2);
            let mut all = vec![0.0; 77];
            products(Level::detect(), &rows, &inputs, width, &mut all);
            for (i, &value) in all.iter().enumerate() {
                let (r, t) = (i / 7, i % 7);
                let mut one = [0.0];
                products(
                    Level::Scalar,
                    &rows[r * width..][..width],
                    &inputs[t * width..][..width],
                    width,
                    &mut one,
                );
                assert_eq!(one[0].to_bits(), value.to_bits(), "width {width}, row {r}, input {t}");
            }
        }
    }

    #[test]
    fn attention_does_not_depend_on_the_instruction_set_or_on_how_heads_are_grouped() {
        let (width, n_heads, n_keys) = (136, 6, 19);
        let queries = numbers(n_heads * width, 3);
        let keys = numbers(n_keys * width, 4);
        let keys: Vec<&[f32]> = keys.chunks(width).collect();
        let sinks = numbers(n_heads, 5);
        let mut all = vec![0.0; n_heads * width];
        attend_heads(Level::detect(), &queries, &keys, &sinks, &mut all);
        for h in 0..n_heads {
            let mut one = vec![0.0; width];
            let head = h * width..(h + 1) * width;
            attend_heads(Level::Scalar, &queries[head.clone()], &keys, &sinks[h..=h], &mut one);
            assert_eq!(one, all[head]);
        }
    }

    #[test]
    fn a_very_negative_sink_leaves_plain_softmax_and_a_large_one_takes_all_weight() {
        let key = [1.0_f32; 8];
        let mut out = [0.0; 8];
        attend_heads(Level::detect(), &[0.5; 8], &[&key, &key], &[-1e30], &mut out);
        assert_eq!(out, [1.0; 8]);
        attend_heads(Level::detect(), &[0.5; 8], &[&key, &key], &[1e30], &mut out);
        assert_eq!(out, [0.0; 8]);
    }
}
