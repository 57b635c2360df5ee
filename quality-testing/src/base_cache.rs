//! Predictions of a base model in a file: what takes the largest model hours to compute is computed once.
//!
//! `GGSBASE1`, the length of the header (`u32`), the header (JSON, an [`Identity`]), then one row for each position that has a next
//! token, texts one after another: most probable token (`u32`), negative log likelihood of the next token (`f32`), log-probabilities of
//! the vocabulary (`f16` each). All little-endian. A row takes `8 + 2 vocabulary` bytes: 259 KB for DeepSeek V4.
//!
//! Half precision rounds a log-probability by at most one part in 2048, so that confident predictions, on which small divergences hang,
//! lose least. Likelihoods and most probable tokens are kept exactly. `docs/quality.md` states the measured error.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use gguf_tools::progress::{Progress, Step};
use half::f16;
use half::slice::HalfFloatSliceExt;
use runner::logits::{argmax, log_probabilities};
use runner::observe::NoObserver;
use runner::{Model, RunnerError};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ScoreError;
use crate::divergence::slices;

const MAGIC: &[u8; 8] = b"GGSBASE1";
/// Longest header that is believed, bytes.
const LONGEST_HEADER: u64 = 1 << 16;
/// Bytes of a row before its log-probabilities.
const ROW_HEAD_BYTES: usize = 8;
/// Tokens of the texts that are read together.
const GROUP_TOKENS: usize = 2048;

/// What a file of predictions is of. Any difference makes it another file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Checkpoint of the base model, where it says.
    pub label: Option<String>,
    /// [`crate::hash::fingerprint`] of its files.
    pub model_fingerprint: String,
    /// Rounding of activations.
    pub numerics: String,
    /// Inputs of quantized matrices.
    pub activations: String,
    /// Directions that were taken out of activations.
    pub steering: Vec<String>,
    /// SHA-256 of the texts' tokens.
    pub texts_sha256: String,
    /// Tokens of the texts.
    pub n_tokens: usize,
}

impl Identity {
    /// Of a model on some texts. `label`, `model_fingerprint`: of the model's files.
    pub fn new(model: &Model, texts: &[Vec<u32>], label: Option<String>, model_fingerprint: String) -> Self {
        let provenance = model.provenance();
        let mut hash = Sha256::new();
        for text in texts {
            hash.update((text.len() as u64).to_le_bytes());
            for token in text {
                hash.update(token.to_le_bytes());
            }
        }
        Self {
            label,
            model_fingerprint,
            numerics: provenance.numerics.to_owned(),
            activations: provenance.activations.to_owned(),
            steering: provenance.steering.clone(),
            texts_sha256: crate::hash::hex(&hash.finalize()),
            n_tokens: texts.iter().map(Vec::len).sum(),
        }
    }
}

/// Why a file of predictions cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The system's own.
    #[error("cannot read or write the base predictions in `{path}`")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// It is none.
    #[error("`{path}` holds no base predictions of this program ({reason}); choose another file")]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// It is of another model, text or computation.
    #[error(
        "`{path}` holds other predictions: {field} is {found} there and {expected} now; choose another file, or remove it"
    )]
    Other {
        /// The file.
        path: PathBuf,
        /// What differs first.
        field: &'static str,
        /// In the file.
        found: String,
        /// Now.
        expected: String,
    },
    /// Its length is not that of its rows.
    #[error(
        "`{path}` has {found} bytes, its {n_rows} positions take {expected}: it is damaged; remove it to compute it again"
    )]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// Bytes there.
        found: u64,
        /// Rows that it must have.
        n_rows: usize,
        /// Bytes that they take.
        expected: u64,
    },
    /// It would be larger than allowed.
    #[error(
        "base predictions of {n_rows} positions take {needed} bytes ({row_bytes} each), allowed are {allowed}; \
         raise --max-cache, or use at most {fitting} tokens of text"
    )]
    TooLarge {
        /// Positions.
        n_rows: usize,
        /// Bytes of the file.
        needed: u64,
        /// Bytes of a position.
        row_bytes: u64,
        /// The bound.
        allowed: u64,
        /// Positions that fit.
        fitting: u64,
    },
    /// Another process writes it.
    #[error("`{path}` is being written by another process; wait for it")]
    InUse {
        /// The part file.
        path: PathBuf,
    },
}

/// The value that the file keeps of a log-probability. Below the least half-precision number the probability is nothing.
pub(crate) fn round_to_f16(value: f32) -> f32 {
    to_f16(value).to_f32()
}

fn to_f16(value: f32) -> f16 {
    f16::from_f32(value.max(f16::MIN.to_f32()))
}

/// A complete file of predictions.
#[derive(Debug)]
pub(crate) struct CacheFile {
    path: PathBuf,
    /// Bytes before the first row.
    head_bytes: u64,
    vocabulary: usize,
    /// Row of the first position of each text, and of one more.
    first_rows: Vec<usize>,
}

/// One position.
pub(crate) struct Row {
    pub(crate) top: u32,
    pub(crate) nll: f32,
    pub(crate) log_probabilities: Vec<f32>,
}

