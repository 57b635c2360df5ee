//! Thirty-two bytes that are worked on together, so that a product is written once and every
//! instruction set computes the same integers.
#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "vendor intrinsics; every use is reached through a function that has checked for AVX2"
    )
)]

use gguf_tools::simd::{Lanes, Scalar};

/// Bytes and the integers that their products sum up to. Lane `l` of eight belongs to bytes `4l` to `4l + 3`.
///
/// Only call the methods of an implementation inside a function compiled for its instruction set.
pub(super) trait Wide: Copy {
    /// Thirty-two bytes.
    type Bytes: Copy;
    /// Eight 32-bit sums.
    type Sums: Copy;
    /// Sixteen scales of 8 bits.
    type Scales: Copy;
    /// Eight `f32`.
    type Floats: Lanes;

    fn load(from: &[u8; 32]) -> Self::Bytes;
    fn load_signed(from: &[i8; 32]) -> Self::Bytes;
    /// Low halves of sixteen bytes, then their high halves.
    fn nibbles(from: &[u8; 16]) -> Self::Bytes;
    /// Four words of eight bytes.
    fn words(from: [u64; 4]) -> Self::Bytes;
    /// `(byte >> shift) & mask`; the mask must leave no more than `8 - shift` bits.
    fn field<const SHIFT: i32>(bytes: Self::Bytes, mask: u8) -> Self::Bytes;
    /// `low | (high << 4)`, for bytes below 16 and 4.
    fn join(low: Self::Bytes, high: Self::Bytes) -> Self::Bytes;
    /// `table[byte]`, for bytes below 16.
    fn lookup(table: &[i8; 16], bytes: Self::Bytes) -> Self::Bytes;
    /// Negates byte `i` where bit `i` is set; no byte is -128.
    fn negate_where(bytes: Self::Bytes, bits: u32) -> Self::Bytes;
    /// No sums yet.
    fn zero() -> Self::Sums;
    /// Adds the products of all bytes times a scale, given [`doubled`].
    /// `a` is unsigned, `b` signed, and two neighbouring products fit 16 bits together.
    fn add_products(sums: Self::Sums, a: Self::Bytes, b: Self::Bytes, scale: u32) -> Self::Sums;
    fn scales(all: &[i8; 16]) -> Self::Scales;
    /// As [`Wide::add_products`], with scale `2 I` for the first sixteen bytes and `2 I + 1` for the others. Without
    /// `SIGNED` no scale is negative.
    fn add_scaled<const I: usize, const SIGNED: bool>(
        sums: Self::Sums,
        a: Self::Bytes,
        b: Self::Bytes,
        scales: Self::Scales,
    ) -> Self::Sums;
    /// Of each of eight groups of eight bytes, the second four being a word: [`even_signs`] of the word, and
    /// `2s + 1` [`doubled`], `s` being its upper four bits.
    fn signs_and_scales(groups: &[u8; 64]) -> [[u32; 8]; 2];
    /// Products of signed bytes; no byte of `b` is -128.
    fn signed_products(a: Self::Bytes, b: Self::Bytes) -> Self::Sums;
    /// Lane `l`: `factors[2l] * values[2l] + factors[2l + 1] * values[2l + 1]`, times `2^SHIFT`.
    fn sixteen<const SHIFT: i32>(factors: &[i8; 16], values: &[i16; 16]) -> Self::Sums;
    fn subtract(a: Self::Sums, b: Self::Sums) -> Self::Sums;
    fn floats(sums: Self::Sums) -> Self::Floats;
    /// The value of a half-precision number.
    fn half(bits: u16) -> f32;
    /// Eight half-precision numbers.
    fn halves(from: &[u8; 16]) -> Self::Floats;
    /// Eight BF16 numbers.
    fn brains(from: &[u8; 16]) -> Self::Floats;
}

/// A scale as [`Wide::add_products`] takes it: in both halves of a word.
#[inline(always)]
pub(super) const fn doubled(scale: u8) -> u32 {
    scale as u32 * 0x0001_0001
}

/// Spreads four times seven sign bits over the bytes of a word; the eighth of each makes their number even.
#[inline(always)]
pub(super) fn even_signs(word: u32) -> u32 {
    let seven = (word & 0x7f) | (word & 0x3f80) << 1 | (word & 0x001f_c000) << 2 | (word & 0x0fe0_0000) << 3;
    let mut parity = seven ^ (seven >> 4);
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    seven | (parity & 0x0101_0101) << 7
}

