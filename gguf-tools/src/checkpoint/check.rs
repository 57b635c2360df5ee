//! Compares the headers of a checkpoint with the tensors that its configuration announces. Reads no tensor.

use std::collections::{BTreeMap, HashSet};

use super::layout::{MatrixLayout, SourcePrecision};
use super::{Checkpoint, CheckpointError};
use crate::model::{Family, SourceRole, TensorSpec};

/// One way in which the tensors are not those of the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Finding {
    /// A tensor is absent.
    #[error("tensor `{0}` is missing")]
    Missing(String),
    /// A matrix is absent for some experts of a layer.
    #[error("layer {layer}: {} no {matrix}", experts_have(experts, *n_experts))]
    MissingExperts {
        /// The layer.
        layer: u32,
        /// Which matrix: `w1`, `w2` or `w3`.
        matrix: String,
        /// The experts that lack it.
        experts: Vec<usize>,
        /// Experts of the layer.
        n_experts: usize,
    },
    /// A tensor cannot be decoded, or its type is not one that it may have.
    #[error("tensor `{tensor}` {problem}")]
    Layout {
        /// The tensor.
        tensor: String,
        /// What was found and expected.
        problem: String,
    },
    /// A tensor has another shape than the configuration says.
    #[error("tensor `{tensor}` has shape {found:?}, config.json says {expected:?}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Logical shape in the file.
        found: Vec<u64>,
        /// Shape from the configuration.
        expected: Vec<u64>,
    },
    /// A tensor is not known.
    #[error("tensor `{0}` is not one of this model")]
    Unexpected(String),
    /// Tensors belong to something that is not supported.
    #[error("{n_tensors} tensors (`{first}` and others) belong to {what}, which is not supported")]
    Unsupported {
        /// What they belong to.
        what: &'static str,
        /// One of them.
        first: String,
        /// How many there are.
        n_tensors: usize,
    },
    /// The index names a shard that lacks the tensor.
    #[error(
        "the index says that tensor `{tensor}` is in {shard}, but it is not; index and shards are of different downloads"
    )]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The file.
        shard: String,
    },
}

fn experts_have(experts: &[usize], n_experts: usize) -> String {
    /// More than these are counted, not listed.
    const LISTED: usize = 12;
    if experts.len() == n_experts {
        return format!("all {n_experts} experts have");
    }
    let list: Vec<String> = experts.iter().take(LISTED).map(ToString::to_string).collect();
    let more = experts.len().saturating_sub(LISTED);
    match (experts.len(), more) {
        (1, _) => format!("expert {} has", list[0]),
        (_, 0) => format!("experts {} have", list.join(", ")),
        (_, more) => format!("experts {} and {more} more have", list.join(", ")),
    }
}

/// What a check of the headers says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// Everything that keeps the checkpoint from being used.
    pub problems: Vec<Finding>,
    /// Tensors of drafting modules (`mtp.*`), set aside.
    pub n_draft_tensors: usize,
    /// Their bytes.
    pub draft_bytes: u64,
    /// Tensors that no implementation uses, set aside.
    pub unused: Vec<String>,
}

impl Checkpoint {
    /// Compares names, types, shapes and scales of all tensors with what `config.json` announces.
    pub fn check(&self) -> Findings {
        let mut findings = Findings::default();
        let mut used = HashSet::new();
        for spec in self.table().specs() {
            self.check_spec(spec, &mut used, &mut findings.problems);
        }
        self.check_rest(&used, &mut findings);
        let promises = self.broken_promises.iter();
        findings.problems.extend(
            promises
                .map(|(tensor, shard)| Finding::NotInShard { tensor: tensor.clone(), shard: shard.clone() }),
        );
        findings
    }

    /// Refuses a checkpoint whose tensors are not those of its configuration.
    ///
    /// # Errors
    /// [`CheckpointError::Tensors`] with everything that [`Checkpoint::check`] found.
    pub fn demand_sound(&self) -> Result<Findings, CheckpointError> {
        let findings = self.check();
        if findings.problems.is_empty() {
            Ok(findings)
        } else {
            Err(CheckpointError::Tensors { folder: self.folder().to_owned(), findings: findings.problems })
        }
    }

