//! Residual streams in a file beside the output: a checkpoint of the pass, and the reason why it needs little memory.
//!
//! One line of JSON, then `f32` values `[tokens, width]`, little-endian. The file of the next layer is written beside it and takes its name
//! when the layer's bytes are in the output for good.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use gguf_tools::build::CalibrationError;

/// First line of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    identity: String,
    /// The layer that these are the inputs of.
    layer: usize,
    n_tokens: usize,
    width: usize,
    /// Of the values.
    sha256: String,
}

/// Where the streams before a layer are.
pub(super) struct Kept {
    /// The file; `None`: nothing is kept beyond this process.
    path: PathBuf,
    /// Removes the folder of a pass that keeps nothing.
    _folder: Option<tempfile::TempDir>,
    identity: String,
    n_tokens: usize,
    width: usize,
    ready: usize,
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn named(path: &Path) -> impl Fn(io::Error) -> CalibrationError + '_ {
    move |e| format!("cannot use activations `{}`: {e}", path.display()).into()
}

impl Kept {
    /// Looks for activations of this identity beside `beside`; without one they are kept for this process only.
    pub(super) fn new(beside: Option<&Path>, identity: String, texts: &[Vec<u32>], width: usize) -> Self {
        let folder = beside.is_none().then(tempfile::tempdir).and_then(Result::ok);
        let path = match (beside, &folder) {
            (Some(out), _) => super::activations_path(out),
            (None, Some(folder)) => folder.path().join("activations"),
            (None, None) => PathBuf::from("activations.part"),
        };
        let n_tokens = texts.iter().map(Vec::len).sum();
        let mut kept = Self { path, _folder: folder, identity, n_tokens, width, ready: 0 };
        kept.ready = kept.found().unwrap_or(0);
        kept
    }

    pub(super) fn ready_layer(&self) -> usize {
        self.ready
    }

    /// The layer of a sound file of this identity.
    fn found(&self) -> Option<usize> {
        let mut file = BufReader::new(File::open(&self.path).ok()?);
        let head = read_head(&mut file).ok()?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut n_bytes = 0u64;
        loop {
            let n = file.read(&mut buffer).ok()?;
            if n == 0 {
                break;
            }
            hasher.update(&buffer[..n]);
            n_bytes += n as u64;
        }
        let expected = Head { sha256: hex(hasher), ..self.head(head.layer, String::new()) };
        (head == expected && n_bytes == 4 * (self.n_tokens * self.width) as u64).then_some(head.layer)
    }

    fn head(&self, layer: usize, sha256: String) -> Head {
        Head { identity: self.identity.clone(), layer, n_tokens: self.n_tokens, width: self.width, sha256 }
    }

    /// Reads the streams before a layer; `None`: they are the embeddings.
    pub(super) fn reader(&self, layer: usize) -> Result<Option<StreamReader>, CalibrationError> {
        if layer == 0 {
            return Ok(None);
        }
        let mut file = BufReader::new(File::open(&self.path).map_err(named(&self.path))?);
        let head = read_head(&mut file).map_err(named(&self.path))?;
        if head.layer != layer || head.identity != self.identity {
            return Err(format!(
                "activations `{}` are those before layer {}, not {layer}; remove the file and run again",
                self.path.display(),
                head.layer
            )
            .into());
        }
        Ok(Some(StreamReader { file, width: self.width }))
    }

    /// A file for the streams before a layer.
    pub(super) fn writer(&self, layer: usize) -> Result<StreamFile, CalibrationError> {
        let path = with_suffix(&self.path, ".new");
        let mut file = BufWriter::new(File::create(&path).map_err(named(&path))?);
        // The sum is not known yet, but its length is: the line is written again in the end.
        let head = self.head(layer, "0".repeat(64));
        file.write_all(&head_line(&head)).map_err(named(&path))?;
        Ok(StreamFile { file, hasher: Sha256::new(), path, head })
    }

    /// Completes a file without giving it the name yet.
    pub(super) fn hold(streams: StreamFile) -> Result<(), CalibrationError> {
        let StreamFile { file, hasher, path, mut head } = streams;
        let file = file.into_inner().map_err(|e| named(&path)(e.into_error()))?;
        head.sha256 = hex(hasher);
        std::os::unix::fs::FileExt::write_all_at(&file, &head_line(&head), 0).map_err(named(&path))?;
        file.sync_all().map_err(named(&path))
    }

    /// Makes the file held last the one that a later run goes on from.
    pub(super) fn advance(&mut self, layer: usize) -> Result<(), CalibrationError> {
        std::fs::rename(with_suffix(&self.path, ".new"), &self.path).map_err(named(&self.path))?;
        self.ready = layer;
        Ok(())
    }

    pub(super) fn remove(&mut self) {
        // Of no use to anybody; failing to remove them harms nothing.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(with_suffix(&self.path, ".new"));
        self.ready = 0;
    }
}

fn head_line(head: &Head) -> Vec<u8> {
    let mut line = serde_json::to_vec(head).unwrap_or_default();
    line.push(b'\n');
    line
}

fn read_head(file: &mut impl BufRead) -> io::Result<Head> {
    let mut line = Vec::new();
    file.take(4096).read_until(b'\n', &mut line)?;
    Ok(serde_json::from_slice(&line)?)
}

/// The sum as lower-case hexadecimal digits.
pub(super) fn hex(hasher: Sha256) -> String {
    use std::fmt::Write;
    hasher.finalize().iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Streams that are being written.
pub(super) struct StreamFile {
    file: BufWriter<File>,
    hasher: Sha256,
    path: PathBuf,
    head: Head,
}

impl StreamFile {
    pub(super) fn write(&mut self, streams: &[f32]) -> Result<(), CalibrationError> {
        let bytes: Vec<u8> = streams.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.hasher.update(&bytes);
        self.file.write_all(&bytes).map_err(named(&self.path))
    }
}

/// Streams that are being read, in order.
pub(super) struct StreamReader {
    file: BufReader<File>,
    width: usize,
}

impl StreamReader {
    pub(super) fn read(&mut self, n_tokens: usize) -> Result<Vec<f32>, CalibrationError> {
        let mut bytes = vec![0; 4 * n_tokens * self.width];
        self.file.read_exact(&mut bytes).map_err(|e| format!("activations end too early: {e}"))?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}
