//! llama.cpp's GGUF form. For each weight `NAME` two F32 tensors, shapes outermost first:
//!
//! * `NAME.in_sum2` `[n_matrices, n_columns]`: sums of squared inputs,
//! * `NAME.counts` `[n_matrices, 1]`: rows summed; a single count stands for every matrix.
//!
//! Keys: `general.type` = `imatrix`, `imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size`.

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use gguf_tools::block::BlockType;
use gguf_tools::gguf::{Array, Gguf, Layout, Metadata, NewTensor, TensorInfo, Value};

use crate::entry::{Bytes, CountUnit, Entry, State};
use crate::error::{ImatrixError, Problem};
use crate::{Columns, Contents, Format};

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
/// What llama.cpp's collector takes where nothing else is asked for.
const DEFAULT_CHUNK_SIZE: u64 = 512;
const ALIGNMENT: u32 = 32;

/// Reads headers and counts; sums stay in the file.
pub(crate) fn read(
    path: &Path,
    bytes: &Arc<Bytes>,
    columns: Columns<'_>,
    problems: &mut Vec<Problem>,
) -> Result<Contents, ImatrixError> {
    let read_error = |source: io::Error| ImatrixError::Read { path: path.to_owned(), source };
    let gguf =
        Gguf::open(path).map_err(|source| ImatrixError::Container { path: path.to_owned(), source })?;
    refuse_other_content(path, gguf.metadata())?;
    let mut contents = Contents::empty(Format::Gguf);
    read_keys(gguf.metadata(), &mut contents, problems);
    let [shard] = gguf.shards() else {
        problems.push(Problem::of_file(format!("{} shards", gguf.shards().len()), "one file"));
        return Ok(contents);
    };
    let n_file_bytes = bytes.n_bytes().map_err(read_error)?;
    let pairs = Pairs { bytes, columns, data_offset_bytes: shard.data_offset_bytes, n_file_bytes };
    let by_name: HashMap<_, _> = gguf.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    for tensor in gguf.tensors() {
        if let Some(name) = tensor.name.strip_suffix(SUMS) {
            match by_name.get(&*format!("{name}{COUNTS}")) {
                Some(counts) => {
                    let entry = pairs.entry(name, tensor, counts, problems).map_err(read_error)?;
                    contents.entries.extend(entry);
                }
                None => {
                    problems.push(Problem::of_entry(name, "no counts", format!("a tensor `{name}{COUNTS}`")));
                }
            }
        } else if let Some(name) = tensor.name.strip_suffix(COUNTS) {
            if !by_name.contains_key(&*format!("{name}{SUMS}")) {
                problems.push(Problem::of_entry(name, "no sums", format!("a tensor `{name}{SUMS}`")));
            }
        } else {
            problems.push(Problem::of_entry(
                &*tensor.name,
                "a tensor of another name",
                format!("names that end in `{SUMS}` or `{COUNTS}`"),
            ));
        }
    }
    if contents.entries.is_empty() && problems.is_empty() {
        problems.push(Problem::of_file("no entries", "at least one"));
    }
    Ok(contents)
}

fn refuse_other_content(path: &Path, metadata: &Metadata) -> Result<(), ImatrixError> {
    let kind = metadata.get("general.type").and_then(Value::as_str);
    let found = match kind {
        Some("imatrix") => return Ok(()),
        None if metadata.get("imatrix.chunk_count").is_some() => return Ok(()),
        Some(kind) => format!("a GGUF file whose `general.type` is `{kind}`"),
        None => "a GGUF file without the keys of an imatrix".to_owned(),
    };
    Err(ImatrixError::NotAnImatrix { path: path.to_owned(), found })
}

fn read_keys(metadata: &Metadata, contents: &mut Contents, problems: &mut Vec<Problem>) {
    let mut number = |key: &str| {
        let value = metadata.get(key).and_then(Value::as_u64);
        if value.is_none() {
            let found = if metadata.get(key).is_some() { "another type" } else { "nothing" };
            problems.push(Problem::of_file(format!("{found} under the key `{key}`"), "a number"));
        }
        value
    };
    contents.n_chunks = number("imatrix.chunk_count");
    contents.chunk_size = number("imatrix.chunk_size");
    match metadata.get("imatrix.datasets").and_then(Value::as_array).and_then(Array::as_strs) {
        Some(names) => contents.datasets = names.to_vec(),
        None => problems.push(Problem::of_file("no list of names under the key `imatrix.datasets`", "one")),
    }
}

