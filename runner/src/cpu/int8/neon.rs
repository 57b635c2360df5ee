//! Thirty-two bytes in two NEON registers. Every aarch64 processor has them, so nothing has to be detected.
#![expect(unsafe_code, reason = "vendor intrinsics, and a conversion that has no stable one")]

use std::arch::aarch64::*;
use std::arch::asm;

use gguf_tools::simd::{Lanes, Neon};

use super::wide::Wide;

/// NEON.
#[derive(Clone, Copy)]
pub(super) struct NeonBytes;

/// Bytes 0 to 15, then 16 to 31.
type Halves = [uint8x16_t; 2];
/// Lanes 0 to 3, then 4 to 7.
type Sums = [int32x4_t; 2];

#[inline(always)]
fn sixteen_bytes(from: &[u8; 16]) -> uint8x16_t {
    // SAFETY: every aarch64 processor has NEON. 16 bytes are there.
    unsafe { vld1q_u8(from.as_ptr()) }
}

#[inline(always)]
fn thirty_two_bytes(from: *const u8) -> Halves {
    // SAFETY: every aarch64 processor has NEON. Every caller has 32 bytes there.
    unsafe { [vld1q_u8(from), vld1q_u8(from.add(16))] }
}

/// Sums of four products of signed bytes each.
#[inline(always)]
fn four_products(a: uint8x16_t, b: uint8x16_t) -> int32x4_t {
    // SAFETY: every aarch64 processor has NEON.
    unsafe {
        let (a, b) = (vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b));
        let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
        let high = vmull_high_s8(a, b);
        vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))
    }
}

/// `x` shifted to the left, to the right if `by` is negative.
#[inline(always)]
fn shift(x: uint8x16_t, by: i32) -> uint8x16_t {
    // SAFETY: every aarch64 processor has NEON.
    unsafe { vshlq_u8(x, vdupq_n_s8(by as i8)) }
}

impl Wide for NeonBytes {
    type Bytes = Halves;
    type Sums = Sums;
    type Scales = [i8; 16];
    type Floats = Neon;

