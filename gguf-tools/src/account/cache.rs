//! What layers keep of the tokens they have seen: keys and values, compressed rows, states.

use regex::Regex;
use serde::Serialize;
use std::sync::LazyLock;

use super::AccountError;
use super::facts::Facts;
use super::headers::StoredTensor;
use super::names::{Component, Named};
use crate::model::HyperParameters;

/// How values of the cache are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheType {
    /// Two bytes a value.
    #[default]
    F16,
    /// Four bytes a value.
    F32,
    /// One byte a value and a scale for 32.
    Q8_0,
}

impl CacheType {
    /// Every type with the name that users type.
    pub const NAMES: [(&'static str, Self); 3] =
        [("f16", Self::F16), ("f32", Self::F32), ("q8_0", Self::Q8_0)];

    fn bytes(self, n_values: u64) -> u64 {
        match self {
            Self::F16 => n_values.saturating_mul(2),
            Self::F32 => n_values.saturating_mul(4),
            Self::Q8_0 => n_values.div_ceil(32).saturating_mul(34),
        }
    }
}

/// Rows that grow with the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct CachedRows {
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Tokens for which one row is kept.
    pub every_tokens: u64,
    /// Rows of these that a token reads at most; `None`: all.
    pub top_k: Option<u64>,
}

/// What one layer keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LayerCache {
    /// What kind of layer it is.
    pub kind: String,
    /// Rows that grow with the text.
    pub rows: Vec<CachedRows>,
    /// Tokens of a window of fixed size, and bytes of one of them.
    pub window: Option<(u64, u64)>,
    /// Bytes of a recurrent state, f32; `None`: the configuration does not say.
    pub state_bytes: Option<u64>,
}

impl LayerCache {
    /// Bytes that a token leaves behind.
    pub fn bytes_per_token(&self) -> f64 {
        // A sum of nothing would be -0.
        self.rows.iter().fold(0.0, |sum, rows| sum + rows.row_bytes as f64 / rows.every_tokens as f64)
    }

    /// Bytes that grew up to a context of so many tokens.
    pub fn grown_bytes(&self, context: u64) -> u64 {
        let grown = |rows: &CachedRows| (context / rows.every_tokens).saturating_mul(rows.row_bytes);
        self.rows.iter().map(grown).fold(0, u64::saturating_add)
    }

    /// Bytes that are there whatever the context.
    pub fn fixed_bytes(&self) -> u64 {
        let window = self.window.map_or(0, |(tokens, bytes)| tokens.saturating_mul(bytes));
        window.saturating_add(self.state_bytes.unwrap_or(0))
    }

    /// Bytes that decoding one token at a context reads.
    pub fn read_bytes(&self, context: u64) -> u64 {
        let read = |rows: &CachedRows| {
            let all = context / rows.every_tokens;
            rows.top_k.map_or(all, |k| all.min(k)).saturating_mul(rows.row_bytes)
        };
        let window = self.window.map_or(0, |(tokens, bytes)| context.min(tokens).saturating_mul(bytes));
        let rows = self.rows.iter().map(read).fold(0, u64::saturating_add);
        rows.saturating_add(window).saturating_add(self.state_bytes.unwrap_or(0))
    }
}

/// A tensor with what its name says.
pub(super) type Sorted<'a> = (&'a StoredTensor, Named<'a>);

