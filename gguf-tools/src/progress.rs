//! How long work tells its caller how far it is. Libraries never print.

use std::sync::atomic::{AtomicBool, Ordering};

/// One step of a long job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step<'a> {
    /// What is being worked on: a tensor name, a file name.
    pub item: &'a str,
    /// Bytes of the result that are done.
    pub done_bytes: u64,
    /// Bytes of the whole result.
    pub total_bytes: u64,
    /// Tensors (or other items) that are done.
    pub done_items: usize,
    /// Tensors (or other items) in all.
    pub total_items: usize,
}

/// Receives the steps of a job and can ask it to stop.
pub trait Progress: Sync {
    /// Called after each item and, for large items, in between.
    fn step(&self, step: &Step<'_>);

    /// Whether the job should stop at the next point from which it can resume.
    fn interrupted(&self) -> bool {
        false
    }
}

/// Ignores every step.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn step(&self, _: &Step<'_>) {}
}

/// Ignores every step and stops when the flag is set.
#[derive(Debug, Default)]
pub struct StopFlag(AtomicBool);

impl StopFlag {
    /// Asks the job to stop.
    pub fn stop(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Progress for StopFlag {
    fn step(&self, _: &Step<'_>) {}

    fn interrupted(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
