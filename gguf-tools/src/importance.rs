//! Importance of input columns, as the quantizers consume it. The `imatrix` crate reads the files.

use std::borrow::Cow;

/// One matrix of the model whose importance is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix<'a> {
    /// GGUF name of the weight, `blk.3.ffn_gate_exps.weight`.
    pub tensor: &'a str,
    /// Name of this very matrix in the checkpoint, tried when the GGUF name has no entry; `None` if not known.
    pub source: Option<&'a str>,
    /// Which matrix of a stacked tensor; 0 for a dense one.
    pub expert_index: usize,
    /// Matrices in the tensor; 1 for a dense one. Entries of another number of matrices are refused.
    pub n_experts: usize,
    /// Input columns of the matrix: the length of a row of weights.
    pub n_columns: usize,
}

/// Gives the importance of one matrix, or none.
pub trait ImportanceSource: Sync {
    /// Mean of the squared input of each column of the matrix, `[n_columns]`.
    fn importance(&self, matrix: &Matrix<'_>) -> Found<'_>;

    /// Where the values come from, for reports and metadata: the file's name and SHA-256.
    fn provenance(&self) -> Option<Provenance> {
        None
    }
}

/// What a source knows about one matrix.
#[derive(Debug, Clone, PartialEq)]
pub enum Found<'a> {
    /// Usable values: finite, not negative, not all zero.
    Values(Cow<'a, [f32]>),
    /// The source has no entry for the tensor.
    NoEntry,
    /// The entry is there but this expert was never reached, or all its values are zero.
    Unseen,
    /// The entry cannot be used: what was found and what was expected.
    Unusable(String),
}

/// The file that importance came from.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Provenance {
    /// File name without folder.
    pub file_name: String,
    /// SHA-256 of its bytes, lower-case hexadecimal.
    pub sha256: String,
    /// Names of the calibration data sets it records.
    pub datasets: Vec<String>,
    /// Number of tensors with an entry.
    pub n_entries: usize,
    /// Number of calibration chunks, where recorded.
    pub n_chunks: Option<u64>,
}

/// Knows nothing: every quantizer takes its fallback.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoImportance;

impl ImportanceSource for NoImportance {
    fn importance(&self, _: &Matrix<'_>) -> Found<'_> {
        Found::NoEntry
    }
}
