//! What the routed experts of one layer read, kept until their second moments are asked for.

use std::ops::Range;

use gguf_tools::build::MatrixMoments;
use gguf_tools::feedback::{CrossMoments, SecondMoments, Settings, mixed, products, shrunk_to_diagonal};
use gguf_tools::model::MatrixInput;
use runner::observe::{ExpertObservation, Observation, Observer, Site};

use super::dense::squares;
use super::half_rows::HalfRows;

/// Inputs that came to one expert, in the order of the tokens.
#[derive(Debug, Clone)]
struct Expert {
    /// Rows of [`Gathered::inputs`].
    rows: Vec<u32>,
    /// Route weight of each.
    weights: Vec<f32>,
    /// Mids times route weights, `[tokens, inner]`.
    mids: HalfRows,
}

/// What was gathered in one layer.
#[derive(Debug)]
pub(super) struct Gathered {
    layer: usize,
    hidden: usize,
    inner: usize,
    /// FFN inputs of all tokens, `[tokens, hidden]`.
    inputs: HalfRows,
    /// How much a change of the FFN's output matters, by token: the squares of the weights with which it enters the streams over the
    /// squared length of the streams behind the layer, which the next norm divides by.
    sensitivities: Vec<f32>,
    /// Row of the first token of the batch.
    base: usize,
    experts: Vec<Expert>,
    /// Second moments over all tokens of the layer.
    mean_inputs: Vec<f32>,
    /// Second moments over all mids; only where an expert has none of its own.
    mean_mids: Option<Vec<f32>>,
}

impl Gathered {
    pub(super) fn new(layer: usize, n_experts: usize, hidden: usize, inner: usize) -> Self {
        Self {
            layer,
            hidden,
            inner,
            inputs: HalfRows::new(hidden),
            sensitivities: Vec::new(),
            base: 0,
            experts: vec![
                Expert { rows: Vec::new(), weights: Vec::new(), mids: HalfRows::new(inner) };
                n_experts
            ],
            mean_inputs: Vec::new(),
            mean_mids: None,
        }
    }

    /// Forms what all experts share.
    pub(super) fn finish(&mut self, settings: &Settings) {
        if self.inputs.is_empty() {
            return;
        }
        let power = settings.sensitivity_power as f32;
        for sensitivity in &mut self.sensitivities {
            *sensitivity = if power > 0.0 { sensitivity.powf(power) } else { 1.0 };
        }
        let n = self.sensitivities.len() as f64;
        let mean = self.sensitivities.iter().map(|&s| f64::from(s)).sum::<f64>() / n;
        let is_usable = mean.is_finite() && mean > 0.0;
        self.sensitivities.iter_mut().for_each(|s| *s = if is_usable { *s / mean as f32 } else { 1.0 });
        let shares = self.experts.iter().map(|expert| input_share(settings, expert.rows.len()));
        if shares.into_iter().any(|share| share > 0.0) {
            let mut mean = SecondMoments::new(self.hidden);
            for (row, &weight) in self.inputs.rows().zip(&self.sensitivities) {
                mean.add(row, weight);
            }
            self.mean_inputs = mean.finish();
        }
        if self.experts.iter().any(|expert| expert.rows.is_empty()) {
            let mut mean = SecondMoments::new(self.inner);
            for row in self.experts.iter().flat_map(|expert| expert.mids.rows()) {
                mean.add(row, 1.0);
            }
            self.mean_mids = Some(mean.finish());
        }
    }

    /// Second moments of one expert, mixed as the settings say.
    pub(super) fn moments(&self, input: MatrixInput, expert: usize, settings: &Settings) -> MatrixMoments {
        let expert = &self.experts[expert];
        let n_tokens = expert.rows.len();
        let (moments, columns) = match input {
            MatrixInput::RoutedMid => (self.mid_moments(expert, settings), self.inner),
            _ => (self.input_moments(expert, settings), self.hidden),
        };
        let diagonal = (0..columns).map(|i| moments[i * columns + i]).collect();
        MatrixMoments { moments, diagonal, n_tokens, cross: None }
    }

    fn input_moments(&self, expert: &Expert, settings: &Settings) -> Vec<f32> {
        let share = input_share(settings, expert.rows.len());
        let mut own = SecondMoments::new(self.hidden);
        for (&row, mid) in expert.rows.iter().zip(expert.mids.rows()) {
            let weight = if settings.response_power > 0.0 {
                let energy: f64 = mid.map(|x| f64::from(x).powi(2)).sum();
                energy.powf(settings.response_power) as f32
            } else {
                1.0
            };
            own.add(self.inputs.row(row as usize), weight * self.sensitivities[row as usize]);
        }
        let mut own = own.finish();
        if share > 0.0 {
            mixed(&mut own, &self.mean_inputs, share);
        }
        own
    }

