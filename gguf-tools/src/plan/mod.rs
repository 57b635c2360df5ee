//! What each tensor becomes, where it will lie and how large the file will be. No tensor data is read.
//!
//! Dry run, space check, resume, header and build all come from one [`Plan`]: they cannot disagree.

mod metadata;
mod part;
mod recipe;

use serde::Serialize;

pub(crate) use metadata::hex;
pub use metadata::{Provenance, sha256_of_file};
pub use part::PlanPart;
pub use recipe::{BUILT_IN, Recipe, Rule};

use crate::block::{BlockType, Objective};
use crate::gguf::{GgufError, Layout, Metadata, NewTensor};
use crate::model::{Family, TensorSpec};
use crate::source::{SetAside, SourceError, WeightSource};

/// Why a plan could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The recipe has mistakes; all of them are listed.
    #[error("the recipe cannot be used\n  {}", problems.join("\n  "))]
    Recipe {
        /// One line a mistake.
        problems: Vec<String>,
    },
    /// Tensors cannot become what the recipe asks for; all of them are listed.
    #[error("the recipe does not fit the model\n  {}", problems.join("\n  "))]
    Targets {
        /// One line a tensor.
        problems: Vec<String>,
    },
    /// The source cannot be used.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The file would break a rule of the container.
    #[error(transparent)]
    Layout(#[from] GgufError),
    /// The model has no such part.
    #[error("{0}")]
    Part(String),
}

/// How the bytes of a tensor come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Conversion {
    /// The values are carried over exactly: a copy, or a repack such as FP4 to MXFP4.
    Exact,
    /// Values are widened to f32 and stored in the target type.
    Quantize,
}

/// One tensor of the file to be.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlannedTensor {
    /// Name, family, shape and source names.
    #[serde(flatten)]
    pub spec: TensorSpec,
    /// Type of the source, as users call it: `FP4`, `BF16`, `MXFP4`.
    pub source_type: String,
    /// Bytes of the source, scales included.
    pub source_bytes: u64,
    /// Type in the file.
    #[serde(serialize_with = "as_name")]
    pub target: BlockType,
    /// How the bytes come about.
    pub conversion: Conversion,
    /// Where the data begins in the file.
    pub offset_bytes: u64,
    /// Size of the data, without padding.
    pub n_bytes: u64,
}

fn as_name<S: serde::Serializer>(target: &BlockType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(target.name())
}

impl PlannedTensor {
    /// Number of matrices stacked in the tensor: the experts of a routed one, else 1.
    pub fn n_matrices(&self) -> usize {
        if self.spec.shape.len() == 3 { self.spec.shape[0] as usize } else { 1 }
    }

    /// Rows of one matrix.
    pub fn n_rows(&self) -> usize {
        match self.spec.shape.as_slice() {
            [.., rows, _] => *rows as usize,
            _ => 1,
        }
    }

    /// Values of one row.
    pub fn n_columns(&self) -> usize {
        self.spec.shape.last().map_or(1, |&columns| columns as usize)
    }

    /// Bytes of one row in the file.
    pub fn row_bytes(&self) -> usize {
        self.n_bytes as usize / (self.n_matrices() * self.n_rows()).max(1)
    }
}

/// A tensor that does not get the type the recipe asks for, because its rows are no whole number of blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fallback {
    /// GGUF name.
    pub tensor: String,
    /// Values of a row.
    pub n_columns: u64,
    /// What the recipe asks for.
    pub wanted: String,
    /// What the tensor gets.
    pub used: String,
}

/// Totals of one family of tensors.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FamilyTotal {
    /// Which tensors.
    pub family: Family,
    /// How many.
    pub n_tensors: usize,
    /// Types in the source, as users call them.
    pub source_types: Vec<String>,
    /// Types in the file.
    pub target_types: Vec<String>,
    /// Values in all.
    pub n_values: u64,
    /// Bytes in the source.
    pub source_bytes: u64,
    /// Bytes in the file, without padding.
    pub n_bytes: u64,
    /// Bits per value in the file.
    pub bits_per_value: f64,
}

/// Everything about the file to be, from headers alone.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The recipe it was made from.
    pub recipe: Recipe,
    /// Objective of the quantizers.
    pub objective: Objective,
    /// The tensors, in file order.
    pub tensors: Vec<PlannedTensor>,
    /// Tensors that get another type than the recipe asks for.
    pub fallbacks: Vec<Fallback>,
    /// Rules of the recipe that match no tensor whose type can be chosen, by number from 1.
    pub idle_rules: Vec<usize>,
    /// Tensors of the source that stay out of the file: drafting heads.
    pub set_aside: SetAside,
    /// Where everything lies.
    pub layout: Layout,
    /// Which part of the whole file this is; `None`: all of it.
    pub part: Option<PlanPart>,
}

