//! The driver, thinly: one device, its stream, memory, launches, events and graphs.
//!
//! Everything that touches `cudarc` is here and in [`super::module`]. `cudarc` panics where the driver's library or one
//! of its functions is missing, so [`Device::open`] looks for the library and at the driver's version first.
//!
//! Work is ordered by one stream a [`Device`]; clones share it. Memory comes from the driver's pool in stream order,
//! so buffers may be dropped while kernels that use them are still queued.
#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::error::CudaError;

/// CUDA 13.0, of driver 580.
const NEEDED_DRIVER: i32 = 13_000;

/// Shared memory that a block may use without asking.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;

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
    /// Most bytes of shared memory a block.
    pub shared_bytes: u32,
    /// Bytes of the second-level cache.
    pub l2_bytes: u32,
    /// Whether device and host share one memory (GB10).
    pub integrated: bool,
    /// `cuDriverGetVersion`.
    pub driver: i32,
}

/// The device's primary context. Dropped last.
struct Context {
    handle: sys::CUcontext,
    device: sys::CUdevice,
}

// SAFETY: contexts may be used by any thread that makes them current, which every call here does.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `Device::open`; nothing that needs it is left.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

struct Stream {
    handle: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: the driver locks streams; order between threads is the caller's affair, and each model is used by one.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by this module and not used again; work in flight is finished by the driver.
        let _ = unsafe { result::stream::destroy(self.handle) };
    }
}

