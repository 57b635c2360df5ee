//! `ggsmith`: makes, checks and proves GGUF files of DeepSeek V4.
//!
//! Argument parsing and printing only; the libraries hold the work.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this crate is the one that prints")]
#![allow(
    missing_docs,
    reason = "clap turns the documentation of arguments into help text; the rest is private"
)]

mod cli;
mod nano;
mod render;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let arguments = cli::Cli::parse();
    match cli::run(arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", cli::message(&error));
            ExitCode::from(if render::progress::interrupted() { 130 } else { cli::exit_code(&error) })
        }
    }
}
