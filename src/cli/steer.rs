//! `steer`: directions in a model's activations.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use dir_steering::{
    BuildOptions, Captured, Component, Direction, Example, Format, Generation, Method, ModelIdentity,
    Operation, Position, Separation, SweepOptions, SweepRow,
};
use gguf_tools::plot::{LineChart, Series};
use runner::chat::{Message, render};
use runner::tokenizer::Tokenizer;
use serde_json::json;

use super::model::ModelArguments;
use super::{UsageError, print, print_json};
use crate::render::table::table;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Find a direction from good and bad prompts.
    Build(BuildArguments),
    /// Try a direction at several scales.
    Sweep(SweepArguments),
    /// Show what a direction file says.
    Show(ShowArguments),
    /// Write a direction in another format.
    Convert(ConvertArguments),
}

/// How lines of a prompt file become prompts.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prompts")]
struct PromptArguments {
    /// Instructions in front of each prompt.
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Let the model think before it answers; without it, it answers at once.
    #[arg(long, conflicts_with = "raw")]
    think: bool,
    /// Let the model answer at once; the default.
    #[arg(long, conflicts_with = "think")]
    nothink: bool,
    /// Take each line as it is instead of as a user's turn.
    #[arg(long)]
    raw: bool,
}

impl PromptArguments {
    /// Tokens of each prompt of a file's text.
    fn tokens(&self, tokenizer: &Tokenizer, text: &str, from: &str) -> anyhow::Result<Vec<Vec<u32>>> {
        let prompts = dir_steering::prompts(text);
        anyhow::ensure!(!prompts.is_empty(), "{from} holds no prompts; expected one a line");
        let encode = |&prompt: &&str| -> anyhow::Result<Vec<u32>> {
            if self.raw {
                return Ok(tokenizer.encode_plain(prompt)?);
            }
            let system = self.system.as_deref().map(Message::System);
            let messages: Vec<_> = system.into_iter().chain([Message::User(prompt)]).collect();
            Ok(tokenizer.encode_chat(&render(&messages, self.think, true))?)
        };
        prompts.iter().map(encode).collect()
    }
}

#[derive(Debug, Args)]
struct BuildArguments {
    #[command(flatten)]
    model: ModelArguments,
    /// Prompts that the direction points to, one a line; `#` begins a comment.
    #[arg(long, value_name = "FILE", visible_alias = "good-file", required_unless_present = "example")]
    good: Option<PathBuf>,
    /// Prompts that it is told apart from; line N of both files is a pair.
    #[arg(long, value_name = "FILE", visible_alias = "bad-file", required_unless_present = "example")]
    bad: Option<PathBuf>,
    /// A set of pairs that comes with the program, instead of files.
    #[arg(long, value_name = "NAME", value_parser = ["terse-verbose", "formal-casual"], conflicts_with_all = ["good", "bad"])]
    example: Option<String>,
    /// Where in each layer.
    #[arg(long, value_name = "NAME", default_value = "ffn_out", value_parser = Component::NAMES.map(|(name, _)| name))]
    component: String,
    /// Which token stands for a prompt.
    #[arg(long, value_name = "WHICH", default_value = "last", value_parser = ["last", "mean"])]
    position: String,
    /// Difference of means, or first principal component of the pairs' differences.
    #[arg(long, value_name = "METHOD", default_value = "mean", value_parser = ["mean", "pca"])]
    method: String,
    /// Do not take the mean of the bad prompts out of the direction.
    #[arg(long)]
    no_orthogonalize: bool,
    /// Share of the pairs, the last ones, that judge the direction instead of making it.
    #[arg(long, value_name = "SHARE", default_value_t = 0.2)]
    held_out: f64,
    /// Keep only these layers, as FIRST:LAST.
    #[arg(long, value_name = "RANGE")]
    layers: Option<String>,
    #[command(flatten)]
    prompts: PromptArguments,
    #[command(flatten)]
    output: OutputArguments,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Where a direction goes.
#[derive(Debug, Args)]
struct OutputArguments {
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Its format; by the name's end if left out (.safetensors, .f32, .gguf for GLP).
    #[arg(long = "to", value_name = "FORMAT", value_parser = Format::NAMES.map(|(name, _)| name))]
    format: Option<String>,
    /// Replace the file if it exists.
    #[arg(long)]
    overwrite: bool,
}

impl OutputArguments {
    fn format(&self) -> anyhow::Result<Format> {
        let extension = self.out.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let name = match self.format.as_deref().unwrap_or(extension) {
            "gguf" => "glp",
            name => name,
        };
        let found = Format::NAMES.iter().find(|(known, _)| *known == name);
        Ok(found
            .ok_or_else(|| {
                UsageError(format!("`{}`: no format has this end; pass --to", self.out.display()))
            })?
            .1)
    }

