//! Results as they are kept, and the pages made of them: a self-contained HTML page and a Markdown card to publish beside a file.

mod card;
mod page;

use std::path::{Path, PathBuf};

use gguf_tools::gguf::Gguf;
use gguf_tools::plot::PlotError;
use serde::{Deserialize, Serialize};

pub use card::card;
pub use page::page;

use crate::agreement::Agreement;
use crate::label::SetLabel;
use crate::scoring::CaseScore;
use crate::{Comparison, Interval, hash, label};

/// `schema` of [`RunReport`].
pub const RUN_SCHEMA: &str = "ggsmith-score-v1";
/// `schema` of [`KldReport`].
pub const KLD_SCHEMA: &str = "ggsmith-kld-v1";

/// What a result must say about the model it is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// Name of the file or folder.
    pub name: String,
    /// Checkpoint label, where the file says.
    pub checkpoint: Option<String>,
    /// [`hash::fingerprint`] of its files.
    pub fingerprint: String,
    /// Bytes of its files.
    pub file_bytes: u64,
    /// Rounding of activations.
    pub numerics: String,
    /// Inputs of quantized matrices.
    pub activations: String,
    /// Device.
    pub backend: String,
    /// Directions that were taken out of activations.
    #[serde(default)]
    pub steering: Vec<String>,
}

/// A model scored by recorded continuations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// [`RUN_SCHEMA`].
    pub schema: String,
    /// The model.
    pub model: ModelFacts,
    /// The case set.
    pub cases: CaseFacts,
    /// Whether model and cases are of one checkpoint; `None` where one of them does not say.
    pub same_checkpoint: Option<bool>,
    /// Sums and means.
    pub summary: Summary,
    /// Every case.
    pub scores: Vec<CaseScore>,
}

/// What a result must say about the cases it is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaseFacts {
    /// Name of the manifest.
    pub name: String,
    /// Checkpoint that answered, where it is known.
    pub label: Option<SetLabel>,
    /// [`crate::cases::CaseSet::sha256`].
    pub sha256: String,
}

/// A set's scores in a few numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Cases.
    pub n_cases: usize,
    /// Tokens of their continuations.
    pub n_tokens: usize,
    /// Nats a token, with an interval over cases.
    pub average_nll: Interval,
    /// Cases whose first token matches.
    pub first_match: usize,
    /// Mean greedy longest common prefix, tokens.
    pub average_lcp: f64,
    /// Agreement with the recorded log-probabilities.
    pub agreement: Agreement,
    /// What a reader must know.
    pub warnings: Vec<String>,
}

/// Models compared with a base on texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KldReport {
    /// [`KLD_SCHEMA`].
    pub schema: String,
    /// The base.
    pub base: ModelFacts,
    /// Names of the texts.
    pub texts: Vec<String>,
    /// SHA-256 of their tokens.
    pub texts_sha256: String,
    /// Tokens of each sequence at most.
    pub sequence: usize,
    /// Whether the base's predictions are rounded to half precision, as a file keeps them.
    pub rounded: bool,
    /// The base against itself, then the models.
    pub rows: Vec<KldRow>,
}

/// One line of [`KldReport`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KldRow {
    /// The model.
    pub model: ModelFacts,
    /// Whether this is the base against itself: the noise of the measurement.
    pub is_noise: bool,
    /// The numbers.
    pub comparison: Comparison,
    /// By how much the divergence exceeds that of the line before, paired.
    pub kl_above_line_before: Option<Interval>,
}

/// A result of one of the two kinds.
#[derive(Debug, Clone, PartialEq)]
pub enum Report {
    /// By recorded continuations.
    Run(Box<RunReport>),
    /// By divergence from a base.
    Kld(Box<KldReport>),
}

