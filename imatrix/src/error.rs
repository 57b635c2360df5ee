//! What can be wrong with an importance matrix file, and with its use.

use std::fmt;
use std::path::PathBuf;

use crate::Format;
use crate::coverage::Finding;

/// Most lines of a list that a message shows; the rest is counted.
const MOST_LINES: usize = 12;

/// Why an importance matrix was not read, not used, or not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImatrixError {
    /// The operating system refused to open or read the file.
    #[error("cannot read imatrix `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// The bytes are no importance matrix at all.
    #[error(
        "`{}` is no importance matrix: found {found}, expected a GGUF imatrix or a legacy `.dat`; pass the file that \
         was collected for this model",
        path.display()
    )]
    NotAnImatrix {
        /// The file.
        path: PathBuf,
        /// What the first bytes or the metadata say.
        found: String,
    },
    /// The GGUF container itself cannot be read.
    #[error("cannot read imatrix `{}` (GGUF, by its first bytes)", path.display())]
    Container {
        /// The file.
        path: PathBuf,
        /// The reader's reason.
        #[source]
        source: gguf_tools::gguf::GgufError,
    },
    /// The structure is damaged, so no entry can be trusted.
    #[error(
        "imatrix `{}` (read as {format}, by its first bytes) is damaged{}\n  copy or collect it again",
        path.display(), Lines(problems)
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The format found.
        format: Format,
        /// Everything found, in file order.
        problems: Vec<Problem>,
    },
    /// The file does not serve the tensors of the plan.
    #[error(
        "imatrix `{file_name}` does not cover what is to be quantized{}\n  collect more text, or \
         pass `--imatrix-missing fallback` without `--imatrix-strict`",
        Lines(findings)
    )]
    Coverage {
        /// The file's name.
        file_name: String,
        /// What is missing, by tensor.
        findings: Vec<Finding>,
    },
    /// No entry of the file belongs to any tensor of the plan.
    #[error(
        "imatrix `{file_name}` matches none of {n_tensors} tensors: it has `{example_entry}`, the plan wants \
         `{example_tensor}`; it was collected for another model"
    )]
    NothingMatches {
        /// The file's name.
        file_name: String,
        /// Tensors asked for.
        n_tensors: usize,
        /// First entry of the file.
        example_entry: String,
        /// First tensor of the plan.
        example_tensor: String,
    },
    /// Values that cannot be used stand in the way of a merge or a conversion.
    #[error("cannot merge or convert `{file_name}`: it holds values that cannot be used{}", Lines(problems))]
    UnusableValues {
        /// The file's name.
        file_name: String,
        /// Which.
        problems: Vec<Problem>,
    },
    /// Two files do not belong together.
    #[error("cannot merge entry `{entry}`: `{first}` has {expected}, `{second}` has {found}")]
    Incompatible {
        /// The entry, or the property, that differs.
        entry: String,
        /// The file that came first.
        first: String,
        /// The file that differs from it.
        second: String,
        /// What the first one has.
        expected: String,
        /// What the second one has.
        found: String,
    },
    /// Nothing was given to merge.
    #[error("no imatrix was given to merge; pass at least one file")]
    NothingToMerge,
    /// Unseen experts cannot be told apart without the width of a matrix.
    #[error(
        "cannot merge entry `{entry}` of `{file_name}`: it may mark experts that were never reached by the value 1, \
         and its number of columns is not stored; pass the model it was collected from"
    )]
    ColumnsNeeded {
        /// The entry.
        entry: String,
        /// The file's name.
        file_name: String,
    },
    /// The number of experts is not stored.
    #[error(
        "entry `{entry}` of `{file_name}` has {n_values} values and does not say for how many experts; pass the model \
         that it was collected from"
    )]
    ExpertsNeeded {
        /// The entry.
        entry: String,
        /// The file's name.
        file_name: String,
        /// Its values.
        n_values: usize,
    },
    /// The output exists.
    #[error("`{}` exists; pass `--overwrite` to replace it", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// The output is not representable in its format.
    #[error("cannot write `{}`: {what}", path.display())]
    NotRepresentable {
        /// The output.
        path: PathBuf,
        /// Which number, and the limit.
        what: String,
    },
    /// The operating system refused to write; nothing lies under the final name.
    #[error("cannot write imatrix `{}`; nothing was left under that name", path.display())]
    Write {
        /// The output.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
}

/// One thing wrong in a file: where, what was found, what was expected.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    /// The entry; `None` where the file as a whole is meant.
    pub entry: Option<String>,
    /// The matrix within the entry, where the entry's width is known.
    pub expert: Option<usize>,
    /// The column, or the position in the whole entry where its width is not known.
    pub column: Option<usize>,
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: String,
}

impl Problem {
    pub(crate) fn of_file(found: impl Into<String>, expected: impl Into<String>) -> Self {
        Self { entry: None, expert: None, column: None, found: found.into(), expected: expected.into() }
    }

    pub(crate) fn of_entry(
        entry: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self { entry: Some(entry.into()), ..Self::of_file(found, expected) }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.entry {
            Some(entry) => write!(f, "entry `{entry}`")?,
            None => write!(f, "the file")?,
        }
        match (self.expert, self.column) {
            (Some(expert), Some(column)) => write!(f, ", expert {expert}, column {column}")?,
            (Some(expert), None) => write!(f, ", expert {expert}")?,
            (None, Some(index)) => write!(f, ", value {index}")?,
            (None, None) => {}
        }
        write!(f, ": found {}, expected {}", self.found, self.expected)
    }
}

/// Shows a list below a headline, one line each, and counts what it leaves out.
struct Lines<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for Lines<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for item in self.0.iter().take(MOST_LINES) {
            write!(f, "\n  {item}")?;
        }
        match self.0.len().saturating_sub(MOST_LINES) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}
