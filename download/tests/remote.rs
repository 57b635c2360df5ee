//! Reading parts of files where they lie.

mod common;

use std::io::{Read, Seek, SeekFrom};

use common::*;
use download::progress::Silent;
use download::{DownloadError, Downloader, HubReference};
use test_vectors::hub::{COMMIT, LoopbackHub, Origin, Published, noise};
use test_vectors::server::{Body, Response};

fn reference() -> HubReference {
    HubReference { repository: REPOSITORY.to_owned(), path: None, revision: "main".to_owned() }
}

#[test]
fn reads_in_sequence_double_and_nothing_is_fetched_twice() {
    let content = noise(3_000_000, 4);
    let hub = LoopbackHub::start(REPOSITORY, vec![Published::large("m.gguf", content.clone())], |_, r| r);
    let root = tempfile::tempdir().unwrap();
    let downloader = Downloader::new(settings(&hub.hub.url(), root.path())).unwrap();
    let mut file = downloader.remote_file(&reference(), "m.gguf", &Silent).unwrap();
    assert_eq!((file.n_bytes(), file.fetched_bytes(), file.commit()), (3_000_000, 0, Some(COMMIT)));
    let mut start = vec![0; 1_000_000];
    file.read_exact(&mut start).unwrap();
    assert_eq!(start, content[..1_000_000]);
    // 64 KiB, 128, 256, 512, 1024.
    assert_eq!(hub.storage.requests().len(), 5);
    let before = hub.storage.requests().len();
    file.seek(SeekFrom::Start(10)).unwrap();
    file.read_exact(&mut start[..5]).unwrap();
    assert_eq!(start[..5], content[10..15]);
    assert_eq!(hub.storage.requests().len(), before);
    file.seek(SeekFrom::End(-3)).unwrap();
    let mut end = Vec::new();
    file.read_to_end(&mut end).unwrap();
    assert_eq!(end, content[2_999_997..]);
    assert!(file.seek(SeekFrom::Current(-4_000_000)).is_err());
}

/// Places beyond 300 GB: the range asked for and the bytes that come are the right ones.
#[test]
fn a_header_of_a_file_of_460_gb_costs_kilobytes() {
    let n_bytes = 464_627_334_560;
    let block: Vec<u8> = (0..=250).collect();
    let body = Body { block: block.into(), start: 0, n_bytes };
    let file =
        Published { path: "pro.gguf".to_owned(), body: body.clone(), large: true, digest: "ab".repeat(32) };
    let hub = LoopbackHub::start(REPOSITORY, vec![file], |visit, response| {
        let whole = visit.origin == Origin::Storage && visit.request.header("range").is_none();
        if whole { Response::status(400) } else { response }
    });
    let root = tempfile::tempdir().unwrap();
    let downloader = Downloader::new(settings(&hub.hub.url(), root.path())).unwrap();
    let mut file = downloader.remote_file(&reference(), "pro.gguf", &Silent).unwrap();
    assert_eq!(file.n_bytes(), n_bytes);
    for at in [0, 431_000_000_123, n_bytes - 7] {
        let mut bytes = [0; 7];
        file.seek(SeekFrom::Start(at)).unwrap();
        file.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes.as_slice(), body.slice(at..at + 7).to_vec());
    }
    assert!(file.fetched_bytes() <= 3 * (64 << 10));
    assert_eq!(hub.storage.body_bytes_sent(), file.fetched_bytes());
}

#[test]
fn faults_are_met_as_in_downloads() {
    let content = noise(300_000, 4);
    let files = vec![Published::large("m.gguf", content.clone())];
    let hub = LoopbackHub::with_links_for(2, REPOSITORY, files, |visit, response| {
        match (visit.origin, visit.number) {
            (Origin::Storage, 0) => Response::status(503),
            (Origin::Storage, 1) => response.cut_after(1000),
            _ => response,
        }
    });
    let root = tempfile::tempdir().unwrap();
    let downloader = Downloader::new(settings(&hub.hub.url(), root.path())).unwrap();
    let mut bytes = Vec::new();
    downloader.remote_file(&reference(), "m.gguf", &Silent).unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, content);
    let error = downloader.remote_file(&reference(), "n.gguf", &Silent).err().unwrap();
    assert!(matches!(&error, DownloadError::NoSuchFile { near, .. } if near == &["m.gguf"]), "{error}");
}
