//! Rows in half precision that come one after the other, in memory that does not move as they grow.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Rows of a chunk. A vector of all rows would be copied whenever it grows, and hold both copies meanwhile; of short chunks
/// only the last has room for more, and an expert has one such.
const CHUNK_ROWS: usize = 32;

/// Rows `[n, width]`, each value within the range of `f16`.
#[derive(Debug, Clone)]
pub(super) struct HalfRows {
    width: usize,
    /// Of `CHUNK_ROWS` rows each, but the last.
    chunks: Vec<Vec<f16>>,
}

impl HalfRows {
    pub(super) fn new(width: usize) -> Self {
        Self { width, chunks: Vec::new() }
    }

    /// The most bytes that `n_rows` rows in so many of these take.
    pub(super) fn memory_bytes(width: u64, n_rows: u64, n_parts: u64) -> u64 {
        2 * width * (n_rows + n_parts.min(n_rows) * (CHUNK_ROWS as u64 - 1))
    }

    /// Number of rows.
    pub(super) fn len(&self) -> usize {
        self.chunks.last().map_or(0, |last| (self.chunks.len() - 1) * CHUNK_ROWS + last.len() / self.width)
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Adds a row of `width` values; what `f16` cannot hold becomes its largest.
    pub(super) fn push(&mut self, values: impl Iterator<Item = f32>) {
        let bound = f16::MAX.to_f32();
        let row: Vec<f32> = values.map(|v| v.clamp(-bound, bound)).collect();
        debug_assert_eq!(row.len(), self.width, "a row");
        let full = CHUNK_ROWS * self.width;
        if self.chunks.last().is_none_or(|last| last.len() == full) {
            self.chunks.push(Vec::with_capacity(full));
        }
        if let Some(last) = self.chunks.last_mut() {
            let start = last.len();
            last.resize(start + row.len(), f16::ZERO);
            last[start..].convert_from_f32_slice(&row);
        }
    }

    /// Row `index`, widened.
    pub(super) fn row(&self, index: usize) -> impl ExactSizeIterator<Item = f32> + Clone + '_ {
        let first = index % CHUNK_ROWS * self.width;
        self.chunks[index / CHUNK_ROWS][first..first + self.width].iter().map(|x| x.to_f32())
    }

    /// All rows in turn, widened.
    pub(super) fn rows(&self) -> impl Iterator<Item = impl ExactSizeIterator<Item = f32> + Clone + '_> + '_ {
        (0..self.len()).map(|index| self.row(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_wherever_chunks_end() {
        let value = |row: usize, i: usize| (row * 7 + i) as f32 - 100.0;
        let mut rows = HalfRows::new(3);
        assert!(rows.is_empty());
        for row in 0..=2 * CHUNK_ROWS {
            rows.push((0..3).map(|i| value(row, i)));
            assert_eq!(rows.len(), row + 1);
        }
        for (row, found) in rows.rows().enumerate() {
            assert!(found.eq((0..3).map(|i| value(row, i))), "row {row}");
        }
        assert!(rows.row(CHUNK_ROWS).eq((0..3).map(|i| value(CHUNK_ROWS, i))));
    }

    #[test]
    fn values_beyond_halves_become_the_largest() {
        let mut rows = HalfRows::new(2);
        rows.push([1e9, -1e9].into_iter());
        assert!(rows.row(0).eq([65504.0, -65504.0]));
    }
}
