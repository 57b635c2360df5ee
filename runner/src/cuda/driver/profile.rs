//! Time that each kernel takes in what is queued while somebody measures.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::super::error::CudaError;
use super::{Device, Event};

/// What was queued while somebody measures, each with the point behind it.
#[derive(Default)]
pub(super) struct Profile {
    pub(super) on: AtomicBool,
    points: Mutex<Vec<(String, Event)>>,
}

/// Time that the launches of one kernel took together.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct KernelShare {
    /// Name of the kernel, or of a copy.
    pub kernel: String,
    /// Number of launches.
    pub launches: usize,
    /// Time from the end of what was queued before to the end of each, summed.
    pub microseconds: f64,
}

impl Device {
    /// Measures everything that `work` queues, kernel by kernel, the kernels that took longest first. `work` must queue
    /// faster than the device works, or begin with something long.
    ///
    /// # Errors
    /// If `work` fails or the driver refuses.
    pub fn profile<R, E: From<CudaError>>(
        &self,
        work: impl FnOnce() -> Result<R, E>,
    ) -> Result<(R, Vec<KernelShare>), E> {
        self.synchronize()?;
        self.points().clear();
        self.profile.on.store(true, Ordering::Relaxed);
        let result = work();
        self.profile.on.store(false, Ordering::Relaxed);
        let points = std::mem::take(&mut *self.points());
        let result = result?;
        let mut sums: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
        for pair in points.windows(2) {
            let sum = sums.entry(&pair[1].0).or_default();
            sum.0 += 1;
            sum.1 += 1e3 * f64::from(pair[1].1.milliseconds_since(&pair[0].1)?);
        }
        let share = |(kernel, (launches, microseconds)): (&str, (usize, f64))| KernelShare {
            kernel: kernel.to_owned(),
            launches,
            microseconds,
        };
        let mut shares: Vec<_> = sums.into_iter().map(share).collect();
        shares.sort_by(|a, b| b.microseconds.total_cmp(&a.microseconds));
        Ok((result, shares))
    }

    fn points(&self) -> std::sync::MutexGuard<'_, Vec<(String, Event)>> {
        self.profile.points.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the end of what was just queued, if somebody measures.
    pub(super) fn queued(&self, what: &str) -> Result<(), CudaError> {
        if self.profile.on.load(Ordering::Relaxed) {
            let event = self.record()?;
            self.points().push((what.to_owned(), event));
        }
        Ok(())
    }
}
