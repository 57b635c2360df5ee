//! The job files of `examples/cluster`, run for real as far as one machine goes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const GGSMITH: &str = env!("CARGO_BIN_EXE_ggsmith");

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn run(program: &mut Command) -> Output {
    let output = program.output().unwrap();
    assert!(output.status.success(), "{program:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// A checkpoint, and the file that one machine makes of it.
struct Setting {
    folder: tempfile::TempDir,
    whole: Vec<u8>,
}

impl Setting {
    fn new(experts: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let synth = ["synth", "--quiet", "--shape", "tiny", "--experts", experts, "--out"];
        run(Command::new(GGSMITH).args(synth).arg(at("checkpoint")));
        let quantize = ["quantize", "--quiet", "--recipe", "q2", "--hf"];
        run(Command::new(GGSMITH).args(quantize).arg(at("checkpoint")).arg("--out").arg(at("whole.gguf")));
        let whole = std::fs::read(at("whole.gguf")).unwrap();
        Self { folder, whole }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Python with the packages that the checks of this repository install, if Ray is among them.
fn python_with_ray() -> Option<Command> {
    let python = || {
        let mut python = Command::new("python3");
        python.env("PYTHONPATH", repository().join("target/python"));
        python
    };
    let found = python().args(["-c", "import ray"]).stderr(Stdio::null()).status();
    found.is_ok_and(|status| status.success()).then(python)
}

fn wait_for(what: &str, child: &mut Child, mut ready: impl FnMut() -> bool) {
    let started = Instant::now();
    while !ready() {
        assert!(child.try_wait().unwrap().is_none(), "the build ended before {what}");
        assert!(started.elapsed() < Duration::from_mins(5), "no {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_ray_build_whose_worker_is_killed_in_the_middle_ends_with_the_right_bytes() {
    let Some(mut python) = python_with_ray() else {
        test_vectors::report_skip("the Python package ray is absent");
        return;
    };
    let setting = Setting::new("64");
    let out = setting.path("built.gguf");
    let mut build = python
        .arg(repository().join("examples/cluster/ray_build.py"))
        .args(["--local", "2", "--shards", "2", "--program", GGSMITH, "--out"])
        .arg(&out)
        .args(["--", "--quiet", "--recipe", "q2", "--hf"])
        .arg(setting.path("checkpoint"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (part, workers) =
        (setting.path("built-00002-of-00002.gguf.part"), setting.path("built-00002-of-00002.gguf.workers"));
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
    wait_for("share 2 was begun", &mut build, || size(&part) > 0);
    let attempts = std::fs::read_to_string(&workers).unwrap();
    let worker = attempts.split_whitespace().nth(1).unwrap().to_owned();
    run(Command::new("kill").args(["-KILL", &worker]));
    assert!(
        size(&part) > 0 && !setting.path("built-00002-of-00002.gguf").exists(),
        "it was killed in the middle"
    );
    wait_for("another worker took over", &mut build, || {
        std::fs::read_to_string(&workers).is_ok_and(|text| text.lines().count() > 1)
    });
    assert!(build.wait().unwrap().success());
    assert!(std::fs::read(&out).unwrap() == setting.whole, "the merged file has the bytes of one machine's");
}

#[test]
fn the_slurm_jobs_make_the_bytes_of_one_machine_and_finished_shares_are_kept() {
    let setting = Setting::new("8");
    let out = setting.path("built.gguf");
    let programs = Path::new(GGSMITH).parent().unwrap().display().to_string();
    let job = |name: &str, share: &str| {
        let mut job = Command::new("bash");
        job.arg(repository().join("examples/cluster").join(name))
            .env("PATH", format!("{programs}:/usr/bin:/bin"))
            .env("SLURM_ARRAY_TASK_ID", share)
            .env("SLURM_CPUS_PER_TASK", "1")
            .arg("3")
            .arg(&out);
        job
    };
    let build = |share: &str| {
        run(job("build.sbatch", share)
            .args(["--quiet", "--recipe", "q2", "--hf"])
            .arg(setting.path("checkpoint")))
    };
    for share in ["2", "3", "1"] {
        build(share);
    }
    let again = String::from_utf8(build("2").stdout).unwrap();
    assert!(again.contains("built-00002-of-00003.gguf is finished"), "{again}");
    run(&mut job("merge.sbatch", "1"));
    assert!(std::fs::read(&out).unwrap() == setting.whole);
    run(Command::new("bash").arg("-n").arg(repository().join("examples/cluster/submit.sh")));
}
