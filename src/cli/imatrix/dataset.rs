//! `imatrix dataset`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use imatrix::dataset::{BuildOptions, Built, Share, Source, SourceKind, build};

use super::super::model::tokenizer;
use super::super::{UsageError, print, print_json};
use crate::render::table::table;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The model whose tokenizer and conversation format are used: a GGUF file or the folder of a checkpoint.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: PathBuf,
    /// The file to write, JSON lines; the account of it goes to OUT.manifest.json.
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Most tokens of the set.
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    tokens: u64,
    /// The same seed and files give the same bytes.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Weight of a kind among the tokens, 0 to leave it out; may repeat. Kinds: text, code, chat, transcript (your files),
    /// code_review, extraction, long_context, reasoning, tool_calls, translation.
    #[arg(long = "share", value_name = "KIND=WEIGHT")]
    shares: Vec<String>,
    /// A file of prose; may repeat.
    #[arg(long = "text", value_name = "FILE")]
    texts: Vec<PathBuf>,
    /// A file of source code; may repeat.
    #[arg(long = "code", value_name = "FILE")]
    codes: Vec<PathBuf>,
    /// Conversations as JSON lines, each with `messages` of `role` and `content`; may repeat.
    #[arg(long = "chat", value_name = "FILE")]
    chats: Vec<PathBuf>,
    /// A conversation in plain text, turns begun by `User:`, `Assistant:`, `System:`; may repeat.
    #[arg(long = "transcript", value_name = "FILE")]
    transcripts: Vec<PathBuf>,
    /// Most tokens of a piece that prose and code are cut into.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    piece_tokens: usize,
    /// Replace existing outputs.
    #[arg(long, visible_alias = "force")]
    overwrite: bool,
    /// Print the manifest as JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let shares = arguments.shares.iter().map(|text| share(text)).collect::<Result<Vec<_>, _>>()?;
    let of = |kind: SourceKind, paths: &[PathBuf]| {
        paths.iter().map(move |path| Source { kind, path: path.clone() }).collect::<Vec<_>>()
    };
    let sources = [
        of(SourceKind::Text, &arguments.texts),
        of(SourceKind::Code, &arguments.codes),
        of(SourceKind::Chat, &arguments.chats),
        of(SourceKind::Transcript, &arguments.transcripts),
    ];
    let mut manifest_path = arguments.out.as_os_str().to_owned();
    manifest_path.push(".manifest.json");
    let manifest_path = PathBuf::from(manifest_path);
    for path in [&arguments.out, &manifest_path] {
        anyhow::ensure!(
            arguments.overwrite || !path.exists(),
            "`{}` exists; pass `--overwrite` to replace it",
            path.display()
        );
    }
    let options = BuildOptions {
        tokens: arguments.tokens,
        seed: arguments.seed,
        shares,
        sources: sources.concat(),
        piece_tokens: arguments.piece_tokens,
    };
    let built = build(&tokenizer(&arguments.model)?, &options)?;
    anyhow::ensure!(
        built.manifest.n_texts > 0,
        "no text fits {} tokens shared among {} kinds; raise --tokens",
        arguments.tokens,
        built.manifest.kinds.len()
    );
    super::write_text(&arguments.out, &built.lines, arguments.overwrite)?;
    super::write_text(&manifest_path, &serde_json::to_string_pretty(&built.manifest)?, arguments.overwrite)?;
    for source in &built.manifest.sources {
        if source.n_with_control_tokens > 0 {
            eprintln!(
                "warning: {} texts of `{}` spell control tokens and were left out",
                source.n_with_control_tokens,
                source.path.display()
            );
        }
    }
    for kind in built.manifest.kinds.iter().filter(|kind| kind.n_texts == 0) {
        eprintln!("warning: no text of kind `{}` fits its share; raise --tokens", kind.kind);
    }
    if arguments.json {
        print_json(&built.manifest)?;
    } else {
        print(&report(&built, &arguments.out))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn share(text: &str) -> Result<Share, UsageError> {
    let wrong = || UsageError(format!("--share `{text}`: expected KIND=WEIGHT with a weight from 0 up"));
    let (kind, weight) = text.split_once('=').ok_or_else(wrong)?;
    let weight: f64 = weight.parse().map_err(|_| wrong())?;
    if weight.is_finite() && weight >= 0.0 {
        Ok(Share { kind: kind.to_owned(), weight })
    } else {
        Err(wrong())
    }
}

fn report(built: &Built, out: &std::path::Path) -> String {
    let manifest = &built.manifest;
    let rows: Vec<_> = manifest
        .kinds
        .iter()
        .map(|kind| {
            vec![
                kind.kind.clone(),
                kind.n_texts.to_string(),
                kind.n_tokens.to_string(),
                format!("{:.1} %", 100.0 * kind.share),
                format!("{:.1} %", 100.0 * kind.wanted_share),
                kind.n_duplicates.to_string(),
            ]
        })
        .collect();
    format!(
        "{}\n\n{} texts, {} of at most {} tokens, seed {}\nsha256 {}\n{}",
        table(&["kind", "texts", "tokens", "share", "wanted", "duplicates left out"], 1, &rows),
        manifest.n_texts,
        manifest.n_tokens,
        manifest.wanted_tokens,
        manifest.seed,
        manifest.sha256,
        out.display()
    )
}
