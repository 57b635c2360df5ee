//! An append-only file of finished work, one JSON value a line: what is in it survives a crash, and is never done twice.
//!
//! The first line says what the work is. A journal of other work is refused. A line that a crash cut off is dropped.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a journal cannot be gone on with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The system's own.
    #[error("cannot read or write `{path}`")]
    Io {
        /// The journal.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Another process has it.
    #[error("`{path}` is in use by another process; wait for it, or choose another output")]
    InUse {
        /// The journal.
        path: PathBuf,
    },
    /// It belongs to other work.
    #[error(
        "`{path}` belongs to other work: {field} is {found} there and {expected} now; choose another output, or remove it to start again"
    )]
    OtherWork {
        /// The journal.
        path: PathBuf,
        /// What differs first.
        field: String,
        /// As the journal has it.
        found: String,
        /// As this run has it.
        expected: String,
    },
    /// A line in the middle is damaged.
    #[error(
        "`{path}` line {line} is no record of this program ({reason}); restore it, or remove it to start again"
    )]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What the parser says.
        reason: String,
    },
}

/// An open journal, locked against other processes.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens the journal of some work, which `work` describes, or begins one. Gives the records that are in it.
    ///
    /// # Errors
    /// If it is in use, of other work, or damaged before its last line.
    pub fn open<R: DeserializeOwned>(
        path: &Path,
        work: &impl Serialize,
    ) -> Result<(Self, Vec<R>), JournalError> {
        let io = |source| JournalError::Io { path: path.to_owned(), source };
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(JournalError::InUse { path: path.to_owned() });
            }
            Err(std::fs::TryLockError::Error(source)) => return Err(io(source)),
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io)?;
        // Every record ends with its line: what follows the last line end was cut off while it was written.
        let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64).map_err(io)?;
        file.seek(SeekFrom::End(0)).map_err(io)?;
        let mut journal = Self { path: path.to_owned(), file };
        let damaged = |line: usize, e: serde_json::Error| JournalError::Damaged {
            path: path.to_owned(),
            line: line + 1,
            reason: e.to_string(),
        };
        let work = serde_json::to_value(work).map_err(|e| damaged(0, e))?;
        let mut lines =
            bytes[..whole].split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).enumerate();
        let Some((_, first)) = lines.next() else {
            journal.append(&work)?;
            return Ok((journal, Vec::new()));
        };
        let found: serde_json::Value = serde_json::from_slice(first).map_err(|e| damaged(0, e))?;
        if let Some((field, found, expected)) = first_difference(&found, &work) {
            return Err(JournalError::OtherWork { path: path.to_owned(), field, found, expected });
        }
        let records = lines.map(|(i, line)| serde_json::from_slice(line).map_err(|e| damaged(i, e)));
        let records = records.collect::<Result<_, _>>()?;
        Ok((journal, records))
    }

    /// Adds a record and waits until it is on the disk.
    ///
    /// # Errors
    /// The system's own.
    pub fn append(&mut self, record: &impl Serialize) -> Result<(), JournalError> {
        let io = |source| JournalError::Io { path: self.path.clone(), source };
        let mut line = serde_json::to_vec(record).map_err(|e| io(e.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).and_then(|()| self.file.sync_data()).map_err(io)
    }
}

/// The first field by which two JSON objects differ, and what each has there.
fn first_difference(
    found: &serde_json::Value,
    expected: &serde_json::Value,
) -> Option<(String, String, String)> {
    let text = |value: Option<&serde_json::Value>| value.map_or("absent".to_owned(), ToString::to_string);
    let (Some(found), Some(expected)) = (found.as_object(), expected.as_object()) else {
        return (found != expected).then(|| ("it".into(), found.to_string(), expected.to_string()));
    };
    let keys = expected.keys().chain(found.keys());
    let mut differing = keys.filter(|key| found.get(*key) != expected.get(*key));
    differing.next().map(|key| (format!("`{key}`"), text(found.get(key)), text(expected.get(key))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_cut_off_by_a_crash_is_done_again_and_none_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let work = serde_json::json!({ "label": "x", "n": 1 });
        let (mut journal, records) = Journal::open::<u32>(&path, &work).unwrap();
        assert!(records.is_empty());
        for n in [7, 8, 9] {
            journal.append(&n).unwrap();
        }
        assert!(matches!(Journal::open::<u32>(&path, &work), Err(JournalError::InUse { .. })));
        drop(journal);
        let whole = std::fs::read(&path).unwrap();
        let header = whole.iter().position(|&b| b == b'\n').unwrap() + 1;
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (mut journal, records) = Journal::open::<u32>(&path, &work).unwrap();
            let n_whole = cut.saturating_sub(header) / 2;
            assert_eq!(records, [7, 8, 9][..n_whole], "cut at {cut}");
            journal.append(&1).unwrap();
            drop(journal);
            let (_, records) = Journal::open::<u32>(&path, &work).unwrap();
            assert_eq!(records.len(), n_whole + 1, "cut at {cut}");
        }
    }

    #[test]
    fn other_work_and_damage_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        drop(Journal::open::<u32>(&path, &serde_json::json!({ "label": "x" })).unwrap());
        let other =
            Journal::open::<u32>(&path, &serde_json::json!({ "label": "y" })).unwrap_err().to_string();
        assert!(other.contains("`label` is \"x\" there and \"y\" now"), "{other}");
        std::fs::write(&path, "{\"label\":\"x\"}\nno number\n3\n").unwrap();
        let damaged = Journal::open::<u32>(&path, &serde_json::json!({ "label": "x" })).unwrap_err();
        assert!(matches!(damaged, JournalError::Damaged { line: 2, .. }), "{damaged}");
    }
}
