//! What the hub's own tools take from the environment, and the limits of a transfer.

use std::env;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::Url;

use crate::error::DownloadError;

/// The public hub.
pub const PUBLIC_HUB: &str = "https://huggingface.co";

/// Most connections: each costs more than a MiB in the HTTP library, and a download is to stay below 64 MiB of memory.
pub const MAX_CONNECTIONS: usize = 24;

/// Limit on silence where nobody sets one.
const DEFAULT_INACTIVITY: Duration = Duration::from_secs(30);

/// A hub token. Not shown by `Debug`, sent to the hub's own host and nowhere else.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// A token, unless the text is blank.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.to_owned()))
    }

    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(...)")
    }
}

/// How failed requests are repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retry {
    /// Wait after the first failure; doubled after each further one.
    pub first_wait: Duration,
    /// Longest wait of its own choosing, and longest `Retry-After` that is obeyed rather than reported.
    pub longest_wait: Duration,
    /// Failures in a row without a byte of progress before a connection gives up.
    pub attempts: u32,
}

/// Where to ask, how, and where things live.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Base address of the hub; every request for `hf:` obeys it.
    pub endpoint: Url,
    /// Sent to the endpoint's origin only.
    pub token: Option<Token>,
    /// The hub cache: `models--ORG--NAME` folders.
    pub cache: PathBuf,
    /// No request at all.
    pub offline: bool,
    /// Requests at a time, over all files; 1 to [`MAX_CONNECTIONS`].
    pub connections: usize,
    /// A connection that brings nothing for so long is dropped.
    pub inactivity: Duration,
    /// The same of answers to questions about files, such as listings and sizes.
    pub answer_within: Duration,
    /// How failed requests are repeated.
    pub retry: Retry,
    /// Bytes of a piece: what is verified and, if wrong, fetched again by itself.
    pub piece_bytes: u32,
    /// Whether snapshots may link to blobs; `false` puts real files there.
    pub use_links: bool,
    /// ds4's own folder of models: where files of the catalogue go if nothing else is said.
    pub model_folder: Option<PathBuf>,
    /// Plain lines in place of bars.
    pub plain_progress: bool,
    /// Whether a cache without links is worth a warning.
    pub warn_without_links: bool,
    /// Start although another program's unfinished download lies beside the target.
    pub beside_foreign: bool,
    /// Replace files that are there and differ.
    pub overwrite: bool,
}

