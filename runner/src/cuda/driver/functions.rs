//! The functions of the driver that are called here.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::super::error::CudaError;

/// The one that says how old the library is. All drivers have it.
const VERSION: &str = "cuDriverGetVersion";

/// All others. A call of one that is missing would be a panic of `cudarc`.
const FUNCTIONS: [&str; 50] = [
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDevResourceGenerateDesc",
    "cuDevSmResourceSplitByCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetDevResource",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
    "cuInit",
    "cuLaunchKernelEx",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemPoolSetAttribute",
    "cuMemPoolTrimTo",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// Whether the library can say how old it is.
pub(super) fn check_version() -> Result<(), CudaError> {
    check(&[VERSION])
}

/// Refuses a library that lacks some.
pub(super) fn check_all() -> Result<(), CudaError> {
    check(&FUNCTIONS)
}

/// The library must be present.
fn check(names: &[&str]) -> Result<(), CudaError> {
    // SAFETY: loads the library that `driver_is_present` has found; libcuda runs nothing of ours on load.
    let library = unsafe { sys::culib() };
    // SAFETY: looked up, not called.
    let is_missing = |name: &&str| unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_err();
    let missing: Vec<&str> = names.iter().copied().filter(|name| is_missing(name)).collect();
    match missing.first() {
        Some(&first) => {
            Err(CudaError::MissingFunctions { n_missing: missing.len(), first: first.to_owned() })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The stand-in has what is called, as the tests with it show: so must the list.
    #[test]
    fn the_list_names_what_the_stand_in_driver_has() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/driver/stand_in.c");
        let text = std::fs::read_to_string(path).unwrap();
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let is_function =
            |word: &&str| word.strip_prefix("cu").is_some_and(|rest| rest.starts_with(char::is_uppercase));
        let found: BTreeSet<&str> = words.filter(is_function).collect();
        let listed: BTreeSet<&str> = FUNCTIONS.into_iter().chain([VERSION]).collect();
        assert_eq!(found, listed);
    }
}
