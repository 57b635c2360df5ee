//! Parts of a model by layers, as ds4 splits its files: `0:30` holds the embedding and layers 0 to 30, `31:output` the
//! rest with the output head.

use std::fmt;

use super::RewriteError;
use crate::gguf::{Metadata, Value};

/// Some consecutive layers of a model, perhaps with its output head. The embedding goes with layer 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct LayerPart {
    /// First layer; `None` for a part that holds the output head alone.
    pub first: Option<u32>,
    /// Last layer; `None` for all that follow.
    pub last: Option<u32>,
    /// Whether the output head is in it.
    pub output: bool,
}

impl fmt::Display for LayerPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (Some(first), Some(last)) => write!(f, "{first}:{last}"),
            (Some(first), None) => write!(f, "{first}:output"),
            (None, _) => f.write_str("output"),
        }
    }
}

/// Where a tensor stands in the order of the computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// In front of the layers.
    Input,
    /// In this layer.
    Layer(u32),
    /// Behind the layers.
    Output,
}

/// Beginnings of the names of tensors in front of the layers, and behind them.
const INPUT: [&str; 8] =
    ["token_embd", "token_types", "position_embd", "per_layer_", "altup_proj", "rope_", "conv1d", "embed"];
const OUTPUT: [&str; 6] = ["output", "cls", "mtp.", "nextn.", "altup_unembd_proj", "dense_"];

impl Place {
    /// The place of a tensor by its GGUF name; `None` if the name says nothing.
    pub(crate) fn of(name: &str, n_layers: u32) -> Option<Self> {
        if let Some(rest) = name.strip_prefix("blk.") {
            let layer: u32 = rest.split_once('.')?.0.parse().ok()?;
            // Drafting layers are counted behind the main ones and work on their output.
            return Some(if layer < n_layers { Self::Layer(layer) } else { Self::Output });
        }
        let begins = |starts: &[&str]| starts.iter().any(|start| name.starts_with(start));
        if begins(&INPUT) { Some(Self::Input) } else { begins(&OUTPUT).then_some(Self::Output) }
    }
}

impl LayerPart {
    /// Whether a tensor at this place belongs to the part.
    pub(crate) fn holds(&self, place: Place) -> bool {
        match place {
            Place::Input => self.first == Some(0),
            Place::Layer(layer) => {
                self.first.is_some_and(|first| first <= layer) && self.last.is_none_or(|last| layer <= last)
            }
            Place::Output => self.output,
        }
    }

    /// The part of a model that these tensors are, if they are consecutive layers; what is wrong otherwise.
    pub(super) fn of_tensors<'a>(
        names: impl Iterator<Item = &'a str>,
        n_layers: u32,
    ) -> Result<Self, String> {
        let (mut layers, mut input, mut output) = (std::collections::BTreeSet::new(), false, false);
        for name in names {
            match Place::of(name, n_layers) {
                Some(Place::Input) => input = true,
                Some(Place::Layer(layer)) => drop(layers.insert(layer)),
                Some(Place::Output) => output = true,
                None => return Err(format!("tensor `{name}` belongs to no layer, embedding or output head")),
            }
        }
        let (first, last) = (layers.first().copied(), layers.last().copied());
        if let (Some(first), Some(last)) = (first, last)
            && layers.len() as u64 != u64::from(last - first) + 1
        {
            return Err(format!(
                "its layers are not consecutive, between {first} and {last} some are missing"
            ));
        }
        if input != (first == Some(0)) {
            let problem = if input {
                "it holds the embedding but not layer 0"
            } else {
                "it holds layer 0 but not the embedding"
            };
            return Err(problem.to_owned());
        }
        Ok(Self { first, last, output })
    }

    /// The part as text with the last layer resolved.
    pub(super) fn describe(&self, n_layers: u32) -> String {
        let last = self.last.unwrap_or(n_layers.saturating_sub(1));
        match self.first {
            Some(first) => format!("{first}:{last}{}", if self.output { " and the output head" } else { "" }),
            None => "the output head".to_owned(),
        }
    }
}

/// Reads `0:30,31:output`: parts with commas between, each `FIRST:LAST` (both included), one layer, or `output`.
///
/// # Errors
/// [`RewriteError::Request`] with what is expected.
pub fn parse_layer_parts(text: &str) -> Result<Vec<LayerPart>, RewriteError> {
    text.split(',').map(|part| parse_part(part.trim())).collect()
}

