//! What stands in for importance where nothing was measured: the energy of the weights themselves.
//!
//! Formats of about two bits need weights for their error. Where no calibration reached a matrix, column `c` of it
//! weighs `sum over rows of w_rc^2`. A matrix never stands in for another one: each expert has its own energy.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::importance::Found;

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

/// Why nothing was measured for a matrix.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// The source has no entry for the tensor, or there is no source.
    NoEntry,
    /// The calibration never reached this expert.
    Unseen,
    /// The entry cannot be used, and why.
    Unusable(String),
}

/// Which weights of the error a matrix is quantized with.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "kind", content = "because", rename_all = "snake_case")]
pub enum Origin {
    /// What the calibration measured.
    Measured,
    /// The energy of the matrix's own weights.
    WeightEnergy(Missing),
    /// None: every column alike.
    Flat(Missing),
}

/// The importance chosen for one matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen<'a> {
    /// For [`crate::block::Guide::importance`]: finite, not negative, not all zero; `None`: every column alike.
    pub values: Option<Cow<'a, [f32]>>,
    /// Where they come from.
    pub origin: Origin,
}

impl<'a> Chosen<'a> {
    /// Takes what was measured, else the fallback.
    ///
    /// `energy` is asked only where nothing was measured and gives [`WeightEnergy::finish`] of the matrix; pass
    /// `None` for a format that does without importance, whose bytes are then those of a run without calibration.
    pub fn new(found: Found<'a>, energy: Option<impl FnOnce() -> Option<Vec<f32>>>) -> Self {
        let missing = match found {
            Found::Values(values) => return Self { values: Some(values), origin: Origin::Measured },
            Found::NoEntry => Missing::NoEntry,
            Found::Unseen => Missing::Unseen,
            Found::Unusable(problem) => Missing::Unusable(problem),
        };
        match energy.and_then(|energy| energy()) {
            Some(values) => Self { values: Some(Cow::Owned(values)), origin: Origin::WeightEnergy(missing) },
            None => Self { values: None, origin: Origin::Flat(missing) },
        }
    }
}

/// Which matrices of a build were quantized with which importance. The same whatever the order of records.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct ImportanceRecord {
    /// By GGUF name.
    pub tensors: BTreeMap<String, TensorRecord>,
}

/// Which matrices of one tensor were quantized with which importance.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct TensorRecord {
    /// Matrices with measured importance.
    pub n_measured: usize,
    /// Experts that took the energy of their weights.
    pub weight_energy: BTreeSet<usize>,
    /// Experts whose columns all counted alike.
    pub flat: BTreeSet<usize>,
    /// Why, for the experts that took either fallback.
    pub because: BTreeMap<usize, Missing>,
}

impl ImportanceRecord {
    /// Notes the choice for one matrix, once.
    pub fn note(&mut self, tensor: &str, expert_index: usize, origin: &Origin) {
        let record = self.tensors.entry(tensor.to_owned()).or_default();
        let (experts, missing) = match origin {
            Origin::Measured => {
                record.n_measured += 1;
                return;
            }
            Origin::WeightEnergy(missing) => (&mut record.weight_energy, missing),
            Origin::Flat(missing) => (&mut record.flat, missing),
        };
        experts.insert(expert_index);
        record.because.insert(expert_index, missing.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type NoEnergy = fn() -> Option<Vec<f32>>;

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

    #[test]
    fn measured_values_win_and_the_weights_are_not_read() {
        let values = [1.0, 2.0];
        let chosen =
            Chosen::new(Found::Values(values.as_slice().into()), Some(|| panic!("asked for the energy")));
        assert_eq!(chosen, Chosen { values: Some(values.as_slice().into()), origin: Origin::Measured });
    }

    #[test]
    fn each_reason_leads_to_the_fallback_and_is_recorded() {
        let energy = || WeightEnergy::of_matrix(&[1.0, 2.0], 2);
        let zeros = || WeightEnergy::of_matrix(&[0.0, 0.0], 2);
        let unusable = || Found::Unusable("column 1 is NaN".to_owned());
        let mut record = ImportanceRecord::default();
        let chosen = Chosen::new(Found::Unseen, Some(energy));
        assert_eq!(chosen.values.as_deref(), Some([0.25, 1.0].as_slice()));
        record.note("gate", 3, &chosen.origin);
        record.note("gate", 1, &Chosen::new(unusable(), Some(energy)).origin);
        record.note("gate", 2, &Chosen::new(Found::NoEntry, Some(zeros)).origin);
        record.note("gate", 0, &Origin::Measured);
        let without = Chosen::new(Found::Unseen, None::<NoEnergy>);
        assert_eq!(without, Chosen { values: None, origin: Origin::Flat(Missing::Unseen) });
        let gate = &record.tensors["gate"];
        assert_eq!(gate.n_measured, 1);
        assert_eq!(gate.weight_energy, [1, 3].into());
        assert_eq!(gate.flat, [2].into());
        assert_eq!(gate.because[&1], Missing::Unusable("column 1 is NaN".to_owned()));
        assert_eq!(gate.because[&2], Missing::NoEntry);
    }
}
