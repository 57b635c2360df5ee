//! Parts of formats for quantizers that choose scales and codes themselves.

use half::f16;

use super::{codebook, iq2_xxs, mxfp4, q2_k, q4_k};

pub(crate) use iq2_xxs::{ENTRIES, HALVES, MAGNITUDES, N_HALVES, N_LOW};

/// `d`, `dmin`, scales and minimums of a Q2_K block.
pub(crate) fn read_q2_k(block: &[u8]) -> (f16, f16, [u8; 16], [u8; 16]) {
    let scales = std::array::from_fn(|b| block[b] & 15);
    let minimums = std::array::from_fn(|b| block[b] >> 4);
    (codebook::read_f16(&block[80..]), codebook::read_f16(&block[82..]), scales, minimums)
}

/// Lays out a Q2_K block.
pub(crate) fn write_q2_k(
    d: f16,
    dmin: f16,
    scales: &[u8; 16],
    minimums: &[u8; 16],
    codes: &[u8; 256],
    block: &mut [u8],
) {
    for b in 0..16 {
        block[b] = scales[b] | minimums[b] << 4;
    }
    q2_k::pack_pairs(codes, &mut block[16..80]);
    block[80..82].copy_from_slice(&d.to_le_bytes());
    block[82..84].copy_from_slice(&dmin.to_le_bytes());
}

/// `d`, `dmin`, scales and minimums (the first eight of each) of a Q4_K block.
pub(crate) fn read_q4_k(block: &[u8]) -> (f16, f16, [u8; 16], [u8; 16]) {
    let (mut scales, mut minimums) = ([0; 16], [0; 16]);
    for b in 0..8 {
        (scales[b], minimums[b]) = q4_k::unpack_scale(&block[4..16], b);
    }
    (codebook::read_f16(block), codebook::read_f16(&block[2..]), scales, minimums)
}

/// Lays out a Q4_K block.
pub(crate) fn write_q4_k(
    d: f16,
    dmin: f16,
    scales: &[u8; 16],
    minimums: &[u8; 16],
    codes: &[u8; 256],
    block: &mut [u8],
) {
    q4_k::pack_head(d, dmin, scales, minimums, &mut block[..16]);
    q4_k::pack_nibbles(codes, &mut block[16..]);
}

/// 2^(e - 128): half the scale of an MXFP4 block, for doubled values.
pub(crate) fn mxfp4_half_scale(e: u8) -> f32 {
    mxfp4::half_scale(e)
}

/// `d` and scale indices (the first eight) of an IQ2_XXS block.
pub(crate) fn read_iq2_xxs(block: &[u8]) -> (f16, [u8; 16]) {
    let mut scales = [0; 16];
    for (group, scale) in scales.iter_mut().take(8).enumerate() {
        *scale = (codebook::read_u32(block, 6 + 8 * group) >> 28) as u8;
    }
    (codebook::read_f16(block), scales)
}

/// Lays out an IQ2_XXS block. `eight`: number of the entry, and the signs (bit set: negative, their number even) of eight values.
pub(crate) fn write_iq2_xxs(d: f16, scales: &[u8; 16], eight: impl Fn(usize) -> (u8, u8), block: &mut [u8]) {
    block[..2].copy_from_slice(&d.to_le_bytes());
    for (group, bytes) in block[2..].chunks_exact_mut(8).enumerate() {
        let mut word = u32::from(scales[group]) << 28;
        for k in 0..4 {
            let (entry, negative) = eight(4 * group + k);
            bytes[k] = entry;
            word |= u32::from(negative & 127) << (7 * k);
        }
        bytes[4..].copy_from_slice(&word.to_le_bytes());
    }
}

/// Magnitude `i` of an IQ2_XXS entry.
#[inline(always)]
pub(crate) fn magnitude(entry: u8, i: usize) -> f32 {
    MAGNITUDES[(iq2_xxs::CODES[usize::from(entry)] >> (3 * i) & 3) as usize]
}
