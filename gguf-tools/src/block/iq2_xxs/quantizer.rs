//! Rows to IQ2_XXS blocks: weights of the error, range of the numbers, layout of the bytes.
//!
//! A gain on `d` is free to choose after the search: the best codes for `c x` are those for `x`, with `c d`.

use std::cell::RefCell;

use super::search::{self, BLOCK_VALUES, Found, Workspace};
use crate::block::{Guide, Objective, RowQuantizer};
use crate::simd::{Lanes, Level, Scalar, to_array};

const BLOCK_BYTES: usize = 66;
/// Below this every value of a block decodes to zero, whatever its codes: `d` is under the smallest half.
const SMALLEST: f32 = 1e-12;
/// Least weight of a value relative to the largest of its block: values without any still get sane codes.
const LEAST_WEIGHT: f32 = 1.0 / 16_777_216.0;

/// Without a factor given, `d` is raised until this much of the size of the weights is left (see
/// [`Found::alignment`]): models lose more by smaller weights than by the error that it costs.
const ALIGNMENT: f32 = 0.98;
/// Never by more than this.
const LARGEST_GAIN: f32 = 1.25;

thread_local! {
    /// One a thread: it is larger than a row, so that making it for each would be felt.
    static WORKSPACE: RefCell<Workspace> = RefCell::new(Workspace::new());
}

/// Quantizes the rows of one matrix.
pub(super) struct Quantizer {
    /// Importance of the columns, at most 1 in every super-block; `None`: all alike.
    column_weights: Option<Vec<f32>>,
    /// Weights also follow the values, as in ggml.
    by_value: bool,
    /// Factor on `d`; `None`: each super-block's own.
    scale_gain: Option<f32>,
    level: Level,
}

impl Quantizer {
    pub(super) fn new(guide: Guide<'_>) -> Self {
        let importance = guide.importance.filter(|_| guide.objective != Objective::Flat);
        Self {
            column_weights: importance.map(column_weights),
            by_value: importance.is_some() && guide.objective == Objective::Ggml,
            scale_gain: guide.scale_gain,
            level: guide.level,
        }
    }

    #[inline(always)]
    fn quantize<L: Lanes>(&self, row: &[f32], blocks: &mut [u8], work: &mut Workspace) {
        let (mut values, mut weights) = ([0.0; BLOCK_VALUES], [1.0; BLOCK_VALUES]);
        for (index, (row, block)) in
            row.chunks_exact(BLOCK_VALUES).zip(blocks.chunks_exact_mut(BLOCK_BYTES)).enumerate()
        {
            block.fill(0);
            let Some(unit) = to_order_one::<L>(row, &mut values) else { continue };
            if let Some(columns) = &self.column_weights {
                weights.copy_from_slice(&columns[index * BLOCK_VALUES..][..BLOCK_VALUES]);
                if self.by_value {
                    weigh_by_value::<L>(&values, &mut weights);
                }
            }
            let stored = |d: f32| search::to_f16(d * unit);
            let round_d = |d: f32| stored(d).to_f32() / unit;
            if let Some(found) = search::search::<L>(&values, &weights, work, round_d) {
                let gain = self.scale_gain.unwrap_or((ALIGNMENT / found.alignment).clamp(1.0, LARGEST_GAIN));
                write(&found, stored(found.d * gain), block);
            }
        }
    }
}

impl RowQuantizer for Quantizer {
    /// # Panics
    /// If the row is not whole blocks, or its length is not that of the importance or does not belong to `blocks`.
    fn quantize_row(&self, row: &[f32], blocks: &mut [u8]) {
        assert_eq!(row.len() % BLOCK_VALUES, 0, "whole blocks");
        assert_eq!(row.len() / BLOCK_VALUES * BLOCK_BYTES, blocks.len(), "bytes of the row");
        if let Some(columns) = &self.column_weights {
            assert_eq!(columns.len(), row.len(), "one importance a column");
        }
        WORKSPACE.with_borrow_mut(|work| match self.level {
            Level::Scalar => self.quantize::<Scalar>(row, blocks, work),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 | Level::Avx512 => avx2::quantize(self, row, blocks, work),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => self.quantize::<crate::simd::Neon>(row, blocks, work),
        });
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    #![expect(unsafe_code, reason = "enters code compiled for AVX2")]

    use super::{Quantizer, Workspace};
    use crate::simd::Avx2;

    pub(super) fn quantize(quantizer: &Quantizer, row: &[f32], blocks: &mut [u8], work: &mut Workspace) {
        #[target_feature(enable = "avx2,f16c")]
        fn enter(quantizer: &Quantizer, row: &[f32], blocks: &mut [u8], work: &mut Workspace) {
            quantizer.quantize::<Avx2>(row, blocks, work);
        }
        // SAFETY: the levels are only made where the machine has AVX2 and F16C.
        unsafe { enter(quantizer, row, blocks, work) }
    }
}

/// Importance relative to the largest of each super-block; flat where a super-block has none.
fn column_weights(importance: &[f32]) -> Vec<f32> {
    let mut weights = importance.to_vec();
    for block in weights.chunks_mut(BLOCK_VALUES) {
        let most = block.iter().copied().fold(0.0, f32::max);
        for weight in block {
            *weight = if most > 0.0 { (*weight / most).max(LEAST_WEIGHT) } else { 1.0 };
        }
    }
    weights
}

/// Scales a super-block by a power of two so that its largest magnitude is between 1 and 4, and returns
/// the power to go back; `None` if the block decodes to zeros whatever is stored.
#[inline(always)]
fn to_order_one<L: Lanes>(row: &[f32], values: &mut [f32; BLOCK_VALUES]) -> Option<f32> {
    let mut most = L::splat(0.0);
    for x in row.chunks_exact(8) {
        most = most.max(L::load(x).abs());
    }
    let most = to_array(most).into_iter().fold(0.0, f32::max);
    if most < SMALLEST {
        return None;
    }
    let exponent = (most.to_bits() >> 23).min(253);
    let factor = L::splat(f32::from_bits((254 - exponent) << 23));
    for (x, value) in row.chunks_exact(8).zip(values.chunks_exact_mut(8)) {
        (L::load(x) * factor).store(value);
    }
    Some(f32::from_bits(exponent << 23))
}

/// Multiplies weights by `sqrt(mean of x^2 + x^2)`.
#[inline(always)]
fn weigh_by_value<L: Lanes>(values: &[f32; BLOCK_VALUES], weights: &mut [f32; BLOCK_VALUES]) {
    let mut energy = L::splat(0.0);
    for x in values.chunks_exact(8) {
        energy = energy + L::load(x) * L::load(x);
    }
    let mean = L::splat(energy.sum() / BLOCK_VALUES as f32);
    for (x, weight) in values.chunks_exact(8).zip(weights.chunks_exact_mut(8)) {
        let x = L::load(x);
        (L::load(weight) * (mean + x * x).sqrt()).store(weight);
    }
}

/// Lays out one block.
pub(super) fn write(found: &Found, d: half::f16, block: &mut [u8]) {
    if d.to_f32() == 0.0 {
        return;
    }
    block[..2].copy_from_slice(&d.to_le_bytes());
    for (index, group) in block[2..].chunks_exact_mut(8).enumerate() {
        let signs = found.signs[index];
        let word =
            (0..4).fold(found.scale_indices[index] << 28, |word, k| word | u32::from(signs[k]) << (7 * k));
        group[..4].copy_from_slice(&found.entries[index]);
        group[4..].copy_from_slice(&word.to_le_bytes());
    }
}
