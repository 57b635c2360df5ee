//! The run-time compiler, NVRTC, where a machine has it.
#![expect(unsafe_code, reason = "calls of the run-time compiler")]

use std::ffi::{CString, c_void};

use cudarc::nvrtc::{result, sys};

use super::error::CudaError;
use super::module::{OPTIONS, Unit};

/// Its functions that are called here. A call of one that is missing would be a panic of `cudarc`.
const FUNCTIONS: [&str; 10] = [
    "nvrtcVersion",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcDestroyProgram",
    "nvrtcGetPTXSize",
    "nvrtcGetPTX",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
];

/// Version of the compiler on this machine.
///
/// # Errors
/// Says why there is none that can be used.
pub fn compiler() -> Result<(i32, i32), String> {
    // SAFETY: loads a library by its usual names.
    if !unsafe { sys::is_culib_present() } {
        return Err("libnvrtc was not found".to_owned());
    }
    // SAFETY: the library is there; it runs nothing of ours on load.
    let library = unsafe { sys::culib() };
    // SAFETY: looked up, not called.
    let is_missing = |name: &&&str| unsafe { library.get::<*const c_void>(name.as_bytes()) }.is_err();
    let missing: Vec<&&str> = FUNCTIONS.iter().filter(is_missing).collect();
    if let Some(first) = missing.first() {
        return Err(format!(
            "libnvrtc lacks {} of {} functions, the first is `{first}`: reinstall it, or take it out of the libraries' path",
            missing.len(),
            FUNCTIONS.len()
        ));
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the function is there; it writes two integers.
    let told = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result();
    told.map(|()| (major, minor)).map_err(|_| "libnvrtc does not tell its version".to_owned())
}

/// Compiles a unit with NVRTC: a cubin for `sm_NN`, PTX (ending in NUL) for `compute_NN`.
///
/// # Errors
/// If there is no compiler, or it refuses; the error holds its log.
pub fn compile(unit: &Unit, target: &str) -> Result<Vec<u8>, CudaError> {
    compile_with(unit, target, &[]).map(|compiled| compiled.image)
}

/// What the compiler gives.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// A cubin or PTX.
    pub image: Vec<u8>,
    /// What it says.
    pub log: String,
}

/// As [`compile`], with options for reports in the log. They must not change what is made.
///
/// # Errors
/// As [`compile`].
pub fn compile_with(unit: &Unit, target: &str, more: &[&str]) -> Result<Compiled, CudaError> {
    let found = compiler();
    let failed = |log: String| CudaError::Compile {
        unit: unit.name.to_owned(),
        target: target.to_owned(),
        version: found.as_ref().map_or("(absent)".to_owned(), |(major, minor)| format!("{major}.{minor}")),
        log,
    };
    if let Err(problem) = &found {
        return Err(failed(problem.clone()));
    }
    let source = CString::new(unit.source()).map_err(|e| failed(e.to_string()))?;
    let name = CString::new(format!("{}.cu", unit.name)).map_err(|e| failed(e.to_string()))?;
    let program = result::create_program(&source, Some(&name)).map_err(|e| failed(e.to_string()))?;
    let mut options = vec![format!("--gpu-architecture={target}")];
    let all = OPTIONS.into_iter().chain([unit.contraction()]).chain(more.iter().copied());
    options.extend(all.map(str::to_owned));
    // SAFETY: the program was just made; source and name live until it is destroyed.
    let compiled = unsafe {
        let compiled = result::compile_program(program, &options);
        let log = result::get_program_log(program);
        let output = compiled.and_then(|()| output(program, target.starts_with("compute_")));
        let _ = result::destroy_program(program);
        let log = log.map(|log| log.iter().map(|&c| c as u8).collect::<Vec<_>>()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        match output {
            Ok(image) => Ok(Compiled { image, log }),
            Err(error) => Err(format!("{error}\n{log}")),
        }
    };
    compiled.map_err(failed)
}

/// What a compiled program holds.
///
/// # Safety
/// `program` must have been compiled and not be destroyed.
unsafe fn output(program: sys::nvrtcProgram, ptx: bool) -> Result<Vec<u8>, result::NvrtcError> {
    let mut size = 0;
    // SAFETY: the compiler writes as many bytes as it announced.
    unsafe {
        if ptx {
            sys::nvrtcGetPTXSize(program, &raw mut size).result()?;
        } else {
            sys::nvrtcGetCUBINSize(program, &raw mut size).result()?;
        }
        let mut bytes = vec![0u8; size];
        if ptx {
            sys::nvrtcGetPTX(program, bytes.as_mut_ptr().cast()).result()?;
        } else {
            sys::nvrtcGetCUBIN(program, bytes.as_mut_ptr().cast()).result()?;
        }
        Ok(bytes)
    }
}
