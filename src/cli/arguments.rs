//! Arguments that several commands share: where weights come from, and what becomes of them.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use gguf_tools::block::BlockType;
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::gguf::{Gguf, Metadata, Value};
use gguf_tools::importance::{ImportanceSource, NoImportance};
use gguf_tools::model::Family;
use gguf_tools::plan::{Plan, Provenance, Recipe, Rule, sha256_of_file};
use gguf_tools::source::{CheckpointSource, GgufSource, WeightSource};
use imatrix::Imatrix;

use super::UsageError;
use super::remote::{self, Replica};

/// Where the weights come from.
#[derive(Debug, Args)]
#[group(skip)]
pub(crate) struct SourceArguments {
    /// Folder of the official checkpoint: config.json, tokenizer.json, safetensors shards.
    #[arg(long, value_name = "DIR", conflicts_with = "from")]
    hf: Option<PathBuf>,
    /// A GGUF file (any shard of a split one) to requantize instead.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Accept source tensors that are already quantized below the released precision.
    #[arg(long)]
    allow_requantize: bool,
    /// Label of the checkpoint, recorded in the file; taken from the folder's name if left out.
    #[arg(long, value_name = "NAME")]
    label: Option<String>,
}

impl SourceArguments {
    pub(crate) fn open(&self) -> anyhow::Result<Box<dyn WeightSource>> {
        if let Some(name) = [&self.hf, &self.from].into_iter().flatten().find(|path| remote::is_remote(path))
        {
            let name = name.display();
            return Err(UsageError(format!(
                "only `plan` and `inspect` read from the hub, and only headers\n  fetch it first: ggsmith download {name}"
            ))
            .into());
        }
        Ok(match (&self.hf, &self.from) {
            (Some(folder), _) => open_checkpoint(folder)?,
            (None, Some(file)) => self.open_gguf(file)?,
            (None, None) => return Err(UsageError("give --hf DIR or --from FILE".to_owned()).into()),
        })
    }

    fn open_gguf(&self, file: &Path) -> anyhow::Result<Box<dyn WeightSource>> {
        Ok(Box::new(GgufSource::new(Gguf::open(file)?, self.allow_requantize)?))
    }

    /// Opens the source for its headers only, which may lie on the hub: `name`, or what the flags say. The copy of the headers
    /// must live as long as the source.
    pub(crate) fn open_headers(
        &self,
        name: Option<&Path>,
    ) -> anyhow::Result<(Box<dyn WeightSource>, Option<Replica>)> {
        if name.is_some() && (self.hf.is_some() || self.from.is_some()) {
            return Err(UsageError("give hf:ORG/NAME or --hf or --from, not two of them".to_owned()).into());
        }
        let checkpoint = name.or(self.hf.as_deref()).filter(|name| remote::is_remote(name));
        let file = self.from.as_deref().filter(|name| remote::is_remote(name));
        let replica = match (checkpoint, file) {
            (Some(name), _) => remote::checkpoint(name)?,
            (None, Some(name)) => remote::gguf(name)?,
            (None, None) if name.is_none() => return Ok((self.open()?, None)),
            (None, None) => {
                return Err(
                    UsageError("a source by itself is hf:ORG/NAME; for folders use --hf".to_owned()).into()
                );
            }
        };
        let opened = match checkpoint {
            Some(_) => open_checkpoint(&replica.path),
            None => self.open_gguf(&replica.path),
        };
        let source = opened.map_err(|error| replica.rename_error(&error))?;
        Ok((source, Some(replica)))
    }

    /// The folder or file.
    pub(crate) fn path(&self) -> &std::path::Path {
        self.hf.as_deref().or(self.from.as_deref()).unwrap_or(std::path::Path::new(""))
    }

    pub(crate) fn label(&self, source: &dyn WeightSource) -> String {
        self.label.clone().unwrap_or_else(|| source.label())
    }
}

fn open_checkpoint(folder: &Path) -> anyhow::Result<Box<dyn WeightSource>> {
    Ok(Box::new(CheckpointSource::new(Checkpoint::open(folder)?)?))
}

/// Heading of the recipe's flags in the help. It would hold for all flags that follow: groups with headings come last.
pub(crate) const RECIPE_HEADING: &str = "What tensors become";

