//! Finding the statistics of a matrix of the model under the names that collectors use.

use std::borrow::Cow;

use gguf_tools::importance::{Found, ImportanceSource, Matrix, Provenance};

use crate::Imatrix;
use crate::entry::{Entry, State};

/// Where an entry holds a matrix, or why it does not fit.
pub(crate) enum Place<'a> {
    At { entry: &'a Entry, index_in_entry: usize },
    Misfit { entry: &'a Entry, problem: String },
}

impl Imatrix {
    /// The first entry that names `matrix`: for each of the GGUF name and the checkpoint's name in turn
    /// `NAME.expert.E`, `NAME.expert_E` and `NAME`.
    pub(crate) fn place(&self, matrix: &Matrix<'_>) -> Option<Place<'_>> {
        let names = [Some((matrix.tensor, false)), matrix.source.map(|name| (name, true))];
        for (name, is_single) in names.into_iter().flatten() {
            if matrix.n_experts > 1 {
                let of_one = [".expert.", ".expert_"]
                    .into_iter()
                    .find_map(|infix| self.entry(&format!("{name}{infix}{}", matrix.expert_index)));
                if let Some(entry) = of_one {
                    return Some(fit(entry, 0, 1, matrix.n_columns));
                }
            }
            if let Some(entry) = self.entry(name) {
                // The checkpoint names each expert's matrix by itself, unless the entry is plainly a stack.
                let single = is_single && entry.n_values == matrix.n_columns;
                let (index, n_experts) =
                    if single { (0, 1) } else { (matrix.expert_index, matrix.n_experts) };
                return Some(fit(entry, index, n_experts, matrix.n_columns));
            }
        }
        None
    }
}

/// Compares an entry's lengths with the tensor's; `index` is below `n_experts`.
fn fit(entry: &Entry, index: usize, n_experts: usize, n_columns: usize) -> Place<'_> {
    let misfit = |problem: String| Place::Misfit { entry, problem };
    if n_experts.checked_mul(n_columns) != Some(entry.n_values) || index >= n_experts {
        return misfit(format!(
            "entry `{}` has {} values, expected {n_experts} x {n_columns} (experts x columns)",
            entry.name, entry.n_values
        ));
    }
    if let Some(found) = entry.n_columns.filter(|&found| found != n_columns) {
        return misfit(format!("entry `{}` has {found} columns, expected {n_columns}", entry.name));
    }
    if entry.counts.len() > 1 && entry.counts.len() != n_experts {
        return misfit(format!(
            "entry `{}` counts {} experts, expected {n_experts}",
            entry.name,
            entry.counts.len()
        ));
    }
    Place::At { entry, index_in_entry: index }
}

impl ImportanceSource for Imatrix {
    fn importance(&self, matrix: &Matrix<'_>) -> Found<'_> {
        match self.place(matrix) {
            None => Found::NoEntry,
            Some(Place::Misfit { problem, .. }) => Found::Unusable(problem),
            Some(Place::At { entry, index_in_entry }) => {
                match entry.state(index_in_entry, matrix.n_columns) {
                    State::Seen(means) => Found::Values(Cow::Owned(means)),
                    State::Unseen => Found::Unseen,
                    State::Unusable(problem) => Found::Unusable(problem),
                }
            }
        }
    }

    fn provenance(&self) -> Option<Provenance> {
        let origin = self.origin.as_ref()?;
        Some(Provenance {
            file_name: self.file_name(),
            sha256: origin.sha256.clone(),
            datasets: self.contents.datasets.clone(),
            n_entries: self.contents.entries.len(),
            n_chunks: self.contents.n_chunks,
        })
    }
}
