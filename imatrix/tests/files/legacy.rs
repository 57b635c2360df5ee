//! The legacy format: generations, validation, hostile files.

use crate::common::{DOWN, GATE, Scratch, legacy, message, open, open_with_columns};
use gguf_tools::importance::{Found, ImportanceSource, Matrix};
use imatrix::{Format, Generation, Imatrix, ImatrixError, Target};
use proptest::prelude::*;

fn small() -> Vec<u8> {
    legacy(
        &[(GATE, 2, &[2.0, 4.0, 6.0, 8.0, 2.0, 2.0]), (DOWN, 3, &[3.0, 0.0, 0.0, 9.0, 0.0, 0.0])],
        Some(5),
        Some("wiki.txt"),
    )
}

fn matrix(tensor: &str, expert_index: usize) -> Matrix<'_> {
    Matrix { tensor, source: None, expert_index, n_experts: 3, n_columns: 2 }
}

#[test]
fn each_generation_is_found_and_copied_to_the_same_bytes() {
    let scratch = Scratch::new();
    let entries: [(&str, i32, &[f32]); 1] = [(GATE, 2, &[2.0, 4.0])];
    let cases = [
        (None, None, Generation::EntriesOnly),
        (Some(5), None, Generation::ChunkCount),
        (Some(5), Some("wiki.txt"), Generation::Dataset),
        (Some(5), Some(""), Generation::Dataset),
    ];
    for (chunks, dataset, generation) in cases {
        let bytes = legacy(&entries, chunks, dataset);
        let imatrix = open(&bytes).unwrap();
        assert_eq!(imatrix.format(), Format::Legacy(generation));
        assert_eq!(imatrix.n_chunks(), chunks.map(|n| n as u64));
        let dataset = dataset.filter(|name| !name.is_empty());
        assert_eq!(imatrix.datasets(), dataset.as_slice());
        let copy = scratch.path("copy.dat");
        assert_eq!(imatrix.write(&copy, Target::Legacy, true).unwrap(), []);
        assert_eq!(std::fs::read(copy).unwrap(), bytes);
    }
}

#[test]
fn values_are_means_and_unseen_experts_are_never_weights() {
    let imatrix = open(&small()).unwrap();
    let means = |tensor, expert| imatrix.importance(&matrix(tensor, expert));
    assert_eq!(means(GATE, 0), Found::Values(vec![1.0, 2.0].into()));
    assert_eq!(means(GATE, 1), Found::Values(vec![3.0, 4.0].into()));
    assert_eq!(means(GATE, 2), Found::Unseen, "2 stored in 2 calls is the mark of an unseen expert");
    assert_eq!(means(DOWN, 0), Found::Values(vec![1.0, 0.0].into()));
    assert_eq!(means(DOWN, 2), Found::Unseen, "zeros");
    assert_eq!(means("blk.1.ffn_gate_exps.weight", 0), Found::NoEntry);
}

#[test]
fn lengths_that_do_not_fit_the_tensor_are_unusable_and_say_what_was_expected() {
    let imatrix = open(&small()).unwrap();
    for (n_experts, n_columns) in [(2, 2), (1, 2), (4, 2), (3, 3), (usize::MAX, 2)] {
        let Found::Unusable(problem) =
            imatrix.importance(&Matrix { n_experts, n_columns, ..matrix(GATE, 0) })
        else {
            panic!("{n_experts} x {n_columns} was accepted");
        };
        assert!(problem.contains(&format!("6 values, expected {n_experts} x {n_columns}")), "{problem}");
    }
    assert!(matches!(imatrix.importance(&matrix(GATE, 3)), Found::Unusable(_)), "expert 3 of 3");
}

#[test]
fn entries_by_expert_and_by_checkpoint_name_are_found_in_order() {
    let source = "layers.0.ffn.experts.1.w1.weight";
    let bytes = legacy(
        &[
            (&format!("{GATE}.expert.0"), 1, &[10.0, 11.0]),
            (&format!("{GATE}.expert_2"), 1, &[12.0, 13.0]),
            (source, 1, &[14.0, 15.0]),
            (DOWN, 1, &[1.5, 2.5]),
        ],
        None,
        None,
    );
    let imatrix = open(&bytes).unwrap();
    let found = |m: Matrix<'_>| match imatrix.importance(&m) {
        Found::Values(values) => values.to_vec(),
        other => panic!("{other:?}"),
    };
    assert_eq!(found(matrix(GATE, 0)), [10.0, 11.0]);
    assert_eq!(found(matrix(GATE, 2)), [12.0, 13.0]);
    assert_eq!(imatrix.importance(&matrix(GATE, 1)), Found::NoEntry);
    assert_eq!(found(Matrix { source: Some(source), ..matrix(GATE, 1) }), [14.0, 15.0]);
    assert_eq!(found(Matrix { n_experts: 1, ..matrix(DOWN, 0) }), [1.5, 2.5]);
}

