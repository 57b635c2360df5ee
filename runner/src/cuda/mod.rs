//! The model's operations on an NVIDIA GPU.
//!
//! [`driver`] is the driver, thinly; [`module`] finds the kernels or has the [`compiler`] make them; [`matrix`] holds weights and multiplies;
//! [`CudaBackend`] holds what a model needs there, and its operations are everything else. Kernels are CUDA C without any include, in `kernels/`. A result never depends on
//! the grid, on the number of multiprocessors or on the other rows of a batch: no float atomics, each sum in a fixed order.
//!
//! Nothing that depends on token ids, positions or choices is known to the host: the pass over one token is recorded as a
//! graph and repeated for every next one.

mod attention;
mod backend;
mod cache;
pub mod check;
mod choice;
pub mod compiler;
pub mod driver;
mod error;
mod hyper;
mod loading;
pub mod matrix;
pub mod module;
mod operations;
mod plan;
mod pool;
pub mod self_test;
mod taps;
mod token;

pub use backend::{CudaBackend, CudaTensor};
pub use cache::CudaCache;
pub use choice::{KernelChoice, Origin, PORTABLE_SHARED_BYTES};
pub use driver::{Device, DeviceBuffer, View, ViewMut};
pub use error::CudaError;
pub use matrix::{ExpertMatrices, Matrix, Pass, Workspace};
pub use module::{Gpu, Kernels};
pub use plan::{Plan, Room};
