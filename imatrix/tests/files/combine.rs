//! Writing, converting, merging, comparing.

use gguf_tools::importance::{Found, ImportanceSource, Matrix};
use imatrix::{Entry, Imatrix, ImatrixError, Loss, Target};

use crate::common::{DOWN, GATE, Scratch, gguf, legacy, message, open, open_with_columns};

fn means(imatrix: &Imatrix, tensor: &str, n_experts: usize) -> Vec<Option<Vec<f32>>> {
    (0..n_experts)
        .map(|expert_index| {
            match imatrix.importance(&Matrix { tensor, source: None, expert_index, n_experts, n_columns: 2 })
            {
                Found::Values(values) => Some(values.to_vec()),
                Found::Unseen => None,
                other => panic!("{other:?}"),
            }
        })
        .collect()
}

#[test]
fn a_gguf_copy_has_the_same_statistics() {
    let scratch = Scratch::new();
    let sums = [0.1, 4.0, 0.0, 0.0, 9.0, 3.0];
    let first = open(&gguf(&[
        (GATE, [3, 2], &sums, &[3.0, 0.0, 7.0]),
        ("blk.0.attn_q_a.weight", [1, 4], &[0.3; 4], &[9.0]),
    ]))
    .unwrap();
    let path = scratch.path("copy.gguf");
    assert_eq!(first.write(&path, Target::Gguf, false).unwrap(), []);
    let copy = Imatrix::open(&path).unwrap();
    assert_eq!(means(&copy, GATE, 3), means(&first, GATE, 3));
    assert_eq!((copy.datasets(), copy.n_chunks()), (first.datasets(), first.n_chunks()));
    assert_eq!(copy.chunk_size(), first.chunk_size());
    for (a, b) in first.entries().iter().zip(copy.entries()) {
        assert_eq!((a.name(), a.n_columns(), a.counts()), (b.name(), b.n_columns(), b.counts()));
    }
    let again = scratch.path("again.gguf");
    copy.write(&again, Target::Gguf, false).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), std::fs::read(again).unwrap());
}

#[test]
fn ds4_files_come_back_from_gguf_with_the_same_bytes() {
    let scratch = Scratch::new();
    let bytes = legacy(
        &[(GATE, 1, &[0.1, 0.2, 1.0, 1.0, 0.3, 0.4]), (DOWN, 1, &[1.0, 0.7, 0.3, 0.2])],
        Some(12),
        Some("chat.txt"),
    );
    let of_two_columns: &dyn Fn(&str) -> Option<usize> = &|_| Some(2);
    for columns in [of_two_columns, &|_| None] {
        let ds4 = open_with_columns(&bytes, columns).unwrap();
        assert!(ds4.is_packed_by_expert());
        let (gguf_path, back_path) = (scratch.path("x.gguf"), scratch.path("back.dat"));
        let losses = ds4.write(&gguf_path, Target::Gguf, true).unwrap();
        assert!(losses.contains(&Loss::RowCountsInvented { chunk_size: 512 }), "{losses:?}");
        let gguf = Imatrix::open(&gguf_path).unwrap();
        assert_eq!(means(&gguf, GATE, 3), means(&ds4, GATE, 3));
        assert_eq!(means(&gguf, GATE, 3)[1], None);
        let split = ds4.entries()[0].n_columns().is_some();
        assert_eq!(gguf.entries()[0].counts().len(), if split { 3 } else { 1 });
        assert_eq!(losses.contains(&Loss::CountPerExpert { n_entries: 2 }), !split);
        let losses = gguf.write(&back_path, Target::Legacy, true).unwrap();
        assert_eq!(losses, [Loss::RowCounts, Loss::ChunkSize]);
        assert_eq!(std::fs::read(back_path).unwrap(), bytes);
    }
}

#[test]
fn merging_adds_sums_and_counts_and_joins_datasets() {
    let name = "blk.0.attn_q_a.weight";
    let a = open(&gguf(&[(GATE, [2, 2], &[2.0, 4.0, 0.0, 0.0], &[2.0, 0.0])])).unwrap();
    let b = open(&gguf(&[
        (GATE, [2, 2], &[4.0, 2.0, 5.0, 10.0], &[1.0, 5.0]),
        (name, [1, 2], &[3.0, 6.0], &[3.0]),
    ]))
    .unwrap();
    let merged = Imatrix::merge(&[a, b]).unwrap();
    assert_eq!(means(&merged, GATE, 2), [Some(vec![2.0, 2.0]), Some(vec![1.0, 2.0])]);
    assert_eq!(means(&merged, name, 1), [Some(vec![1.0, 2.0])]);
    assert_eq!(merged.entries()[0].counts(), [3.0, 5.0]);
    assert_eq!(merged.datasets(), ["a.txt", "b.txt", "a.txt", "b.txt"]);
    assert_eq!(merged.n_chunks(), Some(14));
}

