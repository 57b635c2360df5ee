//! Parsing the header: counts are never trusted before the bytes that back them are seen.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;
use std::io::Read;
use std::path::Path;

use super::regions::{self, tensor_bytes};
use super::value::{ARRAY_TYPE, Array, Metadata, Value};
use super::{
    ALIGNMENTS, DEFAULT_ALIGNMENT, GgufError, MAGIC, MAX_DIMENSIONS, MAX_HEADER_BYTES, RegionProblem, magic,
};
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
/// [`GgufError::NotGguf`], [`GgufError::Header`] or [`GgufError::Regions`], naming the field.
pub fn parse_header(bytes: &[u8], path: &Path) -> Result<Header, GgufError> {
    let (header, problems) = parse_collecting(bytes, path)?;
    if problems.is_empty() { Ok(header) } else { Err(GgufError::Regions { path: path.to_owned(), problems }) }
}

/// Reads from the start of a file until its header is whole, which [`parse_header`] can then be given; for files that are
/// slow to read, such as remote ones. Reads at most four times the header, and little of a file that is none.
///
/// # Errors
/// As [`parse_header`], and [`GgufError::Open`] if the reader fails.
pub fn read_header(source: &mut dyn Read, path: &Path) -> Result<Vec<u8>, GgufError> {
    /// Enough to recognise what the file is, and for the header of a small one.
    const FIRST_READ_BYTES: usize = 64 << 10;
    let mut bytes = Vec::new();
    loop {
        let wanted = bytes.len().max(FIRST_READ_BYTES).min(MAX_HEADER_BYTES + 1 - bytes.len());
        let n = Read::take(&mut *source, wanted as u64)
            .read_to_end(&mut bytes)
            .map_err(|source| GgufError::Open { path: path.to_owned(), source })?;
        let ran_out = Cell::new(false);
        match parse(&bytes, path, &ran_out) {
            Err(_) if ran_out.get() && n == wanted && bytes.len() <= MAX_HEADER_BYTES => {}
            Err(error) => return Err(error),
            Ok(_) => return Ok(bytes),
        }
    }
}

/// Like [`parse_header`], but hands back wrong places of tensors beside the header.
pub(super) fn parse_collecting(bytes: &[u8], path: &Path) -> Result<(Header, Vec<RegionProblem>), GgufError> {
    parse(bytes, path, &Cell::new(false))
}

/// `ran_out` is set if something needs more bytes than there are.
fn parse(bytes: &[u8], path: &Path, ran_out: &Cell<bool>) -> Result<(Header, Vec<RegionProblem>), GgufError> {
    magic::check(bytes, path)?;
    let mut reader = Reader {
        bytes: &bytes[..bytes.len().min(MAX_HEADER_BYTES)],
        cut_at_limit: bytes.len() > MAX_HEADER_BYTES,
        at: MAGIC.len(),
        path,
        field: Field::Part("version"),
        ran_out,
    };
    let version = reader.version()?;
    reader.field = Field::Part("number of tensors");
    let n_tensors = reader.count(LEAST_TENSOR_BYTES)?;
    reader.field = Field::Part("number of metadata keys");
    let n_keys = reader.count(LEAST_KEY_BYTES)?;
    let metadata = reader.metadata(n_keys)?;
    let alignment = reader.alignment(&metadata)?;
    let tensors = reader.tensors(n_tensors)?;
    let data_offset_bytes = (reader.at as u64).next_multiple_of(u64::from(alignment));
    let header = Header { version, metadata, tensors, alignment, data_offset_bytes };
    let problems = regions::check(&header);
    Ok((header, problems))
}

/// Name length, rank, one dimension, type and offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;
/// Key length, value type and one byte of value.
const LEAST_KEY_BYTES: u64 = 8 + 4 + 1;

