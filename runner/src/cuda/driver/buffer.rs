//! Memory of the device and page-locked memory of the host, and copies between them.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::super::error::CudaError;
use super::stream::{Context, bind};
use super::{Device, describe, step};

impl Device {
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
        let out_of_memory = Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        // SAFETY: the stream lives as long as the buffer, which holds the device; empty buffers get one byte.
        let take = || unsafe { result::malloc_async(self.stream.now(), bytes.max(1)) };
        let mut pointer = take();
        if pointer == out_of_memory {
            // What was freed and kept in pieces may do as a whole.
            self.trim()?;
            pointer = take();
        }
        if pointer == out_of_memory {
            let (free, total) = self.memory()?;
            let (name, what) = (self.facts.name.clone(), what.to_owned());
            return Err(CudaError::OutOfMemory { name, what, wanted: bytes, free, total });
        }
        let pointer = step(what, pointer)?;
        Ok(DeviceBuffer { pointer, len, device: self.clone(), values: PhantomData })
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
        self.stream.ends_early_beginnings();
        // SAFETY: the view is within its buffer.
        step("clearing memory", unsafe {
            result::memset_d8_async(target.pointer, 0, bytes, self.stream.now())
        })?;
        self.queued("clearing")
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
        self.stream.ends_early_beginnings();
        // SAFETY: same length; from pageable memory the driver has taken the values when the call returns.
        step("copying to the device", unsafe {
            result::memcpy_htod_async(target.pointer, values, self.stream.now())
        })
    }

    /// Copies from pinned memory without waiting.
    ///
    /// # Errors
    /// If the lengths differ or the driver refuses.
    ///
    /// # Safety
    /// `values` must stay unchanged until the stream has come past this copy ([`Device::synchronize`], [`Event::wait`](super::Event::wait)).
    pub unsafe fn write_pinned<T: Pod>(
        &self,
        target: &mut ViewMut<'_, T>,
        values: &PinnedBuffer<T>,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        self.bind()?;
        let values = &values.as_slice()[range];
        same_length("copy to the device", values.len(), target.len)?;
        self.stream.ends_early_beginnings();
        // SAFETY: same length; the caller keeps the values.
        step("copying to the device", unsafe {
            result::memcpy_htod_async(target.pointer, values, self.stream.now())
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
        self.stream.ends_early_beginnings();
        // SAFETY: same length; the stream is waited for before `values` is used.
        step("copying from the device", unsafe {
            result::memcpy_dtoh_async(values, source.pointer, self.stream.now())
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
        self.stream.ends_early_beginnings();
        // SAFETY: same length; the borrow of the target forbids overlap.
        step("copying on the device", unsafe {
            result::memcpy_dtod_async(target.pointer, source.pointer, bytes, self.stream.now())
        })?;
        self.queued("copying")
    }

    /// Page-locked host memory, cached by the CPU as usual.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, CudaError> {
        self.bind()?;
        let n_bytes = (len * size_of::<T>()).max(1);
        // SAFETY: freed by the buffer; zeroed below before anyone reads it.
        let pointer = unsafe { result::malloc_host(n_bytes, 0) };
        if let Err(error @ DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) = pointer {
            // Not the device's memory, unless the two share one.
            let what = format!("locking {n_bytes} bytes of the machine's memory");
            return Err(CudaError::Driver { what, problem: describe(error) });
        }
        let pointer = step("locking host memory", pointer)?;
        // SAFETY: just allocated with this many bytes.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, len * size_of::<T>()) };
        Ok(PinnedBuffer { pointer: pointer.cast(), len, context: Arc::clone(&self.stream.context) })
    }
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
            let _ = unsafe { result::free_async(self.pointer, self.device.stream.now()) };
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
