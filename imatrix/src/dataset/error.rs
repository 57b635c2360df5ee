//! What can be wrong with a data set.

use std::path::PathBuf;

/// Why a data set was not read or built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatasetError {
    /// The system refused.
    #[error("cannot read data set `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The file is no text.
    #[error("`{}` is no UTF-8 text: the byte at {offset} does not fit; convert it first", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// First byte that does not fit.
        offset: usize,
    },
    /// A line is no record.
    #[error("`{}`, line {line}: {problem}", path.display())]
    BadLine {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What was found and expected.
        problem: String,
    },
    /// A record holds a token that the model does not have.
    #[error(
        "record `{id}` holds token {found}, but the vocabulary has {vocabulary} tokens; it was made for another model"
    )]
    UnknownToken {
        /// The record.
        id: String,
        /// The token.
        found: u32,
        /// Tokens in the vocabulary.
        vocabulary: usize,
    },
    /// A kind that nothing provides.
    #[error("a share is given for `{kind}`, but there are only: {known}")]
    UnknownKind {
        /// As given.
        kind: String,
        /// Kinds with texts.
        known: String,
    },
    /// Nothing was asked for.
    #[error("the shares of all kinds are 0; give at least one kind a share above 0")]
    NoShares,
    /// The tokenizer failed.
    #[error("cannot cut a text into tokens")]
    Tokenizer(#[from] runner::RunnerError),
}
