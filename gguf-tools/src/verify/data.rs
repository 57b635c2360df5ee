//! Reads every byte once: hashes files while blocks are looked at.

use std::fmt::Write as _;
use std::ops::Range;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::{Findings, VerifiedFile};
use crate::block::BlockFormat;
use crate::gguf::{Gguf, GgufError, ShardInfo, TensorInfo};
use crate::plan::hex;
use crate::progress::{Progress, Step};

/// Bytes that are hashed and looked at before the next are read: small against memory, large against a thread's start.
const PIECE_BYTES: usize = 64 << 20;
/// Bytes that one thread looks at.
const SHARE_BYTES: usize = 1 << 20;

/// What reading gave beside findings.
pub(super) struct Read {
    pub(super) files: Vec<VerifiedFile>,
    pub(super) n_checked_tensors: usize,
    pub(super) only_sized: Vec<String>,
}

/// A tensor whose blocks can be judged, and what was found so far.
struct Judged<'a> {
    tensor: &'a TensorInfo,
    format: &'static dyn BlockFormat,
    data: &'a [u8],
    start: usize,
    bad: Option<Bad>,
}

/// The bad blocks of a part of a tensor.
struct Bad {
    n_blocks: usize,
    first: usize,
    problem: String,
}

impl Bad {
    /// Puts two parts together; independent of their order.
    fn merge(self, other: Self) -> Self {
        let n_blocks = self.n_blocks + other.n_blocks;
        let first = if self.first <= other.first { self } else { other };
        Self { n_blocks, ..first }
    }
}

pub(super) fn read(gguf: &Gguf, progress: &dyn Progress, findings: &mut Findings) -> Result<Read, GgufError> {
    read_in_pieces(gguf, PIECE_BYTES, progress, findings)
}

/// Reads in pieces of any size; what is found does not depend on it.
pub(super) fn read_in_pieces(
    gguf: &Gguf,
    piece_bytes: usize,
    progress: &dyn Progress,
    findings: &mut Findings,
) -> Result<Read, GgufError> {
    let total_bytes = gguf.shards().iter().map(|shard| shard.file_bytes).sum();
    let mut read = Read { files: Vec::new(), n_checked_tensors: 0, only_sized: Vec::new() };
    let mut done_bytes = 0;
    for (shard_index, shard) in gguf.shards().iter().enumerate() {
        let mut judged = judged_tensors(gguf, shard, &mut read.only_sized);
        read.n_checked_tensors += judged.len();
        let mut hash = Sha256::new();
        let bytes = gguf.shard_bytes(shard_index);
        for (i, piece) in bytes.chunks(piece_bytes).enumerate() {
            if progress.interrupted() {
                return Err(GgufError::Interrupted { path: shard.path.clone() });
            }
            let start = i * piece_bytes;
            rayon::join(|| hash.update(piece), || look_at(&mut judged, start..start + piece.len()));
            done_bytes += piece.len() as u64;
            progress.step(&Step {
                item: &shard.path.to_string_lossy(),
                done_bytes,
                total_bytes,
                done_items: shard_index,
                total_items: gguf.shards().len(),
            });
        }
        for Judged { tensor, bad, .. } in judged {
            if let Some(bad) = bad {
                findings.error(Some(&tensor.name), describe(tensor, &bad));
            }
        }
        check_padding(gguf, shard, bytes, findings);
        read.files.push(VerifiedFile {
            path: shard.path.display().to_string(),
            file_bytes: shard.file_bytes,
            sha256: hex(&hash.finalize()),
        });
    }
    Ok(read)
}

