//! Where kernels come from: the sources, which are part of the program, and what was compiled from them.
//!
//! For a device, in this order: what an earlier run compiled and kept in the user's cache folder; the run-time compiler
//! NVRTC if it is on the machine; PTX that is part of the program and that the driver finishes for the device.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use flate2::read::GzDecoder;
use gguf_tools::block::{BlockType, codebook};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::choice::{KernelChoice, Origin, PORTABLE_SHARED_BYTES};
use super::compiler::{compile, compiler};
use super::driver::{Arguments, Device, Kernel, Launch, Module};
use super::error::CudaError;

/// What all sources begin with.
const COMMON: &str = include_str!("kernels/common.cuh");

/// PTX of all sources, made by `cargo xtask kernels`.
const PREBUILT: &[u8] = include_bytes!("prebuilt/ptx.json.gz");

/// Virtual architecture of the embedded PTX.
pub const PTX_TARGET: &str = "compute_90";

/// That of the H100 and H200 alone: `wgmma` is in no other.
pub const OWN_PTX_TARGET: &str = "compute_90a";

/// Chips that kernels are checked for: H200, without and with the instructions that no other chip has, RTX 50, GB10.
pub const CHIPS: [&str; 4] = ["sm_90", "sm_90a", "sm_120", "sm_121"];

/// Version of NVRTC. Those before know nothing of consumer Blackwell, and none before was tried.
const OLDEST_COMPILER: (i32, i32) = (12, 8);

/// What sources on activations begin with behind that.
const ACTIVATIONS: &str = include_str!("kernels/activations.cuh");

/// What the source of products with many inputs begins with.
const PREFILL_PARTS: [&str; 4] = [
    include_str!("kernels/prefill_formats.cuh"),
    include_str!("kernels/prefill_tile.cuh"),
    include_str!("kernels/prefill_tile_warps.cuh"),
    include_str!("kernels/prefill_tile_groups.cuh"),
];

/// Name of that source.
const PREFILL: &str = "matrix_prefill";

/// Options of every compilation.
pub(super) const OPTIONS: [&str; 3] = ["--std=c++17", "-default-device", "-diag-suppress=177"];

/// One source file: kernels that are compiled together.
#[derive(Debug, Clone, Copy)]
pub struct Unit {
    /// Name of the file without ending.
    pub name: &'static str,
    /// Its text, without what all begin with.
    text: &'static str,
    /// Whether speed matters so much that a spilled register is an error: not for what runs once when a model is loaded,
    /// and not for the products in file order, which serve exact numerics and types without kernels of their own.
    pub hot: bool,
    /// Whether its kernels work on activations, not on weights: products and sums are contracted only where the source
    /// says so, and it begins with the helpers for activations.
    activations: bool,
}

macro_rules! units {
    (weights: $($weights:literal $hot:literal),* ; activations: $($name:literal),* $(;)?) => {
        /// All sources.
        pub const UNITS: &[Unit] = &[
            $(Unit {
                name: $weights,
                text: include_str!(concat!("kernels/", $weights, ".cu")),
                hot: $hot,
                activations: false,
            },)*
            $(Unit {
                name: $name,
                text: include_str!(concat!("kernels/", $name, ".cu")),
                hot: true,
                activations: true,
            },)*
        ];
    };
}

units! {
    weights: "matrix_generic" false, "matrix_repack" false, "matrix_generate" false, "matrix_decode" true,
        "matrix_experts" true, "matrix_prefill" true;
    activations: "rows", "hyper", "router", "attention", "attention_tiles", "compressor",
        "indexer";
}

impl Unit {
    /// The whole text that is compiled.
    pub fn source(&self) -> String {
        let mut source = String::new();
        for (name, block_type) in
            [("IQ2_XXS", BlockType::Iq2Xxs), ("IQ2_XS", BlockType::Iq2Xs), ("IQ3_XXS", BlockType::Iq3Xxs)]
        {
            let entries: Vec<String> =
                codebook(block_type).unwrap_or_default().iter().map(ToString::to_string).collect();
            let _ = writeln!(source, "#define {name}_CODEBOOK {}", entries.join(","));
        }
        source.push_str(COMMON);
        if self.activations {
            source.push_str(ACTIVATIONS);
        }
        if self.name == PREFILL {
            source.push_str(&PREFILL_PARTS.concat());
        }
        source.push_str(self.text);
        source
    }

