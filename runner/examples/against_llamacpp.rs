//! Compares this runner's predictions with those that llama.cpp's `llama-perplexity --kl-divergence-base FILE` has
//! saved for the same model: called by `tools/compare_with_llamacpp.sh`.
//!
//! `cargo run --release -p runner --example against_llamacpp -- MODEL FILE`

use std::error::Error;
use std::path::Path;

use runner::logits::{argmax, log_probabilities};
use runner::observe::NoObserver;
use runner::{ActivationPrecision, Model, Numerics, Options};

/// What `llama-perplexity` saves: the second half of each chunk of `n_context` tokens, its last position left out.
struct Saved {
    n_context: usize,
    vocabulary: usize,
    tokens: Vec<u32>,
    /// A position: scale and least log-probability as two `f32`, then a step a token. 16 bits each.
    rows: Vec<u16>,
}

/// 16-bit words in front of a row's steps.
const ROW_HEADER: usize = 4;
/// Nats below the best token where saving ends.
const WIDEST: f64 = 16.0;

impl Saved {
    fn read(path: &str) -> Result<Self, Box<dyn Error>> {
        let bytes = std::fs::read(path)?;
        let rest = bytes.strip_prefix(b"_logits_").ok_or("no file of llama-perplexity")?;
        let (header, rest) = rest.split_at_checked(12).ok_or("the file ends early")?;
        let field = |i: usize| u32::from_le_bytes([0, 1, 2, 3].map(|j| header[4 * i + j])) as usize;
        let (n_context, vocabulary, n_chunks) = (field(0), field(1), field(2));
        let n_bytes = n_context.checked_mul(n_chunks).and_then(|n| n.checked_mul(4));
        let (tokens, rows) = n_bytes.and_then(|n| rest.split_at_checked(n)).ok_or("the file ends early")?;
        let tokens = tokens.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let rows = rows.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        Ok(Self { n_context, vocabulary, tokens, rows })
    }

    /// First position of a chunk that is saved.
    fn first(&self) -> usize {
        self.n_context / 2
    }

    /// Log-probabilities at a position of a chunk; none for a token that is not above the least that is saved.
    fn row(&self, chunk: usize, position: usize) -> Option<Vec<Option<f64>>> {
        let at = position.checked_sub(self.first()).filter(|_| position + 1 < self.n_context)?;
        let words = ROW_HEADER + self.vocabulary.next_multiple_of(2);
        let row = self.rows.chunks_exact(words).nth(chunk * (self.n_context - 1 - self.first()) + at)?;
        let float = |i: usize| f32::from_bits(u32::from(row[i]) | u32::from(row[i + 1]) << 16);
        let (scale, least) = (f64::from(float(0)), f64::from(float(2)));
        let value = |&step: &u16| (step > 0).then(|| scale.mul_add(f64::from(step), least));
        Some(row[ROW_HEADER..][..self.vocabulary].iter().map(value).collect())
    }
}

/// Sums over positions.
#[derive(Default)]
struct Sums {
    n: usize,
    same_top: usize,
    divergence: f64,
    /// llama.cpp's lead of its first over its second token, where ours is another: the largest.
    widest_lost: f64,
}

impl Sums {
    /// Both are compared among the tokens whose probability is saved.
    fn add(&mut self, theirs: &[Option<f64>], logits: &[f32]) {
        let ours = log_probabilities(logits);
        let known = || theirs.iter().zip(&ours).filter_map(|(t, o)| Some(((*t)?, *o)));
        let (all_theirs, all_ours) = known().fold((0.0, 0.0), |(t, o), (p, q)| (t + p.exp(), o + q.exp()));
        let shift = f64::ln(all_ours / all_theirs);
        self.n += 1;
        self.divergence += known().map(|(p, q)| p.exp() / all_theirs * (p - q + shift)).sum::<f64>();
        let best = known().fold(f64::NEG_INFINITY, |best, (p, _)| best.max(p));
        let lost = best - theirs[argmax(logits) as usize].unwrap_or(best - WIDEST);
        self.same_top += usize::from(lost == 0.0);
        self.widest_lost = self.widest_lost.max(lost);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, saved] = arguments.as_slice() else {
        return Err("usage: against_llamacpp MODEL FILE".into());
    };
    let saved = Saved::read(saved)?;
    let chunks: Vec<&[u32]> = saved.tokens.chunks_exact(saved.n_context).collect();
    for (name, activations) in ActivationPrecision::NAMES.into_iter().filter(|(_, a)| a.runs_on_cpu()) {
        let options = Options { activations, numerics: Numerics::Exact, ..Options::default() };
        let model = Model::open(Path::new(model), options)?;
        let mut sums = Sums::default();
        model.read_texts(&chunks, &mut NoObserver, &mut |chunk, position, logits| {
            if let Some(theirs) = saved.row(chunk, position) {
                sums.add(&theirs, logits);
            }
        })?;
        report(name, &sums);
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "the program's result")]
fn report(activations: &str, sums: &Sums) {
    let n = sums.n as f64;
    println!(
        "{activations:>10} activations: {} positions, same top-1 {:.2} %, mean KL {:.2e}, most likely token lost by at most {:.4} nats",
        sums.n,
        100.0 * sums.same_top as f64 / n,
        sums.divergence / n,
        sums.widest_lost
    );
}
