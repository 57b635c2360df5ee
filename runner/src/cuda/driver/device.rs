//! Devices: what they are, opening one, and its restriction to some multiprocessors.

use std::sync::Arc;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::super::error::CudaError;
use super::profile::Profile;
use super::stream::{Context, Side, Stream, bind};
use super::{describe, functions, step};

/// CUDA 13.0, of driver 580.
const NEEDED_DRIVER: i32 = 13_000;

/// Numbers of the device that kernels and plans depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Name as the driver gives it.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Streaming multiprocessors that the stream may use.
    pub n_multiprocessors: u32,
    /// Bytes of device memory.
    pub total_bytes: usize,
    /// Most bytes of shared memory of a block, declared by a kernel or asked for by a launch.
    pub shared_bytes: u32,
    /// Bytes of the second-level cache.
    pub l2_bytes: u32,
    /// Whether device and host share one memory (GB10).
    pub integrated: bool,
    /// `cuDriverGetVersion`.
    pub driver: i32,
}

/// A CUDA device with one stream. Clones are cheap and share both.
#[derive(Clone)]
pub struct Device {
    pub(super) stream: Arc<Stream>,
    pub(super) facts: Arc<DeviceFacts>,
    pub(super) profile: Arc<Profile>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Device").field(&self.facts).finish()
    }
}

/// Whether the driver's library is on this machine.
pub fn driver_is_present() -> bool {
    // SAFETY: loads a library by its usual names; libcuda runs nothing of ours on load.
    unsafe { sys::is_culib_present() }
}

impl Device {
    /// Opens device `ordinal` and makes a stream on it.
    ///
    /// # Errors
    /// If there is no driver, it is too old, or there is no such device or a too old one.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        if !driver_is_present() {
            return Err(CudaError::NoDriver);
        }
        functions::check_version()?;
        let mut driver = 0;
        // SAFETY: writes one integer; allowed before `cuInit`.
        step("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result())?;
        if driver < NEEDED_DRIVER {
            return Err(CudaError::OldDriver { found: driver, needed: NEEDED_DRIVER });
        }
        functions::check_all()?;
        start(ordinal)?;
        let found = step("counting devices", result::device::get_count())? as usize;
        if ordinal >= found {
            return Err(CudaError::NoDevice { wanted: ordinal, found });
        }
        let device = step("finding the device", result::device::get(ordinal as i32))?;
        let facts = facts(device, driver)?;
        if facts.capability < (9, 0) {
            return Err(CudaError::OldDevice { name: facts.name, capability: facts.capability });
        }
        // SAFETY: a device that the driver gave; released when the last user of the context is dropped.
        let handle = match unsafe { result::primary_ctx::retain(device) } {
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
                let advice = "another program may have the device for itself: see `nvidia-smi`";
                return Err(CudaError::NotStarted { problem: describe(error), advice });
            }
            handle => step("making a context", handle)?,
        };
        let context = Arc::new(Context { handle, device });
        bind(&context)?;
        keep_freed_memory(device)?;
        let stream =
            || step("making a stream", result::stream::create(result::stream::StreamKind::NonBlocking));
        let handle = stream()?;
        let side = || Side::new(&context, stream()?);
        let sides = [side()?, side()?];
        Ok(Self {
            stream: Arc::new(Stream::new(handle, Some(sides), context)),
            facts: Arc::new(facts),
            profile: Arc::default(),
        })
    }

    /// The same device with a stream that may use only `n` multiprocessors (rounded up by the driver), to find out how
    /// kernels fare on smaller devices. Bandwidth is not restricted.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn restricted_to(&self, n: u32) -> Result<Self, CudaError> {
        self.bind()?;
        let device = self.stream.context.device;
        // SAFETY: plain data, overwritten by the calls below; every pointer is to a local value of the type asked for,
        // and the green context lives as long as the process.
        let (handle, found) = unsafe {
            let mut all: sys::CUdevResource = std::mem::zeroed();
            let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
            step(
                "reading multiprocessors",
                sys::cuDeviceGetDevResource(device, &raw mut all, kind).result(),
            )?;
            let mut part: sys::CUdevResource = std::mem::zeroed();
            let mut rest: sys::CUdevResource = std::mem::zeroed();
            let mut groups = 1;
            let split = sys::cuDevSmResourceSplitByCount(
                &raw mut part,
                &raw mut groups,
                &raw const all,
                &raw mut rest,
                0,
                n,
            );
            step("splitting multiprocessors", split.result())?;
            let mut description: sys::CUdevResourceDesc = std::ptr::null_mut();
            let described = sys::cuDevResourceGenerateDesc(&raw mut description, &raw mut part, 1);
            step("describing multiprocessors", described.result())?;
            let mut green: sys::CUgreenCtx = std::ptr::null_mut();
            let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
            let made = sys::cuGreenCtxCreate(&raw mut green, description, device, flags);
            step("making a green context", made.result())?;
            let mut stream: sys::CUstream = std::ptr::null_mut();
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            let made = sys::cuGreenCtxStreamCreate(&raw mut stream, green, flags, 0);
            step("making a stream on a green context", made.result())?;
            (stream, part.__bindgen_anon_1.sm.smCount)
        };
        let facts = DeviceFacts { n_multiprocessors: found, ..(*self.facts).clone() };
        let stream = Stream::new(handle, None, Arc::clone(&self.stream.context));
        Ok(Self { stream: Arc::new(stream), facts: Arc::new(facts), profile: Arc::default() })
    }

    /// The same device, of which no block may have more than so many bytes of shared memory: kernels are chosen as on a chip
    /// that has no more, and a launch that asks for more fails.
    pub fn with_shared_memory(self, bytes: u32) -> Self {
        let shared_bytes = self.facts.shared_bytes.min(bytes);
        let facts = DeviceFacts { shared_bytes, ..(*self.facts).clone() };
        Self { facts: Arc::new(facts), ..self }
    }

    /// The device's numbers.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Free and total bytes. On integrated devices the first moves with the system's page cache: never plan by it there.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.bind()?;
        step("reading free memory", result::mem_get_info())
    }

    pub(super) fn bind(&self) -> Result<(), CudaError> {
        bind(&self.stream.context)
    }

    /// Gives memory that was freed and kept back to the system, once all queued work of this process is done: memory is freed
    /// in the order of the stream that it came from, which may be another model's.
    ///
    /// # Errors
    /// If queued work failed, or the driver refuses.
    pub(in super::super) fn trim(&self) -> Result<(), CudaError> {
        self.bind()?;
        step("waiting for the device", result::ctx::synchronize())?;
        // SAFETY: the device is that of the context.
        let pool = unsafe { result::device::get_default_mem_pool(self.stream.context.device) };
        // SAFETY: the pool is the device's own.
        let trimmed = pool.and_then(|pool| unsafe { result::mem_pool::trim_to(pool, 0) });
        step("giving memory back", trimmed)
    }

    /// Waits until all queued work is done; reports errors of kernels that ran.
    ///
    /// # Errors
    /// What the driver found, for instance an access out of bounds by a kernel.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        step("waiting for the device", unsafe { result::stream::synchronize(self.stream.now()) })
    }
}

