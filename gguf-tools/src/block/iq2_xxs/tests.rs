use half::f16;

use super::search::{self, BLOCK_VALUES, Found, Workspace};
use super::*;
use crate::block::codebook::signs;
use crate::block::{BlockType, Objective};
use crate::simd::Scalar;

/// Numbers that look random and are the same everywhere.
struct Numbers(u64);

impl Numbers {
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
    }

    /// Nearly normal: mean 0, variance 1.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    fn gaussian(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| 0.02 * self.normal()).collect()
    }

    /// Values as MXFP4 holds them: few magnitudes, one power of two every 32.
    fn fp4_valued(&mut self, n: usize) -> Vec<f32> {
        let levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0_f32];
        let mut values = Vec::new();
        while values.len() < n {
            let unit = if self.uniform() < 0.7 { 1.0 / 128.0 } else { 1.0 / 256.0 };
            for _ in 0..32 {
                let wanted = self.normal() * 2.0;
                let distance = |level: f32| (level - wanted.abs()).abs();
                let level = levels.into_iter().min_by(|a, b| distance(*a).total_cmp(&distance(*b)));
                values.push(level.unwrap_or(0.0).copysign(wanted) * unit);
            }
        }
        values
    }

    fn with_outliers(&mut self, n: usize) -> Vec<f32> {
        let mut values = self.gaussian(n);
        for block in values.chunks_mut(BLOCK_VALUES) {
            let at = (self.uniform() * BLOCK_VALUES as f32) as usize;
            block[at] *= 1e4;
        }
        values
    }

    /// Importance with a heavy tail; the largest of a super-block is 1.
    fn importance(&mut self, n: usize) -> Vec<f32> {
        let mut importance: Vec<f32> = (0..n).map(|_| (1.2 * self.normal()).exp()).collect();
        for block in importance.chunks_mut(BLOCK_VALUES) {
            let most = block.iter().copied().fold(0.0, f32::max);
            for weight in block {
                *weight /= most;
            }
        }
        importance
    }
}

fn quantize(row: &[f32], guide: Guide<'_>) -> Vec<u8> {
    let mut blocks = vec![0xA5; row.len() / BLOCK_VALUES * Iq2Xxs::BLOCK_BYTES];
    Iq2Xxs.quantizer(guide).expect("can be written").quantize_row(row, &mut blocks);
    blocks
}

fn decode(blocks: &[u8]) -> Vec<f32> {
    let mut row = vec![f32::NAN; blocks.len() / Iq2Xxs::BLOCK_BYTES * BLOCK_VALUES];
    Iq2Xxs.dequantize(blocks, &mut row);
    row
}

/// `sum w x y`.
fn product(w: &[f32], x: &[f32], y: &[f32]) -> f64 {
    w.iter().zip(x).zip(y).map(|((&w, &x), &y)| f64::from(w) * f64::from(x) * f64::from(y)).sum()
}

fn error(w: &[f32], x: &[f32], q: &[f32]) -> f64 {
    let difference: Vec<f32> = x.iter().zip(q).map(|(x, q)| x - q).collect();
    product(w, &difference, &difference)
}

fn codebook() -> Vec<[f64; 8]> {
    let magnitudes = |codes: u32| [0, 1, 2, 3, 4, 5, 6, 7].map(|i| (codes >> (3 * i)) & 7);
    let magnitude = |code: u32| f64::from(Iq2Xxs::MAGNITUDES[code as usize]);
    CODES.iter().map(|&codes| magnitudes(codes).map(magnitude)).collect()
}

/// A row kind by name, with importance.
fn rows(n: usize) -> Vec<(&'static str, Vec<f32>, Vec<f32>)> {
    let mut numbers = Numbers(20_261_129);
    vec![
        ("gaussian", numbers.gaussian(n), numbers.importance(n)),
        ("fp4", numbers.fp4_valued(n), numbers.importance(n)),
        ("outlier", numbers.with_outliers(n), numbers.importance(n)),
    ]
}

#[test]
fn iq2_xxs_equals_the_golden_blocks_bit_for_bit() {
    codebook::tests::check_golden::<Iq2Xxs>(BlockType::Iq2Xxs);
}

