//! One safetensors file: mapped, its header checked and, if it is damaged, diagnosed by tensor and number.
#![expect(
    unsafe_code,
    reason = "mapping a file, and telling the system that mapped pages are no longer needed"
)]

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use memmap2::{Mmap, UncheckedAdvice};
use safetensors::{Dtype, SafeTensors};

use super::ShardProblem;

/// Longest header that is read, in bytes: the limit of the safetensors format.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the length in front of the header.
const LENGTH_BYTES: usize = 8;

/// One tensor as the header of its shard describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceTensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Stored type.
    pub dtype: Dtype,
    /// Stored shape, outermost first (of packed bytes, for FP4 stored as I8).
    pub shape: Vec<u64>,
    /// Index into [`super::Checkpoint::shard_paths`].
    pub shard: usize,
    /// Bytes within that file.
    pub bytes: Range<usize>,
}

impl SourceTensor {
    /// Stored bytes.
    pub fn n_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }
}

/// A mapped file.
#[derive(Debug)]
pub(super) struct Shard {
    map: Mmap,
}

impl Shard {
    /// Maps a file and reads its header. `index`: what its tensors will call their shard.
    pub(super) fn open(path: &Path, index: usize) -> Result<(Self, Vec<SourceTensor>), ShardProblem> {
        let problem = |problem: String| ShardProblem { path: path.to_owned(), problem };
        let file = File::open(path).map_err(|e| problem(open_failure(path, &e)))?;
        // SAFETY: the mapping is read-only. A program that changes a checkpoint while it is read gets wrong values or a
        // bus error, as with every tool that maps weights; nothing here relies on two reads being equal.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| problem(format!("cannot be mapped: {e}")))?;
        let tensors = read_header(&map, index).map_err(problem)?;
        Ok((Self { map }, tensors))
    }

    /// The bytes of a tensor of this shard.
    pub(super) fn bytes(&self, tensor: &SourceTensor) -> &[u8] {
        &self.map[tensor.bytes.clone()]
    }

    /// Lets the system take back the pages of a tensor. They are read again from the file if they are used again.
    pub(super) fn release(&self, tensor: &SourceTensor) {
        // SAFETY: the mapping is of a file and never written to, so dropping its pages loses nothing: a later read
        // brings the same bytes back.
        let advised = unsafe {
            self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, tensor.bytes.start, tensor.bytes.len())
        };
        // Only a hint: where it is not possible the pages stay until the system needs them.
        let _ = advised;
    }
}

fn open_failure(path: &Path, error: &std::io::Error) -> String {
    if error.kind() != std::io::ErrorKind::NotFound {
        return format!("cannot be opened: {error}");
    }
    let partial = [".part", ".aria2", ".incomplete"].iter().find_map(|suffix| {
        let mut name = path.file_name()?.to_owned();
        name.push(suffix);
        path.with_file_name(&name).exists().then(|| name.to_string_lossy().into_owned())
    });
    match partial {
        Some(name) => format!("is absent, but the partial download {name} is there; finish the download"),
        None => "is absent; finish the download".to_owned(),
    }
}

/// Reads the header of a whole file.
pub(super) fn read_header(file: &[u8], shard: usize) -> Result<Vec<SourceTensor>, String> {
    if let Some(content) = foreign_content(file) {
        return Err(content);
    }
    let header_bytes = header_length(file, file.len() as u64)? as usize;
    let (_, header) =
        SafeTensors::read_metadata(file).map_err(|e| diagnosis(file, header_bytes, &e.to_string()))?;
    let data_start = LENGTH_BYTES + header_bytes;
    let mut tensors: Vec<SourceTensor> = header
        .tensors()
        .into_iter()
        .map(|(name, info)| SourceTensor {
            name,
            dtype: info.dtype,
            shape: info.shape.iter().map(|&n| n as u64).collect(),
            shard,
            bytes: data_start + info.data_offsets.0..data_start + info.data_offsets.1,
        })
        .collect();
    tensors.sort_by_key(|tensor| tensor.bytes.start);
    Ok(tensors)
}

/// Recognises what often lies where weights should.
fn foreign_content(file: &[u8]) -> Option<String> {
    let start = String::from_utf8_lossy(&file[..file.len().min(64)]).trim_start().to_ascii_lowercase();
    if file.is_empty() {
        Some("is empty; download it again".to_owned())
    } else if start.starts_with("<!doctype") || start.starts_with("<html") {
        Some("is a web page, not safetensors; download the file itself".to_owned())
    } else if start.starts_with("version https://git-lfs") {
        Some("is a Git LFS pointer, not safetensors; fetch the content with `git lfs pull`".to_owned())
    } else if file.starts_with(b"GGUF") {
        Some("is a GGUF file, not safetensors".to_owned())
    } else {
        None
    }
}