    fn write(&self, direction: &Direction) -> anyhow::Result<()> {
        let format = self.format()?;
        if self.out.exists() && !self.overwrite {
            anyhow::bail!("`{}` exists; pass --overwrite to replace it", self.out.display());
        }
        Ok(dir_steering::write(direction, format, &self.out)?)
    }
}

#[derive(Debug, Args)]
struct SweepArguments {
    #[command(flatten)]
    model: ModelArguments,
    /// The direction.
    #[arg(long, value_name = "FILE")]
    direction: PathBuf,
    /// Prompts, one a line.
    #[arg(long = "prompts", value_name = "FILE")]
    file: PathBuf,
    /// Scales to try.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        allow_hyphen_values = true,
        default_value = "-1,-0.5,0,0.5,1,2"
    )]
    scales: Vec<f32>,
    /// Apply it to the attention output instead of the FFN output.
    #[arg(long)]
    attn: bool,
    /// Most tokens of each answer.
    #[arg(short = 'n', long = "tokens", value_name = "N", default_value_t = 180)]
    tokens: usize,
    /// Use the direction on another checkpoint than it was made on.
    #[arg(long)]
    allow_other_checkpoint: bool,
    #[command(flatten)]
    prompts: PromptArguments,
    /// Write every row, with its answer, as CSV.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the means over the prompts.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ShowArguments {
    /// A direction file of any known format.
    file: PathBuf,
    /// A model to check it against.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ConvertArguments {
    /// A direction file of any known format.
    file: PathBuf,
    #[command(flatten)]
    output: OutputArguments,
    /// Change what the vectors mean: projected out of a component, or added behind a layer. Never done unasked.
    #[arg(long = "as", value_name = "OPERATION", value_parser = ["project", "add"])]
    operation: Option<String>,
    /// The component, where the file names none.
    #[arg(long, value_name = "NAME", value_parser = ["ffn_out", "attn_out"])]
    component: Option<String>,
    /// Length of the vectors if they become added ones.
    #[arg(long, value_name = "LENGTH", default_value_t = 1.0)]
    length: f32,
    /// Scale every vector to length 1.
    #[arg(long)]
    normalize: bool,
    /// Keep only these layers, as FIRST:LAST.
    #[arg(long, value_name = "RANGE")]
    layers: Option<String>,
    /// The model it is for: gives the number of layers, and the label if the file has none.
    #[arg(short, long, value_name = "FILE|DIR")]
    model: Option<PathBuf>,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.command {
        Command::Build(a) => build(a),
        Command::Sweep(a) => sweep(a),
        Command::Show(a) => show(a),
        Command::Convert(a) => convert(a),
    }
}

/// First and last layer of `FIRST:LAST`.
fn layer_range(range: &str) -> anyhow::Result<(usize, usize)> {
    let parsed =
        range.split_once(':').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    let wrong = || UsageError(format!("--layers: found `{range}`, expected FIRST:LAST, for example 1:42"));
    Ok(parsed.filter(|(first, last)| first <= last).ok_or_else(wrong)?)
}

fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))
}

/// The pairs' prompts: good, bad, and what they are.
fn pairs(arguments: &BuildArguments) -> anyhow::Result<(String, String, String)> {
    if let Some(example) = arguments.example.as_deref().and_then(Example::from_name) {
        return Ok((example.good.to_owned(), example.bad.to_owned(), format!("example {}", example.name)));
    }
    let (Some(good), Some(bad)) = (&arguments.good, &arguments.bad) else {
        return Err(UsageError("--good and --bad, or --example".to_owned()).into());
    };
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok((read(good)?, read(bad)?, format!("{} against {}", name(good), name(bad))))
}

