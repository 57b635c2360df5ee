//! Building a data set: texts of every kind up to its share of the tokens, none twice, the same for the same seed.

use std::collections::{BTreeMap, HashSet};

use runner::tokenizer::Tokenizer;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::generate::{self, Random};
use super::sources::{self, Source, SourceReport};
use super::{DatasetError, Record};
use crate::collect::hex;

/// Weight of the user's own files against the generated kinds, where both are there and no shares are given.
const OWN_WEIGHT: f64 = 1.5;
/// Texts in a row that do not fit or were there before, after which a kind is taken to be exhausted.
const MOST_MISSES: usize = 100;

/// The weight of a kind among the tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Share {
    /// The kind.
    pub kind: String,
    /// Relative to the weights of the others; 0 leaves the kind out.
    pub weight: f64,
}

/// What to build.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BuildOptions {
    /// Tokens of the whole set; it stays below.
    pub tokens: u64,
    /// The same seed, files and tokenizer give the same bytes.
    pub seed: u64,
    /// Weights that replace the usual ones.
    pub shares: Vec<Share>,
    /// The user's files.
    pub sources: Vec<Source>,
    /// Most tokens of a piece that a file is cut into.
    pub piece_tokens: usize,
}

/// One kind of a built set.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KindReport {
    /// The kind.
    pub kind: String,
    /// Share of the tokens that was wanted.
    pub wanted_share: f64,
    /// Share of the tokens that came out.
    pub share: f64,
    /// Texts.
    pub n_texts: usize,
    /// Tokens.
    pub n_tokens: u64,
    /// Texts left out because they were there before.
    pub n_duplicates: usize,
}

/// One text of a built set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecordReport {
    /// The record.
    pub id: String,
    /// SHA-256 of its text.
    pub sha256: String,
    /// Tokens.
    pub n_tokens: u64,
}

/// How a set came about.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Manifest {
    /// The seed.
    pub seed: u64,
    /// Tokens asked for.
    pub wanted_tokens: u64,
    /// Tokens in the set.
    pub n_tokens: u64,
    /// Texts in the set.
    pub n_texts: usize,
    /// SHA-256 of the set's JSON lines.
    pub sha256: String,
    /// Every kind, in the order of their names.
    pub kinds: Vec<KindReport>,
    /// The user's files.
    pub sources: Vec<SourceReport>,
    /// Every record, in the set's order.
    pub records: Vec<RecordReport>,
}

/// A data set with the account of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Built {
    /// The file's text: JSON lines.
    pub lines: String,
    /// How it came about.
    pub manifest: Manifest,
}

/// One text that was taken.
struct Taken {
    record: Record,
    n_tokens: u64,
}

