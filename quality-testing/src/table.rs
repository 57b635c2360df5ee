//! Scores in ds4's tab-separated columns, and three more of our own at the end.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::agreement::Agreement;
use crate::scoring::CaseScore;

/// ds4's columns, in its order.
const DS4_COLUMNS: [&str; 26] = [
    "id",
    "prompt_tokens",
    "target_tokens",
    "nll",
    "avg_nll",
    "first_match",
    "greedy_lcp",
    "api_ref_tokens",
    "api_target_tokens",
    "api_target_mae",
    "api_target_mean_delta",
    "api_top_items",
    "api_top_mapped",
    "api_top_coverage",
    "api_top1_count",
    "api_top1_match",
    "api_top1_rate",
    "api_topn_ref",
    "api_topn_hit",
    "api_topn_recall",
    "api_top_logprob_count",
    "api_top_mae",
    "api_top_mean_delta",
    "api_pair_total",
    "api_pair_agree",
    "api_pair_rate",
];

/// Our own, behind ds4's: kind of the case, checkpoint of the model, checkpoint that answered.
const OWN_COLUMNS: [&str; 3] = ["kind", "checkpoint", "cases_checkpoint"];

/// Largest count that is believed: sums of any number of rows that fit memory stay far from overflow.
const MOST_OF_A_CASE: u64 = 1 << 32;

/// One case of a table of scores.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Name of the case.
    pub id: String,
    /// Kind of its prompt, where the table says.
    pub kind: Option<String>,
    /// Tokens of the continuation.
    pub target_tokens: u64,
    /// Negative log likelihood, nats: the sum.
    pub nll: f64,
    /// Whether the first token matches.
    pub first_match: bool,
    /// Greedy longest common prefix, tokens.
    pub greedy_lcp: u64,
    /// Positions whose best recorded alternative is a token of the vocabulary, and those with the same best token.
    pub top1: (u64, u64),
}

/// The scores of one file.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreTable {
    /// Where it was read.
    pub path: PathBuf,
    /// Checkpoint of the model, where the table says.
    pub checkpoint: Option<String>,
    /// Checkpoint that the cases are of, where the table says.
    pub cases_checkpoint: Option<String>,
    /// At least one.
    pub rows: Vec<Row>,
}

