//! Products of quantized rows with 8-bit inputs.

use gguf_tools::block::BlockType;
use gguf_tools::simd::Level;

/// Inputs rounded to 8 bits.
pub(super) struct Int8Rows;

impl Int8Rows {
    pub(super) fn new(_: Level, _: &[f32], _: usize) -> Self {
        Self
    }
}

/// The product with 8-bit inputs for one block type.
#[derive(Debug, Clone, Copy)]
pub(super) enum Int8Dot {}

impl Int8Dot {
    pub(super) fn of(_: BlockType) -> Option<Self> {
        None
    }

    pub(super) fn products(self, _: Level, _: &[u8], _: &Int8Rows, _: &mut [f32]) {
        match self {}
    }
}
