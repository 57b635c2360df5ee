//! What a tensor is to a model, by its name: official checkpoints of many families, and GGUF files.
//!
//! Rules are tried in order and the first that matches decides. A name that none matches is an error of the caller, since a
//! tensor that is counted in the wrong class makes every figure wrong.
#![allow(clippy::enum_glob_use, reason = "tables of components read better without a prefix on each line")]

use std::fmt;
use std::sync::LazyLock;

use regex::Regex;

/// What tensors are to the model, as far as it matters for what a token reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Component {
    /// Gate projections of routed experts.
    RoutedGate,
    /// Up projections of routed experts.
    RoutedUp,
    /// Gate and up projections of routed experts in one tensor.
    RoutedGateUp,
    /// Down projections of routed experts.
    RoutedDown,
    /// Experts that work on every token.
    SharedExpert,
    /// Feed-forward layers without experts.
    FeedForward,
    /// Projections of attention.
    Attention,
    /// Compressors of key-value rows.
    Compressor,
    /// Indexers, which choose the rows that attention looks at.
    Indexer,
    /// State-space and linear-attention layers.
    Recurrent,
    /// Routers of experts.
    Router,
    /// Biases of the choice of experts.
    SelectionBias,
    /// Tables from token to experts.
    RoutingTable,
    /// Mixing of residual streams.
    HyperConnection,
    /// Norms, sinks and other vectors.
    Norm,
    /// Tables with a row for each token or position.
    Embedding,
    /// The output head.
    Output,
    /// Modules that draft tokens.
    Drafting,
    /// Towers and projectors for images.
    Vision,
    /// Towers and projectors for sound.
    Audio,
    /// Stored, and read by nobody while decoding: tables that programs compute, calibration leftovers.
    Unread,
}

/// How a decoded token reads the tensors of a component.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// All of them.
    Whole,
    /// Those of the experts that are chosen.
    ByExpert,
    /// One row.
    OneRow,
    /// Not at all in plain decoding of text.
    Apart,
}

