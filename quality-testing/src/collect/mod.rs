//! Records continuations of the official chat API, in the form that ds4's scorer and ours read.
//!
//! A folder holds `prompts/ID.txt`, `continuations/ID.txt`, the raw `responses/ID.json`, `manifest.tsv`, and `journal.jsonl`: a line
//! for each finished case, forced to the disk. A case is asked for once: what the journal has is skipped, and a response that came
//! before a crash and is not in it yet is taken from its file.

mod client;
mod prompts;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gguf_tools::progress::{Progress, Step};
use serde::{Deserialize, Serialize};

pub use client::Retry;
pub use prompts::{Prompt, read_prompts};

use crate::cases::official::{Answer, read_response};
use crate::files::write_whole;
use crate::hash::sha256;
use crate::journal::{Journal, JournalError};
use crate::label::{is_same, served};
use client::{Api, Unusable};

/// What is asked, and how.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Address of the chat completions.
    pub endpoint: String,
    /// The API's name of the model.
    pub model: String,
    /// The checkpoint that is behind that name now: nobody but the user can say.
    pub label: String,
    /// Most tokens of a continuation.
    pub max_tokens: u32,
    /// Alternatives of each token; 0 for no log-probabilities.
    pub top_logprobs: u32,
    /// Most requests a minute.
    pub per_minute: Option<u32>,
    /// Time for one whole answer.
    pub timeout: Duration,
    /// Further attempts.
    pub retry: Retry,
}

/// What makes two runs the same work: the first line of the journal.
#[derive(Debug, Serialize)]
struct Work<'a> {
    schema: &'static str,
    endpoint: &'a str,
    model: &'a str,
    label: &'a str,
    max_tokens: u32,
    top_logprobs: u32,
    temperature: u32,
    thinking: &'static str,
}

/// A finished case, as the journal has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    id: String,
    kind: Option<String>,
    prompt_sha256: String,
    response_sha256: String,
    /// What the API called the model that answered.
    served_model: Option<String>,
    created_at: Option<String>,
}

/// What a run did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Collected {
    /// The manifest of all finished cases.
    pub manifest: PathBuf,
    /// Cases that are finished now.
    pub n_cases: usize,
    /// Those that this run asked for.
    pub n_asked: usize,
    /// Those whose response an earlier run had received and not noted.
    pub n_adopted: usize,
}

/// Why collecting stopped. What was finished stays; the same command goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectError {
    /// A prompt cannot be read.
    #[error("{place}: {reason}")]
    Prompt {
        /// File, and line where there are several in it.
        place: String,
        /// What is wrong.
        reason: String,
    },
    /// A file cannot be written or read.
    #[error("cannot write or read `{path}`")]
    Io {
        /// Which.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The journal cannot be gone on with.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A label that is no name.
    #[error("the label `{label}` is no name; give the checkpoint that answers, as `DeepSeek-V4.1-Flash`")]
    BadLabel {
        /// As given.
        label: String,
    },
    /// Not an address for a key.
    #[error("cannot ask `{endpoint}`: {reason}")]
    BadEndpoint {
        /// As given.
        endpoint: String,
        /// Why not.
        reason: String,
    },
    /// The key has characters that no header can hold.
    #[error(
        "the API key holds line ends or other characters that no key has; check the file or variable that it comes from"
    )]
    BadKey,
    /// 401 or 403.
    #[error("the API refuses the key ({status}: {message}); check DEEPSEEK_API_KEY or --key-file")]
    KeyRefused {
        /// Status code.
        status: u16,
        /// What the API says.
        message: String,
    },
    /// 402.
    #[error(
        "the account has no balance left (402: {message}); top it up and run the same command: finished cases are not asked for again"
    )]
    NoBalance {
        /// What the API says.
        message: String,
    },
    /// Another refusal that will not pass.
    #[error(
        "the API refuses the request ({status}: {message}); check --model, --max-tokens and --top-logprobs"
    )]
    Refused {
        /// Status code.
        status: u16,
        /// What the API says.
        message: String,
    },
    /// It sends us elsewhere.
    #[error(
        "`{endpoint}` redirects to `{location}`; the key is not sent there: if that is right, give it as --endpoint"
    )]
    Redirected {
        /// As given.
        endpoint: String,
        /// Where to.
        location: String,
    },
    /// No attempt succeeded.
    #[error(
        "case `{id}`: gave up after {attempts} attempts, last: {reason}; run the same command later: finished cases are kept"
    )]
    GaveUp {
        /// The case.
        id: String,
        /// How many.
        attempts: u32,
        /// The last failure.
        reason: String,
    },
    /// It asks for a long wait.
    #[error(
        "case `{id}`: the API asks to wait {seconds} s; run the same command then: finished cases are kept"
    )]
    AskedToWait {
        /// The case.
        id: String,
        /// How long.
        seconds: u64,
    },
    /// An answer that says nothing.
    #[error("case `{id}`: the API's answer cannot be used: {reason}")]
    BadAnswer {
        /// The case.
        id: String,
        /// What is wrong.
        reason: String,
    },
    /// Another model answers than before.
    #[error(
        "case `{id}` was answered by `{found}`, the cases before by `{before}`: the name moved to another checkpoint meanwhile; \
         record the rest into another folder under its own label"
    )]
    ModelChanged {
        /// The case.
        id: String,
        /// Now.
        found: String,
        /// Before.
        before: String,
    },
    /// The date contradicts the label.
    #[error(
        "the API's `{model}` answered on {day} as `{known}`, the label given is `{label}`; give the right --label"
    )]
    WrongLabel {
        /// The API's name.
        model: String,
        /// The day.
        day: String,
        /// What it is known to have been.
        known: String,
        /// As given.
        label: String,
    },
    /// A prompt is not what it was.
    #[error(
        "the prompt of case `{id}` is not the one that was asked; give it another name, or collect into another folder"
    )]
    PromptChanged {
        /// The case.
        id: String,
    },
    /// The user stopped it.
    #[error("interrupted; the same command goes on from here")]
    Interrupted,
}

