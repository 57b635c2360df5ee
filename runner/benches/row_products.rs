//! Products of one row with one input, GB of weights a second and thread, straight from the blocks.
//!
//! Time is the processor time of the thread, so that a busy machine shows in the caches alone; ggml's are measured
//! alike by the program of the baselines.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gguf_tools::block::BlockType;
use gguf_tools::simd::Level;
use runner::cpu::{FloatDot, Int8Dot, Int8Rows};

const WIDTH: usize = 4096;
/// Bytes of rows that are gone through, more than the caches next to a core hold.
const ROW_BYTES: usize = 16 << 20;

/// Time that this thread has run.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn row_products(criterion: &mut Criterion) {
    let input: Vec<f32> = (0..WIDTH).map(|i| (i as f32 * 0.37).sin()).collect();
    let types = ["IQ2_XXS", "Q2_K", "Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16", "BF16"];
    for block_type in types.map(|name| name.parse::<BlockType>().expect("a known type")) {
        let row_bytes = block_type.row_bytes(WIDTH as u64).expect("whole blocks") as usize;
        let n_rows = ROW_BYTES / row_bytes;
        // Bytes below 0x40 make finite scales of every kind.
        let mut rows: Vec<u8> =
            (0..n_rows * row_bytes).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 & 0x3f).collect();
        if block_type == BlockType::Mxfp4 {
            // The first byte is an exponent; so small ones, which no file has, would make subnormal, slow products.
            rows.chunks_exact_mut(block_type.bytes_per_block()).for_each(|block| block[0] += 0x40);
        }
        let mut out = vec![0.0; n_rows];
        let mut group = criterion.benchmark_group("row_products");
        group.throughput(Throughput::Bytes(rows.len() as u64)).sample_size(20);
        for level in Level::all().into_iter().rev() {
            group.bench_function(format!("{block_type} {level:?}"), |bencher| {
                bencher.iter_custom(|n| {
                    let started = processor_time();
                    for _ in 0..n {
                        if let Some(dot) = Int8Dot::of(block_type) {
                            let inputs = Int8Rows::new(level, &input, WIDTH, dot.group_values());
                            dot.products(level, &rows, &inputs, &mut out);
                        } else if let Some(dot) = FloatDot::of(block_type) {
                            dot.products(level, &rows, &input, &mut out);
                        }
                        black_box(&out);
                    }
                    processor_time().saturating_sub(started)
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, row_products);
criterion_main!(benches);