/// Sum of the products of unsigned with signed bytes in a lane.
fn four_products(a: &[u8; 32], b: &[u8; 32], lane: usize) -> i32 {
    (4 * lane..4 * lane + 4).map(|i| i32::from(a[i]) * i32::from(b[i] as i8)).sum()
}

/// Plain Rust, the oracle.
#[derive(Clone, Copy)]
pub(super) struct Plain;

impl Wide for Plain {
    type Bytes = [u8; 32];
    type Sums = [i32; 8];
    type Scales = [i8; 16];
    type Floats = Scalar;

    fn load(from: &[u8; 32]) -> [u8; 32] {
        *from
    }
    fn load_signed(from: &[i8; 32]) -> [u8; 32] {
        from.map(|v| v as u8)
    }
    fn nibbles(from: &[u8; 16]) -> [u8; 32] {
        std::array::from_fn(|i| if i < 16 { from[i] & 15 } else { from[i - 16] >> 4 })
    }
    fn words(from: [u64; 4]) -> [u8; 32] {
        std::array::from_fn(|i| from[i / 8].to_le_bytes()[i % 8])
    }
    fn field<const SHIFT: i32>(bytes: [u8; 32], mask: u8) -> [u8; 32] {
        bytes.map(|b| (b >> SHIFT) & mask)
    }
    fn join(low: [u8; 32], high: [u8; 32]) -> [u8; 32] {
        std::array::from_fn(|i| low[i] | high[i] << 4)
    }
    fn lookup(table: &[i8; 16], bytes: [u8; 32]) -> [u8; 32] {
        bytes.map(|b| table[b as usize] as u8)
    }
    fn negate_where(bytes: [u8; 32], bits: u32) -> [u8; 32] {
        std::array::from_fn(|i| if bits >> i & 1 == 1 { bytes[i].wrapping_neg() } else { bytes[i] })
    }
    fn zero() -> [i32; 8] {
        [0; 8]
    }
    fn add_products(sums: [i32; 8], a: [u8; 32], b: [u8; 32], scale: u32) -> [i32; 8] {
        let scale = i32::from(scale as i16);
        std::array::from_fn(|l| sums[l] + scale * four_products(&a, &b, l))
    }
    fn scales(all: &[i8; 16]) -> [i8; 16] {
        *all
    }
    fn add_scaled<const I: usize, const SIGNED: bool>(
        sums: [i32; 8],
        a: [u8; 32],
        b: [u8; 32],
        scales: [i8; 16],
    ) -> [i32; 8] {
        std::array::from_fn(|l| sums[l] + i32::from(scales[2 * I + l / 4]) * four_products(&a, &b, l))
    }
    fn signs_and_scales(groups: &[u8; 64]) -> [[u32; 8]; 2] {
        let word = |i: usize| {
            let at = 8 * i + 4;
            u32::from_le_bytes([groups[at], groups[at + 1], groups[at + 2], groups[at + 3]])
        };
        [
            std::array::from_fn(|i| even_signs(word(i))),
            std::array::from_fn(|i| doubled((2 * (word(i) >> 28) + 1) as u8)),
        ]
    }
    fn signed_products(a: [u8; 32], b: [u8; 32]) -> [i32; 8] {
        std::array::from_fn(|l| {
            (4 * l..4 * l + 4).map(|i| i32::from(a[i] as i8) * i32::from(b[i] as i8)).sum()
        })
    }
    fn sixteen<const SHIFT: i32>(factors: &[i8; 16], values: &[i16; 16]) -> [i32; 8] {
        let product = |i: usize| i32::from(factors[i]) * i32::from(values[i]);
        std::array::from_fn(|l| (product(2 * l) + product(2 * l + 1)) << SHIFT)
    }
    fn subtract(a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        std::array::from_fn(|l| a[l] - b[l])
    }
    fn floats(sums: [i32; 8]) -> Scalar {
        Scalar::load(&sums.map(|v| v as f32))
    }
    fn half(bits: u16) -> f32 {
        half::f16::from_bits(bits).to_f32()
    }
    fn halves(from: &[u8; 16]) -> Scalar {
        let value = |i: usize| Self::half(u16::from_le_bytes([from[2 * i], from[2 * i + 1]]));
        Scalar::load(&std::array::from_fn::<f32, 8, _>(value))
    }
    fn brains(from: &[u8; 16]) -> Scalar {
        let value = |i: usize| f32::from_bits(u32::from_le_bytes([0, 0, from[2 * i], from[2 * i + 1]]));
        Scalar::load(&std::array::from_fn::<f32, 8, _>(value))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2Bytes, Avx512Bytes};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use gguf_tools::simd::Avx2;

