//! How close the predictions of one model file are to those of another, with intervals.

mod divergence;
mod interval;

pub use divergence::{Base, Comparison, ScoreError};
pub use interval::Interval;
