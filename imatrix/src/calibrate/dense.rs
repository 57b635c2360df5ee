//! Second moments of what the dense matrices of one layer read, formed while its tokens pass: their inputs are too wide to be
//! kept for all tokens.

use std::collections::BTreeSet;

use gguf_tools::build::{CalibrationError, MatrixMoments};
use gguf_tools::feedback::SecondMoments;
use gguf_tools::model::{HyperParameters, MatrixInput};
use rayon::prelude::*;
use runner::observe::{ExpertObservation, Observation, Observer, RouteObservation, Site};

/// Where an input is seen; `None`: it is no dense matrix's.
fn site_of(input: MatrixInput) -> Option<Site> {
    match input {
        MatrixInput::Attention => Some(Site::AttentionInput),
        MatrixInput::QueryLora => Some(Site::QueryLora),
        MatrixInput::Heads => Some(Site::HeadsOutput),
        MatrixInput::OutputLora => Some(Site::OutputLora),
        MatrixInput::Ffn => Some(Site::FfnInput),
        MatrixInput::SharedMid => Some(Site::SharedMid),
        MatrixInput::Final => Some(Site::FinalNorm),
        MatrixInput::RoutedMid => None,
    }
}

/// Weights with which the sublayer that reads an input enters the streams; `None` behind the layers.
fn post_of(input: MatrixInput) -> Option<Site> {
    match input {
        MatrixInput::Attention | MatrixInput::QueryLora | MatrixInput::Heads | MatrixInput::OutputLora => {
            Some(Site::AttentionPost)
        }
        MatrixInput::Ffn | MatrixInput::RoutedMid | MatrixInput::SharedMid => Some(Site::FfnPost),
        MatrixInput::Final => None,
    }
}

/// One input.
struct Input {
    of: MatrixInput,
    site: Site,
    /// Values that wait for the weights of their tokens, `[tokens, groups, columns]`.
    waiting: Vec<f32>,
    /// By group.
    groups: Vec<SecondMoments>,
    /// Their means, once all tokens have passed.
    means: Vec<Vec<f32>>,
    n_tokens: usize,
}

/// What was gathered in one layer, or behind the last.
pub(super) struct Dense {
    layer: Option<usize>,
    inputs: Vec<Input>,
    /// Squares of the weights with which a sublayer's output enters the streams, by token of the batch.
    attention_posts: Vec<f32>,
    ffn_posts: Vec<f32>,
    /// Power of the sensitivity with which tokens count.
    power: f32,
}

impl Dense {
    /// `layer`: `None` behind the layers. `power`: [`gguf_tools::feedback::Settings::sensitivity_power`].
    pub(super) fn new(
        layer: Option<usize>,
        wanted: &BTreeSet<MatrixInput>,
        model: &HyperParameters,
        power: f64,
    ) -> Self {
        let input = |&input: &MatrixInput| {
            let n_groups = input.n_groups(model);
            let columns = input.width(model) as usize / n_groups;
            let groups = (0..n_groups).map(|_| SecondMoments::new(columns)).collect();
            let site = site_of(input)?;
            Some(Input { of: input, site, waiting: Vec::new(), groups, means: Vec::new(), n_tokens: 0 })
        };
        Self {
            layer,
            inputs: wanted.iter().filter_map(input).collect(),
            attention_posts: Vec::new(),
            ffn_posts: Vec::new(),
            power: power as f32,
        }
    }

    /// Bytes of the sums of these inputs, and of the values of a batch that wait.
    pub(super) fn memory_bytes(wanted: &BTreeSet<MatrixInput>, model: &HyperParameters, batch: u64) -> u64 {
        let of = |&input: &MatrixInput| {
            let (width, n_groups) = (input.width(model), input.n_groups(model) as u64);
            let columns = width / n_groups;
            4 * (n_groups * columns * columns + 256 * width + batch * width)
        };
        wanted.iter().map(of).sum()
    }

