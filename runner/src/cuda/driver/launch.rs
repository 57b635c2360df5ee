//! Modules, their kernels, and launches of them.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;
use cudarc::driver::{result, sys};

use super::super::error::CudaError;
use super::stream::{Context, bind};
use super::{Device, View, ViewMut, failure, step};

/// Shared memory that a block may use without asking, what its kernel declares included.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;

impl Device {
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
        kernel.allow_shared(shape.shared_bytes, self.facts.shared_bytes)?;
        let Arguments { mut words, offsets } = arguments;
        let base = words.as_mut_ptr();
        // SAFETY: every offset is within `words`, which outlives the call.
        let mut pointers: Vec<*mut c_void> =
            offsets.iter().map(|&offset| unsafe { base.add(offset) }.cast()).collect();
        let early = shape.early && self.stream.may_begin_early() && !self.profile.on.load(Ordering::Relaxed);
        // SAFETY: plain data; zero is a valid value of every field.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid.0,
            gridDimY: shape.grid.1,
            gridDimZ: shape.grid.2,
            blockDimX: shape.block.0,
            blockDimY: shape.block.1,
            blockDimZ: shape.block.2,
            sharedMemBytes: shape.shared_bytes,
            hStream: self.stream.now(),
            attrs: &raw mut attribute,
            numAttrs: u32::from(early),
        };
        // SAFETY: the function lives as long as its module, held by `kernel`; parameters and configuration are copied by
        // the call.
        let launched = unsafe {
            let parameters = pointers.as_mut_ptr();
            sys::cuLaunchKernelEx(&raw const config, kernel.handle, parameters, std::ptr::null_mut()).result()
        };
        launched.map_err(|error| {
            let what = format!(
                "kernel `{}` (grid {:?}, block {:?}, {} bytes of shared memory)",
                kernel.name, shape.grid, shape.block, shape.shared_bytes
            );
            failure(what, error)
        })?;
        self.queued(&kernel.name)
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
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function was just found.
        let declared = step(&what, unsafe { result::function::get_function_attribute(handle, which) })?;
        let declared = u32::try_from(declared).unwrap_or(0);
        let allowed = Arc::new(AtomicU32::new(PLAIN_SHARED_BYTES.saturating_sub(declared)));
        Ok(Kernel { handle, module: Arc::clone(&self.inner), name: Arc::from(name), declared, allowed })
    }
}

/// A kernel of a loaded module.
#[derive(Clone)]
pub struct Kernel {
    handle: sys::CUfunction,
    module: Arc<ModuleHandle>,
    name: Arc<str>,
    /// Shared memory that the kernel declares.
    declared: u32,
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

    /// Lets launches use up to `bytes` of dynamic shared memory, where a block may have `most` in all.
    fn allow_shared(&self, bytes: u32, most: u32) -> Result<(), CudaError> {
        let all = u64::from(bytes) + u64::from(self.declared);
        if all > u64::from(most) {
            return Err(CudaError::Shape {
                what: format!("kernel `{}`", self.name),
                found: format!("{all} bytes of shared memory a block"),
                expected: format!("at most {most}, which is what the device has"),
            });
        }
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
    /// Whether the kernel may begin while the one before it still runs: it waits itself before it touches what others do.
    pub early: bool,
}

impl Launch {
    /// `blocks` blocks of `threads` threads.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self { grid: (blocks as u32, 1, 1), block: (threads, 1, 1), shared_bytes: 0, early: false }
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

    /// A third dimension of the grid.
    pub fn deep(mut self, z: usize) -> Self {
        self.grid.2 = z as u32;
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
        self.word(view.into().address())
    }

    /// A pointer to values that the kernel writes.
    pub fn write<T>(self, view: &ViewMut<'_, T>) -> Self {
        self.word(view.address())
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
