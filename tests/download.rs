//! `ggsmith download` and its relatives as users run them, against a hub on the loopback address.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use test_vectors::hub::{LoopbackHub, Origin, Published, noise, ranged, sha256};
use test_vectors::server::{Body, Response, Server};

const REPOSITORY: &str = "org/model";
const FILE: &str = "m.gguf";
/// Size of a piece that the program uses.
const PIECE_BYTES: u64 = 8 << 20;

/// The program, with a hub and nothing else of this machine's settings.
fn ggsmith(endpoint: &str, home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ggsmith"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HF_") || name.ends_with("_PROXY"))
    {
        command.env_remove(name);
    }
    for name in ["http_proxy", "https_proxy", "all_proxy", "XDG_CACHE_HOME", "SSL_CERT_FILE", "DS4_GGUF_DIR"]
    {
        command.env_remove(name);
    }
    command.env("HF_ENDPOINT", endpoint).env("HF_HOME", home);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn outcome(output: &Output) -> (Option<i32>, String, String) {
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn done(command: &mut Command) -> (String, String) {
    let (code, stdout, stderr) = outcome(&command.output().unwrap());
    assert_eq!(code, Some(0), "{stderr}");
    (stdout, stderr)
}

fn fails(command: &mut Command, expected: i32) -> String {
    let (code, stdout, stderr) = outcome(&command.output().unwrap());
    assert_eq!(code, Some(expected), "{stdout}{stderr}");
    assert!(stdout.is_empty() && !stderr.contains("panicked"), "{stdout}{stderr}");
    stderr
}

fn small_hub() -> LoopbackHub {
    let files = vec![
        Published::large(FILE, noise(300_000, 5)),
        Published::small("config.json", "{}\n"),
        Published::large("other/n.gguf", noise(200_000, 6)),
    ];
    LoopbackHub::start(REPOSITORY, files, |_, response| response)
}

#[test]
fn the_path_is_the_last_line_and_everything_else_goes_to_stderr() {
    let (hub, home) = (small_hub(), tempfile::tempdir().unwrap());
    let name = format!("hf:{REPOSITORY}/{FILE}");
    let download = |extra: &[&str]| {
        let mut command = ggsmith(&hub.hub.url(), home.path());
        command.args(["download", &name]).args(extra);
        command
    };
    let (plan, _) = done(&mut download(&["--dry-run"]));
    assert!(plan.contains("to fetch") && plan.contains("300000"), "{plan}");
    assert_eq!(hub.storage.requests().len(), 0);
    let (stdout, stderr) = done(&mut download(&[]));
    assert_eq!(fs::read(stdout.trim_end()).unwrap(), noise(300_000, 5));
    assert!(stdout.contains("/hub/models--org--model/snapshots/"), "{stdout}");
    assert!(stderr.contains("1 files to fetch") && stderr.contains("as announced"), "{stderr}");
    // No terminal: plain lines, with the file, the total, the rate and the time left.
    let line = stderr.lines().find(|line| line.starts_with("downloading m.gguf at 100 %")).unwrap();
    assert!(line.contains("(0/1 files done): ") && line.contains("/s, ETA "), "{line}");
    assert!(!stderr.contains('\r') && !stderr.contains('\u{1b}'), "{stderr}");
    // A second time it is there, and quiet means quiet.
    let (again, stderr) = done(&mut download(&["--quiet"]));
    assert_eq!((again, stderr.as_str()), (stdout.clone(), ""));
    let (json, _) = done(&mut download(&["--json", "--quiet"]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["files"][0]["was_present"], true);
    // Offline the cache answers, and what it lacks is named.
    let n_requests = hub.hub.requests().len();
    let (offline, _) = done(download(&["--quiet"]).env("HF_HUB_OFFLINE", "1"));
    assert_eq!(offline, stdout);
    let error = fails(
        ggsmith(&hub.hub.url(), home.path())
            .args(["download", &format!("hf:{REPOSITORY}/other/n.gguf")])
            .env("HF_HUB_OFFLINE", "1"),
        1,
    );
    assert!(error.contains("other/n.gguf") && error.contains("HF_HUB_OFFLINE"), "{error}");
    assert_eq!(hub.hub.requests().len(), n_requests);
}

#[test]
fn a_folder_is_filled_linked_and_verified() {
    let (hub, home) = (small_hub(), tempfile::tempdir().unwrap());
    let run = |arguments: &[&str]| {
        let mut command = ggsmith(&hub.hub.url(), home.path());
        command.arg("download").args(arguments).current_dir(home.path());
        command
    };
    let repository = format!("hf:{REPOSITORY}");
    let (stdout, _) = done(&mut run(&[&repository, "--local-dir", "models", "--include", "*.gguf"]));
    assert_eq!(stdout, "models\n");
    assert_eq!(fs::read(home.path().join("models/other/n.gguf")).unwrap(), noise(200_000, 6));
    let file = format!("{repository}/{FILE}");
    let (stdout, _) = done(&mut run(&[&file, "--local-dir", "models", "--link"]));
    assert_eq!(stdout, format!("models/{FILE}\n"));
    assert_eq!(fs::read(home.path().join("ds4flash.gguf")).unwrap(), noise(300_000, 5));

    let (report, _) = done(&mut run(&["verify", "models"]));
    assert!(report.ends_with("2 of 2 files are right in models\n"), "{report}");
    let place = home.path().join("models").join(FILE);
    let mut bytes = fs::read(&place).unwrap();
    bytes[123_456] ^= 1;
    fs::write(&place, bytes).unwrap();
    let (code, report, _) = outcome(&run(&["verify", "models", "--no-fetch"]).output().unwrap());
    assert_eq!(code, Some(1));
    assert!(report.contains(&format!("{FILE}: WRONG\n  bytes 0 to 299999")), "{report}");
    let (report, stderr) = done(&mut run(&["verify", "models"]));
    assert!(report.contains("fetched again and right now"), "{report}");
    assert!(stderr.contains("piece 1 of 1"), "{stderr}");
    assert_eq!(fs::read(place).unwrap(), noise(300_000, 5));
    // A file that is no link is not replaced by one.
    fs::remove_file(home.path().join("ds4flash.gguf")).unwrap();
    fs::write(home.path().join("ds4flash.gguf"), "mine").unwrap();
    let error = fails(&mut run(&[&file, "--local-dir", "models", "--link"]), 1);
    assert!(error.contains("is no link"), "{error}");
}

#[test]
fn wrong_calls_are_exit_2_and_missing_files_exit_1() {
    let (hub, home) = (small_hub(), tempfile::tempdir().unwrap());
    for (arguments, words) in [
        (&["flash-q3"][..], "flash-q2"),
        (&["org/model"], "hf:ORG/NAME"),
        (&["hf:org/model", "--sha256", "12"], "64 hexadecimal digits"),
        (&["hf:org/model", "--sha256", &"a".repeat(64)], "one file"),
        (&["verify", ".", "--from", "flash-q2"], "--from"),
    ] {
        let error = fails(ggsmith(&hub.hub.url(), home.path()).arg("download").args(arguments), 2);
        assert!(error.contains(words), "{error}");
    }
    fails(ggsmith(&hub.hub.url(), home.path()).arg("download"), 2);
    fails(ggsmith("nonsense", home.path()).args(["download", "hf:org/model"]), 2);
    let error = fails(ggsmith(&hub.hub.url(), home.path()).args(["download", "hf:org/model/M.gguf"]), 1);
    assert!(error.contains("`m.gguf`"), "{error}");
    let (list, _) = done(ggsmith(&hub.hub.url(), home.path()).args(["download", "list"]));
    assert!(list.contains("flash-mxfp4") && list.contains("not recorded"), "{list}");
}

/// A hub whose storage sends to each connection at a limited rate.
fn paced_hub(body: Body, bytes_per_step: usize) -> LoopbackHub {
    LoopbackHub::start(REPOSITORY, vec![Published::large(FILE, body)], move |visit, response| {
        if visit.origin == Origin::Storage {
            response.pace(bytes_per_step, Duration::from_millis(5))
        } else {
            response
        }
    })
}

/// Bytes that the program said to be there when it went on.
fn resumed_at(stderr: &str) -> u64 {
    let line = stderr.lines().find(|line| line.contains("resuming at"));
    line.map_or(0, |line| {
        line.split("resuming at ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
    })
}

fn spawn(hub: &LoopbackHub, home: &Path) -> Child {
    ggsmith(&hub.hub.url(), home)
        .args(["download", &format!("hf:{REPOSITORY}/{FILE}"), "--local-dir", "."])
        .current_dir(home)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn wait_for(mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_mins(1), "it never happened");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Killed without warning at twenty places, the download ends with the right bytes, and none of the deaths cost as much as
/// a piece.
#[test]
fn killed_twenty_times_it_still_ends_and_loses_less_than_a_piece_each_time() {
    const N_KILLS: usize = 20;
    const STEP: usize = 32 << 10;
    let block = noise(1 << 20, 11);
    let body = Body { block: block.into(), start: 0, n_bytes: 260_000_001 };
    let expected = sha256(&body);
    let (hub, home) = (paced_hub(body, STEP), tempfile::tempdir().unwrap());
    // Places at random, the same each time; the threads see to the rest.
    let random = noise(N_KILLS * 2, u64::from(std::process::id()));
    let (mut sent, mut there, mut worst) = (0, 0, 0);
    let mut end = |sent_before: u64, stderr: &str| {
        // What the run before this one brought, and what of it was still there when this one began.
        let now = resumed_at(stderr);
        let (brought, kept) = (sent_before - sent, now.saturating_sub(there));
        worst = worst.max(brought.saturating_sub(kept));
        (sent, there) = (sent_before, now);
    };
    for place in random.as_chunks::<2>().0 {
        let sent_before = hub.storage.body_bytes_sent();
        let after = (2 << 20) + u64::from(u16::from_le_bytes(*place)) * 240;
        let mut child = spawn(&hub, home.path());
        wait_for(|| {
            hub.storage.body_bytes_sent() >= sent_before + after || child.try_wait().unwrap().is_some()
        });
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        end(sent_before, &text(&output.stderr));
        if output.status.success() {
            break;
        }
    }
    let sent_before = hub.storage.body_bytes_sent();
    let output = spawn(&hub, home.path()).wait_with_output().unwrap();
    let (code, _, stderr) = outcome(&output);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains(&expected), "{stderr}");
    end(sent_before, &stderr);
    assert!(worst > 0 && worst <= PIECE_BYTES, "{worst} bytes lost in one death");
}

/// Interrupted by the user at 90 %, the program says so, and the next run fetches the rest.
#[cfg(unix)]
#[test]
fn an_interrupted_download_exits_130_and_goes_on_where_it_was() {
    let body = Body { block: noise(1 << 20, 3).into(), start: 0, n_bytes: 64 << 20 };
    let (hub, home) = (paced_hub(body.clone(), 64 << 10), tempfile::tempdir().unwrap());
    let child = spawn(&hub, home.path());
    wait_for(|| hub.storage.body_bytes_sent() >= body.n_bytes * 9 / 10);
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let (code, stdout, stderr) = outcome(&child.wait_with_output().unwrap());
    assert_eq!((code, stdout.as_str()), (Some(130), ""), "{stderr}");
    assert!(stderr.contains("run the same command again"), "{stderr}");
    let before = hub.storage.body_bytes_sent();
    let (code, _, stderr) = outcome(&spawn(&hub, home.path()).wait_with_output().unwrap());
    assert_eq!(code, Some(0), "{stderr}");
    assert!(resumed_at(&stderr) > body.n_bytes * 4 / 5, "{stderr}");
    assert!(hub.storage.body_bytes_sent() - before < body.n_bytes * 15 / 100);
}

/// Peak memory does not grow with the file.
#[cfg(target_os = "linux")]
#[test]
fn memory_stays_below_64_mib() {
    let body = Body { block: noise(1 << 20, 3).into(), start: 0, n_bytes: 400 << 20 };
    let hub = LoopbackHub::start(REPOSITORY, vec![Published::large(FILE, body)], |_, response| response);
    let home = tempfile::tempdir().unwrap();
    let mut child = spawn(&hub, home.path());
    let status = format!("/proc/{}/status", child.id());
    let mut peak_kib = 0;
    while child.try_wait().unwrap().is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        peak_kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(peak_kib);
        std::thread::sleep(Duration::from_millis(5));
    }
    let (code, _, stderr) = outcome(&child.wait_with_output().unwrap());
    assert_eq!(code, Some(0), "{stderr}");
    assert!(peak_kib > 0 && peak_kib < 64 << 10, "{peak_kib} KiB");
}

#[test]
fn proxies_are_asked_and_can_be_excepted() {
    let body: Body = noise(100_000, 1).into();
    let shared = body.clone();
    let proxy = Server::start(move |request| {
        let whole = request.path.starts_with("http://files.invalid/") || request.path.starts_with('/');
        if whole { ranged(request, &shared, "\"e\"") } else { Response::status(502) }
    });
    let home = tempfile::tempdir().unwrap();
    let mut through = ggsmith("http://hub.invalid", home.path());
    through
        .args(["download", "http://files.invalid/a.bin", "--sha256", &sha256(&body)])
        .current_dir(home.path());
    done(through.env("HTTP_PROXY", proxy.url()));
    assert_eq!(fs::read(home.path().join("a.bin")).unwrap(), body.to_vec());
    assert!(proxy.requests().iter().all(|request| request.path == "http://files.invalid/a.bin"));
    let before = proxy.requests().len();
    let mut direct = ggsmith("http://hub.invalid", home.path());
    direct.args(["download", &format!("{}/b.bin", proxy.url())]).current_dir(home.path());
    done(direct.env("HTTP_PROXY", "http://127.0.0.1:1").env("NO_PROXY", "127.0.0.1"));
    assert!(proxy.requests()[before..].iter().all(|request| request.path == "/b.bin"));
}

/// A proxy that is asked for tunnels, and where to they lead. It ends with the test.
fn tunnels(goal: SocketAddr) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let heads = asked.clone();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, heads) = (client.unwrap(), heads.clone());
            std::thread::spawn(move || {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    client.read_exact(&mut byte).unwrap();
                    head.push(byte[0]);
                }
                heads.lock().unwrap().push(text(&head));
                client.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").unwrap();
                let mut server = TcpStream::connect(goal).unwrap();
                let (mut to_server, mut from_client) =
                    (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from_client, &mut to_server);
                    let _ = to_server.shutdown(Shutdown::Write);
                });
                let _ = std::io::copy(&mut server, &mut client);
                let _ = client.shutdown(Shutdown::Both);
            });
        }
    });
    (url, asked)
}

