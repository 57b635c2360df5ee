//! How fast this machine reads its memory: the roof of decoding speed.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;

use crate::error::RunnerError;

/// Bytes that are read a pass: more than the caches of any processor in common use.
const BUFFER_BYTES: usize = 1 << 30;
/// The fastest pass counts: slower ones shared the machine with somebody.
const PASSES: usize = 5;
/// Values that are summed at once: enough independent sums to hide the latency of an addition.
const SUMS: usize = 32;

/// Bytes a second that `n_threads` threads (0 = one a core) read from memory together, best of several passes over
/// 1 GiB. Takes a second or two.
///
/// # Errors
/// If the threads cannot be started.
pub fn read_bandwidth(n_threads: usize) -> Result<f64, RunnerError> {
    let threads = rayon::ThreadPoolBuilder::new()
        .num_threads(n_threads)
        .build()
        .map_err(|source| RunnerError::Threads { n_threads, source })?;
    Ok(threads.install(|| {
        let n = BUFFER_BYTES / size_of::<u64>();
        let part = n.div_ceil(rayon::current_num_threads()).next_multiple_of(SUMS);
        // Written by the threads that read it, so that pages lie near them; not zero, for those may share one page.
        let mut buffer = vec![0_u64; n];
        buffer.par_chunks_mut(part).for_each(|part| part.fill(1));
        let seconds = (0..PASSES).map(|_| {
            let started = Instant::now();
            let sum: u64 = buffer.par_chunks(part).map(sum).sum();
            black_box(sum);
            started.elapsed().as_secs_f64()
        });
        BUFFER_BYTES as f64 / seconds.fold(f64::INFINITY, f64::min)
    }))
}

fn sum(values: &[u64]) -> u64 {
    let (blocks, rest) = values.as_chunks::<SUMS>();
    let mut sums = [0_u64; SUMS];
    for block in blocks {
        for (sum, value) in sums.iter_mut().zip(block) {
            *sum = sum.wrapping_add(*value);
        }
    }
    sums.iter().chain(rest).fold(0, |all, value| all.wrapping_add(*value))
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn every_value_is_read_once() {
        let values: Vec<u64> = (0..1000).collect();
        assert_eq!(sum(&values), 499_500);
        assert_eq!(sum(&[]), 0);
    }
}
