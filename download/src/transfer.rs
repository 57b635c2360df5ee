//! Fetching files: connections that take pieces of whichever file has some left.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::Duration;

use reqwest::Url;

use crate::digest::Digest;
use crate::error::DownloadError;
use crate::http::{Answer, Ask, Backoff, Client, Gate, Trouble, host};
use crate::part::{Opening, Part, Pool, Remedy, Run, Verdict};
use crate::probe::{Found, probe};
use crate::progress::{Event, Meter, Observer};
use crate::settings::{MAX_CONNECTIONS, Settings};
use crate::stream::{Body, Stream};
use crate::{space, unsized_body};

/// Most bytes that one request asks for: signed addresses are renewed between requests.
const MAX_RUN_BYTES: u64 = 64 << 20;
/// A file that changes more often while it is fetched is given up.
const MAX_RESTARTS: u32 = 3;

/// One file to be had.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    /// Name for messages.
    pub(crate) name: String,
    /// What the journal calls its source.
    pub(crate) source: String,
    pub(crate) url: Url,
    pub(crate) n_bytes: Option<u64>,
    pub(crate) digest: Option<Digest>,
    pub(crate) target: PathBuf,
    /// Where the record of its pieces is kept afterwards.
    pub(crate) record: Option<PathBuf>,
}

/// A file that is whole and under its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fetched {
    pub(crate) digest: Digest,
    /// Whether it was compared with an announced one.
    pub(crate) checked: bool,
    pub(crate) n_bytes: u64,
}

/// Fetches all files. They are under their final names when this returns well, and only then.
pub(crate) fn fetch_all(
    client: &Client,
    settings: &Settings,
    items: &[Item],
    observer: &dyn Observer,
) -> Result<Vec<Fetched>, DownloadError> {
    let mut found = Vec::with_capacity(items.len());
    for item in items {
        found.push(match item.n_bytes {
            Some(n_bytes) => Found { n_bytes: Some(n_bytes), ..Found::default() },
            None => probe(client, settings, item, observer)?,
        });
    }
    space::check(items.iter().zip(&found).map(|(item, found)| (item.target.as_path(), found.n_bytes)))?;
    let n_bytes = found.iter().filter_map(|found| found.n_bytes).sum();
    let connections = settings.connections.clamp(1, MAX_CONNECTIONS);
    let job = Job {
        client,
        settings,
        items,
        found,
        observer,
        meter: Meter::new(items.len(), n_bytes),
        pool: Pool::new(connections),
        connections,
        gate: Gate::default(),
        queue: Mutex::new(Queue {
            waiting: (0..items.len()).collect(),
            active: Vec::new(),
            n_opening: 0,
            done: vec![None; items.len()],
            failure: None,
        }),
        changed: Condvar::new(),
        stop: AtomicBool::new(false),
    };
    std::thread::scope(|scope| {
        let connections: Vec<_> = (0..job.connections).map(|_| scope.spawn(|| job.work(scope))).collect();
        for connection in connections {
            if connection.join().is_err() {
                job.stop.store(true, Ordering::SeqCst);
            }
        }
        for active in &job.lock().active {
            active.part.stop();
        }
    });
    let queue = job.queue.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(failure) = queue.failure {
        return Err(failure);
    }
    let done: Option<Vec<_>> = queue.done.into_iter().collect();
    let (done_bytes, n_bytes) = job.meter.totals();
    done.ok_or(DownloadError::Interrupted { done_bytes, n_bytes })
}

/// Everything that the connections share.
pub(crate) struct Job<'a> {
    client: &'a Client,
    settings: &'a Settings,
    items: &'a [Item],
    found: Vec<Found>,
    pub(crate) observer: &'a dyn Observer,
    pub(crate) meter: Meter,
    pub(crate) pool: Arc<Pool>,
    connections: usize,
    gate: Gate,
    queue: Mutex<Queue>,
    changed: Condvar,
    stop: AtomicBool,
}

struct Queue {
    waiting: VecDeque<usize>,
    active: Vec<Active>,
    n_opening: usize,
    done: Vec<Option<Fetched>>,
    failure: Option<DownloadError>,
}

#[derive(Clone)]
struct Active {
    index: usize,
    part: Arc<Part>,
}

enum Work {
    Open(usize),
    Run(Active, Run),
    Finish(Active),
}

