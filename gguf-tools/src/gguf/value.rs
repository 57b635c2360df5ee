//! Metadata: ordered keys with typed values.

use std::collections::HashMap;

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "each variant is the GGUF value type of that name")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A metadata array; all elements have one type, and arrays do not nest.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "each variant is the GGUF value type of that name")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// GGUF's number of the array type.
pub(super) const ARRAY_TYPE: u32 = 9;

impl Value {
    /// The value as an unsigned integer, if it is any integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        self.as_i128().and_then(|v| u64::try_from(v).ok())
    }

    /// The value as a signed integer, if it is any integer in range.
    pub fn as_i64(&self) -> Option<i64> {
        self.as_i128().and_then(|v| i64::try_from(v).ok())
    }

    fn as_i128(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// The value as a floating-point number, if it is any number.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(v) => Some(v.into()),
            Self::F64(v) => Some(v),
            _ => self.as_i128().map(|v| v as f64),
        }
    }

    /// The value as text.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }

    /// The value as a truth value.
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(v) = *self { Some(v) } else { None }
    }

    /// The value as an array.
    pub fn as_array(&self) -> Option<&Array> {
        if let Self::Array(array) = self { Some(array) } else { None }
    }

    /// Name of the type, for messages: `u32`, `array of string`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::F32(_) => "f32",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
            Self::Array(array) => array.type_name(),
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F64(_) => "f64",
        }
    }

    /// GGUF's number of the type.
    pub(super) fn type_id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => ARRAY_TYPE,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// Appends the value as it lies in a file, without its type.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(v) => out.push(*v),
            Self::I8(v) => out.extend(v.to_le_bytes()),
            Self::U16(v) => out.extend(v.to_le_bytes()),
            Self::I16(v) => out.extend(v.to_le_bytes()),
            Self::U32(v) => out.extend(v.to_le_bytes()),
            Self::I32(v) => out.extend(v.to_le_bytes()),
            Self::F32(v) => out.extend(v.to_le_bytes()),
            Self::Bool(v) => out.push(u8::from(*v)),
            Self::String(v) => write_string(v, out),
            Self::Array(v) => v.write(out),
            Self::U64(v) => out.extend(v.to_le_bytes()),
            Self::I64(v) => out.extend(v.to_le_bytes()),
            Self::F64(v) => out.extend(v.to_le_bytes()),
        }
    }
}

