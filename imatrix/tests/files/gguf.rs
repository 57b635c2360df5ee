//! The GGUF form: pairs, keys, counts, hostile files.

use gguf_tools::importance::{Found, ImportanceSource, Matrix};
use imatrix::{Format, Imatrix, ImatrixError};
use proptest::prelude::*;

use crate::common::{DOWN, GATE, Scratch, default_keys, gguf, gguf_of, message, open};

const QUERY: &str = "blk.0.attn_q_a.weight";

fn small() -> Vec<u8> {
    gguf(&[
        (GATE, [3, 2], &[2.0, 4.0, 0.0, 0.0, 9.0, 3.0], &[2.0, 0.0, 3.0]),
        (QUERY, [1, 4], &[4.0, 8.0, 12.0, 4.0], &[4.0]),
    ])
}

fn matrix(expert_index: usize) -> Matrix<'static> {
    Matrix { tensor: GATE, source: None, expert_index, n_experts: 3, n_columns: 2 }
}

#[test]
fn sums_are_divided_by_the_counts_of_each_expert() {
    let imatrix = open(&small()).unwrap();
    assert_eq!(imatrix.format(), Format::Gguf);
    assert_eq!(imatrix.datasets(), ["a.txt", "b.txt"]);
    assert_eq!((imatrix.n_chunks(), imatrix.chunk_size()), (Some(7), Some(512)));
    assert_eq!(imatrix.problems(), []);
    assert_eq!(imatrix.importance(&matrix(0)), Found::Values(vec![1.0, 2.0].into()));
    assert_eq!(imatrix.importance(&matrix(1)), Found::Unseen);
    assert_eq!(imatrix.importance(&matrix(2)), Found::Values(vec![3.0, 1.0].into()));
    let dense = Matrix { tensor: QUERY, source: None, expert_index: 0, n_experts: 1, n_columns: 4 };
    assert_eq!(imatrix.importance(&dense), Found::Values(vec![1.0, 2.0, 3.0, 1.0].into()));
}

#[test]
fn a_mean_of_one_is_a_measurement_where_each_expert_is_counted() {
    let counted = open(&gguf(&[(GATE, [3, 2], &[2.0; 6], &[2.0; 3])])).unwrap();
    assert_eq!(counted.importance(&matrix(0)), Found::Values(vec![1.0, 1.0].into()));
    // One count for a whole stack: a converted legacy file, with the legacy mark.
    let stored = [512.0, 512.0, 1024.0, 512.0, 0.0, 0.0];
    for shape in [[1, 6], [3, 2]] {
        let converted = open(&gguf(&[(GATE, shape, &stored, &[512.0])])).unwrap();
        assert_eq!(converted.importance(&matrix(0)), Found::Unseen);
        assert_eq!(converted.importance(&matrix(1)), Found::Values(vec![2.0, 1.0].into()));
        assert_eq!(converted.importance(&matrix(2)), Found::Unseen);
    }
}

#[test]
fn the_width_in_the_file_must_be_the_tensors() {
    let imatrix = open(&gguf(&[(GATE, [2, 3], &[1.0; 6], &[2.0; 2])])).unwrap();
    let Found::Unusable(problem) = imatrix.importance(&matrix(0)) else { panic!("3 columns taken for 2") };
    assert!(problem.contains("has 3 columns, expected 2"), "{problem}");
}

#[test]
fn counts_and_values_that_cannot_be_used_are_named_and_spare_the_other_experts() {
    let sums = [1.0, 2.0, 3.0, 4.0, f32::NAN, 6.0];
    for (counts, problem) in [
        ([2.0, 0.0, 1.0], "expert 1, column 0: found 3, expected 0 where the count is 0"),
        ([2.0, f32::NAN, 1.0], "expert 1: found a count of NaN"),
        ([2.0, -1.0, 1.0], "expert 1: found a count of -1"),
        ([2.0, f32::INFINITY, 1.0], "expert 1: found a count of inf"),
    ] {
        let imatrix = open(&gguf(&[(GATE, [3, 2], &sums, &counts)])).unwrap();
        let texts: Vec<_> = imatrix.problems().iter().map(ToString::to_string).collect();
        assert!(texts.iter().any(|text| text.contains(problem)), "{texts:?}");
        assert!(texts.iter().any(|text| text.contains("expert 2, column 0: found NaN")), "{texts:?}");
        assert!(matches!(imatrix.importance(&matrix(0)), Found::Values(_)));
        assert!(matches!(imatrix.importance(&matrix(1)), Found::Unusable(_)));
        assert!(matches!(imatrix.importance(&matrix(2)), Found::Unusable(_)));
    }
}

