//! A super-block of 256 values made ready for a search: scaled to about 1, weighted, and turned so that eight
//! sub-blocks lie side by side in the lanes. From there on no search needs a sum across lanes.

use half::f16;

use super::{Guide, Objective};
use crate::simd::{Lanes, to_array};

/// `ROUNDS` times eight sub-blocks of `N` values, `N * ROUNDS` = 32.
pub(super) struct SuperBlock<L, const N: usize, const ROUNDS: usize> {
    /// `x[round][i]`: value `i` of eight sub-blocks, times `1 / unit`.
    pub(super) x: [[L; N]; ROUNDS],
    /// Weights of the squared error, at most about 1 and never zero.
    pub(super) w: [[L; N]; ROUNDS],
    /// Power of two: the values are `x * unit`, and the largest magnitude in `x` is in [1, 2).
    unit: f32,
}

/// Share of the mean weight that every value has at least: columns whose importance is zero or vanishes next to that of
/// their neighbours keep a sensible code and never decide one, and a super-block without any importance is fitted flat.
const LEAST_WEIGHT: f32 = 1.0 / 65536.0;

/// Below this even the smallest half-precision scale is too coarse for any value.
const SMALLEST: f32 = 1.0 / (1u64 << 40) as f32;

impl<L: Lanes, const N: usize, const ROUNDS: usize> SuperBlock<L, N, ROUNDS> {
    /// `None`: nothing in the block is large enough to be stored, it becomes all zeros.
    #[inline(always)]
    pub(super) fn new(
        guide: &Guide<'_>,
        values: &[f32; 256],
        importance: Option<&[f32; 256]>,
    ) -> Option<Self> {
        let zero = L::splat(0.0);
        let eights = values.chunks_exact(8).map(L::load);
        let largest = highest(eights.fold(zero, |largest, eight| eight.abs().max(largest)));
        if largest < SMALLEST {
            return None;
        }
        // A power of two whose inverse is a normal number too: scaling is exact.
        let unit = f32::from_bits((largest.to_bits() & 0x7F80_0000).min(0x7E80_0000));
        let inverse = L::splat(1.0 / unit);
        let mut x = [0.0; 256];
        for (to, from) in x.chunks_exact_mut(8).zip(values.chunks_exact(8)) {
            (L::load(from) * inverse).store(to);
        }
        let w = weights::<L>(guide.objective, &x, importance);
        Some(Self { x: turned(&x), w: turned(&w), unit })
    }

    /// A scale in units of `x` as half precision stores it: the bits, and what it then is in units of `x`.
    /// Not negative; one that is too large becomes the largest finite one.
    #[inline(always)]
    pub(super) fn rounded(&self, scale: f32) -> (f16, f32) {
        let stored = f16::from_f32((scale * self.unit).clamp(0.0, f16::MAX.to_f32()));
        (stored, stored.to_f32() / self.unit)
    }
}

/// Everything that a super-block stores, before it is packed. Eight sub-blocks use the first eight scales and minimums.
pub(super) struct Stored {
    pub(super) d: f16,
    pub(super) dmin: f16,
    /// Signed ones in two's complement.
    pub(super) scales: [u8; 16],
    pub(super) minimums: [u8; 16],
    /// Codes minus the format's lowest code.
    pub(super) codes: [u8; 256],
}

impl Stored {
    /// A super-block of zeros, for a format with this lowest code.
    pub(super) fn zeros(lowest_code: f32) -> Self {
        let codes = [-lowest_code as u8; 256];
        Self { d: f16::ZERO, dmin: f16::ZERO, scales: [0; 16], minimums: [0; 16], codes }
    }
}

/// The largest of the lanes.
#[inline(always)]
pub(super) fn highest<L: Lanes>(lanes: L) -> f32 {
    to_array(lanes).into_iter().fold(0.0, f32::max)
}

#[inline(always)]
fn weights<L: Lanes>(objective: Objective, x: &[f32; 256], importance: Option<&[f32; 256]>) -> [f32; 256] {
    let zero = L::splat(0.0);
    let mut w = [1.0; 256];
    if let (Some(importance), Objective::Importance | Objective::Ggml) = (importance, objective) {
        let top = highest(importance.chunks_exact(8).map(L::load).fold(zero, |top, w| w.max(top)));
        if top > 0.0 && top.is_finite() {
            for (w, importance) in w.chunks_exact_mut(8).zip(importance.chunks_exact(8)) {
                (L::load(importance) / L::splat(top)).store(w);
            }
        }
    }
    if objective == Objective::Ggml {
        let squares = x.chunks_exact(8).map(L::load).fold(zero, |sum, x| sum + x * x);
        let mean = L::splat(squares.sum() / 256.0);
        for (w, x) in w.chunks_exact_mut(8).zip(x.chunks_exact(8)) {
            let x = L::load(x);
            (L::load(w) * (mean + x * x).sqrt()).store(w);
        }
    }
    let total = w.chunks_exact(8).map(L::load).fold(zero, |sum, w| sum + w).sum();
    let least = L::splat(total / 256.0 * LEAST_WEIGHT);
    for w in w.chunks_exact_mut(8) {
        (L::load(w) + least).store(w);
    }
    w
}

/// `values[N * b + i]` becomes lane `b % 8` of `[b / 8][i]`.
#[inline(always)]
fn turned<L: Lanes, const N: usize, const ROUNDS: usize>(values: &[f32; 256]) -> [[L; N]; ROUNDS] {
    let mut lanes = [[L::splat(0.0); N]; ROUNDS];
    for (round, lanes) in lanes.iter_mut().enumerate() {
        for first in (0..N).step_by(8) {
            let rows = std::array::from_fn(|b| L::load(&values[N * (8 * round + b) + first..]));
            lanes[first..first + 8].copy_from_slice(&L::transpose(rows));
        }
    }
    lanes
}

/// The inverse of [`turned`], as bytes: `[b / 8][i]`, lane `b % 8`, becomes `codes[N * b + i]`. The lanes hold whole numbers
/// from 0 to 255.
#[inline(always)]
pub(super) fn turned_back<L: Lanes, const N: usize, const ROUNDS: usize>(
    lanes: &[[L; N]; ROUNDS],
) -> [u8; 256] {
    let mut codes = [0; 256];
    for (round, lanes) in lanes.iter().enumerate() {
        for first in (0..N).step_by(8) {
            let rows = L::transpose(std::array::from_fn(|i| lanes[first + i]));
            for (b, row) in rows.into_iter().enumerate() {
                let codes = &mut codes[N * (8 * round + b) + first..][..8];
                for (code, value) in codes.iter_mut().zip(row.to_i32()) {
                    *code = value as u8;
                }
            }
        }
    }
    codes
}

/// Sixteen (or eight) values, one a sub-block, as bytes.
#[inline(always)]
pub(super) fn bytes_of<L: Lanes, const ROUNDS: usize>(lanes: &[L; ROUNDS]) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (bytes, lanes) in bytes.chunks_exact_mut(8).zip(lanes) {
        for (byte, value) in bytes.iter_mut().zip(lanes.to_i32()) {
            *byte = value as u8;
        }
    }
    bytes
}
