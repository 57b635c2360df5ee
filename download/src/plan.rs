//! Which files a request means, where they go, and which of them are there.

use std::fs;
use std::path::{Path, PathBuf};

use reqwest::Url;

use crate::Downloader;
use crate::catalogue::{Target, target, targets};
use crate::digest::{Digest, Hasher};
use crate::error::DownloadError;
use crate::http::shown;
use crate::hub::{Cache, Entry, Folder, Hub, Listing, collect, foreign, nearest};
use crate::part::{BUFFER_BYTES, PART_SUFFIX, beside};
use crate::progress::{Event, Observer};
use crate::reference::{HubReference, Reference, fits, is_safe_path};
use crate::transfer::Item;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The source.
    pub reference: Reference,
    /// Only files of a repository that fit one of these patterns; all if empty.
    pub include: Vec<String>,
    /// But none that fits one of these.
    pub exclude: Vec<String>,
    /// Where the files go.
    pub destination: Destination,
    /// What a single file must hash to.
    pub sha256: Option<Digest>,
}

/// Where files go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// The hub cache; the current folder for files that are not of the hub.
    Cache,
    /// Real files in a folder.
    Folder(PathBuf),
}

/// The files that a request means.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The source, for reports: `hf:ORG/NAME@COMMIT` or an address.
    pub source: String,
    /// The files.
    pub files: Vec<PlannedFile>,
    /// The file, or the folder that holds all of them.
    pub place: PathBuf,
    pub(crate) layout: Layout,
}

/// One file of a plan.
#[derive(Debug, Clone)]
pub struct PlannedFile {
    /// Path in the repository, or name.
    pub path: String,
    /// Where it will be found.
    pub target: PathBuf,
    /// Size, if it was told.
    pub n_bytes: Option<u64>,
    /// What it must hash to, if it was told.
    pub digest: Option<Digest>,
    /// How much of it is there.
    pub state: FileState,
    pub(crate) item: Option<Item>,
}

/// How much of a file is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    /// Nothing.
    Absent,
    /// A part file, which will be gone on with.
    Begun,
    /// All of it.
    Present,
}

/// What is to be done after the files have come.
#[derive(Debug, Clone)]
pub(crate) enum Layout {
    Cache { cache: Cache, commit: String, revision: String, links: bool },
    Folder { folder: Folder, commit: Option<String> },
}

/// What is known of a repository's file.
struct Known {
    path: String,
    n_bytes: Option<u64>,
    digest: Option<Digest>,
}

impl From<Entry> for Known {
    fn from(entry: Entry) -> Self {
        Self { path: entry.path, n_bytes: Some(entry.n_bytes), digest: Some(entry.digest) }
    }
}

impl Plan {
    /// Bytes of all files whose size is known.
    pub fn n_bytes(&self) -> u64 {
        self.files.iter().filter_map(|file| file.n_bytes).sum()
    }
}

impl Downloader {
    /// Finds out which files are meant, where they go and which are there. Fetches none of them.
    ///
    /// # Errors
    /// If the source does not exist, cannot be read or has no such file; if another program's unfinished download or a
    /// different file is in the way.
    pub fn plan(&self, request: &Request, observer: &dyn Observer) -> Result<Plan, DownloadError> {
        match &request.reference {
            Reference::Url(url) => self.plan_url(request, url, observer),
            Reference::Hub(reference) => self.plan_hub(request, reference, None, observer),
            Reference::Target(name) => {
                let target = target(name).ok_or_else(|| unknown_target(name))?;
                let reference = HubReference {
                    repository: target.repository.clone(),
                    path: target
                        .files
                        .first()
                        .filter(|_| target.files.len() == 1)
                        .map(|file| file.path.clone()),
                    revision: target.revision.clone().unwrap_or_else(|| "main".to_owned()),
                };
                self.plan_hub(request, &reference, Some(target), observer)
            }
        }
    }

