//! Compiles every CUDA kernel for every chip on a machine that needs no GPU, and keeps what a review wants to see:
//! registers, local and shared memory of each kernel.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use flate2::{Compression, GzBuilder};
use runner::cuda::module::{
    CHIPS, PTX_TARGET, Prebuilt, PrebuiltUnit, UNITS, Unit, compile, compiler_version, prebuilt,
};
use serde::{Deserialize, Serialize};

use crate::cubin::{self, Needs};

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
}

/// What is committed about the kernels.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Manifest {
    nvrtc: String,
    units: BTreeMap<String, ManifestUnit>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct ManifestUnit {
    hash: String,
    /// By chip, then by kernel.
    chips: BTreeMap<String, BTreeMap<String, Needs>>,
}

fn prebuilt_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../runner/src/cuda/prebuilt")
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let (major, minor) = compiler_version().context(
        "NVRTC (libnvrtc.so.13) was not found; `pip install --target target/python nvidia-cuda-nvrtc==13.0.88` \
         and set LD_LIBRARY_PATH to target/python/nvidia/cu13/lib",
    )?;
    let nvrtc = format!("{major}.{minor}");
    let units: Vec<&Unit> =
        UNITS.iter().filter(|unit| arguments.unit.as_ref().is_none_or(|name| name == unit.name)).collect();
    ensure!(!units.is_empty(), "no source has that name");
    let mut manifest = Manifest { nvrtc: nvrtc.clone(), units: BTreeMap::new() };
    let mut built = Prebuilt { nvrtc, units: std::collections::BTreeMap::new() };
    let mut problems = Vec::new();
    for unit in units {
        let made = compile_unit(unit, arguments.keep.as_deref(), &mut problems)?;
        let mut ptx = String::from_utf8(compile(unit, PTX_TARGET)?)?;
        ptx.truncate(ptx.trim_end_matches('\0').len());
        built.units.insert(unit.name.to_owned(), PrebuiltUnit { hash: made.hash.clone(), ptx });
        manifest.units.insert(unit.name.to_owned(), made);
    }
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    if arguments.unit.is_some() || arguments.keep.is_some() {
        return Ok(());
    }
    if arguments.check { check(&manifest, &built) } else { write(&manifest, &built) }
}

#[expect(clippy::print_stdout, reason = "the command's report")]
fn compile_unit(unit: &Unit, keep: Option<&Path>, problems: &mut Vec<String>) -> Result<ManifestUnit> {
    let mut chips = BTreeMap::new();
    for chip in CHIPS {
        let image = compile(unit, chip)?;
        if let Some(folder) = keep {
            std::fs::create_dir_all(folder)?;
            std::fs::write(folder.join(format!("{}-{chip}.cubin", unit.name)), &image)?;
        }
        let needs = cubin::needs(&image).with_context(|| format!("{} for {chip}", unit.name))?;
        for (kernel, needs) in &needs {
            println!(
                "{:<16} {chip:<7} {kernel:<44} {:>3} registers {:>5} B local {:>6} B shared",
                unit.name, needs.registers, needs.local, needs.shared
            );
            if unit.hot && needs.local > 0 {
                problems.push(format!("kernel `{kernel}` spills {} bytes a thread on {chip}", needs.local));
            }
        }
        chips.insert(chip.to_owned(), needs.into_iter().collect());
    }
    Ok(ManifestUnit { hash: unit.hash(), chips })
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
    let committed: Manifest = serde_json::from_str(&text)?;
    let again = "run `cargo xtask kernels` and commit what it writes";
    ensure!(
        committed.nvrtc == manifest.nvrtc,
        "the manifest was made with NVRTC {}, this is {}",
        committed.nvrtc,
        manifest.nvrtc
    );
    for (name, unit) in &manifest.units {
        ensure!(
            committed.units.get(name) == Some(unit),
            "the manifest of `{name}` is of another source; {again}"
        );
    }
    ensure!(
        committed.units.len() == manifest.units.len(),
        "the manifest lists sources that are gone; {again}"
    );
    let embedded = prebuilt().map_err(|problem| anyhow::anyhow!("embedded PTX: {problem}"))?;
    for (name, unit) in &built.units {
        let same =
            embedded.units.get(name).is_some_and(|found| found.ptx == unit.ptx && found.hash == unit.hash);
        ensure!(same, "the embedded PTX of `{name}` is not what its source gives; {again}");
    }
    Ok(())
}