/// Over TLS: the system's roots or those of `SSL_CERT_FILE` decide, proxies see a tunnel and no token, and no redirect
/// leads out of it.
#[test]
fn tls_is_checked_and_goes_through_tunnels() {
    let body: Body = noise(3_000_000, 1).into();
    let shared = body.clone();
    let server = Server::start_tls(move |request| match request.path.as_str() {
        "/away" => Response::status(302).header("location", "http://127.0.0.1:1/a.bin"),
        _ => ranged(request, &shared, "\"e\""),
    });
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("root.pem");
    fs::write(&root, test_vectors::tls::ROOT_PEM).unwrap();
    let download = |path: &str| {
        let mut command = ggsmith(&server.url(), home.path());
        let url = format!("{}/{path}", server.url());
        command.args(["download", &url, "--sha256", &sha256(&body)]).current_dir(home.path());
        command.env("HF_TOKEN", "hf_verysecret").env("SSL_CERT_FILE", &root);
        command
    };
    done(&mut download("a.bin"));
    assert_eq!(fs::read(home.path().join("a.bin")).unwrap(), body.to_vec());
    let authorized = |request: &test_vectors::server::Request| request.header("authorization").is_some();
    assert!(server.requests().iter().all(authorized), "this is the endpoint's origin");

    let (proxy, asked) = tunnels(server.address());
    done(download("b.bin").env("HTTPS_PROXY", proxy));
    assert_eq!(fs::read(home.path().join("b.bin")).unwrap(), body.to_vec());
    let asked = asked.lock().unwrap();
    assert!(!asked.is_empty());
    for head in asked.iter() {
        assert!(head.starts_with(&format!("CONNECT {} ", server.address())), "{head}");
        assert!(!head.contains("secret"), "{head}");
    }

    let error = fails(&mut download("away"), 1);
    assert!(error.contains("which is not safe"), "{error}");
    // Without the root the certificate is nobody's.
    let before = server.requests().len();
    let other = home.path().join("none.pem");
    fs::write(&other, "").unwrap();
    let mut distrusting = download("c.bin");
    let error = fails(distrusting.env("SSL_CERT_FILE", &other), 1);
    assert!(error.contains("its certificate is not trusted") && error.contains("SSL_CERT_FILE"), "{error}");
    assert!(!error.contains("trying again"), "one attempt is enough: {error}");
    assert!(!home.path().join("c.bin").exists());
    assert_eq!(server.requests().len(), before);
}

