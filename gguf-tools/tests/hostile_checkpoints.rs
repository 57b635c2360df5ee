//! Damaged, incomplete, foreign and unusual checkpoints: each is refused by name and number, or read exactly.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use gguf_tools::checkpoint::{Checkpoint, CheckpointError};
use gguf_tools::progress::Silent;
use gguf_tools::synth::{Shape, SynthOptions, write_checkpoint};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// A sound checkpoint of which every test changes its own copy.
static SOUND: LazyLock<TempDir> = LazyLock::new(|| {
    let place = tempfile::tempdir().unwrap();
    let options = SynthOptions { experts: Some(2), ..SynthOptions::new(Shape::Tiny) };
    write_checkpoint(&place.path().join("sound"), &options, &Silent).unwrap();
    place
});

struct Copy {
    _place: TempDir,
    folder: PathBuf,
}

fn copy() -> Copy {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("copy");
    fs::create_dir(&folder).unwrap();
    for entry in fs::read_dir(SOUND.path().join("sound")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    Copy { _place: place, folder }
}

/// Splits a shard into header and data, and writes it back after `change` with `padding` spaces behind the header.
fn rewrite(path: &Path, padding: usize, change: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut data = bytes[8 + length..].to_vec();
    change(&mut header, &mut data);
    let mut text = Value::Object(header).to_string();
    text.push_str(&" ".repeat(padding));
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend(text.as_bytes());
    file.append(&mut data);
    fs::write(path, file).unwrap();
}

impl Copy {
    fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(&self.folder)
    }

    fn refusal(&self) -> String {
        self.open().unwrap_err().to_string()
    }

    /// What a check of the opened checkpoint says.
    fn findings(&self) -> String {
        self.open().unwrap().demand_sound().unwrap_err().to_string()
    }

    fn shard(&self, number: usize) -> PathBuf {
        Checkpoint::open(SOUND.path().join("sound")).unwrap().shard_paths()[number]
            .file_name()
            .map(|name| self.folder.join(name))
            .unwrap()
    }

    /// The shard that holds a tensor.
    fn shard_of(&self, tensor: &str) -> PathBuf {
        let sound = Checkpoint::open(SOUND.path().join("sound")).unwrap();
        self.shard(sound.tensor(tensor).unwrap().shard)
    }

    /// Changes the header entry of one tensor.
    fn entry(&self, tensor: &str, change: impl FnOnce(&mut Value)) {
        rewrite(&self.shard_of(tensor), 0, |header, _| change(&mut header[tensor]));
    }

    /// Gives tensors other names, in index and shards alike.
    fn rename(&self, names: &[(&str, &str)]) {
        for (old, new) in names {
            let shard = self.shard_of(old);
            rewrite(&shard, 0, |header, _| {
                let entry = header.remove(*old).unwrap();
                header.insert((*new).to_owned(), entry);
            });
        }
        self.index(|map| {
            for (old, new) in names {
                let file = map.remove(*old).unwrap();
                map.insert((*new).to_owned(), file);
            }
        });
    }

    fn index(&self, change: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.folder.join("model.safetensors.index.json");
        let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(index["weight_map"].as_object_mut().unwrap());
        fs::write(path, index.to_string()).unwrap();
    }

    /// Overwrites stored bytes of a tensor.
    fn poke(&self, tensor: &str, at: usize, bytes: &[u8]) {
        rewrite(&self.shard_of(tensor), 0, |header, data| {
            let start = header[tensor]["data_offsets"][0].as_u64().unwrap() as usize + at;
            data[start..start + bytes.len()].copy_from_slice(bytes);
        });
    }

    fn read(&self, tensor: &str, rows: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        let mut values = vec![0.0; rows.len() * 256];
        self.open()?.read_rows_f32(tensor, rows, &mut values)?;
        Ok(values)
    }
}

const EXPERT: &str = "layers.1.ffn.experts.1.w2.weight";
const EXPERT_SCALE: &str = "layers.1.ffn.experts.1.w2.scale";
const DENSE: &str = "layers.2.attn.wq_a.weight";
const DENSE_SCALE: &str = "layers.2.attn.wq_a.scale";

