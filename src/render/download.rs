//! What a download says on stderr: a bar on a terminal, a plain line every few seconds otherwise.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use download::progress::{Event, Observer, Progress};
use indicatif::{ProgressBar, ProgressStyle};

use super::progress::interrupted;
use super::units;

/// Time between plain lines.
const BETWEEN_LINES: Duration = Duration::from_secs(5);

/// Shows the events of one download.
pub(crate) struct DownloadReporter {
    bar: Option<ProgressBar>,
    last_line: Mutex<Option<Instant>>,
    quiet: bool,
}

impl DownloadReporter {
    /// A reporter; `quiet` leaves errors only, `plain` takes lines in place of a bar.
    pub(crate) fn new(quiet: bool, plain: bool) -> Self {
        let bar = (!quiet && !plain && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(0);
            bar.set_style(ProgressStyle::with_template("{msg} {wide_bar}").expect("the template is fixed"));
            bar
        });
        Self { bar, last_line: Mutex::new(None), quiet }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            _ if self.quiet => {}
            Some(bar) => bar.suspend(|| print(text)),
            None => print(text),
        }
    }

    /// Whether it is time for another plain line.
    fn due(&self, last: bool) -> bool {
        let Ok(mut last_line) = self.last_line.lock() else { return false };
        let now = Instant::now();
        let due = last || last_line.is_none_or(|line| now - line >= BETWEEN_LINES);
        if due {
            *last_line = Some(now);
        }
        due
    }

    fn progress(&self, progress: &Progress<'_>) {
        let eta = progress.eta.map_or_else(|| "unknown".to_owned(), |eta| units::seconds(eta.as_secs_f64()));
        let total = format!(
            "{} of {}, {}/s, ETA {eta}",
            units::bytes(progress.done_bytes),
            units::bytes(progress.n_bytes),
            units::bytes(progress.bytes_per_second as u64)
        );
        if let Some(bar) = &self.bar {
            bar.set_length(progress.n_bytes);
            bar.set_position(progress.done_bytes);
            bar.set_message(format!("{}/{} {total}", progress.done_files, progress.n_files));
        } else if self.due(progress.done_bytes >= progress.n_bytes) {
            let of_file = format!(
                "{} at {:.0} %",
                progress.file,
                100.0 * progress.file_done_bytes as f64 / progress.file_bytes.max(1) as f64
            );
            self.line(&format!(
                "downloading {of_file} ({}/{} files done): {total}",
                progress.done_files, progress.n_files
            ));
        }
    }
}

#[expect(clippy::print_stderr, reason = "the binary's progress lines")]
fn print(line: &str) {
    eprintln!("{line}");
}

impl Observer for DownloadReporter {
    fn event(&self, event: &Event<'_>) {
        match event {
            Event::Progress(progress) => self.progress(progress),
            Event::Planned { n_files: 0, n_present, .. } => self.line(&format!("all {n_present} files are there")),
            Event::Planned { n_files, n_bytes, n_present } => {
                self.line(&format!("{n_files} files to fetch, {}; {n_present} are there", units::bytes(*n_bytes)));
            }
            Event::Checking { file, done_bytes, n_bytes } => {
                if let Some(bar) = &self.bar {
                    bar.set_length(*n_bytes);
                    bar.set_position(*done_bytes);
                    bar.set_message(format!("checking {file}"));
                } else if self.due(false) {
                    self.line(&format!("checking {file}: {} of {}", units::bytes(*done_bytes), units::bytes(*n_bytes)));
                }
            }
            Event::Resuming { file, done_bytes, n_bytes } => {
                self.line(&format!(
                    "{file}: resuming at {} of {}",
                    units::exact_bytes(*done_bytes),
                    units::exact_bytes(*n_bytes)
                ));
            }
            Event::Retrying { file, problem, wait } => {
                self.line(&format!("{file}: {problem}; trying again in {}", units::seconds(wait.as_secs_f64())));
            }
            Event::Restarted { file, reason } => self.line(&format!("{file}: {reason}; starting from nothing")),
            Event::WrongPiece { file, piece, n_pieces, start, end, reason } => self.line(&format!(
                "{file}: piece {} of {n_pieces} (bytes {start} to {}): {reason}; it is fetched again",
                piece + 1,
                end - 1
            )),
            Event::Comparing { file, found, expected } => self.line(&format!(
                "{file}: its digest is {found}, expected {expected}; fetching it a second time to find the pieces that differ"
            )),
            Event::Finished { file, digest, checked, .. } => {
                let word = if *checked { "as announced" } else { "not compared: none was announced" };
                self.line(&format!("{file}: done, digest {digest} ({word})"));
            }
            Event::Warning(text) => self.line(&format!("warning: {text}")),
            _ => {}
        }
    }

    fn interrupted(&self) -> bool {
        interrupted()
    }
}
