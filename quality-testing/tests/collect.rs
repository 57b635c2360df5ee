//! Collecting from an API that fails in every way it can.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gguf_tools::progress::{Silent, StopFlag};
use quality_testing::cases::CaseSet;
use quality_testing::collect::{CollectError, Collected, Prompt, Retry, Settings, collect};
use test_vectors::server::{Length, Request, Response, Server};

const KEY: &str = "sk-very-secret";

fn settings(server: &Server) -> Settings {
    Settings {
        endpoint: format!("{}/chat/completions", server.url()),
        model: "deepseek-v4-pro".to_owned(),
        label: "Test-Checkpoint".to_owned(),
        max_tokens: 4,
        top_logprobs: 2,
        per_minute: None,
        timeout: Duration::from_secs(5),
        retry: Retry {
            attempts: 4,
            first_wait: Duration::from_millis(2),
            longest_wait: Duration::from_millis(8),
            longest_asked_wait: Duration::from_secs(2),
        },
    }
}

fn prompts(n: usize) -> Vec<Prompt> {
    let prompt =
        |i| Prompt { id: format!("case_{i}"), kind: Some("test".into()), text: format!("question {i}") };
    (0..n).map(prompt).collect()
}

/// What the API answers to a question, in mid-future so that no date is known.
fn answer(request: &Request) -> String {
    let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
    let prompt = body["messages"][0]["content"].as_str().unwrap();
    let text = format!("answer to {prompt}");
    serde_json::json!({
        "id": "x", "created": 2_000_000_000u64, "model": "deepseek-v4-pro",
        "choices": [{
            "index": 0, "finish_reason": "length", "message": { "role": "assistant", "content": text },
            "logprobs": { "content": [{
                "token": text, "bytes": text.as_bytes(), "logprob": -0.25,
                "top_logprobs": [{ "token": text, "bytes": text.as_bytes(), "logprob": -0.25 }],
            }] },
        }],
    })
    .to_string()
}

fn run(settings: &Settings, n: usize, folder: &Path) -> (Result<Collected, CollectError>, Vec<String>) {
    let mut notes = Vec::new();
    let result =
        collect(settings, &prompts(n), folder, KEY, &Silent, &mut |note| notes.push(note.to_owned()));
    (result, notes)
}

/// Answers the first requests by these, later ones properly.
fn failing_first(failures: Vec<Response>) -> Server {
    let next = AtomicUsize::new(0);
    Server::start(move |request| {
        let n = next.fetch_add(1, Ordering::SeqCst);
        failures.get(n).cloned().unwrap_or_else(|| Response::ok(answer(request)))
    })
}

#[test]
fn what_is_recorded_is_a_case_set_and_is_not_asked_for_again() {
    // The API keeps a slow connection open by blank lines in front of the answer.
    let server = Server::start(|request| Response::ok(format!("\n\n{}", answer(request))));
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&server);
    let (result, _) = run(&settings, 3, folder.path());
    assert_eq!(result.unwrap().n_asked, 3);
    let request = &server.requests()[1];
    assert_eq!((request.method.as_str(), request.path.as_str()), ("POST", "/chat/completions"));
    assert_eq!(request.header("authorization"), Some("Bearer sk-very-secret"));
    let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
    assert_eq!(body["messages"], serde_json::json!([{ "role": "user", "content": "question 1" }]));
    assert_eq!(body["logprobs"], true);
    assert_eq!(
        (&body["top_logprobs"], &body["max_tokens"], &body["temperature"]),
        (&2.into(), &4.into(), &0.into())
    );
    assert_eq!(body["thinking"]["type"], "disabled");

    let set = CaseSet::open(folder.path(), None).unwrap();
    assert_eq!(set.label.as_ref().unwrap().label, "Test-Checkpoint");
    assert!(set.label.as_ref().unwrap().stated);
    assert_eq!(set.cases[2].continuation, b"answer to question 2");
    assert_eq!(set.cases[2].recorded[0].log_probability, -0.25);
    assert_eq!(set.cases[2].kind.as_deref(), Some("test"));
    let raw = std::fs::read_to_string(folder.path().join("responses/case_1.json")).unwrap();
    assert_eq!(raw, format!("\n\n{}", answer(request)), "raw responses are kept as they came");

    let (again, _) = run(&settings, 5, folder.path());
    let again = again.unwrap();
    assert_eq!((again.n_asked, again.n_cases), (2, 5));
    assert_eq!(server.requests().len(), 5, "every case is asked for once");
}

