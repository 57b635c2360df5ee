//! What a server says of a file whose size nobody announced.

use std::thread::sleep;

use reqwest::Url;

use crate::error::DownloadError;
use crate::http::{Ask, Backoff, Client, Trouble, host};
use crate::progress::{Event, Observer};
use crate::settings::Settings;
use crate::transfer::Item;

/// What is known of a file before it is fetched.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// `None`: the server does not say, and the file must be fetched in one go.
    pub(crate) n_bytes: Option<u64>,
    pub(crate) etag: Option<String>,
    /// Where it lies, if not where it was asked for.
    pub(crate) link: Option<Url>,
    /// Whether the server answers a range with the whole.
    pub(crate) no_ranges: bool,
}

/// Asks for the first byte: its answer tells the size, whatever a redirect on the way claims.
pub(crate) fn probe(
    client: &Client,
    settings: &Settings,
    item: &Item,
    observer: &dyn Observer,
) -> Result<Found, DownloadError> {
    repeat(settings, &item.name, observer, || {
        let answer = client.send(&Ask { range: Some((0, 0)), ..Ask::get(&item.url) })?;
        let range = answer.content_range();
        let (n_bytes, no_ranges) = match answer.status() {
            206 | 416 => (range.and_then(|range| range.total), false),
            _ => (answer.content_length().filter(|_| answer.encoding().is_none()), true),
        };
        let found = Found {
            n_bytes: answer.linked.n_bytes.or(n_bytes),
            etag: answer.etag(),
            link: answer.elsewhere.then(|| answer.url.clone()),
            no_ranges,
        };
        if found.n_bytes == Some(0) {
            return Err(Trouble::Final(DownloadError::NotTheFile {
                file: item.name.clone(),
                host: host(&answer.url),
                found: "an empty file",
                advice: "its upload was not finished, or the address is wrong; nothing was fetched",
            }));
        }
        Ok(found)
    })
}

/// Makes a request until it succeeds or fails for good.
pub(crate) fn repeat<T>(
    settings: &Settings,
    name: &str,
    observer: &dyn Observer,
    mut request: impl FnMut() -> Result<T, Trouble>,
) -> Result<T, DownloadError> {
    let mut backoff = Backoff::new(settings.retry);
    loop {
        let (problem, asked_for) = match request() {
            Ok(value) => return Ok(value),
            Err(Trouble::Final(error)) => return Err(error),
            Err(Trouble::Expired { what }) => (what, None),
            Err(Trouble::Passing { what, wait }) => (what, wait),
        };
        if observer.interrupted() {
            return Err(DownloadError::Interrupted { done_bytes: 0, n_bytes: 0 });
        }
        let Some(wait) = backoff.failure(asked_for) else {
            return Err(DownloadError::GaveUp {
                file: name.to_owned(),
                attempts: backoff.attempts(),
                done_bytes: 0,
                n_bytes: 0,
                last: problem,
            });
        };
        observer.event(&Event::Retrying { file: name, problem: &problem, wait });
        sleep(wait);
    }
}
