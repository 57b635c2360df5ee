//! The lanes in plain Rust.

use std::array::from_fn;
use std::ops::{Add, Div, Mul, Sub};

use half::f16;

use super::Lanes;

/// Eight values, worked on one by one.
#[derive(Debug, Clone, Copy)]
pub struct Scalar([f32; 8]);

macro_rules! lane_by_lane {
    ($($name:ident, $method:ident, $op:tt;)*) => {$(
        impl $name for Scalar {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Self(from_fn(|i| self.0[i] $op other.0[i]))
            }
        }
    )*};
}
lane_by_lane! { Add, add, +; Sub, sub, -; Mul, mul, *; Div, div, /; }

impl Lanes for Scalar {
    type Mask = [bool; 8];

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; 8])
    }
    #[inline(always)]
    fn load(from: &[f32]) -> Self {
        Self(from_fn(|i| from[i]))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32]) {
        to[..8].copy_from_slice(&self.0);
    }
    #[inline(always)]
    fn load_f16(from: &[u8]) -> Self {
        Self(from_fn(|i| f16::from_le_bytes([from[2 * i], from[2 * i + 1]]).to_f32()))
    }
    #[inline(always)]
    fn store_f16(self, to: &mut [u8]) {
        for i in 0..8 {
            to[2 * i..2 * i + 2].copy_from_slice(&f16::from_f32(self.0[i]).to_le_bytes());
        }
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        Self(self.0.map(f32::sqrt))
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        Self(from_fn(|i| if self.0[i] < other.0[i] { self.0[i] } else { other.0[i] }))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self(from_fn(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] }))
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn to_i32(self) -> [i32; 8] {
        self.0.map(|v| v as i32)
    }
    #[inline(always)]
    fn less(self, other: Self) -> [bool; 8] {
        from_fn(|i| self.0[i] < other.0[i])
    }
    #[inline(always)]
    fn and(a: [bool; 8], b: [bool; 8]) -> [bool; 8] {
        from_fn(|i| a[i] && b[i])
    }
    #[inline(always)]
    fn bits(mask: [bool; 8]) -> u32 {
        (0..8).fold(0, |bits, i| bits | (u32::from(mask[i]) << i))
    }
    #[inline(always)]
    fn select(mask: [bool; 8], yes: Self, no: Self) -> Self {
        Self(from_fn(|i| if mask[i] { yes.0[i] } else { no.0[i] }))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        let v = self.0;
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }
    #[inline(always)]
    fn transpose(rows: [Self; 8]) -> [Self; 8] {
        from_fn(|column| Self(from_fn(|row| rows[row].0[column])))
    }
}
