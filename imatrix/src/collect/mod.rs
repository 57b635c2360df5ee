//! Collecting: prompts go through the model, and what each matrix is multiplied with is squared and summed.
//!
//! For a matrix with input rows `a`, the sum of `a_c^2` is kept for each column `c`, with the number of rows. All
//! prompts of a batch pass a layer before the next ([`runner::Model::read_texts`]), so a model that does not fit the
//! memory is read once a batch. Totals are `f64`, every row is added by itself and in order: the result does not
//! depend on batches, threads or interruptions.

mod error;
mod state;
mod totals;

use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use runner::Model;
use sha2::{Digest, Sha256};

use crate::Imatrix;

pub use error::CollectError;
pub use totals::DownInput;

use state::{Identity, Position};
use totals::Totals;

/// How to collect.
#[derive(Debug, Clone)]
pub struct CollectOptions {
    /// Whether the dense matrices are collected too, not only the routed experts.
    pub dense: bool,
    /// Which row is squared for a routed down projection.
    pub down_input: DownInput,
    /// Tokens that pass a layer together: bounds memory. The result does not depend on it.
    pub batch_tokens: usize,
    /// Where the state of an unfinished collection is kept; `None`: nowhere.
    pub state: Option<PathBuf>,
    /// Prompts between two savings of the state.
    pub save_every: usize,
    /// [`fingerprint`] of the model, so that a state is continued with no other.
    pub model_fingerprint: String,
    /// Names of the data sets, recorded in the file.
    pub datasets: Vec<String>,
    /// Most tokens of a prompt, recorded in the file.
    pub chunk_size: u64,
}

/// How far a collection is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CollectStep {
    /// Prompts done, those of earlier runs included.
    pub n_prompts: usize,
    /// Prompts in all.
    pub total_prompts: usize,
    /// Tokens done, those of earlier runs included.
    pub n_tokens: u64,
    /// Tokens in all.
    pub total_tokens: u64,
    /// Prompts that an earlier run had done.
    pub resumed_prompts: usize,
    /// Tokens that an earlier run had done.
    pub resumed_tokens: u64,
}

/// What was collected.
#[derive(Debug, Clone)]
pub struct Collected {
    /// The matrix.
    pub imatrix: Imatrix,
    /// Prompts read.
    pub n_prompts: usize,
    /// Tokens read.
    pub n_tokens: u64,
    /// Prompts that an earlier run had read.
    pub resumed_prompts: usize,
    /// Mean negative log-probability of the prompts' tokens in nats: shows whether the model makes sense of them.
    pub mean_nll: f64,
    /// For each layer the share of routed experts that were reached.
    pub shares_seen: Vec<f64>,
}

/// Collects over `prompts`. `watch` is called after each batch; when it returns `false`, the state is saved and the
/// collection ends with [`CollectError::Interrupted`]. A finished collection leaves its state file to the caller,
/// who removes it once the result is safe.
///
/// # Errors
/// If there are no prompts, the model cannot compute them, sums are not finite, or a state belongs to another run,
/// is damaged or cannot be saved.
pub fn collect(
    model: &Model,
    prompts: &[Vec<u32>],
    options: &CollectOptions,
    watch: &mut dyn FnMut(&CollectStep) -> bool,
) -> Result<Collected, CollectError> {
    if prompts.is_empty() {
        return Err(CollectError::NoPrompts);
    }
    let identity = identity(model, prompts, options);
    let mut totals = Totals::new(model.hyper_parameters(), options.dense, options.down_input);
    let mut position = match &options.state {
        Some(path) => state::load(path, &identity, &mut totals)?.unwrap_or_default(),
        None => Position::default(),
    };
    let resumed = position;
    let mut saved = position.n_prompts;
    while position.n_prompts < prompts.len() {
        let unsaved = position.n_prompts - saved;
        let batch = next_batch(&prompts[position.n_prompts..], options, unsaved);
        read_batch(model, batch, &mut totals, &mut position)?;
        let goes_on = watch(&CollectStep {
            n_prompts: position.n_prompts,
            total_prompts: prompts.len(),
            n_tokens: position.n_tokens,
            total_tokens: prompts.iter().map(|prompt| prompt.len() as u64).sum(),
            resumed_prompts: resumed.n_prompts,
            resumed_tokens: resumed.n_tokens,
        });
        let due = position.n_prompts - saved >= options.save_every.max(1);
        if due || !goes_on || position.n_prompts == prompts.len() {
            refuse_not_finite(&totals)?;
            if let Some(path) = &options.state {
                state::save(path, &identity, position, &totals)?;
            }
            saved = position.n_prompts;
        }
        if !goes_on && position.n_prompts < prompts.len() {
            let state = options.state.clone();
            return Err(CollectError::Interrupted {
                n_prompts: position.n_prompts,
                total_prompts: prompts.len(),
                state,
            });
        }
    }
    let (n_chunks, chunk_size) = (prompts.len() as u64, options.chunk_size);
    Ok(Collected {
        imatrix: Imatrix::from_entries(totals.entries(), options.datasets.clone(), n_chunks, chunk_size),
        n_prompts: position.n_prompts,
        n_tokens: position.n_tokens,
        resumed_prompts: resumed.n_prompts,
        mean_nll: f64::from_bits(position.nll_bits) / position.n_scored.max(1) as f64,
        shares_seen: totals.shares_seen(),
    })
}

