use faer::linalg::solvers::Solve;
use faer::{Accum, Mat};

use super::factor::{add_carried, carry, inverse_of, upper_factor};
use super::*;
use crate::simd::Level;

const WALKED: [BlockType; 5] =
    [BlockType::Iq2Xxs, BlockType::Q2K, BlockType::Q4K, BlockType::Q8_0, BlockType::Mxfp4];

/// A small generator; the tests need no more.
struct Numbers(u64);

impl Numbers {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }

    fn matrix(&mut self, rows: usize, columns: usize) -> Vec<f32> {
        (0..rows * columns).map(|_| self.normal() as f32).collect()
    }

    /// Mean of `x x^T` of inputs that lie near a space of `rank` dimensions.
    fn moments(&mut self, columns: usize, rank: usize, noise: f64) -> Vec<f32> {
        let directions = self.matrix(rank, columns);
        let mut moments = SecondMoments::new(columns);
        for _ in 0..4 * columns {
            let factors: Vec<f64> = (0..rank).map(|_| self.normal()).collect();
            let row: Vec<f32> = (0..columns)
                .map(|c| {
                    let sum: f64 =
                        (0..rank).map(|r| factors[r] * f64::from(directions[r * columns + c])).sum();
                    (sum + noise * self.normal()) as f32
                })
                .collect();
            moments.add(row.into_iter(), 1.0);
        }
        moments.finish()
    }
}

fn feedback(settings: &str) -> Feedback {
    Feedback { settings: settings.parse().expect("sound settings"), plain: RowByRow::default() }
}

struct Moments<'a>(&'a [f32], Vec<f32>);

impl<'a> Moments<'a> {
    fn new(h: &'a [f32], columns: usize) -> Self {
        Self(h, (0..columns).map(|i| h[i * columns + i]).collect())
    }
}

impl Curvature for Moments<'_> {
    fn diagonal(&self) -> Option<&[f32]> {
        Some(&self.1)
    }

    fn second_moments(&self) -> Option<&[f32]> {
        Some(self.0)
    }
}

fn bytes_of(target: BlockType, weights: &[f32]) -> usize {
    weights.len() / target.values_per_block() * target.bytes_per_block()
}

fn walk(
    feedback: &Feedback,
    target: BlockType,
    weights: &[f32],
    h: &[f32],
    columns: usize,
) -> (Vec<u8>, Report) {
    let mut out = vec![0xA5; bytes_of(target, weights)];
    let curvature = Moments::new(h, columns);
    let report =
        feedback.quantize_reporting(target, weights, columns, &curvature, &mut out).expect("writable");
    (out, report)
}

fn plain(target: BlockType, weights: &[f32], h: &[f32], columns: usize) -> Vec<u8> {
    let mut out = vec![0xA5; bytes_of(target, weights)];
    let curvature = Moments::new(h, columns);
    let importance = Diagonal(curvature.diagonal());
    RowByRow::default().quantize(target, weights, columns, &importance, &mut out).expect("writable");
    out
}

/// `d H d^T` of each row in double precision, from the bytes.
fn errors(target: BlockType, weights: &[f32], bytes: &[u8], h: &[f32], columns: usize) -> Vec<f64> {
    let mut decoded = vec![0.0; weights.len()];
    target.format().expect("computed with").dequantize(bytes, &mut decoded);
    weights
        .chunks_exact(columns)
        .zip(decoded.chunks_exact(columns))
        .map(|(w, q)| {
            let d: Vec<f64> = w.iter().zip(q).map(|(w, q)| f64::from(w - q)).collect();
            (0..columns)
                .map(|i| {
                    let row = h[i * columns..][..columns].iter().zip(&d);
                    d[i] * row.map(|(h, d)| f64::from(*h) * d).sum::<f64>()
                })
                .sum()
        })
        .collect()
}

/// What the factor is made of: `h` scaled to a mean diagonal of one, with damping.
fn damped(h: &[f32], columns: usize, damping: f64) -> Vec<f32> {
    let mean = (0..columns).map(|i| f64::from(h[i * columns + i])).sum::<f64>() / columns as f64;
    let mut damped: Vec<f32> = h.iter().map(|&v| (f64::from(v) / mean) as f32).collect();
    (0..columns).for_each(|i| damped[i * columns + i] += damping as f32);
    damped
}