/// What ds4's users and those of older hub tools have in their scripts.
#[test]
fn conventions_of_other_tools_are_kept() {
    let target = download::catalogue::target("flash-q2").unwrap();
    let listed = &target.files[0];
    let model = Published {
        path: listed.path.clone(),
        body: Body { block: vec![7; 1024].into(), start: 0, n_bytes: listed.bytes.unwrap() },
        large: true,
        digest: listed.sha256.clone().unwrap(),
    };
    let hub = LoopbackHub::start(&target.repository, vec![model], |_, response| response);
    let home = tempfile::tempdir().unwrap();
    let place = |extra: &[&str]| {
        let mut command = ggsmith(&hub.hub.url(), home.path());
        command
            .args(["download", "flash-q2", "--dry-run", "--json"])
            .args(extra)
            .env("DS4_GGUF_DIR", "theirs");
        let plan: serde_json::Value = serde_json::from_str(&done(&mut command).0).unwrap();
        plan["place"].as_str().unwrap().to_owned()
    };
    assert_eq!(place(&[]), format!("theirs/{}", listed.path));
    assert_eq!(place(&["--local-dir", "mine"]), format!("mine/{}", listed.path));
    let cache = home.path().join("cache").display().to_string();
    assert!(place(&["--cache-dir", &cache]).starts_with(&cache));

    let hub = small_hub();
    let mut old = ggsmith(&hub.hub.url(), home.path());
    old.args(["download", &format!("hf:{REPOSITORY}/{FILE}"), "--local-dir", "."]).current_dir(home.path());
    old.args(["--resume-download", "--local-dir-use-symlinks", "False"]);
    let (_, stderr) = done(&mut old);
    assert!(stderr.contains("accepted and ignored"), "{stderr}");
    assert_eq!(fs::read(home.path().join(FILE)).unwrap(), noise(300_000, 5));
}