#[test]
fn merging_legacy_files_leaves_out_the_ones_of_unseen_experts() {
    let file = |values: &[f32]| legacy(&[(GATE, 2, values)], Some(2), Some("x"));
    let (a, b) = (file(&[8.0, 4.0, 2.0, 2.0, 2.0, 2.0]), file(&[4.0, 8.0, 6.0, 10.0, 2.0, 2.0]));
    let open_both = |columns: &dyn Fn(&str) -> Option<usize>| {
        [&a, &b].map(|bytes| open_with_columns(bytes, columns).unwrap())
    };
    let merged = Imatrix::merge(&open_both(&|_| Some(2))).unwrap();
    assert_eq!(means(&merged, GATE, 3), [Some(vec![3.0, 3.0]), Some(vec![3.0, 5.0]), None]);
    let scratch = Scratch::new();
    let path = scratch.path("merged.dat");
    merged.write(&path, Target::Legacy, false).unwrap();
    assert_eq!(means(&Imatrix::open(path).unwrap(), GATE, 3), means(&merged, GATE, 3));
    let refused = Imatrix::merge(&open_both(&|_| None)).unwrap_err();
    assert!(matches!(refused, ImatrixError::ColumnsNeeded { .. }), "{refused}");
}

#[test]
fn files_that_do_not_belong_together_are_not_merged() {
    let a = || open(&gguf(&[(GATE, [2, 2], &[2.0; 4], &[1.0; 2])])).unwrap();
    let others = [
        gguf(&[(GATE, [3, 2], &[2.0; 6], &[1.0; 3])]),
        gguf(&[(GATE, [4, 1], &[2.0; 4], &[1.0; 4])]),
        legacy(&[(GATE, 1, &[2.0; 4])], None, None),
    ];
    for (other, found) in others.iter().zip(["6 values", "1 columns", "legacy"]) {
        let error = Imatrix::merge(&[a(), open(other).unwrap()]).unwrap_err();
        assert!(matches!(error, ImatrixError::Incompatible { .. }), "{error}");
        assert!(error.to_string().contains(found), "{error}");
    }
    let bad = open(&gguf(&[(GATE, [2, 2], &[f32::NAN; 4], &[1.0; 2])])).unwrap();
    assert!(matches!(Imatrix::merge(&[a(), bad]), Err(ImatrixError::UnusableValues { .. })));
    assert!(matches!(Imatrix::merge(&[]), Err(ImatrixError::NothingToMerge)));
}

#[test]
fn a_file_does_not_differ_from_itself_and_scaling_keeps_the_cosine() {
    let a = open(&gguf(&[(GATE, [2, 2], &[2.0, 4.0, 0.0, 0.0], &[2.0, 0.0])])).unwrap();
    let same = a.diff(&a);
    assert_eq!(same.entries[0].cosine, Some(1.0));
    assert_eq!(same.entries[0].max_ratio, Some(1.0));
    let b = open(&gguf(&[
        (GATE, [2, 2], &[8.0, 16.0, 1.0, 2.0], &[2.0, 1.0]),
        (DOWN, [1, 2], &[1.0, 2.0], &[1.0]),
    ]))
    .unwrap();
    let scaled = a.diff(&b);
    let gate = &scaled.entries[0];
    assert!((gate.cosine.unwrap() - 1.0).abs() < 1e-12);
    assert_eq!((gate.max_ratio, gate.seen_only_in_second), (Some(4.0), 1));
    assert_eq!(scaled.only_in_second, [DOWN]);
    assert_eq!(b.diff(&a).only_in_first, [DOWN]);
    let wider = open(&gguf(&[(GATE, [2, 3], &[1.0; 6], &[1.0; 2])])).unwrap();
    assert_eq!(a.diff(&wider).entries[0].shapes_differ, Some((4, 6)));
    let turned = open(&gguf(&[(GATE, [2, 2], &[4.0, 0.0, 0.0, 0.0], &[2.0, 0.0])])).unwrap();
    let turned = &a.diff(&turned).entries[0];
    assert_eq!((turned.n_zero_in_one, turned.max_ratio), (1, Some(2.0)));
    assert!((turned.cosine.unwrap() - 1.0 / 5.0_f64.sqrt()).abs() < 1e-12);
}

#[test]
fn statistics_made_in_memory_are_written_and_read_back() {
    let scratch = Scratch::new();
    let entries = vec![Entry::from_sums(GATE, 2, &[2.0, 4.0, 0.0, 0.0], vec![2.0, 0.0])];
    let made = Imatrix::from_entries(entries, vec!["mine.txt".to_owned()], 3, 256);
    for (name, target) in [("a.gguf", Target::Gguf), ("a.dat", Target::Legacy)] {
        let path = scratch.path(name);
        made.write(&path, target, false).unwrap();
        let read = Imatrix::open(path).unwrap();
        assert_eq!(means(&read, GATE, 2), [Some(vec![1.0, 2.0]), None]);
        assert_eq!(read.datasets(), ["mine.txt"]);
        assert_eq!(read.n_chunks(), Some(3));
    }
}

#[test]
fn an_existing_file_is_kept_and_a_failed_write_leaves_nothing() {
    let scratch = Scratch::new();
    let path = scratch.write("taken.dat", b"precious");
    let imatrix = open(&legacy(&[(GATE, 1, &[2.0, 3.0])], None, None)).unwrap();
    let error = imatrix.write(&path, Target::Legacy, false).unwrap_err();
    assert!(matches!(error, ImatrixError::Exists { .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    imatrix.write(&path, Target::Legacy, true).unwrap();
    assert_ne!(std::fs::read(&path).unwrap(), b"precious");
    let error = imatrix.write(scratch.path("no/such/folder.dat"), Target::Legacy, false).unwrap_err();
    assert!(message(&error).contains("folder.dat"), "{error}");
    let names: Vec<_> =
        std::fs::read_dir(scratch.folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["taken.dat"], "no temporary file is left");
}
