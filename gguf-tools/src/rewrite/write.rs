//! Writing new files: all of them or none under their final names, going on where an earlier run stopped.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::copy::{BUFFER_BYTES, Copier};
use super::part::{PartFile, Segment, Sources, Stopped, equal_bytes, segments, source_paths, write_segments};
use super::{CopyMethod, NewFile, RewriteError, clones_files};
use crate::build::free_bytes;
use crate::progress::{Progress, Step};

/// How files are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// Replace files of the final names.
    pub overwrite: bool,
    /// Let every byte pass through a buffer, for a file system whose own copying is not to be trusted.
    pub through_buffer: bool,
}

/// What became of one file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Written {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub file_bytes: u64,
    /// Its tensors.
    pub n_tensors: usize,
    /// Bytes that an earlier run had written already; all of them, if the file was there with the very bytes.
    pub resumed_bytes: u64,
    /// How the last of its data was copied.
    pub method: CopyMethod,
}

/// One file with everything that writing it needs.
struct Job<'a> {
    file: &'a NewFile<'a>,
    header: Vec<u8>,
    segments: Vec<Segment>,
    part_path: PathBuf,
    part: Option<File>,
    sound_bytes: u64,
}

/// Writes new files beside their final names and renames them when the last one is on disk.
///
/// Going on: a part file of an earlier run is compared with what it should hold and continued from the first byte that
/// differs, so nothing is taken on trust. A file that lies under its final name with the very bytes is left as it is.
/// Memory: one buffer of 8 MiB (two while comparing), and the headers. `inputs`: files that are never written over.
///
/// # Errors
/// [`RewriteError`]; nothing new lies under a final name then, unless renaming itself failed half way.
pub fn write_files(
    files: &[NewFile<'_>],
    inputs: &[PathBuf],
    options: WriteOptions,
    progress: &dyn Progress,
) -> Result<Vec<Written>, RewriteError> {
    let mut sources = Sources::default();
    for file in files {
        sources.open(file)?;
    }
    check_names(files)?;
    let mut jobs = Vec::new();
    for file in files {
        jobs.push(Job::open(file, &sources, inputs, options)?);
    }
    let room = check_room(&jobs);
    if let Err(error) = room {
        jobs.iter().for_each(Job::remove_if_empty);
        return Err(error);
    }
    let total_bytes: u64 = files.iter().map(|f| f.layout.file_bytes()).sum();
    let total_items: usize = files.iter().map(|f| f.origins.len()).sum();
    let (mut done_bytes, mut done_items) = (0, 0);
    let method = if options.through_buffer { CopyMethod::Buffer } else { CopyMethod::System };
    let mut copier = Copier::new(method);
    let mut written = Vec::new();
    for job in &jobs {
        let mut step = |segment: &Segment, at: u64| {
            progress.step(&Step {
                item: job.item(segment.tensor_index),
                done_bytes: done_bytes + at,
                total_bytes,
                done_items: done_items + segment.tensor_index,
                total_items,
            });
            !progress.interrupted()
        };
        job.write(&sources, &mut copier, &mut step).map_err(|error| match error {
            RewriteError::Interrupted { done_bytes: here, .. } => {
                RewriteError::Interrupted { done_bytes: done_bytes + here, total_bytes }
            }
            other => other,
        })?;
        done_bytes += job.file.layout.file_bytes();
        done_items += job.file.origins.len();
        written.push(Written {
            path: job.file.path.clone(),
            file_bytes: job.file.layout.file_bytes(),
            n_tensors: job.file.origins.len(),
            resumed_bytes: job.sound_bytes,
            method: copier.method(),
        });
    }
    for job in &jobs {
        job.publish(options.overwrite)?;
    }
    Ok(written)
}

impl<'a> Job<'a> {
    /// Refuses an output that may not be written, and finds out what of it is there already.
    fn open(
        file: &'a NewFile<'a>,
        sources: &Sources,
        inputs: &[PathBuf],
        options: WriteOptions,
    ) -> Result<Self, RewriteError> {
        let header = file.layout.header_bytes();
        let segments = segments(file, sources);
        let part_path = with_suffix(&file.path, ".part");
        let output = |path: &Path, problem: String| RewriteError::Output { path: path.to_owned(), problem };
        for path in [&file.path, &part_path] {
            if let Some(input) = inputs.iter().find(|input| is_same_file(input, path)) {
                let problem = format!("it is an input (`{}`); choose another name", input.display());
                return Err(output(path, problem));
            }
        }
        let mut job = Self { file, header, segments, part_path, part: None, sound_bytes: 0 };
        if file.path.is_dir() {
            return Err(output(&file.path, "it is a folder; give the name of a file".to_owned()));
        }
        if file.path.exists() && !options.overwrite {
            let equal = File::open(&file.path).and_then(|f| job.equal_bytes(&f, sources));
            if equal.is_ok_and(|n| n == file.layout.file_bytes())
                && std::fs::metadata(&file.path).is_ok_and(|m| m.len() == file.layout.file_bytes())
            {
                job.sound_bytes = file.layout.file_bytes();
                return Ok(job);
            }
            let problem = "it exists with other content; choose another name or pass --overwrite";
            return Err(output(&file.path, problem.to_owned()));
        }
        let part = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&job.part_path)
            .map_err(|e| output(&job.part_path, format!("{e}; choose a folder you may write to")))?;
        part.try_lock().map_err(|_| {
            let problem = "another run is writing it; wait for that run or choose another name";
            output(&job.part_path, problem.to_owned())
        })?;
        job.sound_bytes =
            job.equal_bytes(&part, sources).map_err(|e| output(&job.part_path, e.to_string()))?;
        part.set_len(job.sound_bytes).map_err(|e| output(&job.part_path, e.to_string()))?;
        job.part = Some(part);
        Ok(job)
    }

    fn equal_bytes(&self, existing: &File, sources: &Sources) -> io::Result<u64> {
        equal_bytes(existing, &self.header, &self.segments, sources)
    }

    /// The tensor with this number, or what comes after the last.
    fn item(&self, tensor_index: usize) -> &str {
        self.file.layout.tensors().get(tensor_index).map_or("padding", |tensor| tensor.name.as_str())
    }

    /// Writes what is missing of the part file and waits for the disk.
    fn write(
        &self,
        sources: &Sources,
        copier: &mut Copier,
        step: &mut dyn FnMut(&Segment, u64) -> bool,
    ) -> Result<(), RewriteError> {
        let Some(file) = &self.part else { return Ok(()) };
        let mut target = PartFile { file, copier };
        let result =
            write_segments(&mut target, &self.header, &self.segments, sources, self.sound_bytes, step);
        let fail = |offset_bytes: u64, item: String, source: io::Error| RewriteError::Copy {
            path: self.part_path.clone(),
            offset_bytes,
            item,
            source,
        };
        match result {
            Ok(()) => file.sync_all().map_err(|source| {
                fail(self.file.layout.file_bytes(), "waiting for the disk".to_owned(), source)
            }),
            Err(Stopped { offset_bytes, error: None, .. }) => {
                Err(RewriteError::Interrupted { done_bytes: offset_bytes, total_bytes: 0 })
            }
            Err(Stopped { offset_bytes, tensor_index, error: Some(source) }) => {
                Err(fail(offset_bytes, format!("tensor `{}`", self.item(tensor_index)), source))
            }
        }
    }

    /// Gives a finished part file its final name.
    fn publish(&self, overwrite: bool) -> Result<(), RewriteError> {
        if self.part.is_none() {
            return Ok(());
        }
        let keep = |problem: String| RewriteError::Output {
            path: self.file.path.clone(),
            problem: format!("{problem}; the finished data is kept as `{}`", self.part_path.display()),
        };
        if !overwrite && self.file.path.exists() {
            return Err(keep("a file of that name has appeared meanwhile".to_owned()));
        }
        std::fs::rename(&self.part_path, &self.file.path)
            .and_then(|()| File::open(folder_of(&self.file.path))?.sync_all())
            .map_err(|e| keep(e.to_string()))
    }

    fn remove_if_empty(&self) {
        if self.part.is_some() && self.sound_bytes == 0 {
            // Nothing is in it; failing to remove it harms nothing.
            let _ = std::fs::remove_file(&self.part_path);
        }
    }
}

