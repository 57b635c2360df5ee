//! What stands in for importance where nothing was measured: the energy of the weights themselves.
//!
//! Formats of about two bits need weights for their error. Where no calibration reached a matrix, column `c` of it
//! weighs `sum over rows of w_rc^2`. A matrix never stands in for another one: each expert has its own energy.

/// Adds up the energy of the columns of one matrix, rows at a time.
///
/// Squares of `f32` are exact in `f64` and added in the order of rows, so the result depends neither on how rows are
/// grouped into calls nor on the instruction set.
#[derive(Debug, Clone)]
pub struct WeightEnergy {
    sums: Vec<f64>,
}

impl WeightEnergy {
    /// An empty sum for a matrix of `n_columns` columns.
    pub fn new(n_columns: usize) -> Self {
        Self { sums: vec![0.0; n_columns] }
    }

    /// The energy of a whole matrix `[rows, n_columns]`; `None` as in [`WeightEnergy::finish`].
    pub fn of_matrix(weights: &[f32], n_columns: usize) -> Option<Vec<f32>> {
        let mut energy = Self::new(n_columns);
        energy.add_rows(weights);
        energy.finish()
    }

    /// Adds whole rows of finite weights, `[any number, n_columns]`.
    ///
    /// # Panics
    /// If `rows` is no whole number of rows: lengths come from a checked plan.
    pub fn add_rows(&mut self, rows: &[f32]) {
        let n_columns = self.sums.len();
        assert!(n_columns > 0 && rows.len().is_multiple_of(n_columns), "rows have {n_columns} columns");
        for row in rows.chunks_exact(n_columns) {
            for (sum, &weight) in self.sums.iter_mut().zip(row) {
                *sum += f64::from(weight) * f64::from(weight);
            }
        }
    }

    /// The energy of each column, times the power of two that brings the largest into `[1, 2)`.
    ///
    /// The factor changes no quantizer's choice and keeps the squares of tiny weights (1e-30 and less) from
    /// vanishing in `f32`. `None` if every weight is 0: then no column is more important than another.
    pub fn finish(self) -> Option<Vec<f32>> {
        let largest = self.sums.iter().copied().fold(0.0_f64, f64::max);
        if largest == 0.0 || !largest.is_finite() {
            return None;
        }
        // Squares of f32 lie within 2^-298 and 2^256, so neither this power nor its product leaves f64's range.
        let factor = 2.0_f64.powi(-exponent(largest));
        Some(self.sums.into_iter().map(|sum| (sum * factor) as f32).map(below_two).collect())
    }
}

/// The power of two at or below a normal positive number.
fn exponent(value: f64) -> i32 {
    ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

/// Undoes the rounding of a sum just below 2 up to 2.
fn below_two(value: f32) -> f32 {
    value.min(2.0_f32.next_down())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn energy_is_the_sum_of_squares_of_each_column_up_to_a_power_of_two() {
        let weights = [1.0, -2.0, 0.0, 3.0, 0.5, 0.0];
        assert_eq!(WeightEnergy::of_matrix(&weights, 3), Some(vec![1.25, 0.53125, 0.0]));
        let scaled: Vec<f32> = weights.iter().map(|w| w * 1024.0).collect();
        assert_eq!(WeightEnergy::of_matrix(&scaled, 3), WeightEnergy::of_matrix(&weights, 3));
    }

    #[test]
    fn grouping_rows_changes_no_bit() {
        let weights: Vec<f32> = (0..70 * 8).map(|i| ((i * 37 % 101) as f32 - 50.0) / 77.0).collect();
        let whole = WeightEnergy::of_matrix(&weights, 8);
        for n_rows in [1, 3, 64] {
            let mut energy = WeightEnergy::new(8);
            weights.chunks(8 * n_rows).for_each(|rows| energy.add_rows(rows));
            assert_eq!(energy.finish(), whole);
        }
    }

    #[test]
    fn tiny_and_huge_weights_stay_finite_and_above_zero() {
        for weight in [f32::from_bits(1), 1e-38, 1e-30, 1.0, f32::MAX] {
            let energy = WeightEnergy::of_matrix(&[weight, 0.0, weight, -0.0], 2).unwrap();
            assert!((1.0..2.0).contains(&energy[0]), "{weight}: {energy:?}");
            assert_eq!(energy[1], 0.0);
        }
        let energy = WeightEnergy::of_matrix(&[1.0, 1.0_f32.next_down()], 1).unwrap();
        assert!(energy[0] < 2.0, "{energy:?}");
    }

    #[test]
    fn a_matrix_of_zeros_has_no_energy() {
        assert_eq!(WeightEnergy::of_matrix(&[0.0, -0.0, 0.0, 0.0], 2), None);
    }
}
