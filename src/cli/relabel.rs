//! `relabel`: another header over the same tensors.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use gguf_tools::gguf::Gguf;
use gguf_tools::rewrite::{Edit, Edited, InPlace, finish_interrupted_relabel, parse_value, relabel};
use serde_json::json;

use super::rewritten::{WriteArguments, inputs_of, usage_or_failure, written_text};
use super::{UsageError, print, print_json};
use crate::render::units;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The GGUF file.
    file: PathBuf,
    /// Set a key; may repeat. TYPE is str, bool, u8 to i64, f32, f64, or one of them in [] for a list.
    #[arg(long = "set", value_name = "KEY=TYPE:VALUE", visible_alias = "override-kv")]
    set: Vec<String>,
    /// Remove a key; may repeat.
    #[arg(long, value_name = "KEY")]
    unset: Vec<String>,
    /// Take the keys of this GGUF, but keep those about how the tensors were made.
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// Add the keys that llama.cpp or ds4 demand and the others determine, and give tensors of early forks their names.
    #[arg(long)]
    dialect: bool,
    /// The file to write: a copy with the new header.
    #[arg(long, value_name = "FILE", required_unless_present = "in_place", conflicts_with = "in_place")]
    out: Option<PathBuf>,
    /// Replace the header of the file itself; refused if the new one does not fit in the old one's place.
    #[arg(long)]
    in_place: bool,
    #[command(flatten)]
    write: WriteArguments,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if finish_interrupted_relabel(&arguments.file).map_err(usage_or_failure)? {
        eprintln!("note: finished the header that an earlier run was replacing");
    }
    let edits = edits(arguments)?;
    let gguf = Gguf::open(&arguments.file)?;
    let out = arguments.out.as_ref().unwrap_or(&arguments.file);
    let (file, edited) = relabel(&gguf, &edits, out).map_err(usage_or_failure)?;
    let write = &arguments.write;
    let file_bytes = file.layout.file_bytes();
    let mut closing = format!("file size  {}", units::exact_bytes(file_bytes));
    if arguments.in_place && !write.dry_run {
        let in_place = InPlace::fitting(&gguf, &file).with_context(|| {
            format!(
                "the new header takes {} bytes, the old one {}: data would have to move; write a copy with --out FILE",
                file.layout.data_offset_bytes(),
                gguf.shards()[0].data_offset_bytes
            )
        })?;
        drop(file);
        drop(gguf);
        in_place.write().map_err(usage_or_failure)?;
        closing = format!("replaced the header in place\n{}", arguments.file.display());
    } else if !write.dry_run {
        closing = written_text(&write.write(std::slice::from_ref(&file), &inputs_of([&gguf]), "copying")?);
    }
    if write.json {
        print_json(&json!({ "edited": edited, "file_bytes": file_bytes, "path": out }))?;
    } else {
        print(&(text(&edited) + &closing))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The template first, then the dialect, then single keys: the more particular edit has the last word.
fn edits(arguments: &Arguments) -> anyhow::Result<Vec<Edit>> {
    let mut edits = Vec::new();
    if let Some(template) = &arguments.template {
        edits.push(Edit::Template(Gguf::open(template).context("the template")?.metadata().clone()));
    }
    edits.extend(arguments.dialect.then_some(Edit::Dialect));
    edits.extend(arguments.unset.iter().cloned().map(Edit::Unset));
    for text in &arguments.set {
        let (key, value) = parse_value(text).map_err(|e| UsageError(format!("--set: {e}")))?;
        edits.push(Edit::Set(key, value));
    }
    if edits.is_empty() {
        return Err(
            UsageError("nothing to do; give --set, --unset, --template or --dialect".to_owned()).into()
        );
    }
    Ok(edits)
}

fn text(edited: &Edited) -> String {
    if edited.is_nothing() {
        return "the header stays as it is\n".to_owned();
    }
    let mut text = String::new();
    for (verb, keys) in [("added", &edited.added), ("changed", &edited.changed), ("removed", &edited.removed)]
    {
        for key in keys {
            text += &format!("{verb} {key}\n");
        }
    }
    for (old, new) in &edited.renamed {
        text += &format!("renamed {old} to {new}\n");
    }
    text
}