    use super::Wide;

    /// AVX registers of 256 bits. Use only inside functions compiled for AVX2 and F16C, and with `MASKS` for AVX-512 (F,
    /// BW, VL), after their detection.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Registers<const MASKS: bool>;

    /// AVX2 and F16C.
    pub(in super::super) type Avx2Bytes = Registers<false>;
    /// AVX-512 besides: masks in registers of their own.
    pub(in super::super) type Avx512Bytes = Registers<true>;

    impl<const MASKS: bool> Wide for Registers<MASKS> {
        type Bytes = __m256i;
        type Sums = __m256i;
        type Scales = __m256i;
        type Floats = Avx2;

        #[inline(always)]
        fn load(from: &[u8; 32]) -> __m256i {
            // SAFETY: the caller runs on a machine with AVX2 (see the type); 32 bytes are there.
            unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
        }
        #[inline(always)]
        fn load_signed(from: &[i8; 32]) -> __m256i {
            // SAFETY: as for `load`.
            unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
        }
        #[inline(always)]
        fn nibbles(from: &[u8; 16]) -> __m256i {
            // SAFETY: as for `load`; 16 bytes are there.
            unsafe {
                let bytes = _mm_loadu_si128(from.as_ptr().cast());
                let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
                _mm256_and_si256(both, _mm256_set1_epi8(15))
            }
        }
        #[inline(always)]
        fn words(from: [u64; 4]) -> __m256i {
            // SAFETY: as for `load`.
            unsafe { _mm256_set_epi64x(from[3] as i64, from[2] as i64, from[1] as i64, from[0] as i64) }
        }
        #[inline(always)]
        fn field<const SHIFT: i32>(bytes: __m256i, mask: u8) -> __m256i {
            // SAFETY: as for `load`. Bits that cross from the byte above are masked away.
            unsafe { _mm256_and_si256(_mm256_srli_epi16::<SHIFT>(bytes), _mm256_set1_epi8(mask as i8)) }
        }
        #[inline(always)]
        fn join(low: __m256i, high: __m256i) -> __m256i {
            // SAFETY: as for `load`.
            unsafe { _mm256_or_si256(low, _mm256_slli_epi16::<4>(high)) }
        }
        #[inline(always)]
        fn lookup(table: &[i8; 16], bytes: __m256i) -> __m256i {
            // SAFETY: as for `load`; 16 bytes are there.
            unsafe {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                _mm256_shuffle_epi8(table, bytes)
            }
        }
        #[inline(always)]
        fn negate_where(bytes: __m256i, bits: u32) -> __m256i {
            if MASKS {
                // SAFETY: as for `load`, with AVX-512.
                return unsafe { _mm256_mask_sub_epi8(bytes, bits, _mm256_setzero_si256(), bytes) };
            }
            // SAFETY: as for `load`.
            unsafe {
                // Every byte sees the byte of `bits` that its bit is in, then that bit alone.
                let places = _mm256_set_epi64x(
                    0x0303030303030303,
                    0x0202020202020202,
                    0x0101010101010101,
                    0x0000000000000000,
                );
                let own_bit = _mm256_set1_epi64x(0x8040201008040201_u64 as i64);
                let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), places);
                let negative = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own_bit), own_bit);
                _mm256_sub_epi8(_mm256_xor_si256(bytes, negative), negative)
            }
        }
        #[inline(always)]
        fn zero() -> __m256i {
            // SAFETY: as for `load`.
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        fn add_products(sums: __m256i, a: __m256i, b: __m256i, scale: u32) -> __m256i {
            // SAFETY: as for `load`.
            unsafe {
                let scales = _mm256_set1_epi32(scale as i32);
                _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), scales))
            }
        }
        #[inline(always)]
        fn scales(all: &[i8; 16]) -> __m256i {
            // SAFETY: as for `load`; 16 bytes are there.
            unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(all.as_ptr().cast())) }
        }
        #[inline(always)]
        fn add_scaled<const I: usize, const SIGNED: bool>(
            sums: __m256i,
            a: __m256i,
            b: __m256i,
            scales: __m256i,
        ) -> __m256i {
            // SAFETY: as for `load`.
            unsafe {
                // Byte 2I below a zero in every place of the lower half, byte 2I + 1 in the upper one; with signs in
                // the upper byte of 16 bits, to be shifted down.
                let zero = if SIGNED { 0x0080_u16 } else { 0x8000 };
                let places = |byte: usize| {
                    let byte = byte as u16;
                    _mm_set1_epi16((zero | if SIGNED { byte << 8 } else { byte }) as i16)
                };
                let scales = _mm256_shuffle_epi8(scales, _mm256_set_m128i(places(2 * I + 1), places(2 * I)));
                let scales = if SIGNED { _mm256_srai_epi16::<8>(scales) } else { scales };
                _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), scales))
            }
        }
        #[inline(always)]
        fn signs_and_scales(groups: &[u8; 64]) -> [[u32; 8]; 2] {
            let mut out = [[0; 8]; 2];
            // SAFETY: as for `load`; 64 bytes are there, and `out` holds twice eight words.
            unsafe {
                let first = _mm256_loadu_ps(groups.as_ptr().cast());
                let second = _mm256_loadu_ps(groups.as_ptr().add(32).cast());
                // The odd words of both, back in order.
                let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0xdd>(first, second));
                let words = _mm256_permute4x64_epi64::<0xd8>(odd);
                let seven = _mm256_or_si256(
                    _mm256_or_si256(
                        _mm256_and_si256(words, _mm256_set1_epi32(0x7f)),
                        _mm256_and_si256(_mm256_slli_epi32::<1>(words), _mm256_set1_epi32(0x7f00)),
                    ),
                    _mm256_or_si256(
                        _mm256_and_si256(_mm256_slli_epi32::<2>(words), _mm256_set1_epi32(0x007f_0000)),
                        _mm256_and_si256(_mm256_slli_epi32::<3>(words), _mm256_set1_epi32(0x7f00_0000)),
                    ),
                );
                let parity = _mm256_xor_si256(seven, _mm256_srli_epi32::<4>(seven));
                let parity = _mm256_xor_si256(parity, _mm256_srli_epi32::<2>(parity));
                let parity = _mm256_xor_si256(parity, _mm256_srli_epi32::<1>(parity));
                let eighth = _mm256_slli_epi32::<7>(_mm256_and_si256(parity, _mm256_set1_epi32(0x0101_0101)));
                _mm256_storeu_si256(out[0].as_mut_ptr().cast(), _mm256_or_si256(seven, eighth));
                let scale = _mm256_srli_epi32::<28>(words);
                let scale = _mm256_or_si256(_mm256_slli_epi32::<1>(scale), _mm256_set1_epi32(1));
                let scales = _mm256_or_si256(scale, _mm256_slli_epi32::<16>(scale));
                _mm256_storeu_si256(out[1].as_mut_ptr().cast(), scales);
            }
            out
        }
        #[inline(always)]
        fn signed_products(a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: as for `load`.
            unsafe {
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
                _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
            }
        }
        #[inline(always)]
        fn sixteen<const SHIFT: i32>(factors: &[i8; 16], values: &[i16; 16]) -> __m256i {
            // SAFETY: as for `load`; 16 bytes and 16 values are there.
            unsafe {
                let factors = _mm256_cvtepi8_epi16(_mm_loadu_si128(factors.as_ptr().cast()));
                let values = _mm256_loadu_si256(values.as_ptr().cast());
                _mm256_slli_epi32::<SHIFT>(_mm256_madd_epi16(factors, values))
            }
        }
        #[inline(always)]
        fn subtract(a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: as for `load`.
            unsafe { _mm256_sub_epi32(a, b) }
        }
        #[inline(always)]
        fn floats(sums: __m256i) -> Avx2 {
            // SAFETY: as for `load`.
            Avx2(unsafe { _mm256_cvtepi32_ps(sums) })
        }
        #[inline(always)]
        fn half(bits: u16) -> f32 {
            // SAFETY: as for `load`, with F16C.
            unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
        }
        #[inline(always)]
        fn halves(from: &[u8; 16]) -> Avx2 {
            // SAFETY: as for `load`, with F16C; 16 bytes are there.
            Avx2(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())) })
        }
        #[inline(always)]
        fn brains(from: &[u8; 16]) -> Avx2 {
            // SAFETY: as for `load`; 16 bytes are there.
            unsafe {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                Avx2(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
            }
        }
    }
}