#[test]
fn the_search_comes_within_one_percent_of_trying_everything_and_never_below() {
    let entries = codebook();
    for (kind, row, importance) in rows(6 * BLOCK_VALUES) {
        let guide = Guide { importance: Some(&importance), scale_gain: Some(1.0), ..Guide::default() };
        let blocks = quantize(&row, guide);
        let decoded = decode(&blocks);
        let mut ratios = Vec::new();
        for (index, block) in blocks.chunks_exact(Iq2Xxs::BLOCK_BYTES).enumerate() {
            let range = index * BLOCK_VALUES..(index + 1) * BLOCK_VALUES;
            let (x, w) = (&row[range.clone()], &importance[range.clone()]);
            // Every half-precision number from a fourth of the scale found to four times it.
            let found = u16::from_le_bytes([block[0], block[1]]);
            let candidates = (found - 2048..found + 2048).map(|bits| f16::from_bits(bits).to_f64());
            let least = oracle::least_error(&entries, x, w, candidates);
            ratios.push(error(w, x, &decoded[range]) / least);
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        assert!(mean < 1.01, "{kind}: {ratios:?}");
        assert!(ratios.iter().all(|&ratio| ratio > 1.0 - 1e-6), "{kind}: {ratios:?}");
    }
}

/// The search's result for one block of order one, and the block.
fn found(x: &[f32], w: &[f32]) -> (Found, Vec<u8>) {
    let (x, w) = (x.try_into().expect("one block"), w.try_into().expect("one block"));
    let round = |d: f32| search::to_f16(d).to_f32();
    let found = search::search::<Scalar>(x, w, &mut Workspace::new(), round).expect("not zero");
    let mut block = vec![0; Iq2Xxs::BLOCK_BYTES];
    quantizer::write(&found, search::to_f16(found.d), &mut block);
    (found, block)
}

#[test]
fn codes_decode_to_the_error_that_the_search_believed() {
    for (kind, row, importance) in rows(16 * BLOCK_VALUES) {
        for (x, w) in row.chunks_exact(BLOCK_VALUES).zip(importance.chunks_exact(BLOCK_VALUES)) {
            let (found, block) = found(x, w);
            // At the best d the error is what is missing from the alignment.
            let believed = 1.0 - f64::from(found.alignment);
            let measured = error(w, x, &decode(&block)) / product(w, x, x);
            assert!((measured - believed).abs() < 2e-5, "{kind}: {measured} but believed {believed}");
        }
    }
}

#[test]
fn where_negatives_are_odd_the_cheapest_sign_is_wrong_and_no_other() {
    for (kind, row, importance) in rows(16 * BLOCK_VALUES) {
        for (x, w) in row.chunks_exact(BLOCK_VALUES).zip(importance.chunks_exact(BLOCK_VALUES)) {
            let (found, block) = found(x, w);
            let q = decode(&block);
            for (eight, start) in (0..BLOCK_VALUES).step_by(8).enumerate() {
                let range = start..start + 8;
                let wrong: Vec<usize> =
                    range.clone().filter(|&i| x[i] != 0.0 && (x[i] < 0.0) != (q[i] < 0.0)).collect();
                let odd = range.clone().filter(|&i| x[i] < 0.0).count() % 2 == 1;
                let cost = |i: usize| w[i] * x[i].abs() * q[i].abs();
                let least = range.clone().map(cost).fold(f32::MAX, f32::min);
                if !odd || least == 0.0 {
                    assert!(wrong.is_empty() || range.clone().all(|i| q[i] == 0.0), "{kind}: {wrong:?}");
                } else {
                    assert_eq!(wrong.len(), 1, "{kind}");
                    assert!(cost(wrong[0]) <= least * 1.00001, "{kind}: {} is not {least}", cost(wrong[0]));
                }
                let stored = u32::from(found.signs[eight / 4][eight % 4]);
                assert_eq!(signs(stored).count_ones() % 2, 0);
            }
        }
    }
}

/// Rows that break careless arithmetic.
fn hostile_rows() -> Vec<(&'static str, Vec<f32>)> {
    let mut numbers = Numbers(7);
    let mut scaled =
        |factor: f32| numbers.gaussian(BLOCK_VALUES).iter().map(|x| x * factor).collect::<Vec<_>>();
    let mut rows = vec![
        ("tiny", scaled(1e-37)),
        ("under the smallest d", scaled(1e-6)),
        ("near the smallest d", scaled(1e-4)),
        ("above the largest d", scaled(1e9)),
        ("huge", scaled(2e38)),
        ("half of it zero", scaled(1.0)),
        ("one sub-block", scaled(1.0)),
        ("one outlier", scaled(1.0)),
    ];
    rows[5].1[..128].fill(0.0);
    rows[6].1[32..].fill(0.0);
    rows[7].1[77] = 1e4;
    for value in [0.0, -0.0, 1.0, -1.0, 1e-38, -1e-45, f32::MAX, f32::MIN] {
        rows.push(("constant", vec![value; BLOCK_VALUES]));
    }
    let mut alone = vec![0.0; BLOCK_VALUES];
    alone[255] = -f32::MAX;
    rows.push(("one huge value", alone));
    rows
}

fn hostile_importance() -> Vec<(&'static str, Vec<f32>)> {
    let mut numbers = Numbers(8);
    let usual = numbers.importance(BLOCK_VALUES);
    let scaled = |factor: f32| usual.iter().map(|w| w * factor).collect::<Vec<_>>();
    let mut half = usual.clone();
    half[..128].fill(0.0);
    let mut one = vec![0.0; BLOCK_VALUES];
    one[3] = 1.0;
    vec![
        ("usual", usual.clone()),
        ("tiny", scaled(1e-38)),
        ("huge", scaled(1e38)),
        ("half zero", half),
        ("one column", one),
        ("zero", vec![0.0; BLOCK_VALUES]),
    ]
}

#[test]
fn hostile_rows_and_importance_give_finite_blocks_that_are_equal_at_every_level() {
    for (row_kind, row) in hostile_rows() {
        for (importance_kind, importance) in hostile_importance() {
            for (objective, _) in Objective::NAMES.iter().map(|(name, objective)| (*objective, name)) {
                let guide = Guide { importance: Some(&importance), objective, ..Guide::default() };
                let blocks = quantize(&row, guide);
                let case = format!("{row_kind}, importance {importance_kind}, {objective:?}");
                assert_eq!(Iq2Xxs.first_bad_block(&blocks), None, "{case}");
                assert!(decode(&blocks).iter().all(|q| q.is_finite()), "{case}");
                assert_eq!(blocks, quantize(&row, Guide { level: Level::Scalar, ..guide }), "{case}");
                if row.iter().all(|x| x.abs() < 1e-9) {
                    assert_eq!(blocks, [0; Iq2Xxs::BLOCK_BYTES], "{case}");
                }
            }
        }
    }
}

#[test]
fn scalar_and_detected_levels_write_the_same_bytes() {
    for (kind, row, importance) in rows(16 * BLOCK_VALUES) {
        for (name, objective) in Objective::NAMES {
            let guide = Guide { importance: Some(&importance), objective, ..Guide::default() };
            let scalar = quantize(&row, Guide { level: Level::Scalar, ..guide });
            assert_eq!(quantize(&row, guide), scalar, "{kind}, {name}");
        }
    }
}

#[test]
fn without_a_gain_given_the_size_of_the_weights_is_kept() {
    for (kind, row, importance) in rows(32 * BLOCK_VALUES).into_iter().take(2) {
        let guide = Guide { importance: Some(&importance), ..Guide::default() };
        let q = decode(&quantize(&row, guide));
        let alignment = product(&importance, &row, &q) / product(&importance, &row, &row);
        assert!((0.97..1.0).contains(&alignment), "{kind}: {alignment}");
        let shrunk = decode(&quantize(&row, Guide { scale_gain: Some(1.0), ..guide }));
        let shrunk = product(&importance, &row, &shrunk) / product(&importance, &row, &row);
        assert!(shrunk < 0.96, "{kind}: {shrunk}");
    }
}

#[test]
fn a_gain_changes_the_scale_and_no_code() {
    let (_, row, importance) = rows(4 * BLOCK_VALUES).swap_remove(0);
    let with = |gain| {
        quantize(&row, Guide { importance: Some(&importance), scale_gain: Some(gain), ..Guide::default() })
    };
    for (plain, raised) in with(1.0).chunks_exact(66).zip(with(1.5).chunks_exact(66)) {
        assert_eq!(plain[2..], raised[2..]);
        let d = |block: &[u8]| codebook::read_f16(block).to_f32();
        assert!((d(raised) / d(plain) - 1.5).abs() < 2e-3);
    }
}

#[test]
fn a_power_of_two_moves_to_the_scale() {
    let (_, row, importance) = rows(4 * BLOCK_VALUES).swap_remove(1);
    let guide = Guide { importance: Some(&importance), ..Guide::default() };
    let larger: Vec<f32> = row.iter().map(|x| x * 64.0).collect();
    let wanted: Vec<f32> = decode(&quantize(&row, guide)).iter().map(|q| q * 64.0).collect();
    assert_eq!(decode(&quantize(&larger, guide)), wanted);
}

#[test]
fn missing_importance_is_flat_importance() {
    let (_, row, importance) = rows(2 * BLOCK_VALUES).swap_remove(0);
    let flat = quantize(
        &row,
        Guide { objective: Objective::Flat, importance: Some(&importance), ..Guide::default() },
    );
    for (_, objective) in Objective::NAMES {
        assert_eq!(quantize(&row, Guide { objective, ..Guide::default() }), flat);
    }
    // So is importance that is zero in a whole super-block, and only there.
    let mut partly = importance.clone();
    partly[..BLOCK_VALUES].fill(0.0);
    let blocks = quantize(&row, Guide { importance: Some(&partly), ..Guide::default() });
    assert_eq!(blocks[..66], flat[..66]);
    let usual = quantize(&row, Guide { importance: Some(&importance), ..Guide::default() });
    assert_eq!(blocks[66..], usual[66..]);
}
