//! GGUF files made byte by byte, right or wrong. Knows the container and nothing of the code that it tests.

use std::ops::Range;

/// A metadata value as it lies in a file. [`RawValue::Raw`] can say anything.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "each variant is the GGUF value type of that name")]
pub enum RawValue {
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    I32s(Vec<i32>),
    Strings(Vec<String>),
    /// Type number and the bytes after it.
    Raw(u32, Vec<u8>),
}

/// An entry of the tensor directory as it lies in a file.
#[derive(Debug, Clone)]
pub struct RawTensor {
    /// Name.
    pub name: String,
    /// Rank, if it is not to be the number of dimensions.
    pub rank: Option<u32>,
    /// Dimensions in the file's order: the innermost first.
    pub dimensions: Vec<u64>,
    /// ggml's number of the type.
    pub type_id: u32,
    /// Offset, if it is not to be the next free one.
    pub offset: Option<u64>,
    /// Bytes of data; padded to the alignment.
    pub data: Vec<u8>,
}

/// A GGUF file to be made.
#[derive(Debug, Clone)]
pub struct GgufBytes {
    /// Container version.
    pub version: u32,
    /// Number of tensors, if it is not to be true.
    pub n_tensors: Option<u64>,
    /// Number of keys, if it is not to be true.
    pub n_keys: Option<u64>,
    /// Keys and values.
    pub keys: Vec<(String, RawValue)>,
    /// Tensors.
    pub tensors: Vec<RawTensor>,
    /// Alignment that is used; say it in `keys` too if it is not 32.
    pub alignment: usize,
}

/// A made file with the places of what a test may want to break.
#[derive(Debug, Clone)]
pub struct MadeGguf {
    /// The whole file.
    pub bytes: Vec<u8>,
    /// Every count and length (8 bytes each), by what it counts.
    pub counts: Vec<(String, Range<usize>)>,
    /// First byte after the tensor directory.
    pub header_end: usize,
    /// First byte of the data section.
    pub data_start: usize,
}

impl Default for GgufBytes {
    fn default() -> Self {
        Self {
            version: 3,
            n_tensors: None,
            n_keys: None,
            keys: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
        }
    }
}

impl GgufBytes {
    /// Adds a key.
    #[must_use]
    pub fn key(mut self, name: &str, value: RawValue) -> Self {
        self.keys.push((name.to_owned(), value));
        self
    }

    /// Adds a tensor whose data are the byte `fill`.
    #[must_use]
    pub fn tensor(mut self, name: &str, type_id: u32, dimensions: &[u64], n_bytes: usize, fill: u8) -> Self {
        self.tensors.push(RawTensor {
            name: name.to_owned(),
            rank: None,
            dimensions: dimensions.to_vec(),
            type_id,
            offset: None,
            data: vec![fill; n_bytes],
        });
        self
    }

    /// A file with every type that matters here and metadata of several types; sound in every way.
    pub fn small() -> Self {
        Self::default()
            .key("general.architecture", RawValue::String("deepseek4".to_owned()))
            .key("deepseek4.block_count", RawValue::U32(2))
            .key("deepseek4.expert_weights_norm", RawValue::Bool(true))
            .key("deepseek4.expert_weights_scale", RawValue::F32(1.5))
            .key("deepseek4.attention.compress_ratios", RawValue::I32s(vec![0, 4, 128]))
            .key("tokenizer.ggml.tokens", RawValue::Strings(vec!["<s>".to_owned(), "\u{ff5c}".to_owned()]))
            .tensor("token_embd.weight", 1, &[256, 3], 2 * 256 * 3, 0x11)
            .tensor("output_norm.weight", 0, &[5], 20, 0x22)
            .tensor("blk.0.attn_q_a.weight", 8, &[256, 2], 2 * 8 * 34, 0x33)
            .tensor("blk.0.ffn_gate_exps.weight", 16, &[256, 2, 3], 6 * 66, 0x44)
            .tensor("blk.0.ffn_down_exps.weight", 10, &[256, 2, 3], 6 * 84, 0x55)
            .tensor("blk.1.ffn_down_exps.weight", 39, &[32, 2, 3], 6 * 17, 0x66)
    }

    /// The bytes.
    pub fn make(&self) -> MadeGguf {
        let mut out = Out::default();
        out.bytes.extend(b"GGUF");
        out.bytes.extend(self.version.to_le_bytes());
        out.count("number of tensors", self.n_tensors.unwrap_or(self.tensors.len() as u64));
        out.count("number of keys", self.n_keys.unwrap_or(self.keys.len() as u64));
        for (key, value) in &self.keys {
            out.text("length of a key", key);
            out.value(key, value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            out.text("length of a tensor name", &tensor.name);
            out.bytes.extend(tensor.rank.unwrap_or(tensor.dimensions.len() as u32).to_le_bytes());
            for n in &tensor.dimensions {
                out.count(&format!("dimension of {}", tensor.name), *n);
            }
            out.bytes.extend(tensor.type_id.to_le_bytes());
            out.bytes.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
            data.resize(data.len().next_multiple_of(self.alignment), 0);
        }
        let header_end = out.bytes.len();
        let data_start = header_end.next_multiple_of(self.alignment);
        out.bytes.resize(data_start, 0);
        out.bytes.extend(data);
        MadeGguf { bytes: out.bytes, counts: out.counts, header_end, data_start }
    }
}

#[derive(Default)]
struct Out {
    bytes: Vec<u8>,
    counts: Vec<(String, Range<usize>)>,
}

impl Out {
    fn count(&mut self, what: &str, n: u64) {
        self.counts.push((what.to_owned(), self.bytes.len()..self.bytes.len() + 8));
        self.bytes.extend(n.to_le_bytes());
    }

    fn text(&mut self, what: &str, text: &str) {
        self.count(what, text.len() as u64);
        self.bytes.extend(text.as_bytes());
    }

    fn array(&mut self, key: &str, element_type: u32, n: usize) {
        self.bytes.extend(9_u32.to_le_bytes());
        self.bytes.extend(element_type.to_le_bytes());
        self.count(&format!("length of array {key}"), n as u64);
    }

    fn scalar(&mut self, type_id: u32, bytes: &[u8]) {
        self.bytes.extend(type_id.to_le_bytes());
        self.bytes.extend(bytes);
    }

    fn value(&mut self, key: &str, value: &RawValue) {
        match value {
            RawValue::U16(v) => self.scalar(2, &v.to_le_bytes()),
            RawValue::U32(v) => self.scalar(4, &v.to_le_bytes()),
            RawValue::I32(v) => self.scalar(5, &v.to_le_bytes()),
            RawValue::F32(v) => self.scalar(6, &v.to_le_bytes()),
            RawValue::Bool(v) => self.scalar(7, &[u8::from(*v)]),
            RawValue::String(v) => {
                self.bytes.extend(8_u32.to_le_bytes());
                self.text(&format!("length of text {key}"), v);
            }
            RawValue::I32s(values) => {
                self.array(key, 5, values.len());
                self.bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            }
            RawValue::Strings(texts) => {
                self.array(key, 8, texts.len());
                for text in texts {
                    self.text(&format!("length of an element of {key}"), text);
                }
            }
            RawValue::Raw(type_id, bytes) => self.scalar(*type_id, bytes),
        }
    }
}
