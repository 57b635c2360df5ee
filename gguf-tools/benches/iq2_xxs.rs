//! IQ2_XXS: weights a second of one thread, at every instruction set of this machine.
//!
//! `cargo bench -p gguf-tools --bench iq2_xxs`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gguf_tools::block::{BlockType, Guide, Objective};
use gguf_tools::simd::Level;

/// Values that look like weights: the sum of four uniform numbers, small.
fn weights(n: usize) -> Vec<f32> {
    let mut state = 1_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(|_| 0.03 * (uniform() + uniform() + uniform() + uniform())).collect()
}

fn quantize(c: &mut Criterion) {
    let format = BlockType::Iq2Xxs.format().expect("computed");
    for n in [4096, 2048] {
        let row = weights(n);
        let importance: Vec<f32> = weights(n).iter().map(|x| (80.0 * x).exp()).collect();
        let mut blocks = vec![0; n / 256 * 66];
        let mut group = c.benchmark_group(format!("quantize {n}"));
        group.throughput(Throughput::Elements(n as u64));
        for level in [Level::Scalar, Level::detect()] {
            for (name, objective) in Objective::NAMES {
                let guide = Guide { importance: Some(&importance), objective, scale_gain: None, level };
                let quantizer = format.quantizer(guide).expect("can be written");
                let id = BenchmarkId::new(name, format!("{level:?}"));
                group.bench_function(id, |b| {
                    b.iter(|| quantizer.quantize_row(black_box(&row), black_box(&mut blocks)));
                });
            }
        }
        group.finish();
    }
}

fn dequantize(c: &mut Criterion) {
    let n = 4096;
    let importance = vec![1.0; n];
    for block_type in [BlockType::Iq2Xxs, BlockType::Iq2Xs, BlockType::Iq3Xxs] {
        let format = block_type.format().expect("computed");
        let mut blocks = vec![0x35; n / 256 * block_type.bytes_per_block()];
        if let Some(quantizer) = format.quantizer(Guide { importance: Some(&importance), ..Guide::default() })
        {
            quantizer.quantize_row(&weights(n), &mut blocks);
        }
        let mut row = vec![0.0; n];
        let mut group = c.benchmark_group("dequantize");
        group.throughput(Throughput::Elements(n as u64));
        group.bench_function(block_type.name(), |b| {
            b.iter(|| format.dequantize(black_box(&blocks), black_box(&mut row)));
        });
        group.finish();
    }
}

criterion_group!(benches, quantize, dequantize);
criterion_main!(benches);