/// A CUDA device with one stream. Clones are cheap and share both.
#[derive(Clone)]
pub struct Device {
    stream: Arc<Stream>,
    facts: Arc<DeviceFacts>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Device").field(&self.facts).finish()
    }
}

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
        let mut driver = 0;
        // SAFETY: writes one integer; allowed before `cuInit`.
        step("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result())?;
        if driver < NEEDED_DRIVER {
            return Err(CudaError::OldDriver { found: driver, needed: NEEDED_DRIVER });
        }
        step("cuInit", result::init())?;
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
        let handle = step("making a context", unsafe { result::primary_ctx::retain(device) })?;
        let context = Arc::new(Context { handle, device });
        bind(&context)?;
        keep_freed_memory(device)?;
        let handle =
            step("making a stream", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Self { stream: Arc::new(Stream { handle, context }), facts: Arc::new(facts) })
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
        let stream = Stream { handle, context: Arc::clone(&self.stream.context) };
        Ok(Self { stream: Arc::new(stream), facts: Arc::new(facts) })
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

    fn bind(&self) -> Result<(), CudaError> {
        bind(&self.stream.context)
    }

    /// Waits until all queued work is done; reports errors of kernels that ran.
    ///
    /// # Errors
    /// What the driver found, for instance an access out of bounds by a kernel.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        step("waiting for the device", unsafe { result::stream::synchronize(self.stream.handle) })
    }

    /// Memory of `len` values with undefined content. `what` names it in errors.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn alloc<T: Pod>(&self, len: usize, what: &str) -> Result<DeviceBuffer<T>, CudaError> {
        self.bind()?;
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| CudaError::Shape {
            what: what.to_owned(),
            found: format!("{len} values"),
            expected: "a size that can be addressed".to_owned(),
        })?;
        // SAFETY: the stream lives as long as the buffer, which holds the device; empty buffers get one byte.
        let pointer = unsafe { result::malloc_async(self.stream.handle, bytes.max(1)) };
        match pointer {
            Ok(pointer) => Ok(DeviceBuffer { pointer, len, device: self.clone(), values: PhantomData }),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let (free, total) = self.memory()?;
                let (name, what) = (self.facts.name.clone(), what.to_owned());
                Err(CudaError::OutOfMemory { name, what, wanted: bytes, free, total })
            }
            error => step(what, error).map(|_| unreachable!("only errors come here")),
        }
    }

    /// Memory of `len` values, all bits zero.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn zeros<T: Pod>(&self, len: usize, what: &str) -> Result<DeviceBuffer<T>, CudaError> {
        let mut buffer = self.alloc(len, what)?;
        self.clear(&mut buffer.view_mut())?;
        Ok(buffer)
    }

    /// Sets all bits to zero.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn clear<T: Pod>(&self, target: &mut ViewMut<'_, T>) -> Result<(), CudaError> {
        self.bind()?;
        let bytes = target.len * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the view is within its buffer.
        step("clearing memory", unsafe {
            result::memset_d8_async(target.pointer, 0, bytes, self.stream.handle)
        })
    }

    /// A buffer with these values.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn upload<T: Pod>(&self, values: &[T], what: &str) -> Result<DeviceBuffer<T>, CudaError> {
        let mut buffer = self.alloc(values.len(), what)?;
        self.write(&mut buffer.view_mut(), values)?;
        Ok(buffer)
    }

    /// Copies values to the device; they may be changed once this returns.
    ///
    /// # Errors
    /// If the lengths differ or the driver refuses.
    pub fn write<T: Pod>(&self, target: &mut ViewMut<'_, T>, values: &[T]) -> Result<(), CudaError> {
        self.bind()?;
        same_length("copy to the device", values.len(), target.len)?;
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: same length; from pageable memory the driver has taken the values when the call returns.
        step("copying to the device", unsafe {
            result::memcpy_htod_async(target.pointer, values, self.stream.handle)
        })
    }

    /// Copies from pinned memory without waiting.
    ///
    /// # Errors
    /// If the lengths differ or the driver refuses.
    ///
    /// # Safety
    /// `values` must stay unchanged until the stream has come past this copy ([`Device::synchronize`], [`Event::wait`]).
    pub unsafe fn write_pinned<T: Pod>(
        &self,
        target: &mut ViewMut<'_, T>,
        values: &PinnedBuffer<T>,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        self.bind()?;
        let values = &values.as_slice()[range];
        same_length("copy to the device", values.len(), target.len)?;
        // SAFETY: same length; the caller keeps the values.
        step("copying to the device", unsafe {
            result::memcpy_htod_async(target.pointer, values, self.stream.handle)
        })
    }

    /// Copies values to the host, after all queued work.
    ///
    /// # Errors
    /// If the lengths differ or the driver refuses.
    pub fn read_into<T: Pod>(&self, source: View<'_, T>, values: &mut [T]) -> Result<(), CudaError> {
        self.bind()?;
        same_length("copy from the device", values.len(), source.len)?;
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: same length; the stream is waited for before `values` is used.
        step("copying from the device", unsafe {
            result::memcpy_dtoh_async(values, source.pointer, self.stream.handle)
        })?;
        self.synchronize()
    }

    /// The values on the host.
    ///
    /// # Errors
    /// If the driver refuses, or queued work failed.
    pub fn download<T: Pod>(&self, source: View<'_, T>) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::zeroed(); source.len];
        self.read_into(source, &mut values)?;
        Ok(values)
    }

    /// Copies within the device.
    ///
    /// # Errors
    /// If the lengths differ or the driver refuses.
    pub fn copy<T: Pod>(&self, source: View<'_, T>, target: &mut ViewMut<'_, T>) -> Result<(), CudaError> {
        self.bind()?;
        same_length("copy on the device", source.len, target.len)?;
        let bytes = source.len * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: same length; the borrow of the target forbids overlap.
        step("copying on the device", unsafe {
            result::memcpy_dtod_async(target.pointer, source.pointer, bytes, self.stream.handle)
        })
    }

    /// Page-locked host memory, cached by the CPU as usual.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, CudaError> {
        self.bind()?;
        // SAFETY: freed by the buffer; zeroed below before anyone reads it.
        let pointer =
            step("locking host memory", unsafe { result::malloc_host((len * size_of::<T>()).max(1), 0) })?;
        // SAFETY: just allocated with this many bytes.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, len * size_of::<T>()) };
        Ok(PinnedBuffer { pointer: pointer.cast(), len, context: Arc::clone(&self.stream.context) })
    }

    /// Loads a cubin or (ending in NUL) PTX.
    ///
    /// # Errors
    /// If the driver cannot use it on this device.
    pub fn load_module(&self, name: &str, image: &[u8]) -> Result<Module, CudaError> {
        self.bind()?;
        // SAFETY: the image is a whole ELF file or NUL-terminated text; the driver copies it.
        let handle = step(&format!("loading the kernels of `{name}`"), unsafe {
            result::module::load_data(image.as_ptr().cast())
        })?;
        Ok(Module {
            inner: Arc::new(ModuleHandle { handle, context: Arc::clone(&self.stream.context) }),
            name: name.to_owned(),
        })
    }

    /// Queues a kernel.
    ///
    /// The wrappers around kernels, all in [`crate::cuda`], see to it that the arguments are what the kernel declares and
    /// that its sizes stay within the buffers.
    ///
    /// # Errors
    /// If the driver refuses the launch; the message names the kernel and the grid.
    pub fn launch(&self, kernel: &Kernel, shape: Launch, arguments: Arguments) -> Result<(), CudaError> {
        if shape.grid.0 == 0 || shape.grid.1 == 0 || shape.grid.2 == 0 {
            return Ok(());
        }
        self.bind()?;
        kernel.allow_shared(shape.shared_bytes)?;
        let Arguments { mut words, offsets } = arguments;
        let base = words.as_mut_ptr();
        // SAFETY: every offset is within `words`, which outlives the call.
        let mut pointers: Vec<*mut c_void> =
            offsets.iter().map(|&offset| unsafe { base.add(offset) }.cast()).collect();
        // SAFETY: the function lives as long as its module, held by `kernel`; the parameters are copied by the call.
        let launched = unsafe {
            result::launch_kernel(
                kernel.handle,
                shape.grid,
                shape.block,
                shape.shared_bytes,
                self.stream.handle,
                &mut pointers,
            )
        };
        launched.map_err(|error| CudaError::Driver {
            what: format!(
                "kernel `{}` (grid {:?}, block {:?}, {} bytes of shared memory)",
                kernel.name, shape.grid, shape.block, shape.shared_bytes
            ),
            problem: describe(error),
        })
    }

    /// A point in the stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn record(&self) -> Result<Event, CudaError> {
        self.bind()?;
        let handle = step("making an event", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        let event = Event { handle, context: Arc::clone(&self.stream.context) };
        // SAFETY: both live here.
        step("recording an event", unsafe { result::event::record(event.handle, self.stream.handle) })?;
        Ok(event)
    }

    /// Records what `work` queues into a graph instead of running it.
    ///
    /// # Errors
    /// If `work` fails, or does something that cannot be recorded (allocation, waiting).
    pub fn capture<E: From<CudaError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives here.
        step("starting to record a graph", unsafe {
            result::stream::begin_capture(self.stream.handle, mode)
        })?;
        let done = work();
        // SAFETY: as above.
        let graph = unsafe { result::stream::end_capture(self.stream.handle) };
        done?;
        let graph = step("recording a graph", graph)?;
        let mut handle: sys::CUgraphExec = std::ptr::null_mut();
        // SAFETY: a graph that was just recorded; destroyed right after.
        let made = unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&raw mut handle, graph, 0).result();
            let _ = result::graph::destroy(graph);
            made
        };
        step("making a graph", made)?;
        Ok(Graph { handle, device: self.clone() })
    }
}