    fn plan_url(&self, request: &Request, url: &Url, observer: &dyn Observer) -> Result<Plan, DownloadError> {
        let name = url.path_segments().and_then(|mut segments| segments.next_back()).unwrap_or_default();
        if name.is_empty() || !is_safe_path(name) {
            return Err(DownloadError::Reference {
                given: shown(url),
                problem: "its path ends in no file name".to_owned(),
            });
        }
        let folder = Folder(match &request.destination {
            Destination::Folder(folder) => folder.clone(),
            Destination::Cache => PathBuf::from("."),
        });
        let known = Known { path: name.to_owned(), n_bytes: None, digest: request.sha256.clone() };
        let source = shown(url);
        let target = folder.target(name);
        if self.settings.offline && !target.exists() {
            return Err(DownloadError::Offline { wanted: source, looked_in: folder.0 });
        }
        let file = self.plan_file(&folder, known, source.clone(), url.clone(), observer)?;
        Ok(Plan { source, place: target, files: vec![file], layout: Layout::Folder { folder, commit: None } })
    }

    fn plan_hub(
        &self,
        request: &Request,
        reference: &HubReference,
        target: Option<&Target>,
        observer: &dyn Observer,
    ) -> Result<Plan, DownloadError> {
        if self.settings.offline {
            return self.plan_offline(request, reference, target, observer);
        }
        let hub = Hub { client: &self.client, settings: &self.settings, observer };
        let (commit, mut files) = if let Some(path) = &reference.path {
            one_file(&hub, reference, path)?
        } else {
            let Listing { commit, entries } = hub.list(&reference.repository, &reference.revision)?;
            let n_files = entries.len();
            let files = select(entries, request, target);
            if files.is_empty() {
                return Err(DownloadError::NothingSelected {
                    repository: reference.repository.clone(),
                    revision: reference.revision.clone(),
                    n_files,
                });
            }
            (commit, files)
        };
        for file in &mut files {
            expect(file, target, request)?;
        }
        self.lay_out(request, reference, &hub, commit, files, observer)
    }

    fn lay_out(
        &self,
        request: &Request,
        reference: &HubReference,
        hub: &Hub<'_>,
        commit: String,
        files: Vec<Known>,
        observer: &dyn Observer,
    ) -> Result<Plan, DownloadError> {
        let repository = &reference.repository;
        let source = |path: &str| HubReference::file(repository, path, &commit);
        let url = |path: &str| hub.file_url(repository, path, &commit);
        let (folder, layout) = match &request.destination {
            Destination::Folder(folder) => {
                let folder = Folder(folder.clone());
                (folder.0.clone(), Layout::Folder { folder, commit: Some(commit.clone()) })
            }
            Destination::Cache => {
                let cache = Cache::new(&self.settings.cache, repository);
                let links = self.settings.use_links && cache.can_link();
                if self.settings.use_links && !links && self.settings.warn_without_links {
                    observer.event(&Event::Warning(
                        "links cannot be made in the cache: files are put where links would be, and a file that two revisions share takes its room twice",
                    ));
                }
                let revision = reference.revision.clone();
                (cache.snapshot(&commit), Layout::Cache { cache, commit: commit.clone(), revision, links })
            }
        };
        let mut planned = Vec::with_capacity(files.len());
        for file in files {
            let (source, url) = (source(&file.path), url(&file.path));
            planned.push(match &layout {
                Layout::Folder { folder, .. } => self.plan_file(folder, file, source, url, observer)?,
                Layout::Cache { cache, links, .. } => {
                    let place = folder.join(&file.path);
                    self.plan_blob(cache, file, source, url, (*links, &place))?
                }
            });
        }
        let place = match planned.as_slice() {
            [file] => file.target.clone(),
            _ => folder,
        };
        Ok(Plan { source: format!("hf:{repository}@{commit}"), files: planned, place, layout })
    }

    /// A file of the cache: the blob is named by its digest.
    fn plan_blob(
        &self,
        cache: &Cache,
        known: Known,
        source: String,
        url: Url,
        (links, place): (bool, &Path),
    ) -> Result<PlannedFile, DownloadError> {
        let Some(digest) = known.digest.clone() else {
            return Err(DownloadError::Answer {
                host: crate::http::host(&url),
                what: shown(&url),
                problem: "it tells no ETag, which names the file in the cache; give --local-dir".to_owned(),
            });
        };
        let blob = if links { cache.blob(&digest) } else { place.to_owned() };
        let found = blob.metadata().ok().map(|found| found.len());
        let present = found.is_some_and(|found| known.n_bytes.is_none_or(|wanted| wanted == found));
        if let Some(found) = found.filter(|_| !present && !self.settings.overwrite) {
            let problem = format!("it has {found} bytes, expected {}", known.n_bytes.unwrap_or(0));
            return Err(DownloadError::Exists { path: blob, problem });
        }
        let record = Some(cache.record(&digest));
        self.planned(known, source, url, place.to_owned(), blob, record, present, None)
    }

