//! `quickstart`: the whole job on the nano model that ships inside, end to end, in one readable report.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use gguf_tools::build::{BuildOptions, build};
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::compare::{Comparison, compare};
use gguf_tools::gguf::Gguf;
use gguf_tools::importance::{ImportanceSource, NoImportance};
use gguf_tools::model::Family;
use gguf_tools::plan::{Plan, Provenance, Recipe, sha256_of_file};
use gguf_tools::progress::Silent;
use gguf_tools::source::{CheckpointSource, WeightSource};
use gguf_tools::verify::{VerifyReport, verify};
use imatrix::collect::{CollectOptions, DownInput, collect};
use imatrix::{Imatrix, Target};
use quality_testing::{Base, Interval};
use runner::{Model, Numerics, Options};
use serde_json::json;

use super::model::{sequences, tokenizer};
use super::plan::View;
use super::{print, print_json};
use crate::nano;
use crate::render::progress::interrupted;
use crate::render::table::table;
use crate::render::units;

/// What is built: its name, the recipe, and whether the collected importance is used. The first two are compared.
const BUILDS: [(&str, &str, bool); 4] =
    [("q2", "q2", false), ("q2-imatrix", "q2", true), ("q4", "q4", false), ("mxfp4", "mxfp4", false)];
/// Tokens of each kind of calibration text.
const CALIBRATION_TOKENS: usize = 4000;
/// The builds with and without importance are scored on so many times the text of the others: their difference is small.
const CLOSER_LOOK: usize = 2;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Keep the checkpoint and the files in this folder, which must not exist; else they are removed at the end.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Tokens of each kind of held-out text that the recipes are scored on; twice as many tell what importance is worth.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    tokens: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What came of one recipe.
struct Outcome {
    name: &'static str,
    plan: Plan,
    sha256: String,
    seconds: f64,
    verified: VerifyReport,
    compared: Comparison,
    /// Errors of the routed experts, weighted by what the held-out text multiplies them with.
    weighed: Comparison,
    /// On the text that all recipes are scored on.
    scored: Option<quality_testing::Comparison>,
    /// On more of it, where importance is judged.
    looked_at: Option<quality_testing::Comparison>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let temporary;
    let folder = if let Some(folder) = &arguments.dir {
        std::fs::create_dir(folder).with_context(|| format!("cannot make folder `{}`", folder.display()))?;
        folder.as_path()
    } else {
        temporary = tempfile::tempdir().context("cannot make a temporary folder")?;
        temporary.path()
    };
    let checkpoint = folder.join("nano");
    nano::write_checkpoint(&checkpoint)
        .with_context(|| format!("cannot write `{}`", checkpoint.display()))?;
    // Files are compared by float arithmetic alone: the official rounding would add its own noise.
    let options = Options { numerics: Numerics::Exact, ..Options::default() };
    let texts = first_tokens(&nano::HELD_OUT, &checkpoint, arguments.tokens.max(2))?;
    let calibration = first_tokens(&nano::CALIBRATION, &checkpoint, CALIBRATION_TOKENS)?;
    let model = Model::open(&checkpoint, options.clone())?;
    let importance = Importance {
        collected: collected(&model, &calibration, &folder.join("nano.imatrix.gguf"))?,
        held_out: collected(&model, &texts, &folder.join("nano.held-out.imatrix.gguf"))?,
    };
    let base = Base::new(&model, texts)?;
    let closer = first_tokens(&nano::HELD_OUT, &checkpoint, CLOSER_LOOK * arguments.tokens.max(2))?;
    let closer = Base::new(&model, closer)?;
    let source = CheckpointSource::new(Checkpoint::open(&checkpoint)?)?;
    let outcomes = BUILDS
        .into_iter()
        .map(|build| outcome(build, &source, folder, &importance, &base, &closer, &options))
        .collect::<anyhow::Result<Vec<_>>>()?;
    if arguments.json {
        print_json(&json!({
            "builds": outcomes.iter().map(json).collect::<Vec<_>>(),
            "importance": importance_json(&outcomes),
        }))?;
    } else {
        print(&report(&outcomes, &checkpoint, arguments.dir.is_some())?)?;
    }
    let sound = outcomes.iter().all(|o| o.verified.is_sound() && o.regenerates());
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Importance by calibration, and by the text that files are scored on, which only judges.
struct Importance {
    collected: Imatrix,
    held_out: Imatrix,
}

/// The importance of the routed experts over some sequences, written and read back.
fn collected(model: &Model, sequences: &[Vec<u32>], path: &Path) -> anyhow::Result<Imatrix> {
    let options = CollectOptions {
        dense: false,
        down_input: DownInput::Weighted,
        batch_tokens: 4096,
        state: None,
        save_every: usize::MAX,
        model_fingerprint: String::new(),
        datasets: vec!["nano".to_owned()],
        chunk_size: 512,
    };
    let collected = collect(model, sequences, &options, &mut |_| !interrupted())?;
    collected.imatrix.write(path, Target::Gguf, false)?;
    Ok(Imatrix::open(path)?)
}

/// The first tokens of each kind of text, in sequences of at most 512.
fn first_tokens(texts: &[(&str, &str)], checkpoint: &Path, n_tokens: usize) -> anyhow::Result<Vec<Vec<u32>>> {
    let tokenizer = tokenizer(checkpoint)?;
    let kinds = texts;
    let mut texts = Vec::new();
    for (_, text) in kinds {
        let mut left = n_tokens;
        for mut sequence in sequences(&tokenizer, text, 512)? {
            sequence.truncate(left);
            left -= sequence.len();
            texts.extend((sequence.len() > 1).then_some(sequence));
        }
    }
    Ok(texts)
}

fn outcome(
    (name, recipe, with_importance): (&'static str, &'static str, bool),
    source: &CheckpointSource,
    folder: &Path,
    importance: &Importance,
    base: &Base,
    closer: &Base,
    options: &Options,
) -> anyhow::Result<Outcome> {
    let started = Instant::now();
    let guide: &dyn ImportanceSource = if with_importance { &importance.collected } else { &NoImportance };
    let chosen = Recipe::built_in(recipe).context("a built-in recipe")?;
    let files = source.files().into_iter().map(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let sum = sha256_of_file(&path)
            .map_err(|(path, e)| anyhow::Error::new(e).context(path.display().to_string()));
        sum.map(|sum| (name, sum))
    });
    let provenance = Provenance {
        label: source.label(),
        revision: source.revision(),
        files: files.collect::<anyhow::Result<_>>()?,
        importance: guide.provenance(),
    };
    let mut metadata = source.metadata()?;
    provenance.add_to(&mut metadata, &chosen);
    let plan = Plan::new(source, &chosen, metadata)?;
    let path = folder.join(format!("nano-{name}.gguf"));
    let fresh = BuildOptions { overwrite: false, resume: false, importance_fallback: true };
    let built = build(&plan, source, guide, &path, fresh, &Silent)?;
    let seconds = started.elapsed().as_secs_f64();
    let verified = verify(&path, &Silent)?;
    let gguf = Gguf::open(&path)?;
    let compared = compare(&plan, source, guide, &gguf, &[], true, &Silent)?;
    let routed = plan.tensors.iter().filter(|t| t.spec.family.is_routed());
    let routed: Vec<_> = routed.map(|t| t.spec.gguf_name.clone()).collect();
    let weighed = compare(&plan, source, &importance.held_out, &gguf, &routed, false, &Silent)?;
    let model = Model::open(&path, options.clone())?;
    // The build with importance is only compared with its twin.
    let scored = if with_importance { None } else { Some(base.compare(&model)?) };
    let looked_at = if recipe == "q2" { Some(closer.compare(&model)?) } else { None };
    Ok(Outcome { name, plan, sha256: built.sha256, seconds, verified, compared, weighed, scored, looked_at })
}

