//! Pieces of a file, and the journal beside a part file that says which of them are there.
//!
//! A part file has its full length from the start; the journal says what of it is real. Every piece has a fingerprint
//! (128-bit XXH3) of the bytes that were written, so that a resumed download trusts the disk only where it still holds what
//! came, and so that a wrong byte is found by piece. Fingerprints guard against accidents; whether the file is the right
//! one is for the digest of the whole file to say.
//!
//! Layout of a journal: a header of [`HEADER_BYTES`], JSON padded with spaces, then one slot of [`SLOT_BYTES`] a piece,
//! written in place: bytes done (u32), zeros (u32), fingerprint of those bytes (u128), and the low half of the
//! fingerprint of these 24 bytes seeded with the piece's index (u64), all little-endian. A slot that fails its check,
//! as after a power cut, means a piece of which nothing is there.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use twox_hash::xxhash3_128;

use crate::digest::Digest;
use crate::error::DownloadError;

/// Size of a journal's header.
pub(crate) const HEADER_BYTES: u64 = 4096;
/// Size of a journal's entry for one piece.
pub(crate) const SLOT_BYTES: usize = 32;
/// Version of the layout.
const FORMAT: u32 = 1;

/// How a file is cut into pieces: all of the same size but the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) n_bytes: u64,
    pub(crate) piece_bytes: u32,
}

impl Geometry {
    pub(crate) fn n_pieces(self) -> usize {
        self.n_bytes.div_ceil(u64::from(self.piece_bytes)) as usize
    }

    /// Where a piece lies in the file.
    pub(crate) fn range(self, piece: usize) -> Range<u64> {
        let start = piece as u64 * u64::from(self.piece_bytes);
        start..(start + u64::from(self.piece_bytes)).min(self.n_bytes)
    }

    /// Bytes of a piece.
    pub(crate) fn len(self, piece: usize) -> u32 {
        let range = self.range(piece);
        (range.end - range.start) as u32
    }

    /// The piece that holds this byte.
    pub(crate) fn piece_of(self, offset: u64) -> usize {
        (offset / u64::from(self.piece_bytes)) as usize
    }
}

/// Which file a part file is to become.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Identity {
    format: u32,
    /// `hf:ORG/NAME/PATH@COMMIT`, or an address without its query.
    pub(crate) source: String,
    pub(crate) n_bytes: u64,
    pub(crate) piece_bytes: u32,
    pub(crate) digest: Option<Digest>,
    /// Version by the server's own word.
    pub(crate) etag: Option<String>,
}

impl Identity {
    pub(crate) fn new(
        source: String,
        geometry: Geometry,
        digest: Option<Digest>,
        etag: Option<String>,
    ) -> Self {
        let Geometry { n_bytes, piece_bytes } = geometry;
        Self { format: FORMAT, source, n_bytes, piece_bytes, digest, etag }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        Geometry { n_bytes: self.n_bytes, piece_bytes: self.piece_bytes }
    }

    /// Why pieces of `old` are no pieces of this file; `None` if they are.
    ///
    /// Equal digests settle it, whatever else changed. Without them size, source and the server's ETag must agree.
    pub(crate) fn differs_from(&self, old: &Self) -> Option<String> {
        if old.n_bytes != self.n_bytes {
            return Some(format!("the file had {} bytes and now has {}", old.n_bytes, self.n_bytes));
        }
        match (&self.digest, &old.digest) {
            (Some(new), Some(old)) if new == old => return None,
            (Some(new), Some(old)) => {
                return Some(format!("its {} was {} and is {}", new.algorithm(), old.hex(), new.hex()));
            }
            _ => {}
        }
        if old.source != self.source {
            return Some(format!("it was part of {}", old.source));
        }
        match (&self.etag, &old.etag) {
            (Some(new), Some(old)) if new != old => Some(format!("its ETag was `{old}` and is `{new}`")),
            _ => None,
        }
    }
}

/// What is there of one piece.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Bytes from the piece's start that are on disk.
    pub(crate) done: u32,
    /// Fingerprint of these bytes.
    pub(crate) fingerprint: u128,
}

