//! One file on its way: the part file, its journal, and the digest of the whole that follows the data.

mod buffer;
mod flush;
mod front;

use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use reqwest::Url;

use crate::digest::Digest;
use crate::error::DownloadError;
use crate::pieces::{Fingerprint, Geometry, Identity, Journal, Slot};
use crate::progress::{Event, Observer};
pub(crate) use buffer::{Buffer, Pool};
use flush::Flusher;
use front::Front;

/// Ends of the names of a part file and its journal, after the target's name.
pub(crate) const PART_SUFFIX: &str = ".ggsmith-part";
pub(crate) const JOURNAL_SUFFIX: &str = ".ggsmith-pieces";
/// Bytes that are read from disk at a time.
pub(crate) const BUFFER_BYTES: usize = 256 << 10;
/// A part file and what is known of it. Shared by the connections that fill it.
pub(crate) struct Part {
    /// Name for messages.
    pub(crate) name: String,
    pub(crate) target: PathBuf,
    pub(crate) path: PathBuf,
    pub(crate) geometry: Geometry,
    pub(crate) digest: Option<Digest>,
    file: File,
    flusher: Flusher,
    journal: Journal,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    identity: Identity,
    slots: Vec<Slot>,
    busy: Vec<bool>,
    n_busy: usize,
    n_incomplete: usize,
    /// Pieces that were fetched a second time and compared; empty before that is asked for.
    compared: Vec<bool>,
    n_uncompared: usize,
    compared_bytes: u64,
    /// Set when the file changed: it starts from nothing as soon as no connection writes.
    restart: Option<String>,
    n_restarts: u32,
    /// Whether the server gives ranges.
    ranges: bool,
    /// Address that the origin redirected to.
    link: Option<Url>,
    finish_taken: bool,
    /// The digest was found right: nothing may change any more.
    closed: bool,
    front: Front,
}

/// Pieces that one request is to bring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) pieces: Range<usize>,
    /// Only to be compared with what is there.
    pub(crate) compare: bool,
}

/// What the digest says of a file that has all its pieces.
pub(crate) enum Verdict {
    Right(Digest),
    Wrong(Digest),
    Stopped,
}

/// What to do about a wrong digest.
pub(crate) enum Remedy {
    /// Pieces on disk are not what came; they are fetched again.
    Refetch,
    /// Everything is fetched a second time and compared.
    Compare,
    /// A comparison goes on.
    Continue,
    /// Everything has been compared: the server's bytes are as they are.
    None { compared_bytes: u64 },
}

/// Where a file comes from and goes to.
pub(crate) struct Opening<'a> {
    pub(crate) name: &'a str,
    pub(crate) source: &'a str,
    pub(crate) target: &'a Path,
    pub(crate) n_bytes: u64,
    pub(crate) piece_bytes: u32,
    pub(crate) digest: Option<&'a Digest>,
    pub(crate) etag: Option<&'a str>,
}

/// The path with something appended to its last name.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    path.with_file_name(name)
}

