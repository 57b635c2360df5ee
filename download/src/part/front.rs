//! The digest of the whole file, which follows the data in a thread of its own: from the buffers of the connection that
//! brings the next bytes, and from the file where another connection was ahead.

use std::collections::VecDeque;
use std::sync::{MutexGuard, PoisonError};

use super::{BUFFER_BYTES, Buffer, Part, State};
use crate::digest::{Digest, Hasher};
use crate::error::DownloadError;
use crate::pieces::Geometry;

/// Buffers that may wait for the digest.
const MAX_QUEUED: usize = 8;
/// Most states of the digest that are kept of one file, about 120 bytes each.
const MAX_STATES: usize = 1024;

/// Pieces from one kept state of the digest to the next.
fn stride(geometry: Geometry) -> usize {
    geometry.n_pieces().div_ceil(MAX_STATES).max(1)
}

/// The last piece up to this one before which the digest's state is kept.
fn kept_before(piece: usize, geometry: Geometry) -> usize {
    piece - piece % stride(geometry)
}

/// How far the digest is.
#[derive(Default)]
pub(super) struct Front {
    /// First byte that is neither hashed nor queued nor being read.
    pub(super) next: u64,
    queue: VecDeque<Buffer>,
    /// The bytes from this piece on are to be hashed again. Before it, a state is kept.
    pub(super) from_piece: Option<usize>,
    pub(super) finished: Option<Digest>,
    /// Counts how often it went back.
    pub(super) epoch: u64,
    pub(super) stop: bool,
}

impl Part {
    /// Hands a buffer to the digest if it is the next one. Otherwise the digest reads the bytes from the file when it gets
    /// there.
    pub(super) fn offer(&self, mut state: MutexGuard<'_, State>, at: u64, buffer: Buffer) {
        if state.front.next == at && state.front.from_piece.is_none() {
            state.front.next += buffer.len() as u64;
            let epoch = state.front.epoch;
            while state.front.queue.len() >= MAX_QUEUED && !state.front.stop {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            // If the digest went back meanwhile, it will read these bytes from the file.
            if state.front.epoch == epoch {
                state.front.queue.push_back(buffer);
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends the thread of the digest.
    pub(crate) fn stop(&self) {
        self.lock().front.stop = true;
        self.changed.notify_all();
    }

    /// Computes the digest of the whole as the data come; returns when it is told to stop. Runs in a thread of its own.
    pub(crate) fn follow(&self) -> Result<(), DownloadError> {
        let mut hasher = Hasher::new(self.digest.as_ref(), self.geometry.n_bytes);
        // States before pieces at equal distances, so that a repaired piece costs no second look at the whole file.
        let mut before = vec![hasher.clone()];
        let mut hashed = 0_u64;
        let mut chunk = Vec::new();
        let mut state = self.lock();
        loop {
            if let Some(piece) = state.front.from_piece.take() {
                // What was queued and not yet hashed has left no state.
                let kept = (piece / stride(self.geometry)).min(before.len() - 1);
                before.truncate(kept + 1);
                hasher = before[kept].clone();
                hashed = self.geometry.range(kept * stride(self.geometry)).start;
                state.front.next = hashed;
            } else if state.front.stop {
                return Ok(());
            } else if let Some(buffer) = state.front.queue.pop_front() {
                drop(state);
                self.changed.notify_all();
                self.hash(&buffer, &mut hasher, &mut hashed, &mut before);
                drop(buffer);
                state = self.lock();
            } else if hashed == self.geometry.n_bytes && state.n_incomplete == 0 {
                if state.front.finished.is_none() {
                    state.front.finished = Some(hasher.clone().finish());
                    self.changed.notify_all();
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                let n = state.on_disk_after(hashed, self.geometry).min(BUFFER_BYTES as u64) as usize;
                if n == 0 || state.front.next != hashed {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                state.front.next += n as u64;
                drop(state);
                chunk.resize(BUFFER_BYTES, 0);
                self.read(&mut chunk[..n], hashed)?;
                self.hash(&chunk[..n], &mut hasher, &mut hashed, &mut before);
                state = self.lock();
            }
        }
    }

    /// Buffers never cross the end of a piece.
    fn hash(&self, bytes: &[u8], hasher: &mut Hasher, hashed: &mut u64, before: &mut Vec<Hasher>) {
        hasher.update(bytes);
        *hashed += bytes.len() as u64;
        let distance = u64::from(self.geometry.piece_bytes) * stride(self.geometry) as u64;
        if (*hashed).is_multiple_of(distance) {
            before.push(hasher.clone());
        }
    }
}

impl State {
    /// Bytes on disk from this place on, within its piece.
    fn on_disk_after(&self, at: u64, geometry: Geometry) -> u64 {
        if at >= geometry.n_bytes {
            return 0;
        }
        let piece = geometry.piece_of(at);
        (geometry.range(piece).start + u64::from(self.slots[piece].done)).saturating_sub(at)
    }

    /// The digest goes back to this piece, or to the last state that is kept before it, if it is past its start.
    pub(super) fn rehash_from(&mut self, piece: usize, geometry: Geometry) {
        if self.front.next <= geometry.range(piece).start {
            return;
        }
        let piece = kept_before(piece, geometry);
        self.front.next = geometry.range(piece).start;
        self.front.queue.clear();
        self.front.finished = None;
        self.front.epoch += 1;
        self.front.from_piece = Some(self.front.from_piece.map_or(piece, |earlier| earlier.min(piece)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_the_digest_are_bounded_whatever_the_size() {
        let geometry = |n_bytes| Geometry { n_bytes, piece_bytes: 8 << 20 };
        assert_eq!(stride(geometry(0)), 1);
        assert_eq!(stride(geometry(8 << 30)), 1);
        let large = geometry(464_627_334_560);
        assert_eq!(stride(large), 55);
        assert!(large.n_pieces().div_ceil(stride(large)) <= MAX_STATES);
        assert_eq!((kept_before(54, large), kept_before(55, large), kept_before(56, large)), (0, 55, 55));
    }
}
