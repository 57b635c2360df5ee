//! What observers see on the device, and directions that are taken out there, against the CPU.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::models::{MODES, all_logits, greedy, logits_tolerance};
use super::{Report, SelfTest, Tolerance, Verdict, compare, same_bits};
use crate::error::RunnerError;
use crate::forward::Steering;
use crate::observe::{Observation, Observer, Site};
use crate::ops::Numerics;
use crate::session::{Model, Options};

/// Rows of all sites, by site and layer.
#[derive(Default)]
struct Taps {
    seen: BTreeMap<(usize, Option<usize>), Vec<f32>>,
}

impl Observer for Taps {
    fn wants(&self, _: Site, _: Option<usize>) -> bool {
        true
    }

    fn rows(&mut self, observation: Observation<'_>) {
        let Some(site) = Site::NAMES.iter().position(|(_, site)| *site == observation.site) else { return };
        // Rows that an indexer cannot see have no score.
        let values = observation.values.iter().map(|&v| if v == f32::NEG_INFINITY { 0.0 } else { v });
        self.seen.entry((site, observation.layer)).or_default().extend(values);
    }
}

fn taps(model: &Model, text: &[u32]) -> Result<Taps, RunnerError> {
    let mut taps = Taps::default();
    model.read_texts(&[text], &mut taps, &mut |_, _, _| {})?;
    Ok(taps)
}

/// A vector of length 1 for every layer, the same on every machine.
fn directions(model: &Model) -> Vec<Vec<f32>> {
    let h = model.hyper_parameters();
    let one = |layer: u64| {
        let value = |i: u64| f64::from((layer * 31 + i * 7) as u32 % 101) - 50.0;
        let values: Vec<f64> = (0..h.hidden_size).map(value).collect();
        let length = values.iter().map(|v| v * v).sum::<f64>().sqrt();
        values.into_iter().map(|v| (v / length) as f32).collect()
    };
    (0..h.num_hidden_layers).map(one).collect()
}

fn steering(directions: &[Vec<f32>], attention_scale: f32, ffn_scale: f32) -> Arc<Steering> {
    Arc::new(Steering {
        name: "check".to_owned(),
        directions: directions.to_vec(),
        attention_scale,
        ffn_scale,
    })
}

/// Observers and directions against the CPU, in every mode.
pub(super) fn steered(test: &SelfTest<'_>, report: &mut Report<'_>) -> Result<(), RunnerError> {
    for (numerics, activations) in MODES {
        let mode = format!("{} numerics, {} activations", numerics.name(), activations.name());
        let cpu_options = Options { numerics, ..Options::default() };
        let options = test.options(numerics, activations);
        let cpu = Model::open(test.model, cpu_options.clone())?;
        let plain = test.open(options.clone())?;
        let width = cpu.hyper_parameters().vocab_size as usize;
        let directions = directions(&cpu);
        report.run(format!("{mode}: what observers see"), || sites(&cpu, &plain, &test.text(310), numerics));
        for (attention, ffn) in [(0.0, 1.0), (1.0, 0.0), (0.7, -1.0)] {
            report.run(
                format!("{mode}: {attention} of attention and {ffn} of FFN outputs taken out"),
                || {
                    let steering = vec![steering(&directions, attention, ffn)];
                    let cpu = Model::open(
                        test.model,
                        Options { steering: steering.clone(), ..cpu_options.clone() },
                    )?;
                    let cuda = test.open(Options { steering, ..options.clone() })?;
                    let text = test.text(310);
                    let tolerance = logits_tolerance(numerics, activations);
                    let (expected, found) = (all_logits(&cpu, &[&text])?, all_logits(&cuda, &[&text])?);
                    let mut verdict = compare(&expected[0], &found[0], width, tolerance);
                    let unsteered = all_logits(&plain, &[&text])?;
                    let changed = !same_bits(&unsteered[0], &found[0], width).passed;
                    verdict.passed &= changed;
                    verdict.detail += if changed { "" } else { "; and nothing was taken out" };
                    Ok(verdict)
                },
            );
        }
        report.run(format!("{mode}: nothing taken out"), || {
            let steering = vec![steering(&directions, 0.0, 0.0)];
            let cuda = test.open(Options { steering, ..options.clone() })?;
            let text = test.text(310);
            Ok(same_bits(&all_logits(&plain, &[&text])?[0], &all_logits(&cuda, &[&text])?[0], width))
        });
        report.run(format!("{mode}: steered, recorded or not"), || {
            let steering = vec![steering(&directions, 0.5, -1.0), steering(&directions, 0.0, 0.3)];
            let recorded = test.open(Options { steering: steering.clone(), ..options.clone() })?;
            let not = test.open(Options { steering, record_steps: false, ..options.clone() })?;
            let (mut a, mut b) = (not.session(), recorded.session());
            let prompt = test.text(200);
            let (first, second) = (a.prefill(&prompt)?, b.prefill(&prompt)?);
            let (_, expected) = greedy(&mut a, first, 40)?;
            let (_, found) = greedy(&mut b, second, 40)?;
            Ok(same_bits(&expected, &found, width))
        });
    }
    Ok(())
}

/// The rows of every site of every layer; the first that is too far off is told.
fn sites(cpu: &Model, cuda: &Model, text: &[u32], numerics: Numerics) -> Result<Verdict, RunnerError> {
    let (expected, found) = (taps(cpu, text)?, taps(cuda, text)?);
    if !expected.seen.keys().eq(found.seen.keys()) {
        let detail = format!("{} places, the CPU shows {}", found.seen.len(), expected.seen.len());
        return Ok(Verdict { passed: false, detail });
    }
    // Where activations are rounded, values fall on the other side of a step, and experts are chosen otherwise.
    let tolerance = match numerics {
        Numerics::Exact => Tolerance { rms: 1e-4, largest: 1e-2 },
        Numerics::Official => Tolerance { rms: 0.3, largest: 30.0 },
    };
    let mut detail = format!("{} places", expected.seen.len());
    for ((&(site, layer), expected), found) in expected.seen.iter().zip(found.seen.values()) {
        let width = expected.len() / text.len();
        let verdict = compare(expected, found, width, tolerance);
        if !verdict.passed {
            let layer =
                layer.map_or_else(|| "behind the layers".to_owned(), |layer| format!("layer {layer}"));
            detail += &format!("; {}, {layer}: {}", Site::NAMES[site].0, verdict.detail);
            return Ok(Verdict { passed: false, detail });
        }
    }
    Ok(Verdict { passed: true, detail })
}
