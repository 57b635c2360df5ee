//! `score run`: how probable recorded official answers are to a model.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use gguf_tools::progress::{Progress, Step};
use quality_testing::cases::CaseSet;
use quality_testing::journal::{Journal, JournalError};
use quality_testing::label;
use quality_testing::report::{CaseFacts, ModelFacts, RUN_SCHEMA, RunReport, Summary, file_name};
use quality_testing::scoring::{CaseScore, Prepared, Vocabulary, prepare, score};
use quality_testing::table;
use runner::weights::open_source;
use runner::{Model, RunnerError};
use serde::Serialize;

use super::super::model::{ComputeArguments, tokenizer};
use super::super::steering::SteeringArguments;
use super::super::{UsageError, print, print_json};
use super::{check_output, write};
use crate::render::progress::{Reporter, interrupted};

/// Positions as ds4's scorer takes them: `score run MODEL MANIFEST OUT CTX`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The model to score: a GGUF file (any shard of a split one) or the folder of an official checkpoint.
    model: PathBuf,
    /// The cases, if --cases does not name them.
    #[arg(value_name = "MANIFEST", conflicts_with = "cases")]
    manifest: Option<PathBuf>,
    /// The table to write, if --out does not name it.
    #[arg(value_name = "OUT", conflicts_with = "out")]
    table: Option<PathBuf>,
    /// Most tokens of a case, as --ctx.
    #[arg(value_name = "CTX", conflicts_with = "context")]
    limit: Option<usize>,
    /// ds4's manifest.tsv, manifest.json, `.vec` or official JSON file, or a folder with a manifest.
    #[arg(long, value_name = "MANIFEST")]
    cases: Option<PathBuf>,
    /// Write the scores as a table in ds4's columns. An interrupted run goes on from its part file.
    #[arg(long, value_name = "FILE.tsv")]
    out: Option<PathBuf>,
    /// Write over an existing table.
    #[arg(long)]
    overwrite: bool,
    /// The checkpoint that the cases were recorded from, where the set does not say.
    #[arg(long, value_name = "NAME")]
    cases_label: Option<String>,
    /// Score by the answers of another checkpoint, too. The difference is none of quality.
    #[arg(long)]
    allow_other_checkpoint: bool,
    /// Print JSON, with every case.
    #[arg(long)]
    json: bool,
    /// No progress.
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    compute: ComputeArguments,
    #[command(flatten)]
    steering: SteeringArguments,
}

/// What makes two runs the same work: the first line of the part file.
#[derive(Serialize)]
struct Work<'a> {
    schema: &'static str,
    model: &'a ModelFacts,
    cases: &'a CaseFacts,
}

