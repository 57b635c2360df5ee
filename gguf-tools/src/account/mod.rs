//! What a decoded token costs, from headers alone: bytes by component, caches by kind of layer, ceilings of machines.
//!
//! Nothing is guessed: a tensor without a known role, a layer whose cache cannot be told, a missing count are errors,
//! because a figure that leaves them out looks right and is not.

mod cache;
mod facts;
mod headers;
mod machines;
mod names;
mod promises;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

pub use cache::{CacheType, CachedRows, LayerCache};
pub use headers::{Description, HeaderFiles, Headers, LocalFiles, StoredTensor};
pub use machines::{Ceiling, Machine, known_machines};
pub use names::{Component, Named, Reading, name_of};

use crate::gguf::GgufError;
use facts::Facts;

/// Why the bytes could not be counted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccountError {
    /// A GGUF header cannot be read.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The bytes of a header cannot be had.
    #[error("cannot read `{place}`: {source}")]
    Io {
        /// The file.
        place: String,
        /// The system's own words.
        source: std::io::Error,
    },
    /// A file that is not what it should be.
    #[error("`{place}` {problem}")]
    Damaged {
        /// The file.
        place: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// Tensors without a known role.
    #[error(
        "{} tensors of `{place}` have no known role, so what they cost a token is unknown\n  {}\n  please report these names and the model they belong to", names.len(), shown(names)
    )]
    UnknownTensors {
        /// The model.
        place: String,
        /// Their names.
        names: Vec<String>,
    },
    /// A number that the description lacks.
    #[error("`{place}` does not say {fact}; without it the bytes of a token are not known")]
    MissingFact {
        /// The model.
        place: String,
        /// What is missing and where it is looked for.
        fact: &'static str,
    },
    /// A layer with attention of an unknown kind.
    #[error(
        "layer {layer} of `{place}`: what it keeps for a token cannot be told from its attention tensors and the description\n  {}\n  please report these names and the model they belong to",
        shown(tensors)
    )]
    UnknownCache {
        /// The model.
        place: String,
        /// The layer.
        layer: u32,
        /// Its attention tensors.
        tensors: Vec<String>,
    },
}

fn shown(names: &[String]) -> String {
    let more = names.len().saturating_sub(12);
    let listed = names.iter().take(12).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{listed} and {more} more") } else { listed }
}

/// Bytes that one decoded token makes the machine read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
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

/// The tensors of one component.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ComponentTotal {
    /// Which.
    pub component: Component,
    /// How many tensors.
    pub n_tensors: usize,
    /// Their types, the largest first.
    pub types: Vec<String>,
    /// Their bytes.
    pub n_bytes: u64,
    /// Bytes that one decoded token reads of them.
    pub bytes_per_token: u64,
}

/// Layers that keep the same.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CacheKind {
    /// What one of them keeps.
    #[serde(flatten)]
    pub cache: LayerCache,
    /// How many there are.
    pub n_layers: usize,
    /// Bytes that a token leaves behind in one of them.
    pub bytes_per_token: f64,
}

/// The caches at one length of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct AtContext {
    /// Tokens.
    pub context: u64,
    /// Bytes that have grown with the text.
    pub grown_bytes: u64,
    /// Those, and windows and states of fixed size.
    pub held_bytes: u64,
    /// Bytes of caches that decoding the next token reads.
    pub read_bytes: u64,
}

/// What is to be accounted for.
#[derive(Debug, Clone, PartialEq)]
pub struct AccountOptions {
    /// Lengths of text, in tokens.
    pub contexts: Vec<u64>,
    /// How caches are stored.
    pub cache_type: CacheType,
    /// Machines to compute ceilings for.
    pub machines: Vec<Machine>,
}

impl Default for AccountOptions {
    fn default() -> Self {
        let contexts = vec![4096, 32_768, 131_072, 1_048_576];
        Self { contexts, cache_type: CacheType::F16, machines: known_machines() }
    }
}

