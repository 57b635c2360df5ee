//! Directional steering: directions in a model's activations, found from pairs of prompts, judged, kept in files that say
//! what they mean, and taken out of (or added to) what a layer writes.
//!
//! The operation is a projection, `y -= scale * v * (v . y)` with `|v| = 1`: scale 1 removes the direction from `y`,
//! a larger scale inverts it, a negative scale amplifies it. `v` points from the "bad" prompts to the "good" ones.
//!
//! A direction is only meaningful for the operation, the place, the layers and the checkpoint it was made for.
//! [`Direction`] carries all of them, and [`Direction::for_model`] refuses what does not fit, with numbers.

mod build;
mod capture;
mod component;
mod direction;
mod error;
mod examples;
mod format;
mod judge;
mod model;
mod sweep;

pub use build::{BuildOptions, Method, build};
pub use capture::{Captured, Position, capture};
pub use component::Component;
pub use direction::{Direction, Operation, Origin};
pub use error::SteeringError;
pub use examples::{EXAMPLES, Example, prompts};
pub use format::{Format, open, read, write};
pub use judge::{Separation, separation};
pub use model::ModelIdentity;
pub use sweep::{Generation, SweepOptions, SweepRow, sweep};
