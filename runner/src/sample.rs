//! Picking the next token.

use rand_core::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;

use crate::error::RunnerError;
use crate::logits::argmax;

/// How the next token is picked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 = always the most probable token.
    pub temperature: f64,
    /// The most probable tokens that together reach this share are kept; 1 = all.
    pub top_p: f64,
    /// Tokens below this share of the best one's probability are dropped; 0 = none.
    pub min_p: f64,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// Picks tokens. The same seed and logits give the same tokens on every machine, forever:
/// random numbers are those of PCG64 (128-bit state, XSL-RR output), seeded by `rand_core`'s `seed_from_u64`.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    random: Pcg64,
}

impl Sampler {
    /// A sampler at the start of its random numbers.
    ///
    /// # Errors
    /// If a value is out of range.
    pub fn new(sampling: Sampling) -> Result<Self, RunnerError> {
        let refuse = |option, found: f64, expected| {
            Err(RunnerError::BadOption { option, found: found.to_string(), expected })
        };
        if !(sampling.temperature.is_finite() && sampling.temperature >= 0.0) {
            return refuse("temperature", sampling.temperature, "a number from 0 up");
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            return refuse("top-p", sampling.top_p, "a number above 0 and up to 1");
        }
        if !(0.0..=1.0).contains(&sampling.min_p) {
            return refuse("min-p", sampling.min_p, "a number from 0 to 1");
        }
        Ok(Self { sampling, random: Pcg64::seed_from_u64(sampling.seed) })
    }

    /// The next token. One random number is drawn, except at temperature 0.
    ///
    /// Temperature first, then `min_p`, then `top_p` on what is left, then a draw in proportion to the probabilities.
    pub fn pick(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_p, min_p, .. } = self.sampling;
        let first = argmax(logits);
        if temperature == 0.0 {
            return first;
        }
        let best = f64::from(logits[first as usize]);
        let share = |logit: f32| ((f64::from(logit) - best) / temperature).exp();
        let shares = logits.iter().enumerate().map(|(token, &logit)| (token as u32, share(logit)));
        let mut kept: Vec<(u32, f64)> = shares.filter(|&(_, share)| share > 0.0 && share >= min_p).collect();
        if top_p < 1.0 {
            keep_most_probable(&mut kept, top_p);
        }
        let total: f64 = kept.iter().map(|(_, share)| share).sum();
        // 53 random bits: every value is a whole multiple of 2^-53.
        let mut left = (self.random.next_u64() >> 11) as f64 * 2.0_f64.powi(-53) * total;
        for &(token, share) in &kept {
            left -= share;
            if left < 0.0 {
                return token;
            }
        }
        // Rounding let the sum fall short of the total.
        kept.last().map_or(first, |&(token, _)| token)
    }
}

/// Keeps the fewest tokens that together reach `top_p` of all shares, most probable first, the lower of two equal ones
/// first. Few tokens are ranked, however many there are.
fn keep_most_probable(kept: &mut Vec<(u32, f64)>, top_p: f64) {
    let wanted = top_p * kept.iter().map(|(_, share)| share).sum::<f64>();
    let order = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let (mut reached, mut ranked, mut step) = (0.0, 0, FIRST_RANKED);
    while ranked < kept.len() {
        let rest = &mut kept[ranked..];
        let n = step.min(rest.len());
        if n < rest.len() {
            rest.select_nth_unstable_by(n, order);
        }
        rest[..n].sort_unstable_by(order);
        for at in ranked..ranked + n {
            reached += kept[at].1;
            if reached >= wanted {
                kept.truncate(at + 1);
                return;
            }
        }
        ranked += n;
        step *= 8;
    }
}

/// Tokens that are ranked at first.
const FIRST_RANKED: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn picks(sampling: Sampling, logits: &[f32], n: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling).unwrap();
        (0..n).map(|_| sampler.pick(logits)).collect()
    }

    const LOGITS: [f32; 5] = [0.0, 2.0, 1.0, -1.0, 2.0];

    #[test]
    fn temperature_zero_takes_the_best_and_the_lower_of_two() {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(picks(sampling, &LOGITS, 3), [1, 1, 1]);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let all = picks(Sampling::default(), &LOGITS, 40_000);
        let probabilities = crate::logits::log_probabilities(&LOGITS);
        for (token, log) in probabilities.iter().enumerate() {
            let n = all.iter().filter(|&&t| t == token as u32).count() as f64;
            let expected = 40_000.0 * log.exp();
            assert!((n - expected).abs() < 5.0 * expected.sqrt(), "token {token}: {n} of {expected}");
        }
    }

    #[test]
    fn min_p_and_top_p_keep_the_best_tokens_only() {
        let only = |sampling| {
            let mut tokens = picks(sampling, &LOGITS, 2_000);
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        assert_eq!(only(Sampling { min_p: 0.2, ..Sampling::default() }), [1, 2, 4]);
        assert_eq!(only(Sampling { min_p: 0.9, ..Sampling::default() }), [1, 4]);
        assert_eq!(only(Sampling { top_p: 0.3, ..Sampling::default() }), [1]);
        assert_eq!(only(Sampling { top_p: 0.7, ..Sampling::default() }), [1, 4]);
    }

    #[test]
    fn the_most_probable_are_those_of_a_full_ranking() {
        // 3,000 shares with many equal ones.
        let shares: Vec<(u32, f64)> =
            (0..3000_u32).map(|i| (i, f64::from(i.wrapping_mul(2_654_435_761) >> 22) + 1.0)).collect();
        let mut ranked = shares.clone();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        let total: f64 = shares.iter().map(|s| s.1).sum();
        for top_p in [1e-9, 0.01, 0.1, 0.5, 0.9, 0.999_999] {
            let mut reached = 0.0;
            let n = ranked.iter().position(|s| {
                reached += s.1;
                reached >= top_p * total
            });
            let mut kept = shares.clone();
            keep_most_probable(&mut kept, top_p);
            assert_eq!(kept, ranked[..=n.unwrap()], "{top_p}");
        }
    }

    #[test]
    fn a_seed_means_the_same_tokens_forever() {
        let flat = [0.0; 100];
        let tokens = picks(Sampling { seed: 7, ..Sampling::default() }, &flat, 8);
        assert_eq!(tokens, PINNED);
        assert_ne!(picks(Sampling { seed: 8, ..Sampling::default() }, &flat, 8), tokens);
    }

    /// From the first run: a change of the stream would break recorded runs.
    const PINNED: [u32; 8] = [0, 23, 90, 83, 49, 59, 8, 32];

    #[test]
    fn senseless_settings_are_refused() {
        for sampling in [
            Sampling { temperature: -1.0, ..Sampling::default() },
            Sampling { temperature: f64::NAN, ..Sampling::default() },
            Sampling { top_p: 0.0, ..Sampling::default() },
            Sampling { min_p: 1.5, ..Sampling::default() },
        ] {
            assert!(Sampler::new(sampling).is_err(), "{sampling:?}");
        }
    }
}
