//! Two tables of scores of the same cases, case by case.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Interval;
use crate::table::{Row, ScoreTable};

/// Differences of a case below this are a tie, as in ds4's comparison.
const TIE_NATS: f64 = 1e-9;

/// Why two tables cannot be compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PairError {
    /// The cases are not the same ones.
    #[error(
        "`{old}` and `{new}` hold different cases: {only_old} only in the first, {only_new} only in the second, for example `{example}`; \
         score both files by the same set"
    )]
    DifferentCases {
        /// The first table.
        old: String,
        /// The second table.
        new: String,
        /// Cases only there.
        only_old: usize,
        /// Cases only there.
        only_new: usize,
        /// One of them.
        example: String,
    },
    /// A case has another length.
    #[error(
        "case `{id}` has {old} tokens in the first table and {new} in the second: the tokenizers or the sets differ"
    )]
    DifferentTokens {
        /// The case.
        id: String,
        /// Tokens in the first.
        old: u64,
        /// Tokens in the second.
        new: u64,
    },
    /// The tables are of several checkpoints.
    #[error(
        "the {what} are of different checkpoints, `{old}` and `{new}`: the difference would be read as one of quality; \
         compare anyway with --allow-other-checkpoint"
    )]
    DifferentCheckpoints {
        /// Models or cases.
        what: &'static str,
        /// Of the first table.
        old: String,
        /// Of the second table.
        new: String,
    },
}

/// One group of cases: all, or those of a kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Name of the kind, or `all`.
    pub kind: String,
    /// Cases.
    pub n_cases: usize,
    /// Tokens of their continuations.
    pub n_tokens: u64,
    /// Nats a token, old and new.
    pub average_nll: [f64; 2],
    /// New less old, nats a token: below 0 where the new file fits better. The bootstrap draws whole cases.
    pub difference: Interval,
    /// Cases that the new file fits better, worse, and equally well.
    pub wins: usize,
    /// See `wins`.
    pub losses: usize,
    /// See `wins`.
    pub ties: usize,
    /// Two-sided p of the exact sign test on wins and losses; 1 without any.
    pub sign_test_p: f64,
    /// Cases whose first token matches, old and new.
    pub first_match: [usize; 2],
    /// Mean greedy longest common prefix, tokens, old and new.
    pub average_lcp: [f64; 2],
    /// Share of positions whose best token is the API's, old and new, where it was recorded.
    pub top1_rate: [Option<f64>; 2],
}

/// A comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairedComparison {
    /// All cases.
    pub all: Group,
    /// The cases of each kind, where the tables name kinds.
    pub kinds: Vec<Group>,
    /// The first table, case by case, against another scoring of the same file, or against itself: what difference means nothing.
    pub noise: Interval,
    /// Cases whose score changed between the two scorings of the first file.
    pub noise_changed: usize,
}

/// Compares tables of the same cases. `again`: another scoring of the first file, by another backend for example; without one the
/// noise is that of the table against itself.
///
/// # Errors
/// If cases, their lengths, or checkpoints differ; the last are let through by `allow_other_checkpoint`.
pub fn compare(
    old: &ScoreTable,
    new: &ScoreTable,
    again: Option<&ScoreTable>,
    allow_other_checkpoint: bool,
) -> Result<PairedComparison, PairError> {
    let pairs = pair(old, new, allow_other_checkpoint)?;
    let noise_pairs = pair(old, again.unwrap_or(old), allow_other_checkpoint)?;
    let mut by_kind: BTreeMap<&str, Vec<(&Row, &Row)>> = BTreeMap::new();
    for pair in &pairs {
        if let Some(kind) = pair.0.kind.as_deref().or(pair.1.kind.as_deref()) {
            by_kind.entry(kind).or_default().push(*pair);
        }
    }
    let noise = group("noise", &noise_pairs);
    Ok(PairedComparison {
        all: group("all", &pairs),
        kinds: by_kind.iter().map(|(kind, pairs)| group(kind, pairs)).collect(),
        noise: noise.difference,
        noise_changed: noise.wins + noise.losses,
    })
}

