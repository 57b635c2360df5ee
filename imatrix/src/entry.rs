//! One entry: where its values lie, what they mean, and which of them can be used.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::error::Problem;

/// Values read at once while all of them are checked.
const CHECK_STEP: usize = 1 << 16;

/// Problems kept for one file; a file of nothing but NaN must not fill the memory.
pub(crate) const MOST_PROBLEMS: usize = 1000;

/// Bytes that values are read from: the file itself, so that only what is asked for occupies memory.
#[derive(Debug)]
pub(crate) enum Bytes {
    File(File),
    Memory(Vec<u8>),
}

impl Bytes {
    pub(crate) fn n_bytes(&self) -> io::Result<u64> {
        match self {
            Self::File(file) => Ok(file.metadata()?.len()),
            Self::Memory(bytes) => Ok(bytes.len() as u64),
        }
    }

    pub(crate) fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File(file) => file.read_exact_at(into, offset),
            Self::Memory(bytes) => {
                let part = usize::try_from(offset)
                    .ok()
                    .and_then(|start| bytes.get(start..start.checked_add(into.len())?))
                    .ok_or(io::ErrorKind::UnexpectedEof)?;
                into.copy_from_slice(part);
                Ok(())
            }
        }
    }

    /// `n` little-endian `f32` at `offset`; the caller knows that they are there.
    pub(crate) fn read_f32s(&self, offset: u64, n: usize) -> io::Result<Vec<f32>> {
        let mut bytes = vec![0; n * 4];
        self.read_exact_at(offset, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

/// What an entry's counts count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CountUnit {
    /// Calls of the collector, about one a chunk (legacy files).
    Calls,
    /// Rows of activations (GGUF files).
    Rows,
}

/// The statistics of one weight tensor, as its file holds them.
#[derive(Debug, Clone)]
pub struct Entry {
    pub(crate) name: String,
    pub(crate) n_values: usize,
    /// Columns of one matrix; `None` where the file does not say.
    pub(crate) n_columns: Option<usize>,
    /// One for each matrix, or a single one for all.
    pub(crate) counts: Vec<f64>,
    pub(crate) unit: CountUnit,
    pub(crate) bytes: Arc<Bytes>,
    pub(crate) offset: u64,
}

/// What is known about one matrix.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum State {
    /// Means of the squared inputs.
    Seen(Vec<f32>),
    Unseen,
    Unusable(String),
}

impl Entry {
    /// An entry made in memory: sums of squares `[n_experts, n_columns]` over `counts` rows of each expert.
    ///
    /// # Panics
    /// If there is not one count for each `n_columns` sums: they come from a collector that counted both.
    pub fn from_sums(name: impl Into<String>, n_columns: usize, sums: &[f32], row_counts: Vec<f64>) -> Self {
        assert_eq!(
            Some(sums.len()),
            row_counts.len().checked_mul(n_columns),
            "an entry has one count for each matrix of {n_columns} columns"
        );
        Self::in_memory(name.into(), Some(n_columns), sums, row_counts, CountUnit::Rows)
    }

    pub(crate) fn in_memory(
        name: String,
        n_columns: Option<usize>,
        sums: &[f32],
        counts: Vec<f64>,
        unit: CountUnit,
    ) -> Self {
        let bytes = sums.iter().flat_map(|v| v.to_le_bytes()).collect();
        let bytes = Arc::new(Bytes::Memory(bytes));
        Self { name, n_values: sums.len(), n_columns, counts, unit, bytes, offset: 0 }
    }

    /// The tensor's name: GGUF's, a checkpoint's, or one of those with `.expert.E` appended.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Values in the entry: matrices times columns.
    pub fn n_values(&self) -> usize {
        self.n_values
    }

    /// Columns of one matrix; `None` where the file does not say.
    pub fn n_columns(&self) -> Option<usize> {
        self.n_columns
    }

    /// How often each matrix was reached, or one number for all of them.
    pub fn counts(&self) -> &[f64] {
        &self.counts
    }

    /// What [`Entry::counts`] counts.
    pub fn count_unit(&self) -> CountUnit {
        self.unit
    }

    /// Matrices and their columns as far as known: an entry of unknown width is one wide matrix.
    pub(crate) fn shape(&self) -> (usize, usize) {
        let n_columns = self.n_columns.unwrap_or(self.n_values).max(1);
        (self.n_values / n_columns, n_columns)
    }

