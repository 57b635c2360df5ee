//! Downloads that finish, resume and are right.
pub mod catalogue;
mod digest;
mod error;
mod fetch;
mod http;
mod hub;
mod part;
mod pieces;
mod plan;
mod probe;
pub mod progress;
mod reference;
pub mod remote;
mod settings;
mod space;
mod stream;
mod transfer;
mod unsized_body;
mod verify;
pub use digest::Digest;
pub use error::DownloadError;
pub use fetch::{Report, ReportedFile};
pub use hub::replace_link;
pub use plan::{Destination, FileState, Plan, PlannedFile, Request};
pub use reference::{DEFAULT_REVISION, HubReference, Reference, fits};
pub use settings::{MAX_CONNECTIONS, PUBLIC_HUB, Retry, Settings, Token};
pub use verify::{FileCheck, VerifiedFile, VerifyOptions, VerifyReport};

/// Downloads files by these settings.
#[derive(Debug)]
pub struct Downloader {
    settings: Settings,
    client: http::Client,
}

impl Downloader {
    /// Prepares requests; sends none.
    ///
    /// # Errors
    /// If the token or the system's certificates cannot be used.
    pub fn new(settings: Settings) -> Result<Self, DownloadError> {
        Ok(Self { client: http::Client::new(&settings)?, settings })
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }
}
