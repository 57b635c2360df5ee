//! Whole downloads from a hub that behaves.

mod common;

use std::fs;

use common::*;
use download::{Destination, DownloadError, Downloader, Request, Token, VerifyOptions};
use test_vectors::hub::{COMMIT, LoopbackHub, Published, noise};

fn repository() -> Vec<Published> {
    vec![
        Published::small("config.json", "{\"model_type\": \"deepseek_v4\"}\n"),
        Published::large("model-00001-of-00002.safetensors", noise(700_001, 1)),
        Published::large("model-00002-of-00002.safetensors", noise(1_000_000, 2)),
        Published::large("sub/imatrix.dat", noise(300, 3)),
        Published::small("README.md", "words"),
    ]
}

fn hub() -> LoopbackHub {
    LoopbackHub::start(REPOSITORY, repository(), |_, response| response)
}

#[test]
fn a_repository_fills_the_cache_as_the_hub_tool_would_and_comes_only_once() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let request = Request {
        destination: Destination::Cache,
        exclude: vec!["*.md".to_owned()],
        ..request(&format!("hf:{REPOSITORY}"), root.path())
    };
    let log = Log::default();
    let report = get(settings(&hub.hub.url(), root.path()), &request, &log).unwrap();
    let folder = root.path().join("models--org--model");
    assert_eq!(report.place, folder.join("snapshots").join(COMMIT));
    assert_eq!(report.files.len(), 4);
    for file in repository().iter().filter(|file| file.path != "README.md") {
        let place = report.place.join(&file.path);
        assert!(fs::symlink_metadata(&place).unwrap().is_symlink());
        assert_eq!(
            fs::canonicalize(&place).unwrap(),
            folder.canonicalize().unwrap().join("blobs").join(&file.digest)
        );
        assert_eq!(fs::read(&place).unwrap(), file.body.to_vec(), "{}", file.path);
    }
    assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    assert!(report.files.iter().all(|file| file.checked && !file.was_present));

    let bytes_before = hub.storage.body_bytes_sent();
    let again = get(settings(&hub.hub.url(), root.path()), &request, &log).unwrap();
    assert!(again.files.iter().all(|file| file.was_present));
    assert_eq!(hub.storage.body_bytes_sent(), bytes_before);

    // Offline the same answer comes without a request.
    let n_requests = hub.hub.requests().len();
    let offline = download::Settings { offline: true, ..settings(&hub.hub.url(), root.path()) };
    let report = get(offline.clone(), &request, &log).unwrap();
    assert_eq!(report.place, again.place);
    assert_eq!(report.files.len(), 4);
    let mut other = request;
    other.reference = download::Reference::parse("hf:org/other").unwrap();
    let error = get(offline, &other, &log).unwrap_err().to_string();
    assert!(error.contains("hf:org/other") && error.contains("HF_HUB_OFFLINE"), "{error}");
    assert_eq!(hub.hub.requests().len(), n_requests);
}

/// Offline nothing is asked, whatever is wanted.
#[test]
fn offline_no_request_leaves() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let online = settings(&hub.hub.url(), root.path());
    let url = format!("{}/{REPOSITORY}/resolve/main/README.md", hub.hub.url());
    get(online.clone(), &request(&url, root.path()), &Log::default()).unwrap();
    let n_requests = hub.hub.requests().len();
    let offline = download::Settings { offline: true, overwrite: true, ..online };
    let error = get(offline.clone(), &request(&url, root.path()), &Log::default()).unwrap_err();
    assert!(matches!(error, DownloadError::Offline { .. }), "{error}");
    let downloader = Downloader::new(offline).unwrap();
    let download::Reference::Hub(from) = download::Reference::parse(&format!("hf:{REPOSITORY}")).unwrap()
    else {
        unreachable!()
    };
    let options = VerifyOptions { fetch: true, from: Some(from.clone()), include: Vec::new() };
    let error = downloader.verify(root.path(), &options, &Log::default()).unwrap_err();
    assert!(matches!(error, DownloadError::Offline { .. }), "{error}");
    let error = downloader.remote_folder(REPOSITORY, "main", &Log::default()).err().unwrap();
    assert!(matches!(error, DownloadError::Offline { .. }), "{error}");
    let error = downloader.remote_file(&from, "config.json", &Log::default()).err().unwrap();
    assert!(matches!(error, DownloadError::Offline { .. }), "{error}");
    assert_eq!((hub.hub.requests().len(), hub.storage.requests().len()), (n_requests, 0));
}

