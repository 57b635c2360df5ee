//! Reading downloaded files again: which are as they were announced, which pieces are not, what is missing; and fetching
//! only that.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::Downloader;
use crate::digest::{Digest, Hasher};
use crate::error::DownloadError;
use crate::hub::{Cache, Folder, Hub, collect};
use crate::part::{BUFFER_BYTES, JOURNAL_SUFFIX, PART_SUFFIX, beside};
use crate::pieces::{Fingerprint, Geometry, Identity, Journal, Slot};
use crate::progress::{Event, Observer};
use crate::reference::{HubReference, Reference, fits};
use crate::transfer::{Item, fetch_all};

/// What `verify` is to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyOptions {
    /// Fetch what is missing or wrong.
    pub fetch: bool,
    /// What the folder should hold, for folders without a record of their own.
    pub from: Option<HubReference>,
    /// Of that, only files that fit one of these patterns; all if empty.
    pub include: Vec<String>,
}

/// What `verify` found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct VerifyReport {
    /// The folder.
    pub folder: PathBuf,
    /// Every file that should be there.
    pub files: Vec<VerifiedFile>,
}

impl VerifyReport {
    /// Whether everything is there and right, now.
    pub fn is_sound(&self) -> bool {
        self.files
            .iter()
            .all(|file| file.repaired || matches!(file.state, FileCheck::Right | FileCheck::Unchanged))
    }
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct VerifiedFile {
    /// Path within the folder.
    pub path: String,
    /// As it was found.
    pub state: FileCheck,
    /// Pieces that are not as they came, as byte ranges; known only of files with a record of their pieces.
    pub wrong_pieces: Vec<(u64, u64)>,
    /// Bytes found.
    pub n_bytes: u64,
    /// Digest found, in hexadecimal.
    pub digest: Option<String>,
    /// Whether it was fetched, wholly or in part, and is right now.
    pub repaired: bool,
}

/// How a file was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FileCheck {
    /// It has the announced digest.
    Right,
    /// No digest was ever announced; it is as it came.
    Unchanged,
    /// It has another digest, size or pieces.
    Wrong,
    /// It is not there.
    Missing,
    /// Nothing is known to compare it with.
    Unknown,
}

/// A file that should be there.
#[derive(Debug, Clone)]
struct Candidate {
    path: String,
    target: PathBuf,
    digest: Option<Digest>,
    n_bytes: Option<u64>,
    source: Option<String>,
    record: PathBuf,
}

/// What is in a file.
struct Contents {
    n_bytes: u64,
    digest: Digest,
    geometry: Geometry,
    /// Of every piece, and whether the record agrees, if there is one.
    pieces: Vec<(u128, Option<bool>)>,
}

impl Downloader {
    /// Reads every file that a folder should hold. Wrong pieces and missing files are fetched if asked for; nothing else is.
    ///
    /// # Errors
    /// [`DownloadError::NoRecord`] if nothing says what the folder should hold; else as [`Downloader::fetch`].
    pub fn verify(
        &self,
        folder: &Path,
        options: &VerifyOptions,
        observer: &dyn Observer,
    ) -> Result<VerifyReport, DownloadError> {
        let candidates = self.candidates(folder, options, observer)?;
        if candidates.is_empty() {
            return Err(DownloadError::NoRecord { folder: folder.to_owned() });
        }
        let mut files = Vec::with_capacity(candidates.len());
        let mut items: Vec<(usize, Item)> = Vec::new();
        for candidate in &candidates {
            let contents = read(candidate, self.settings.piece_bytes, observer)?;
            let file = judge(candidate, contents.as_ref(), observer);
            let broken = matches!(file.state, FileCheck::Wrong | FileCheck::Missing);
            if broken
                && options.fetch
                && !self.settings.offline
                && let Some(item) = self.item(candidate)
            {
                if let Some(contents) = contents.filter(|_| candidate.target.exists()) {
                    take_apart(candidate, &contents)?;
                }
                items.push((files.len(), item));
            }
            files.push(file);
        }
        let (positions, mut items): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        // Two names of one blob need it once.
        let mut targets = BTreeSet::new();
        items.retain(|item| targets.insert(item.target.clone()));
        if !items.is_empty() {
            fetch_all(&self.client, &self.settings, &items, observer)?;
            for position in positions {
                files[position].repaired = true;
            }
        }
        Ok(VerifyReport { folder: folder.to_owned(), files })
    }

