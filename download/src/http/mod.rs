//! Requests: ranges, redirects, who may see the token, and what each failure means for the next attempt.

mod answer;
mod wait;

use std::error::Error as _;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::blocking::Response;
use reqwest::header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, HeaderValue, IF_RANGE, LOCATION, RANGE};
use reqwest::{Method, StatusCode, Url};

use answer::first_line;
pub(crate) use answer::{Answer, bare_etag, read_text, recognise};
pub(crate) use wait::{Backoff, Gate};

use crate::error::DownloadError;
use crate::settings::{Settings, Token};

/// Most redirects that are followed for one request.
const MAX_REDIRECTS: usize = 10;

/// What a failed request means for the next attempt.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// It may pass; the server may say when.
    Passing { what: String, wait: Option<Duration> },
    /// The signed address is no longer good; a fresh one may be.
    Expired { what: String },
    /// It will not pass.
    Final(DownloadError),
}

impl From<DownloadError> for Trouble {
    fn from(error: DownloadError) -> Self {
        Self::Final(error)
    }
}

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Ask<'a> {
    pub(crate) method: Method,
    pub(crate) url: &'a Url,
    /// Bytes `first..=last`.
    pub(crate) range: Option<(u64, u64)>,
    /// A strong ETag: the range is only wanted of that version.
    pub(crate) if_range: Option<&'a str>,
    /// Whether redirects to another origin are followed.
    pub(crate) leave_origin: bool,
    /// Whether `url` is itself the goal of an earlier redirect, which may have expired.
    pub(crate) is_link: bool,
    /// Whether this is a question about files, not for one: another limit on silence holds.
    pub(crate) is_question: bool,
}

impl<'a> Ask<'a> {
    pub(crate) fn get(url: &'a Url) -> Self {
        Self {
            method: Method::GET,
            url,
            range: None,
            if_range: None,
            leave_origin: true,
            is_link: false,
            is_question: false,
        }
    }

    pub(crate) fn question(url: &'a Url) -> Self {
        Self { is_question: true, ..Self::get(url) }
    }

    pub(crate) fn head(url: &'a Url) -> Self {
        Self { method: Method::HEAD, leave_origin: false, ..Self::question(url) }
    }
}

/// Sends requests; shared by all connections.
#[derive(Debug)]
pub(crate) struct Client {
    inner: reqwest::blocking::Client,
    hub: Url,
    authorization: Option<HeaderValue>,
    /// Limit on the silence of an answer to a question.
    answer_within: Duration,
    /// If nothing may be asked: where files are looked for instead.
    offline: Option<PathBuf>,
}

