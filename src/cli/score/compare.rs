//! `score compare`: two tables of scores, paired.

use std::path::PathBuf;
use std::process::ExitCode;

use quality_testing::paired::{Group, PairedComparison, compare};
use quality_testing::table::{self, ScoreTable};
use serde_json::json;

use super::super::{print, print_json};
use crate::render::table::table;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Scores of the old file, as `score run` or ds4's scorer writes them.
    old: PathBuf,
    /// Scores of the new file, of the same cases.
    new: PathBuf,
    /// Another scoring of the old file, by another backend for example: how much a difference must be to mean something.
    #[arg(long, value_name = "FILE.tsv")]
    again: Option<PathBuf>,
    /// Compare scores of different checkpoints, too. The difference is none of quality.
    #[arg(long)]
    allow_other_checkpoint: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (old, new) = (table::read(&arguments.old)?, table::read(&arguments.new)?);
    let again = arguments.again.as_deref().map(table::read).transpose()?;
    let result = compare(&old, &new, again.as_ref(), arguments.allow_other_checkpoint)?;
    if arguments.json {
        let facts = |table: &ScoreTable| {
            json!({
                "path": table.path, "checkpoint": table.checkpoint, "cases_checkpoint": table.cases_checkpoint,
            })
        };
        print_json(&json!({
            "schema": "ggsmith-score-compare-v1", "old": facts(&old), "new": facts(&new), "comparison": result,
        }))?;
    } else {
        print(&text(arguments, &old, &new, &result))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(arguments: &Arguments, old: &ScoreTable, new: &ScoreTable, result: &PairedComparison) -> String {
    let label = |label: &Option<String>| label.clone().unwrap_or_else(|| "not stated".to_owned());
    let line = |name: &str, table: &ScoreTable| {
        format!(
            "{name}  {}: checkpoint {}, cases of {}\n",
            table.path.display(),
            label(&table.checkpoint),
            label(&table.cases_checkpoint)
        )
    };
    let mut text = line("old", old) + &line("new", new) + "\n";
    let rows: Vec<Vec<String>> = std::iter::once(&result.all).chain(&result.kinds).map(cells).collect();
    let columns = [
        "kind",
        "cases",
        "tokens",
        "old NLL",
        "new NLL",
        "new - old",
        "change",
        "wins",
        "losses",
        "ties",
        "sign test p",
        "first token",
        "greedy prefix",
        "API best token",
    ];
    text += &table(&columns, 1, &rows);
    let noise = &result.noise;
    let of = match &arguments.again {
        Some(path) => format!("the old file scored again, `{}`", path.display()),
        None => "the old scores against themselves (--again FILE takes another scoring of the old file)"
            .to_owned(),
    };
    text += &format!(
        "\n\nNLL in nats a token, wins are cases that the new file fits better. Intervals are 95 %, drawn over whole cases.\nnoise floor: {:.6} [{:.6}, {:.6}] nats a token, {} cases changed: {of}",
        noise.mean, noise.low, noise.high, result.noise_changed
    );
    text + &format!("\n{}", verdict(&result.all))
}

/// What interval and sign test say together: a few long cases can move the mean alone.
fn verdict(all: &Group) -> String {
    const USUAL_P: f64 = 0.05;
    if !all.difference.excludes_zero() {
        return "the interval holds zero: no difference is shown".to_owned();
    }
    let side = if all.difference.mean < 0.0 { "better" } else { "worse" };
    if all.sign_test_p < USUAL_P {
        return format!("the new file fits {side}, by the interval and by the sign test");
    }
    format!(
        "the new file fits {side} by the interval; the sign test does not show it (p = {:.4}): take more cases",
        all.sign_test_p
    )
}

fn cells(group: &Group) -> Vec<String> {
    let d = &group.difference;
    let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{:.2} %", 100.0 * rate));
    let change = if group.average_nll[0] > 0.0 {
        format!("{:+.3} %", 100.0 * d.mean / group.average_nll[0])
    } else {
        "-".to_owned()
    };
    vec![
        group.kind.clone(),
        group.n_cases.to_string(),
        group.n_tokens.to_string(),
        format!("{:.6}", group.average_nll[0]),
        format!("{:.6}", group.average_nll[1]),
        format!("{:+.6} [{:+.6}, {:+.6}]", d.mean, d.low, d.high),
        change,
        group.wins.to_string(),
        group.losses.to_string(),
        group.ties.to_string(),
        format!("{:.4}", group.sign_test_p),
        format!("{} -> {}", group.first_match[0], group.first_match[1]),
        format!("{:.3} -> {:.3}", group.average_lcp[0], group.average_lcp[1]),
        format!("{} -> {}", rate(group.top1_rate[0]), rate(group.top1_rate[1])),
    ]
}