/// Starts the driver.
fn start(ordinal: usize) -> Result<(), CudaError> {
    let Err(error) = result::init() else { return Ok(()) };
    let advice = match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => {
            return Err(CudaError::NoDevice { wanted: ordinal, found: 0 });
        }
        sys::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "its library and its kernel module are of different versions: restart the machine, or install the driver again"
        }
        sys::CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "a compatibility library is found before the driver's own, which this device does not allow: remove its folder \
             from LD_LIBRARY_PATH"
        }
        sys::CUresult::CUDA_ERROR_SYSTEM_NOT_READY => {
            "a service of the driver is not ready: start `nvidia-fabricmanager` if the machine has NVSwitches, or try again"
        }
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "a toolkit's stub is found before the driver's own library: remove its folder from LD_LIBRARY_PATH"
        }
        _ => {
            "see whether `nvidia-smi` works; if not, load the kernel module (`nvidia-modprobe -u`) or restart the machine"
        }
    };
    Err(CudaError::NotStarted { problem: describe(error), advice })
}

/// Freed memory stays with the process, so that later allocations are quick.
fn keep_freed_memory(device: sys::CUdevice) -> Result<(), CudaError> {
    // SAFETY: the pool is the device's own, and the attribute is one u64.
    step("configuring the memory pool", unsafe {
        result::device::get_default_mem_pool(device).and_then(|pool| {
            let mut most = u64::MAX;
            let which = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            sys::cuMemPoolSetAttribute(pool, which, (&raw mut most).cast()).result()
        })
    })
}

fn facts(device: sys::CUdevice, driver: i32) -> Result<DeviceFacts, CudaError> {
    let attribute = |which: Attribute| -> Result<u32, CudaError> {
        // SAFETY: a device that the driver gave.
        step("asking about the device", unsafe { result::device::get_attribute(device, which) })
            .map(|n| n as u32)
    };
    Ok(DeviceFacts {
        name: step("asking for the device's name", result::device::get_name(device))?,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        n_multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        // SAFETY: as above.
        total_bytes: step("asking for the device's memory", unsafe { result::device::total_mem(device) })?,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        integrated: attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
        driver,
    })
}
