//! What goes wrong on the way, one test a fault. Names in comments are rows of the collection of public fault cases.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::*;
use download::progress::{Event, Observer};
use download::{Digest, DownloadError, Request, Settings};
use test_vectors::hub::{LoopbackHub, Origin, Published, Visit, noise, ranged, sha256};
use test_vectors::server::{Body, Length, Response, Server};

const FILE: &str = "m.gguf";
const N_BYTES: usize = 1_000_003;

fn content() -> Vec<u8> {
    noise(N_BYTES, 9)
}

fn hub(fault: impl Fn(&Visit<'_>, Response) -> Response + Send + Sync + 'static) -> LoopbackHub {
    LoopbackHub::start(REPOSITORY, vec![Published::large(FILE, content())], fault)
}

fn at_storage(
    fault: impl Fn(&Visit<'_>, Response) -> Response + Send + Sync + 'static,
) -> impl Fn(&Visit<'_>, Response) -> Response + Send + Sync + 'static {
    move |visit, response| if visit.origin == Origin::Storage { fault(visit, response) } else { response }
}

/// One file arrives whole in spite of what the storage does; gives what was told.
fn arrives(fault: impl Fn(&Visit<'_>, Response) -> Response + Send + Sync + 'static) -> String {
    let (hub, root) = (hub(at_storage(fault)), tempfile::tempdir().unwrap());
    let log = Log::default();
    let report = get_file(&hub, FILE, root.path(), &log).unwrap();
    assert!(report.files[0].checked);
    assert_eq!(fs::read(&report.place).unwrap(), content());
    log.text()
}

/// No file arrives; gives the message.
fn fails(fault: impl Fn(&Visit<'_>, Response) -> Response + Send + Sync + 'static) -> String {
    let (hub, root) = (hub(at_storage(fault)), tempfile::tempdir().unwrap());
    let error = get_file(&hub, FILE, root.path(), &Log::default()).unwrap_err().to_string();
    assert!(!root.path().join(FILE).exists(), "bad data under the final name");
    assert!(!error.contains("secret"), "{error}");
    error
}

fn part(root: &Path) -> PathBuf {
    root.join(format!("{FILE}.ggsmith-part"))
}

/// Where the range asked for begins.
fn first_byte(visit: &Visit<'_>) -> usize {
    let range = visit.request.header("range").unwrap();
    range.strip_prefix("bytes=").unwrap().split_once('-').unwrap().0.parse().unwrap()
}

#[test]
fn cut_bodies_go_on_at_the_same_byte() {
    let told =
        arrives(|visit, response| if visit.number % 2 == 0 { response.cut_after(30_000) } else { response });
    assert!(told.contains("Retrying"), "{told}");
}

#[test]
fn dropped_connections_and_server_errors_pass() {
    arrives(|visit, response| match visit.number {
        0 | 3 => Response::dropped(),
        1 => Response::status(503),
        2 => Response::status(500).body("oops"),
        _ => response,
    });
}

/// 429 with Retry-After: nobody asks again before the time is over.
#[test]
fn a_server_that_asks_to_wait_is_obeyed() {
    let asked = std::sync::Mutex::new(Vec::new());
    let asked = std::sync::Arc::new(asked);
    let seen = asked.clone();
    let (hub, root) = (
        hub(at_storage(move |visit, response| {
            seen.lock().unwrap().push(std::time::Instant::now());
            if visit.number == 0 { Response::status(429).header("retry-after", "1") } else { response }
        })),
        tempfile::tempdir().unwrap(),
    );
    let mut settings = settings(&hub.hub.url(), root.path());
    settings.connections = 1;
    settings.retry.longest_wait = Duration::from_secs(2);
    let log = Log::default();
    get(settings, &request(&format!("hf:{REPOSITORY}/{FILE}"), root.path()), &log).unwrap();
    let asked = asked.lock().unwrap();
    assert!(asked[1] - asked[0] >= Duration::from_millis(950), "{:?}", asked[1] - asked[0]);
    assert!(log.text().contains("429"), "{}", log.text());
}

/// C093: a connection that says nothing is dropped; if no other does better, the download ends with an error.
#[test]
fn silence_is_not_waited_for() {
    let hours = Duration::from_hours(5);
    let told = arrives(move |visit, response| match visit.number {
        0 => response.delay(hours),
        1 => response.stall(20_000, hours),
        _ => response,
    });
    assert!(told.contains("no answer in time") && told.contains("nothing came for too long"), "{told}");
    let last = N_BYTES - 10_000;
    let error = fails(move |visit, response| {
        if first_byte(visit) + response.body.n_bytes as usize > last {
            let until = last.saturating_sub(first_byte(visit));
            response.stall(until, hours)
        } else {
            response
        }
    });
    assert!(error.contains("gave up") && error.contains(&format!("of {N_BYTES} bytes done")), "{error}");
}

/// C090: signed links that die after two uses are asked for anew, and the transfer goes on where it was.
#[test]
fn expired_links_are_renewed() {
    let files = vec![Published::large(FILE, content())];
    let hub = LoopbackHub::with_links_for(2, REPOSITORY, files, |_, response| response);
    let root = tempfile::tempdir().unwrap();
    let report = get_file(&hub, FILE, root.path(), &Log::default()).unwrap();
    assert_eq!(fs::read(report.place).unwrap(), content());
    assert_eq!(hub.storage.body_bytes_sent() / 1000, N_BYTES as u64 / 1000, "nothing came twice");
    let links = hub.hub.requests().iter().filter(|request| request.method == "GET").count();
    assert!(links > 2, "{links}");
}

#[test]
fn links_that_never_work_are_given_up() {
    let error = fails(|_, _| Response::status(403).body("<Error>AccessDenied</Error>"));
    assert!(error.contains("gave up") && error.contains("403") && error.contains("AccessDenied"), "{error}");
}

/// C082: a server that refuses whole files is never asked for one; its page is an error with status, host and first line.
#[test]
fn large_files_are_asked_for_by_range() {
    arrives(|visit, response| {
        let ranged = visit.request.header("range").is_some();
        if ranged { response } else { Response::status(400).body("<html>too large</html>") }
    });
    let (hub, root) = (
        LoopbackHub::start(REPOSITORY, vec![Published::small(FILE, "x")], |visit, response| {
            if visit.request.method == "GET" {
                Response::status(400).body("<html><h1>Entry too large</h1></html>")
            } else {
                response
            }
        }),
        tempfile::tempdir().unwrap(),
    );
    let error = get_file(&hub, FILE, root.path(), &Log::default()).unwrap_err().to_string();
    assert!(
        error.contains("400") && error.contains("127.0.0.1") && error.contains("Entry too large"),
        "{error}"
    );
}

/// C083: one wrong byte on the way, once: the piece is named, and it alone is fetched again.
#[test]
fn a_byte_that_was_wrong_once_is_found_by_piece() {
    let wrong = N_BYTES * 6 / 10;
    let spoilt = AtomicUsize::new(0);
    let fault = at_storage(move |visit, response| {
        let first = first_byte(visit);
        let hit = (first..first + response.body.n_bytes as usize).contains(&wrong);
        if !hit || spoilt.fetch_add(1, Ordering::SeqCst) > 0 {
            return response;
        }
        let mut bytes = response.body.to_vec();
        bytes[wrong - first] ^= 0x10;
        response.body(bytes)
    });
    let (hub, root) = (hub(fault), tempfile::tempdir().unwrap());
    let log = Log::default();
    let report = get_file(&hub, FILE, root.path(), &log).unwrap();
    assert_eq!(fs::read(report.place).unwrap(), content());
    let piece = wrong / PIECE_BYTES as usize;
    assert_eq!(log.count("WrongPiece"), 1, "{}", log.text());
    assert!(log.text().contains(&format!("piece: {piece},")), "{}", log.text());
    // The file, at most once more to compare, and the piece.
    let most = 2 * N_BYTES as u64 + u64::from(PIECE_BYTES);
    assert!(hub.storage.body_bytes_sent() <= most);
}

/// C083: a server whose bytes are not those that it announces.
#[test]
fn a_wrong_digest_is_an_error_with_both_digests_and_no_file() {
    let mut wrong = content();
    wrong[N_BYTES * 6 / 10] ^= 1;
    let mut file = Published::large(FILE, wrong);
    let found = file.digest.clone();
    file.digest = sha256(&content().into());
    let expected = file.digest.clone();
    let hub = LoopbackHub::start(REPOSITORY, vec![file], |_, response| response);
    let root = tempfile::tempdir().unwrap();
    let log = Log::default();
    for _ in 0..2 {
        let error = get_file(&hub, FILE, root.path(), &log).unwrap_err();
        assert!(
            matches!(error, DownloadError::Digest { compared_bytes, .. } if compared_bytes == N_BYTES as u64)
        );
        let error = error.to_string();
        assert!(error.contains(&found) && error.contains(&expected), "{error}");
        assert!(!root.path().join(FILE).exists());
    }
    assert_eq!(log.count("WrongPiece"), 0);
}

/// Stops as soon as so many bytes are there.
struct StopAt {
    bytes: u64,
    reached: std::sync::atomic::AtomicBool,
}

impl Observer for StopAt {
    fn event(&self, event: &Event<'_>) {
        if let Event::Progress(progress) = event
            && progress.done_bytes >= self.bytes
        {
            self.reached.store(true, Ordering::SeqCst);
        }
    }

    fn interrupted(&self) -> bool {
        self.reached.load(Ordering::SeqCst)
    }
}

/// Fetches about so much and stops.
fn begin(hub: &LoopbackHub, root: &Path, share: f64) {
    let stop = StopAt { bytes: (share * N_BYTES as f64) as u64, reached: false.into() };
    let downloader = download::Downloader::new(settings(&hub.hub.url(), root)).unwrap();
    let plan = downloader.plan(&request(&format!("hf:{REPOSITORY}/{FILE}"), root), &stop).unwrap();
    let error = downloader.fetch(&plan, &stop).unwrap_err();
    assert!(matches!(error, DownloadError::Interrupted { .. }), "{error}");
}

/// A hub that is slow enough to be interrupted anywhere.
fn slow_hub() -> LoopbackHub {
    hub(at_storage(|_, response| response.pace(8 << 10, Duration::from_millis(25))))
}

/// C084, C091: an interrupted download goes on, whatever happened to the part file meanwhile.
#[test]
fn interrupted_downloads_go_on() {
    type Change = fn(&Path);
    let nothing: Change = |_| {};
    let longer: Change = |root| {
        let mut bytes = fs::read(part(root)).unwrap();
        bytes.extend(b"extra");
        fs::write(part(root), bytes).unwrap();
    };
    let shorter: Change = |root| {
        let bytes = fs::read(part(root)).unwrap();
        fs::write(part(root), &bytes[..N_BYTES / 2]).unwrap();
    };
    for (share, change, most) in [
        (0.3, nothing, 0.75),
        (0.6, nothing, 0.45),
        (0.8, nothing, 0.25),
        (0.6, longer, 0.45),
        (0.6, shorter, 1.0),
    ] {
        let (hub, root) = (slow_hub(), tempfile::tempdir().unwrap());
        begin(&hub, root.path(), share);
        change(root.path());
        let before = hub.storage.body_bytes_sent();
        let log = Log::default();
        let report = get_file(&hub, FILE, root.path(), &log).unwrap();
        assert_eq!(fs::read(report.place).unwrap(), content());
        assert!(log.text().contains("Resuming"), "{}", log.text());
        let sent = (hub.storage.body_bytes_sent() - before) as f64 / N_BYTES as f64;
        assert!(sent <= most, "{share}: {sent} sent again");
    }
}

/// A byte of the part file that changed on disk is found by piece, and that piece alone is fetched again.
#[test]
fn a_byte_that_rots_on_disk_costs_its_piece() {
    let (hub, root) = (slow_hub(), tempfile::tempdir().unwrap());
    begin(&hub, root.path(), 0.8);
    let mut bytes = fs::read(part(root.path())).unwrap();
    // The first pieces are fetched first.
    let place = PIECE_BYTES as usize / 2;
    bytes[place] ^= 1;
    fs::write(part(root.path()), bytes).unwrap();
    let (log, before) = (Log::default(), hub.storage.body_bytes_sent());
    get_file(&hub, FILE, root.path(), &log).unwrap();
    assert_eq!(fs::read(root.path().join(FILE)).unwrap(), content());
    assert_eq!(log.count("WrongPiece"), 1, "{}", log.text());
    assert!(log.text().contains("piece: 0,"));
    let sent = hub.storage.body_bytes_sent() - before;
    assert!(sent <= N_BYTES as u64 * 3 / 10 + u64::from(PIECE_BYTES), "{sent}");
}

/// C086: a part file that is complete is verified and renamed without a request for its bytes.
/// C094: so is one whose rename failed, and until then its data stay.
#[test]
fn a_complete_part_file_only_needs_its_name() {
    let (hub, root) = (hub(|_, response| response), tempfile::tempdir().unwrap());
    struct Blocker(PathBuf);
    impl Observer for Blocker {
        fn event(&self, event: &Event<'_>) {
            // A folder in the place of the file makes the rename fail.
            if matches!(event, Event::Progress(_)) {
                let _ = fs::create_dir_all(self.0.join("x"));
            }
        }
    }
    let target = root.path().join(FILE);
    let downloader = download::Downloader::new(settings(&hub.hub.url(), root.path())).unwrap();
    let blocker = Blocker(target.clone());
    let plan = downloader.plan(&request(&format!("hf:{REPOSITORY}/{FILE}"), root.path()), &blocker).unwrap();
    let error = downloader.fetch(&plan, &blocker).unwrap_err();
    assert!(matches!(error, DownloadError::Rename { .. }), "{error}");
    assert!(error.to_string().contains("ggsmith-part"), "{error}");
    fs::remove_dir_all(&target).unwrap();
    let before = hub.storage.body_bytes_sent();
    get_file(&hub, FILE, root.path(), &Log::default()).unwrap();
    assert_eq!(fs::read(target).unwrap(), content());
    assert_eq!(hub.storage.body_bytes_sent(), before);
}

/// C086: 416 for a range that should be there ends; a server that has a shorter file says so.
#[test]
fn refused_ranges_end() {
    let error = fails(|_, _| Response::status(416).header("content-range", format!("bytes */{N_BYTES}")));
    assert!(error.contains("416"), "{error}");
    let error = fails(|_, _| Response::status(416).header("content-range", "bytes */77"));
    assert!(error.contains("has 77 bytes") && error.contains(&N_BYTES.to_string()), "{error}");
    // Once is a hiccup.
    arrives(|visit, response| if visit.number == 1 { Response::status(416) } else { response });
}

#[test]
fn a_server_without_ranges_gives_the_file_all_the_same() {
    arrives(|_, _| Response::ok(content()).header("etag", "\"whole\""));
}

#[test]
fn a_server_that_forgets_about_ranges_in_between_is_no_harm() {
    arrives(
        |visit, response| {
            if visit.number > 2 { Response::ok(content()).header("etag", "\"whole\"") } else { response }
        },
    );
}

#[test]
fn ranges_of_other_bytes_are_not_taken() {
    arrives(|visit, response| {
        if visit.number % 3 != 0 {
            return response;
        }
        let range = format!("bytes 0-{}/{N_BYTES}", response.body.n_bytes - 1);
        let headers = response.headers.into_iter().filter(|(name, _)| name != "content-range").collect();
        Response { headers, ..Response::status(206) }
            .header("content-range", range)
            .body(content()[..response.body.n_bytes as usize].to_vec())
    });
    let error = fails(|_, response| Response { headers: Vec::new(), ..response });
    assert!(error.contains("Content-Range"), "{error}");
}

/// C099, C100 and relatives: lengths that are not those of the file.
#[test]
fn false_lengths_are_not_believed() {
    // A claimed length beyond the body: the connection ends early, what came is kept.
    arrives(|visit, response| {
        if visit.number % 2 == 0 {
            let claimed = Length::Claimed(response.body.n_bytes + 999);
            response.length(claimed)
        } else {
            response
        }
    });
    // No body at all.
    arrives(|visit, response| if visit.number == 0 { response.cut_after(0) } else { response });
    let error = fails(|_, response| response.cut_after(0));
    assert!(error.contains("gave up"), "{error}");
    // A shorter file than announced.
    let error = fails(|visit, _| ranged(visit.request, &content()[..500].to_vec().into(), "\"x\""));
    assert!(error.contains("has 500 bytes"), "{error}");
}

/// C099: without X-Linked-Size the size is that of the file, not of the page that redirects to it.
#[test]
fn the_length_of_a_redirect_is_not_that_of_the_file() {
    let fault = |visit: &Visit<'_>, mut response: Response| {
        if visit.origin == Origin::Hub {
            response.headers.retain(|(name, _)| name != "x-linked-size");
        }
        response
    };
    let (hub, root) = (hub(fault), tempfile::tempdir().unwrap());
    let report = get_file(&hub, FILE, root.path(), &Log::default()).unwrap();
    assert_eq!(report.files[0].n_bytes, N_BYTES as u64);
    assert_eq!(fs::read(report.place).unwrap(), content());
}

#[test]
fn pages_and_pointers_are_not_saved() {
    let page = "<!DOCTYPE html><html><title>Sign in</title></html>";
    let lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000003\n";
    for (text, found) in [(page, "a web page"), (lfs, "a Git LFS pointer")] {
        let server = Server::scripted(vec![Response::ok(text).header("content-type", "text/html")]);
        let root = tempfile::tempdir().unwrap();
        let url = format!("{}/{FILE}", server.url());
        let error = get(settings(&server.url(), root.path()), &request(&url, root.path()), &Log::default());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(found), "{error}");
        assert!(!root.path().join(FILE).exists());
    }
    // A page in the place of a range, with the range's length.
    let error = fails(|_, response| {
        let mut page = b"<!doctype html><p>captive portal".to_vec();
        page.resize(response.body.n_bytes as usize, b' ');
        response.header("content-type", "text/html; charset=utf-8").body(page)
    });
    assert!(error.contains("a web page"), "{error}");
}

/// Servers that compress although none was asked for, and such as only say so.
#[test]
fn compression_is_refused_and_false_claims_of_it_are_harmless() {
    arrives(|_, response| response.header("content-encoding", "gzip"));
    let error = fails(|_, response| {
        let mut bytes = vec![0x1f, 0x8b, 8, 0];
        bytes.extend(noise(5000, 1));
        let headers = response.headers;
        Response { headers, ..Response::status(206) }.header("content-encoding", "gzip").body(bytes)
    });
    assert!(error.contains("compressed (gzip)"), "{error}");
}

/// The file changes while it is fetched. Without a digest it starts over; with one, the digest decides.
#[test]
fn a_new_etag_in_mid_file_starts_over() {
    let (old, new) = (noise(N_BYTES, 1), noise(N_BYTES, 2));
    let (old_body, new_body): (Body, Body) = (old.into(), new.clone().into());
    let n = AtomicUsize::new(0);
    let server = Server::start(move |request| {
        let first = n.fetch_add(1, Ordering::SeqCst) < 4;
        let (body, etag) = if first { (&old_body, "\"old\"") } else { (&new_body, "\"new\"") };
        ranged(request, body, etag)
    });
    let (root, log) = (tempfile::tempdir().unwrap(), Log::default());
    let url = format!("{}/{FILE}", server.url());
    let report = get(settings(&server.url(), root.path()), &request(&url, root.path()), &log).unwrap();
    assert_eq!(fs::read(&report.place).unwrap(), new);
    assert!(!report.files[0].checked);
    assert_eq!(report.files[0].digest.as_deref(), Some(sha256(&new.into()).as_str()));
    assert_eq!(log.count("Restarted"), 1, "{}", log.text());
    assert!(log.text().contains("old") && log.text().contains("new"));
}

#[test]
fn a_file_that_never_stops_changing_is_given_up() {
    let n = AtomicUsize::new(0);
    let body: Body = content().into();
    let server = Server::start(move |request| {
        ranged(request, &body, &format!("\"{}\"", n.fetch_add(1, Ordering::SeqCst)))
    });
    let root = tempfile::tempdir().unwrap();
    let url = format!("{}/{FILE}", server.url());
    let error = get(settings(&server.url(), root.path()), &request(&url, root.path()), &Log::default());
    assert!(matches!(error, Err(DownloadError::Changing { .. })), "{error:?}");
}

#[test]
fn a_changed_etag_of_the_right_bytes_costs_nothing() {
    arrives(|visit, mut response| {
        response.headers.retain(|(name, _)| name != "etag");
        response.header("etag", format!("\"edge-{}\"", visit.number % 3))
    });
}

/// A file of the same name and size by another digest: pieces of the old one are not used.
#[test]
fn a_republished_file_starts_over() {
    let (hub, root) = (slow_hub(), tempfile::tempdir().unwrap());
    begin(&hub, root.path(), 0.5);
    let new = noise(N_BYTES, 77);
    let hub =
        LoopbackHub::start(REPOSITORY, vec![Published::large(FILE, new.clone())], |_, response| response);
    let log = Log::default();
    get_file(&hub, FILE, root.path(), &log).unwrap();
    assert_eq!(fs::read(root.path().join(FILE)).unwrap(), new);
    assert_eq!(log.count("Restarted"), 1, "{}", log.text());
}

#[test]
fn addresses_need_a_digest_that_fits() {
    let body: Body = content().into();
    let shared = body.clone();
    let server = Server::start(move |request| ranged(request, &shared, "W/\"weak\""));
    let url = format!("{}/dir/{FILE}?download=true", server.url());
    let root = tempfile::tempdir().unwrap();
    let wanted = |digest: &str| Request { sha256: Digest::from_hex(digest), ..request(&url, root.path()) };
    let log = Log::default();
    let error = get(settings(&server.url(), root.path()), &wanted(&"ab".repeat(32)), &log).unwrap_err();
    assert!(matches!(error, DownloadError::Digest { .. }), "{error}");
    assert!(!root.path().join(FILE).exists());
    fs::remove_file(part(root.path())).unwrap();
    let report = get(settings(&server.url(), root.path()), &wanted(&sha256(&body)), &log).unwrap();
    assert!(report.files[0].checked);
    assert_eq!(report.place, root.path().join(FILE));
}

/// No length, no ranges: taken whole if a digest can tell whether it is whole.
#[test]
fn a_body_without_length_needs_a_digest() {
    let body: Body = content().into();
    let shared = body.clone();
    let n = AtomicUsize::new(0);
    let server = Server::start(move |_| {
        let response = Response::ok(shared.clone()).length(Length::Unsaid);
        if n.fetch_add(1, Ordering::SeqCst) == 1 { Response::status(502) } else { response }
    });
    let url = format!("{}/{FILE}", server.url());
    let root = tempfile::tempdir().unwrap();
    let error =
        get(settings(&server.url(), root.path()), &request(&url, root.path()), &Log::default()).unwrap_err();
    assert!(error.to_string().contains("--sha256"), "{error}");
    let wanted = Request { sha256: Digest::from_hex(&sha256(&body)), ..request(&url, root.path()) };
    get(settings(&server.url(), root.path()), &wanted, &Log::default()).unwrap();
    assert_eq!(fs::read(root.path().join(FILE)).unwrap(), content());
}

/// Unfinished downloads of other programs are named and left alone.
#[test]
fn foreign_part_files_are_named_and_never_touched() {
    let hub = hub(|_, response| response);
    for (name, program) in [
        (format!("{FILE}.aria2"), "aria2"),
        (format!("{FILE}.part"), "ds4"),
        (format!("{FILE}.incomplete"), "hub"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let theirs = root.path().join(&name);
        fs::write(&theirs, "theirs").unwrap();
        let error = get_file(&hub, FILE, root.path(), &Log::default()).unwrap_err().to_string();
        assert!(error.contains(&name) && error.contains(program), "{error}");
        let beside = Settings { beside_foreign: true, ..settings(&hub.hub.url(), root.path()) };
        get(beside, &request(&format!("hf:{REPOSITORY}/{FILE}"), root.path()), &Log::default()).unwrap();
        assert_eq!(fs::read_to_string(&theirs).unwrap(), "theirs");
    }
    // What curl leaves has the final name and is too short.
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join(FILE), &content()[..5000]).unwrap();
    let error = get_file(&hub, FILE, root.path(), &Log::default()).unwrap_err().to_string();
    assert!(error.contains("5000 bytes") && error.contains("curl"), "{error}");
    assert_eq!(fs::read(root.path().join(FILE)).unwrap(), &content()[..5000]);
    let overwrite = Settings { overwrite: true, ..settings(&hub.hub.url(), root.path()) };
    get(overwrite, &request(&format!("hf:{REPOSITORY}/{FILE}"), root.path()), &Log::default()).unwrap();
    assert_eq!(fs::read(root.path().join(FILE)).unwrap(), content());
}

#[test]
fn a_second_process_is_kept_out() {
    let (hub, root) = (slow_hub(), tempfile::tempdir().unwrap());
    begin(&hub, root.path(), 0.3);
    let journal = root.path().join(format!("{FILE}.ggsmith-pieces"));
    let other = fs::File::open(journal).unwrap();
    other.lock().unwrap();
    let error = get_file(&hub, FILE, root.path(), &Log::default()).unwrap_err();
    assert!(matches!(error, DownloadError::Locked { .. }), "{error}");
}

#[test]
fn redirects_that_loop_or_lead_nowhere_end() {
    for location in ["/again", "file:///etc/passwd", "::"] {
        let server = Server::scripted(vec![Response::status(302).header("location", location)]);
        let root = tempfile::tempdir().unwrap();
        let url = format!("{}/{FILE}", server.url());
        let error = get(settings(&server.url(), root.path()), &request(&url, root.path()), &Log::default());
        assert!(
            matches!(error, Err(DownloadError::Answer { .. } | DownloadError::Status { .. })),
            "{error:?}"
        );
    }
}

/// A hub that refuses, and one that answers nonsense.
#[test]
fn hubs_that_refuse_or_talk_nonsense_are_named() {
    for (response, words) in [
        (Response::status(401).body("Invalid credentials"), "HF_TOKEN"),
        (Response::status(403).body("gated"), "HF_TOKEN"),
        (Response::ok("<html>"), "HF_ENDPOINT"),
        (Response::ok("{\"sha\": \"../../x\"}"), "HF_ENDPOINT"),
        (Response::status(418).body("teapot"), "418"),
    ] {
        let server = Server::scripted(vec![response]);
        let root = tempfile::tempdir().unwrap();
        let request = request(&format!("hf:{REPOSITORY}"), root.path());
        let error =
            get(settings(&server.url(), root.path()), &request, &Log::default()).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("127.0.0.1"), "{error}");
    }
    let hostile = Published::large("../../evil", "x");
    let hub = LoopbackHub::start(REPOSITORY, vec![hostile], |_, response| response);
    let root = tempfile::tempdir().unwrap();
    let request = request(&format!("hf:{REPOSITORY}"), root.path());
    let error =
        get(settings(&hub.hub.url(), root.path()), &request, &Log::default()).unwrap_err().to_string();
    assert!(error.contains("leads out of the repository"), "{error}");
}
