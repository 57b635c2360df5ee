//! Random but sane weights, made on the device and, row by row, on the CPU: for models too large for any file at hand.
//!
//! Every byte depends on seed, row and place alone. Codes are random bits; scales are such that the mean square of a row
//! of `n` values is near `1 / n`, so that activations neither explode nor vanish.

use bytemuck::{Pod, Zeroable};
use gguf_tools::block::BlockType;
use half::{bf16, f16};

use super::super::driver::{Arguments, Launch};
use super::super::error::CudaError;
use super::super::module::Gpu;
use super::{LOAD_BYTES, Matrix};

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Bytes of a block that are no random bits.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Patch {
    offset: u32,
    bytes: u32,
    /// The value, to which random bits within `mask` are added.
    base: u32,
    mask: u32,
}

/// How rows of one matrix are made; also the kernel's argument.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Recipe {
    key: u64,
    block_bytes: u32,
    n_patches: u32,
    patches: [Patch; 4],
    float_bytes: u32,
    bfloat: u32,
    factor: f32,
    unused: u32,
}

/// The finalizer of SplitMix64 over a counter.
fn random_word(key: u64, index: u64) -> u64 {
    let mut z = key.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN_GAMMA));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Where scales lie: offset, bytes, and the value that stands for `1` (of minima: for as much as centres the values).
fn scales(block_type: BlockType) -> &'static [(u32, f32)] {
    match block_type {
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 => &[(0, 1.0)],
        BlockType::Q4_1 => &[(0, 1.0), (2, -7.5)],
        BlockType::Q5_1 => &[(0, 1.0), (2, -15.5)],
        BlockType::Q2K => &[(80, 1.0), (82, 1.5)],
        BlockType::Q3K => &[(108, 1.0)],
        BlockType::Q4K => &[(0, 1.0), (2, 7.5)],
        BlockType::Q5K => &[(0, 1.0), (2, 15.5)],
        BlockType::Q6K => &[(208, 1.0)],
        BlockType::Iq2Xxs | BlockType::Iq2Xs | BlockType::Iq3Xxs | BlockType::Iq4Nl | BlockType::Iq4Xs => {
            &[(0, 1.0)]
        }
        _ => &[],
    }
}

impl Recipe {
    /// Rows of `columns` values in this type; `None` if nothing can be computed with it or the columns do not fit.
    pub fn new(block_type: BlockType, columns: usize, seed: u64) -> Option<Self> {
        let key = random_word(seed, u64::from(block_type.id()));
        let block_bytes = block_type.bytes_per_block() as u32;
        let mut recipe = Self { key, block_bytes, ..Zeroable::zeroed() };
        let wanted = 1.0 / (columns.max(1) as f32).sqrt();
        if matches!(block_type, BlockType::F32 | BlockType::F16 | BlockType::Bf16) {
            recipe.float_bytes = block_bytes;
            recipe.bfloat = u32::from(block_type == BlockType::Bf16);
            // 24 random bits are uniform: their root mean square is 2^23 / sqrt(3).
            recipe.factor = wanted * 3f32.sqrt() / (1 << 23) as f32;
            return Some(recipe);
        }
        let format = block_type.format()?;
        block_type.row_bytes(columns as u64)?;
        let mut patches = Vec::new();
        match block_type {
            // Exponents of powers of two, the nearest below.
            BlockType::Mxfp4 => {
                let exponent = 128 + (wanted / 6.0).log2().floor() as i32;
                patches.push(Patch { offset: 0, bytes: 1, base: exponent as u32, mask: 1 });
            }
            BlockType::Nvfp4 => {
                // An E4M3 exponent is four bits above three of mantissa; below the least of them values are 512ths.
                let scale = wanted / 3.0;
                let exponent = 7.0 + scale.log2().floor();
                let (base, mask) = if exponent >= 1.0 {
                    ((exponent as u32) << 3, 7)
                } else {
                    ((scale * 512.0).round().max(1.0) as u32, 0)
                };
                patches.extend((0..4).map(|i| Patch { offset: i, bytes: 1, base, mask }));
            }
            _ => {
                let unit = recipe.root_mean_square(block_type, format, |one| f16::from_f32(one).to_bits());
                patches.extend(scales(block_type).iter().map(|&(offset, one)| {
                    let base = f16::from_f32(one * wanted / unit).to_bits().into();
                    Patch { offset, bytes: 2, base, mask: 31 }
                }));
            }
        }
        recipe.put(&patches);
        Some(recipe)
    }

    fn put(&mut self, patches: &[Patch]) {
        self.n_patches = patches.len() as u32;
        self.patches[..patches.len()].copy_from_slice(patches);
    }