    fn candidates(
        &self,
        folder: &Path,
        options: &VerifyOptions,
        observer: &dyn Observer,
    ) -> Result<Vec<Candidate>, DownloadError> {
        let full = folder.canonicalize().map_err(DownloadError::io("look at", folder))?;
        let mut found = match Cache::around(&full) {
            Some((cache, repository)) => in_cache(&full, &cache, &repository),
            None => in_folder(folder),
        };
        if let Some(reference) = &options.from {
            let hub = Hub { client: &self.client, settings: &self.settings, observer };
            let listing = hub.list(&reference.repository, &reference.revision)?;
            let known: BTreeSet<_> =
                found.iter().filter(|c| c.source.is_some()).map(|c| c.path.clone()).collect();
            for entry in listing.entries {
                let named = reference.path.as_ref().is_none_or(|path| *path == entry.path);
                let fit = options.include.is_empty() || options.include.iter().any(|p| fits(p, &entry.path));
                if !named || !fit || known.contains(&entry.path) {
                    continue;
                }
                found.retain(|candidate| candidate.path != entry.path);
                let notes = Folder(folder.to_owned());
                found.push(Candidate {
                    target: notes.target(&entry.path),
                    record: notes.record(&entry.path),
                    source: Some(HubReference::file(&reference.repository, &entry.path, &listing.commit)),
                    digest: Some(entry.digest),
                    n_bytes: Some(entry.n_bytes),
                    path: entry.path,
                });
            }
        }
        Ok(found)
    }

    fn item(&self, candidate: &Candidate) -> Option<Item> {
        let source = candidate.source.clone()?;
        let url = match Reference::parse(&source).ok()? {
            Reference::Url(url) => url,
            Reference::Hub(HubReference { repository, path, revision }) => {
                let hub = Hub {
                    client: &self.client,
                    settings: &self.settings,
                    observer: &crate::progress::Silent,
                };
                hub.file_url(&repository, &path?, &revision)
            }
            Reference::Target(_) => return None,
        };
        Some(Item {
            name: candidate.path.clone(),
            source,
            url,
            n_bytes: candidate.n_bytes,
            digest: candidate.digest.clone(),
            target: candidate.target.clone(),
            record: Some(candidate.record.clone()),
        })
    }
}

