//! The build through its public interface: same bytes however it is run, nothing lost however it ends.

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf_tools::build::{BuildError, BuildOptions, BuildReport, Sink, build, build_into};
use gguf_tools::checkpoint::Checkpoint;
use gguf_tools::compare::compare;
use gguf_tools::gguf::Gguf;
use gguf_tools::importance::{Found, ImportanceSource, Matrix, NoImportance, Provenance};
use gguf_tools::plan::{Plan, Recipe};
use gguf_tools::progress::{Progress, Silent, Step};
use gguf_tools::source::{CheckpointSource, WeightSource};
use gguf_tools::synth::{Shape, SynthOptions, write_checkpoint};

const OPTIONS: BuildOptions = BuildOptions { overwrite: false, resume: true, importance_fallback: true };

struct Setting {
    folder: tempfile::TempDir,
    source: CheckpointSource,
}

impl Setting {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = folder.path().join("checkpoint");
        write_checkpoint(&checkpoint, &SynthOptions::new(Shape::Tiny), &Silent).unwrap();
        let source = CheckpointSource::new(Checkpoint::open(&checkpoint).unwrap()).unwrap();
        Self { folder, source }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn plan(&self, recipe: &str) -> Plan {
        let metadata = self.source.metadata().unwrap();
        Plan::new(&self.source, &Recipe::built_in(recipe).unwrap(), metadata).unwrap()
    }

    fn build(&self, recipe: &str, out: &str, progress: &dyn Progress) -> Result<BuildReport, BuildError> {
        build(&self.plan(recipe), &self.source, &NoImportance, &self.path(out), OPTIONS, progress)
    }
}

fn in_pool<T: Send>(n_threads: usize, work: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap().install(work)
}

/// Asks to stop at the `n`th step.
struct StopAt(usize, AtomicUsize);

impl Progress for StopAt {
    fn step(&self, _: &Step<'_>) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }

    fn interrupted(&self) -> bool {
        self.1.load(Ordering::SeqCst) >= self.0
    }
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn bytes_do_not_depend_on_the_number_of_threads() {
    let setting = Setting::new();
    let one = in_pool(1, || setting.build("q2", "one.gguf", &Silent).unwrap());
    let three = in_pool(3, || setting.build("q2", "three.gguf", &Silent).unwrap());
    assert_eq!(one.sha256, three.sha256);
    assert_eq!(one.file_bytes, std::fs::metadata(setting.path("one.gguf")).unwrap().len());
    assert_eq!(names_in(setting.folder.path()), ["checkpoint", "one.gguf", "three.gguf"]);
}

#[test]
fn an_interrupted_build_goes_on_and_ends_with_the_same_bytes() {
    let setting = Setting::new();
    let undisturbed = in_pool(1, || setting.build("q4", "whole.gguf", &Silent).unwrap());
    let mut interruptions = 0;
    let resumed = loop {
        let progress = StopAt(1, AtomicUsize::new(0));
        match in_pool(1, || setting.build("q4", "parts.gguf", &progress)) {
            Ok(report) => break report,
            Err(BuildError::Interrupted { done_bytes, total_bytes, .. }) => {
                assert!(done_bytes < total_bytes);
                assert!(!setting.path("parts.gguf").exists(), "nothing lies under the final name");
                interruptions += 1;
                assert!(interruptions < 1000, "no progress");
            }
            Err(other) => panic!("{other}"),
        }
    };
    assert!(interruptions >= 1 && resumed.resumed_bytes > 0);
    assert_eq!(resumed.sha256, undisturbed.sha256);
    assert_eq!(
        std::fs::read(setting.path("parts.gguf")).unwrap(),
        std::fs::read(setting.path("whole.gguf")).unwrap()
    );
}

#[test]
fn a_part_file_of_another_plan_or_with_changed_bytes_is_not_continued() {
    let setting = Setting::new();
    let stop = || StopAt(1, AtomicUsize::new(0));
    let interrupted = in_pool(1, || setting.build("q2", "out.gguf", &stop()));
    assert!(matches!(interrupted, Err(BuildError::Interrupted { .. })));
    let other = setting.build("q4", "out.gguf", &Silent).unwrap_err().to_string();
    assert!(other.contains("another plan") && other.contains("--no-resume"), "{other}");
    let part = setting.path("out.gguf.part");
    let mut bytes = std::fs::read(&part).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&part, bytes).unwrap();
    let damaged = setting.build("q2", "out.gguf", &Silent).unwrap_err().to_string();
    assert!(damaged.contains("SHA-256 differs"), "{damaged}");
    let again = BuildOptions { resume: false, ..OPTIONS };
    build(&setting.plan("q2"), &setting.source, &NoImportance, &setting.path("out.gguf"), again, &Silent)
        .unwrap();
}

/// Fails at the `n`th append, as a disk that fills up.
struct FullDisk {
    appends_left: usize,
    done_bytes: u64,
}

impl Sink for FullDisk {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.appends_left == 0 {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.appends_left -= 1;
        self.done_bytes += bytes.len() as u64;
        Ok(())
    }

