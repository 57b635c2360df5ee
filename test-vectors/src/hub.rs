//! A model hub on the loopback address: two origins, one with the interface and small files, one with large files behind
//! signed links. Answers are those of the real hub; a test puts faults into them.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use sha1::Digest as _;

use crate::server::{Body, Request, Response, Server};

/// Commit that every revision of the loopback hub is at.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// One file of the repository.
#[derive(Debug, Clone)]
pub struct Published {
    /// Path in the repository.
    pub path: String,
    /// Content.
    pub body: Body,
    /// Whether it lies at the storage origin, named by its SHA-256.
    pub large: bool,
    /// SHA-256 of a large file, git's SHA-1 of a small one; hexadecimal. What is announced, true or not.
    pub digest: String,
}

impl Published {
    /// A file at the storage origin.
    pub fn large(path: &str, body: impl Into<Body>) -> Self {
        let body = body.into();
        Self { path: path.to_owned(), digest: sha256(&body), body, large: true }
    }

    /// A file that the hub gives itself.
    pub fn small(path: &str, body: impl Into<Body>) -> Self {
        let body = body.into();
        let mut hasher = sha1::Sha1::new();
        hasher.update(format!("blob {}\0", body.n_bytes));
        hasher.update(body.to_vec());
        Self { path: path.to_owned(), digest: hex(&hasher.finalize()), body, large: false }
    }
}

/// SHA-256 in hexadecimal.
pub fn sha256(body: &Body) -> String {
    let mut hasher = sha2::Sha256::new();
    let step = body.block.len().max(1) as u64;
    for start in (0..body.n_bytes).step_by(step as usize) {
        hasher.update(body.slice(start..(start + step).min(body.n_bytes)).to_vec());
    }
    hex(&hasher.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Bytes that look random and are the same each time.
pub fn noise(n_bytes: usize, seed: u64) -> Vec<u8> {
    // xorshift64*, Vigna 2014.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..n_bytes.div_ceil(8)).flat_map(|_| next()).collect();
    bytes.truncate(n_bytes);
    bytes
}

/// Who was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The interface, and small files.
    Hub,
    /// Large files.
    Storage,
}

/// One request, for the closure that makes faults.
#[derive(Debug)]
pub struct Visit<'a> {
    /// Who was asked.
    pub origin: Origin,
    /// What was asked.
    pub request: &'a Request,
    /// Number of the request at this origin, from 0.
    pub number: usize,
}

