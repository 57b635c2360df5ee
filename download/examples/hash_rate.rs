//! How fast one core computes SHA-256 here: hashes N_BYTES of memory and prints bytes per second.
#![allow(clippy::print_stdout, reason = "its output is read by a script")]

use std::time::Instant;

use sha2::{Digest, Sha256};

fn main() {
    let n_bytes: usize = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(2_000_000_000);
    let buffer = vec![0x5a; 256 << 10];
    let mut hasher = Sha256::new();
    let started = Instant::now();
    for _ in 0..n_bytes.div_ceil(buffer.len()) {
        hasher.update(&buffer);
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{:.0} {:x?}", n_bytes as f64 / seconds, &hasher.finalize()[..4]);
}