    /// Whether all its kernels wait for those before them by themselves.
    fn begins_early(&self) -> bool {
        self.activations || ["matrix_decode", "matrix_experts"].contains(&self.name)
    }

    /// Virtual architectures that its PTX is embedded for.
    pub fn ptx_targets(&self) -> &'static [&'static str] {
        if self.name == PREFILL { &[PTX_TARGET, OWN_PTX_TARGET] } else { &[PTX_TARGET] }
    }

    /// Whether products and sums may be contracted, as an option of the compiler.
    pub(super) fn contraction(&self) -> &'static str {
        if self.activations { "--fmad=false" } else { "--fmad=true" }
    }

    /// Hash of text and options, in hexadecimal digits.
    pub fn hash(&self) -> String {
        let mut hash = Sha256::new();
        for option in OPTIONS.into_iter().chain([self.contraction()]) {
            hash.update(option);
        }
        hash.update(self.source());
        hash.finalize().iter().take(12).fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

/// PTX of all units, as embedded.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Prebuilt {
    /// Version of the compiler that made it.
    pub nvrtc: String,
    /// By [`Prebuilt::key`].
    pub units: BTreeMap<String, PrebuiltUnit>,
}

/// PTX of one unit.
#[derive(Debug, Serialize, Deserialize)]
pub struct PrebuiltUnit {
    /// [`Unit::hash`] of the source it was made from.
    pub hash: String,
    /// The text.
    pub ptx: String,
}

/// What is embedded in this program.
///
/// # Errors
/// Says what is wrong with it: it is checked when the program is built, so this is never seen.
pub fn prebuilt() -> Result<Prebuilt, String> {
    let mut text = String::new();
    GzDecoder::new(PREBUILT).read_to_string(&mut text).map_err(|e| e.to_string())?;
    serde_json::from_str(&text).map_err(|e| e.to_string())
}

/// Units that the embedded PTX lacks or has from other sources than those of this program.
///
/// # Errors
/// As [`prebuilt`].
pub fn stale() -> Result<Vec<&'static str>, String> {
    prebuilt().map(|prebuilt| prebuilt.stale())
}

impl Prebuilt {
    /// What a unit's PTX for a virtual architecture is kept by.
    pub fn key(unit: &Unit, target: &str) -> String {
        if target == PTX_TARGET { unit.name.to_owned() } else { format!("{} {target}", unit.name) }
    }

    /// Text of a unit, if it was made from the unit's source.
    fn of(&self, unit: &Unit, target: &str) -> Option<&PrebuiltUnit> {
        self.units.get(&Self::key(unit, target)).filter(|found| found.hash == unit.hash())
    }

    fn stale(&self) -> Vec<&'static str> {
        let is_stale = |unit: &&Unit| unit.ptx_targets().iter().any(|target| self.of(unit, target).is_none());
        UNITS.iter().filter(is_stale).map(|unit| unit.name).collect()
    }
}

/// All kernels, loaded on one device. Clones are cheap.
#[derive(Clone)]
pub struct Kernels {
    inner: Arc<Loaded>,
}

struct Loaded {
    /// Whether they are those with the instructions that only the H100 and H200 have.
    warp_groups: bool,
    modules: HashMap<&'static str, Module>,
    /// Those that were asked for, by unit and name.
    kernels: RwLock<HashMap<(&'static str, String), Kernel>>,
    origin: String,
}

/// A device with its kernels: what operations are queued on. Clones are cheap and share both.
#[derive(Clone)]
pub struct Gpu {
    /// Device and stream.
    pub device: Device,
    /// Kernels.
    pub kernels: Kernels,
}

impl Gpu {
    /// Opens a device and loads its kernels. With kernels for any chip, blocks have no more shared memory than on any.
    ///
    /// # Errors
    /// As [`Device::open`] and [`Kernels::load`].
    pub fn open(ordinal: usize, choice: KernelChoice) -> Result<Self, CudaError> {
        let device = Device::open(ordinal)?;
        let device = if choice.portable { device.with_shared_memory(PORTABLE_SHARED_BYTES) } else { device };
        let kernels = Kernels::load(&device, choice)?;
        Ok(Self { device, kernels })
    }

