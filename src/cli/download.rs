//! `download`: files of the hub and elsewhere, whole and right; the list of targets; checking what was downloaded.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use download::catalogue::{Target, target, targets};
use download::progress::{Event, Observer};
use download::{
    Destination, Digest, DownloadError, Downloader, FileCheck, FileState, MAX_CONNECTIONS, Plan, Reference,
    Report, Request, Settings, Token, VerifyOptions, VerifyReport,
};
use serde_json::json;

use super::{UsageError, print, print_json};
use crate::render::download::DownloadReporter;
use crate::render::table::table;
use crate::render::units;

/// Link that ds4 looks for.
const DEFAULT_LINK: &str = "ds4flash.gguf";

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// A name from `download list`, `hf:ORG/NAME[/PATH][@REV]`, or an https address.
    #[arg(required = true, value_name = "TARGET|hf:ORG/NAME[/PATH][@REV]|URL")]
    what: Option<String>,
    #[command(flatten)]
    place: PlaceArguments,
    #[command(flatten)]
    transfer: TransferArguments,
    /// Only files whose path fits; may repeat. `*` stands for any text.
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// No file whose path fits; may repeat.
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Branch, tag or commit, as after @.
    #[arg(long, value_name = "REV")]
    revision: Option<String>,
    /// SHA-256 that the file must have.
    #[arg(long, value_name = "HEX")]
    sha256: Option<String>,
    /// Link this name to the model afterwards.
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = DEFAULT_LINK)]
    link: Option<PathBuf>,
    /// Say what would be fetched and fetch nothing.
    #[arg(long)]
    dry_run: bool,
    /// Replace files that are there and differ.
    #[arg(long, visible_alias = "force-download")]
    overwrite: bool,
    /// Start although another program's unfinished download lies beside the target. It is left alone.
    #[arg(long)]
    beside_foreign: bool,
    /// Put real files where the cache has links.
    #[arg(long)]
    no_links: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Flags of older hub tools: accepted, told to be of no effect.
    #[arg(long, hide = true)]
    resume_download: bool,
    #[arg(long, hide = true, value_name = "WHETHER")]
    local_dir_use_symlinks: Option<String>,
}