impl Slot {
    fn to_bytes(self, piece: usize) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        bytes[..4].copy_from_slice(&self.done.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.fingerprint.to_le_bytes());
        let check = slot_check(&bytes, piece);
        bytes[24..].copy_from_slice(&check);
        bytes
    }

    /// The slot, or an empty one if the bytes fail their check.
    fn from_bytes(bytes: &[u8; SLOT_BYTES], piece: usize) -> Self {
        if bytes[24..] != slot_check(bytes, piece) {
            return Self::default();
        }
        let done = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
        let fingerprint = u128::from_le_bytes(bytes[8..24].try_into().expect("sixteen bytes"));
        Self { done, fingerprint }
    }
}

fn slot_check(bytes: &[u8; SLOT_BYTES], piece: usize) -> [u8; 8] {
    let hash = xxhash3_128::Hasher::oneshot_with_seed(piece as u64, &bytes[..24]);
    (hash as u64).to_le_bytes()
}

/// A fingerprint in the making.
#[derive(Clone)]
pub(crate) struct Fingerprint(xxhash3_128::Hasher);

impl Fingerprint {
    pub(crate) fn new() -> Self {
        Self(xxhash3_128::Hasher::new())
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub(crate) fn value(&self) -> u128 {
        self.0.finish_128()
    }
}

/// The journal of one part file.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
}

