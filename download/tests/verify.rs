//! Reading what was downloaded again, and fetching only what is missing or wrong.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::*;
use download::{
    Destination, DownloadError, Downloader, FileCheck, Reference, Request, VerifyOptions, VerifyReport,
};
use test_vectors::hub::{COMMIT, LoopbackHub, Published, noise};

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
const N_BYTES: usize = 700_001;

fn hub() -> LoopbackHub {
    let files = vec![
        Published::small("config.json", "{}\n"),
        Published::large(SHARDS[0], noise(N_BYTES, 1)),
        Published::large(SHARDS[1], noise(N_BYTES, 2)),
        Published::small("unwanted.md", "words"),
    ];
    LoopbackHub::start(REPOSITORY, files, |_, response| response)
}

fn verify(
    hub: &LoopbackHub,
    folder: &Path,
    options: VerifyOptions,
    log: &Log,
) -> Result<VerifyReport, DownloadError> {
    Downloader::new(settings(&hub.hub.url(), folder))?.verify(folder, &options, log)
}

fn fetching() -> VerifyOptions {
    VerifyOptions { fetch: true, ..VerifyOptions::default() }
}

fn state(report: &VerifyReport, path: &str) -> FileCheck {
    report.files.iter().find(|file| file.path == path).unwrap().state
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x80;
    fs::write(path, bytes).unwrap();
}

fn download(hub: &LoopbackHub, root: &Path, destination: Destination) -> PathBuf {
    let request = Request {
        exclude: vec!["*.md".to_owned()],
        destination,
        ..request(&format!("hf:{REPOSITORY}"), root)
    };
    get(settings(&hub.hub.url(), root), &request, &Log::default()).unwrap().place
}

/// A wrong byte anywhere is found, named by piece, and only that piece is fetched again.
#[test]
fn wrong_bytes_and_missing_files_are_named_and_only_they_are_fetched() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let folder = root.path();
    download(&hub, folder, Destination::Folder(folder.to_owned()));
    let sound = verify(&hub, folder, fetching(), &Log::default()).unwrap();
    assert!(sound.is_sound());
    assert_eq!(sound.files.len(), 3);

    for at in [0, N_BYTES / 3, N_BYTES - 1] {
        flip(&folder.join(SHARDS[0]), at);
        let report = verify(&hub, folder, VerifyOptions::default(), &Log::default()).unwrap();
        assert!(!report.is_sound());
        assert_eq!(state(&report, SHARDS[0]), FileCheck::Wrong);
        assert_eq!(state(&report, SHARDS[1]), FileCheck::Right);

        let (log, before) = (Log::default(), hub.storage.body_bytes_sent());
        let report = verify(&hub, folder, fetching(), &log).unwrap();
        assert!(report.is_sound());
        let file = report.files.iter().find(|file| file.path == SHARDS[0]).unwrap();
        let piece = at as u64 / u64::from(PIECE_BYTES);
        let start = piece * u64::from(PIECE_BYTES);
        let end = (start + u64::from(PIECE_BYTES)).min(N_BYTES as u64);
        assert_eq!(file.wrong_pieces, [(start, end)]);
        assert!(log.text().contains(&format!("piece: {piece},")), "{}", log.text());
        assert_eq!(hub.storage.body_bytes_sent() - before, end - start, "only the piece came");
        assert_eq!(fs::read(folder.join(SHARDS[0])).unwrap(), noise(N_BYTES, 1));
    }

    fs::remove_file(folder.join(SHARDS[1])).unwrap();
    let before = hub.storage.body_bytes_sent();
    let report = verify(&hub, folder, fetching(), &Log::default()).unwrap();
    assert_eq!(state(&report, SHARDS[1]), FileCheck::Missing);
    assert!(report.is_sound());
    assert_eq!(hub.storage.body_bytes_sent() - before, N_BYTES as u64);
    assert!(!folder.join("unwanted.md").exists(), "what was never asked for is not missing");
}

