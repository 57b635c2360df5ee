//! Context and streams of a device, and order between them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{result, sys};

use super::super::error::CudaError;
use super::{Device, Event, step};

/// The device's primary context. Dropped last.
pub(super) struct Context {
    pub(super) handle: sys::CUcontext,
    pub(super) device: sys::CUdevice,
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

pub(super) struct Stream {
    pub(super) handle: sys::CUstream,
    /// For work beside; none on a restricted device.
    pub(super) side: Option<Side>,
    /// Whether a kernel comes last here, so that the next may begin before its end; of the second stream, too.
    pub(super) kernel_is_last: [AtomicBool; 2],
    pub(super) context: Arc<Context>,
}

/// A second stream, and the points where the two part and meet.
pub(super) struct Side {
    pub(super) handle: sys::CUstream,
    pub(super) parting: Event,
    pub(super) meeting: Event,
    /// Whether work is queued here now.
    pub(super) chosen: AtomicBool,
    /// Whether the first stream has yet to wait for this one.
    pub(super) apart: AtomicBool,
}

impl Stream {
    pub(super) fn is_beside(&self) -> bool {
        self.side.as_ref().is_some_and(|side| side.chosen.load(Ordering::Relaxed))
    }

    /// Whether the kernel that is queued next may begin before what comes before has ended. Then it comes last itself.
    pub(super) fn may_begin_early(&self) -> bool {
        self.kernel_is_last[usize::from(self.is_beside())].swap(true, Ordering::Relaxed)
    }

    /// The kernel that is queued next has to wait for everything before.
    pub(super) fn ends_early_beginnings(&self, beside: bool) {
        self.kernel_is_last[usize::from(beside)].store(false, Ordering::Relaxed);
    }

    /// Where work is queued now.
    pub(super) fn now(&self) -> sys::CUstream {
        match &self.side {
            Some(side) if side.chosen.load(Ordering::Relaxed) => side.handle,
            _ => self.handle,
        }
    }
}

// SAFETY: the driver locks streams; order between threads is the caller's affair, and each model is used by one.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by this module and not used again; work in flight is finished by the driver.
        let _ = unsafe { result::stream::destroy(self.handle) };
        if let Some(side) = &self.side {
            // SAFETY: as above.
            let _ = unsafe { result::stream::destroy(side.handle) };
        }
    }
}

impl Device {
    /// Queues `work` on a second stream, which waits for everything before; what is queued afterwards does not wait for
    /// it until [`Device::together`]. Memory that either gives back must not be used again before then.
    ///
    /// # Errors
    /// If `work` fails or the driver refuses.
    pub fn beside<E: From<CudaError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        // Measured one after the other.
        let Some(side) = self.stream.side.as_ref().filter(|_| !self.profile.on.load(Ordering::Relaxed))
        else {
            return work();
        };
        self.follow(side.handle, &side.parting, self.stream.handle)?;
        self.stream.ends_early_beginnings(true);
        side.apart.store(true, Ordering::Relaxed);
        side.chosen.store(true, Ordering::Relaxed);
        let done = work();
        side.chosen.store(false, Ordering::Relaxed);
        done
    }

    /// What is queued from now on waits for all work beside.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn together(&self) -> Result<(), CudaError> {
        match &self.stream.side {
            Some(side) if side.apart.swap(false, Ordering::Relaxed) => {
                self.stream.ends_early_beginnings(false);
                self.follow(self.stream.handle, &side.meeting, side.handle)
            }
            _ => Ok(()),
        }
    }

    /// Lets one stream wait for another.
    fn follow(&self, later: sys::CUstream, point: &Event, earlier: sys::CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: event and streams live as long as the device; a wait takes the event as it was last recorded.
        step("ordering two streams", unsafe {
            result::event::record(point.handle, earlier).and_then(|()| {
                let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
                result::stream::wait_event(later, point.handle, flags)
            })
        })
    }
}

pub(super) fn bind(context: &Context) -> Result<(), CudaError> {
    // SAFETY: the context is retained.
    step("using the context", unsafe { result::ctx::set_current(context.handle) })
}