    /// A file of a folder.
    fn plan_file(
        &self,
        folder: &Folder,
        known: Known,
        source: String,
        url: Url,
        observer: &dyn Observer,
    ) -> Result<PlannedFile, DownloadError> {
        let target = folder.target(&known.path);
        let present = match target.metadata() {
            Err(_) => false,
            Ok(_) if self.settings.overwrite => false,
            Ok(found) => {
                let noted = folder.noted(&known.path).map(|(_, digest)| digest);
                match existing(&target, found.len(), &known, noted.as_ref(), observer)? {
                    None => true,
                    Some(problem) => return Err(DownloadError::Exists { path: target, problem }),
                }
            }
        };
        let record = Some(folder.record(&known.path));
        let notes = folder.record(&known.path).parent().map(Path::to_owned);
        self.planned(known, source, url, target.clone(), target, record, present, notes.as_deref())
    }

    #[expect(clippy::too_many_arguments, reason = "the two layouts differ in each of them")]
    fn planned(
        &self,
        known: Known,
        source: String,
        url: Url,
        visible: PathBuf,
        target: PathBuf,
        record: Option<PathBuf>,
        present: bool,
        notes: Option<&Path>,
    ) -> Result<PlannedFile, DownloadError> {
        let begun = beside(&target, PART_SUFFIX).exists();
        let state = match (present, begun) {
            (true, _) => FileState::Present,
            (false, true) => FileState::Begun,
            (false, false) => FileState::Absent,
        };
        if !present
            && !self.settings.beside_foreign
            && let Some((found, program)) = foreign(&target, known.digest.as_ref(), notes)
        {
            return Err(DownloadError::Foreign { found, program });
        }
        let item = (!present).then(|| Item {
            name: known.path.clone(),
            source,
            url,
            n_bytes: known.n_bytes,
            digest: known.digest.clone(),
            target,
            record,
        });
        let Known { path, n_bytes, digest } = known;
        Ok(PlannedFile { path, target: visible, n_bytes, digest, state, item })
    }

    fn plan_offline(
        &self,
        request: &Request,
        reference: &HubReference,
        target: Option<&Target>,
        observer: &dyn Observer,
    ) -> Result<Plan, DownloadError> {
        let repository = &reference.repository;
        let cache = Cache::new(&self.settings.cache, repository);
        let commit = cache.commit_of(&reference.revision);
        let folder = match (&request.destination, &commit) {
            (Destination::Folder(folder), _) => folder.clone(),
            (Destination::Cache, Some(commit)) => cache.snapshot(commit),
            (Destination::Cache, None) => cache.folder(),
        };
        let mut paths = Vec::new();
        match &reference.path {
            Some(path) => paths.push(path.clone()),
            None => collect(&folder, "", &mut |path| {
                if !path.starts_with(".cache/") && selected(path, request, target) {
                    paths.push(path.to_owned());
                }
            }),
        }
        paths.sort();
        let absent = paths.iter().find(|path| !folder.join(path).exists());
        if paths.is_empty() || absent.is_some() {
            let wanted = absent.cloned().unwrap_or_else(|| format!("hf:{repository}@{}", reference.revision));
            return Err(DownloadError::Offline { wanted, looked_in: folder });
        }
        observer.event(&Event::Warning("offline: files are as they were when they came"));
        let files: Vec<_> = paths.into_iter().map(|path| here(&folder, path)).collect();
        let place = if let [file] = files.as_slice() { file.target.clone() } else { folder.clone() };
        let source = format!("hf:{repository}@{}", commit.as_deref().unwrap_or(&reference.revision));
        Ok(Plan { source, files, place, layout: Layout::Folder { folder: Folder(folder), commit } })
    }
}

/// A file that is there and is not asked about any further.
fn here(folder: &Path, path: String) -> PlannedFile {
    let target = folder.join(&path);
    let n_bytes = target.metadata().ok().map(|found| found.len());
    PlannedFile { path, target, n_bytes, digest: None, state: FileState::Present, item: None }
}

