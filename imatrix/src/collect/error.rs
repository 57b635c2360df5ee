//! Why a collection stopped.

use std::path::PathBuf;

use crate::ImatrixError;

/// Why an importance matrix was not collected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectError {
    /// The model could not compute.
    #[error("cannot run the model over the prompts")]
    Runner(#[from] runner::RunnerError),
    /// A file could not be read or written.
    #[error(transparent)]
    File(#[from] ImatrixError),
    /// There is nothing to read.
    #[error("the data set holds no prompt of at least two tokens")]
    NoPrompts,
    /// A sum is no number that can be stored.
    #[error(
        "the sum of squares of `{tensor}`, expert {expert}, column {column} is {found}; the model computes no numbers \
         there: find the place with `--check-finite`"
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// The expert; 0 for a dense matrix.
        expert: usize,
        /// The column.
        column: usize,
        /// The sum.
        found: f64,
    },
    /// The state file was written by a run with other inputs.
    #[error(
        "the state `{}` belongs to another collection ({differs}); repeat that one, remove the state, or pass \
         `--no-resume` to start over",
        path.display()
    )]
    OtherState {
        /// The state file.
        path: PathBuf,
        /// What differs.
        differs: String,
    },
    /// The state file cannot be used.
    #[error("the state `{}` is damaged: {problem}; remove it, or pass `--no-resume` to start over", path.display())]
    StateDamaged {
        /// The state file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The caller asked to stop.
    #[error(
        "stopped after {n_prompts} of {total_prompts} prompts{}",
        match state {
            Some(path) => format!("; the same command goes on from `{}`", path.display()),
            None => String::new(),
        }
    )]
    Interrupted {
        /// Prompts done.
        n_prompts: usize,
        /// Prompts in all.
        total_prompts: usize,
        /// Where the state lies.
        state: Option<PathBuf>,
    },
}