/// The account of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Account {
    /// What was read.
    pub place: String,
    /// Components in the order of [`Component::NAMES`]; their bytes sum to `data_bytes`.
    pub components: Vec<ComponentTotal>,
    /// Bytes of all tensors.
    pub data_bytes: u64,
    /// Headers and padding.
    pub overhead_bytes: u64,
    /// Size of all files: data, headers and padding.
    pub file_bytes: u64,
    /// Routed experts of a layer and how many of them work on a token; `None` without experts.
    pub experts: Option<(u64, u64)>,
    /// Bytes that one decoded token reads of the weights.
    pub token: TokenBytes,
    /// Their sum.
    pub bytes_per_token: u64,
    /// How caches are stored.
    pub cache_type: CacheType,
    /// What layers keep, kind by kind.
    pub caches: Vec<CacheKind>,
    /// Bytes that a token leaves behind in all layers.
    pub cache_bytes_per_token: f64,
    /// Windows and states of fixed size in all layers.
    pub cache_fixed_bytes: u64,
    /// The caches at the lengths asked for.
    pub contexts: Vec<AtContext>,
    /// Most tokens a second by memory alone.
    pub ceilings: Vec<Ceiling>,
    /// What the description says and the tensors contradict, and what could not be told.
    pub findings: Vec<String>,
}

impl Account {
    /// Accounts for a model by its headers.
    ///
    /// A token reads dense tensors once, `num_experts_per_tok` of all routed experts, one row of what is looked up by
    /// token, and the embedding again as output head where there is no other. Drafting modules and towers take no part.
    /// Anything that a cache of experts saves is left out: this is the worst case of one sequence at a time.
    ///
    /// # Errors
    /// [`AccountError`] naming what is not known.
    pub fn of(headers: &Headers, options: &AccountOptions) -> Result<Self, AccountError> {
        let mut facts = Facts::of(&headers.description, &headers.place)?;
        let n_main = main_layers(headers, facts.n_layers);
        facts.n_layers = n_main;
        let mut sorted = Vec::with_capacity(headers.tensors.len());
        let mut unknown = Vec::new();
        for tensor in &headers.tensors {
            match name_of(&tensor.name, n_main) {
                Some(named) => sorted.push((tensor, named)),
                None => unknown.push(tensor.name.clone()),
            }
        }
        if !unknown.is_empty() {
            return Err(AccountError::UnknownTensors { place: headers.place.clone(), names: unknown });
        }
        let experts = facts.experts();
        let components = totals(&sorted, experts, &headers.place)?;
        let token = token_bytes(&components);
        let layers = cache::layer_caches(&sorted, &facts, options.cache_type, &headers.place)?;
        let mut findings = promises::findings(headers, &sorted, &facts);
        if layers.iter().any(|layer| layer.state_bytes.is_none()) {
            findings.push(
                "the size of recurrent states is not told by the description; they are left out".to_owned(),
            );
        }
        let contexts: Vec<AtContext> = options.contexts.iter().map(|&c| at_context(&layers, c)).collect();
        let data_bytes = headers.data_bytes();
        let held = contexts.iter().map(|c| c.held_bytes).max().unwrap_or(0);
        let ceilings = options
            .machines
            .iter()
            .map(|machine| Ceiling {
                fits: machine.memory_bytes.map(|memory| data_bytes.saturating_add(held) <= memory),
                tokens_per_second: contexts
                    .iter()
                    .map(|at| machine.bandwidth / (token.total() as f64 + at.read_bytes as f64))
                    .collect(),
                machine: machine.clone(),
            })
            .collect();
        Ok(Self {
            place: headers.place.clone(),
            components,
            data_bytes,
            overhead_bytes: headers.overhead_bytes,
            file_bytes: headers.file_bytes,
            experts: experts.filter(|_| token.routed > 0),
            bytes_per_token: token.total(),
            token,
            cache_type: options.cache_type,
            cache_bytes_per_token: layers.iter().fold(0.0, |sum, layer| sum + layer.bytes_per_token()),
            cache_fixed_bytes: layers.iter().map(LayerCache::fixed_bytes).fold(0, u64::saturating_add),
            caches: kinds(layers),
            contexts,
            ceilings,
            findings,
        })
    }
}

/// The account's bytes of a token for a GGUF file (any file of a split set) or a checkpoint folder.
///
/// # Errors
/// As [`Account::of`].
pub fn bytes_per_token_of(path: &Path) -> Result<TokenBytes, AccountError> {
    Ok(Account::of(&Headers::open(path)?, &AccountOptions::default())?.token)
}

