//! Exact decoding of stored values to `f32`, and of FP4 to MXFP4 blocks without loss.
//!
//! Every FP8 and FP4 value times a power of two is exact in `f32`. Codes that stand for no number (E4M3 NaN, E8M0 255)
//! become NaN here; callers look for values that are not finite afterwards and say where they came from.

use super::layout::{FP4_SCALE_VALUES, ScaleGrid};

/// Bytes of FP4 codes that share a scale.
const FP4_SCALE_BYTES: usize = FP4_SCALE_VALUES as usize / 2;
/// Bytes of an MXFP4 block: the scale's exponent and 32 codes.
pub(super) const MXFP4_BLOCK_BYTES: usize = 1 + FP4_SCALE_BYTES;

/// Values of all E4M3 bytes.
static E4M3: [f32; 256] = e4m3_values();
/// Values of all E8M0 bytes: `2^(byte - 127)`; 255 is no number.
static E8M0: [f32; 256] = e8m0_values();
/// Values of both codes of a byte of packed FP4, low nibble first.
static E2M1_PAIRS: [[f32; 2]; 256] = e2m1_pairs();

const fn e4m3_values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
        let magnitude = if exponent == 15 && mantissa == 7 {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 / 512.0
        } else {
            // (8 + mantissa) / 8 * 2^(exponent - 7), the power of two written as bits.
            (8 + mantissa) as f32 / 8.0 * f32::from_bits((exponent as u32 + 120) << 23)
        };
        values[code] = if code >= 128 { -magnitude } else { magnitude };
        code += 1;
    }
    values
}

const fn e8m0_values() -> [f32; 256] {
    let mut values = [f32::NAN; 256];
    // 2^-127 is below the normal numbers, so its bits are no exponent.
    values[0] = f32::from_bits(0x0040_0000);
    let mut byte = 1;
    while byte < 255 {
        values[byte] = f32::from_bits((byte as u32) << 23);
        byte += 1;
    }
    values
}

const fn e2m1_pairs() -> [[f32; 2]; 256] {
    const VALUES: [f32; 16] =
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [VALUES[byte & 15], VALUES[byte >> 4]];
        byte += 1;
    }
    pairs
}

/// Decodes the scales of one row of a grid.
pub(super) fn scales(grid: ScaleGrid, bytes: &[u8], out: &mut [f32]) {
    if grid.is_exponent { exponents(bytes, out) } else { f32s(bytes, out) }
}

/// Decodes E8M0 scales.
pub(crate) fn exponents(bytes: &[u8], out: &mut [f32]) {
    for (out, &byte) in out.iter_mut().zip(bytes) {
        *out = E8M0[byte as usize];
    }
}

/// Decodes a row of E4M3 bytes; `scales`: one for `block_columns` of them.
pub(crate) fn fp8_row(codes: &[u8], scales: &[f32], block_columns: usize, out: &mut [f32]) {
    for ((out, codes), &scale) in out.chunks_mut(block_columns).zip(codes.chunks(block_columns)).zip(scales) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = E4M3[code as usize] * scale;
        }
    }
}

/// Decodes a row of packed FP4; `scales`: one for 32 values.
pub(crate) fn fp4_row(packed: &[u8], scales: &[f32], out: &mut [f32]) {
    let blocks = out.as_chunks_mut::<{ FP4_SCALE_VALUES as usize }>().0.iter_mut();
    for ((out, packed), &scale) in blocks.zip(packed.as_chunks::<FP4_SCALE_BYTES>().0).zip(scales) {
        for (out, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
            let [low, high] = E2M1_PAIRS[byte as usize];
            *out = [low * scale, high * scale];
        }
    }
}

/// Widens bfloat16.
pub(crate) fn bf16s(bytes: &[u8], out: &mut [f32]) {
    for (out, &[a, b]) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = f32::from_bits(u32::from(u16::from_le_bytes([a, b])) << 16);
    }
}

/// Widens IEEE half precision.
pub(super) fn f16s(bytes: &[u8], out: &mut [f32]) {
    for (out, &pair) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = half::f16::from_le_bytes(pair).to_f32();
    }
}

/// Reads single precision.
pub(crate) fn f32s(bytes: &[u8], out: &mut [f32]) {
    for (out, &four) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *out = f32::from_le_bytes(four);
    }
}

