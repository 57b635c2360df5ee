//! Parsing the header: counts are never trusted before the bytes that back them are seen.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::value::{ARRAY_TYPE, Array, Metadata, Value};
use super::{ALIGNMENTS, DEFAULT_ALIGNMENT, GgufError, MAGIC, MAX_DIMENSIONS};
use crate::block::BlockType;

/// A parsed header.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// Version of the container: 2 or 3.
    pub version: u32,
    /// Metadata in file order.
    pub metadata: Metadata,
    /// Tensors in directory order.
    pub tensors: Vec<HeaderTensor>,
    /// Alignment of tensor data.
    pub alignment: u32,
    /// Where the data section begins in the file.
    pub data_offset_bytes: u64,
}

/// One entry of the tensor directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Name.
    pub name: String,
    /// Type.
    pub block_type: BlockType,
    /// Shape, outermost first.
    pub shape: Vec<u64>,
    /// Where the data begins, from the start of the data section.
    pub offset_bytes: u64,
    /// Size of the data by type and shape.
    pub n_bytes: u64,
}

/// Parses the header at the start of `bytes`, which may end anywhere after it. `path` is for messages.
///
/// # Errors
/// [`GgufError::NotGguf`] or [`GgufError::Header`], naming the field.
pub fn parse_header(bytes: &[u8], path: &Path) -> Result<Header, GgufError> {
    check_magic(bytes, path)?;
    let mut reader = Reader { bytes, at: MAGIC.len(), path, field: "version".to_owned() };
    let version = reader.u32()?;
    match version {
        2 | 3 => {}
        0x0200_0000 | 0x0300_0000 => {
            return Err(reader.wrong("the file is big-endian; expected little-endian, convert it first"));
        }
        _ => return Err(reader.wrong(format!("found {version}, expected 2 or 3"))),
    }
    "number of tensors".clone_into(&mut reader.field);
    // A tensor takes at least name length, rank, one dimension, type and offset.
    let n_tensors = reader.count(8 + 4 + 4 + 8)?;
    "number of metadata keys".clone_into(&mut reader.field);
    let n_keys = reader.count(8 + 4 + 1)?;
    let metadata = reader.metadata(n_keys)?;
    let alignment = alignment(&metadata).map_err(|problem| GgufError::Header {
        path: path.to_owned(),
        field: "key `general.alignment`".to_owned(),
        problem,
    })?;
    let tensors = reader.tensors(n_tensors)?;
    let data_offset_bytes = (reader.at as u64).next_multiple_of(u64::from(alignment));
    let header = Header { version, metadata, tensors, alignment, data_offset_bytes };
    check_regions(&header, path)?;
    Ok(header)
}

fn check_magic(bytes: &[u8], path: &Path) -> Result<(), GgufError> {
    let Some(start) = bytes.get(..MAGIC.len()) else {
        let found = format!("it has {} bytes; the download or copy is incomplete", bytes.len());
        return Err(GgufError::NotGguf { path: path.to_owned(), found });
    };
    if start == MAGIC {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(64)]).to_lowercase();
    let found = if text.trim_start().starts_with("<!doctype") || text.trim_start().starts_with("<html") {
        "it is a web page; use the address of the file itself".to_owned()
    } else if text.starts_with("version https://git-lfs") {
        "it is a Git LFS pointer; fetch the file it points to (`git lfs pull`)".to_owned()
    } else if bytes.iter().take(32).all(|&b| b == 0) {
        "it begins with zeros, as a file whose writer was interrupted; make or download it again".to_owned()
    } else if bytes.get(8) == Some(&b'{') {
        "it looks like a safetensors file; give its folder with --hf".to_owned()
    } else {
        format!("it begins with bytes {start:02x?}, expected {MAGIC:02x?} (\"GGUF\")")
    };
    Err(GgufError::NotGguf { path: path.to_owned(), found })
}

fn alignment(metadata: &Metadata) -> Result<u32, String> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&Value::U32(v)) if v.is_power_of_two() && ALIGNMENTS.contains(&v) => Ok(v),
        Some(Value::U32(v)) => Err(format!(
            "found {v}, expected a power of two from {} to {}",
            ALIGNMENTS.start(),
            ALIGNMENTS.end()
        )),
        Some(other) => Err(format!("found a value of type {}, expected u32", other.type_name())),
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    path: &'a Path,
    field: String,
}