#[test]
fn a_cut_or_lengthened_file_keeps_its_right_pieces() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let folder = root.path();
    download(&hub, folder, Destination::Folder(folder.to_owned()));
    let whole = noise(N_BYTES, 1);
    let mut longer = whole.clone();
    longer.extend(b"tail");
    for (bytes, most) in [(&whole[..N_BYTES / 2], N_BYTES / 2 + PIECE_BYTES as usize), (&longer[..], 0)] {
        fs::write(folder.join(SHARDS[0]), bytes).unwrap();
        let before = hub.storage.body_bytes_sent();
        let report = verify(&hub, folder, fetching(), &Log::default()).unwrap();
        assert_eq!(state(&report, SHARDS[0]), FileCheck::Wrong);
        assert_eq!(fs::read(folder.join(SHARDS[0])).unwrap(), whole);
        assert!(hub.storage.body_bytes_sent() - before <= most as u64);
    }
}

#[test]
fn a_snapshot_of_the_cache_is_checked_by_the_names_of_its_blobs() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let snapshot = download(&hub, root.path(), Destination::Cache);
    assert!(snapshot.ends_with(COMMIT));
    flip(&fs::canonicalize(snapshot.join(SHARDS[1])).unwrap(), 200_000);
    fs::remove_file(fs::canonicalize(snapshot.join("config.json")).unwrap()).unwrap();
    let before = hub.storage.body_bytes_sent();
    let report = verify(&hub, &snapshot, fetching(), &Log::default()).unwrap();
    assert_eq!(state(&report, SHARDS[0]), FileCheck::Right);
    assert_eq!(state(&report, SHARDS[1]), FileCheck::Wrong);
    assert_eq!(state(&report, "config.json"), FileCheck::Missing);
    assert!(report.is_sound());
    assert_eq!(hub.storage.body_bytes_sent() - before, u64::from(PIECE_BYTES));
    assert_eq!(fs::read(snapshot.join(SHARDS[1])).unwrap(), noise(N_BYTES, 2));
    assert_eq!(fs::read(snapshot.join("config.json")).unwrap(), b"{}\n");
}

/// A folder that another tool filled: the hub's digests say which files are wrong, and comparing says which pieces.
#[test]
fn files_of_other_tools_are_repaired_by_the_hubs_word() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let folder = root.path();
    let error = verify(&hub, folder, fetching(), &Log::default()).unwrap_err();
    assert!(matches!(error, DownloadError::NoRecord { .. }), "{error}");
    fs::write(folder.join("config.json"), "{}\n").unwrap();
    fs::write(folder.join(SHARDS[0]), noise(N_BYTES, 1)).unwrap();
    flip(&folder.join(SHARDS[0]), 300_000);
    let Reference::Hub(reference) = Reference::parse(&format!("hf:{REPOSITORY}")).unwrap() else {
        unreachable!()
    };
    let options = VerifyOptions {
        from: Some(reference),
        include: vec!["*0001-of*".to_owned(), "config*".to_owned()],
        ..fetching()
    };
    let log = Log::default();
    let report = verify(&hub, folder, options, &log).unwrap();
    assert_eq!(report.files.len(), 2);
    assert_eq!(state(&report, "config.json"), FileCheck::Right);
    assert_eq!(state(&report, SHARDS[0]), FileCheck::Wrong);
    assert!(report.is_sound());
    assert_eq!(fs::read(folder.join(SHARDS[0])).unwrap(), noise(N_BYTES, 1));
    assert_eq!(log.count("Comparing"), 1, "{}", log.text());
    assert!(log.text().contains(&format!("piece: {},", 300_000 / PIECE_BYTES)), "{}", log.text());
}

#[test]
fn a_file_without_an_announced_digest_is_compared_with_its_record() {
    let hub = hub();
    let root = tempfile::tempdir().unwrap();
    let url = format!("{}/{REPOSITORY}/resolve/main/config.json", hub.hub.url());
    get(settings(&hub.hub.url(), root.path()), &request(&url, root.path()), &Log::default()).unwrap();
    let report = verify(&hub, root.path(), fetching(), &Log::default()).unwrap();
    assert_eq!(state(&report, "config.json"), FileCheck::Unchanged);
    flip(&root.path().join("config.json"), 1);
    let report = verify(&hub, root.path(), fetching(), &Log::default()).unwrap();
    assert_eq!(state(&report, "config.json"), FileCheck::Wrong);
    assert!(report.is_sound());
    assert_eq!(fs::read(root.path().join("config.json")).unwrap(), b"{}\n");
}