/// Where a kind's texts come from.
enum Texts {
    Own(std::vec::IntoIter<String>),
    Generated { kind: &'static str, next: u64 },
}

impl Texts {
    fn next(&mut self, seed: u64) -> Option<String> {
        match self {
            Self::Own(texts) => texts.next(),
            Self::Generated { kind, next } => {
                *next += 1;
                generate::text(kind, seed, *next - 1)
            }
        }
    }
}

/// Builds a data set.
///
/// Kinds are the sorts of the user's files and [`super::GENERATED`]. Each gets its share of the tokens; texts that were
/// there before (up to white space) are left out. Texts of all kinds are mixed, so that a part of the set is like the
/// whole.
///
/// # Errors
/// If a file cannot be read or used, a share is given to a kind without texts, or no kind has a share.
pub fn build(tokenizer: &Tokenizer, options: &BuildOptions) -> Result<Built, DatasetError> {
    let mut reports = Vec::new();
    let mut kinds: BTreeMap<&'static str, Texts> =
        generate::GENERATED.iter().map(|&kind| (kind, Texts::Generated { kind, next: 0 })).collect();
    let mut own: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
    for source in &options.sources {
        let (texts, report) = sources::texts(source, tokenizer, options.piece_tokens.max(16))?;
        own.entry(source.kind.name()).or_default().extend(texts);
        reports.push(report);
    }
    let weights = weights(&own.keys().copied().collect::<Vec<_>>(), &options.shares)?;
    for (kind, mut texts) in own {
        Random::new(options.seed, kind, u64::MAX).shuffle(&mut texts);
        kinds.insert(kind, Texts::Own(texts.into_iter()));
    }
    let total: f64 = weights.values().sum();
    let (mut seen, mut taken, mut shares) = (HashSet::new(), Vec::new(), Vec::new());
    for (kind, texts) in &mut kinds {
        let wanted_share = weights.get(kind).copied().unwrap_or_default() / total;
        let budget = (options.tokens as f64 * wanted_share) as u64;
        let (texts, n_duplicates) = take(kind, texts, budget, options.seed, tokenizer, &mut seen)?;
        let n_tokens: u64 = texts.iter().map(|t| t.n_tokens).sum();
        shares.push(KindReport {
            kind: (*kind).to_owned(),
            wanted_share,
            share: 0.0,
            n_texts: texts.len(),
            n_tokens,
            n_duplicates,
        });
        taken.extend(texts);
    }
    Random::new(options.seed, "order", 0).shuffle(&mut taken);
    let n_tokens: u64 = taken.iter().map(|t| t.n_tokens).sum();
    for kind in &mut shares {
        kind.share = kind.n_tokens as f64 / n_tokens.max(1) as f64;
    }
    shares.retain(|kind| kind.wanted_share > 0.0);
    let lines: String = taken
        .iter()
        .map(|t| serde_json::to_string(&t.record).expect("a record of strings is JSON") + "\n")
        .collect();
    let records = taken.iter().map(|t| RecordReport {
        id: t.record.id.clone(),
        sha256: hex(&Sha256::digest(t.record.text.as_deref().unwrap_or_default())),
        n_tokens: t.n_tokens,
    });
    let manifest = Manifest {
        seed: options.seed,
        wanted_tokens: options.tokens,
        n_tokens,
        n_texts: taken.len(),
        sha256: hex(&Sha256::digest(&lines)),
        kinds: shares,
        sources: reports,
        records: records.collect(),
    };
    Ok(Built { lines, manifest })
}

/// The weight of every kind.
fn weights(own: &[&'static str], shares: &[Share]) -> Result<BTreeMap<&'static str, f64>, DatasetError> {
    let own_weight = OWN_WEIGHT * generate::GENERATED.len() as f64 / own.len().max(1) as f64;
    let generated = generate::GENERATED.iter().map(|&kind| (kind, 1.0));
    let mut weights: BTreeMap<_, _> = generated.chain(own.iter().map(|&kind| (kind, own_weight))).collect();
    for share in shares {
        let known = weights.keys().copied().collect::<Vec<_>>().join(", ");
        let weight = weights.iter_mut().find(|(kind, _)| **kind == share.kind);
        let unknown = || DatasetError::UnknownKind { kind: share.kind.clone(), known };
        *weight.ok_or_else(unknown)?.1 = share.weight;
    }
    if weights.values().sum::<f64>() > 0.0 { Ok(weights) } else { Err(DatasetError::NoShares) }
}

/// Texts of one kind until its budget is used up; also how many were left out as duplicates.
fn take(
    kind: &str,
    texts: &mut Texts,
    budget: u64,
    seed: u64,
    tokenizer: &Tokenizer,
    seen: &mut HashSet<[u8; 32]>,
) -> Result<(Vec<Taken>, usize), DatasetError> {
    let (mut taken, mut left) = (Vec::new(), budget);
    let (mut n_duplicates, mut misses) = (0, 0);
    while left > 0 && misses < MOST_MISSES {
        let Some(text) = texts.next(seed) else { break };
        misses += 1;
        let words: Vec<_> = text.split_whitespace().collect();
        let digest: [u8; 32] = Sha256::digest(words.join(" ")).into();
        if seen.contains(&digest) {
            n_duplicates += 1;
            continue;
        }
        let id = format!("{kind}-{:06}", taken.len() + 1);
        let record = Record { kind: kind.to_owned(), id, text: Some(text), tokens: None };
        let n_tokens = record.tokens(tokenizer)?.len() as u64;
        if n_tokens <= left {
            seen.insert(digest);
            left -= n_tokens;
            misses = 0;
            taken.push(Taken { record, n_tokens });
        }
    }
    Ok((taken, n_duplicates))
}
