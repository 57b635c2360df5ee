//! Looking at files on the hub by their headers alone: copies that have the header and are empty behind it, which the
//! commands for headers read as if they were local.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context;
use download::progress::Silent;
use download::{Downloader, HubReference, Reference, Settings};
use gguf_tools::checkpoint::MAX_HEADER_BYTES;
use gguf_tools::gguf::read_header;
use tempfile::TempDir;

use super::UsageError;

/// Files of a checkpoint that are fetched whole are no larger than this.
const MAX_SMALL_BYTES: u64 = 64 << 20;
/// Headers that are fetched at a time.
const CONNECTIONS: usize = 8;

/// Copies of headers in a folder that is removed when this is dropped. Their data are holes: zeros that nobody may use.
pub(crate) struct Replica {
    folder: TempDir,
    /// The file or folder to open.
    pub path: PathBuf,
}

impl Replica {
    /// A text in which places in the folder are called by their names on the hub.
    pub(crate) fn rename(&self, text: &str) -> String {
        text.replace(&format!("{}/", self.folder.path().display()), "hf:")
    }

    /// An error, likewise.
    pub(crate) fn rename_error(&self, error: &anyhow::Error) -> anyhow::Error {
        anyhow::Error::msg(self.rename(&super::message(error)))
    }
}

/// Whether a path is the name of something on the hub.
pub(crate) fn is_remote(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with("hf:"))
}

fn parse(path: &Path) -> anyhow::Result<HubReference> {
    match Reference::parse(&path.to_string_lossy()) {
        Ok(Reference::Hub(reference)) => Ok(reference),
        Ok(_) => Err(UsageError(format!("`{}` is not of the form hf:ORG/NAME", path.display())).into()),
        Err(error) => Err(UsageError(error.to_string()).into()),
    }
}

/// The header of a GGUF file on the hub, and those of its siblings if it is a shard.
pub(crate) fn gguf(name: &Path) -> anyhow::Result<Replica> {
    let reference = parse(name)?;
    let downloader = Downloader::new(Settings::from_environment()?)?;
    let Some(path) = reference.path.clone() else {
        let listing = downloader.remote_folder(&reference.repository, &reference.revision, &Silent)?;
        let names: Vec<_> = listing
            .files
            .iter()
            .map(|(path, _)| path.as_str())
            .filter(|path| has_ending(path, "gguf"))
            .collect();
        return Err(UsageError(format!(
            "`{}` is a repository; give a file of it, as hf:ORG/NAME/PATH\n  GGUF files there: {}",
            name.display(),
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        ))
        .into());
    };
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let root = folder.path().join(&reference.repository);
    let copy = |path: &str| copy_gguf(&downloader, &reference, path, &root);
    let shards = shard_names(&path).unwrap_or_else(|| vec![path.clone()]);
    let replica = Replica { path: root.join(&path), folder };
    each(&shards, &copy).map_err(|error| replica.rename_error(&error))?;
    Ok(replica)
}

fn has_ending(path: &str, ending: &str) -> bool {
    Path::new(path).extension().is_some_and(|found| found == ending)
}

/// Names of all shards of a set, from the name of one.
fn shard_names(path: &str) -> Option<Vec<String>> {
    let stem = path.strip_suffix(".gguf")?;
    let (rest, n_shards) = stem.rsplit_once("-of-")?;
    let (prefix, shard) = rest.rsplit_once('-')?;
    let number = |text: &str| (text.len() == 5).then(|| text.parse::<usize>().ok()).flatten();
    let n = number(n_shards).filter(|_| number(shard).is_some())?;
    Some((1..=n).map(|shard| format!("{prefix}-{shard:05}-of-{n_shards}.gguf")).collect())
}

fn copy_gguf(
    downloader: &Downloader,
    reference: &HubReference,
    path: &str,
    root: &Path,
) -> anyhow::Result<()> {
    let mut remote = downloader.remote_file(reference, path, &Silent)?;
    let place = root.join(path);
    let header = read_header(&mut remote, &place)?;
    write_hollow(&place, &header, remote.n_bytes())
}

