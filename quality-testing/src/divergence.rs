//! Kullback-Leibler divergence, perplexity and agreement of one model with another on the same text.

use runner::logits::{argmax, log_probabilities};
use runner::observe::NoObserver;
use runner::{Model, RunnerError};
use serde::Serialize;

use crate::Interval;

/// Why two models were not compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScoreError {
    /// A model cannot be run.
    #[error(transparent)]
    Runner(#[from] RunnerError),
    /// The models do not predict the same tokens.
    #[error("the models have vocabularies of {base} and {other} tokens; compare files of one checkpoint")]
    VocabularyDiffers {
        /// Tokens of the base.
        base: usize,
        /// Tokens of the other.
        other: usize,
    },
}

/// The predictions of the model that others are compared with: natural-log probabilities of the whole
/// vocabulary at every position, 4 bytes each.
#[derive(Debug, Clone)]
pub struct Base {
    texts: Vec<Vec<u32>>,
    /// `[positions, vocabulary]` a text.
    log_probabilities: Vec<Vec<f32>>,
    vocabulary: usize,
}

/// One model against the base, position by position of all texts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Positions whose next token is in the text.
    pub n_positions: usize,
    /// Negative log likelihood of the text, nats a token.
    pub nll: Interval,
    /// The same of the base.
    pub base_nll: Interval,
    /// `nll - base_nll`, paired.
    pub nll_difference: Interval,
    /// `exp(nll)`.
    pub perplexity: f64,
    /// Divergence of the model from the base, nats: `sum p ln(p / q)`, p the base's.
    pub kl: Interval,
    /// Divergence at the median position, and at those above 90 and 99 % of all.
    pub kl_percentiles: [f64; 3],
    /// Share of positions with the same most probable token.
    pub same_top: Interval,
    /// Divergence of each position, texts one after another.
    #[serde(skip)]
    pub kl_by_position: Vec<f64>,
}

impl Base {
    /// Reads the texts with the base model.
    ///
    /// # Errors
    /// As [`Model::read_texts`].
    pub fn new(model: &Model, texts: Vec<Vec<u32>>) -> Result<Self, ScoreError> {
        let vocabulary = model.hyper_parameters().vocab_size as usize;
        let mut log_probabilities_of: Vec<Vec<f32>> =
            texts.iter().map(|text| Vec::with_capacity(text.len() * vocabulary)).collect();
        model.read_texts(&slices(&texts), &mut NoObserver, &mut |text, _, logits| {
            log_probabilities_of[text].extend(log_probabilities(logits).into_iter().map(|p| p as f32));
        })?;
        Ok(Self { texts, log_probabilities: log_probabilities_of, vocabulary })
    }

    /// Compares a model of the same vocabulary with the base.
    ///
    /// # Errors
    /// As [`Model::read_texts`], and if the vocabularies differ in size.
    pub fn compare(&self, model: &Model) -> Result<Comparison, ScoreError> {
        let vocabulary = model.hyper_parameters().vocab_size as usize;
        if vocabulary != self.vocabulary {
            return Err(ScoreError::VocabularyDiffers { base: self.vocabulary, other: vocabulary });
        }
        let (mut nll, mut base_nll, mut kl, mut same) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        model.read_texts(&slices(&self.texts), &mut NoObserver, &mut |text, position, logits| {
            let Some(&next) = self.texts[text].get(position + 1) else { return };
            let base = &self.log_probabilities[text][position * vocabulary..][..vocabulary];
            // The base is held in f32; rounding the other side alike makes equal predictions compare as equal.
            let other: Vec<f32> = log_probabilities(logits).into_iter().map(|p| p as f32).collect();
            nll.push(-f64::from(other[next as usize]));
            base_nll.push(-f64::from(base[next as usize]));
            let terms =
                base.iter().zip(&other).map(|(&p, &q)| f64::from(p).exp() * (f64::from(p) - f64::from(q)));
            kl.push(terms.sum::<f64>());
            same.push(f64::from(u8::from(argmax(base) == argmax(&other))));
        })?;
        let difference: Vec<f64> = nll.iter().zip(&base_nll).map(|(a, b)| a - b).collect();
        let mut sorted = kl.clone();
        sorted.sort_by(f64::total_cmp);
        let percentile = |share: f64| {
            let last = sorted.len().saturating_sub(1);
            sorted.get((share * last as f64).round() as usize).copied().unwrap_or(0.0)
        };
        let nll = Interval::of(&nll);
        Ok(Comparison {
            n_positions: kl.len(),
            perplexity: nll.mean.exp(),
            nll,
            base_nll: Interval::of(&base_nll),
            nll_difference: Interval::of(&difference),
            kl: Interval::of(&kl),
            kl_percentiles: [percentile(0.5), percentile(0.9), percentile(0.99)],
            same_top: Interval::of(&same),
            kl_by_position: kl,
        })
    }
}

impl Comparison {
    /// By how much this model's divergence exceeds another's, on the same texts and the same base, paired.
    pub fn kl_above(&self, other: &Self) -> Interval {
        let paired = self.kl_by_position.iter().zip(&other.kl_by_position);
        Interval::of(&paired.map(|(a, b)| a - b).collect::<Vec<_>>())
    }
}

fn slices(texts: &[Vec<u32>]) -> Vec<&[u32]> {
    texts.iter().map(Vec::as_slice).collect()
}