impl Job<'_> {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.observer.interrupted()
    }

    fn fail(&self, error: DownloadError) {
        let mut queue = self.lock();
        queue.failure.get_or_insert(error);
        self.stop.store(true, Ordering::SeqCst);
        for active in &queue.active {
            active.part.stop();
        }
        drop(queue);
        self.changed.notify_all();
    }

    /// One connection: takes work until there is none.
    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let mut backoff = Backoff::new(self.settings.retry);
        while let Some(work) = self.next() {
            let result = match work {
                Work::Open(index) => self.open(index, scope),
                Work::Finish(active) => self.finish(&active),
                Work::Run(active, run) => self.run(&active, run, &mut backoff),
            };
            if let Err(error) = result {
                self.fail(error);
            }
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = self.lock();
        loop {
            if self.stopped() {
                return None;
            }
            for active in &queue.active {
                if active.part.take_finish() {
                    return Some(Work::Finish(active.clone()));
                }
                if let Some(run) = active.part.take_run(self.connections, MAX_RUN_BYTES) {
                    return Some(Work::Run(active.clone(), run));
                }
            }
            if let Some(index) = queue.waiting.pop_front() {
                queue.n_opening += 1;
                return Some(Work::Open(index));
            }
            if queue.active.is_empty() && queue.n_opening == 0 {
                return None;
            }
            let wait = Duration::from_millis(100);
            queue = self.changed.wait_timeout(queue, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn open<'scope>(
        &'scope self,
        index: usize,
        scope: &'scope Scope<'scope, '_>,
    ) -> Result<(), DownloadError> {
        let (item, found) = (&self.items[index], &self.found[index]);
        let Some(n_bytes) = found.n_bytes else {
            let fetched =
                unsized_body::fetch(self.client, self.settings, item, self.observer, &|| self.stopped())?;
            let mut queue = self.lock();
            queue.n_opening -= 1;
            queue.done[index] = fetched;
            self.meter.file_done();
            return Ok(());
        };
        let opening = Opening {
            name: &item.name,
            source: &item.source,
            target: &item.target,
            n_bytes,
            piece_bytes: self.settings.piece_bytes,
            digest: item.digest.as_ref(),
            etag: found.etag.as_deref(),
        };
        let opened = Part::open(&opening, self.observer);
        let mut queue = self.lock();
        queue.n_opening -= 1;
        let part = Arc::new(opened?);
        if found.no_ranges {
            part.no_ranges();
        }
        part.set_link(found.link.clone());
        let done_bytes = part.done_bytes();
        self.meter.found(done_bytes);
        if done_bytes > 0 {
            self.observer.event(&Event::Resuming { file: &item.name, done_bytes, n_bytes });
        }
        queue.active.push(Active { index, part: part.clone() });
        scope.spawn(move || {
            if let Err(error) = part.follow() {
                self.fail(error);
            }
        });
        Ok(())
    }

    fn finish(&self, active: &Active) -> Result<(), DownloadError> {
        let part = &active.part;
        let item = &self.items[active.index];
        let found = match part.verdict(&|| self.stopped()) {
            Verdict::Stopped => return Ok(()),
            Verdict::Wrong(found) => return self.remedy(part, &found),
            Verdict::Right(found) => found,
        };
        part.finish(item.record.as_deref())?;
        part.stop();
        self.meter.file_done();
        self.observer.event(&Event::Finished {
            file: &item.name,
            path: &item.target,
            digest: found.hex(),
            checked: item.digest.is_some(),
        });
        let mut queue = self.lock();
        queue.active.retain(|other| other.index != active.index);
        let n_bytes = part.geometry.n_bytes;
        queue.done[active.index] = Some(Fetched { digest: found, checked: item.digest.is_some(), n_bytes });
        Ok(())
    }

    fn remedy(&self, part: &Part, found: &Digest) -> Result<(), DownloadError> {
        let expected = part.digest.as_ref().expect("only an expected digest can be wrong");
        let before = part.done_bytes();
        let remedy = part.remedy(self.observer)?;
        self.meter.lost(before.saturating_sub(part.done_bytes()));
        match remedy {
            Remedy::Refetch | Remedy::Continue => Ok(()),
            Remedy::Compare => {
                let (found, expected) = (found.hex(), expected.hex());
                self.observer.event(&Event::Comparing { file: &part.name, found, expected });
                Ok(())
            }
            Remedy::None { compared_bytes } => Err(DownloadError::Digest {
                file: part.name.clone(),
                algorithm: expected.algorithm(),
                found: found.hex().to_owned(),
                expected: expected.hex().to_owned(),
                compared_bytes,
                part: part.path.clone(),
            }),
        }
    }

    /// One request, and what its failure means.
    fn run(&self, active: &Active, run: Run, backoff: &mut Backoff) -> Result<(), DownloadError> {
        self.sleep(self.gate.closed_for());
        let mut received = 0;
        let result = self.fetch(active, &run, &mut received);
        let lost = active.part.release(run.pieces, self.observer)?;
        self.meter.lost(lost);
        if received > 0 {
            backoff.progress();
        }
        let (problem, asked_for) = match result {
            Ok(()) => return Ok(()),
            Err(Trouble::Final(error)) => return Err(error),
            Err(Trouble::Expired { what }) => {
                active.part.set_link(None);
                (what, None)
            }
            Err(Trouble::Passing { what, wait }) => (what, wait),
        };
        // The pieces are free again: another connection may have more luck meanwhile.
        self.changed.notify_all();
        if self.stopped() {
            return Ok(());
        }
        let file = &active.part.name;
        let Some(wait) = backoff.failure(asked_for) else {
            return Err(DownloadError::GaveUp {
                file: file.clone(),
                attempts: backoff.attempts(),
                done_bytes: active.part.done_bytes(),
                n_bytes: active.part.geometry.n_bytes,
                last: problem,
            });
        };
        if asked_for.is_some() {
            self.gate.close_for(wait);
        }
        self.observer.event(&Event::Retrying { file, problem: &problem, wait });
        self.sleep(wait);
        Ok(())
    }

    fn sleep(&self, time: Duration) {
        const STEP: Duration = Duration::from_millis(50);
        let mut left = time;
        while !left.is_zero() && !self.stopped() {
            std::thread::sleep(left.min(STEP));
            left = left.saturating_sub(STEP);
        }
    }

    fn fetch(&self, active: &Active, run: &Run, received: &mut u64) -> Result<(), Trouble> {
        let (part, item) = (&active.part, &self.items[active.index]);
        let start = part.start_of(run);
        let end = part.geometry.range(run.pieces.end - 1).end;
        let (link, if_range, ranged) = (part.link(), part.if_range(), part.ranges());
        let ask = Ask {
            range: ranged.then_some((start, end - 1)),
            if_range: if_range.as_deref(),
            is_link: link.is_some(),
            ..Ask::get(link.as_ref().unwrap_or(&item.url))
        };
        let answer = self.client.send(&ask)?;
        if answer.elsewhere {
            part.set_link(Some(answer.url.clone()));
        }
        let Some(body) = accept(part, &answer, ranged, start..end)? else { return Ok(()) };
        Stream { job: self, part, answer, at: body.from, wanted: true, received }.pour(run, &body)
    }
}

/// Whether the answer is what was asked for. `None`: the request is to be made again in another way.
fn accept(
    part: &Part,
    answer: &Answer,
    ranged: bool,
    wanted: std::ops::Range<u64>,
) -> Result<Option<Body>, Trouble> {
    let host = || host(&answer.url);
    let passing = |what: String| Trouble::Passing { what: format!("{}: {what}", host()), wait: None };
    let wrong_size = |found: u64| {
        let expected = part.geometry.n_bytes;
        Trouble::Final(DownloadError::Size { file: part.name.clone(), host: host(), found, expected })
    };
    if let (Some(announced), Some(Digest::Sha256(expected))) = (&answer.linked.etag, &part.digest)
        && let Some(Digest::Sha256(announced)) = Digest::from_hex(announced)
        && announced != *expected
    {
        return Err(Trouble::Final(DownloadError::Changing {
            file: part.name.clone(),
            before: expected.clone(),
            now: announced,
        }));
    }
    let etag = answer.etag();
    if let Some(before) = part.note_etag(etag.as_deref())? {
        if part.digest.is_none() {
            if part.n_restarts() > MAX_RESTARTS {
                let now = etag.unwrap_or_default();
                return Err(Trouble::Final(DownloadError::Changing { file: part.name.clone(), before, now }));
            }
            return Ok(None);
        }
        if answer.status() == 200 && ranged {
            return Ok(None);
        }
    }
    let n_bytes = part.geometry.n_bytes;
    match answer.status() {
        206 if ranged => {
            let range =
                answer.content_range().ok_or_else(|| passing("206 without Content-Range".to_owned()))?;
            if let Some(total) = range.total.filter(|total| *total != n_bytes) {
                return Err(wrong_size(total));
            }
            let (first, last) = range.bytes.unwrap_or((u64::MAX, 0));
            if first != wanted.start || last < first || last >= n_bytes {
                return Err(passing(format!("asked for byte {}, got {first} to {last}", wanted.start)));
            }
            let end = wanted.end.min(last + 1);
            Ok(Some(Body { from: first, start: first, end }))
        }
        200 => {
            if let Some(found) =
                answer.content_length().filter(|found| *found != n_bytes && answer.encoding().is_none())
            {
                return Err(wrong_size(found));
            }
            if ranged && wanted != (0..n_bytes) {
                part.no_ranges();
                return Ok(None);
            }
            Ok(Some(Body { from: 0, start: wanted.start, end: wanted.end }))
        }
        416 => match answer.content_range().and_then(|range| range.total) {
            Some(found) if found != n_bytes => Err(wrong_size(found)),
            _ => Err(passing(format!("refuses bytes {} to {} (416)", wanted.start, wanted.end - 1))),
        },
        status => Err(passing(format!("answers {status}"))),
    }
}
