//! `inspect`: what a file says about itself, from its headers.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use gguf_tools::gguf::Gguf;
use gguf_tools::inspect::{Inspection, Total, inspect};
use serde_json::json;

use super::{print, remote};
use crate::render::table::table;
use crate::render::units;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The GGUF file, or any shard of a split set. hf:ORG/NAME/PATH reads only the headers of a file on the hub.
    file: PathBuf,
    /// List every tensor.
    #[arg(long)]
    tensors: bool,
    /// List every metadata key.
    #[arg(long)]
    metadata: bool,
    /// Print JSON, with metadata and tensors.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if remote::is_remote(&arguments.file) {
        let replica = remote::gguf(&arguments.file)?;
        let text = report(&replica.path, arguments).map_err(|error| replica.rename_error(&error))?;
        print(&replica.rename(&text))?;
    } else {
        print(&report(&arguments.file, arguments)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn report(file: &Path, arguments: &Arguments) -> anyhow::Result<String> {
    let gguf = Gguf::open(file)?;
    let inspection = inspect(&gguf);
    if arguments.json {
        let tensors: Vec<_> = gguf
            .tensors()
            .iter()
            .map(|t| {
                json!({
                    "name": t.name,
                    "type": t.block_type.name(),
                    "shape": t.shape,
                    "shard": t.shard_index,
                    "offset_bytes": t.offset_bytes,
                    "bytes": t.n_bytes,
                })
            })
            .collect();
        let report = json!({ "inspection": inspection, "tensors": tensors });
        return Ok(serde_json::to_string_pretty(&report)?);
    }
    let mut text = summary(&inspection);
    if arguments.metadata {
        let rows: Vec<_> = inspection
            .metadata
            .iter()
            .map(|entry| vec![entry.key.clone(), entry.value_type.to_owned(), entry.value.clone()])
            .collect();
        text += &format!("\n\n{}", table(&["key", "type", "value"], 3, &rows));
    }
    if arguments.tensors {
        let rows: Vec<_> = gguf
            .tensors()
            .iter()
            .map(|t| {
                let shape: Vec<_> = t.shape.iter().map(u64::to_string).collect();
                vec![t.name.clone(), t.block_type.to_string(), shape.join(" x "), t.n_bytes.to_string()]
            })
            .collect();
        text += &format!("\n\n{}", table(&["tensor", "type", "shape", "bytes"], 3, &rows));
    }
    Ok(text)
}

fn summary(inspection: &Inspection) -> String {
    let mut text = String::new();
    for file in &inspection.files {
        text += &format!(
            "{}: {}, GGUF version {}, alignment {}, {} tensors\n",
            file.path,
            units::exact_bytes(file.file_bytes),
            file.version,
            file.alignment,
            file.n_tensors
        );
    }
    let unknown = || "unknown".to_owned();
    text += &format!("architecture   {}\n", inspection.architecture.clone().unwrap_or_else(unknown));
    match &inspection.tokenizer {
        None => text += "tokenizer      none\n",
        Some(tokenizer) => {
            text += &format!(
                "tokenizer      {}, pre-tokenizer {}, {} tokens (sha256 {}), {} merges\n",
                tokenizer.model.clone().unwrap_or_else(unknown),
                tokenizer.pre_tokenizer.clone().unwrap_or_else(unknown),
                tokenizer.n_tokens,
                tokenizer.tokens_sha256,
                tokenizer.n_merges
            );
        }
    }
    match &inspection.chat_template {
        None => text += "chat template  none: runtimes fall back to their own\n",
        Some(template) => {
            text += &format!("chat template  {} bytes (sha256 {})\n", template.n_bytes, template.sha256);
        }
    }
    if let Some(truncated) = &inspection.truncated {
        text += &format!(
            "TRUNCATED: {} tensors are not whole, from `{}` on; {} are missing; resume the download\n",
            truncated.n_tensors,
            truncated.first_tensor,
            units::bytes(truncated.missing_bytes)
        );
    }
    if !inspection.sequential_offsets {
        text += "tensor data is not in directory order: llama.cpp will refuse the file\n";
    }
    for entry in inspection.provenance.iter().filter(|entry| entry.key != "ggsmith.recipe") {
        text += &format!("{}  {}\n", entry.key, entry.value);
    }
    text += "\n";
    text += &family_table(inspection);
    text
}

fn family_table(inspection: &Inspection) -> String {
    let row = |name: &str, types: String, total: &Total| {
        vec![
            name.to_owned(),
            types,
            total.n_tensors.to_string(),
            units::bytes(total.n_bytes),
            format!("{:.2}", total.bits_per_weight),
        ]
    };
    let mut rows: Vec<_> = inspection
        .families
        .iter()
        .map(|family| {
            let types: Vec<_> = family.types.iter().map(|t| t.block_type).collect();
            row(family.family, types.join(", "), &family.total)
        })
        .collect();
    rows.push(row("total", String::new(), &inspection.total));
    table(&["family", "types", "tensors", "bytes", "bits/weight"], 2, &rows)
}
