//! The part file: grows in order beside the final name, with a journal that says how far it is sound.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{BuildError, BuildOptions};
use crate::plan::hex;

/// Takes the bytes of a build in order.
pub trait Sink: Send {
    /// Appends bytes and records that they are sound.
    ///
    /// # Errors
    /// The system's own; what was appended before stays sound.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;

    /// Bytes that are sound.
    fn done_bytes(&self) -> u64;

    /// SHA-256 of the bytes that are sound.
    fn sha256(&self) -> String;

    /// The file being written, for messages.
    fn path(&self) -> PathBuf;
}

/// Time between two records in the journal, each of which waits for the disk: a killed run loses that much work.
const JOURNAL_EVERY: Duration = Duration::from_secs(1);

/// What the journal beside a part file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    /// Identity of plan, sources and options: equal means the same bytes.
    pub identity: String,
    /// Bytes of the part file that are sound.
    pub done_bytes: u64,
    /// SHA-256 of those bytes.
    pub sha256: String,
}

/// A part file on disk.
#[derive(Debug)]
pub struct FileSink {
    final_path: PathBuf,
    part_path: PathBuf,
    journal_path: PathBuf,
    file: File,
    hasher: Sha256,
    done_bytes: u64,
    journaled_bytes: u64,
    journaled: Option<Instant>,
    identity: String,
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

impl FileSink {
    /// Opens the part file of `out`, going on where a sound one of the same identity ends.
    ///
    /// # Errors
    /// [`BuildError`]: an output that exists or is an input, no room, a part file of another plan,
    /// or the system's own.
    pub(super) fn open(
        out: &Path,
        file_bytes: u64,
        identity: &str,
        inputs: &[PathBuf],
        options: BuildOptions,
    ) -> Result<Self, BuildError> {
        refuse_output(out, inputs, options.overwrite)?;
        let part_path = with_suffix(out, ".part");
        let journal_path = with_suffix(out, ".part.json");
        let output = |problem: String| BuildError::Output { path: part_path.clone(), problem };
        let mut open = OpenOptions::new();
        let file = open
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&part_path)
            .map_err(|e| output(format!("{e}; choose a folder you may write to")))?;
        file.try_lock().map_err(|_| {
            output("another run is writing it; wait for that run or choose another name".to_owned())
        })?;
        let mut sink = Self {
            final_path: out.to_owned(),
            part_path: part_path.clone(),
            journal_path,
            file,
            hasher: Sha256::new(),
            done_bytes: 0,
            journaled_bytes: 0,
            journaled: None,
            identity: identity.to_owned(),
        };
        if options.resume {
            sink.resume()?;
        }
        sink.file.set_len(sink.done_bytes).map_err(|e| output(e.to_string()))?;
        io::Seek::seek(&mut sink.file, io::SeekFrom::Start(sink.done_bytes))
            .map_err(|e| output(e.to_string()))?;
        let needed_bytes = file_bytes.saturating_sub(sink.done_bytes);
        let free_bytes = free_bytes(&folder_of(out)).map_err(|e| output(e.to_string()))?;
        if needed_bytes > free_bytes {
            if sink.done_bytes == 0 {
                sink.remove_part();
            }
            return Err(BuildError::NoRoom { path: out.to_owned(), needed_bytes, free_bytes });
        }
        Ok(sink)
    }

    /// Takes over what a journal of the same identity vouches for, after reading it back.
    fn resume(&mut self) -> Result<(), BuildError> {
        let Ok(text) = std::fs::read_to_string(&self.journal_path) else { return Ok(()) };
        let refuse = |problem: String| BuildError::Resume { path: self.part_path.clone(), problem };
        let journal: Journal =
            serde_json::from_str(&text).map_err(|e| refuse(format!("its journal is damaged ({e})")))?;
        if journal.identity != self.identity {
            return Err(refuse(
                "it was made from another plan, source, importance matrix or version".to_owned(),
            ));
        }
        let present = self.file.metadata().map_err(|e| refuse(e.to_string()))?.len();
        if present < journal.done_bytes {
            let expected = journal.done_bytes;
            return Err(refuse(format!("it has {present} bytes, its journal vouches for {expected}")));
        }
        let mut left = journal.done_bytes;
        let mut buffer = vec![0; 1 << 20];
        while left > 0 {
            let n = buffer.len().min(left as usize);
            self.file.read_exact(&mut buffer[..n]).map_err(|e| refuse(e.to_string()))?;
            self.hasher.update(&buffer[..n]);
            left -= n as u64;
        }
        if hex(&self.hasher.clone().finalize()) != journal.sha256 {
            return Err(refuse("its bytes are not those that were written (SHA-256 differs)".to_owned()));
        }
        self.done_bytes = journal.done_bytes;
        self.journaled_bytes = journal.done_bytes;
        Ok(())
    }