fn check_names(files: &[NewFile<'_>]) -> Result<(), RewriteError> {
    for (i, file) in files.iter().enumerate() {
        if files[..i].iter().any(|other| other.path == file.path) {
            return Err(RewriteError::Output {
                path: file.path.clone(),
                problem: "two new files would have this name".to_owned(),
            });
        }
    }
    Ok(())
}

/// All files of a set lie in one folder. Where the file system shares blocks, data takes next to no room.
fn check_room(jobs: &[Job<'_>]) -> Result<(), RewriteError> {
    let Some(first) = jobs.first() else { return Ok(()) };
    let folder = folder_of(&first.file.path);
    let left = |job: &Job<'_>| job.file.layout.file_bytes() - job.sound_bytes;
    let mut needed_bytes: u64 = jobs.iter().map(left).sum();
    let output = |e: io::Error| RewriteError::Output { path: folder.clone(), problem: e.to_string() };
    let free_bytes = free_bytes(&folder).map_err(output)?;
    if needed_bytes > free_bytes {
        let shared = jobs.iter().all(|job| source_paths(job.file).iter().all(|s| clones_files(s, &folder)));
        if shared {
            needed_bytes = jobs.iter().map(unshared_bytes).sum();
        }
    }
    if needed_bytes > free_bytes {
        return Err(RewriteError::NoRoom { folder, needed_bytes, free_bytes });
    }
    Ok(())
}

/// Bytes that take room on a file system that shares blocks: the header, and tensors that do not begin alike in their
/// blocks.
fn unshared_bytes(job: &Job<'_>) -> u64 {
    const BLOCK: u64 = 4096;
    let data = |(placed, origin): (&crate::gguf::PlacedTensor, &super::Origin<'_>)| {
        let from =
            origin.gguf.shards()[origin.tensor.shard_index].data_offset_bytes + origin.tensor.offset_bytes;
        let aligned = from.is_multiple_of(BLOCK) && placed.offset_bytes.is_multiple_of(BLOCK);
        if aligned { placed.n_bytes % BLOCK + BLOCK } else { placed.n_bytes }
    };
    let tensors: u64 = job.file.layout.tensors().iter().zip(&job.file.origins).map(data).sum();
    job.file.layout.data_offset_bytes() + tensors + BUFFER_BYTES as u64
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    match (std::fs::metadata(one), std::fs::metadata(other)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

pub(super) fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}