impl CacheFile {
    pub(crate) fn open_or_write(
        model: &Model,
        texts: &[Vec<u32>],
        path: &Path,
        identity: &Identity,
        most_bytes: u64,
        progress: &dyn Progress,
    ) -> Result<Self, ScoreError> {
        let io = |source| CacheError::Io { path: path.to_owned(), source };
        let header = serde_json::to_vec(identity).map_err(|e| io(e.into()))?;
        let mut first_rows = vec![0];
        for text in texts {
            first_rows.push(first_rows.last().copied().unwrap_or(0) + text.len().saturating_sub(1));
        }
        let cache = Self {
            path: path.to_owned(),
            head_bytes: MAGIC.len() as u64 + 4 + header.len() as u64,
            vocabulary: model.hyper_parameters().vocab_size as usize,
            first_rows,
        };
        let needed = cache.check_size(most_bytes)?;
        if path.exists() {
            let mut file = File::open(path).map_err(io)?;
            check_header(&mut file, path, identity)?;
            let found = file.metadata().map_err(io)?.len();
            if found != needed {
                let n_rows = cache.n_rows();
                return Err(CacheError::WrongLength {
                    path: path.to_owned(),
                    found,
                    n_rows,
                    expected: needed,
                }
                .into());
            }
            return Ok(cache);
        }
        cache.write(model, texts, identity, &header, progress)?;
        Ok(cache)
    }

    pub(crate) fn reader(&self) -> Result<Reader<'_>, CacheError> {
        let io = |source| CacheError::Io { path: self.path.clone(), source };
        let file = BufReader::new(File::open(&self.path).map_err(io)?);
        Ok(Reader { cache: self, file, bytes: vec![0; self.row_bytes()] })
    }

    fn n_rows(&self) -> usize {
        self.first_rows.last().copied().unwrap_or(0)
    }

    fn row_bytes(&self) -> usize {
        ROW_HEAD_BYTES + 2 * self.vocabulary
    }

    /// Bytes up to a row.
    fn offset(&self, row: usize) -> u64 {
        self.head_bytes + row as u64 * self.row_bytes() as u64
    }

    /// Bytes of the whole file, if they are allowed.
    fn check_size(&self, allowed: u64) -> Result<u64, CacheError> {
        let row_bytes = self.row_bytes() as u64;
        let needed = (self.n_rows() as u64).saturating_mul(row_bytes).saturating_add(self.head_bytes);
        if needed > allowed {
            let fitting = allowed.saturating_sub(self.head_bytes) / row_bytes;
            return Err(CacheError::TooLarge { n_rows: self.n_rows(), needed, row_bytes, allowed, fitting });
        }
        Ok(needed)
    }

    /// Computes what the part file lacks, and gives it its name.
    fn write(
        &self,
        model: &Model,
        texts: &[Vec<u32>],
        identity: &Identity,
        header: &[u8],
        progress: &dyn Progress,
    ) -> Result<(), ScoreError> {
        let mut name = self.path.as_os_str().to_owned();
        name.push(".part");
        let part = PathBuf::from(name);
        let io = |source| CacheError::Io { path: part.clone(), source };
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&part).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Err(CacheError::InUse { path: part }.into()),
            Err(std::fs::TryLockError::Error(source)) => return Err(io(source).into()),
        }
        let mut done = self.texts_done(&mut file, &part, identity).map_err(ScoreError::Cache)?;
        if done == 0 {
            file.set_len(0).and_then(|()| file.rewind()).map_err(io)?;
            let length = header.len() as u32;
            file.write_all(&[MAGIC, &length.to_le_bytes()[..], header].concat()).map_err(io)?;
        }
        file.set_len(self.offset(self.first_rows[done])).map_err(io)?;
        file.seek(SeekFrom::End(0)).map_err(io)?;
        let mut out = BufWriter::new(file);
        while done < texts.len() {
            if progress.interrupted() {
                return Err(ScoreError::Interrupted);
            }
            let end = group_end(texts, done);
            self.write_group(model, &texts[done..end], &mut out)?.map_err(io)?;
            out.flush().and_then(|()| out.get_ref().sync_data()).map_err(io)?;
            done = end;
            progress.step(&Step {
                item: "base",
                done_bytes: self.offset(self.first_rows[done]),
                total_bytes: self.offset(self.n_rows()),
                done_items: done,
                total_items: texts.len(),
            });
        }
        out.get_ref().sync_all().map_err(io)?;
        std::fs::rename(&part, &self.path).map_err(io)?;
        let folder = self.path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)?;
        Ok(())
    }

    /// Whole texts that a part file holds; those that a crash may have left unwritten do not count.
    fn texts_done(&self, file: &mut File, path: &Path, identity: &Identity) -> Result<usize, CacheError> {
        let io = |source| CacheError::Io { path: path.to_owned(), source };
        let n_bytes = file.metadata().map_err(io)?.len();
        if n_bytes <= self.head_bytes {
            return Ok(0);
        }
        check_header(file, path, identity)?;
        let whole = |done: &usize| self.offset(self.first_rows[*done]) <= n_bytes;
        let mut done = (0..self.first_rows.len()).rev().find(whole).unwrap_or(0);
        // Only the last group may be lost: all before were forced to the disk before it was begun.
        let mut reader =
            Reader { cache: self, file: BufReader::new(&*file), bytes: vec![0; self.row_bytes()] };
        while done > 0 && (self.first_rows[done - 1]..self.first_rows[done]).any(|row| !reader.is_sound(row))
        {
            done -= 1;
        }
        Ok(done)
    }

    /// The outer error is the model's, the inner one the file's.
    fn write_group(
        &self,
        model: &Model,
        texts: &[Vec<u32>],
        out: &mut (impl Write + Send),
    ) -> Result<std::io::Result<()>, RunnerError> {
        let mut written = Ok(());
        let mut bytes = Vec::with_capacity(self.row_bytes());
        model.read_texts(&slices(texts), &mut NoObserver, &mut |text, position, logits| {
            let Some(&next) = texts[text].get(position + 1) else { return };
            let values: Vec<f32> = log_probabilities(logits).into_iter().map(|p| p as f32).collect();
            bytes.clear();
            bytes.extend(argmax(&values).to_le_bytes());
            bytes.extend((-values[next as usize]).to_le_bytes());
            for &value in &values {
                bytes.extend(to_f16(value).to_le_bytes());
            }
            if written.is_ok() {
                written = out.write_all(&bytes);
            }
        })?;
        Ok(written)
    }
}

