//! A whole small model on both machines, and on the device in every way that must not change a bit.

use std::time::Instant;

use super::{Report, SelfTest, Tolerance, Verdict, compare, same_bits};
use crate::error::RunnerError;
use crate::logits::{argmax, log_probability};
use crate::observe::{ExpertObservation, NoObserver, Observer, Site};
use crate::ops::{ActivationPrecision, Numerics};
use crate::session::{Model, Options, Processor, Session};

/// Modes that everything is checked in.
pub(super) const MODES: [(Numerics, ActivationPrecision); 3] = [
    (Numerics::Exact, ActivationPrecision::F32),
    (Numerics::Official, ActivationPrecision::F32),
    (Numerics::Official, ActivationPrecision::Mixed),
];

impl SelfTest<'_> {
    pub(super) fn options(&self, numerics: Numerics, activations: ActivationPrecision) -> Options {
        let (processor, kernels) = (Processor::Cuda(self.ordinal), self.kernels);
        Options { processor, numerics, activations, kernels, ..Options::default() }
    }

    pub(super) fn open(&self, options: Options) -> Result<Model, RunnerError> {
        Model::open(self.model, options)
    }

    pub(super) fn text(&self, n: usize) -> Vec<u32> {
        self.tokens.iter().copied().cycle().take(n).collect()
    }
}

/// How far logits may be from the CPU's.
pub(super) fn logits_tolerance(numerics: Numerics, activations: ActivationPrecision) -> Tolerance {
    match (numerics, activations) {
        (Numerics::Exact, _) => Tolerance { rms: 1e-5, largest: 1e-3 },
        (_, ActivationPrecision::F32) => Tolerance { rms: 3e-2, largest: 2.0 },
        _ => Tolerance { rms: 5e-2, largest: 2.0 },
    }
}

