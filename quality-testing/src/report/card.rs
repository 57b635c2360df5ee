//! The Markdown card.

use std::fmt::Write;

use super::{KldReport, Report, RunReport, labels_line, size, spread};

/// A card with the numbers of some results, to publish beside a file. `title`: its heading.
pub fn card(title: &str, reports: &[Report]) -> String {
    let mut text = format!("# {}\n", cell(title));
    let runs: Vec<&RunReport> = reports
        .iter()
        .filter_map(|r| if let Report::Run(run) = r { Some(run.as_ref()) } else { None })
        .collect();
    if !runs.is_empty() {
        add_runs(&mut text, &runs);
    }
    for report in reports {
        if let Report::Kld(kld) = report {
            add_kld(&mut text, kld);
        }
    }
    text.push_str(
        "\nMeasured with [ggsmith](https://github.com/ggsmith/ggsmith); intervals are 95 %, by bootstrap.\n",
    );
    text
}

fn add_runs(text: &mut String, runs: &[&RunReport]) {
    text.push_str("\n## Official continuations\n\n");
    text.push_str("| file | size | cases | tokens | NLL, nats a token | first token | greedy prefix | API best token |\n");
    text.push_str("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
    for run in runs {
        let s = &run.summary;
        let top = s.agreement.top1_rate().map_or("-".into(), |rate| format!("{:.2} %", 100.0 * rate));
        add(
            text,
            &format!(
                "| {} | {} | {} | {} | {} | {} | {:.2} | {top} |",
                cell(&run.model.name),
                size(run.model.file_bytes),
                s.n_cases,
                s.n_tokens,
                spread(&s.average_nll, 5),
                s.first_match,
                s.average_lcp,
            ),
        );
    }
    text.push('\n');
    for run in runs {
        add(text, &format!("- {}: {}.", cell(&run.model.name), cell(&labels_line(run))));
        for warning in &run.summary.warnings {
            add(text, &format!("  - {}", cell(warning)));
        }
    }
    if let Some(run) = runs.first() {
        add(text, &format!("- Cases: {}, SHA-256 `{}`.", cell(&run.cases.name), run.cases.sha256));
    }
    add_models(text, runs.iter().map(|run| &run.model));
}

fn add_kld(text: &mut String, kld: &KldReport) {
    add(text, &format!("\n## Divergence from {}\n", cell(&kld.base.name)));
    text.push_str("| file | size | perplexity | KL, nats | KL 50 / 90 / 99 % | RMS dp | same best token |\n");
    text.push_str("| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n");
    for row in &kld.rows {
        let c = &row.comparison;
        let name = if row.is_noise { "noise: the base against itself" } else { &row.model.name };
        let [median, p90, p99] = c.kl_percentiles;
        add(
            text,
            &format!(
                "| {} | {} | {:.4} | {} | {median:.5} / {p90:.4} / {p99:.4} | {:.2} % | {:.2} % |",
                cell(name),
                size(row.model.file_bytes),
                c.perplexity,
                spread(&c.kl, 5),
                100.0 * c.rms_delta_p,
                100.0 * c.same_top.mean,
            ),
        );
    }
    let positions = kld.rows.last().map_or(0, |row| row.comparison.n_positions);
    let texts: Vec<String> = kld.texts.iter().map(|name| cell(name)).collect();
    add(
        text,
        &format!(
            "\n- Texts: {} ({positions} positions, sequences of up to {} tokens), SHA-256 of the tokens `{}`.",
            texts.join(", "),
            kld.sequence,
            kld.texts_sha256
        ),
    );
    if kld.rounded {
        text.push_str("- The base's log-probabilities were kept in half precision.\n");
    }
    let label = |label: &Option<String>| label.clone().unwrap_or_else(|| "not stated".to_owned());
    add(text, &format!("- Base of checkpoint {}.", cell(&label(&kld.base.checkpoint))));
    for row in kld.rows.iter().filter(|row| !row.is_noise) {
        add(
            text,
            &format!("- {} of checkpoint {}.", cell(&row.model.name), cell(&label(&row.model.checkpoint))),
        );
    }
    add_models(
        text,
        std::iter::once(&kld.base).chain(kld.rows.iter().filter(|r| !r.is_noise).map(|r| &r.model)),
    );
}

fn add_models<'a>(text: &mut String, models: impl Iterator<Item = &'a super::ModelFacts>) {
    for model in models {
        let steered = [""].into_iter().chain(model.steering.iter().map(String::as_str)).collect::<Vec<_>>();
        let steered = steered.join(", steered by ");
        add(
            text,
            &format!(
                "- {}: {} numerics, {} activations, {}{steered}; fingerprint `{}`.",
                cell(&model.name),
                model.numerics,
                model.activations,
                model.backend,
                model.fingerprint
            ),
        );
    }
}

fn add(text: &mut String, line: &str) {
    writeln!(text, "{line}").expect("a string takes any text");
}

/// A text from outside, so that it stays one cell and is no markup.
fn cell(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' | '\r' | '\t' => plain.push(' '),
            '<' => plain.push_str("&lt;"),
            '|' | '`' | '*' | '[' | ']' | '_' | '\\' => plain.extend(['\\', c]),
            _ => plain.push(c),
        }
    }
    plain
}