impl Outcome {
    /// Whether every tensor could be made again byte for byte.
    fn regenerates(&self) -> bool {
        self.compared.tensors.iter().all(|t| t.differing_bytes == Some(0))
    }

    /// Mean relative squared error, as the held-out text weighs it, and alignment of the routed experts, weighted by
    /// their values.
    fn routed(&self) -> (f64, f64) {
        let mut sums = (0.0, 0.0, 0.0);
        for compared in &self.weighed.tensors {
            let n = compared.n_values as f64;
            sums = (sums.0 + n * compared.weighted_error, sums.1 + n * compared.alignment, sums.2 + n);
        }
        (sums.0 / sums.2, sums.1 / sums.2)
    }

    fn type_of(&self, family: Family) -> String {
        let totals = self.plan.family_totals();
        totals.iter().find(|t| t.family == family).map_or_else(String::new, |t| t.target_types.join(", "))
    }
}

fn json(outcome: &Outcome) -> serde_json::Value {
    json!({
        "build": outcome.name,
        "routed_weighted_error": outcome.routed().0,
        "file_bytes": outcome.plan.file_bytes(),
        "sha256": outcome.sha256,
        "seconds": outcome.seconds,
        "verify": outcome.verified,
        "compare": outcome.compared,
        "score": outcome.scored,
    })
}

/// What the collected importance is worth at the same size.
struct Gain<'a> {
    without: (&'a Outcome, &'a quality_testing::Comparison),
    with: (&'a Outcome, &'a quality_testing::Comparison),
    /// Divergence with importance minus that without, position by position.
    change: Interval,
    /// Tensors whose weighted error is smaller with importance.
    n_better: usize,
}

