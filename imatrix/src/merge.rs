//! Adding up files that were collected from one model.

use std::collections::HashSet;

use crate::entry::{CountUnit, Entry, State};
use crate::error::ImatrixError;
use crate::{Contents, Format, Generation, Imatrix};

impl Imatrix {
    /// Adds sums and counts of every matrix over `files`; data sets are concatenated.
    ///
    /// Experts that a file never reached count for nothing there, also where a legacy file marks them by 1: such
    /// files are to be opened with [`Imatrix::open_with_columns`]. Sums are made in `f64` and rounded once.
    ///
    /// # Errors
    /// If there are no files, formats are mixed (convert first), an entry has different shapes, values cannot be
    /// used, or unseen experts cannot be told apart.
    pub fn merge(files: &[Self]) -> Result<Self, ImatrixError> {
        let first = files.first().ok_or(ImatrixError::NothingToMerge)?;
        for file in files {
            file.refuse_unusable()?;
            if unit(file) != unit(first) {
                return Err(differ(
                    "of any name",
                    first,
                    file,
                    first.format().to_string(),
                    file.format().to_string(),
                ));
            }
            if file.chunk_size() != first.chunk_size() {
                let say = |size: Option<u64>| format!("chunk size {}", size.unwrap_or_default());
                return Err(differ(
                    "of any name",
                    first,
                    file,
                    say(first.chunk_size()),
                    say(file.chunk_size()),
                ));
            }
        }
        let mut contents = Contents::empty(match first.format() {
            Format::Gguf => Format::Gguf,
            Format::Legacy(_) => Format::Legacy(Generation::Dataset),
        });
        contents.chunk_size = first.chunk_size();
        contents.n_chunks = files.iter().map(Self::n_chunks).sum();
        contents.datasets = files.iter().flat_map(|file| file.datasets().iter().cloned()).collect();
        let mut names = HashSet::new();
        for name in files.iter().flat_map(Self::entries).map(Entry::name).filter(|name| names.insert(*name)) {
            contents.entries.push(merge_entry(name, files)?);
        }
        Ok(Self::from_contents(contents))
    }
}

fn unit(file: &Imatrix) -> CountUnit {
    match file.format() {
        Format::Gguf => CountUnit::Rows,
        Format::Legacy(_) => CountUnit::Calls,
    }
}

fn differ(entry: &str, first: &Imatrix, second: &Imatrix, expected: String, found: String) -> ImatrixError {
    ImatrixError::Incompatible {
        entry: entry.to_owned(),
        first: first.file_name(),
        second: second.file_name(),
        expected,
        found,
    }
}

fn merge_entry(name: &str, files: &[Imatrix]) -> Result<Entry, ImatrixError> {
    let parts: Vec<_> = files.iter().filter_map(|file| Some((file, file.entry(name)?))).collect();
    let (first_file, first) = parts[0];
    let n_columns = parts.iter().find_map(|(_, entry)| entry.n_columns);
    for &(file, entry) in &parts {
        if entry.n_values != first.n_values {
            let say = |entry: &Entry| format!("{} values", entry.n_values);
            return Err(differ(name, first_file, file, say(first), say(entry)));
        }
        if let (Some(found), Some(expected)) = (entry.n_columns, n_columns) {
            if found != expected {
                let say = |n: usize| format!("{n} columns");
                return Err(differ(name, first_file, file, say(expected), say(found)));
            }
        } else if n_columns.is_none() && parts.len() > 1 && may_mark_unseen(entry, file)? {
            return Err(ImatrixError::ColumnsNeeded { entry: name.to_owned(), file_name: file.file_name() });
        }
    }
    let width = n_columns.unwrap_or(first.n_values).max(1);
    let n_experts = first.n_values / width;
    let mut sums = Vec::with_capacity(first.n_values);
    let mut counts = vec![0.0; n_experts];
    for (expert_index, count) in counts.iter_mut().enumerate() {
        let mut sum = vec![0.0_f64; width];
        for &(file, entry) in &parts {
            // The state decides who was seen; the stored sums are what adds up.
            if let State::Seen(_) = entry.state(expert_index, width) {
                let stored =
                    entry.read_matrix(expert_index, width).map_err(|source| read_error(file, source))?;
                sum.iter_mut().zip(stored).for_each(|(sum, value)| *sum += f64::from(value));
                *count += entry.count(expert_index);
            }
        }
        sums.extend(sum.into_iter().map(|sum| sum as f32));
    }
    Ok(Entry::in_memory(name.to_owned(), n_columns, &sums, counts, first.unit))
}

/// Whether an entry of unknown width holds two neighbouring means of exactly 1, as unseen experts do.
fn may_mark_unseen(entry: &Entry, file: &Imatrix) -> Result<bool, ImatrixError> {
    let stored = entry.read(0..entry.n_values).map_err(|source| read_error(file, source))?;
    let count = entry.count(0);
    Ok(stored.windows(2).any(|pair| pair.iter().all(|&v| f64::from(v) == count)))
}

fn read_error(file: &Imatrix, source: std::io::Error) -> ImatrixError {
    let path = file.origin.as_ref().map(|origin| origin.path.clone()).unwrap_or_default();
    ImatrixError::Read { path, source }
}