    /// Second moments of one expert's mids when its gate and up projections are others.
    pub(super) fn changed_mid_moments(
        &self,
        expert: usize,
        [gate, up]: [&[f32]; 2],
        limit: f32,
        settings: &Settings,
    ) -> MatrixMoments {
        let expert = &self.experts[expert];
        let n_tokens = expert.rows.len();
        if n_tokens == 0 {
            let moments = self.mid_moments(expert, settings);
            let diagonal = (0..self.inner).map(|i| moments[i * self.inner + i]).collect();
            return MatrixMoments { moments, diagonal, n_tokens, cross: None };
        }
        let mut own = SecondMoments::new(self.inner);
        let (mut cross, mut plain) = (CrossMoments::new(self.inner), CrossMoments::new(self.inner));
        // Some tokens at a time: an expert may have seen most of the text.
        for first in (0..n_tokens).step_by(CrossMoments::ROWS) {
            let part = first..n_tokens.min(first + CrossMoments::ROWS);
            let mut mids = self.changed_mids(expert, part.clone(), [gate, up], limit);
            let mut right: Vec<f32> = part.clone().flat_map(|row| expert.mids.row(row)).collect();
            let sensitivities: Vec<f32> =
                expert.rows[part].iter().map(|&row| self.sensitivities[row as usize]).collect();
            for (row, sensitivity) in mids.chunks_exact(self.inner).zip(&sensitivities) {
                own.add(row.iter().copied(), mid_weight(settings, row.iter().copied()) * sensitivity);
            }
            for values in [&mut mids, &mut right] {
                for (row, sensitivity) in values.chunks_exact_mut(self.inner).zip(&sensitivities) {
                    let root = sensitivity.sqrt();
                    for v in row {
                        *v *= root;
                    }
                }
            }
            cross.add(&right, &mids);
            plain.add(&mids, &mids);
        }
        let moments = self.shrunk_mids(own, settings);
        let diagonal = (0..self.inner).map(|i| moments[i * self.inner + i]).collect();
        MatrixMoments { moments, diagonal, n_tokens, cross: Some((cross.finish(), plain.finish())) }
    }

    /// Mids times route weights of some of an expert's tokens when its gate and up projections are others.
    fn changed_mids(
        &self,
        expert: &Expert,
        tokens: Range<usize>,
        [gate, up]: [&[f32]; 2],
        limit: f32,
    ) -> Vec<f32> {
        let mut inputs = Vec::with_capacity(tokens.len() * self.hidden);
        for &row in &expert.rows[tokens.clone()] {
            inputs.extend(self.inputs.row(row as usize));
        }
        let mut mids = products(&inputs, gate, self.hidden);
        let ups = products(&inputs, up, self.hidden);
        for ((mids, ups), weight) in
            mids.chunks_exact_mut(self.inner).zip(ups.chunks_exact(self.inner)).zip(&expert.weights[tokens])
        {
            for (mid, up) in mids.iter_mut().zip(ups) {
                let gate = mid.min(limit);
                *mid = gate / (1.0 + (-gate).exp()) * up.clamp(-limit, limit) * weight;
            }
        }
        mids
    }

    fn mid_moments(&self, expert: &Expert, settings: &Settings) -> Vec<f32> {
        if expert.rows.is_empty()
            && let Some(mean) = &self.mean_mids
        {
            return mean.clone();
        }
        let mut own = SecondMoments::new(self.inner);
        for (row, &at) in expert.mids.rows().zip(&expert.rows) {
            own.add(row.clone(), mid_weight(settings, row) * self.sensitivities[at as usize]);
        }
        self.shrunk_mids(own, settings)
    }

    /// Second moments of mids, what is beside the diagonal reduced as the settings say.
    fn shrunk_mids(&self, own: SecondMoments, settings: &Settings) -> Vec<f32> {
        let share = settings.mid_shrinkage.max(prior_share(settings, own.n_rows()));
        let mut own = own.finish();
        if share > 0.0 {
            shrunk_to_diagonal(&mut own, self.inner, share);
        }
        own
    }
}

/// How much a mid counts by its length.
fn mid_weight(settings: &Settings, mid: impl Iterator<Item = f32>) -> f32 {
    if settings.mid_power < 0.0 {
        let energy: f64 = mid.map(|x| f64::from(x).powi(2)).sum();
        energy.max(f64::from(f32::MIN_POSITIVE)).powf(settings.mid_power) as f32
    } else {
        1.0
    }
}

/// Share of the layer's mean in an expert's second moments of inputs: all of it for an expert that no token came to.
fn input_share(settings: &Settings, n_tokens: usize) -> f64 {
    if n_tokens == 0 { 1.0 } else { settings.mix.max(prior_share(settings, n_tokens)) }
}

/// Weight of what is known without an expert's own tokens.
fn prior_share(settings: &Settings, n_tokens: usize) -> f64 {
    let prior = settings.prior_tokens;
    if prior > 0.0 { prior / (prior + n_tokens as f64) } else { 0.0 }
}

impl Observer for Gathered {
    fn wants(&self, site: Site, layer: Option<usize>) -> bool {
        layer == Some(self.layer)
            && matches!(site, Site::FfnInput | Site::RoutedMid | Site::FfnPost | Site::Streams)
    }

    fn rows(&mut self, observation: Observation<'_>) {
        let n = observation.tokens.len();
        let squares = || squares(observation.values, n);
        match observation.site {
            Site::FfnInput => {
                self.base = self.inputs.len();
                for row in observation.values.chunks_exact(self.hidden) {
                    self.inputs.push(row.iter().copied());
                }
            }
            Site::FfnPost => self.sensitivities.extend(squares()),
            Site::Streams => {
                let first = self.sensitivities.len() - n;
                for (sensitivity, square) in self.sensitivities[first..].iter_mut().zip(squares()) {
                    *sensitivity /= square.max(f32::MIN_POSITIVE);
                }
            }
            _ => {}
        }
    }

    fn expert(&mut self, observation: ExpertObservation<'_>) {
        let base = self.base;
        let expert = &mut self.experts[observation.expert];
        expert.rows.extend(observation.rows.iter().map(|row| (base + row) as u32));
        expert.weights.extend(observation.weights);
        for (mid, &weight) in observation.mids.chunks_exact(self.inner).zip(observation.weights) {
            expert.mids.push(mid.iter().map(|v| v * weight));
        }
    }
}