    /// Of values whose scales are one.
    fn root_mean_square(
        mut self,
        block_type: BlockType,
        format: &dyn gguf_tools::block::BlockFormat,
        one: impl Fn(f32) -> u16,
    ) -> f32 {
        let ones: Vec<Patch> = scales(block_type)
            .iter()
            .map(|&(offset, value)| Patch { offset, bytes: 2, base: one(value).into(), mask: 0 })
            .collect();
        self.put(&ones);
        let mut blocks = vec![0; 64 * block_type.bytes_per_block()];
        self.row(0, &mut blocks);
        let mut values = vec![0.0; 64 * block_type.values_per_block()];
        format.dequantize(&blocks, &mut values);
        let sum: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        (sum / values.len() as f64).sqrt() as f32
    }

    /// The bytes of a row, in the file's order.
    pub fn row(&self, row: u64, bytes: &mut [u8]) {
        if self.float_bytes > 0 {
            return self.floats(row, bytes);
        }
        let words = bytes.len().div_ceil(8) as u64;
        for (i, chunk) in bytes.chunks_mut(8).enumerate() {
            let word = random_word(self.key, row * words + i as u64).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        let blocks = (bytes.len() / self.block_bytes as usize) as u64;
        for (block, bytes) in bytes.chunks_mut(self.block_bytes as usize).enumerate() {
            for patch in &self.patches[..self.n_patches as usize] {
                let key = self.key ^ u64::from(patch.offset + 1);
                let random = random_word(key, row * blocks + block as u64) as u32;
                let value = patch.base.wrapping_add(random & patch.mask).to_le_bytes();
                let (first, n) = (patch.offset as usize, patch.bytes as usize);
                bytes[first..first + n].copy_from_slice(&value[..n]);
            }
        }
    }

    fn floats(&self, row: u64, bytes: &mut [u8]) {
        let width = self.float_bytes as usize;
        let values = (bytes.len() / width) as u64;
        for (i, bytes) in bytes.chunks_exact_mut(width).enumerate() {
            let word = random_word(self.key, row * values + i as u64);
            let number = ((word >> 40) as i32 - (1 << 23)) as f32 * self.factor;
            match (width, self.bfloat) {
                (4, _) => bytes.copy_from_slice(&number.to_le_bytes()),
                (_, 0) => bytes.copy_from_slice(&f16::from_f32(number).to_le_bytes()),
                // Cut, not rounded.
                _ => bytes.copy_from_slice(&bf16::from_bits((number.to_bits() >> 16) as u16).to_le_bytes()),
            }
        }
    }
}

impl Matrix {
    /// A matrix of random weights, row `r` being [`Recipe::row`] of `first_row + r`.
    ///
    /// # Errors
    /// As [`Matrix::empty`].
    pub fn generate(
        gpu: &Gpu,
        block_type: BlockType,
        rows: usize,
        columns: usize,
        seed: u64,
    ) -> Result<Self, CudaError> {
        let mut matrix = Self::empty(gpu, block_type, rows, columns)?;
        let recipe = Recipe::new(block_type, columns, seed).ok_or_else(|| {
            matrix.wrong(
                "random weights",
                block_type.to_string(),
                "a type that can be computed with".to_owned(),
            )
        })?;
        let piece = (LOAD_BYTES / matrix.row_bytes.max(1)).max(1);
        let staged = gpu.device.alloc::<u8>(piece.min(rows) * matrix.row_bytes, "staging of weights")?;
        for first in (0..rows).step_by(piece) {
            let n = piece.min(rows - first);
            let bytes = n * matrix.row_bytes;
            let arguments = Arguments::new()
                .structure(&recipe)
                .read(&staged)
                .long(first as u64)
                .long(n as u64)
                .int(matrix.row_bytes);
            let shape = Launch::new(bytes.div_ceil(1024).min(1 << 20), 256);
            gpu.launch("matrix_generate", "generate", shape, arguments)?;
            matrix.put_rows(gpu, first, staged.slice(0..bytes))?;
        }
        Ok(matrix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_every_type_have_the_mean_square_that_keeps_activations_sane() {
        let columns = 1024;
        for block_type in BlockType::all().filter(|t| t.format().is_some()) {
            let recipe = Recipe::new(block_type, columns, 7).unwrap();
            let mut bytes = vec![0; block_type.row_bytes(columns as u64).unwrap() as usize];
            let mut values = vec![0.0f32; columns];
            recipe.row(3, &mut bytes);
            let format = block_type.format().unwrap();
            assert_eq!(format.first_bad_block(&bytes), None, "{block_type}");
            format.dequantize(&bytes, &mut values);
            let sum: f32 = values.iter().map(|v| v * v).sum();
            assert!((0.4..2.5).contains(&sum), "{block_type}: {sum}");
            let mut other = bytes.clone();
            recipe.row(4, &mut other);
            assert_ne!(bytes, other, "{block_type}");
        }
    }
}
