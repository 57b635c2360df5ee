//! Device memory that is used again and again: once a pass was run, the next of the same shape allocates nothing.
//!
//! Work is on one stream, so memory may be handed out again as soon as its last user was queued; while some runs
//! beside it on another, what is given back is held.
//! What must keep its content between passes (caches) has a pool of its own.
//!
//! Only where memory runs out is any of it given back to the driver: all that waits in the pool of what is kept, and, if
//! there is no recorded graph, in the other: graphs hold addresses of free memory, which they write before they read it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

use super::driver::{Device, DeviceBuffer, View, ViewMut};
use super::error::CudaError;

/// Buffers that wait, by their number of values.
type Free<T> = Mutex<BTreeMap<usize, Vec<DeviceBuffer<T>>>>;

/// The waiting buffers of a pool, by type.
#[derive(Default)]
pub(super) struct Lists {
    floats: Free<f32>,
    integers: Free<u32>,
    halves: Free<u16>,
    /// Whether a graph is being recorded: nothing may be allocated.
    closed: AtomicBool,
    /// Whether memory that is given back waits in the lists below until [`Pool::release`].
    held: AtomicBool,
    held_floats: Free<f32>,
    held_integers: Free<u32>,
    held_halves: Free<u16>,
}

/// Values that a [`Pool`] has buffers of.
pub(super) trait Pooled: Pod {
    /// Where they wait.
    fn list(lists: &Lists) -> &Free<Self>;
    /// Where they wait until they may be used.
    fn held(lists: &Lists) -> &Free<Self>;
}

macro_rules! pooled {
    ($($value:ty => $field:ident, $held:ident;)*) => {
        $(impl Pooled for $value {
            fn list(lists: &Lists) -> &Free<Self> {
                &lists.$field
            }
            fn held(lists: &Lists) -> &Free<Self> {
                &lists.$held
            }
        })*
    };
}

pooled!(f32 => floats, held_floats; u32 => integers, held_integers; u16 => halves, held_halves;);

/// Device memory that is used again. Clones share it.
#[derive(Clone)]
pub(super) struct Pool {
    device: Device,
    lists: Arc<Lists>,
    both: Arc<Both>,
}

/// The pools of a device.
struct Both {
    kept: Arc<Lists>,
    passing: Arc<Lists>,
    n_recordings: AtomicUsize,
}

/// While it lives, a recorded graph may write to memory that waits.
pub(super) struct InUse(Arc<Both>);

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.n_recordings.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Memory from a [`Pool`], given back when dropped. Its content is undefined at first.
pub(super) struct PoolBuffer<T: Pooled> {
    /// There until dropped.
    buffer: Option<DeviceBuffer<T>>,
    len: usize,
    lists: Arc<Lists>,
}

/// The next size at or above `len` with three significant bits: at most a quarter is wasted, and sizes recur.
fn size_class(len: usize) -> usize {
    let len = len.max(64);
    let step = (1_usize << len.ilog2()) / 4;
    len.div_ceil(step) * step
}

impl Lists {
    /// Gives what waits back to the driver.
    fn clear(&self) {
        fn clear<T: Pooled>(lists: &Lists) {
            T::list(lists).lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
        clear::<f32>(self);
        clear::<u32>(self);
        clear::<u16>(self);
    }
}

impl Pool {
    /// Empty pools: for what is kept between passes, and for what is used within one.
    pub(super) fn both(device: &Device) -> (Self, Self) {
        let both = Both { kept: Arc::default(), passing: Arc::default(), n_recordings: AtomicUsize::new(0) };
        let both = Arc::new(both);
        let pool =
            |lists: &Arc<Lists>| Self { device: device.clone(), lists: lists.clone(), both: both.clone() };
        (pool(&both.kept), pool(&both.passing))
    }

    /// To be held as long as a recorded graph.
    pub(super) fn in_use(&self) -> InUse {
        self.both.n_recordings.fetch_add(1, Ordering::Relaxed);
        InUse(Arc::clone(&self.both))
    }

