//! Flushing a part file while it still grows, so that little is left to be flushed before it gets its name.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

/// Bytes after which the file is flushed.
const FLUSH_BYTES: u64 = 64 << 20;

/// A thread that flushes a file when so many bytes were written.
pub(super) struct Flusher {
    written: AtomicU64,
    running: Mutex<Option<Running>>,
}

/// The thread, until it is waited for.
struct Running {
    requests: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
}

impl Flusher {
    pub(super) fn new(file: &File) -> io::Result<Self> {
        let file = file.try_clone()?;
        // One request may wait while another is served; more would mean the same.
        let (requests, asked) = sync_channel(1);
        let thread = std::thread::Builder::new().name("flush".to_owned()).spawn(move || {
            // The system tells of a failed write once: the first error is kept for `finish`.
            asked.iter().try_for_each(|()| file.sync_data())
        })?;
        Ok(Self { written: AtomicU64::new(0), running: Mutex::new(Some(Running { requests, thread })) })
    }

    /// Counts bytes that were written.
    pub(super) fn wrote(&self, n_bytes: u64) {
        let before = self.written.fetch_add(n_bytes, Ordering::Relaxed);
        if before / FLUSH_BYTES != (before + n_bytes) / FLUSH_BYTES
            && let Some(running) = &*self.running.lock().unwrap_or_else(PoisonError::into_inner)
        {
            // Full or ended: nothing to ask for.
            let _ = running.requests.try_send(());
        }
    }

    /// Ends the thread, and gives the first error it met.
    pub(super) fn finish(&self) -> io::Result<()> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Running { requests, thread }) = running else { return Ok(()) };
        drop(requests);
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the flushing thread ended early")))
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        // The part file stays, and what is in it is looked at again before it is used.
        let _ = self.finish();
    }
}