impl Client {
    pub(crate) fn new(settings: &Settings) -> Result<Self, DownloadError> {
        // Fails only if it has been installed before, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let inner = reqwest::blocking::Client::builder()
            .user_agent(concat!("ggsmith/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            // Several requests over one connection would share its rate.
            .http1_only()
            .connect_timeout(settings.inactivity)
            // Of the blocking client, a limit on each wait, for the head and for every read of the body.
            .timeout(settings.inactivity)
            .pool_max_idle_per_host(settings.connections)
            .build()
            .map_err(|e| DownloadError::Client { problem: chain(&e.without_url()) })?;
        let authorization = settings.token.as_ref().map(bearer).transpose()?;
        Ok(Self {
            inner,
            hub: settings.endpoint.clone(),
            authorization,
            answer_within: settings.answer_within,
            offline: settings.offline.then(|| settings.cache.clone()),
        })
    }

    /// Sends a request and follows its redirects. Gives answers with status 2xx, 416, and redirects that are not
    /// to be followed.
    pub(crate) fn send(&self, ask: &Ask<'_>) -> Result<Answer, Trouble> {
        // Callers answer from what is there; this is for those that cannot.
        if let Some(looked_in) = self.offline.clone() {
            return Err(Trouble::Final(DownloadError::Offline { wanted: shown(ask.url), looked_in }));
        }
        let mut url = ask.url.clone();
        let mut linked = answer::Linked::default();
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send_once(ask, &url)?;
            linked.note(response.headers());
            let elsewhere = ask.is_link || url.origin() != ask.url.origin();
            if !is_redirect(response.status()) {
                return self.judge(ask, response, url, linked, elsewhere);
            }
            let next = redirect_goal(&response, &url)?;
            if next.origin() != url.origin() && !ask.leave_origin {
                return Ok(Answer { response, url, linked, elsewhere });
            }
            url = next;
        }
        Err(Trouble::Final(DownloadError::Answer {
            host: host(&url),
            what: shown(ask.url),
            problem: format!("it redirects more than {MAX_REDIRECTS} times"),
        }))
    }

    fn send_once(&self, ask: &Ask<'_>, url: &Url) -> Result<Response, Trouble> {
        let mut request = self.inner.request(ask.method.clone(), url.clone());
        if let Some((first, last)) = ask.range {
            request = request.header(RANGE, format!("bytes={first}-{last}"));
            if let Some(etag) = ask.if_range {
                request = request.header(IF_RANGE, etag);
            }
        }
        if ask.is_question {
            request = request.timeout(self.answer_within);
        }
        // Storage hosts have their permission in the signed address; the token is not for them to see.
        if let Some(token) = self.authorization.as_ref().filter(|_| url.origin() == self.hub.origin()) {
            request = request.header(AUTHORIZATION, token.clone());
        }
        request.send().map_err(|error| {
            if let Some(problem) = certificate_problem(&error) {
                return Trouble::Final(DownloadError::Certificate { host: host(url), problem });
            }
            Trouble::Passing {
                what: format!("{}: {}", host(url), describe(&error.without_url())),
                wait: None,
            }
        })
    }

    fn judge(
        &self,
        ask: &Ask<'_>,
        response: Response,
        url: Url,
        linked: answer::Linked,
        elsewhere: bool,
    ) -> Result<Answer, Trouble> {
        let status = response.status();
        if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
            return Ok(Answer { response, url, linked, elsewhere });
        }
        let (host, what) = (host(&url), shown(ask.url));
        let wait = wait::asked_for(response.headers());
        let said = first_line(response);
        let summary = format!("{host} answers {} ({said})", status.as_u16());
        let on_hub = url.origin() == self.hub.origin();
        Err(match status.as_u16() {
            408 | 425 | 429 | 500.. => Trouble::Passing { what: summary, wait },
            // Storage services tell of an expired address by any of these.
            400 | 401 | 403 | 404 | 410 if elsewhere => Trouble::Expired { what: summary },
            status @ (401 | 403) if on_hub => {
                Trouble::Final(DownloadError::Forbidden { host, status, what, said })
            }
            status => Trouble::Final(DownloadError::Status { host, status, what, said }),
        })
    }
}

fn bearer(token: &Token) -> Result<HeaderValue, DownloadError> {
    let mut value =
        HeaderValue::from_str(&format!("Bearer {}", token.reveal())).map_err(|_| DownloadError::Setting {
            setting: "HF_TOKEN",
            found: "(hidden)".to_owned(),
            expected: "a token of letters, digits and underscores",
        })?;
    value.set_sensitive(true);
    Ok(value)
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

fn redirect_goal(response: &Response, from: &Url) -> Result<Url, Trouble> {
    let wrong = |problem: String| {
        Trouble::Final(DownloadError::Answer { host: host(from), what: shown(from), problem })
    };
    let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    let location = location.ok_or_else(|| wrong("it redirects to nowhere".to_owned()))?;
    let next =
        from.join(location).map_err(|e| wrong(format!("it redirects to an address that is none: {e}")))?;
    let downgrade = from.scheme() == "https" && next.scheme() != "https";
    if downgrade || !matches!(next.scheme(), "http" | "https") {
        return Err(wrong(format!(
            "it redirects from {} to {}, which is not safe",
            from.scheme(),
            next.scheme()
        )));
    }
    Ok(next)
}

/// Host and port, for messages.
pub(crate) fn host(url: &Url) -> String {
    let name = url.host_str().unwrap_or("unknown host");
    url.port().map_or_else(|| name.to_owned(), |port| format!("{name}:{port}"))
}

/// An address without query, fragment and credentials, which may be secret.
pub(crate) fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    // Fails for addresses that cannot have credentials, and so have none.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    url.to_string()
}

/// What is wrong with the server's certificate, if that is what failed: no further attempt mends it.
fn certificate_problem(error: &reqwest::Error) -> Option<String> {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(rustls::Error::InvalidCertificate(_)) = cause.downcast_ref() {
            return Some(cause.to_string());
        }
        // An error in an I/O error is not its source.
        let inner = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        source = match inner {
            Some(inner) => Some(inner),
            None => cause.source(),
        };
    }
    None
}

fn describe(error: &reqwest::Error) -> String {
    if error.is_timeout() { "no answer in time".to_owned() } else { chain(error) }
}

/// An error of a body in mid-transfer.
pub(crate) fn describe_body(error: &std::io::Error) -> String {
    let timed_out = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<reqwest::Error>())
        .is_some_and(reqwest::Error::is_timeout);
    if timed_out { "nothing came for too long".to_owned() } else { "the connection broke".to_owned() }
}

/// An error and its causes, which the library keeps apart.
fn chain(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
