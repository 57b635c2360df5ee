//! How the program fails on CUDA devices, with a driver that stands in for NVIDIA's: it is compiled here, says what it is told to
//! say, computes nothing, and lets calls fail. Skipped, with the reason, where there is no C compiler. The same failures on a
//! real device: `tools/test_cuda_faults.sh`.
#![cfg(target_os = "linux")]
#![allow(clippy::print_stderr, reason = "a test that is skipped says so")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/driver");
const NANO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/test-vectors/nano/checkpoint");

/// The compiled libraries; nothing where there is no compiler.
static LIBRARIES: LazyLock<Option<Libraries>> = LazyLock::new(Libraries::compile);

struct Libraries {
    /// With folders `driver`, `old`, `faults`, `compiler`, each with a library, and `home`.
    folder: tempfile::TempDir,
}

impl Libraries {
    fn compile() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            path.into_os_string().into_string().unwrap()
        };
        let (driver, old, faults) =
            (place("driver/libcuda.so.1"), place("old/libcuda.so.1"), place("faults/libcuda.so"));
        let compiler = place("compiler/libnvrtc.so");
        place("home/nothing");
        let source = |name: &str| format!("{SOURCES}/{name}.c");
        let soname = "-Wl,-soname,libcuda.so.1".to_owned();
        for arguments in [
            vec![soname.clone(), "-o".into(), driver.clone(), source("stand_in")],
            vec![soname, "-DOLD_LIBRARY".into(), "-o".into(), old, source("stand_in")],
            vec!["-o".into(), compiler, source("compiler")],
            vec!["-o".into(), faults, source("faults"), "-Wl,--no-as-needed".into(), driver, "-ldl".into()],
        ] {
            let output =
                Command::new("cc").args(["-shared", "-fPIC", "-O1"]).args(&arguments).output().ok()?;
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        for name in ["driver", "old"] {
            // The name that is looked for first: a machine with a real driver may have that one, too.
            let library = folder.path().join(name).join("libcuda.so.1");
            std::fs::copy(&library, library.with_extension("")).unwrap();
        }
        Some(Self { folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// A machine with some driver.
struct Machine {
    libraries: &'static Libraries,
    /// Folders of libraries, the first one first.
    folders: Vec<&'static str>,
    /// What the stand-in is told.
    driver: String,
    faults: String,
}

struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Machine {
    /// With the stand-in, told this. Nothing where there is no compiler.
    fn new(driver: &str) -> Option<Self> {
        let Some(libraries) = &*LIBRARIES else {
            eprintln!("skipped: no C compiler (`cc`) for a driver that stands in");
            return None;
        };
        Some(Self { libraries, folders: vec!["driver"], driver: driver.to_owned(), faults: String::new() })
    }

    /// With calls that fail.
    fn failing(driver: &str, faults: &str) -> Option<Self> {
        let machine = Self::new(driver)?;
        Some(Self { folders: vec!["faults", "driver"], faults: faults.to_owned(), ..machine })
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        let folders: Vec<PathBuf> = self.folders.iter().map(|name| self.libraries.path(name)).collect();
        let output = Command::new(env!("CARGO_BIN_EXE_ggsmith"))
            .args(arguments)
            .env("LD_LIBRARY_PATH", std::env::join_paths(folders).unwrap())
            // Kernels are neither compiled nor kept in the user's folder.
            .env("HOME", self.libraries.path("home"))
            .env("STAND_IN", &self.driver)
            .env("FAULTS", &self.faults)
            .env("FAULTS_COUNTS", self.counts())
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let ended =
            Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) };
        for word in ["panicked", "abort", "backtrace"] {
            assert!(!ended.stderr.contains(word), "{arguments:?}: {}", ended.stderr);
        }
        ended
    }

    /// A file of this machine alone.
    fn counts(&self) -> PathBuf {
        self.libraries.path(&format!("counts-{:?}", std::thread::current().id()))
    }

    /// How often each call was made in the last run.
    fn count(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(self.counts()).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.unwrap().parse().unwrap()
    }

    /// Fails with exit code 1 and one error that has all these parts; gives it.
    fn fails(&self, arguments: &[&str], parts: &[&str]) -> String {
        let ended = self.run(arguments);
        assert_eq!(ended.code, Some(1), "{arguments:?}: {} {}", ended.stdout, ended.stderr);
        assert_eq!(ended.stderr.matches("error: ").count(), 1, "{}", ended.stderr);
        let at = ended.stderr.find("error: ").unwrap();
        let error = ended.stderr[at..].to_owned();
        for part in parts {
            assert!(error.contains(part), "{error} lacks {part}");
        }
        error
    }

    /// Succeeds on the CPU, which is told with all these parts if there are any.
    fn falls_back(&self, parts: &[&str]) {
        let ended = self.run(&score("auto"));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(ended.stdout.contains("\"cpu\""), "{}", ended.stdout);
        let note = ended.stderr.lines().find(|line| line.starts_with("computing on the CPU: "));
        assert_eq!(note.is_some(), !parts.is_empty(), "{}", ended.stderr);
        for part in parts {
            assert!(note.unwrap().contains(part), "{note:?} lacks {part}");
        }
    }

    /// `doctor` reports, and does not fail.
    fn is_reported(&self, parts: &[&str]) {
        for more in [&[][..], &["--json"], &["--model", NANO]] {
            let ended = self.run(&[&["doctor"], more].concat());
            assert_eq!(ended.code, Some(0), "{more:?}: {}", ended.stderr);
            for part in parts {
                assert!(ended.stdout.contains(part), "{more:?}: {} lacks {part}", ended.stdout);
            }
        }
    }

    /// What all machines without a usable device do.
    fn is_refused(&self, parts: &[&str]) {
        self.fails(&run("cuda"), parts);
        self.falls_back(parts);
        self.is_reported(parts);
    }
}

/// A command that prints what computes.
fn score(backend: &str) -> [&str; 10] {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/test-vectors/nano/heldout/code.txt");
    ["score", "kld", NANO, NANO, "--text", text, "--max-tokens=60", "--json", "--backend", backend]
}

fn run(backend: &str) -> [&str; 10] {
    ["run", "-m", NANO, "-p", "The sea", "-n", "4", "--raw", "--backend", backend]
}

/// Loads a model, reads a prompt, generates by a recorded graph, and lets caches grow.
fn bench() -> Vec<&'static str> {
    let arguments =
        "--backend cuda --ctx-start 2048 --ctx-max 6144 --step-incr 4096 --gen-tokens 6 --bandwidth 1";
    ["bench", "-m", NANO].into_iter().chain(arguments.split(' ')).collect()
}

