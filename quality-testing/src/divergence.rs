//! Kullback-Leibler divergence, perplexity and agreement of one model with another on the same text.

use std::path::Path;

use gguf_tools::progress::Progress;
use runner::logits::{argmax, log_probabilities};
use runner::observe::NoObserver;
use runner::{Model, RunnerError};
use serde::{Deserialize, Serialize};

use crate::Interval;
use crate::base_cache::{CacheError, CacheFile, Identity, round_to_f16};

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
    /// The file of base predictions cannot be used.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The user stopped it.
    #[error("interrupted; the same command goes on from here")]
    Interrupted,
}

/// The predictions of the model that others are compared with: natural-log probabilities of the whole vocabulary at every
/// position, 4 bytes each in memory or 2 in a file.
#[derive(Debug)]
pub struct Base {
    texts: Vec<Vec<u32>>,
    rows: Rows,
    vocabulary: usize,
}

#[derive(Debug)]
enum Rows {
    /// `[positions, vocabulary]` a text.
    Memory(Vec<Vec<f32>>),
    File(CacheFile),
}

/// One model against the base, position by position of all texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// Divergence of the model from the base, nats: `sum p ln(p / q) - p + q`, p the base's. The last two terms cancel where both
    /// sum to one, and take the first-order effect of rounded probabilities out where they do not quite.
    pub kl: Interval,
    /// Divergence at the median position, and at those above 90 and 99 % of all.
    pub kl_percentiles: [f64; 3],
    /// Largest divergence of any position.
    pub kl_max: f64,
    /// Root mean square of the change of the next token's probability, 0 to 1.
    pub rms_delta_p: f64,
    /// Share of positions with the same most probable token.
    pub same_top: Interval,
    /// Divergence of each position, texts one after another.
    #[serde(skip)]
    pub kl_by_position: Vec<f64>,
}

impl Base {
    /// Reads the texts with the base model and keeps its predictions in memory.
    ///
    /// # Errors
    /// As [`Model::read_texts`].
    pub fn new(model: &Model, texts: Vec<Vec<u32>>) -> Result<Self, ScoreError> {
        let vocabulary = model.hyper_parameters().vocab_size as usize;
        let mut rows: Vec<Vec<f32>> =
            texts.iter().map(|text| Vec::with_capacity(text.len() * vocabulary)).collect();
        model.read_texts(&slices(&texts), &mut NoObserver, &mut |text, _, logits| {
            rows[text].extend(rounded(logits));
        })?;
        Ok(Self { texts, rows: Rows::Memory(rows), vocabulary })
    }

    /// Takes the base model's predictions from a file, which is written first if it is not there; see [`crate::base_cache`]. An
    /// interrupted writing is gone on with.
    ///
    /// `identity`: what the file must be of. `most_bytes`: a larger file is refused before anything is computed.
    ///
    /// # Errors
    /// If the file is of something else, damaged or would be too large; and as [`Model::read_texts`].
    pub fn cached(
        model: &Model,
        texts: Vec<Vec<u32>>,
        path: &Path,
        identity: &Identity,
        most_bytes: u64,
        progress: &dyn Progress,
    ) -> Result<Self, ScoreError> {
        let vocabulary = model.hyper_parameters().vocab_size as usize;
        let file = CacheFile::open_or_write(model, &texts, path, identity, most_bytes, progress)?;
        Ok(Self { texts, rows: Rows::File(file), vocabulary })
    }

    /// Texts of the base.
    pub fn texts(&self) -> &[Vec<u32>] {
        &self.texts
    }

    /// Compares a model of the same vocabulary with the base.
    ///
    /// # Errors
    /// As [`Model::read_texts`], and if the vocabularies differ in size.
    pub fn compare(&self, model: &Model) -> Result<Comparison, ScoreError> {
        self.compare_first(model, self.texts.len())
    }