/// Why no page was made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// The system's own.
    #[error("cannot read `{path}`")]
    Read {
        /// The result.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It is no result.
    #[error("`{path}` is no result of `score run --json` or `score kld --json`: {reason}")]
    NoResult {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Results that do not belong on one page.
    #[error("`{first}` and `{other}` are scores by different cases ({reason}); make a page for each set")]
    DifferentCases {
        /// The first file.
        first: String,
        /// Another.
        other: String,
        /// How they differ.
        reason: String,
    },
    /// A picture cannot be drawn.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

impl ModelFacts {
    /// Of a GGUF file (any shard) or a checkpoint folder, and how it is run.
    ///
    /// # Errors
    /// If its files cannot be read.
    pub fn of(path: &Path, provenance: &runner::session::Provenance) -> Result<Self, ReportError> {
        let read = |path: &Path| {
            let path = path.to_owned();
            move |source| ReportError::Read { path, source }
        };
        let no_result =
            |e: label::LabelError| ReportError::NoResult { path: path.to_owned(), reason: e.to_string() };
        let files = model_files(path).map_err(read(path))?;
        let mut file_bytes = 0;
        for file in &files {
            file_bytes += std::fs::metadata(file).map_err(read(file))?.len();
        }
        Ok(Self {
            name: file_name(path),
            checkpoint: label::of_model(path).map_err(no_result)?,
            fingerprint: hash::fingerprint(&files)
                .map_err(|(path, source)| ReportError::Read { path, source })?,
            file_bytes,
            numerics: provenance.numerics.to_owned(),
            activations: provenance.activations.to_owned(),
            backend: provenance.backend.to_owned(),
            steering: provenance.steering.clone(),
        })
    }
}

/// The last part of a path: a page that is published says nothing about the machine.
pub fn file_name(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    absolute.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// The files of a split set, or of a checkpoint folder by name.
fn model_files(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        let gguf = Gguf::open(path).map_err(std::io::Error::other)?;
        return Ok(gguf.shards().iter().map(|shard| shard.path.clone()).collect());
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let file = entry?.path();
        let suffix = file.extension().unwrap_or_default().to_string_lossy().into_owned();
        files.extend((file.is_file() && ["json", "safetensors"].contains(&suffix.as_str())).then_some(file));
    }
    files.sort();
    Ok(files)
}

impl Summary {
    /// Of scores by a model with `vocabulary` tokens.
    pub fn of(scores: &[CaseScore], vocabulary: usize) -> Self {
        let n_tokens: usize = scores.iter().map(|score| score.target_tokens).sum();
        let clusters: Vec<_> = scores.iter().map(|score| (score.nll, score.target_tokens)).collect();
        let mut agreement = Agreement::default();
        for score in scores {
            agreement.add(&score.agreement);
        }
        let average_nll = Interval::of_clusters(&clusters);
        let mut warnings: Vec<String> = scores
            .iter()
            .filter_map(|score| Some(format!("case `{}`: {}", score.id, score.warning.as_ref()?)))
            .collect();
        if agreement.is_saturated() {
            warnings.push(format!(
                "the API told log-probabilities of {} of {} alternatives (at temperature 0 it gives 0 and -9999): api_top_mae says nothing \
                 here, order and best tokens do",
                agreement.told, agreement.top_mapped
            ));
        }
        let uniform = (vocabulary as f64).ln();
        if (average_nll.mean / uniform - 1.0).abs() < 0.01 {
            warnings.push(format!(
                "the mean of {:.3} nats is that of a model which predicts nothing (ln {vocabulary} = {uniform:.3}): the computation is broken",
                average_nll.mean
            ));
        }
        Self {
            n_cases: scores.len(),
            n_tokens,
            average_nll,
            first_match: scores.iter().filter(|score| score.first_match).count(),
            average_lcp: scores.iter().map(|score| score.greedy_lcp as f64).sum::<f64>()
                / scores.len().max(1) as f64,
            agreement,
            warnings,
        }
    }
}

/// Reads a result that `score run --json` or `score kld --json` printed.
///
/// # Errors
/// If it cannot be read or is none.
pub fn read(path: &Path) -> Result<Report, ReportError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ReportError::Read { path: path.to_owned(), source })?;
    let no_result = |reason: String| ReportError::NoResult { path: path.to_owned(), reason };
    let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| no_result(e.to_string()))?;
    let schema = value.get("schema").and_then(|schema| schema.as_str()).map(str::to_owned);
    let report = match schema.as_deref() {
        Some(RUN_SCHEMA) => serde_json::from_value(value).map(Box::new).map(Report::Run),
        Some(KLD_SCHEMA) => serde_json::from_value(value).map(Box::new).map(Report::Kld),
        other => {
            return Err(no_result(format!(
                "`schema` is {}, expected `{RUN_SCHEMA}` or `{KLD_SCHEMA}`",
                other.map_or("absent".to_owned(), |name| format!("`{name}`"))
            )));
        }
    };
    report.map_err(|e| no_result(e.to_string()))
}

/// Refuses scores by different cases: their means cannot stand side by side.
///
/// # Errors
/// [`ReportError::DifferentCases`].
pub fn check_together(reports: &[Report]) -> Result<(), ReportError> {
    let mut runs = reports.iter().filter_map(|report| match report {
        Report::Run(run) => Some(run.as_ref()),
        Report::Kld(_) => None,
    });
    let Some(first) = runs.next() else { return Ok(()) };
    match runs.find(|run| run.cases.sha256 != first.cases.sha256) {
        Some(other) => Err(ReportError::DifferentCases {
            first: first.model.name.clone(),
            other: other.model.name.clone(),
            reason: format!("`{}` and `{}`", first.cases.name, other.cases.name),
        }),
        None => Ok(()),
    }
}

/// The label line that every result carries.
fn labels_line(run: &RunReport) -> String {
    let model = run.model.checkpoint.as_deref().unwrap_or("not stated");
    let cases = run.cases.label.as_ref().map_or("not stated", |label| &label.label);
    let how = match &run.cases.label {
        Some(label) if !label.stated => " (by API name and date)",
        _ => "",
    };
    let verdict = match run.same_checkpoint {
        Some(true) => "the same checkpoint",
        Some(false) => "DIFFERENT checkpoints: not a measure of quality",
        None => "not known to be the same",
    };
    format!("model of {model}, cases of {cases}{how}: {verdict}")
}

/// Mean with its interval.
fn spread(interval: &Interval, digits: usize) -> String {
    format!("{:.digits$} [{:.digits$}, {:.digits$}]", interval.mean, interval.low, interval.high)
}

/// Decimal gigabytes, as file sizes are published; megabytes for small files.
fn size(n_bytes: u64) -> String {
    let n_bytes = n_bytes as f64;
    if n_bytes < 1e9 { format!("{:.2} MB", n_bytes / 1e6) } else { format!("{:.2} GB", n_bytes / 1e9) }
}
