//! The device against the CPU: every operation, then whole models. Made to be run on machines that have nothing but the
//! program, so each finding says all that is needed to go and look.

mod full;
mod models;
mod operations;
mod sequences;
mod source;
mod steering;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::KernelChoice;
use crate::error::RunnerError;
use crate::session::Model;
use crate::weights::SyntheticSource;

/// What a self-test checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Norms, streams, rotation, rounding, the router.
    Rows,
    /// Caches, compressors, the indexer, attention.
    Attention,
    /// Products of matrices and experts in every block type.
    Matrices,
    /// A whole model: logits, likelihoods and continuations.
    Model,
    /// Equal bits: recorded or not, in parts of any size, batched or alone, restored.
    Equalities,
    /// What observers see, and directions that are taken out.
    Steering,
}

impl Group {
    /// Every group with the name users type.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("rows", Self::Rows),
        ("attention", Self::Attention),
        ("matrices", Self::Matrices),
        ("model", Self::Model),
        ("equalities", Self::Equalities),
        ("steering", Self::Steering),
    ];
}

/// One finding.
#[derive(Debug, Clone, Serialize)]
pub struct Check {
    /// What was compared.
    pub name: String,
    /// Whether it is as it must be.
    pub passed: bool,
    /// Numbers, and where they are worst.
    pub detail: String,
    /// How long it took.
    pub seconds: f64,
}

/// What to check with.
#[derive(Debug, Clone, Copy)]
pub struct SelfTest<'a> {
    /// The device.
    pub ordinal: usize,
    /// The kernels.
    pub kernels: KernelChoice,
    /// A small model: checkpoint folder or file.
    pub model: &'a Path,
    /// Some text in the model's tokens, at least 1200.
    pub tokens: &'a [u32],
}

/// Where findings go.
pub(super) struct Report<'a> {
    pub(super) each: &'a mut dyn FnMut(&Check),
}

impl Report<'_> {
    /// Runs one check; errors and panics are findings, too.
    pub(super) fn run(&mut self, name: String, check: impl FnOnce() -> Result<Verdict, RunnerError>) {
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(check));
        let verdict = match outcome {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(error)) => Verdict { passed: false, detail: format!("error: {}", chain(&error)) },
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied());
                Verdict { passed: false, detail: format!("panic: {}", text.unwrap_or("unknown")) }
            }
        };
        let Verdict { passed, detail } = verdict;
        (self.each)(&Check { name, passed, detail, seconds: started.elapsed().as_secs_f64() });
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Whether a check passed, and its numbers.
pub(super) struct Verdict {
    pub(super) passed: bool,
    pub(super) detail: String,
}

/// How far results may be apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tolerance {
    /// Root mean square of the differences over that of the expected values.
    pub(super) rms: f64,
    /// Largest difference over the root mean square of the expected values.
    pub(super) largest: f64,
}

/// Compares `[.., width]` values.
pub(super) fn compare(expected: &[f32], found: &[f32], width: usize, tolerance: Tolerance) -> Verdict {
    if expected.len() != found.len() {
        let detail = format!("{} values, expected {}", found.len(), expected.len());
        return Verdict { passed: false, detail };
    }
    let scale = (expected.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / expected.len().max(1) as f64)
        .sqrt()
        .max(1e-30);
    let (mut sum, mut worst, mut worst_at, mut n_equal) = (0.0, 0.0, 0, 0);
    let mut first_wrong = None;
    for (i, (&a, &b)) in expected.iter().zip(found).enumerate() {
        n_equal += usize::from(a.to_bits() == b.to_bits());
        if a == b {
            continue;
        }
        let difference = (f64::from(a) - f64::from(b)).abs() / scale;
        sum += difference * difference;
        // A NaN is no small difference.
        if difference > worst || difference.is_nan() {
            (worst, worst_at) = (if difference.is_nan() { f64::INFINITY } else { difference }, i);
        }
        if (difference.is_nan() || difference > tolerance.largest) && first_wrong.is_none() {
            first_wrong = Some(i);
        }
    }
    let rms = (sum / expected.len().max(1) as f64).sqrt();
    let passed = rms <= tolerance.rms && worst <= tolerance.largest;
    let place =
        |i: usize| format!("[{}, {}] is {:e}, expected {:e}", i / width, i % width, found[i], expected[i]);
    let mut detail = format!(
        "rms {rms:.2e} of {:.0e}, largest {worst:.2e} of {:.0e}, {n_equal} of {} bits equal",
        tolerance.rms,
        tolerance.largest,
        expected.len()
    );
    if !passed {
        detail += &format!("; scale {scale:.3e}; worst {}", place(worst_at));
        if let Some(i) = first_wrong {
            detail += &format!("; first {}", place(i));
        }
    }
    Verdict { passed, detail }
}

/// Demands equal bits.
pub(super) fn same_bits(expected: &[f32], found: &[f32], width: usize) -> Verdict {
    let wrong = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    let n_wrong = expected.iter().zip(found).filter(|&pair| wrong(pair)).count();
    let first = expected.iter().zip(found).position(wrong);
    let passed = first.is_none() && expected.len() == found.len();
    let mut detail = format!("{n_wrong} of {} values differ ({} found)", expected.len(), found.len());
    if let Some(i) = first {
        let width = width.max(1);
        detail +=
            &format!("; first [{}, {}] is {:e}, expected {:e}", i / width, i % width, found[i], expected[i]);
    }
    Verdict { passed, detail }
}

/// Runs a group of checks, and tells `each` about every one.
///
/// # Errors
/// If the device or the model cannot be opened at all.
pub fn self_test(test: &SelfTest<'_>, group: Group, each: &mut dyn FnMut(&Check)) -> Result<(), RunnerError> {
    let mut report = Report { each };
    match group {
        Group::Rows => operations::rows(test, &mut report),
        Group::Attention => sequences::attention(test, &mut report),
        Group::Matrices => operations::matrices(test, &mut report),
        Group::Model => models::model(test, &mut report),
        Group::Equalities => models::equalities(test, &mut report),
        Group::Steering => steering::steered(test, &mut report),
    }
}

/// Checks an open synthetic model: layers of every kind, some rows of every matrix in them, which the CPU makes again.
///
/// # Errors
/// If the model cannot be run at all.
pub fn check_synthetic(
    model: &Model,
    source: &Arc<SyntheticSource>,
    each: &mut dyn FnMut(&Check),
) -> Result<(), RunnerError> {
    full::full(model, source, &mut Report { each })
}
