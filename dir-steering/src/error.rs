//! What can go wrong with a direction.

use std::path::PathBuf;

use gguf_tools::checkpoint::CheckpointError;
use gguf_tools::gguf::GgufError;
use runner::RunnerError;

/// Why a direction cannot be made, read, written or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SteeringError {
    /// A file cannot be read.
    #[error("cannot read `{path}`")]
    Read {
        /// File.
        path: PathBuf,
        /// Reason.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write `{path}`")]
    Write {
        /// File.
        path: PathBuf,
        /// Reason.
        source: std::io::Error,
    },
    /// A direction file says something impossible.
    #[error("`{path}`: {field} is {found}, expected {expected}")]
    Field {
        /// File.
        path: PathBuf,
        /// What is wrong.
        field: String,
        /// What the file has.
        found: String,
        /// What it must have.
        expected: String,
    },
    /// The content is none of the known formats.
    #[error(
        "`{path}` is no direction file: it begins with {found}; expected our safetensors form, a GGUF with tensors \
         `direction.N`, or a raw `.f32` file with its `.json` beside it"
    )]
    UnknownFormat {
        /// File.
        path: PathBuf,
        /// First bytes, in words.
        found: String,
    },
    /// A raw file without description.
    #[error(
        "`{path}` is raw values without a description; expected `{json}` beside it, with \"shape\" and \"component\""
    )]
    NoDescription {
        /// File.
        path: PathBuf,
        /// The description's name.
        json: PathBuf,
    },
    /// No layer has a direction.
    #[error("`{path}` holds no direction: every layer is empty or zero")]
    Empty {
        /// File.
        path: PathBuf,
    },
    /// A layer's vector has a width of its own.
    #[error("`{path}`: direction of layer {layer} has {found} values, expected {expected}")]
    Width {
        /// File.
        path: PathBuf,
        /// Layer.
        layer: usize,
        /// Values found.
        found: usize,
        /// Values expected.
        expected: usize,
    },
    /// A value that is NaN or infinite.
    #[error(
        "`{path}`: direction of layer {layer} has {found} at {index}, expected finite values; build it again"
    )]
    NotFinite {
        /// File.
        path: PathBuf,
        /// Layer.
        layer: usize,
        /// Position in the vector.
        index: usize,
        /// The value.
        found: f32,
    },
    /// A projection along a vector that is not of length 1 has a strength of its own.
    #[error(
        "`{path}`: direction of layer {layer} has length {length:.6}, expected 1 (to 0.001): its length would change the strength \
         unseen; `steer convert --normalize` writes it with length 1"
    )]
    NotUnit {
        /// File.
        path: PathBuf,
        /// Layer.
        layer: usize,
        /// Length.
        length: f64,
    },
    /// A vector that cannot be normalized.
    #[error("`{path}`: direction of layer {layer} has length {length}, which cannot be scaled to 1")]
    NoLength {
        /// File.
        path: PathBuf,
        /// Layer.
        layer: usize,
        /// Length.
        length: f64,
    },
    /// A choice of layers that leaves nothing.
    #[error("`{path}` has directions for layers {had:?}, none of them in {first}:{last}")]
    NoLayerLeft {
        /// File.
        path: PathBuf,
        /// First layer wanted.
        first: usize,
        /// Last layer wanted.
        last: usize,
        /// Layers that have one.
        had: Vec<usize>,
    },
    /// The direction is for models of another width.
    #[error(
        "`{path}` has directions of width {found}, the model's width is {expected}: it was made for another model"
    )]
    ModelWidth {
        /// File.
        path: PathBuf,
        /// Width of the direction.
        found: usize,
        /// Width of the model.
        expected: usize,
    },
    /// The direction is for models of other depth.
    #[error("`{path}` covers {found} layers, the model has {expected}: it was made for another model")]
    ModelLayers {
        /// File.
        path: PathBuf,
        /// Layers of the file.
        found: usize,
        /// Layers of the model.
        expected: usize,
    },
    /// The direction was made on another checkpoint.
    #[error(
        "`{path}` was made on checkpoint `{found}`, the model is `{expected}`: directions do not carry over; build it again \
         on this checkpoint, or pass --dir-steering-any-checkpoint (of `steer sweep`: --allow-other-checkpoint)"
    )]
    Checkpoint {
        /// File.
        path: PathBuf,
        /// Label of the direction.
        found: String,
        /// Label of the model.
        expected: String,
    },
    /// A control vector where a projection is needed.
    #[error(
        "`{path}` is a control vector: it is added behind a layer, not projected out of what attention or FFN write, and would \
         do something else here; `steer convert --to safetensors --as project` makes a projection of it, if that is what you want"
    )]
    Additive {
        /// File.
        path: PathBuf,
    },
    /// A place where the runner does not act.
    #[error("`{path}` was made for {component}; steering acts on ffn_out and attn_out")]
    Place {
        /// File.
        path: PathBuf,
        /// The component.
        component: &'static str,
    },
    /// A scale that is no number.
    #[error("the {option} scale is {found}, expected a finite number")]
    Scale {
        /// Which.
        option: &'static str,
        /// Its value.
        found: f32,
    },
    /// A format that cannot say what the direction means.
    #[error("{format} cannot hold this direction: {reason}")]
    CannotHold {
        /// The format wanted.
        format: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// Prompts that no direction can be made of.
    #[error("{set} prompts: {reason}")]
    Prompts {
        /// "good" or "bad".
        set: &'static str,
        /// Why not.
        reason: String,
    },
    /// Both sets look the same in a layer.
    #[error(
        "layer {layer}: the activations of good and bad prompts differ by {length:.3e} on average, nothing to make a direction of; \
         are the files the same?"
    )]
    NoDifference {
        /// Layer.
        layer: usize,
        /// Length of the mean difference.
        length: f64,
    },
    /// The model's metadata.
    #[error("`{path}` describes no supported model")]
    Model {
        /// File.
        path: PathBuf,
        /// Reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A checkpoint.
    #[error(transparent)]
    OpenCheckpoint(#[from] CheckpointError),
    /// Computing.
    #[error(transparent)]
    Runner(#[from] RunnerError),
}
