//! What an answer says about the file, and what it is if it is not the file.

use std::io::Read;

use reqwest::Url;
use reqwest::blocking::Response;
use reqwest::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, HeaderName, LINK,
    TRANSFER_ENCODING,
};

/// An answer, and where it came from.
pub(crate) struct Answer {
    pub(crate) response: Response,
    /// The last address.
    pub(crate) url: Url,
    /// What the hub said on the way about the file.
    pub(crate) linked: Linked,
    /// Whether another origin than the one asked first gave it, or it was asked by an earlier link.
    pub(crate) elsewhere: bool,
}

/// The hub's word about a file that lies elsewhere.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Linked {
    pub(crate) etag: Option<String>,
    pub(crate) n_bytes: Option<u64>,
    pub(crate) commit: Option<String>,
}

impl Linked {
    /// Takes what these headers say; earlier hops win, since they are the hub's.
    pub(super) fn note(&mut self, headers: &HeaderMap) {
        let text = |name| text(headers, &HeaderName::from_static(name));
        self.etag =
            self.etag.take().or_else(|| text("x-linked-etag").map(|etag| bare_etag(&etag).to_owned()));
        self.n_bytes = self.n_bytes.or_else(|| text("x-linked-size")?.parse().ok());
        self.commit = self.commit.take().or_else(|| text("x-repo-commit"));
    }
}

impl Answer {
    pub(crate) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    /// The ETag as sent, quotes included.
    pub(crate) fn etag(&self) -> Option<String> {
        text(self.response.headers(), &ETAG)
    }

    pub(crate) fn content_range(&self) -> Option<ContentRange> {
        ContentRange::parse(&text(self.response.headers(), &CONTENT_RANGE)?)
    }

    /// The length that the head announces, which the library's own count hides for HEAD.
    pub(crate) fn content_length(&self) -> Option<u64> {
        text(self.response.headers(), &CONTENT_LENGTH)?.parse().ok()
    }

    pub(crate) fn is_chunked(&self) -> bool {
        text(self.response.headers(), &TRANSFER_ENCODING).is_some_and(|t| t.contains("chunked"))
    }

    /// The encoding that the head claims, other than none.
    pub(crate) fn encoding(&self) -> Option<String> {
        text(self.response.headers(), &CONTENT_ENCODING).filter(|encoding| encoding != "identity")
    }

    /// Address of the page that follows in a listing.
    pub(crate) fn next_page(&self) -> Option<String> {
        let links = text(self.response.headers(), &LINK)?;
        links.split(',').find_map(|link| {
            let (goal, relation) = link.trim().split_once('>')?;
            relation.contains("rel=\"next\"").then(|| goal.trim_start_matches('<').to_owned())
        })
    }

    pub(crate) fn is_html(&self) -> bool {
        text(self.response.headers(), &CONTENT_TYPE).is_some_and(|t| t.starts_with("text/html"))
    }
}

fn text(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    headers.get(name)?.to_str().ok().map(|value| value.trim().to_owned())
}

/// An ETag without quotes and mark of weakness.
pub(crate) fn bare_etag(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// A `Content-Range` header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContentRange {
    /// First and last byte; `None` if the range could not be had.
    pub(crate) bytes: Option<(u64, u64)>,
    /// Bytes of the whole file, if told.
    pub(crate) total: Option<u64>,
}

impl ContentRange {
    fn parse(text: &str) -> Option<Self> {
        let (bytes, total) = text.strip_prefix("bytes ")?.split_once('/')?;
        let total = if total == "*" { None } else { Some(total.parse().ok()?) };
        let bytes = if bytes == "*" {
            None
        } else {
            let (first, last) = bytes.split_once('-')?;
            Some((first.parse().ok()?, last.parse().ok()?))
        };
        Some(Self { bytes, total })
    }
}

/// Most bytes of an error page that are read.
const MAX_PAGE_BYTES: u64 = 4096;

/// The first line with text, for messages; markup is left out.
pub(crate) fn first_line(response: Response) -> String {
    let mut page = Vec::new();
    // What cannot be read is no help to the reader of the message.
    let _ = response.take(MAX_PAGE_BYTES).read_to_end(&mut page);
    let page = String::from_utf8_lossy(&page);
    let plain: String = without_markup(&page);
    let line = plain.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no explanation");
    line.chars().filter(|c| !c.is_control()).take(160).collect()
}

fn without_markup(page: &str) -> String {
    let mut inside = false;
    page.chars()
        .filter_map(|c| match c {
            '<' => {
                inside = true;
                None
            }
            '>' if inside => {
                inside = false;
                Some('\n')
            }
            c => (!inside).then_some(c),
        })
        .collect()
}

/// A small text, such as an answer of the hub's interface.
pub(crate) fn read_text(response: Response, max_bytes: u64) -> std::io::Result<String> {
    let mut text = String::new();
    response.take(max_bytes).read_to_string(&mut text)?;
    Ok(text)
}

/// What came instead of a file, and what to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unwanted {
    pub(crate) found: &'static str,
    pub(crate) advice: &'static str,
}

/// Recognises by its first bytes what servers send instead of a model.
pub(crate) fn recognise(start: &[u8]) -> Option<Unwanted> {
    let text = String::from_utf8_lossy(&start[..start.len().min(256)]).to_lowercase();
    let text = text.trim_start_matches('\u{feff}').trim_start();
    let page = ["<!doctype html", "<html"].iter().any(|beginning| text.starts_with(beginning));
    if page {
        return Some(Unwanted { found: "a web page", advice: WEB_PAGE });
    }
    if text.starts_with("<?xml") && text.contains("<error>") {
        return Some(Unwanted { found: "a storage server's error text", advice: WEB_PAGE });
    }
    text.starts_with("version https://git-lfs").then_some(Unwanted {
        found: "a Git LFS pointer",
        advice: "use the address with `resolve`, not `raw`; the pointer names a file that lies elsewhere",
    })
}

const WEB_PAGE: &str = "use the address of the file itself (`resolve` in place of `blob`), and look at it in a browser: it may ask to sign in";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read_or_refused() {
        let of = |text: &str| ContentRange::parse(text);
        assert_eq!(
            of("bytes 0-9/431000000000"),
            Some(ContentRange { bytes: Some((0, 9)), total: Some(431_000_000_000) })
        );
        assert_eq!(of("bytes 5-9/*"), Some(ContentRange { bytes: Some((5, 9)), total: None }));
        assert_eq!(of("bytes */12"), Some(ContentRange { bytes: None, total: Some(12) }));
        for wrong in ["", "bytes", "bytes 0-9", "items 0-9/10", "bytes a-b/c", "bytes -1-2/3"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn pages_and_pointers_are_no_models() {
        assert_eq!(recognise(b"  <!DOCTYPE HTML><p>").unwrap().found, "a web page");
        assert_eq!(
            recognise(b"version https://git-lfs.github.com/spec/v1\n").unwrap().found,
            "a Git LFS pointer"
        );
        assert!(recognise(b"<?xml version=\"1.0\"?><Error><Code>AccessDenied").is_some());
        for model in [&b"GGUF\x03\0\0\0"[..], b"\x10\0\0\0\0\0\0\0{\"__metadata__\"", b"{\"a\": 1}", b""] {
            assert_eq!(recognise(model), None);
        }
    }

    #[test]
    fn a_page_is_told_by_its_first_line_of_text() {
        assert_eq!(without_markup("<html><title>Too big</title>").trim(), "Too big");
    }
}