/// What becomes of the tensors.
#[derive(Debug, Args)]
#[command(next_help_heading = RECIPE_HEADING)]
pub(crate) struct RecipeArguments {
    /// q2, q2-q4, q4, mxfp4, or a TOML file as `plan --emit-recipe` prints it.
    #[arg(long, value_name = "NAME|FILE", default_value = "q2")]
    recipe: String,
    /// Type of every tensor whose name matches; may repeat, the last match decides.
    #[arg(long = "tensor-type", value_name = "REGEX=TYPE", alias = "custom-q", value_delimiter = ',')]
    tensor_types: Vec<String>,
    /// Type of all routed experts.
    #[arg(long, value_name = "TYPE", visible_alias = "routed")]
    experts: Option<BlockType>,
    /// Type of the routed experts' gate projections.
    #[arg(long, value_name = "TYPE", visible_alias = "routed-gate")]
    routed_w1: Option<BlockType>,
    /// Type of the routed experts' down projections.
    #[arg(long, value_name = "TYPE", visible_alias = "routed-down")]
    routed_w2: Option<BlockType>,
    /// Type of the routed experts' up projections.
    #[arg(long, value_name = "TYPE", visible_alias = "routed-up")]
    routed_w3: Option<BlockType>,
    /// Type of the attention projections.
    #[arg(long, value_name = "TYPE")]
    attention_proj: Option<BlockType>,
    /// Type of the attention projections, compressors and indexers.
    #[arg(long, value_name = "TYPE")]
    attention: Option<BlockType>,
    /// Type of the shared experts.
    #[arg(long, value_name = "TYPE")]
    shared: Option<BlockType>,
    /// Type of the token embedding.
    #[arg(long, value_name = "TYPE", visible_alias = "token-embedding-type")]
    embedding: Option<BlockType>,
    /// Type of the output matrix.
    #[arg(long, value_name = "TYPE", visible_alias = "output-tensor-type")]
    output: Option<BlockType>,
    /// Keep the output matrix in BF16, as released.
    #[arg(long, conflicts_with = "output")]
    leave_output_tensor: bool,
    /// Type of the other dense matrices: routers, compressors, indexers, hyper-connections.
    #[arg(long, value_name = "TYPE")]
    dense: Option<BlockType>,
    /// Refuse a plan in which rows do not fit their type, instead of taking a wider type.
    #[arg(long)]
    no_fallback: bool,
    /// Alignment of tensors in bytes: a power of two from 8 to 65536.
    #[arg(long, value_name = "BYTES")]
    alignment: Option<u32>,
    /// Which weighted error the quantizers minimise.
    #[arg(long, value_name = "NAME", value_parser = ["importance", "ggml", "flat"])]
    objective: Option<String>,
    /// Factor on the stored scales that undoes the shrinkage of the fit.
    #[arg(long, value_name = "FACTOR")]
    scale_gain: Option<f32>,
    /// Set or replace a metadata value; TYPE is str, bool, u32, i32, u64, i64 or f32.
    #[arg(long = "override-kv", value_name = "KEY=TYPE:VALUE")]
    override_kv: Vec<String>,
}

/// A built-in recipe, or that of a file.
pub(crate) fn recipe_named(name: &str) -> anyhow::Result<Recipe> {
    if let Some(recipe) = Recipe::built_in(name) {
        return Ok(recipe);
    }
    let text = std::fs::read_to_string(name).with_context(|| {
        let names: Vec<_> = gguf_tools::plan::BUILT_IN.iter().map(|(name, _)| *name).collect();
        format!("`{name}` is neither a recipe ({}) nor a readable file", names.join(", "))
    })?;
    Recipe::from_toml(&text).with_context(|| format!("in recipe file `{name}`"))
}

impl RecipeArguments {
    pub(crate) fn recipe(&self) -> anyhow::Result<Recipe> {
        let mut recipe = recipe_named(&self.recipe)?;
        let mut set = |families: &[Family], target: Option<BlockType>| {
            for (family, target) in families.iter().zip(std::iter::repeat(target)) {
                if let Some(target) = target {
                    recipe.types.insert(family.name().to_owned(), target.name().to_owned());
                    // A flag for a family replaces the recipe's exceptions for it as well.
                    for rule in &mut recipe.rules {
                        rule.families.retain(|name| name != family.name());
                    }
                    recipe.rules.retain(|rule| rule.tensor.is_some() || !rule.families.is_empty());
                }
            }
        };
        set(&[Family::Router, Family::Compressor, Family::Indexer, Family::HyperConnection], self.dense);
        set(&[Family::Attention, Family::Compressor, Family::Indexer], self.attention);
        set(&[Family::Attention], self.attention_proj);
        set(&Family::ROUTED, self.experts);
        set(&[Family::RoutedGate], self.routed_w1);
        set(&[Family::RoutedDown], self.routed_w2);
        set(&[Family::RoutedUp], self.routed_w3);
        set(&[Family::SharedExpert], self.shared);
        set(&[Family::Embedding], self.embedding);
        set(&[Family::Output], self.output.or(self.leave_output_tensor.then_some(BlockType::Bf16)));
        for text in &self.tensor_types {
            let (pattern, target) = text
                .rsplit_once('=')
                .ok_or_else(|| UsageError(format!("--tensor-type `{text}`: expected REGEX=TYPE")))?;
            let target = target.parse().map_err(|e| UsageError(format!("--tensor-type `{text}`: {e}")))?;
            recipe.rules.push(Rule::for_tensors(pattern, target));
        }
        recipe.fallback &= !self.no_fallback;
        recipe.alignment = self.alignment.unwrap_or(recipe.alignment);
        recipe.objective = self.objective.clone().unwrap_or(recipe.objective);
        recipe.scale_gain = self.scale_gain.or(recipe.scale_gain);
        Ok(recipe)
    }

