//! Buffers of one download: a fixed number of fixed size, however many files, connections and bytes there are.

use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Most bytes that a connection reads, writes and hands on at a time: somewhat more than the HTTP library brings at once.
const MAX_BUFFER_BYTES: usize = 512 << 10;
/// Fewer are not worth the handing around.
const MIN_BUFFER_BYTES: usize = 64 << 10;
/// Bytes of all buffers together.
const POOL_BYTES: usize = 8 << 20;

/// All buffers.
#[derive(Debug)]
pub(crate) struct Pool {
    buffer_bytes: usize,
    idle: Mutex<Idle>,
    returned: Condvar,
}

#[derive(Debug)]
struct Idle {
    buffers: Vec<Box<[u8]>>,
    /// Buffers that have not been needed yet.
    n_unmade: usize,
}

impl Pool {
    /// Each connection can have one that it fills, one that is written, and those of all that wait for a digest come on top.
    pub(crate) fn new(connections: usize) -> Arc<Self> {
        let n_buffers = (2 * connections + 2).max(POOL_BYTES / MAX_BUFFER_BYTES);
        let buffer_bytes = (POOL_BYTES / n_buffers).clamp(MIN_BUFFER_BYTES, MAX_BUFFER_BYTES);
        let idle = Mutex::new(Idle { buffers: Vec::new(), n_unmade: n_buffers });
        Arc::new(Self { buffer_bytes, idle, returned: Condvar::new() })
    }

    /// A buffer with nothing in it, as soon as there is one. Whoever has one gives it back without waiting for another.
    pub(crate) fn take(self: &Arc<Self>) -> Buffer {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(bytes) = idle.buffers.pop() {
                return Buffer { bytes, len: 0, pool: self.clone() };
            }
            if idle.n_unmade > 0 {
                idle.n_unmade -= 1;
                drop(idle);
                return Buffer { bytes: vec![0; self.buffer_bytes].into(), len: 0, pool: self.clone() };
            }
            idle = self.returned.wait(idle).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A buffer on loan; dropped, it goes back. Bytes that are not filled keep what they had, so that nobody clears them each time.
pub(crate) struct Buffer {
    bytes: Box<[u8]>,
    len: usize,
    pool: Arc<Pool>,
}

impl Buffer {
    /// All of it, to be filled.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Says how much is filled.
    pub(crate) fn set_len(&mut self, len: usize) {
        assert!(len <= self.bytes.len(), "{len} bytes in a buffer of {}", self.bytes.len());
        self.len = len;
    }
}

/// What is filled.
impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner).buffers.push(bytes);
        self.pool.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::MAX_CONNECTIONS;

    #[test]
    fn memory_is_bounded_whatever_the_connections() {
        for connections in 1..=MAX_CONNECTIONS {
            let pool = Pool::new(connections);
            let n_buffers = pool.idle.lock().unwrap().n_unmade;
            assert!(n_buffers > 2 * connections);
            assert!(pool.buffer_bytes >= MIN_BUFFER_BYTES);
            assert!(n_buffers * pool.buffer_bytes <= POOL_BYTES, "{connections}");
        }
    }

    #[test]
    fn a_buffer_comes_back_for_whoever_waits() {
        let pool = Pool::new(1);
        let n_buffers = pool.idle.lock().unwrap().n_unmade;
        let mut all: Vec<_> = (0..n_buffers).map(|_| pool.take()).collect();
        all[0].space()[..3].copy_from_slice(b"abc");
        all[0].set_len(3);
        assert_eq!(&*all[0], b"abc");
        let waiting = pool.clone();
        let waiter = std::thread::spawn(move || waiting.take().len());
        drop(all.pop());
        assert_eq!(waiter.join().unwrap(), 0);
    }
}
