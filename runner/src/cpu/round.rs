//! The rounding of activations that the official code simulates, section 7: exact to the bit.

/// Channels that share an FP8 scale.
const FP8_GROUP: usize = 64;
/// Values that share an FP4 scale.
const FP4_GROUP: usize = 32;
const FP8_LARGEST: f32 = 448.0;
const FP4_LARGEST: f32 = 6.0;

/// Rounds each group of 64 values to FP8 E4M3 with a power-of-two scale.
pub(super) fn round_to_fp8(values: &mut [f32]) {
    for group in values.chunks_mut(FP8_GROUP) {
        let scale = power_of_two_above(largest(group).max(1e-4) / FP8_LARGEST);
        for value in group {
            *value = nearest_e4m3((*value / scale).clamp(-FP8_LARGEST, FP8_LARGEST)) * scale;
        }
    }
}

/// Rotates by the normalised Walsh-Hadamard matrix, then rounds each group of 32 values to FP4 E2M1
/// with a power-of-two scale. The number of values must be a power of two.
pub(super) fn rotate_and_round_to_fp4(values: &mut [f32]) {
    hadamard(values);
    for group in values.chunks_mut(FP4_GROUP) {
        let smallest_allowed = FP4_LARGEST * f32::MIN_POSITIVE;
        let scale = power_of_two_above(largest(group).max(smallest_allowed) / FP4_LARGEST);
        for value in group {
            *value = nearest_e2m1((*value / scale).clamp(-FP4_LARGEST, FP4_LARGEST)) * scale;
        }
    }
}

fn largest(group: &[f32]) -> f32 {
    group.iter().fold(0.0, |a, b| a.max(b.abs()))
}

/// `2^ceil(log2(x))` of a positive normal number, from its bits: exact where a logarithm is not.
fn power_of_two_above(x: f32) -> f32 {
    let bits = x.to_bits();
    let exponent = (bits >> 23) + u32::from(bits & 0x007f_ffff != 0);
    f32::from_bits(exponent << 23)
}

/// Nearest E4M3 value, ties to even, for a magnitude up to 448.
fn nearest_e4m3(x: f32) -> f32 {
    // Three mantissa bits: the step is 2^-3 of the power of two below, and 2^-9 below 2^-6.
    let exponent = ((x.abs().to_bits() >> 23) as i32 - 127).max(-6);
    let step = f32::from_bits(((exponent - 3 + 127) as u32) << 23);
    (x / step).round_ties_even() * step
}

/// Nearest E2M1 value (0, 0.5, 1, 1.5, 2, 3, 4, 6), ties to the even code, for a magnitude up to 6.
fn nearest_e2m1(x: f32) -> f32 {
    let step = match x.abs() {
        a if a < 2.0 => 0.5,
        a if a < 4.0 => 1.0,
        _ => 2.0,
    };
    (x / step).round_ties_even() * step
}

/// Multiplies by `H[i][j] = (-1)^popcount(i & j) / sqrt(n)`.
fn hadamard(values: &mut [f32]) {
    sum_and_subtract(values);
    let factor = (1.0 / (values.len() as f64).sqrt()) as f32;
    for value in values {
        *value *= factor;
    }
}

/// Multiplies by `H[i][j] = (-1)^popcount(i & j)`.
pub(super) fn sum_and_subtract(values: &mut [f32]) {
    let mut half = 1;
    while half < values.len() {
        for pair in values.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fp8_value_is_kept_and_ties_go_to_the_even_code() {
        for code in 0..=0x7e_u32 {
            let (exponent, mantissa) = (code >> 3, code & 7);
            let value = if exponent == 0 {
                mantissa as f32 * 2.0_f32.powi(-9)
            } else {
                (1.0 + mantissa as f32 / 8.0) * 2.0_f32.powi(exponent as i32 - 7)
            };
            assert_eq!(nearest_e4m3(value), value);
            assert_eq!(nearest_e4m3(-value), -value);
        }
        assert_eq!(nearest_e4m3(17.0), 16.0);
        assert_eq!(nearest_e4m3(19.0), 20.0);
        assert_eq!(nearest_e4m3(2.0_f32.powi(-10)), 0.0);
        assert_eq!(nearest_e4m3(3.0 * 2.0_f32.powi(-10)), 2.0_f32.powi(-8));
    }

    #[test]
    fn fp4_ties_go_to_the_even_code() {
        let halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        assert_eq!(halfway.map(nearest_e2m1), [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]);
        for value in [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] {
            assert_eq!(nearest_e2m1(value), value);
        }
    }

    #[test]
    fn scales_are_the_power_of_two_at_or_above() {
        assert_eq!(power_of_two_above(1.0), 1.0);
        assert_eq!(power_of_two_above(1.0 + f32::EPSILON), 2.0);
        assert_eq!(power_of_two_above(0.26), 0.5);
    }

    #[test]
    fn the_hadamard_matrix_is_its_own_inverse_and_in_natural_order() {
        let mut values = [0.0_f32; 128];
        values[5] = 1.0;
        hadamard(&mut values);
        let scale = 1.0 / 128.0_f32.sqrt();
        for (i, &value) in values.iter().enumerate() {
            let sign = if (i & 5_usize).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            assert!((value - sign * scale).abs() < 1e-8);
        }
        hadamard(&mut values);
        assert!((values[5] - 1.0).abs() < 1e-6 && values[4].abs() < 1e-6);
    }
}