/// Appends a string with its length.
pub(super) fn write_string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Up to `n` elements from the start, as values.
    pub fn elements(&self, n: usize) -> Vec<Value> {
        fn first<T: Clone + Into<Value>>(values: &[T], n: usize) -> Vec<Value> {
            values.iter().take(n).cloned().map(Into::into).collect()
        }
        match self {
            Self::U8(v) => first(v, n),
            Self::I8(v) => first(v, n),
            Self::U16(v) => first(v, n),
            Self::I16(v) => first(v, n),
            Self::U32(v) => first(v, n),
            Self::I32(v) => first(v, n),
            Self::F32(v) => first(v, n),
            Self::Bool(v) => first(v, n),
            Self::String(v) => first(v, n),
            Self::U64(v) => first(v, n),
            Self::I64(v) => first(v, n),
            Self::F64(v) => first(v, n),
        }
    }

    /// The elements as texts, if they are.
    pub fn as_strs(&self) -> Option<&[String]> {
        if let Self::String(texts) = self { Some(texts) } else { None }
    }

    /// The elements as signed integers, if they are integers in range.
    pub fn as_i64s(&self) -> Option<Vec<i64>> {
        Some(match self {
            Self::U8(v) => v.iter().map(|&x| x.into()).collect(),
            Self::I8(v) => v.iter().map(|&x| x.into()).collect(),
            Self::U16(v) => v.iter().map(|&x| x.into()).collect(),
            Self::I16(v) => v.iter().map(|&x| x.into()).collect(),
            Self::U32(v) => v.iter().map(|&x| x.into()).collect(),
            Self::I32(v) => v.iter().map(|&x| x.into()).collect(),
            Self::U64(v) => return v.iter().map(|&x| i64::try_from(x).ok()).collect(),
            Self::I64(v) => v.clone(),
            _ => return None,
        })
    }

    /// The elements as floating-point numbers, if they are numbers.
    pub fn as_f64s(&self) -> Option<Vec<f64>> {
        match self {
            Self::F32(v) => Some(v.iter().map(|&x| x.into()).collect()),
            Self::F64(v) => Some(v.clone()),
            _ => self.as_i64s().map(|v| v.into_iter().map(|x| x as f64).collect()),
        }
    }

    fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "array of u8",
            Self::I8(_) => "array of i8",
            Self::U16(_) => "array of u16",
            Self::I16(_) => "array of i16",
            Self::U32(_) => "array of u32",
            Self::I32(_) => "array of i32",
            Self::F32(_) => "array of f32",
            Self::Bool(_) => "array of bool",
            Self::String(_) => "array of string",
            Self::U64(_) => "array of u64",
            Self::I64(_) => "array of i64",
            Self::F64(_) => "array of f64",
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        fn numbers<T: Copy, const N: usize>(
            id: u32,
            values: &[T],
            bytes: fn(T) -> [u8; N],
            out: &mut Vec<u8>,
        ) {
            out.extend(id.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            out.extend(values.iter().flat_map(|&v| bytes(v)));
        }
        match self {
            Self::U8(v) => numbers(0, v, u8::to_le_bytes, out),
            Self::I8(v) => numbers(1, v, i8::to_le_bytes, out),
            Self::U16(v) => numbers(2, v, u16::to_le_bytes, out),
            Self::I16(v) => numbers(3, v, i16::to_le_bytes, out),
            Self::U32(v) => numbers(4, v, u32::to_le_bytes, out),
            Self::I32(v) => numbers(5, v, i32::to_le_bytes, out),
            Self::F32(v) => numbers(6, v, f32::to_le_bytes, out),
            Self::Bool(v) => numbers(7, v, |b| [u8::from(b)], out),
            Self::String(v) => {
                out.extend(8_u32.to_le_bytes());
                out.extend((v.len() as u64).to_le_bytes());
                for text in v {
                    write_string(text, out);
                }
            }
            Self::U64(v) => numbers(10, v, u64::to_le_bytes, out),
            Self::I64(v) => numbers(11, v, i64::to_le_bytes, out),
            Self::F64(v) => numbers(12, v, f64::to_le_bytes, out),
        }
    }
}

macro_rules! from {
    ($($variant:ident: $type:ty;)*) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }
        impl From<Vec<$type>> for Value {
            fn from(values: Vec<$type>) -> Self {
                Self::Array(Array::$variant(values))
            }
        }
    )*};
}
from! {
    U8: u8; I8: i8; U16: u16; I16: i16; U32: u32; I32: i32; F32: f32; Bool: bool; String: String; U64: u64;
    I64: i64; F64: f64;
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

impl From<Array> for Value {
    fn from(array: Array) -> Self {
        Self::Array(array)
    }
}

/// Keys and values in the order of a file; keys are unique.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    positions: HashMap<String, usize>,
}

impl PartialEq for Metadata {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl Metadata {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.positions.get(key).map(|&at| &self.entries[at].1)
    }

    /// Replaces the value of a key where it stands, or appends it.
    pub fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        let (key, value) = (key.into(), value.into());
        if let Some(&at) = self.positions.get(&key) {
            self.entries[at].1 = value;
        } else {
            self.positions.insert(key.clone(), self.entries.len());
            self.entries.push((key, value));
        }
    }

    /// Removes a key and gives its value.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let at = self.positions.remove(key)?;
        for position in self.positions.values_mut().filter(|position| **position > at) {
            *position -= 1;
        }
        Some(self.entries.remove(at).1)
    }

    /// Keys and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}
