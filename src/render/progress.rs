//! Progress on stderr: a bar on a terminal, one plain line per tensor otherwise.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gguf_tools::progress::{Progress, Step};
use indicatif::{ProgressBar, ProgressStyle};

use super::units;

/// Set by Ctrl-C; every job asks it between two resumable points.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Lets Ctrl-C and termination ask the running job to stop; a second one ends the process at once.
///
/// # Errors
/// If the system refuses the handler.
pub(crate) fn stop_on_signals() -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::SeqCst) {
            #[expect(clippy::exit, reason = "the user asked twice; every file is resumable at any moment")]
            std::process::exit(130);
        }
        eprintln_line("stopping as soon as that loses nothing; once more ends the program at once");
    })
}

/// Whether Ctrl-C was pressed.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// Draws the steps of one job.
pub(crate) struct Reporter {
    bar: Option<ProgressBar>,
    lines: Option<Mutex<Lines>>,
    verb: &'static str,
}

struct Lines {
    started: Instant,
    started_bytes: Option<u64>,
    last: Option<Instant>,
}

impl Reporter {
    /// A reporter for a job that `verb` names, as "quantizing"; silent if asked to be.
    pub(crate) fn new(verb: &'static str, quiet: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = (terminal && !quiet).then(|| {
            let bar = ProgressBar::new(0);
            let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}";
            bar.set_style(ProgressStyle::with_template(template).expect("the template is fixed"));
            bar
        });
        let lines = (!terminal && !quiet)
            .then(|| Mutex::new(Lines { started: Instant::now(), started_bytes: None, last: None }));
        Self { bar, lines, verb }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Lines {
    /// A line at most every two seconds, and the last one.
    fn step(&mut self, verb: &str, step: &Step<'_>) {
        let now = Instant::now();
        let first = *self.started_bytes.get_or_insert(step.done_bytes);
        let finished = step.done_bytes >= step.total_bytes;
        if !finished && self.last.is_some_and(|last| now - last < Duration::from_secs(2)) {
            return;
        }
        self.last = Some(now);
        let elapsed = (now - self.started).as_secs_f64().max(1e-9);
        let rate = step.done_bytes.saturating_sub(first) as f64 / elapsed;
        let eta = match step.total_bytes.saturating_sub(step.done_bytes) as f64 / rate {
            eta if eta.is_finite() => units::seconds(eta),
            _ => "unknown".to_owned(),
        };
        eprintln_line(&format!(
            "{verb} {} ({}/{}): {} of {}, {}/s, ETA {eta}",
            step.item,
            step.done_items,
            step.total_items,
            units::bytes(step.done_bytes),
            units::bytes(step.total_bytes),
            units::bytes(rate as u64),
        ));
    }
}

#[expect(clippy::print_stderr, reason = "the binary's progress lines")]
fn eprintln_line(line: &str) {
    eprintln!("{line}");
}

impl Progress for Reporter {
    fn step(&self, step: &Step<'_>) {
        if let Some(bar) = &self.bar {
            bar.set_length(step.total_bytes);
            bar.set_position(step.done_bytes);
            bar.set_message(format!("{} {}", self.verb, step.item));
        }
        if let Some(mut lines) = self.lines.as_ref().and_then(|l| l.lock().ok()) {
            lines.step(self.verb, step);
        }
    }

    fn interrupted(&self) -> bool {
        interrupted()
    }
}
