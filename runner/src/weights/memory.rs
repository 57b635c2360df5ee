//! How much memory this process may use.

use std::fs::read_to_string;
use std::path::Path;

/// Bytes that can be had without pushing anything out, as the system tells, and at most what the limits of this
/// process's control groups (versions 1 and 2) allow. `None` where nothing is known.
pub(crate) fn available_bytes() -> Option<u64> {
    let free = read_to_string("/proc/meminfo").ok().and_then(|text| available_of(&text));
    let groups = read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = limit_files(&groups)
        .into_iter()
        .filter_map(|path| read_to_string(Path::new("/sys/fs/cgroup").join(path)).ok()?.trim().parse().ok());
    free.into_iter().chain(limits).min()
}

/// All memory of the machine, and [`available_bytes`].
pub(crate) fn host_memory() -> Option<(u64, u64)> {
    let text = read_to_string("/proc/meminfo").ok()?;
    Some((field_of(&text, "MemTotal:")?, available_bytes()?))
}

fn available_of(text: &str) -> Option<u64> {
    field_of(text, "MemAvailable:")
}

/// A field of `/proc/meminfo` in bytes.
fn field_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Files with the limits of the groups in `/proc/self/cgroup` and of those around them, below `/sys/fs/cgroup`.
fn limit_files(groups: &str) -> Vec<String> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (folder, file) = match controllers {
            "" => ("", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => ("memory/", "memory.limit_in_bytes"),
            _ => continue,
        };
        let mut group = group.trim_matches('/');
        loop {
            let slash = if group.is_empty() { "" } else { "/" };
            files.push(format!("{folder}{group}{slash}{file}"));
            match group.rsplit_once('/') {
                Some((outer, _)) => group = outer,
                None if group.is_empty() => break,
                None => group = "",
            }
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal:       24689764 kB\nMemFree:  1 kB\nMemAvailable:   21000000 kB\n";
        assert_eq!(available_of(text), Some(21_504_000_000));
        assert_eq!(available_of("MemTotal: 1 kB\n"), None);
        assert_eq!(available_of("MemAvailable: lots\n"), None);
    }

    #[test]
    fn limits_of_both_versions_and_of_outer_groups_count() {
        let groups = "5:devices:/\n4:memory:/outer/inner\n0::/unit\n";
        let expected = [
            "memory/outer/inner/memory.limit_in_bytes",
            "memory/outer/memory.limit_in_bytes",
            "memory/memory.limit_in_bytes",
            "unit/memory.max",
            "memory.max",
        ];
        assert_eq!(limit_files(groups), expected);
        assert!(limit_files("no groups").is_empty());
    }
}
