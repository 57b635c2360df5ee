//! The exact search, in double precision and without any cleverness but one: an entry that no scale
//! prefers is left out. It tries every scale it is given with every scale index.

/// `P` and `Q` of one entry (see the search).
type Point = (f64, f64);

/// Weighted squared error that remains of one super-block at best, over the given `d`.
pub(super) fn least_error(
    codebook: &[[f64; 8]],
    values: &[f32],
    weights: &[f32],
    candidates: impl Iterator<Item = f64>,
) -> f64 {
    let eights: Vec<Vec<Point>> = values
        .chunks_exact(8)
        .zip(weights.chunks_exact(8))
        .map(|(x, w)| hull(codebook.iter().map(|g| point(g, x, w)).collect()))
        .collect();
    let energy: f64 = values.iter().zip(weights).map(|(&x, &w)| f64::from(w) * f64::from(x).powi(2)).sum();
    let gain = |sub_block: &[Vec<Point>], s: f64| -> f64 {
        sub_block
            .iter()
            .map(|hull| hull.iter().map(|(p, q)| s * (2.0 * p - s * q)).fold(f64::MIN, f64::max))
            .sum()
    };
    let best = candidates
        .map(|d| {
            let scales = (0..16).map(|index| d * (0.5 + f64::from(index)) / 4.0);
            eights
                .chunks_exact(4)
                .map(|sub_block| scales.clone().map(|s| gain(sub_block, s)).fold(f64::MIN, f64::max))
                .sum()
        })
        .fold(0.0, f64::max);
    energy - best
}

fn point(entry: &[f64; 8], x: &[f32], w: &[f32]) -> Point {
    let terms: Vec<Point> = (0..8)
        .map(|i| {
            let w = f64::from(w[i]);
            (w * f64::from(x[i].abs()) * entry[i], w * entry[i] * entry[i])
        })
        .collect();
    let least = terms.iter().map(|t| t.0).fold(f64::MAX, f64::min);
    let odd = x.iter().filter(|&&x| x < 0.0).count() % 2 == 1;
    let p: f64 = terms.iter().map(|t| t.0).sum();
    (if odd { p - 2.0 * least } else { p }, terms.iter().map(|t| t.1).sum())
}

/// The points that maximise `P - h Q` for some `h >= 0`.
fn hull(mut points: Vec<Point>) -> Vec<Point> {
    points.sort_by(|a, b| a.1.total_cmp(&b.1).then(b.0.total_cmp(&a.0)));
    let mut hull: Vec<Point> = Vec::new();
    for c in points {
        if hull.last().is_some_and(|a| c.0 <= a.0) {
            continue;
        }
        while let [.., a, b] = hull[..] {
            if (b.0 - a.0) * (c.1 - b.1) > (c.0 - b.0) * (b.1 - a.1) {
                break;
            }
            hull.pop();
        }
        hull.push(c);
    }
    hull
}