/// A checkpoint as a repository.
fn published(folder: &Path) -> Vec<Published> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let bytes = fs::read(entry.path()).unwrap();
            if name.ends_with(".safetensors") {
                Published::large(&name, bytes)
            } else {
                Published::small(&name, bytes)
            }
        })
        .collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

#[test]
fn a_plan_of_a_repository_reads_headers_only_and_equals_that_of_the_folder() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("test-vectors/nano/checkpoint");
    let files = published(&folder);
    let n_bytes: u64 = files.iter().filter(|file| file.large).map(|file| file.body.n_bytes).sum();
    let hub = LoopbackHub::start(REPOSITORY, files, |_, response| response);
    let home = tempfile::tempdir().unwrap();
    // Where headers of the hub are copied to is nobody's business; a checkout may well lie there.
    let is_local = |arguments: &[&str]| !arguments.iter().any(|argument| argument.starts_with("hf:"));
    let plan = |arguments: &[&str]| -> serde_json::Value {
        let mut command = ggsmith(&hub.hub.url(), home.path());
        let (stdout, _) = done(command.args(["plan", "--json", "--recipe", "mxfp4"]).args(arguments));
        assert!(is_local(arguments) || !stdout.contains("/tmp"), "{stdout}");
        let mut plan: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        // The header holds the name of the source, which may end on another page of 4096 bytes.
        let tensors = plan["tensors"].as_array_mut().unwrap();
        let first = tensors[0]["offset_bytes"].as_u64().unwrap();
        for tensor in tensors {
            tensor["offset_bytes"] = (tensor["offset_bytes"].as_u64().unwrap() - first).into();
        }
        plan
    };
    let local = plan(&["--hf", folder.to_str().unwrap()]);
    for remote in [plan(&["hf:org/model"]), plan(&["--hf", "hf:org/model@main"])] {
        for part in ["recipe", "families", "tensors", "tensor_bytes", "set_aside"] {
            assert_eq!(remote[part], local[part], "{part}");
        }
    }
    let account = |model: &str| -> serde_json::Value {
        let (stdout, _) = done(ggsmith(&hub.hub.url(), home.path()).args(["account", "--json", model]));
        assert!(is_local(&[model]) || !stdout.contains("/tmp"), "{stdout}");
        serde_json::from_str(&stdout).unwrap()
    };
    let (local, remote) = (account(folder.to_str().unwrap()), account("hf:org/model"));
    for part in ["components", "bytes_per_token", "cache_bytes_per_token"] {
        assert_eq!(remote[part], local[part], "{part}");
    }
    assert!(hub.storage.body_bytes_sent() < n_bytes / 20, "{} of {n_bytes}", hub.storage.body_bytes_sent());
    let error = fails(
        ggsmith(&hub.hub.url(), home.path()).args(["quantize", "--hf", "hf:org/model", "--out", "x"]),
        2,
    );
    assert!(error.contains("ggsmith download hf:org/model"), "{error}");
}

