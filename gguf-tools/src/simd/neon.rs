//! The lanes in two NEON registers. Every aarch64 processor has them, so nothing has to be detected.
#![expect(unsafe_code, reason = "vendor intrinsics, and conversions that have no stable one")]

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::{Add, Div, Mul, Sub};

use super::Lanes;

/// Eight values: lanes 0 to 3, then lanes 4 to 7.
#[derive(Debug, Clone, Copy)]
pub struct Neon(pub float32x4_t, pub float32x4_t);

macro_rules! lane_by_lane {
    ($($name:ident, $method:ident, $intrinsic:ident;)*) => {$(
        impl $name for Neon {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: every aarch64 processor has NEON.
                unsafe { Self($intrinsic(self.0, other.0), $intrinsic(self.1, other.1)) }
            }
        }
    )*};
}
lane_by_lane! { Add, add, vaddq_f32; Sub, sub, vsubq_f32; Mul, mul, vmulq_f32; Div, div, vdivq_f32; }

/// Four values of half precision, the lower or the upper ones of a register.
macro_rules! widen_halves {
    ($instruction:literal, $from:expr) => {{
        let wide: float32x4_t;
        asm!($instruction, out(vreg) wide, in(vreg) $from, options(pure, nomem, nostack, preserves_flags));
        wide
    }};
}

#[inline(always)]
fn load_words(from: &[u32; 4]) -> uint32x4_t {
    // SAFETY: every aarch64 processor has NEON. Four values are there.
    unsafe { vld1q_u32(from.as_ptr()) }
}

#[inline(always)]
fn load_shifts(from: &[i32; 4]) -> int32x4_t {
    // SAFETY: every aarch64 processor has NEON. Four values are there.
    unsafe { vld1q_s32(from.as_ptr()) }
}

/// `word` shifted to the left by each of four numbers, to the right where they are negative.
#[inline(always)]
fn shifted(word: u32, by: &[i32; 4]) -> uint32x4_t {
    // SAFETY: every aarch64 processor has NEON.
    unsafe { vshlq_u32(vdupq_n_u32(word), load_shifts(by)) }
}

/// Rows become columns.
#[inline(always)]
fn transpose_four(r: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: every aarch64 processor has NEON.
    unsafe {
        let pair = |a, b| (vreinterpretq_f64_f32(vtrn1q_f32(a, b)), vreinterpretq_f64_f32(vtrn2q_f32(a, b)));
        let (even_low, odd_low) = pair(r[0], r[1]);
        let (even_high, odd_high) = pair(r[2], r[3]);
        [
            vreinterpretq_f32_f64(vtrn1q_f64(even_low, even_high)),
            vreinterpretq_f32_f64(vtrn1q_f64(odd_low, odd_high)),
            vreinterpretq_f32_f64(vtrn2q_f64(even_low, even_high)),
            vreinterpretq_f32_f64(vtrn2q_f64(odd_low, odd_high)),
        ]
    }
}