#[test]
fn the_conditional_update_is_the_direct_solution_to_1e_8() {
    let mut numbers = Numbers(1);
    for (n, done, width) in [(24, 8, 8), (40, 24, 8), (33, 1, 5), (64, 32, 32)] {
        let x = Mat::from_fn(3 * n, n, |_, _| numbers.normal());
        let mut h = x.transpose() * &x;
        (0..n).for_each(|i| h[(i, i)] += 0.01);
        let r = upper_factor(h.clone()).expect("positive definite");
        let product = &r * r.transpose();
        let worst =
            (0..n * n).map(|k| (product[(k / n, k % n)] - h[(k / n, k % n)]).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-9 * h[(0, 0)], "{worst}");

        let rows = 3;
        let differences = Mat::from_fn(rows, done, |_, _| numbers.normal());
        let weights = Mat::from_fn(rows, width, |_, _| numbers.normal());
        let mut carried = Mat::zeros(rows, width);
        carry(carried.as_mut(), differences.as_ref(), r.submatrix(0, done, done, width), Accum::Replace);
        let mut targets = weights.clone();
        let inverse = inverse_of(r.submatrix(done, done, width, width));
        add_carried(targets.as_mut(), carried.as_ref(), inverse.as_ref());

        // Directly: the other columns' differences that make good most of those made are -D_f H_fr H_rr^-1.
        let rest = n - done;
        let h_rr = h.submatrix(done, done, rest, rest);
        let right = h.submatrix(done, 0, rest, done) * differences.transpose();
        let solution = h_rr.partial_piv_lu().solve(&right);
        for row in 0..rows {
            for j in 0..width {
                let direct = weights[(row, j)] + solution[(j, row)];
                assert!((targets[(row, j)] - direct).abs() < 1e-8, "{} {direct}", targets[(row, j)]);
            }
        }
    }
}

#[test]
fn where_columns_say_nothing_about_each_other_the_plain_search_is_the_answer_code_for_code() {
    let mut numbers = Numbers(2);
    let columns = 512;
    let weights = numbers.matrix(24, columns);
    for target in WALKED {
        let mut h = vec![0.0; columns * columns];
        (0..columns).for_each(|i| h[i * columns + i] = 2.5);
        assert_eq!(
            walk(&feedback(""), target, &weights, &h, columns).0,
            plain(target, &weights, &h, columns)
        );
        (0..columns).for_each(|i| h[i * columns + i] = 0.1 + numbers.uniform() as f32);
        assert_eq!(
            walk(&feedback(""), target, &weights, &h, columns).0,
            plain(target, &weights, &h, columns)
        );
    }
}

#[test]
fn no_row_ends_above_the_plain_search_and_correlated_inputs_gain_much() {
    let mut numbers = Numbers(3);
    let (rows, columns) = (20, 512);
    let weights = numbers.matrix(rows, columns);
    let h = numbers.moments(columns, 60, 0.3);
    for settings in ["", "order=natural", "reach=0,refits=0", "d-factors=0.9/1/1.1,refits=2,reach=2"] {
        let feedback = feedback(settings);
        let judged = damped(&h, columns, feedback.settings.damping);
        for target in WALKED {
            let (bytes, report) = walk(&feedback, target, &weights, &h, columns);
            let found = errors(target, &weights, &bytes, &judged, columns);
            let before = errors(target, &weights, &plain(target, &weights, &h, columns), &judged, columns);
            for (found, before) in found.iter().zip(&before) {
                assert!(*found <= before * (1.0 + 1e-4), "{target} {settings}: {found} above {before}");
            }
            let (found, before) = (found.iter().sum::<f64>(), before.iter().sum::<f64>());
            assert!(found < 0.6 * before, "{target} {settings}: {found} of {before}");
            // What the walk believed is what the bytes say.
            assert!((report.error / found - 1.0).abs() < 1e-3, "{target}: {} but {found}", report.error);
            assert!((report.plain_error / before - 1.0).abs() < 1e-3, "{target}");
            assert!(target.format().expect("read").first_bad_block(&bytes).is_none());
        }
    }
}

#[test]
fn singular_and_indefinite_moments_are_damped_and_said_so() {
    let mut numbers = Numbers(4);
    let columns = 256;
    let weights = numbers.matrix(8, columns);
    // Three inputs in all: rank 3, most of the diagonal small.
    let singular = numbers.moments(columns, 3, 0.0);
    let (_, report) = walk(&feedback("damping=0"), BlockType::Q2K, &weights, &singular, columns);
    assert!(report.walked && report.damping_raised && report.damping > 0.0, "{report:?}");
    let mut indefinite = numbers.moments(columns, 40, 0.3);
    indefinite[columns + 2] = 500.0;
    indefinite[2 * columns + 1] = 500.0;
    let (bytes, report) = walk(&feedback(""), BlockType::Iq2Xxs, &weights, &indefinite, columns);
    assert!(report.damping_raised && report.damping > 0.01, "{report:?}");
    assert!(BlockType::Iq2Xxs.format().expect("read").first_bad_block(&bytes).is_none());
    // A column that no input ever used.
    let mut unused = numbers.moments(columns, 40, 0.3);
    for i in 0..columns {
        unused[7 * columns + i] = 0.0;
        unused[i * columns + 7] = 0.0;
    }
    assert!(walk(&feedback(""), BlockType::Q4K, &weights, &unused, columns).1.walked);
}

