//! How a download tells its caller what happens. The library never prints.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Something that happened.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// What is about to be done.
    Planned {
        /// Files to be fetched.
        n_files: usize,
        /// Their bytes, as far as they are known.
        n_bytes: u64,
        /// Files that are there already.
        n_present: usize,
    },
    /// Bytes on disk are read, to see whether they are still those that came.
    Checking {
        /// The file.
        file: &'a str,
        /// Bytes read.
        done_bytes: u64,
        /// Bytes to read.
        n_bytes: u64,
    },
    /// An earlier download goes on.
    Resuming {
        /// The file.
        file: &'a str,
        /// Bytes that are there.
        done_bytes: u64,
        /// Bytes of the file.
        n_bytes: u64,
    },
    /// How far everything is. At most some ten times a second.
    Progress(Progress<'a>),
    /// A request failed and will be made again.
    Retrying {
        /// The file.
        file: &'a str,
        /// What went wrong.
        problem: &'a str,
        /// Wait before the next attempt.
        wait: Duration,
    },
    /// What was there of a file cannot be used; it starts from nothing.
    Restarted {
        /// The file.
        file: &'a str,
        /// Why.
        reason: &'a str,
    },
    /// A piece has wrong bytes; it alone is fetched again.
    WrongPiece {
        /// The file.
        file: &'a str,
        /// Number of the piece, from 0.
        piece: usize,
        /// Pieces of the file.
        n_pieces: usize,
        /// First byte of the piece in the file.
        start: u64,
        /// First byte after it.
        end: u64,
        /// How it was found out.
        reason: &'a str,
    },
    /// The digest of the whole file is wrong, and the bytes on disk are those that came: everything is fetched a second time
    /// to see which pieces differ.
    Comparing {
        /// The file.
        file: &'a str,
        /// Digest found.
        found: &'a str,
        /// Digest expected.
        expected: &'a str,
    },
    /// A file is whole, checked and under its final name.
    Finished {
        /// The file.
        file: &'a str,
        /// Its place.
        path: &'a Path,
        /// Its digest in hexadecimal.
        digest: &'a str,
        /// Whether it was compared with an announced one.
        checked: bool,
    },
    /// Something that still gives the result.
    Warning(&'a str),
}

/// How far everything is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress<'a> {
    /// The file that was worked on last.
    pub file: &'a str,
    /// Bytes of it that are there.
    pub file_done_bytes: u64,
    /// Its bytes.
    pub file_bytes: u64,
    /// Bytes of all files that are there.
    pub done_bytes: u64,
    /// Bytes of all files.
    pub n_bytes: u64,
    /// Files that are finished.
    pub done_files: usize,
    /// Files in all.
    pub n_files: usize,
    /// Mean of the last ten seconds.
    pub bytes_per_second: f64,
    /// Time left at that rate; `None` as long as nothing comes.
    pub eta: Option<Duration>,
}

/// Receives events and can ask the download to stop.
pub trait Observer: Sync {
    /// Something happened. Called from several threads.
    fn event(&self, event: &Event<'_>);

    /// Whether to stop at once; what is done is kept.
    fn interrupted(&self) -> bool {
        false
    }
}

/// Ignores everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn event(&self, _: &Event<'_>) {}
}

/// Counts bytes over all connections.
#[derive(Debug)]
pub(crate) struct Meter {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    done_bytes: u64,
    n_bytes: u64,
    done_files: usize,
    n_files: usize,
    received_bytes: u64,
    /// Bytes received until then.
    history: VecDeque<(Instant, u64)>,
    last_told: Option<Instant>,
}

const BETWEEN_EVENTS: Duration = Duration::from_millis(100);
const WINDOW: Duration = Duration::from_secs(10);
const BETWEEN_SAMPLES: Duration = Duration::from_millis(250);

impl Meter {
    pub(crate) fn new(n_files: usize, n_bytes: u64) -> Self {
        Self { counts: Mutex::new(Counts { n_bytes, n_files, ..Counts::default() }) }
    }

    fn with<T>(&self, change: impl FnOnce(&mut Counts) -> T) -> T {
        change(&mut self.counts.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Bytes that were there before.
    pub(crate) fn found(&self, n_bytes: u64) {
        self.with(|counts| counts.done_bytes += n_bytes);
    }

    /// Bytes that turned out to be of no use.
    pub(crate) fn lost(&self, n_bytes: u64) {
        self.with(|counts| counts.done_bytes = counts.done_bytes.saturating_sub(n_bytes));
    }

    pub(crate) fn file_done(&self) {
        self.with(|counts| counts.done_files += 1);
    }

    /// Bytes done and expected.
    pub(crate) fn totals(&self) -> (u64, u64) {
        self.with(|counts| (counts.done_bytes, counts.n_bytes))
    }

    /// Bytes came. `new_bytes` of them add to what is there. Tells the observer if it is time.
    pub(crate) fn received(
        &self,
        n_bytes: u64,
        new_bytes: u64,
        observer: &dyn Observer,
        file: (&str, u64, u64),
    ) {
        let progress = self.with(|counts| {
            counts.received_bytes += n_bytes;
            counts.done_bytes += new_bytes;
            let now = Instant::now();
            let due = counts.last_told.is_none_or(|last| now - last >= BETWEEN_EVENTS);
            if !due && file.1 < file.2 {
                return None;
            }
            counts.last_told = Some(now);
            Some(counts.progress(now, file))
        });
        if let Some(progress) = progress {
            observer.event(&Event::Progress(progress));
        }
    }
}

impl Counts {
    fn progress<'a>(
        &mut self,
        now: Instant,
        (file, file_done_bytes, file_bytes): (&'a str, u64, u64),
    ) -> Progress<'a> {
        if self.history.back().is_none_or(|(at, _)| now - *at >= BETWEEN_SAMPLES) {
            self.history.push_back((now, self.received_bytes));
        }
        while self.history.len() > 2 && now - self.history[0].0 > WINDOW {
            self.history.pop_front();
        }
        let (since, before) = self.history[0];
        let seconds = (now - since).as_secs_f64();
        let rate = if seconds > 0.0 { (self.received_bytes - before) as f64 / seconds } else { 0.0 };
        let left = self.n_bytes.saturating_sub(self.done_bytes) as f64;
        Progress {
            file,
            file_done_bytes,
            file_bytes,
            done_bytes: self.done_bytes,
            n_bytes: self.n_bytes,
            done_files: self.done_files,
            n_files: self.n_files,
            bytes_per_second: rate,
            eta: (rate > 0.0).then(|| Duration::try_from_secs_f64(left / rate).ok()).flatten(),
        }
    }
}
