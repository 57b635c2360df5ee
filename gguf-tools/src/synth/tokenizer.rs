//! A small byte-level BPE tokenizer with the release's special tokens and pre-tokenizer.

use serde_json::{Map, Value, json};

use crate::checkpoint::tokenizer::release_pre_tokenizer;

/// Special tokens at the start of the vocabulary.
const FIRST: [&str; 3] = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"];
/// Further tokens that are never split; the first ones take part in the text of a conversation.
const ADDED: [&str; 16] = [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜title｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
];
/// Frequent English pairs, in the order in which they join.
const MERGES: [(&str, &str); 24] = [
    ("Ġ", "t"),
    ("h", "e"),
    ("i", "n"),
    ("Ġ", "a"),
    ("r", "e"),
    ("o", "n"),
    ("Ġt", "he"),
    ("e", "r"),
    ("n", "d"),
    ("a", "t"),
    ("o", "r"),
    ("Ġa", "nd"),
    ("in", "g"),
    ("e", "s"),
    ("Ġ", "o"),
    ("e", "d"),
    ("i", "t"),
    ("Ġo", "f"),
    ("Ġt", "o"),
    ("a", "l"),
    ("Ġ", "in"),
    ("i", "s"),
    ("Ġ", "s"),
    ("e", "n"),
];

/// `tokenizer.json`.
pub(super) fn tokenizer() -> Value {
    let mut vocabulary = Map::new();
    let merged = MERGES.iter().map(|(left, right)| format!("{left}{right}"));
    let texts = FIRST.into_iter().map(str::to_owned).chain(byte_characters().map(String::from)).chain(merged);
    for (id, text) in texts.enumerate() {
        vocabulary.insert(text, json!(id));
    }
    let n_vocabulary = vocabulary.len();
    let first = FIRST.iter().enumerate().map(|(id, token)| added_token(id, token, true));
    let rest = ADDED.iter().enumerate().map(|(i, token)| added_token(n_vocabulary + i, token, false));
    let added: Vec<Value> = first.chain(rest).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": { "type": "Sequence", "normalizers": [] },
        "pre_tokenizer": release_pre_tokenizer(),
        "post_processor": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "vocab": vocabulary,
            "merges": MERGES.iter().map(|(left, right)| format!("{left} {right}")).collect::<Vec<_>>(),
        },
    })
}

/// `tokenizer_config.json`.
pub(super) fn tokenizer_config(max_length: u64) -> Value {
    json!({
        "add_bos_token": false,
        "add_eos_token": false,
        "bos_token": FIRST[0],
        "eos_token": FIRST[1],
        "pad_token": FIRST[1],
        "unk_token": null,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
}

fn added_token(id: usize, content: &str, special: bool) -> Value {
    json!({
        "id": id,
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": !special,
        "special": special,
    })
}

/// The characters that stand for the 256 bytes in byte-level BPE: printable Latin-1 for itself, others from U+0100 on.
fn byte_characters() -> impl Iterator<Item = char> {
    let printable = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..256).filter(move |byte| !printable(byte)).count() as u32;
    (0..256).filter(printable).chain(0x100..0x100 + others).filter_map(char::from_u32)
}