/// Prompts until a batch is full or the state is to be saved; at least one.
fn next_batch<'a>(rest: &'a [Vec<u32>], options: &CollectOptions, unsaved: usize) -> &'a [Vec<u32>] {
    let most = options.save_every.max(1) - unsaved;
    let mut n_tokens = 0;
    let n = rest
        .iter()
        .take(most)
        .take_while(|prompt| {
            let fits = n_tokens == 0 || n_tokens + prompt.len() <= options.batch_tokens;
            n_tokens += prompt.len();
            fits
        })
        .count();
    &rest[..n]
}

fn read_batch(
    model: &Model,
    batch: &[Vec<u32>],
    totals: &mut Totals,
    position: &mut Position,
) -> Result<(), CollectError> {
    let texts: Vec<&[u32]> = batch.iter().map(Vec::as_slice).collect();
    let (mut nll, mut n_scored) = (f64::from_bits(position.nll_bits), position.n_scored);
    model.read_texts(&texts, totals, &mut |text, place, logits| {
        if let Some(&next) = texts[text].get(place + 1) {
            nll -= runner::logits::log_probability(logits, next);
            n_scored += 1;
        }
    })?;
    position.n_prompts += batch.len();
    position.n_tokens += batch.iter().map(|prompt| prompt.len() as u64).sum::<u64>();
    (position.nll_bits, position.n_scored) = (nll.to_bits(), n_scored);
    Ok(())
}

fn refuse_not_finite(totals: &Totals) -> Result<(), CollectError> {
    match totals.first_not_finite() {
        None => Ok(()),
        Some((tensor, expert, column, found)) => {
            Err(CollectError::NotFinite { tensor, expert, column, found })
        }
    }
}

fn identity(model: &Model, prompts: &[Vec<u32>], options: &CollectOptions) -> Identity {
    let mut digest = Sha256::new();
    for prompt in prompts {
        digest.update((prompt.len() as u64).to_le_bytes());
        for token in prompt {
            digest.update(token.to_le_bytes());
        }
    }
    let provenance = model.provenance();
    let settings = format!(
        "{} numerics, {} activations, {}, down input {:?}",
        provenance.numerics,
        provenance.activations,
        if options.dense { "dense matrices too" } else { "routed experts only" },
        options.down_input,
    );
    Identity { model: options.model_fingerprint.clone(), prompts: hex(&digest.finalize()), settings }
}

/// Tells model files apart without reading them whole: SHA-256 over name, size, first and last MiB of each file.
///
/// # Errors
/// The system's own, with the file.
pub fn fingerprint(files: &[PathBuf]) -> Result<String, CollectError> {
    let mut digest = Sha256::new();
    for path in files {
        let read_error = |source| crate::ImatrixError::Read { path: path.clone(), source };
        digest_ends(path, &mut digest).map_err(read_error)?;
    }
    Ok(hex(&digest.finalize()))
}

fn digest_ends(path: &Path, digest: &mut Sha256) -> io::Result<()> {
    const END_BYTES: u64 = 1 << 20;
    let file = File::open(path)?;
    let n_bytes = file.metadata()?.len();
    digest.update(path.file_name().unwrap_or_default().as_encoded_bytes());
    digest.update(n_bytes.to_le_bytes());
    let mut end = vec![0; n_bytes.min(END_BYTES) as usize];
    for offset in [0, n_bytes - end.len() as u64] {
        file.read_exact_at(&mut end, offset)?;
        digest.update(&end);
    }
    Ok(())
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
