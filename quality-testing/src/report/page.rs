//! The HTML page: one file, pictures inside, nothing fetched from anywhere.

use std::collections::BTreeMap;
use std::fmt::Write;

use gguf_tools::plot::{Bar, BarChart, LineChart, Scale, Series};

use super::{KldReport, KldRow, ModelFacts, Report, ReportError, RunReport, labels_line, size, spread};
use crate::scoring::CaseScore;

const STYLE: &str = include_str!("page.css");

/// A page of some results, one under the other. `title`: its heading.
///
/// # Errors
/// If a picture cannot be drawn.
pub fn page(title: &str, reports: &[Report]) -> Result<String, ReportError> {
    let mut body = String::new();
    let runs: Vec<&RunReport> = reports
        .iter()
        .filter_map(|r| if let Report::Run(run) = r { Some(run.as_ref()) } else { None })
        .collect();
    if !runs.is_empty() {
        body.push_str(&runs_section(&runs)?);
    }
    for report in reports {
        if let Report::Kld(kld) = report {
            body.push_str(&kld_section(kld)?);
        }
    }
    let title = escaped(title);
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}<footer>Measured with ggsmith {}. \
         Intervals are 95 %, by bootstrap.</footer>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    ))
}

fn runs_section(runs: &[&RunReport]) -> Result<String, ReportError> {
    let mut html = String::from("<section>\n<h2>Official continuations</h2>\n");
    html.push_str("<p class=\"lead\">How probable the recorded answers are to each file, token by token. Lower is closer to the official model.</p>\n");
    for run in runs {
        let class = if run.same_checkpoint == Some(true) { "label" } else { "label warn" };
        add(
            &mut html,
            &format!(
                "<p class=\"{class}\"><b>{}</b>: {}</p>",
                escaped(&run.model.name),
                escaped(&labels_line(run))
            ),
        );
    }
    let warnings = runs.iter().flat_map(|run| run.summary.warnings.iter());
    for warning in warnings.collect::<std::collections::BTreeSet<_>>() {
        add(&mut html, &format!("<p class=\"label warn\">{}</p>", escaped(warning)));
    }
    let rows: Vec<Vec<String>> = runs.iter().map(|run| run_row(run)).collect();
    let columns = [
        "file",
        "size",
        "cases",
        "tokens",
        "NLL, nats a token",
        "first token",
        "greedy prefix",
        "API best token",
    ];
    html.push_str(&table(&columns, &rows));
    html.push_str("<div class=\"plots\">\n");
    let bars = runs.iter().map(|run| {
        let nll = &run.summary.average_nll;
        Bar { name: short(&run.model.name), value: nll.mean, interval: Some((nll.low, nll.high)) }
    });
    html.push_str(&figure(&bar_chart("NLL of the official continuations", "nats a token", bars.collect())?));
    for chart in by_kind(runs)? {
        html.push_str(&figure(&chart));
    }
    html.push_str(&wide_figure(&by_token(runs)?));
    html.push_str("</div>\n");
    html.push_str(&details(runs));
    html.push_str(&facts(runs.iter().map(|run| &run.model)));
    html.push_str("</section>\n");
    Ok(html)
}

fn run_row(run: &RunReport) -> Vec<String> {
    let s = &run.summary;
    vec![
        run.model.name.clone(),
        size(run.model.file_bytes),
        s.n_cases.to_string(),
        s.n_tokens.to_string(),
        spread(&s.average_nll, 4),
        format!("{} of {}", s.first_match, s.n_cases),
        format!("{:.2}", s.average_lcp),
        s.agreement.top1_rate().map_or("-".into(), |rate| format!("{:.2} %", 100.0 * rate)),
    ]
}

/// Mean negative log likelihood of the first, second, ... token of the continuations.
fn by_token(runs: &[&RunReport]) -> Result<String, ReportError> {
    let series = runs.iter().map(|run| {
        let longest = run.scores.iter().map(|score| score.token_nll.len()).max().unwrap_or(0);
        let at = |i: usize| {
            let values: Vec<f64> = run.scores.iter().filter_map(|s| s.token_nll.get(i).copied()).collect();
            (i as f64 + 1.0, values.iter().sum::<f64>() / values.len() as f64)
        };
        Series { name: short(&run.model.name), points: (0..longest).map(at).collect() }
    });
    let chart = LineChart {
        title: "Where in the answer the likelihood is lost".into(),
        x_label: "token of the continuation".into(),
        y_label: "mean NLL, nats".into(),
        x_scale: Scale::Linear,
        y_range: None,
        series: series.collect(),
    };
    Ok(chart.to_svg()?)
}