fn bind(context: &Context) -> Result<(), CudaError> {
    // SAFETY: the context is retained.
    step("using the context", unsafe { result::ctx::set_current(context.handle) })
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

fn same_length(what: &str, found: usize, expected: usize) -> Result<(), CudaError> {
    if found == expected {
        return Ok(());
    }
    Err(CudaError::Shape {
        what: what.to_owned(),
        found: format!("{found} values"),
        expected: format!("{expected}"),
    })
}

/// Memory of the device, freed in stream order.
pub struct DeviceBuffer<T> {
    pointer: u64,
    len: usize,
    device: Device,
    values: PhantomData<T>,
}

impl<T> std::fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceBuffer({} values)", self.len)
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated on this stream, freed once.
            let _ = unsafe { result::free_async(self.pointer, self.device.stream.handle) };
        }
    }
}

impl<T: Pod> DeviceBuffer<T> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes.
    pub fn n_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device that it lies on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// All values.
    pub fn view(&self) -> View<'_, T> {
        View { pointer: self.pointer, len: self.len, values: PhantomData }
    }

    /// All values, to be written.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { pointer: self.pointer, len: self.len, values: PhantomData }
    }

    /// Some values.
    ///
    /// # Panics
    /// If they are not in the buffer.
    pub fn slice(&self, range: Range<usize>) -> View<'_, T> {
        self.view().slice(range)
    }

    /// Some values, to be written.
    ///
    /// # Panics
    /// If they are not in the buffer.
    pub fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        self.view_mut().slice(range)
    }
}

/// Values on the device, to be read by kernels.
#[derive(Debug)]
pub struct View<'a, T> {
    pointer: u64,
    len: usize,
    values: PhantomData<&'a T>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

