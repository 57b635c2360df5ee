//! What the tests of this crate share.
#![allow(dead_code, reason = "each test binary uses its own part of it")]

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use download::progress::{Event, Observer};
use download::{Destination, DownloadError, Downloader, Reference, Report, Request, Retry, Settings};
use test_vectors::hub::LoopbackHub;

pub(crate) const REPOSITORY: &str = "org/model";
pub(crate) const PIECE_BYTES: u32 = 64 << 10;

/// Keeps what it is told.
#[derive(Default)]
pub(crate) struct Log(pub(crate) Mutex<Vec<String>>);

impl Observer for Log {
    fn event(&self, event: &Event<'_>) {
        if !matches!(event, Event::Progress(_) | Event::Checking { .. }) {
            self.0.lock().unwrap().push(format!("{event:?}"));
        }
    }
}

impl Log {
    pub(crate) fn text(&self) -> String {
        self.0.lock().unwrap().join("\n")
    }

    pub(crate) fn count(&self, what: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|line| line.starts_with(what)).count()
    }
}

/// Settings with short waits that know nothing of this machine.
pub(crate) fn settings(endpoint: &str, cache: &Path) -> Settings {
    Settings {
        endpoint: format!("{endpoint}/").parse().unwrap(),
        token: None,
        cache: cache.to_owned(),
        offline: false,
        connections: 4,
        inactivity: Duration::from_millis(400),
        answer_within: Duration::from_millis(400),
        retry: Retry {
            first_wait: Duration::from_millis(5),
            longest_wait: Duration::from_millis(300),
            attempts: 4,
        },
        piece_bytes: PIECE_BYTES,
        use_links: true,
        model_folder: None,
        plain_progress: false,
        warn_without_links: true,
        beside_foreign: false,
        overwrite: false,
    }
}

pub(crate) fn request(reference: &str, folder: &Path) -> Request {
    Request {
        reference: Reference::parse(reference).unwrap(),
        include: Vec::new(),
        exclude: Vec::new(),
        destination: Destination::Folder(folder.to_owned()),
        sha256: None,
    }
}

/// Plans and fetches.
pub(crate) fn get(settings: Settings, request: &Request, log: &Log) -> Result<Report, DownloadError> {
    let downloader = Downloader::new(settings)?;
    let plan = downloader.plan(request, log)?;
    downloader.fetch(&plan, log)
}

/// Fetches one file of the loopback hub's repository into a folder.
pub(crate) fn get_file(
    hub: &LoopbackHub,
    path: &str,
    folder: &Path,
    log: &Log,
) -> Result<Report, DownloadError> {
    let reference = format!("hf:{REPOSITORY}/{path}");
    get(settings(&hub.hub.url(), folder), &request(&reference, folder), log)
}
