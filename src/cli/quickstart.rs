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
use gguf_tools::importance::NoImportance;
use gguf_tools::model::Family;
use gguf_tools::plan::{Plan, Provenance, Recipe, sha256_of_file};
use gguf_tools::progress::Silent;
use gguf_tools::source::{CheckpointSource, WeightSource};
use gguf_tools::verify::{VerifyReport, verify};
use quality_testing::Base;
use runner::{Model, Numerics, Options};
use serde_json::json;

use super::model::{sequences, tokenizer};
use super::plan::View;
use super::{print, print_json};
use crate::nano;
use crate::render::table::table;
use crate::render::units;

/// The recipes that are shown.
const RECIPES: [&str; 3] = ["q2", "q4", "mxfp4"];

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Keep the checkpoint and the files in this folder, which must not exist; else they are removed at the end.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Tokens of each kind of held-out text that the files are scored on.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    tokens: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// What came of one recipe.
struct Outcome {
    recipe: &'static str,
    plan: Plan,
    sha256: String,
    seconds: f64,
    verified: VerifyReport,
    compared: Comparison,
    scored: quality_testing::Comparison,
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
    let texts = held_out(&checkpoint, arguments.tokens.max(2))?;
    let base = Base::new(&Model::open(&checkpoint, options.clone())?, texts)?;
    let source = CheckpointSource::new(Checkpoint::open(&checkpoint)?)?;
    let outcomes = RECIPES
        .into_iter()
        .map(|recipe| outcome(recipe, &source, folder, &base, &options))
        .collect::<anyhow::Result<Vec<_>>>()?;
    if arguments.json {
        print_json(&outcomes.iter().map(json).collect::<Vec<_>>())?;
    } else {
        print(&report(&outcomes, &checkpoint, arguments.dir.is_some())?)?;
    }
    let sound = outcomes.iter().all(|o| o.verified.is_sound() && o.regenerates());
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The first tokens of each kind of held-out text, in sequences of at most 512.
fn held_out(checkpoint: &Path, n_tokens: usize) -> anyhow::Result<Vec<Vec<u32>>> {
    let tokenizer = tokenizer(checkpoint)?;
    let mut texts = Vec::new();
    for (_, text) in nano::HELD_OUT {
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
    recipe: &'static str,
    source: &CheckpointSource,
    folder: &Path,
    base: &Base,
    options: &Options,
) -> anyhow::Result<Outcome> {
    let started = Instant::now();
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
        importance: None,
    };
    let mut metadata = source.metadata()?;
    provenance.add_to(&mut metadata, &chosen);
    let plan = Plan::new(source, &chosen, metadata)?;
    let path = folder.join(format!("nano-{recipe}.gguf"));
    let fresh = BuildOptions { overwrite: false, resume: false, importance_fallback: true };
    let built = build(&plan, source, &NoImportance, &path, fresh, &Silent)?;
    let seconds = started.elapsed().as_secs_f64();
    let verified = verify(&path, &Silent)?;
    let compared = compare(&plan, source, &NoImportance, &Gguf::open(&path)?, &[], true, &Silent)?;
    let scored = base.compare(&Model::open(&path, options.clone())?)?;
    Ok(Outcome { recipe, plan, sha256: built.sha256, seconds, verified, compared, scored })
}

impl Outcome {
    /// Whether every tensor could be made again byte for byte.
    fn regenerates(&self) -> bool {
        self.compared.tensors.iter().all(|t| t.differing_bytes == Some(0))
    }

    /// Mean relative squared error and alignment of the routed experts, weighted by their values.
    fn routed(&self) -> (f64, f64) {
        let routed =
            self.compared.tensors.iter().zip(&self.plan.tensors).filter(|(_, t)| t.spec.family.is_routed());
        let mut sums = (0.0, 0.0, 0.0);
        for (compared, _) in routed {
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
        "recipe": outcome.recipe,
        "file_bytes": outcome.plan.file_bytes(),
        "sha256": outcome.sha256,
        "seconds": outcome.seconds,
        "verify": outcome.verified,
        "compare": outcome.compared,
        "score": outcome.scored,
    })
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
                o.recipe.to_owned(),
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
    let columns = [
        "recipe",
        "gate/up",
        "down",
        "file",
        "expert error",
        "alignment",
        "verify",
        "made again",
        "built in",
    ];
    text += "\n\n";
    text += &table(&columns, 3, &rows);
    text += "\n\nexpert error: squared error of the routed experts relative to their squares; alignment: 1 where weights are not shrunk\n\n";
    let above = std::iter::once(None).chain(outcomes.iter().map(|o| Some(&o.scored)));
    let rows: Vec<_> =
        outcomes.iter().zip(above).map(|(o, above)| super::score::row(o.recipe, &o.scored, above)).collect();
    text += &table(&super::score::COLUMNS, 1, &rows);
    text += "\n\nHeld-out prose, code and tables against the source (nats, 95 % intervals); every file was run by the CPU runner.";
    for outcome in outcomes {
        text += &format!("\n{} sha256 {}", outcome.recipe, outcome.sha256);
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