/// Main layers. Where a GGUF file counts drafting layers among the others, the tensors say so.
fn main_layers(headers: &Headers, stated: u32) -> u32 {
    let drafting = |tensor: &StoredTensor| {
        let (layer, rest) = tensor.name.strip_prefix("blk.")?.split_once('.')?;
        rest.starts_with("nextn.").then(|| layer.parse::<u32>().ok())?
    };
    headers.tensors.iter().filter_map(drafting).min().map_or(stated, |first| first.min(stated))
}

fn totals(
    tensors: &[cache::Sorted<'_>],
    experts: Option<(u64, u64)>,
    place: &str,
) -> Result<Vec<ComponentTotal>, AccountError> {
    struct Sum {
        n_tensors: usize,
        types: BTreeMap<String, u64>,
        n_bytes: u64,
        row_bytes: u64,
    }
    let mut sums: BTreeMap<Component, Sum> = BTreeMap::new();
    for (tensor, named) in tensors {
        let sum = sums.entry(named.component).or_insert_with(|| Sum {
            n_tensors: 0,
            types: BTreeMap::new(),
            n_bytes: 0,
            row_bytes: 0,
        });
        sum.n_tensors += 1;
        *sum.types.entry(tensor.stored_type.clone()).or_default() += tensor.n_bytes;
        sum.n_bytes = sum.n_bytes.saturating_add(tensor.n_bytes);
        sum.row_bytes += tensor.n_bytes / tensor.shape.first().copied().unwrap_or(1).max(1);
    }
    let has_head = sums.contains_key(&Component::Output);
    let mut totals = Vec::new();
    for (_, component) in Component::NAMES {
        let Some(sum) = sums.remove(&component) else {
            // Tied to the embedding: read whole once more, stored once.
            let tied = totals.iter().find(|t: &&ComponentTotal| t.component == Component::Embedding);
            if let (Component::Output, false, Some(tied)) = (component, has_head, tied) {
                let (types, bytes_per_token) = (tied.types.clone(), tied.n_bytes);
                totals.push(ComponentTotal { component, n_tensors: 0, types, n_bytes: 0, bytes_per_token });
            }
            continue;
        };
        let bytes_per_token = match component.reading() {
            Reading::Whole => sum.n_bytes,
            Reading::Apart => 0,
            Reading::OneRow => sum.row_bytes,
            Reading::ByExpert => {
                let fact = "how many experts there are and how many work on a token (num_experts_per_tok, or ARCHITECTURE.expert_used_count)";
                let (all, used) =
                    experts.ok_or_else(|| AccountError::MissingFact { place: place.to_owned(), fact })?;
                (u128::from(sum.n_bytes) * u128::from(used) / u128::from(all)) as u64
            }
        };
        let mut types: Vec<(String, u64)> = sum.types.into_iter().collect();
        types.sort_by_key(|(_, n_bytes)| std::cmp::Reverse(*n_bytes));
        totals.push(ComponentTotal {
            component,
            n_tensors: sum.n_tensors,
            types: types.into_iter().map(|(name, _)| name).collect(),
            n_bytes: sum.n_bytes,
            bytes_per_token,
        });
    }
    Ok(totals)
}

fn token_bytes(components: &[ComponentTotal]) -> TokenBytes {
    let sum = |reading: Reading| {
        let of = components.iter().filter(|total| total.component.reading() == reading);
        of.map(|total| total.bytes_per_token).fold(0, u64::saturating_add)
    };
    TokenBytes { dense: sum(Reading::Whole), routed: sum(Reading::ByExpert), looked_up: sum(Reading::OneRow) }
}

fn at_context(layers: &[LayerCache], context: u64) -> AtContext {
    let sum = |bytes: &dyn Fn(&LayerCache) -> u64| layers.iter().map(bytes).fold(0, u64::saturating_add);
    let grown_bytes = sum(&|layer| layer.grown_bytes(context));
    AtContext {
        context,
        grown_bytes,
        held_bytes: grown_bytes.saturating_add(sum(&LayerCache::fixed_bytes)),
        read_bytes: sum(&|layer| layer.read_bytes(context)),
    }
}

fn kinds(layers: Vec<LayerCache>) -> Vec<CacheKind> {
    let mut kinds: Vec<CacheKind> = Vec::new();
    for cache in layers {
        match kinds.iter_mut().find(|kind| kind.cache == cache) {
            Some(kind) => kind.n_layers += 1,
            None => kinds.push(CacheKind { bytes_per_token: cache.bytes_per_token(), cache, n_layers: 1 }),
        }
    }
    kinds
}
