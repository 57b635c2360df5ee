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
    /// The library is not what its version says.
    #[error(
        "the NVIDIA driver library lacks {n_missing} functions that are needed, first `{first}`; \
         install driver 580 or newer, or use `--backend cpu`"
    )]
    MissingFunctions {
        /// How many are absent.
        n_missing: usize,
        /// The first of them.
        first: String,
    },
    /// The driver is there and does not work.
    #[error("the NVIDIA driver does not start: {problem}; {advice}, or use `--backend cpu`")]
    NotStarted {
        /// The driver's name of the error and what it means.
        problem: String,
        /// What helps.
        advice: &'static str,
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
        "{name} is out of memory: {wanted} bytes are wanted for {what}, {free} of {total} bytes are free; \
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
    /// Memory ran out in a call that asks for no number of bytes.
    #[error(
        "{what} failed: the device is out of memory; \
         close other programs that use the device, or ask for a shorter context"
    )]
    Exhausted {
        /// Which step, with the kernel's name if it was one.
        what: String,
    },
    /// The device is lost to this process: all it held is gone, and every later call fails.
    #[error(
        "{what} failed: {problem}; the device is lost to this run: start the program again. If that does not help, \
         lines with `Xid` in `dmesg` name the cause; reset the device (`nvidia-smi --gpu-reset`) or restart the \
         machine, or use `--backend cpu`"
    )]
    Lost {
        /// Which step noticed it, with the kernel's name if it was one. The cause may be any step before.
        what: String,
        /// The driver's name of the error and what it means.
        problem: String,
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
    /// The kernels are not made for a model of this shape.
    #[error("{what} is {found}; the kernels for CUDA devices are made for {expected}: use `--backend cpu`")]
    Unsuitable {
        /// Which number of the model.
        what: &'static str,
        /// As given.
        found: u64,
        /// As needed.
        expected: &'static str,
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

impl CudaError {
    /// Whether the device cannot be used for this model at all, which is known before anything is loaded: another
    /// processor may do.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::NoDriver
                | Self::OldDriver { .. }
                | Self::MissingFunctions { .. }
                | Self::NotStarted { .. }
                | Self::NoDevice { .. }
                | Self::OldDevice { .. }
                | Self::TooLarge { .. }
                | Self::NoKernels { .. }
                | Self::Unsuitable { .. }
        )
    }

    /// Whether memory ran out: what was under way is lost, and everything else goes on.
    pub fn is_about_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::Exhausted { .. })
    }
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
        let missing = CudaError::MissingFunctions { n_missing: 3, first: "cuInit".into() }.to_string();
        let lost = CudaError::Lost { what: "kernel `a`".into(), problem: "CUDA_ERROR_LAUNCH_FAILED".into() };
        let lost = lost.to_string();
        for (text, parts) in [
            (&missing, &["3 functions", "`cuInit`", "driver 580"][..]),
            (&lost, &["kernel `a`", "CUDA_ERROR_LAUNCH_FAILED", "start the program again", "Xid"]),
            (&old, &["12.4", "13.0", "update the driver"]),
            (&chip, &["NVIDIA A100", "8.0", "9.0"]),
            (&absent, &["device 1", "sees 0", "CUDA_VISIBLE_DEVICES"]),
            (&CudaError::NoDriver.to_string(), &["libcuda.so.1", "install the driver"]),
            (&memory, &["NVIDIA GB10", "a cache", "5000", "1000 of 9000", "shorter context"]),
        ] {
            let missing: Vec<_> = parts.iter().filter(|part| !text.contains(**part)).collect();
            assert!(missing.is_empty(), "{text} lacks {missing:?}");
        }
        for text in [old, chip, absent, missing, lost, CudaError::NoDriver.to_string()] {
            assert!(text.contains("--backend cpu"), "{text}");
        }
    }
}
