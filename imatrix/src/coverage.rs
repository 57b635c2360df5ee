//! How far a file serves the tensors of a plan, and what to do where it does not.

use std::collections::BTreeSet;
use std::fmt;

use gguf_tools::importance::Matrix;

use crate::entry::State;
use crate::error::ImatrixError;
use crate::lookup::Place;
use crate::{Format, Imatrix};

/// Experts that a message names before it only counts them.
const MOST_EXPERTS_NAMED: usize = 16;

/// A tensor of the plan that wants importance.
#[derive(Debug, Clone, Copy)]
pub struct StackedTensor<'a> {
    /// GGUF name.
    pub tensor: &'a str,
    /// Names in the checkpoint, one for each expert in order; empty if not known.
    pub sources: &'a [String],
    /// Matrices in the tensor; 1 for a dense one.
    pub n_experts: usize,
    /// Columns of each.
    pub n_columns: usize,
}

impl<'a> StackedTensor<'a> {
    /// One of the tensor's matrices, as a lookup asks for it.
    pub fn matrix(&self, expert_index: usize) -> Matrix<'a> {
        Matrix {
            tensor: self.tensor,
            source: self.sources.get(expert_index).map(String::as_str),
            expert_index,
            n_experts: self.n_experts,
            n_columns: self.n_columns,
        }
    }
}

/// What a file knows about one tensor. Experts not listed anywhere were seen.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TensorCoverage {
    /// GGUF name.
    pub tensor: String,
    /// Matrices in the tensor.
    pub n_experts: usize,
    /// Columns of each.
    pub n_columns: usize,
    /// Whether any entry has this tensor's name.
    pub matched: bool,
    /// Experts with usable values.
    pub n_seen: usize,
    /// `n_seen / n_experts`.
    pub share_seen: f64,
    /// Experts the calibration never reached.
    pub unseen: Vec<usize>,
    /// Experts without an entry, of a tensor whose entries are kept by expert.
    pub without_entry: Vec<usize>,
    /// Experts whose values cannot be used, and why.
    pub unusable: Vec<(usize, String)>,
    /// Rows that its experts were reached by, where the file counts each expert.
    pub counts: Option<CountRange>,
}

/// Smallest, middle and largest number of rows of a tensor's experts.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct CountRange {
    /// The least.
    pub min: f64,
    /// The lower middle one.
    pub median: f64,
    /// The most.
    pub max: f64,
}

/// Sums over all tensors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Totals {
    /// Tensors asked for.
    pub n_tensors: usize,
    /// Those that have an entry.
    pub n_tensors_matched: usize,
    /// Matrices asked for.
    pub n_matrices: usize,
    /// Those with usable values.
    pub n_seen: usize,
    /// Those the calibration never reached.
    pub n_unseen: usize,
    /// Those whose values cannot be used.
    pub n_unusable: usize,
    /// Those without an entry.
    pub n_without_entry: usize,
}

/// How far a file serves the tensors of a plan.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Coverage {
    /// The file's name.
    pub file_name: String,
    /// The format it was found in.
    pub format: Format,
    /// Every tensor asked for, in the order given.
    pub tensors: Vec<TensorCoverage>,
    /// Entries of the file that no tensor asked for.
    pub unmatched_entries: Vec<String>,
    /// Sums.
    pub totals: Totals,
    /// Entries in the file.
    pub n_entries: usize,
}

/// What to do with a matrix that has no usable values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MissingPolicy {
    /// Refuse.
    #[default]
    Error,
    /// Let the quantizer take its fallback, and say so.
    Fallback,
}