#[test]
fn a_folder_gets_real_files_and_the_hub_tools_notes() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let log = Log::default();
    let report = get(
        settings(&hub.hub.url(), root.path()),
        &Request {
            include: vec!["*.json".to_owned(), "sub/*".to_owned()],
            ..request(&format!("hf:{REPOSITORY}"), root.path())
        },
        &log,
    )
    .unwrap();
    assert_eq!(report.place, root.path());
    assert_eq!(fs::read(root.path().join("sub/imatrix.dat")).unwrap(), noise(300, 3));
    let note =
        fs::read_to_string(root.path().join(".cache/huggingface/download/sub/imatrix.dat.metadata")).unwrap();
    assert_eq!(note.lines().next(), Some(COMMIT));
    assert!(!root.path().join("README.md").exists());
    let leftovers: Vec<_> = fs::read_dir(root.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(leftovers.len(), 3, "{leftovers:?}");
}

/// C088: the token is for the hub's origin; storage does not see it, and no message has it or a signature.
#[test]
fn the_token_stays_at_the_hub() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let mut settings = settings(&hub.hub.url(), root.path());
    settings.token = Token::new("hf_verysecret");
    let log = Log::default();
    let path = "model-00001-of-00002.safetensors";
    get(settings, &request(&format!("hf:{REPOSITORY}/{path}"), root.path()), &log).unwrap();
    assert!(hub.hub.requests().iter().all(|r| r.header("authorization") == Some("Bearer hf_verysecret")));
    assert!(!hub.storage.requests().is_empty());
    assert!(hub.storage.requests().iter().all(|r| r.header("authorization").is_none()));
    assert!(!log.text().contains("secret"), "{}", log.text());
}

/// C081: every request goes to the endpoint, although the listing names another host for its next page.
#[test]
fn a_mirror_is_asked_for_everything() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let log = Log::default();
    let report =
        get(settings(&hub.hub.url(), root.path()), &request(&format!("hf:{REPOSITORY}"), root.path()), &log)
            .unwrap();
    assert_eq!(report.files.len(), 5);
    let pages = hub.hub.requests().iter().filter(|request| request.path.contains("/tree/")).count();
    assert_eq!(pages, 3);
}

/// C101: a misspelt name is answered with the nearest names, and nothing is fetched.
#[test]
fn a_misspelt_name_gets_near_names_and_nothing_else() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let log = Log::default();
    let error = get_file(&hub, "model-0001-of-0002.safetensors", root.path(), &log).unwrap_err().to_string();
    assert!(error.contains("model-00001-of-00002.safetensors"), "{error}");
    assert!(!error.contains("README"), "{error}");
    assert_eq!(hub.storage.requests().len(), 0);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

/// C096: where links cannot be made real files are put, with one warning.
#[test]
fn without_links_the_snapshot_has_real_files() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let settings = download::Settings { use_links: false, ..settings(&hub.hub.url(), root.path()) };
    let request =
        Request { destination: Destination::Cache, ..request(&format!("hf:{REPOSITORY}"), root.path()) };
    let report = get(settings, &request, &Log::default()).unwrap();
    for file in repository() {
        let place = report.place.join(&file.path);
        assert!(fs::symlink_metadata(&place).unwrap().is_file());
        assert_eq!(fs::read(place).unwrap(), file.body.to_vec());
    }
}

/// C102: the announced size is compared with the free space before anything is fetched.
#[test]
fn a_file_that_cannot_fit_is_refused_at_the_start() {
    let huge = Published {
        path: "huge.gguf".to_owned(),
        body: test_vectors::server::Body { block: vec![7; 1024].into(), start: 0, n_bytes: 1 << 60 },
        large: true,
        digest: "ab".repeat(32),
    };
    let hub = LoopbackHub::start(REPOSITORY, vec![huge], |_, response| response);
    let root = tempfile::tempdir().unwrap();
    let error = get_file(&hub, "huge.gguf", root.path(), &Log::default()).unwrap_err().to_string();
    assert!(error.contains("1152921504606846976") && error.contains("are free"), "{error}");
    assert_eq!(hub.storage.requests().len(), 0);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn a_plan_says_what_is_there_and_fetches_nothing() {
    let (hub, root) = (hub(), tempfile::tempdir().unwrap());
    let downloader = Downloader::new(settings(&hub.hub.url(), root.path())).unwrap();
    let plan = downloader.plan(&request(&format!("hf:{REPOSITORY}"), root.path()), &Log::default()).unwrap();
    assert_eq!(plan.n_bytes(), repository().iter().map(|file| file.body.n_bytes).sum::<u64>());
    assert!(plan.files.iter().all(|file| file.state == download::FileState::Absent));
    assert_eq!(hub.storage.requests().len(), 0);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}
