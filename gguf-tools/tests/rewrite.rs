//! Splitting, merging, splicing and relabelling through the public interface: bytes come back, nothing is lost.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf_tools::block::BlockType;
use gguf_tools::diff::diff;
use gguf_tools::gguf::{Gguf, Layout, Metadata, NewTensor};
use gguf_tools::progress::{Progress, Silent, Step};
use gguf_tools::rewrite::*;
use proptest::prelude::*;

const OPTIONS: WriteOptions = WriteOptions { overwrite: false, through_buffer: false };

/// A model of a few layers whose tensors stand in a random order, with random types, sizes and alignment.
#[derive(Debug, Clone)]
struct Model {
    metadata: Metadata,
    tensors: Vec<NewTensor>,
    alignment: u32,
    n_layers: u32,
    seed: u64,
}

fn models() -> impl Strategy<Value = Model> {
    let types = prop::sample::select(BlockType::all().collect::<Vec<_>>());
    let sizes = prop::collection::vec((types, 1_u64..4, 1_u64..4), 24);
    let names: Vec<&str> =
        vec!["token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight"];
    (1_u32..5, sizes, any::<u64>(), 3_u32..13, 0_usize..40).prop_flat_map(
        move |(n_layers, sizes, seed, bits, padding)| {
            let mut all: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            for layer in 0..n_layers {
                for part in ["attn_q", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_norm"] {
                    all.push(format!("blk.{layer}.{part}.weight"));
                }
            }
            let sizes = sizes.clone();
            Just(all).prop_shuffle().prop_map(move |all| {
                let mut metadata = Metadata::default();
                metadata.set("general.architecture", "tiny");
                metadata.set("general.name", "x".repeat(padding));
                metadata.set("tiny.block_count", n_layers);
                let tensors =
                    all.iter().zip(sizes.iter().cycle()).map(|(name, (block_type, rows, blocks))| {
                        NewTensor {
                            name: name.clone(),
                            block_type: *block_type,
                            shape: vec![*rows, blocks * block_type.values_per_block() as u64],
                        }
                    });
                Model { metadata, tensors: tensors.collect(), alignment: 1 << bits, n_layers, seed }
            })
        },
    )
}

impl Model {
    fn bytes(&self) -> Vec<u8> {
        let layout = Layout::new(self.metadata.clone(), self.tensors.clone(), self.alignment).unwrap();
        let mut bytes = layout.header_bytes();
        let mut state = self.seed | 1;
        for tensor in layout.tensors() {
            bytes.resize(tensor.offset_bytes as usize, 0);
            bytes.extend((0..tensor.n_bytes).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as u8
            }));
        }
        bytes.resize(layout.file_bytes() as usize, 0);
        bytes
    }

    fn write(&self, path: &Path) -> Vec<u8> {
        let bytes = self.bytes();
        std::fs::write(path, &bytes).unwrap();
        bytes
    }
}

fn inputs(gguf: &Gguf) -> Vec<PathBuf> {
    gguf.shards().iter().map(|shard| shard.path.clone()).collect()
}

fn split_into(gguf: &Gguf, by: &SplitBy, prefix: &Path, options: WriteOptions) -> Vec<PathBuf> {
    let files = split(gguf, by, prefix).unwrap();
    let written = write_files(&files, &inputs(gguf), options, &Silent).unwrap();
    for (file, written) in files.iter().zip(&written) {
        assert_eq!(std::fs::metadata(&file.path).unwrap().len(), written.file_bytes);
        assert_eq!(written.file_bytes, file.layout.file_bytes());
    }
    written.into_iter().map(|w| w.path).collect()
}

fn merged(given: &[PathBuf], out: &Path) -> Vec<u8> {
    let parts = open_parts(given).unwrap();
    let file = merge(&parts, out).unwrap();
    write_files(&[file], given, OPTIONS, &Silent).unwrap();
    std::fs::read(out).unwrap()
}

