//! Telling what a file is that is no GGUF file.

use std::path::Path;

use super::{GgufError, MAGIC};

/// Starts of what people have instead of a model, in lower case, with what it is and what to do.
const OTHERS: [(&str, &str, &str); 8] = [
    ("<!doctype", WEB_PAGE, USE_THE_FILE),
    ("<html", WEB_PAGE, USE_THE_FILE),
    ("<?xml", "it is an XML document, such as a storage server's error reply", USE_THE_FILE),
    ("{\"", "it is JSON text, such as a server's error reply", USE_THE_FILE),
    (
        "version https://git-lfs",
        "it is a Git LFS pointer, not the file that it points to",
        "fetch the file itself, for example with `git lfs pull`",
    ),
    ("tjgg", OLD_GGML, CONVERT_AGAIN),
    ("fmgg", OLD_GGML, CONVERT_AGAIN),
    ("lmgg", OLD_GGML, CONVERT_AGAIN),
];
const WEB_PAGE: &str = "it is a web page";
const USE_THE_FILE: &str =
    "download again from the address of the file itself (`resolve` in place of `blob`)";
const OLD_GGML: &str = "it is in a GGML format from before GGUF";
const CONVERT_AGAIN: &str = "convert the model again from its checkpoint";
const RESUME: &str = "the download or copy is incomplete; resume it or start it again";

/// Checks the first four bytes, and says what the file is if they are wrong.
pub(super) fn check(bytes: &[u8], path: &Path) -> Result<(), GgufError> {
    if bytes.starts_with(&MAGIC) {
        return Ok(());
    }
    let (found, advice) = recognise(bytes);
    Err(GgufError::NotGguf { path: path.to_owned(), found, advice })
}

fn recognise(bytes: &[u8]) -> (String, &'static str) {
    if bytes.is_empty() {
        return ("it is empty".to_owned(), RESUME);
    }
    let Some((start, rest)) = bytes.split_first_chunk::<{ MAGIC.len() }>() else {
        return (format!("it has {} bytes, a header takes at least 24", bytes.len()), RESUME);
    };
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(256)]).to_lowercase();
    let text = text.trim_start_matches('\u{feff}').trim_start();
    if let Some((_, found, advice)) = OTHERS.iter().find(|(beginning, ..)| text.starts_with(beginning)) {
        return ((*found).to_owned(), advice);
    }
    if rest.get(4) == Some(&b'{') {
        let found = "it looks like a safetensors file".to_owned();
        return (found, "give the checkpoint's folder where a checkpoint is expected, or quantize it first");
    }
    if *start == [0; 4] {
        let found = "it begins with zeros, as a file whose writer was interrupted".to_owned();
        return (found, "make or download it again");
    }
    let found = format!("it begins with bytes {start:02x?}, expected {MAGIC:02x?} (`GGUF`)");
    (found, "give a GGUF file, or download this one again")
}