impl<'a, T> View<'a, T> {
    /// Number of values.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Some of the values.
    ///
    /// # Panics
    /// If they are not in the view.
    pub fn slice(self, range: Range<usize>) -> View<'a, T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} values", self.len);
        View {
            pointer: self.pointer + (range.start * size_of::<T>()) as u64,
            len: range.len(),
            values: PhantomData,
        }
    }

    /// Address on the device.
    pub(crate) fn address(self) -> u64 {
        self.pointer
    }
}

impl<'a, T: Pod> From<&'a DeviceBuffer<T>> for View<'a, T> {
    fn from(buffer: &'a DeviceBuffer<T>) -> Self {
        buffer.view()
    }
}

/// Values on the device, to be written by kernels.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    pointer: u64,
    len: usize,
    values: PhantomData<&'a mut T>,
}

impl<'a, T> ViewMut<'a, T> {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Some of the values.
    ///
    /// # Panics
    /// If they are not in the view.
    pub fn slice(self, range: Range<usize>) -> ViewMut<'a, T> {
        let View { pointer, len, .. } =
            View::<T> { pointer: self.pointer, len: self.len, values: PhantomData }.slice(range);
        ViewMut { pointer, len, values: PhantomData }
    }

    /// The first `n` values, and the rest.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn split_at(self, n: usize) -> (Self, Self) {
        assert!(n <= self.len, "{n} of {} values", self.len);
        let later = self.pointer + (n * size_of::<T>()) as u64;
        let rest = ViewMut { pointer: later, len: self.len - n, values: PhantomData };
        (ViewMut { pointer: self.pointer, len: n, values: PhantomData }, rest)
    }

    /// The same values for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { pointer: self.pointer, len: self.len, values: PhantomData }
    }

    /// The same values, to be read.
    pub fn as_view(&self) -> View<'_, T> {
        View { pointer: self.pointer, len: self.len, values: PhantomData }
    }

    /// Address on the device.
    pub(crate) fn address(&self) -> u64 {
        self.pointer
    }
}

impl<'a, T: Pod> From<&'a mut DeviceBuffer<T>> for ViewMut<'a, T> {
    fn from(buffer: &'a mut DeviceBuffer<T>) -> Self {
        buffer.view_mut()
    }
}

/// Page-locked host memory.
pub struct PinnedBuffer<T> {
    pointer: *mut T,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory of plain data with one owner.
unsafe impl<T: Pod + Send> Send for PinnedBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Pod + Sync> Sync for PinnedBuffer<T> {}

impl<T: Pod> PinnedBuffer<T> {
    /// The values.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: allocated with `len` values, zeroed, so initialised.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    /// The values, to be changed. No copy from or to this buffer may be in flight.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        if bind(&self.context).is_ok() {
            // SAFETY: allocated by `Device::pinned`, freed once.
            let _ = unsafe { result::free_host(self.pointer.cast()) };
        }
    }
}

struct ModuleHandle {
    handle: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: modules may be used by any thread with the context current.
unsafe impl Send for ModuleHandle {}
// SAFETY: as above.
unsafe impl Sync for ModuleHandle {}

impl Drop for ModuleHandle {
    fn drop(&mut self) {
        if bind(&self.context).is_ok() {
            // SAFETY: loaded once; its functions hold it, so none is left.
            let _ = unsafe { result::module::unload(self.handle) };
        }
    }
}

/// Kernels that were loaded together.
#[derive(Clone)]
pub struct Module {
    inner: Arc<ModuleHandle>,
    name: String,
}

impl Module {
    /// The kernel with this name.
    ///
    /// # Errors
    /// If there is none.
    pub fn kernel(&self, name: &str) -> Result<Kernel, CudaError> {
        bind(&self.inner.context)?;
        let what = format!("finding kernel `{name}` in `{}`", self.name);
        let text = CString::new(name).map_err(|_| CudaError::Driver {
            what: what.clone(),
            problem: "the name holds a NUL".to_owned(),
        })?;
        // SAFETY: the module is loaded.
        let handle = step(&what, unsafe { result::module::get_function(self.inner.handle, text) })?;
        let allowed = Arc::new(AtomicU32::new(PLAIN_SHARED_BYTES));
        Ok(Kernel { handle, module: Arc::clone(&self.inner), name: Arc::from(name), allowed })
    }
}

/// A kernel of a loaded module.
#[derive(Clone)]
pub struct Kernel {
    handle: sys::CUfunction,
    module: Arc<ModuleHandle>,
    name: Arc<str>,
    /// Dynamic shared memory that launches may use.
    allowed: Arc<AtomicU32>,
}

// SAFETY: as for modules.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Kernel").field(&self.name).finish()
    }
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets launches use up to `bytes` of dynamic shared memory.
    fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        if bytes <= self.allowed.load(Ordering::Relaxed) {
            return Ok(());
        }
        bind(&self.module.context)?;
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let what = format!("asking for {bytes} bytes of shared memory for kernel `{}`", self.name);
        // SAFETY: the function lives.
        step(&what, unsafe { result::function::set_function_attribute(self.handle, which, bytes as i32) })?;
        self.allowed.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// Grid, block and shared memory of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: (u32, u32, u32),
    /// Threads a block.
    pub block: (u32, u32, u32),
    /// Dynamic shared memory a block.
    pub shared_bytes: u32,
}