fn parse_part(text: &str) -> Result<LayerPart, RewriteError> {
    let wrong = || {
        RewriteError::request(format!(
            "layers `{text}`: expected FIRST:LAST or FIRST:output, as 0:30 or 31:output"
        ))
    };
    if text == "output" {
        return Ok(LayerPart { first: None, last: None, output: true });
    }
    let (first, last) = text.split_once(':').unwrap_or((text, text));
    let first: u32 = first.parse().map_err(|_| wrong())?;
    if last == "output" {
        return Ok(LayerPart { first: Some(first), last: None, output: true });
    }
    let last: u32 = last.parse().map_err(|_| wrong())?;
    if first > last {
        return Err(wrong());
    }
    Ok(LayerPart { first: Some(first), last: Some(last), output: false })
}

/// What keeps the parts from holding every layer and the output head exactly once.
pub(super) fn cover_problems(parts: &[LayerPart], n_layers: u32) -> Vec<String> {
    let mut problems = Vec::new();
    for part in parts {
        let beyond = part.last.or(part.first).is_some_and(|layer| layer >= n_layers);
        if beyond {
            problems.push(format!("part {part}: the model has layers 0 to {}", n_layers.saturating_sub(1)));
        }
    }
    let times = |place: Place| parts.iter().filter(|part| part.holds(place)).count();
    let mut bad: Vec<(u32, u32, bool)> = Vec::new();
    for layer in 0..n_layers {
        let is_gap = match times(Place::Layer(layer)) {
            0 => true,
            1 => continue,
            _ => false,
        };
        match bad.last_mut() {
            Some((_, last, gap)) if *last + 1 == layer && *gap == is_gap => *last = layer,
            _ => bad.push((layer, layer, is_gap)),
        }
    }
    problems.extend(bad.into_iter().map(|(first, last, is_gap)| {
        let layers =
            if first == last { format!("layer {first} is") } else { format!("layers {first} to {last} are") };
        format!("{layers} in {}", if is_gap { "no part" } else { "more than one part" })
    }));
    match times(Place::Output) {
        0 => problems.push(format!(
            "the output head is in no part; end with FIRST:output instead of FIRST:{}",
            n_layers.saturating_sub(1)
        )),
        1 => {}
        _ => problems.push("the output head is in more than one part".to_owned()),
    }
    problems
}

/// Bound on the number of layers from an untrusted file.
const MAX_LAYERS: u32 = 100_000;

/// Number of layers by `ARCHITECTURE.block_count`.
pub(crate) fn layer_count(metadata: &Metadata) -> Result<u32, RewriteError> {
    let architecture = metadata.get("general.architecture").and_then(Value::as_str).unwrap_or("unknown");
    let key = format!("{architecture}.block_count");
    let found = metadata.get(&key).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
    found.filter(|n| (1..=MAX_LAYERS).contains(n)).ok_or_else(|| {
        RewriteError::request(format!(
            "key `{key}`: missing or no plausible count; without it a file cannot be divided by layers"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str, n_layers: u32) -> String {
        cover_problems(&parse_layer_parts(text).unwrap(), n_layers).join("; ")
    }

    #[test]
    fn parts_must_hold_every_layer_and_the_head_once() {
        assert_eq!(problems("0:1,2:output", 4), "");
        assert_eq!(problems("2:output, 0:1", 4), "");
        assert_eq!(problems("0:output", 4), "");
        assert_eq!(problems("0:3,output", 4), "");
        assert_eq!(problems("0,1,2,3:output", 4), "");
        assert_eq!(problems("0:1,1:output", 4), "layer 1 is in more than one part");
        assert_eq!(problems("0:0,2:output", 4), "layer 1 is in no part");
        assert_eq!(
            problems("0:0,4:9", 12),
            "layers 1 to 3 are in no part; layers 10 to 11 are in no part; the output head is in no part; end with FIRST:output instead of FIRST:11"
        );
        assert_eq!(
            problems("0:1,2:3", 4),
            "the output head is in no part; end with FIRST:output instead of FIRST:3"
        );
        assert!(problems("0:1,2:7,8:output", 4).contains("part 2:7: the model has layers 0 to 3"));
        for wrong in ["", "a:b", "3:1", "0:1,", ":output", "0-3"] {
            assert!(parse_layer_parts(wrong).unwrap_err().to_string().contains("FIRST:LAST"), "{wrong}");
        }
    }
}
