//! The one table of block formats. A new format is one file and one line here.

use std::fmt;
use std::str::FromStr;

use super::{BlockFormat, float, iq4_nl, mxfp4, nvfp4, q2_k, q3_k, q4_0, q4_k, q6_k, q8_0};

macro_rules! registry {
    ($( $variant:ident = $id:literal, $name:literal, $values:literal values in $bytes:literal bytes $(, $format:expr)?; )*) => {
        /// The type of a tensor in a GGUF file, by ggml's numbers.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum BlockType {
            $(
                #[doc = concat!("`", $name, "`: ", stringify!($values), " values in ", stringify!($bytes), " bytes.")]
                $variant = $id,
            )*
        }

        const ROWS: &[(BlockType, &str, usize, usize, Option<&dyn BlockFormat>)] =
            &[$((BlockType::$variant, $name, $values, $bytes, registry!(@format $($format)?)),)*];

        impl BlockType {
            /// Position of this type's line in the table.
            const fn line(self) -> usize {
                match self { $(BlockType::$variant => Line::$variant as usize,)* }
            }
        }

        #[derive(Clone, Copy)]
        enum Line { $($variant,)* }
    };
    (@format) => { None };
    (@format $format:expr) => { Some($format) };
}

registry! {
    F32 = 0, "F32", 1 values in 4 bytes, &float::F32;
    F16 = 1, "F16", 1 values in 2 bytes, &float::F16;
    Q4_0 = 2, "Q4_0", 32 values in 18 bytes, &q4_0::Q4_0;
    Q4_1 = 3, "Q4_1", 32 values in 20 bytes, &q4_0::Q4_1;
    Q5_0 = 6, "Q5_0", 32 values in 22 bytes, &q4_0::Q5_0;
    Q5_1 = 7, "Q5_1", 32 values in 24 bytes, &q4_0::Q5_1;
    Q8_0 = 8, "Q8_0", 32 values in 34 bytes, &q8_0::Q8_0;
    Q8_1 = 9, "Q8_1", 32 values in 36 bytes;
    Q2K = 10, "Q2_K", 256 values in 84 bytes, &q2_k::Q2_K;
    Q3K = 11, "Q3_K", 256 values in 110 bytes, &q3_k::Q3_K;
    Q4K = 12, "Q4_K", 256 values in 144 bytes, &q4_k::Q4_K;
    Q5K = 13, "Q5_K", 256 values in 176 bytes, &q4_k::Q5_K;
    Q6K = 14, "Q6_K", 256 values in 210 bytes, &q6_k::Q6_K;
    Q8K = 15, "Q8_K", 256 values in 292 bytes;
    Iq2Xxs = 16, "IQ2_XXS", 256 values in 66 bytes;
    Iq2Xs = 17, "IQ2_XS", 256 values in 74 bytes;
    Iq3Xxs = 18, "IQ3_XXS", 256 values in 98 bytes;
    Iq1S = 19, "IQ1_S", 256 values in 50 bytes;
    Iq4Nl = 20, "IQ4_NL", 32 values in 18 bytes, &iq4_nl::IQ4_NL;
    Iq3S = 21, "IQ3_S", 256 values in 110 bytes;
    Iq2S = 22, "IQ2_S", 256 values in 82 bytes;
    Iq4Xs = 23, "IQ4_XS", 256 values in 136 bytes, &iq4_nl::IQ4_XS;
    I8 = 24, "I8", 1 values in 1 bytes;
    I16 = 25, "I16", 1 values in 2 bytes;
    I32 = 26, "I32", 1 values in 4 bytes;
    I64 = 27, "I64", 1 values in 8 bytes;
    F64 = 28, "F64", 1 values in 8 bytes;
    Iq1M = 29, "IQ1_M", 256 values in 56 bytes;
    Bf16 = 30, "BF16", 1 values in 2 bytes, &float::Bf16;
    Tq1_0 = 34, "TQ1_0", 256 values in 54 bytes;
    Tq2_0 = 35, "TQ2_0", 256 values in 66 bytes;
    Mxfp4 = 39, "MXFP4", 32 values in 17 bytes, &mxfp4::MXFP4;
    Nvfp4 = 40, "NVFP4", 64 values in 36 bytes, &nvfp4::NVFP4;
}

impl BlockType {
    /// Every type, in the order of their numbers.
    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.iter().map(|row| row.0)
    }

    /// The type with ggml's number `id`.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::all().find(|t| t.id() == id)
    }

    /// ggml's number, as stored in GGUF files.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The name users read: `IQ2_XXS`, `Q2_K`.
    pub fn name(self) -> &'static str {
        ROWS[self.line()].1
    }

    /// Values in one block.
    pub fn values_per_block(self) -> usize {
        ROWS[self.line()].2
    }

    /// Bytes of one block.
    pub fn bytes_per_block(self) -> usize {
        ROWS[self.line()].3
    }

    /// What can be computed with this type; `None` if it can only be sized and copied.
    pub fn format(self) -> Option<&'static dyn BlockFormat> {
        ROWS[self.line()].4
    }

    /// Bits per value, block overhead included.
    pub fn bits_per_value(self) -> f64 {
        8.0 * self.bytes_per_block() as f64 / self.values_per_block() as f64
    }

    /// Bytes of a row of `n_values` values; `None` if that is no whole number of blocks or not representable.
    pub fn row_bytes(self, n_values: u64) -> Option<u64> {
        let values = self.values_per_block() as u64;
        if !n_values.is_multiple_of(values) {
            return None;
        }
        (n_values / values).checked_mul(self.bytes_per_block() as u64)
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that belongs to no block format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no tensor type is called `{found}`; known types: {}", known_names())]
pub struct UnknownBlockType {
    /// The name as given.
    pub found: String,
}

fn known_names() -> String {
    BlockType::all().map(BlockType::name).collect::<Vec<_>>().join(", ")
}

impl FromStr for BlockType {
    type Err = UnknownBlockType;

    /// Accepts any case, with or without underscores: `iq2xxs`, `Q2_K`, `q2k`.
    fn from_str(text: &str) -> Result<Self, UnknownBlockType> {
        let plain = |s: &str| s.replace('_', "").to_ascii_uppercase();
        let wanted = plain(text);
        Self::all()
            .find(|t| plain(t.name()) == wanted)
            .ok_or_else(|| UnknownBlockType { found: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_found_by_its_number_and_its_name() {
        for t in BlockType::all() {
            assert_eq!(BlockType::from_id(t.id()), Some(t));
            assert_eq!(t.name().parse(), Ok(t));
            assert_eq!(t.name().to_lowercase().replace('_', "").parse(), Ok(t));
        }
        assert!("Q9_K".parse::<BlockType>().unwrap_err().to_string().contains("IQ2_XXS"));
    }
}
