//! `score report`: pages made of results.

use std::path::PathBuf;
use std::process::ExitCode;

use quality_testing::report::{card, check_together, page, read};

use super::super::{UsageError, print};
use super::{check_output, write};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Results as `score run --json` and `score kld --json` print them; tables keep their order.
    #[arg(required = true, value_name = "RESULT.json")]
    results: Vec<PathBuf>,
    /// Write a self-contained HTML page with plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write a Markdown card; printed if neither this nor a page is asked for.
    #[arg(long, value_name = "FILE")]
    card: Option<PathBuf>,
    /// Heading of both.
    #[arg(long, value_name = "TEXT", default_value = "Quality report")]
    title: String,
    /// Write over existing files.
    #[arg(long)]
    overwrite: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.title.trim().is_empty() {
        return Err(UsageError("--title: a page needs a heading".to_owned()).into());
    }
    for path in arguments.html.iter().chain(&arguments.card) {
        check_output(path, arguments.overwrite)?;
    }
    let reports = arguments.results.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
    check_together(&reports)?;
    if let Some(path) = &arguments.html {
        write(path, &page(&arguments.title, &reports)?)?;
        print(&path.display().to_string())?;
    }
    let text = card(&arguments.title, &reports);
    match &arguments.card {
        Some(path) => {
            write(path, &text)?;
            print(&path.display().to_string())?;
        }
        None if arguments.html.is_none() => print(text.trim_end())?,
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}
