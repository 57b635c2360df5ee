//! The bytes of a new file as a list of segments, to be written, compared or continued.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::copy::{BUFFER_BYTES, Copier};
use super::{NewFile, RewriteError};
use crate::gguf::GgufError;

/// Where the bytes of a segment come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// The header, from its start.
    Header,
    /// Padding.
    Zeros,
    /// A range of an opened source.
    Range { file_index: usize, offset_bytes: u64 },
}

/// Some bytes of a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) offset_bytes: u64,
    pub(super) n_bytes: u64,
    pub(super) content: Content,
    /// Tensors that are done before this segment.
    pub(super) tensor_index: usize,
}

/// Source files, each opened once.
#[derive(Debug, Default)]
pub(super) struct Sources {
    files: Vec<File>,
    by_path: HashMap<PathBuf, usize>,
}

impl Sources {
    /// Opens the sources of a file.
    pub(super) fn open(&mut self, file: &NewFile<'_>) -> Result<(), RewriteError> {
        for path in source_paths(file) {
            if !self.by_path.contains_key(&path) {
                let opened =
                    File::open(&path).map_err(|source| GgufError::Open { path: path.clone(), source })?;
                self.by_path.insert(path, self.files.len());
                self.files.push(opened);
            }
        }
        Ok(())
    }

    pub(super) fn file(&self, index: usize) -> &File {
        &self.files[index]
    }
}

/// The files that the data of a new file comes from.
pub(super) fn source_paths(file: &NewFile<'_>) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for origin in &file.origins {
        let path = &origin.gguf.shards()[origin.tensor.shard_index].path;
        if !paths.contains(path) {
            paths.push(path.clone());
        }
    }
    paths
}

/// Every byte of a new file, in order.
pub(super) fn segments(file: &NewFile<'_>, sources: &Sources) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut end = file.layout.data_offset_bytes();
    segments.push(Segment { offset_bytes: 0, n_bytes: end, content: Content::Header, tensor_index: 0 });
    let zeros_to = |start: u64, to: u64, tensor_index: usize, segments: &mut Vec<Segment>| {
        if to > start {
            let (offset_bytes, n_bytes) = (start, to - start);
            segments.push(Segment { offset_bytes, n_bytes, content: Content::Zeros, tensor_index });
        }
    };
    for (tensor_index, (placed, origin)) in file.layout.tensors().iter().zip(&file.origins).enumerate() {
        zeros_to(end, placed.offset_bytes, tensor_index, &mut segments);
        let shard = &origin.gguf.shards()[origin.tensor.shard_index];
        segments.push(Segment {
            offset_bytes: placed.offset_bytes,
            n_bytes: placed.n_bytes,
            content: Content::Range {
                file_index: sources.by_path[&shard.path],
                offset_bytes: shard.data_offset_bytes + origin.tensor.offset_bytes,
            },
            tensor_index,
        });
        end = placed.offset_bytes + placed.n_bytes;
    }
    zeros_to(end, file.layout.file_bytes(), file.origins.len(), &mut segments);
    segments
}

/// What a new file is written into. Tests put one in place that fails.
pub(super) trait Target {
    fn write_at(&mut self, bytes: &[u8], to: u64) -> io::Result<()>;
    fn copy_at(&mut self, source: &File, from: u64, to: u64, n_bytes: u64) -> io::Result<()>;
    fn set_length(&mut self, n_bytes: u64) -> io::Result<()>;
}

/// A part file on disk.
pub(super) struct PartFile<'a> {
    pub(super) file: &'a File,
    pub(super) copier: &'a mut Copier,
}

impl Target for PartFile<'_> {
    fn write_at(&mut self, bytes: &[u8], to: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, to)
    }

    fn copy_at(&mut self, source: &File, from: u64, to: u64, n_bytes: u64) -> io::Result<()> {
        self.copier.copy(source, from, self.file, to, n_bytes)
    }

    fn set_length(&mut self, n_bytes: u64) -> io::Result<()> {
        self.file.set_len(n_bytes)
    }
}

/// Bytes that are copied between two looks at the progress.
const STEP_BYTES: u64 = 64 << 20;

/// Where writing stopped.
#[derive(Debug)]
pub(super) struct Stopped {
    pub(super) offset_bytes: u64,
    pub(super) tensor_index: usize,
    /// `None`: the caller asked to stop.
    pub(super) error: Option<io::Error>,
}

/// Writes all segments from byte `start` on. `step` hears of every piece and answers whether to go on.
pub(super) fn write_segments(
    target: &mut dyn Target,
    header: &[u8],
    segments: &[Segment],
    sources: &Sources,
    start: u64,
    step: &mut dyn FnMut(&Segment, u64) -> bool,
) -> Result<(), Stopped> {
    let stopped = |offset_bytes: u64, segment: &Segment, error: Option<io::Error>| Stopped {
        offset_bytes,
        tensor_index: segment.tensor_index,
        error,
    };
    for segment in segments {
        let end = segment.offset_bytes + segment.n_bytes;
        let mut at = start.clamp(segment.offset_bytes, end);
        while at < end {
            let n_bytes = (end - at).min(STEP_BYTES);
            let inside = at - segment.offset_bytes;
            let result = match segment.content {
                Content::Header => target.write_at(&header[inside as usize..][..n_bytes as usize], at),
                // The file is as long as what is written, so that a longer one reads as zeros.
                Content::Zeros => target.set_length(at + n_bytes),
                Content::Range { file_index, offset_bytes } => {
                    target.copy_at(sources.file(file_index), offset_bytes + inside, at, n_bytes)
                }
            };
            result.map_err(|error| stopped(at, segment, Some(error)))?;
            at += n_bytes;
            if !step(segment, at) && at < segments.last().map_or(0, |s| s.offset_bytes + s.n_bytes) {
                return Err(stopped(at, segment, None));
            }
        }
    }
    Ok(())
}

