//! Hints to the system about which tensors will be read next and which are done with.
//!
//! All of it is advice: where the system does not take it, reading works as before.
#![expect(unsafe_code, reason = "giving pages of a map back is unsafe by its signature")]

use std::fs::File;
use std::num::NonZeroU64;
use std::ops::Range;

use memmap2::UncheckedAdvice;

use super::{Gguf, TensorInfo};

impl Gguf {
    /// Asks the system to read bytes `range` of a tensor's data from disk; does not wait for them.
    pub fn read_ahead(&self, tensor: &TensorInfo, range: Range<usize>) {
        self.advise_file(tensor, range, FileAdvice::WillNeed);
    }

    /// Lets the system take back the memory that holds a tensor's data. It is read again from the file if it is used
    /// again.
    pub fn release(&self, tensor: &TensorInfo) {
        let Ok(bytes) = self.data(tensor) else { return };
        if let (false, Some(map)) = (bytes.is_empty(), &self.maps[tensor.shard_index]) {
            let start = bytes.as_ptr().addr() - map.as_ptr().addr();
            // SAFETY: the map is of a file and never written to, so dropping its pages loses nothing: a later read
            // brings the same bytes back.
            let advised =
                unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, bytes.len()) };
            // Only a hint.
            let _ = advised;
        }
        // The pages are this process's no more, but still the system's copy of the file.
        self.advise_file(tensor, 0..bytes.len(), FileAdvice::DontNeed);
    }

    fn advise_file(&self, tensor: &TensorInfo, range: Range<usize>, advice: FileAdvice) {
        let shard = &self.shards[tensor.shard_index];
        let start = shard.data_offset_bytes.saturating_add(tensor.offset_bytes);
        let start = start.saturating_add(range.start as u64);
        if let (Ok(file), Some(n_bytes)) = (File::open(&shard.path), NonZeroU64::new(range.len() as u64)) {
            advice.give(&file, start, n_bytes);
        }
    }
}

#[derive(Clone, Copy)]
enum FileAdvice {
    WillNeed,
    DontNeed,
}

impl FileAdvice {
    #[cfg(target_os = "linux")]
    fn give(self, file: &File, start: u64, n_bytes: NonZeroU64) {
        let advice = match self {
            Self::WillNeed => rustix::fs::Advice::WillNeed,
            Self::DontNeed => rustix::fs::Advice::DontNeed,
        };
        // Only a hint.
        let _ = rustix::fs::fadvise(file, start, Some(n_bytes), advice);
    }

    /// Systems without the call.
    #[cfg(not(target_os = "linux"))]
    fn give(self, _: &File, _: u64, _: NonZeroU64) {}
}

#[cfg(test)]
mod tests {
    use test_vectors::gguf::{GgufBytes, RawTensor};

    use super::*;

    #[test]
    fn data_that_was_given_back_reads_the_same_again() {
        let tensor = |name: &str, first: u8| RawTensor {
            name: name.into(),
            rank: None,
            dimensions: vec![5000],
            type_id: 0,
            offset: None,
            data: (0..20_000_u32).map(|i| first.wrapping_add((i / 7) as u8)).collect(),
        };
        let file = GgufBytes { tensors: vec![tensor("a", 1), tensor("b", 2)], ..GgufBytes::default() };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("two.gguf");
        std::fs::write(&path, file.make().bytes).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        for tensor in gguf.tensors() {
            let before = gguf.data(tensor).unwrap().to_vec();
            gguf.release(tensor);
            gguf.read_ahead(tensor, 100..20_000);
            assert_eq!(gguf.data(tensor).unwrap(), before, "{}", tensor.name);
            gguf.read_ahead(tensor, 7..7);
        }
    }
}
