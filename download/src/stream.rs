//! The body of one answer on its way into a part file. The thread of the connection receives and fingerprints; a second one
//! writes, so that neither waits for the other.

use std::io::Read;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::error::DownloadError;
use crate::http::{Answer, Trouble, describe_body, host, recognise};
use crate::part::{Buffer, Part, Run};
use crate::pieces::Fingerprint;
use crate::transfer::Job;

/// A connection hands on what it has when it has so many bytes, even if its buffer would hold more.
const LEAST_READ_BYTES: usize = 64 << 10;
/// Buffers that may wait to be written.
const MAX_UNWRITTEN: usize = 2;

/// Which bytes a body has.
pub(crate) struct Body {
    pub(crate) from: u64,
    /// First byte that is wanted.
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// A body on its way into a part file.
pub(crate) struct Stream<'a> {
    pub(crate) job: &'a Job<'a>,
    pub(crate) part: &'a Part,
    pub(crate) answer: Answer,
    pub(crate) at: u64,
    /// Whether the piece at hand is written: of a whole body, only what is missing is.
    pub(crate) wanted: bool,
    pub(crate) received: &'a mut u64,
}

/// Bytes that are to be written.
struct Filled {
    piece: usize,
    at: u64,
    buffer: Buffer,
    /// Fingerprint of the piece up to their end.
    fingerprint: u128,
}

impl Stream<'_> {
    /// Takes the body up to the end of the run.
    pub(crate) fn pour(mut self, run: &Run, body: &Body) -> Result<(), Trouble> {
        let part = self.part;
        let fingerprint = part.begun(run, self.job.pool.take().space())?;
        std::thread::scope(|scope| {
            let (filled, to_write) = sync_channel(MAX_UNWRITTEN);
            let writer = scope.spawn(move || write(part, to_write));
            let received = self.receive(run, body, fingerprint, &filled);
            drop(filled);
            writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            received
        })
    }

    fn receive(
        &mut self,
        run: &Run,
        body: &Body,
        mut fingerprint: Fingerprint,
        filled: &SyncSender<Filled>,
    ) -> Result<(), Trouble> {
        let part = self.part;
        let encoding = self.answer.encoding();
        let suspicious = self.answer.is_html();
        let mut first = true;
        while self.at < body.end {
            let piece = part.geometry.piece_of(self.at.max(body.start));
            let piece_end = part.geometry.range(piece).end;
            let limit = if self.at < body.start { body.start } else { piece_end.min(body.end) };
            let mut buffer = self.job.pool.take();
            let read = self.fill(&mut buffer, (limit - self.at) as usize);
            if first && !buffer.is_empty() {
                first = false;
                check_start(part, &self.answer, &buffer, encoding.as_deref(), suspicious || self.at == 0)?;
            }
            let at = self.at;
            self.at += buffer.len() as u64;
            if at >= body.start && !buffer.is_empty() {
                if !self.keep(run, piece, at, buffer, &mut fingerprint, filled)? {
                    return Ok(());
                }
                if self.at == piece_end {
                    fingerprint = Fingerprint::new();
                }
            }
            if let Err(problem) = read {
                let what = format!("{}: {problem} at byte {}", host(&self.answer.url), self.at);
                return Err(Trouble::Passing { what, wait: None });
            }
            if self.job.stopped() {
                return Ok(());
            }
        }
        // Lets the connection be used again if the body ends here, as it should.
        let _ = self.answer.response.read(&mut [0]);
        Ok(())
    }

    /// Reads up to `limit` bytes. What came before a failure is in the buffer.
    fn fill(&mut self, buffer: &mut Buffer, limit: usize) -> Result<(), String> {
        let space = buffer.space();
        let limit = limit.min(space.len());
        let mut n = 0;
        let result = loop {
            match self.answer.response.read(&mut space[n..limit]) {
                Ok(0) => break Err("the body ends early".to_owned()),
                Ok(more) => {
                    n += more;
                    if n == limit || n >= LEAST_READ_BYTES {
                        break Ok(());
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => break Err(describe_body(&error)),
            }
        };
        buffer.set_len(n);
        result
    }

    /// Sends what came where it belongs. `false`: the connection is to stop.
    fn keep(
        &mut self,
        run: &Run,
        piece: usize,
        at: u64,
        buffer: Buffer,
        fingerprint: &mut Fingerprint,
        filled: &SyncSender<Filled>,
    ) -> Result<bool, DownloadError> {
        let part = self.part;
        let n_bytes = buffer.len() as u64;
        let piece_start = part.geometry.range(piece).start;
        let mut new_bytes = 0;
        if run.compare {
            fingerprint.update(&buffer);
            let complete = self.at == part.geometry.range(piece).end;
            if complete && !part.compare(piece, fingerprint, self.job.observer)? {
                self.job.meter.lost(u64::from(part.geometry.len(piece)));
            }
        } else {
            if at == piece_start && piece > run.pieces.start {
                let lost = part.needs(piece);
                self.wanted = lost.is_some();
                self.job.meter.lost(lost.unwrap_or(0));
            }
            if !self.wanted {
                return Ok(true);
            }
            fingerprint.update(&buffer);
            let fingerprint = fingerprint.value();
            if filled.send(Filled { piece, at, buffer, fingerprint }).is_err() {
                // The other thread has stopped; it says why.
                return Ok(false);
            }
            new_bytes = n_bytes;
        }
        *self.received += n_bytes;
        let file = (part.name.as_str(), self.at, part.geometry.n_bytes);
        self.job.meter.received(n_bytes, new_bytes, self.job.observer, file);
        Ok(true)
    }
}

/// Writes what comes until there is no more, or the file starts over.
fn write(part: &Part, to_write: Receiver<Filled>) -> Result<(), DownloadError> {
    for Filled { piece, at, buffer, fingerprint } in to_write {
        if !part.write(piece, at, buffer, fingerprint)? {
            break;
        }
    }
    Ok(())
}

/// Looks at the first bytes of a body: they may be something else than the file.
fn check_start(
    part: &Part,
    answer: &Answer,
    start: &[u8],
    encoding: Option<&str>,
    look: bool,
) -> Result<(), Trouble> {
    const GZIP: [u8; 2] = [0x1f, 0x8b];
    if let Some(encoding) = encoding
        && (start.starts_with(&GZIP) || encoding != "gzip")
    {
        // A server that claims an encoding and sends plain bytes is believed; the digest has the last word.
        let what =
            format!("{} sends the file compressed ({encoding}), which was not asked for", host(&answer.url));
        return Err(Trouble::Passing { what, wait: None });
    }
    let is_page = [".html", ".htm", ".xml"].iter().any(|end| part.name.ends_with(end));
    match recognise(start).filter(|_| look && !is_page) {
        Some(unwanted) => Err(Trouble::Final(DownloadError::NotTheFile {
            file: part.name.clone(),
            host: host(&answer.url),
            found: unwanted.found,
            advice: unwanted.advice,
        })),
        None => Ok(()),
    }
}