#[test]
fn missing_and_unexpected_tensors_are_listed_together_and_experts_summarised() {
    let copy = copy();
    copy.rename(&[(EXPERT, "a.b"), ("norm.weight", "c.d"), ("layers.0.attn.wkv.weight", "e.f")]);
    let message = copy.findings();
    for part in [
        "layer 1: expert 1 has no w2",
        "`norm.weight` is missing",
        "`layers.0.attn.wkv.weight` is missing",
        "`a.b` is not one of this model",
        "`c.d` is not one of this model",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn other_shapes_types_and_scales_than_announced_are_found_without_reading_data() {
    let copy = copy();
    copy.entry("layers.1.attn.compressor.wkv.weight", |entry| entry["shape"] = json!([256, 1024]));
    copy.entry("layers.2.ffn_norm.weight", |entry| {
        entry["dtype"] = json!("I8");
        entry["shape"] = json!([512]);
    });
    copy.entry("layers.0.ffn.gate.tid2eid", |entry| {
        entry["dtype"] = json!("F32");
        entry["shape"] = json!([512, 4]);
    });
    copy.entry(DENSE_SCALE, |entry| entry["shape"] = json!([1, 4]));
    copy.entry(EXPERT_SCALE, |entry| entry["shape"] = json!([128, 16]));
    let message = copy.findings();
    for part in [
        "`layers.1.attn.compressor.wkv.weight` has shape [256, 1024], config.json says [1024, 256]",
        "`layers.2.ffn_norm.weight` has no scales",
        "`layers.0.ffn.gate.tid2eid` has shape [512, 4]",
        "`layers.1.ffn.experts.1.w2.scale` have shape [128, 16], expected [256, 8]",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    // A grid of 1x4 divides 256x256 exactly, so it is taken as such.
    assert!(!message.contains(DENSE_SCALE), "{message}");
}

#[test]
fn vision_parts_are_refused_by_name_and_a_drafter_is_set_aside() {
    let copy = copy();
    copy.rename(&[("norm.weight", "vision.norm.weight"), ("hc_head_base", "mtp.0.hc_head_base")]);
    assert!(copy.findings().contains("vision tower"), "{}", copy.findings());
    let findings = copy.open().unwrap().check();
    assert_eq!((findings.n_draft_tensors, findings.draft_bytes), (1, 16));
}

#[test]
fn other_spellings_of_the_same_values_read_alike() {
    let sound = copy();
    let (expert, dense) = (sound.read(EXPERT, 0..256).unwrap(), sound.read(DENSE, 0..256).unwrap());
    let blocks = |copy: &Copy| {
        let mut blocks = vec![0; 256 * 8 * 17];
        copy.open().unwrap().read_fp4_as_mxfp4(EXPERT, 0..256, &mut blocks).unwrap();
        blocks
    };
    let spelled = copy();
    spelled.entry(EXPERT, |entry| {
        entry["dtype"] = json!("F4");
        entry["shape"] = json!([256, 256]);
    });
    spelled.entry(EXPERT_SCALE, |entry| entry["dtype"] = json!("U8"));
    spelled.rename(&[(DENSE_SCALE, "layers.2.attn.wq_a.weight_scale_inv")]);
    spelled.open().unwrap().demand_sound().unwrap();
    assert_eq!(spelled.read(EXPERT, 0..256).unwrap(), expert);
    assert_eq!(blocks(&spelled), blocks(&sound));
    assert_eq!(spelled.read(DENSE, 0..256).unwrap(), dense);
}

#[test]
fn scales_in_single_precision_give_the_same_values() {
    let sound = copy();
    for (weight, scale) in [(DENSE, DENSE_SCALE), (EXPERT, EXPERT_SCALE)] {
        let expected = sound.read(weight, 0..256).unwrap();
        let widened = copy();
        rewrite(&widened.shard_of(scale), 0, |header, data| {
            let old = header.remove(scale).unwrap();
            let range = |i: usize| old["data_offsets"][i].as_u64().unwrap() as usize;
            let values: Vec<u8> = data[range(0)..range(1)]
                .iter()
                .flat_map(|byte| f32::from_bits(u32::from(*byte) << 23).to_le_bytes())
                .collect();
            // The old bytes stay where they are, as part of a drafter, so that no other offset changes.
            header.insert("mtp.0.old".to_owned(), old.clone());
            let offsets = [data.len(), data.len() + values.len()];
            header.insert(
                scale.to_owned(),
                json!({ "dtype": "F32", "shape": old["shape"], "data_offsets": offsets }),
            );
            data.extend(values);
        });
        widened.open().unwrap().demand_sound().unwrap();
        assert_eq!(widened.read(weight, 0..256).unwrap(), expected, "{weight}");
    }
    let mut blocks = vec![0; 256 * 8 * 17];
    assert!(sound.open().unwrap().read_fp4_as_mxfp4(EXPERT, 0..256, &mut blocks).is_ok());
}

#[test]
fn any_alignment_of_the_data_reads_alike() {
    let sound = copy();
    let (tensor, other) = ("layers.0.hc_attn_fn", "layers.0.ffn.gate.tid2eid");
    let values = |copy: &Copy| {
        let checkpoint = copy.open().unwrap();
        let mut values = vec![0.0; 24 * 1024];
        checkpoint.read_rows_f32(tensor, 0..24, &mut values).unwrap();
        let mut ids = vec![0; 512 * 2];
        checkpoint.read_i64_as_i32(other, 0..512, &mut ids).unwrap();
        (values, ids)
    };
    let expected = values(&sound);
    for padding in [1, 2, 5] {
        let shifted = copy();
        rewrite(&shifted.shard_of(tensor), padding, |_, _| ());
        rewrite(&shifted.shard_of(other), padding, |_, _| ());
        assert_eq!(values(&shifted), expected, "{padding}");
    }
}

#[test]
fn an_index_that_does_not_fit_its_shards_is_refused() {
    let absent = copy();
    fs::remove_file(absent.shard(1)).unwrap();
    fs::write(absent.shard(1).with_extension("safetensors.part"), "x").unwrap();
    let message = absent.refusal();
    assert!(message.contains("model-00002-of") && message.contains("partial download"), "{message}");

    let moved = copy();
    let first = moved.shard(0).file_name().unwrap().to_str().unwrap().to_owned();
    moved.index(|map| map["norm.weight"] = json!(first));
    assert!(moved.findings().contains(&format!("`norm.weight` is in {first}")), "{}", moved.findings());

    let outside = copy();
    outside.index(|map| map["norm.weight"] = json!("../model.safetensors"));
    assert!(outside.refusal().contains("plain file name"));

    let twice = copy();
    fs::copy(twice.shard(0), twice.folder.join("extra.safetensors")).unwrap();
    twice.index(|map| map["embed.weight"] = json!("extra.safetensors"));
    let message = twice.refusal();
    assert!(message.contains("`embed.weight` is also in"), "{message}");
}

#[test]
fn every_damaged_shard_is_named_in_one_message() {
    let copy = copy();
    let whole = fs::read(copy.shard(0)).unwrap();
    fs::write(copy.shard(0), &whole[..whole.len() - 1]).unwrap();
    fs::write(copy.shard(1), "<!DOCTYPE html><html></html>").unwrap();
    let message = copy.refusal();
    assert!(message.contains("the download is incomplete") && message.contains("web page"), "{message}");
    assert!(message.contains("model-00001-of") && message.contains("model-00002-of"), "{message}");
}

#[test]
fn a_folder_without_a_checkpoint_says_what_is_missing() {
    let copy = copy();
    fs::remove_file(copy.folder.join("model.safetensors.index.json")).unwrap();
    assert!(copy.refusal().contains("neither model.safetensors.index.json nor model.safetensors"));
    fs::write(copy.folder.join("config.json"), "version https://git-lfs.github.com/spec/v1").unwrap();
    assert!(copy.refusal().contains("LFS pointer"));
    fs::write(copy.folder.join("config.json"), "{").unwrap();
    assert!(copy.refusal().contains("config.json: is not valid JSON"));
    assert!(Checkpoint::open(copy.folder.join("nothing")).unwrap_err().to_string().contains("not a folder"));
}

#[test]
fn values_that_are_no_numbers_are_refused_by_row_and_column() {
    let code = copy();
    code.poke(DENSE, 3 * 256 + 7, &[0x7f]);
    let message = code.read(DENSE, 0..256).unwrap_err().to_string();
    assert!(message.contains("row 3, column 7") && message.contains("0x7f (NaN)"), "{message}");
    assert!(code.read(DENSE, 4..256).is_ok(), "other rows are sound");

    let scale = copy();
    scale.poke(EXPERT_SCALE, 5 * 8 + 2, &[255]);
    let message = scale.read(EXPERT, 0..256).unwrap_err().to_string();
    assert!(message.contains("row 5, column 64") && message.contains("scale byte 255"), "{message}");
    let mut blocks = vec![0; 256 * 8 * 17];
    let repacked =
        scale.open().unwrap().read_fp4_as_mxfp4(EXPERT, 0..256, &mut blocks).unwrap_err().to_string();
    assert_eq!(repacked, message);

    let plain = copy();
    plain.poke("embed.weight", 2 * 256 * 9 + 4, &[0x80, 0x7f]);
    let message = plain.read("embed.weight", 0..16).unwrap_err().to_string();
    assert!(message.contains("`embed.weight`, row 9, column 2"), "{message}");
}

#[test]
fn expert_ids_out_of_range_are_refused_by_value() {
    let table = "layers.0.ffn.gate.tid2eid";
    for value in [1_i64 << 33, -1, 2] {
        let copy = copy();
        copy.poke(table, 8 * (2 * 17 + 1), &value.to_le_bytes());
        let mut ids = vec![0; 512 * 2];
        let error = copy.open().unwrap().read_i64_as_i32(table, 0..512, &mut ids).unwrap_err().to_string();
        assert!(error.contains(&format!("found {value}, expected a number from 0 to 1")), "{error}");
        assert!(error.contains("row 17, column 1"), "{error}");
    }
}

#[test]
fn a_tensor_read_as_what_it_is_not_is_refused() {
    let copy = copy();
    let checkpoint = copy.open().unwrap();
    let mut blocks = vec![0; 256 * 8 * 17];
    let dense = checkpoint.read_fp4_as_mxfp4(DENSE, 0..256, &mut blocks).unwrap_err().to_string();
    assert!(dense.contains("stored as FP8"), "{dense}");
    let mut values = vec![0.0; 512 * 2];
    let table =
        checkpoint.read_rows_f32("layers.0.ffn.gate.tid2eid", 0..512, &mut values).unwrap_err().to_string();
    assert!(table.contains("I64 integers"), "{table}");
    let absent = checkpoint.read_rows_f32("no.such", 0..1, &mut values).unwrap_err();
    assert!(matches!(absent, CheckpointError::NoSuchTensor(name) if name == "no.such"));
}

#[test]
fn the_label_and_revision_of_a_hub_snapshot_are_its_repository_and_commit() {
    let place = tempfile::tempdir().unwrap();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let snapshots = place.path().join("models--deepseek-ai--DeepSeek-V4-Flash/snapshots");
    fs::create_dir_all(&snapshots).unwrap();
    let copy = copy();
    fs::rename(&copy.folder, snapshots.join(commit)).unwrap();
    let mut checkpoint = Checkpoint::open(snapshots.join(commit)).unwrap();
    assert_eq!((checkpoint.label(), checkpoint.revision()), ("DeepSeek-V4-Flash", Some(commit)));
    checkpoint.set_label("mine");
    assert_eq!(checkpoint.label(), "mine");
}