fn build(arguments: &BuildArguments) -> anyhow::Result<ExitCode> {
    if !(0.0..1.0).contains(&arguments.held_out) {
        return Err(
            UsageError(format!("--held-out: found {}, expected 0 to below 1", arguments.held_out)).into()
        );
    }
    arguments.output.format()?;
    let range = arguments.layers.as_deref().map(layer_range).transpose()?;
    let (good, bad, contrast) = pairs(arguments)?;
    let tokenizer = arguments.model.tokenizer()?;
    let good = arguments.prompts.tokens(&tokenizer, &good, "the file of good prompts")?;
    let bad = arguments.prompts.tokens(&tokenizer, &bad, "the file of bad prompts")?;
    let component =
        Component::from_name(&arguments.component).context("the parser admits known components only")?;
    let options = BuildOptions {
        component,
        position: if arguments.position == "last" { Position::Last } else { Position::Mean },
        method: if arguments.method == "mean" {
            Method::DifferenceOfMeans
        } else {
            Method::PrincipalComponent
        },
        orthogonalize: !arguments.no_orthogonalize,
        contrast,
    };
    let identity = ModelIdentity::open(arguments.model.path())?;
    let model = arguments.model.open()?;
    let n_made_from = |n: usize| n - ((n as f64 * arguments.held_out) as usize).min(n - 1);
    let split = |prompts: &[Vec<u32>]| -> anyhow::Result<(Captured, Captured)> {
        let all = dir_steering::capture(&model, prompts, component, options.position)?;
        let part = |keep: std::ops::Range<usize>| Captured {
            layers: all.layers.iter().map(|rows| rows[keep.clone()].to_vec()).collect(),
        };
        let n = n_made_from(prompts.len());
        Ok((part(0..n), part(n..prompts.len())))
    };
    let ((good, good_held_out), (bad, bad_held_out)) = (split(&good)?, split(&bad)?);
    let mut direction = dir_steering::build(&identity, &good, &bad, &options)?;
    if let Some((first, last)) = range {
        direction.keep_layers(first, last)?;
    }
    let made_from = dir_steering::separation(&direction, &good, &bad);
    let judged = [&good_held_out, &bad_held_out].iter().all(|c| c.layers.iter().all(|rows| !rows.is_empty()));
    let held_out =
        if judged { dir_steering::separation(&direction, &good_held_out, &bad_held_out) } else { Vec::new() };
    arguments.output.write(&direction)?;
    if arguments.json {
        let report = json!({
            "direction": direction,
            "content_sha256": direction.content_sha256(),
            "provenance": model.provenance(),
            "made_from": made_from,
            "held_out": held_out,
        });
        print_json(&report)?;
    } else {
        print(&separations(&made_from, &held_out))?;
    }
    eprintln!("wrote `{}`", arguments.output.out.display());
    Ok(ExitCode::SUCCESS)
}

fn separations(made_from: &[Separation], held_out: &[Separation]) -> String {
    let rows: Vec<Vec<String>> = made_from
        .iter()
        .enumerate()
        .map(|(i, made_from)| {
            let held_out = held_out.get(i);
            let number =
                |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
            vec![
                made_from.layer.to_string(),
                format!("{:.3}", made_from.auc),
                number(held_out.map(|s| s.auc)),
                number(held_out.map(|s| s.good_mean)),
                number(held_out.map(|s| s.bad_mean)),
            ]
        })
        .collect();
    let columns = ["layer", "AUC, made from", "AUC, held out", "good, held out", "bad, held out"];
    format!(
        "{}\nAUC: probability that a good prompt lies further along the direction than a bad one; 0.5 is chance.",
        table(&columns, 0, &rows)
    )
}

