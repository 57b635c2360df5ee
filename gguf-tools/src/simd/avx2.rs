//! The lanes as one AVX register.
#![expect(
    unsafe_code,
    reason = "vendor intrinsics; every use is reached through a function that has checked for AVX2"
)]

use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

use super::{Kernel, Lanes};

/// Eight values in one AVX register. Use only inside functions compiled for AVX2, after [`super::Level::detect`].
#[derive(Debug, Clone, Copy)]
pub struct Avx2(pub __m256);

macro_rules! lane_by_lane {
    ($($name:ident, $method:ident, $intrinsic:ident;)*) => {$(
        impl $name for Avx2 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: the caller runs on a machine with AVX2 (see the type).
                Self(unsafe { $intrinsic(self.0, other.0) })
            }
        }
    )*};
}
lane_by_lane! { Add, add, _mm256_add_ps; Sub, sub, _mm256_sub_ps; Mul, mul, _mm256_mul_ps; Div, div, _mm256_div_ps; }

/// Runs a kernel with AVX registers. The caller has found the machine to have AVX2 and F16C.
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    #[target_feature(enable = "avx2,f16c")]
    fn compiled<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<Avx2>()
    }
    // SAFETY: `Level::run` is the only caller and has asked the machine.
    unsafe { compiled(kernel) }
}

impl Lanes for Avx2 {
    type Mask = __m256;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: as for the type.
        Self(unsafe { _mm256_set1_ps(value) })
    }
    #[inline(always)]
    fn load(from: &[f32]) -> Self {
        let from = &from[..8];
        // SAFETY: as for the type; eight values are there.
        Self(unsafe { _mm256_loadu_ps(from.as_ptr()) })
    }
    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        let to = &mut to[..8];
        // SAFETY: as for the type; there is room for eight values.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn load_f16(from: &[u8]) -> Self {
        let from = &from[..16];
        // SAFETY: as for the type (F16C comes with the level); sixteen bytes are there.
        Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())) })
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [u8]) {
        let to = &mut to[..16];
        // SAFETY: as for the type (F16C comes with the level); there is room for sixteen bytes.
        unsafe {
            let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            _mm_storeu_si128(to.as_mut_ptr().cast(), halves);
        }
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        // SAFETY: as for the type.
        Self(unsafe { _mm256_sqrt_ps(self.0) })
    }
    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: as for the type.
        Self(unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0) })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: as for the type. The instruction returns the second operand on ties and NaN, as the trait says.
        Self(unsafe { _mm256_min_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: as for the type. The instruction returns the second operand on ties and NaN, as the trait says.
        Self(unsafe { _mm256_max_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: as for the type.
        Self(unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
    }
    #[inline(always)]
    fn to_i32(self) -> [i32; 8] {
        let mut out = [0; 8];
        // SAFETY: as for the type; the array holds eight integers.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_cvttps_epi32(self.0)) }
        out
    }
    #[inline(always)]
    fn less(self, other: Self) -> __m256 {
        // SAFETY: as for the type.
        unsafe { _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0) }
    }
    #[inline(always)]
    fn and(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as for the type.
        unsafe { _mm256_and_ps(a, b) }
    }
    #[inline(always)]
    fn bits(mask: __m256) -> u32 {
        // SAFETY: as for the type.
        unsafe { _mm256_movemask_ps(mask) as u32 }
    }
    #[inline(always)]
    fn select(mask: __m256, yes: Self, no: Self) -> Self {
        // SAFETY: as for the type.
        Self(unsafe { _mm256_blendv_ps(no.0, yes.0, mask) })
    }
    #[inline(always)]
    fn pick(self, lane_numbers: u32) -> Self {
        // SAFETY: as for the type. The permutation looks at the lowest three bits of each lane alone.
        unsafe {
            let shifts = _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21);
            let numbers = _mm256_srlv_epi32(_mm256_set1_epi32(lane_numbers as i32), shifts);
            Self(_mm256_permutevar8x32_ps(self.0, numbers))
        }
    }
    #[inline(always)]
    fn negate(self, lanes: u32) -> Self {
        // SAFETY: as for the type.
        unsafe {
            let shifts = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
            let top = _mm256_sllv_epi32(_mm256_set1_epi32(lanes as i32), shifts);
            let signs = _mm256_and_ps(_mm256_castsi256_ps(top), _mm256_set1_ps(-0.0));
            Self(_mm256_xor_ps(self.0, signs))
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as for the type.
        unsafe {
            let low = _mm256_castps256_ps128(self.0);
            let high = _mm256_extractf128_ps::<1>(self.0);
            let four = _mm_add_ps(low, high);
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn transpose(r: [Self; 8]) -> [Self; 8] {
        // SAFETY: as for the type.
        unsafe {
            let pair =
                |a: usize, b: usize| (_mm256_unpacklo_ps(r[a].0, r[b].0), _mm256_unpackhi_ps(r[a].0, r[b].0));
            let (t0, t1) = pair(0, 1);
            let (t2, t3) = pair(2, 3);
            let (t4, t5) = pair(4, 5);
            let (t6, t7) = pair(6, 7);
            let quad =
                |a: __m256, b: __m256| (_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b));
            let (u0, u1) = quad(t0, t2);
            let (u2, u3) = quad(t1, t3);
            let (u4, u5) = quad(t4, t6);
            let (u6, u7) = quad(t5, t7);
            let low = |a, b| Self(_mm256_permute2f128_ps::<0x20>(a, b));
            let high = |a, b| Self(_mm256_permute2f128_ps::<0x31>(a, b));
            [
                low(u0, u4),
                low(u1, u5),
                low(u2, u6),
                low(u3, u7),
                high(u0, u4),
                high(u1, u5),
                high(u2, u6),
                high(u3, u7),
            ]
        }
    }
}