#[test]
fn unusable_moments_leave_the_plain_search() {
    let mut numbers = Numbers(5);
    let columns = 256;
    let weights = numbers.matrix(8, columns);
    let mut h = numbers.moments(columns, 40, 0.3);
    h[3] = f32::NAN;
    let (bytes, report) = walk(&feedback(""), BlockType::Q2K, &weights, &h, columns);
    assert!(!report.walked);
    h[3] = 0.0;
    assert_eq!(bytes, plain(BlockType::Q2K, &weights, &h, columns));
    let zero = vec![0.0; columns * columns];
    assert!(!walk(&feedback(""), BlockType::Iq2Xxs, &weights, &zero, columns).1.walked);
}

#[test]
fn hostile_weights_give_sound_blocks() {
    let mut numbers = Numbers(6);
    let columns = 256;
    let h = numbers.moments(columns, 40, 0.3);
    let mut weights = numbers.matrix(8, columns);
    weights[..columns].fill(0.0);
    weights[columns..2 * columns].iter_mut().for_each(|w| *w *= 1e-37);
    weights[2 * columns..3 * columns].iter_mut().for_each(|w| *w *= 1e30);
    weights[3 * columns] = f32::MAX;
    for target in WALKED {
        let (bytes, _) = walk(&feedback(""), target, &weights, &h, columns);
        assert_eq!(target.format().expect("read").first_bad_block(&bytes), None, "{target}");
    }
}

#[test]
fn bytes_depend_neither_on_threads_nor_on_the_instruction_set_of_the_search() {
    let mut numbers = Numbers(7);
    let (rows, columns) = (300, 256);
    let weights = numbers.matrix(rows, columns);
    let h = numbers.moments(columns, 40, 0.3);
    for target in WALKED {
        let run = |threads: usize, level| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            let mut feedback = feedback("");
            feedback.plain.level = level;
            pool.install(|| walk(&feedback, target, &weights, &h, columns).0)
        };
        let one = run(1, Level::detect());
        assert_eq!(one, run(3, Level::detect()), "{target}");
        assert_eq!(one, run(2, Level::Scalar), "{target}");
    }
}

#[test]
fn moments_do_not_depend_on_how_inputs_are_handed_over_and_weigh_them() {
    let mut numbers = Numbers(8);
    let (n, columns) = (700, 32);
    let rows = numbers.matrix(n, columns);
    let mut moments = SecondMoments::new(columns);
    let mut direct = vec![0.0f64; columns * columns];
    let mut total = 0.0;
    for (k, row) in rows.chunks_exact(columns).enumerate() {
        let weight = 0.5 + (k % 3) as f64;
        moments.add(row.iter().copied(), weight as f32);
        total += weight;
        for i in 0..columns {
            for j in 0..columns {
                direct[i * columns + j] += weight * f64::from(row[i]) * f64::from(row[j]);
            }
        }
    }
    assert_eq!(moments.n_rows(), n);
    for (found, direct) in moments.finish().iter().zip(&direct) {
        assert!((f64::from(*found) - direct / total).abs() < 1e-5);
    }
}

#[test]
fn settings_read_what_they_print_and_refuse_the_rest() {
    let settings: Settings = "damping=0.05,order=natural,d-factors=0.9/1.1,mix=0.3".parse().expect("sound");
    assert_eq!(settings.to_string().parse(), Ok(settings));
    for wrong in ["damping", "damping=x", "mix=2", "colour=red", "order=random", "d-factors=0", "reach=1000"]
    {
        assert!(wrong.parse::<Settings>().unwrap_err().to_string().contains(wrong));
    }
}