impl Launch {
    /// `blocks` blocks of `threads` threads.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self { grid: (blocks as u32, 1, 1), block: (threads, 1, 1), shared_bytes: 0 }
    }

    /// One thread for each of `n` items, in blocks of 256.
    pub fn over(n: usize) -> Self {
        Self::new(n.div_ceil(256), 256)
    }

    /// A second dimension of the grid.
    pub fn by(mut self, y: usize) -> Self {
        self.grid.1 = y as u32;
        self
    }

    /// Dynamic shared memory.
    pub fn shared(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }
}

/// Arguments of a kernel, in the order of its declaration.
#[derive(Debug, Default)]
pub struct Arguments {
    words: Vec<u64>,
    offsets: Vec<usize>,
}

impl Arguments {
    /// No arguments yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn word(mut self, word: u64) -> Self {
        self.offsets.push(self.words.len());
        self.words.push(word);
        self
    }

    /// A pointer to values that the kernel reads.
    pub fn read<'a, T: 'a>(self, view: impl Into<View<'a, T>>) -> Self {
        self.word(view.into().pointer)
    }

    /// A pointer to values that the kernel writes.
    pub fn write<T>(self, view: &ViewMut<'_, T>) -> Self {
        self.word(view.pointer)
    }

    /// A null pointer.
    pub fn null(self) -> Self {
        self.word(0)
    }

    /// A 32-bit integer, signed or not.
    ///
    /// # Panics
    /// If it needs more bits.
    pub fn int(self, value: usize) -> Self {
        self.word(u64::from(u32::try_from(value).expect("kernel sizes are checked at load")))
    }

    /// A 64-bit integer.
    pub fn long(self, value: u64) -> Self {
        self.word(value)
    }

    /// A float.
    pub fn float(self, value: f32) -> Self {
        self.word(u64::from(value.to_bits()))
    }

    /// A structure, passed by value.
    pub fn structure<T: Pod>(mut self, value: &T) -> Self {
        self.offsets.push(self.words.len());
        let bytes = bytemuck::bytes_of(value);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.words.push(u64::from_le_bytes(word));
        }
        self
    }
}

/// A point in a stream.
pub struct Event {
    handle: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: events may be used by any thread with the context current.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Waits until the stream has come here.
    ///
    /// # Errors
    /// If work before it failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        bind(&self.context)?;
        // SAFETY: the event lives.
        step("waiting for an event", unsafe { result::event::synchronize(self.handle) })
    }

    /// Milliseconds from `earlier` to this point; waits for both.
    ///
    /// # Errors
    /// If work before them failed.
    pub fn milliseconds_since(&self, earlier: &Self) -> Result<f32, CudaError> {
        self.wait()?;
        // SAFETY: both live and are done.
        step("reading the time between events", unsafe {
            result::event::elapsed(earlier.handle, self.handle)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if bind(&self.context).is_ok() {
            // SAFETY: made by `Device::record`, destroyed once.
            let _ = unsafe { result::event::destroy(self.handle) };
        }
    }
}

/// Work that was recorded once and can be queued again as a whole.
pub struct Graph {
    handle: sys::CUgraphExec,
    device: Device,
}

// SAFETY: used by one thread at a time, through `&self` methods that the driver locks.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// Queues all of it.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn launch(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: graph and stream live.
        step("launching a graph", unsafe { result::graph::launch(self.handle, self.device.stream.handle) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: made by `Device::capture`, destroyed once.
            let _ = unsafe { result::graph::exec_destroy(self.handle) };
        }
    }
}
