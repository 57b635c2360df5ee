//! The hub's interface: which files a repository has, and where each lies.

mod place;

use reqwest::Url;
use serde::Deserialize;

pub use place::replace_link;
pub(crate) use place::{Cache, Folder, collect, foreign};

use crate::digest::Digest;
use crate::error::DownloadError;
use crate::http::{Ask, Client, Trouble, host, read_text, shown};
use crate::probe::repeat;
use crate::progress::Observer;
use crate::reference::{HubReference, is_safe_path};
use crate::settings::Settings;

/// Most bytes of one page of a listing.
const MAX_PAGE_BYTES: u64 = 64 << 20;
/// Most pages of a listing: a server must not keep us asking for ever.
const MAX_PAGES: usize = 10_000;
/// Similar names that a message shows.
const MAX_NEAR: usize = 3;
/// Least similarity (Jaro-Winkler, 0 to 1) of a name worth showing.
const LEAST_SIMILARITY: f64 = 0.7;

/// One file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) path: String,
    pub(crate) n_bytes: u64,
    pub(crate) digest: Digest,
}

/// All files of a repository at a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) entries: Vec<Entry>,
}

/// What the hub says of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileWord {
    pub(crate) commit: Option<String>,
    pub(crate) n_bytes: Option<u64>,
    pub(crate) digest: Option<Digest>,
}

/// The hub, asked with these settings.
pub(crate) struct Hub<'a> {
    pub(crate) client: &'a Client,
    pub(crate) settings: &'a Settings,
    pub(crate) observer: &'a dyn Observer,
}

#[derive(Deserialize)]
struct RevisionAnswer {
    sha: String,
}

#[derive(Deserialize)]
struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    oid: String,
    size: u64,
}

impl Hub<'_> {
    /// Address of a file.
    pub(crate) fn file_url(&self, repository: &str, path: &str, revision: &str) -> Url {
        self.url(&[], repository, &["resolve", revision], path)
    }

    fn url(&self, before: &[&str], repository: &str, after: &[&str], path: &str) -> Url {
        let mut url = self.settings.endpoint.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(before).extend(repository.split('/')).extend(after);
            if !path.is_empty() {
                segments.extend(path.split('/'));
            }
        }
        url
    }

    /// All files of a repository.
    pub(crate) fn list(&self, repository: &str, revision: &str) -> Result<Listing, DownloadError> {
        let url = self.url(&["api", "models"], repository, &["revision", revision], "");
        let (text, _) = self.text(&url)?;
        let RevisionAnswer { sha: commit } = parse(&url, &text)?;
        if !is_commit(&commit) {
            return Err(unreadable(&url, format!("`{commit}` is no commit")));
        }
        let mut url = self.url(&["api", "models"], repository, &["tree", &commit], "");
        url.set_query(Some("recursive=true"));
        let mut entries = Vec::new();
        for _ in 0..MAX_PAGES {
            let (text, next) = self.text(&url)?;
            for entry in parse::<Vec<TreeEntry>>(&url, &text)? {
                entries.extend(read_entry(&url, entry)?);
            }
            // A mirror may pass on the public hub's own address: only its query is taken.
            match next.and_then(|next| url.join(&next).ok()) {
                Some(next) if next.query() != url.query() => url.set_query(next.query()),
                _ => return Ok(Listing { commit, entries }),
            }
        }
        Err(unreadable(&url, format!("its listing has more than {MAX_PAGES} pages")))
    }

    /// What the hub says of one file, without fetching any of it.
    pub(crate) fn file(&self, reference: &HubReference, path: &str) -> Result<FileWord, DownloadError> {
        let HubReference { repository, revision, .. } = reference;
        let url = self.file_url(repository, path, revision);
        let word = repeat(self.settings, path, self.observer, || {
            let answer = self.client.send(&Ask::head(&url))?;
            let linked = answer.linked.clone();
            let direct = answer.status() == 200;
            let etag = linked.etag.or_else(|| answer.etag().filter(|_| direct));
            Ok(FileWord {
                commit: linked.commit.filter(|commit| is_commit(commit)),
                // The length of a page that redirects is not the file's.
                n_bytes: linked.n_bytes.or_else(|| answer.content_length().filter(|_| direct)),
                digest: etag.and_then(|etag| Digest::from_hex(crate::http::bare_etag(&etag))),
            })
        });
        match word {
            Err(DownloadError::Status { status: 404, .. }) => Err(self.no_such_file(reference, path)),
            other => other,
        }
    }

    /// The error for a misspelt name, with the names that may have been meant.
    pub(crate) fn no_such_file(&self, reference: &HubReference, path: &str) -> DownloadError {
        let HubReference { repository, revision, .. } = reference;
        let near = match self.list(repository, revision) {
            Ok(listing) => nearest(path, listing.entries.iter().map(|entry| entry.path.as_str())),
            Err(_) => Vec::new(),
        };
        DownloadError::NoSuchFile {
            path: path.to_owned(),
            repository: repository.clone(),
            revision: revision.clone(),
            near,
        }
    }

    /// A text and the address of the page after it.
    fn text(&self, url: &Url) -> Result<(String, Option<String>), DownloadError> {
        repeat(self.settings, &shown(url), self.observer, || {
            let answer = self.client.send(&Ask::question(url))?;
            let next = answer.next_page();
            let text = read_text(answer.response, MAX_PAGE_BYTES).map_err(|_| Trouble::Passing {
                what: format!("{}: the answer breaks off", host(url)),
                wait: None,
            })?;
            Ok((text, next))
        })
    }
}

fn parse<'a, T: Deserialize<'a>>(url: &Url, text: &'a str) -> Result<T, DownloadError> {
    serde_json::from_str(text).map_err(|e| unreadable(url, e.to_string()))
}

fn unreadable(url: &Url, problem: String) -> DownloadError {
    DownloadError::Answer { host: host(url), what: shown(url), problem }
}

/// `None` for folders.
fn read_entry(url: &Url, entry: TreeEntry) -> Result<Option<Entry>, DownloadError> {
    if entry.kind != "file" {
        return Ok(None);
    }
    if !is_safe_path(&entry.path) {
        return Err(unreadable(url, format!("the path `{}` leads out of the repository", entry.path)));
    }
    let (oid, n_bytes) = entry.lfs.map_or((entry.oid, entry.size), |lfs| (lfs.oid, lfs.size));
    let digest = Digest::from_hex(oid.trim_start_matches("sha256:"))
        .ok_or_else(|| unreadable(url, format!("`{oid}` of `{}` is no digest", entry.path)))?;
    Ok(Some(Entry { path: entry.path, n_bytes, digest }))
}

pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The most similar names, most similar first.
pub(crate) fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let wanted = wanted.to_lowercase();
    let mut scored: Vec<_> = names
        .map(|name| (strsim::jaro_winkler(&wanted, &name.to_lowercase()), name))
        .filter(|(score, _)| *score >= LEAST_SIMILARITY)
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    scored.into_iter().take(MAX_NEAR).map(|(_, name)| name.to_owned()).collect()
}
