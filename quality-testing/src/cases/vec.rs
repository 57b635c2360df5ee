//! ds4's compact `.vec` file: `case ID CONTEXT STEPS PROMPT_FILE`, then for each step `step INDEX TOKEN_HEX N_TOP` and that many
//! `top TOKEN_HEX LOG_PROBABILITY`, then `end`. Lines that begin with `#` are comments; ours may state `# label: NAME`.

use super::{Alternative, Case, CaseError, Gathering, Position};

/// Begins every such file.
pub const FIRST_LINE_PREFIX: &str = "# ds4-official-logprob-vectors-v";

/// One case while its lines are read.
struct Open {
    id: String,
    line: usize,
    n_steps: usize,
    prompt: String,
    recorded: Vec<Position>,
    /// Alternatives that the last step announced and that have not come yet.
    n_top_left: usize,
}

pub(super) fn read(text: &str, set: &mut Gathering) -> Result<(), CaseError> {
    let mut open: Option<Open> = None;
    for (i, line) in text.lines().enumerate() {
        let place = format!("line {}", i + 1);
        let line = line.trim();
        if let Some(label) = line.strip_prefix("# label:") {
            set.state_label(label.trim())?;
        }
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let wrong = |expected: &str| CaseError::Malformed {
            path: set.path.clone(),
            place: place.clone(),
            found: format!("`{line}`"),
            expected: expected.to_owned(),
        };
        match (words.as_slice(), open.as_mut()) {
            (["case", id, context, n_steps, file], None) => {
                let n_steps = n_steps.parse().map_err(|_| wrong("a number of steps"))?;
                context.parse::<u32>().map_err(|_| wrong("a context length"))?;
                let (_, prompt) = set.read_named(&place, file)?;
                open = Some(Open {
                    id: (*id).to_owned(),
                    line: i + 1,
                    n_steps,
                    prompt,
                    recorded: Vec::new(),
                    n_top_left: 0,
                });
            }
            (["step", index, token, n_top], Some(case)) if case.n_top_left == 0 => {
                if index.parse() != Ok(case.recorded.len()) {
                    return Err(wrong(&format!("step {}", case.recorded.len())));
                }
                case.n_top_left = n_top.parse().map_err(|_| wrong("a number of alternatives"))?;
                let token = from_hex(token).ok_or_else(|| wrong("a token in hexadecimal digits"))?;
                case.recorded.push(Position { token, log_probability: f64::NAN, top: Vec::new() });
            }
            (["top", token, log_probability], Some(case)) if case.n_top_left > 0 => {
                let token = from_hex(token).ok_or_else(|| wrong("a token in hexadecimal digits"))?;
                let value: f64 = log_probability.parse().map_err(|_| wrong("a log-probability"))?;
                let position = case.recorded.last_mut().ok_or_else(|| wrong("a step first"))?;
                if position.token == token {
                    position.log_probability = value;
                }
                position.top.push(Alternative { token, log_probability: value });
                case.n_top_left -= 1;
            }
            (["end"], Some(case)) => {
                if case.recorded.len() != case.n_steps || case.n_top_left > 0 {
                    return Err(cut_off(set, case));
                }
                let case = open.take().ok_or_else(|| wrong("a case first"))?;
                let continuation = case.recorded.iter().flat_map(|p| p.token.iter().copied()).collect();
                let case = Case {
                    id: case.id,
                    kind: None,
                    prompt: case.prompt,
                    continuation,
                    recorded: case.recorded,
                };
                set.add(case, None)?;
            }
            (_, None) => return Err(wrong("`case ID CONTEXT STEPS PROMPT_FILE`")),
            (_, Some(case)) if case.n_top_left > 0 => {
                return Err(wrong(&format!("`top`, {} more times", case.n_top_left)));
            }
            (_, Some(_)) => return Err(wrong("`step` or `end`")),
        }
    }
    match open {
        Some(case) => Err(cut_off(set, &case)),
        None => Ok(()),
    }
}

fn cut_off(set: &Gathering, case: &Open) -> CaseError {
    CaseError::Truncated {
        path: set.path.clone(),
        place: format!("line {}, case `{}`", case.line, case.id),
        found: format!("{} steps, {} alternatives missing", case.recorded.len(), case.n_top_left),
        expected: format!("{} steps and `end`", case.n_steps),
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| char::from(c).to_digit(16).map(|d| d as u8);
    if text.is_empty() || !text.len().is_multiple_of(2) {
        return None;
    }
    text.as_bytes().chunks_exact(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}
