//! Copying a range of one file into another, without passing through this program where the system can.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::io::Errno;

/// Bytes of the one buffer through which data passes where the system does not copy by itself.
pub(super) const BUFFER_BYTES: usize = 8 << 20;

/// How the bytes of tensors got into a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyMethod {
    /// `copy_file_range`: the file system shares blocks where it can and copies inside the kernel elsewhere.
    System,
    /// Read and written in large pieces.
    Buffer,
}

/// Copies ranges, and remembers when the system refuses to do it.
#[derive(Debug)]
pub(super) struct Copier {
    method: CopyMethod,
    buffer: Vec<u8>,
}

impl Copier {
    pub(super) fn new(method: CopyMethod) -> Self {
        Self { method, buffer: Vec::new() }
    }

    pub(super) fn method(&self) -> CopyMethod {
        self.method
    }

    /// Copies `n_bytes` from one place to another.
    pub(super) fn copy(
        &mut self,
        source: &File,
        from: u64,
        target: &File,
        to: u64,
        n_bytes: u64,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < n_bytes && self.method == CopyMethod::System {
            match by_system(source, from + done, target, to + done, n_bytes - done) {
                // The end of the source, or a file system that says so wrongly: reading will tell.
                Ok(0) => self.method = CopyMethod::Buffer,
                Ok(n) => done += n,
                Err(error) if is_refusal(error) => self.method = CopyMethod::Buffer,
                Err(error) => return Err(error.into()),
            }
        }
        while done < n_bytes {
            self.buffer.resize(BUFFER_BYTES, 0);
            let piece = &mut self.buffer[..(n_bytes - done).min(BUFFER_BYTES as u64) as usize];
            source.read_exact_at(piece, from + done)?;
            target.write_all_at(piece, to + done)?;
            done += piece.len() as u64;
        }
        Ok(())
    }
}

fn by_system(source: &File, from: u64, target: &File, to: u64, n_bytes: u64) -> Result<u64, Errno> {
    let (mut from, mut to) = (from, to);
    let n_bytes = usize::try_from(n_bytes).unwrap_or(usize::MAX);
    loop {
        match rustix::fs::copy_file_range(source, Some(&mut from), target, Some(&mut to), n_bytes) {
            Err(Errno::INTR) => {}
            other => return other.map(|n| n as u64),
        }
    }
}

/// Whether the error means that these files cannot be copied in this way, as opposed to not at all.
fn is_refusal(error: Errno) -> bool {
    [Errno::XDEV, Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP, Errno::PERM, Errno::BADF].contains(&error)
}

/// Whether the file system of a folder can share the blocks of a file, so that copies take no room.
///
/// Tried with an empty file beside, which is removed again.
pub fn clones_files(source: &Path, folder: &Path) -> bool {
    let probe = folder.join(format!(".ggsmith-{}.probe", std::process::id()));
    let cloned = File::open(source).and_then(|source| {
        let target = OpenOptions::new().write(true).create_new(true).open(&probe)?;
        Ok(rustix::fs::ioctl_ficlone(&target, &source)?)
    });
    // There is nothing in it; failing to remove it harms nothing.
    let _ = std::fs::remove_file(&probe);
    cloned.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_copy_the_same_bytes_and_a_short_source_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..BUFFER_BYTES + 12_345).map(|i| (i % 251) as u8).collect();
        std::fs::write(folder.path().join("source"), &bytes).unwrap();
        let source = File::open(folder.path().join("source")).unwrap();
        for method in [CopyMethod::System, CopyMethod::Buffer] {
            let path = folder.path().join("target");
            let target = File::create(&path).unwrap();
            let n_bytes = bytes.len() as u64 - 77;
            Copier::new(method).copy(&source, 77, &target, 1000, n_bytes).unwrap();
            let copied = std::fs::read(&path).unwrap();
            assert!(copied[..1000].iter().all(|&b| b == 0) && copied[1000..] == bytes[77..]);
            let beyond = Copier::new(method).copy(&source, 78, &target, 0, n_bytes);
            assert_eq!(beyond.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
