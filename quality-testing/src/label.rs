//! Which checkpoint a file or a set of recorded answers belongs to. Scores say something only where both are the same.

use std::path::Path;

use gguf_tools::checkpoint::{Checkpoint, CheckpointError};
use gguf_tools::gguf::{Gguf, GgufError};
use serde::{Deserialize, Serialize};

/// Why the checkpoint of a model is not known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabelError {
    /// The GGUF cannot be read.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The set was recorded from another checkpoint.
    #[error(
        "the cases of `{cases}` were recorded from checkpoint `{recorded}`, `{model}` is of `{found}`: the difference would be read \
         as a loss of quality; use cases of its own checkpoint, or score anyway with --allow-other-checkpoint"
    )]
    Other {
        /// The case set.
        cases: String,
        /// Its label.
        recorded: String,
        /// The model file.
        model: String,
        /// Its label.
        found: String,
    },
    /// One of the two does not say what it is.
    #[error(
        "`{path}` does not say which checkpoint it is of ({reason}); {hint}, or score anyway with --allow-other-checkpoint"
    )]
    Unknown {
        /// Which file.
        path: String,
        /// Why it is not known.
        reason: &'static str,
        /// What to do.
        hint: &'static str,
    },
}

/// The label of a GGUF (`ggsmith.checkpoint.label`, else `general.name`) or of a checkpoint folder.
///
/// # Errors
/// If the file cannot be read.
pub fn of_model(path: &Path) -> Result<Option<String>, LabelError> {
    if path.is_dir() {
        return Ok(Some(Checkpoint::open(path)?.label().to_owned()));
    }
    let gguf = Gguf::open(path)?;
    let text = |key: &str| gguf.metadata().get(key).and_then(|value| value.as_str());
    Ok(text("ggsmith.checkpoint.label").or_else(|| text("general.name")).map(str::to_owned))
}

/// Whether two labels name one checkpoint: letters and digits count, case, separators and a leading organisation do not.
pub fn is_same(a: &str, b: &str) -> bool {
    let plain = |label: &str| {
        let name = label.rsplit('/').next().unwrap_or(label);
        name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect::<String>()
    };
    plain(a) == plain(b)
}

/// The label of a case set, and how it is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetLabel {
    /// The checkpoint.
    pub label: String,
    /// Whether the set or the user names it; else it follows from the name of the API's model and the date.
    pub stated: bool,
}

/// Refuses to score a model by the answers of another checkpoint. `allow`: whatever they are.
///
/// # Errors
/// [`LabelError::Other`] or [`LabelError::Unknown`].
pub fn check(
    cases: &Path,
    recorded: Option<&SetLabel>,
    model: &Path,
    found: Option<&str>,
    allow: bool,
) -> Result<(), LabelError> {
    if allow {
        return Ok(());
    }
    let unknown =
        |path: &Path, reason, hint| LabelError::Unknown { path: path.display().to_string(), reason, hint };
    let Some(recorded) = recorded else {
        let reason = "no label, and no API model with a date at which it is known what it served";
        return Err(unknown(cases, reason, "name it with --cases-label"));
    };
    let Some(found) = found else {
        let reason = "neither `ggsmith.checkpoint.label` nor `general.name`";
        return Err(unknown(model, reason, "build it again with `--label`"));
    };
    if is_same(&recorded.label, found) {
        return Ok(());
    }
    Err(LabelError::Other {
        cases: cases.display().to_string(),
        recorded: recorded.label.clone(),
        model: model.display().to_string(),
        found: found.to_owned(),
    })
}

/// A model name of the official API served one checkpoint from one day to another, both included.
struct Served {
    model: &'static str,
    label: &'static str,
    first_day: &'static str,
    last_day: &'static str,
}

/// Days about a release are left out where it is not known which checkpoint answered.
const SERVED: [Served; 4] = [
    Served {
        model: "deepseek-v4-flash",
        label: "DeepSeek-V4-Flash",
        first_day: "2026-04-24",
        last_day: "2026-07-30",
    },
    Served {
        model: "deepseek-v4-flash",
        label: "DeepSeek-V4-Flash-0731",
        first_day: "2026-08-01",
        last_day: "2026-08-31",
    },
    Served {
        model: "deepseek-v4-pro",
        label: "DeepSeek-V4-Pro",
        first_day: "2026-04-24",
        last_day: "2026-08-12",
    },
    Served {
        model: "deepseek-v4-pro",
        label: "DeepSeek-V4-Pro-0813",
        first_day: "2026-08-14",
        last_day: "2026-11-29",
    },
];

/// The checkpoint that an API name served on a day (`YYYY-MM-DD`, more may follow), where that is known.
pub fn served(model: &str, day: &str) -> Option<&'static str> {
    let day = day.get(..10)?;
    let found = SERVED.iter().find(|s| s.model == model && (s.first_day..=s.last_day).contains(&day));
    found.map(|served| served.label)
}

/// What is known to have happened to a model name of the official API, as a warning.
pub fn moved(model: &str) -> Option<&'static str> {
    (model == "deepseek-v4-flash").then_some(
        "the API's `deepseek-v4-flash` served the preview from April 2026, 0731 from the end of July, and moved on to V4.1 in September: \
         what it answers now is not of V4-Flash",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_differ_in_what_counts_only() {
        assert!(is_same("deepseek-ai/DeepSeek-V4-Flash", "DeepSeek V4 Flash"));
        assert!(!is_same("DeepSeek-V4-Flash", "DeepSeek-V4-Flash-0731"));
    }

    #[test]
    fn an_api_name_is_a_label_only_while_it_is_known_what_it_served() {
        assert_eq!(served("deepseek-v4-flash", "2026-05-06T22:09:33Z"), Some("DeepSeek-V4-Flash"));
        assert_eq!(served("deepseek-v4-flash", "2026-08-02"), Some("DeepSeek-V4-Flash-0731"));
        assert_eq!(served("deepseek-v4-flash", "2026-07-31"), None);
        assert_eq!(served("deepseek-v4-flash", "2026-10-01"), None);
        assert_eq!(served("deepseek-v4-flash", "bad"), None);
    }

    #[test]
    fn a_set_without_a_label_is_refused_like_one_of_another() {
        let check = |recorded: Option<&str>, found, allow| {
            let set = recorded.map(|label| SetLabel { label: label.to_owned(), stated: true });
            super::check(Path::new("cases"), set.as_ref(), Path::new("model"), found, allow)
        };
        assert!(check(Some("a-b"), Some("A B"), false).is_ok());
        assert!(matches!(check(Some("a"), Some("b"), false), Err(LabelError::Other { .. })));
        assert!(matches!(check(None, Some("b"), false), Err(LabelError::Unknown { .. })));
        assert!(matches!(check(Some("a"), None, false), Err(LabelError::Unknown { .. })));
        assert!(check(None, None, true).is_ok());
    }
}