/// Why a table of scores cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The system's own.
    #[error("cannot read `{path}`")]
    Read {
        /// The table.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// A column is missing.
    #[error("`{path}` has no column `{column}`; it is no table of scores, which `score run` writes")]
    NoColumn {
        /// The table.
        path: PathBuf,
        /// Which.
        column: &'static str,
    },
    /// A cell is not what it must be.
    #[error("`{path}` line {line}, column `{column}`: found `{found}`, expected {expected}")]
    Cell {
        /// The table.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// Which.
        column: String,
        /// What is there.
        found: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// A case is there twice.
    #[error("`{path}` line {line} has case `{id}` a second time")]
    Duplicate {
        /// The table.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// The case.
        id: String,
    },
    /// No rows.
    #[error("`{path}` holds no scores")]
    Empty {
        /// The table.
        path: PathBuf,
    },
}

/// The table of some scores, line ends included. Labels that are not known stay empty.
pub fn write(scores: &[CaseScore], checkpoint: Option<&str>, cases_checkpoint: Option<&str>) -> String {
    let mut text = [&DS4_COLUMNS[..], &OWN_COLUMNS].concat().join("\t");
    text.push('\n');
    for score in scores {
        text.push_str(&ds4_cells(score).join("\t"));
        let own = [score.kind.as_deref(), checkpoint, cases_checkpoint];
        for cell in own {
            // A tab or line end in a label would move the columns.
            text.push('\t');
            text.push_str(&cell.unwrap_or_default().replace(['\t', '\n', '\r'], " "));
        }
        text.push('\n');
    }
    text
}

fn ds4_cells(score: &CaseScore) -> Vec<String> {
    let a = &score.agreement;
    let decimal = |value: f64| format!("{value:.9}");
    let ratio = |sum: f64, n: u64| decimal(Agreement::ratio(sum, n));
    vec![
        score.id.clone(),
        score.prompt_tokens.to_string(),
        score.target_tokens.to_string(),
        decimal(score.nll),
        decimal(score.average_nll()),
        u8::from(score.first_match).to_string(),
        score.greedy_lcp.to_string(),
        a.ref_tokens.to_string(),
        a.target_tokens.to_string(),
        decimal(a.mae()),
        ratio(a.target_signed_delta, a.target_tokens),
        a.top_items.to_string(),
        a.top_mapped.to_string(),
        ratio(a.top_mapped as f64, a.top_items),
        a.top1_count.to_string(),
        a.top1_match.to_string(),
        ratio(a.top1_match as f64, a.top1_count),
        a.top_mapped.to_string(),
        a.topn_hit.to_string(),
        ratio(a.topn_hit as f64, a.top_mapped),
        a.top_mapped.to_string(),
        ratio(a.top_abs_delta, a.top_mapped),
        ratio(a.top_signed_delta, a.top_mapped),
        a.pair_total.to_string(),
        a.pair_agree.to_string(),
        ratio(a.pair_agree as f64, a.pair_total),
    ]
}

/// Reads a table that this program or ds4 wrote: columns by their names in the first line.
///
/// # Errors
/// If it cannot be read, lacks a column, or a cell is no number; or is empty or has a case twice.
pub fn read(path: &Path) -> Result<ScoreTable, TableError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| TableError::Read { path: path.to_owned(), source })?;
    let mut lines = text.lines().enumerate();
    let header: Vec<&str> = lines.next().map(|(_, line)| line.split('\t').collect()).unwrap_or_default();
    let find = |name: &str| header.iter().position(|column| *column == name);
    let needed =
        |column: &'static str| find(column).ok_or(TableError::NoColumn { path: path.to_owned(), column });
    let (id, target, nll) = (needed("id")?, needed("target_tokens")?, needed("nll")?);
    let (first, lcp) = (needed("first_match")?, needed("greedy_lcp")?);
    let top1 = (find("api_top1_count"), find("api_top1_match"));
    let own = OWN_COLUMNS.map(find);
    let mut table =
        ScoreTable { path: path.to_owned(), checkpoint: None, cases_checkpoint: None, rows: Vec::new() };
    let mut ids = BTreeSet::new();
    for (i, line) in lines.filter(|(_, line)| !line.is_empty()) {
        let cells: Vec<&str> = line.split('\t').collect();
        let bad = |column: usize, expected| TableError::Cell {
            path: path.to_owned(),
            line: i + 1,
            column: header[column].to_owned(),
            found: cells.get(column).copied().unwrap_or("nothing: the line is cut off").to_owned(),
            expected,
        };
        let cell = |column: usize| cells.get(column).copied();
        let count = |column: usize| {
            let number = cell(column).and_then(|text| text.parse::<u64>().ok());
            number.filter(|&n| n <= MOST_OF_A_CASE).ok_or_else(|| bad(column, "a count"))
        };
        let text =
            |column: Option<usize>| column.and_then(cell).filter(|text| !text.is_empty()).map(str::to_owned);
        let optional = |column: Option<usize>| column.map_or(Ok(0), count);
        let row = Row {
            id: cell(id).filter(|id| !id.is_empty()).ok_or_else(|| bad(id, "a name"))?.to_owned(),
            kind: text(own[0]),
            target_tokens: count(target)?,
            nll: cell(nll)
                .and_then(|text| text.parse().ok())
                .filter(|nll: &f64| nll.is_finite() && *nll >= 0.0)
                .ok_or_else(|| bad(nll, "a finite number, not below 0"))?,
            first_match: match count(first)? {
                0 => false,
                1 => true,
                _ => return Err(bad(first, "0 or 1")),
            },
            greedy_lcp: count(lcp)?,
            top1: (optional(top1.0)?, optional(top1.1)?),
        };
        if row.target_tokens == 0 {
            return Err(bad(target, "at least 1: a case without tokens says nothing"));
        }
        if !ids.insert(row.id.clone()) {
            return Err(TableError::Duplicate { path: path.to_owned(), line: i + 1, id: row.id });
        }
        table.checkpoint = table.checkpoint.or_else(|| text(own[1]));
        table.cases_checkpoint = table.cases_checkpoint.or_else(|| text(own[2]));
        table.rows.push(row);
    }
    if table.rows.is_empty() {
        return Err(TableError::Empty { path: path.to_owned() });
    }
    Ok(table)
}