    /// Queues a kernel by unit and name.
    ///
    /// # Errors
    /// If there is no such kernel or the driver refuses the launch.
    pub fn launch(
        &self,
        unit: &'static str,
        name: &str,
        mut shape: Launch,
        arguments: Arguments,
    ) -> Result<(), CudaError> {
        shape.early = UNITS.iter().any(|known| known.name == unit && known.begins_early());
        self.device.launch(&self.kernels.kernel(unit, name)?, shape, arguments)
    }
}

impl Kernels {
    /// Loads every unit.
    ///
    /// # Errors
    /// If a unit can neither be compiled nor taken from the program.
    pub fn load(device: &Device, choice: KernelChoice) -> Result<Self, CudaError> {
        let KernelChoice { origin, portable } = choice;
        let warp_groups = !portable && has_own_instructions(device);
        let found = compiler();
        let served = found.as_ref().ok().copied();
        let compiler = served.filter(|&version| version >= OLDEST_COMPILER && origin != Origin::Ptx);
        let images = match compiler {
            Some(version) => compile_all(device, version, origin, warp_groups),
            None if origin == Origin::Compiler => {
                let capability = device.facts().capability;
                Err(CudaError::NoKernels { capability, problem: no_compiler(found) })
            }
            None => embedded(device, warp_groups),
        };
        let compiled = images.and_then(|images| load_all(device, &images));
        let (modules, from) = match (compiled, origin) {
            // The device itself fails.
            (Err(error @ (CudaError::Lost { .. } | CudaError::Exhausted { .. })), _) => return Err(error),
            (Err(refused), Origin::Any) if compiler.is_some() => {
                let modules = embedded(device, warp_groups).and_then(|images| load_all(device, &images));
                (modules.map_err(|error| no_kernels(device, error, Some(&refused)))?, None)
            }
            (modules, _) => (modules.map_err(|error| no_kernels(device, error, None))?, compiler),
        };
        let origin = from.map_or_else(
            || {
                let own = if warp_groups { " and compute_90a" } else { "" };
                format!("embedded PTX ({PTX_TARGET}{own}), finished by the driver")
            },
            |(major, minor)| format!("compiled by NVRTC {major}.{minor}"),
        );
        let kernels = RwLock::default();
        Ok(Self { inner: Arc::new(Loaded { warp_groups, modules, kernels, origin }) })
    }

    /// Whether tensor cores are used by groups of four warps (`wgmma`).
    pub fn has_warp_groups(&self) -> bool {
        self.inner.warp_groups
    }

    /// Where they came from, for reports, and whether the embedded PTX could not have served.
    pub fn origin(&self) -> String {
        let origin = &self.inner.origin;
        match stale() {
            Ok(units) if units.is_empty() => origin.clone(),
            Ok(units) => {
                format!("{origin} (the embedded PTX of {} is of other sources)", units.join(", "))
            }
            Err(problem) => format!("{origin} (the embedded PTX cannot be read: {problem})"),
        }
    }

    /// A kernel by unit and name.
    ///
    /// # Errors
    /// If there is none.
    pub fn kernel(&self, unit: &'static str, name: &str) -> Result<Kernel, CudaError> {
        let key = (unit, name.to_owned());
        let known = self.inner.kernels.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(kernel) = known {
            return Ok(kernel);
        }
        let module = self.inner.modules.get(unit).ok_or_else(|| CudaError::Driver {
            what: format!("finding kernel `{name}`"),
            problem: format!("no unit `{unit}`"),
        })?;
        let kernel = module.kernel(name)?;
        self.inner.kernels.write().unwrap_or_else(PoisonError::into_inner).insert(key, kernel.clone());
        Ok(kernel)
    }
}

/// Loads an image of every unit.
fn load_all(device: &Device, images: &[Vec<u8>]) -> Result<HashMap<&'static str, Module>, CudaError> {
    let load = |(unit, image): (&Unit, &Vec<u8>)| Ok((unit.name, device.load_module(unit.name, image)?));
    UNITS.iter().zip(images).map(load).collect()
}

/// Why there are no kernels, and why there were none of another origin before.
fn no_kernels(device: &Device, error: CudaError, before: Option<&CudaError>) -> CudaError {
    let problem = match error {
        CudaError::NoKernels { problem, .. } => problem,
        CudaError::Driver { .. } | CudaError::Compile { .. } => error.to_string(),
        error => return error,
    };
    let also = before.map(|before| format!(", and {before}")).unwrap_or_default();
    CudaError::NoKernels { capability: device.facts().capability, problem: problem + &also }
}

/// Why the compiler that was asked for does not serve.
fn no_compiler(found: Result<(i32, i32), String>) -> String {
    let (major, minor) = OLDEST_COMPILER;
    let is_old = |(found, second)| format!("NVRTC is {found}.{second}; {major}.{minor} or newer is needed");
    found.map_or_else(|problem| problem, is_old)
}