fn pair<'a>(
    old: &'a ScoreTable,
    new: &'a ScoreTable,
    allow: bool,
) -> Result<Vec<(&'a Row, &'a Row)>, PairError> {
    for (what, a, b) in [
        ("models", &old.checkpoint, &new.checkpoint),
        ("cases", &old.cases_checkpoint, &new.cases_checkpoint),
    ] {
        if let (Some(a), Some(b)) = (a, b)
            && !allow
            && !crate::label::is_same(a, b)
        {
            return Err(PairError::DifferentCheckpoints { what, old: a.clone(), new: b.clone() });
        }
    }
    let by_id = |table: &'a ScoreTable| -> BTreeMap<&'a str, &'a Row> {
        table.rows.iter().map(|row| (row.id.as_str(), row)).collect()
    };
    let (of_old, of_new) = (by_id(old), by_id(new));
    let only = |a: &BTreeMap<&'a str, &'a Row>, b: &BTreeMap<&'a str, &'a Row>| -> Vec<&'a str> {
        a.keys().filter(|id| !b.contains_key(*id)).copied().collect()
    };
    let (only_old, only_new) = (only(&of_old, &of_new), only(&of_new, &of_old));
    if let Some(example) = only_old.first().or(only_new.first()) {
        return Err(PairError::DifferentCases {
            old: old.path.display().to_string(),
            new: new.path.display().to_string(),
            only_old: only_old.len(),
            only_new: only_new.len(),
            example: (*example).to_owned(),
        });
    }
    let pairs: Vec<_> = old.rows.iter().map(|row| (row, of_new[row.id.as_str()])).collect();
    match pairs.iter().find(|(a, b)| a.target_tokens != b.target_tokens) {
        Some((a, b)) => {
            Err(PairError::DifferentTokens { id: a.id.clone(), old: a.target_tokens, new: b.target_tokens })
        }
        None => Ok(pairs),
    }
}

fn group(kind: &str, pairs: &[(&Row, &Row)]) -> Group {
    let n_tokens: u64 = pairs.iter().map(|(row, _)| row.target_tokens).sum();
    let sides = |of: &dyn Fn(&Row) -> f64| {
        [pairs.iter().map(|(a, _)| of(a)).sum::<f64>(), pairs.iter().map(|(_, b)| of(b)).sum::<f64>()]
    };
    let differences: Vec<f64> = pairs.iter().map(|(a, b)| b.nll - a.nll).collect();
    let wins = differences.iter().filter(|d| **d < -TIE_NATS).count();
    let losses = differences.iter().filter(|d| **d > TIE_NATS).count();
    let clusters: Vec<(f64, usize)> =
        differences.iter().zip(pairs).map(|(&d, (row, _))| (d, row.target_tokens as usize)).collect();
    let rate = |side: fn(&(&Row, &Row)) -> (u64, u64)| {
        let (n, same) = pairs.iter().map(side).fold((0, 0), |sum, top1| (sum.0 + top1.0, sum.1 + top1.1));
        (n > 0).then(|| same as f64 / n as f64)
    };
    Group {
        kind: kind.to_owned(),
        n_cases: pairs.len(),
        n_tokens,
        average_nll: sides(&|row| row.nll).map(|sum| sum / n_tokens as f64),
        difference: Interval::of_clusters(&clusters),
        wins,
        losses,
        ties: pairs.len() - wins - losses,
        sign_test_p: sign_test(wins, losses),
        first_match: sides(&|row| f64::from(u8::from(row.first_match))).map(|n| n as usize),
        average_lcp: sides(&|row| row.greedy_lcp as f64).map(|sum| sum / pairs.len() as f64),
        top1_rate: [rate(|pair| pair.0.top1), rate(|pair| pair.1.top1)],
    }
}

/// Two-sided p of the exact sign test: the chance that, wins and losses being equally likely, the rarer of them is at most as
/// frequent as found. `2 sum_{k <= min} C(n, k) / 2^n`, at most 1; ties do not count.
pub fn sign_test(wins: usize, losses: usize) -> f64 {
    let (n, rarer) = (wins + losses, wins.min(losses));
    // Logarithms: 2^n leaves the range of f64 at n = 1024.
    let mut log_term = -(n as f64) * std::f64::consts::LN_2;
    let mut sum = log_term.exp();
    for k in 0..rarer {
        log_term += ((n - k) as f64 / (k + 1) as f64).ln();
        sum += log_term.exp();
    }
    (2.0 * sum).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sign_test_has_the_values_of_the_binomial_distribution() {
        // Sums of binomial coefficients by hand: 2 (1 + 10 + 45) / 1024 and 2 / 2^5; the others in whole numbers by Python.
        assert!((sign_test(8, 2) - 112.0 / 1024.0).abs() < 1e-12);
        assert!((sign_test(0, 5) - 2.0 / 32.0).abs() < 1e-12);
        assert!((sign_test(20, 80) / 1.115_908_905_725e-9 - 1.0).abs() < 1e-9);
        assert_eq!(sign_test(3, 3), 1.0);
        assert_eq!(sign_test(0, 0), 1.0);
        assert!((sign_test(2000, 1000) / 1.009_014_862_8e-75 - 1.0).abs() < 1e-9);
    }
}
