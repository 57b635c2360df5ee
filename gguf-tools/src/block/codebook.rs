//! What the IQ formats with a codebook share: super-blocks of 256 values whose magnitudes come, eight at a
//! time, from a fixed list of entries, with signs that obey a parity rule.

use half::f16;

use super::BadBlock;
use crate::simd::{Lanes, Level, Scalar};

/// Values in one super-block.
pub(super) const BLOCK_VALUES: usize = 256;
/// Values that share one scale index or two: a group of the format's definition.
pub(super) const GROUP_VALUES: usize = 32;

/// Eight values of a group: which magnitudes, which signs, under which scale.
#[derive(Debug, Clone, Copy)]
pub(super) struct Eight {
    /// Factor of the magnitudes.
    pub scale: f32,
    /// Code of the value `i` in bits `3i` to `3i + 2`; it points into [`Codebook::MAGNITUDES`].
    pub codes: u32,
    /// The seven stored sign bits.
    pub sign_index: u32,
}

/// One format of the family.
pub(super) trait Codebook {
    /// Bytes of one block. The first two are the super-block's scale `d` in half precision.
    const BLOCK_BYTES: usize;
    /// The magnitude of each code; unused places repeat the last one.
    const MAGNITUDES: [f32; 8];

    /// The four eights of group `group` of a block whose scale is `d`.
    fn group(block: &[u8], group: usize, d: f32) -> [Eight; 4];
}

/// The eight signs that a stored 7-bit index stands for, 1 = negative: the last one makes their number even.
#[inline(always)]
pub(super) const fn signs(index: u32) -> u32 {
    let index = index & 127;
    // Bit n of 0x6996 is the parity of the four-bit number n.
    index | ((0x6996 >> ((index ^ (index >> 4)) & 15)) & 1) << 7
}

/// Spreads the 2-bit codes of a packed entry to three bits each.
pub(super) const fn spread(packed: u16) -> u32 {
    let mut codes = 0;
    let mut i = 0;
    while i < 8 {
        codes |= ((packed as u32 >> (2 * i)) & 3) << (3 * i);
        i += 1;
    }
    codes
}

/// [`spread`] for a whole codebook.
pub(super) const fn spread_all<const N: usize>(packed: &[u16; N]) -> [u32; N] {
    let mut codes = [0; N];
    let mut i = 0;
    while i < N {
        codes[i] = spread(packed[i]);
        i += 1;
    }
    codes
}

/// The little-endian half-precision number at the start of `bytes`.
#[inline(always)]
pub(super) fn read_f16(bytes: &[u8]) -> f16 {
    f16::from_le_bytes([bytes[0], bytes[1]])
}

/// The little-endian word at `at`.
#[inline(always)]
pub(super) fn read_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Widens whole blocks to `f32`.
///
/// # Panics
/// If the lengths do not belong together.
pub(super) fn dequantize<C: Codebook>(level: Level, blocks: &[u8], row: &mut [f32]) {
    assert_eq!(blocks.len() % C::BLOCK_BYTES, 0, "whole blocks");
    assert_eq!(blocks.len() / C::BLOCK_BYTES * BLOCK_VALUES, row.len(), "values of the blocks");
    match level {
        Level::Scalar => widen::<Scalar, C>(blocks, row),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::Avx512 => avx2::dequantize::<C>(blocks, row),
        #[cfg(target_arch = "aarch64")]
        Level::Neon => widen::<crate::simd::Neon, C>(blocks, row),
    }
}

#[inline(always)]
fn widen<L: Lanes, C: Codebook>(blocks: &[u8], row: &mut [f32]) {
    let magnitudes = L::load(&C::MAGNITUDES);
    for (block, values) in blocks.chunks_exact(C::BLOCK_BYTES).zip(row.chunks_exact_mut(BLOCK_VALUES)) {
        let d = read_f16(block).to_f32();
        for (index, values) in values.chunks_exact_mut(GROUP_VALUES).enumerate() {
            for (eight, values) in C::group(block, index, d).into_iter().zip(values.chunks_exact_mut(8)) {
                let scaled = L::splat(eight.scale) * magnitudes;
                scaled.pick(eight.codes).negate(signs(eight.sign_index)).store(values);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    #![expect(unsafe_code, reason = "enters code compiled for AVX2")]

    use super::{Codebook, widen};
    use crate::simd::Avx2;

    pub(super) fn dequantize<C: Codebook>(blocks: &[u8], row: &mut [f32]) {
        #[target_feature(enable = "avx2,f16c")]
        fn enter<C: Codebook>(blocks: &[u8], row: &mut [f32]) {
            widen::<Avx2, C>(blocks, row);
        }
        // SAFETY: the levels are only made where the machine has AVX2 and F16C.
        unsafe { enter::<C>(blocks, row) }
    }
}

/// The first block whose scale `d`, its first two bytes, is not finite.
pub(super) fn first_bad_block<C: Codebook>(blocks: &[u8]) -> Option<BadBlock> {
    blocks.chunks_exact(C::BLOCK_BYTES).enumerate().find_map(|(block_index, block)| {
        let d = read_f16(block);
        let kind = if d.is_nan() { "NaN" } else { "infinite" };
        (!d.is_finite()).then(|| BadBlock { block_index, problem: format!("scale `d` is {kind}") })
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::block::{BlockFormat, BlockType};

    /// Checks a format against the golden blocks, at every instruction set.
    pub(in crate::block) fn check_golden<C: Codebook>(block_type: BlockType) {
        let Some(folder) = test_vectors::fixtures("dequantization of codebook formats") else { return };
        let file = folder.join(format!("golden/quants/{block_type}.safetensors"));
        let golden = test_vectors::golden_arrays(&file);
        let (blocks, wanted) = (&golden["blocks"].bytes, golden["dequant"].f32());
        for level in [Level::Scalar, Level::detect()] {
            let mut row = vec![0.0; wanted.len()];
            dequantize::<C>(level, blocks, &mut row);
            for (i, (found, wanted)) in row.iter().zip(&wanted).enumerate() {
                assert_eq!(found.to_bits(), wanted.to_bits(), "{block_type} value {i} at {level:?}");
            }
        }
        let format = block_type.format().expect("computed");
        assert_eq!(format.first_bad_block(blocks), None);
        check_bad_scales(format, blocks, C::BLOCK_BYTES);
    }

    fn check_bad_scales(format: &dyn BlockFormat, blocks: &[u8], block_bytes: usize) {
        for (bits, problem) in [(0x7C00_u16, "infinite"), (0xFE01, "NaN")] {
            let mut spoiled = blocks.to_vec();
            spoiled[3 * block_bytes..3 * block_bytes + 2].copy_from_slice(&bits.to_le_bytes());
            let bad = format.first_bad_block(&spoiled).expect("a spoiled scale");
            assert_eq!((bad.block_index, bad.problem), (3, format!("scale `d` is {problem}")));
        }
    }

    #[test]
    fn every_sign_index_gives_an_even_number_of_negatives() {
        assert_eq!(signs(1), 0b1000_0001);
        assert_eq!(signs(3), 0b0000_0011);
        for index in 0..128 {
            assert_eq!(signs(index) & 127, index);
            assert_eq!(signs(index).count_ones() % 2, 0);
        }
    }
}
