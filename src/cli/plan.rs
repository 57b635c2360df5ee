//! `plan`: what each tensor becomes and how large the file will be, without reading weights.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use gguf_tools::build::free_bytes;
use gguf_tools::plan::Plan;
use serde_json::json;

use super::arguments::{ImportanceArguments, RecipeArguments, SourceArguments, make_plan};
use super::{print, print_json};
use crate::render::table::table;
use crate::render::units;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A checkpoint on the hub, of which only the headers are read. --hf and --from take such names too.
    #[arg(value_name = "hf:ORG/NAME[@REV]")]
    remote: Option<PathBuf>,
    #[command(flatten)]
    source: SourceArguments,
    /// Where the file would go: its folder is asked for free space.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Threads that the build would use; all processors if left out.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// List every tensor.
    #[arg(long)]
    tensors: bool,
    /// Print the recipe as TOML and nothing else.
    #[arg(long)]
    emit_recipe: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    recipe: RecipeArguments,
    #[command(flatten)]
    importance: ImportanceArguments,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.emit_recipe {
        print(arguments.recipe.recipe()?.to_toml().trim_end())?;
        return Ok(ExitCode::SUCCESS);
    }
    // The copy of remote headers goes when it is dropped.
    let (source, _replica) = arguments.source.open_headers(arguments.remote.as_deref())?;
    let matrix = arguments.importance.open()?;
    let label = arguments.source.label(source.as_ref());
    let plan = make_plan(source.as_ref(), &arguments.recipe, label, matrix.as_ref(), false)?;
    super::quantize::warn_of(&plan);
    if let Some(matrix) = &matrix {
        super::quantize::report_coverage(&plan, matrix, &arguments.importance, arguments.json)?;
    }
    let view = View::new(&plan, arguments.threads.unwrap_or_else(rayon::current_num_threads));
    let out = arguments.out.as_deref();
    if arguments.json {
        print_json(&view.json(out)?)?;
    } else {
        print(&view.text(out, arguments.tensors)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A plan as it is printed.
pub(crate) struct View<'a> {
    pub plan: &'a Plan,
    pub threads: usize,
    /// Bytes of memory that calibration adds.
    pub more_memory: u64,
}

impl<'a> View<'a> {
    /// A plan without calibration.
    pub(crate) fn new(plan: &'a Plan, threads: usize) -> Self {
        Self { plan, threads, more_memory: 0 }
    }

    fn peak_memory_bytes(&self) -> u64 {
        self.plan.peak_memory_bytes(self.threads) + self.more_memory
    }

    pub(crate) fn json(&self, out: Option<&Path>) -> anyhow::Result<serde_json::Value> {
        let plan = self.plan;
        Ok(json!({
            "recipe": plan.recipe,
            "families": plan.family_totals(),
            "tensors": plan.tensors,
            "fallbacks": plan.fallbacks,
            "set_aside": plan.set_aside,
            "tensor_bytes": plan.tensor_bytes(),
            "file_bytes": plan.file_bytes(),
            "peak_memory_bytes": self.peak_memory_bytes(),
            "free_bytes": free_bytes(&folder(out))?,
        }))
    }

    pub(crate) fn text(&self, out: Option<&Path>, list_tensors: bool) -> anyhow::Result<String> {
        let plan = self.plan;
        let mut text = format!("recipe {}\n\n", plan.recipe.name);
        if list_tensors {
            text += &self.tensor_table();
            text += "\n\n";
        }
        text += &self.family_table();
        for fallback in &plan.fallbacks {
            text += &format!(
                "\nfallback: {} has rows of {} values: {} instead of {}",
                fallback.tensor, fallback.n_columns, fallback.used, fallback.wanted
            );
        }
        if plan.set_aside.n_tensors > 0 {
            text += &format!(
                "\n{} tensors ({}) stay out of the file: drafting heads and what no runtime uses",
                plan.set_aside.n_tensors,
                units::bytes(plan.set_aside.n_bytes)
            );
        }
        let free = free_bytes(&folder(out))?;
        text += &format!("\nfile size    {}", units::exact_bytes(plan.file_bytes()));
        text += &format!(
            "\npeak memory  {} at most with {} threads",
            units::bytes(self.peak_memory_bytes()),
            self.threads
        );
        text += &format!("\nfree space   {}", units::bytes(free));
        if free < plan.file_bytes() {
            text += &format!("  TOO LITTLE: {} more are needed", units::bytes(plan.file_bytes() - free));
        }
        Ok(text)
    }

    fn family_table(&self) -> String {
        let totals = self.plan.family_totals();
        let mut rows: Vec<_> = totals
            .iter()
            .map(|t| {
                vec![
                    t.family.name().replace('_', " "),
                    t.source_types.join(", "),
                    t.target_types.join(", "),
                    t.n_tensors.to_string(),
                    units::bytes(t.source_bytes),
                    units::bytes(t.n_bytes),
                    format!("{:.2}", t.bits_per_value),
                ]
            })
            .collect();
        let n_values: u64 = totals.iter().map(|t| t.n_values).sum();
        let n_bytes: u64 = totals.iter().map(|t| t.n_bytes).sum();
        rows.push(vec![
            "total".to_owned(),
            String::new(),
            String::new(),
            totals.iter().map(|t| t.n_tensors).sum::<usize>().to_string(),
            units::bytes(totals.iter().map(|t| t.source_bytes).sum()),
            units::bytes(n_bytes),
            format!("{:.2}", 8.0 * n_bytes as f64 / n_values.max(1) as f64),
        ]);
        table(&["family", "from", "to", "tensors", "from bytes", "to bytes", "bits/weight"], 3, &rows)
    }

    fn tensor_table(&self) -> String {
        let rows: Vec<_> = self
            .plan
            .tensors
            .iter()
            .map(|t| {
                let shape: Vec<_> = t.spec.shape.iter().map(u64::to_string).collect();
                vec![
                    t.spec.gguf_name.clone(),
                    shape.join(" x "),
                    t.source_type.clone(),
                    t.target.name().to_owned(),
                    t.n_bytes.to_string(),
                    t.offset_bytes.to_string(),
                ]
            })
            .collect();
        table(&["tensor", "shape", "from", "to", "bytes", "offset"], 4, &rows)
    }
}

/// The folder that a file of this name would lie in.
fn folder(out: Option<&Path>) -> PathBuf {
    match out.and_then(Path::parent) {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
