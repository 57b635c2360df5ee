//! Gets a set of vectors from a web address or a folder, every file checked against its hash.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use reqwest::Url;

use super::{SUMS, write_folder};
use crate::hash::sha256;
use crate::http;

/// Most files of a set.
const MOST_FILES: usize = 10_000;
/// Most bytes of a set: it is held in memory until all of it is right.
const MOST_BYTES: usize = 1 << 30;
/// Time for one file.
const TIMEOUT: Duration = Duration::from_mins(5);

/// Why a set was not fetched. Nothing is left behind then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The output is there already.
    #[error("`{path}` exists; choose another folder, or remove it")]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// A file cannot be had.
    #[error("cannot get `{place}`: {reason}")]
    Unavailable {
        /// Address or path.
        place: String,
        /// Why.
        reason: String,
    },
    /// A file is not what it must be.
    #[error("`{place}` has SHA-256 {found}, expected {expected}; it was changed or damaged on the way")]
    WrongHash {
        /// Address or path.
        place: String,
        /// As computed.
        found: String,
        /// As given or listed.
        expected: String,
    },
    /// The list of hashes is unusable.
    #[error("`{place}` line {line}: found `{found}`, expected {expected}")]
    BadList {
        /// Address or path.
        place: String,
        /// Counted from 1.
        line: usize,
        /// What is there.
        found: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// A file cannot be written.
    #[error("cannot write `{path}`")]
    Io {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// Where a set is.
enum Source {
    Folder(PathBuf),
    Web(Url),
}

impl Source {
    fn new(text: &str) -> Result<Self, FetchError> {
        if !text.starts_with("http://") && !text.starts_with("https://") {
            return Ok(Self::Folder(PathBuf::from(text)));
        }
        // Names are joined behind the last slash.
        let with_slash = if text.ends_with('/') { text.to_owned() } else { format!("{text}/") };
        Url::parse(&with_slash)
            .map(Self::Web)
            .map_err(|e| FetchError::Unavailable { place: text.to_owned(), reason: e.to_string() })
    }

    fn place(&self, name: &str) -> String {
        match self {
            Self::Folder(folder) => folder.join(name).display().to_string(),
            Self::Web(url) => format!("{url}{name}"),
        }
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, FetchError> {
        let unavailable = |reason: String| FetchError::Unavailable { place: self.place(name), reason };
        match self {
            Self::Folder(folder) => {
                let path = folder.join(name);
                let n_bytes = std::fs::metadata(&path).map_err(|e| unavailable(e.to_string()))?.len();
                if n_bytes > http::LARGEST_BODY {
                    return Err(unavailable(format!("it has {n_bytes} bytes, no file of a set has so many")));
                }
                std::fs::read(&path).map_err(|e| unavailable(e.to_string()))
            }
            Self::Web(url) => {
                let url = url.join(name).map_err(|e| unavailable(e.to_string()))?;
                let client = http::client(&url, TIMEOUT).map_err(|e| unavailable(http::with_causes(&e)))?;
                let response = client.get(url).send().map_err(|e| unavailable(http::with_causes(&e)))?;
                let status = response.status();
                if status.as_u16() != 200 {
                    return Err(unavailable(format!("the server answers {status}")));
                }
                http::body(response).map_err(|e| unavailable(http::with_causes(&e)))
            }
        }
    }
}

/// Fetches a set into a new folder. `source`: web address or folder that holds `SHA256SUMS`; `sums_sha256`: the hash of that file, which
/// vouches for all others. The folder appears when every file in it is right. Returns the number of files.
///
/// # Errors
/// If the folder exists, a file cannot be had, is not the listed one, or cannot be written.
pub fn fetch(source: &str, sums_sha256: &str, folder: &Path) -> Result<usize, FetchError> {
    if folder.exists() {
        return Err(FetchError::Exists { path: folder.to_owned() });
    }
    let source = Source::new(source)?;
    let sums = get_checked(&source, SUMS, sums_sha256)?;
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    let mut n_bytes = 0;
    for (hash, name) in parse_sums(&sums, &source.place(SUMS))? {
        let bytes = get_checked(&source, &name, &hash)?;
        n_bytes += bytes.len();
        if n_bytes > MOST_BYTES {
            let reason = format!("the set is larger than {MOST_BYTES} bytes");
            return Err(FetchError::Unavailable { place: source.place(&name), reason });
        }
        files.push((name, bytes));
    }
    let n_files = files.len();
    files.push((SUMS.to_owned(), sums));
    write_folder(folder, &files).map_err(|(path, source)| FetchError::Io { path, source })?;
    Ok(n_files)
}

fn get_checked(source: &Source, name: &str, expected: &str) -> Result<Vec<u8>, FetchError> {
    let bytes = source.get(name)?;
    let found = sha256(&bytes);
    if !found.eq_ignore_ascii_case(expected) {
        return Err(FetchError::WrongHash {
            place: source.place(name),
            found,
            expected: expected.to_owned(),
        });
    }
    Ok(bytes)
}

/// Lines of `HASH  NAME`, as `sha256sum` writes them. Names stay within the folder.
fn parse_sums(sums: &[u8], place: &str) -> Result<Vec<(String, String)>, FetchError> {
    let text = String::from_utf8_lossy(sums);
    let mut listed: Vec<(String, String)> = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let bad = |expected| FetchError::BadList {
            place: place.to_owned(),
            line: i + 1,
            found: line.chars().take(200).collect(),
            expected,
        };
        if i >= MOST_FILES {
            return Err(bad("at most 10000 files"));
        }
        let (hash, name) = line.split_once("  ").ok_or_else(|| bad("a hash, two spaces and a name"))?;
        if hash.len() != 64 || !hash.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad("a SHA-256 of 64 hexadecimal digits"));
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
        let stays = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
        if name.is_empty() || !name.chars().all(is_plain) || !stays || name == SUMS {
            return Err(bad("the name of a file under the folder"));
        }
        if listed.iter().any(|(_, other)| other == name) {
            return Err(bad("every file once"));
        }
        listed.push((hash.to_owned(), name.to_owned()));
    }
    if listed.is_empty() {
        return Err(FetchError::BadList {
            place: place.to_owned(),
            line: 1,
            found: "nothing".into(),
            expected: "files",
        });
    }
    Ok(listed)
}
