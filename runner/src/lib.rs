//! The DeepSeek V4 model on the CPU and on NVIDIA GPUs.
//!
//! [`forward`] is the model, [`ops`] the operations it is written in, [`cpu`] and [`cuda`] their implementations.

pub mod bandwidth;
pub mod chat;
pub mod cpu;
pub mod cuda;
mod engine;
pub mod error;
pub mod forward;
mod layer;
pub mod load;
pub mod logits;
pub mod observe;
mod operands;
pub mod ops;
mod rotary;
pub mod sample;
pub mod session;
pub mod tokenizer;
pub mod trace;
pub mod weights;

pub use error::RunnerError;
pub use ops::{ActivationPrecision, Numerics};
pub use session::{Model, Options, Processor, Session, Snapshot};