#[test]
fn corrected_weights_are_the_least_squares_ones_and_ridges_hold_them_back() {
    let mut numbers = Numbers(9);
    let (n, rows, columns) = (600, 5, 24);
    let weights = numbers.matrix(rows, columns);
    let right = numbers.matrix(n, columns);
    // Inputs that have shrunk and are disturbed.
    let changed: Vec<f32> = right.iter().map(|x| 0.8 * x + 0.3 * numbers.normal() as f32).collect();
    let moments = |a: &[f32], b: &[f32]| {
        let mut moments = CrossMoments::new(columns);
        let rows = CrossMoments::ROWS * columns;
        a.chunks(rows).zip(b.chunks(rows)).for_each(|(a, b)| moments.add(a, b));
        moments.finish()
    };
    let (cross, own) = (moments(&right, &changed), moments(&changed, &changed));
    let error = |by: &[f32]| -> f64 {
        let (a, b) = (products(&right, &weights, columns), products(&changed, by, columns));
        a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    };
    let best = corrected(&weights, &cross, &own, columns, 1e-9).expect("solvable");
    assert!(error(&best) < 0.95 * error(&weights), "{} of {}", error(&best), error(&weights));
    for k in 0..rows * columns {
        let mut other = best.clone();
        other[k] += 0.02;
        assert!(error(&other) > error(&best), "value {k} is not the best");
    }
    let held = corrected(&weights, &cross, &own, columns, 1.0).expect("solvable");
    assert!(error(&best) < error(&held) && error(&held) < error(&weights));
    let stuck = corrected(&weights, &cross, &own, columns, 1e9).expect("solvable");
    assert!(stuck.iter().zip(&weights).all(|(a, b)| (a - b).abs() < 1e-5));
    assert_eq!(corrected(&weights, &cross, &vec![0.0; columns * columns], columns, 0.5), None);
    assert_eq!(corrected(&weights, &vec![f32::NAN; columns * columns], &own, columns, 0.5), None);
}

#[test]
fn alignment_is_given_back_without_another_code() {
    let mut numbers = Numbers(10);
    let (rows, columns) = (16, 512);
    let weights = numbers.matrix(rows, columns);
    let h = numbers.moments(columns, 60, 0.3);
    let settings = |a: &str| format!("alignment={a},scalar-alignment={a}");
    for target in [BlockType::Iq2Xxs, BlockType::Q2K] {
        let run = |a: &str| walk(&feedback(&settings(a)), target, &weights, &h, columns);
        let ((free, _), (kept, report)) = (run("0"), run("0.97"));
        assert_eq!(report.n_plain_rows, 0);
        let aligned = |bytes: &[u8]| {
            let mut q = vec![0.0; weights.len()];
            target.format().expect("read").dequantize(bytes, &mut q);
            let sums = q.iter().zip(&weights).enumerate().fold((0.0, 0.0), |(a, b), (k, (q, w))| {
                let weight = f64::from(h[k % columns * (columns + 1)]) * f64::from(*w);
                (a + weight * f64::from(*q), b + weight * f64::from(*w))
            });
            sums.0 / sums.1
        };
        assert!(aligned(&free) < 0.95, "{target}: {}", aligned(&free));
        assert!((aligned(&kept) - 0.97).abs() < 0.01, "{target}: {}", aligned(&kept));
        let differing = free.iter().zip(&kept).filter(|(a, b)| a != b).count();
        assert!(differing <= rows * columns / 256 * 4, "{target}: only scales differ, not {differing} bytes");
    }
}

#[test]
fn sweeps_lower_the_full_error_and_end_where_nothing_changes() {
    let mut numbers = Numbers(11);
    let (rows, columns) = (8, 512);
    let weights = numbers.matrix(rows, columns);
    let h = numbers.moments(columns, 60, 0.3);
    for target in WALKED {
        let run = |sweeps: u32| {
            // Without alignment: it is given back after the sweeps and raises the error again.
            let feedback = feedback(&format!("sweeps={sweeps},alignment=0,scalar-alignment=0"));
            let judged = damped(&h, columns, feedback.settings.damping);
            let (bytes, report) = walk(&feedback, target, &weights, &h, columns);
            let found = errors(target, &weights, &bytes, &judged, columns);
            let sum: f64 = found.iter().sum();
            assert!((report.error / sum - 1.0).abs() < 1e-3, "{target}: {} but {sum}", report.error);
            assert!(target.format().expect("read").first_bad_block(&bytes).is_none());
            (bytes, found)
        };
        let (walked, once, often) = (run(0).1, run(1).1, run(40));
        for ((walked, once), often) in walked.iter().zip(&once).zip(&often.1) {
            assert!(*once <= walked * (1.0 + 1e-5), "{target}: {once} above {walked}");
            assert!(*often <= once * (1.0 + 1e-5), "{target}: {often} above {once}");
        }
        let sum = |errors: &[f64]| errors.iter().sum::<f64>();
        assert!(sum(&often.1) < 0.97 * sum(&walked), "{target}: {} of {}", sum(&often.1), sum(&walked));
        assert_eq!(often.0, run(41).0, "{target}: nothing is left to change");
    }
}