#[test]
fn no_driver_is_said_only_where_a_device_was_asked_for() {
    let Some(mut machine) = Machine::new("") else { return };
    machine.folders = vec!["home"];
    if machine.run(&["doctor"]).stdout.contains("driver  ") {
        eprintln!("skipped: this machine has a driver");
        return;
    }
    let parts = ["no NVIDIA driver library (libcuda.so.1) found", "install the driver", "--backend cpu"];
    machine.fails(&run("cuda"), &parts);
    machine.falls_back(&[]);
    machine.is_reported(&parts);
}

#[test]
fn a_driver_that_is_too_old_is_refused_with_both_versions() {
    let Some(machine) = Machine::new("driver=12040") else { return };
    let parts = ["supports CUDA 12.4", "CUDA 13.0", "driver 580", "update the driver", "--backend cpu"];
    machine.is_refused(&parts);
}

#[test]
fn an_old_device_is_refused_with_both_capabilities() {
    let Some(machine) = Machine::new("major=8") else { return };
    machine.is_refused(&["Stand-in has compute capability 8.0", "at least 9.0", "--backend cpu"]);
}

#[test]
fn no_device_is_no_device_whoever_says_it() {
    for told in ["devices=0", "init=100"] {
        let Some(machine) = Machine::new(told) else { return };
        machine.is_refused(&[
            "CUDA device 0 does not exist",
            "sees 0",
            "CUDA_VISIBLE_DEVICES",
            "--backend cpu",
        ]);
    }
    let Some(machine) = Machine::new("") else { return };
    let ended = machine.run(&["doctor", "--device", "1"]);
    assert!(ended.stdout.contains("CUDA device 1 does not exist; the driver sees 1"), "{}", ended.stdout);
}

#[test]
fn a_library_that_lacks_functions_is_no_panic() {
    let Some(mut machine) = Machine::new("driver=13000") else { return };
    machine.folders = vec!["old"];
    machine.is_refused(&["lacks 50 functions", "first `cuCtxSetCurrent`", "driver 580", "--backend cpu"]);
    // The version comes first: it says what to do.
    machine.driver = "driver=11080".to_owned();
    machine.is_refused(&["supports CUDA 11.8", "update the driver"]);
}

