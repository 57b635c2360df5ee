//! Split sets by llama.cpp's convention.

use std::path::{Path, PathBuf};

use gguf_tools::gguf::Gguf;
use test_vectors::gguf::{GgufBytes, RawValue};

fn shard_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("tiny-{number:05}-of-00003.gguf"))
}

/// The small file's tensors over three shards, two each; metadata in the first.
fn shards() -> Vec<GgufBytes> {
    let whole = GgufBytes::small();
    let shard = |i: usize| {
        let mut shard =
            GgufBytes { tensors: whole.tensors[2 * i..2 * i + 2].to_vec(), ..GgufBytes::default() };
        if i == 0 {
            shard.keys.clone_from(&whole.keys);
        }
        shard
            .key("split.no", RawValue::U16(i as u16))
            .key("split.count", RawValue::U16(3))
            .key("split.tensors.count", RawValue::I32(6))
    };
    (0..3).map(shard).collect()
}

fn write(folder: &Path, shards: &[GgufBytes]) {
    for (i, shard) in shards.iter().enumerate() {
        std::fs::write(shard_path(folder, i + 1), shard.make().bytes).unwrap();
    }
}

fn error_of(shards: &[GgufBytes]) -> String {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), shards);
    Gguf::open(shard_path(folder.path(), 1)).unwrap_err().to_string()
}

fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn any_shard_opens_the_set_with_the_tensors_of_the_whole_file() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &shards());
    let whole_path = folder.path().join("whole.gguf");
    std::fs::write(&whole_path, GgufBytes::small().make().bytes).unwrap();
    let whole = Gguf::open(whole_path).unwrap();
    assert_eq!(whole.split_place(), None);
    for number in 1..=3 {
        let set = Gguf::open(shard_path(folder.path(), number)).unwrap();
        assert_eq!(set.shards().len(), 3);
        assert_eq!(set.tensors().len(), 6);
        assert_eq!(set.split_place().unwrap().n_shards, 3);
        assert!(set.sequential_offsets());
        assert_eq!(set.metadata().get("general.architecture"), whole.metadata().get("general.architecture"));
        for (one, other) in set.tensors().iter().zip(whole.tensors()) {
            assert_eq!(
                (&one.name, &one.shape, one.block_type),
                (&other.name, &other.shape, other.block_type)
            );
            assert_eq!(set.data(one).unwrap(), whole.data(other).unwrap());
        }
    }
}

#[test]
fn absent_shards_are_named_with_what_the_given_one_is() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(shard_path(folder.path(), 1), shards()[0].make().bytes).unwrap();
    let message = Gguf::open(shard_path(folder.path(), 1)).unwrap_err().to_string();
    assert_says(
        &message,
        &["this is shard 1 of 3", "`tiny-00002-of-00003.gguf`, `tiny-00003-of-00003.gguf`"],
    );
    assert_says(&message, &[&format!("not found in `{}`", folder.path().display())]);
    assert!(!message.contains("`tiny-00001"), "{message}");
}

#[test]
fn a_count_of_shards_that_nobody_has_makes_a_short_message() {
    let folder = tempfile::tempdir().unwrap();
    let shard = GgufBytes::small()
        .key("split.no", RawValue::U16(0))
        .key("split.count", RawValue::U16(u16::MAX))
        .key("split.tensors.count", RawValue::I32(6));
    let path = folder.path().join("tiny-00001-of-65535.gguf");
    std::fs::write(&path, shard.make().bytes).unwrap();
    let message = Gguf::open(path).unwrap_err().to_string();
    assert_says(&message, &["shard 1 of 65535", "and 65526 more"]);
    assert!(message.len() < 1000);
}

#[test]
fn a_shard_under_another_name_is_refused_with_the_name_it_should_have() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("renamed.gguf");
    std::fs::write(&path, shards()[1].make().bytes).unwrap();
    assert_says(&Gguf::open(path).unwrap_err().to_string(), &["shard 2 of 3", "-00002-of-00003.gguf"]);
}

#[test]
fn a_sibling_that_is_another_shard_is_named() {
    let mut set = shards();
    set.swap(1, 2);
    let message = error_of(&set);
    assert_says(&message, &["tiny-00002-of-00003.gguf", "shard 3 of 3", "expected shard 2 of 3"]);
}

#[test]
fn a_sibling_that_is_no_shard_is_named() {
    let mut set = shards();
    set[2].keys.clear();
    assert_says(
        &error_of(&set),
        &["tiny-00003-of-00003.gguf", "does not say that it is part of a split set"],
    );
}

#[test]
fn a_wrong_total_of_tensors_is_refused() {
    let mut set = shards();
    set[1].tensors.pop();
    assert_says(&error_of(&set), &["hold 5 tensors", "`split.tensors.count` says 6"]);
}

#[test]
fn a_tensor_in_two_shards_is_named_with_both() {
    let mut set = shards();
    set[2].tensors[0] = set[0].tensors[0].clone();
    let message = error_of(&set);
    assert_says(&message, &["`token_embd.weight`", "tiny-00001-of-00003.gguf", "tiny-00003-of-00003.gguf"]);
}

#[test]
fn an_emptied_sibling_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &shards());
    std::fs::write(shard_path(folder.path(), 2), []).unwrap();
    let message = Gguf::open(shard_path(folder.path(), 1)).unwrap_err().to_string();
    assert_says(&message, &["tiny-00002-of-00003.gguf", "empty"]);
}

#[test]
fn split_keys_of_wrong_type_or_value_are_named() {
    let with = |key: &str, value: RawValue| {
        let mut set = shards();
        set[0].keys.retain(|(name, _)| name != key);
        set[0] = set[0].clone().key(key, value);
        error_of(&set)
    };
    assert_says(&with("split.no", RawValue::U16(3)), &["`split.no`", "found 3"]);
    assert_says(&with("split.count", RawValue::String("3".to_owned())), &["`split.count`", "type string"]);
    assert_says(&with("split.tensors.count", RawValue::I32(-1)), &["`split.tensors.count`"]);
}

#[test]
fn shards_may_have_their_own_alignment() {
    let mut set = shards();
    set[0] = GgufBytes { alignment: 64, ..set[0].clone() }.key("general.alignment", RawValue::U32(64));
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &set);
    let gguf = Gguf::open(shard_path(folder.path(), 3)).unwrap();
    assert!(gguf.sequential_offsets());
    assert_eq!(gguf.data(&gguf.tensors()[5]).unwrap(), [0x66; 6 * 17]);
}

#[test]
fn a_file_with_some_of_the_layers_opens_as_an_ordinary_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("Tiny-Layers-31-output.gguf");
    let mut half = GgufBytes::small();
    half.tensors.remove(0);
    std::fs::write(&path, half.make().bytes).unwrap();
    let gguf = Gguf::open(path).unwrap();
    assert_eq!((gguf.shards().len(), gguf.tensors().len()), (1, 5));
}
