//! Reads a whole GGUF file and reports everything that is wrong with it.
//!
//! Checked are the container, every tensor's room and blocks, the routing tables, the metadata against the tensors,
//! and by static rules which runtimes load the file. Nothing stops at the first finding.

mod data;
mod ds4;
mod llama_cpp;
mod model;
#[cfg(test)]
mod tests;

use std::path::Path;

use crate::gguf::{Gguf, GgufError};
use crate::progress::Progress;

pub use model::LayerRange;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The file still gives what it promises.
    Warning,
    /// The file is damaged or incomplete.
    Error,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// The tensor concerned, if one is.
    pub tensor: Option<String>,
    /// What was found and what was expected.
    pub message: String,
}

/// One file of the set as it was read.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct VerifiedFile {
    /// The file.
    pub path: String,
    /// Its size.
    pub file_bytes: u64,
    /// SHA-256 of its bytes, lower-case hexadecimal.
    pub sha256: String,
}

/// Whether a runtime loads the file, by its published rules; nothing is run.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RuntimeVerdict {
    /// Name of the runtime.
    pub name: &'static str,
    /// Whether it loads the file.
    pub loads: bool,
    /// Why it does not.
    pub reasons: Vec<String>,
    /// What it silently takes amiss.
    pub warnings: Vec<String>,
}

/// What [`verify`] found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct VerifyReport {
    /// Every file that was read.
    pub files: Vec<VerifiedFile>,
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// Number of tensors.
    pub n_tensors: usize,
    /// Bytes of all tensors, without padding.
    pub tensor_bytes: u64,
    /// Tensors whose every block was looked at.
    pub n_checked_tensors: usize,
    /// Tensors of types whose blocks cannot be judged; their sizes were checked.
    pub only_sized: Vec<String>,
    /// The layers that a ds4 layer file holds; `None` for a file with all layers.
    pub layers: Option<LayerRange>,
    /// Everything that is wrong, errors first.
    pub findings: Vec<Finding>,
    /// Who loads the file. Empty for architectures whose rules are not known here.
    pub runtimes: Vec<RuntimeVerdict>,
}

impl VerifyReport {
    /// Whether there are no errors. Warnings may be there.
    pub fn is_sound(&self) -> bool {
        !self.findings.iter().any(|finding| finding.severity == Severity::Error)
    }
}

/// Collects findings.
#[derive(Debug, Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn error(&mut self, tensor: Option<&str>, message: String) {
        self.push(Severity::Error, tensor, message);
    }

    fn warning(&mut self, tensor: Option<&str>, message: String) {
        self.push(Severity::Warning, tensor, message);
    }

    fn push(&mut self, severity: Severity, tensor: Option<&str>, message: String) {
        self.0.push(Finding { severity, tensor: tensor.map(str::to_owned), message });
    }
}

/// Reads all of a file, or of the split set that it belongs to, once.
///
/// An error is what is damaged, missing or contradictory. What only one runtime minds is in that runtime's verdict.
///
/// # Errors
/// [`GgufError`] if the header cannot be parsed, shards are absent, or `progress` asked to stop.
pub fn verify(path: impl AsRef<Path>, progress: &dyn Progress) -> Result<VerifyReport, GgufError> {
    let (gguf, region_problems) = Gguf::open_collecting(path)?;
    let mut findings = Findings::default();
    for problem in &region_problems {
        let message = format!("found {}, expected {}", problem.found, problem.expected);
        findings.error(Some(&problem.tensor), message);
    }
    for tensor in gguf.missing_data() {
        let shard = &gguf.shards()[tensor.shard_index];
        let end = shard.data_offset_bytes.saturating_add(tensor.offset_bytes).saturating_add(tensor.n_bytes);
        let message = format!(
            "data ends at byte {end} of `{}`, which has {}; resume the download or copy",
            shard.path.display(),
            shard.file_bytes
        );
        findings.error(Some(&tensor.name), message);
    }
    let read = data::read(&gguf, progress, &mut findings)?;
    let model = model::check(&gguf, &mut findings);
    let runtimes = if model.is_known {
        vec![llama_cpp::judge(&gguf, &model, &region_problems), ds4::judge(&gguf, &model, &region_problems)]
    } else {
        Vec::new()
    };
    let mut findings = findings.0;
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(VerifyReport {
        files: read.files,
        architecture: model.architecture,
        n_tensors: gguf.tensors().len(),
        tensor_bytes: gguf.tensors().iter().fold(0, |sum, tensor| sum.saturating_add(tensor.n_bytes)),
        n_checked_tensors: read.n_checked_tensors,
        only_sized: read.only_sized,
        layers: model.layers,
        findings,
        runtimes,
    })
}