    pub(crate) fn count(&self, expert_index: usize) -> f64 {
        *self.counts.get(expert_index).unwrap_or(&self.counts[0])
    }

    /// Whether the file counted this very matrix, so that a mean of exactly 1 is a measurement.
    pub(crate) fn counts_each_matrix(&self, n_columns: usize) -> bool {
        self.unit == CountUnit::Rows && self.counts.len().checked_mul(n_columns) == Some(self.n_values)
    }

    /// The stored values of a part of the entry: sums, not means.
    pub(crate) fn read(&self, range: Range<usize>) -> io::Result<Vec<f32>> {
        self.bytes.read_f32s(self.offset + 4 * range.start as u64, range.len())
    }

    /// The stored values of one matrix.
    pub(crate) fn read_matrix(&self, expert_index: usize, n_columns: usize) -> io::Result<Vec<f32>> {
        self.read(expert_index * n_columns..(expert_index + 1) * n_columns)
    }

    /// What is known about matrix `expert_index` of `n_columns` columns; it lies within the entry.
    ///
    /// Mean = sum / count. A matrix of zeros was never reached. So was one of exactly 1 everywhere in a file that does
    /// not count each matrix: collectors write 1 there so that older quantizers do not erase the expert.
    pub(crate) fn state(&self, expert_index: usize, n_columns: usize) -> State {
        let mut values = match self.read_matrix(expert_index, n_columns) {
            Ok(values) => values,
            Err(error) => return State::Unusable(format!("cannot be read from its file: {error}")),
        };
        let count = self.count(expert_index);
        if !usable_count(count) {
            return State::Unusable(format!("its count is {count}, expected {EXPECTED_COUNT}"));
        }
        if let Some(column) = values.iter().position(|&v| !usable(v)) {
            return State::Unusable(format!("column {column} is {}, expected {EXPECTED}", values[column]));
        }
        let Some(column) = values.iter().position(|&v| v > 0.0) else { return State::Unseen };
        if count == 0.0 {
            return State::Unusable(format!("its count is 0 but column {column} is {}", values[column]));
        }
        if count != 1.0 {
            for value in &mut values {
                *value = (f64::from(*value) / count) as f32;
            }
        }
        if let Some(column) = values.iter().position(|v| v.is_infinite()) {
            return State::Unusable(format!("the mean of column {column} is infinite: its count is {count}"));
        }
        let marked_unseen = !self.counts_each_matrix(n_columns) && values.iter().all(|&v| v == 1.0);
        if marked_unseen || values.iter().all(|&v| v == 0.0) { State::Unseen } else { State::Seen(values) }
    }

    /// Every count and value that cannot be used, until `problems` is full.
    pub(crate) fn check(&self, problems: &mut Vec<Problem>) -> io::Result<()> {
        let (_, n_columns) = self.shape();
        let mut note = |expert: Option<usize>, column: Option<usize>, found: String, expected: &str| {
            if problems.len() < MOST_PROBLEMS {
                problems.push(Problem { expert, column, ..Problem::of_entry(&*self.name, found, expected) });
            }
        };
        for (index, &count) in self.counts.iter().enumerate().filter(|(_, count)| !usable_count(**count)) {
            let expert = (self.counts.len() > 1).then_some(index);
            note(expert, None, format!("a count of {count}"), EXPECTED_COUNT);
        }
        for start in (0..self.n_values).step_by(CHECK_STEP) {
            let values = self.read(start..self.n_values.min(start + CHECK_STEP))?;
            for (index, &value) in (start..).zip(&values) {
                let never_counted = || value > 0.0 && self.count(index / n_columns) == 0.0;
                if usable(value) && !never_counted() {
                    continue;
                }
                let (expert, column) = match self.n_columns {
                    Some(n) => (Some(index / n), index % n),
                    None => (None, index),
                };
                let expected = if usable(value) { "0 where the count is 0" } else { EXPECTED };
                note(expert, Some(column), value.to_string(), expected);
            }
        }
        Ok(())
    }
}

const EXPECTED: &str = "a finite value that is not negative";
const EXPECTED_COUNT: &str = "a finite count that is not negative";

fn usable(value: f32) -> bool {
    value.is_finite() && value >= 0.0
}

fn usable_count(count: f64) -> bool {
    count.is_finite() && count >= 0.0
}
