//! Files that are looked at where they lie: a reader that fetches the ranges it is asked for, and remembers them.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};

use reqwest::Url;

use crate::Downloader;
use crate::error::DownloadError;
use crate::http::{Ask, Trouble, describe_body, host};
use crate::hub::{Hub, Listing};
use crate::probe::{probe, repeat};
use crate::progress::{Observer, Silent};
use crate::reference::HubReference;
use crate::transfer::Item;

/// What is fetched and remembered at a time, at least.
const BLOCK_BYTES: u64 = 64 << 10;
/// Most that one request brings, however long a sequence of reads goes on.
const MAX_FETCH_BYTES: u64 = 4 << 20;

/// The files of a repository, as the hub lists them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFolder {
    /// The commit.
    pub commit: String,
    /// Path and size of every file.
    pub files: Vec<(String, u64)>,
}

/// A file on the hub, read by ranges. Reads in sequence are served by requests that double in size; what was fetched once is
/// not fetched again.
pub struct RemoteFile<'a> {
    downloader: &'a Downloader,
    name: String,
    url: Url,
    link: Option<Url>,
    n_bytes: u64,
    commit: Option<String>,
    at: u64,
    blocks: BTreeMap<u64, Vec<u8>>,
    /// End and size of the last fetch.
    last: (u64, u64),
    fetched_bytes: u64,
}

impl Downloader {
    /// Lists a repository.
    ///
    /// # Errors
    /// If the hub does not answer or knows no such repository.
    pub fn remote_folder(
        &self,
        repository: &str,
        revision: &str,
        observer: &dyn Observer,
    ) -> Result<RemoteFolder, DownloadError> {
        let hub = Hub { client: &self.client, settings: &self.settings, observer };
        let Listing { commit, entries } = hub.list(repository, revision)?;
        Ok(RemoteFolder {
            commit,
            files: entries.into_iter().map(|entry| (entry.path, entry.n_bytes)).collect(),
        })
    }

    /// Opens a file of a repository, without fetching any of it.
    ///
    /// # Errors
    /// If there is no such file; its name is answered with the nearest ones.
    pub fn remote_file(
        &self,
        reference: &HubReference,
        path: &str,
        observer: &dyn Observer,
    ) -> Result<RemoteFile<'_>, DownloadError> {
        let HubReference { repository, revision, .. } = reference;
        let hub = Hub { client: &self.client, settings: &self.settings, observer };
        let url = hub.file_url(repository, path, revision);
        let name = HubReference::file(repository, path, revision);
        if self.settings.offline {
            let looked_in = self.settings.cache.clone();
            return Err(DownloadError::Offline { wanted: name, looked_in });
        }
        let word = hub.file(reference, path)?;
        let n_bytes = if let Some(n_bytes) = word.n_bytes {
            Some(n_bytes)
        } else {
            let item = Item {
                name: name.clone(),
                source: name.clone(),
                url: url.clone(),
                n_bytes: None,
                digest: None,
                target: path.into(),
                record: None,
            };
            probe(&self.client, &self.settings, &item, observer)?.n_bytes
        };
        let n_bytes = n_bytes.ok_or_else(|| DownloadError::Answer {
            host: host(&url),
            what: name.clone(),
            problem: "it tells no size".to_owned(),
        })?;
        Ok(RemoteFile {
            downloader: self,
            name,
            url,
            link: None,
            n_bytes,
            commit: word.commit,
            at: 0,
            blocks: BTreeMap::new(),
            last: (u64::MAX, 0),
            fetched_bytes: 0,
        })
    }
}

impl RemoteFile<'_> {
    /// Size of the file.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Bytes fetched so far.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes
    }

    /// The commit that the hub gave the file from.
    pub fn commit(&self) -> Option<&str> {
        self.commit.as_deref()
    }

    /// Fetches from this block on until something known, and no more than is likely to be wanted.
    fn fetch(&mut self, block: u64) -> Result<(), DownloadError> {
        let start = block * BLOCK_BYTES;
        let size = if self.last.0 == start { (2 * self.last.1).min(MAX_FETCH_BYTES) } else { BLOCK_BYTES };
        let known = self.blocks.range(block..).next().map_or(u64::MAX, |(next, _)| next * BLOCK_BYTES);
        let end = (start + size).min(known).min(self.n_bytes);
        let settings = &self.downloader.settings;
        let mut link = self.link.clone();
        let bytes = repeat(settings, &self.name, &Silent, || {
            let result = self.request(&mut link, start, end);
            if matches!(result, Err(Trouble::Expired { .. })) {
                link = None;
            }
            result
        });
        self.link = link;
        let bytes = bytes?;
        self.last = (end, size);
        self.fetched_bytes += bytes.len() as u64;
        for (i, part) in bytes.chunks(BLOCK_BYTES as usize).enumerate() {
            self.blocks.insert(block + i as u64, part.to_vec());
        }
        Ok(())
    }

    fn request(&self, link: &mut Option<Url>, start: u64, end: u64) -> Result<Vec<u8>, Trouble> {
        let ask = Ask {
            range: Some((start, end - 1)),
            is_link: link.is_some(),
            ..Ask::get(link.as_ref().unwrap_or(&self.url))
        };
        let answer = self.downloader.client.send(&ask)?;
        if answer.elsewhere {
            *link = Some(answer.url.clone());
        }
        let passing =
            |what: String| Trouble::Passing { what: format!("{}: {what}", host(&answer.url)), wait: None };
        let whole = answer.status() == 200 && start == 0 && end == self.n_bytes;
        let ranged = answer.status() == 206
            && answer.content_range().and_then(|range| range.bytes) == Some((start, end - 1));
        if answer.status() == 200 && !whole {
            return Err(Trouble::Final(DownloadError::Answer {
                host: host(&answer.url),
                what: self.name.clone(),
                problem: "it gives no ranges, and the whole file is not wanted".to_owned(),
            }));
        }
        if !whole && !ranged {
            return Err(passing(format!("answers {} for bytes {start} to {}", answer.status(), end - 1)));
        }
        let mut bytes = Vec::with_capacity((end - start) as usize);
        let host = host(&answer.url);
        let body = answer.response.take(end - start).read_to_end(&mut bytes);
        body.map_err(|e| Trouble::Passing { what: format!("{host}: {}", describe_body(&e)), wait: None })?;
        if bytes.len() as u64 == end - start {
            Ok(bytes)
        } else {
            Err(Trouble::Passing { what: format!("{host}: the body ends early"), wait: None })
        }
    }
}

impl Read for RemoteFile<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at >= self.n_bytes || buffer.is_empty() {
            return Ok(0);
        }
        let block = self.at / BLOCK_BYTES;
        if !self.blocks.contains_key(&block) {
            self.fetch(block).map_err(io::Error::other)?;
        }
        let bytes = &self.blocks[&block][(self.at % BLOCK_BYTES) as usize..];
        let n = bytes.len().min(buffer.len());
        buffer[..n].copy_from_slice(&bytes[..n]);
        self.at += n as u64;
        Ok(n)
    }
}

impl Seek for RemoteFile<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let goal = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.n_bytes.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at =
            goal.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a place before the start"))?;
        Ok(self.at)
    }
}