fn one_file(
    hub: &Hub<'_>,
    reference: &HubReference,
    path: &str,
) -> Result<(String, Vec<Known>), DownloadError> {
    let word = hub.file(reference, path)?;
    let commit = word.commit.unwrap_or_else(|| reference.revision.clone());
    Ok((commit, vec![Known { path: path.to_owned(), n_bytes: word.n_bytes, digest: word.digest }]))
}

fn selected(path: &str, request: &Request, target: Option<&Target>) -> bool {
    let any = |patterns: &[String]| patterns.iter().any(|pattern| fits(pattern, path));
    let named =
        target.is_none_or(|target| target.files.iter().any(|file| file.path == path) || any(&target.include));
    named && (request.include.is_empty() || any(&request.include)) && !any(&request.exclude)
}

fn select(entries: Vec<Entry>, request: &Request, target: Option<&Target>) -> Vec<Known> {
    entries.into_iter().filter(|entry| selected(&entry.path, request, target)).map(Known::from).collect()
}

/// Adds what the catalogue and the caller know of a file. Two digests that differ are two files.
fn expect(file: &mut Known, target: Option<&Target>, request: &Request) -> Result<(), DownloadError> {
    let listed = target.and_then(|target| target.files.iter().find(|listed| listed.path == file.path));
    let wanted = listed
        .and_then(|listed| Digest::from_hex(listed.sha256.as_deref()?))
        .or_else(|| request.sha256.clone());
    if let (Some(now), Some(wanted)) = (&file.digest, &wanted)
        && matches!(now, Digest::Sha256(_))
        && now != wanted
    {
        return Err(DownloadError::Changing {
            file: file.path.clone(),
            before: wanted.hex().to_owned(),
            now: now.hex().to_owned(),
        });
    }
    if let (Some(now), Some(wanted)) = (file.n_bytes, listed.and_then(|listed| listed.bytes))
        && now != wanted
    {
        let host = "the hub".to_owned();
        return Err(DownloadError::Size { file: file.path.clone(), host, found: now, expected: wanted });
    }
    file.digest = wanted.or_else(|| file.digest.take());
    file.n_bytes = file.n_bytes.or_else(|| listed.and_then(|listed| listed.bytes));
    Ok(())
}

/// Whether a file that is there is the one asked for; if not, how it differs.
fn existing(
    target: &Path,
    found_bytes: u64,
    known: &Known,
    noted: Option<&Digest>,
    observer: &dyn Observer,
) -> Result<Option<String>, DownloadError> {
    if let Some(wanted) = known.n_bytes.filter(|wanted| *wanted != found_bytes) {
        let cut = if found_bytes < wanted { ", as an interrupted curl or wget leaves it" } else { "" };
        return Ok(Some(format!("it has {found_bytes} bytes, expected {wanted}{cut}")));
    }
    let Some(expected) = &known.digest else {
        return Ok((noted.is_none() && known.n_bytes.is_none())
            .then(|| "there is nothing to compare it with".to_owned()));
    };
    if noted == Some(expected) {
        return Ok(None);
    }
    let found = digest_of(target, expected, found_bytes, observer)?;
    Ok((found != *expected)
        .then(|| format!("its {} is {}, expected {}", found.algorithm(), found.hex(), expected.hex())))
}

/// The digest of a file, by the algorithm of the expected one.
pub(crate) fn digest_of(
    path: &Path,
    expected: &Digest,
    n_bytes: u64,
    observer: &dyn Observer,
) -> Result<Digest, DownloadError> {
    use std::io::Read;
    let mut file = fs::File::open(path).map_err(DownloadError::io("open", path))?;
    let mut hasher = Hasher::new(Some(expected), n_bytes);
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut done_bytes = 0;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    loop {
        let n = file.read(&mut buffer).map_err(DownloadError::io("read", path))?;
        if n == 0 {
            return Ok(hasher.finish());
        }
        if observer.interrupted() {
            return Err(DownloadError::Interrupted { done_bytes, n_bytes });
        }
        hasher.update(&buffer[..n]);
        done_bytes += n as u64;
        observer.event(&Event::Checking { file: &name, done_bytes, n_bytes });
    }
}

fn unknown_target(name: &str) -> DownloadError {
    let near = nearest(name, targets().iter().map(|target| target.name.as_str()));
    let problem = match near.as_slice() {
        [] => "there is no target of this name".to_owned(),
        near => format!("there is no target of this name; similar ones: {}", near.join(", ")),
    };
    DownloadError::Reference { given: name.to_owned(), problem }
}
