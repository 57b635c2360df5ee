//! Hashes that tell files and texts apart.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// Files up to this size are hashed whole.
const WHOLE_BYTES: u64 = 64 << 20;
/// Hashed whole from the beginning of a larger file: its headers.
const HEAD_BYTES: u64 = 16 << 20;
/// Places in a larger file that are hashed, spread evenly, the end included.
const SAMPLES: u64 = 4096;
/// Bytes at each place.
const SAMPLE_BYTES: u64 = 4096;

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes any text");
        text
    })
}

/// SHA-256 of bytes, in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// A fingerprint of a model's files that does not read 160 GB: SHA-256 over the size of every file, all of its content up to 64 MiB,
/// of larger files the first 16 MiB and 4 KiB at each of 4096 places spread evenly. It tells builds apart; it is no proof
/// against somebody who changes a few weights on purpose.
///
/// # Errors
/// If a file cannot be read; the error names it.
pub fn fingerprint(files: &[PathBuf]) -> Result<String, (PathBuf, std::io::Error)> {
    let mut hash = Sha256::new();
    for path in files {
        add_file(&mut hash, path).map_err(|e| (path.clone(), e))?;
    }
    Ok(hex(&hash.finalize()))
}

fn add_file(hash: &mut Sha256, path: &Path) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let n_bytes = file.metadata()?.len();
    hash.update(n_bytes.to_le_bytes());
    if n_bytes <= WHOLE_BYTES {
        return add_all(hash, &mut file);
    }
    add_all(hash, &mut Read::by_ref(&mut file).take(HEAD_BYTES))?;
    let last = n_bytes - SAMPLE_BYTES;
    let mut sample = vec![0; SAMPLE_BYTES as usize];
    for i in 0..SAMPLES {
        // No product of these overflows: a file is below 2^63 bytes.
        let offset =
            HEAD_BYTES + (u128::from(last - HEAD_BYTES) * u128::from(i) / u128::from(SAMPLES - 1)) as u64;
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(&mut sample)?;
        hash.update(&sample);
    }
    Ok(())
}

fn add_all(hash: &mut Sha256, reader: &mut impl Read) -> std::io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(()),
            n => hash.update(&buffer[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_sees_every_byte_of_a_small_file_and_the_ends_of_a_large_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let of = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            fingerprint(std::slice::from_ref(&path)).unwrap()
        };
        assert_eq!(of(b"abc"), of(b"abc"));
        assert_ne!(of(b"abc"), of(b"abd"));
        let file = File::create(&path).unwrap();
        file.set_len(WHOLE_BYTES + 12_345).unwrap();
        let sparse = fingerprint(std::slice::from_ref(&path)).unwrap();
        let mut file = File::options().write(true).open(&path).unwrap();
        file.seek(SeekFrom::End(-1)).unwrap();
        std::io::Write::write_all(&mut file, b"x").unwrap();
        assert_ne!(fingerprint(std::slice::from_ref(&path)).unwrap(), sparse);
        assert!(fingerprint(&[folder.path().join("absent")]).is_err());
    }
}
