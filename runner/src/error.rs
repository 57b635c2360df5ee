//! Why the runner refused to load or to compute.

use std::path::PathBuf;

use gguf_tools::block::BlockType;
use gguf_tools::checkpoint::CheckpointError;
use gguf_tools::gguf::GgufError;
use gguf_tools::model::ModelError;

use crate::cuda::CudaError;
use crate::observe::Site;

/// Why the runner refused to load or to compute.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunnerError {
    /// A synthetic model cannot give what was asked for.
    #[error("the synthetic model: {problem}")]
    Synthetic {
        /// What, and why.
        problem: String,
    },
    /// The GGUF file cannot be read.
    #[error("cannot read the model")]
    Gguf(#[from] GgufError),
    /// The CUDA device cannot be used.
    #[error("cannot compute on the CUDA device")]
    Cuda(#[from] CudaError),
    /// The checkpoint folder cannot be read.
    #[error("cannot read the checkpoint")]
    Checkpoint(#[from] CheckpointError),
    /// A file can no longer be read.
    #[error("cannot read `{}`", path.display())]
    Reading {
        /// The file.
        path: PathBuf,
        /// The system's own words.
        source: std::io::Error,
    },
    /// The description of the model is unusable.
    #[error("cannot use `{path}` as a model")]
    Model {
        /// File or folder.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: ModelError,
    },
    /// Tensors that the model needs are absent.
    #[error(
        "`{path}` lacks {n_missing} tensors that this model needs, first `{first}`; \
         the file is incomplete or of another model: check it with `ggsmith inspect`"
    )]
    MissingTensors {
        /// File or folder.
        path: PathBuf,
        /// How many are absent.
        n_missing: usize,
        /// The first of them.
        first: String,
    },
    /// A tensor has another shape than the metadata say.
    #[error("tensor `{tensor}` of `{path}` has shape {found:?}, expected {expected:?} (outermost first)")]
    WrongShape {
        /// File or folder.
        path: PathBuf,
        /// Name in GGUF spelling.
        tensor: String,
        /// As stored.
        found: Vec<u64>,
        /// As the metadata imply.
        expected: Vec<u64>,
    },
    /// A tensor is stored in a type that cannot be computed with.
    #[error(
        "tensor `{tensor}` of `{path}` is stored as {block_type}, which this program cannot compute with; quantize it to another type"
    )]
    UncomputableType {
        /// File or folder.
        path: PathBuf,
        /// Name in GGUF spelling.
        tensor: String,
        /// The type.
        block_type: BlockType,
    },
    /// A value of a small tensor is out of range.
    #[error("tensor `{tensor}` of `{path}`, value {index}: found {found}, expected {expected}")]
    BadValue {
        /// File or folder.
        path: PathBuf,
        /// Name in GGUF spelling.
        tensor: String,
        /// Position of the value in the tensor.
        index: usize,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// Nothing to compute.
    #[error(
        "the prompt has no tokens; give at least one (the model expects the beginning-of-sentence token first)"
    )]
    EmptyPrompt,
    /// A token that the model does not have.
    #[error("token {index} of the prompt is {found}, but the vocabulary has {vocabulary} tokens (0 to {})", .vocabulary - 1)]
    TokenOutOfRange {
        /// Position in the prompt.
        index: usize,
        /// The id.
        found: u32,
        /// Number of tokens in the vocabulary.
        vocabulary: usize,
    },
    /// More tokens than the context allows.
    #[error(
        "{wanted} tokens do not fit the context of {limit}; shorten the prompt or raise the context limit"
    )]
    ContextFull {
        /// Tokens after the request.
        wanted: usize,
        /// Most tokens allowed.
        limit: usize,
    },
    /// The context limit asked for is beyond the model's own.
    #[error("a context of {wanted} tokens was asked for, but the model is made for at most {limit}")]
    ContextTooLong {
        /// As asked.
        wanted: usize,
        /// As the metadata say.
        limit: usize,
    },
    /// A value that is no number came up.
    #[error(
        "{site} {place} at position {position} is not finite (value {value_index}: {found}); \
             look for a broken tensor with `ggsmith verify`"
    )]
    NotFinite {
        /// The operation whose result it is.
        site: Site,
        /// "of layer 3", or "behind the layers".
        place: String,
        /// Position of the token in its sequence.
        position: usize,
        /// Position of the value in the token's row.
        value_index: usize,
        /// NaN or an infinity.
        found: f32,
    },
    /// All logits of a position are the same, so nothing was predicted.
    #[error(
        "all {vocabulary} logits at position {position} are {value}: the model predicts nothing; \
             its output matrix or final norm is probably all zeros"
    )]
    ConstantLogits {
        /// Position of the token in its sequence.
        position: usize,
        /// Number of logits.
        vocabulary: usize,
        /// The value they share.
        value: f32,
    },
    /// A setting that makes no sense.
    #[error("{option} is {found}; expected {expected}")]
    BadOption {
        /// Name of the option.
        option: &'static str,
        /// As given.
        found: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// The worker threads could not be started.
    #[error("cannot start {n_threads} worker threads")]
    Threads {
        /// As asked; 0 = one a core.
        n_threads: usize,
        /// The system's reason.
        #[source]
        source: rayon::ThreadPoolBuildError,
    },
    /// The tokenizer cannot be built or used.
    #[error("tokenizer: {problem}")]
    Tokenizer {
        /// Which key or token, what was found, what was expected.
        problem: String,
    },
}