/// The caches of all main layers, in order.
///
/// Widths come from the shapes of the key and value projections where these are stored unpacked, else from the heads of
/// the description.
pub(super) fn layer_caches(
    tensors: &[Sorted<'_>],
    facts: &Facts<'_>,
    cache_type: CacheType,
    place: &str,
) -> Result<Vec<LayerCache>, AccountError> {
    if let Some(model) = &facts.deepseek4 {
        return Ok((0..facts.n_layers).map(|layer| deepseek4(model, layer, cache_type)).collect());
    }
    let mut by_layer: Vec<Vec<&Sorted<'_>>> = vec![Vec::new(); facts.n_layers as usize];
    for sorted in tensors {
        if let Some(layer) = sorted.1.layer.and_then(|layer| by_layer.get_mut(layer as usize)) {
            layer.push(sorted);
        }
    }
    let caches = by_layer.iter().enumerate();
    caches.map(|(layer, tensors)| layer_cache(tensors, layer as u32, facts, cache_type, place)).collect()
}

/// DeepSeek V4: a window everywhere; a compressed row for 4 or 128 tokens, and with 4 an indexer's row beside it.
fn deepseek4(model: &HyperParameters, layer: u32, cache_type: CacheType) -> LayerCache {
    let row_bytes = cache_type.bytes(model.head_dim);
    let ratio = model.compress_ratio(layer);
    let every_tokens = u64::from(ratio);
    let mut rows = Vec::new();
    if ratio != 0 {
        let top_k = (ratio == 4).then_some(model.index_topk);
        rows.push(CachedRows { row_bytes, every_tokens, top_k });
    }
    if ratio == 4 {
        rows.push(CachedRows {
            row_bytes: cache_type.bytes(model.index_head_dim),
            every_tokens,
            top_k: None,
        });
    }
    let kind = match ratio {
        0 => "window only".to_owned(),
        4 => "window, 1 row for 4 tokens, indexer".to_owned(),
        _ => format!("window, 1 row for {ratio} tokens"),
    };
    LayerCache { kind, rows, window: Some((model.sliding_window, row_bytes)), state_bytes: Some(0) }
}

/// Projections whose rows are what a layer keeps, by their names within the layer.
struct Patterns {
    latent: Regex,
    key: Regex,
    value: Regex,
    fused: Regex,
    index_key: Regex,
}

static PATTERNS: LazyLock<Patterns> = LazyLock::new(|| {
    let new = |pattern: &str| Regex::new(pattern).expect("the patterns of this file are right");
    Patterns {
        latent: new(r"(^|[._])(kv_a_proj_with_mqa|kv_a_mqa|wkv_a)\.(weight|weight_packed)$"),
        key: new(r"(^|[._])(k_proj|attn_k|wk)\.(weight|weight_packed|qweight)$"),
        value: new(r"(^|[._])(v_proj|attn_v|wv)\.(weight|weight_packed|qweight)$"),
        fused: new(
            r"(^|[._])(qkv_proj|attn_qkv|query_key_value|c_attn|W_pack|wqkv|qkv)\.(weight|weight_packed|qweight)$",
        ),
        index_key: new(r"indexer[._](wk|k_proj|attn_k)\.(weight|weight_packed)$"),
    }
});

fn layer_cache(
    tensors: &[&Sorted<'_>],
    layer: u32,
    facts: &Facts<'_>,
    cache_type: CacheType,
    place: &str,
) -> Result<LayerCache, AccountError> {
    let has = |component: Component| tensors.iter().any(|(_, named)| named.component == component);
    let find = |pattern: &Regex, component: Component| {
        let matches =
            |(_, named): &&&Sorted<'_>| named.component == component && pattern.is_match(named.rest);
        tensors.iter().find(matches).map(|(tensor, _)| *tensor)
    };
    let patterns = &*PATTERNS;
    let attends = [&patterns.latent, &patterns.key, &patterns.fused];
    let found = attends.map(|pattern| find(pattern, Component::Attention));
    if has(Component::Recurrent) && found[0].is_none() && found[1].is_none() {
        let kind = "recurrent".to_owned();
        return Ok(LayerCache { kind, state_bytes: facts.recurrent_state(), ..LayerCache::default() });
    }
    if !has(Component::Attention) {
        let kind = "no attention".to_owned();
        return Ok(LayerCache { kind, state_bytes: Some(0), ..LayerCache::default() });
    }
    let unknown = || AccountError::UnknownCache {
        place: place.to_owned(),
        layer,
        tensors: tensors
            .iter()
            .filter(|s| s.1.component == Component::Attention)
            .map(|s| s.0.name.clone())
            .collect(),
    };
    // In GPTQ and AWQ files the rows of a matrix are packed along either side: only heads tell the width there.
    let unpacked = |tensor: &&StoredTensor| !tensor.name.ends_with(".qweight");
    let rows_of = |tensor: &StoredTensor| tensor.shape.first().copied().unwrap_or(0);
    let state_bytes = if has(Component::Recurrent) { facts.recurrent_state() } else { Some(0) };
    if let Some(latent) = found[0] {
        let index = find(&patterns.index_key, Component::Indexer).map(rows_of);
        let top_k = index.and(facts.count(&["index_topk"], &["attention.indexer.top_k"]));
        let mut rows =
            vec![CachedRows { row_bytes: cache_type.bytes(rows_of(latent)), every_tokens: 1, top_k }];
        if let Some(width) = index {
            rows.push(CachedRows { row_bytes: cache_type.bytes(width), every_tokens: 1, top_k: None });
        }
        let kind = if index.is_some() { "latent attention, indexer" } else { "latent attention" };
        return Ok(LayerCache { kind: kind.to_owned(), rows, window: None, state_bytes });
    }
    let by_shape = || {
        let key = found[1].filter(unpacked).map(rows_of)?;
        let value = find(&patterns.value, Component::Attention).filter(unpacked).map_or(key, rows_of);
        key.checked_add(value)
    };
    let width =
        by_shape().or_else(|| facts.cache_width(layer)).filter(|&width| width > 0).ok_or_else(unknown)?;
    let row_bytes = cache_type.bytes(width);
    let with = if has(Component::Recurrent) { " beside a recurrent part" } else { "" };
    Ok(match facts.window(layer) {
        Some(tokens) => LayerCache {
            kind: format!("window of {tokens}{with}"),
            rows: Vec::new(),
            window: Some((tokens, row_bytes)),
            state_bytes,
        },
        None => LayerCache {
            kind: format!("full attention{with}"),
            rows: vec![CachedRows { row_bytes, every_tokens: 1, top_k: None }],
            window: None,
            state_bytes,
        },
    })
}