/// Configuration, tokenizer and headers of a checkpoint on the hub.
pub(crate) fn checkpoint(name: &Path) -> anyhow::Result<Replica> {
    let reference = parse(name)?;
    if reference.path.is_some() {
        return Err(UsageError(format!(
            "`{}` is a file; give the repository, as hf:ORG/NAME",
            name.display()
        ))
        .into());
    }
    let downloader = Downloader::new(Settings::from_environment()?)?;
    let listing = downloader.remote_folder(&reference.repository, &reference.revision, &Silent)?;
    let reference = HubReference { revision: listing.commit.clone(), ..reference };
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let root = folder.path().join(&reference.repository);
    let wanted: Vec<String> = listing
        .files
        .into_iter()
        .filter(|(path, n_bytes)| {
            let small =
                ["json", "jinja"].iter().any(|end| has_ending(path, end)) && *n_bytes <= MAX_SMALL_BYTES;
            !path.contains('/') && (small || has_ending(path, "safetensors"))
        })
        .map(|(path, _)| path)
        .collect();
    let copy = |path: &str| copy_of_checkpoint(&downloader, &reference, path, &root);
    let replica = Replica { path: root.clone(), folder };
    each(&wanted, &copy).map_err(|error| replica.rename_error(&error))?;
    // Where a folder that the hub's tool filled has its commit.
    let notes = root.join(".cache/huggingface/download");
    fs::create_dir_all(&notes)?;
    fs::write(notes.join("config.json.metadata"), format!("{}\n", reference.revision))?;
    Ok(replica)
}

fn copy_of_checkpoint(
    downloader: &Downloader,
    reference: &HubReference,
    path: &str,
    root: &Path,
) -> anyhow::Result<()> {
    let mut remote = downloader.remote_file(reference, path, &Silent)?;
    let n_bytes = remote.n_bytes();
    let mut bytes = Vec::new();
    if has_ending(path, "safetensors") {
        (&mut remote).take(8).read_to_end(&mut bytes)?;
        let header = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
        // A wrong length is reported by the reader of the checkpoint, with the file's name.
        remote.take(header.min(MAX_HEADER_BYTES)).read_to_end(&mut bytes)?;
    } else {
        remote.read_to_end(&mut bytes)?;
    }
    write_hollow(&root.join(path), &bytes, n_bytes)
}

/// A file of `n_bytes` with these bytes at its start and a hole behind them.
fn write_hollow(place: &Path, start: &[u8], n_bytes: u64) -> anyhow::Result<()> {
    let write = || {
        fs::create_dir_all(place.parent().unwrap_or(Path::new(".")))?;
        let mut file = File::create(place)?;
        file.write_all(start)?;
        file.set_len(n_bytes)
    };
    write().with_context(|| format!("cannot write `{}`", place.display()))
}

/// Does something for each name, several at a time.
fn each(names: &[String], work: &(dyn Fn(&str) -> anyhow::Result<()> + Sync)) -> anyhow::Result<()> {
    let next = Mutex::new(names.iter());
    let take = || next.lock().ok().and_then(|mut names| names.next());
    std::thread::scope(|scope| {
        let run = || std::iter::from_fn(take).try_for_each(|name| work(name));
        let workers: Vec<_> = (0..CONNECTIONS.min(names.len())).map(|_| scope.spawn(run)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a connection ended unexpectedly")))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_found_by_the_name_of_one() {
        assert_eq!(
            shard_names("sub/m-00002-of-00003.gguf").unwrap(),
            ["sub/m-00001-of-00003.gguf", "sub/m-00002-of-00003.gguf", "sub/m-00003-of-00003.gguf"]
        );
        for whole in ["m.gguf", "m-2-of-3.gguf", "m-00001-of-00003.safetensors", "of-00001.gguf"] {
            assert_eq!(shard_names(whole), None, "{whole}");
        }
    }
}