impl Component {
    /// Every component with its name, in the order of tables.
    pub const NAMES: [(&'static str, Self); 21] = [
        ("routed gate", Self::RoutedGate),
        ("routed up", Self::RoutedUp),
        ("routed gate and up", Self::RoutedGateUp),
        ("routed down", Self::RoutedDown),
        ("shared expert", Self::SharedExpert),
        ("feed-forward", Self::FeedForward),
        ("attention", Self::Attention),
        ("compressor", Self::Compressor),
        ("indexer", Self::Indexer),
        ("recurrent", Self::Recurrent),
        ("router", Self::Router),
        ("selection bias", Self::SelectionBias),
        ("routing table", Self::RoutingTable),
        ("hyper-connection", Self::HyperConnection),
        ("norm", Self::Norm),
        ("embedding", Self::Embedding),
        ("output head", Self::Output),
        ("drafting", Self::Drafting),
        ("vision", Self::Vision),
        ("audio", Self::Audio),
        ("unread", Self::Unread),
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, component)| *component == self).map_or("", |(name, _)| name)
    }

    /// How a decoded token reads these tensors.
    ///
    /// The biases of the choice of experts (a kilobyte a layer) are counted as resident in the processor's cache, which
    /// is the convention of the figures that this account is compared with; norms are not, although they are as small.
    pub fn reading(self) -> Reading {
        match self {
            Self::RoutedGate | Self::RoutedUp | Self::RoutedGateUp | Self::RoutedDown => Reading::ByExpert,
            Self::Embedding | Self::RoutingTable => Reading::OneRow,
            Self::SelectionBias | Self::Drafting | Self::Vision | Self::Audio | Self::Unread => {
                Reading::Apart
            }
            _ => Reading::Whole,
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Named<'a> {
    /// What the tensor is.
    pub component: Component,
    /// Its layer, if it is in one.
    pub layer: Option<u32>,
    /// The name within the layer, or the whole name without wrappers.
    pub rest: &'a str,
}

type Rule = (Component, Regex);

fn compile(rules: &[(Component, &str)]) -> Vec<Rule> {
    let compile = |(component, pattern): &(Component, &str)| {
        (*component, Regex::new(pattern).expect("the patterns of this file are right"))
    };
    rules.iter().map(compile).collect()
}

/// Wrappers that multimodal and older models put in front of the language model's names.
const WRAPPERS: [&str; 8] = [
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "thinker.model.",
    "model.",
    "backbone.",
    "transformer.",
    "gpt_neox.",
];

/// Towers and drafting modules, by the whole name.
static APART: LazyLock<Vec<Rule>> = LazyLock::new(|| {
    use Component::{Audio, Drafting, Unread, Vision};
    compile(&[
        (Drafting, r"(^|\.)(mtp|mtp_block|mtp_layers|nextn|eagle|dspark|draft)[._]"),
        (
            Audio,
            r"(^|\.)(audio|audio_tower|audio_model|audio_encoder|sound_encoder|sound_projection|speech\w*|talker|code2wav|token2wav|embed_audio|multi_modal_projector_audio)\.",
        ),
        (Audio, r"^(a|mm\.a)\."),
        (
            Vision,
            r"(^|\.)(visual|vision|vision_tower|vision_model|vision_encoder|vision_embed_tokens|vision_adapter|vision_projector|vit|vit_large_projector|aligner|multi_modal_projector|mm_projector|mlp1|embed_vision|patch_merger|pre_mm_projector_norm)\.",
        ),
        (Vision, r"^(v|mm)\.|^(model\.)?image_|^radio_model\.|^view_seperator|^resampler\."),
        (Unread, r"rotary_emb\.inv_freq$|(^|\.)rotary_pos_emb\.|\.attn\.(masked_)?bias$"),
    ])
});

/// Tensors within a layer, by the name behind the layer's number.
static IN_LAYER: LazyLock<Vec<Rule>> = LazyLock::new(|| {
    use Component::*;
    compile(&[
        (Drafting, r"^(nextn\.|eh_proj|enorm|hnorm|shared_head\.|embed_tokens\.)"),
        (HyperConnection, r"^(hc_|hyper_connection|attn_hc|ffn_hc|mhc)"),
        (
            SelectionBias,
            r"(^|\.)(exp_probs_b(_vl)?(\.bias)?|e_score_correction_bias|expert_bias|ffn\.gate\.bias(_vl)?|moe_statics\.\w+)$",
        ),
        (RoutingTable, r"(^|\.)(tid2eid|ffn_gate_tid2eid)(\.|$)"),
        (Indexer, r"(^|\.)indexer[._]|^attn_indexer"),
        (Compressor, r"(^|\.)(attn_)?compressor[._]"),
        (
            SharedExpert,
            r"(^|\.|_)(shared_experts?|share_expert|shared_mlp|shared_expert_gate)(\.|_|$)|_shexp(\.|$)",
        ),
        // Norms inside a recurrent block belong to it.
        (
            Recurrent,
            r"^(linear_attn|mamba|ssm|ssm_\w+|time_mix\w*|channel_mix\w*|shortconv|short_conv|conv|delta_net|kda|linear_attention|recurrent)[._]|^ssm_",
        ),
        (Recurrent, r"^mixer\.(in_proj|out_proj|conv1d|A_log|D|dt_bias|dt_proj|x_proj|norm|A|B|C)(\.|$)"),
        (
            RoutedGateUp,
            r"(^|\.)(local_)?experts(\.\d+)?\.(gate_up_proj|gate_and_up_proj|w13|gate_up|linear_fc1)|ffn_gate_up_exps",
        ),
        (RoutedGate, r"(^|\.)(local_)?experts(\.\d+)?\.(gate_proj|w1|gate|linear_v)([._]|$)|ffn_gate_exps"),
        (RoutedUp, r"(^|\.)(local_)?experts(\.\d+)?\.(up_proj|w3|up)([._]|$)|ffn_up_exps"),
        (RoutedDown, r"(^|\.)(local_)?experts(\.\d+)?\.(down_proj|w2|down|linear_fc2)([._]|$)|ffn_down_exps"),
        (
            Norm,
            r"(^|\.)(attn_)?sinks?(\.(weight|bias))?$|(^|[._])\w*(layernorm|layer_norm|rmsnorm|norm|norm\d|ln_\w+)(_\d)?(\.(weight|bias|scale|norm\.weight))?$",
        ),
        (
            Router,
            r"(^|\.)(ffn_gate_inp|router|gate_weight|(mlp|block_sparse_moe|ffn|mixer|moe|feed_forward|mlp\.moe)\.(gate|router))(\.|$)",
        ),
        (Attention, r"^(self_attn|attn|attention|self_attention|cross_attn|temporal_block)[._]"),
        (Attention, r"^(attn_\w+|mixer\.[qkvo]_proj|mixer\.qkv_proj|wq|wk|wv|wo|attn)(\.|$)"),
        (
            FeedForward,
            r"^(mlp|feed_forward|ffn|mixer|block_sparse_moe|moe)\.((\w+_)?(gate|up|down|gate_up)_proj|w[123]|c_fc|c_proj|fc[12]|fc[12]_latent_proj|dense_\w+|gate|up|down|up_gate_proj)(\.|$)",
        ),
        (FeedForward, r"^ffn_(gate|up|down|gate_up|latent_in|latent_out)(\.|$)"),
        (Norm, r"^(layer_scalar|layer_output_scale|residual_scale|attn_scale)(\.weight)?$"),
    ])
});

/// Tensors outside the layers, by the name without wrappers.
static OUTSIDE: LazyLock<Vec<Rule>> = LazyLock::new(|| {
    use Component::*;
    compile(&[
        (HyperConnection, r"^(hc_head|output_hc)_"),
        (
            Norm,
            r"^(norm|norm_f|final_norm|final_layernorm|final_layer_norm|ln_f|output_norm|embedding_norm|token_embd_norm|embed_norm|embeddings\.norm)(\.(weight|bias))?$",
        ),
        (
            Embedding,
            r"^(embed|embed_tokens|embed_in|embeddings?|word_embeddings|tok_embeddings|token_embd|wte|wpe|position_embd|token_types|embeddings\.word_embeddings)(\.|$)",
        ),
        (Output, r"^(lm_head|head|output|embed_out|output_layer)(\.|$)"),
        (Norm, r"^rope_(freqs|factors_long|factors_short)(\.weight)?$"),
    ])
});

/// Layers under their numbers: `layers.7.`, `blk.7.`, `h.7.`.
static LAYER: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^(?:layers|blk|h|blocks|decoder\.layers)\.(\d+)\.").expect("the pattern is right")
});