#[test]
fn what_passes_is_tried_again_with_growing_waits() {
    let cut = |bytes: usize| Response::ok("x".repeat(1000)).cut_after(bytes);
    let failures = [
        vec![Response::status(500).body("down"), Response::status(503)],
        vec![Response::status(429).body(r#"{"error":{"message":"slow down"}}"#), Response::dropped()],
        vec![cut(0), cut(10), cut(999)],
        vec![Response::ok("{\"choices\": [").length(Length::True), Response::ok("<html>busy</html>")],
        vec![Response::ok("").length(Length::Claimed(50))],
    ];
    for failures in failures {
        let n_failures = failures.len();
        let server = failing_first(failures);
        let folder = tempfile::tempdir().unwrap();
        let (result, notes) = run(&settings(&server), 2, folder.path());
        assert_eq!(result.unwrap().n_cases, 2);
        assert_eq!(notes.len(), n_failures, "{notes:?}");
        assert_eq!(server.requests().len(), n_failures + 2);
        assert_eq!(CaseSet::open(folder.path(), None).unwrap().cases.len(), 2, "nothing twice, nothing lost");
    }
}

#[test]
fn an_asked_for_wait_is_kept_and_one_too_long_ends_the_run() {
    let server = failing_first(vec![Response::status(429).header("Retry-After", "1")]);
    let folder = tempfile::tempdir().unwrap();
    let started = Instant::now();
    let (result, notes) = run(&settings(&server), 1, folder.path());
    assert_eq!(result.unwrap().n_asked, 1);
    assert!(started.elapsed() >= Duration::from_secs(1), "{notes:?}");
    let server = failing_first(vec![Response::status(503).header("retry-after", "3600")]);
    let (result, _) = run(&settings(&server), 1, tempfile::tempdir().unwrap().path());
    assert!(matches!(result, Err(CollectError::AskedToWait { seconds: 3600, .. })));
    let date = "Fri, 31 Dec 2100 23:59:59 GMT";
    let server = failing_first(vec![Response::status(503).header("retry-after", date)]);
    let (result, _) = run(&settings(&server), 1, tempfile::tempdir().unwrap().path());
    assert!(matches!(result, Err(CollectError::AskedToWait { .. })));
}

#[test]
fn refusals_that_do_not_pass_end_the_run_and_keep_what_is_finished() {
    let body = format!(r#"{{"error":{{"message":"no: {KEY}"}}}}"#);
    for (status, part) in [
        (401, "refuses the key"),
        (402, "no balance"),
        (403, "refuses the key"),
        (400, "--model"),
        (422, "--model"),
        (302, "redirects"),
    ] {
        let failure = Response::status(status).body(body.clone()).header("location", "http://elsewhere/");
        let next = AtomicUsize::new(0);
        let server = Server::start(move |request| match next.fetch_add(1, Ordering::SeqCst) {
            1 => failure.clone(),
            _ => Response::ok(answer(request)),
        });
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(&server);
        let (result, notes) = run(&settings, 3, folder.path());
        let message = result.unwrap_err().to_string();
        assert!(message.contains(part), "{status}: {message}");
        assert!(!message.contains(KEY), "the key is never shown: {message}");
        assert!(notes.is_empty() && server.requests().len() == 2, "no second attempt");
        assert_eq!(CaseSet::open(folder.path(), None).unwrap().cases.len(), 1, "what is finished is listed");
        let (result, _) = run(&settings, 3, folder.path());
        assert_eq!(result.unwrap().n_asked, 2, "and the rest is asked for later");
    }
}

#[test]
fn attempts_are_bounded() {
    let server = Server::scripted(vec![Response::status(500).body("broken")]);
    let folder = tempfile::tempdir().unwrap();
    let (result, _) = run(&settings(&server), 1, folder.path());
    let message = result.unwrap_err().to_string();
    assert!(message.contains("4 attempts") && message.contains("500: broken"), "{message}");
    assert_eq!(server.requests().len(), 4);
    // Nobody listens any more.
    let settings = settings(&server);
    drop(server);
    let (result, _) = run(&settings, 1, folder.path());
    assert!(matches!(result, Err(CollectError::GaveUp { .. })));
}

#[test]
fn a_silent_api_is_not_waited_for_without_end() {
    let server = Server::scripted(vec![Response::ok("late").delay(Duration::from_hours(1))]);
    let mut settings = settings(&server);
    (settings.timeout, settings.retry.attempts) = (Duration::from_millis(100), 2);
    let (result, _) = run(&settings, 1, tempfile::tempdir().unwrap().path());
    assert!(matches!(result, Err(CollectError::GaveUp { attempts: 2, .. })));
}

#[test]
fn answers_that_say_nothing_or_come_from_elsewhere_are_not_recorded() {
    let change = |from: &'static str, to: &'static str| {
        let next = AtomicUsize::new(0);
        Server::start(move |request| {
            let text = answer(request);
            let second = next.fetch_add(1, Ordering::SeqCst) == 1;
            Response::ok(if second { text.replace(from, to) } else { text })
        })
    };
    let cases = [
        ("\"content\":\"answer to question 1\"", "\"content\":\"\"", "it is empty"),
        ("\"logprobs\":", "\"nothing\":", "no log-probabilities"),
        ("\"length\"", "\"content_filter\"", "filter"),
        ("\"model\":\"deepseek-v4-pro\"", "\"model\":\"deepseek-v5\"", "moved to another checkpoint"),
    ];
    for (from, to, part) in cases {
        let server = change(from, to);
        let folder = tempfile::tempdir().unwrap();
        let (result, _) = run(&settings(&server), 3, folder.path());
        let message = result.unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
        assert_eq!(CaseSet::open(folder.path(), None).unwrap().cases.len(), 1);
        assert!(
            !folder.path().join("responses/case_1.json").exists(),
            "a response that is refused is no record"
        );
    }
    // A date at which it is known which checkpoint answered.
    let server = Server::start(|request| Response::ok(answer(request).replace("2000000000", "1790000000")));
    let (result, _) = run(&settings(&server), 1, tempfile::tempdir().unwrap().path());
    assert!(matches!(result, Err(CollectError::WrongLabel { known, .. }) if known == "DeepSeek-V4-Pro-0813"));
}

#[test]
fn a_crash_between_a_response_and_its_record_costs_nothing() {
    let server = Server::start(|request| Response::ok(answer(request)));
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&server);
    run(&settings, 3, folder.path()).0.unwrap();
    let journal = folder.path().join("journal.jsonl");
    let whole = std::fs::read_to_string(&journal).unwrap();
    // The last record was cut in the middle of its line.
    std::fs::write(&journal, &whole[..whole.len() - 20]).unwrap();
    let (result, _) = run(&settings, 3, folder.path());
    let collected = result.unwrap();
    assert_eq!((collected.n_asked, collected.n_adopted, collected.n_cases), (0, 1, 3));
    assert_eq!(std::fs::read_to_string(&journal).unwrap(), whole);
    // A response that was cut with it is asked for again.
    std::fs::write(&journal, &whole[..whole.len() - 20]).unwrap();
    std::fs::write(folder.path().join("responses/case_2.json"), "{\"cho").unwrap();
    assert_eq!(run(&settings, 3, folder.path()).0.unwrap().n_asked, 1);
    assert_eq!(server.requests().len(), 4);
}

#[test]
fn another_job_in_the_same_folder_is_refused_by_what_differs() {
    let server = Server::start(|request| Response::ok(answer(request)));
    let folder = tempfile::tempdir().unwrap();
    let first = settings(&server);
    run(&first, 2, folder.path()).0.unwrap();
    let other = Settings { label: "Other".to_owned(), ..first.clone() };
    let message = run(&other, 2, folder.path()).0.unwrap_err().to_string();
    assert!(message.contains("`label` is \"Test-Checkpoint\" there and \"Other\" now"), "{message}");
    let mut changed = prompts(2);
    changed[1].text.push('!');
    let refused = collect(&first, &changed, folder.path(), KEY, &Silent, &mut |_| {});
    assert!(matches!(refused, Err(CollectError::PromptChanged { id }) if id == "case_1"));
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn a_key_is_sent_encrypted_or_to_this_machine_only_and_an_interrupted_run_goes_on() {
    let server = Server::start(|request| Response::ok(answer(request)));
    let folder = tempfile::tempdir().unwrap();
    let good = settings(&server);
    let plain = Settings { endpoint: "http://api.example.com/chat".to_owned(), ..good.clone() };
    assert!(matches!(run(&plain, 1, folder.path()).0, Err(CollectError::BadEndpoint { .. })));
    let folder = tempfile::tempdir().unwrap();
    let bad_key = collect(&good, &prompts(1), folder.path(), "two\nlines", &Silent, &mut |_| {});
    assert!(matches!(bad_key, Err(CollectError::BadKey)));
    let stopped = StopFlag::default();
    stopped.stop();
    let result = collect(&good, &prompts(2), folder.path(), KEY, &stopped, &mut |_| {});
    assert!(matches!(result, Err(CollectError::Interrupted)));
    assert_eq!(run(&good, 2, folder.path()).0.unwrap().n_asked, 2);
}

#[test]
fn the_rate_is_kept() {
    let server = Server::start(|request| Response::ok(answer(request)));
    let settings = Settings { per_minute: Some(600), ..settings(&server) };
    let started = Instant::now();
    run(&settings, 4, tempfile::tempdir().unwrap().path()).0.unwrap();
    assert!(started.elapsed() >= Duration::from_millis(300), "{:?}", started.elapsed());
}