/// Asks for every prompt that is not finished. `note` hears what a user should know meanwhile.
///
/// # Errors
/// As [`CollectError`] says. The manifest lists what is finished then, too.
pub fn collect(
    settings: &Settings,
    prompts: &[Prompt],
    folder: &Path,
    key: &str,
    progress: &dyn Progress,
    note: &mut dyn FnMut(&str),
) -> Result<Collected, CollectError> {
    let mut job = Job::open(settings, prompts, folder)?;
    let result = job.run(prompts, key, progress, note);
    let manifest = job.write_manifest(prompts)?;
    let (n_asked, n_adopted) = result?;
    Ok(Collected { manifest, n_cases: job.records.len(), n_asked, n_adopted })
}

struct Job<'a> {
    settings: &'a Settings,
    folder: &'a Path,
    journal: Journal,
    records: BTreeMap<String, Record>,
}

impl<'a> Job<'a> {
    fn open(settings: &'a Settings, prompts: &[Prompt], folder: &'a Path) -> Result<Self, CollectError> {
        let label = &settings.label;
        if label.trim().is_empty() || label.chars().any(char::is_control) {
            return Err(CollectError::BadLabel { label: label.clone() });
        }
        for sub in ["prompts", "continuations", "responses"] {
            let path = folder.join(sub);
            std::fs::create_dir_all(&path).map_err(|source| CollectError::Io { path, source })?;
        }
        let work = Work {
            schema: "ggsmith-collect-v1",
            endpoint: &settings.endpoint,
            model: &settings.model,
            label: &settings.label,
            max_tokens: settings.max_tokens,
            top_logprobs: settings.top_logprobs,
            temperature: 0,
            thinking: "disabled",
        };
        let (journal, records) = Journal::open::<Record>(&folder.join("journal.jsonl"), &work)?;
        let records: BTreeMap<_, _> = records.into_iter().map(|r| (r.id.clone(), r)).collect();
        for prompt in prompts {
            if records.get(&prompt.id).is_some_and(|r| r.prompt_sha256 != sha256(prompt.text.as_bytes())) {
                return Err(CollectError::PromptChanged { id: prompt.id.clone() });
            }
        }
        Ok(Self { settings, folder, journal, records })
    }

    fn path(&self, sub: &str, id: &str, suffix: &str) -> PathBuf {
        self.folder.join(sub).join(format!("{id}.{suffix}"))
    }

    /// How many cases were asked for, and how many taken from responses of an earlier run.
    fn run(
        &mut self,
        prompts: &[Prompt],
        key: &str,
        progress: &dyn Progress,
        note: &mut dyn FnMut(&str),
    ) -> Result<(usize, usize), CollectError> {
        let mut api = Api::new(self.settings, key, progress)?;
        let (mut n_asked, mut n_adopted) = (0, 0);
        for (i, prompt) in prompts.iter().enumerate() {
            if self.records.contains_key(&prompt.id) {
                continue;
            }
            if progress.interrupted() {
                return Err(CollectError::Interrupted);
            }
            if let Some((text, answer)) = self.received_before(prompt) {
                self.finish(prompt, &text, &answer)?;
                n_adopted += 1;
            } else {
                write(&self.path("prompts", &prompt.id, "txt"), prompt.text.as_bytes())?;
                let accept = |text: &str| self.usable(&prompt.id, text);
                let (text, answer) = api.ask(&prompt.id, &prompt.text, &accept, note)?;
                let response = self.path("responses", &prompt.id, "json");
                write(&response, text.as_bytes())?;
                self.finish(prompt, &text, &answer)?;
                n_asked += 1;
            }
            progress.step(&Step {
                item: &prompt.id,
                done_bytes: i as u64 + 1,
                total_bytes: prompts.len() as u64,
                done_items: i + 1,
                total_items: prompts.len(),
            });
        }
        Ok((n_asked, n_adopted))
    }