/// Random cuts of the layers, the output head with the last part or alone.
fn layer_parts(n_layers: u32, cuts: u64) -> Vec<LayerPart> {
    let mut parts = Vec::new();
    let mut first = 0;
    for layer in 0..n_layers {
        let is_last = layer + 1 == n_layers;
        if is_last || cuts >> layer & 1 == 1 {
            parts.push(LayerPart { first: Some(first), last: Some(layer), output: false });
            first = layer + 1;
        }
    }
    if cuts >> 40 & 1 == 1 {
        parts.push(LayerPart { first: None, last: None, output: true });
    } else if let Some(last) = parts.last_mut() {
        *last = LayerPart { last: None, output: true, ..*last };
    }
    if cuts >> 41 & 1 == 1 {
        parts.reverse();
    }
    parts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn split_then_merge_is_the_identity(
        model in models(), most in 1_usize..9, cuts in any::<u64>(), no_tensor_first in any::<bool>(), through_buffer in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let bytes = model.write(&at("whole.gguf"));
        let gguf = Gguf::open(at("whole.gguf")).unwrap();
        prop_assert_eq!(restores_exactly(&gguf), None);
        let options = WriteOptions { through_buffer, ..OPTIONS };

        let by_count = split_into(&gguf, &SplitBy::Tensors { most, no_tensor_first }, &at("count"), options);
        prop_assert_eq!(by_count.len(), gguf.tensors().len().div_ceil(most) + usize::from(no_tensor_first));
        // Any shard opens the set.
        let any = by_count[cuts as usize % by_count.len()].clone();
        prop_assert_eq!(&merged(&[any], &at("a.gguf")), &bytes);

        let header = Layout::new(gguf.metadata().clone(), Vec::new(), model.alignment).unwrap().file_bytes();
        let largest = gguf.tensors().iter().map(|t| t.n_bytes).max().unwrap() + 2 * header + 8192 + 400;
        let by_size = split_into(&gguf, &SplitBy::Bytes { most: largest, no_tensor_first }, &at("size"), options);
        for shard in &by_size {
            prop_assert!(std::fs::metadata(shard).unwrap().len() <= largest);
        }
        prop_assert_eq!(&merged(&by_size[..1], &at("b.gguf")), &bytes);
        // A set split anew.
        let set = Gguf::open(&by_size[0]).unwrap();
        let again = split_into(&set, &SplitBy::Tensors { most: 3, no_tensor_first: false }, &at("again"), options);
        prop_assert_eq!(&merged(&again, &at("c.gguf")), &bytes);

        let parts = layer_parts(model.n_layers, cuts);
        let by_layers = split_into(&gguf, &SplitBy::Layers(parts), &at("model"), options);
        if let [all] = by_layers.as_slice() {
            prop_assert_eq!(&std::fs::read(all).unwrap(), &bytes);
        } else {
            prop_assert_eq!(&merged(&by_layers, &at("d.gguf")), &bytes);
            // One of them finds the others by their names.
            prop_assert_eq!(&merged(&by_layers[..1], &at("e.gguf")), &bytes);
        }
    }

    #[test]
    fn splice_with_itself_is_the_identity_and_with_another_takes_what_is_chosen(model in models(), layer in 0_u32..5) {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let bytes = model.write(&at("base.gguf"));
        model.write(&at("same.gguf"));
        let mut other = Model { seed: model.seed ^ 2, ..model.clone() };
        for tensor in &mut other.tensors {
            let values = tensor.shape.last_mut().unwrap();
            *values = values.next_multiple_of(256);
        }
        let layer = layer % model.n_layers;
        let options = SpliceOptions { layers: vec![(layer, layer)], ..SpliceOptions::default() };
        for donor in ["base.gguf", "same.gguf"] {
            let (base, donor) = (Gguf::open(at("base.gguf")).unwrap(), Gguf::open(at(donor)).unwrap());
            let out = at("out.gguf");
            let plan = splice(&base, &donor, &options, &out).unwrap();
            prop_assert_eq!((plan.taken.len(), plan.n_equal), (0, 3));
            write_files(&[plan.file], &[], OPTIONS, &Silent).unwrap();
            prop_assert_eq!(&std::fs::read(&out).unwrap(), &bytes);
        }
        // The same shapes in other types and with other bytes.
        let base_model = Model { tensors: other.tensors.clone(), ..model.clone() };
        for tensor in &mut other.tensors {
            tensor.block_type = if tensor.block_type == BlockType::Q4K { BlockType::Q2K } else { BlockType::Q4K };
        }
        base_model.write(&at("wide.gguf"));
        other.write(&at("donor.gguf"));
        let (base, donor) = (Gguf::open(at("wide.gguf")).unwrap(), Gguf::open(at("donor.gguf")).unwrap());
        let plan = splice(&base, &donor, &options, &at("spliced.gguf")).unwrap();
        prop_assert_eq!(plan.taken.len(), 3);
        let size = plan.file.layout.file_bytes();
        write_files(&[plan.file], &[], OPTIONS, &Silent).unwrap();
        prop_assert_eq!(std::fs::metadata(at("spliced.gguf")).unwrap().len(), size);
        let spliced = Gguf::open(at("spliced.gguf")).unwrap();
        for tensor in spliced.tensors() {
            let chosen = tensor.name.starts_with(&format!("blk.{layer}.ffn_"));
            let from = if chosen { &donor } else { &base };
            let wanted = from.tensor(&tensor.name).unwrap();
            prop_assert_eq!(tensor.block_type, wanted.block_type);
            prop_assert_eq!(spliced.data(tensor).unwrap(), from.data(wanted).unwrap());
        }
    }
}