fn gain(outcomes: &[Outcome]) -> Option<Gain<'_>> {
    let [without, with, ..] = outcomes else { return None };
    let (without, with) = ((without, without.looked_at.as_ref()?), (with, with.looked_at.as_ref()?));
    let pairs = without.0.weighed.tensors.iter().zip(&with.0.weighed.tensors);
    let n_better = pairs.filter(|(without, with)| with.weighted_error < without.weighted_error).count();
    Some(Gain { without, with, change: with.1.kl_above(without.1), n_better })
}

fn importance_json(outcomes: &[Outcome]) -> serde_json::Value {
    let Some(gain) = gain(outcomes) else { return serde_json::Value::Null };
    let side = |(outcome, scored): (&Outcome, &quality_testing::Comparison)| json!({ "weighted_error": outcome.routed().0, "score": scored });
    json!({
        "without": side(gain.without),
        "with": side(gain.with),
        "kl_with_minus_without": gain.change,
        "tensors_better": gain.n_better,
        "tensors": gain.with.0.weighed.tensors.len(),
    })
}

fn importance_text(outcomes: &[Outcome]) -> String {
    let Some(gain) = gain(outcomes) else { return String::new() };
    let (error_without, error_with) = (gain.without.0.routed().0, gain.with.0.routed().0);
    let verdict = if gain.change.high < 0.0 {
        "better beyond the interval"
    } else if gain.change.low > 0.0 {
        "WORSE beyond the interval"
    } else {
        "not told apart by so little text; --tokens gives more"
    };
    let rows = [
        super::score::row(gain.without.0.name, gain.without.1, None),
        super::score::row(gain.with.0.name, gain.with.1, Some(gain.without.1)),
    ];
    format!(
        "\n\nImportance collected from calibration text, against the energy of the weights, at the same size:\n\n{}\n\n\
         expert error {error_with:.5} instead of {error_without:.5} ({:+.1} %, {} of {} tensors better); KL {:+.1} %: {verdict}\n",
        table(&super::score::COLUMNS, 1, &rows),
        100.0 * (error_with / error_without - 1.0),
        gain.n_better,
        gain.with.0.weighed.tensors.len(),
        100.0 * (gain.with.1.kl.mean / gain.without.1.kl.mean - 1.0),
    )
}

fn report(outcomes: &[Outcome], checkpoint: &Path, kept: bool) -> anyhow::Result<String> {
    let mut text = format!(
        "A trained nano DeepSeek V4 in the official layout (FP8, FP4, three kinds of layer, 16 experts): {}\n\n",
        checkpoint.display()
    );
    if let Some(first) = outcomes.first() {
        let view = View::new(&first.plan, rayon::current_num_threads());
        text += &view.text(Some(checkpoint), false)?;
    }
    let rows: Vec<_> = outcomes
        .iter()
        .map(|o| {
            let (error, alignment) = o.routed();
            vec![
                o.name.to_owned(),
                o.type_of(Family::RoutedGate),
                o.type_of(Family::RoutedDown),
                units::bytes(o.plan.file_bytes()),
                format!("{error:.5}"),
                format!("{alignment:.4}"),
                if o.verified.is_sound() { "sound" } else { "BROKEN" }.to_owned(),
                if o.regenerates() { "equal" } else { "DIFFER" }.to_owned(),
                units::seconds(o.seconds),
            ]
        })
        .collect();
    let columns =
        ["build", "gate/up", "down", "file", "expert error", "alignment", "verify", "made again", "built in"];
    text += "\n\n";
    text += &table(&columns, 3, &rows);
    text += "\n\nexpert error: squared error of the routed experts relative to their squares, weighted by what the held-out text multiplies\nthem with; alignment: 1 where weights are not shrunk\n\n";
    let mut rows = Vec::new();
    let mut above = None;
    for (name, scored) in outcomes.iter().filter_map(|o| Some((o.name, o.scored.as_ref()?))) {
        rows.push(super::score::row(name, scored, above));
        above = Some(scored);
    }
    text += &table(&super::score::COLUMNS, 1, &rows);
    text += "\n\nHeld-out prose, code and tables against the source (nats, 95 % intervals); every file was run by the CPU runner.";
    text += &importance_text(outcomes);
    for outcome in outcomes {
        text += &format!("\n{} sha256 {}", outcome.name, outcome.sha256);
    }
    if let Some(runtimes) = outcomes.first().map(|o| &o.verified.runtimes) {
        for runtime in runtimes {
            let verdict = if runtime.loads {
                "loads".to_owned()
            } else {
                format!("does not load: {}", runtime.reasons[0])
            };
            text += &format!("\n{}: {verdict}", runtime.name);
        }
    }
    text += if kept { "\nThe files are kept." } else { "\nThe files were removed; --dir DIR keeps them." };
    Ok(text)
}
