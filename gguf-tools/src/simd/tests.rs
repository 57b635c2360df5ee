//! Instruction sets against plain Rust.

use super::*;

#[inline(always)]
fn results<L: Lanes>(a: &[f32; 8], b: &[f32; 8]) -> Vec<u32> {
    let (x, y) = (L::load(a), L::load(b));
    let mask = x.less(y);
    let mut all = vec![L::bits(mask), x.sum().to_bits()];
    all.extend(x.round().min(L::splat(100.0)).max(L::splat(-100.0)).to_i32().map(|v| v as u32));
    let rows = [x, y, x + y, x - y, x * y, x / y, x.abs().sqrt(), x.round()];
    let both = L::and(mask, y.less(x));
    let others = [x.min(y), x.max(y), L::select(both, x, y), L::select(mask, x, y)];
    let moved = [x.pick(0o7654_3210), x.pick(0o1113_0572), x.negate(0b1010_0110)];
    for lanes in rows.into_iter().chain(L::transpose(rows)).chain(others).chain(moved) {
        // The sign of a NaN that an operation makes is not part of IEEE arithmetic.
        all.extend(to_array(lanes).map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }));
    }
    let mut halves = [0; 16];
    x.store_f16(&mut halves);
    all.extend(halves.map(u32::from));
    all.extend(to_array(L::load_f16(&halves)).map(f32::to_bits));
    all
}

/// [`results`] as a kernel.
struct Results<'a>(&'a [f32; 8], &'a [f32; 8]);

impl Kernel for Results<'_> {
    type Output = Vec<u32>;

    #[inline(always)]
    fn run<L: Lanes>(self) -> Vec<u32> {
        results::<L>(self.0, self.1)
    }
}

#[test]
fn the_best_level_equals_scalar_bit_for_bit() {
    if Level::detect() == Level::Scalar {
        return test_vectors::report_skip("this machine has one instruction set");
    }
    let a = [0.5, -0.0, 1.5, 2.5, -3.5, 1e-40, f32::INFINITY, 7.25];
    let b = [0.25, 0.0, -1.5, 2.5, 3.5, 3e38, 1.0, -7.0];
    // Halves of every kind: ties, subnormal ones, the largest, too large.
    let c = [1.000_488_3, 2.001_464_8, 6e-8, 2.9e-8, 65504.0, 65520.0, -1e-5, 3.140_625];
    for (a, b) in [(a, b), (b, a), (c, a), (a, c)] {
        for level in Level::all() {
            assert_eq!(level.run(Results(&a, &b)), results::<Scalar>(&a, &b), "{level:?}");
        }
    }
}

/// Every half that is a number, subnormal ones too, is read as what it is.
#[test]
fn every_half_is_widened_exactly() {
    struct Widen<'a>(&'a [u8; 16]);
    impl Kernel for Widen<'_> {
        type Output = [f32; 8];
        #[inline(always)]
        fn run<L: Lanes>(self) -> [f32; 8] {
            to_array(L::load_f16(self.0))
        }
    }
    for first in (0..=u16::MAX).step_by(8) {
        let bits: [u16; 8] = std::array::from_fn(|i| first + i as u16);
        let bytes: [u8; 16] = std::array::from_fn(|i| bits[i / 2].to_le_bytes()[i % 2]);
        for (found, bits) in Level::detect().run(Widen(&bytes)).into_iter().zip(bits) {
            let expected = half::f16::from_bits(bits).to_f32();
            assert!(
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
                "{bits:#x}"
            );
        }
    }
}