fn one_model() -> Model {
    let names = [
        "token_embd",
        "blk.0.attn_q",
        "blk.0.ffn_gate_exps",
        "blk.1.attn_q",
        "blk.1.ffn_gate_exps",
        "output",
    ];
    let mut metadata = Metadata::default();
    metadata.set("general.architecture", "tiny");
    metadata.set("general.name", "Tiny");
    metadata.set("tiny.block_count", 2_u32);
    let tensor = |name: &&str| NewTensor {
        name: format!("{name}.weight"),
        block_type: BlockType::Q8_0,
        shape: vec![3, 64],
    };
    Model { metadata, tensors: names.iter().map(tensor).collect(), alignment: 4096, n_layers: 2, seed: 7 }
}

/// Asks to stop at the `n`th step.
struct StopAt(usize, AtomicUsize);

impl Progress for StopAt {
    fn step(&self, _: &Step<'_>) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }

    fn interrupted(&self) -> bool {
        self.1.load(Ordering::SeqCst) >= self.0
    }
}

fn is_part(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "part")
}

fn names_in(folder: &Path) -> BTreeSet<String> {
    let name =
        |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().to_string_lossy().into_owned();
    std::fs::read_dir(folder).unwrap().map(name).collect()
}

#[test]
fn a_split_stopped_at_any_step_leaves_part_files_only_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let bytes = one_model().write(&at("whole.gguf"));
    let gguf = Gguf::open(at("whole.gguf")).unwrap();
    let files = split(&gguf, &SplitBy::Tensors { most: 2, no_tensor_first: false }, &at("s")).unwrap();
    let mut interruptions = 0;
    let written = loop {
        // One step further each time: what is done already is compared, not written again.
        match write_files(&files, &inputs(&gguf), OPTIONS, &StopAt(1, AtomicUsize::new(0))) {
            Ok(written) => break written,
            Err(RewriteError::Interrupted { done_bytes, total_bytes }) => {
                assert!(done_bytes < total_bytes);
                assert!(names_in(folder.path()).iter().all(|n| n == "whole.gguf" || is_part(n)));
                interruptions += 1;
                assert!(interruptions < 100, "no progress");
            }
            Err(other) => panic!("{other}"),
        }
    };
    assert!(interruptions > 3 && written.iter().all(|w| w.resumed_bytes > 0));
    assert_eq!(merged(&[at("s-00002-of-00003.gguf")], &at("merged.gguf")), bytes);
    // Once more: everything is there, nothing is written.
    let again = write_files(&files, &inputs(&gguf), OPTIONS, &Silent).unwrap();
    assert!(again.iter().all(|w| w.resumed_bytes == w.file_bytes));
}

#[test]
fn damage_in_a_part_file_is_found_and_mended() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let bytes = one_model().write(&at("whole.gguf"));
    let gguf = Gguf::open(at("whole.gguf")).unwrap();
    let files = split(&gguf, &SplitBy::Tensors { most: 9, no_tensor_first: false }, &at("s")).unwrap();
    let sound = split_into(&gguf, &SplitBy::Tensors { most: 9, no_tensor_first: false }, &at("t"), OPTIONS);
    let mut part = std::fs::read(&sound[0]).unwrap();
    part[5000] ^= 1;
    part.extend([7; 100]);
    std::fs::write(at("s-00001-of-00001.gguf.part"), part).unwrap();
    let written = write_files(&files, &inputs(&gguf), OPTIONS, &Silent).unwrap();
    assert_eq!(written[0].resumed_bytes, 5000);
    assert_eq!(std::fs::read(&written[0].path).unwrap(), std::fs::read(&sound[0]).unwrap());
    drop(bytes);
}