impl Plan {
    /// Decides every tensor.
    ///
    /// `metadata` is what the file will carry; see [`Provenance`] for what a build adds to it.
    ///
    /// # Errors
    /// [`PlanError`] with every problem of the recipe or of the tensors at once.
    pub fn new(source: &dyn WeightSource, recipe: &Recipe, metadata: Metadata) -> Result<Self, PlanError> {
        let specs = source.tensors();
        let n_layers = specs.iter().filter_map(|s| s.layer).max().map_or(1, |last| last + 1);
        let compiled = recipe.compile(n_layers).map_err(|problems| PlanError::Recipe { problems })?;
        let idle_rules = compiled.idle_rules(specs);
        let mut chosen = Vec::with_capacity(specs.len());
        let mut fallbacks = Vec::new();
        let mut problems = Vec::new();
        for spec in specs {
            let wanted = compiled.target(spec);
            match fitting_type(spec, wanted, recipe.fallback) {
                Ok(used) => {
                    if used != wanted {
                        fallbacks.push(Fallback {
                            tensor: spec.gguf_name.clone(),
                            n_columns: spec.columns(),
                            wanted: wanted.name().to_owned(),
                            used: used.name().to_owned(),
                        });
                    }
                    chosen.push(used);
                }
                Err(problem) => problems.push(problem),
            }
        }
        if problems.is_empty() {
            problems = source.refusals(&specs.iter().zip(chosen.iter().copied()).collect::<Vec<_>>());
        }
        if !problems.is_empty() {
            return Err(PlanError::Targets { problems });
        }
        let new_tensors = specs.iter().zip(&chosen).map(|(spec, &block_type)| NewTensor {
            name: spec.gguf_name.clone(),
            block_type,
            shape: spec.shape.clone(),
        });
        let layout = Layout::new(metadata, new_tensors.collect(), recipe.alignment)?;
        let tensors = specs
            .iter()
            .zip(layout.tensors())
            .map(|(spec, placed)| PlannedTensor {
                source_type: source.type_name(spec),
                source_bytes: source.n_bytes(spec),
                conversion: if source.is_exact(spec, placed.block_type) {
                    Conversion::Exact
                } else {
                    Conversion::Quantize
                },
                spec: spec.clone(),
                target: placed.block_type,
                offset_bytes: placed.offset_bytes,
                n_bytes: placed.n_bytes,
            })
            .collect();
        Ok(Self {
            recipe: recipe.clone(),
            objective: recipe.objective().unwrap_or_default(),
            tensors,
            fallbacks,
            idle_rules,
            set_aside: source.set_aside(),
            layout,
            part: None,
        })
    }

    /// SHA-256 of the file's header: of everything that it says about itself.
    pub fn header_sha256(&self) -> String {
        use sha2::{Digest, Sha256};
        hex(&Sha256::digest(self.layout.header_bytes()))
    }

    /// Size of the finished file.
    pub fn file_bytes(&self) -> u64 {
        self.layout.file_bytes()
    }

    /// Bytes of all tensors, without header and padding.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.n_bytes).sum()
    }

    /// Totals by family, in the order of [`Family::all`].
    pub fn family_totals(&self) -> Vec<FamilyTotal> {
        let total = |family: Family| {
            let of_family: Vec<_> = self.tensors.iter().filter(|t| t.spec.family == family).collect();
            let n_values: u64 = of_family.iter().map(|t| t.spec.shape.iter().product::<u64>()).sum();
            let n_bytes: u64 = of_family.iter().map(|t| t.n_bytes).sum();
            FamilyTotal {
                family,
                n_tensors: of_family.len(),
                source_types: distinct(of_family.iter().map(|t| t.source_type.clone())),
                target_types: distinct(of_family.iter().map(|t| t.target.name().to_owned())),
                n_values,
                source_bytes: of_family.iter().map(|t| t.source_bytes).sum(),
                n_bytes,
                bits_per_value: if n_values == 0 { 0.0 } else { 8.0 * n_bytes as f64 / n_values as f64 },
            }
        };
        Family::all().map(total).filter(|t| t.n_tensors > 0).collect()
    }

    /// Anonymous memory that a build with `n_threads` threads needs at most, by the sizes of its buffers.
    pub fn peak_memory_bytes(&self, n_threads: usize) -> u64 {
        crate::build::peak_memory_bytes(self, n_threads)
    }
}

fn distinct(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for name in names {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    all
}

/// The type itself if the rows fit it; else `Q8_0`, else `F16`, if a fallback is allowed.
///
/// Both hold any weights at least as well as the types they stand in for, so a plan never gets worse by one.
fn fitting_type(spec: &TensorSpec, wanted: BlockType, fallback: bool) -> Result<BlockType, String> {
    let columns = spec.columns();
    let writable = wanted == BlockType::I32
        || wanted.format().is_some_and(|f| f.quantizer(crate::block::Guide::default()).is_some());
    if !writable || (wanted == BlockType::I32) != (spec.family == Family::RoutingTable) {
        let types: Vec<_> = writable_types().map(BlockType::name).collect();
        return Err(format!(
            "tensor `{}`: {wanted} cannot be written here; expected one of {}",
            spec.gguf_name,
            types.join(", ")
        ));
    }
    if wanted.row_bytes(columns).is_some() {
        return Ok(wanted);
    }
    if !fallback {
        return Err(format!(
            "tensor `{}`: rows of {columns} values are no whole number of {wanted} blocks of {}; choose another type or allow fallbacks",
            spec.gguf_name,
            wanted.values_per_block()
        ));
    }
    let fits = BlockType::Q8_0.row_bytes(columns).is_some();
    Ok(if fits { BlockType::Q8_0 } else { BlockType::F16 })
}

/// The types that can be targets of weights.
pub fn writable_types() -> impl Iterator<Item = BlockType> {
    BlockType::all()
        .filter(|t| t.format().is_some_and(|f| f.quantizer(crate::block::Guide::default()).is_some()))
}
