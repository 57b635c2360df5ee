//! Context and streams of a device, and order between them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

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

/// Where work is queued beside the first stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// Work of a layer that takes as long as what it runs beside.
    Branch,
    /// A little that nothing waits for soon, not even what comes later on the branch.
    Trifle,
}

/// Number of the first stream among all; those beside follow.
const FIRST: usize = 0;

pub(super) struct Stream {
    pub(super) handle: sys::CUstream,
    /// For work beside; none on a restricted device.
    pub(super) sides: Option<[Side; 2]>,
    /// Number of the stream where work is queued now.
    chosen: AtomicUsize,
    /// Whether a kernel comes last in each stream, so that the next may begin before its end.
    kernel_is_last: [AtomicBool; 3],
    pub(super) context: Arc<Context>,
}

/// A further stream, and the points where it parts from the first and meets it again.
pub(super) struct Side {
    pub(super) handle: sys::CUstream,
    parting: Event,
    meeting: Event,
    /// Whether the first stream has yet to wait for this one.
    apart: AtomicBool,
}

impl Side {
    pub(super) fn new(context: &Arc<Context>, handle: sys::CUstream) -> Result<Self, CudaError> {
        let event = || Event::new(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        Ok(Self { handle, parting: event()?, meeting: event()?, apart: AtomicBool::new(false) })
    }
}

impl Stream {
    pub(super) fn new(handle: sys::CUstream, sides: Option<[Side; 2]>, context: Arc<Context>) -> Self {
        Self { handle, sides, chosen: AtomicUsize::new(FIRST), kernel_is_last: Default::default(), context }
    }

    /// Whether the kernel that is queued next may begin before what comes before has ended. Then it comes last itself.
    pub(super) fn may_begin_early(&self) -> bool {
        self.kernel_is_last[self.chosen.load(Ordering::Relaxed)].swap(true, Ordering::Relaxed)
    }

    /// The kernel that is queued next where work is queued now has to wait for everything before.
    pub(super) fn ends_early_beginnings(&self) {
        self.kernel_is_last[self.chosen.load(Ordering::Relaxed)].store(false, Ordering::Relaxed);
    }

    /// Where work is queued now.
    pub(super) fn now(&self) -> sys::CUstream {
        match (&self.sides, self.chosen.load(Ordering::Relaxed)) {
            (Some(sides), number @ 1..) => sides[number - 1].handle,
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
        for side in self.sides.iter().flatten() {
            // SAFETY: as above.
            let _ = unsafe { result::stream::destroy(side.handle) };
        }
    }
}

impl Device {
    /// Queues `work` on a further stream, which waits for everything before; what is queued afterwards does not wait for
    /// it until [`Device::together`]. Memory that either gives back must not be used again before then.
    ///
    /// # Errors
    /// If `work` fails or the driver refuses.
    pub fn beside<E: From<CudaError>>(
        &self,
        which: Beside,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        // Measured one after the other.
        let Some(sides) = self.stream.sides.as_ref().filter(|_| !self.profile.on.load(Ordering::Relaxed))
        else {
            return work();
        };
        let side = &sides[which as usize];
        self.follow(side.handle, &side.parting, self.stream.handle)?;
        side.apart.store(true, Ordering::Relaxed);
        self.stream.chosen.store(1 + which as usize, Ordering::Relaxed);
        self.stream.ends_early_beginnings();
        let done = work();
        self.stream.chosen.store(FIRST, Ordering::Relaxed);
        done
    }

    /// What is queued from now on waits for all work beside; work beside itself does not.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn together(&self) -> Result<(), CudaError> {
        if self.stream.chosen.load(Ordering::Relaxed) != FIRST {
            return Ok(());
        }
        for side in self.stream.sides.iter().flatten() {
            if side.apart.swap(false, Ordering::Relaxed) {
                self.stream.ends_early_beginnings();
                self.follow(self.stream.handle, &side.meeting, side.handle)?;
            }
        }
        Ok(())
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
