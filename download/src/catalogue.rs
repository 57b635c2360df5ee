//! Short names for what people download most.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// One name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// The name.
    pub name: String,
    /// What it is, in one line.
    pub summary: String,
    /// Repository on the hub.
    pub repository: String,
    /// Commit that the digests were recorded at; the newest if absent.
    pub revision: Option<String>,
    /// Whether this is a model that runtimes load by itself, and so may be linked to as the selected one.
    #[serde(default)]
    pub model: bool,
    /// Its files.
    #[serde(default)]
    pub files: Vec<TargetFile>,
    /// Patterns of its files, where there are too many to name.
    #[serde(default)]
    pub include: Vec<String>,
}

/// One file of a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetFile {
    /// Path in the repository.
    pub path: String,
    /// Size, if a public record of it was found.
    pub bytes: Option<u64>,
    /// SHA-256, if a public record of it was found.
    pub sha256: Option<String>,
}

#[derive(Deserialize)]
struct File {
    target: Vec<Target>,
}

static TARGETS: LazyLock<Vec<Target>> = LazyLock::new(|| {
    let file: File = toml::from_str(include_str!("catalogue.toml")).expect("a test reads the catalogue");
    file.target
});

/// All targets.
pub fn targets() -> &'static [Target] {
    &TARGETS
}

/// The target of this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::digest::Digest;
    use crate::reference::{Reference, is_safe_path};

    #[test]
    fn every_target_can_be_asked_for_by_a_name_of_its_own() {
        let mut names = HashSet::new();
        for target in targets() {
            assert!(names.insert(&target.name), "{} twice", target.name);
            assert_eq!(Reference::parse(&target.name).unwrap(), Reference::Target(target.name.clone()));
            assert!(Reference::parse(&format!("hf:{}", target.repository)).is_ok());
            assert!(target.files.is_empty() != target.include.is_empty(), "{}", target.name);
            for file in &target.files {
                assert!(is_safe_path(&file.path));
                let digest = file.sha256.as_deref().map(Digest::from_hex);
                assert!(matches!(digest, None | Some(Some(Digest::Sha256(_)))), "{}", file.path);
            }
        }
        for wanted in [
            "flash-q2",
            "flash-q2-q4",
            "flash-q4",
            "flash-mxfp4",
            "flash-dspark",
            "pro-q2",
            "pro-q4-layers00-30",
            "pro-q4-layers31-output",
            "flash-official",
            "pro-official",
            "flash-imatrix",
        ] {
            assert!(target(wanted).is_some(), "{wanted}");
        }
    }
}
