//! Super-blocks that a format can hold without any error, found before any search.
//!
//! Weights that were FP4 times powers of two (the routed experts of DeepSeek V4) are whole multiples of a power of two in each
//! sub-block. Where the format has enough codes, scales that are powers of two hold them exactly, which no search by
//! steps would find. Other weights are ruled out within the first sub-block.

use half::f16;

use super::super_block::Stored;

/// One sub-block: all values are whole multiples of `2^step`.
#[derive(Clone, Copy)]
struct Multiples {
    step: i32,
    lowest: f32,
    highest: f32,
}

/// `x = d * scale * code`, codes from `codes[0]` to `codes[1]`, scales up to `scales`.
#[inline(always)]
pub(super) fn symmetric<const BLOCKS: usize>(
    values: &[f32; 256],
    codes: [f32; 2],
    scales: u8,
) -> Option<Stored> {
    let fits = |m: Multiples, step: i32| {
        let inverse = power_of_two(-step);
        m.lowest * inverse >= codes[0] && m.highest * inverse <= codes[1]
    };
    let (multiples, base) = multiples::<BLOCKS>(values, |m| fits(m, m.step))?;
    let mut exact = Stored { d: half_power_of_two(base)?, ..Stored::zeros(codes[0]) };
    for (b, m) in multiples.iter().enumerate() {
        let Some(m) = m else { continue };
        let step = m.step.min(base + scales.ilog2() as i32);
        if !fits(*m, step) {
            return None;
        }
        exact.scales[b] = 1 << (step - base);
        let n = 256 / BLOCKS;
        for i in n * b..n * (b + 1) {
            exact.codes[i] = (values[i] * power_of_two(-step) - codes[0]) as u8;
        }
    }
    Some(exact)
}

/// `x = d * scale * code - dmin * minimum`, codes up to `codes`, scales and minimums up to `scales`.
#[inline(always)]
pub(super) fn affine<const BLOCKS: usize>(values: &[f32; 256], codes: f32, scales: u8) -> Option<Stored> {
    let fits = |m: &Multiples, minimum: f32, step: i32| (m.highest + minimum) * power_of_two(-step) <= codes;
    let (multiples, base) = multiples::<BLOCKS>(values, |m| fits(&m, -m.lowest, m.step))?;
    // The coarser the minimums' step, the farther they reach, and the more codes rounding them up costs.
    (0..6).rev().find_map(|coarser| {
        let dmin = base + coarser;
        let (d, stored_dmin) = (half_power_of_two(base)?, half_power_of_two(dmin)?);
        let mut exact = Stored { d, dmin: stored_dmin, ..Stored::zeros(0.0) };
        for (b, m) in multiples.iter().enumerate() {
            let Some(m) = m else { continue };
            let step = m.step.min(base + scales.ilog2() as i32);
            let minimum_step = power_of_two(step.max(dmin));
            let minimum = (-m.lowest / minimum_step).ceil() * minimum_step;
            let stored = minimum * power_of_two(-dmin);
            if stored > f32::from(scales) || !fits(m, minimum, step) {
                return None;
            }
            exact.scales[b] = 1 << (step - base);
            exact.minimums[b] = stored as u8;
            let n = 256 / BLOCKS;
            for i in n * b..n * (b + 1) {
                exact.codes[i] = ((values[i] + minimum) * power_of_two(-step)) as u8;
            }
        }
        Some(exact)
    })
}

/// The sub-blocks as multiples, and the finest step among them; `None` as soon as `fits` fails for one.
#[inline(always)]
fn multiples<const BLOCKS: usize>(
    values: &[f32; 256],
    fits: impl Fn(Multiples) -> bool,
) -> Option<([Option<Multiples>; BLOCKS], i32)> {
    let mut found = [None; BLOCKS];
    let mut base = i32::MAX;
    for (found, values) in found.iter_mut().zip(values.chunks_exact(256 / BLOCKS)) {
        let mut m = Multiples { step: i32::MAX, lowest: 0.0, highest: 0.0 };
        for value in values {
            m.step = m.step.min(lowest_bit(*value)?);
            m.lowest = m.lowest.min(*value);
            m.highest = m.highest.max(*value);
        }
        if m.step == i32::MAX {
            continue;
        }
        // Beyond these no half-precision scale is near, and the powers of two here stay normal numbers.
        if !(-60..=60).contains(&m.step) || !fits(m) {
            return None;
        }
        base = base.min(m.step);
        *found = Some(m);
    }
    (base < i32::MAX).then_some((found, base))
}

/// Exponent of the lowest bit that is set in the value; very high for zero, `None` for a subnormal number.
#[inline(always)]
fn lowest_bit(value: f32) -> Option<i32> {
    let bits = value.to_bits() & 0x7FFF_FFFF;
    if bits == 0 {
        return Some(i32::MAX);
    }
    let exponent = (bits >> 23) as i32 - 150;
    (bits >> 23 > 0).then(|| exponent + (bits | 0x80_0000).trailing_zeros() as i32)
}

/// `2^exponent`, for exponents of normal numbers.
#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// `2^exponent` in half precision, where that is exact.
#[inline(always)]
fn half_power_of_two(exponent: i32) -> Option<f16> {
    (-24..=15).contains(&exponent).then(|| f16::from_f32(power_of_two(exponent)))
}