fn sweep(arguments: &SweepArguments) -> anyhow::Result<ExitCode> {
    let (direction, _) = dir_steering::open(&arguments.direction)?;
    let identity = ModelIdentity::open(arguments.model.path())?;
    let tokenizer = arguments.model.tokenizer()?;
    let text = read(&arguments.file)?;
    let from = format!("`{}`", arguments.file.display());
    let prompts = arguments.prompts.tokens(&tokenizer, &text, &from)?;
    let steering = |scale: f32| {
        let (ffn, attention) = if arguments.attn { (0.0, scale) } else { (scale, 0.0) };
        direction.for_model(&identity, ffn, attention, arguments.allow_other_checkpoint)
    };
    for &scale in &arguments.scales {
        steering(scale)?;
    }
    let mut model = arguments.model.open()?;
    let options =
        SweepOptions { scales: arguments.scales.clone(), n_tokens: arguments.tokens, end: tokenizer.eos() };
    let mut answers = Vec::new();
    let mut each = |row: &SweepRow, answer: &Generation| {
        eprintln!(
            "prompt {} of {}, scale {}: {} tokens",
            row.prompt + 1,
            prompts.len(),
            row.scale,
            row.length
        );
        answers.push(tokenizer.decode(&answer.tokens));
    };
    let rows = dir_steering::sweep(&mut model, &prompts, &options, &steering, &mut each)?;
    let means = means(&rows, &arguments.scales);
    if let Some(path) = &arguments.csv {
        write_text(path, &csv(&rows, &answers))?;
    }
    if let Some(path) = &arguments.svg {
        write_text(path, &chart(&means)?)?;
    }
    if arguments.json {
        print_json(
            &json!({ "provenance": model.provenance(), "means": means, "rows": rows, "answers": answers }),
        )?;
    } else {
        print(&mean_table(&means))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Means over the prompts.
#[derive(Debug, serde::Serialize)]
struct Mean {
    scale: f32,
    length: f64,
    ended: f64,
    repetition: f64,
    perplexity: f64,
    cosine_drift: f64,
}

fn means(rows: &[SweepRow], scales: &[f32]) -> Vec<Mean> {
    let of_scale = |&scale: &f32| {
        let rows: Vec<_> = rows.iter().filter(|row| row.scale == scale).collect();
        let mean = |value: &dyn Fn(&SweepRow) -> f64| {
            rows.iter().map(|row| value(row)).sum::<f64>() / rows.len().max(1) as f64
        };
        Mean {
            scale,
            length: mean(&|row| row.length as f64),
            ended: mean(&|row| f64::from(u8::from(row.ended))),
            repetition: mean(&|row| row.repetition),
            // The geometric mean: perplexities multiply.
            perplexity: mean(&|row| row.perplexity.ln()).exp(),
            cosine_drift: mean(&|row| row.cosine_drift),
        }
    };
    scales.iter().map(of_scale).collect()
}

fn mean_table(means: &[Mean]) -> String {
    let row = |mean: &Mean| {
        vec![
            format!("{}", mean.scale),
            format!("{:.1}", mean.length),
            format!("{:.0} %", 100.0 * mean.ended),
            format!("{:.1} %", 100.0 * mean.repetition),
            format!("{:.3}", mean.perplexity),
            format!("{:.4}", mean.cosine_drift),
        ]
    };
    let columns = ["scale", "length", "ended", "repetition", "perplexity", "cosine drift"];
    format!(
        "{}\nMeans over the prompts. Perplexity and drift are of the unsteered answer under the steered model.",
        table(&columns, 0, &means.iter().map(row).collect::<Vec<_>>())
    )
}

fn csv(rows: &[SweepRow], answers: &[String]) -> String {
    let mut text = "scale,prompt,length,ended,repetition,perplexity,cosine_drift,answer\n".to_owned();
    for (row, answer) in rows.iter().zip(answers) {
        let SweepRow { scale, prompt, length, ended, repetition, perplexity, cosine_drift } = row;
        let answer = answer.replace('"', "\"\"");
        let _ = writeln!(
            text,
            "{scale},{prompt},{length},{ended},{repetition:.4},{perplexity:.4},{cosine_drift:.6},\"{answer}\""
        );
    }
    text
}

/// Every measure as a share of its largest value, so that one picture shows them all.
fn chart(means: &[Mean]) -> anyhow::Result<String> {
    type Measure = (&'static str, fn(&Mean) -> f64);
    let measures: [Measure; 4] = [
        ("length", |mean| mean.length),
        ("repetition", |mean| mean.repetition),
        ("perplexity of the unsteered answer", |mean| mean.perplexity),
        ("cosine drift", |mean| mean.cosine_drift),
    ];
    let series = measures.map(|(name, value)| {
        let most = means.iter().map(value).fold(0.0, f64::max);
        let share = |mean: &Mean| (f64::from(mean.scale), if most > 0.0 { value(mean) / most } else { 0.0 });
        let mut points: Vec<_> = means.iter().map(share).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { name: format!("{name} (1 = {most:.3})"), points }
    });
    let chart = LineChart {
        title: "What the direction does".to_owned(),
        x_label: "scale".to_owned(),
        y_label: "share of the largest value".to_owned(),
        series: series.into(),
        ..LineChart::default()
    };
    Ok(chart.to_svg()?)
}

fn write_text(path: &Path, text: &str) -> anyhow::Result<()> {
    let context = || format!("cannot write `{}`", path.display());
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::NamedTempFile::new_in(folder).with_context(context)?;
    std::fs::write(file.path(), text).with_context(context)?;
    file.as_file().sync_all().with_context(context)?;
    file.persist(path).with_context(context)?;
    Ok(())
}

fn show(arguments: &ShowArguments) -> anyhow::Result<ExitCode> {
    let (direction, format) = dir_steering::open(&arguments.file)?;
    if let Some(model) = &arguments.model {
        direction.for_model(&ModelIdentity::open(model)?, 1.0, 0.0, false)?;
    }
    let layers = direction.layer_ids();
    if arguments.json {
        print_json(&json!({
            "file": arguments.file,
            "format": format.name(),
            "direction": direction,
            "layers": layers,
            "norms": layers.iter().map(|&layer| direction.norm(layer)).collect::<Vec<_>>(),
            "content_sha256": direction.content_sha256(),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let unknown = || "not stated".to_owned();
    let origin = &direction.origin;
    let operation = match direction.operation {
        Operation::Project => "project: y -= scale * v * (v . y)",
        Operation::Add => "add: y += scale * v",
    };
    let component = direction.component.map_or_else(unknown, |component| component.name().to_owned());
    let lengths = layers.iter().map(|&layer| direction.norm(layer));
    let (shortest, longest) =
        lengths.fold((f64::INFINITY, 0.0_f64), |(low, high), n| (low.min(n), high.max(n)));
    let total =
        if direction.states_n_layers { format!(" of {}", direction.layers.len()) } else { String::new() };
    let rows = [
        ("format", format.name().to_owned()),
        ("operation", operation.to_owned()),
        ("component", component),
        ("width", direction.width.to_string()),
        ("layers", format!("{}{total}: {layers:?}", layers.len())),
        ("lengths", format!("{shortest:.6} to {longest:.6}")),
        ("checkpoint", origin.label.clone().unwrap_or_else(unknown)),
        ("model sha256", origin.model_sha256.clone().unwrap_or_else(unknown)),
        ("method", origin.method.clone().unwrap_or_else(unknown)),
        ("contrast", origin.contrast.clone().unwrap_or_else(unknown)),
        ("content sha256", direction.content_sha256()),
    ];
    let lines: Vec<String> = rows.iter().map(|(name, value)| format!("{name:<15} {value}")).collect();
    print(&lines.join("\n"))?;
    Ok(ExitCode::SUCCESS)
}

fn convert(arguments: &ConvertArguments) -> anyhow::Result<ExitCode> {
    arguments.output.format()?;
    let (mut direction, _) = dir_steering::read(&arguments.file)?;
    if let Some(model) = &arguments.model {
        let identity = ModelIdentity::open(model)?;
        anyhow::ensure!(
            direction.layers.len() <= identity.n_layers && direction.width == identity.width,
            "`{}` covers {} layers of width {}, the model has {} of width {}",
            arguments.file.display(),
            direction.layers.len(),
            direction.width,
            identity.n_layers,
            identity.width
        );
        direction.layers.resize(identity.n_layers, Vec::new());
        direction.states_n_layers = true;
        direction.origin.label = direction.origin.label.or(identity.label);
    }
    if arguments.normalize {
        direction.normalize()?;
    }
    if let Some(range) = &arguments.layers {
        let (first, last) = layer_range(range)?;
        direction.keep_layers(first, last)?;
    }
    let operation = match arguments.operation.as_deref() {
        Some("add") => Operation::Add,
        Some(_) => Operation::Project,
        None => direction.operation,
    };
    if operation != direction.operation {
        direction = direction.reinterpret(operation, arguments.length)?;
        eprintln!("note: the vectors now mean something else: {}", operation_note(operation));
    }
    if let Some(component) = &arguments.component {
        direction.component = Component::from_name(component);
    }
    arguments.output.write(&direction)?;
    eprintln!("wrote `{}`", arguments.output.out.display());
    Ok(ExitCode::SUCCESS)
}

fn operation_note(operation: Operation) -> &'static str {
    match operation {
        Operation::Project => "they are projected out of a component, whatever lies along them",
        Operation::Add => "they are added to every token behind the layer, whatever it holds",
    }
}
