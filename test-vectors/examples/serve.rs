//! Serves one synthetic file with ranges on a loopback port, for measurements: `serve N_BYTES` prints address and SHA-256
//! and runs until its standard input ends.
#![allow(clippy::print_stdout, reason = "its output is read by a script")]

use std::io::Read;

use test_vectors::hub::{noise, ranged, sha256};
use test_vectors::server::{Body, Server};

fn main() {
    let n_bytes = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(2_000_000_000);
    let body = Body { block: noise(8 << 20, 1).into(), start: 0, n_bytes };
    let digest = sha256(&body);
    let server = Server::start(move |request| ranged(request, &body, "\"synthetic\""));
    println!("{}/file.bin {digest}", server.url());
    let mut rest = Vec::new();
    // The end of input is the sign to stop; how it ends does not matter.
    let _ = std::io::stdin().read_to_end(&mut rest);
}
