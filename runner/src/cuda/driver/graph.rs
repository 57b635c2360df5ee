//! Points in a stream, and work that is recorded once and queued as a whole.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::super::error::CudaError;
use super::stream::{Context, bind};
use super::{Device, step};

impl Device {
    /// A point in the stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn record(&self) -> Result<Event, CudaError> {
        self.bind()?;
        let event = Event::new(&self.stream.context, sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        // SAFETY: both live here.
        step("recording an event", unsafe { result::event::record(event.handle, self.stream.now()) })?;
        Ok(event)
    }

    /// Records what `work` queues into a graph instead of running it.
    ///
    /// # Errors
    /// If `work` fails, or does something that cannot be recorded (allocation, waiting).
    pub fn capture<E: From<CudaError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph, E> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.ends_early_beginnings();
        // SAFETY: the stream lives here.
        step("starting to record a graph", unsafe {
            result::stream::begin_capture(self.stream.handle, mode)
        })?;
        let done = work();
        if done.is_err() {
            // A stream that is still apart would keep the recording from ending; the error is told below.
            let _ = self.together();
        }
        // SAFETY: as above.
        let graph = unsafe { result::stream::end_capture(self.stream.handle) };
        if let (Err(_), Ok(graph)) = (&done, &graph)
            && !graph.is_null()
        {
            // SAFETY: just recorded and not used.
            let _ = unsafe { result::graph::destroy(*graph) };
        }
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

/// A point in a stream.
pub struct Event {
    pub(super) handle: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: events may be used by any thread with the context current.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<Self, CudaError> {
        let handle = step("making an event", result::event::create(flags))?;
        Ok(Self { handle, context: Arc::clone(context) })
    }

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
        self.device.stream.ends_early_beginnings();
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
