//! What a direction does at several scales, prompt by prompt.

use std::sync::Arc;

use runner::Model;
use runner::forward::Steering;
use runner::logits::{argmax, log_probability};
use runner::observe::{Observation, Observer, Site};
use serde::Serialize;

use crate::error::SteeringError;

/// What to try.
#[derive(Debug, Clone)]
pub struct SweepOptions {
    /// Scales; 0 is always measured first, as the text that the others are compared with.
    pub scales: Vec<f32>,
    /// Most tokens to generate a prompt.
    pub n_tokens: usize,
    /// The token that ends an answer.
    pub end: Option<u32>,
}

/// One scale on one prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SweepRow {
    /// The scale.
    pub scale: f32,
    /// Index of the prompt.
    pub prompt: usize,
    /// Tokens generated, the end included.
    pub length: usize,
    /// Whether the model ended by itself.
    pub ended: bool,
    /// Share of the answer's four-token runs that occurred before in it: 0 = none, near 1 = a loop.
    pub repetition: f64,
    /// Perplexity of the unsteered answer under the steered model.
    pub perplexity: f64,
    /// One minus the cosine between steered and unsteered final states, mean over the unsteered answer.
    pub cosine_drift: f64,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generation {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Whether the last one is the end.
    pub ended: bool,
}

/// Tries every scale on every prompt. `steering` makes the directions of a scale; `each` sees every row and its answer.
/// The model is left without steering.
///
/// # Errors
/// If a prompt cannot be read or computing fails.
pub fn sweep(
    model: &mut Model,
    prompts: &[Vec<u32>],
    options: &SweepOptions,
    steering: &dyn Fn(f32) -> Result<Steering, SteeringError>,
    each: &mut dyn FnMut(&SweepRow, &Generation),
) -> Result<Vec<SweepRow>, SteeringError> {
    let mut rows = Vec::new();
    for (prompt, tokens) in prompts.iter().enumerate() {
        model.set_steering(Vec::new())?;
        let unsteered = generate(model, tokens, options)?;
        let reference = Reference::new(model, tokens, &unsteered)?;
        for &scale in &options.scales {
            model.set_steering(vec![Arc::new(steering(scale)?)])?;
            let answer = generate(model, tokens, options)?;
            let (perplexity, cosine_drift) = reference.compare(model)?;
            let row = SweepRow {
                scale,
                prompt,
                length: answer.tokens.len(),
                ended: answer.ended,
                repetition: repetition(&answer.tokens),
                perplexity,
                cosine_drift,
            };
            each(&row, &answer);
            rows.push(row);
        }
    }
    model.set_steering(Vec::new())?;
    Ok(rows)
}

/// The most probable answer.
fn generate(model: &Model, prompt: &[u32], options: &SweepOptions) -> Result<Generation, SteeringError> {
    let mut session = model.session();
    let mut logits = session.prefill(prompt)?;
    let mut tokens = Vec::new();
    while tokens.len() < options.n_tokens {
        let token = argmax(&logits);
        tokens.push(token);
        if Some(token) == options.end {
            return Ok(Generation { tokens, ended: true });
        }
        if tokens.len() < options.n_tokens {
            logits = session.decode(token)?;
        }
    }
    Ok(Generation { tokens, ended: false })
}

/// Share of four-token runs that occurred before.
fn repetition(tokens: &[u32]) -> f64 {
    let runs: Vec<&[u32]> = tokens.windows(4).collect();
    let mut seen = std::collections::HashSet::new();
    let repeated = runs.iter().filter(|run| !seen.insert(**run)).count();
    repeated as f64 / runs.len().max(1) as f64
}

/// The unsteered answer with the states behind it.
struct Reference {
    /// Prompt and answer.
    text: Vec<u32>,
    n_prompt: usize,
    /// `[answer][width]`: the state that predicts each token of the answer.
    states: Vec<Vec<f32>>,
}

impl Reference {
    fn new(model: &Model, prompt: &[u32], answer: &Generation) -> Result<Self, SteeringError> {
        let text = [prompt, &answer.tokens].concat();
        let mut reference = Self { text, n_prompt: prompt.len(), states: Vec::new() };
        reference.states = reference.read(model)?.1;
        Ok(reference)
    }

    /// Negative log-likelihood of the answer, and its states.
    fn read(&self, model: &Model) -> Result<(f64, Vec<Vec<f32>>), SteeringError> {
        let mut states = States { from: self.n_prompt - 1, rows: Vec::new() };
        let mut nll = 0.0;
        model.read_texts(&[&self.text], &mut states, &mut |_, position, logits| {
            if position + 1 >= self.n_prompt
                && let Some(&next) = self.text.get(position + 1)
            {
                nll -= log_probability(logits, next);
            }
        })?;
        states.rows.truncate(self.text.len() - self.n_prompt);
        Ok((nll, states.rows))
    }

    /// Perplexity and cosine drift of the model as it is steered now.
    fn compare(&self, model: &Model) -> Result<(f64, f64), SteeringError> {
        let (nll, states) = self.read(model)?;
        let n = states.len().max(1) as f64;
        let drift: f64 = states.iter().zip(&self.states).map(|(a, b)| 1.0 - cosine(a, b)).sum();
        Ok(((nll / n).exp(), drift / n))
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    use crate::judge::dot;
    if a == b { 1.0 } else { dot(a, b) / (dot(a, a) * dot(b, b)).sqrt() }
}

/// Final states from a position on.
struct States {
    from: usize,
    rows: Vec<Vec<f32>>,
}

impl Observer for States {
    fn wants(&self, site: Site, _: Option<usize>) -> bool {
        site == Site::FinalNorm
    }

    fn rows(&mut self, observation: Observation<'_>) {
        let width = observation.values.len() / observation.tokens.len().max(1);
        for (place, row) in observation.tokens.iter().zip(observation.values.chunks_exact(width.max(1))) {
            if place.position >= self.from {
                self.rows.push(row.to_vec());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::repetition;

    #[test]
    fn repetition_finds_loops() {
        assert_eq!(repetition(&[1, 2, 3, 4, 5, 6, 7]), 0.0);
        assert_eq!(repetition(&[1; 13]), 0.9);
        assert_eq!(repetition(&[1, 2]), 0.0);
    }
}