#[test]
fn an_output_that_exists_or_is_an_input_is_never_touched() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    one_model().write(&at("whole.gguf"));
    let gguf = Gguf::open(at("whole.gguf")).unwrap();
    let shards = split_into(&gguf, &SplitBy::Tensors { most: 2, no_tensor_first: false }, &at("s"), OPTIONS);
    let before: Vec<_> = shards.iter().map(|s| std::fs::read(s).unwrap()).collect();
    let set = Gguf::open(&shards[0]).unwrap();
    let overwrite = WriteOptions { overwrite: true, ..OPTIONS };
    // The same names as the inputs: three shards of other cuts.
    let files = split(&set, &SplitBy::Layers(parse_layer_parts("0:1,output").unwrap()), &at("l")).unwrap();
    let hard_link = files[0].path.clone();
    std::fs::hard_link(&shards[2], &hard_link).unwrap();
    let refused = write_files(&files, &inputs(&set), overwrite, &Silent).unwrap_err().to_string();
    assert!(refused.contains("it is an input"), "{refused}");
    std::fs::remove_file(&hard_link).unwrap();
    std::fs::write(&hard_link, "precious").unwrap();
    let refused = write_files(&files, &inputs(&set), OPTIONS, &Silent).unwrap_err().to_string();
    assert!(refused.contains("--overwrite"), "{refused}");
    assert_eq!(std::fs::read_to_string(&hard_link).unwrap(), "precious");
    let after: Vec<_> = shards.iter().map(|s| std::fs::read(s).unwrap()).collect();
    assert_eq!(before, after);
}

#[test]
fn parts_that_do_not_belong_together_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    one_model().write(&at("whole.gguf"));
    let mut other = one_model();
    other.metadata.set("general.name", "Other");
    other.write(&at("other.gguf"));
    let gguf = Gguf::open(at("whole.gguf")).unwrap();
    let foreign = Gguf::open(at("other.gguf")).unwrap();
    let by = SplitBy::Layers(parse_layer_parts("0,1:output").unwrap());
    let ours = split_into(&gguf, &by, &at("ours"), OPTIONS);
    assert!(ours[0].ends_with("ours-Layers00-00.gguf") && ours[1].ends_with("ours-Layers-01-output.gguf"));
    let theirs = split_into(&foreign, &by, &at("theirs"), OPTIONS);
    let message =
        |paths: &[PathBuf]| merge(&open_parts(paths).unwrap(), &at("out.gguf")).unwrap_err().to_string();
    let mixed = message(&[ours[0].clone(), theirs[1].clone()]);
    assert!(mixed.contains("`general.name` differs") && mixed.contains("theirs-Layers-01-output"), "{mixed}");
    let double = message(&[ours[0].clone(), at("whole.gguf")]);
    assert!(double.contains("tensor `token_embd.weight` is in"), "{double}");
    std::fs::rename(&ours[1], at("elsewhere.gguf")).unwrap();
    let half = message(&ours[..1]);
    assert!(half.contains("layer 1 is in no part") && half.contains("holds 0:0"), "{half}");
    assert!(message(&[at("whole.gguf")]).contains("whole file already"));
    assert!(
        split(&gguf, &SplitBy::Bytes { most: 100, no_tensor_first: false }, &at("x"))
            .unwrap_err()
            .to_string()
            .contains("tensor `token_embd.weight`")
    );
}

#[test]
fn a_donor_of_another_checkpoint_shape_or_model_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    one_model().write(&at("base.gguf"));
    let refusal = |change: &dyn Fn(&mut Model)| {
        let mut donor = Model { seed: 9, ..one_model() };
        change(&mut donor);
        donor.write(&at("donor.gguf"));
        let (base, donor) = (Gguf::open(at("base.gguf")).unwrap(), Gguf::open(at("donor.gguf")).unwrap());
        splice(&base, &donor, &SpliceOptions::default(), &at("out.gguf"))
            .map(|p| p.taken.len())
            .map_err(|e| e.to_string())
    };
    assert_eq!(refusal(&|_| {}), Ok(2));
    let label = refusal(&|m| m.metadata.set("general.name", "Tiny-0731")).unwrap_err();
    assert!(
        label.contains("base `Tiny`, donor `Tiny-0731`") && label.contains("--any-checkpoint"),
        "{label}"
    );
    let shape = refusal(&|m| m.tensors[2].shape[0] = 4).unwrap_err();
    assert!(shape.contains("`blk.0.ffn_gate_exps.weight`: base [3, 64], donor [4, 64]"), "{shape}");
    let missing = refusal(&|m| drop(m.tensors.remove(5))).unwrap_err();
    assert!(missing.contains("tensor `output.weight` is in the base only"), "{missing}");
    let layers = refusal(&|m| m.metadata.set("tiny.block_count", 3_u32)).unwrap_err();
    assert!(layers.contains("`tiny.block_count` differs"), "{layers}");
}

