//! Every block format that can be computed: values quantized and dequantized per second, on one thread.
//!
//! `cargo bench -p gguf-tools --bench block_formats -- Q2_K`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gguf_tools::block::{BlockType, Guide};
use gguf_tools::simd::Level;

const N_VALUES: usize = 16 * 4096;

/// Roughly bell-shaped values with a scale that changes along the row, from a fixed recurrence.
fn row() -> Vec<f32> {
    let mut state = 1u32;
    let mut uniform = move || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..N_VALUES)
        .map(|i| (uniform() + uniform() + uniform() + uniform()) * 0.02 * (1 + i / 32 % 3) as f32)
        .collect()
}

fn levels() -> Vec<(&'static str, Level)> {
    let mut levels = vec![("scalar", Level::Scalar)];
    #[cfg(target_arch = "x86_64")]
    if Level::all().contains(&Level::Avx2) {
        levels.push(("AVX2", Level::Avx2));
    }
    levels
}

fn formats(criterion: &mut Criterion) {
    let row = row();
    let importance: Vec<f32> = row.iter().map(|v| 0.01 + (v * 40.0).powi(2)).collect();
    for block_type in BlockType::all() {
        let Some(format) = block_type.format() else { continue };
        let n_bytes = block_type.row_bytes(N_VALUES as u64).expect("whole blocks") as usize;
        let mut blocks = vec![0x11; n_bytes];

        let mut group = criterion.benchmark_group("quantize");
        group.throughput(Throughput::Elements(N_VALUES as u64)).sample_size(20);
        for (name, level) in levels() {
            let guide = Guide { importance: Some(&importance), level, ..Guide::default() };
            let Some(quantizer) = format.quantizer(guide) else { continue };
            group.bench_function(BenchmarkId::new(block_type.name(), name), |bencher| {
                bencher.iter(|| quantizer.quantize_row(black_box(&row), &mut blocks));
            });
        }
        group.finish();

        let mut group = criterion.benchmark_group("dequantize");
        group.throughput(Throughput::Elements(N_VALUES as u64)).sample_size(20);
        let mut widened = vec![0.0; N_VALUES];
        group.bench_function(block_type.name(), |bencher| {
            bencher.iter(|| format.dequantize(black_box(&blocks), &mut widened));
        });
        group.finish();
    }
}

criterion_group!(benches, formats);
criterion_main!(benches);