/// A chart for each kind of prompt, where there are several.
fn by_kind(runs: &[&RunReport]) -> Result<Vec<String>, ReportError> {
    let mut kinds: BTreeMap<&str, Vec<Bar>> = BTreeMap::new();
    for run in runs {
        let mut of_run: BTreeMap<&str, Vec<&CaseScore>> = BTreeMap::new();
        for score in &run.scores {
            if let Some(kind) = score.kind.as_deref() {
                of_run.entry(kind).or_default().push(score);
            }
        }
        for (kind, scores) in of_run {
            let n_tokens: usize = scores.iter().map(|s| s.target_tokens).sum();
            let nll = scores.iter().map(|s| s.nll).sum::<f64>() / n_tokens.max(1) as f64;
            kinds.entry(kind).or_default().push(Bar {
                name: short(&run.model.name),
                value: nll,
                interval: None,
            });
        }
    }
    if kinds.len() < 2 {
        return Ok(Vec::new());
    }
    kinds
        .into_iter()
        .map(|(kind, bars)| bar_chart(&format!("Kind: {}", short(kind)), "nats a token", bars))
        .collect()
}

/// Every case of every run, folded away.
fn details(runs: &[&RunReport]) -> String {
    let mut html = String::new();
    for run in runs {
        let rows: Vec<Vec<String>> = run
            .scores
            .iter()
            .map(|s| {
                vec![
                    s.id.clone(),
                    s.kind.clone().unwrap_or_default(),
                    s.target_tokens.to_string(),
                    format!("{:.4}", s.average_nll()),
                    if s.first_match { "yes" } else { "no" }.to_owned(),
                    s.greedy_lcp.to_string(),
                ]
            })
            .collect();
        let columns = ["case", "kind", "tokens", "NLL, nats a token", "first token", "greedy prefix"];
        add(
            &mut html,
            &format!(
                "<details><summary>Every case of {}</summary>\n{}</details>",
                escaped(&run.model.name),
                table(&columns, &rows)
            ),
        );
    }
    html
}

fn kld_section(kld: &KldReport) -> Result<String, ReportError> {
    let mut html = format!("<section>\n<h2>Divergence from {}</h2>\n", escaped(&kld.base.name));
    let label = |label: &Option<String>| label.clone().unwrap_or_else(|| "not stated".to_owned());
    let positions = kld.rows.last().map_or(0, |row| row.comparison.n_positions);
    let rounded = if kld.rounded { "; the base's log-probabilities were kept in half precision" } else { "" };
    add(
        &mut html,
        &format!(
            "<p class=\"lead\">On {} ({positions} positions, sequences of up to {} tokens{rounded}). The first line is the base against \
             itself: a difference no larger than that means nothing.</p>",
            escaped(&kld.texts.join(", ")),
            kld.sequence
        ),
    );
    let others = kld.rows.iter().filter(|row| !row.is_noise).map(|row| &row.model);
    let labels: Vec<String> = std::iter::once(&kld.base)
        .chain(others)
        .map(|model| format!("<b>{}</b> of {}", escaped(&model.name), escaped(&label(&model.checkpoint))))
        .collect();
    add(&mut html, &format!("<p class=\"label\">Checkpoints: {}</p>", labels.join(", ")));
    let rows: Vec<Vec<String>> = kld.rows.iter().map(kld_row).collect();
    let columns =
        ["file", "size", "perplexity", "KL, nats", "KL 50 %", "90 %", "99 %", "RMS dp", "same best token"];
    html.push_str(&table(&columns, &rows));
    let models: Vec<&KldRow> = kld.rows.iter().filter(|row| !row.is_noise).collect();
    html.push_str("<div class=\"plots\">\n");
    if !models.is_empty() {
        let kl = models.iter().map(|row| {
            let kl = &row.comparison.kl;
            Bar { name: short(&row.model.name), value: kl.mean, interval: Some((kl.low, kl.high)) }
        });
        html.push_str(&figure(&bar_chart("Divergence (KL) from the base", "nats", kl.collect())?));
        let other_top = models.iter().map(|row| {
            let same = &row.comparison.same_top;
            let percent = |same: f64| 100.0 * (1.0 - same);
            Bar {
                name: short(&row.model.name),
                value: percent(same.mean),
                interval: Some((percent(same.high), percent(same.low))),
            }
        });
        html.push_str(&figure(&bar_chart("Positions with another best token", "%", other_top.collect())?));
    }
    if models.len() > 1 {
        html.push_str(&wide_figure(&size_chart(&models)?));
    }
    html.push_str("</div>\n");
    html.push_str(&facts(std::iter::once(&kld.base).chain(models.iter().map(|row| &row.model))));
    html.push_str("</section>\n");
    Ok(html)
}