const DAMAGED: &str = "the file is truncated or damaged; resume the download or copy it again";
const WRITTEN_WRONGLY: &str = "the file was written wrongly or is damaged; make it again";
const NEWER_OR_OTHER: &str = "take a file with types from this list, or a newer version of this program";

/// What of the header is being read, for messages.
#[derive(Clone, Copy)]
enum Field<'a> {
    Part(&'static str),
    KeyNumber(usize, usize),
    Key(&'a str),
    TensorNumber(usize, usize),
    Tensor(&'a str),
}

impl fmt::Display for Field<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Part(name) => f.write_str(name),
            Self::KeyNumber(number, n_keys) => write!(f, "metadata key {number} of {n_keys}"),
            Self::Key(key) => write!(f, "key `{key}`"),
            Self::TensorNumber(number, n_tensors) => write!(f, "tensor {number} of {n_tensors}"),
            Self::Tensor(name) => write!(f, "tensor `{name}`"),
        }
    }
}

struct Reader<'a> {
    /// What may hold the header.
    bytes: &'a [u8],
    /// Whether the file goes on behind `bytes`.
    cut_at_limit: bool,
    at: usize,
    path: &'a Path,
    field: Field<'a>,
    ran_out: &'a Cell<bool>,
}

impl<'a> Reader<'a> {
    fn wrong(
        &self,
        found: impl Into<String>,
        expected: impl Into<String>,
        advice: &'static str,
    ) -> GgufError {
        GgufError::Header {
            path: self.path.to_owned(),
            field: self.field.to_string(),
            found: found.into(),
            expected: expected.into(),
            advice,
        }
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The error of something that needs more bytes than are left.
    fn too_long(&self, what: String) -> GgufError {
        self.ran_out.set(true);
        let (left, at) = (self.left(), self.at);
        let expected = if self.cut_at_limit {
            format!("at most the {left} bytes up to {MAX_HEADER_BYTES}, the most that a header may take")
        } else {
            format!("at most the {left} bytes that are left at byte {at}")
        };
        self.wrong(what, expected, DAMAGED)
    }

    fn take(&mut self, n: u64) -> Result<&'a [u8], GgufError> {
        match usize::try_from(n).ok().filter(|&n| n <= self.left()) {
            Some(n) => {
                self.at += n;
                Ok(&self.bytes[self.at - n..self.at])
            }
            None => Err(self.too_long(format!("something that takes {n} bytes"))),
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
            _ => Err(self.too_long(format!("a count of {n}"))),
        }
    }

