//! Products of quantized rows with 8-bit inputs that add in the order of ggml's plain C code: block after block in one
//! `f32`, and for Q4_K and Q6_K in eight, one for every eighth value. Written for equality, not for speed.

use gguf_tools::block::BlockType;
use half::f16;

use super::formats::{E2M1_TWICE, e8m0_half, iq2_xxs_grid, six_bit_pairs};
use super::inputs::{Group32, Group256, Groups, Int8Rows};
use super::wide::even_signs;

/// Every product of rows (as bytes) with rounded inputs.
pub(super) type Products = fn(&[u8], &Int8Rows, &mut [f32]);

/// One line of the table.
macro_rules! plain_products {
    ($name:ident, $bytes:literal, $groups:ident) => {
        |blocks, inputs, out| {
            let Groups::$groups(groups) = &inputs.groups else { return };
            let n = inputs.groups_per_row;
            let rows = blocks.as_chunks::<$bytes>().0.chunks_exact(n);
            for (row, out) in rows.zip(out.chunks_exact_mut(groups.len() / n)) {
                for (x, out) in groups.chunks_exact(n).zip(out) {
                    *out = $name(row, x);
                }
            }
        }
    };
}

/// The products of a block type, if it has any.
pub(super) fn products(block_type: BlockType) -> Option<Products> {
    Some(match block_type {
        BlockType::Q8_0 => plain_products!(q8_0, 34, Of32),
        BlockType::Mxfp4 => plain_products!(mxfp4, 17, Of32),
        BlockType::Q2K => plain_products!(q2_k, 84, Of256),
        BlockType::Q4K => plain_products!(q4_k, 144, Of256),
        BlockType::Q6K => plain_products!(q6_k, 210, Of256),
        BlockType::Iq2Xxs => plain_products!(iq2_xxs, 66, Of256),
        _ => return None,
    })
}

