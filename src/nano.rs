//! The nano model that ships inside the program: a DeepSeek V4 in the official layout that has learned
//! something, so that quality can be shown without a download. See `tools/nano/README.md`.

use std::io;
use std::path::Path;

macro_rules! embedded {
    ($folder:literal: $($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../test-vectors/nano/", $folder, "/", $name)))),*]
    };
}

const CHECKPOINT: &[(&str, &[u8])] = embedded!(
    "checkpoint": "config.json", "generation_config.json", "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer_config.json",
);

/// Text that the model was not trained on, by kind.
pub(crate) const HELD_OUT: [(&str, &str); 3] = [
    ("prose", include_str!("../test-vectors/nano/heldout/prose.txt")),
    ("code", include_str!("../test-vectors/nano/heldout/code.txt")),
    ("tables", include_str!("../test-vectors/nano/heldout/tables.txt")),
];

/// Text for calibration, by kind: neither trained on nor held out for scoring.
pub(crate) const CALIBRATION: [(&str, &str); 3] = [
    ("prose", include_str!("../test-vectors/nano/calibration/prose.txt")),
    ("code", include_str!("../test-vectors/nano/calibration/code.txt")),
    ("tables", include_str!("../test-vectors/nano/calibration/tables.txt")),
];

/// Writes the checkpoint into a new folder.
///
/// # Errors
/// The system's own, for example if the folder exists.
pub(crate) fn write_checkpoint(folder: &Path) -> io::Result<()> {
    std::fs::create_dir(folder)?;
    CHECKPOINT.iter().try_for_each(|(name, bytes)| std::fs::write(folder.join(name), bytes))
}
