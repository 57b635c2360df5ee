//! What a decoded token costs, from headers alone.

use std::path::Path;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::gguf::{Gguf, GgufError};
use crate::model::{Family, HyperParameters, ModelError, SourceRole, TensorTable};

/// Why the bytes could not be counted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccountError {
    /// The GGUF file cannot be read.
    #[error("cannot read the model")]
    Gguf(#[from] GgufError),
    /// The checkpoint cannot be read.
    #[error("cannot read the checkpoint")]
    Checkpoint(#[from] CheckpointError),
    /// The metadata describe no supported model.
    #[error("the metadata describe no supported model")]
    Model(#[from] ModelError),
    /// A tensor has no known role.
    #[error(
        "tensor `{name}` has no known role in this model, so what it costs a token is unknown; check the file with `ggsmith verify`"
    )]
    UnknownTensor {
        /// Its name.
        name: String,
    },
}

/// Bytes that one decoded token makes the machine read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct TokenBytes {
    /// Tensors that every token passes whole.
    pub dense: u64,
    /// The routed experts that work on a token.
    pub routed: u64,
    /// The token's row of the embedding and of each hash-routing table.
    pub looked_up: u64,
}

impl TokenBytes {
    /// Everything together.
    pub fn total(&self) -> u64 {
        self.dense.saturating_add(self.routed).saturating_add(self.looked_up)
    }
}

/// Bytes that one decoded token makes the machine read, from names and sizes alone.
///
/// `headers`: name, in the spelling of GGUF files or of official checkpoints, and bytes in the file.
/// Counts dense tensors once, `num_experts_per_tok` of `n_routed_experts` for routed ones, and one of
/// `vocab_size` rows of what is looked up by token. Leaves out the caches, which grow with the context, and anything
/// that an expert cache saves: this is the worst case. Drafting tensors take no part in plain decoding.
///
/// # Errors
/// [`AccountError::UnknownTensor`] if a name belongs to no known role. Nothing is guessed,
/// because a tensor counted in the wrong class makes every speed estimate wrong.
pub fn bytes_per_token<'a>(
    headers: impl IntoIterator<Item = (&'a str, u64)>,
    model: &HyperParameters,
) -> Result<TokenBytes, AccountError> {
    let table = TensorTable::new(model);
    let mut sums = TokenBytes::default();
    // Summed before the division: experts of a checkpoint are tensors of their own.
    let (mut all_routed, mut all_rows) = (0_u64, 0_u64);
    for (name, n_bytes) in headers {
        let Some(family) = family(&table, name)? else { continue };
        let sum = match family {
            Family::Embedding | Family::RoutingTable => &mut all_rows,
            family if family.is_routed() => &mut all_routed,
            _ => &mut sums.dense,
        };
        *sum = sum.saturating_add(n_bytes);
    }
    let share =
        |all: u64, part: u64, whole: u64| (u128::from(all) * u128::from(part) / u128::from(whole)) as u64;
    sums.routed = share(all_routed, model.num_experts_per_tok, model.n_routed_experts);
    sums.looked_up = share(all_rows, 1, model.vocab_size);
    Ok(sums)
}

/// [`bytes_per_token`] of a GGUF file (any file of a split set) or an official checkpoint folder.
///
/// # Errors
/// If the headers cannot be read, or as [`bytes_per_token`].
pub fn bytes_per_token_of(path: &Path) -> Result<TokenBytes, AccountError> {
    if path.is_dir() {
        let checkpoint = Checkpoint::open(path)?;
        let headers = checkpoint.tensors().iter().map(|t| (t.name.as_str(), t.bytes.len() as u64));
        return bytes_per_token(headers, checkpoint.hyper_parameters());
    }
    let gguf = Gguf::open(path)?;
    let headers = gguf.tensors().iter().map(|t| (t.name.as_str(), t.n_bytes));
    bytes_per_token(headers, &HyperParameters::from_metadata(gguf.metadata())?)
}

/// The family of a tensor by either name, scales going with their weights; `None` if plain decoding does not touch it.
fn family(table: &TensorTable, name: &str) -> Result<Option<Family>, AccountError> {
    if let Some(spec) = table.by_gguf_name(name) {
        return Ok(Some(spec.family));
    }
    let stem = [".scale", ".weight_scale_inv"].into_iter().find_map(|suffix| name.strip_suffix(suffix));
    let weight = stem.map(|stem| format!("{stem}.weight"));
    match table.role(weight.as_deref().unwrap_or(name)) {
        SourceRole::Weight(spec, _) => Ok(Some(spec.family)),
        SourceRole::Draft | SourceRole::Unused => Ok(None),
        SourceRole::Refused(_) | SourceRole::Unknown => {
            Err(AccountError::UnknownTensor { name: name.to_owned() })
        }
    }
}