/// What is needed to make entries of pairs of tensors.
struct Pairs<'a> {
    bytes: &'a Arc<Bytes>,
    columns: Columns<'a>,
    data_offset_bytes: u64,
    n_file_bytes: u64,
}

impl Pairs<'_> {
    /// `None` if a problem was noted.
    fn entry(
        &self,
        name: &str,
        sums: &TensorInfo,
        counts: &TensorInfo,
        problems: &mut Vec<Problem>,
    ) -> io::Result<Option<Entry>> {
        let fewest_problems = problems.len();
        let place_of_sums = self.values(name, sums, problems);
        let place_of_counts = self.values(name, counts, problems);
        let (Some((offset, n_values)), Some((counts_offset, n_counts))) = (place_of_sums, place_of_counts)
        else {
            return Ok(None);
        };
        let width = sums.shape.last().copied().unwrap_or(1) as usize;
        let n_matrices = n_values.checked_div(width).unwrap_or(0);
        if n_values == 0 {
            problems.push(Problem::of_entry(name, "no values", "at least one"));
        } else if n_counts != 1 && n_counts != n_matrices {
            let expected = format!("{n_matrices}, one for each matrix, or 1 for all");
            problems.push(Problem::of_entry(name, format!("{n_counts} counts"), expected));
        }
        if problems.len() > fewest_problems {
            return Ok(None);
        }
        let stored_counts = self.bytes.read_f32s(counts_offset, n_counts)?;
        // One wide row may be a whole stack that was converted from a legacy file.
        let known = (n_matrices > 1).then_some(width);
        let told = || (self.columns)(name).filter(|&n| n > 0 && n_values.is_multiple_of(n));
        Ok(Some(Entry {
            name: name.to_owned(),
            n_values,
            n_columns: known.or_else(told),
            counts: stored_counts.into_iter().map(f64::from).collect(),
            unit: CountUnit::Rows,
            bytes: Arc::clone(self.bytes),
            offset,
        }))
    }

    /// Where the tensor's values lie in the file, and how many they are.
    fn values(&self, name: &str, tensor: &TensorInfo, problems: &mut Vec<Problem>) -> Option<(u64, usize)> {
        if tensor.block_type != BlockType::F32 {
            let found = format!("tensor `{}` of type {}", tensor.name, tensor.block_type);
            problems.push(Problem::of_entry(name, found, "F32"));
            return None;
        }
        let offset = self.data_offset_bytes.checked_add(tensor.offset_bytes);
        let end = offset.and_then(|offset| offset.checked_add(tensor.n_bytes));
        match (offset, end) {
            (Some(offset), Some(end)) if end <= self.n_file_bytes => {
                Some((offset, usize::try_from(tensor.n_bytes / 4).ok()?))
            }
            _ => {
                let found = format!("the end of the file at byte {}", self.n_file_bytes);
                let expected = format!(
                    "{} bytes of tensor `{}` at byte {}",
                    tensor.n_bytes,
                    tensor.name,
                    offset.unwrap_or(u64::MAX)
                );
                problems.push(Problem::of_entry(name, found, expected));
                None
            }
        }
    }
}

/// Tokens in a chunk: as recorded, or as assumed for a legacy file.
pub(crate) fn chunk_size(contents: &Contents) -> u64 {
    contents.chunk_size.filter(|&n| n > 0).unwrap_or(DEFAULT_CHUNK_SIZE)
}

/// One entry as it is to be written.
struct Planned<'a> {
    entry: &'a Entry,
    n_matrices: usize,
    width: usize,
    /// Rows of each matrix.
    counts: Vec<f64>,
    /// What turns a stored value into a sum over rows.
    factor: f64,
}

