//! Scoring a model by recorded continuations: how probable each token of them is to it, given those before.

use std::collections::HashMap;

use runner::chat::{Message, render};
use runner::logits::{argmax, log_probability};
use runner::observe::NoObserver;
use runner::tokenizer::Tokenizer;
use runner::{Model, RunnerError};
use serde::{Deserialize, Serialize};

use crate::agreement::Agreement;
use crate::cases::Case;

/// Tokens of the cases that are read together.
const GROUP_TOKENS: usize = 2048;

/// Why cases were not scored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScoringError {
    /// The model cannot be run.
    #[error(transparent)]
    Runner(#[from] RunnerError),
    /// A case needs more context than there is.
    #[error(
        "case `{id}` needs {needed} tokens of context ({prompt} of prompt, {target} of continuation), the limit is {limit}; \
         raise --ctx"
    )]
    ContextTooShort {
        /// The case.
        id: String,
        /// Tokens in all.
        needed: usize,
        /// Of the prompt.
        prompt: usize,
        /// Of the continuation.
        target: usize,
        /// What there is.
        limit: usize,
    },
    /// A continuation is no text and its tokens are not of this vocabulary.
    #[error(
        "case `{id}`: token {index} of the continuation (bytes {bytes:?}) is not in the model's vocabulary; the case is of another model"
    )]
    UnknownToken {
        /// The case.
        id: String,
        /// Which token.
        index: usize,
        /// Its bytes.
        bytes: Vec<u8>,
    },
}

/// What a model makes of one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseScore {
    /// Name of the case.
    pub id: String,
    /// Kind of the prompt, where the set says.
    pub kind: Option<String>,
    /// Tokens of the rendered prompt.
    pub prompt_tokens: usize,
    /// Tokens of the continuation.
    pub target_tokens: usize,
    /// Negative log likelihood of the continuation, nats: the sum over its tokens.
    pub nll: f64,
    /// Whether the most probable first token is the recorded one.
    pub first_match: bool,
    /// Tokens from the beginning at which the most probable token is the recorded one.
    pub greedy_lcp: usize,
    /// Negative log likelihood of every token, nats: `[target_tokens]`.
    pub token_nll: Vec<f64>,
    /// Agreement with the recorded log-probabilities; all zero without any.
    pub agreement: Agreement,
    /// What does not fit, in words.
    pub warning: Option<String>,
}

impl CaseScore {
    /// Nats a token.
    pub fn average_nll(&self) -> f64 {
        self.nll / self.target_tokens.max(1) as f64
    }
}

/// Finds tokens by the bytes they stand for.
pub struct Vocabulary {
    pub(crate) by_bytes: HashMap<Vec<u8>, u32>,
}

impl Vocabulary {
    /// Of a tokenizer; control tokens stand for no text. Where two tokens have the same bytes the first counts.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let mut by_bytes = HashMap::new();
        for token in (0..tokenizer.n_tokens() as u32).filter(|&token| !tokenizer.is_control(token)) {
            by_bytes.entry(tokenizer.token_bytes(token)).or_insert(token);
        }
        by_bytes.remove(&Vec::new());
        Self { by_bytes }
    }

    /// The token that stands for exactly these bytes.
    pub fn token(&self, bytes: &[u8]) -> Option<u32> {
        self.by_bytes.get(bytes).copied()
    }
}

/// A case as tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared<'a> {
    /// The case.
    pub case: &'a Case,
    /// Tokens of the prompt, rendered as a user's turn that is answered without thinking.
    pub prompt: Vec<u32>,
    /// Tokens of the continuation.
    pub target: Vec<u32>,
    /// Whether the recorded tokens are those of `target`, so that positions can be compared.
    pub aligned: bool,
}

/// Turns every case into tokens.
///
/// A continuation is cut into tokens as text, as ds4 does; one that is no whole UTF-8 by its recorded tokens.
///
/// # Errors
/// If a case does not fit the context, or a continuation cannot be had in this vocabulary. Nothing is computed before.
pub fn prepare<'a>(
    cases: &'a [Case],
    tokenizer: &Tokenizer,
    vocabulary: &Vocabulary,
    context_limit: usize,
) -> Result<Vec<Prepared<'a>>, ScoringError> {
    cases.iter().map(|case| prepare_one(case, tokenizer, vocabulary, context_limit)).collect()
}