impl Journal {
    /// Opens or makes the file and locks it against other processes.
    pub(crate) fn open(path: &Path, part: &Path) -> Result<Self, DownloadError> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(DownloadError::io("open", path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { file, path: path.to_owned() }),
            Err(std::fs::TryLockError::WouldBlock) => Err(DownloadError::Locked { part: part.to_owned() }),
            Err(std::fs::TryLockError::Error(source)) => {
                Err(DownloadError::Io { action: "lock", path: path.to_owned(), source })
            }
        }
    }

    /// The journal that is kept of a finished file, to be read only; `None` if there is none.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        Some(Self { file: File::open(path).ok()?, path: path.to_owned() })
    }

    /// Which file the journal is of; `None` if it is new or damaged.
    pub(crate) fn identity(&self) -> Option<Identity> {
        let mut header = vec![0; HEADER_BYTES as usize];
        self.file.read_exact_at(&mut header, 0).ok()?;
        let identity: Identity = serde_json::from_slice(&header).ok()?;
        let sane = identity.format == FORMAT && identity.piece_bytes > 0;
        sane.then_some(identity)
    }

    /// Starts over for a file of which nothing is there.
    pub(crate) fn start(&self, identity: &Identity) -> Result<(), DownloadError> {
        let write = || {
            self.file.set_len(0)?;
            self.file.set_len(HEADER_BYTES + (identity.geometry().n_pieces() * SLOT_BYTES) as u64)?;
            self.write_header(identity)
        };
        write().map_err(DownloadError::io("write", &self.path))
    }

    /// Replaces the header, and leaves the pieces as they are.
    pub(crate) fn rename(&self, identity: &Identity) -> Result<(), DownloadError> {
        self.write_header(identity).map_err(DownloadError::io("write", &self.path))
    }

    fn write_header(&self, identity: &Identity) -> std::io::Result<()> {
        let mut header = serde_json::to_vec(identity)?;
        if header.len() >= HEADER_BYTES as usize {
            return Err(std::io::Error::other("the address is too long for the journal"));
        }
        header.resize(HEADER_BYTES as usize - 1, b' ');
        header.push(b'\n');
        self.file.write_all_at(&header, 0)
    }

    /// The slots of all pieces.
    pub(crate) fn slots(&self, geometry: Geometry) -> Vec<Slot> {
        let mut bytes = vec![0; geometry.n_pieces() * SLOT_BYTES];
        // What cannot be read stays zero, and zeros fail the check: nothing is there.
        let _ = self.file.read_exact_at(&mut bytes, HEADER_BYTES);
        let slots = bytes.as_chunks::<SLOT_BYTES>().0.iter().enumerate();
        slots
            .map(|(piece, bytes)| {
                let slot = Slot::from_bytes(bytes, piece);
                if slot.done <= geometry.len(piece) { slot } else { Slot::default() }
            })
            .collect()
    }

    /// Records a piece.
    pub(crate) fn put(&self, piece: usize, slot: Slot) -> Result<(), DownloadError> {
        let place = HEADER_BYTES + (piece * SLOT_BYTES) as u64;
        self.file.write_all_at(&slot.to_bytes(piece), place).map_err(DownloadError::io("write", &self.path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_files_beyond_300_gb_without_gap() {
        let geometry = Geometry { n_bytes: 464_627_334_560, piece_bytes: 8 << 20 };
        let n = geometry.n_pieces();
        assert_eq!(n, 55_388);
        assert_eq!(geometry.range(n - 1).end, geometry.n_bytes);
        assert_eq!(geometry.range(n - 2).end, geometry.range(n - 1).start);
        assert_eq!(geometry.piece_of(geometry.n_bytes - 1), n - 1);
        assert_eq!(u64::from(geometry.len(n - 1)), geometry.n_bytes - geometry.range(n - 1).start);
        assert_eq!(Geometry { n_bytes: 0, piece_bytes: 4 }.n_pieces(), 0);
    }

    #[test]
    fn a_slot_with_any_flipped_bit_or_in_another_place_is_empty() {
        let slot = Slot { done: 77, fingerprint: 0x1234_5678_9abc_def0_1122_3344_5566_7788 };
        let bytes = slot.to_bytes(3);
        assert_eq!(Slot::from_bytes(&bytes, 3), slot);
        assert_eq!(Slot::from_bytes(&bytes, 4), Slot::default());
        for bit in 0..SLOT_BYTES * 8 {
            let mut wrong = bytes;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Slot::from_bytes(&wrong, 3), Slot::default(), "bit {bit}");
        }
        assert_eq!(Slot::from_bytes(&[0; SLOT_BYTES], 0), Slot::default());
    }

    #[test]
    fn a_journal_keeps_its_pieces_and_excludes_a_second_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let geometry = Geometry { n_bytes: 10, piece_bytes: 4 };
        let identity = Identity::new("hf:a/b/c".to_owned(), geometry, None, Some("x".to_owned()));
        let journal = Journal::open(&path, Path::new("part")).unwrap();
        assert_eq!(journal.identity(), None);
        journal.start(&identity).unwrap();
        let slot = Slot { done: 2, fingerprint: 9 };
        journal.put(2, slot).unwrap();
        journal.put(1, Slot { done: 5, fingerprint: 1 }).unwrap();
        assert!(matches!(Journal::open(&path, Path::new("part")), Err(DownloadError::Locked { .. })));
        drop(journal);
        let journal = Journal::open(&path, Path::new("part")).unwrap();
        assert_eq!(journal.identity(), Some(identity));
        // A piece with more bytes than it can have counts as empty.
        assert_eq!(journal.slots(geometry), [Slot::default(), Slot::default(), slot]);
    }

    #[test]
    fn digests_decide_whether_pieces_belong_to_a_file() {
        let geometry = Geometry { n_bytes: 10, piece_bytes: 4 };
        let identity = |source: &str, digest: Option<&str>, etag: &str| {
            let digest = digest.map(|d| Digest::Sha256(d.to_owned()));
            Identity::new(source.to_owned(), geometry, digest, Some(etag.to_owned()))
        };
        let a = identity("x", Some("d"), "1");
        assert_eq!(a.differs_from(&identity("y", Some("d"), "2")), None);
        assert!(a.differs_from(&identity("x", Some("e"), "1")).is_some());
        let b = identity("x", None, "1");
        assert!(b.differs_from(&identity("x", None, "2")).unwrap().contains("ETag"));
        assert!(b.differs_from(&identity("y", None, "1")).is_some());
        assert_eq!(b.differs_from(&identity("x", Some("d"), "1")), None);
    }
}