impl Lanes for Neon {
    type Mask = (uint32x4_t, uint32x4_t);

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { Self(vdupq_n_f32(value), vdupq_n_f32(value)) }
    }
    #[inline(always)]
    fn load(from: &[f32]) -> Self {
        // SAFETY: every aarch64 processor has NEON. Eight values are there.
        unsafe {
            let from = &from[..8];
            Self(vld1q_f32(from.as_ptr()), vld1q_f32(from.as_ptr().add(4)))
        }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        // SAFETY: every aarch64 processor has NEON. There is room for eight values.
        unsafe {
            let to = &mut to[..8];
            vst1q_f32(to.as_mut_ptr(), self.0);
            vst1q_f32(to.as_mut_ptr().add(4), self.1);
        }
    }
    #[inline(always)]
    fn load_f16(from: &[u8]) -> Self {
        // SAFETY: every aarch64 processor has NEON. Sixteen bytes are there. The conversions work on registers alone.
        unsafe {
            let from = &from[..16];
            let halves = vld1q_u8(from.as_ptr());
            Self(
                widen_halves!("fcvtl {0:v}.4s, {1:v}.4h", halves),
                widen_halves!("fcvtl2 {0:v}.4s, {1:v}.8h", halves),
            )
        }
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [u8]) {
        // SAFETY: every aarch64 processor has NEON. The instructions work on registers alone and round to nearest
        // even, as Rust leaves the processor. There is room for sixteen bytes.
        unsafe {
            let to = &mut to[..16];
            let halves: uint8x16_t;
            asm!(
                "fcvtn {0:v}.4h, {1:v}.4s",
                "fcvtn2 {0:v}.8h, {2:v}.4s",
                out(vreg) halves,
                in(vreg) self.0,
                in(vreg) self.1,
                options(pure, nomem, nostack, preserves_flags)
            );
            vst1q_u8(to.as_mut_ptr(), halves);
        }
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { Self(vsqrtq_f32(self.0), vsqrtq_f32(self.1)) }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { Self(vabsq_f32(self.0), vabsq_f32(self.1)) }
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // The instruction for a minimum treats zeros and NaN in another way.
        Self::select(self.less(other), self, other)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self::select(other.less(self), self, other)
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { Self(vrndnq_f32(self.0), vrndnq_f32(self.1)) }
    }
    #[inline(always)]
    fn to_i32(self) -> [i32; 8] {
        // SAFETY: every aarch64 processor has NEON. The array holds eight integers.
        unsafe {
            let mut out = [0; 8];
            vst1q_s32(out.as_mut_ptr(), vcvtq_s32_f32(self.0));
            vst1q_s32(out.as_mut_ptr().add(4), vcvtq_s32_f32(self.1));
            out
        }
    }
    #[inline(always)]
    fn less(self, other: Self) -> Self::Mask {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { (vcltq_f32(self.0, other.0), vcltq_f32(self.1, other.1)) }
    }
    #[inline(always)]
    fn and(a: Self::Mask, b: Self::Mask) -> Self::Mask {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { (vandq_u32(a.0, b.0), vandq_u32(a.1, b.1)) }
    }
    #[inline(always)]
    fn bits(mask: Self::Mask) -> u32 {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let low = vandq_u32(mask.0, load_words(&[1, 2, 4, 8]));
            let high = vandq_u32(mask.1, load_words(&[16, 32, 64, 128]));
            vaddvq_u32(vorrq_u32(low, high))
        }
    }
    #[inline(always)]
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe { Self(vbslq_f32(mask.0, yes.0, no.0), vbslq_f32(mask.1, yes.1, no.1)) }
    }
    #[inline(always)]
    fn pick(self, lane_numbers: u32) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            // Each lane's number becomes the four places of its bytes in the table of all lanes.
            let table = uint8x16x2_t(vreinterpretq_u8_f32(self.0), vreinterpretq_u8_f32(self.1));
            let take = |shifts: &[i32; 4]| {
                let numbers = vandq_u32(shifted(lane_numbers, shifts), vdupq_n_u32(7));
                let places = vmlaq_n_u32(vdupq_n_u32(0x0302_0100), numbers, 0x0404_0404);
                vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(places)))
            };
            Self(take(&[0, -3, -6, -9]), take(&[-12, -15, -18, -21]))
        }
    }
    #[inline(always)]
    fn negate(self, lanes: u32) -> Self {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let flip = |values: float32x4_t, shifts: &[i32; 4]| {
                let signs = vandq_u32(shifted(lanes, shifts), vdupq_n_u32(1 << 31));
                vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(values), signs))
            };
            Self(flip(self.0, &[31, 30, 29, 28]), flip(self.1, &[27, 26, 25, 24]))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: every aarch64 processor has NEON.
        unsafe {
            let four = vaddq_f32(self.0, self.1);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
    #[inline(always)]
    fn transpose(r: [Self; 8]) -> [Self; 8] {
        let top_left = transpose_four([r[0].0, r[1].0, r[2].0, r[3].0]);
        let top_right = transpose_four([r[0].1, r[1].1, r[2].1, r[3].1]);
        let bottom_left = transpose_four([r[4].0, r[5].0, r[6].0, r[7].0]);
        let bottom_right = transpose_four([r[4].1, r[5].1, r[6].1, r[7].1]);
        std::array::from_fn(|i| match i {
            0..4 => Self(top_left[i], bottom_left[i]),
            _ => Self(top_right[i - 4], bottom_right[i - 4]),
        })
    }
}