impl MissingPolicy {
    /// Every policy with the name users type.
    pub const NAMES: [(&'static str, Self); 2] = [("error", Self::Error), ("fallback", Self::Fallback)];
}

/// One thing that a file does not give: a warning where a fallback is allowed, else part of an error.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Finding {
    /// No entry has the tensor's name.
    NoEntry {
        /// GGUF name.
        tensor: String,
    },
    /// Some experts have an entry and these have none.
    ExpertsWithoutEntry {
        /// GGUF name.
        tensor: String,
        /// Which.
        experts: Vec<usize>,
        /// Of how many.
        n_experts: usize,
    },
    /// The calibration never reached these experts.
    Unseen {
        /// GGUF name.
        tensor: String,
        /// Which.
        experts: Vec<usize>,
        /// Of how many.
        n_experts: usize,
    },
    /// Values that cannot be used.
    Unusable {
        /// GGUF name.
        tensor: String,
        /// Which.
        experts: Vec<usize>,
        /// Of how many.
        n_experts: usize,
        /// What is wrong with the first of them.
        problem: String,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let which = |experts: &[usize], n: usize| {
            let named: Vec<_> = experts.iter().take(MOST_EXPERTS_NAMED).map(usize::to_string).collect();
            let more = if experts.len() > named.len() { ", ..." } else { "" };
            format!("{} of {n} experts ({}{more})", experts.len(), named.join(", "))
        };
        match self {
            Self::NoEntry { tensor } => write!(f, "`{tensor}`: no entry"),
            Self::ExpertsWithoutEntry { tensor, experts, n_experts } => {
                write!(f, "`{tensor}`: no entry for {}", which(experts, *n_experts))
            }
            Self::Unseen { tensor, n_experts: 1, .. } => {
                write!(f, "`{tensor}`: never reached by the calibration")
            }
            Self::Unseen { tensor, experts, n_experts } => {
                write!(f, "`{tensor}`: {} never reached by the calibration", which(experts, *n_experts))
            }
            Self::Unusable { tensor, n_experts: 1, problem, .. } => write!(f, "`{tensor}`: {problem}"),
            Self::Unusable { tensor, experts, n_experts, problem } => {
                write!(f, "`{tensor}`: {} cannot be used: {problem}", which(experts, *n_experts))
            }
        }
    }
}

impl Imatrix {
    /// Compares the file with the tensors that want importance. Reads the values of each.
    pub fn coverage(&self, tensors: &[StackedTensor<'_>]) -> Coverage {
        let mut used = BTreeSet::new();
        let tensors: Vec<_> = tensors.iter().map(|tensor| self.cover(tensor, &mut used)).collect();
        let names = self.entries().iter().map(crate::Entry::name);
        Coverage {
            file_name: self.file_name(),
            format: self.format(),
            totals: totals(&tensors),
            tensors,
            unmatched_entries: names.filter(|name| !used.contains(name)).map(str::to_owned).collect(),
            n_entries: self.entries().len(),
        }
    }

    fn cover<'a>(&'a self, tensor: &StackedTensor<'_>, used: &mut BTreeSet<&'a str>) -> TensorCoverage {
        let mut result = TensorCoverage {
            tensor: tensor.tensor.to_owned(),
            n_experts: tensor.n_experts,
            n_columns: tensor.n_columns,
            matched: false,
            n_seen: 0,
            share_seen: 0.0,
            unseen: Vec::new(),
            without_entry: Vec::new(),
            unusable: Vec::new(),
            counts: None,
        };
        let mut counts = Vec::new();
        for expert_index in 0..tensor.n_experts {
            match self.place(&tensor.matrix(expert_index)) {
                None => result.without_entry.push(expert_index),
                Some(Place::Misfit { entry, problem }) => {
                    used.insert(entry.name());
                    result.unusable.push((expert_index, problem));
                }
                Some(Place::At { entry, index_in_entry }) => {
                    used.insert(entry.name());
                    if entry.counts_each_matrix(tensor.n_columns) {
                        counts.push(entry.count(index_in_entry));
                    }
                    match entry.state(index_in_entry, tensor.n_columns) {
                        State::Seen(_) => result.n_seen += 1,
                        State::Unseen => result.unseen.push(expert_index),
                        State::Unusable(problem) => result.unusable.push((expert_index, problem)),
                    }
                }
            }
        }
        result.matched = result.without_entry.len() < tensor.n_experts;
        result.share_seen = result.n_seen as f64 / tensor.n_experts.max(1) as f64;
        result.counts = count_range(counts, tensor.n_experts);
        result
    }
}

/// `None` unless every expert was counted.
fn count_range(mut counts: Vec<f64>, n_experts: usize) -> Option<CountRange> {
    if counts.len() != n_experts || counts.is_empty() || counts.iter().any(|c| c.is_nan()) {
        return None;
    }
    counts.sort_by(f64::total_cmp);
    let last = counts.len() - 1;
    Some(CountRange { min: counts[0], median: counts[last / 2], max: counts[last] })
}

fn totals(tensors: &[TensorCoverage]) -> Totals {
    let sum = |of: fn(&TensorCoverage) -> usize| tensors.iter().map(of).sum();
    Totals {
        n_tensors: tensors.len(),
        n_tensors_matched: sum(|t| usize::from(t.matched)),
        n_matrices: sum(|t| t.n_experts),
        n_seen: sum(|t| t.n_seen),
        n_unseen: sum(|t| t.unseen.len()),
        n_unusable: sum(|t| t.unusable.len()),
        n_without_entry: sum(|t| t.without_entry.len()),
    }
}

impl TensorCoverage {
    fn findings(&self) -> Vec<Finding> {
        let (tensor, n_experts) = (&self.tensor, self.n_experts);
        if !self.matched {
            return vec![Finding::NoEntry { tensor: tensor.clone() }];
        }
        let mut findings = Vec::new();
        if !self.without_entry.is_empty() {
            let experts = self.without_entry.clone();
            findings.push(Finding::ExpertsWithoutEntry { tensor: tensor.clone(), experts, n_experts });
        }
        if !self.unseen.is_empty() {
            findings.push(Finding::Unseen {
                tensor: tensor.clone(),
                experts: self.unseen.clone(),
                n_experts,
            });
        }
        if let Some((_, problem)) = self.unusable.first() {
            let experts = self.unusable.iter().map(|(expert, _)| *expert).collect();
            let problem = problem.clone();
            findings.push(Finding::Unusable { tensor: tensor.clone(), experts, n_experts, problem });
        }
        findings
    }
}

impl Coverage {
    /// Everything the file does not give, tensor by tensor.
    pub fn findings(&self) -> Vec<Finding> {
        self.tensors.iter().flat_map(TensorCoverage::findings).collect()
    }

    /// Decides whether to go on: the warnings to print, or the error.
    ///
    /// Give it the tensors whose target format uses importance, and no others. Entries that no tensor asked for are
    /// no finding: a plan may keep a tensor as it is.
    ///
    /// # Errors
    /// If anything is missing and the policy is [`MissingPolicy::Error`] or `strict` is set; under any policy, if no
    /// entry matches any tensor, because then the file belongs to another model.
    pub fn judge(&self, policy: MissingPolicy, strict: bool) -> Result<Vec<Finding>, ImatrixError> {
        if let (Some(first), 0) = (self.tensors.first(), self.totals.n_tensors_matched) {
            return Err(ImatrixError::NothingMatches {
                file_name: self.file_name.clone(),
                n_tensors: self.tensors.len(),
                example_entry: self.unmatched_entries.first().cloned().unwrap_or_default(),
                example_tensor: first.tensor.clone(),
            });
        }
        let findings = self.findings();
        if findings.is_empty() || (policy == MissingPolicy::Fallback && !strict) {
            return Ok(findings);
        }
        Err(ImatrixError::Coverage { file_name: self.file_name.clone(), findings })
    }
}
