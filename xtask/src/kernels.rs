//! Compiles every CUDA kernel for every chip on a machine that needs no GPU, and keeps what a review wants to see:
//! registers, local and shared memory of each kernel.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, bail, ensure};
use flate2::{Compression, GzBuilder};
use runner::cuda::compiler::{Compiled, compile_with, compiler};
use runner::cuda::module::{CHIPS, Prebuilt, PrebuiltUnit, UNITS, Unit, prebuilt};
use serde::{Deserialize, Serialize};

use crate::cubin::{self, Needs};
use crate::report;

/// What sets NVRTC up.
const HOW_TO_INSTALL: &str = "`pip install --target target/python nvidia-cuda-nvrtc==13.0.88` and set LD_LIBRARY_PATH to \
                              target/python/nvidia/cu13/lib";
/// What to do when something that is committed is of other sources.
const AGAIN: &str = "run `cargo xtask kernels` and commit what it writes";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Compare with the committed manifest and embedded PTX instead of writing them.
    #[arg(long)]
    check: bool,
    /// Only this source (nothing is written).
    #[arg(long)]
    unit: Option<String>,
    /// Keep the cubins in this folder, to be looked at with nvdisasm (nothing is written).
    #[arg(long)]
    keep: Option<PathBuf>,
    /// Print what each kernel needs.
    #[arg(long, short)]
    verbose: bool,
}

/// What is committed about the kernels.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Manifest {
    nvrtc: String,
    units: BTreeMap<String, ManifestUnit>,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct ManifestUnit {
    hash: String,
    /// By chip, then by kernel.
    chips: BTreeMap<String, BTreeMap<String, Needs>>,
}

/// One source for one target.
struct Job<'a> {
    unit: &'a Unit,
    target: &'static str,
}

fn prebuilt_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../runner/src/cuda/prebuilt")
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if let Err(problem) = compiler() {
        bail!("NVRTC (libnvrtc.so.13) is needed: {problem}; {HOW_TO_INSTALL}");
    }
    let wanted = |unit: &&Unit| arguments.unit.as_ref().is_none_or(|name| name == unit.name);
    // The largest sources first, so that no thread waits long for another at the end.
    let mut units: Vec<&Unit> = UNITS.iter().filter(wanted).collect();
    units.sort_by_key(|unit| std::cmp::Reverse(unit.source().len()));
    ensure!(
        !units.is_empty(),
        "no source has that name; there are {}",
        UNITS.iter().map(|unit| unit.name).collect::<Vec<_>>().join(", ")
    );
    let jobs: Vec<Job<'_>> = units
        .iter()
        .flat_map(|unit| CHIPS.iter().chain(unit.ptx_targets()).map(|&target| Job { unit, target }))
        .collect();
    let compiled = compile_all(&jobs)?;
    if let Some(folder) = &arguments.keep {
        std::fs::create_dir_all(folder)?;
        for (job, compiled) in jobs.iter().zip(&compiled) {
            let ending = if is_ptx(job.target) { "ptx" } else { "cubin" };
            let name = format!("{}-{}.{ending}", job.unit.name, job.target);
            std::fs::write(folder.join(name), &compiled.image)?;
        }
    }
    let (manifest, built, problems) = collect(&jobs, compiled)?;
    print(&manifest, arguments.verbose || arguments.unit.is_some());
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    if arguments.unit.is_some() || arguments.keep.is_some() {
        return Ok(());
    }
    if arguments.check { check(&manifest, &built) } else { write(&manifest, &built) }
}

/// Whether a target is a virtual architecture.
fn is_ptx(target: &str) -> bool {
    target.starts_with("compute_")
}