    /// Records everything written so far as sound.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        if self.journaled_bytes < self.done_bytes { self.write_journal() } else { Ok(()) }
    }

    /// Reads back what was written.
    pub(super) fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, out, offset)
    }

    fn write_journal(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        let journal =
            Journal { identity: self.identity.clone(), done_bytes: self.done_bytes, sha256: self.sha256() };
        let text = serde_json::to_string(&journal)?;
        let new = with_suffix(&self.journal_path, ".new");
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, &self.journal_path)?;
        self.journaled_bytes = self.done_bytes;
        self.journaled = Some(Instant::now());
        Ok(())
    }

    fn remove_part(&self) {
        // The part file is of no use to anybody; failing to remove it harms nothing.
        let _ = std::fs::remove_file(&self.part_path);
        let _ = std::fs::remove_file(&self.journal_path);
    }

    /// Makes the part file durable and gives it its final name.
    pub(super) fn finish(self, overwrite: bool) -> Result<(), BuildError> {
        let output = |problem: String| BuildError::Output { path: self.final_path.clone(), problem };
        let keep = |e: io::Error| {
            output(format!("{e}; the finished data is kept as `{}`", self.part_path.display()))
        };
        self.file.sync_all().map_err(keep)?;
        if !overwrite && self.final_path.exists() {
            return Err(output(format!(
                "a file of that name has appeared meanwhile; the finished data is kept as `{}`",
                self.part_path.display()
            )));
        }
        std::fs::rename(&self.part_path, &self.final_path).map_err(keep)?;
        let _ = std::fs::remove_file(&self.journal_path);
        File::open(folder_of(&self.final_path)).and_then(|folder| folder.sync_all()).map_err(keep)
    }
}

impl Sink for FileSink {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let result = self.file.write_all(bytes);
        if let Err(error) = result {
            // Keep what the journal can vouch for: the bytes of earlier appends.
            self.file.set_len(self.done_bytes)?;
            let _ = self.write_journal();
            return Err(error);
        }
        self.hasher.update(bytes);
        self.done_bytes += bytes.len() as u64;
        if self.journaled.is_none_or(|then| then.elapsed() >= JOURNAL_EVERY) {
            self.write_journal()?;
        }
        Ok(())
    }

    fn done_bytes(&self) -> u64 {
        self.done_bytes
    }

    fn sha256(&self) -> String {
        hex(&self.hasher.clone().finalize())
    }

    fn path(&self) -> PathBuf {
        self.part_path.clone()
    }
}

impl Drop for FileSink {
    /// An interrupted run leaves a journal of everything it wrote.
    fn drop(&mut self) {
        if self.part_path.exists() && self.journaled_bytes < self.done_bytes {
            let _ = self.write_journal();
        }
    }
}

fn refuse_output(out: &Path, inputs: &[PathBuf], overwrite: bool) -> Result<(), BuildError> {
    let output = |problem: String| BuildError::Output { path: out.to_owned(), problem };
    let Ok(existing) = std::fs::metadata(out) else { return Ok(()) };
    if existing.is_dir() {
        return Err(output("it is a folder; give the name of a file".to_owned()));
    }
    for input in inputs {
        if std::fs::metadata(input).is_ok_and(|m| (m.dev(), m.ino()) == (existing.dev(), existing.ino())) {
            return Err(output(format!("it is an input (`{}`); choose another name", input.display())));
        }
    }
    if !overwrite {
        return Err(output("it exists; choose another name or pass --overwrite".to_owned()));
    }
    Ok(())
}

/// Bytes that an ordinary user may still write to the file system of a folder.
///
/// # Errors
/// The system's own.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
