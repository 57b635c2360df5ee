//! Where files of the hub go: its cache, or a folder with the hub tool's notes in it.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::digest::Digest;
use crate::error::DownloadError;
use crate::part::{JOURNAL_SUFFIX, beside};

/// Folder of a repository in the hub cache:
/// `models--ORG--NAME/{refs/REV, blobs/ETAG, snapshots/COMMIT/PATH -> ../../blobs/ETAG}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cache {
    root: PathBuf,
    /// `models--ORG--NAME`.
    name: String,
}

impl Cache {
    pub(crate) fn new(root: &Path, repository: &str) -> Self {
        Self { root: root.to_owned(), name: format!("models--{}", repository.replace('/', "--")) }
    }

    /// The repository folder that a path lies in, and the repository's name.
    pub(crate) fn around(path: &Path) -> Option<(Self, String)> {
        path.ancestors().find_map(|folder| {
            let name = folder.file_name()?.to_str()?;
            let repository = name.strip_prefix("models--")?.replacen("--", "/", 1);
            Some((Self { root: folder.parent()?.to_owned(), name: name.to_owned() }, repository))
        })
    }

    pub(crate) fn folder(&self) -> PathBuf {
        self.root.join(&self.name)
    }

    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.folder().join("blobs").join(digest.hex())
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    /// Where the record of a blob's pieces is kept.
    pub(crate) fn record(&self, digest: &Digest) -> PathBuf {
        self.folder().join(".ggsmith").join(format!("{}{JOURNAL_SUFFIX}", digest.hex()))
    }

    /// The commit that a branch or tag was at when it was last asked for.
    pub(crate) fn commit_of(&self, revision: &str) -> Option<String> {
        if super::is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = fs::read_to_string(self.folder().join("refs").join(revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| super::is_commit(commit))
    }

    /// Notes the commit of a branch or tag.
    pub(crate) fn note_revision(&self, revision: &str, commit: &str) -> Result<(), DownloadError> {
        if super::is_commit(revision) || !crate::reference::is_safe_path(revision) {
            return Ok(());
        }
        write_text(&self.folder().join("refs").join(revision), commit)
    }

    /// Excludes the hub's own tool and other processes from a blob, by the lock that it uses.
    pub(crate) fn lock(&self, digest: &Digest) -> Result<File, DownloadError> {
        let path = self.root.join(".locks").join(&self.name).join(format!("{}.lock", digest.hex()));
        let folder = path.parent().expect("a file in a folder");
        fs::create_dir_all(folder).map_err(DownloadError::io("make the folder", folder))?;
        let file = File::create(&path).map_err(DownloadError::io("make", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(file),
            Err(fs::TryLockError::WouldBlock) => Err(DownloadError::Locked { part: self.blob(digest) }),
            Err(fs::TryLockError::Error(source)) => Err(DownloadError::Io { action: "lock", path, source }),
        }
    }

    /// Whether links can be made here. Asked once, before any connection starts.
    pub(crate) fn can_link(&self) -> bool {
        let folder = self.folder();
        let probe = folder.join(format!(".ggsmith-link-{}", std::process::id()));
        let made = fs::create_dir_all(&folder).is_ok() && symlink("nowhere", &probe).is_ok();
        made && fs::remove_file(&probe).is_ok()
    }

    /// Links a file of a snapshot to its blob.
    pub(crate) fn link(&self, commit: &str, path: &str, digest: &Digest) -> Result<(), DownloadError> {
        let place = self.snapshot(commit).join(path);
        let folder = place.parent().expect("a file in a folder");
        fs::create_dir_all(folder).map_err(DownloadError::io("make the folder", folder))?;
        // snapshots/COMMIT and the folders of the path itself.
        let up = "../".repeat(2 + path.matches('/').count());
        let goal = PathBuf::from(format!("{up}blobs/{}", digest.hex()));
        replace_link(&goal, &place)
    }
}

/// Puts a link where perhaps another is, in one step.
///
/// # Errors
/// If the file system has no links, or the folder cannot be written.
pub fn replace_link(goal: &Path, place: &Path) -> Result<(), DownloadError> {
    if fs::read_link(place).is_ok_and(|found| found == goal) {
        return Ok(());
    }
    let fresh = beside(place, ".ggsmith-link");
    let made = match symlink(goal, &fresh) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(&fresh).and_then(|()| symlink(goal, &fresh))
        }
        other => other,
    };
    made.and_then(|()| fs::rename(&fresh, place)).map_err(DownloadError::io("link", place))
}

/// A folder with real files, and the hub tool's notes under `.cache/huggingface/download`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Folder(pub(crate) PathBuf);

/// What the hub's tool notes of a file: commit, ETag, time.
const METADATA_SUFFIX: &str = ".metadata";

impl Folder {
    pub(crate) fn notes(&self) -> PathBuf {
        self.0.join(".cache/huggingface/download")
    }

    pub(crate) fn target(&self, path: &str) -> PathBuf {
        self.0.join(path)
    }

    /// Where the record of a file's pieces is kept.
    pub(crate) fn record(&self, path: &str) -> PathBuf {
        self.notes().join(format!("{path}{JOURNAL_SUFFIX}"))
    }

    /// The digest and the commit that a file was noted with.
    pub(crate) fn noted(&self, path: &str) -> Option<(String, Digest)> {
        let text = fs::read_to_string(self.notes().join(format!("{path}{METADATA_SUFFIX}"))).ok()?;
        let mut lines = text.lines();
        let commit = lines.next()?.trim().to_owned();
        Some((commit, Digest::from_hex(lines.next()?)?))
    }