fn prepare_one<'a>(
    case: &'a Case,
    tokenizer: &Tokenizer,
    vocabulary: &Vocabulary,
    limit: usize,
) -> Result<Prepared<'a>, ScoringError> {
    let prompt = tokenizer.encode_chat(&render(&[Message::User(&case.prompt)], false, true))?;
    let recorded = || {
        let tokens = case.recorded.iter().enumerate().map(|(index, position)| {
            vocabulary.token(&position.token).ok_or_else(|| ScoringError::UnknownToken {
                id: case.id.clone(),
                index,
                bytes: position.token.clone(),
            })
        });
        tokens.collect::<Result<Vec<u32>, _>>()
    };
    let target = match std::str::from_utf8(&case.continuation) {
        Ok(text) => tokenizer.encode_plain(text)?,
        Err(_) => recorded()?,
    };
    let needed = prompt.len() + target.len();
    if needed > limit {
        return Err(ScoringError::ContextTooShort {
            id: case.id.clone(),
            needed,
            prompt: prompt.len(),
            target: target.len(),
            limit,
        });
    }
    let aligned = target.len() == case.recorded.len()
        && target.iter().zip(&case.recorded).all(|(&token, p)| tokenizer.token_bytes(token) == p.token);
    Ok(Prepared { case, prompt, target, aligned })
}

/// Reads cases and gives `each` the logits in front of every token of the continuations: index of the case, index of the
/// token, logits `[vocab_size]`. Cases come in order, their tokens ascending.
///
/// # Errors
/// As [`Model::read_texts`].
pub fn read(
    model: &Model,
    cases: &[Prepared<'_>],
    each: &mut (dyn FnMut(usize, usize, &[f32]) + Send),
) -> Result<(), RunnerError> {
    let texts: Vec<Vec<u32>> = cases
        .iter()
        // Nothing is asked behind the last token.
        .map(|case| [&case.prompt[..], &case.target[..case.target.len().saturating_sub(1)]].concat())
        .collect();
    let slices: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    model.read_texts(&slices, &mut NoObserver, &mut |text, position, logits| {
        if let Some(step) = (position + 1).checked_sub(cases[text].prompt.len()) {
            each(text, step, logits);
        }
    })
}

/// Scores cases in groups, in order. `done` gets each group's scores and says whether to go on.
///
/// # Errors
/// As [`Model::read_texts`], and whatever `done` gives.
pub fn score<E: From<RunnerError>>(
    model: &Model,
    cases: &[Prepared<'_>],
    vocabulary: &Vocabulary,
    done: &mut dyn FnMut(Vec<CaseScore>) -> Result<bool, E>,
) -> Result<(), E> {
    let mut rest = cases;
    while !rest.is_empty() {
        let mut n_tokens = 0;
        let fits = rest.iter().take_while(|case| {
            n_tokens += case.prompt.len() + case.target.len();
            n_tokens <= GROUP_TOKENS
        });
        let (group, later) = rest.split_at(fits.count().max(1));
        if !done(score_group(model, group, vocabulary)?)? {
            break;
        }
        rest = later;
    }
    Ok(())
}

fn score_group(
    model: &Model,
    cases: &[Prepared<'_>],
    vocabulary: &Vocabulary,
) -> Result<Vec<CaseScore>, RunnerError> {
    let mut scores: Vec<CaseScore> = cases.iter().map(empty_score).collect();
    read(model, cases, &mut |case, step, logits| {
        let (score, case) = (&mut scores[case], &cases[case]);
        let (token, greedy) = (case.target[step], argmax(logits));
        if score.greedy_lcp == step && greedy == token {
            score.greedy_lcp += 1;
        }
        score.first_match |= step == 0 && greedy == token;
        let nll = -log_probability(logits, token);
        score.nll += nll;
        score.token_nll.push(nll);
        if case.aligned {
            score.agreement.add_position(&case.case.recorded[step], logits, -nll, vocabulary);
        }
    })?;
    Ok(scores)
}

fn empty_score(case: &Prepared<'_>) -> CaseScore {
    let n_recorded = case.case.recorded.len();
    let warning = (n_recorded > 0 && !case.aligned).then(|| {
        format!(
            "recorded as {n_recorded} tokens, this tokenizer makes {} of the text: agreement with the recorded log-probabilities is left out",
            case.target.len()
        )
    });
    CaseScore {
        id: case.case.id.clone(),
        kind: case.case.kind.clone(),
        prompt_tokens: case.prompt.len(),
        target_tokens: case.target.len(),
        nll: 0.0,
        first_match: false,
        greedy_lcp: 0,
        token_nll: Vec::new(),
        agreement: Agreement { ref_tokens: n_recorded as u64, ..Agreement::default() },
        warning,
    }
}
