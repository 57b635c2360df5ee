//! Damaged, truncated and hostile GGUF files: always an error that names file and field, never a panic.

use std::path::{Path, PathBuf};

use gguf_tools::gguf::{Gguf, GgufError, Header, parse_header};
use proptest::prelude::*;
use test_vectors::gguf::{GgufBytes, RawValue};

fn parse(bytes: &[u8]) -> Result<Header, GgufError> {
    parse_header(bytes, Path::new("model.gguf"))
}

fn message(file: &GgufBytes) -> String {
    parse(&file.make().bytes).unwrap_err().to_string()
}

fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

fn write(folder: &tempfile::TempDir, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_header_cut_at_any_byte_is_an_error_that_names_file_and_field() {
    let made = GgufBytes::small().make();
    for end in 0..made.header_end {
        let message = parse(&made.bytes[..end]).unwrap_err().to_string();
        assert!(message.contains("model.gguf"), "cut at {end}: {message}");
        let named = ["it is empty", "it has", "version", "number of", "key `", "key ", "tensor "];
        assert!(named.iter().any(|field| message.contains(field)), "cut at {end}: {message}");
    }
    assert!(parse(&made.bytes[..made.header_end]).is_ok());
}

#[test]
fn counts_and_lengths_set_to_their_extremes_are_refused() {
    let made = GgufBytes::small().make();
    let with = |place: &std::ops::Range<usize>, n: u64| {
        let mut bytes = made.bytes.clone();
        bytes[place.clone()].copy_from_slice(&n.to_le_bytes());
        parse(&bytes)
    };
    for (what, place) in &made.counts {
        // A last tensor of 2^60 values is representable: that it is not all there shows when it is asked for.
        let large = if what.starts_with("dimension") { 1 << 62 } else { 1 << 60 };
        for n in [u64::MAX, u64::MAX - 7, 1 << 63, (1 << 63) - 1, large] {
            let message = with(place, n).expect_err(what).to_string();
            assert_says(&message, &["model.gguf", "found", "expected"]);
        }
        for n in [0, 1] {
            if let Err(error) = with(place, n) {
                assert_says(&error.to_string(), &["model.gguf", "found", "expected"]);
            }
        }
    }
}

#[test]
fn a_size_that_is_not_representable_names_tensor_shape_and_type() {
    let file = GgufBytes::default().tensor("big", 0, &[1 << 22, (1 << 42) + 1], 64, 0);
    assert_says(&message(&file), &["`big`", "4398046511105", "F32", "not representable"]);
    let values = GgufBytes::default().tensor("many", 16, &[1 << 32, 1 << 31], 64, 0);
    assert_says(&message(&values), &["`many`", "not representable"]);
}

#[test]
fn a_dimension_of_zero_is_refused() {
    let file = GgufBytes::default().tensor("none", 0, &[8, 0], 0, 0);
    assert_says(&message(&file), &["`none`", "no dimension of 0"]);
}

#[test]
fn absurd_counts_are_refused_with_the_bytes_that_are_left() {
    let tensors = GgufBytes { n_tensors: Some(1 << 60), ..GgufBytes::default() };
    assert_says(&message(&tensors), &["number of tensors", "1152921504606846976", "bytes that are left"]);
    let keys = GgufBytes { n_keys: Some(u64::MAX), ..GgufBytes::default() };
    assert_says(&message(&keys), &["number of metadata keys"]);
    let text = GgufBytes::default().key("k", RawValue::Raw(8, (1_u64 << 63).to_le_bytes().to_vec()));
    assert_says(&message(&text), &["key `k`", "9223372036854775808"]);
    let mut array = 0_u32.to_le_bytes().to_vec();
    array.extend((1_u64 << 61).to_le_bytes());
    let array = GgufBytes::default().key("a", RawValue::Raw(9, array));
    assert_says(&message(&array), &["key `a`", "a count of"]);
}

#[test]
fn a_key_or_tensor_that_occurs_twice_is_named() {
    let key = |file: GgufBytes| file.key("general.name", RawValue::U32(1));
    assert_says(&message(&key(key(GgufBytes::default()))), &["`general.name`", "a second time"]);
    let tensor = |file: GgufBytes| file.tensor("t", 0, &[8], 32, 0);
    assert_says(&message(&tensor(tensor(GgufBytes::default()))), &["tensor `t`", "a second time"]);
}

#[test]
fn empty_names_are_refused() {
    assert_says(&message(&GgufBytes::default().key("", RawValue::U32(1))), &["metadata key 1 of 1"]);
    assert_says(&message(&GgufBytes::default().tensor("", 0, &[8], 32, 0)), &["tensor 1 of 1"]);
}

#[test]
fn only_an_alignment_that_is_a_u32_power_of_two_within_bounds_is_taken() {
    let wrong = [
        (RawValue::U32(0), "found 0"),
        (RawValue::U32(3), "found 3"),
        (RawValue::U32(4), "found 4"),
        (RawValue::U32(1 << 31), "found 2147483648"),
        (RawValue::I32(32), "type i32"),
        (RawValue::String("32".to_owned()), "type string"),
    ];
    for (value, found) in wrong {
        let file = GgufBytes::small().key("general.alignment", value);
        assert_says(&message(&file), &["`general.alignment`", found, "8 to 65536"]);
    }
    for alignment in [8, 64, 65536] {
        let file = GgufBytes { alignment, ..GgufBytes::small() };
        let made = file.key("general.alignment", RawValue::U32(alignment as u32)).make();
        let header = parse(&made.bytes).unwrap();
        assert_eq!(header.alignment as usize, alignment);
        assert_eq!(header.data_offset_bytes as usize, made.data_start);
    }
}

#[test]
fn a_rank_out_of_range_is_refused() {
    for rank in [0, 5, 9, 1 << 31, u32::MAX] {
        let mut file = GgufBytes::default().tensor("t", 0, &[8], 32, 0);
        file.tensors[0].rank = Some(rank);
        assert_says(&message(&file), &["tensor `t`", &format!("found {rank} dimensions"), "1 to 4"]);
    }
}

#[test]
fn a_row_that_is_no_whole_number_of_blocks_is_refused() {
    let file = GgufBytes::default().tensor("t", 16, &[160, 2], 132, 0);
    assert_says(&message(&file), &["tensor `t`", "rows of 160 values", "multiple of 256", "IQ2_XXS"]);
}

#[test]
fn an_unknown_type_is_named_with_the_types_that_are_known() {
    let file = GgufBytes::default().tensor("known", 39, &[32], 17, 0).tensor("unknown", 200, &[32], 17, 0);
    assert_says(&message(&file), &["tensor `unknown`", "type number 200", "39 MXFP4", "16 IQ2_XXS"]);
    let private = GgufBytes::default().tensor("fp8", 42, &[128], 129, 0);
    assert_says(&message(&private), &["tensor `fp8`", "type number 42", "raw FP8", "Q2_0"]);
    let removed = GgufBytes::default().tensor("old", 31, &[32], 18, 0);
    assert_says(&message(&removed), &["type number 31", "removed"]);
}

#[test]
fn other_versions_are_refused_by_name() {
    let cases = [(1, "found 1,"), (3 << 24, "3 in big-endian order"), (4, "found 4"), (0, "found 0")];
    for (version, found) in cases {
        let file = GgufBytes { version, ..GgufBytes::small() };
        assert_says(&message(&file), &["version", found, "2 or 3"]);
    }
    assert!(parse(&GgufBytes { version: 2, ..GgufBytes::small() }.make().bytes).is_ok());
}

#[test]
fn what_is_no_gguf_file_is_recognised() {
    let mut safetensors = 100_u64.to_le_bytes().to_vec();
    safetensors.extend(br#"{"embed.weight":{"dtype":"BF16"}}"#);
    let cases: [(&[u8], &str); 12] = [
        (b"", "empty"),
        (b"GG", "it has 2 bytes"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\xef\xbb\xbf\r\n <HTML lang=en>", "web page"),
        (b"<?xml version='1.0'?><Error>", "XML"),
        (br#"{"error":"Entry not found"}"#, "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "Git LFS pointer"),
        (&[0; 200], "zeros"),
        (b"tjgg\x03\0\0\0", "before GGUF"),
        (&safetensors, "safetensors"),
        (b"\x7fELF\x02\x01\x01\0", "7f, 45, 4c, 46"),
        (b"gguf\x03\0\0\0", "67, 67, 75, 66"),
    ];
    for (bytes, says) in cases {
        let error = parse(bytes).unwrap_err();
        assert!(matches!(error, GgufError::NotGguf { .. }), "{error}");
        assert_says(&error.to_string(), &["model.gguf", says]);
    }
}

#[test]
fn values_that_break_the_format_are_named_by_key() {
    let truth = GgufBytes::default().key("b", RawValue::Raw(7, vec![2]));
    assert_says(&message(&truth), &["key `b`", "byte 2 as a truth value"]);
    let text = GgufBytes::default().key("t", RawValue::Raw(8, b"\x02\0\0\0\0\0\0\0a\xff".to_vec()));
    assert_says(&message(&text), &["key `t`", "not UTF-8"]);
    let nested = GgufBytes::default().key("n", RawValue::Raw(9, vec![9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
    assert_says(&message(&nested), &["key `n`", "array of arrays"]);
    let unknown = GgufBytes::default().key("v", RawValue::Raw(13, vec![0; 8]));
    assert_says(&message(&unknown), &["key `v`", "value type 13"]);
}

#[test]
fn a_tensor_whose_region_is_too_short_is_named_and_no_other() {
    let mut file = GgufBytes::default();
    for i in 0..3 {
        file = file.tensor(&format!("blk.{i}.ffn_gate_exps.weight"), 16, &[256, 8, 8], 64 * 66, i);
    }
    file.tensors[0].data.truncate(63 * 66);
    let made = file.make();
    let error = parse(&made.bytes).unwrap_err();
    let GgufError::Regions { problems, .. } = &error else { panic!("{error}") };
    assert_eq!(problems.len(), 1);
    assert_says(
        &error.to_string(),
        &["`blk.0.ffn_gate_exps.weight`", "4160 bytes reserved", "4224 bytes for"],
    );

    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, &made.bytes);
    assert!(matches!(Gguf::open(&path), Err(GgufError::Regions { .. })));
    let (gguf, problems) = Gguf::open_collecting(&path).unwrap();
    assert_eq!((gguf.tensors().len(), problems.len()), (3, 1));
}

#[test]
fn every_short_tensor_is_listed() {
    let mut file = GgufBytes::default();
    for i in 0..5 {
        file = file.tensor(&format!("t{i}"), 0, &[64], if i == 4 { 256 } else { 224 }, i);
    }
    let GgufError::Regions { problems, .. } = parse(&file.make().bytes).unwrap_err() else { panic!() };
    let names: Vec<_> = problems.iter().map(|problem| problem.tensor.as_str()).collect();
    assert_eq!(names, ["t0", "t1", "t2", "t3"]);
}

#[test]
fn offsets_that_overlap_run_over_or_are_not_aligned_are_refused() {
    let at = |offsets: [u64; 2]| {
        let mut file = GgufBytes::default().tensor("a", 0, &[8], 32, 0).tensor("b", 0, &[8], 32, 0);
        file.tensors[0].offset = Some(offsets[0]);
        file.tensors[1].offset = Some(offsets[1]);
        parse(&file.make().bytes)
    };
    assert!(at([0, 32]).is_ok());
    assert!(at([64, 0]).is_ok(), "order is free and gaps are allowed");
    assert_says(&at([0, 0]).unwrap_err().to_string(), &["tensor `a`", "0 bytes reserved before `b`"]);
    assert_says(&at([0, 33]).unwrap_err().to_string(), &["tensor `b`", "offset 33", "alignment 32"]);
    for offset in [u64::MAX - 31, 1 << 63, (1 << 63) - 32] {
        assert_says(&at([0, offset]).unwrap_err().to_string(), &["tensor `b`", "2^63"]);
    }
}

#[test]
fn offsets_out_of_directory_order_open_but_are_not_sequential() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = GgufBytes::default().tensor("a", 0, &[8], 32, 1).tensor("b", 0, &[8], 32, 2);
    assert!(Gguf::open(write(&folder, &file.make().bytes)).unwrap().sequential_offsets());
    file.tensors[0].offset = Some(32);
    file.tensors[1].offset = Some(0);
    let gguf = Gguf::open(write(&folder, &file.make().bytes)).unwrap();
    assert!(!gguf.sequential_offsets());
    assert_eq!(gguf.data(gguf.tensor("a").unwrap()).unwrap(), [2; 32]);
}

#[test]
fn data_that_is_cut_off_is_an_error_of_the_tensor_only() {
    let folder = tempfile::tempdir().unwrap();
    let made = GgufBytes::small().make();
    let n = made.bytes.len();
    let padding = 32 - (6 * 17) % 32;
    let cuts = [(n, 0), (n - padding, 0), (n - padding - 1, 1), (made.data_start, 6), (made.header_end, 6)];
    for (end, n_missing) in cuts {
        let gguf = Gguf::open(write(&folder, &made.bytes[..end])).unwrap();
        assert_eq!(gguf.missing_data().len(), n_missing, "cut at {end}");
        assert_eq!(gguf.metadata().len(), 6);
        if n_missing > 0 {
            let last = &gguf.tensors()[5];
            let error = gguf.data(last).unwrap_err();
            assert!(matches!(&error, GgufError::Truncated { file_bytes, .. } if *file_bytes == end as u64));
            assert_says(&error.to_string(), &["model.gguf", &last.name, &end.to_string(), "resume"]);
        }
    }
}

#[test]
fn a_shape_larger_than_the_file_is_refused_when_its_data_is_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = GgufBytes::default().tensor("t", 1, &[1024, 1024], 64, 7).make();
    let gguf = Gguf::open(write(&folder, &file.bytes)).unwrap();
    let error = gguf.data(gguf.tensor("t").unwrap()).unwrap_err().to_string();
    assert_says(&error, &["tensor `t`", &(file.data_start + 2 * 1024 * 1024).to_string()]);
}

#[test]
fn an_absent_file_and_a_folder_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(Gguf::open(folder.path()).unwrap_err(), GgufError::Open { .. }));
    assert!(matches!(Gguf::open(folder.path().join("no.gguf")).unwrap_err(), GgufError::Open { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn flipped_bytes_never_panic(flips in prop::collection::vec((any::<u16>(), any::<u8>()), 1..6)) {
        let made = GgufBytes::small().make();
        let mut bytes = made.bytes;
        for (at, value) in flips {
            bytes[usize::from(at) % made.header_end] ^= value;
        }
        if let Err(error) = parse(&bytes) {
            prop_assert!(error.to_string().contains("model.gguf"));
        }
    }

    #[test]
    fn random_bytes_behind_the_magic_never_panic(rest in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(rest);
        if let Ok(header) = parse(&bytes) {
            prop_assert!(header.data_offset_bytes < bytes.len() as u64 + 65536);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn opened_files_with_flipped_bytes_hand_out_only_bytes_of_the_file(
        flips in prop::collection::vec((any::<u16>(), any::<u8>()), 1..4),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let made = GgufBytes::small().make();
        let mut bytes = made.bytes;
        for (at, value) in flips {
            bytes[usize::from(at) % made.header_end] ^= value;
        }
        if let Ok((gguf, _)) = Gguf::open_collecting(write(&folder, &bytes)) {
            let there = gguf.tensors().iter().filter(|t| gguf.data(t).is_ok()).count();
            prop_assert_eq!(gguf.missing_data().len() + there, gguf.tensors().len());
            let _ = gguf.sequential_offsets();
        }
    }
}
