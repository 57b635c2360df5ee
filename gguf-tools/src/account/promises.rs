//! What a description promises and the tensors do not keep.

use std::collections::BTreeSet;

use regex::Regex;
use serde_json::Value as Json;

use super::cache::Sorted;
use super::facts::Facts;
use super::headers::Headers;
use super::names::Component;

/// Lists in a quantization's configuration of modules that are left as they are.
const IGNORE_LISTS: [&str; 5] =
    ["ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "ignored_modules"];

/// Everything that the description says and the tensors contradict, one sentence each.
pub(super) fn findings(headers: &Headers, tensors: &[Sorted<'_>], facts: &Facts<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    let called = facts.called();
    let count = |component: Component| tensors.iter().filter(|(_, n)| n.component == component).count();
    let of = |component: Component| {
        let n = count(component);
        format!("index has {n} {}", if n == 1 { "tensor" } else { "tensors" })
    };
    let layers = facts.count(
        &[
            "num_nextn_predict_layers",
            "mtp_num_hidden_layers",
            "num_mtp_layers",
            "mtp_num_layers",
            "num_mtp_modules",
        ],
        &["nextn_predict_layers"],
    );
    let n_draft = layers.unwrap_or(0);
    if (n_draft > 0) != (count(Component::Drafting) > 0) {
        let plural = if n_draft == 1 { "" } else { "s" };
        findings.push(format!("{called} says {n_draft} MTP layer{plural}, {}", of(Component::Drafting)));
    }
    for (field, tower, component) in [
        ("vision_config", "a vision tower", Component::Vision),
        ("audio_config", "an audio tower", Component::Audio),
        ("speech_config", "an audio tower", Component::Audio),
    ] {
        let promised = facts.config().and_then(|config| config.get(field)).is_some_and(|v| !v.is_null());
        if promised && count(component) == 0 {
            findings.push(format!("{called} says {tower} (`{field}`), {}", of(component)));
        }
    }
    findings.extend(missing_layers(tensors, facts));
    let tied = facts.field("tie_word_embeddings").and_then(Json::as_bool);
    let has_head = count(Component::Output) > 0;
    if tied == Some(false) && !has_head {
        findings.push(format!(
            "{called} says that the output head is not tied to the embedding, index has no output head"
        ));
    }
    if tied == Some(true) && has_head {
        findings.push(format!(
            "{called} says that the output head is tied to the embedding, {}",
            of(Component::Output)
        ));
    }
    findings.extend(expert_counts(tensors, facts));
    findings.extend(quantization(headers, facts));
    if let [first, ..] = headers.only_in_index.as_slice() {
        findings.push(format!(
            "the index lists {} tensors that no file holds, the first is `{first}`",
            headers.only_in_index.len()
        ));
    }
    findings
}

fn missing_layers(tensors: &[Sorted<'_>], facts: &Facts<'_>) -> Option<String> {
    let present: BTreeSet<u32> = tensors.iter().filter_map(|(_, named)| named.layer).collect();
    let missing: Vec<String> =
        (0..facts.n_layers).filter(|layer| !present.contains(layer)).map(|layer| layer.to_string()).collect();
    let shown = missing.iter().take(8).cloned().collect::<Vec<_>>().join(", ");
    let more = if missing.len() > 8 { format!(" and {} more", missing.len() - 8) } else { String::new() };
    (!missing.is_empty()).then(|| {
        format!("{} says {} layers, index has no tensor of {shown}{more}", facts.called(), facts.n_layers)
    })
}

/// Experts under numbers of their own: as many as the description says?
fn expert_counts(tensors: &[Sorted<'_>], facts: &Facts<'_>) -> Option<String> {
    let (promised, _) = facts.experts()?;
    let routed = |component: Component| {
        matches!(
            component,
            Component::RoutedGate | Component::RoutedUp | Component::RoutedDown | Component::RoutedGateUp
        )
    };
    let number =
        |rest: &str| -> Option<u64> { rest.split_once("experts.")?.1.split('.').next()?.parse().ok() };
    let highest =
        tensors.iter().filter(|(_, n)| routed(n.component)).filter_map(|(_, n)| number(n.rest)).max()?;
    (highest + 1 != promised).then(|| {
        format!("{} says {promised} routed experts, index has numbers up to {highest}", facts.called())
    })
}

fn quantization(headers: &Headers, facts: &Facts<'_>) -> Vec<String> {
    let Some(config) = facts.config() else { return Vec::new() };
    let Some(settings) = config.get("quantization_config").or_else(|| facts.field("quantization_config"))
    else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    let is_scale = |name: &str| {
        ["scale", "qweight", "absmax", "qzeros", "weight_shape"].iter().any(|s| name.contains(s))
    };
    if !headers.tensors.iter().any(|t| is_scale(&t.name)) {
        let method = settings.get("quant_method").and_then(Json::as_str).unwrap_or("unnamed");
        findings.push(format!("config says the weights are quantized (`{method}`), index has no scales"));
    }
    let modules: BTreeSet<&str> =
        headers.tensors.iter().map(|t| t.name.rsplit_once('.').map_or(t.name.as_str(), |(m, _)| m)).collect();
    for list in IGNORE_LISTS {
        let patterns = settings.get(list).and_then(Json::as_array);
        for pattern in patterns.into_iter().flatten().filter_map(Json::as_str) {
            if !modules.iter().any(|module| matches_module(pattern, module)) {
                findings.push(format!(
                    "config leaves `{pattern}` unquantized (`quantization_config.{list}`), index has no such module"
                ));
            }
        }
    }
    findings
}

/// Whether an entry of an ignore list is about a module: `re:` a regular expression from the start, `*` any text, else
/// the module, one above it, or a part of its name, as the libraries that read these lists take them.
fn matches_module(pattern: &str, module: &str) -> bool {
    if let Some(expression) = pattern.strip_prefix("re:") {
        return Regex::new(&format!("^(?:{expression})")).is_ok_and(|regex| regex.is_match(module));
    }
    if pattern.contains('*') {
        let expression = pattern.split('*').map(regex::escape).collect::<Vec<_>>().join(".*");
        return Regex::new(&format!("^{expression}$")).is_ok_and(|regex| regex.is_match(module));
    }
    module.contains(pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignore_lists_are_read_as_their_libraries_do() {
        let module = "model.layers.3.mlp.gate";
        for yes in ["lm_head", "re:.*lm_head"] {
            assert!(matches_module(yes, "lm_head") && !matches_module(yes, module), "{yes}");
        }
        for yes in ["re:.*mlp[.]gate$", "*.mlp.gate", "model.layers.3.mlp.gate", "gate", "model.layers.3*"] {
            assert!(matches_module(yes, module), "{yes}");
        }
        for no in ["re:mlp.gate", "*.mlp", "visual", "re:("] {
            assert!(!matches_module(no, module), "{no}");
        }
    }
}