    fn check_spec<'a>(
        &'a self,
        spec: &'a TensorSpec,
        used: &mut HashSet<&'a str>,
        problems: &mut Vec<Finding>,
    ) {
        let mut missing = Vec::new();
        let mut precision = None;
        for (expert, name) in spec.sources.iter().enumerate() {
            let Some(tensor) = self.tensor(name) else {
                missing.push(expert);
                continue;
            };
            used.insert(name.as_str());
            let scale = self.scale_of(name);
            used.extend(scale.map(|scale| scale.name.as_str()));
            let layout = match MatrixLayout::of(tensor, scale) {
                Ok(layout) => layout,
                Err(problem) => {
                    problems.push(Finding::Layout { tensor: name.clone(), problem });
                    continue;
                }
            };
            if layout.shape != spec.source_shape() {
                let expected = spec.source_shape().to_vec();
                problems.push(Finding::Shape { tensor: name.clone(), found: layout.shape, expected });
            } else if !allowed(spec, layout.precision) {
                let problem = format!(
                    "is stored as {}, which a {} tensor cannot be",
                    layout.precision.name(),
                    spec.family
                );
                problems.push(Finding::Layout { tensor: name.clone(), problem });
            } else if *precision.get_or_insert(layout.precision) != layout.precision {
                let problem =
                    format!("is stored as {}, unlike the experts before it", layout.precision.name());
                problems.push(Finding::Layout { tensor: name.clone(), problem });
            }
        }
        if let (false, Some(layer), true) = (missing.is_empty(), spec.layer, spec.family.is_routed()) {
            let matrix = spec.sources[0].rsplit('.').nth(1).unwrap_or_default().to_owned();
            problems.push(Finding::MissingExperts {
                layer,
                matrix,
                experts: missing,
                n_experts: spec.sources.len(),
            });
        } else {
            problems.extend(missing.into_iter().map(|i| Finding::Missing(spec.sources[i].clone())));
        }
    }

    /// Sorts the tensors that no part of the model took.
    fn check_rest(&self, used: &HashSet<&str>, findings: &mut Findings) {
        let mut unsupported: BTreeMap<&'static str, (String, usize)> = BTreeMap::new();
        for tensor in self.tensors().iter().filter(|tensor| !used.contains(tensor.name.as_str())) {
            match self.table().role(&tensor.name) {
                SourceRole::Draft => {
                    findings.n_draft_tensors += 1;
                    findings.draft_bytes += tensor.n_bytes();
                }
                SourceRole::Unused => findings.unused.push(tensor.name.clone()),
                SourceRole::Refused(what) => {
                    unsupported.entry(what).or_insert_with(|| (tensor.name.clone(), 0)).1 += 1;
                }
                SourceRole::Weight(..) | SourceRole::Unknown => {
                    findings.problems.push(Finding::Unexpected(tensor.name.clone()));
                }
            }
        }
        findings.problems.extend(
            unsupported.into_iter().map(|(what, (first, n_tensors))| Finding::Unsupported {
                what,
                first,
                n_tensors,
            }),
        );
    }
}

/// Whether a tensor of this kind may be stored so.
fn allowed(spec: &TensorSpec, precision: SourcePrecision) -> bool {
    match spec.family {
        Family::RoutingTable => !precision.is_float(),
        Family::RoutedGate | Family::RoutedUp | Family::RoutedDown => precision.is_float(),
        Family::Norm => {
            precision.is_float() && !matches!(precision, SourcePrecision::Fp8 | SourcePrecision::Fp4)
        }
        _ => precision.is_float() && precision != SourcePrecision::Fp4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_experts_are_one_line_whether_one_some_many_or_all() {
        let line = |experts: Vec<usize>| {
            Finding::MissingExperts { layer: 3, matrix: "w2".to_owned(), experts, n_experts: 256 }.to_string()
        };
        assert_eq!(line(vec![4]), "layer 3: expert 4 has no w2");
        assert_eq!(line(vec![4, 9]), "layer 3: experts 4, 9 have no w2");
        assert!(line((10..40).collect()).ends_with("20, 21 and 18 more have no w2"));
        assert_eq!(line((0..256).collect()), "layer 3: all 256 experts have no w2");
    }
}
