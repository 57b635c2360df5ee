//! Checks and times the matrix kernels on a CUDA device: `cuda_matrices [check] [bench] [ptx]`.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example's report")]

use std::process::ExitCode;

use runner::cuda::module::Origin;
use runner::cuda::{Device, Gpu, Kernels, self_test};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            eprintln!("{failed} checks failed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<usize, Box<dyn std::error::Error>> {
    let asked = |name: &str| arguments.iter().any(|argument| argument == name);
    let start = std::time::Instant::now();
    let device = Device::open(0)?;
    println!("{:?}, opened in {:.2?}", device.facts(), start.elapsed());
    let start = std::time::Instant::now();
    let kernels = Kernels::load(&device, if asked("ptx") { Origin::Ptx } else { Origin::Any })?;
    println!("kernels {}, in {:.2?}", kernels.origin(), start.elapsed());
    let gpu = Gpu { device, kernels };
    let mut failed = 0;
    if asked("check") || !asked("bench") {
        let start = std::time::Instant::now();
        let mut n = 0;
        failed = self_test::matrices(&gpu, &mut |check| {
            n += 1;
            match &check.problem {
                Some(problem) => println!("FAILED {}: {problem}", check.name),
                None => println!("ok     {} ({})", check.name, check.measured),
            }
        })?;
        println!("{n} checks, {failed} failed, in {:.1?}", start.elapsed());
    }
    if asked("bench") {
        self_test::kernel_times(&gpu, &mut |time| {
            println!("{}", serde_json::to_string(time).unwrap_or_default());
        })?;
    }
    Ok(failed)
}
