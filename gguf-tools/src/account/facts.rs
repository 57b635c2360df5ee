//! Numbers of a model that its tensors do not show: from `config.json` or from GGUF metadata, under any of their names.

use serde_json::Value as Json;

use super::AccountError;
use super::headers::Description;
use crate::gguf::{Array, Metadata, Value};
use crate::model::HyperParameters;

/// Where multimodal configurations keep the language model's.
const NESTED: [&[&str]; 5] = [
    &["text_config"],
    &["llm_config"],
    &["language_config"],
    &["thinker_config", "text_config"],
    &["language_model_config"],
];

/// Bound on the number of layers from an untrusted description: a list is made for each.
const MAX_LAYERS: u32 = 100_000;

/// Numbers about a model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Facts<'a> {
    description: &'a Description,
    /// DeepSeek V4's own description, if this is one.
    pub(super) deepseek4: Option<HyperParameters>,
    /// Main layers; drafting layers are not counted.
    pub(super) n_layers: u32,
}

impl<'a> Facts<'a> {
    /// Reads what is needed to sort tensors.
    ///
    /// # Errors
    /// [`AccountError::MissingFact`] if the number of layers is not given.
    pub(super) fn of(description: &'a Description, place: &str) -> Result<Self, AccountError> {
        let deepseek4 = match description {
            Description::Config(config) => HyperParameters::from_config(config).ok(),
            Description::Metadata(metadata) => HyperParameters::from_metadata(metadata).ok(),
        };
        let mut facts = Self { description, deepseek4, n_layers: 0 };
        let stated =
            facts.count(&["num_hidden_layers", "n_layer", "num_layers", "n_layers"], &["block_count"]);
        let n_layers = stated.and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=MAX_LAYERS).contains(n));
        facts.n_layers = n_layers.ok_or_else(|| AccountError::MissingFact {
            place: place.to_owned(),
            fact: "a plausible number of layers (num_hidden_layers, or ARCHITECTURE.block_count)",
        })?;
        Ok(facts)
    }

    /// The configuration, if there is one.
    pub(super) fn config(&self) -> Option<&'a Json> {
        if let Description::Config(config) = self.description { Some(config) } else { None }
    }

    fn metadata(&self) -> Option<&'a Metadata> {
        if let Description::Metadata(metadata) = self.description { Some(metadata) } else { None }
    }

    /// A field of the language model's configuration.
    pub(super) fn field(&self, name: &str) -> Option<&'a Json> {
        let config = self.config()?;
        let inner = |path: &&[&str]| path.iter().try_fold(config, |at, key| at.get(key));
        let nested = NESTED.iter().filter_map(inner).find_map(|config| config.get(name));
        nested.or_else(|| config.get(name)).filter(|value| !value.is_null())
    }

    /// A key of GGUF metadata behind the architecture's name.
    pub(super) fn key(&self, name: &str) -> Option<&'a Value> {
        let metadata = self.metadata()?;
        let architecture = metadata.get("general.architecture").and_then(Value::as_str)?;
        metadata.get(&format!("{architecture}.{name}"))
    }

    /// A count under one of these fields or keys.
    pub(super) fn count(&self, fields: &[&str], keys: &[&str]) -> Option<u64> {
        let in_config = fields.iter().find_map(|name| self.field(name).and_then(Json::as_u64));
        in_config.or_else(|| keys.iter().find_map(|name| self.key(name).and_then(Value::as_u64)))
    }

    /// What the description is called in messages.
    pub(super) fn called(&self) -> &'static str {
        if self.config().is_some() { "config" } else { "metadata" }
    }

    /// Routed experts of a layer, and how many of them work on a token.
    pub(super) fn experts(&self) -> Option<(u64, u64)> {
        let all = self.count(
            &[
                "n_routed_experts",
                "num_experts",
                "num_local_experts",
                "moe_num_experts",
                "num_routed_experts",
            ],
            &["expert_count"],
        )?;
        let used = self.count(
            &[
                "num_experts_per_tok",
                "num_experts_per_token",
                "moe_topk",
                "moe_k",
                "top_k_experts",
                "experts_per_token",
            ],
            &["expert_used_count"],
        )?;
        (all > 0 && used <= all).then_some((all, used))
    }

    /// Width of the keys and of the values that a layer keeps, by heads.
    pub(super) fn cache_width(&self, layer: u32) -> Option<u64> {
        let heads = self.count(&["num_attention_heads", "n_head"], &["attention.head_count"]);
        let per_layer = match self.key("attention.head_count_kv") {
            Some(Value::Array(list)) => {
                list.as_i64s().and_then(|l| l.get(layer as usize).copied()).map(|n| n.max(0) as u64)
            }
            _ => None,
        };
        let kv_heads = per_layer
            .or_else(|| self.count(&["num_key_value_heads", "num_kv_heads"], &["attention.head_count_kv"]))
            .or(heads)?;
        let hidden = self.count(&["hidden_size", "n_embd"], &["embedding_length"]);
        let by_division = || Some(hidden? / heads.filter(|&n| n > 0)?);
        let key = self.count(&["head_dim"], &["attention.key_length"]).or_else(by_division)?;
        let value = self.count(&["v_head_dim"], &["attention.value_length"]).unwrap_or(key);
        kv_heads.checked_mul(key.checked_add(value)?)
    }

    /// Tokens that a layer of windowed attention looks back; `None` for one that looks at everything.
    pub(super) fn window(&self, layer: u32) -> Option<u64> {
        let window = self
            .count(
                &["sliding_window", "sliding_window_size", "attention_chunk_size"],
                &["attention.sliding_window", "attention.chunk_size"],
            )
            .filter(|&n| n > 0)?;
        if self.field("use_sliding_window").and_then(Json::as_bool) == Some(false) {
            return None;
        }
        if let Some(kinds) = self.field("layer_types").and_then(Json::as_array) {
            let kind = kinds.get(layer as usize).and_then(Json::as_str).unwrap_or_default();
            return (kind.contains("sliding") || kind.contains("chunked")).then_some(window);
        }
        match self.key("attention.sliding_window_pattern") {
            Some(Value::Array(Array::Bool(list))) => {
                return list.get(layer as usize).copied().unwrap_or(false).then_some(window);
            }
            Some(value) => {
                return every_nth(value.as_u64(), layer).then_some(window);
            }
            None => {}
        }
        if let Some(n) = self.count(&["sliding_window_pattern", "_sliding_window_pattern"], &[]) {
            return every_nth(Some(n), layer).then_some(window);
        }
        // Architectures whose files leave the pattern to the program: every so many layers look at everything.
        let architecture =
            self.metadata().and_then(|m| m.get("general.architecture")).and_then(Value::as_str);
        let architecture = architecture.or_else(|| self.field("model_type")?.as_str()).unwrap_or_default();
        let patterns = [
            ("gemma2", 2),
            ("gpt-oss", 2),
            ("gpt_oss", 2),
            ("gemma3", 6),
            ("llama4", 4),
            ("cohere2", 4),
            ("exaone4", 4),
        ];
        match patterns.iter().find(|(name, _)| architecture.starts_with(name)) {
            Some((_, n)) => every_nth(Some(*n), layer).then_some(window),
            None => Some(window),
        }
    }

    /// Bytes of the state of a recurrent layer, f32: the matrix or vectors it carries, and its convolution's inputs.
    pub(super) fn recurrent_state(&self) -> Option<u64> {
        let delta = || {
            let value_heads = self.count(&["linear_num_value_heads"], &[])?;
            let key_heads = self.count(&["linear_num_key_heads"], &[])?;
            let key = self.count(&["linear_key_head_dim"], &[])?;
            let value = self.count(&["linear_value_head_dim"], &[])?;
            let kernel = self.count(&["linear_conv_kernel_dim"], &[])?;
            let state = value_heads.checked_mul(key)?.checked_mul(value)?;
            let width = (2 * key_heads).checked_mul(key)?.checked_add(value_heads.checked_mul(value)?)?;
            state.checked_add(width.checked_mul(kernel.saturating_sub(1))?)
        };
        let mamba = || {
            let inner = match self.count(&["mamba_num_heads", "mamba_n_heads"], &[]) {
                Some(heads) => heads.checked_mul(self.count(&["mamba_head_dim", "mamba_d_head"], &[])?)?,
                None => self.count(&["mamba_d_ssm"], &["ssm.inner_size"])?,
            };
            let state =
                self.count(&["ssm_state_size", "mamba_d_state", "state_size"], &["ssm.state_size"])?;
            let groups = self.count(&["n_groups", "mamba_n_groups"], &["ssm.group_count"]).unwrap_or(1);
            let kernel =
                self.count(&["conv_kernel", "mamba_d_conv", "conv_kernel_size"], &["ssm.conv_kernel"])?;
            let width = inner.checked_add((2 * groups).checked_mul(state)?)?;
            inner.checked_mul(state)?.checked_add(width.checked_mul(kernel.saturating_sub(1))?)
        };
        delta().or_else(mamba)?.checked_mul(4)
    }
}

/// Whether the layer is windowed where every `n`th looks at everything.
fn every_nth(n: Option<u64>, layer: u32) -> bool {
    n.is_none_or(|n| n == 0 || (u64::from(layer) + 1) % n != 0)
}
