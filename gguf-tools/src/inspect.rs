//! What a GGUF file holds, from its header alone.

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest, Sha256};

use crate::block::BlockType;
use crate::gguf::{Array, Gguf, SplitPlace, Value};
use crate::model::{ARCHITECTURES, Family};
use crate::plan::hex;

/// Elements of a long array, and characters of a long text, that a listing shows.
const SHOWN_ELEMENTS: usize = 8;
const SHOWN_CHARACTERS: usize = 120;

/// Keys about where a file comes from, by their beginnings.
const PROVENANCE: [&str; 8] = [
    "ggsmith.",
    "quantize.",
    "general.name",
    "general.basename",
    "general.source",
    "general.base_model",
    "general.quantized_by",
    "general.license",
];

/// Summary of a file or split set.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Inspection {
    /// The files.
    pub files: Vec<InspectedFile>,
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// Place in the split set; absent for a whole file.
    pub split: Option<SplitPlace>,
    /// Whether offsets are in directory order without gaps, as llama.cpp demands.
    pub sequential_offsets: bool,
    /// Data that is not in the file; absent if all is there.
    pub truncated: Option<Truncation>,
    /// Everything together.
    pub total: Total,
    /// Families of tensors, the largest first; tensors that no table knows are `other`.
    pub families: Vec<FamilyTotal>,
    /// The tokenizer; absent if there is none.
    pub tokenizer: Option<TokenizerSummary>,
    /// The chat template; absent if there is none.
    pub chat_template: Option<TemplateSummary>,
    /// Keys about where the file comes from.
    pub provenance: Vec<MetadataEntry>,
    /// All metadata in file order, long values abbreviated.
    pub metadata: Vec<MetadataEntry>,
}

/// One file of a set.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct InspectedFile {
    /// The file.
    pub path: String,
    /// Its size.
    pub file_bytes: u64,
    /// Version of the container.
    pub version: u32,
    /// Alignment of tensor data.
    pub alignment: u32,
    /// Where the data section begins.
    pub data_offset_bytes: u64,
    /// Number of tensors.
    pub n_tensors: usize,
}

/// Data that is not in the file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Truncation {
    /// Tensors that are not all there.
    pub n_tensors: usize,
    /// The first of them in directory order.
    pub first_tensor: String,
    /// Bytes by which the files are too short.
    pub missing_bytes: u64,
}

/// Sums over some tensors.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Total {
    /// Number of tensors.
    pub n_tensors: usize,
    /// Number of values.
    pub n_values: u64,
    /// Bytes of data, without padding.
    pub n_bytes: u64,
    /// Bits per value; 0 for no values.
    pub bits_per_weight: f64,
}

/// Sums over the tensors of one family.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct FamilyTotal {
    /// Name of the family.
    pub family: &'static str,
    /// Sums over all its types.
    pub total: Total,
    /// Sums by type, the largest first.
    pub types: Vec<TypeTotal>,
}

/// Sums over the tensors of one type.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TypeTotal {
    /// Name of the type.
    pub block_type: &'static str,
    /// The sums.
    pub total: Total,
}

/// What the metadata says about the tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TokenizerSummary {
    /// `tokenizer.ggml.model`.
    pub model: Option<String>,
    /// `tokenizer.ggml.pre`.
    pub pre_tokenizer: Option<String>,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Number of merges.
    pub n_merges: usize,
    /// SHA-256 of the tokens as they lie in a file: each with its length in 8 bytes before it.
    pub tokens_sha256: String,
}

/// The chat template in short.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TemplateSummary {
    /// Its size.
    pub n_bytes: usize,
    /// SHA-256 of its text.
    pub sha256: String,
}

/// One key.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct MetadataEntry {
    /// The key.
    pub key: String,
    /// Type of the value.
    pub value_type: &'static str,
    /// The value as text, abbreviated if it is long.
    pub value: String,
}

/// Summarises an opened file. Works for any architecture; families are known for those that can be built.
pub fn inspect(gguf: &Gguf) -> Inspection {
    let metadata = gguf.metadata();
    let architecture = metadata.get("general.architecture").and_then(Value::as_str).map(str::to_owned);
    let (total, families) = totals(gguf, architecture.as_deref());
    let entries: Vec<_> = metadata.iter().map(|(key, value)| entry(key, value)).collect();
    let is_provenance = |entry: &&MetadataEntry| PROVENANCE.iter().any(|start| entry.key.starts_with(start));
    Inspection {
        files: files(gguf),
        architecture,
        split: gguf.split_place(),
        sequential_offsets: gguf.sequential_offsets(),
        truncated: truncation(gguf),
        total,
        families,
        tokenizer: tokenizer(gguf),
        chat_template: metadata
            .get("tokenizer.chat_template")
            .and_then(Value::as_str)
            .map(|text| TemplateSummary { n_bytes: text.len(), sha256: hex(&Sha256::digest(text)) }),
        provenance: entries.iter().filter(is_provenance).cloned().collect(),
        metadata: entries,
    }
}