    /// Notes a file as the hub's tool does.
    pub(crate) fn note(&self, path: &str, commit: &str, digest: &Digest) -> Result<(), DownloadError> {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let text = format!("{commit}\n{}\n{seconds}\n", digest.hex());
        write_text(&self.notes().join(format!("{path}{METADATA_SUFFIX}")), &text)
    }

    /// Paths of all files that have a note with this suffix, relative to the folder.
    pub(crate) fn with_notes(&self, suffix: &str) -> Vec<String> {
        let mut found = Vec::new();
        collect(&self.notes(), "", &mut |path| {
            found.extend(path.strip_suffix(suffix).map(str::to_owned));
        });
        found.sort();
        found
    }

    /// Those with a note of the hub's tool.
    pub(crate) fn with_metadata(&self) -> Vec<String> {
        self.with_notes(METADATA_SUFFIX)
    }

    /// Those with a record of their pieces.
    pub(crate) fn with_records(&self) -> Vec<String> {
        self.with_notes(JOURNAL_SUFFIX)
    }
}

/// Calls `take` with the relative path of every file below a folder. What cannot be read is left out.
pub(crate) fn collect(folder: &Path, relative: &str, take: &mut dyn FnMut(&str)) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if relative.is_empty() { name } else { format!("{relative}/{name}") };
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), &path, take);
        } else {
            take(&path);
        }
    }
}

fn write_text(path: &Path, text: &str) -> Result<(), DownloadError> {
    let folder = path.parent().expect("a file in a folder");
    fs::create_dir_all(folder).map_err(DownloadError::io("make the folder", folder))?;
    let fresh = beside(path, ".ggsmith-new");
    fs::write(&fresh, text).and_then(|()| fs::rename(&fresh, path)).map_err(DownloadError::io("write", path))
}

/// Unfinished downloads of other programs: what ends the name, and who does that.
const FOREIGN: [(&str, &str); 6] = [
    (".aria2", "aria2"),
    (".part", "curl in ds4's script, or of a browser"),
    (".crdownload", "a browser"),
    (".partial", "a download tool"),
    (".download", "a download tool"),
    (".incomplete", "the hub's own tool"),
];

/// Looks for another program's unfinished download of this file. `notes`: where the hub's tool keeps its own.
pub(crate) fn foreign(
    target: &Path,
    digest: Option<&Digest>,
    notes: Option<&Path>,
) -> Option<(PathBuf, &'static str)> {
    let direct = FOREIGN.iter().map(|(suffix, program)| (beside(target, suffix), *program));
    let mut found = direct.filter(|(path, _)| path.exists());
    if let Some(found) = found.next() {
        return Some(found);
    }
    let ending = format!(".{}.incomplete", digest?.hex());
    let entries = fs::read_dir(notes?).ok()?;
    let ends =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(&ending));
    entries.flatten().map(|entry| entry.path()).find(ends).map(|path| (path, "the hub's own tool"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_has_the_hub_tools_names_and_links() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::new(root.path(), "org/name");
        let digest = Digest::Sha256("ab".repeat(32));
        let commit = "c".repeat(40);
        fs::create_dir_all(cache.folder().join("blobs")).unwrap();
        fs::write(cache.blob(&digest), "x").unwrap();
        cache.link(&commit, "sub/file.gguf", &digest).unwrap();
        cache.link(&commit, "sub/file.gguf", &digest).unwrap();
        let place = root.path().join(format!("models--org--name/snapshots/{commit}/sub/file.gguf"));
        assert_eq!(fs::read_to_string(&place).unwrap(), "x");
        assert_eq!(fs::read_link(&place).unwrap(), PathBuf::from(format!("../../../blobs/{}", digest.hex())));
        cache.note_revision("main", &commit).unwrap();
        assert_eq!(cache.commit_of("main"), Some(commit.clone()));
        assert_eq!(cache.commit_of("other"), None);
        assert!(cache.can_link());
        let lock = cache.lock(&digest).unwrap();
        assert!(matches!(cache.lock(&digest), Err(DownloadError::Locked { .. })));
        drop(lock);
        assert_eq!(Cache::around(&place), Some((cache, "org/name".to_owned())));
    }

    #[test]
    fn notes_are_those_of_the_hub_tool() {
        let root = tempfile::tempdir().unwrap();
        let folder = Folder(root.path().to_owned());
        let digest = Digest::GitBlob("ab".repeat(20));
        let commit = "c".repeat(40);
        folder.note("sub/config.json", &commit, &digest).unwrap();
        let note = root.path().join(".cache/huggingface/download/sub/config.json.metadata");
        let text = fs::read_to_string(note).unwrap();
        assert!(text.starts_with(&format!("{commit}\n{}\n1", digest.hex())), "{text}");
        assert_eq!(folder.noted("sub/config.json"), Some((commit, digest)));
        assert_eq!(folder.with_metadata(), ["sub/config.json"]);
    }

    #[test]
    fn unfinished_downloads_of_others_are_found() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("m.gguf");
        let digest = Digest::Sha256("ab".repeat(32));
        assert_eq!(foreign(&target, Some(&digest), Some(root.path())), None);
        let theirs = root.path().join(format!("xyz=.{}.incomplete", digest.hex()));
        fs::write(&theirs, "").unwrap();
        assert_eq!(foreign(&target, Some(&digest), Some(root.path())), Some((theirs, "the hub's own tool")));
        fs::write(root.path().join("m.gguf.aria2"), "").unwrap();
        assert_eq!(foreign(&target, None, None).unwrap().1, "aria2");
    }
}
