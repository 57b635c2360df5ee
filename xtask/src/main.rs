//! Tasks of this repository's own development: `cargo xtask --help`.

mod cubin;
mod kernels;
mod report;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Tasks of this repository's own development")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Compile all CUDA kernels for every chip (no GPU is needed, but NVRTC), and write the manifest and the embedded PTX.
    Kernels(kernels::Arguments),
}

#[expect(clippy::print_stderr, reason = "a command's own message")]
fn main() -> ExitCode {
    let Task::Kernels(arguments) = Arguments::parse().task;
    match kernels::run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