fn files(gguf: &Gguf) -> Vec<InspectedFile> {
    let file = |shard: &crate::gguf::ShardInfo| InspectedFile {
        path: shard.path.display().to_string(),
        file_bytes: shard.file_bytes,
        version: shard.version,
        alignment: shard.alignment,
        data_offset_bytes: shard.data_offset_bytes,
        n_tensors: shard.tensors.len(),
    };
    gguf.shards().iter().map(file).collect()
}

fn truncation(gguf: &Gguf) -> Option<Truncation> {
    let missing = gguf.missing_data();
    let first_tensor = missing.first()?.name.clone();
    let too_short = |(index, shard): (usize, &crate::gguf::ShardInfo)| {
        let ends = missing.iter().filter(|tensor| tensor.shard_index == index).map(|tensor| {
            shard.data_offset_bytes.saturating_add(tensor.offset_bytes).saturating_add(tensor.n_bytes)
        });
        ends.max().map_or(0, |end| end.saturating_sub(shard.file_bytes))
    };
    let missing_bytes = gguf.shards().iter().enumerate().map(too_short).fold(0, u64::saturating_add);
    Some(Truncation { n_tensors: missing.len(), first_tensor, missing_bytes })
}

impl Total {
    fn add(&mut self, n_values: u64, n_bytes: u64) {
        self.n_tensors += 1;
        self.n_values = self.n_values.saturating_add(n_values);
        self.n_bytes = self.n_bytes.saturating_add(n_bytes);
        self.bits_per_weight = 8.0 * self.n_bytes as f64 / self.n_values as f64;
    }
}

fn totals(gguf: &Gguf, architecture: Option<&str>) -> (Total, Vec<FamilyTotal>) {
    let known = family_names(architecture);
    let mut all = Total::default();
    let mut sums: BTreeMap<&'static str, (Total, BTreeMap<BlockType, Total>)> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let n_values = tensor.shape.iter().product();
        let family = known.get(&pattern(&tensor.name)).map_or("other", |family| family.name());
        let (total, types) = sums.entry(family).or_default();
        for sum in [&mut all, total, types.entry(tensor.block_type).or_default()] {
            sum.add(n_values, tensor.n_bytes);
        }
    }
    let mut families: Vec<FamilyTotal> = sums
        .into_iter()
        .map(|(family, (total, types))| {
            let mut types: Vec<_> = types
                .into_iter()
                .map(|(block_type, total)| TypeTotal { block_type: block_type.name(), total })
                .collect();
            types.sort_by_key(|t| std::cmp::Reverse(t.total.n_bytes));
            FamilyTotal { family, total, types }
        })
        .collect();
    families.sort_by_key(|family| std::cmp::Reverse(family.total.n_bytes));
    (all, families)
}

/// Families by the patterns of the architecture's tensor table.
fn family_names(architecture: Option<&str>) -> HashMap<String, Family> {
    let known = ARCHITECTURES.iter().find(|known| Some(known.gguf_name) == architecture);
    let rows =
        known.into_iter().flat_map(|a| a.before_layers.iter().chain(a.in_layers).chain(a.after_layers));
    rows.map(|row| (row.gguf.to_owned(), row.family)).collect()
}

/// `blk.7.attn_q_a.weight` -> `blk.{L}.attn_q_a.weight`.
fn pattern(name: &str) -> String {
    match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) if layer.parse::<u32>().is_ok() => format!("blk.{{L}}.{rest}"),
        _ => name.to_owned(),
    }
}

fn tokenizer(gguf: &Gguf) -> Option<TokenizerSummary> {
    let value = |key: &str| gguf.metadata().get(key);
    let text = |key: &str| value(key).and_then(Value::as_str).map(str::to_owned);
    let tokens = value("tokenizer.ggml.tokens").and_then(Value::as_array).and_then(Array::as_strs)?;
    let mut hash = Sha256::new();
    for token in tokens {
        hash.update((token.len() as u64).to_le_bytes());
        hash.update(token);
    }
    Some(TokenizerSummary {
        model: text("tokenizer.ggml.model"),
        pre_tokenizer: text("tokenizer.ggml.pre"),
        n_tokens: tokens.len(),
        n_merges: value("tokenizer.ggml.merges").and_then(Value::as_array).map_or(0, Array::len),
        tokens_sha256: hex(&hash.finalize()),
    })
}

fn entry(key: &str, value: &Value) -> MetadataEntry {
    MetadataEntry { key: key.to_owned(), value_type: value.type_name(), value: shown(value) }
}

/// A value as text; long lists end in how many elements there are, long texts in how many bytes.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => shown_text(text),
        Value::Array(list) => shown_list(list),
        Value::Bool(truth) => truth.to_string(),
        Value::F32(number) => number.to_string(),
        Value::F64(number) => number.to_string(),
        Value::U64(number) => number.to_string(),
        other => other.as_i64().map_or_else(String::new, |number| number.to_string()),
    }
}

fn shown_text(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}... ({} bytes)", &text[..end], text.len()),
        None => text.to_owned(),
    }
}

fn shown_list(list: &Array) -> String {
    let elements = list.elements(SHOWN_ELEMENTS);
    let shown: Vec<_> = elements.iter().map(shown).collect();
    if list.len() > shown.len() {
        format!("[{}, ... {} elements]", shown.join(", "), list.len())
    } else {
        format!("[{}]", shown.join(", "))
    }
}