fn kld_row(row: &KldRow) -> Vec<String> {
    let c = &row.comparison;
    let [median, p90, p99] = c.kl_percentiles;
    vec![
        if row.is_noise { "the base against itself".to_owned() } else { row.model.name.clone() },
        size(row.model.file_bytes),
        format!("{:.4}", c.perplexity),
        spread(&c.kl, 5),
        format!("{median:.5}"),
        format!("{p90:.4}"),
        format!("{p99:.4}"),
        format!("{:.2} %", 100.0 * c.rms_delta_p),
        format!("{:.2} %", 100.0 * c.same_top.mean),
    ]
}

/// Divergence over file size: what is bought with every gigabyte.
fn size_chart(models: &[&KldRow]) -> Result<String, ReportError> {
    // Small files are shown in a unit in which they differ.
    let largest = models.iter().map(|row| row.model.file_bytes).max().unwrap_or(0);
    let (unit, name) = if largest < 1_000_000_000 { (1e6, "MB") } else { (1e9, "GB") };
    let mut points: Vec<(f64, f64)> =
        models.iter().map(|row| (row.model.file_bytes as f64 / unit, row.comparison.kl.mean)).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let chart = LineChart {
        title: "Divergence over size".into(),
        x_label: format!("size of the file, {name}"),
        y_label: "KL, nats".into(),
        x_scale: Scale::Linear,
        y_range: None,
        series: vec![Series { name: "files".into(), points }],
    };
    Ok(chart.to_svg()?)
}

fn bar_chart(title: &str, unit: &str, bars: Vec<Bar>) -> Result<String, ReportError> {
    Ok(BarChart { title: title.to_owned(), y_label: unit.to_owned(), bars }.to_svg()?)
}

/// How each number was made.
fn facts<'a>(models: impl Iterator<Item = &'a ModelFacts>) -> String {
    let rows: Vec<Vec<String>> = models
        .map(|m| {
            let steered = [""].into_iter().chain(m.steering.iter().map(String::as_str)).collect::<Vec<_>>();
            let steered = steered.join(", steered by ");
            vec![
                m.name.clone(),
                m.checkpoint.clone().unwrap_or_else(|| "not stated".to_owned()),
                format!("{} numerics, {} activations, {}{steered}", m.numerics, m.activations, m.backend),
                m.fingerprint.clone(),
            ]
        })
        .collect();
    let table = table(&["file", "checkpoint", "computed with", "fingerprint of the files"], &rows);
    format!("<details><summary>How it was computed</summary>\n{table}</details>\n")
}

/// Half the width of the page.
fn figure(svg: &str) -> String {
    // A declaration and document type have no place inside a page.
    let start = svg.find("<svg").unwrap_or(0);
    format!("<figure>{}</figure>\n", &svg[start..])
}

/// All of its width.
fn wide_figure(svg: &str) -> String {
    figure(svg).replacen("<figure>", "<figure class=\"wide\">", 1)
}

fn table(columns: &[&str], rows: &[Vec<String>]) -> String {
    let mut html = String::from("<div class=\"scroll\"><table>\n<thead><tr>");
    for column in columns {
        html.push_str(&format!("<th>{}</th>", escaped(column)));
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    for row in rows {
        html.push_str("<tr>");
        for cell in row {
            html.push_str(&format!("<td>{}</td>", escaped(cell)));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody></table></div>\n");
    html
}

fn add(html: &mut String, line: &str) {
    writeln!(html, "{line}").expect("a string takes any text");
}

/// A name that fits under a bar: its end, which tells files apart, is kept.
fn short(name: &str) -> String {
    const LONGEST: usize = 22;
    let stem = name.strip_suffix(".gguf").unwrap_or(name);
    let n = stem.chars().count();
    if n <= LONGEST {
        return stem.to_owned();
    }
    format!("…{}", stem.chars().skip(n - LONGEST + 1).collect::<String>())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
