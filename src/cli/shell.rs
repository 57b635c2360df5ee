//! `completions` and `man`.

use std::process::ExitCode;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::{Cli, UsageError};

#[derive(Debug, Args)]
pub(crate) struct CompletionArguments {
    /// The shell to complete for.
    shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArguments {
    /// The command to describe; the program itself if left out.
    command: Option<String>,
}

pub(crate) fn completions(arguments: &CompletionArguments) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Cli::command(), "ggsmith", &mut script);
    super::print(String::from_utf8_lossy(&script).trim_end())?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn man(arguments: &ManArguments) -> anyhow::Result<ExitCode> {
    let program = Cli::command();
    let command = match &arguments.command {
        None => program,
        Some(name) => {
            let found = program.find_subcommand(name);
            let found = found.ok_or_else(|| UsageError(format!("there is no command `{name}`")))?;
            // A manual page's name is one word, and clap keeps names as static text.
            let title: &'static str = Box::leak(format!("ggsmith-{name}").into_boxed_str());
            found.clone().name(title)
        }
    };
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    super::print(String::from_utf8_lossy(&page).trim_end())?;
    Ok(ExitCode::SUCCESS)
}