/// What a tensor is; `None` if no rule knows its name. `n_layers`: main layers; later ones draft.
pub fn name_of(name: &str, n_layers: u32) -> Option<Named<'_>> {
    let first = |rules: &[Rule], text: &str| rules.iter().find(|(_, r)| r.is_match(text)).map(|(c, _)| *c);
    let bare = WRAPPERS.iter().find_map(|wrapper| name.strip_prefix(wrapper)).unwrap_or(name);
    let (layer, rest) = match LAYER.captures(bare) {
        Some(found) => (Some(found[1].parse().ok()?), &bare[found[0].len()..]),
        None => (None, bare),
    };
    let apart = first(&APART, name).or_else(|| layer.filter(|&l| l >= n_layers).map(|_| Component::Drafting));
    let component = match (apart, layer) {
        (Some(component), _) => component,
        (None, Some(_)) => first(&IN_LAYER, rest)?,
        (None, None) => first(&OUTSIDE, rest)?,
    };
    Some(Named { component, layer, rest })
}

#[cfg(test)]
mod tests {
    use super::*;
    use Component::*;

    /// Names of published checkpoints and GGUF files, a few of each family.
    const KNOWN: &[(&str, Component)] = &[
        // Llama, Mistral, Qwen.
        ("model.embed_tokens.weight", Embedding),
        ("model.layers.0.input_layernorm.weight", Norm),
        ("model.layers.0.self_attn.q_proj.weight", Attention),
        ("model.layers.0.self_attn.k_proj.bias", Attention),
        ("model.layers.0.self_attn.q_norm.weight", Norm),
        ("model.layers.0.mlp.gate_proj.weight", FeedForward),
        ("model.layers.0.mlp.gate_proj.weight_scale_inv", FeedForward),
        ("model.layers.0.mlp.down_proj.qweight", FeedForward),
        ("model.norm.weight", Norm),
        ("lm_head.weight", Output),
        // Mixtures: Qwen 3, GLM 4.5, DeepSeek V3, Mixtral, MiniMax, Llama 4, gpt-oss.
        ("model.layers.3.mlp.gate.weight", Router),
        ("model.layers.3.mlp.experts.117.gate_proj.weight", RoutedGate),
        ("model.layers.3.mlp.experts.117.up_proj.weight_scale", RoutedUp),
        ("model.layers.3.mlp.experts.117.down_proj.weight_packed", RoutedDown),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", SharedExpert),
        ("model.layers.3.mlp.shared_expert_gate.weight", SharedExpert),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", SharedExpert),
        ("model.layers.3.mlp.gate.e_score_correction_bias", SelectionBias),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", Attention),
        ("model.layers.3.self_attn.kv_a_layernorm.weight", Norm),
        ("model.layers.3.self_attn.indexer.wk.weight", Indexer),
        ("model.layers.3.self_attn.indexer.k_norm.weight", Indexer),
        ("model.layers.5.block_sparse_moe.experts.1.w2.weight", RoutedDown),
        ("model.layers.5.block_sparse_moe.gate.weight", Router),
        ("model.layers.5.block_sparse_moe.e_score_correction_bias", SelectionBias),
        ("language_model.model.layers.1.feed_forward.experts.gate_up_proj", RoutedGateUp),
        ("language_model.model.layers.1.feed_forward.router.weight", Router),
        ("language_model.model.layers.1.feed_forward.shared_expert.up_proj.weight", SharedExpert),
        ("language_model.lm_head.weight", Output),
        ("model.layers.2.mlp.experts.gate_up_proj_blocks", RoutedGateUp),
        ("model.layers.2.mlp.experts.down_proj_scales", RoutedDown),
        ("model.layers.2.mlp.experts.down_proj_bias", RoutedDown),
        ("model.layers.2.mlp.router.bias", Router),
        ("model.layers.2.self_attn.sinks", Norm),
        // Hybrids: Qwen 3 Next, Nemotron-H, Falcon-H.
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", Recurrent),
        ("model.layers.0.linear_attn.A_log", Recurrent),
        ("model.layers.0.linear_attn.norm.weight", Recurrent),
        ("model.language_model.layers.0.linear_attn.conv1d.weight", Recurrent),
        ("mtp.layers.0.mlp.experts.3.up_proj.weight", Drafting),
        ("mtp.fc.weight", Drafting),
        ("backbone.embeddings.weight", Embedding),
        ("backbone.layers.0.norm.weight", Norm),
        ("backbone.layers.0.mixer.in_proj.weight", Recurrent),
        ("backbone.layers.0.mixer.norm.weight", Recurrent),
        ("backbone.layers.0.mixer.A_log", Recurrent),
        ("backbone.layers.1.mixer.up_proj.weight", FeedForward),
        ("backbone.layers.1.mixer.experts.12.down_proj.weight_scale_2", RoutedDown),
        ("backbone.layers.1.mixer.experts.12.up_proj.input_scale", RoutedUp),
        ("backbone.layers.1.mixer.shared_experts.up_proj.weight", SharedExpert),
        ("backbone.layers.1.mixer.gate.weight", Router),
        ("backbone.layers.1.mixer.gate.e_score_correction_bias", SelectionBias),
        ("backbone.layers.1.mixer.fc1_latent_proj.weight", FeedForward),
        ("backbone.layers.7.mixer.q_proj.weight", Attention),
        ("backbone.layers.7.mixer.k_proj.k_scale", Attention),
        ("backbone.norm_f.weight", Norm),
        // Towers.
        ("model.visual.blocks.0.attn.qkv.weight", Vision),
        ("visual.merger.mlp.0.weight", Vision),
        ("vision_tower.encoder.layers.0.mlp.fc1.weight", Vision),
        ("multi_modal_projector.linear_1.weight", Vision),
        ("v.blk.0.attn_q.weight", Vision),
        ("mm.0.weight", Vision),
        ("audio_tower.layers.0.fc1.weight", Audio),
        // Drafting layers behind the main ones (40 here).
        ("model.layers.40.eh_proj.weight", Drafting),
        ("model.layers.40.mlp.experts.0.up_proj.weight", Drafting),
        ("blk.40.nextn.enorm.weight", Drafting),
        // GGUF.
        ("token_embd.weight", Embedding),
        ("blk.0.attn_q.weight", Attention),
        ("blk.0.attn_qkv.weight", Attention),
        ("blk.0.attn_kv_a_mqa.weight", Attention),
        ("blk.0.attn_q_norm.weight", Norm),
        ("blk.0.post_attention_norm.weight", Norm),
        ("blk.0.ffn_gate.weight", FeedForward),
        ("blk.0.ffn_gate_inp.weight", Router),
        ("blk.0.ffn_gate_inp_shexp.weight", SharedExpert),
        ("blk.0.ffn_gate_up_exps.weight", RoutedGateUp),
        ("blk.0.ffn_up_shexp.weight", SharedExpert),
        ("blk.0.exp_probs_b.bias", SelectionBias),
        ("blk.0.ssm_conv1d.weight", Recurrent),
        ("blk.0.ssm_a", Recurrent),
        ("output_norm.weight", Norm),
        ("output.weight", Output),
        ("rope_freqs.weight", Norm),
        // DeepSeek V4.
        ("layers.4.attn.indexer.compressor.norm.weight", Indexer),
        ("layers.4.attn.compressor.norm.weight", Compressor),
        ("layers.4.attn.attn_sink", Norm),
        ("layers.4.attn.wo_a.scale", Attention),
        ("layers.4.hc_attn_base", HyperConnection),
        ("layers.0.ffn.gate.tid2eid", RoutingTable),
        ("layers.4.ffn.gate.bias", SelectionBias),
        ("layers.4.ffn.experts.9.w3.scale", RoutedUp),
        ("mtp.0.e_proj.weight", Drafting),
        ("vision.blocks.0.weight", Vision),
        ("embed.weight", Embedding),
        ("head.weight", Output),
        ("blk.4.indexer_compressor_norm.weight", Indexer),
        ("output_hc_fn.weight", HyperConnection),
    ];

    #[test]
    fn names_of_many_families_are_known() {
        let wrong: Vec<_> = KNOWN
            .iter()
            .map(|(name, wanted)| (name, wanted, name_of(name, 40).map(|n| n.component)))
            .filter(|(_, wanted, found)| *found != Some(**wanted))
            .collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn what_nobody_knows_is_no_component() {
        for name in [
            "blk.0.surprise.weight",
            "model.layers.0.surprise.weight",
            "surprise",
            "model.layers.x.mlp.up_proj.weight",
        ] {
            assert_eq!(name_of(name, 40), None, "{name}");
        }
        assert_eq!(
            name_of("model.layers.7.self_attn.k_proj.weight", 40).unwrap().rest,
            "self_attn.k_proj.weight"
        );
    }
}
