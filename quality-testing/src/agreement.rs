//! Agreement of a model with the log-probabilities that an API recorded, by ds4's counts.

use runner::logits::{log_probability, top_log_probabilities};
use serde::{Deserialize, Serialize};

use crate::cases::{NOT_TOLD, Position};
use crate::scoring::Vocabulary;

/// Differences this small are no order.
const NO_ORDER: f64 = 1e-12;

/// Sums over positions; [`Agreement::mae`] and the other ratios make the reported numbers of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Agreement {
    /// Recorded tokens.
    pub ref_tokens: u64,
    /// Those whose log-probability was compared.
    pub target_tokens: u64,
    /// Sum of absolute differences, model less API, of the recorded tokens' log-probabilities, nats.
    pub target_abs_delta: f64,
    /// The same with its sign.
    pub target_signed_delta: f64,
    /// Recorded alternatives.
    pub top_items: u64,
    /// Those that are one token of this vocabulary.
    pub top_mapped: u64,
    /// Positions whose best alternative is one.
    pub top1_count: u64,
    /// Those at which it is the model's best, too.
    pub top1_match: u64,
    /// Alternatives among the model's best, of as many as are recorded at the position.
    pub topn_hit: u64,
    /// Sum of absolute differences of all mapped alternatives, nats. Where the API tells no log-probability but -9999,
    /// this says nothing: see `told`.
    pub top_abs_delta: f64,
    /// The same with its sign.
    pub top_signed_delta: f64,
    /// Mapped alternatives whose log-probability the API tells.
    pub told: u64,
    /// Sum of absolute differences of those, nats.
    pub told_abs_delta: f64,
    /// Pairs of alternatives at one position that both order.
    pub pair_total: u64,
    /// Those that both order alike.
    pub pair_agree: u64,
}

impl Agreement {
    /// Counts one position. `own`: the model's log-probability of the recorded token.
    pub(crate) fn add_position(
        &mut self,
        recorded: &Position,
        logits: &[f32],
        own: f64,
        vocabulary: &Vocabulary,
    ) {
        if recorded.log_probability.is_finite() {
            let delta = own - recorded.log_probability;
            self.target_tokens += 1;
            self.target_abs_delta += delta.abs();
            self.target_signed_delta += delta;
        }
        if recorded.top.is_empty() {
            return;
        }
        let best = top_log_probabilities(logits, recorded.top.len());
        self.top_items += recorded.top.len() as u64;
        let mut mapped = Vec::with_capacity(recorded.top.len());
        for (rank, alternative) in recorded.top.iter().enumerate() {
            let Some(token) = vocabulary.token(&alternative.token) else { continue };
            let ours = log_probability(logits, token);
            if rank == 0 {
                self.top1_count += 1;
                self.top1_match += u64::from(best.first().is_some_and(|(first, _)| *first == token));
            }
            let delta = ours - alternative.log_probability;
            self.top_mapped += 1;
            self.top_abs_delta += delta.abs();
            self.top_signed_delta += delta;
            if alternative.log_probability > NOT_TOLD {
                self.told += 1;
                self.told_abs_delta += delta.abs();
            }
            self.topn_hit += u64::from(best.iter().any(|(other, _)| *other == token));
            mapped.push((token, alternative.log_probability, ours));
        }
        for (i, a) in mapped.iter().enumerate() {
            for b in mapped[i + 1..].iter().filter(|b| b.0 != a.0) {
                let (api, ours) = (a.1 - b.1, a.2 - b.2);
                if api.abs() >= NO_ORDER && ours.abs() >= NO_ORDER {
                    self.pair_total += 1;
                    self.pair_agree += u64::from((api > 0.0) == (ours > 0.0));
                }
            }
        }
    }

    /// Adds the counts of other positions.
    pub fn add(&mut self, other: &Self) {
        self.ref_tokens += other.ref_tokens;
        self.target_tokens += other.target_tokens;
        self.target_abs_delta += other.target_abs_delta;
        self.target_signed_delta += other.target_signed_delta;
        self.top_items += other.top_items;
        self.top_mapped += other.top_mapped;
        self.top1_count += other.top1_count;
        self.top1_match += other.top1_match;
        self.topn_hit += other.topn_hit;
        self.top_abs_delta += other.top_abs_delta;
        self.top_signed_delta += other.top_signed_delta;
        self.told += other.told;
        self.told_abs_delta += other.told_abs_delta;
        self.pair_total += other.pair_total;
        self.pair_agree += other.pair_agree;
    }

    /// `sum / n`, 0 for none: ds4 writes 0 where there is nothing.
    pub fn ratio(sum: f64, n: u64) -> f64 {
        if n == 0 { 0.0 } else { sum / n as f64 }
    }

    /// Mean absolute difference of the recorded tokens' log-probabilities, nats.
    pub fn mae(&self) -> f64 {
        Self::ratio(self.target_abs_delta, self.target_tokens)
    }

    /// Share of positions with the same best token; `None` without any.
    pub fn top1_rate(&self) -> Option<f64> {
        (self.top1_count > 0).then(|| Self::ratio(self.top1_match as f64, self.top1_count))
    }

    /// Whether the API told log-probabilities of fewer than half of its alternatives.
    pub fn is_saturated(&self) -> bool {
        self.top_mapped > 0 && self.told * 2 < self.top_mapped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::Alternative;

    #[test]
    fn the_counts_are_those_made_by_hand() {
        let by_bytes = [(b"a", 0), (b"b", 1), (b"c", 2), (b"d", 3)].map(|(text, id)| (text.to_vec(), id));
        let vocabulary = Vocabulary { by_bytes: by_bytes.into() };
        let logits = [3.0f32, 2.0, 1.0, 0.0];
        let top = [("b", -0.1), ("a", -2.0), ("zz", -3.0), ("c", -9999.0)];
        let top = top.map(|(token, log_probability)| Alternative { token: token.into(), log_probability });
        let position = Position { token: b"b".to_vec(), log_probability: -0.1, top: top.to_vec() };
        let sum = logits.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln();
        let mut agreement = Agreement::default();
        agreement.add_position(&position, &logits, 2.0 - sum, &vocabulary);
        assert_eq!((agreement.top_items, agreement.top_mapped, agreement.told), (4, 3, 2));
        assert_eq!((agreement.top1_count, agreement.top1_match), (1, 0), "the API's best is b, ours is a");
        assert_eq!(agreement.topn_hit, 3);
        assert_eq!((agreement.pair_total, agreement.pair_agree), (3, 2), "b and a are the other way round");
        assert!((agreement.mae() - (2.0 - sum + 0.1).abs()).abs() < 1e-12);
        let told = (2.0 - sum + 0.1).abs() + (3.0 - sum + 2.0).abs();
        assert!((agreement.told_abs_delta - told).abs() < 1e-12);
        assert!((agreement.top_abs_delta - told - (1.0 - sum + 9999.0)).abs() < 1e-9);
        assert!(!agreement.is_saturated());
    }
}