/// The first text behind those that are read together.
fn group_end(texts: &[Vec<u32>], first: usize) -> usize {
    let mut n_tokens = 0;
    let fitting = texts[first..].iter().take_while(|text| {
        n_tokens += text.len();
        n_tokens <= GROUP_TOKENS
    });
    first + fitting.count().max(1)
}

/// Leaves the file behind its header.
fn check_header(file: &mut File, path: &Path, expected: &Identity) -> Result<(), CacheError> {
    let not_ours = |reason: String| CacheError::NotOurs { path: path.to_owned(), reason };
    let mut start = [0; 12];
    file.rewind().and_then(|()| file.read_exact(&mut start)).map_err(|e| not_ours(e.to_string()))?;
    let length = u32::from_le_bytes([start[8], start[9], start[10], start[11]]);
    if &start[..8] != MAGIC || u64::from(length) > LONGEST_HEADER {
        return Err(not_ours("it does not begin as one".to_owned()));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(|e| not_ours(e.to_string()))?;
    let found: Identity = serde_json::from_slice(&header).map_err(|e| not_ours(e.to_string()))?;
    let label = |identity: &Identity| identity.label.clone().unwrap_or_else(|| "none".to_owned());
    let fields = [
        ("checkpoint", label(&found), label(expected)),
        ("fingerprint of the model", found.model_fingerprint.clone(), expected.model_fingerprint.clone()),
        ("numerics", found.numerics.clone(), expected.numerics.clone()),
        ("activations", found.activations.clone(), expected.activations.clone()),
        ("steering", found.steering.join(", "), expected.steering.join(", ")),
        ("tokens of text", found.n_tokens.to_string(), expected.n_tokens.to_string()),
        ("SHA-256 of the texts", found.texts_sha256.clone(), expected.texts_sha256.clone()),
    ];
    match fields.into_iter().find(|(_, found, expected)| found != expected) {
        Some((field, found, expected)) => {
            Err(CacheError::Other { path: path.to_owned(), field, found, expected })
        }
        None if header != serde_json::to_vec(expected).unwrap_or_default() => {
            Err(not_ours("its header is written differently".to_owned()))
        }
        None => Ok(()),
    }
}

/// Reads rows.
pub(crate) struct Reader<'a, F = File> {
    cache: &'a CacheFile,
    file: BufReader<F>,
    bytes: Vec<u8>,
}

impl<F: Read + Seek> Reader<'_, F> {
    pub(crate) fn row(&mut self, text: usize, position: usize) -> Result<Row, CacheError> {
        self.read(self.cache.first_rows[text] + position)
            .map_err(|source| CacheError::Io { path: self.cache.path.clone(), source })
    }

    fn read(&mut self, row: usize) -> std::io::Result<Row> {
        let offset = self.cache.offset(row);
        let ahead = offset as i64 - self.file.stream_position()? as i64;
        self.file.seek_relative(ahead)?;
        self.file.read_exact(&mut self.bytes)?;
        let b = &self.bytes;
        let halves: Vec<f16> =
            b[ROW_HEAD_BYTES..].chunks_exact(2).map(|pair| f16::from_le_bytes([pair[0], pair[1]])).collect();
        Ok(Row {
            top: u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            nll: f32::from_le_bytes([b[4], b[5], b[6], b[7]]),
            log_probabilities: halves.to_f32_vec(),
        })
    }

    /// Whether a row holds probabilities: they sum to one, within what rounding does to them.
    fn is_sound(&mut self, row: usize) -> bool {
        self.read(row).is_ok_and(|row| {
            let sum: f64 = row.log_probabilities.iter().map(|&p| f64::from(p).exp()).sum();
            (0.9..1.1).contains(&sum)
        })
    }
}