/// Length of the header of a file of `file_bytes` bytes that begins with `start`.
pub(crate) fn header_length(start: &[u8], file_bytes: u64) -> Result<u64, String> {
    let Some(length) = start.first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("has {file_bytes} bytes, too few for a safetensors header; download it again"));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(format!(
            "announces a header of {length} bytes, the limit is {MAX_HEADER_BYTES}; this is not a safetensors file"
        ));
    }
    let present = file_bytes - LENGTH_BYTES as u64;
    if length > present {
        return Err(format!(
            "announces a header of {length} bytes, but only {present} follow; the download is incomplete"
        ));
    }
    Ok(length)
}

/// What is wrong with a header that the safetensors crate refuses, by tensor and number.
fn diagnosis(file: &[u8], header_bytes: usize, reason: &str) -> String {
    let json = &file[LENGTH_BYTES..LENGTH_BYTES + header_bytes];
    let data_bytes = (file.len() - LENGTH_BYTES - header_bytes) as u64;
    header_entries(json, data_bytes).err().unwrap_or_else(|| format!("the header is refused: {reason}"))
}

/// One tensor of a header.
#[derive(Debug)]
pub(crate) struct HeaderEntry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) start_byte: u64,
    pub(crate) n_bytes: u64,
}

/// The tensors of a header in front of `data_bytes` bytes of data, or what is wrong with it by tensor and number.
pub(crate) fn header_entries(json: &[u8], data_bytes: u64) -> Result<Vec<HeaderEntry>, String> {
    let entries: BTreeMap<String, serde_json::Value> = serde_json::from_slice(json)
        .map_err(|e| format!("the header is not a JSON object ({e}); download the file again"))?;
    let mut regions = Vec::new();
    for (name, entry) in entries.iter().filter(|(name, _)| *name != "__metadata__") {
        regions.push(region_of(name, entry)?);
    }
    regions.sort_unstable_by_key(|region| (region.start_byte, region.n_bytes));
    let mut expected_start = 0;
    for region in &regions {
        let (name, start) = (&region.name, region.start_byte);
        if start != expected_start {
            return Err(format!(
                "tensor `{name}` starts at data byte {start}, but {expected_start} bytes precede it; \
                 data must follow each other without gap or overlap"
            ));
        }
        expected_start = start + region.n_bytes;
    }
    if let Some(region) = regions.iter().find(|region| region.start_byte + region.n_bytes > data_bytes) {
        let (name, start, end) = (&region.name, region.start_byte, region.start_byte + region.n_bytes);
        return Err(format!(
            "the header says tensor `{name}` has data bytes {start}..{end}, but the file ends at {data_bytes}; \
             the download is incomplete"
        ));
    }
    if expected_start < data_bytes {
        return Err(format!(
            "{} bytes follow the last tensor; the file is damaged",
            data_bytes - expected_start
        ));
    }
    Ok(regions)
}