    /// A response to this very prompt that an earlier run received and had no time to note.
    fn received_before(&self, prompt: &Prompt) -> Option<(String, Answer)> {
        let asked = std::fs::read(self.path("prompts", &prompt.id, "txt")).ok()?;
        let text = std::fs::read_to_string(self.path("responses", &prompt.id, "json")).ok()?;
        let answer = self.usable(&prompt.id, &text).ok()?;
        (asked == prompt.text.as_bytes()).then_some((text, answer))
    }

    /// The answer in a response, if it can be scored by.
    fn usable(&self, id: &str, text: &str) -> Result<Answer, Unusable> {
        let bad = |reason: &str| {
            Unusable::Final(CollectError::BadAnswer { id: id.to_owned(), reason: reason.to_owned() })
        };
        let answer = read_response(text, Path::new("the answer"))
            .map_err(|e| Unusable::Passing(format!("the answer cannot be read ({e})")))?;
        match answer.finish_reason.as_deref() {
            Some("insufficient_system_resource") => {
                return Err(Unusable::Passing("the API ran out of resources in mid-answer".to_owned()));
            }
            Some("content_filter") => return Err(bad("its filter withheld the text; change the prompt")),
            _ => {}
        }
        if answer.content.is_empty() {
            return Err(bad("it is empty; change the prompt"));
        }
        if self.settings.top_logprobs > 0 && answer.recorded.is_empty() {
            return Err(bad("it has no log-probabilities; ask with --top-logprobs 0 to do without"));
        }
        let before = self.records.values().find_map(|record| record.served_model.as_ref());
        if let (Some(before), Some(found)) = (before, &answer.model)
            && before != found
        {
            return Err(Unusable::Final(CollectError::ModelChanged {
                id: id.to_owned(),
                found: found.clone(),
                before: before.clone(),
            }));
        }
        let day = answer.created_at.as_deref().unwrap_or_default();
        if let Some(known) = served(&self.settings.model, day).filter(|k| !is_same(k, &self.settings.label)) {
            return Err(Unusable::Final(CollectError::WrongLabel {
                model: self.settings.model.clone(),
                day: day.chars().take(10).collect(),
                known: known.to_owned(),
                label: self.settings.label.clone(),
            }));
        }
        Ok(answer)
    }

    /// The response is in its file; notes it.
    fn finish(&mut self, prompt: &Prompt, text: &str, answer: &Answer) -> Result<(), CollectError> {
        write(&self.path("continuations", &prompt.id, "txt"), answer.content.as_bytes())?;
        let record = Record {
            id: prompt.id.clone(),
            kind: prompt.kind.clone(),
            prompt_sha256: sha256(prompt.text.as_bytes()),
            response_sha256: sha256(text.as_bytes()),
            served_model: answer.model.clone(),
            created_at: answer.created_at.clone(),
        };
        self.journal.append(&record)?;
        self.records.insert(prompt.id.clone(), record);
        Ok(())
    }

    /// All finished cases: those of these prompts in their order, then those of earlier ones.
    fn write_manifest(&self, prompts: &[Prompt]) -> Result<PathBuf, CollectError> {
        let mut text = format!(
            "# label: {}\n# recorded from {} as {}\n# id\tprompt_file\tcontinuation_file\tresponse_file\tkind\n",
            self.settings.label, self.settings.endpoint, self.settings.model
        );
        let in_order = prompts.iter().filter_map(|prompt| self.records.get(&prompt.id));
        let others = self.records.values().filter(|record| !prompts.iter().any(|p| p.id == record.id));
        for record in in_order.chain(others) {
            let Record { id, kind, .. } = record;
            let kind = kind.as_deref().unwrap_or_default();
            writeln!(text, "{id}\tprompts/{id}.txt\tcontinuations/{id}.txt\tresponses/{id}.json\t{kind}")
                .expect("a string takes any text");
        }
        let path = self.folder.join("manifest.tsv");
        write(&path, text.as_bytes())?;
        Ok(path)
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), CollectError> {
    write_whole(path, bytes).map_err(|source| CollectError::Io { path: path.to_owned(), source })
}
