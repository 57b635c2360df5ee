//! `quantize`: the build.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use gguf_tools::build::{
    BuildOptions, BuildReport, ByFeedback, FeedbackOutcome, build, build_calibrated, is_walked,
};
use gguf_tools::plan::{Conversion, Plan, PlanPart};
use gguf_tools::rewrite::{parse_layer_parts, shard_name};
use imatrix::{Imatrix, MissingPolicy, StackedTensor, TensorCoverage};

use super::arguments::{
    ImportanceArguments, Missing, RecipeArguments, SourceArguments, importance_of, make_plan_with,
};
use super::calibrate::CalibrationArguments;
use super::plan::View;
use super::rewritten::usage_or_failure;
use super::{UsageError, print, print_json};
use crate::render::progress::Reporter;
use crate::render::table::table;
use crate::render::units;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    source: SourceArguments,
    /// The file to write.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Make one part only, by layers, as 0:30 or 31:output: an ordinary file, as ds4 loads it. `merge` joins the parts.
    #[arg(long, value_name = "FIRST:LAST", conflicts_with = "shard")]
    layers: Option<String>,
    /// Make share I of N of the file, as PREFIX-0000I-of-0000N.gguf, on one of N machines. `merge` joins the shares.
    #[arg(long, value_name = "I/N")]
    shard: Option<String>,
    /// Print the plan and stop.
    #[arg(long)]
    dry_run: bool,
    /// Replace an existing output.
    #[arg(long, visible_alias = "force")]
    overwrite: bool,
    /// Start again instead of going on from the part file of an interrupted run.
    #[arg(long)]
    no_resume: bool,
    /// Go on from a fitting part file; the default.
    #[arg(long, conflicts_with = "no_resume")]
    resume: bool,
    /// Threads; all processors if left out. The bytes do not depend on it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Show no progress.
    #[arg(long)]
    quiet: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    recipe: RecipeArguments,
    #[command(flatten)]
    importance: ImportanceArguments,
    #[command(flatten)]
    calibration: CalibrationArguments,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let threads = arguments.threads.map(usize::from);
    if let Some(n) = threads {
        rayon::ThreadPoolBuilder::new().num_threads(n).build_global().context("cannot start threads")?;
    }
    let source = arguments.source.open()?;
    let matrix = arguments.importance.open()?;
    let label = arguments.source.label(source.as_ref());
    let part = part(arguments)?;
    let hash_files = !arguments.dry_run && part.is_none_or(|part| part.names_source_sums());
    let text = arguments.calibration.read(arguments.source.path())?;
    if text.is_some() && part.is_some() {
        let message = "--calibrate makes whole files: every layer needs what the layers before it compute; leave out --shard and --layers";
        return Err(UsageError(message.to_owned()).into());
    }
    let more = text.as_ref().map(|text| text.metadata.clone()).unwrap_or_default();
    let mut plan =
        make_plan_with(source.as_ref(), &arguments.recipe, label, matrix.as_ref(), hash_files, &more)?;
    warn_of(&plan);
    if let Some(part) = part {
        plan = plan.part(part).map_err(|e| UsageError(e.to_string()))?;
    }
    let out = match part {
        Some(PlanPart::Shard { index, n_shards }) => {
            let whole = &arguments.out;
            let named = whole.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
            shard_name(&if named { whole.with_extension("") } else { whole.clone() }, index, n_shards)
        }
        _ => arguments.out.clone(),
    };
    if let Some(matrix) = &matrix {
        report_coverage(&plan, matrix, &arguments.importance, arguments.json)?;
    }
    let mut view = View::new(&plan, rayon::current_num_threads());
    if let Some(text) = &text {
        view.more_memory = text.memory_bytes(&plan, arguments.source.path(), view.threads)?;
        anyhow::ensure!(
            plan.tensors.iter().any(|tensor| is_walked(tensor, text.dense)),
            "--calibrate changes nothing: no {} becomes a type that error feedback can write (IQ2_XXS, Q2_K, Q4_K, Q8_0, MXFP4)",
            if text.dense { "matrix" } else { "routed expert" }
        );
    }
    if arguments.dry_run {
        let out = Some(out.as_path());
        if arguments.json {
            print_json(&view.json(out)?)?;
        } else {
            print(&view.text(out, false)?)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let options = BuildOptions {
        overwrite: arguments.overwrite,
        resume: !arguments.no_resume,
        importance_fallback: arguments.importance.fallback_allowed(),
    };
    let reporter = Reporter::new("quantizing", arguments.quiet);
    let importance = importance_of(matrix.as_ref());
    let result = match text {
        None => build(&plan, source.as_ref(), importance, &out, options, &reporter),
        Some(text) => {
            let (identity, dense) = (plan.header_sha256(), text.dense);
            let beside = Some(out.as_path());
            let model = arguments.source.path();
            let (mut pass, mut quantizer) = text.pass(model, beside, &identity, threads.unwrap_or(0))?;
            quantizer.plain.objective = plan.objective;
            quantizer.plain.scale_gain = plan.recipe.scale_gain;
            let by = ByFeedback { calibration: &mut pass, quantizer: &quantizer, dense };
            build_calibrated(&plan, source.as_ref(), importance, by, &out, options, &reporter)
        }
    };
    reporter.finish();
    print_report(&result?, arguments.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Which part of the file is to be made; `None`: all of it.
fn part(arguments: &Arguments) -> anyhow::Result<Option<PlanPart>> {
    if let Some(text) = &arguments.layers {
        let parts = parse_layer_parts(text).map_err(usage_or_failure)?;
        let [part] = parts.as_slice() else {
            return Err(UsageError(format!(
                "--layers `{text}`: expected one part, as 0:30; `split` makes several"
            ))
            .into());
        };
        return Ok(Some(PlanPart::Layers(*part)));
    }
    let Some(text) = &arguments.shard else { return Ok(None) };
    let wrong = || UsageError(format!("--shard `{text}`: expected I/N with I from 1 to N, as 2/4"));
    let (number, n_shards) = text.split_once('/').ok_or_else(wrong)?;
    let number: usize = number.trim().parse().map_err(|_| wrong())?;
    let n_shards: usize = n_shards.trim().parse().map_err(|_| wrong())?;
    if !(1..=n_shards).contains(&number) {
        return Err(wrong().into());
    }
    Ok(Some(PlanPart::Shard { index: number - 1, n_shards }))
}

/// What a build did.
pub(crate) fn print_report(report: &BuildReport, json: bool) -> anyhow::Result<()> {
    if json { print_json(report) } else { print(&closing_text(report)) }
}

/// Things in a plan that are most likely not meant.
pub(crate) fn warn_of(plan: &Plan) {
    for number in &plan.idle_rules {
        eprintln!("warning: rule {number} of the recipe matches no tensor whose type can be chosen");
    }
}

/// Prints which tensors the matrix covers, and stops where the options say so.
pub(crate) fn report_coverage(
    plan: &Plan,
    matrix: &Imatrix,
    options: &ImportanceArguments,
    json: bool,
) -> anyhow::Result<()> {
    let wanted: Vec<_> = plan
        .tensors
        .iter()
        .filter(|t| t.conversion == Conversion::Quantize)
        .filter(|t| t.target.format().is_some_and(gguf_tools::block::BlockFormat::uses_importance))
        .map(|t| StackedTensor {
            tensor: &t.spec.gguf_name,
            sources: &t.spec.sources,
            n_experts: t.n_matrices(),
            n_columns: t.n_columns(),
        })
        .collect();
    let coverage = matrix.coverage(&wanted);
    if !json {
        let rows: Vec<_> = coverage.tensors.iter().map(coverage_row).collect();
        eprintln!("importance matrix: {}", matrix.format());
        eprintln!("{}", table(&["tensor", "found", "experts seen", "least count", "median count"], 2, &rows));
    }
    let policy = match options.missing() {
        Missing::Error => MissingPolicy::Error,
        Missing::Fallback => MissingPolicy::Fallback,
    };
    for warning in coverage.judge(policy, options.strict())? {
        eprintln!("warning: {warning}");
    }
    Ok(())
}

fn coverage_row(tensor: &TensorCoverage) -> Vec<String> {
    let count = |value: Option<f64>| value.map_or_else(|| "unknown".to_owned(), |n| n.to_string());
    vec![
        tensor.tensor.clone(),
        if tensor.matched { "yes" } else { "no entry" }.to_owned(),
        format!("{} of {}", tensor.n_seen, tensor.n_experts),
        count(tensor.counts.map(|c| c.min)),
        count(tensor.counts.map(|c| c.median)),
    ]
}

/// One row a tensor: what error feedback did.
fn feedback_table(outcomes: &[FeedbackOutcome]) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for group in outcomes.chunk_by(|a, b| a.tensor == b.tensor) {
        let sum = |of: fn(&FeedbackOutcome) -> f64| group.iter().map(of).sum::<f64>();
        let (plain, error) = (sum(|o| o.report.plain_error), sum(|o| o.report.error));
        let n_rows = sum(|o| o.report.n_rows as f64);
        let n_plain = sum(|o| o.report.n_plain_rows as f64);
        rows.push(vec![
            group[0].tensor.clone(),
            group.iter().map(|o| o.n_tokens).min().unwrap_or(0).to_string(),
            format!("{:.4}", if plain > 0.0 { error / plain } else { 1.0 }),
            format!("{:.2} %", 100.0 * n_plain / n_rows.max(1.0)),
            group.iter().filter(|o| o.report.damping_raised).count().to_string(),
        ]);
    }
    let columns = ["tensor", "least tokens", "error / plain", "plain rows", "damping raised"];
    format!("error feedback:\n{}\n", table(&columns, 1, &rows))
}

fn closing_text(report: &BuildReport) -> String {
    let mut text = String::new();
    if !report.feedback.is_empty() {
        text += &feedback_table(&report.feedback);
    }
    if !report.fallback_importance.is_empty() {
        let mut tensors: Vec<(String, Vec<usize>, &str, &str)> = Vec::new();
        for note in &report.fallback_importance {
            match tensors.last_mut() {
                Some(last) if last.0 == note.tensor && last.2 == note.reason => {
                    last.1.push(note.expert_index);
                }
                _ => tensors.push((note.tensor.clone(), vec![note.expert_index], &note.reason, note.used)),
            }
        }
        text += "quantized without importance of their own:\n";
        for (tensor, experts, reason, used) in tensors {
            let which = match experts.as_slice() {
                [first, .., last] if last - first + 1 == experts.len() => {
                    format!("experts {first} to {last}")
                }
                [one] => format!("expert {one}"),
                _ => {
                    format!("experts {}", experts.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
                }
            };
            text += &format!("  {tensor}, {which}: {reason}; used: {used}\n");
        }
    }
    if report.resumed_bytes > 0 {
        text += &format!("resumed at {}\n", units::exact_bytes(report.resumed_bytes));
    }
    text += &format!(
        "sha256 {}\nwrote {}\n{}",
        report.sha256,
        units::exact_bytes(report.file_bytes),
        report.path.display()
    );
    text
}