/// Data bytes of one tensor of an untrusted header, or what is wrong with its entry.
fn region_of(name: &str, entry: &serde_json::Value) -> Result<HeaderEntry, String> {
    let text = entry.get("dtype").and_then(serde_json::Value::as_str);
    let Some(dtype) = text.and_then(|t| serde_json::from_value::<Dtype>(t.into()).ok()) else {
        return Err(format!(
            "tensor `{name}` has dtype {}; understood are F32, F16, BF16, F8_E4M3, F8_E8M0, F4, I8, U8, I32 and I64",
            text.unwrap_or("(none)")
        ));
    };
    let numbers = |field: &str| -> Option<Vec<u64>> {
        entry.get(field)?.as_array()?.iter().map(serde_json::Value::as_u64).collect()
    };
    let (Some(shape), Some(offsets)) = (numbers("shape"), numbers("data_offsets")) else {
        return Err(format!("tensor `{name}` lacks a shape or data offsets of whole numbers"));
    };
    let &[start, end] = offsets.as_slice() else {
        return Err(format!("tensor `{name}` has {} data offsets, expected 2", offsets.len()));
    };
    let bits = shape.iter().try_fold(dtype.bitsize() as u64, |bits, &n| bits.checked_mul(n));
    match (bits, end.checked_sub(start)) {
        (Some(bits), Some(stored)) if bits.is_multiple_of(8) && bits / 8 == stored => {
            Ok(HeaderEntry { name: name.to_owned(), dtype, shape, start_byte: start, n_bytes: stored })
        }
        (Some(bits), Some(_)) if !bits.is_multiple_of(8) => Err(format!(
            "tensor `{name}`, {dtype} {shape:?}: an odd number of 4-bit values fills no whole byte"
        )),
        (Some(bits), Some(stored)) => Err(format!(
            "tensor `{name}`, {dtype} {shape:?}, needs {} bytes, but its data range {start}..{end} has {stored}",
            bits / 8
        )),
        (None, _) => {
            Err(format!("tensor `{name}`, {dtype} {shape:?}: the size in bytes is not representable"))
        }
        (_, None) => Err(format!("tensor `{name}`: its data range {start}..{end} ends before it starts")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A file with this header and that many bytes of data.
    fn file(header: &serde_json::Value, data_bytes: usize) -> Vec<u8> {
        let header = header.to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + data_bytes, 1);
        file
    }

    fn problem(header: &serde_json::Value, data_bytes: usize) -> String {
        read_header(&file(header, data_bytes), 0).unwrap_err()
    }

    #[test]
    fn a_file_cut_at_any_byte_is_refused_with_numbers() {
        let whole = file(
            &json!({
                "a": { "dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24] },
                "b.weight": { "dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [24, 40] },
            }),
            40,
        );
        assert_eq!(read_header(&whole, 0).unwrap().len(), 2);
        for length in 0..whole.len() {
            let message = read_header(&whole[..length], 0).unwrap_err();
            assert!(
                ["empty", "too few", "incomplete"].iter().any(|word| message.contains(word)),
                "cut at {length}: {message}"
            );
        }
        let cut = read_header(&whole[..whole.len() - 10], 0).unwrap_err();
        assert!(cut.contains("`b.weight`") && cut.contains("24..40") && cut.contains("ends at 30"), "{cut}");
    }

    #[test]
    fn a_byte_range_that_does_not_fit_the_shape_is_refused_by_name_and_number() {
        let weight = problem(
            &json!({ "w": { "dtype": "F8_E4M3", "shape": [128, 128], "data_offsets": [0, 128] } }),
            128,
        );
        assert!(weight.contains("`w`") && weight.contains("[128, 128]"), "{weight}");
        assert!(weight.contains("16384 bytes") && weight.contains("has 128"), "{weight}");
        let scale = problem(
            &json!({ "w.scale": { "dtype": "F8_E8M0", "shape": [2, 2], "data_offsets": [0, 3] } }),
            3,
        );
        assert!(
            scale.contains("`w.scale`") && scale.contains("4 bytes") && scale.contains("has 3"),
            "{scale}"
        );
        let packed =
            problem(&json!({ "e": { "dtype": "I8", "shape": [4, 16], "data_offsets": [0, 60] } }), 60);
        assert!(packed.contains("`e`") && packed.contains("64 bytes"), "{packed}");
    }

    #[test]
    fn sizes_that_no_file_can_have_are_refused_before_anything_is_allocated() {
        let wide = problem(
            &json!({ "w": { "dtype": "F32", "shape": [1_u64 << 40, 1_u64 << 40], "data_offsets": [0, 4] } }),
            4,
        );
        assert!(wide.contains("not representable"), "{wide}");
        let mut long = (1_u64 << 40).to_le_bytes().to_vec();
        long.extend([0; 8]);
        let message = read_header(&long, 0).unwrap_err();
        assert!(message.contains("1099511627776") && message.contains("100000000"), "{message}");
    }

    #[test]
    fn gaps_overlaps_backward_ranges_and_trailing_bytes_are_refused() {
        let two = |a: [u64; 2], b: [u64; 2], data| {
            problem(
                &json!({
                    "a": { "dtype": "U8", "shape": [4], "data_offsets": a },
                    "b": { "dtype": "U8", "shape": [4], "data_offsets": b },
                }),
                data,
            )
        };
        assert!(two([0, 4], [5, 9], 9).contains("`b` starts at data byte 5, but 4 bytes"));
        assert!(two([0, 4], [2, 6], 6).contains("without gap or overlap"));
        assert!(two([0, 4], [8, 4], 8).contains("ends before it starts"));
        assert!(two([0, 4], [4, 8], 11).contains("3 bytes follow"));
    }

    #[test]
    fn unknown_types_and_odd_packed_widths_are_refused_by_name() {
        let odd = problem(&json!({ "e": { "dtype": "F4", "shape": [3, 3], "data_offsets": [0, 5] } }), 5);
        assert!(odd.contains("`e`") && odd.contains("odd number"), "{odd}");
        let unknown = problem(&json!({ "q": { "dtype": "Q9", "shape": [1], "data_offsets": [0, 1] } }), 1);
        assert!(
            unknown.contains("`q`") && unknown.contains("Q9") && unknown.contains("F8_E8M0"),
            "{unknown}"
        );
    }

    #[test]
    fn what_often_lies_in_place_of_weights_is_recognised() {
        let message = |bytes: &[u8]| read_header(bytes, 0).unwrap_err();
        assert!(message(b"<!DOCTYPE html><html>").contains("web page"));
        assert!(message(b"version https://git-lfs.github.com/spec/v1\noid sha256:0").contains("LFS pointer"));
        assert!(message(b"GGUF\x03\0\0\0\0\0\0\0").contains("GGUF"));
        assert!(message(b"").contains("empty"));
    }
}
