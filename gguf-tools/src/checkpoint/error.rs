//! Why a checkpoint was refused.

use std::io;
use std::path::PathBuf;

use crate::model::ModelError;

/// Why a checkpoint was refused. Every message names the file or tensor, what was found and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The folder holds no checkpoint.
    #[error("{}: {problem}", folder.display())]
    NotACheckpoint {
        /// The folder.
        folder: PathBuf,
        /// What is missing.
        problem: String,
    },
    /// A file could not be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A JSON file does not parse or has the wrong structure.
    #[error("{}: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong, with line and column where known.
        problem: String,
    },
    /// The model in `config.json` is refused.
    #[error("{}: {source}", path.display())]
    Model {
        /// The configuration file.
        path: PathBuf,
        /// What is wrong.
        source: ModelError,
    },
    /// Shards are absent, damaged or incomplete; every one is listed.
    #[error("{}", listed(problems))]
    Shards {
        /// Every problem found.
        problems: Vec<ShardProblem>,
    },
    /// Tensors are absent or are not what the configuration announces; every one is listed.
    #[error("{}: the tensors do not fit config.json:\n  {}", folder.display(), joined(findings))]
    Tensors {
        /// The folder.
        folder: PathBuf,
        /// Every problem found.
        findings: Vec<super::Finding>,
    },
    /// No tensor has this name.
    #[error("the checkpoint has no tensor `{0}`")]
    NoSuchTensor(String),
    /// A tensor cannot be decoded as asked.
    #[error("tensor `{tensor}`: {problem}")]
    Undecodable {
        /// The tensor's name.
        tensor: String,
        /// What was found and what was expected.
        problem: String,
    },
    /// A value is not finite or out of range.
    #[error("tensor `{tensor}`, row {row}, column {column}: {problem}; the file is damaged or not a release")]
    BadValue {
        /// The tensor's name.
        tensor: String,
        /// Row of the value.
        row: usize,
        /// Column of the value.
        column: usize,
        /// What was found.
        problem: String,
    },
    /// The tokenizer cannot be used.
    #[error("{}: {problem}", path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// What was found and what was expected.
        problem: String,
    },
}

/// What is wrong with one shard.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct ShardProblem {
    /// The shard.
    pub path: PathBuf,
    /// What was found and what to do.
    pub problem: String,
}

fn listed(problems: &[ShardProblem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn joined(findings: &[super::Finding]) -> String {
    findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  ")
}