#[test]
fn relabelling_keeps_the_data_in_place_or_in_a_copy() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let bytes = one_model().write(&at("a.gguf"));
    let edits = [
        Edit::Set("general.name".to_owned(), parse_value("general.name=str:Small").unwrap().1),
        Edit::Set("x.list".to_owned(), parse_value("x.list=[i32]:1,-2,3").unwrap().1),
        Edit::Unset("tiny.block_count".to_owned()),
    ];
    {
        let gguf = Gguf::open(at("a.gguf")).unwrap();
        let (file, edited) = relabel(&gguf, &edits, &at("copy.gguf")).unwrap();
        assert_eq!((edited.added.len(), edited.changed.len(), edited.removed.len()), (1, 1, 1));
        write_files(std::slice::from_ref(&file), &inputs(&gguf), OPTIONS, &Silent).unwrap();
        let copy = Gguf::open(at("copy.gguf")).unwrap();
        let found = diff(&gguf, &copy, true, &Silent).unwrap();
        assert_eq!((found.metadata.len(), found.tensors.len(), found.n_equal_tensors), (3, 0, 6));
        // The same header fits over the old one, because data begins at a page.
        let in_place = InPlace::fitting(&gguf, &file).unwrap();
        drop(file);
        drop((copy, gguf));
        in_place.write().unwrap();
    }
    assert_eq!(std::fs::read(at("a.gguf")).unwrap(), std::fs::read(at("copy.gguf")).unwrap());
    assert_eq!(names_in(folder.path()), BTreeSet::from(["a.gguf".to_owned(), "copy.gguf".to_owned()]));
    // A header that is too long does not fit, and nothing is done.
    let gguf = Gguf::open(at("a.gguf")).unwrap();
    let long = [Edit::Set("general.description".to_owned(), "x".repeat(9000).as_str().into())];
    let (file, _) = relabel(&gguf, &long, &at("unused.gguf")).unwrap();
    assert!(InPlace::fitting(&gguf, &file).is_none());
    assert_eq!(std::fs::read(at("a.gguf")).unwrap(), std::fs::read(at("copy.gguf")).unwrap());
    assert_ne!(std::fs::read(at("a.gguf")).unwrap(), bytes);
    assert!(
        relabel(&gguf, &[Edit::Unset("no.such".to_owned())], &at("u.gguf"))
            .unwrap_err()
            .to_string()
            .contains("`no.such`")
    );
    for wrong in ["key", "key=3", "key=u9:3", "key=u8:300", "=u8:1", "key=[u8]:1,x", "key=bool:yes"] {
        assert!(parse_value(wrong).unwrap_err().to_string().contains("KEY=TYPE:VALUE"), "{wrong}");
    }
}

#[test]
fn a_header_that_was_half_replaced_is_finished_from_its_record() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let old = one_model().write(&at("a.gguf"));
    let edits = [Edit::Set("general.name".to_owned(), "Something longer".into())];
    let gguf = Gguf::open(at("a.gguf")).unwrap();
    let (file, _) = relabel(&gguf, &edits, &at("copy.gguf")).unwrap();
    let header = file.layout.header_bytes();
    drop(gguf);
    assert!(!finish_interrupted_relabel(&at("a.gguf")).unwrap());
    let mut record =
        format!("{{\"file_bytes\":{},\"header_bytes\":{}}}\n", old.len(), header.len()).into_bytes();
    record.extend(&header);
    // Killed at any byte of the header: the file is the old one, the new one, or a mix.
    for n_new in [0, 1, 100, header.len() / 2, header.len()] {
        let mut torn = old.clone();
        torn[..n_new].copy_from_slice(&header[..n_new]);
        std::fs::write(at("a.gguf"), &torn).unwrap();
        std::fs::write(at("a.gguf.relabel"), &record).unwrap();
        assert!(finish_interrupted_relabel(&at("a.gguf")).unwrap());
        let finished = std::fs::read(at("a.gguf")).unwrap();
        assert_eq!(
            (&finished[..header.len()], &finished[header.len()..]),
            (&header[..], &old[header.len()..])
        );
        assert!(!at("a.gguf.relabel").exists());
    }
    std::fs::write(at("a.gguf.relabel"), &record[..record.len() - 1]).unwrap();
    assert!(
        finish_interrupted_relabel(&at("a.gguf")).unwrap_err().to_string().contains("does not fit this file")
    );
}