    /// Adds what waits, each token with the weight of its sublayer. `squares`: squared length of the streams behind the layer.
    fn flush(&mut self, squares: &[f32]) {
        let power = self.power;
        let weights = |posts: &[f32]| -> Vec<f32> {
            let sensitivity = |(post, square): (&f32, &f32)| post / square.max(f32::MIN_POSITIVE);
            let of_token = |s: f32| if power > 0.0 { s.powf(power) } else { 1.0 };
            posts.iter().zip(squares).map(sensitivity).map(of_token).collect()
        };
        let (attention, ffn) = (weights(&self.attention_posts), weights(&self.ffn_posts));
        self.inputs.par_iter_mut().for_each(|input| {
            input.add(if post_of(input.of) == Some(Site::AttentionPost) { &attention } else { &ffn });
        });
        self.attention_posts.clear();
        self.ffn_posts.clear();
    }

    /// Forms the means.
    pub(super) fn finish(&mut self) {
        for input in &mut self.inputs {
            let groups = std::mem::take(&mut input.groups);
            input.means = groups.into_par_iter().map(SecondMoments::finish).collect();
        }
    }

    /// Second moments of one group of an input.
    pub(super) fn moments(
        &self,
        input: MatrixInput,
        group: usize,
    ) -> Result<MatrixMoments, CalibrationError> {
        let found = self.inputs.iter().find(|found| found.of == input);
        let (found, moments) = found
            .and_then(|found| Some((found, found.means.get(group)?.clone())))
            .ok_or_else(|| format!("group {group} of {input:?} was not gathered"))?;
        let columns = moments.len().isqrt();
        let diagonal = (0..columns).map(|i| moments[i * columns + i]).collect();
        Ok(MatrixMoments { moments, diagonal, n_tokens: found.n_tokens, cross: None })
    }
}

impl Input {
    /// Adds what waits, one weight a token.
    fn add(&mut self, weights: &[f32]) {
        let n_groups = self.groups.len();
        let width = self.waiting.len() / weights.len().max(1);
        let columns = width / n_groups;
        let waiting = &self.waiting;
        self.groups.par_iter_mut().enumerate().for_each(|(group, sums)| {
            for (row, &weight) in waiting.chunks_exact(width.max(1)).zip(weights) {
                sums.add(row[group * columns..][..columns].iter().copied(), weight);
            }
        });
        self.n_tokens += weights.len();
        self.waiting.clear();
    }
}

/// Sum of the squares of each of `n` rows.
pub(super) fn squares(values: &[f32], n: usize) -> Vec<f32> {
    let width = (values.len() / n.max(1)).max(1);
    values.chunks_exact(width).map(|row| row.iter().map(|v| v * v).sum()).collect()
}

impl Observer for Dense {
    fn wants(&self, site: Site, layer: Option<usize>) -> bool {
        let weights = [Site::AttentionPost, Site::FfnPost, Site::Streams];
        layer == self.layer
            && (self.inputs.iter().any(|input| input.site == site)
                || (layer.is_some() && weights.contains(&site)))
    }

    fn rows(&mut self, observation: Observation<'_>) {
        let (values, n) = (observation.values, observation.tokens.len());
        match observation.site {
            Site::AttentionPost => self.attention_posts.extend(squares(values, n)),
            Site::FfnPost => self.ffn_posts.extend(squares(values, n)),
            Site::Streams => self.flush(&squares(values, n)),
            site => {
                if let Some(input) = self.inputs.iter_mut().find(|input| input.site == site) {
                    input.waiting.extend_from_slice(values);
                    if self.layer.is_none() {
                        // All places of the text count alike.
                        input.add(&vec![1.0; n]);
                    }
                }
            }
        }
    }
}

/// Two observers side by side.
pub(super) struct Both<'a>(pub(super) &'a mut dyn Observer, pub(super) &'a mut dyn Observer);

impl Observer for Both<'_> {
    fn wants(&self, site: Site, layer: Option<usize>) -> bool {
        self.0.wants(site, layer) || self.1.wants(site, layer)
    }

    fn rows(&mut self, observation: Observation<'_>) {
        for observer in [&mut *self.0, &mut *self.1] {
            if observer.wants(observation.site, observation.layer) {
                observer.rows(observation);
            }
        }
    }

    fn routes(&mut self, observation: RouteObservation<'_>) {
        for observer in [&mut *self.0, &mut *self.1] {
            if observer.wants(Site::RouterLogits, Some(observation.layer)) {
                observer.routes(observation);
            }
        }
    }

    fn expert(&mut self, observation: ExpertObservation<'_>) {
        for observer in [&mut *self.0, &mut *self.1] {
            if observer.wants(Site::RoutedMid, Some(observation.layer)) {
                observer.expert(observation);
            }
        }
    }
}
