//! F32, F16 and BF16: values without blocks. All little-endian.

use half::{bf16, f16};

use super::{BadBlock, BlockFormat, Guide, RowQuantizer};
use crate::simd::{Kernel, Lanes, Level};

/// IEEE single precision.
pub(super) struct F32;
/// IEEE half precision.
pub(super) struct F16;
/// The upper half of IEEE single precision.
pub(super) struct Bf16;

impl BlockFormat for F32 {
    fn dequantize(&self, blocks: &[u8], row: &mut [f32]) {
        assert_eq!(blocks.len(), 4 * row.len(), "four bytes a value");
        for (bytes, value) in blocks.as_chunks().0.iter().zip(row) {
            *value = f32::from_le_bytes(*bytes);
        }
    }

    fn quantizer<'a>(&self, _: Guide<'a>) -> Option<Box<dyn RowQuantizer + 'a>> {
        Some(Box::new(Self))
    }

    fn first_bad_block(&self, blocks: &[u8]) -> Option<BadBlock> {
        first_bad_value(blocks.as_chunks().0, |bytes| f32::from_le_bytes(*bytes))
    }
}

impl RowQuantizer for F32 {
    fn quantize_row(&self, row: &[f32], blocks: &mut [u8]) {
        assert_eq!(blocks.len(), 4 * row.len(), "four bytes a value");
        for (value, bytes) in row.iter().zip(blocks.as_chunks_mut().0) {
            *bytes = value.to_le_bytes();
        }
    }
}

impl BlockFormat for F16 {
    fn dequantize(&self, blocks: &[u8], row: &mut [f32]) {
        Level::detect().run(WidenF16 { blocks, row });
    }

    fn quantizer<'a>(&self, guide: Guide<'a>) -> Option<Box<dyn RowQuantizer + 'a>> {
        Some(Box::new(RoundF16(guide.level)))
    }

    fn first_bad_block(&self, blocks: &[u8]) -> Option<BadBlock> {
        first_bad_value(blocks.as_chunks().0, |bytes| f16::from_le_bytes(*bytes).to_f32())
    }
}

struct WidenF16<'a> {
    blocks: &'a [u8],
    row: &'a mut [f32],
}

impl Kernel for WidenF16<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        assert_eq!(self.blocks.len(), 2 * self.row.len(), "two bytes a value");
        let (eights, rest) = self.row.as_chunks_mut::<8>();
        let (halves, spare) = self.blocks.as_chunks::<16>();
        for (values, bytes) in eights.iter_mut().zip(halves) {
            L::load_f16(bytes).store(values);
        }
        for (value, bytes) in rest.iter_mut().zip(spare.as_chunks().0) {
            *value = f16::from_le_bytes(*bytes).to_f32();
        }
    }
}

/// Rounds to nearest even; values above the largest half become infinite.
struct RoundF16(Level);

impl RowQuantizer for RoundF16 {
    fn quantize_row(&self, row: &[f32], blocks: &mut [u8]) {
        self.0.run(NarrowF16 { row, blocks });
    }
}

struct NarrowF16<'a> {
    row: &'a [f32],
    blocks: &'a mut [u8],
}

impl Kernel for NarrowF16<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        assert_eq!(self.blocks.len(), 2 * self.row.len(), "two bytes a value");
        let (eights, rest) = self.row.as_chunks::<8>();
        let (halves, spare) = self.blocks.as_chunks_mut::<16>();
        for (values, bytes) in eights.iter().zip(halves) {
            L::load(values).store_f16(bytes);
        }
        for (value, bytes) in rest.iter().zip(spare.as_chunks_mut().0) {
            *bytes = f16::from_f32(*value).to_le_bytes();
        }
    }
}

impl BlockFormat for Bf16 {
    fn dequantize(&self, blocks: &[u8], row: &mut [f32]) {
        Level::detect().run(WidenBf16 { blocks, row });
    }

    fn quantizer<'a>(&self, guide: Guide<'a>) -> Option<Box<dyn RowQuantizer + 'a>> {
        Some(Box::new(RoundBf16(guide.level)))
    }

    fn first_bad_block(&self, blocks: &[u8]) -> Option<BadBlock> {
        first_bad_value(blocks.as_chunks().0, |bytes| bf16::from_le_bytes(*bytes).to_f32())
    }
}

struct WidenBf16<'a> {
    blocks: &'a [u8],
    row: &'a mut [f32],
}

