//! From logits to probabilities.

use crate::error::RunnerError;

/// Log of the sum of the exponentials, in `f64`.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)));
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - largest).exp()).sum();
    largest + sum.ln()
}

/// Natural-log probability of `token`.
///
/// # Panics
/// If there is no such token.
pub fn log_probability(logits: &[f32], token: u32) -> f64 {
    f64::from(logits[token as usize]) - log_sum_exp(logits)
}

/// Natural-log probabilities of all tokens.
pub fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let sum = log_sum_exp(logits);
    logits.iter().map(|&logit| f64::from(logit) - sum).collect()
}

/// The `n` most probable tokens with their natural-log probabilities, best first; of equal ones the lower id first.
pub fn top_log_probabilities(logits: &[f32], n: usize) -> Vec<(u32, f64)> {
    let sum = log_sum_exp(logits);
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_rank = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if n < order.len() {
        order.select_nth_unstable_by(n, by_rank);
        order.truncate(n);
    }
    order.sort_unstable_by(by_rank);
    order.into_iter().map(|token| (token, f64::from(logits[token as usize]) - sum)).collect()
}

/// Values that are looked through together: as many as the widest registers hold, several times.
const LANES: usize = 64;

/// The most probable token; of equal ones the lowest id.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for (largest, &logit) in largest.iter_mut().zip(chunk) {
            *largest = if logit > *largest { logit } else { *largest };
        }
    }
    let largest = largest.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    logits.iter().position(|&logit| logit == largest).unwrap_or(0) as u32
}

/// The first value that is NaN or infinite.
fn first_not_finite(logits: &[f32]) -> Option<usize> {
    let is_broken = |chunk: &[f32]| chunk.iter().fold(false, |broken, logit| broken | !logit.is_finite());
    let chunk = logits.chunks(LANES).position(is_broken)?;
    let within = logits[chunk * LANES..].iter().position(|logit| !logit.is_finite())?;
    Some(chunk * LANES + within)
}

/// Refuses logits that are no numbers, and logits that are all the same.
pub(crate) fn check_logits(logits: &[f32], position: usize) -> Result<(), RunnerError> {
    if let Some(value_index) = first_not_finite(logits) {
        return Err(RunnerError::NotFinite {
            site: crate::observe::Site::Logits,
            place: "behind the layers (find the first place with the check for finite values)".into(),
            position,
            value_index,
            found: logits[value_index],
        });
    }
    match logits {
        [first, rest @ ..] if !rest.is_empty() && rest.iter().all(|logit| logit == first) => {
            Err(RunnerError::ConstantLogits { position, vocabulary: logits.len(), value: *first })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one_and_large_logits_do_not_overflow() {
        let logits = [1000.0, 999.0, -1000.0];
        let sum: f64 = log_probabilities(&logits).into_iter().map(f64::exp).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        assert!((log_probability(&logits, 1) - log_probability(&logits, 0) + 1.0).abs() < 1e-12);
    }

    #[test]
    fn the_best_tokens_come_first_and_ties_by_id() {
        let logits = [0.0, 2.0, 1.0, 2.0];
        let ids: Vec<u32> = top_log_probabilities(&logits, 3).into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids, [1, 3, 2]);
        assert_eq!(argmax(&logits), 1);
        assert_eq!(top_log_probabilities(&logits, 9).len(), 4);
    }

    #[test]
    fn logits_that_predict_nothing_are_refused() {
        assert!(matches!(check_logits(&[0.5; 4], 7), Err(RunnerError::ConstantLogits { position: 7, .. })));
        assert!(matches!(check_logits(&[0.5, f32::NAN], 7), Err(RunnerError::NotFinite { .. })));
        assert!(check_logits(&[0.5, 0.6], 7).is_ok());
    }
}
