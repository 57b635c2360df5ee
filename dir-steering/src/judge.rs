//! Whether a direction tells prompts apart that it was not made from.

use serde::Serialize;

use crate::capture::Captured;
use crate::direction::Direction;

/// How well one layer's direction separates two sets.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Separation {
    /// Layer.
    pub layer: usize,
    /// Probability that a good prompt lies further along the direction than a bad one, ties counted half: 0.5 is chance.
    pub auc: f64,
    /// Mean of the good prompts along the direction.
    pub good_mean: f64,
    /// Mean of the bad prompts along the direction.
    pub bad_mean: f64,
}

/// Places of good and bad prompts along each layer's direction.
pub fn separation(direction: &Direction, good: &Captured, bad: &Captured) -> Vec<Separation> {
    let of_layer = |layer: usize| {
        let places = |captured: &Captured| -> Vec<f64> {
            captured.layers[layer].iter().map(|row| dot(row, &direction.layers[layer])).collect()
        };
        let (good, bad) = (places(good), places(bad));
        Separation { layer, auc: auc(&good, &bad), good_mean: mean(&good), bad_mean: mean(&bad) }
    };
    direction.layer_ids().into_iter().map(of_layer).collect()
}

/// The Mann-Whitney statistic over all pairs.
fn auc(good: &[f64], bad: &[f64]) -> f64 {
    let win = |good: f64, bad: f64| match good.total_cmp(&bad) {
        std::cmp::Ordering::Greater => 1.0,
        std::cmp::Ordering::Equal => 0.5,
        std::cmp::Ordering::Less => 0.0,
    };
    let wins: f64 = good.iter().flat_map(|&good| bad.iter().map(move |&bad| win(good, bad))).sum();
    wins / (good.len() * bad.len()).max(1) as f64
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

pub(crate) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

#[cfg(test)]
mod tests {
    use super::auc;

    #[test]
    fn auc_counts_pairs() {
        assert_eq!(auc(&[2.0, 3.0], &[0.0, 1.0]), 1.0);
        assert_eq!(auc(&[0.0, 1.0], &[2.0, 3.0]), 0.0);
        assert_eq!(auc(&[1.0], &[1.0]), 0.5);
        assert_eq!(auc(&[0.0, 2.0], &[1.0]), 0.5);
    }
}