/// How many of the first bytes of `existing` are those of the new file; compared in pieces.
pub(super) fn equal_bytes(
    existing: &File,
    header: &[u8],
    segments: &[Segment],
    sources: &Sources,
) -> io::Result<u64> {
    let present = existing.metadata()?.len();
    let (mut ours, mut wanted) = (Vec::new(), Vec::new());
    for segment in segments {
        let end = (segment.offset_bytes + segment.n_bytes).min(present);
        let mut at = segment.offset_bytes;
        while at < end {
            let n_bytes = ((end - at) as usize).min(BUFFER_BYTES);
            let inside = at - segment.offset_bytes;
            ours.resize(n_bytes, 0);
            wanted.resize(n_bytes, 0);
            existing.read_exact_at(&mut ours, at)?;
            match segment.content {
                Content::Header => wanted.copy_from_slice(&header[inside as usize..][..n_bytes]),
                Content::Zeros => wanted.fill(0),
                Content::Range { file_index, offset_bytes } => {
                    sources.file(file_index).read_exact_at(&mut wanted, offset_bytes + inside)?;
                }
            }
            if let Some(different) = ours.iter().zip(&wanted).position(|(a, b)| a != b) {
                return Ok(at + different as u64);
            }
            at += n_bytes as u64;
        }
        if present < segment.offset_bytes + segment.n_bytes {
            return Ok(present);
        }
    }
    Ok(segments.last().map_or(0, |s| s.offset_bytes + s.n_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{Gguf, Metadata};
    use crate::rewrite::Origin;
    use test_vectors::gguf::GgufBytes;

    /// Holds the bytes in memory and has room for so many.
    struct SmallDisk {
        bytes: Vec<u8>,
        room: usize,
    }

    impl SmallDisk {
        fn grow(&mut self, to: usize) -> io::Result<()> {
            if to > self.room {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.bytes.resize(self.bytes.len().max(to), 0);
            Ok(())
        }
    }

    impl Target for SmallDisk {
        fn write_at(&mut self, bytes: &[u8], to: u64) -> io::Result<()> {
            self.grow(to as usize + bytes.len())?;
            self.bytes[to as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        }

        fn copy_at(&mut self, source: &File, from: u64, to: u64, n_bytes: u64) -> io::Result<()> {
            let mut bytes = vec![0; n_bytes as usize];
            source.read_exact_at(&mut bytes, from)?;
            self.write_at(&bytes, to)
        }

        fn set_length(&mut self, n_bytes: u64) -> io::Result<()> {
            self.grow(n_bytes as usize)
        }
    }

    #[test]
    fn a_disk_that_is_full_at_any_byte_is_named_and_going_on_ends_with_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("source.gguf");
        std::fs::write(&path, GgufBytes::small().make().bytes).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        let origins = gguf.tensors().iter().rev().map(|tensor| Origin { gguf: &gguf, tensor }).collect();
        let file = NewFile::new("out.gguf".into(), Metadata::default(), origins, 64).unwrap();
        let mut sources = Sources::default();
        sources.open(&file).unwrap();
        let (header, segments) = (file.layout.header_bytes(), segments(&file, &sources));
        let total = file.layout.file_bytes();
        let write = |disk: &mut SmallDisk, start: u64| {
            write_segments(disk, &header, &segments, &sources, start, &mut |_, _| true)
        };
        let mut whole = SmallDisk { bytes: Vec::new(), room: usize::MAX };
        write(&mut whole, 0).unwrap();
        assert_eq!(whole.bytes.len() as u64, total);
        let existing = folder.path().join("existing");
        for room in 0..total as usize {
            let mut disk = SmallDisk { bytes: Vec::new(), room };
            let stopped = write(&mut disk, 0).unwrap_err();
            assert_eq!(stopped.error.unwrap().kind(), io::ErrorKind::StorageFull);
            assert!(stopped.offset_bytes <= room as u64);
            assert_eq!(disk.bytes, whole.bytes[..disk.bytes.len()]);
            std::fs::write(&existing, &disk.bytes).unwrap();
            let sound = equal_bytes(&File::open(&existing).unwrap(), &header, &segments, &sources).unwrap();
            assert_eq!(sound, disk.bytes.len() as u64);
            disk.room = usize::MAX;
            write(&mut disk, sound).unwrap();
            assert_eq!(disk.bytes, whole.bytes);
        }
        for damaged in [0, total as usize / 2, total as usize - 1] {
            let mut bytes = whole.bytes.clone();
            bytes[damaged] ^= 0x80;
            std::fs::write(&existing, &bytes).unwrap();
            let sound = equal_bytes(&File::open(&existing).unwrap(), &header, &segments, &sources).unwrap();
            assert_eq!(sound, damaged as u64);
        }
    }
}
