//! A synthetic model of any size: what its layers compute against rows of its matrices that the CPU makes again.

use std::sync::Arc;

use gguf_tools::model::HyperParameters;

use super::{Report, Tolerance, Verdict, compare};
use crate::cpu::experts::swiglu;
use crate::error::RunnerError;
use crate::observe::{ExpertObservation, Observation, Observer, RouteObservation, Site};
use crate::session::Model;
use crate::weights::{SyntheticSource, WeightSource};

/// Rows of each matrix that are made again.
const ROWS: usize = 24;

/// What was seen in one layer, or behind the layers.
#[derive(Default)]
struct Seen {
    sites: Vec<(Site, Option<usize>, Vec<f32>)>,
    experts: Vec<(usize, usize, Vec<f32>)>,
    routes: Vec<(usize, Vec<u32>, Vec<f32>)>,
    layers: Vec<usize>,
}

impl Observer for Seen {
    fn wants(&self, _: Site, layer: Option<usize>) -> bool {
        layer.is_none_or(|layer| self.layers.contains(&layer))
    }

    fn rows(&mut self, o: Observation<'_>) {
        let width = o.values.len() / o.tokens.len().max(1);
        let last = o.values[o.values.len() - width..].to_vec();
        self.sites.push((o.site, o.layer, last));
    }

    fn routes(&mut self, o: RouteObservation<'_>) {
        let n_used = o.experts.len() / o.tokens.len();
        let first = o.experts.len() - n_used;
        self.routes.push((o.layer, o.experts[first..].to_vec(), o.weights[first..].to_vec()));
    }

    fn expert(&mut self, o: ExpertObservation<'_>) {
        // The last token's row, if it came to this expert.
        let last = self.routes.last().is_some_and(|(_, experts, _)| experts.contains(&(o.expert as u32)));
        if last && !o.rows.is_empty() {
            let width = o.mids.len() / o.rows.len();
            self.experts.push((o.layer, o.expert, o.mids[o.mids.len() - width..].to_vec()));
        }
    }
}

impl Seen {
    fn at(&self, site: Site, layer: Option<usize>) -> Result<&[f32], RunnerError> {
        let found = self.sites.iter().find(|(s, l, _)| *s == site && *l == layer);
        found.map(|(.., values)| &values[..]).ok_or_else(|| problem(format!("nothing was seen at {site}")))
    }
}

fn problem(problem: String) -> RunnerError {
    RunnerError::Synthetic { problem }
}

/// Rows of the source, made again.
struct Rows<'a>(&'a SyntheticSource);

impl Rows<'_> {
    fn row(&self, name: &str, row: usize, width: usize) -> Result<Vec<f32>, RunnerError> {
        let found = self.0.find(name).ok_or_else(|| problem(format!("no tensor `{name}`")))?;
        let mut values = vec![0.0; width];
        self.0.read_rows(found.index, row..row + 1, &mut values)?;
        Ok(values)
    }

    fn product(&self, name: &str, row: usize, x: &[f32]) -> Result<f32, RunnerError> {
        let row = self.row(name, row, x.len())?;
        Ok(row.iter().zip(x).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32)
    }
}

/// Some rows out of `n`, the first and the last among them.
fn some(n: usize) -> Vec<usize> {
    if n <= ROWS { (0..n).collect() } else { (0..ROWS).map(|i| i * (n - 1) / (ROWS - 1)).collect() }
}

/// Checks layers of an open synthetic model with a few tokens.
pub(super) fn full(
    model: &Model,
    source: &Arc<SyntheticSource>,
    report: &mut Report<'_>,
) -> Result<(), RunnerError> {
    let h = source.hyper_parameters().clone();
    let n_layers = h.num_hidden_layers as usize;
    let with_ratio = |ratio| (0..n_layers).rev().find(|&layer| h.compress_ratio(layer as u32) == ratio);
    let mut layers: Vec<usize> = [0, 4, 128].into_iter().filter_map(with_ratio).chain([0]).collect();
    layers.sort_unstable();
    layers.dedup();
    let mut seen = Seen { layers: layers.clone(), ..Seen::default() };
    let tokens: Vec<u32> = (0..5).map(|i| (i * 977 + 3) % h.vocab_size as u32).collect();
    let mut session = model.session();
    session.prefill_observed(&tokens, &mut seen)?;
    let check = Checks { rows: Rows(source), seen: &seen, report };
    check.run(&layers, &h);
    Ok(())
}

struct Checks<'a, 'b> {
    rows: Rows<'a>,
    seen: &'a Seen,
    report: &'a mut Report<'b>,
}

/// Inputs and weights are rounded to halves on the way.
const HALVES: Tolerance = Tolerance { rms: 2e-3, largest: 2e-2 };

