//! Arguments of error feedback, and how calibration text becomes a pass over a source.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use gguf_tools::build::{Wanted, calibrated_memory_bytes, is_walked};
use gguf_tools::feedback::{Feedback, Settings};
use gguf_tools::gguf::{Array, Metadata, Value};
use gguf_tools::plan::{Plan, sha256_of_file};
use gguf_tools::quantize::RowByRow;
use imatrix::calibrate::{CalibrationOptions, LayerPass, Propagate, read_documents};
use runner::Options;
use runner::weights::open_source;

use super::UsageError;
use super::model::{sequences, tokenizer};

/// Tokens that pass a layer together.
const BATCH_TOKENS: usize = 2048;

/// Calibration text.
#[derive(Debug, Args)]
pub(crate) struct TextArguments {
    /// Calibration text: plain text, or JSON lines with `text`; may repeat. `quantize` uses it for error feedback in routed
    /// experts, `compare` for the error in the outputs of matrices.
    #[arg(long, value_name = "DATASET")]
    calibrate: Vec<PathBuf>,
    /// Use at most so many calibration tokens, from all files alike.
    #[arg(long, value_name = "N", requires = "calibrate")]
    calibrate_tokens: Option<usize>,
    /// Tokens of each sequence that calibration text is cut into.
    #[arg(long, value_name = "N", default_value_t = 512, requires = "calibrate")]
    calibrate_sequence: usize,
}

/// Error feedback.
#[derive(Debug, Args)]
#[command(next_help_heading = "Error feedback")]
pub(crate) struct CalibrationArguments {
    #[command(flatten)]
    text: TextArguments,
    /// Error feedback in dense matrices as well (attention, shared expert, output), where their type has one: Q8_0, Q4_K, Q2_K.
    #[arg(long, requires = "calibrate")]
    calibrate_dense: bool,
    /// What a layer's calibration sees of the layers before it.
    #[arg(long, value_name = "WHICH", default_value = "source", requires = "calibrate",
        value_parser = ["source", "quantized"])]
    propagate: String,
    /// Change a setting of the feedback, as damping=0.02; may repeat.
    #[arg(long = "feedback", value_name = "NAME=VALUE", value_delimiter = ',', requires = "calibrate")]
    feedback: Vec<String>,
}

/// Calibration text, cut into sequences, with what the file will say about it.
pub(crate) struct CalibrationText {
    texts: Vec<Vec<u32>>,
    settings: Settings,
    propagate: Propagate,
    /// Whether dense matrices are quantized by it as well.
    pub(crate) dense: bool,
    pub(crate) metadata: Metadata,
}

impl CalibrationArguments {
    /// Reads the text; `None`: no calibration is asked for.
    pub(crate) fn read(&self, model: &Path) -> anyhow::Result<Option<CalibrationText>> {
        let mut settings = Settings::default();
        for text in &self.feedback {
            settings.set(text).map_err(|e| UsageError(format!("--feedback: {e}")))?;
        }
        let propagate = Propagate::NAMES.iter().find(|(name, _)| *name == self.propagate);
        let propagate = propagate.context("the parser admits known names only")?.1;
        let mut text = self.text.read(model, settings, propagate)?;
        if let Some(text) = &mut text
            && self.calibrate_dense
        {
            text.dense = true;
            text.metadata.set("ggsmith.calibration.dense".to_owned(), Value::Bool(true));
        }
        Ok(text)
    }
}

impl TextArguments {
    /// Reads the text for judging: second moments of each expert's own, nothing mixed in, all tokens alike.
    pub(crate) fn read_for_judging(&self, model: &Path) -> anyhow::Result<Option<CalibrationText>> {
        let settings = Settings {
            mix: 0.0,
            prior_tokens: 0.0,
            mid_shrinkage: 0.0,
            mid_power: 0.0,
            response_power: 0.0,
            sensitivity_power: 0.0,
            ..Settings::default()
        };
        self.read(model, settings, Propagate::Source)
    }

