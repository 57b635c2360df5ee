//! Weights from a file to the device: read by several threads, past the system's cache, into page-locked memory; copied from
//! there, and put in the kernels' order on the device, while the next are read.
//!
//! Nothing of the file stays in the host's memory behind it. That matters where device and host share one memory (GB10):
//! the system's copy of a file would take the room of the weights.
#![expect(unsafe_code, reason = "copies from page-locked memory that go on behind the call")]

use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use rustix::fs::{Advice, Mode, OFlags, fadvise, open};

use super::driver::{DeviceBuffer, Event, PinnedBuffer};
use super::error::CudaError;
use super::matrix::Matrix;
use super::module::Gpu;
use crate::error::RunnerError;
use crate::weights::FileExtent;

/// Bytes that a thread reads at once.
const PIECE_BYTES: usize = 8 << 20;
/// Pieces that are read together, while as many before them are copied.
const PIECES_AT_ONCE: usize = 8;
/// What offsets, lengths and addresses of reads past the system's cache are multiples of.
const ALIGNMENT: usize = 4096;

/// Page-locked memory for pieces, and memory of the device that they are copied to.
pub(super) struct Loading {
    halves: [Half; 2],
    file: Option<OpenFile>,
}

/// Pieces that are read together.
struct Half {
    slots: Vec<Slot>,
    /// Behind the copies out of these slots.
    copied: Option<Event>,
}

struct Slot {
    host: PinnedBuffer<u8>,
    device: DeviceBuffer<u8>,
}

impl Half {
    fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        let n_bytes = PIECE_BYTES + 2 * ALIGNMENT;
        let slot = |_| {
            let host = gpu.device.pinned(n_bytes)?;
            Ok(Slot { host, device: gpu.device.alloc(n_bytes, "staging of weights")? })
        };
        Ok(Self { slots: (0..PIECES_AT_ONCE).map(slot).collect::<Result<_, CudaError>>()?, copied: None })
    }

    /// Waits until the slots may be overwritten.
    fn wait(&mut self) -> Result<(), CudaError> {
        self.copied.take().map_or(Ok(()), |event| event.wait())
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        // Copies may still be under way when something else failed; if waiting fails, there are none any more.
        let _ = self.wait();
    }
}

/// One file, read past the system's cache where the file system lets us.
struct OpenFile {
    path: PathBuf,
    direct: Option<File>,
    cached: File,
}

impl OpenFile {
    fn open(path: &Path) -> std::io::Result<Self> {
        let direct = open(path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty());
        Ok(Self { path: path.to_owned(), direct: direct.ok().map(File::from), cached: File::open(path)? })
    }

    /// Reads `n_bytes` from `offset` on; gives the place in `slot`, which begins at a page, where they begin.
    fn read(&self, offset: u64, n_bytes: usize, slot: &mut [u8]) -> std::io::Result<usize> {
        let before = (offset % ALIGNMENT as u64) as usize;
        if let Some(direct) = &self.direct {
            let wanted = before + n_bytes;
            let room = &mut slot[..wanted.next_multiple_of(ALIGNMENT)];
            if read_at_least(direct, offset - before as u64, room, wanted).is_ok() {
                return Ok(before);
            }
        }
        // The file system refuses, or the disk's sectors are larger.
        self.cached.read_exact_at(&mut slot[..n_bytes], offset)?;
        // Only a hint.
        let _ = fadvise(&self.cached, offset, NonZeroU64::new(n_bytes as u64), Advice::DontNeed);
        Ok(0)
    }
}

/// Reads at least `wanted` bytes; of the rest of `room` as many as there are.
fn read_at_least(file: &File, offset: u64, room: &mut [u8], wanted: usize) -> std::io::Result<()> {
    let mut done = 0;
    while done < wanted {
        match file.read_at(&mut room[done..], offset + done as u64) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Rows of a matrix that are read at once, if any are.
fn rows_a_piece(row_bytes: usize) -> Option<usize> {
    PIECE_BYTES.checked_div(row_bytes).filter(|&rows| rows > 0)
}

impl Loading {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, CudaError> {
        Ok(Self { halves: [Half::new(gpu)?, Half::new(gpu)?], file: None })
    }

    /// Fills a matrix with rows that lie in a file one after the other. `false`: its rows are too long for this way.
    pub(super) fn fill(
        &mut self,
        gpu: &Gpu,
        matrix: &mut Matrix,
        from: &FileExtent<'_>,
    ) -> Result<bool, RunnerError> {
        let row_bytes = matrix.row_bytes();
        let Some(piece_rows) = rows_a_piece(row_bytes) else { return Ok(false) };
        let failed = |source| RunnerError::Reading { path: from.path.to_owned(), source };
        let file = match self.file.take().filter(|file| file.path == from.path) {
            Some(file) => self.file.insert(file),
            None => self.file.insert(OpenFile::open(from.path).map_err(failed)?),
        };
        let firsts: Vec<usize> = (0..matrix.rows()).step_by(piece_rows).collect();
        for firsts in firsts.chunks(PIECES_AT_ONCE) {
            let [half, _] = &mut self.halves;
            half.wait()?;
            let n_bytes = |first: usize| piece_rows.min(matrix.rows() - first) * row_bytes;
            let read = |(slot, &first): (&mut Slot, &usize)| {
                let offset = from.offset + (first * row_bytes) as u64;
                file.read(offset, n_bytes(first), slot.host.as_mut_slice())
            };
            let begins: Result<Vec<usize>, _> = half.slots.par_iter_mut().zip(firsts).map(read).collect();
            let begins = begins.map_err(failed)?;
            let lengths: Vec<usize> = firsts.iter().map(|&first| n_bytes(first)).collect();
            for (((slot, &first), begin), n_bytes) in
                half.slots.iter_mut().zip(firsts).zip(begins).zip(lengths)
            {
                let mut staged = slot.device.slice_mut(0..n_bytes);
                // SAFETY: the slot is overwritten only behind the event below.
                unsafe { gpu.device.write_pinned(&mut staged, &slot.host, begin..begin + n_bytes)? };
                matrix.put_rows(gpu, first, slot.device.slice(0..n_bytes))?;
            }
            half.copied = Some(gpu.device.record()?);
            self.halves.swap(0, 1);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_from_any_offset_give_the_bytes_of_the_file() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, &bytes).unwrap();
        let mut file = OpenFile::open(&path).unwrap();
        // A page to begin at, as page-locked memory does.
        let mut memory = vec![0; 150_000];
        let page = memory.as_ptr().align_offset(ALIGNMENT);
        for _ in 0..2 {
            for (offset, n) in
                [(0, 10), (1, 4096), (4095, 2), (4096, 8192), (12_345, 60_000), (99_999, 1), (50_000, 50_000)]
            {
                let slot = &mut memory[page..];
                let begin = file.read(offset as u64, n, slot).unwrap();
                assert!(slot[begin..begin + n] == bytes[offset..offset + n], "{n} bytes at {offset}");
            }
            assert!(file.read(99_999, 2, &mut memory[page..]).is_err(), "behind the end");
            // Then as file systems that know no direct reads do it.
            file.direct = None;
        }
    }
}