#[test]
fn pairs_keys_and_types_that_are_missing_are_all_named() {
    let sums: &[f32] = &[1.0, 2.0];
    let tensors = [
        (format!("{GATE}.in_sum2"), [1, 2], sums),
        (format!("{DOWN}.counts"), [2, 1], sums),
        ("stray".to_owned(), [1, 2], sums),
        (format!("{QUERY}.in_sum2"), [1, 2], sums),
        (format!("{QUERY}.counts"), [2, 1], sums),
    ];
    let keys: Vec<_> = default_keys().into_iter().filter(|(key, _)| *key != "imatrix.chunk_size").collect();
    let error = open(&gguf_of(&keys, &tensors)).unwrap_err();
    let ImatrixError::Damaged { problems, .. } = &error else { panic!("{error}") };
    assert_eq!(problems.len(), 5, "{error}");
    let text = message(&error);
    for words in [
        "GGUF imatrix",
        "imatrix.chunk_size",
        "`blk.0.ffn_gate_exps.weight.counts`",
        "`blk.0.ffn_down_exps.weight.in_sum2`",
        "`stray`",
        "found 2 counts, expected 1, one for each matrix",
    ] {
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn a_model_is_no_imatrix_and_the_message_says_so() {
    let mut keys = default_keys();
    keys[0].1 = [8_u32.to_le_bytes().as_slice(), &5_u64.to_le_bytes(), b"model"].concat();
    let text = message(&open(&gguf_of(&keys, &[])).unwrap_err());
    assert!(text.contains("`general.type` is `model`"), "{text}");
    let text = message(&open(&gguf_of(&[], &[])).unwrap_err());
    assert!(text.contains("without the keys of an imatrix"), "{text}");
    assert!(open(&gguf_of(&default_keys(), &[])).is_err(), "no entries");
}

#[test]
fn a_file_cut_at_any_byte_is_refused() {
    let bytes = small();
    let padding_after_the_last_count = 32 - 4;
    for n in 0..bytes.len() - padding_after_the_last_count {
        let error = open(&bytes[..n]).expect_err(&format!("cut at {n} of {} was accepted", bytes.len()));
        assert!(!message(&error).is_empty());
    }
}

#[test]
fn a_gguf_file_is_read_whatever_its_suffix() {
    let scratch = Scratch::new();
    let imatrix = Imatrix::open(scratch.write("flash.dat", &small())).unwrap();
    assert_eq!(imatrix.format().to_string(), "GGUF imatrix");
}

#[test]
fn every_byte_set_to_zero_one_and_the_largest_never_panics() {
    let bytes = small();
    for at in 0..bytes.len() {
        for value in [0, 1, u8::MAX] {
            let mut changed = bytes.clone();
            changed[at] = value;
            if let Err(error) = open(&changed) {
                assert!(message(&error).contains("tmp"), "the message names the file: {error}");
            }
        }
    }
}

proptest! {
    #[test]
    fn changed_bytes_never_panic_and_never_give_bad_weights(
        changes in prop::collection::vec((0..small().len(), any::<u8>()), 1..6),
    ) {
        let mut bytes = small();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        if let Ok(imatrix) = open(&bytes) {
            for expert in 0..3 {
                if let Found::Values(values) = imatrix.importance(&matrix(expert)) {
                    prop_assert!(values.iter().all(|v| v.is_finite() && *v >= 0.0));
                    prop_assert!(values.iter().any(|v| *v > 0.0));
                }
            }
        }
    }
}
