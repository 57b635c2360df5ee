//! The driver, thinly: one device, its stream, memory, launches, events and graphs.
//!
//! Everything that touches `cudarc` is here and in [`super::module`]. `cudarc` panics where the driver's library or one
//! of its functions is missing, so [`Device::open`] looks for the library, at the driver's version and for its functions
//! first.
//!
//! Work is ordered by one stream a [`Device`]; clones share it. Memory comes from the driver's pool in stream order,
//! so buffers may be dropped while kernels that use them are still queued.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

mod buffer;
mod device;
mod functions;
mod graph;
mod launch;
mod profile;
mod stream;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

pub use self::buffer::{DeviceBuffer, PinnedBuffer, View, ViewMut};
pub use self::device::{Device, DeviceFacts, driver_is_present};
pub use self::graph::{Event, Graph};
pub use self::launch::{Arguments, Kernel, Launch, Module};
pub use self::profile::KernelShare;
pub use self::stream::Beside;
use super::error::CudaError;

/// Names the step that failed.
fn step<T>(what: &str, result: Result<T, DriverError>) -> Result<T, CudaError> {
    result.map_err(|error| failure(what.to_owned(), error))
}

/// What a refused call means for the caller.
fn failure(what: String, error: DriverError) -> CudaError {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::Exhausted { what },
        code if is_lost(code) => CudaError::Lost { what, problem: describe(error) },
        _ => CudaError::Driver { what, problem: describe(error) },
    }
}

/// Whether the driver's documentation says of this error that nothing more can be done in the process or with the device.
/// `UNKNOWN` is what broken drivers and devices that fell off the bus give.
fn is_lost(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_SYSTEM_NOT_READY
            | CUresult::CUDA_ERROR_MPS_RPC_FAILURE
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

/// The driver's name and explanation; of a library that knows neither (a toolkit's stub), our name.
fn describe(error: DriverError) -> String {
    let text = |found: Result<&std::ffi::CStr, DriverError>| {
        found.ok().map(|text| text.to_string_lossy().into_owned())
    };
    let name = text(error.error_name()).unwrap_or_else(|| format!("{:?}", error.0));
    match text(error.error_string()) {
        Some(meaning) => format!("{name} ({meaning})"),
        None => format!("{name} (number {})", error.0 as u32),
    }
}