impl Settings {
    /// The hub conventions: `HF_ENDPOINT`; `HF_TOKEN`, the file in `HF_TOKEN_PATH`, `$HF_HOME/token`; `HF_HUB_CACHE`, else
    /// `$HF_HOME/hub`, with `HF_HOME` defaulting to `$XDG_CACHE_HOME/huggingface` and `~/.cache/huggingface`;
    /// `HF_HUB_OFFLINE`; `HF_HUB_DOWNLOAD_TIMEOUT` and `HF_HUB_ETAG_TIMEOUT` in seconds;
    /// `HF_HUB_DISABLE_SYMLINKS_WARNING`; `HF_HUB_DISABLE_PROGRESS_BARS`; `DS4_GGUF_DIR`. Proxies and `SSL_CERT_FILE` are the HTTP library's business.
    ///
    /// # Errors
    /// If `HF_ENDPOINT` is no address, or a limit no time.
    pub fn from_environment() -> Result<Self, DownloadError> {
        Self::from_variables(&|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, DownloadError> {
        let home = get("HF_HOME").map_or_else(
            || {
                let cache = get("XDG_CACHE_HOME")
                    .map(PathBuf::from)
                    .or_else(|| get("HOME").map(|home| PathBuf::from(home).join(".cache")));
                cache.unwrap_or_else(|| PathBuf::from(".cache")).join("huggingface")
            },
            PathBuf::from,
        );
        let truth = |name: &str| {
            get(name).is_some_and(|value| {
                matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")
            })
        };
        let token = if truth("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            None
        } else {
            let file = get("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
            get("HF_TOKEN")
                .or_else(|| get("HUGGING_FACE_HUB_TOKEN"))
                .or_else(|| fs::read_to_string(file).ok())
                .and_then(|text| Token::new(&text))
        };
        let seconds = |name: &'static str| -> Result<Option<Duration>, DownloadError> {
            let Some(text) = get(name) else { return Ok(None) };
            let time = text.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            match time.filter(|time| !time.is_zero()) {
                Some(time) => Ok(Some(time)),
                None => {
                    Err(DownloadError::Setting { setting: name, found: text, expected: "seconds above 0" })
                }
            }
        };
        let endpoint = get("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_HUB.to_owned());
        let cache = get("HF_HUB_CACHE").or_else(|| get("HUGGINGFACE_HUB_CACHE"));
        Ok(Self {
            endpoint: parse_endpoint(&endpoint)?,
            token,
            cache: cache.map_or_else(|| home.join("hub"), PathBuf::from),
            offline: truth("HF_HUB_OFFLINE"),
            connections: 8,
            inactivity: seconds("HF_HUB_DOWNLOAD_TIMEOUT")?.unwrap_or(DEFAULT_INACTIVITY),
            answer_within: seconds("HF_HUB_ETAG_TIMEOUT")?.unwrap_or(DEFAULT_INACTIVITY),
            retry: Retry {
                first_wait: Duration::from_millis(500),
                longest_wait: Duration::from_mins(5),
                attempts: 8,
            },
            piece_bytes: 8 << 20,
            use_links: true,
            model_folder: get("DS4_GGUF_DIR").map(PathBuf::from),
            plain_progress: truth("HF_HUB_DISABLE_PROGRESS_BARS"),
            warn_without_links: !truth("HF_HUB_DISABLE_SYMLINKS_WARNING"),
            beside_foreign: false,
            overwrite: false,
        })
    }
}

fn parse_endpoint(text: &str) -> Result<Url, DownloadError> {
    let wrong = || DownloadError::Setting {
        setting: "HF_ENDPOINT",
        found: text.to_owned(),
        expected: "an address such as https://huggingface.co",
    };
    // A base that ends in a slash is joined with, not replaced by, what follows.
    let url = Url::parse(&format!("{}/", text.trim_end_matches('/'))).map_err(|_| wrong())?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(wrong());
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<Settings, DownloadError> {
        Settings::from_variables(&|name| {
            variables.iter().find(|(found, _)| *found == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_cache_is_where_the_hub_tools_have_it() {
        let cache = |variables: &[(&str, &str)]| settings(variables).unwrap().cache;
        assert_eq!(cache(&[("HOME", "/h")]), PathBuf::from("/h/.cache/huggingface/hub"));
        let xdg = [("HOME", "/h"), ("XDG_CACHE_HOME", "/x")];
        assert_eq!(cache(&xdg), PathBuf::from("/x/huggingface/hub"));
        assert_eq!(cache(&[("HF_HOME", "/f"), ("XDG_CACHE_HOME", "/x")]), PathBuf::from("/f/hub"));
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), PathBuf::from("/c"));
    }

    #[test]
    fn the_token_comes_from_the_variable_or_the_file_and_is_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let home = folder.path().to_str().unwrap();
        let token = |variables: &[(&str, &str)]| settings(variables).unwrap().token;
        assert_eq!(token(&[("HF_HOME", home)]), Token::new("hf_file"));
        assert_eq!(token(&[("HF_HOME", home), ("HF_TOKEN", "hf_var")]), Token::new("hf_var"));
        assert_eq!(token(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert!(!format!("{:?}", token(&[("HF_HOME", home)])).contains("hf_file"));
    }

    #[test]
    fn limits_are_seconds_and_apply_to_their_own_requests() {
        let limits =
            |variables: &[(&str, &str)]| settings(variables).map(|s| (s.inactivity, s.answer_within));
        assert_eq!(limits(&[]).unwrap(), (DEFAULT_INACTIVITY, DEFAULT_INACTIVITY));
        let both = [("HF_HUB_DOWNLOAD_TIMEOUT", "10"), ("HF_HUB_ETAG_TIMEOUT", "2.5")];
        assert_eq!(limits(&both).unwrap(), (Duration::from_secs(10), Duration::from_millis(2500)));
        for wrong in ["0", "-1", "soon", "nan", "1e300"] {
            let error = limits(&[("HF_HUB_ETAG_TIMEOUT", wrong)]).unwrap_err();
            assert!(error.to_string().contains("HF_HUB_ETAG_TIMEOUT"), "{error}");
        }
    }

    #[test]
    fn an_endpoint_keeps_its_path_and_must_be_an_address() {
        let endpoint = |text: &str| settings(&[("HF_ENDPOINT", text)]).map(|s| s.endpoint.to_string());
        assert_eq!(endpoint("http://mirror.local/hub").unwrap(), "http://mirror.local/hub/");
        assert_eq!(endpoint("https://mirror.local/").unwrap(), "https://mirror.local/");
        assert!(matches!(endpoint("mirror.local"), Err(DownloadError::Setting { .. })));
        assert!(matches!(endpoint("file:///x"), Err(DownloadError::Setting { .. })));
    }
}
