//! The legacy `.dat` format, all integers `i32`, little-endian:
//!
//! ```text
//! n_entries, then for each entry: name_len, name, n_calls, n_values, n_values x f32
//! first generation ends here; second: last call number (chunk count); third: dataset_len, dataset
//! ```
//!
//! A stored value is a mean of squares times `n_calls`. A stacked tensor is one entry, expert after expert;
//! experts that were never reached hold 1 x `n_calls` throughout. ds4's collector writes this form with `n_calls` 1.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use crate::entry::{Bytes, CountUnit, Entry, State};
use crate::error::{ImatrixError, Problem};
use crate::{Columns, Contents, Format, Generation};

/// Fixed bytes of an entry: three lengths, one byte of name and one value.
const FEWEST_ENTRY_BYTES: u64 = 4 + 1 + 4 + 4 + 4;
/// Longest name of a tensor or data set that is believed.
const MOST_NAME_BYTES: u64 = 4096;

/// Reads fields one after the other and knows how many bytes are left.
struct Fields<'a> {
    bytes: &'a Bytes,
    position: u64,
    n_bytes: u64,
}

/// A field that stops the reading: the system's error, or what is wrong.
enum Stop {
    Io(io::Error),
    Problem(Problem),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Fields<'_> {
    fn left(&self) -> u64 {
        self.n_bytes - self.position
    }

    /// Where a problem is: an entry's number, counted from 0, and its name once it is read.
    fn problem(place: &str, found: impl Into<String>, expected: impl Into<String>) -> Stop {
        let problem = match place {
            "" => Problem::of_file(found, expected),
            entry => Problem::of_entry(entry, found, expected),
        };
        Stop::Problem(problem)
    }

    fn bytes(&mut self, place: &str, field: &str, n: u64) -> Result<Vec<u8>, Stop> {
        self.require(place, field, n)?;
        let mut into = vec![0; n as usize];
        self.bytes.read_exact_at(self.position, &mut into)?;
        self.position += n;
        Ok(into)
    }

    fn require(&self, place: &str, field: &str, n: u64) -> Result<(), Stop> {
        if n <= self.left() {
            return Ok(());
        }
        let found = format!("the end of the file after {} bytes of the {field}", self.left());
        Err(Self::problem(place, found, format!("{n} bytes at byte {}", self.position)))
    }

