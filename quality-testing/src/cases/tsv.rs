//! ds4's manifest: a line a case, columns parted by tabs: name, prompt file, continuation file, then where there are any the
//! raw response of the API and, in our own sets, the kind. Lines that begin with `#` are comments; ours state `# label: NAME`.

use super::official::{Answer, read_response};
use super::{Case, CaseError, Gathering};

pub(super) fn read(text: &str, set: &mut Gathering) -> Result<(), CaseError> {
    for (i, line) in text.lines().enumerate() {
        if let Some(label) = line.strip_prefix("# label:") {
            set.state_label(label.trim())?;
        }
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let place = format!("line {}", i + 1);
        let columns: Vec<&str> = line.split('\t').collect();
        let (id, prompt_file, continuation_file) = match columns.as_slice() {
            [id, prompt, continuation, ..] if !id.is_empty() => (*id, *prompt, *continuation),
            _ => {
                return Err(CaseError::Malformed {
                    path: set.path.clone(),
                    place,
                    found: format!("{} columns in `{}`", columns.len(), shortened(line)),
                    expected: "at least 3 parted by tabs: name, prompt file, continuation file".into(),
                });
            }
        };
        let (_, prompt) = set.read_named(&place, prompt_file)?;
        let (_, continuation) = set.read_named(&place, continuation_file)?;
        let column = |n: usize| columns.get(n).copied().filter(|text| !text.is_empty());
        let answer = column(3).map(|file| response(file, &place, set)).transpose()?;
        let label = answer.as_ref().and_then(Answer::label);
        let case = Case {
            id: id.to_owned(),
            kind: column(4).map(str::to_owned),
            prompt,
            continuation: continuation.into_bytes(),
            recorded: answer.map(|answer| answer.recorded).unwrap_or_default(),
        };
        set.add(case, label)?;
    }
    Ok(())
}

fn response(file: &str, place: &str, set: &Gathering) -> Result<Answer, CaseError> {
    let (path, text) = set.read_named(place, file)?;
    read_response(&text, &path)
}

fn shortened(line: &str) -> String {
    let short: String = line.chars().take(60).collect();
    if short.len() < line.len() { format!("{short}...") } else { short }
}
