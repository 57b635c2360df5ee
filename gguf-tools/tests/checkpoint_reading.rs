//! Sound checkpoints: everything that the goldens say about them is what we read.

use std::collections::BTreeMap;

use gguf_tools::checkpoint::{Checkpoint, SourcePrecision};
use gguf_tools::model::{Family, TensorSpec};
use sha2::{Digest, Sha256};
use test_vectors::{fixtures, hex};

/// Lines `T name : TYPE ne=[..] offset=.. bytes=.. sha256=..` of the header that llama.cpp's converter wrote.
struct GoldenTensor {
    block_type: String,
    /// Innermost first.
    ne: Vec<u64>,
    sha256_prefix: String,
}

fn golden_tensors(header: &str) -> BTreeMap<String, GoldenTensor> {
    let field = |line: &str, key: &str| {
        let rest = &line[line.find(key).expect("field") + key.len()..];
        rest.split([' ', ']']).next().unwrap().to_owned()
    };
    header
        .lines()
        .filter_map(|line| line.strip_prefix("T ")?.split_once(" : "))
        .map(|(name, rest)| {
            let ne = &rest[rest.find("ne=[").unwrap() + 4..rest.find(']').unwrap()];
            let tensor = GoldenTensor {
                block_type: rest.split(' ').next().unwrap().to_owned(),
                ne: ne.split(", ").map(|n| n.parse().unwrap()).collect(),
                sha256_prefix: field(rest, "sha256="),
            };
            (name.to_owned(), tensor)
        })
        .collect()
}

fn hex_prefix(bytes: &[u8], length: usize) -> String {
    hex(&Sha256::digest(bytes))[..length].to_owned()
}

/// All source values of a tensor in file order.
fn values(checkpoint: &Checkpoint, spec: &TensorSpec) -> Vec<f32> {
    let rows = spec.source_shape().iter().rev().skip(1).product::<u64>() as usize;
    let mut all = Vec::new();
    for source in &spec.sources {
        let mut one = vec![0.0; rows * spec.columns() as usize];
        checkpoint.read_rows_f32(source, 0..rows, &mut one).unwrap();
        all.extend(one);
    }
    all
}

#[test]
fn the_native_tiny_checkpoint_opens_without_findings_and_sets_its_drafting_layer_aside() {
    let Some(folder) = fixtures("tiny checkpoints") else { return };
    let checkpoint = Checkpoint::open(folder.join("tiny-native")).unwrap();
    let findings = checkpoint.demand_sound().unwrap();
    assert!(findings.n_draft_tensors > 100 && findings.draft_bytes > 1 << 20, "{findings:?}");
    assert_eq!(findings.unused, [""; 0]);
    assert_eq!(checkpoint.shard_paths().len(), 3);
    assert_eq!(checkpoint.label(), "tiny-native");
    let precisions: BTreeMap<&str, SourcePrecision> = checkpoint
        .table()
        .specs()
        .iter()
        .map(|spec| (spec.family.name(), checkpoint.source_precision(spec).unwrap()))
        .collect();
    assert_eq!(precisions[Family::RoutedUp.name()], SourcePrecision::Fp4);
    assert_eq!(precisions[Family::Attention.name()], SourcePrecision::Fp8);
    assert_eq!(precisions[Family::RoutingTable.name()], SourcePrecision::I64);
    assert_eq!(precisions[Family::Embedding.name()], SourcePrecision::Bf16);
    let bf16 = Checkpoint::open(folder.join("tiny-bf16")).unwrap();
    assert_eq!(bf16.demand_sound().unwrap().n_draft_tensors, 0);
}

#[test]
fn names_and_shapes_are_those_that_llama_cpp_writes() {
    let Some(folder) = fixtures("tiny checkpoints") else { return };
    let checkpoint = Checkpoint::open(folder.join("tiny-native")).unwrap();
    let header = std::fs::read_to_string(folder.join("golden/llamacpp_header.txt")).unwrap();
    let golden = golden_tensors(&header);
    assert_eq!(checkpoint.table().specs().len(), golden.len());
    for spec in checkpoint.table().specs() {
        let mut ne = spec.shape.clone();
        ne.reverse();
        assert_eq!(Some(&ne), golden.get(&spec.gguf_name).map(|t| &t.ne), "{}", spec.gguf_name);
    }
}

#[test]
fn stored_values_are_those_that_llama_cpp_reads() {
    let Some(folder) = fixtures("tiny checkpoints") else { return };
    let checkpoint = Checkpoint::open(folder.join("tiny-native")).unwrap();
    let header = std::fs::read_to_string(folder.join("golden/llamacpp_header.txt")).unwrap();
    let golden = golden_tensors(&header);
    let mut compared = BTreeMap::<&str, usize>::new();
    for spec in checkpoint.table().specs() {
        let golden = &golden[&spec.gguf_name];
        let bytes: Vec<u8> = match golden.block_type.as_str() {
            "F32" => values(&checkpoint, spec).into_iter().flat_map(f32::to_le_bytes).collect(),
            "BF16" => values(&checkpoint, spec)
                .into_iter()
                .flat_map(|x| half::bf16::from_f32(x).to_le_bytes())
                .collect(),
            "I32" => {
                let mut ids = vec![0; spec.n_values() as usize];
                checkpoint.read_i64_as_i32(&spec.sources[0], 0..spec.shape[0] as usize, &mut ids).unwrap();
                ids.into_iter().flat_map(i32::to_le_bytes).collect()
            }
            "MXFP4" => {
                let mut blocks = Vec::new();
                for source in &spec.sources {
                    let mut one = vec![0; (spec.n_values() as usize / spec.sources.len()) / 32 * 17];
                    checkpoint
                        .read_fp4_as_mxfp4(source, 0..spec.source_shape()[0] as usize, &mut one)
                        .unwrap();
                    blocks.extend(one);
                }
                blocks
            }
            _ => continue,
        };
        assert_eq!(hex_prefix(&bytes, 16), golden.sha256_prefix, "{}", spec.gguf_name);
        *compared.entry(golden.block_type.as_str()).or_default() += 1;
        checkpoint.release(&spec.sources[0]);
    }
    assert_eq!(compared["MXFP4"], 18);
    assert_eq!(compared["I32"], 3);
    assert!(compared["F32"] > 80 && compared["BF16"] > 20, "{compared:?}");
}

#[test]
fn any_range_of_rows_reads_as_in_the_whole_tensor_even_after_its_pages_were_released() {
    let Some(folder) = fixtures("tiny checkpoints") else { return };
    let checkpoint = Checkpoint::open(folder.join("tiny-native")).unwrap();
    for name in ["layers.2.attn.wq_b.weight", "layers.1.ffn.experts.3.w2.weight", "embed.weight"] {
        let columns = 256;
        let mut whole = vec![0.0; 200 * columns];
        checkpoint.read_rows_f32(name, 0..200, &mut whole).unwrap();
        checkpoint.release(name);
        let mut part = vec![0.0; 7 * columns];
        checkpoint.read_rows_f32(name, 125..132, &mut part).unwrap();
        assert_eq!(part, whole[125 * columns..132 * columns], "{name}");
    }
}