/// Position of the first value that is not finite.
pub(super) fn first_not_finite(row: &[f32]) -> Option<usize> {
    const EXPONENT: u32 = 0x7f80_0000;
    // No early exit, so that the common case, none, runs on vectors.
    let any = row.iter().fold(false, |any, x| any | (x.to_bits() & EXPONENT == EXPONENT));
    if any { row.iter().position(|x| !x.is_finite()) } else { None }
}

/// Repacks a row of packed FP4 with its E8M0 scales as MXFP4 blocks, without loss.
///
/// A block is the scale byte, then 16 bytes whose low nibbles are values 0 to 15 and whose high nibbles are values 16 to 31.
/// The source has neighbours in one byte. The scale byte stays: MXFP4 doubles its codes and biases its exponent by one more.
pub(crate) fn fp4_row_to_mxfp4(packed: &[u8], scale_bytes: &[u8], out: &mut [u8]) {
    const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    let blocks = out.as_chunks_mut::<MXFP4_BLOCK_BYTES>().0.iter_mut();
    for ((block, packed), &scale) in blocks.zip(packed.as_chunks::<8>().0.as_chunks::<2>().0).zip(scale_bytes)
    {
        let first = u64::from_le_bytes(packed[0]);
        let second = u64::from_le_bytes(packed[1]);
        let even = (first & LOW) | ((second & LOW) << 4);
        let odd = ((first >> 4) & LOW) | (second & !LOW);
        block[0] = scale;
        for (i, (even, odd)) in even.to_le_bytes().into_iter().zip(odd.to_le_bytes()).enumerate() {
            block[1 + 2 * i] = even;
            block[2 + 2 * i] = odd;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_vectors::{fixtures, golden_arrays};

    fn same(ours: f32, golden: f32) -> bool {
        ours.to_bits() == golden.to_bits() || (ours.is_nan() && golden.is_nan())
    }

    #[test]
    fn every_code_of_the_native_formats_has_the_independent_value() {
        let Some(folder) = fixtures("native formats") else { return };
        let golden = golden_arrays(&folder.join("golden/quants/native_formats.safetensors"));
        for (code, value) in golden["e4m3_all256"].f32().into_iter().enumerate() {
            assert!(same(E4M3[code], value), "E4M3 {code:#x}: {} {value}", E4M3[code]);
        }
        for (byte, value) in golden["e8m0_all255"].f32().into_iter().enumerate() {
            assert!(same(E8M0[byte], value), "E8M0 {byte}: {} {value}", E8M0[byte]);
        }
        for (code, value) in golden["e2m1_all16"].f32().into_iter().enumerate() {
            assert!(same(E2M1_PAIRS[code][0], value) && same(E2M1_PAIRS[code << 4][1], value), "E2M1 {code}");
        }
        assert!(E8M0[255].is_nan());
    }

    #[test]
    fn scaled_values_are_exact_at_the_ends_of_the_exponent() {
        let mut out = [0.0; 2];
        fp8_row(&[0x01, 0x80], &[E8M0[0]], 2, &mut out);
        assert_eq!(f64::from(out[0]), 2_f64.powi(-9 - 127));
        assert_eq!(out[1].to_bits(), (-0.0_f32).to_bits());
        fp8_row(&[0x38, 0x7e], &[E8M0[254]], 2, &mut out);
        assert_eq!(f64::from(out[0]), 2_f64.powi(127));
        assert_eq!(first_not_finite(&out), Some(1), "448 * 2^127 does not fit");
    }

    #[test]
    fn a_repacked_row_has_value_j_and_value_j_plus_16_in_byte_j() {
        let packed: Vec<u8> = (0..32).map(|i| (i * 37 + 11) as u8).collect();
        let mut out = [0; 2 * MXFP4_BLOCK_BYTES];
        fp4_row_to_mxfp4(&packed, &[120, 7], &mut out);
        let code = |i: usize| (packed[i / 2] >> (4 * (i % 2))) & 15;
        for block in 0..2 {
            assert_eq!(out[block * MXFP4_BLOCK_BYTES], [120, 7][block]);
            for j in 0..16 {
                let byte = out[block * MXFP4_BLOCK_BYTES + 1 + j];
                assert_eq!((byte & 15, byte >> 4), (code(block * 32 + j), code(block * 32 + j + 16)));
            }
        }
    }
}