#[test]
fn a_compiler_that_lacks_functions_is_no_panic() {
    let Some(mut machine) = Machine::new("") else { return };
    machine.folders = vec!["compiler", "driver"];
    let lacks = "libnvrtc lacks 9 of 10 functions, the first is `nvrtcCreateProgram`";
    let ended = machine.run(&["doctor"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    // What is part of the program serves.
    assert!(ended.stdout.contains("embedded PTX"), "{}", ended.stdout);
    machine.is_reported(&[lacks]);
    // Who asks for the compiler is not given something else.
    machine.fails(&[&run("cuda")[..], &["--kernels-from", "nvrtc"]].concat(), &[lacks, "--backend cpu"]);
    let ended = machine.run(&[&score("auto")[..], &["--kernels-from", "nvrtc"]].concat());
    assert!(
        ended.stderr.contains("computing on the CPU: ") && ended.stderr.contains(lacks),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_driver_that_does_not_start_is_told_with_what_helps() {
    for (told, parts) in [
        ("init=803", ["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "restart the machine"]),
        ("init=999", ["CUDA_ERROR_UNKNOWN", "nvidia-smi"]),
        ("init=802", ["CUDA_ERROR_SYSTEM_NOT_READY (number 802)", "nvidia-fabricmanager"]),
        ("init=34", ["CUDA_ERROR_STUB_LIBRARY (number 34)", "LD_LIBRARY_PATH"]),
        ("retain=46", ["CUDA_ERROR_DEVICE_UNAVAILABLE", "another program"]),
    ] {
        let Some(machine) = Machine::new(told) else { return };
        machine.is_refused(&["the NVIDIA driver does not start", parts[0], parts[1], "--backend cpu"]);
    }
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_the_sum() {
    let gib: u64 = 1 << 30;
    let Some(machine) = Machine::new(&format!("total={gib},used={}", gib - (200 << 20))) else { return };
    let parts =
        ["Stand-in: need ", "GiB = weights ", " + cache ", "(8192 tokens) + scratch ", " + reserve 0.25;"];
    let parts = [&parts[..], &["0.20 (free on the device) of 1.00 GiB", "--backend cpu"]].concat();
    let error = machine.fails(&run("cuda"), &parts);
    // The parts add up.
    let number = |text: &str| text.split([' ', ';']).next().unwrap().parse::<f64>().unwrap();
    let after = |word: &str| number(error.split(word).nth(1).unwrap());
    let sum = ["weights ", "cache ", "scratch ", "reserve "].map(after).iter().sum::<f64>();
    assert!((after("need ") - sum).abs() < 0.021, "{error}");
    machine.falls_back(&parts);

    let Some(machine) = Machine::new(&format!("total={gib}")) else { return };
    let flash = ["bench", "--synthetic", "flash", "--backend", "cuda", "--bandwidth", "1"];
    machine.fails(&flash, &["need 8", "weights 8", "1.00 (free on the device) of 1.00 GiB"]);
}

#[test]
fn doctor_judges_a_model_by_what_loading_it_would() {
    let doctor = ["doctor", "--model", NANO];
    let gib: u64 = 1 << 30;
    let almost_full = format!("total={gib},used={}", gib - (200 << 20));
    let limited = ["--device-memory", "0.1"];
    for (told, more, verdict) in [
        ("", &[][..], "model        fits into 8.00 GiB (free on the device): needs "),
        ("", &limited[..], "does not fit into 102.40 MiB (the limit that was set): needs "),
        (&almost_full, &[], "does not fit into 200.00 MiB (free on the device): needs "),
        // What the driver calls free moves with the system's cache there.
        (&format!("{almost_full},integrated=1"), &[], "model        fits into "),
    ] {
        let Some(machine) = Machine::new(told) else { return };
        let ended = machine.run(&[&doctor[..], more].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        assert!(ended.stdout.contains(verdict), "{told}: {}", ended.stdout);
        let loads = machine.run(&[&run("cuda")[..], more].concat());
        assert_eq!(!loads.stderr.contains("need "), verdict.contains(" fits "), "{told}: {}", loads.stderr);
    }
    // Without a device the model is read all the same.
    for told in ["", "devices=0"] {
        let Some(machine) = Machine::new(told) else { return };
        assert!(machine.run(&doctor).stdout.contains("\nmodel        "));
        machine.fails(&["doctor", "--model", "nowhere.gguf"], &["cannot open `nowhere.gguf`"]);
    }
}

#[test]
fn kernels_that_cannot_be_loaded_are_told_with_what_helps() {
    for (told, name) in
        [("module=222", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"), ("module=209", "CUDA_ERROR_NO_BINARY_FOR_GPU")]
    {
        let Some(machine) = Machine::new(told) else { return };
        machine.is_refused(&[
            "no kernels for compute capability 9.0",
            name,
            "libnvrtc.so.13",
            "--backend cpu",
        ]);
    }
}

#[test]
fn launches_ask_for_no_more_shared_memory_than_there_is() {
    // An RTX 50 and a GB10.
    let Some(mut machine) = Machine::new("major=12,shared=101376") else { return };
    let ended = machine.run(&bench());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    machine.driver = "shared=16384".to_owned();
    machine.fails(&bench(), &["kernel `", "bytes of shared memory a block", "at most 16384"]);
}

#[test]
fn kernels_are_timed_on_devices_with_few_multiprocessors() {
    let Some(machine) = Machine::new("") else { return };
    let ended = machine.run(&["bench", "--kernels", "shared down"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for part in ["\"multiprocessors\": 8", "\"multiprocessors\": 4"] {
        assert!(ended.stdout.contains(part), "{} lacks {part}", ended.stdout);
    }
}

#[test]
fn a_device_that_is_lost_ends_a_command_with_one_error() {
    let Some(mut machine) = Machine::failing("", "") else { return };
    let whole = machine.run(&bench());
    assert_eq!(whole.code, Some(0), "{}", whole.stderr);
    let n = |name| machine.count(name);
    let (launches, graphs, waits) = (n("launches"), n("graphs"), n("waits"));
    assert!(launches > 100 && graphs > 4 && waits > 4, "{launches} {graphs} {waits}");
    let mut faults: Vec<String> = Vec::new();
    for (name, n) in [("launches", launches), ("graphs", graphs), ("waits", waits)] {
        // The first, the last and some between.
        faults.extend((0..8).map(|i| format!("{name}={}", 1 + (n - 1) * i / 7)));
    }
    for (code, name) in [
        (719, "CUDA_ERROR_LAUNCH_FAILED"),
        (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
        (999, "CUDA_ERROR_UNKNOWN"),
    ] {
        let faults = if code == 719 { &faults[..] } else { &faults[3..4] };
        for fault in faults {
            machine.faults = format!("{fault},code={code}");
            let parts = [name, "lost to this run", "start the program again", "`Xid`", "--backend cpu"];
            let error = machine.fails(&bench(), &parts);
            // A launch that fails names its kernel.
            assert!(!fault.starts_with("launches") || error.contains("kernel `"), "{fault}: {error}");
            assert!(!fault.starts_with("graphs") || error.contains("launching a graph"), "{fault}: {error}");
        }
    }
}

#[test]
fn memory_that_runs_out_ends_a_command_with_one_error() {
    let Some(mut machine) = Machine::failing("", "") else { return };
    assert_eq!(machine.run(&bench()).code, Some(0));
    let n = machine.count("allocations");
    let mut errors = String::new();
    for i in 0..40 {
        machine.faults = format!("allocations={}", 1 + (n - 1) * i / 39);
        let parts = ["Stand-in is out of memory: ", " bytes are wanted for ", "are free", "shorter context"];
        errors += &machine.fails(&bench(), &parts);
    }
    for what in ["wanted for weights", "wanted for the key-value cache", "wanted for activations"] {
        assert!(errors.contains(what), "never {what}: {errors}");
    }
    // Less memory than the whole command wants at a time, and more than it needs: some is given back and used again.
    let most = machine.count("bytes");
    machine.faults = format!("bytes={}", most / 2);
    machine.fails(&bench(), &["out of memory"]);
}

#[test]
fn sources_are_where_the_tool_for_real_devices_looks() {
    for name in ["stand_in.c", "faults.c"] {
        assert!(Path::new(SOURCES).join(name).is_file(), "{name}");
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/test_cuda_faults.sh");
    assert!(std::fs::read_to_string(script).unwrap().contains("tests/driver"));
}