#[test]
fn the_header_of_a_remote_file_is_inspected_as_that_of_a_local_one() {
    let home = tempfile::tempdir().unwrap();
    let made =
        test_vectors::gguf::GgufBytes::small().tensor("large.weight", 0, &[1 << 20], 4 << 20, 1).make().bytes;
    let local = home.path().join(FILE);
    fs::write(&local, &made).unwrap();
    let cut = Published::large("cut.gguf", made[..made.len() - 5000].to_vec());
    let hub = LoopbackHub::start(REPOSITORY, vec![Published::large(FILE, made), cut], |_, response| response);
    let inspect = |name: &str| done(ggsmith(&hub.hub.url(), home.path()).args(["inspect", "--json", name])).0;
    let remote = inspect("hf:org/model/m.gguf");
    assert_eq!(
        remote.replace("hf:org/model/m.gguf", local.to_str().unwrap()),
        inspect(local.to_str().unwrap())
    );
    assert!(remote.contains("hf:org/model/m.gguf"));
    assert!(hub.storage.body_bytes_sent() <= 64 << 10, "{}", hub.storage.body_bytes_sent());
    let (cut, _) = done(ggsmith(&hub.hub.url(), home.path()).args(["inspect", "hf:org/model/cut.gguf"]));
    assert!(cut.contains("TRUNCATED"), "{cut}");
    let error = fails(ggsmith(&hub.hub.url(), home.path()).args(["inspect", "hf:org/model"]), 2);
    assert!(error.contains("cut.gguf, m.gguf") || error.contains("m.gguf, cut.gguf"), "{error}");
    let error = fails(ggsmith(&hub.hub.url(), home.path()).args(["inspect", "hf:org/model/n.gguf"]), 1);
    assert!(error.contains("`m.gguf`"), "{error}");
}