    /// Applies `--override-kv`.
    pub(crate) fn override_metadata(&self, metadata: &mut Metadata) -> Result<(), UsageError> {
        for text in &self.override_kv {
            let wrong = || UsageError(format!("--override-kv `{text}`: expected KEY=TYPE:VALUE"));
            let (key, typed) = text.split_once('=').ok_or_else(wrong)?;
            let (kind, value) = typed.split_once(':').ok_or_else(wrong)?;
            let bad = |e: &dyn std::fmt::Display| UsageError(format!("--override-kv `{text}`: {e}"));
            let value = match kind {
                "str" => Value::String(value.to_owned()),
                "bool" => Value::Bool(value.parse().map_err(|e| bad(&e))?),
                "u32" => Value::U32(value.parse().map_err(|e| bad(&e))?),
                "i32" => Value::I32(value.parse().map_err(|e| bad(&e))?),
                "u64" => Value::U64(value.parse().map_err(|e| bad(&e))?),
                "i64" => Value::I64(value.parse().map_err(|e| bad(&e))?),
                "f32" => Value::F32(value.parse().map_err(|e| bad(&e))?),
                _ => return Err(wrong()),
            };
            metadata.set(key, value);
        }
        Ok(())
    }
}

/// What to do where an importance matrix knows nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Missing {
    /// Stop and say which experts are missing.
    Error,
    /// Use the energy of the weights, or no weights, and say so in the report.
    Fallback,
}

/// Importance of input columns.
#[derive(Debug, Args)]
#[command(next_help_heading = "Importance")]
pub(crate) struct ImportanceArguments {
    /// Importance matrix, legacy or GGUF; told apart by content.
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Where the matrix has no usable entry for a tensor or expert.
    #[arg(long, value_name = "WHAT", default_value = "fallback", requires = "imatrix")]
    imatrix_missing: Missing,
    /// Make every gap and oddity of the matrix an error.
    #[arg(long, requires = "imatrix")]
    imatrix_strict: bool,
}

impl ImportanceArguments {
    pub(crate) fn open(&self) -> anyhow::Result<Option<Imatrix>> {
        Ok(self.imatrix.as_deref().map(Imatrix::open).transpose()?)
    }

    pub(crate) fn fallback_allowed(&self) -> bool {
        self.imatrix_missing == Missing::Fallback && !self.imatrix_strict
    }

    pub(crate) fn strict(&self) -> bool {
        self.imatrix_strict
    }

    pub(crate) fn missing(&self) -> Missing {
        self.imatrix_missing
    }
}

/// The matrix as a source, or the source that knows nothing.
pub(crate) fn importance_of(matrix: Option<&Imatrix>) -> &dyn ImportanceSource {
    match matrix {
        Some(matrix) => matrix,
        None => &NoImportance,
    }
}

/// The plan of a build. `hash_files`: whether to read all source files for their SHA-256, which a dry run does not.
pub(crate) fn make_plan(
    source: &dyn WeightSource,
    recipe: &RecipeArguments,
    label: String,
    matrix: Option<&Imatrix>,
    hash_files: bool,
) -> anyhow::Result<Plan> {
    make_plan_with(source, recipe, label, matrix, hash_files, &Metadata::default())
}

/// [`make_plan`] with more metadata.
pub(crate) fn make_plan_with(
    source: &dyn WeightSource,
    recipe: &RecipeArguments,
    label: String,
    matrix: Option<&Imatrix>,
    hash_files: bool,
    more: &Metadata,
) -> anyhow::Result<Plan> {
    use rayon::prelude::*;
    let files = source.files();
    let sums: Vec<_> = files
        .par_iter()
        .map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // A SHA-256 has 64 digits whatever it is, so the planned size is exact without one.
            let sum = if hash_files { sha256_of_file(path) } else { Ok("0".repeat(64)) };
            sum.map(|sum| (name, sum)).map_err(|(path, e)| {
                anyhow::Error::new(e).context(format!("cannot read `{}`", path.display()))
            })
        })
        .collect::<anyhow::Result<_>>()?;
    let provenance = Provenance {
        label,
        revision: source.revision(),
        files: sums,
        importance: importance_of(matrix).provenance(),
    };
    let chosen = recipe.recipe()?;
    let mut metadata = source.metadata()?;
    provenance.add_to(&mut metadata, &chosen);
    for (key, value) in more.iter() {
        metadata.set(key, value.clone());
    }
    recipe.override_metadata(&mut metadata)?;
    Ok(Plan::new(source, &chosen, metadata)?)
}
