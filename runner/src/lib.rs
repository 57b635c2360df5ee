//! The DeepSeek V4 model on the CPU.
//!
//! [`forward`] is the model, [`ops`] the operations it is written in, [`cpu`] their implementation.

pub mod bandwidth;
pub mod chat;
pub mod cpu;
pub mod error;
pub mod forward;
pub mod load;
pub mod logits;
pub mod observe;
pub mod ops;
pub mod sample;
pub mod session;
pub mod tokenizer;
pub mod trace;
pub mod weights;

pub use error::RunnerError;
pub use ops::{ActivationPrecision, Numerics};
pub use session::{Model, Options, Session, Snapshot};
