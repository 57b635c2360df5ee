//! Picking the next token.

use rand_core::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;

use crate::error::RunnerError;
use crate::logits::{argmax, top_log_probabilities};

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
        if temperature == 0.0 {
            return argmax(logits);
        }
        let ranked = top_log_probabilities(logits, logits.len());
        let best = ranked[0].1;
        let mut kept: Vec<(u32, f64)> = ranked
            .into_iter()
            .map(|(token, log)| (token, ((log - best) / temperature).exp()))
            .take_while(|&(_, share)| share >= min_p)
            .collect();
        let total: f64 = kept.iter().map(|(_, share)| share).sum();
        let mut reached = 0.0;
        let n_kept = kept.iter().position(|(_, share)| {
            reached += share;
            reached >= top_p * total
        });
        kept.truncate(n_kept.map_or(kept.len(), |last| last + 1));
        let total: f64 = kept.iter().map(|(_, share)| share).sum();
        // 53 random bits: every value is a whole multiple of 2^-53.
        let mut left = (self.random.next_u64() >> 11) as f64 * 2.0_f64.powi(-53) * total;
        for &(token, share) in &kept {
            left -= share;
            if left < 0.0 {
                return token;
            }
        }
        kept[kept.len() - 1].0
    }
}

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
