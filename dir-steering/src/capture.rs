//! Activations of whole prompts, one vector a prompt and layer.

use runner::Model;
use runner::observe::{Observation, Observer, Site};

use crate::component::Component;
use crate::error::SteeringError;

/// Which tokens of a prompt stand for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// The last one: the state from which the answer begins.
    Last,
    /// The mean of all.
    Mean,
}

impl Position {
    /// The name that users type and files store.
    pub fn name(self) -> &'static str {
        match self {
            Self::Last => "last",
            Self::Mean => "mean",
        }
    }
}

/// One vector a prompt and layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Captured {
    /// `[layers][prompts]`, each `[width]`.
    pub layers: Vec<Vec<Vec<f32>>>,
}

/// Runs prompts through the model and keeps a component of every layer.
///
/// # Errors
/// If a prompt is empty, too long or holds unknown tokens, or computing fails.
pub fn capture(
    model: &Model,
    prompts: &[Vec<u32>],
    component: Component,
    position: Position,
) -> Result<Captured, SteeringError> {
    let h = model.hyper_parameters();
    let width = h.hidden_size as usize;
    let zeros = vec![vec![0.0_f64; width]; prompts.len()];
    let mut collector = Collector {
        site: component.site(),
        position,
        lengths: prompts.iter().map(Vec::len).collect(),
        sums: vec![zeros; h.num_hidden_layers as usize],
    };
    let texts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    model.observe_texts(&texts, &mut collector)?;
    let narrow = |row: Vec<f64>| row.into_iter().map(|value| value as f32).collect();
    let layers = collector.sums.into_iter().map(|rows| rows.into_iter().map(narrow).collect()).collect();
    Ok(Captured { layers })
}

struct Collector {
    site: Site,
    position: Position,
    /// Tokens of each prompt.
    lengths: Vec<usize>,
    /// `[layers][prompts][width]`.
    sums: Vec<Vec<Vec<f64>>>,
}

impl Observer for Collector {
    fn wants(&self, site: Site, layer: Option<usize>) -> bool {
        site == self.site && layer.is_some()
    }

    fn rows(&mut self, observation: Observation<'_>) {
        let Some(layer) = observation.layer else { return };
        let width = observation.values.len() / observation.tokens.len().max(1);
        for (place, row) in observation.tokens.iter().zip(observation.values.chunks_exact(width.max(1))) {
            let length = self.lengths[place.sequence];
            let share = match self.position {
                Position::Last if place.position + 1 == length => 1.0,
                Position::Last => continue,
                Position::Mean => 1.0 / length as f64,
            };
            let sums = &mut self.sums[layer][place.sequence];
            sums.iter_mut().zip(row).for_each(|(sum, &value)| *sum += share * f64::from(value));
        }
    }
}
