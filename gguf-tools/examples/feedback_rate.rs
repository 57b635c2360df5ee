//! How long error feedback takes for matrices of real size on one thread, and how near its matrix products come to the rate of one
//! large product on the same machine.
//!
//!     cargo run --release -p gguf-tools --example feedback_rate -- [COLUMNS [ROWS]]

#![expect(clippy::print_stdout, reason = "a program")]

use faer::linalg::matmul::matmul;
use faer::{Accum, Mat, Par};
use gguf_tools::block::BlockType;
use gguf_tools::feedback::{Feedback, SecondMoments};
use rand_core::{Rng, SeedableRng};
use rand_pcg::Pcg64;

/// Seconds of processor time that `f` takes: a busy machine does not change them much.
fn seconds<T>(f: impl FnOnce() -> T) -> (T, f64) {
    let now = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    };
    let start = now();
    let result = f();
    (result, now() - start)
}

/// Operations a second of one large product in single precision.
fn rate(n: usize) -> f64 {
    let a = Mat::<f32>::from_fn(n, n, |i, j| ((i * 7 + j * 13) % 17) as f32 * 0.1);
    let mut c = Mat::<f32>::zeros(n, n);
    let run = |c: &mut Mat<f32>| matmul(c.as_mut(), Accum::Replace, a.as_ref(), a.as_ref(), 1.0, Par::Seq);
    run(&mut c);
    let best = (0..3).map(|_| seconds(|| run(&mut c)).1).fold(f64::INFINITY, f64::min);
    2.0 * (n as f64).powi(3) / best
}

fn main() {
    let mut sizes = std::env::args().skip(1).map(|text| text.parse().expect("a number"));
    let columns: usize = sizes.next().unwrap_or(4096);
    let rows: usize = sizes.next().unwrap_or(2048);
    let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("one thread");
    let mut random = Pcg64::seed_from_u64(1);
    let mut normal =
        || (0..4).map(|_| f64::from(random.next_u32()) / 4_294_967_296.0 - 0.5).sum::<f64>() as f32;

    let n_inputs = 1024;
    let inputs: Vec<f32> = (0..n_inputs * columns).map(|_| normal()).collect();
    let (moments, taken) = seconds(|| {
        let mut moments = SecondMoments::new(columns);
        for input in inputs.chunks_exact(columns) {
            moments.add(input.iter().copied(), 1.0);
        }
        moments.finish()
    });
    let gram = n_inputs as f64 * (columns as f64).powi(2);
    println!("second moments of {n_inputs} inputs: {taken:.2} s, {:.1} Gop/s", gram / taken / 1e9);

    let weights: Vec<f32> = (0..rows * columns).map(|_| normal()).collect();
    let diagonal: Vec<f32> = (0..columns).map(|i| moments[i * columns + i]).collect();
    let feedback = Feedback::default();
    for target in [BlockType::Iq2Xxs, BlockType::Q2K, BlockType::Q4K] {
        let (factor, taken) =
            seconds(|| feedback.factor(target, &moments, columns, 0.1).expect("positive definite"));
        let cholesky = (columns as f64).powi(3) / 3.0;
        println!(
            "{target}: factor of {columns} x {columns}: {taken:.2} s, {:.1} Gop/s in double precision",
            cholesky / taken / 1e9
        );
        let before = rate(1536);
        let mut out = vec![0; rows * columns / target.values_per_block() * target.bytes_per_block()];
        let (report, taken) = seconds(|| {
            threads.install(|| feedback.quantize_by(target, &weights, &diagonal, &factor, &mut out))
        });
        let report = report.expect("can be written");
        let machine = f64::midpoint(before, rate(1536));
        let products = report.work.operations / report.work.seconds;
        println!(
            "{target}: {rows} x {columns} in {taken:.2} s, {:.2} M weights/s; matrix products {:.2} s, {:.1} Gop/s, {:.0} % of \
             one large product ({:.1} Gop/s)",
            (rows * columns) as f64 / taken / 1e6,
            report.work.seconds,
            products / 1e9,
            100.0 * products / machine,
            machine / 1e9
        );
    }
}