impl Part {
    /// Opens or makes the part file, and reads what is there to see whether it is still what came.
    pub(crate) fn open(opening: &Opening<'_>, observer: &dyn Observer) -> Result<Self, DownloadError> {
        let path = beside(opening.target, PART_SUFFIX);
        let journal_path = beside(opening.target, JOURNAL_SUFFIX);
        let folder = opening.target.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(DownloadError::io("make the folder", folder))?;
        let journal = Journal::open(&journal_path, &path)?;
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(DownloadError::io("open", &path))?;
        let found_bytes = file.metadata().map_err(DownloadError::io("look at", &path))?.len();
        let geometry = Geometry { n_bytes: opening.n_bytes, piece_bytes: opening.piece_bytes };
        let mut identity = Identity::new(
            opening.source.to_owned(),
            geometry,
            opening.digest.cloned(),
            opening.etag.map(str::to_owned),
        );
        let mut slots = None;
        if found_bytes > 0 {
            match journal.identity() {
                None => tell_restart(observer, opening.name, "there is no record of which bytes came"),
                Some(old) => {
                    if let Some(reason) = identity.differs_from(&old) {
                        tell_restart(observer, opening.name, &reason);
                    } else {
                        identity.piece_bytes = old.piece_bytes;
                        identity.etag = identity.etag.or(old.etag);
                        slots = Some(journal.slots(identity.geometry()));
                    }
                }
            }
        }
        let geometry = identity.geometry();
        let slots = if let Some(slots) = slots {
            journal.rename(&identity)?;
            file.set_len(geometry.n_bytes).map_err(DownloadError::io("resize", &path))?;
            slots
        } else {
            file.set_len(0).map_err(DownloadError::io("empty", &path))?;
            journal.start(&identity)?;
            reserve(&file, geometry.n_bytes).map_err(DownloadError::io("reserve room for", &path))?;
            vec![Slot::default(); geometry.n_pieces()]
        };
        let n_pieces = slots.len();
        let flusher = Flusher::new(&file).map_err(DownloadError::io("flush", &path))?;
        let part = Self {
            name: opening.name.to_owned(),
            target: opening.target.to_owned(),
            path,
            geometry,
            digest: opening.digest.cloned(),
            file,
            flusher,
            journal,
            changed: Condvar::new(),
            state: Mutex::new(State {
                identity,
                n_incomplete: incomplete(&slots, geometry),
                slots,
                busy: vec![false; n_pieces],
                n_busy: 0,
                compared: Vec::new(),
                n_uncompared: 0,
                compared_bytes: 0,
                restart: None,
                n_restarts: 0,
                ranges: true,
                link: None,
                finish_taken: false,
                closed: false,
                front: Front::default(),
            }),
        };
        part.check_disk("the bytes on disk are not those that came", observer)?;
        Ok(part)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are there.
    pub(crate) fn done_bytes(&self) -> u64 {
        self.lock().slots.iter().map(|slot| u64::from(slot.done)).sum()
    }

    /// Reads every piece of which something should be there; what differs from its fingerprint is forgotten and told.
    /// Gives the number of such pieces.
    fn check_disk(&self, reason: &str, observer: &dyn Observer) -> Result<usize, DownloadError> {
        let slots = self.lock().slots.clone();
        let total: u64 = slots.iter().map(|slot| u64::from(slot.done)).sum();
        let mut buffer = vec![0; BUFFER_BYTES];
        let (mut n_wrong, mut read) = (0, 0);
        for (piece, slot) in slots.iter().enumerate().filter(|(_, slot)| slot.done > 0) {
            if observer.interrupted() {
                break;
            }
            let found = self.fingerprint_on_disk(piece, slot.done, &mut buffer)?.value();
            read += u64::from(slot.done);
            observer.event(&Event::Checking { file: &self.name, done_bytes: read, n_bytes: total });
            if found != slot.fingerprint {
                n_wrong += 1;
                self.forget(piece, reason, observer)?;
            }
        }
        Ok(n_wrong)
    }

    /// The fingerprint of the first `done` bytes of a piece.
    pub(crate) fn fingerprint_on_disk(
        &self,
        piece: usize,
        done: u32,
        buffer: &mut [u8],
    ) -> Result<Fingerprint, DownloadError> {
        let mut fingerprint = Fingerprint::new();
        let mut at = self.geometry.range(piece).start;
        let end = at + u64::from(done);
        while at < end {
            let n = buffer.len().min((end - at) as usize);
            self.read(&mut buffer[..n], at)?;
            fingerprint.update(&buffer[..n]);
            at += n as u64;
        }
        Ok(fingerprint)
    }

    fn read(&self, buffer: &mut [u8], at: u64) -> Result<(), DownloadError> {
        self.file.read_exact_at(buffer, at).map_err(DownloadError::io("read", &self.path))
    }

    /// Nothing is there of this piece any more.
    fn forget(&self, piece: usize, reason: &str, observer: &dyn Observer) -> Result<(), DownloadError> {
        {
            let mut state = self.lock();
            if state.slots[piece].done == self.geometry.len(piece) {
                state.n_incomplete += 1;
            }
            state.slots[piece] = Slot::default();
            state.rehash_from(piece, self.geometry);
            self.journal.put(piece, Slot::default())?;
        }
        let Range { start, end } = self.geometry.range(piece);
        let n_pieces = self.geometry.n_pieces();
        observer.event(&Event::WrongPiece { file: &self.name, piece, n_pieces, start, end, reason });
        Ok(())
    }

    /// Takes the next pieces for one request, if there are any that no other connection has. `connections`: how many share
    /// the work; none of them is to take so much that others idle.
    pub(crate) fn take_run(&self, connections: usize, max_bytes: u64) -> Option<Run> {
        let mut state = self.lock();
        if state.restart.is_some() || state.closed {
            return None;
        }
        let geometry = self.geometry;
        let most = (max_bytes / u64::from(geometry.piece_bytes)).max(1) as usize;
        let wanted =
            |state: &State, piece: usize| !state.busy[piece] && state.slots[piece].done < geometry.len(piece);
        if state.n_incomplete > 0 {
            if !state.ranges {
                let first = (0..state.busy.len()).find(|&piece| wanted(&state, piece))?;
                // The body begins at byte 0 whatever is asked for: one connection takes it all.
                if state.n_busy > 0 {
                    return None;
                }
                let end = state.busy.len();
                state.mark(first..end, true);
                return Some(Run { pieces: first..end, compare: false });
            }
            let first = (0..state.busy.len()).find(|&piece| wanted(&state, piece))?;
            let fair = (state.n_incomplete / (2 * connections)).clamp(1, most);
            let fresh = |piece: &usize| wanted(&state, *piece) && state.slots[*piece].done == 0;
            let end = first + 1 + (first + 1..state.busy.len()).take(fair - 1).take_while(fresh).count();
            state.mark(first..end, true);
            return Some(Run { pieces: first..end, compare: false });
        }
        if state.n_uncompared == 0 || !state.ranges {
            return None;
        }
        let wanted = |state: &State, piece: usize| !state.busy[piece] && !state.compared[piece];
        let first = (0..state.busy.len()).find(|&piece| wanted(&state, piece))?;
        let fair = (state.n_uncompared / (2 * connections)).clamp(1, most);
        let end = first
            + 1
            + (first + 1..state.busy.len()).take(fair - 1).take_while(|&p| wanted(&state, p)).count();
        state.mark(first..end, true);
        Some(Run { pieces: first..end, compare: true })
    }

    /// Gives back what is left of a run, and starts over if that was asked for and no connection writes any more.
    pub(crate) fn release(
        &self,
        pieces: Range<usize>,
        observer: &dyn Observer,
    ) -> Result<u64, DownloadError> {
        let mut state = self.lock();
        state.mark(pieces, false);
        if state.n_busy > 0 {
            return Ok(0);
        }
        let Some(reason) = state.restart.take() else { return Ok(0) };
        let lost = state.slots.iter().map(|slot| u64::from(slot.done)).sum();
        self.journal.start(&state.identity)?;
        state.slots.fill(Slot::default());
        state.n_incomplete = state.slots.len();
        state.compared.clear();
        state.n_uncompared = 0;
        state.rehash_from(0, self.geometry);
        drop(state);
        self.changed.notify_all();
        tell_restart(observer, &self.name, &reason);
        Ok(lost)
    }

    /// Byte at which the work on a piece begins.
    pub(crate) fn start_of(&self, run: &Run) -> u64 {
        let start = self.geometry.range(run.pieces.start).start;
        if run.compare { start } else { start + u64::from(self.lock().slots[run.pieces.start].done) }
    }

    /// The fingerprint so far of the piece at which a run begins.
    pub(crate) fn begun(&self, run: &Run, buffer: &mut [u8]) -> Result<Fingerprint, DownloadError> {
        let slot = self.lock().slots[run.pieces.start];
        if run.compare || slot.done == 0 {
            return Ok(Fingerprint::new());
        }
        self.fingerprint_on_disk(run.pieces.start, slot.done, buffer)
    }

    /// Whether a connection that comes to a piece has to write it. If it does, the piece begins anew, and the bytes that were
    /// there of it are given.
    pub(crate) fn needs(&self, piece: usize) -> Option<u64> {
        let mut state = self.lock();
        let slot = state.slots[piece];
        if slot.done == self.geometry.len(piece) {
            return None;
        }
        if slot.done > 0 {
            state.slots[piece] = Slot::default();
            state.rehash_from(piece, self.geometry);
        }
        Some(u64::from(slot.done))
    }

    /// Writes what came at this place of a piece, records it and hands it to the digest. `fingerprint`: of the piece up to
    /// the end of these bytes. `false` if the connection is to stop because the file starts over.
    pub(crate) fn write(
        &self,
        piece: usize,
        at: u64,
        buffer: Buffer,
        fingerprint: u128,
    ) -> Result<bool, DownloadError> {
        self.file.write_all_at(&buffer, at).map_err(DownloadError::io("write", &self.path))?;
        self.flusher.wrote(buffer.len() as u64);
        let done = (at + buffer.len() as u64 - self.geometry.range(piece).start) as u32;
        let slot = Slot { done, fingerprint };
        let mut state = self.lock();
        if state.restart.is_some() {
            return Ok(false);
        }
        state.slots[piece] = slot;
        if done == self.geometry.len(piece) {
            state.n_incomplete -= 1;
            state.finish_taken = false;
        }
        self.journal.put(piece, slot)?;
        self.offer(state, at, buffer);
        Ok(true)
    }

    /// A piece came a second time. `false` if it is not as before; it is then to be fetched once more and kept.
    pub(crate) fn compare(
        &self,
        piece: usize,
        fingerprint: &Fingerprint,
        observer: &dyn Observer,
    ) -> Result<bool, DownloadError> {
        let same = {
            let mut state = self.lock();
            if state.closed {
                return Ok(true);
            }
            if !state.compared[piece] {
                state.compared[piece] = true;
                state.n_uncompared -= 1;
                state.compared_bytes += u64::from(self.geometry.len(piece));
                state.finish_taken &= state.n_uncompared > 0;
            }
            state.slots[piece].fingerprint == fingerprint.value()
        };
        if !same {
            self.forget(piece, "it came out otherwise when it was fetched a second time", observer)?;
        }
        Ok(same)
    }

    /// Takes the duty to finish the file, if all its pieces are there and nobody else has it.
    pub(crate) fn take_finish(&self) -> bool {
        let mut state = self.lock();
        let ready =
            state.n_incomplete == 0 && state.restart.is_none() && !state.finish_taken && !state.closed;
        state.finish_taken |= ready;
        ready
    }

    /// Waits for the digest of the whole.
    pub(crate) fn verdict(&self, stopped: &dyn Fn() -> bool) -> Verdict {
        let mut state = self.lock();
        loop {
            // While one connection waits here, a repaired piece may let another in: the first to see it right finishes.
            if state.closed {
                return Verdict::Stopped;
            }
            if let Some(found) = &state.front.finished {
                let right = self.digest.as_ref().is_none_or(|expected| expected == found);
                let found = found.clone();
                state.closed |= right;
                return if right { Verdict::Right(found) } else { Verdict::Wrong(found) };
            }
            if stopped() || state.front.stop {
                return Verdict::Stopped;
            }
            let wait = std::time::Duration::from_millis(50);
            state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What to do about a wrong digest.
    pub(crate) fn remedy(&self, observer: &dyn Observer) -> Result<Remedy, DownloadError> {
        {
            let state = self.lock();
            if !state.compared.is_empty() {
                let compared_bytes = state.compared_bytes;
                let over = state.n_uncompared == 0 && state.n_incomplete == 0;
                return Ok(if over { Remedy::None { compared_bytes } } else { Remedy::Continue });
            }
        }
        if self.check_disk("the bytes on disk are not those that came", observer)? > 0 {
            self.lock().finish_taken = false;
            return Ok(Remedy::Refetch);
        }
        let mut state = self.lock();
        if !state.ranges || state.slots.is_empty() {
            return Ok(Remedy::None { compared_bytes: 0 });
        }
        state.compared = vec![false; state.slots.len()];
        state.n_uncompared = state.slots.len();
        Ok(Remedy::Compare)
    }

    /// The server has another version. Pieces of a file whose digest is known are kept, since the digest will judge them;
    /// otherwise the file starts over. Gives the ETag before, if there was one and it differs.
    pub(crate) fn note_etag(&self, etag: Option<&str>) -> Result<Option<String>, DownloadError> {
        let Some(etag) = etag else { return Ok(None) };
        let mut state = self.lock();
        if state.restart.is_some() {
            // An answer from before the change, read after it, is not another change.
            return Ok(state.identity.etag.clone());
        }
        match &state.identity.etag {
            Some(known) if known == etag => Ok(None),
            None => {
                state.identity.etag = Some(etag.to_owned());
                self.journal.rename(&state.identity)?;
                Ok(None)
            }
            Some(known) => {
                let before = known.clone();
                state.identity.etag = Some(etag.to_owned());
                if self.digest.is_some() {
                    self.journal.rename(&state.identity)?;
                } else {
                    state.n_restarts += 1;
                    state.restart = Some(format!("its ETag was {before} and is {etag}"));
                }
                Ok(Some(before))
            }
        }
    }

    /// How often the file had to start over.
    pub(crate) fn n_restarts(&self) -> u32 {
        self.lock().n_restarts
    }

    /// The version that ranges are to be of, if the server's word is strong enough.
    pub(crate) fn if_range(&self) -> Option<String> {
        self.lock().identity.etag.clone().filter(|etag| etag.starts_with('"'))
    }

    pub(crate) fn ranges(&self) -> bool {
        self.lock().ranges
    }

    pub(crate) fn no_ranges(&self) {
        self.lock().ranges = false;
    }

    pub(crate) fn link(&self) -> Option<Url> {
        self.lock().link.clone()
    }

    pub(crate) fn set_link(&self, link: Option<Url>) {
        self.lock().link = link;
    }

    /// Makes the data durable and gives the file its name. The journal goes to `record`, where it lets single pieces be
    /// repaired later, or is removed.
    pub(crate) fn finish(&self, record: Option<&Path>) -> Result<(), DownloadError> {
        let flushed = self.flusher.finish().and_then(|()| self.file.sync_all());
        flushed.map_err(DownloadError::io("flush", &self.path))?;
        fs::rename(&self.path, &self.target).map_err(|source| DownloadError::Rename {
            part: self.path.clone(),
            target: self.target.clone(),
            source,
        })?;
        sync_folder(&self.target);
        let kept = record.is_some_and(|record| {
            let made = record.parent().is_none_or(|folder| fs::create_dir_all(folder).is_ok());
            made && fs::rename(self.journal.path(), record).is_ok()
        });
        if !kept {
            // A journal without its part file is ignored and replaced.
            let _ = fs::remove_file(self.journal.path());
        }
        Ok(())
    }
}

impl State {
    fn mark(&mut self, pieces: Range<usize>, busy: bool) {
        for piece in pieces {
            if self.busy[piece] != busy {
                self.busy[piece] = busy;
                if busy {
                    self.n_busy += 1;
                } else {
                    self.n_busy -= 1;
                }
            }
        }
    }
}

fn incomplete(slots: &[Slot], geometry: Geometry) -> usize {
    slots.iter().enumerate().filter(|(piece, slot)| slot.done < geometry.len(*piece)).count()
}

fn tell_restart(observer: &dyn Observer, file: &str, reason: &str) {
    observer.event(&Event::Restarted { file, reason });
}

/// `f_type` of file systems in memory: there, room is reserved by filling it, which takes as long as the writing.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// Reserves the room, where the file system can, so that it does not run out later.
fn reserve(file: &File, n_bytes: u64) -> std::io::Result<()> {
    if n_bytes == 0 {
        return Ok(());
    }
    if rustix::fs::fstatfs(file).is_ok_and(|found| found.f_type == TMPFS_MAGIC) {
        return file.set_len(n_bytes);
    }
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, n_bytes) {
        Err(rustix::io::Errno::NOSPC) => Err(rustix::io::Errno::NOSPC.into()),
        Ok(()) => Ok(()),
        Err(_) => file.set_len(n_bytes),
    }
}

/// A rename is durable when its folder is.
pub(crate) fn sync_folder(path: &Path) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Not all file systems can; the data themselves are safe.
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}