/// Logits of every position of every text.
pub(super) fn all_logits(model: &Model, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>, RunnerError> {
    let mut logits = vec![Vec::new(); texts.len()];
    model.read_texts(texts, &mut NoObserver, &mut |text, _, row| logits[text].extend_from_slice(row))?;
    Ok(logits)
}

/// Logits behind each of `n` tokens that are decoded greedily.
pub(super) fn greedy(
    session: &mut Session<'_>,
    mut logits: Vec<f32>,
    n: usize,
) -> Result<(Vec<u32>, Vec<f32>), RunnerError> {
    let (mut tokens, mut all) = (Vec::new(), Vec::new());
    for _ in 0..n {
        let token = argmax(&logits);
        tokens.push(token);
        logits = session.decode(token)?;
        all.extend_from_slice(&logits);
    }
    Ok((tokens, all))
}

/// Sums over what experts saw.
#[derive(Default)]
struct ExpertSums {
    sums: Vec<f32>,
}

impl Observer for ExpertSums {
    fn wants(&self, site: Site, _: Option<usize>) -> bool {
        site == Site::RoutedMid
    }

    fn expert(&mut self, o: ExpertObservation<'_>) {
        let squares = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() as f32;
        self.sums.extend([o.layer as f32, o.expert as f32, o.rows.len() as f32]);
        self.sums.extend([o.weights.iter().sum::<f32>(), squares(o.inputs), squares(o.mids)]);
    }
}

/// Logits, likelihoods and continuations against the CPU.
pub(super) fn model(test: &SelfTest<'_>, report: &mut Report<'_>) -> Result<(), RunnerError> {
    let texts = [test.text(620), test.tokens[100..400].to_vec(), test.tokens[700..731].to_vec()];
    let texts = texts.each_ref().map(Vec::as_slice);
    for (numerics, activations) in MODES {
        let mode = format!("{} numerics, {} activations", numerics.name(), activations.name());
        let cpu = Model::open(test.model, Options { numerics, ..Options::default() })?;
        let width = cpu.hyper_parameters().vocab_size as usize;
        let expected = all_logits(&cpu, &texts)?;
        let cuda = match test.open(test.options(numerics, activations)) {
            Ok(model) => model,
            Err(error) => {
                report.run(format!("{mode}: opens"), || Err(error));
                continue;
            }
        };
        report.run(format!("{mode}: logits"), || {
            let found = all_logits(&cuda, &texts)?;
            let tolerance = logits_tolerance(numerics, activations);
            let (a, b) = (expected.concat(), found.concat());
            let mut verdict = compare(&a, &b, width, tolerance);
            let rows = a.chunks(width).zip(b.chunks(width));
            let same = rows.clone().filter(|(a, b)| argmax(a) == argmax(b)).count();
            verdict.detail += &format!("; best token the same at {same} of {}", a.len() / width);
            let mut differences: Vec<f32> = rows
                .map(|(a, b)| a.iter().zip(b).fold(0.0, |worst: f32, (a, b)| worst.max((a - b).abs())))
                .collect();
            differences.sort_by(f32::total_cmp);
            verdict.detail +=
                &format!("; median of the largest differences {:.2e}", differences[differences.len() / 2]);
            let nll = |logits: &[Vec<f32>]| {
                let mut sum = 0.0;
                for (text, logits) in texts.iter().zip(logits) {
                    for (row, &next) in logits.chunks(width).zip(&text[1..]) {
                        sum -= log_probability(row, next);
                    }
                }
                sum / (texts.iter().map(|text| text.len() - 1).sum::<usize>() as f64)
            };
            let (a, b) = (nll(&expected), nll(&found));
            verdict.detail += &format!("; mean NLL {b:.6}, CPU {a:.6}, difference {:.1e}", b - a);
            let allowed = if numerics == Numerics::Exact { 1e-5 } else { 5e-3 };
            verdict.passed &= (a - b).abs() < allowed;
            Ok(verdict)
        });
        report.run(format!("{mode}: greedy continuation"), || {
            let prompt = &test.tokens[..200];
            let (mut on_cpu, mut on_cuda) = (cpu.session(), cuda.session());
            let (first, second) = (on_cpu.prefill(prompt)?, on_cuda.prefill(prompt)?);
            let mut verdict = compare(&first, &second, width, Tolerance { rms: 0.1, largest: 2.0 });
            let (a, _) = greedy(&mut on_cpu, first, 64)?;
            let (b, _) = greedy(&mut on_cuda, second, 64)?;
            let same = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
            // With rounding a near tie may fall the other way.
            verdict.passed &= same == 64 || numerics == Numerics::Official;
            verdict.detail = format!("{same} of 64 tokens the same; first logits: {}", verdict.detail);
            Ok(verdict)
        });
        report.run(format!("{mode}: what experts see"), || {
            let sums = |model: &Model| {
                let mut observer = ExpertSums::default();
                model.read_texts(&texts[1..2], &mut observer, &mut |_, _, _| {})?;
                Ok::<_, RunnerError>(observer.sums)
            };
            let tolerance = match activations {
                ActivationPrecision::F32 if numerics == Numerics::Exact => {
                    Tolerance { rms: 1e-5, largest: 1e-3 }
                }
                _ => Tolerance { rms: 0.2, largest: 10.0 },
            };
            let (a, b) = (sums(&cpu)?, sums(&cuda)?);
            if a.len() != b.len() && numerics == Numerics::Official {
                let detail = format!("another set of experts: {} and {} values", a.len(), b.len());
                return Ok(Verdict { passed: true, detail });
            }
            Ok(compare(&a, &b, 6, tolerance))
        });
        report.run(format!("{mode}: token by token against all at once"), || {
            let text = texts[1];
            let mut session = cuda.session();
            let mut rows = session.prefill(&text[..1])?;
            for &token in &text[1..] {
                rows.extend(session.decode(token)?);
            }
            let tolerance = match (numerics, activations) {
                (Numerics::Exact, _) => Tolerance { rms: 1e-5, largest: 1e-3 },
                (_, ActivationPrecision::F32) => Tolerance { rms: 1e-2, largest: 1.0 },
                _ => Tolerance { rms: 5e-2, largest: 2.0 },
            };
            Ok(compare(&all_logits(&cuda, &[text])?[0], &rows, width, tolerance))
        });
        report.run(format!("{mode}: speed"), || {
            let prompt = test.text(2048);
            let mut session = cuda.session();
            session.prefill(&prompt)?;
            let mut session = cuda.session();
            let started = Instant::now();
            let logits = session.prefill(&prompt)?;
            let read = started.elapsed().as_secs_f64();
            greedy(&mut session, logits.clone(), 3)?;
            let started = Instant::now();
            greedy(&mut session, logits, 100)?;
            let wrote = started.elapsed().as_secs_f64();
            let detail = format!(
                "read 2048 tokens at {:.0} t/s, wrote 100 at {:.0} t/s",
                2048.0 / read,
                100.0 / wrote
            );
            Ok(Verdict { passed: true, detail })
        });
    }
    Ok(())
}

/// Ways to compute that must give the same bits.
pub(super) fn equalities(test: &SelfTest<'_>, report: &mut Report<'_>) -> Result<(), RunnerError> {
    for (numerics, activations) in MODES {
        let mode = format!("{} numerics, {} activations", numerics.name(), activations.name());
        let base = test.options(numerics, activations);
        let plain = test.open(base.clone())?;
        let width = plain.hyper_parameters().vocab_size as usize;
        let unrecorded = test.open(Options { record_steps: false, ..base.clone() })?;
        for n_prompt in [5, 200, 4090] {
            report.run(format!("{mode}: recorded or not, from {n_prompt} tokens"), || {
                let prompt = test.text(n_prompt);
                let (mut a, mut b) = (unrecorded.session(), plain.session());
                let (first, second) = (a.prefill(&prompt)?, b.prefill(&prompt)?);
                let (_, expected) = greedy(&mut a, first, 40)?;
                let (_, found) = greedy(&mut b, second, 40)?;
                Ok(same_bits(&expected, &found, width))
            });
        }
        let prompt = test.text(700);
        let expected = plain.session().prefill(&prompt)?;
        for (batch_tokens, attention_tokens) in [(256, 64), (100, 33), (64, 512), (7, 3)] {
            report.run(format!("{mode}: batches of {batch_tokens}, attention by {attention_tokens}"), || {
                let model = test.open(Options { batch_tokens, attention_tokens, ..base.clone() })?;
                Ok(same_bits(&expected, &model.session().prefill(&prompt)?, width))
            });
        }
        report.run(format!("{mode}: in two calls"), || {
            let mut session = plain.session();
            session.prefill(&prompt[..333])?;
            Ok(same_bits(&expected, &session.prefill(&prompt[333..])?, width))
        });
        report.run(format!("{mode}: texts together or alone"), || {
            let texts = [&prompt[..300], &prompt[300..333], &prompt[333..700]];
            let together = all_logits(&plain, &texts)?.concat();
            let mut alone = Vec::new();
            for text in texts {
                alone.extend(all_logits(&plain, &[text])?.concat());
            }
            Ok(same_bits(&alone, &together, width))
        });
        report.run(format!("{mode}: restored"), || {
            let mut session = plain.session();
            let logits = session.prefill(&prompt[..450])?;
            let here = session.snapshot()?;
            let (_, expected) = greedy(&mut session, logits.clone(), 150)?;
            session.restore(&here)?;
            let (_, again) = greedy(&mut session, logits.clone(), 150)?;
            let mut other = plain.session();
            other.restore(&here)?;
            let (_, elsewhere) = greedy(&mut other, logits, 150)?;
            let mut verdict = same_bits(&expected, &again, width);
            let elsewhere = same_bits(&expected, &elsewhere, width);
            verdict.passed &= elsewhere.passed;
            verdict.detail += &format!("; in another session: {}", elsewhere.detail);
            Ok(verdict)
        });
        report.run(format!("{mode}: two sessions in turn"), || {
            let (mut a, mut b) = (plain.session(), plain.session());
            let (first, second) = (a.prefill(&prompt[..60])?, b.prefill(&prompt[..90])?);
            let (tokens_a, expected_a) = greedy(&mut plain_copy(&plain, &prompt[..60])?, first, 30)?;
            let (tokens_b, expected_b) = greedy(&mut plain_copy(&plain, &prompt[..90])?, second, 30)?;
            let (mut found_a, mut found_b) = (Vec::new(), Vec::new());
            for (&token_a, &token_b) in tokens_a.iter().zip(&tokens_b) {
                found_a.extend(a.decode(token_a)?);
                found_b.extend(b.decode(token_b)?);
            }
            Ok(same_bits(&[expected_a, expected_b].concat(), &[found_a, found_b].concat(), width))
        });
    }
    Ok(())
}

fn plain_copy<'a>(model: &'a Model, prompt: &[u32]) -> Result<Session<'a>, RunnerError> {
    let mut session = model.session();
    session.prefill(prompt)?;
    Ok(session)
}
