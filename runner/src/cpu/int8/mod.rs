//! Products of rows as they lie in the file: quantized rows with 8-bit inputs, float rows with `f32` inputs.

mod formats;
mod inputs;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
mod wide;

use gguf_tools::block::BlockType;
use gguf_tools::simd::Level;

use self::inputs::{Group32, Group256, Groups};
pub use self::inputs::{InputRounding, Int8Rows};
use self::wide::Wide;

/// Defines a function that runs the generic one compiled for the instruction set of `level`.
macro_rules! for_levels {
    ($name:ident = $generic:ident($($arg:ident : $type:ty),*) $(-> $result:ty)?) => {
        #[cfg_attr(
            target_arch = "x86_64",
            expect(unsafe_code, reason = "calls of a function compiled for an instruction set that was detected")
        )]
        fn $name(level: Level, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            fn avx2($($arg: $type),*) $(-> $result)? {
                $generic::<$crate::cpu::int8::wide::Avx2Bytes>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
            fn avx512($($arg: $type),*) $(-> $result)? {
                $generic::<$crate::cpu::int8::wide::Avx512Bytes>($($arg),*)
            }
            match level {
                Level::Scalar => $generic::<$crate::cpu::int8::wide::Plain>($($arg),*),
                // SAFETY: `Level::detect` gives this level only on machines with AVX2 and F16C.
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: `Level::detect` gives this level only on machines that have AVX-512 too.
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "aarch64")]
                Level::Neon => $generic::<$crate::cpu::int8::neon::NeonBytes>($($arg),*),
            }
        }
    };
}

use for_levels;

/// One line of the table: every product of rows (as bytes) with rounded inputs.
macro_rules! int8_products {
    ($name:ident, $format:ident, $bytes:literal, $groups:ident) => {
        fn $name(level: Level, blocks: &[u8], inputs: &Int8Rows, out: &mut [f32]) {
            #[inline(always)]
            fn all<W: Wide>(blocks: &[u8], inputs: &Int8Rows, out: &mut [f32]) {
                let Groups::$groups(groups) = &inputs.groups else { return };
                let n = inputs.groups_per_row;
                let n_inputs = groups.len() / n;
                let rows = blocks.as_chunks::<$bytes>().0.chunks_exact(n);
                for (row, out) in rows.zip(out.chunks_exact_mut(n_inputs)) {
                    for (x, out) in groups.chunks_exact(n).zip(out) {
                        *out = formats::$format::<W>(row, x);
                    }
                }
            }
            for_levels!(run = all(blocks: &[u8], inputs: &Int8Rows, out: &mut [f32]));
            run(level, blocks, inputs, out);
        }
    };
}

int8_products!(q8_0, q8_0, 34, Of32);
int8_products!(mxfp4, mxfp4, 17, Of32);
int8_products!(q2_k, q2_k, 84, Of256);
int8_products!(q4_k, q4_k, 144, Of256);
int8_products!(q6_k, q6_k, 210, Of256);
int8_products!(iq2_xxs, iq2_xxs, 66, Of256);

/// The product with 8-bit inputs for one block type.
#[derive(Clone, Copy)]
pub struct Int8Dot {
    block_type: BlockType,
    group_values: usize,
    products: fn(Level, &[u8], &Int8Rows, &mut [f32]),
    /// Takes the place of `products`, if the sums are to be those of ggml's plain code.
    plain: Option<plain::Products>,
}

/// Types that have one. Other quantized types are widened, whatever the precision asked for.
const INT8_DOTS: [Int8Dot; 6] = [
    Int8Dot { block_type: BlockType::Q8_0, group_values: 32, products: q8_0, plain: None },
    Int8Dot { block_type: BlockType::Mxfp4, group_values: 32, products: mxfp4, plain: None },
    Int8Dot { block_type: BlockType::Q2K, group_values: 256, products: q2_k, plain: None },
    Int8Dot { block_type: BlockType::Q4K, group_values: 256, products: q4_k, plain: None },
    Int8Dot { block_type: BlockType::Q6K, group_values: 256, products: q6_k, plain: None },
    Int8Dot { block_type: BlockType::Iq2Xxs, group_values: 256, products: iq2_xxs, plain: None },
];

impl Int8Dot {
    /// The product for a block type, if there is one.
    pub fn of(block_type: BlockType) -> Option<Self> {
        INT8_DOTS.into_iter().find(|dot| dot.block_type == block_type)
    }

    /// The same product, rounded and summed as ggml's plain C code does it.
    pub fn as_plain_ggml(self) -> Self {
        Self { plain: plain::products(self.block_type), ..self }
    }

    /// Inputs as this product takes them. `values`: `[rows, width]`, `width` a multiple of the group.
    pub fn round(self, level: Level, values: &[f32], width: usize) -> Int8Rows {
        if self.plain.is_some() && self.group_values == 32 {
            let groups = values.as_chunks::<32>().0.iter().map(plain::round_32).collect();
            return Int8Rows { groups: Groups::Of32(groups), groups_per_row: width / 32 };
        }
        Int8Rows::new(level, values, width, self.group_values)
    }

    /// Inputs that share a scale: 32 or 256.
    pub fn group_values(self) -> usize {
        self.group_values
    }

    /// Every product of rows with inputs. `blocks`: whole rows; `out`: `[rows, inputs]`, overwritten.
    ///
    /// # Panics
    /// If the lengths do not belong together: they come from a checked model.
    pub fn products(self, level: Level, blocks: &[u8], inputs: &Int8Rows, out: &mut [f32]) {
        let is_32 = matches!(inputs.groups, Groups::Of32(_));
        assert_eq!(is_32, self.group_values == 32, "inputs rounded in this product's groups");
        match self.plain {
            Some(products) => products(blocks, inputs, out),
            None => (self.products)(level, blocks, inputs, out),
        }
    }
}

/// The product of float rows with one `f32` input, with the bits of the widened rows' product.
#[derive(Debug, Clone, Copy)]
pub enum FloatDot {
    /// Half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
}

impl FloatDot {
    /// The product for a block type, if there is one.
    pub fn of(block_type: BlockType) -> Option<Self> {
        match block_type {
            BlockType::F16 => Some(Self::F16),
            BlockType::Bf16 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Products of rows with one input, whose length is a multiple of 8. `out`: `[rows]`, overwritten.
    pub fn products(self, level: Level, rows: &[u8], input: &[f32], out: &mut [f32]) {
        match self {
            Self::F16 => f16_rows(level, rows, input, out),
            Self::Bf16 => bf16_rows(level, rows, input, out),
        }
    }
}

macro_rules! float_products {
    ($name:ident, $generic:ident, $format:ident) => {
        #[inline(always)]
        fn $generic<W: Wide>(rows: &[u8], input: &[f32], out: &mut [f32]) {
            let rows = rows.as_chunks::<16>().0.chunks_exact(input.len() / 8);
            for (row, out) in rows.zip(out) {
                *out = formats::$format::<W>(row, input);
            }
        }
        for_levels!($name = $generic(rows: &[u8], input: &[f32], out: &mut [f32]));
    };
}
float_products!(f16_rows, f16_rows_in, f16);
float_products!(bf16_rows, bf16_rows_in, bf16);

#[cfg(test)]
mod tests;
