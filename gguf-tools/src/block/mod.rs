//! Block formats: how a row of weights lies in bytes.
//!
//! One file a format, one table (behind [`BlockType`]) that everything else asks: id, name, values and
//! bytes per block, and what can be computed with it. A format that is only sized (not computed)
//! still works in every command that copies or lists tensors.

mod affine;
mod codebook;
mod exact;
mod float;
mod grids;
mod iq2_xs;
mod iq2_xxs;
mod iq3_xxs;
mod iq4_nl;
mod layout;
mod mxfp4;
mod nvfp4;
pub(crate) mod parts;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_k;
mod q6_k;
mod q8_0;
mod registry;
mod super_block;
mod symmetric;

pub use registry::{BlockType, UnknownBlockType};

use crate::simd::Level;

/// The published constants of a format with a codebook, packed: in each entry of IQ2_XXS and IQ2_XS eight codes of two
/// bits (magnitudes 8, 25, 43), of IQ3_XXS four codes of three bits (magnitudes 4, 12, 20, 28, 36, 44, 52, 62).
/// The first value has the lowest bits. `None` for formats without a codebook.
pub fn codebook(block_type: BlockType) -> Option<&'static [u16]> {
    match block_type {
        BlockType::Iq2Xxs => Some(&grids::IQ2_XXS),
        BlockType::Iq2Xs => Some(&grids::IQ2_XS),
        BlockType::Iq3Xxs => Some(&grids::IQ3_XXS),
        _ => None,
    }
}

/// What one block format can compute. Stateless; one static value a format.
pub trait BlockFormat: Sync {
    /// Widens one row of blocks to `f32`.
    ///
    /// `blocks`: whole blocks; `row`: as many values as they hold, overwritten.
    /// Bit-equal to ggml's dequantization, in the order of operations of the format's definition.
    ///
    /// # Panics
    /// If the lengths do not belong together: they come from a checked plan or header.
    fn dequantize(&self, blocks: &[u8], row: &mut [f32]);

    /// A quantizer for rows that share one [`Guide`] (the rows of one matrix, of one expert),
    /// or `None` for a format that is only read.
    fn quantizer<'a>(&self, guide: Guide<'a>) -> Option<Box<dyn RowQuantizer + 'a>> {
        let _ = guide;
        None
    }

    /// Whether [`Guide::importance`] changes what the quantizer does.
    fn uses_importance(&self) -> bool {
        false
    }

    /// Whether the format is so coarse that importance of some kind must be given: without a matrix, weight energy.
    fn needs_importance(&self) -> bool {
        false
    }

    /// The first block whose scales are not finite or not allowed, with what is wrong; `None` if all are sound.
    fn first_bad_block(&self, blocks: &[u8]) -> Option<BadBlock> {
        let _ = blocks;
        None
    }
}

/// A block that no sound file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadBlock {
    /// Index of the block within the bytes given.
    pub block_index: usize,
    /// What is wrong: "scale `d` is NaN".
    pub problem: String,
}

/// Turns rows of one matrix into blocks. Shared by threads: a row's bytes depend on that row and the guide alone.
pub trait RowQuantizer: Sync {
    /// `row`: finite values, a multiple of the block's values; `blocks`: the row's bytes, overwritten.
    ///
    /// Never writes a NaN or infinite scale for finite input.
    fn quantize_row(&self, row: &[f32], blocks: &mut [u8]);
}

/// What a quantizer minimises, and with which instructions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Guide<'a> {
    /// Mean of the squared input of each column, `[columns]`; finite, not negative, not all zero. `None`: not known.
    pub importance: Option<&'a [f32]>,
    /// Which weighted error is minimised.
    pub objective: Objective,
    /// Factor on the stored scale that undoes the shrinkage of the least-squares fit; `None`: the format's own default.
    pub scale_gain: Option<f32>,
    /// Instruction set; results do not depend on it.
    pub level: Level,
}

/// Weights of the squared error that a quantizer minimises. `imp` is the importance of a value's column,
/// `x` the value, `m` the mean of `x^2` over its super-block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Objective {
    /// `imp`: the error of the matrix product itself, to first order.
    #[default]
    Importance,
    /// `imp * sqrt(m + x^2)`: what ggml's quantizers use.
    Ggml,
    /// `1`: every value alike, importance ignored.
    Flat,
}

impl Objective {
    /// Every objective with the name users type.
    pub const NAMES: [(&'static str, Self); 3] =
        [("importance", Self::Importance), ("ggml", Self::Ggml), ("flat", Self::Flat)];
}
