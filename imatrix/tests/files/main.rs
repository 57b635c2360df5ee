//! Importance matrix files through the public API.

mod collect;
mod combine;
mod common;
mod coverage;
mod gguf;
mod golden;
mod legacy;