    /// Whether no graph is recorded.
    pub(super) fn is_free(&self) -> bool {
        self.both.n_recordings.load(Ordering::Relaxed) == 0
    }

    /// Gives what waits in the pools back to the system, as far as no graph uses it.
    ///
    /// # Errors
    /// If queued work failed.
    pub(super) fn give_back(&self) -> Result<(), CudaError> {
        self.both.kept.clear();
        if self.is_free() {
            self.both.passing.clear();
        }
        self.device.trim()
    }

    /// Whether new memory may be allocated from now on: not while a graph is recorded.
    pub(super) fn set_closed(&self, closed: bool) {
        self.lists.closed.store(closed, Ordering::Relaxed);
    }

    /// From now on memory that is given back stays unused: work on two streams is queued, and neither may take what the
    /// other still uses.
    pub(super) fn hold(&self) {
        self.lists.held.store(true, Ordering::Relaxed);
    }

    /// What was given back since [`Pool::hold`] may be used again.
    pub(super) fn release(&self) {
        fn move_all<T: Pooled>(lists: &Lists) {
            let held = std::mem::take(&mut *T::held(lists).lock().unwrap_or_else(PoisonError::into_inner));
            let mut free = T::list(lists).lock().unwrap_or_else(PoisonError::into_inner);
            for (class, buffers) in held {
                free.entry(class).or_default().extend(buffers);
            }
        }
        if self.lists.held.swap(false, Ordering::Relaxed) {
            move_all::<f32>(&self.lists);
            move_all::<u32>(&self.lists);
            move_all::<u16>(&self.lists);
        }
    }

    /// Memory for `len` values. `what` names it in errors.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub(super) fn take<T: Pooled>(&self, len: usize, what: &str) -> Result<PoolBuffer<T>, CudaError> {
        let class = size_class(len);
        let waiting = T::list(&self.lists)
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_mut(&class)
            .and_then(Vec::pop);
        let buffer = match waiting {
            Some(buffer) => buffer,
            None if self.lists.closed.load(Ordering::Relaxed) => {
                return Err(CudaError::Exhausted {
                    what: format!("recording a pass that needs memory for {what}"),
                });
            }
            None => match self.device.alloc(class, what) {
                Err(CudaError::OutOfMemory { .. }) => {
                    self.give_back()?;
                    self.device.alloc(class, what)?
                }
                buffer => buffer?,
            },
        };
        Ok(PoolBuffer { buffer: Some(buffer), len, lists: self.lists.clone() })
    }
}

impl<T: Pooled> PoolBuffer<T> {
    fn buffer(&self) -> &DeviceBuffer<T> {
        self.buffer.as_ref().expect("there until dropped")
    }

    /// Number of values.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes that it takes of the device.
    pub(super) fn n_bytes(&self) -> usize {
        self.buffer().n_bytes()
    }

    /// All values.
    pub(super) fn view(&self) -> View<'_, T> {
        self.buffer().slice(0..self.len)
    }

    /// All values, to be written.
    pub(super) fn view_mut(&mut self) -> ViewMut<'_, T> {
        let len = self.len;
        self.buffer.as_mut().expect("there until dropped").slice_mut(0..len)
    }

    /// Some values.
    pub(super) fn slice(&self, range: Range<usize>) -> View<'_, T> {
        self.view().slice(range)
    }

    /// Some values, to be written.
    pub(super) fn slice_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        self.view_mut().slice(range)
    }
}

impl<T: Pooled> Drop for PoolBuffer<T> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            let held = self.lists.held.load(Ordering::Relaxed);
            let list = if held { T::held(&self.lists) } else { T::list(&self.lists) };
            let mut lists = list.lock().unwrap_or_else(PoisonError::into_inner);
            lists.entry(buffer.len()).or_default().push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::size_class;

    #[test]
    fn sizes_recur_and_waste_at_most_a_quarter() {
        assert_eq!(size_class(1), 64);
        for len in 64..5000 {
            let class = size_class(len);
            assert!(class >= len && 4 * (class - len) <= len, "{len} {class}");
            assert_eq!(size_class(class), class);
        }
    }
}