    fn read(
        &self,
        model: &Path,
        settings: Settings,
        propagate: Propagate,
    ) -> anyhow::Result<Option<CalibrationText>> {
        if self.calibrate.is_empty() {
            return Ok(None);
        }
        if self.calibrate_sequence < 2 {
            return Err(
                UsageError("--calibrate-sequence: a sequence needs at least 2 tokens".to_owned()).into()
            );
        }
        let tokenizer = tokenizer(model)?;
        let mut files = Vec::new();
        let (mut names, mut sums) = (Vec::new(), Vec::new());
        for path in &self.calibrate {
            let mut texts = Vec::new();
            for document in read_documents(path)? {
                texts.extend(sequences(&tokenizer, &document.text, self.calibrate_sequence)?);
            }
            files.push(texts);
            names.push(path.file_name().unwrap_or_default().to_string_lossy().into_owned());
            sums.push(sha256_of_file(path).map_err(|(path, e)| {
                anyhow::Error::new(e).context(format!("cannot read `{}`", path.display()))
            })?);
        }
        let texts = take(files, self.calibrate_tokens.unwrap_or(usize::MAX));
        let n_tokens: usize = texts.iter().map(Vec::len).sum();
        anyhow::ensure!(n_tokens > 1, "the calibration texts hold no two tokens; give more text");
        let mut metadata = Metadata::default();
        let mut set = |key: &str, value| metadata.set(format!("ggsmith.calibration.{key}"), value);
        set("files", Value::Array(Array::String(names)));
        set("sha256", Value::Array(Array::String(sums)));
        set("tokens", Value::U64(n_tokens as u64));
        set("sequence", Value::U32(self.calibrate_sequence as u32));
        let name =
            Propagate::NAMES.iter().find(|(_, which)| *which == propagate).map_or("", |(name, _)| name);
        set("propagate", Value::String(name.to_owned()));
        set("settings", Value::String(settings.to_string()));
        Ok(Some(CalibrationText { texts, settings, propagate, dense: false, metadata }))
    }
}

/// Sequences of all files by turns until there are enough tokens, each file's in order.
fn take(files: Vec<Vec<Vec<u32>>>, most: usize) -> Vec<Vec<u32>> {
    let total: usize = files.iter().flatten().map(Vec::len).sum();
    if total <= most {
        return files.into_iter().flatten().collect();
    }
    let mut taken: Vec<Vec<Vec<u32>>> = vec![Vec::new(); files.len()];
    let (mut left, mut round) = (most, 0);
    while left > 1 && files.iter().any(|texts| texts.len() > round) {
        for (texts, taken) in files.iter().zip(&mut taken) {
            if let Some(text) = texts.get(round)
                && left > 1
            {
                let n = text.len().min(left);
                left -= n;
                taken.push(text[..n].to_vec());
            }
        }
        round += 1;
    }
    taken.into_iter().flatten().filter(|text| text.len() > 1).collect()
}

impl CalibrationText {
    /// Tokens of all sequences.
    pub(crate) fn n_tokens(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }

    /// The pass over the source. `threads`: 0 for one a core.
    pub(crate) fn pass(
        self,
        model: &Path,
        beside: Option<&Path>,
        identity: &str,
        threads: usize,
    ) -> anyhow::Result<(LayerPass, Feedback)> {
        let quantizer = Feedback { settings: self.settings.clone(), plain: RowByRow::default() };
        let options = CalibrationOptions {
            settings: self.settings,
            propagate: self.propagate,
            runner: Options { n_threads: threads, ..Options::default() },
            batch_tokens: BATCH_TOKENS,
        };
        let pass = LayerPass::new(open_source(model)?, self.texts, beside, identity, options)
            .map_err(|e| anyhow::anyhow!("cannot calibrate with `{}`: {e}", model.display()))?;
        Ok((pass, quantizer))
    }

    /// Memory of a calibrated build besides that of a plain one.
    pub(crate) fn memory_bytes(&self, plan: &Plan, model: &Path, threads: usize) -> anyhow::Result<u64> {
        let source = open_source(model)?;
        let wanted = Wanted::by(plan.tensors.iter().filter(|t| is_walked(t, self.dense)));
        let (h, n_tokens) = (source.hyper_parameters(), self.n_tokens() as u64);
        let pass = LayerPass::memory_bytes(h, n_tokens, &wanted, BATCH_TOKENS as u64);
        let model = Options::default().copied_bytes(h);
        Ok(model + pass + calibrated_memory_bytes(plan, threads, self.dense))
    }
}