    #[inline(always)]
    fn load(from: &[u8; 32]) -> Halves {
        thirty_two_bytes(from.as_ptr())
    }
    #[inline(always)]
    fn load_signed(from: &[i8; 32]) -> Halves {
        thirty_two_bytes(from.as_ptr().cast())
    }
    #[inline(always)]
    fn nibbles(from: &[u8; 16]) -> Halves {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let bytes = sixteen_bytes(from);
            [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)]
        }
    }
    #[inline(always)]
    fn words(from: [u64; 4]) -> Halves {
        thirty_two_bytes(from.as_ptr().cast())
    }
    #[inline(always)]
    fn field<const SHIFT: i32>(bytes: Halves, mask: u8) -> Halves {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { bytes.map(|b| vandq_u8(shift(b, -SHIFT), vdupq_n_u8(mask))) }
    }
    #[inline(always)]
    fn join(low: Halves, high: Halves) -> Halves {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { [vorrq_u8(low[0], vshlq_n_u8::<4>(high[0])), vorrq_u8(low[1], vshlq_n_u8::<4>(high[1]))] }
    }
    #[inline(always)]
    fn lookup(table: &[i8; 16], bytes: Halves) -> Halves {
        // SAFETY: every aarch64 processor has NEON. 16 values are there.
        unsafe {
            let table = vld1q_u8(table.as_ptr().cast());
            bytes.map(|b| vqtbl1q_u8(table, b))
        }
    }
    #[inline(always)]
    fn negate_where(bytes: Halves, bits: u32) -> Halves {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let own_bit = sixteen_bytes(&[1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128]);
            let negate = |bytes, first: u8, second: u8| {
                let spread = vcombine_u8(vdup_n_u8(first), vdup_n_u8(second));
                let negative = vtstq_u8(spread, own_bit);
                vsubq_u8(veorq_u8(bytes, negative), negative)
            };
            let [a, b, c, d] = bits.to_le_bytes();
            [negate(bytes[0], a, b), negate(bytes[1], c, d)]
        }
    }
    #[inline(always)]
    fn zero() -> Sums {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { [vdupq_n_s32(0); 2] }
    }
    #[inline(always)]
    fn add_products(sums: Sums, a: Halves, b: Halves, scale: u32) -> Sums {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let scale = (scale & 0xffff) as i32;
            [
                vmlaq_n_s32(sums[0], four_products(a[0], b[0]), scale),
                vmlaq_n_s32(sums[1], four_products(a[1], b[1]), scale),
            ]
        }
    }
    #[inline(always)]
    fn scales(all: &[i8; 16]) -> [i8; 16] {
        *all
    }
    #[inline(always)]
    fn add_scaled<const I: usize, const SIGNED: bool>(
        sums: Sums,
        a: Halves,
        b: Halves,
        scales: [i8; 16],
    ) -> Sums {
        let [first, second] = [2 * I, 2 * I + 1].map(|i| i32::from(scales[i]));
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            [
                vmlaq_n_s32(sums[0], four_products(a[0], b[0]), first),
                vmlaq_n_s32(sums[1], four_products(a[1], b[1]), second),
            ]
        }
    }
    #[inline(always)]
    fn signs_and_scales(groups: &[u8; 64]) -> [[u32; 8]; 2] {
        // SAFETY: every aarch64 processor has NEON. Both arrays hold eight words.
        unsafe {
            let mut out = [[0; 8]; 2];
            let four: [uint32x4_t; 4] =
                std::array::from_fn(|i| vreinterpretq_u32_u8(sixteen_bytes(&groups.as_chunks::<16>().0[i])));
            for half in 0..2 {
                // The odd words.
                let words = vuzp2q_u32(four[2 * half], four[2 * half + 1]);
                let part =
                    |bits: u32, by: i32| vshlq_u32(vandq_u32(words, vdupq_n_u32(bits)), vdupq_n_s32(by));
                let seven = vorrq_u32(
                    vorrq_u32(part(0x7f, 0), part(0x3f80, 1)),
                    vorrq_u32(part(0x001f_c000, 2), part(0x0fe0_0000, 3)),
                );
                // The eighth sign makes the number of minus signs even: it is the parity of the seven.
                let ones = vcntq_u8(vreinterpretq_u8_u32(seven));
                let eighth = vreinterpretq_u32_u8(vshlq_n_u8::<7>(ones));
                let scales = vorrq_u32(vshlq_n_u32::<1>(vshrq_n_u32::<28>(words)), vdupq_n_u32(1));
                let scales = vorrq_u32(scales, vshlq_n_u32::<16>(scales));
                vst1q_u32(out[0].as_mut_ptr().add(4 * half), vorrq_u32(seven, eighth));
                vst1q_u32(out[1].as_mut_ptr().add(4 * half), scales);
            }
            out
        }
    }
    #[inline(always)]
    fn signed_products(a: Halves, b: Halves) -> Sums {
        [four_products(a[0], b[0]), four_products(a[1], b[1])]
    }
    #[inline(always)]
    fn sixteen<const SHIFT: i32>(factors: &[i8; 16], values: &[i16; 16]) -> Sums {
        // SAFETY: every aarch64 processor has NEON. 16 factors and 16 values are there.
        unsafe {
            let (low, high) = (vld1q_s16(values.as_ptr()), vld1q_s16(values.as_ptr().add(8)));
            let factors = vld1q_s8(factors.as_ptr());
            let four = |factors: int16x8_t, values: int16x8_t| {
                let low = vmull_s16(vget_low_s16(factors), vget_low_s16(values));
                let high = vmull_high_s16(factors, values);
                vshlq_s32(vpaddq_s32(low, high), vdupq_n_s32(SHIFT))
            };
            [four(vmovl_s8(vget_low_s8(factors)), low), four(vmovl_high_s8(factors), high)]
        }
    }
    #[inline(always)]
    fn subtract(a: Sums, b: Sums) -> Sums {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { [vsubq_s32(a[0], b[0]), vsubq_s32(a[1], b[1])] }
    }
    #[inline(always)]
    fn floats(sums: Sums) -> Neon {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { Neon(vcvtq_f32_s32(sums[0]), vcvtq_f32_s32(sums[1])) }
    }
    #[inline(always)]
    fn half(bits: u16) -> f32 {
        // SAFETY: every aarch64 processor has NEON. The instruction works on registers alone.
        unsafe {
            let value: f32;
            asm!(
                "fmov {value:s}, {bits:w}",
                "fcvt {value:s}, {value:h}",
                value = out(vreg) value,
                bits = in(reg) u32::from(bits),
                options(pure, nomem, nostack, preserves_flags)
            );
            value
        }
    }
    #[inline(always)]
    fn halves(from: &[u8; 16]) -> Neon {
        Neon::load_f16(from)
    }
    #[inline(always)]
    fn brains(from: &[u8; 16]) -> Neon {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let words = vreinterpretq_u16_u8(sixteen_bytes(from));
            let wide = |four| vreinterpretq_f32_u32(vshll_n_u16::<16>(four));
            Neon(wide(vget_low_u16(words)), wide(vget_high_u16(words)))
        }
    }
}