    fn done_bytes(&self) -> u64 {
        self.done_bytes
    }

    fn sha256(&self) -> String {
        String::new()
    }

    fn path(&self) -> PathBuf {
        PathBuf::from("full/disk.gguf.part")
    }
}

#[test]
fn a_disk_that_fills_up_at_any_write_is_reported_with_place_and_tensor() {
    let setting = Setting::new();
    let plan = setting.plan("q2");
    let header = plan.layout.header_bytes();
    for appends_left in 0.. {
        let mut sink = FullDisk { appends_left, done_bytes: 0 };
        let result = in_pool(1, || {
            build_into(&plan, &setting.source, &NoImportance, &header, &mut sink, OPTIONS, &Silent)
        });
        match result {
            Err(error @ BuildError::Write { .. }) => {
                let text = error.to_string();
                assert!(text.contains("full/disk.gguf.part") && text.contains("no storage space"), "{text}");
            }
            Ok(_) => {
                assert!(appends_left > 1);
                break;
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn an_output_that_exists_or_is_an_input_is_never_touched() {
    let setting = Setting::new();
    std::fs::write(setting.path("mine.gguf"), "precious").unwrap();
    let refused = setting.build("q2", "mine.gguf", &Silent).unwrap_err().to_string();
    assert!(refused.contains("--overwrite"), "{refused}");
    assert_eq!(std::fs::read_to_string(setting.path("mine.gguf")).unwrap(), "precious");
    let shard = setting.source.files()[0].clone();
    let before = std::fs::read(&shard).unwrap();
    let overwrite = BuildOptions { overwrite: true, ..OPTIONS };
    let refused = build(&setting.plan("q2"), &setting.source, &NoImportance, &shard, overwrite, &Silent);
    assert!(refused.unwrap_err().to_string().contains("it is an input"));
    assert_eq!(std::fs::read(&shard).unwrap(), before);
    let nowhere = setting.path("absent/out.gguf");
    let refused = build(&setting.plan("q2"), &setting.source, &NoImportance, &nowhere, OPTIONS, &Silent);
    assert!(refused.unwrap_err().to_string().contains("absent/out.gguf.part"));
}

/// Knows every expert but some.
struct Partial {
    unseen: usize,
}

impl ImportanceSource for Partial {
    fn importance(&self, matrix: &Matrix<'_>) -> Found<'_> {
        if matrix.expert_index == self.unseen {
            return Found::Unseen;
        }
        Found::Values(Cow::Owned((0..matrix.n_columns).map(|c| 0.5 + (c % 7) as f32).collect()))
    }

    fn provenance(&self) -> Option<Provenance> {
        Some(Provenance {
            file_name: "partial.dat".to_owned(),
            sha256: "0".repeat(64),
            datasets: Vec::new(),
            n_entries: 1,
            n_chunks: None,
        })
    }
}

#[test]
fn an_unseen_expert_gets_the_bytes_it_has_without_a_matrix_and_is_named() {
    let setting = Setting::new();
    let plan = setting.plan("q2");
    let build_with = |importance: &dyn ImportanceSource, name: &str| {
        build(&plan, &setting.source, importance, &setting.path(name), OPTIONS, &Silent).unwrap()
    };
    let partial = build_with(&Partial { unseen: 3 }, "partial.gguf");
    build_with(&NoImportance, "none.gguf");
    let open = |name: &str| Gguf::open(setting.path(name)).unwrap();
    let (with, without) = (open("partial.gguf"), open("none.gguf"));
    let mut changed = 0;
    for tensor in plan.tensors.iter().filter(|t| t.spec.family.is_routed()) {
        let name = &tensor.spec.gguf_name;
        let expert = tensor.n_bytes as usize / tensor.n_matrices();
        let bytes = |gguf: &'_ Gguf| gguf.data(gguf.tensor(name).unwrap()).unwrap().to_vec();
        let (a, b) = (bytes(&with), bytes(&without));
        assert_eq!(a[3 * expert..4 * expert], b[3 * expert..4 * expert], "{name}");
        changed += usize::from(a[..expert] != b[..expert]);
        assert!(partial.fallback_importance.iter().any(|n| n.tensor == *name && n.expert_index == 3));
    }
    assert!(changed > 0, "the matrix has no effect at all");
    let strict = BuildOptions { importance_fallback: false, ..OPTIONS };
    let refused =
        build(&plan, &setting.source, &Partial { unseen: 3 }, &setting.path("strict.gguf"), strict, &Silent);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("expert 3") && refused.contains("never reached"), "{refused}");
}

#[test]
fn every_recipe_can_be_made_again_byte_for_byte_and_mxfp4_is_lossless() {
    let setting = Setting::new();
    for (recipe, worst_routed_error) in [("q2", 0.5), ("q2-q4", 0.12), ("q4", 0.12), ("mxfp4", 0.0)] {
        let out = format!("{recipe}.gguf");
        setting.build(recipe, &out, &Silent).unwrap();
        let gguf = Gguf::open(setting.path(&out)).unwrap();
        let plan = setting.plan(recipe);
        let found = compare(&plan, &setting.source, &NoImportance, &gguf, &[], true, &Silent).unwrap();
        assert_eq!(found.tensors.len(), plan.tensors.len());
        for (tensor, planned) in found.tensors.iter().zip(&plan.tensors) {
            assert_eq!(tensor.differing_bytes, Some(0), "{}", tensor.tensor);
            let bound = if planned.spec.family.is_routed() { worst_routed_error } else { 0.02 };
            assert!(tensor.relative_error <= bound, "{} {} {}", recipe, tensor.tensor, tensor.relative_error);
        }
    }
}

#[test]
fn parts_built_apart_merge_to_the_bytes_of_the_whole() {
    use gguf_tools::plan::PlanPart;
    use gguf_tools::rewrite::{merge, open_parts, parse_layer_parts, shard_name, write_files};
    let setting = Setting::new();
    setting.build("q2", "whole.gguf", &Silent).unwrap();
    let whole = std::fs::read(setting.path("whole.gguf")).unwrap();
    let plan = setting.plan("q2");
    let make = |part: PlanPart, out: &Path| {
        let part = plan.part(part).unwrap();
        let report = build(&part, &setting.source, &NoImportance, out, OPTIONS, &Silent).unwrap();
        assert_eq!(report.file_bytes, part.file_bytes());
    };
    let merged = |given: &[PathBuf], name: &str| {
        let parts = open_parts(given).unwrap();
        let file = merge(&parts, &setting.path(name)).unwrap();
        write_files(&[file], given, gguf_tools::rewrite::WriteOptions::default(), &Silent).unwrap();
        std::fs::read(setting.path(name)).unwrap()
    };
    for n_shards in [1, 2, 3, 7] {
        let names: Vec<_> = (0..n_shards).map(|i| shard_name(&setting.path("s"), i, n_shards)).collect();
        for (index, name) in names.iter().enumerate().rev() {
            make(PlanPart::Shard { index, n_shards }, name);
        }
        let out = format!("merged-{n_shards}.gguf");
        assert!(merged(&names[n_shards - 1..], &out) == whole, "{n_shards} shards");
    }
    let names = [setting.path("m-Layers00-01.gguf"), setting.path("m-Layers-02-output.gguf")];
    for (part, name) in parse_layer_parts("0:1,2:output").unwrap().into_iter().zip(&names) {
        make(PlanPart::Layers(part), name);
    }
    assert!(merged(&names[..1], "layers.gguf") == whole);
    // Shards of different recipes are no set.
    let foreign = setting.plan("q4").part(PlanPart::Shard { index: 1, n_shards: 2 }).unwrap();
    let name = shard_name(&setting.path("s"), 1, 2);
    let overwrite = BuildOptions { overwrite: true, ..OPTIONS };
    build(&foreign, &setting.source, &NoImportance, &name, overwrite, &Silent).unwrap();
    let refused = Gguf::open(&name).unwrap_err().to_string();
    assert!(refused.contains("different plans"), "{refused}");
    assert!(
        plan.part(PlanPart::Shard { index: 0, n_shards: 1000 })
            .unwrap_err()
            .to_string()
            .contains("number of tensors")
    );
    let beyond = parse_layer_parts("2:9").unwrap()[0];
    assert!(plan.part(PlanPart::Layers(beyond)).unwrap_err().to_string().contains("layers 0 to 2"));
}