    /// Compares on the first texts only.
    ///
    /// # Errors
    /// As [`Base::compare`].
    pub fn compare_first(&self, model: &Model, n_texts: usize) -> Result<Comparison, ScoreError> {
        let vocabulary = model.hyper_parameters().vocab_size as usize;
        if vocabulary != self.vocabulary {
            return Err(ScoreError::VocabularyDiffers { base: self.vocabulary, other: vocabulary });
        }
        let texts = &self.texts[..n_texts.min(self.texts.len())];
        let mut reader = match &self.rows {
            Rows::Memory(_) => None,
            Rows::File(file) => Some(file.reader()?),
        };
        let mut sums = Positions::default();
        let mut failed = None;
        model.read_texts(&slices(texts), &mut NoObserver, &mut |text, position, logits| {
            let Some(&next) = texts[text].get(position + 1) else { return };
            let mut other = rounded(logits);
            let (top, nll) = (argmax(&other), -f64::from(other[next as usize]));
            match (&self.rows, &mut reader) {
                (Rows::File(_), Some(reader)) => {
                    if failed.is_some() {
                        return;
                    }
                    match reader.row(text, position) {
                        Ok(row) => {
                            // The base is held rounded; rounding the other side alike makes equal predictions equal.
                            for value in &mut other {
                                *value = round_to_f16(*value);
                            }
                            let base = (row.top, f64::from(row.nll));
                            sums.push(&row.log_probabilities, &other, base, (top, nll));
                        }
                        Err(e) => failed = Some(e),
                    }
                }
                (Rows::Memory(rows), _) => {
                    let row = &rows[text][position * vocabulary..][..vocabulary];
                    sums.push(row, &other, (argmax(row), -f64::from(row[next as usize])), (top, nll));
                }
                (Rows::File(_), None) => {}
            }
        })?;
        match failed {
            Some(e) => Err(e.into()),
            None => Ok(sums.comparison()),
        }
    }
}

/// What is known of every position so far.
#[derive(Default)]
struct Positions {
    nll: Vec<f64>,
    base_nll: Vec<f64>,
    kl: Vec<f64>,
    same: Vec<f64>,
}

impl Positions {
    /// `base`, `other`: log-probabilities `[vocabulary]`, then most probable token and negative log likelihood of the next one.
    fn push(&mut self, base: &[f32], other: &[f32], of_base: (u32, f64), of_other: (u32, f64)) {
        let terms = base.iter().zip(other).map(|(&p, &q)| {
            let (p, q) = (f64::from(p), f64::from(q));
            p.exp() * (p - q - 1.0) + q.exp()
        });
        // Every term is 0 for equal predictions, and none is below 0 but by rounding.
        self.kl.push(terms.sum::<f64>().max(0.0));
        self.same.push(f64::from(u8::from(of_base.0 == of_other.0)));
        self.base_nll.push(of_base.1);
        self.nll.push(of_other.1);
    }

    fn comparison(self) -> Comparison {
        let difference: Vec<f64> = self.nll.iter().zip(&self.base_nll).map(|(a, b)| a - b).collect();
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        let percentile = |share: f64| {
            let last = sorted.len().saturating_sub(1);
            sorted.get((share * last as f64).round() as usize).copied().unwrap_or(0.0)
        };
        let changes = self.nll.iter().zip(&self.base_nll).map(|(a, b)| ((-a).exp() - (-b).exp()).powi(2));
        let rms_delta_p = (changes.sum::<f64>() / self.nll.len().max(1) as f64).sqrt();
        let nll = Interval::of(&self.nll);
        Comparison {
            n_positions: self.kl.len(),
            perplexity: nll.mean.exp(),
            nll,
            base_nll: Interval::of(&self.base_nll),
            nll_difference: Interval::of(&difference),
            kl: Interval::of(&self.kl),
            kl_percentiles: [percentile(0.5), percentile(0.9), percentile(0.99)],
            kl_max: sorted.last().copied().unwrap_or(0.0),
            rms_delta_p,
            same_top: Interval::of(&self.same),
            kl_by_position: self.kl,
        }
    }
}

impl Comparison {
    /// By how much this model's divergence exceeds another's, on the same texts and the same base, paired.
    pub fn kl_above(&self, other: &Self) -> Interval {
        let paired = self.kl_by_position.iter().zip(&other.kl_by_position);
        Interval::of(&paired.map(|(a, b)| a - b).collect::<Vec<_>>())
    }
}

/// Log-probabilities as they are held.
fn rounded(logits: &[f32]) -> Vec<f32> {
    log_probabilities(logits).into_iter().map(|p| p as f32).collect()
}

pub(crate) fn slices(texts: &[Vec<u32>]) -> Vec<&[u32]> {
    texts.iter().map(Vec::as_slice).collect()
}