impl Kernel for WidenBf16<'_> {
    type Output = ();

    /// Vectorised by the compiler.
    #[inline(always)]
    fn run<L: Lanes>(self) {
        assert_eq!(self.blocks.len(), 2 * self.row.len(), "two bytes a value");
        for (value, bytes) in self.row.iter_mut().zip(self.blocks.as_chunks().0) {
            *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
        }
    }
}

/// Rounds to nearest even; values that round above the largest BF16 become infinite.
struct RoundBf16(Level);

impl RowQuantizer for RoundBf16 {
    fn quantize_row(&self, row: &[f32], blocks: &mut [u8]) {
        self.0.run(NarrowBf16 { row, blocks });
    }
}

struct NarrowBf16<'a> {
    row: &'a [f32],
    blocks: &'a mut [u8],
}

impl Kernel for NarrowBf16<'_> {
    type Output = ();

    /// Vectorised by the compiler.
    #[inline(always)]
    fn run<L: Lanes>(self) {
        assert_eq!(self.blocks.len(), 2 * self.row.len(), "two bytes a value");
        for (value, bytes) in self.row.iter().zip(self.blocks.as_chunks_mut().0) {
            let bits = value.to_bits();
            let rounded = (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1))) >> 16;
            let quiet_nan = (bits >> 16) | 0x40;
            let is_nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
            *bytes = (if is_nan { quiet_nan } else { rounded } as u16).to_le_bytes();
        }
    }
}

fn first_bad_value<const N: usize>(blocks: &[[u8; N]], value: impl Fn(&[u8; N]) -> f32) -> Option<BadBlock> {
    let block_index = blocks.iter().position(|bytes| !value(bytes).is_finite())?;
    let kind = if value(&blocks[block_index]).is_nan() { "NaN" } else { "infinite" };
    Some(BadBlock { block_index, problem: format!("the value is {kind}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Around every half-precision and BF16 rounding boundary that a stride through all floats meets.
    fn samples() -> Vec<f32> {
        let strided = (0..=u32::MAX).step_by(65521).map(f32::from_bits);
        let edges =
            [0.0, -0.0, 1.0 + 1.0 / 2048.0, 65504.0, 65519.9, 65520.0, 6e-8, 2.9e-8, 3e-8, 1e-40, f32::MAX];
        strided.chain(edges).filter(|v| !v.is_nan()).collect()
    }

    #[test]
    fn narrowing_equals_the_half_crate_at_every_level() {
        let row = samples();
        for level in [Level::Scalar, Level::detect()] {
            let guide = Guide { level, ..Guide::default() };
            let mut bytes = vec![0; 2 * row.len()];
            F16.quantizer(guide).unwrap().quantize_row(&row, &mut bytes);
            for (value, found) in row.iter().zip(bytes.as_chunks().0) {
                assert_eq!(*found, f16::from_f32(*value).to_le_bytes(), "F16 of {value:e}");
            }
            Bf16.quantizer(guide).unwrap().quantize_row(&row, &mut bytes);
            for (value, found) in row.iter().zip(bytes.as_chunks().0) {
                assert_eq!(*found, bf16::from_f32(*value).to_le_bytes(), "BF16 of {value:e}");
            }
        }
    }

    #[test]
    fn every_half_precision_number_widens_exactly() {
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut row = vec![0.0; 1 << 16];
        F16.dequantize(&bytes, &mut row);
        for (bits, value) in (0..=u16::MAX).zip(&row) {
            assert_eq!(value.to_bits(), f16::from_bits(bits).to_f32().to_bits());
        }
        Bf16.dequantize(&bytes, &mut row);
        for (bits, value) in (0..=u16::MAX).zip(&row) {
            assert_eq!(value.to_bits(), u32::from(bits) << 16);
        }
    }

    #[test]
    fn infinities_and_nans_are_found() {
        let bytes: Vec<u8> = [1.0, f32::NAN].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(
            F32.first_bad_block(&bytes),
            Some(BadBlock { block_index: 1, problem: "the value is NaN".into() })
        );
        assert_eq!(F16.first_bad_block(&[0, 0, 0, 0x7C]).unwrap().block_index, 1);
        assert_eq!(Bf16.first_bad_block(&[0x80, 0x7F]).unwrap().problem, "the value is infinite");
        assert_eq!(Bf16.first_bad_block(&[0x7F, 0x7F]), None);
    }
}
