//! The state of an interrupted collection: everything needed to go on with the next prompt.
//!
//! ```text
//! magic, u64 header bytes, header (JSON), then for each block of sums its counts (u64) and sums (f64), then the
//! SHA-256 of all before; little-endian
//! ```

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::CollectError;
use super::totals::Totals;
use crate::write::write_atomically;

const MAGIC: &[u8; 8] = b"ggsimx01";
/// A header is a few hundred bytes.
const MOST_HEADER_BYTES: u64 = 1 << 20;

/// What must be the same for totals to be continued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    /// [`super::fingerprint`] of the model.
    pub(super) model: String,
    /// SHA-256 of the tokens of all prompts.
    pub(super) prompts: String,
    /// Numerics, activations and what is summed.
    pub(super) settings: String,
}

/// How far a collection is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Position {
    pub(super) n_prompts: usize,
    pub(super) n_tokens: u64,
    /// Tokens that were predicted.
    pub(super) n_scored: u64,
    /// Bits of the sum of their negative log-probabilities: JSON would round it.
    pub(super) nll_bits: u64,
}

#[derive(Serialize, Deserialize)]
struct Header {
    identity: Identity,
    position: Position,
}

/// Hashes what passes through.
struct Hashing<T> {
    inner: T,
    digest: Sha256,
}

impl<T: Write> Write for Hashing<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.digest.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for Hashing<T> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(into)?;
        self.digest.update(&into[..n]);
        Ok(n)
    }
}

/// Replaces the state file, or leaves the old one.
pub(super) fn save(
    path: &Path,
    identity: &Identity,
    position: Position,
    totals: &Totals,
) -> Result<(), CollectError> {
    let failed = |source| crate::ImatrixError::Write { path: path.to_owned(), source };
    let header = serde_json::to_vec(&Header { identity: identity.clone(), position })
        .map_err(|e| failed(io::Error::other(e)))?;
    write_atomically(path, true, |out| {
        let mut out = Hashing { inner: out, digest: Sha256::new() };
        let mut write = || {
            out.write_all(MAGIC)?;
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            for block in totals.blocks() {
                block.counts.iter().try_for_each(|count| out.write_all(&count.to_le_bytes()))?;
                block.squares.iter().try_for_each(|sum| out.write_all(&sum.to_le_bytes()))?;
            }
            let digest = out.digest.finalize_reset();
            out.inner.write_all(&digest)
        };
        write().map_err(failed)
    })?;
    Ok(())
}

/// Reads a state into `totals`, which have the shape that `identity` implies. `None` if there is no state file.
pub(super) fn load(
    path: &Path,
    identity: &Identity,
    totals: &mut Totals,
) -> Result<Option<Position>, CollectError> {
    let read_error = |source| crate::ImatrixError::Read { path: path.to_owned(), source };
    let damaged = |problem: String| CollectError::StateDamaged { path: path.to_owned(), problem };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(read_error(e).into()),
    };
    let n_file_bytes = file.metadata().map_err(read_error)?.len();
    let mut file = Hashing { inner: BufReader::with_capacity(1 << 20, file), digest: Sha256::new() };
    let mut start = [0; 16];
    file.read_exact(&mut start).map_err(|_| damaged(format!("{n_file_bytes} bytes are no state")))?;
    let (magic, length) = start.split_at(8);
    let n_header_bytes = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    if magic != MAGIC || n_header_bytes > MOST_HEADER_BYTES.min(n_file_bytes) {
        return Err(damaged("it does not begin like a state".to_owned()));
    }
    let mut header = vec![0; n_header_bytes as usize];
    file.read_exact(&mut header).map_err(read_error)?;
    let header: Header = serde_json::from_slice(&header).map_err(|e| damaged(format!("its header: {e}")))?;
    if header.identity != *identity {
        return Err(CollectError::OtherState {
            path: path.to_owned(),
            differs: differs(&header.identity, identity),
        });
    }
    let n_values: u64 = totals.blocks().map(|b| (b.counts.len() + b.squares.len()) as u64).sum();
    let expected = 16 + n_header_bytes + 8 * n_values + 32;
    if n_file_bytes != expected {
        return Err(damaged(format!("it has {n_file_bytes} bytes, expected {expected}")));
    }
    let mut read = || {
        let mut eight = [0; 8];
        for block in totals.blocks_mut() {
            for count in &mut block.counts {
                file.read_exact(&mut eight)?;
                *count = u64::from_le_bytes(eight);
            }
            for sum in &mut block.squares {
                file.read_exact(&mut eight)?;
                *sum = f64::from_le_bytes(eight);
            }
        }
        let digest = file.digest.finalize_reset();
        let mut stored = [0; 32];
        file.read_exact(&mut stored)?;
        Ok(stored[..] == digest[..])
    };
    if !read().map_err(read_error)? {
        return Err(damaged("its bytes do not have the SHA-256 that it ends with".to_owned()));
    }
    Ok(Some(header.position))
}

fn differs(found: &Identity, expected: &Identity) -> String {
    let fields = [
        ("model", &found.model, &expected.model),
        ("prompts", &found.prompts, &expected.prompts),
        ("settings", &found.settings, &expected.settings),
    ];
    let differing: Vec<_> = fields
        .iter()
        .filter(|(_, found, expected)| found != expected)
        .map(|(name, found, expected)| format!("{name}: found {found}, expected {expected}"))
        .collect();
    differing.join("; ")
}