#[test]
fn values_that_cannot_be_used_are_named_by_entry_expert_column_and_value() {
    let mut gate = vec![3.0_f32; 4 * 20];
    gate[3 * 20 + 17] = f32::NAN;
    gate[20] = f32::INFINITY;
    gate[2 * 20 + 1] = -0.5;
    let bytes = legacy(&[(GATE, 1, &gate), (DOWN, 0, &[0.0, 2.0])], None, None);
    let imatrix = open_with_columns(&bytes, &|name| (name == GATE).then_some(20)).unwrap();
    let problems: Vec<_> = imatrix.problems().iter().map(ToString::to_string).collect();
    let expected = "expected a finite value that is not negative";
    assert_eq!(
        problems,
        [
            format!("entry `{GATE}`, expert 1, column 0: found inf, {expected}"),
            format!("entry `{GATE}`, expert 2, column 1: found -0.5, {expected}"),
            format!("entry `{GATE}`, expert 3, column 17: found NaN, {expected}"),
            format!("entry `{DOWN}`, value 1: found 2, expected 0 where the count is 0"),
        ]
    );
    let ask = |expert_index| {
        imatrix.importance(&Matrix { tensor: GATE, source: None, expert_index, n_experts: 4, n_columns: 20 })
    };
    assert!(matches!(ask(0), Found::Values(_)), "the sound expert stays usable");
    for expert_index in 1..4 {
        assert!(matches!(ask(expert_index), Found::Unusable(_)));
    }
    let scratch = Scratch::new();
    let refused = imatrix.write(scratch.path("out.dat"), Target::Legacy, false).unwrap_err();
    assert!(matches!(refused, ImatrixError::UnusableValues { .. }));
    assert!(message(&refused).contains("column 17"), "{refused}");
}

#[test]
fn a_file_cut_at_any_byte_is_refused_or_is_an_older_generation() {
    let bytes = small();
    let whole_generations =
        [bytes.len(), bytes.len() - 4 - "wiki.txt".len(), bytes.len() - 8 - "wiki.txt".len()];
    for n in 0..bytes.len() {
        match open(&bytes[..n]) {
            Ok(imatrix) => {
                assert!(whole_generations.contains(&n), "cut at {n} was accepted");
                assert_eq!(imatrix.entries().len(), 2);
            }
            Err(error) => {
                assert!(!whole_generations.contains(&n), "cut at {n}: {error}");
                let text = message(&error);
                assert!(text.contains("expected") && text.contains("legacy"), "{text}");
            }
        }
    }
}

#[test]
fn bytes_after_the_end_duplicates_and_other_content_are_named() {
    let cases: [(Vec<u8>, &[&str]); 6] = [
        ([small(), vec![0]].concat(), &["1 bytes after the dataset name"]),
        (
            legacy(&[(GATE, 1, &[1.0]), (DOWN, 1, &[1.0]), (GATE, 1, &[2.0])], None, None),
            &[GATE, "a second time"],
        ),
        (b"<!DOCTYPE html><html>...".to_vec(), &["a web page"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0".to_vec(), &["Git LFS pointer"]),
        (Vec::new(), &["an empty file"]),
        (
            legacy(&[("a\u{e9}", 1, &[1.0])], None, None).into_iter().filter(|b| *b != 0xa9).collect(),
            &["UTF-8"],
        ),
    ];
    for (bytes, words) in cases {
        let text = message(&open(&bytes).unwrap_err());
        for word in words {
            assert!(text.contains(word), "{text}");
        }
    }
}

#[test]
fn every_length_set_to_zero_one_and_the_largest_gives_an_error_that_names_the_field() {
    let bytes = small();
    let name_len = 4;
    let n_calls = name_len + 4 + GATE.len();
    let n_values = n_calls + 4;
    let dataset_len = bytes.len() - "wiki.txt".len() - 4;
    let fields = [
        (0, "number of entries", vec![0, i32::MAX, -1, i32::MIN]),
        (name_len, "length of the name", vec![0, i32::MAX, -1]),
        (n_calls, "number of calls", vec![-1, i32::MIN]),
        (n_values, "number of values", vec![0, i32::MAX, -1]),
        (dataset_len, "length of the dataset name", vec![i32::MAX, -1]),
        (dataset_len - 4, "chunk count", vec![-1]),
    ];
    for (at, field, values) in fields {
        for value in values {
            let mut changed = bytes.clone();
            changed[at..at + 4].copy_from_slice(&value.to_le_bytes());
            let text = message(&open(&changed).unwrap_err());
            assert!(text.contains(&format!("{field} {value}")), "{text}");
        }
        let mut changed = bytes.clone();
        changed[at..at + 4].copy_from_slice(&1_i32.to_le_bytes());
        let _ = open(&changed);
    }
}

#[test]
fn a_legacy_file_is_read_whatever_its_suffix() {
    let scratch = Scratch::new();
    let path = scratch.write("flash.imatrix.gguf", &small());
    let imatrix = Imatrix::open(path).unwrap();
    assert_eq!(imatrix.format().to_string(), "legacy .dat with chunk count and dataset name");
    let provenance = imatrix.provenance().unwrap();
    assert_eq!(provenance.file_name, "flash.imatrix.gguf");
    assert_eq!(provenance.datasets, ["wiki.txt"]);
    assert_eq!((provenance.n_entries, provenance.n_chunks), (2, Some(5)));
    assert_eq!(provenance.sha256.len(), 64);
}

#[test]
fn a_missing_file_is_named() {
    let error = Imatrix::open("/nowhere/flash.dat").unwrap_err();
    assert!(error.to_string().contains("/nowhere/flash.dat"));
}

/// Small legacy files with some bytes replaced.
fn damaged() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec((0..small().len(), any::<u8>()), 1..6).prop_map(|changes| {
        let mut bytes = small();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        bytes
    })
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = open(&bytes);
    }

    #[test]
    fn changed_bytes_never_panic_and_never_give_bad_weights(bytes in damaged()) {
        if let Ok(imatrix) = open(&bytes) {
            for expert in 0..3 {
                if let Found::Values(values) = imatrix.importance(&matrix(GATE, expert)) {
                    prop_assert!(values.iter().all(|v| v.is_finite() && *v >= 0.0));
                    prop_assert!(values.iter().any(|v| *v > 0.0));
                }
            }
        }
    }
}