/// Bytes between tensors and after the last one are zero in every file that was written whole.
fn check_padding(gguf: &Gguf, shard: &ShardInfo, bytes: &[u8], findings: &mut Findings) {
    let mut tensors: Vec<_> = gguf.tensors()[shard.tensors.clone()].iter().collect();
    tensors.sort_by_key(|tensor| tensor.offset_bytes);
    let start = |tensor: &TensorInfo| (shard.data_offset_bytes + tensor.offset_bytes) as usize;
    for (i, tensor) in tensors.iter().enumerate() {
        let end = start(tensor).saturating_add(tensor.n_bytes as usize);
        let next = tensors.get(i + 1).map_or(bytes.len(), |next| start(next));
        let gap = bytes.get(end..next.min(bytes.len())).unwrap_or_default();
        if let Some(at) = gap.iter().position(|&byte| byte != 0) {
            let message = format!(
                "byte {} behind it is {}, expected zero padding; another writer's data or a damaged copy",
                end + at,
                gap[at]
            );
            findings.warning(Some(&tensor.name), message);
        }
    }
}

/// The tensors of a shard that are all there and whose type can judge its blocks; the names of the others are noted.
fn judged_tensors<'a>(gguf: &'a Gguf, shard: &ShardInfo, only_sized: &mut Vec<String>) -> Vec<Judged<'a>> {
    let mut judged = Vec::new();
    for tensor in &gguf.tensors()[shard.tensors.clone()] {
        let Some(format) = tensor.block_type.format() else {
            only_sized.push(tensor.name.clone());
            continue;
        };
        if let Ok(data) = gguf.data(tensor) {
            let start = (shard.data_offset_bytes + tensor.offset_bytes) as usize;
            judged.push(Judged { tensor, format, data, start, bad: None });
        }
    }
    judged
}

/// Looks at every block that begins within `piece` of the file.
fn look_at(judged: &mut [Judged<'_>], piece: Range<usize>) {
    judged.par_iter_mut().for_each(|tensor| {
        let block_bytes = tensor.tensor.block_type.bytes_per_block();
        let n_blocks = tensor.data.len() / block_bytes;
        // Blocks that begin before a place: a block across two pieces belongs to the first.
        let before = |place: usize| place.saturating_sub(tensor.start).div_ceil(block_bytes).min(n_blocks);
        let blocks = before(piece.start)..before(piece.end);
        let share = (SHARE_BYTES / block_bytes).max(1);
        let (format, data) = (tensor.format, tensor.data);
        let found = blocks
            .clone()
            .into_par_iter()
            .step_by(share)
            .filter_map(|first| {
                let end = (first + share).min(blocks.end);
                bad_blocks(format, &data[first * block_bytes..end * block_bytes], block_bytes, first)
            })
            .reduce_with(Bad::merge);
        tensor.bad = [tensor.bad.take(), found].into_iter().flatten().reduce(Bad::merge);
    });
}

fn bad_blocks(format: &dyn BlockFormat, blocks: &[u8], block_bytes: usize, offset: usize) -> Option<Bad> {
    let mut bad: Option<Bad> = None;
    let mut at = 0;
    while let Some(found) = format.first_bad_block(&blocks[at * block_bytes..]) {
        let here = at + found.block_index;
        let this = Bad { n_blocks: 1, first: offset + here, problem: found.problem };
        bad = Some(bad.map_or_else(|| Bad { ..this }, |bad| Bad { n_blocks: bad.n_blocks + 1, ..bad }));
        at = here + 1;
    }
    bad
}

fn describe(tensor: &TensorInfo, bad: &Bad) -> String {
    let columns = tensor.shape.last().copied().unwrap_or(1);
    let blocks_per_row = (columns / tensor.block_type.values_per_block() as u64).max(1);
    let row = bad.first as u64 / blocks_per_row;
    let place = match tensor.shape[..] {
        [_, rows, _] => format!("expert {}, row {}", row / rows, row % rows),
        _ => format!("row {row}"),
    };
    let mut message = format!("{}: block {} ({place}): {}", tensor.block_type, bad.first, bad.problem);
    if bad.n_blocks > 1 {
        let _ = write!(message, "; {} blocks are bad, this is the first", bad.n_blocks);
    }
    message
}