    fn string(&mut self) -> Result<&'a str, GgufError> {
        let n = self.u64()?;
        let start = self.at;
        let bytes = self.take(n)?;
        std::str::from_utf8(bytes).map_err(|error| {
            let place = start + error.valid_up_to();
            self.wrong(format!("bytes at byte {place} that are not UTF-8"), "text in UTF-8", WRITTEN_WRONGLY)
        })
    }

    fn version(&mut self) -> Result<u32, GgufError> {
        const EXPECTED: &str = "2 or 3";
        match self.u32()? {
            version @ (2 | 3) => Ok(version),
            1 => Err(self.wrong(
                "1, whose counts have another size",
                EXPECTED,
                "convert the model again from its checkpoint",
            )),
            swapped @ (0x0100_0000 | 0x0200_0000 | 0x0300_0000) => Err(self.wrong(
                format!("{} in big-endian order", swapped.swap_bytes()),
                format!("{EXPECTED} in little-endian order"),
                "convert the file to little-endian, for example with gguf_convert_endian",
            )),
            other => Err(self.wrong(other.to_string(), EXPECTED, "use a newer version of this program")),
        }
    }

    fn alignment(&mut self, metadata: &Metadata) -> Result<u32, GgufError> {
        const KEY: &str = "general.alignment";
        let found = match metadata.get(KEY) {
            None => return Ok(DEFAULT_ALIGNMENT),
            Some(&Value::U32(v)) if v.is_power_of_two() && ALIGNMENTS.contains(&v) => return Ok(v),
            Some(Value::U32(v)) => v.to_string(),
            Some(other) => format!("a value of type {}", other.type_name()),
        };
        self.field = Field::Key(KEY);
        let (from, to) = (ALIGNMENTS.start(), ALIGNMENTS.end());
        Err(self.wrong(found, format!("a u32 that is a power of two from {from} to {to}"), WRITTEN_WRONGLY))
    }

    fn metadata(&mut self, n_keys: usize) -> Result<Metadata, GgufError> {
        let mut metadata = Metadata::default();
        for i in 0..n_keys {
            self.field = Field::KeyNumber(i + 1, n_keys);
            let key = self.string()?;
            if key.is_empty() {
                return Err(self.wrong("an empty key", "a name", WRITTEN_WRONGLY));
            }
            self.field = Field::Key(key);
            if metadata.get(key).is_some() {
                return Err(self.wrong("the key a second time", "each key once", WRITTEN_WRONGLY));
            }
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
            _ => return Err(self.wrong(format!("value type {id}"), "0 to 12", WRITTEN_WRONGLY)),
        })
    }

    fn truth(&self, byte: u8) -> Result<bool, GgufError> {
        match byte {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.wrong(format!("byte {byte} as a truth value"), "0 or 1", WRITTEN_WRONGLY)),
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
            ARRAY_TYPE => {
                let found = "an array of arrays, which no runtime reads";
                return Err(self.wrong(found, "an array of numbers or texts", WRITTEN_WRONGLY));
            }
            10 => Array::U64(self.numbers(u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(f64::from_le_bytes)?),
            _ => return Err(self.wrong(format!("element type {id}"), "0 to 12", WRITTEN_WRONGLY)),
        })
    }

    fn tensors(&mut self, n_tensors: usize) -> Result<Vec<HeaderTensor>, GgufError> {
        // Grown as entries are seen: the count alone must not decide how much memory is taken.
        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        for i in 0..n_tensors {
            self.field = Field::TensorNumber(i + 1, n_tensors);
            let name = self.string()?;
            if name.is_empty() {
                return Err(self.wrong("an empty name", "a name", WRITTEN_WRONGLY));
            }
            self.field = Field::Tensor(name);
            if !names.insert(name) {
                return Err(self.wrong("the name a second time", "each name once", WRITTEN_WRONGLY));
            }
            tensors.push(self.tensor(name)?);
        }
        Ok(tensors)
    }

    fn tensor(&mut self, name: &str) -> Result<HeaderTensor, GgufError> {
        let rank = self.u32()?;
        if !(1..=MAX_DIMENSIONS).contains(&rank) {
            let found = format!("{rank} dimensions");
            return Err(self.wrong(found, format!("1 to {MAX_DIMENSIONS}"), WRITTEN_WRONGLY));
        }
        let mut shape = (0..rank).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let id = self.u32()?;
        let offset_bytes = self.u64()?;
        let block_type = BlockType::from_id(id).ok_or_else(|| self.unknown_type(id))?;
        let n_bytes = tensor_bytes(block_type, &shape)
            .map_err(|(found, expected)| self.wrong(found, expected, WRITTEN_WRONGLY))?;
        Ok(HeaderTensor { name: name.to_owned(), block_type, shape, offset_bytes, n_bytes })
    }

    fn unknown_type(&self, id: u32) -> GgufError {
        let known: Vec<_> = BlockType::all().map(|t| format!("{} {t}", t.id())).collect();
        let meaning = match id {
            4 | 5 | 31..=33 | 36..=38 => " (removed from ggml)",
            42 => " (raw FP8 in some private files, Q2_0 in ggml; both are refused)",
            _ => "",
        };
        let found = format!("type number {id}{meaning}");
        self.wrong(found, format!("one of {}", known.join(", ")), NEWER_OR_OTHER)
    }
}
