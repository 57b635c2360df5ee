//! Comparing two files: how far the importances that a quantizer would see differ.

use std::collections::HashSet;

use crate::Imatrix;
use crate::entry::{Entry, State};

/// How one entry differs. Computed over the means of matrices seen in both files.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct EntryDifference {
    /// The entry.
    pub name: String,
    /// Cosine of the two rows of means; `None` if no matrix is seen in both or the shapes differ.
    pub cosine: Option<f64>,
    /// Sum of the first row of means over that of the second.
    pub mean_ratio: Option<f64>,
    /// Largest ratio of two means, either way round, among columns where both are above 0.
    pub max_ratio: Option<f64>,
    /// Columns that are 0 in one file and not in the other.
    pub n_zero_in_one: usize,
    /// Matrices seen only in the first file.
    pub seen_only_in_first: usize,
    /// Matrices seen only in the second file.
    pub seen_only_in_second: usize,
    /// The shapes, where they differ: values in the first and in the second file.
    pub shapes_differ: Option<(usize, usize)>,
}

/// How two files differ.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Difference {
    /// Entries that both have, in the first file's order.
    pub entries: Vec<EntryDifference>,
    /// Names that only the first has.
    pub only_in_first: Vec<String>,
    /// Names that only the second has.
    pub only_in_second: Vec<String>,
}

/// Compares `second` with `first`, entry by entry.
pub(crate) fn diff(first: &Imatrix, second: &Imatrix) -> Difference {
    let mut result =
        Difference { entries: Vec::new(), only_in_first: Vec::new(), only_in_second: Vec::new() };
    let mut names = HashSet::new();
    for entry in first.entries() {
        names.insert(entry.name());
        match second.entry(entry.name()) {
            Some(other) => result.entries.push(compare(entry, other)),
            None => result.only_in_first.push(entry.name().to_owned()),
        }
    }
    let others = second.entries().iter().map(Entry::name);
    result.only_in_second = others.filter(|name| !names.contains(name)).map(str::to_owned).collect();
    result
}

fn compare(first: &Entry, second: &Entry) -> EntryDifference {
    let mut result = EntryDifference {
        name: first.name.clone(),
        cosine: None,
        mean_ratio: None,
        max_ratio: None,
        n_zero_in_one: 0,
        seen_only_in_first: 0,
        seen_only_in_second: 0,
        shapes_differ: None,
    };
    let columns_differ = matches!((first.n_columns, second.n_columns), (Some(a), Some(b)) if a != b);
    if first.n_values != second.n_values || columns_differ {
        result.shapes_differ = Some((first.n_values, second.n_values));
        return result;
    }
    let width = first.n_columns.or(second.n_columns).unwrap_or(first.n_values).max(1);
    let (mut dot, mut squares_first, mut squares_second) = (0.0, 0.0, 0.0);
    let (mut sum_first, mut sum_second) = (0.0, 0.0);
    for expert_index in 0..first.n_values / width {
        match (first.state(expert_index, width), second.state(expert_index, width)) {
            (State::Seen(a), State::Seen(b)) => {
                for (a, b) in a.into_iter().map(f64::from).zip(b.into_iter().map(f64::from)) {
                    sum_first += a;
                    sum_second += b;
                    dot += a * b;
                    squares_first += a * a;
                    squares_second += b * b;
                    if a > 0.0 && b > 0.0 {
                        let ratio = (a / b).max(b / a);
                        result.max_ratio = Some(result.max_ratio.unwrap_or(1.0).max(ratio));
                    } else if a != b {
                        result.n_zero_in_one += 1;
                    }
                }
            }
            (State::Seen(_), _) => result.seen_only_in_first += 1,
            (_, State::Seen(_)) => result.seen_only_in_second += 1,
            _ => {}
        }
    }
    if squares_first > 0.0 && squares_second > 0.0 {
        result.mean_ratio = Some(sum_first / sum_second);
        result.cosine = Some((dot / (squares_first * squares_second).sqrt()).min(1.0));
    }
    result
}

impl Imatrix {
    /// Compares `other` with this file, entry by entry.
    pub fn diff(&self, other: &Self) -> Difference {
        diff(self, other)
    }
}