#[derive(Debug, Args)]
struct PlaceArguments {
    /// Put real files into this folder instead of the hub cache.
    #[arg(long, value_name = "DIR")]
    local_dir: Option<PathBuf>,
    /// The hub cache, instead of HF_HOME's.
    #[arg(long, value_name = "DIR", conflicts_with = "local_dir")]
    cache_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct TransferArguments {
    /// Hub token, instead of HF_TOKEN. Sent to the hub and to nobody else.
    #[arg(long, value_name = "TOKEN")]
    token: Option<String>,
    /// Requests at a time, at most 24.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_CONNECTIONS as i64))]
    connections: Option<u16>,
    /// Seconds without a byte after which a connection is given up.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    inactivity: Option<u64>,
    /// Show errors only.
    #[arg(long)]
    quiet: bool,
}

impl TransferArguments {
    fn settings(&self) -> Result<Settings, DownloadError> {
        let mut settings = Settings::from_environment()?;
        if let Some(token) = &self.token {
            settings.token = Token::new(token);
        }
        settings.connections = self.connections.map_or(settings.connections, usize::from);
        settings.inactivity = self.inactivity.map_or(settings.inactivity, std::time::Duration::from_secs);
        Ok(settings)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the names that can be downloaded.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Read downloaded files again; fetch only what is missing or wrong.
    Verify(VerifyArguments),
}

#[derive(Debug, Args)]
struct VerifyArguments {
    /// A folder that was filled by a download, or a snapshot of the hub cache.
    folder: PathBuf,
    /// What the folder should hold, if it has no record of its own.
    #[arg(long, value_name = "hf:ORG/NAME[/PATH][@REV]")]
    from: Option<String>,
    /// Of that, only files whose path fits; may repeat.
    #[arg(long, value_name = "PATTERN", requires = "from")]
    include: Vec<String>,
    /// Report only.
    #[arg(long)]
    no_fetch: bool,
    #[command(flatten)]
    transfer: TransferArguments,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let result = match &arguments.command {
        Some(Command::List { json }) => list(*json),
        Some(Command::Verify(arguments)) => verify(arguments),
        None => fetch(arguments),
    };
    result.map_err(|error| match error.downcast::<DownloadError>() {
        Ok(error @ (DownloadError::Reference { .. } | DownloadError::Setting { .. })) => {
            UsageError(error.to_string()).into()
        }
        Ok(error) => error.into(),
        Err(other) => other,
    })
}

fn list(as_json: bool) -> anyhow::Result<ExitCode> {
    if as_json {
        print_json(&targets())?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<_> = targets().iter().map(row).collect();
    let columns = ["name", "SHA-256", "what", "bytes"];
    print(&format!(
        "{}\n\n`not recorded`: the hub's own word is taken when the file is fetched.\nA repository: hf:ORG/NAME; one file of it: hf:ORG/NAME/PATH; any address: https://...",
        table(&columns, 3, &rows)
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn row(target: &Target) -> Vec<String> {
    let n_bytes: Option<u64> = target.files.iter().map(|file| file.bytes).sum();
    let recorded = !target.files.is_empty() && target.files.iter().all(|file| file.sha256.is_some());
    vec![
        target.name.clone(),
        if recorded { "recorded" } else { "not recorded" }.to_owned(),
        format!("{} ({})", target.summary, target.repository),
        n_bytes.filter(|_| !target.files.is_empty()).map_or_else(|| "not recorded".to_owned(), units::bytes),
    ]
}

fn fetch(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let what = arguments.what.as_deref().unwrap_or_default();
    let mut settings = arguments.transfer.settings()?;
    settings.use_links = !arguments.no_links;
    settings.overwrite = arguments.overwrite;
    settings.beside_foreign = arguments.beside_foreign;
    if let Some(cache) = &arguments.place.cache_dir {
        settings.cache.clone_from(cache);
    }
    let request = request(arguments, what, &settings)?;
    let reporter = DownloadReporter::new(arguments.transfer.quiet, settings.plain_progress);
    if arguments.resume_download || arguments.local_dir_use_symlinks.is_some() {
        reporter.event(&Event::Warning(
            "--resume-download and --local-dir-use-symlinks are accepted and ignored: downloads always resume, and --local-dir always gets real files",
        ));
    }
    let downloader = Downloader::new(settings)?;
    let done = downloader.plan(&request, &reporter).and_then(|plan| {
        let report = if arguments.dry_run { None } else { Some(downloader.fetch(&plan, &reporter)?) };
        Ok((plan, report))
    });
    reporter.finish();
    let (plan, report) = done?;
    let Some(report) = report else {
        print_plan(&plan, arguments.json)?;
        return Ok(ExitCode::SUCCESS);
    };
    if let Some(link) = &arguments.link {
        link_model(&request.reference, &report, link)?;
    }
    if arguments.json {
        print_json(&report)?;
    } else {
        print(&report.place.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn request(arguments: &Arguments, what: &str, settings: &Settings) -> anyhow::Result<Request> {
    let mut reference = Reference::parse(what)?;
    if let Some(revision) = &arguments.revision {
        match &mut reference {
            Reference::Hub(hub) => hub.revision.clone_from(revision),
            _ => return Err(UsageError("--revision is for hf:ORG/NAME".to_owned()).into()),
        }
    }
    let sha256 = match &arguments.sha256 {
        None => None,
        Some(text) => match Digest::from_hex(text) {
            Some(digest @ Digest::Sha256(_)) => Some(digest),
            _ => return Err(UsageError(format!("--sha256 `{text}`: expected 64 hexadecimal digits")).into()),
        },
    };
    let one_file = match &reference {
        Reference::Hub(hub) => hub.path.is_some(),
        Reference::Target(name) => target(name).is_some_and(|target| target.files.len() == 1),
        Reference::Url(_) => true,
    };
    if sha256.is_some() && !one_file {
        return Err(UsageError("--sha256 is for one file: give its path".to_owned()).into());
    }
    let listed = matches!(reference, Reference::Target(_)) && arguments.place.cache_dir.is_none();
    let by_ds4 = settings.model_folder.as_ref().filter(|_| listed);
    let destination = match arguments.place.local_dir.as_ref().or(by_ds4) {
        Some(folder) => Destination::Folder(folder.clone()),
        None => Destination::Cache,
    };
    let (include, exclude) = (arguments.include.clone(), arguments.exclude.clone());
    Ok(Request { reference, include, exclude, destination, sha256 })
}

fn print_plan(plan: &Plan, as_json: bool) -> anyhow::Result<()> {
    let state = |state: FileState| match state {
        FileState::Absent => "to fetch",
        FileState::Begun => "to resume",
        FileState::Present => "there",
    };
    if as_json {
        let files: Vec<_> = plan
            .files
            .iter()
            .map(|file| {
                json!({
                    "path": file.path,
                    "target": file.target,
                    "n_bytes": file.n_bytes,
                    "digest": file.digest.as_ref().map(Digest::hex),
                    "state": state(file.state),
                })
            })
            .collect();
        return print_json(&json!({ "source": plan.source, "place": plan.place, "files": files }));
    }
    let rows: Vec<_> = plan
        .files
        .iter()
        .map(|file| {
            let n_bytes = file.n_bytes.map_or_else(|| "unknown".to_owned(), |n| n.to_string());
            let digest = file.digest.as_ref().map_or("unknown", Digest::hex);
            vec![file.path.clone(), state(file.state).to_owned(), digest.to_owned(), n_bytes]
        })
        .collect();
    print(&format!(
        "{}\n{}\ntotal {}",
        plan.source,
        table(&["file", "state", "digest", "bytes"], 3, &rows),
        units::exact_bytes(plan.n_bytes())
    ))
}

/// Links the name to the model, as users of ds4 expect.
fn link_model(reference: &Reference, report: &Report, link: &Path) -> anyhow::Result<()> {
    let part_of_model =
        matches!(reference, Reference::Target(name) if target(name).is_some_and(|t| !t.model));
    let [file] = report.files.as_slice() else {
        return Err(UsageError("--link is for one file: give its path".to_owned()).into());
    };
    if part_of_model {
        return Err(
            UsageError(format!("`{}` is no model by itself; nothing is linked to it", file.path)).into()
        );
    }
    if std::fs::symlink_metadata(link).is_ok_and(|found| !found.is_symlink()) {
        anyhow::bail!(
            "`{}` is there and is no link; move it away or give another name to --link",
            link.display()
        );
    }
    Ok(download::replace_link(&std::path::absolute(&file.target)?, link)?)
}

fn verify(arguments: &VerifyArguments) -> anyhow::Result<ExitCode> {
    let from = match arguments.from.as_deref().map(Reference::parse).transpose()? {
        None => None,
        Some(Reference::Hub(reference)) => Some(reference),
        Some(_) => return Err(UsageError("--from takes hf:ORG/NAME[/PATH][@REV]".to_owned()).into()),
    };
    let options = VerifyOptions { fetch: !arguments.no_fetch, from, include: arguments.include.clone() };
    let settings = arguments.transfer.settings()?;
    let reporter = DownloadReporter::new(arguments.transfer.quiet, settings.plain_progress);
    let downloader = Downloader::new(settings)?;
    let report = downloader.verify(&arguments.folder, &options, &reporter);
    reporter.finish();
    let report = report?;
    if arguments.json {
        print_json(&report)?;
    } else {
        print(&verified(&report))?;
    }
    Ok(if report.is_sound() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn verified(report: &VerifyReport) -> String {
    let mut lines = Vec::new();
    for file in &report.files {
        let state = match file.state {
            FileCheck::Right => "right",
            FileCheck::Unchanged => "as it came (no digest was announced)",
            FileCheck::Wrong => "WRONG",
            FileCheck::Missing => "MISSING",
            FileCheck::Unknown => "UNKNOWN: nothing to compare it with; say what it should be with --from",
        };
        let repaired = if file.repaired { ", fetched again and right now" } else { "" };
        lines.push(format!("{}: {state}{repaired}", file.path));
        for (start, end) in &file.wrong_pieces {
            lines.push(format!("  bytes {start} to {}", end - 1));
        }
    }
    let n_sound = report
        .files
        .iter()
        .filter(|file| file.repaired || matches!(file.state, FileCheck::Right | FileCheck::Unchanged))
        .count();
    lines.push(format!("{n_sound} of {} files are right in {}", report.files.len(), report.folder.display()));
    lines.join("\n")
}