/// Compiles on all cores; results in the order of the jobs.
fn compile_all(jobs: &[Job<'_>]) -> Result<Vec<Compiled>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(place) else { break };
            let report: &[&str] = if is_ptx(job.target) { &[] } else { &["--ptxas-options=-v"] };
            done.push((place, compile_with(job.unit, job.target, report)));
        }
        done
    };
    let mut results: Vec<_> = std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().flat_map(join).collect()
    });
    results.sort_by_key(|(place, _)| *place);
    results.into_iter().map(|(_, compiled)| Ok(compiled?)).collect()
}

/// What is to be committed, and which hot kernels spill or let tensor cores wait.
fn collect(jobs: &[Job<'_>], compiled: Vec<Compiled>) -> Result<(Manifest, Prebuilt, Vec<String>)> {
    let mut manifest = Manifest { nvrtc: String::new(), units: BTreeMap::new() };
    let mut built = Prebuilt::default();
    let mut problems = Vec::new();
    for (Job { unit, target }, compiled) in jobs.iter().zip(compiled) {
        let made = manifest.units.entry(unit.name.to_owned()).or_default();
        made.hash = unit.hash();
        if is_ptx(target) {
            let mut ptx = String::from_utf8(compiled.image)?;
            ptx.truncate(ptx.trim_end_matches('\0').len());
            let version = report::compiler(&ptx).context("the PTX does not name its compiler")?;
            version.clone_into(&mut built.nvrtc);
            built.units.insert(Prebuilt::key(unit, target), PrebuiltUnit { hash: unit.hash(), ptx });
            continue;
        }
        let spills = report::spills(&compiled.log);
        let mut kernels: BTreeMap<String, Needs> = cubin::needs(&compiled.image)
            .with_context(|| format!("{} for {target}", unit.name))?
            .into_iter()
            .collect();
        for (kernel, needs) in &mut kernels {
            needs.spilled = *spills
                .get(kernel)
                .with_context(|| format!("the compiler reports nothing on `{kernel}` for {target}"))?;
        }
        for (function, bytes) in spills.iter().filter(|(_, bytes)| unit.hot && **bytes > 0) {
            problems
                .push(format!("`{function}` of `{}` spills {bytes} bytes a thread on {target}", unit.name));
        }
        for warning in report::serialized(&compiled.log) {
            problems.push(format!("`{}` on {target}: {warning}", unit.name));
        }
        made.chips.insert((*target).to_owned(), kernels);
    }
    manifest.nvrtc.clone_from(&built.nvrtc);
    Ok((manifest, built, problems))
}

#[expect(clippy::print_stdout, reason = "the command's report")]
fn print(manifest: &Manifest, each: bool) {
    let all = |unit: &ManifestUnit| -> Vec<(String, String, Needs)> {
        let kernels = |(chip, kernels): (&String, &BTreeMap<String, Needs>)| {
            let chip = chip.clone();
            let one = move |(kernel, needs): (&String, &Needs)| (chip.clone(), kernel.clone(), needs.clone());
            kernels.iter().map(one).collect::<Vec<_>>()
        };
        unit.chips.iter().flat_map(kernels).collect()
    };
    println!("NVRTC {}", manifest.nvrtc);
    for (name, unit) in &manifest.units {
        let kernels = all(unit);
        let most = kernels.iter().map(|(.., needs)| needs.registers).max().unwrap_or_default();
        let spilled = kernels.iter().filter(|(.., needs)| needs.spilled > 0).count();
        println!(
            "{name:<16} {:>3} kernels for {} chips, at most {most} registers, {spilled} spill",
            kernels.len() / unit.chips.len().max(1),
            unit.chips.len()
        );
        for (chip, kernel, needs) in kernels.iter().filter(|_| each) {
            println!(
                "    {chip:<7} {kernel:<44} {:>3} registers {:>5} B local {:>4} B spilled {:>6} B shared",
                needs.registers, needs.local, needs.spilled, needs.shared
            );
        }
    }
}

fn write(manifest: &Manifest, built: &Prebuilt) -> Result<()> {
    let folder = prebuilt_folder();
    let text = format!("{}\n", serde_json::to_string_pretty(manifest)?);
    std::fs::write(folder.join("manifest.json"), text)?;
    let file = std::fs::File::create(folder.join("ptx.json.gz"))?;
    // No time and no name, so that the same sources give the same bytes.
    let mut packed = GzBuilder::new().mtime(0).write(file, Compression::best());
    packed.write_all(serde_json::to_string(built)?.as_bytes())?;
    packed.finish()?;
    Ok(())
}

fn check(manifest: &Manifest, built: &Prebuilt) -> Result<()> {
    let place = prebuilt_folder().join("manifest.json");
    let text = std::fs::read_to_string(&place).with_context(|| format!("cannot read {}", place.display()))?;
    let committed: Manifest = serde_json::from_str(&text)
        .with_context(|| format!("{} cannot be read; {AGAIN}", place.display()))?;
    ensure!(
        committed.nvrtc == manifest.nvrtc,
        "the manifest was made with NVRTC {}, this is {}; {HOW_TO_INSTALL}, or {AGAIN}",
        committed.nvrtc,
        manifest.nvrtc
    );
    let mut problems = differences(&committed, manifest);
    let embedded = prebuilt().map_err(|problem| anyhow::anyhow!("embedded PTX: {problem}; {AGAIN}"))?;
    for (name, unit) in &built.units {
        // Not the text: the compiler names and orders things in it differently from run to run.
        if embedded.units.get(name).is_none_or(|found| found.hash != unit.hash) {
            problems.push(format!("the embedded PTX of `{name}` is not of its source"));
        }
    }
    ensure!(problems.is_empty(), "{}\n{AGAIN}", problems.join("\n"));
    Ok(())
}

/// Every way in which the manifest is not that of these sources.
fn differences(committed: &Manifest, made: &Manifest) -> Vec<String> {
    let mut problems = Vec::new();
    for name in committed.units.keys().filter(|name| !made.units.contains_key(*name)) {
        problems.push(format!("the manifest lists `{name}`, which is gone"));
    }
    for (name, unit) in &made.units {
        let Some(before) = committed.units.get(name) else {
            problems.push(format!("the manifest lacks `{name}`"));
            continue;
        };
        if before.hash != unit.hash {
            problems.push(format!("the manifest of `{name}` is of another source"));
            continue;
        }
        for (chip, kernels) in &unit.chips {
            let known = before.chips.get(chip);
            for (kernel, needs) in kernels {
                let known = known.and_then(|known| known.get(kernel));
                if known != Some(needs) {
                    problems.push(format!(
                        "`{kernel}` of `{name}` on {chip}: {known:?} committed, now {needs:?}"
                    ));
                }
            }
        }
        if problems.is_empty() && before != unit {
            problems.push(format!("the manifest of `{name}` lists kernels that are gone"));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(hash: &str, registers: u32) -> Manifest {
        let needs = Needs { registers, local: 0, spilled: 0, shared: 0 };
        let chip = BTreeMap::from([("a_kernel".to_owned(), needs)]);
        let unit =
            ManifestUnit { hash: hash.to_owned(), chips: BTreeMap::from([("sm_90".to_owned(), chip)]) };
        Manifest { nvrtc: "13.0.88".to_owned(), units: BTreeMap::from([("a_unit".to_owned(), unit)]) }
    }

    #[test]
    fn each_difference_is_named() {
        let committed = manifest("1", 40);
        assert!(differences(&committed, &manifest("1", 40)).is_empty());
        assert!(differences(&committed, &manifest("2", 40))[0].contains("another source"));
        let registers = differences(&committed, &manifest("1", 41));
        assert!(registers[0].contains("`a_kernel` of `a_unit` on sm_90"), "{registers:?}");
        let none = Manifest { nvrtc: "13.0.88".to_owned(), units: BTreeMap::new() };
        assert!(differences(&none, &committed)[0].contains("lacks `a_unit`"));
        assert!(differences(&committed, &none)[0].contains("is gone"));
    }
}