type Fault = dyn Fn(&Visit<'_>, Response) -> Response + Send + Sync;

/// A running hub with one repository. Stops when dropped.
pub struct LoopbackHub {
    /// The origin with the interface.
    pub hub: Server,
    /// The origin with the large files.
    pub storage: Server,
}

struct State {
    repository: String,
    storage: Mutex<String>,
    files: Vec<Published>,
    fault: Box<Fault>,
    n_links: AtomicUsize,
    /// Uses of each link so far.
    uses: Mutex<Vec<usize>>,
    most_uses: usize,
    visits: [AtomicUsize; 2],
}

impl LoopbackHub {
    /// Starts a hub with these files. `fault` may change each answer.
    pub fn start(
        repository: &str,
        files: Vec<Published>,
        fault: impl Fn(&Visit<'_>, Response) -> Response + Send + Sync + 'static,
    ) -> Self {
        Self::with_links_for(usize::MAX, repository, files, fault)
    }

    /// Like [`LoopbackHub::start`], with links that the storage refuses after so many uses.
    ///
    /// # Panics
    /// If no port can be had.
    pub fn with_links_for(
        most_uses: usize,
        repository: &str,
        files: Vec<Published>,
        fault: impl Fn(&Visit<'_>, Response) -> Response + Send + Sync + 'static,
    ) -> Self {
        let state = Arc::new(State {
            repository: repository.to_owned(),
            storage: Mutex::default(),
            files,
            fault: Box::new(fault),
            n_links: AtomicUsize::new(0),
            uses: Mutex::default(),
            most_uses,
            visits: [AtomicUsize::new(0), AtomicUsize::new(0)],
        });
        let shared = state.clone();
        let storage = Server::start(move |request| shared.answer(Origin::Storage, request));
        *state.storage.lock().expect("no handler panics") = storage.url();
        let hub = Server::start(move |request| state.answer(Origin::Hub, request));
        Self { hub, storage }
    }
}

impl State {
    fn answer(&self, origin: Origin, request: &Request) -> Response {
        let number = self.visits[origin as usize].fetch_add(1, Ordering::SeqCst);
        let response = match origin {
            Origin::Hub => self.hub(request),
            Origin::Storage => self.stored(request),
        };
        (self.fault)(&Visit { origin, request, number }, response)
    }

    fn hub(&self, request: &Request) -> Response {
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        let inside = |before: &str| path.strip_prefix(&format!("{before}/{}/", self.repository));
        if let Some(rest) = inside("/api/models") {
            return match rest.split_once('/') {
                Some(("revision", _)) => Response::ok(serde_json::json!({ "sha": COMMIT }).to_string()),
                Some(("tree", COMMIT)) => self.tree(path, query),
                _ => Response::status(404).body("{\"error\":\"Not Found\"}"),
            };
        }
        let file = inside("").and_then(|rest| rest.strip_prefix("resolve/")?.split_once('/'));
        let Some(file) = file.and_then(|(_, path)| self.files.iter().find(|file| file.path == path)) else {
            return Response::status(404).header("x-error-code", "EntryNotFound").body("Entry not found");
        };
        let response = if file.large {
            let link = self.n_links.fetch_add(1, Ordering::SeqCst);
            self.uses.lock().expect("no handler panics").push(0);
            let storage = self.storage.lock().expect("no handler panics");
            Response::status(302)
                .header("location", format!("{storage}/{}?signature=secret-{link}", file.path))
                .header("x-linked-etag", format!("\"{}\"", file.digest))
                .header("x-linked-size", file.body.n_bytes.to_string())
                .body("Found. Redirecting to a page whose length is not that of the file.")
        } else {
            ranged(request, &file.body, &format!("\"{}\"", file.digest))
        };
        response.header("x-repo-commit", COMMIT)
    }

    /// A listing in pages of two.
    fn tree(&self, path: &str, query: &str) -> Response {
        const PAGE: usize = 2;
        let first = query.split('&').find_map(|part| part.strip_prefix("cursor=")?.parse().ok()).unwrap_or(0);
        let page: Vec<_> = self.files.iter().skip(first).take(PAGE).map(|file| {
            let mut entry = serde_json::json!({
                "type": "file", "path": file.path, "size": file.body.n_bytes, "oid": "0".repeat(40),
            });
            if file.large {
                entry["lfs"] = serde_json::json!({ "oid": file.digest, "size": file.body.n_bytes, "pointerSize": 134 });
            } else {
                entry["oid"] = file.digest.clone().into();
            }
            entry
        }).collect();
        let response = Response::ok(serde_json::Value::Array(page).to_string());
        if first + PAGE < self.files.len() {
            // The public hub's address, as a mirror may pass it on.
            let next =
                format!("<https://hub.invalid{path}?recursive=true&cursor={}>; rel=\"next\"", first + PAGE);
            return response.header("link", next);
        }
        response
    }

    fn stored(&self, request: &Request) -> Response {
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        let link = query.strip_prefix("signature=secret-").and_then(|number| number.parse::<usize>().ok());
        let mut uses = self.uses.lock().expect("no handler panics");
        let alive = link.and_then(|link| uses.get_mut(link)).is_some_and(|uses| {
            *uses += 1;
            *uses <= self.most_uses
        });
        drop(uses);
        if !alive {
            return Response::status(403)
                .body("<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code></Error>");
        }
        match self.files.iter().find(|file| path == format!("/{}", file.path)) {
            Some(file) => ranged(request, &file.body, &format!("\"{}\"", file.digest)),
            None => Response::status(404),
        }
    }
}

/// The answer of a sound server to a request for a body or a range of it (RFC 9110, section 14).
pub fn ranged(request: &Request, body: &Body, etag: &str) -> Response {
    let whole = || Response::ok(body.clone()).header("etag", etag).header("accept-ranges", "bytes");
    let wanted = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let Some((first, last)) = wanted else { return whole() };
    if request.header("if-range").is_some_and(|known| known != etag) {
        return whole();
    }
    let (Ok(first), last) = (first.parse::<u64>(), last.parse::<u64>().unwrap_or(u64::MAX)) else {
        return whole();
    };
    if first >= body.n_bytes {
        return Response::status(416).header("content-range", format!("bytes */{}", body.n_bytes));
    }
    let last = last.min(body.n_bytes - 1);
    Response::status(206)
        .header("etag", etag)
        .header("content-range", format!("bytes {first}-{last}/{}", body.n_bytes))
        .body(body.slice(first..last + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(headers: &[(&str, &str)]) -> Request {
        Request {
            method: "GET".to_owned(),
            path: "/".to_owned(),
            headers: headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            body: Vec::new(),
        }
    }

    #[test]
    fn ranges_are_answered_by_the_rules() {
        let body = Body::from("0123456789");
        let of = |headers: &[(&str, &str)]| ranged(&request(headers), &body, "\"e\"");
        let part = of(&[("range", "bytes=2-4")]);
        assert_eq!((part.status, part.body.to_vec()), (206, b"234".to_vec()));
        assert!(part.headers.contains(&("content-range".to_owned(), "bytes 2-4/10".to_owned())));
        assert_eq!(of(&[("range", "bytes=8-99")]).body.to_vec(), b"89");
        assert_eq!(of(&[("range", "bytes=10-11")]).status, 416);
        assert_eq!(of(&[("range", "bytes=2-4"), ("if-range", "\"other\"")]).status, 200);
        assert_eq!(of(&[]).body.n_bytes, 10);
    }

    #[test]
    fn a_body_repeats_its_block() {
        let body = Body { block: b"abc".as_slice().into(), start: 1, n_bytes: 7 };
        assert_eq!(body.to_vec(), b"bcabcab");
        assert_eq!(body.slice(3..5).to_vec(), b"bc");
        assert_eq!(sha256(&body), sha256(&b"bcabcab".as_slice().into()));
    }
}