    fn i32(&mut self, place: &str, field: &str) -> Result<i32, Stop> {
        let bytes = self.bytes(place, field, 4)?;
        Ok(i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// A count or length between `fewest` and `most`.
    fn length(&mut self, place: &str, field: &str, fewest: u64, most: u64) -> Result<u64, Stop> {
        let at = self.position;
        let found = self.i32(place, field)?;
        match u64::try_from(found) {
            Ok(n) if (fewest..=most).contains(&n) => Ok(n),
            _ => Err(Self::problem(
                place,
                format!("{field} {found} at byte {at}"),
                format!("{fewest} to {most}, as {} bytes are left", self.left()),
            )),
        }
    }

    fn text(&mut self, place: &str, field: &str, n: u64) -> Result<String, Stop> {
        let at = self.position;
        let bytes = self.bytes(place, field, n)?;
        String::from_utf8(bytes).map_err(|e| {
            let bad = at + e.utf8_error().valid_up_to() as u64;
            Self::problem(place, format!("{field} with a byte at {bad} that is no UTF-8"), "UTF-8 text")
        })
    }
}

/// Reads every header; values stay in the file.
pub(crate) fn read(
    bytes: &Arc<Bytes>,
    columns: Columns<'_>,
    problems: &mut Vec<Problem>,
) -> io::Result<Contents> {
    let mut contents = Contents::empty(Format::Legacy(Generation::EntriesOnly));
    let mut fields = Fields { bytes, position: 0, n_bytes: bytes.n_bytes()? };
    match read_fields(&mut fields, bytes, columns, &mut contents) {
        Ok(()) => {}
        Err(Stop::Io(error)) => return Err(error),
        Err(Stop::Problem(problem)) => problems.push(problem),
    }
    let mut names = BTreeSet::new();
    for entry in &contents.entries {
        if !names.insert(entry.name()) {
            problems.push(Problem::of_entry(entry.name(), "the name a second time", "one entry a tensor"));
        }
    }
    Ok(contents)
}

fn read_fields(
    fields: &mut Fields<'_>,
    bytes: &Arc<Bytes>,
    columns: Columns<'_>,
    contents: &mut Contents,
) -> Result<(), Stop> {
    let most_entries = fields.left().saturating_sub(4) / FEWEST_ENTRY_BYTES;
    let n_entries = fields.length("", "number of entries", 1, most_entries.max(1))?;
    for index in 0..n_entries {
        let entry = read_entry(fields, bytes, columns, index)?;
        contents.entries.push(entry);
    }
    if fields.left() == 0 {
        return Ok(());
    }
    contents.format = Format::Legacy(Generation::ChunkCount);
    contents.n_chunks = Some(fields.length("", "chunk count", 0, i32::MAX as u64)?);
    if fields.left() == 0 {
        return Ok(());
    }
    contents.format = Format::Legacy(Generation::Dataset);
    let most = fields.left().saturating_sub(4).min(MOST_NAME_BYTES);
    let n_bytes = fields.length("", "length of the dataset name", 0, most)?;
    let dataset = fields.text("", "dataset name", n_bytes)?;
    if !dataset.is_empty() {
        contents.datasets.push(dataset);
    }
    match fields.left() {
        0 => Ok(()),
        n => Err(Fields::problem("", format!("{n} bytes after the dataset name"), "the end of the file")),
    }
}

fn read_entry(
    fields: &mut Fields<'_>,
    bytes: &Arc<Bytes>,
    columns: Columns<'_>,
    index: u64,
) -> Result<Entry, Stop> {
    let number = format!("number {index}");
    let most = fields.left().saturating_sub(4).min(MOST_NAME_BYTES);
    let n_name_bytes = fields.length(&number, "length of the name", 1, most.max(1))?;
    let name = fields.text(&number, "name", n_name_bytes)?;
    let n_calls = fields.length(&name, "number of calls", 0, i32::MAX as u64)?;
    let most_values = fields.left().saturating_sub(4) / 4;
    let n_values = fields.length(&name, "number of values", 1, most_values.max(1))?;
    fields.require(&name, "values", 4 * n_values)?;
    let offset = fields.position;
    fields.position += 4 * n_values;
    let n_values = n_values as usize;
    let n_columns = columns(&name).filter(|&n| n > 0 && n_values.is_multiple_of(n));
    let counts = vec![n_calls as f64];
    Ok(Entry { name, n_values, n_columns, counts, unit: CountUnit::Calls, bytes: Arc::clone(bytes), offset })
}

/// Writes `contents` in the generation it came in, or the third one.
///
/// Entries of a legacy file keep their calls and values, so that a copy has the same bytes. Others become means
/// with one call and 1 for unseen experts, as ds4 writes and reads them.
pub(crate) fn write(contents: &Contents, path: &Path, out: &mut dyn Write) -> Result<(), ImatrixError> {
    let io = |source| ImatrixError::Write { path: path.to_owned(), source };
    let int = |n: usize, what: &str| {
        i32::try_from(n).map(i32::to_le_bytes).map_err(|_| ImatrixError::NotRepresentable {
            path: path.to_owned(),
            what: format!("{what} is {n}, and the legacy format ends at {}", i32::MAX),
        })
    };
    out.write_all(&int(contents.entries.len(), "the number of entries")?).map_err(io)?;
    for entry in &contents.entries {
        out.write_all(&int(entry.name.len(), "the length of a name")?).map_err(io)?;
        out.write_all(entry.name.as_bytes()).map_err(io)?;
        let verbatim = stored_calls(entry);
        out.write_all(&verbatim.unwrap_or(1).to_le_bytes()).map_err(io)?;
        out.write_all(&int(entry.n_values, &format!("the number of values of `{}`", entry.name))?)
            .map_err(io)?;
        let (n_experts, n_columns) = entry.shape();
        for expert_index in 0..n_experts {
            let values = match verbatim {
                Some(_) => entry.read_matrix(expert_index, n_columns).map_err(io)?,
                None => means_or_ones(entry, expert_index, n_columns, path)?,
            };
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            out.write_all(&bytes).map_err(io)?;
        }
    }
    let generation = match contents.format {
        Format::Legacy(generation) => generation,
        Format::Gguf => Generation::Dataset,
    };
    if generation >= Generation::ChunkCount {
        let n_chunks = usize::try_from(contents.n_chunks.unwrap_or(0)).unwrap_or(usize::MAX);
        out.write_all(&int(n_chunks, "the chunk count")?).map_err(io)?;
    }
    if generation >= Generation::Dataset {
        let datasets = contents.datasets.join("+");
        out.write_all(&int(datasets.len(), "the length of the dataset names")?).map_err(io)?;
        out.write_all(datasets.as_bytes()).map_err(io)?;
    }
    Ok(())
}

/// The calls of an entry that can be written as they are.
fn stored_calls(entry: &Entry) -> Option<i32> {
    match (entry.unit, entry.counts.as_slice()) {
        (CountUnit::Calls, &[calls]) if calls <= f64::from(i32::MAX) => Some(calls as i32),
        _ => None,
    }
}

fn means_or_ones(
    entry: &Entry,
    expert_index: usize,
    n_columns: usize,
    path: &Path,
) -> Result<Vec<f32>, ImatrixError> {
    match entry.state(expert_index, n_columns) {
        State::Seen(means) => Ok(means),
        State::Unseen => Ok(vec![1.0; n_columns]),
        State::Unusable(problem) => Err(ImatrixError::NotRepresentable {
            path: path.to_owned(),
            what: format!("entry `{}`, expert {expert_index}: {problem}", entry.name),
        }),
    }
}
