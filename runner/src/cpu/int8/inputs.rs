//! Inputs of matrix products, rounded where ggml's CPU code rounds them, so that both read a file alike.

use gguf_tools::block::BlockType;
use gguf_tools::simd::{Lanes, Level};
use half::{bf16, f16};

use super::for_levels;
use super::wide::Wide;

/// How the inputs of a matrix are rounded, by the type of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputRounding {
    /// To half precision, as for F16.
    Half,
    /// To the upper half of single precision, as for BF16.
    Brain,
    /// To 8 bits, 32 values with one scale in half precision (ggml's Q8_0).
    Of32,
    /// To 8 bits, 256 values with one scale in single precision (ggml's Q8_K).
    Of256,
}

impl InputRounding {
    /// How many ways there are.
    pub(in crate::cpu) const COUNT: usize = Self::Of256 as usize + 1;

    /// What ggml does to the inputs of a matrix of this type; nothing for F32.
    ///
    /// Q4_1 and Q5_1 are taken with Q8_0's rounding. ggml rounds the sum that goes with their minimum once more.
    pub fn of(block_type: BlockType) -> Option<Self> {
        match (block_type, block_type.values_per_block()) {
            (BlockType::F16, _) => Some(Self::Half),
            (BlockType::Bf16, _) => Some(Self::Brain),
            (_, 256) => Some(Self::Of256),
            (_, 32 | 64) => Some(Self::Of32),
            _ => None,
        }
    }

    /// Inputs that are rounded together.
    pub fn group_values(self) -> usize {
        match self {
            Self::Half | Self::Brain => 1,
            Self::Of32 => 32,
            Self::Of256 => 256,
        }
    }

    /// The rounded inputs as `f32`. `values`: rows whose width is a multiple of [`InputRounding::group_values`].
    pub fn rounded(self, level: Level, values: &[f32]) -> Vec<f32> {
        match self {
            Self::Half => values.iter().map(|&v| f16::from_f32(v).to_f32()).collect(),
            Self::Brain => values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect(),
            Self::Of32 | Self::Of256 => {
                Int8Rows::new(level, values, values.len(), self.group_values()).values()
            }
        }
    }
}

/// Thirty-two inputs rounded to 8 bits: `value = scale * i`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group32 {
    pub(super) scale: f32,
    pub(super) values: [i8; 32],
}

/// A super-block of inputs rounded to 8 bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group256 {
    pub(super) scale: f32,
    pub(super) values: [i8; 256],
    /// Sums of sixteen values each.
    pub(super) sums: [i16; 16],
}

/// Inputs rounded to 8 bits, in groups that share a scale.
#[derive(Debug, Clone)]
pub struct Int8Rows {
    pub(super) groups: Groups,
    pub(super) groups_per_row: usize,
}

#[derive(Debug, Clone)]
pub(super) enum Groups {
    Of32(Vec<Group32>),
    Of256(Vec<Group256>),
}

impl Int8Rows {
    /// Rounds rows: within a group the largest magnitude becomes 127, ties go to even.
    ///
    /// The scale of 32 values is `largest / 127` in half precision, that of 256 is `1 / (127 / largest)`: ggml's
    /// Q8_0 (as its vector code makes it, not its reference code, which sends ties away from zero) and Q8_K.
    ///
    /// `values`: `[rows, width]`; `width` a multiple of `group_values`, which is 32 or 256.
    pub fn new(level: Level, values: &[f32], width: usize, group_values: usize) -> Self {
        let groups = if group_values == 32 {
            let groups = values.as_chunks::<32>().0.iter().map(|values| {
                let mut group = Group32 { scale: 0.0, values: [0; 32] };
                let largest = round_group(level, values, &mut group.values);
                group.scale = f16::from_f32(largest / 127.0).to_f32();
                group
            });
            Groups::Of32(groups.collect())
        } else {
            let groups = values.as_chunks::<256>().0.iter().map(|values| {
                let mut group = Group256 { scale: 0.0, values: [0; 256], sums: [0; 16] };
                let largest = round_group(level, values, &mut group.values);
                group.scale = if largest == 0.0 { 0.0 } else { 1.0 / (127.0 / largest) };
                for (sum, values) in group.sums.iter_mut().zip(group.values.as_chunks::<16>().0) {
                    *sum = values.iter().map(|&v| i16::from(v)).sum();
                }
                group
            });
            Groups::Of256(groups.collect())
        };
        Self { groups, groups_per_row: width / group_values }
    }

    /// Scale and integers of every group.
    pub(super) fn groups(&self) -> Vec<(f32, &[i8])> {
        match &self.groups {
            Groups::Of32(groups) => groups.iter().map(|g| (g.scale, &g.values[..])).collect(),
            Groups::Of256(groups) => groups.iter().map(|g| (g.scale, &g.values[..])).collect(),
        }
    }

    /// The rounded inputs as `f32`.
    fn values(&self) -> Vec<f32> {
        let groups = self.groups().into_iter();
        groups.flat_map(|(scale, values)| values.iter().map(move |&v| scale * f32::from(v))).collect()
    }
}

for_levels!(round_group = round_group_in(values: &[f32], out: &mut [i8]) -> f32);

/// Returns the largest magnitude. All zeros if that is zero.
#[inline(always)]
fn round_group_in<W: Wide>(values: &[f32], out: &mut [i8]) -> f32 {
    let mut largest = W::Floats::splat(0.0);
    for eight in values.as_chunks::<8>().0 {
        largest = W::Floats::load(eight).abs().max(largest);
    }
    let mut lanes = [0.0_f32; 8];
    largest.store(&mut lanes);
    let largest = lanes.iter().fold(0.0_f32, |a, &b| a.max(b));
    let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
    for (out, eight) in out.as_chunks_mut::<8>().0.iter_mut().zip(values.as_chunks::<8>().0) {
        let rounded = (W::Floats::load(eight) * W::Floats::splat(inverse)).round().to_i32();
        for i in 0..8 {
            out[i] = rounded[i] as i8;
        }
    }
    largest
}