/// Rounds 32 values as ggml's reference code does: by the inverse of the `f32` scale, ties away from zero.
pub(super) fn round_32(values: &[f32; 32]) -> Group32 {
    let largest = values.iter().fold(0.0_f32, |a, v| a.max(v.abs()));
    let scale = largest / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    Group32 { scale: f16::from_f32(scale).to_f32(), values: values.map(|v| (v * inverse).round() as i8) }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Sum of products.
fn dot(a: impl Iterator<Item = i32>, x: &[i8]) -> i32 {
    a.zip(x).map(|(a, &x)| a * i32::from(x)).sum()
}

fn q8_0(blocks: &[[u8; 34]], x: &[Group32]) -> f32 {
    blocks.iter().zip(x).fold(0.0, |all, (block, x)| {
        let sum = dot(block[2..].iter().map(|&b| i32::from(b as i8)), &x.values);
        all + sum as f32 * (half_at(block, 0) * x.scale)
    })
}

fn mxfp4(blocks: &[[u8; 17]], x: &[Group32]) -> f32 {
    blocks.iter().zip(x).fold(0.0, |all, (block, x)| {
        let codes = block[1..].iter().map(|b| b & 15).chain(block[1..].iter().map(|b| b >> 4));
        let sum = dot(codes.map(|code| i32::from(E2M1_TWICE[usize::from(code)])), &x.values);
        all + x.scale * e8m0_half(block[0]) * sum as f32
    })
}

fn q2_k(blocks: &[[u8; 84]], x: &[Group256]) -> f32 {
    blocks.iter().zip(x).fold(0.0, |all, (block, x)| {
        let (scales, codes) = block[..80].split_at(16);
        let below: i32 = scales.iter().zip(x.sums).map(|(s, sum)| i32::from(s >> 4) * i32::from(sum)).sum();
        let mut sum = 0;
        for (i, (scale, x)) in scales.iter().zip(x.values.as_chunks::<16>().0).enumerate() {
            // Sixteen values: half of 32 bytes, one of four pairs of bits.
            let codes = &codes[32 * (i / 8) + 16 * (i % 2)..][..16];
            let shift = 2 * (i % 8 / 2);
            sum += i32::from(scale & 15) * dot(codes.iter().map(|c| i32::from(c >> shift & 3)), x);
        }
        let (scale, minimum) = (x.scale * half_at(block, 80), x.scale * half_at(block, 82));
        all + (scale * sum as f32 - minimum * below as f32)
    })
}

/// `sums[l] += scale * a[8 i + l] * x[8 i + l]`, for all `i`.
fn add_eighths(sums: &mut [i32; 8], scale: i32, a: impl Iterator<Item = i32>, x: &[i8]) {
    for (i, (a, &x)) in a.zip(x).enumerate() {
        sums[i % 8] += scale * a * i32::from(x);
    }
}

fn q4_k(blocks: &[[u8; 144]], x: &[Group256]) -> f32 {
    let mut eighths = [0.0; 8];
    let mut all = 0.0;
    for (block, x) in blocks.iter().zip(x) {
        let (scales, minima) = six_bit_pairs(&block[4..16]);
        let mut sums = [0; 8];
        for (i, (&scale, x)) in scales.iter().zip(x.values.as_chunks::<32>().0).enumerate() {
            let codes = &block[16 + 32 * (i / 2)..][..32];
            add_eighths(&mut sums, scale.into(), codes.iter().map(|c| i32::from(c >> (4 * (i % 2)) & 15)), x);
        }
        let below: i32 = (0..16).map(|i| i32::from(minima[i / 2]) * i32::from(x.sums[i])).sum();
        let scale = half_at(block, 0) * x.scale;
        for (all, sum) in eighths.iter_mut().zip(sums) {
            *all += scale * sum as f32;
        }
        all -= half_at(block, 2) * x.scale * below as f32;
    }
    eighths.iter().fold(all, |all, sum| all + sum)
}

fn q6_k(blocks: &[[u8; 210]], x: &[Group256]) -> f32 {
    let mut eighths = [0.0; 8];
    for (block, x) in blocks.iter().zip(x) {
        let mut sums = [0; 8];
        for (i, (&scale, x)) in block[192..208].iter().zip(x.values.as_chunks::<16>().0).enumerate() {
            // Of 128 values, 64 bytes of low halves and 32 of upper bits: the quarter, and the half of its 32 values.
            let (half, quarter, first) = (i / 8, i % 8 / 2, 16 * (i % 2));
            let low = &block[64 * half + 32 * (quarter % 2) + first..][..16];
            let high = &block[128 + 32 * half + first..][..16];
            let code = |(low, high): (&u8, &u8)| {
                i32::from(low >> (4 * (quarter / 2)) & 15 | (high >> (2 * quarter) & 3) << 4) - 32
            };
            add_eighths(&mut sums, (scale as i8).into(), low.iter().zip(high).map(code), x);
        }
        let scale = half_at(block, 208) * x.scale;
        for (all, sum) in eighths.iter_mut().zip(sums) {
            *all += scale * sum as f32;
        }
    }
    eighths.iter().sum()
}

fn iq2_xxs(blocks: &[[u8; 66]], x: &[Group256]) -> f32 {
    let grid = iq2_xxs_grid();
    let all = blocks.iter().zip(x).fold(0.0, |all, (block, x)| {
        let mut sum = 0;
        for (group, x) in block[2..].as_chunks::<8>().0.iter().zip(x.values.as_chunks::<32>().0) {
            let word = u32::from_le_bytes([group[4], group[5], group[6], group[7]]);
            let signs = even_signs(word);
            let magnitudes = group[..4].iter().flat_map(|&entry| grid[usize::from(entry)].to_le_bytes());
            let signed = magnitudes
                .enumerate()
                .map(|(i, m)| if signs >> i & 1 == 1 { -i32::from(m) } else { i32::from(m) });
            sum += (2 * (word >> 28) + 1) as i32 * dot(signed, x);
        }
        all + half_at(block, 0) * x.scale * sum as f32
    });
    0.125 * all
}
