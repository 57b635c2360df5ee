//! What the formats share: walking over whole blocks, and running a block's code over a row at a level.

use std::marker::PhantomData;

use half::f16;

use super::{BadBlock, BlockFormat, Guide, RowQuantizer};
use crate::simd::{Kernel, Lanes, Level};

/// The half-precision number in the first two bytes.
#[inline(always)]
pub(super) fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// A format as one block's code; [`BlockFormat`] follows from it.
pub(super) trait Block<const VALUES: usize, const BYTES: usize>: Sync + 'static {
    /// Widens one block. Marked `#[inline(always)]`.
    fn dequantize(block: &[u8; BYTES], values: &mut [f32; VALUES]);

    /// What no sound file holds in this block's scales, if anything.
    fn problem(block: &[u8; BYTES]) -> Option<String>;

    /// Whether the quantizer weighs errors with the importance of their columns.
    const USES_IMPORTANCE: bool = false;

    /// The format's quantizer, where it has one.
    fn quantizer(guide: Guide<'_>) -> Option<Box<dyn RowQuantizer + '_>> {
        let _ = guide;
        None
    }
}

/// A format made of [`Block`]s.
pub(super) struct Blocks<F, const VALUES: usize, const BYTES: usize>(PhantomData<fn() -> F>);

impl<F, const VALUES: usize, const BYTES: usize> Blocks<F, VALUES, BYTES> {
    pub(super) const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<F: Block<VALUES, BYTES>, const VALUES: usize, const BYTES: usize> BlockFormat
    for Blocks<F, VALUES, BYTES>
{
    fn uses_importance(&self) -> bool {
        F::USES_IMPORTANCE
    }

    fn dequantize(&self, blocks: &[u8], row: &mut [f32]) {
        Level::detect().run(Dequantize::<F, VALUES, BYTES> { blocks, row, format: PhantomData });
    }

    fn quantizer<'a>(&self, guide: Guide<'a>) -> Option<Box<dyn RowQuantizer + 'a>> {
        F::quantizer(guide)
    }

    fn first_bad_block(&self, blocks: &[u8]) -> Option<BadBlock> {
        let (blocks, _) = blocks.as_chunks();
        let problem =
            |(block_index, block)| F::problem(block).map(|problem| BadBlock { block_index, problem });
        blocks.iter().enumerate().find_map(problem)
    }
}

struct Dequantize<'a, F, const VALUES: usize, const BYTES: usize> {
    blocks: &'a [u8],
    row: &'a mut [f32],
    format: PhantomData<F>,
}

impl<F: Block<VALUES, BYTES>, const VALUES: usize, const BYTES: usize> Kernel
    for Dequantize<'_, F, VALUES, BYTES>
{
    type Output = ();

    /// The lanes are not used: the compiler vectorises the plain loops for their instruction set.
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (blocks, spare_bytes) = self.blocks.as_chunks();
        let (rows, spare_values) = self.row.as_chunks_mut();
        assert!(
            spare_bytes.is_empty() && spare_values.is_empty() && blocks.len() == rows.len(),
            "bytes and values do not belong to the same number of whole blocks"
        );
        for (block, values) in blocks.iter().zip(rows) {
            F::dequantize(block, values);
        }
    }
}

/// A quantizer as one block's code, written once over the lanes.
pub(super) trait QuantizeBlock<const VALUES: usize, const BYTES: usize>: Sync {
    /// Quantizes one block. `importance`: that of the block's columns. Marked `#[inline(always)]`.
    fn quantize<L: Lanes>(
        guide: &Guide<'_>,
        values: &[f32; VALUES],
        importance: Option<&[f32; VALUES]>,
        block: &mut [u8; BYTES],
    );
}

/// The row quantizer of a [`QuantizeBlock`].
pub(super) fn by_block<'a, Q, const VALUES: usize, const BYTES: usize>(
    guide: Guide<'a>,
) -> Box<dyn RowQuantizer + 'a>
where
    Q: QuantizeBlock<VALUES, BYTES> + 'a,
{
    Box::new(ByBlock::<'a, Q, VALUES, BYTES> { guide, quantizer: PhantomData })
}

struct ByBlock<'a, Q, const VALUES: usize, const BYTES: usize> {
    guide: Guide<'a>,
    quantizer: PhantomData<fn() -> Q>,
}

impl<Q: QuantizeBlock<VALUES, BYTES>, const VALUES: usize, const BYTES: usize> RowQuantizer
    for ByBlock<'_, Q, VALUES, BYTES>
{
    fn quantize_row(&self, row: &[f32], blocks: &mut [u8]) {
        self.guide.level.run(QuantizeRow::<Q, VALUES, BYTES> {
            guide: &self.guide,
            row,
            blocks,
            quantizer: PhantomData,
        });
    }
}

struct QuantizeRow<'a, Q, const VALUES: usize, const BYTES: usize> {
    guide: &'a Guide<'a>,
    row: &'a [f32],
    blocks: &'a mut [u8],
    quantizer: PhantomData<Q>,
}

impl<Q: QuantizeBlock<VALUES, BYTES>, const VALUES: usize, const BYTES: usize> Kernel
    for QuantizeRow<'_, Q, VALUES, BYTES>
{
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (rows, spare_values) = self.row.as_chunks();
        let (blocks, spare_bytes) = self.blocks.as_chunks_mut();
        assert!(
            spare_bytes.is_empty() && spare_values.is_empty() && blocks.len() == rows.len(),
            "values and bytes do not belong to the same number of whole blocks"
        );
        let importance = self.guide.importance.map(|importance| {
            assert_eq!(importance.len(), self.row.len(), "one importance a column");
            importance.as_chunks().0
        });
        for (index, (values, block)) in rows.iter().zip(blocks).enumerate() {
            Q::quantize::<L>(self.guide, values, importance.map(|chunks| &chunks[index]), block);
        }
    }
}

/// The problem of scales that are not finite, by name.
pub(super) fn not_finite<const N: usize>(scales: [(&str, f32); N]) -> Option<String> {
    let (name, value) = scales.into_iter().find(|(_, value)| !value.is_finite())?;
    let kind = if value.is_nan() { "NaN" } else { "infinite" };
    Some(format!("scale `{name}` is {kind}"))
}
