//! Text to tokens and back, from the tables in GGUF metadata.

use std::collections::HashMap;

use gguf_tools::gguf::{Array, Metadata, Value};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, Model as _, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
};

use crate::chat::ChatPart;
use crate::error::RunnerError;

/// `tokenizer.ggml.token_type` of tokens that steer the model.
const CONTROL: i64 = 3;
/// Of tokens that were added to the vocabulary as a whole.
const USER_DEFINED: i64 = 4;
/// Of numbers that stand for nothing.
const UNUSED: i64 = 5;

/// The pre-tokenizer `joyai-llm`, gguf naming: runs of up to three digits; runs of Chinese and Japanese letters; words with one
/// character before them, punctuation, line ends, spaces. Each expression cuts up the pieces that the one before left.
const SPLITS: [&str; 3] = [
    r"\p{N}{1,3}",
    "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];

/// The tokenizer of a model: byte-level BPE with tokens that stand for themselves.
pub struct Tokenizer {
    /// With the added tokens, which are found in the text before anything else.
    whole: tokenizers::Tokenizer,
    tokens: Vec<String>,
    types: Vec<i64>,
    byte_of: HashMap<char, u8>,
    bos: Option<u32>,
    eos: Option<u32>,
}

fn error(problem: impl Into<String>) -> RunnerError {
    RunnerError::Tokenizer { problem: problem.into() }
}

impl Tokenizer {
    /// Builds the tokenizer that the `tokenizer.*` keys describe.
    ///
    /// # Errors
    /// If a key is missing or of the wrong type, or describes another kind of tokenizer.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, RunnerError> {
        let text = |key: &str, expected: &str| match metadata.get(key).and_then(Value::as_str) {
            Some(found) if found == expected => Ok(()),
            Some(found) => Err(error(format!("`{key}` is `{found}`, only `{expected}` can be used"))),
            None => Err(error(format!("`{key}` is missing or no text, expected `{expected}`"))),
        };
        text("tokenizer.ggml.model", "gpt2")?;
        text("tokenizer.ggml.pre", "joyai-llm")?;
        let strings = |key: &str| {
            let array = metadata.get(key).and_then(Value::as_array);
            let strings = array.and_then(Array::as_strs);
            strings.ok_or_else(|| error(format!("`{key}` is missing or no array of texts")))
        };
        let tokens = strings("tokenizer.ggml.tokens")?.to_vec();
        let merges = strings("tokenizer.ggml.merges")?;
        let key = "tokenizer.ggml.token_type";
        let types = metadata.get(key).and_then(Value::as_array).and_then(Array::as_i64s);
        let types = types.ok_or_else(|| error(format!("`{key}` is missing or no array of integers")))?;
        if types.len() != tokens.len() {
            let problem = format!("`{key}` has {} entries for {} tokens", types.len(), tokens.len());
            return Err(error(problem));
        }
        let id = |key: &str| {
            let id = metadata.get(key).and_then(Value::as_u64);
            id.and_then(|id| u32::try_from(id).ok()).filter(|&id| (id as usize) < tokens.len())
        };
        let (bos, eos) = (id("tokenizer.ggml.bos_token_id"), id("tokenizer.ggml.eos_token_id"));
        let whole = build(&tokens, &types, merges)?;
        let byte_of = byte_letters().into_iter().enumerate().map(|(b, c)| (c, b as u8)).collect();
        Ok(Self { whole, tokens, types, byte_of, bos, eos })
    }

    /// Number of tokens, unused ones included.
    pub fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// The token that every text begins with.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a turn.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The token with exactly this text, as a control token is looked up.
    pub fn token(&self, text: &str) -> Option<u32> {
        self.whole.token_to_id(text)
    }

    /// Tokens of a text in which control tokens are written out. Nothing is put before or behind it.
    ///
    /// # Errors
    /// If the text cannot be split (a limit of the expression engine).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, RunnerError> {
        let encoding = self.whole.encode_fast(text, false).map_err(|e| error(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokens of a text from outside: what looks like a control token in it is text like any other.
    ///
    /// # Errors
    /// If the text cannot be split (a limit of the expression engine).
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, RunnerError> {
        let mut pieces = PreTokenizedString::from(text);
        let splitter = self.whole.get_pre_tokenizer().expect("set where the tokenizer is built");
        let model = self.whole.get_model();
        let encoding = splitter
            .pre_tokenize(&mut pieces)
            .and_then(|()| pieces.tokenize(|piece| model.tokenize(piece.get())))
            .and_then(|()| pieces.into_encoding(None, 0, OffsetType::None))
            .map_err(|e| error(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokens of a rendered conversation: control tokens from the renderer, texts as [`Tokenizer::encode_plain`].
    ///
    /// # Errors
    /// If the vocabulary lacks a control token, or a text cannot be split.
    pub fn encode_chat(&self, parts: &[ChatPart<'_>]) -> Result<Vec<u32>, RunnerError> {
        let mut ids = Vec::new();
        for part in parts {
            match part {
                ChatPart::Control(name) => ids.push(
                    self.token(name).ok_or_else(|| error(format!("the vocabulary has no token `{name}`")))?,
                ),
                ChatPart::Text(text) => ids.extend(self.encode_plain(text)?),
            }
        }
        Ok(ids)
    }

    /// Whether the token steers the model and stands for no text.
    pub fn is_control(&self, token: u32) -> bool {
        self.types.get(token as usize) == Some(&CONTROL)
    }

    /// The bytes that a token stands for; none for an id that is not in the vocabulary.
    /// A character may be spread over several tokens: see [`TextStream`].
    pub fn token_bytes(&self, token: u32) -> Vec<u8> {
        let Some(text) = self.tokens.get(token as usize) else { return Vec::new() };
        let bytes: Option<Vec<u8>> = text.chars().map(|c| self.byte_of.get(&c).copied()).collect();
        bytes.unwrap_or_else(|| text.clone().into_bytes())
    }

    /// The text of some tokens, control tokens written out; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|&token| self.token_bytes(token)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Puts the pieces of text that tokens stand for together to whole characters.
#[derive(Debug, Clone, Default)]
pub struct TextStream {
    pending: Vec<u8>,
}

impl TextStream {
    /// Takes the bytes of the next token; returns what is complete now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut out = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(text) => {
                    out.push_str(text);
                    self.pending.clear();
                    return out;
                }
                Err(broken) => {
                    let valid = broken.valid_up_to();
                    out.push_str(&String::from_utf8_lossy(&self.pending[..valid]));
                    let Some(n_bad) = broken.error_len() else {
                        self.pending.drain(..valid);
                        return out;
                    };
                    out.push(char::REPLACEMENT_CHARACTER);
                    self.pending.drain(..valid + n_bad);
                }
            }
        }
    }

    /// What is left at the end: at most one broken character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

fn build(tokens: &[String], types: &[i64], merges: &[String]) -> Result<tokenizers::Tokenizer, RunnerError> {
    let mut vocabulary = Vocab::default();
    for (id, (token, kind)) in tokens.iter().zip(types).enumerate() {
        if *kind != UNUSED && vocabulary.insert(token.clone(), id as u32).is_some() {
            return Err(error(format!("token {id}, `{token}`, is in the vocabulary twice")));
        }
    }
    let pairs = merges.iter().map(|merge| {
        let pair = merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()));
        pair.ok_or_else(|| error(format!("merge `{merge}` is not two pieces with a space between")))
    });
    let model = BPE::builder()
        .vocab_and_merges(vocabulary, pairs.collect::<Result<Vec<_>, _>>()?)
        .build()
        .map_err(|e| error(e.to_string()))?;
    let mut whole = tokenizers::Tokenizer::new(model);
    let split = |pattern: &str| {
        Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false)
            .map_err(|e| error(e.to_string()))
    };
    let mut steps = SPLITS
        .iter()
        .map(|pattern| split(pattern).map(Into::into))
        .collect::<Result<Vec<_>, RunnerError>>()?;
    steps.push(ByteLevel::new(false, true, false).into());
    whole.with_pre_tokenizer(Some(Sequence::new(steps)));
    // In the order of their ids: of two that begin at the same place the library prefers the earlier one.
    let added = tokens.iter().zip(types).filter(|(_, kind)| [CONTROL, USER_DEFINED].contains(kind));
    let added = added
        .map(|(token, &kind)| AddedToken::from(token.clone(), kind == CONTROL).normalized(kind != CONTROL));
    let added: Vec<AddedToken> = added.collect();
    whole.add_tokens(added).map_err(|e| error(e.to_string()))?;
    Ok(whole)
}

/// The letter that byte-level BPE writes for each byte: printable ones stand for themselves, the others follow U+0100.
fn byte_letters() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        if matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) {
            return char::from(byte as u8);
        }
        next += 1;
        char::from_u32(next - 1).expect("U+0100 to U+0143 are letters")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_come_out_whole() {
        let mut stream = TextStream::default();
        let rocket = "🚀".as_bytes();
        assert_eq!(stream.push(&rocket[..1]), "");
        assert_eq!(stream.push(&rocket[1..3]), "");
        assert_eq!(stream.push(&[&rocket[3..], b"a\xff"].concat()), "🚀a\u{fffd}");
        assert_eq!(stream.push(&rocket[..2]), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    #[test]
    fn bytes_have_letters_of_their_own() {
        let letters = byte_letters();
        assert_eq!(
            (letters[b'a' as usize], letters[b' ' as usize], letters[b'\n' as usize]),
            ('a', 'Ġ', 'Ċ')
        );
        let different: std::collections::HashSet<char> = letters.into_iter().collect();
        assert_eq!(different.len(), 256);
    }

    #[test]
    fn another_tokenizer_is_refused_by_name() {
        let mut metadata = Metadata::default();
        metadata.set("tokenizer.ggml.model", "gpt2");
        metadata.set("tokenizer.ggml.pre", "llama-bpe");
        let message = Tokenizer::from_metadata(&metadata).err().unwrap().to_string();
        assert!(message.contains("llama-bpe") && message.contains("joyai-llm"), "{message}");
    }
}