impl Checks<'_, '_> {
    fn run(self, layers: &[usize], h: &HyperParameters) {
        let Self { rows, seen, report } = self;
        for &layer in layers {
            let at = Some(layer);
            let name = |rest: &str| format!("blk.{layer}.{rest}.weight");
            let mut product = |what: &str, tensor: &str, input: Site, output: Site, group: usize| {
                report.run(format!("layer {layer}: {what}"), || {
                    let (x, y) = (seen.at(input, at)?, seen.at(output, at)?);
                    let chosen = some(y.len());
                    let groups = y.len().div_ceil(group);
                    let width = x.len() / groups;
                    let expected = chosen
                        .iter()
                        .map(|&row| rows.product(&name(tensor), row, &x[row / group * width..][..width]))
                        .collect::<Result<Vec<_>, _>>()?;
                    let found: Vec<f32> = chosen.iter().map(|&row| y[row]).collect();
                    Ok(compare(&expected, &found, 1, HALVES))
                });
            };
            let all = usize::MAX;
            let lora = h.o_lora_rank as usize;
            product("first output projection", "attn_output_a", Site::HeadsOutput, Site::OutputLora, lora);
            product(
                "second output projection",
                "attn_output_b",
                Site::OutputLora,
                Site::AttentionOutput,
                all,
            );
            product("router", "ffn_gate_inp", Site::FfnInput, Site::RouterLogits, all);
            report.run(format!("layer {layer}: low-rank query"), || {
                let x = seen.at(Site::AttentionInput, at)?;
                let y = seen.at(Site::QueryLora, at)?;
                let all: Result<Vec<f32>, _> =
                    (0..y.len()).map(|row| rows.product(&name("attn_q_a"), row, x)).collect();
                let all = all?;
                let squares: f32 = all.iter().map(|v| v * v).sum::<f32>() / all.len() as f32;
                let factor = 1.0 / (squares + h.rms_norm_eps).sqrt();
                let norm = rows.row(&name("attn_q_a_norm"), 0, y.len())?;
                let expected: Vec<f32> = all.iter().zip(norm).map(|(v, w)| v * factor * w).collect();
                Ok(compare(&expected, y, 1, HALVES))
            });
            report.run(format!("layer {layer}: routed experts"), || routed(&rows, seen, layer, h));
            report.run(format!("layer {layer}: shared expert"), || {
                let (x, y) = (seen.at(Site::FfnInput, at)?, seen.at(Site::SharedOutput, at)?);
                let width = h.moe_intermediate_size as usize;
                let mids: Result<Vec<f32>, RunnerError> = (0..width)
                    .map(|row| {
                        let gate = rows.product(&name("ffn_gate_shexp"), row, x)?;
                        Ok(swiglu(gate, rows.product(&name("ffn_up_shexp"), row, x)?, h.swiglu_limit))
                    })
                    .collect();
                let mids = mids?;
                let chosen = some(y.len());
                let expected: Result<Vec<f32>, _> =
                    chosen.iter().map(|&row| rows.product(&name("ffn_down_shexp"), row, &mids)).collect();
                let found: Vec<f32> = chosen.iter().map(|&row| y[row]).collect();
                Ok(compare(&expected?, &found, 1, HALVES))
            });
        }
        report.run("logits".to_owned(), || {
            let (x, y) = (seen.at(Site::FinalNorm, None)?, seen.at(Site::Logits, None)?);
            let chosen = some(y.len());
            let expected: Result<Vec<f32>, _> =
                chosen.iter().map(|&row| rows.product("output.weight", row, x)).collect();
            let found: Vec<f32> = chosen.iter().map(|&row| y[row]).collect();
            Ok(compare(&expected?, &found, 1, HALVES))
        });
    }
}

/// Some values between the projections of each of the last token's experts, and some of their sum.
fn routed(rows: &Rows<'_>, seen: &Seen, layer: usize, h: &HyperParameters) -> Result<Verdict, RunnerError> {
    let (x, y) = (seen.at(Site::FfnInput, Some(layer))?, seen.at(Site::RoutedOutput, Some(layer))?);
    let route = seen.routes.iter().find(|route| route.0 == layer);
    let (_, experts, weights) = route.ok_or_else(|| problem("no route was seen".to_owned()))?;
    let width = h.moe_intermediate_size as usize;
    let name = |kind: &str| format!("blk.{layer}.ffn_{kind}_exps.weight");
    let (mut expected, mut found) = (Vec::new(), Vec::new());
    let mut sums = vec![0.0_f64; some(y.len()).len()];
    for (&expert, &weight) in experts.iter().zip(weights) {
        let mids = seen.experts.iter().find(|(l, e, _)| *l == layer && *e == expert as usize);
        let (.., mids) = mids.ok_or_else(|| problem(format!("expert {expert} was not seen")))?;
        for row in some(width) {
            let at = expert as usize * width + row;
            let gate = rows.product(&name("gate"), at, x)?;
            expected.push(swiglu(gate, rows.product(&name("up"), at, x)?, h.swiglu_limit));
            found.push(mids[row]);
        }
        for (sum, row) in sums.iter_mut().zip(some(y.len())) {
            let product = rows.product(&name("down"), expert as usize * y.len() + row, mids)?;
            *sum += f64::from(weight) * f64::from(product);
        }
    }
    let mids = compare(&expected, &found, 1, HALVES);
    let expected: Vec<f32> = sums.iter().map(|&sum| sum as f32).collect();
    let found: Vec<f32> = some(y.len()).into_iter().map(|row| y[row]).collect();
    let outputs = compare(&expected, &found, 1, HALVES);
    Ok(Verdict {
        passed: mids.passed && outputs.passed,
        detail: format!("between: {}; behind: {}", mids.detail, outputs.detail),
    })
}