impl<'a> Planned<'a> {
    /// Counts of every matrix as the file has them; else made of the common count, 0 for unseen experts.
    fn new(entry: &'a Entry, chunk_size: u64) -> Self {
        let (n_matrices, width) = entry.shape();
        let factor = match entry.unit {
            CountUnit::Rows => 1.0,
            CountUnit::Calls => chunk_size as f64,
        };
        let count = |index| match entry.state(index, width) {
            State::Seen(_) => entry.count(index) * factor,
            State::Unseen | State::Unusable(_) => 0.0,
        };
        let counts = match entry.unit {
            CountUnit::Rows if entry.counts.len() == n_matrices => entry.counts.clone(),
            _ => (0..n_matrices).map(count).collect(),
        };
        Self { entry, n_matrices, width, counts, factor }
    }

    fn sums(&self, index: usize) -> io::Result<Vec<f32>> {
        if self.counts[index] == 0.0 {
            return Ok(vec![0.0; self.width]);
        }
        let stored = self.entry.read_matrix(index, self.width)?;
        Ok(stored.into_iter().map(|v| (f64::from(v) * self.factor) as f32).collect())
    }
}

/// Writes the pairs in the order of the entries.
pub(crate) fn write(contents: &Contents, path: &Path, out: &mut dyn Write) -> Result<(), ImatrixError> {
    let failed = |source: io::Error| ImatrixError::Write { path: path.to_owned(), source };
    let chunk_size = chunk_size(contents);
    let planned: Vec<_> = contents.entries.iter().map(|entry| Planned::new(entry, chunk_size)).collect();
    let layout = Layout::new(metadata(contents, chunk_size, path)?, tensors(&planned), ALIGNMENT)
        .map_err(|source| ImatrixError::Container { path: path.to_owned(), source })?;
    out.write_all(&layout.header_bytes()).map_err(failed)?;
    let mut position = layout.data_offset_bytes();
    let pad_to = |out: &mut dyn Write, position: u64, to: u64| {
        out.write_all(&vec![0; (to - position) as usize]).map_err(failed)
    };
    for (planned, placed) in planned.iter().zip(layout.tensors().chunks_exact(2)) {
        pad_to(out, position, placed[0].offset_bytes)?;
        for index in 0..planned.n_matrices {
            out.write_all(&to_bytes(&planned.sums(index).map_err(failed)?)).map_err(failed)?;
        }
        position = placed[0].offset_bytes + placed[0].n_bytes;
        pad_to(out, position, placed[1].offset_bytes)?;
        let counts: Vec<f32> = planned.counts.iter().map(|&count| count as f32).collect();
        out.write_all(&to_bytes(&counts)).map_err(failed)?;
        position = placed[1].offset_bytes + placed[1].n_bytes;
    }
    pad_to(out, position, layout.file_bytes())
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn metadata(contents: &Contents, chunk_size: u64, path: &Path) -> Result<Metadata, ImatrixError> {
    let number = |n: u64, key: &str| {
        u32::try_from(n).map(Value::U32).map_err(|_| ImatrixError::NotRepresentable {
            path: path.to_owned(),
            what: format!("`{key}` is {n}, and the format ends at {}", u32::MAX),
        })
    };
    // The oldest legacy files do not record their chunks; their entries count about one call a chunk.
    let most_calls = || contents.entries.iter().map(|e| e.count(0)).fold(0.0, f64::max) as u64;
    let n_chunks = contents.n_chunks.unwrap_or_else(most_calls);
    let mut metadata = Metadata::default();
    metadata.set("general.type", Value::String("imatrix".to_owned()));
    metadata.set("imatrix.datasets", Value::Array(Array::String(contents.datasets.clone())));
    metadata.set("imatrix.chunk_count", number(n_chunks, "imatrix.chunk_count")?);
    metadata.set("imatrix.chunk_size", number(chunk_size, "imatrix.chunk_size")?);
    Ok(metadata)
}

fn tensors(planned: &[Planned<'_>]) -> Vec<NewTensor> {
    let tensor = |name: String, shape: [usize; 2]| NewTensor {
        name,
        block_type: BlockType::F32,
        shape: shape.iter().map(|&n| n as u64).collect(),
    };
    planned
        .iter()
        .flat_map(|p| {
            let name = &p.entry.name;
            [
                tensor(format!("{name}{SUMS}"), [p.n_matrices, p.width]),
                tensor(format!("{name}{COUNTS}"), [p.counts.len(), 1]),
            ]
        })
        .collect()
}