/// Errors of scoring and of noting scores.
#[derive(Debug, thiserror::Error)]
enum Stopped {
    #[error(transparent)]
    Runner(#[from] RunnerError),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let cases = arguments.cases.as_ref().or(arguments.manifest.as_ref());
    let cases = cases.ok_or_else(|| UsageError("give the cases: --cases MANIFEST".to_owned()))?;
    let out = arguments.out.as_deref().or(arguments.table.as_deref());
    if let Some(out) = out {
        check_output(out, arguments.overwrite)?;
    }
    let set = CaseSet::open(cases, arguments.cases_label.as_deref())?;
    let found = label::of_model(&arguments.model)?;
    let allow = arguments.allow_other_checkpoint;
    label::check(&set.path, set.label.as_ref(), &arguments.model, found.as_deref(), allow)?;
    let mut options = arguments.compute.options()?;
    options.context_limit = arguments.limit.or(options.context_limit);
    let tokenizer = tokenizer(&arguments.model)?;
    let options = arguments.steering.add_to(options, &arguments.model)?;
    let (model, _) = arguments.compute.open(&open_source(&arguments.model)?, options)?;
    let vocabulary = Vocabulary::new(&tokenizer);
    let prepared = prepare(&set.cases, &tokenizer, &vocabulary, model.context_limit())?;
    let facts = ModelFacts::of(&arguments.model, &model.provenance())?;
    let case_facts = CaseFacts { name: file_name(&set.path), label: set.label.clone(), sha256: set.sha256() };
    let scores = scores(arguments, &model, &prepared, &vocabulary, out, &facts, &case_facts)?;
    if interrupted() {
        eprintln!("interrupted after {} of {} cases", scores.len(), prepared.len());
        return Ok(ExitCode::from(130));
    }
    let same = case_facts.label.as_ref().zip(facts.checkpoint.as_deref());
    let report = RunReport {
        schema: RUN_SCHEMA.to_owned(),
        same_checkpoint: same.map(|(cases, model)| label::is_same(&cases.label, model)),
        summary: Summary::of(&scores, model.hyper_parameters().vocab_size as usize),
        model: facts,
        cases: case_facts,
        scores,
    };
    if let Some(out) = out {
        let label = report.cases.label.as_ref().map(|label| label.label.as_str());
        write(out, &table::write(&report.scores, report.model.checkpoint.as_deref(), label))?;
        std::fs::remove_file(part_of(out))
            .with_context(|| format!("cannot remove `{}`", part_of(out).display()))?;
    }
    if arguments.json {
        print_json(&report)?;
    } else {
        print(&summary_text(&report))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Scores what the part file does not have yet.
fn scores(
    arguments: &Arguments,
    model: &Model,
    cases: &[Prepared<'_>],
    vocabulary: &Vocabulary,
    out: Option<&Path>,
    facts: &ModelFacts,
    case_facts: &CaseFacts,
) -> anyhow::Result<Vec<CaseScore>> {
    let work = Work { schema: "ggsmith-score-part-v1", model: facts, cases: case_facts };
    let (mut journal, mut scores) = match out {
        Some(out) => {
            let (journal, scores) = Journal::open::<CaseScore>(&part_of(out), &work)?;
            (Some(journal), scores)
        }
        None => (None, Vec::new()),
    };
    let is_prefix = scores.iter().zip(cases).all(|(score, case)| score.id == case.case.id);
    anyhow::ensure!(
        is_prefix && scores.len() <= cases.len(),
        "the part file of `{}` holds other cases; remove it to start again",
        out.unwrap_or(Path::new("")).display()
    );
    if !scores.is_empty() {
        eprintln!("going on after {} of {} cases", scores.len(), cases.len());
    }
    let reporter = Reporter::new("scoring", arguments.quiet);
    let n_bytes = |cases: &[Prepared<'_>]| -> u64 {
        cases.iter().map(|case| (case.case.prompt.len() + case.case.continuation.len()) as u64).sum()
    };
    score::<Stopped>(model, &cases[scores.len()..], vocabulary, &mut |group| {
        for score in group {
            if let Some(journal) = &mut journal {
                journal.append(&score)?;
            }
            scores.push(score);
        }
        reporter.step(&Step {
            item: &cases[scores.len() - 1].case.id,
            done_bytes: n_bytes(&cases[..scores.len()]),
            total_bytes: n_bytes(cases),
            done_items: scores.len(),
            total_items: cases.len(),
        });
        Ok(!interrupted())
    })?;
    reporter.finish();
    Ok(scores)
}

fn part_of(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".part");
    PathBuf::from(name)
}

fn summary_text(report: &RunReport) -> String {
    let s = &report.summary;
    let a = &s.agreement;
    let label = |label: Option<&str>| label.unwrap_or("not stated").to_owned();
    let cases = report.cases.label.as_ref();
    let by_date = if cases.is_some_and(|label| !label.stated) { " (by API name and date)" } else { "" };
    let mut text = format!(
        "model checkpoint   {}\ncases recorded of  {}{by_date}\n",
        label(report.model.checkpoint.as_deref()),
        label(cases.map(|label| label.label.as_str())),
    );
    text += match report.same_checkpoint {
        Some(true) => "",
        Some(false) => "                   DIFFERENT checkpoints: the numbers are no measure of quality\n",
        None => {
            "                   not known to be the same checkpoint: the numbers may be no measure of quality\n"
        }
    };
    text += &format!(
        "cases              {}\ntokens             {}\nNLL, nats a token  {:.6} [{:.6}, {:.6}]\nfirst token        {} of {}\ngreedy prefix      {:.3} tokens\n",
        s.n_cases,
        s.n_tokens,
        s.average_nll.mean,
        s.average_nll.low,
        s.average_nll.high,
        s.first_match,
        s.n_cases,
        s.average_lcp,
    );
    if let Some(rate) = a.top1_rate() {
        let share = |sum: u64, n: u64| 100.0 * sum as f64 / n.max(1) as f64;
        text += &format!(
            "API best token     {:.2} % of {}\nAPI alternatives   {:.2} % of {} are one token here; {:.2} % of those among the best here; order of pairs {:.2} %\nAPI log-prob.      mean difference {:.6} nats of the recorded tokens\n",
            100.0 * rate,
            a.top1_count,
            share(a.top_mapped, a.top_items),
            a.top_items,
            share(a.topn_hit, a.top_mapped),
            share(a.pair_agree, a.pair_total),
            a.mae(),
        );
    }
    for warning in &s.warnings {
        text += &format!("note: {warning}\n");
    }
    text += &format!(
        "computed with      {} numerics, {} activations, {}; intervals 95 % over cases",
        report.model.numerics, report.model.activations, report.model.backend
    );
    text
}
