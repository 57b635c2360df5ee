//! The driver, thinly: one device, its stream, memory, launches, events and graphs.
//!
//! Everything that touches `cudarc` is here and in [`super::module`]. `cudarc` panics where the driver's library or one
//! of its functions is missing, so [`Device::open`] looks for the library and at the driver's version first.
//!
//! Work is ordered by one stream a [`Device`]; clones share it. Memory comes from the driver's pool in stream order,
//! so buffers may be dropped while kernels that use them are still queued.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

mod buffer;
mod device;
mod graph;
mod launch;
mod profile;
mod stream;

use cudarc::driver::result::DriverError;

pub use self::buffer::{DeviceBuffer, PinnedBuffer, View, ViewMut};
pub use self::device::{Device, DeviceFacts, driver_is_present};
pub use self::graph::{Event, Graph};
pub use self::launch::{Arguments, Kernel, Launch, Module};
pub use self::profile::KernelShare;
use super::error::CudaError;

/// Names the step that failed.
fn step<T>(what: &str, result: Result<T, DriverError>) -> Result<T, CudaError> {
    result.map_err(|error| CudaError::Driver { what: what.to_owned(), problem: describe(error) })
}

fn describe(error: DriverError) -> String {
    let text = |found: Result<&std::ffi::CStr, DriverError>| {
        found.map_or_else(|_| "unknown".to_owned(), |text| text.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}
