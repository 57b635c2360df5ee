//! Digests that say whether a whole file is right.

use std::fmt::Write as _;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// What a whole file should hash to.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Digest {
    /// SHA-256, 64 hexadecimal digits in lower case: the ETag of the hub's large files.
    Sha256(String),
    /// SHA-1 of git's header `blob SIZE\0` and the content, 40 digits: the ETag of the hub's small files.
    GitBlob(String),
}

impl Digest {
    /// Told apart by length; `None` if the text is neither.
    pub fn from_hex(text: &str) -> Option<Self> {
        let text = text.trim().to_ascii_lowercase();
        if !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        match text.len() {
            64 => Some(Self::Sha256(text)),
            40 => Some(Self::GitBlob(text)),
            _ => None,
        }
    }

    /// The digits.
    pub fn hex(&self) -> &str {
        let (Self::Sha256(hex) | Self::GitBlob(hex)) = self;
        hex
    }

    /// Name of the algorithm, for messages.
    pub fn algorithm(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::GitBlob(_) => "git SHA-1",
        }
    }
}

/// A digest in the making. Cloned at piece boundaries, so that a repaired piece costs no second look at those before it.
#[derive(Clone)]
pub(crate) enum Hasher {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Hasher {
    /// What is needed to check `expected`, and SHA-256 where nothing is expected, for the report.
    pub(crate) fn new(expected: Option<&Digest>, n_bytes: u64) -> Self {
        match expected {
            Some(Digest::GitBlob(_)) => {
                let mut git = Sha1::new();
                git.update(format!("blob {n_bytes}\0"));
                Self::GitBlob(git)
            }
            _ => Self::Sha256(Sha256::new()),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitBlob(hasher) => hasher.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> Digest {
        match self {
            Self::Sha256(hasher) => Digest::Sha256(hex(&hasher.finalize())),
            Self::GitBlob(hasher) => Digest::GitBlob(hex(&hasher.finalize())),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_equal_those_of_sha256sum_and_git() {
        let of = |expected: &Digest, text: &str| {
            let mut hasher = Hasher::new(Some(expected), text.len() as u64);
            hasher.update(text.as_bytes());
            hasher.finish()
        };
        let sha256 =
            Digest::from_hex("BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD").unwrap();
        assert_eq!(of(&sha256, "abc"), sha256);
        // `printf 'hello\n' | git hash-object --stdin`
        let git = Digest::from_hex("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        assert_eq!(of(&git, "hello\n"), git);
        assert_eq!(Digest::from_hex("ce01"), None);
        assert_eq!(Digest::from_hex(&"g".repeat(64)), None);
    }
}
