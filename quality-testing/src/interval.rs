//! Intervals of means over text positions.

use rand_core::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use serde::{Deserialize, Serialize};

/// Neighbouring positions share context, so they are drawn together: this many at a time.
const BLOCK_POSITIONS: usize = 64;

/// Resamples of the bootstrap.
const RESAMPLES: usize = 1000;

/// A mean with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// The mean of all positions.
    pub mean: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    /// The mean of `values` with the interval of a bootstrap over blocks of 64 neighbouring positions
    /// (percentiles 2.5 and 97.5 of 1000 resamples, fixed seed). All zero for no values.
    ///
    /// Give it per-position *differences* to compare two files: pairing takes the difficulty of the text out.
    pub fn of(values: &[f64]) -> Self {
        let blocks: Vec<(f64, usize)> =
            values.chunks(BLOCK_POSITIONS).map(|block| (block.iter().sum(), block.len())).collect();
        let mut interval = Self::of_clusters(&blocks);
        if !values.is_empty() {
            interval.mean = values.iter().sum::<f64>() / values.len() as f64;
        }
        interval
    }

    /// The mean of values that belong together in clusters of any size, each given as (sum, number of values), with the interval
    /// of a bootstrap over whole clusters, as [`Interval::of`].
    pub fn of_clusters(blocks: &[(f64, usize)]) -> Self {
        let n_values: usize = blocks.iter().map(|block| block.1).sum();
        if n_values == 0 {
            return Self { mean: 0.0, low: 0.0, high: 0.0 };
        }
        let mean = blocks.iter().map(|block| block.0).sum::<f64>() / n_values as f64;
        let mut random = Pcg64::seed_from_u64(0);
        let mut means: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let mut total = (0.0, 0);
                for _ in 0..blocks.len() {
                    let (sum, n) = blocks[(random.next_u64() % blocks.len() as u64) as usize];
                    total = (total.0 + sum, total.1 + n);
                }
                total.0 / total.1.max(1) as f64
            })
            .collect();
        means.sort_by(f64::total_cmp);
        Self { mean, low: means[RESAMPLES * 25 / 1000], high: means[RESAMPLES * 975 / 1000 - 1] }
    }

    /// Whether the interval lies on one side of zero.
    pub fn excludes_zero(&self) -> bool {
        self.low > 0.0 || self.high < 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_holds_the_mean_and_narrows_with_more_positions() {
        let noise = |n: usize| (0..n).map(|i| ((i * 7919) % 1000) as f64 / 500.0).collect::<Vec<_>>();
        let (few, many) = (Interval::of(&noise(1_000)), Interval::of(&noise(100_000)));
        for interval in [few, many] {
            assert!(interval.low <= interval.mean && interval.mean <= interval.high, "{interval:?}");
            assert!(interval.excludes_zero());
        }
        assert!(many.high - many.low < few.high - few.low);
        assert!(!Interval::of(&[0.0; 500]).excludes_zero());
        assert_eq!(Interval::of(&[]).mean, 0.0);
    }
}
