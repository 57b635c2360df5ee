//! What can go wrong on a CUDA device.

/// Why the CUDA device could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The machine has no driver library.
    #[error("no NVIDIA driver library (libcuda.so.1) found; install the driver, or use `--backend cpu`")]
    NoDriver,
    /// The driver is too old for the kernels.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, but CUDA {}.{} (driver 580 or newer) is needed; \
         update the driver, or use `--backend cpu`",
        .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10
    )]
    OldDriver {
        /// `cuDriverGetVersion`, 1000 times the major plus 10 times the minor version.
        found: i32,
        /// The least that works.
        needed: i32,
    },
    /// There is no such device.
    #[error(
        "CUDA device {wanted} does not exist; the driver sees {found} (see CUDA_VISIBLE_DEVICES), \
         or use `--backend cpu`"
    )]
    NoDevice {
        /// Number asked for.
        wanted: usize,
        /// Devices there are.
        found: usize,
    },
    /// The device is too old.
    #[error(
        "{name} has compute capability {}.{}, but at least 9.0 is needed; use `--backend cpu`",
        .capability.0, .capability.1
    )]
    OldDevice {
        /// Name of the device.
        name: String,
        /// Major and minor.
        capability: (u32, u32),
    },
    /// Memory ran out.
    #[error(
        "{name} is out of memory: {what} needs {wanted} bytes, {free} of {total} bytes are free; \
         close other programs that use the device, or ask for a shorter context"
    )]
    OutOfMemory {
        /// Name of the device.
        name: String,
        /// What the memory was for.
        what: String,
        /// Bytes asked for.
        wanted: usize,
        /// Free bytes of the device.
        free: usize,
        /// All bytes of the device.
        total: usize,
    },
    /// The model does not fit.
    #[error(
        "{name}: need {need} GiB = {parts}; there may be {room} of {total} GiB. \
         Close other programs that use the device, raise `--device-memory` if it was given, ask for a shorter context, \
         or use `--backend cpu`"
    )]
    TooLarge {
        /// Name of the device.
        name: String,
        /// GiB needed.
        need: String,
        /// What for.
        parts: String,
        /// GiB that it may take, and why no more.
        room: String,
        /// All GiB of the device.
        total: String,
    },
    /// The driver refused a call.
    #[error("{what} failed: {problem}")]
    Driver {
        /// Which step, with the kernel's name if it was one.
        what: String,
        /// The driver's name of the error and what it means.
        problem: String,
    },
    /// Kernels could not be compiled.
    #[error("the kernels of `{unit}` cannot be compiled for {target} by NVRTC {version}:\n{log}")]
    Compile {
        /// Name of the source.
        unit: String,
        /// `sm_90` and the like.
        target: String,
        /// Version of the compiler.
        version: String,
        /// What the compiler says.
        log: String,
    },
    /// No kernels for this device.
    #[error(
        "no kernels for compute capability {}.{}: {problem}; install the CUDA 13 run-time compiler \
         (libnvrtc.so.13, for instance `pip install nvidia-cuda-nvrtc`), or use `--backend cpu`",
        .capability.0, .capability.1
    )]
    NoKernels {
        /// Major and minor.
        capability: (u32, u32),
        /// What was tried.
        problem: String,
    },
    /// Sizes that do not belong together.
    #[error("{what}: found {found}, expected {expected}")]
    Shape {
        /// Which operation and operand.
        what: String,
        /// As given.
        found: String,
        /// As needed.
        expected: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each says what was found, what was expected and what to do.
    #[test]
    fn errors_of_a_machine_name_both_sides_and_a_way_out() {
        let old = CudaError::OldDriver { found: 12_040, needed: 13_000 }.to_string();
        let chip = CudaError::OldDevice { name: "NVIDIA A100".into(), capability: (8, 0) }.to_string();
        let absent = CudaError::NoDevice { wanted: 1, found: 0 }.to_string();
        let memory = CudaError::OutOfMemory {
            name: "NVIDIA GB10".into(),
            what: "a cache".into(),
            wanted: 5_000,
            free: 1_000,
            total: 9_000,
        }
        .to_string();
        for (text, parts) in [
            (&old, &["12.4", "13.0", "update the driver"][..]),
            (&chip, &["NVIDIA A100", "8.0", "9.0"]),
            (&absent, &["device 1", "sees 0", "CUDA_VISIBLE_DEVICES"]),
            (&CudaError::NoDriver.to_string(), &["libcuda.so.1", "install the driver"]),
            (&memory, &["NVIDIA GB10", "a cache", "5000", "1000 of 9000", "shorter context"]),
        ] {
            let missing: Vec<_> = parts.iter().filter(|part| !text.contains(**part)).collect();
            assert!(missing.is_empty(), "{text} lacks {missing:?}");
        }
        for text in [old, chip, absent, CudaError::NoDriver.to_string()] {
            assert!(text.contains("--backend cpu"), "{text}");
        }
    }
}
