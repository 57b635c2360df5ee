//! The model's operations on an NVIDIA GPU.
//!
//! [`driver`] is the driver, thinly; [`module`] finds or compiles the kernels; [`matrix`] holds weights and multiplies.
//! Kernels are CUDA C without any include, in `kernels/`. A result never depends on the grid, on the number of
//! multiprocessors or on the other rows of a batch: no float atomics, each sum by one warp in a fixed order.

pub mod driver;
mod error;
pub mod matrix;
pub mod module;
pub mod self_test;

pub use driver::{Device, DeviceBuffer, View, ViewMut};
pub use error::CudaError;
pub use matrix::{ExpertMatrices, Matrix, Pass, Workspace};
pub use module::{Gpu, Kernels};
