//! Eight `f32` lanes behind one trait, so that an algorithm is written once and runs the same
//! operations on every instruction set: results are equal bit for bit by construction.
//!
//! No implementation contracts a multiplication and an addition into one rounding.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use scalar::Scalar;

use std::ops::{Add, Div, Mul, Sub};

/// The instruction set that kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Level {
    /// Plain Rust; the oracle of the others.
    Scalar,
    /// x86-64 with AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// x86-64 with AVX-512 (F, BW, VL) besides. Kernels without code of their own for it take that of AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// NEON, which every aarch64 processor has.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// The best level that this machine has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            return if has_avx512 { Self::Avx512 } else { Self::Avx2 };
        }
        #[cfg(target_arch = "aarch64")]
        return Self::Neon;
        #[cfg(not(target_arch = "aarch64"))]
        Self::Scalar
    }

    /// Every level that this machine has, the best one last.
    pub fn all() -> Vec<Self> {
        let mut levels = vec![Self::Scalar];
        #[cfg(target_arch = "x86_64")]
        if Self::detect() == Self::Avx512 {
            levels.push(Self::Avx2);
        }
        if Self::detect() != Self::Scalar {
            levels.push(Self::detect());
        }
        levels
    }
}

/// Work that is written once over [`Lanes`] and run with any of them.
pub trait Kernel {
    /// What it yields.
    type Output;

    /// The work. Implementations are marked `#[inline(always)]`, and so is everything they call that matters:
    /// that is what compiles it for the instruction set of `L`.
    fn run<L: Lanes>(self) -> Self::Output;
}

impl Level {
    /// Runs a kernel with this level's lanes; with scalar ones where the machine lacks the level.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        if matches!(self, Self::Avx2 | Self::Avx512) && Self::detect() != Self::Scalar {
            return avx2::run(kernel);
        }
        #[cfg(target_arch = "aarch64")]
        if self == Self::Neon {
            return kernel.run::<Neon>();
        }
        kernel.run::<Scalar>()
    }
}

impl Default for Level {
    fn default() -> Self {
        Self::detect()
    }
}

/// Eight `f32` values that are worked on together.
///
/// Arithmetic is IEEE single precision with rounding to nearest even, lane by lane.
/// Only call the methods of an implementation inside a function compiled for its instruction set.
pub trait Lanes:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// The outcome of a comparison, one truth value a lane.
    type Mask: Copy;

    /// The same value in every lane.
    fn splat(value: f32) -> Self;
    /// The eight values at the start of `from`.
    fn load(from: &[f32]) -> Self;
    /// Writes the eight values to the start of `to`.
    fn store(self, to: &mut [f32]);
    /// The eight half-precision values in the first 16 bytes of `from`, little-endian.
    fn load_f16(from: &[u8]) -> Self;
    /// Writes the values in half precision, rounded to nearest even, to the first 16 bytes of `to`.
    fn store_f16(self, to: &mut [u8]);
    /// Correctly rounded square root.
    fn sqrt(self) -> Self;
    /// Absolute value.
    fn abs(self) -> Self;
    /// `if self < other { self } else { other }`.
    fn min(self, other: Self) -> Self;
    /// `if self > other { self } else { other }`.
    fn max(self, other: Self) -> Self;
    /// Nearest integer, ties to even.
    fn round(self) -> Self;
    /// The values as integers (they already are whole numbers that fit).
    fn to_i32(self) -> [i32; 8];
    /// `self < other`, false where either is NaN.
    fn less(self, other: Self) -> Self::Mask;
    /// Both.
    fn and(a: Self::Mask, b: Self::Mask) -> Self::Mask;
    /// One bit a lane, lane 0 lowest.
    fn bits(mask: Self::Mask) -> u32;
    /// `if mask { yes } else { no }`, lane by lane.
    fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
    /// Lane `i` takes the value of the lane whose number is in bits `3i` to `3i + 2` of `lane_numbers`.
    fn pick(self, lane_numbers: u32) -> Self;
    /// Lane `i` changes its sign where bit `i` of `lanes` is set.
    fn negate(self, lanes: u32) -> Self;
    /// Sum of the lanes in a fixed order: `((0+4)+(2+6)) + ((1+5)+(3+7))`.
    fn sum(self) -> f32;
    /// Eight rows of eight become eight columns of eight.
    fn transpose(rows: [Self; 8]) -> [Self; 8];
}

/// The values of the lanes as an array.
#[inline(always)]
pub fn to_array<L: Lanes>(lanes: L) -> [f32; 8] {
    let mut out = [0.0; 8];
    lanes.store(&mut out);
    out
}
