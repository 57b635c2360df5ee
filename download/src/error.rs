//! Why a download cannot be had.

use std::path::PathBuf;

/// Why a download failed. Every message names the file or address, what was found, what was expected and what to do.
/// Addresses are shown without their query, which may hold a signature.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DownloadError {
    /// The text names nothing that can be downloaded.
    #[error(
        "`{given}` is nothing to download: {problem}\n  give a name from `ggsmith download list`, hf:ORG/NAME[/PATH][@REV], or an https address"
    )]
    Reference {
        /// What was asked for.
        given: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A setting that cannot be used.
    #[error("{setting} is `{found}`, expected {expected}")]
    Setting {
        /// Variable or flag.
        setting: &'static str,
        /// Its value.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
    /// The machinery of requests cannot start.
    #[error(
        "cannot prepare HTTPS: {problem}\n  the system's certificates are needed; install the package `ca-certificates`"
    )]
    Client {
        /// The library's own words.
        problem: String,
    },
    /// The server's certificate is not one that is trusted.
    #[error(
        "{host}: its certificate is not trusted: {problem}\n  if a proxy of your network opens connections, name the file with its root certificate in SSL_CERT_FILE; otherwise somebody answers in the place of {host}"
    )]
    Certificate {
        /// Host and port.
        host: String,
        /// The library's own words.
        problem: String,
    },
    /// Offline by `HF_HUB_OFFLINE`, and not there.
    #[error("`{wanted}` is not in `{}`, and HF_HUB_OFFLINE forbids asking the hub\n  unset it, or give a folder that has the file", looked_in.display())]
    Offline {
        /// What was asked for.
        wanted: String,
        /// Where it was looked for.
        looked_in: PathBuf,
    },
    /// The repository has no such file.
    #[error("`{path}` is not in {repository} at {revision}\n  {}", nearest(near))]
    NoSuchFile {
        /// The file.
        path: String,
        /// The repository.
        repository: String,
        /// The revision.
        revision: String,
        /// Files with the most similar names, most similar first.
        near: Vec<String>,
    },
    /// The patterns left nothing.
    #[error(
        "no file of {repository} at {revision} fits the patterns; it has {n_files} files\n  see them with `--dry-run` and no patterns"
    )]
    NothingSelected {
        /// The repository.
        repository: String,
        /// The revision.
        revision: String,
        /// Files that it has.
        n_files: usize,
    },
    /// The hub wants another token, or one at all.
    #[error(
        "{host} answers {status} for {what}\n  {said}\n  the repository is private, gated or misspelt: accept its terms on the hub, and set HF_TOKEN to a token that may read it"
    )]
    Forbidden {
        /// Who answered.
        host: String,
        /// Its status.
        status: u16,
        /// What was asked for.
        what: String,
        /// First line of the answer.
        said: String,
    },
    /// A status that does not pass by waiting.
    #[error("{host} answers {status} for {what}\n  it says: {said}")]
    Status {
        /// Who answered.
        host: String,
        /// Its status.
        status: u16,
        /// What was asked for.
        what: String,
        /// First line of the answer.
        said: String,
    },
    /// An answer of the hub that cannot be read.
    #[error(
        "cannot read the answer of {host} for {what}: {problem}\n  check HF_ENDPOINT: the address must be that of a hub"
    )]
    Answer {
        /// Who answered.
        host: String,
        /// What was asked for.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// Too many attempts without progress.
    #[error(
        "gave up on `{file}` after {attempts} attempts without progress, with {done_bytes} of {n_bytes} bytes done\n  last: {last}\n  what is done stays beside the target; run the same command again to go on"
    )]
    GaveUp {
        /// The file.
        file: String,
        /// Attempts in a row that brought nothing.
        attempts: u32,
        /// Bytes on disk and verified.
        done_bytes: u64,
        /// Bytes of the whole file, 0 if unknown.
        n_bytes: u64,
        /// What the last attempt met.
        last: String,
    },
    /// Something else came instead of the file.
    #[error("{host} sends {found} instead of `{file}`\n  {advice}")]
    NotTheFile {
        /// The file.
        file: String,
        /// Who answered.
        host: String,
        /// What the bytes are.
        found: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// The bytes are not those that were announced, and a second look at the server changed nothing.
    #[error("`{file}` has the wrong {algorithm}\n  found    {found}\n  expected {expected}\n  {}\n  nothing was put under the final name; the bytes are in `{}`: remove it to start from nothing", blame(*compared_bytes), part.display())]
    Digest {
        /// The file.
        file: String,
        /// `SHA-256` or `git SHA-1`.
        algorithm: &'static str,
        /// Hexadecimal.
        found: String,
        /// Hexadecimal.
        expected: String,
        /// Bytes that were fetched a second time and were equal to the first.
        compared_bytes: u64,
        /// Where the bytes are.
        part: PathBuf,
    },
    /// The file has another size than was announced.
    #[error(
        "`{file}` has {found} bytes at {host}, {expected} were announced\n  the file changed or the catalogue is out of date; check the address"
    )]
    Size {
        /// The file.
        file: String,
        /// Who answered.
        host: String,
        /// What the server says now.
        found: u64,
        /// What was announced.
        expected: u64,
    },
    /// The file changed on the server again and again while it was fetched.
    #[error(
        "`{file}` changes on the server while it is fetched: its ETag was `{before}` and is `{now}`\n  wait until its publisher is done, or give a fixed revision with @REV"
    )]
    Changing {
        /// The file.
        file: String,
        /// ETag at first.
        before: String,
        /// ETag at last.
        now: String,
    },
    /// Not enough room.
    #[error("not enough room in `{}`\n  needs {needed_bytes} bytes ({}), {free_bytes} are free ({}); nothing was fetched\n  free some, or choose another place with --local-dir or HF_HOME", folder.display(), gib(*needed_bytes), gib(*free_bytes))]
    NoSpace {
        /// Where the files would go.
        folder: PathBuf,
        /// Bytes still to be written.
        needed_bytes: u64,
        /// Bytes that are free.
        free_bytes: u64,
    },
    /// Another program's unfinished download of the same file.
    #[error("`{}` is an unfinished download of {program}\n  finish it there, or remove it; `--beside-foreign` starts a second download beside it and leaves it alone", found.display())]
    Foreign {
        /// The file that was found.
        found: PathBuf,
        /// Who writes such files.
        program: &'static str,
    },
    /// Another process works on the same file.
    #[error("another process downloads `{}`\n  wait for it, or end it", part.display())]
    Locked {
        /// The part file.
        part: PathBuf,
    },
    /// A file of this name is there, and it is not the one asked for.
    #[error("`{}` is there and is not the file asked for: {problem}\n  `ggsmith download verify` repairs a damaged download; `--overwrite` replaces the file", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
        /// How it differs.
        problem: String,
    },
    /// The system refuses.
    #[error("cannot {action} `{}`", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// The system's own words.
        source: std::io::Error,
    },
    /// The data are whole and checked, but cannot be given their name.
    #[error("`{}` is complete and checked, but cannot be renamed to `{}`\n  make the folder writable and run the same command again, or rename it by hand", part.display(), target.display())]
    Rename {
        /// Where the data are.
        part: PathBuf,
        /// Where they should be.
        target: PathBuf,
        /// The system's own words.
        source: std::io::Error,
    },
    /// The caller asked to stop.
    #[error("stopped with {done_bytes} of {n_bytes} bytes done; run the same command again to go on")]
    Interrupted {
        /// Bytes on disk and verified.
        done_bytes: u64,
        /// Bytes of all files.
        n_bytes: u64,
    },
    /// A folder that was never filled by a download.
    #[error("`{}` holds no record of a download\n  give a folder that `ggsmith download` or the hub's own tool filled, or say with `--from hf:ORG/NAME` what it should hold", folder.display())]
    NoRecord {
        /// The folder.
        folder: PathBuf,
    },
}

impl DownloadError {
    /// An [`DownloadError::Io`] for this action and path.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

fn nearest(near: &[String]) -> String {
    if near.is_empty() {
        return "it has no file with a similar name; nothing was fetched".to_owned();
    }
    let names: Vec<_> = near.iter().map(|name| format!("`{name}`")).collect();
    format!("the most similar names there: {}; nothing was fetched", names.join(", "))
}

fn blame(compared_bytes: u64) -> &'static str {
    if compared_bytes > 0 {
        "every piece was fetched a second time and came out the same: the server has other bytes than it announces"
    } else {
        "the bytes on disk are those that came; the server has other bytes than it announces"
    }
}

fn gib(n_bytes: u64) -> String {
    format!("{:.2} GiB", n_bytes as f64 / (1_u64 << 30) as f64)
}
