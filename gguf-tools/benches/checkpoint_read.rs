//! Decoding of checkpoint rows, in bytes of `f32` (or of MXFP4 blocks) a second and thread.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::progress::Silent;
use gguf_tools::synth::{Shape, SynthOptions, write_checkpoint};

fn reading(criterion: &mut Criterion) {
    let place = tempfile::tempdir().expect("a temporary folder");
    let folder = place.path().join("tiny");
    write_checkpoint(&folder, &SynthOptions::new(Shape::Tiny), &Silent).expect("a checkpoint");
    let checkpoint = Checkpoint::open(&folder).expect("a sound checkpoint");
    let mut group = criterion.benchmark_group("checkpoint");
    for (name, tensor) in [
        ("fp8", "layers.1.attn.wq_b.weight"),
        ("fp4", "layers.1.ffn.experts.0.w1.weight"),
        ("bf16", "layers.1.attn.compressor.wkv.weight"),
    ] {
        let rows = checkpoint.tensor(tensor).expect("the tensor").shape[0] as usize;
        let mut values = vec![0.0_f32; rows * 256];
        group.throughput(Throughput::Bytes(4 * values.len() as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| checkpoint.read_rows_f32(tensor, 0..rows, &mut values).expect("finite values"));
        });
    }
    let mut blocks = vec![0; 256 * 8 * 17];
    group.throughput(Throughput::Bytes(blocks.len() as u64));
    group.bench_function("fp4_to_mxfp4", |bencher| {
        let tensor = "layers.1.ffn.experts.0.w1.weight";
        bencher.iter(|| checkpoint.read_fp4_as_mxfp4(tensor, 0..256, &mut blocks).expect("finite values"));
    });
    group.finish();
}

criterion_group!(benches, reading);
criterion_main!(benches);
