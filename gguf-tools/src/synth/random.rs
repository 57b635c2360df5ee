//! Numbers from counters: the value at an index depends on seed, tensor name and index alone, so tensors are made row by
//! row, in any order, with the same bytes on every machine. Only integer arithmetic and correctly rounded operations.

/// Step between the states of SplitMix64.
const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream of random numbers that is addressed by index.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counter {
    key: u64,
}

impl Counter {
    /// The stream of one tensor.
    pub(super) fn new(seed: u64, name: &str) -> Self {
        // FNV-1a, then mixed so that names that differ in their last letter have unrelated streams.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self { key: mix(mix(seed ^ GOLDEN_GAMMA) ^ hash) }
    }

    /// 64 random bits.
    pub(super) fn at(self, index: u64) -> u64 {
        mix(self.key.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN_GAMMA)))
    }

    /// A number of mean 0 and variance 1, nearly normal: the sum of four uniform ones.
    pub(super) fn normal(self, index: u64) -> f32 {
        let bits = self.at(index);
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        // Four uniform numbers below 2^16 have mean 2 * (2^16 - 1) and, nearly, variance 2^32 / 3.
        ((sum as f64 - 131_070.0) * 3_f64.sqrt() / 65_536.0) as f32
    }
}

/// The finalizer of SplitMix64.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// For each random byte the code whose value is nearest to a normal number of standard deviation `deviation`.
///
/// `values[code]`: value of each code, not negative and rising; `sign`: the bit that negates.
pub(super) fn normal_codes(values: &[f64], sign: u8, deviation: f64) -> [u8; 256] {
    std::array::from_fn(|byte| {
        let wanted = quantile((byte as f64 + 0.5) / 256.0) * deviation;
        let nearest = (0..values.len())
            .min_by(|&a, &b| (values[a] - wanted.abs()).abs().total_cmp(&(values[b] - wanted.abs()).abs()))
            .unwrap_or(0) as u8;
        if wanted < 0.0 { nearest | sign } else { nearest }
    })
}

/// Where the sum of four uniform numbers, brought to mean 0 and variance 1, has probability `p` below it.
fn quantile(p: f64) -> f64 {
    const BINOMIALS: [f64; 4] = [1.0, -4.0, 6.0, -4.0];
    let below = |x: f64| -> f64 {
        BINOMIALS
            .iter()
            .enumerate()
            .map(|(k, binomial)| (x - k as f64, binomial))
            .filter(|(over, _)| *over > 0.0)
            .map(|(over, binomial)| binomial * (over * over) * (over * over) / 24.0)
            .sum()
    };
    let (mut low, mut high) = (0.0, 4.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if below(middle) < p {
            low = middle;
        } else {
            high = middle;
        }
    }
    (0.5 * (low + high) - 2.0) * 3_f64.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_0_and_variance_1_in_both_ways_of_making_them() {
        let counter = Counter::new(1, "a");
        let n = 20_000;
        let numbers: Vec<f64> = (0..n).map(|i| f64::from(counter.normal(i))).collect();
        let mean = numbers.iter().sum::<f64>() / n as f64;
        let variance = numbers.iter().map(|x| x * x).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
        let quantiles: f64 =
            (0..256).map(|i| quantile((f64::from(i) + 0.5) / 256.0).powi(2)).sum::<f64>() / 256.0;
        assert!((quantiles - 1.0).abs() < 0.01, "{quantiles}");
    }

    #[test]
    fn streams_of_names_and_seeds_differ() {
        let first = Counter::new(1, "layers.0.w");
        assert_ne!(first.at(0), Counter::new(1, "layers.1.w").at(0));
        assert_ne!(first.at(0), Counter::new(2, "layers.0.w").at(0));
        assert_ne!(first.at(0), first.at(1));
    }
}