impl<'a> Reader<'a> {
    fn wrong(&self, problem: impl Into<String>) -> GgufError {
        GgufError::Header {
            path: PathBuf::from(self.path),
            field: self.field.clone(),
            problem: problem.into(),
        }
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, n: u64) -> Result<&'a [u8], GgufError> {
        match usize::try_from(n).ok().filter(|&n| n <= self.left()) {
            Some(n) => {
                self.at += n;
                Ok(&self.bytes[self.at - n..self.at])
            }
            None => Err(self.wrong(format!(
                "needs {n} bytes at byte {}, {} are left; the file is truncated or damaged, download it again",
                self.at,
                self.left()
            ))),
        }
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let bytes = self.take(N as u64)?;
        Ok(bytes.try_into().expect("as many bytes as asked for"))
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        self.number().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        self.number().map(u64::from_le_bytes)
    }

    /// A count of things that take at least `least_bytes` each.
    fn count(&mut self, least_bytes: u64) -> Result<usize, GgufError> {
        let n = self.u64()?;
        match n.checked_mul(least_bytes) {
            Some(needed) if needed <= self.left() as u64 => Ok(n as usize),
            _ => Err(self.wrong(format!(
                "found {n}, which needs more than the {} bytes that are left; the file is truncated or damaged",
                self.left()
            ))),
        }
    }

    fn string(&mut self) -> Result<&'a str, GgufError> {
        let n = self.u64()?;
        let bytes = self.take(n)?;
        std::str::from_utf8(bytes).map_err(|e| self.wrong(format!("holds text that is not UTF-8 ({e})")))
    }

    fn metadata(&mut self, n_keys: usize) -> Result<Metadata, GgufError> {
        let mut metadata = Metadata::default();
        for i in 0..n_keys {
            self.field = format!("metadata key {} of {n_keys}", i + 1);
            let key = self.string()?;
            if key.is_empty() {
                return Err(self.wrong("the key is empty"));
            }
            if metadata.get(key).is_some() {
                return Err(self.wrong(format!("key `{key}` occurs twice")));
            }
            self.field = format!("key `{key}`");
            let value = self.value()?;
            metadata.set(key, value);
        }
        Ok(metadata)
    }

    fn value(&mut self) -> Result<Value, GgufError> {
        let id = self.u32()?;
        Ok(match id {
            0 => Value::U8(self.number::<1>()?[0]),
            1 => Value::I8(i8::from_le_bytes(self.number()?)),
            2 => Value::U16(u16::from_le_bytes(self.number()?)),
            3 => Value::I16(i16::from_le_bytes(self.number()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.number()?)),
            6 => Value::F32(f32::from_le_bytes(self.number()?)),
            7 => {
                let byte = self.number::<1>()?[0];
                Value::Bool(self.truth(byte)?)
            }
            8 => Value::String(self.string()?.to_owned()),
            ARRAY_TYPE => Value::Array(self.array()?),
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.number()?)),
            12 => Value::F64(f64::from_le_bytes(self.number()?)),
            _ => return Err(self.wrong(format!("found value type {id}, expected 0 to 12"))),
        })
    }

    fn truth(&self, byte: u8) -> Result<bool, GgufError> {
        match byte {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.wrong(format!("found byte {byte} as a truth value, expected 0 or 1"))),
        }
    }

    fn numbers<T, const N: usize>(&mut self, from: fn([u8; N]) -> T) -> Result<Vec<T>, GgufError> {
        let n = self.count(N as u64)?;
        let bytes = self.take((n * N) as u64)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|b| from(*b)).collect())
    }

    fn array(&mut self) -> Result<Array, GgufError> {
        let id = self.u32()?;
        Ok(match id {
            0 => Array::U8(self.numbers(u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(f32::from_le_bytes)?),
            7 => {
                let bytes = self.numbers(u8::from_le_bytes)?;
                Array::Bool(bytes.into_iter().map(|b| self.truth(b)).collect::<Result<_, _>>()?)
            }
            8 => {
                let n = self.count(8)?;
                Array::String((0..n).map(|_| self.string().map(str::to_owned)).collect::<Result<_, _>>()?)
            }
            ARRAY_TYPE => return Err(self.wrong("holds an array of arrays, which no runtime reads")),
            10 => Array::U64(self.numbers(u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(f64::from_le_bytes)?),
            _ => return Err(self.wrong(format!("found element type {id}, expected 0 to 12"))),
        })
    }

    fn tensors(&mut self, n_tensors: usize) -> Result<Vec<HeaderTensor>, GgufError> {
        let mut tensors = Vec::with_capacity(n_tensors);
        let mut names = HashSet::with_capacity(n_tensors);
        for i in 0..n_tensors {
            self.field = format!("tensor {} of {n_tensors}", i + 1);
            let name = self.string()?;
            self.field = format!("tensor `{name}`");
            if name.is_empty() {
                return Err(self.wrong("the name is empty"));
            }
            if !names.insert(name) {
                return Err(self.wrong("the name occurs twice"));
            }
            tensors.push(self.tensor(name)?);
        }
        Ok(tensors)
    }

    fn tensor(&mut self, name: &str) -> Result<HeaderTensor, GgufError> {
        let rank = self.u32()?;
        if !(1..=MAX_DIMENSIONS).contains(&rank) {
            return Err(self.wrong(format!("found {rank} dimensions, expected 1 to {MAX_DIMENSIONS}")));
        }
        let mut shape = (0..rank).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let id = self.u32()?;
        let offset_bytes = self.u64()?;
        let block_type = BlockType::from_id(id).ok_or_else(|| self.wrong(unknown_type(id)))?;
        let n_bytes = tensor_bytes(block_type, &shape).map_err(|problem| self.wrong(problem))?;
        Ok(HeaderTensor { name: name.to_owned(), block_type, shape, offset_bytes, n_bytes })
    }
}

fn unknown_type(id: u32) -> String {
    let known: Vec<_> = BlockType::all().map(|t| format!("{} {t}", t.id())).collect();
    let hint = if id == 42 { " (some private files use 42 for raw FP8, others for Q2_0)" } else { "" };
    format!("found type number {id}{hint}, expected one of {}", known.join(", "))
}

/// Bytes of a tensor by type and shape (outermost first), or what is wrong with them.
pub(super) fn tensor_bytes(block_type: BlockType, shape: &[u64]) -> Result<u64, String> {
    if shape.contains(&0) {
        return Err(format!("found shape {shape:?}, expected no dimension of 0"));
    }
    let columns = shape.last().copied().unwrap_or(1);
    let row_bytes = block_type.row_bytes(columns).ok_or_else(|| {
        let values = block_type.values_per_block();
        format!("rows of {columns} values are no whole number of {block_type} blocks of {values}")
    })?;
    let rows = &shape[..shape.len().saturating_sub(1)];
    rows.iter()
        .try_fold(row_bytes, |bytes, &n| bytes.checked_mul(n))
        // Offsets and sums of sizes must stay representable too.
        .filter(|&bytes| i64::try_from(bytes).is_ok())
        .ok_or_else(|| {
            format!("the size of shape {shape:?} in {block_type} is not representable; the file is damaged")
        })
}

/// Every tensor must have the room that its type and shape need before the next one begins.
fn check_regions(header: &Header, path: &Path) -> Result<(), GgufError> {
    let mut by_offset: Vec<&HeaderTensor> = header.tensors.iter().collect();
    by_offset.sort_by_key(|t| t.offset_bytes);
    let mut problems = Vec::new();
    for (i, tensor) in by_offset.iter().enumerate() {
        if !tensor.offset_bytes.is_multiple_of(u64::from(header.alignment)) {
            problems.push(format!(
                "tensor `{}`: offset {} is no multiple of the alignment {}",
                tensor.name, tensor.offset_bytes, header.alignment
            ));
        }
        if tensor
            .offset_bytes
            .checked_add(tensor.n_bytes)
            .and_then(|end| end.checked_add(header.data_offset_bytes))
            .is_none()
        {
            problems.push(format!(
                "tensor `{}`: offset {} is not representable",
                tensor.name, tensor.offset_bytes
            ));
        } else if let Some(next) = by_offset.get(i + 1) {
            let room = next.offset_bytes - tensor.offset_bytes;
            if room < tensor.n_bytes {
                problems.push(format!(
                    "tensor `{}`: {} of shape {:?} needs {} bytes, only {room} are reserved before `{}`; the file was written wrongly",
                    tensor.name, tensor.block_type, tensor.shape, tensor.n_bytes, next.name
                ));
            }
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(GgufError::Regions { path: path.to_owned(), problems }) }
}
