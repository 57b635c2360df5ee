//! How long a header with a full vocabulary takes to parse and to lay out.

use std::hint::black_box;
use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gguf_tools::block::BlockType;
use gguf_tools::gguf::{Layout, Metadata, NewTensor, parse_header};

/// Tokens and merges of DeepSeek V4, and as many tensors as Flash has.
fn flash_like() -> (Metadata, Vec<NewTensor>) {
    let mut metadata = Metadata::default();
    metadata.set("tokenizer.ggml.tokens", (0..129_280).map(|i| format!("token{i}")).collect::<Vec<_>>());
    metadata.set("tokenizer.ggml.merges", (0..127_741).map(|i| format!("ab{i} cd")).collect::<Vec<_>>());
    metadata.set("tokenizer.ggml.token_type", vec![1_i32; 129_280]);
    let tensors = (0..1_328).map(|i| NewTensor {
        name: format!("blk.{i}.ffn_gate_exps.weight"),
        block_type: BlockType::Iq2Xxs,
        shape: vec![256, 2048, 4096],
    });
    (metadata, tensors.collect())
}

fn headers(criterion: &mut Criterion) {
    let (metadata, tensors) = flash_like();
    let bytes = Layout::new(metadata.clone(), tensors.clone(), 32).expect("sound").header_bytes();
    let mut group = criterion.benchmark_group("gguf_header");
    group.throughput(Throughput::Bytes(bytes.len() as u64)).sample_size(20);
    group.bench_function("parse_130k_tokens", |bencher| {
        bencher.iter(|| parse_header(black_box(&bytes), Path::new("model.gguf")).expect("sound"));
    });
    group.bench_function("lay_out_130k_tokens", |bencher| {
        bencher.iter(|| Layout::new(black_box(metadata.clone()), tensors.clone(), 32).expect("sound"));
    });
    group.finish();
}

criterion_group!(benches, headers);
criterion_main!(benches);
