//! The one place that makes HTTP clients.

use std::io::Read;
use std::time::Duration;

use reqwest::Url;
use reqwest::blocking::{Client, Response};

/// Time to connect.
const CONNECT: Duration = Duration::from_secs(15);
/// Largest body that is read, bytes.
pub(crate) const LARGEST_BODY: u64 = 256 << 20;

/// A client for one address. `timeout`: of a whole exchange. Redirects are not followed: a key must not go elsewhere.
pub(crate) fn client(url: &Url, timeout: Duration) -> Result<Client, reqwest::Error> {
    // An error means that the process has a provider already.
    drop(rustls::crypto::ring::default_provider().install_default());
    let mut builder = Client::builder()
        .user_agent(concat!("ggsmith/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(CONNECT)
        .timeout(timeout)
        .redirect(reqwest::redirect::Policy::none());
    if is_loopback(url) {
        builder = builder.no_proxy();
    }
    builder.build()
}

/// Whether an address is of this machine.
pub(crate) fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The whole body; an error if it ends before its announced length, or is larger than is believed.
pub(crate) fn body(response: Response) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    response.take(LARGEST_BODY + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST_BODY {
        return Err(std::io::Error::other(format!("the body has more than {LARGEST_BODY} bytes")));
    }
    Ok(bytes)
}

/// An error with its causes, which the HTTP library keeps apart.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        cause = error.source();
    }
    text
}
