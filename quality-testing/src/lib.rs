//! How good a model file is: by official continuations that were recorded ([`cases`], [`scoring`]), and by how close its predictions
//! are to another's ([`Base`]); compared in pairs, with intervals.

pub mod agreement;
pub mod base_cache;
pub mod cases;
pub mod collect;
mod divergence;
pub mod files;
pub mod hash;
mod http;
mod interval;
pub mod journal;
pub mod label;
pub mod paired;
pub mod report;
pub mod scoring;
pub mod table;
pub mod time;
pub mod vectors;

pub use divergence::{Base, Comparison, ScoreError};
pub use interval::Interval;