/// Files of snapshots: links to blobs that are named by their digests, or real files that a record names.
fn in_cache(folder: &Path, cache: &Cache, repository: &str) -> Vec<Candidate> {
    let records: BTreeMap<String, (Identity, PathBuf)> = {
        let mut records = BTreeMap::new();
        let place = cache.folder().join(".ggsmith");
        collect(&place, "", &mut |name| {
            let path = place.join(name);
            if let Some(identity) = name.ends_with(JOURNAL_SUFFIX).then(|| identity(&path)).flatten() {
                records.insert(identity.source.clone(), (identity, path));
            }
        });
        records
    };
    let snapshots = cache.folder().join("snapshots");
    let commits: Vec<String> =
        if let Some(commit) = folder.strip_prefix(&snapshots).ok().and_then(|rest| rest.iter().next()) {
            vec![commit.to_string_lossy().into_owned()]
        } else {
            let entries = fs::read_dir(&snapshots).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
    let mut found = Vec::new();
    for commit in commits {
        let snapshot = cache.snapshot(&commit);
        collect(&snapshot, "", &mut |path| {
            let place = snapshot.join(path);
            let source = HubReference::file(repository, path, &commit);
            let blob = fs::read_link(&place)
                .ok()
                .and_then(|goal| Digest::from_hex(&goal.file_name()?.to_string_lossy()));
            let record = records.get(&source);
            let digest = blob.clone().or_else(|| record.and_then(|(identity, _)| identity.digest.clone()));
            found.push(Candidate {
                path: path.to_owned(),
                target: blob.as_ref().map_or(place, |digest| cache.blob(digest)),
                n_bytes: record.map(|(identity, _)| identity.n_bytes),
                record: match (record, &digest) {
                    (Some((_, path)), _) => path.clone(),
                    (None, Some(digest)) => cache.record(digest),
                    (None, None) => cache.folder().join(".ggsmith").join("unknown"),
                },
                digest,
                source: Some(source),
            });
        });
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Files of a folder: those with a record of their pieces, and those that the hub's tool has noted.
fn in_folder(folder: &Path) -> Vec<Candidate> {
    let notes = Folder(folder.to_owned());
    let mut found: BTreeMap<String, Candidate> = BTreeMap::new();
    for path in notes.with_metadata() {
        let candidate = Candidate {
            target: notes.target(&path),
            digest: notes.noted(&path).map(|(_, digest)| digest),
            n_bytes: None,
            source: None,
            record: notes.record(&path),
            path: path.clone(),
        };
        found.insert(path, candidate);
    }
    for path in notes.with_records() {
        let Some(identity) = identity(&notes.record(&path)) else { continue };
        let candidate = Candidate {
            target: notes.target(&path),
            record: notes.record(&path),
            digest: identity.digest,
            n_bytes: Some(identity.n_bytes),
            source: Some(identity.source),
            path: path.clone(),
        };
        found.insert(path, candidate);
    }
    found.into_values().collect()
}

fn identity(record: &Path) -> Option<Identity> {
    Journal::read(record)?.identity()
}

/// Reads a whole file; `None` if it is not there.
fn read(
    candidate: &Candidate,
    piece_bytes: u32,
    observer: &dyn Observer,
) -> Result<Option<Contents>, DownloadError> {
    let path = &candidate.target;
    let Ok(mut file) = File::open(path) else { return Ok(None) };
    let n_bytes = file.metadata().map_err(DownloadError::io("look at", path))?.len();
    let journal = Journal::read(&candidate.record);
    let identity =
        journal.as_ref().and_then(Journal::identity).filter(|identity| identity.digest == candidate.digest);
    let geometry = match &identity {
        Some(identity) => identity.geometry(),
        None => Geometry { n_bytes: candidate.n_bytes.unwrap_or(n_bytes), piece_bytes },
    };
    let slots = match (&journal, &identity) {
        (Some(journal), Some(_)) => Some(journal.slots(geometry)),
        _ => None,
    };
    let mut hasher = Hasher::new(candidate.digest.as_ref(), n_bytes);
    let mut pieces = Vec::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut at = 0;
    // Pieces as they should be; what lies behind them only counts for the digest.
    for piece in 0..geometry.n_pieces() {
        let range = geometry.range(piece);
        let mut fingerprint = Fingerprint::new();
        while at < range.end {
            let limit = BUFFER_BYTES.min((range.end - at) as usize);
            let n = file.read(&mut buffer[..limit]).map_err(DownloadError::io("read", path))?;
            if n == 0 {
                break;
            }
            hasher.update(&buffer[..n]);
            fingerprint.update(&buffer[..n]);
            at += n as u64;
        }
        let whole = at == range.end;
        let agrees = slots.as_ref().map(|slots| {
            let slot = slots[piece];
            whole && slot.done == geometry.len(piece) && slot.fingerprint == fingerprint.value()
        });
        pieces.push((fingerprint.value(), if whole { agrees } else { Some(false) }));
        observer.event(&Event::Checking { file: &candidate.path, done_bytes: at, n_bytes });
        if observer.interrupted() {
            return Err(DownloadError::Interrupted { done_bytes: at, n_bytes });
        }
    }
    loop {
        let n = file.read(&mut buffer).map_err(DownloadError::io("read", path))?;
        if n == 0 {
            break;
        }
        hasher.update(&buffer[..n]);
    }
    Ok(Some(Contents { n_bytes, digest: hasher.finish(), geometry, pieces }))
}

fn judge(candidate: &Candidate, contents: Option<&Contents>, observer: &dyn Observer) -> VerifiedFile {
    let mut file = VerifiedFile {
        path: candidate.path.clone(),
        state: FileCheck::Missing,
        wrong_pieces: Vec::new(),
        n_bytes: 0,
        digest: None,
        repaired: false,
    };
    let Some(contents) = contents else { return file };
    file.n_bytes = contents.n_bytes;
    file.digest = Some(contents.digest.hex().to_owned());
    let right_size = candidate.n_bytes.is_none_or(|expected| expected == contents.n_bytes);
    let recorded = contents.pieces.iter().all(|(_, agrees)| agrees.is_some());
    let unchanged = right_size && contents.pieces.iter().all(|(_, agrees)| *agrees == Some(true));
    file.state = match &candidate.digest {
        Some(expected) if *expected == contents.digest => FileCheck::Right,
        Some(_) => FileCheck::Wrong,
        None if recorded && unchanged => FileCheck::Unchanged,
        None if recorded => FileCheck::Wrong,
        None => FileCheck::Unknown,
    };
    if file.state == FileCheck::Wrong {
        for (piece, _) in contents.pieces.iter().enumerate().filter(|(_, (_, agrees))| *agrees == Some(false))
        {
            let range = contents.geometry.range(piece);
            file.wrong_pieces.push((range.start, range.end));
            observer.event(&Event::WrongPiece {
                file: &candidate.path,
                piece,
                n_pieces: contents.pieces.len(),
                start: range.start,
                end: range.end,
                reason: "it is not as it came",
            });
        }
    }
    file
}

/// Makes a wrong file a part file again, whose journal has the pieces that are right; or all of them, if nothing tells
/// which are.
fn take_apart(candidate: &Candidate, contents: &Contents) -> Result<(), DownloadError> {
    let part = beside(&candidate.target, PART_SUFFIX);
    let journal = Journal::open(&beside(&candidate.target, JOURNAL_SUFFIX), &part)?;
    let Contents { geometry, pieces, .. } = contents;
    let source = candidate.source.clone().unwrap_or_default();
    journal.start(&Identity::new(source, *geometry, candidate.digest.clone(), None))?;
    for (piece, (fingerprint, agrees)) in pieces.iter().enumerate() {
        if *agrees != Some(false) {
            journal.put(piece, Slot { done: geometry.len(piece), fingerprint: *fingerprint })?;
        }
    }
    fs::rename(&candidate.target, &part).map_err(DownloadError::io("rename", &candidate.target))
}