/// Whether a device is one of those that [`OWN_PTX_TARGET`] is for.
fn has_own_instructions(device: &Device) -> bool {
    device.facts().capability == (9, 0)
}

/// The chip of a device, with or without the instructions that only it has.
fn target(device: &Device, own_instructions: bool) -> String {
    let (major, minor) = device.facts().capability;
    let own = if own_instructions { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}

/// Compiles what the cache folder lacks, all units at once.
fn compile_all(
    device: &Device,
    version: (i32, i32),
    origin: Origin,
    own_instructions: bool,
) -> Result<Vec<Vec<u8>>, CudaError> {
    let target = target(device, own_instructions);
    let cache = if origin == Origin::Any { cache_folder() } else { None };
    let one = |unit: &Unit| -> Result<Vec<u8>, CudaError> {
        let place = cache.as_ref().map(|folder| {
            let (major, minor) = version;
            folder.join(format!("{}-{}-{target}-nvrtc{major}.{minor}.cubin", unit.name, unit.hash()))
        });
        if let Some(kept) = place.as_ref().and_then(|place| std::fs::read(place).ok())
            && kept.starts_with(b"\x7fELF")
        {
            return Ok(kept);
        }
        let image = compile(unit, &target)?;
        if let Some(place) = place {
            keep(&place, &image);
        }
        Ok(image)
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = UNITS.iter().map(|unit| scope.spawn(move || one(unit))).collect();
        running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// The embedded PTX, if it was made from the sources of this program.
fn embedded(device: &Device, own_instructions: bool) -> Result<Vec<Vec<u8>>, CudaError> {
    let none = |problem: String| CudaError::NoKernels { capability: device.facts().capability, problem };
    let prebuilt = prebuilt().map_err(none)?;
    UNITS
        .iter()
        .map(|unit| {
            let target = unit.ptx_targets().iter().rfind(|&&target| own_instructions || target == PTX_TARGET);
            let found = target.and_then(|target| prebuilt.of(unit, target)).ok_or_else(|| {
                none(format!("the embedded kernels of `{}` are of other sources", unit.name))
            })?;
            let mut image = found.ptx.clone().into_bytes();
            image.push(0);
            Ok(image)
        })
        .collect()
}

/// `~/.cache/ggsmith/kernels`.
fn cache_folder() -> Option<PathBuf> {
    let folder = std::env::home_dir()?.join(".cache/ggsmith/kernels");
    std::fs::create_dir_all(&folder).ok()?;
    Some(folder)
}

/// Writes beside and renames, so that no other process finds half a file. A cache that cannot be written is none.
fn keep(place: &std::path::Path, image: &[u8]) {
    let beside = place.with_extension(format!("{}.partial", std::process::id()));
    if std::fs::write(&beside, image).is_ok() && std::fs::rename(&beside, place).is_err() {
        let _ = std::fs::remove_file(&beside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_ptx_is_of_these_sources() {
        let stale = stale().unwrap();
        assert!(stale.is_empty(), "run `cargo xtask kernels`: {stale:?} changed");
        let prebuilt = prebuilt().unwrap();
        assert_eq!(prebuilt.units.len(), UNITS.iter().map(|unit| unit.ptx_targets().len()).sum::<usize>());
        for unit in prebuilt.units.values() {
            assert!(unit.ptx.contains(".target sm_90") && !unit.ptx.contains('\0'));
        }
        let own = Prebuilt::key(&UNITS[5], OWN_PTX_TARGET);
        assert!(prebuilt.units[&own].ptx.contains("wgmma"), "the H100 and H200 have code of their own");
    }

    #[test]
    fn other_sources_are_noticed() {
        let mut prebuilt = prebuilt().unwrap();
        prebuilt.units.remove(UNITS[0].name);
        "0".clone_into(&mut prebuilt.units.get_mut(UNITS[2].name).unwrap().hash);
        let stale = prebuilt.stale();
        assert!(stale.contains(&UNITS[0].name) && stale.contains(&UNITS[2].name));
        assert!(prebuilt.of(&UNITS[2], PTX_TARGET).is_none());
    }

    #[test]
    fn each_unit_has_a_hash_of_its_own() {
        let hashes: std::collections::BTreeSet<String> = UNITS.iter().map(Unit::hash).collect();
        assert_eq!(hashes.len(), UNITS.len());
    }
}
