//! Doing what a plan says, and leaving behind what the hub's tools expect.

use std::fs::File;
use std::path::PathBuf;

use crate::Downloader;
use crate::error::DownloadError;
use crate::plan::{FileState, Layout, Plan, PlannedFile};
use crate::progress::{Event, Observer};
use crate::transfer::{Fetched, Item, fetch_all};

/// What a download did.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// The file, or the folder that holds all of them.
    pub place: PathBuf,
    /// All files of the plan.
    pub files: Vec<ReportedFile>,
}

/// One file of a report.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ReportedFile {
    /// Path in the repository, or name.
    pub path: String,
    /// Where it is.
    pub target: PathBuf,
    /// Its size.
    pub n_bytes: u64,
    /// `SHA-256` or `git SHA-1`, if it was computed now or known before.
    pub algorithm: Option<&'static str>,
    /// Its digest in hexadecimal.
    pub digest: Option<String>,
    /// Whether the digest was computed now and equals the announced one.
    pub checked: bool,
    /// Whether it was there before.
    pub was_present: bool,
}

impl Downloader {
    /// Fetches what is not there.
    ///
    /// # Errors
    /// If anything of the plan cannot be had whole and right; what came is kept for the next attempt.
    pub fn fetch(&self, plan: &Plan, observer: &dyn Observer) -> Result<Report, DownloadError> {
        // A file that a repository has under two names has one blob.
        let mut items: Vec<Item> = Vec::new();
        for item in plan.files.iter().filter_map(|file| file.item.as_ref()) {
            if items.iter().all(|other| other.target != item.target) {
                items.push(item.clone());
            }
        }
        let n_present = plan.files.iter().filter(|file| file.state == FileState::Present).count();
        let n_bytes = items.iter().filter_map(|item| item.n_bytes).sum();
        observer.event(&Event::Planned { n_files: items.len(), n_bytes, n_present });
        let locks = Self::lock(plan)?;
        let fetched = if items.is_empty() {
            Vec::new()
        } else {
            fetch_all(&self.client, &self.settings, &items, observer)?
        };
        drop(locks);
        let mut files = Vec::with_capacity(plan.files.len());
        for file in &plan.files {
            let position =
                file.item.as_ref().and_then(|item| items.iter().position(|i| i.target == item.target));
            let fetched = position.map(|position| &fetched[position]);
            Self::note(plan, file, fetched)?;
            files.push(reported(file, fetched));
        }
        if let Layout::Cache { cache, commit, revision, .. } = &plan.layout {
            cache.note_revision(revision, commit)?;
        }
        Ok(Report { place: plan.place.clone(), files })
    }

    fn lock(plan: &Plan) -> Result<Vec<File>, DownloadError> {
        let Layout::Cache { cache, links: true, .. } = &plan.layout else { return Ok(Vec::new()) };
        let mut digests: Vec<_> = plan
            .files
            .iter()
            .filter(|file| file.item.is_some())
            .filter_map(|file| file.digest.as_ref())
            .collect();
        digests.sort_unstable_by_key(|digest| digest.hex());
        digests.dedup();
        digests.into_iter().map(|digest| cache.lock(digest)).collect()
    }

    fn note(plan: &Plan, file: &PlannedFile, fetched: Option<&Fetched>) -> Result<(), DownloadError> {
        match &plan.layout {
            Layout::Cache { cache, commit, links: true, .. } => match &file.digest {
                Some(digest) => cache.link(commit, &file.path, digest),
                None => Ok(()),
            },
            Layout::Folder { folder, commit: Some(commit) } => {
                match file.digest.as_ref().or_else(|| fetched.map(|fetched| &fetched.digest)) {
                    Some(digest) => folder.note(&file.path, commit, digest),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

fn reported(file: &PlannedFile, fetched: Option<&Fetched>) -> ReportedFile {
    let digest = fetched.map(|fetched| &fetched.digest).or(file.digest.as_ref());
    ReportedFile {
        path: file.path.clone(),
        target: file.target.clone(),
        n_bytes: fetched.map(|fetched| fetched.n_bytes).or(file.n_bytes).unwrap_or(0),
        algorithm: digest.map(crate::Digest::algorithm),
        digest: digest.map(|digest| digest.hex().to_owned()),
        checked: fetched.is_some_and(|fetched| fetched.checked),
        was_present: fetched.is_none(),
    }
}
