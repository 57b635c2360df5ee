//! Why a model description was refused.

use std::fmt;

/// One field of a configuration or one metadata key that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldProblem {
    /// Name of the field (`rope_scaling.factor`) or metadata key.
    pub field: String,
    /// What was found and what was expected.
    pub problem: String,
}

impl fmt::Display for FieldProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: {}", self.field, self.problem)
    }
}

/// Why a model description was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The description is of another model family.
    #[error("the model is `{found}`, which is not supported{hint}; supported: {supported}")]
    UnsupportedArchitecture {
        /// `model_type` or `general.architecture` as found.
        found: String,
        /// What to know about that architecture, or nothing.
        hint: &'static str,
        /// Names that are supported.
        supported: String,
    },
    /// The description names no architecture.
    #[error("`{field}` is missing, so the model family is unknown; supported: {supported}")]
    NoArchitecture {
        /// The field that should name it.
        field: &'static str,
        /// Names that are supported.
        supported: String,
    },
    /// The configuration is not a JSON object.
    #[error("the configuration is not a JSON object; expected the model's config.json")]
    NotAnObject,
    /// Fields are missing or have values that this model family cannot have; every one is listed.
    #[error("{} cannot be used: {}", if problems.len() == 1 { "one field" } else { "several fields" }, listed(problems))]
    Fields {
        /// Every problem found.
        problems: Vec<FieldProblem>,
    },
}

fn listed(problems: &[FieldProblem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
