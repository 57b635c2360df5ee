//! Directions from the activations of two sets of prompts.

use std::path::PathBuf;

use crate::capture::{Captured, Position};
use crate::component::Component;
use crate::direction::{Direction, Operation, Origin};
use crate::error::SteeringError;
use crate::model::ModelIdentity;

/// How a direction is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// The mean of the good minus the mean of the bad.
    DifferenceOfMeans,
    /// The first principal component of the differences of the pairs, pointing from bad to good.
    PrincipalComponent,
}

impl Method {
    /// The name that users type and files store.
    pub fn name(self) -> &'static str {
        match self {
            Self::DifferenceOfMeans => "mean",
            Self::PrincipalComponent => "pca",
        }
    }
}

/// What a direction is to be.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// Where the activations were taken.
    pub component: Component,
    /// Which tokens stand for a prompt.
    pub position: Position,
    /// How the direction is found.
    pub method: Method,
    /// Take the mean activation of the bad prompts out of the direction, so that it does not carry what all prompts share.
    pub orthogonalize: bool,
    /// What was told apart, in words: names of the files.
    pub contrast: String,
}

/// Rounds of the power iteration: its error falls by the ratio of the first two eigenvalues each round.
const POWER_ROUNDS: usize = 200;

/// One unit vector a layer, from good and bad prompts. Pair `i` is prompt `i` of each set.
///
/// # Errors
/// If a set is empty, sizes differ where pairs are needed, or the sets do not differ in a layer.
pub fn build(
    model: &ModelIdentity,
    good: &Captured,
    bad: &Captured,
    options: &BuildOptions,
) -> Result<Direction, SteeringError> {
    let n_pairs = good.layers.first().map_or(0, Vec::len);
    let n_bad = bad.layers.first().map_or(0, Vec::len);
    for (set, n) in [("good", n_pairs), ("bad", n_bad)] {
        if n == 0 {
            return Err(SteeringError::Prompts { set, reason: "none; at least one is needed".to_owned() });
        }
    }
    if options.method == Method::PrincipalComponent && n_pairs != n_bad {
        let reason =
            format!("{n_bad}, expected {n_pairs}, one for each good prompt: the pca method works on pairs");
        return Err(SteeringError::Prompts { set: "bad", reason });
    }
    let layers = good.layers.iter().zip(&bad.layers).enumerate();
    let layers =
        layers.map(|(layer, (good, bad))| of_layer(layer, good, bad, options)).collect::<Result<_, _>>()?;
    Ok(Direction {
        operation: Operation::Project,
        component: Some(options.component),
        width: model.width,
        layers,
        states_n_layers: true,
        origin: Origin {
            label: model.label.clone(),
            model_sha256: Some(model.sha256.clone()),
            method: Some(format!(
                "{} of {n_pairs} good and {n_bad} bad prompts, {} token{}",
                options.method.name(),
                options.position.name(),
                if options.orthogonalize { ", orthogonal to the bad mean" } else { "" }
            )),
            contrast: Some(options.contrast.clone()),
        },
        path: PathBuf::new(),
    })
}

fn of_layer(
    layer: usize,
    good: &[Vec<f32>],
    bad: &[Vec<f32>],
    options: &BuildOptions,
) -> Result<Vec<f32>, SteeringError> {
    let (good_mean, bad_mean) = (mean(good), mean(bad));
    let difference: Vec<f64> = good_mean.iter().zip(&bad_mean).map(|(g, b)| g - b).collect();
    let size = length(&good_mean).max(length(&bad_mean));
    let mut direction = match options.method {
        Method::DifferenceOfMeans => difference.clone(),
        Method::PrincipalComponent => principal(good, bad, &difference),
    };
    if options.orthogonalize && length(&bad_mean) > 0.0 {
        let share = dot(&direction, &bad_mean) / dot(&bad_mean, &bad_mean);
        direction.iter_mut().zip(&bad_mean).for_each(|(d, b)| *d -= share * b);
    }
    let length = length(&direction);
    if !(length > 1e-7 * size && length.is_normal()) {
        return Err(SteeringError::NoDifference { layer, length });
    }
    Ok(direction.iter().map(|value| (value / length) as f32).collect())
}

/// The direction along which the pairs' differences spread most around zero, by power iteration from their mean.
fn principal(good: &[Vec<f32>], bad: &[Vec<f32>], difference: &[f64]) -> Vec<f64> {
    let differences: Vec<Vec<f64>> = good
        .iter()
        .zip(bad)
        .map(|(g, b)| g.iter().zip(b).map(|(&g, &b)| f64::from(g) - f64::from(b)).collect())
        .collect();
    let mut direction = difference.to_vec();
    if length(&direction) == 0.0 {
        direction.clone_from(&differences[0]);
    }
    for _ in 0..POWER_ROUNDS {
        let size = length(&direction);
        if size == 0.0 {
            break;
        }
        for value in &mut direction {
            *value /= size;
        }
        let mut next = vec![0.0; direction.len()];
        for row in &differences {
            let along = dot(row, &direction);
            next.iter_mut().zip(row).for_each(|(sum, value)| *sum += along * value);
        }
        direction = next;
    }
    if dot(&direction, difference) < 0.0 {
        for value in &mut direction {
            *value = -*value;
        }
    }
    direction
}

fn mean(rows: &[Vec<f32>]) -> Vec<f64> {
    let mut sum = vec![0.0; rows[0].len()];
    for row in rows {
        sum.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value));
    }
    for value in &mut sum {
        *value /= rows.len() as f64;
    }
    sum
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn length(vector: &[f64]) -> f64 {
    dot(vector, vector).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(method: Method, orthogonalize: bool) -> BuildOptions {
        let (component, position) = (Component::FfnOut, Position::Last);
        BuildOptions { component, position, method, orthogonalize, contrast: "good against bad".to_owned() }
    }

    fn model() -> ModelIdentity {
        ModelIdentity { width: 3, n_layers: 1, label: None, sha256: String::new() }
    }

    fn captured(rows: &[[f32; 3]]) -> Captured {
        Captured { layers: vec![rows.iter().map(|row| row.to_vec()).collect()] }
    }

    #[test]
    fn points_from_bad_to_good() {
        let good = captured(&[[3.0, 1.0, 0.0], [3.0, -1.0, 0.0]]);
        let bad = captured(&[[1.0, 1.0, 0.0], [1.0, -1.0, 0.0]]);
        for method in [Method::DifferenceOfMeans, Method::PrincipalComponent] {
            let found = build(&model(), &good, &bad, &options(method, false)).expect("sets that differ");
            assert_eq!(found.layers, [[1.0, 0.0, 0.0]], "{method:?}");
        }
    }

    #[test]
    fn the_principal_component_sees_past_the_mean() {
        // The mean of the differences has a part along the third axis that only one pair causes.
        let good = captured(&[[9.0, 0.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 1.0]]);
        let bad = captured(&[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]);
        let found =
            build(&model(), &good, &bad, &options(Method::PrincipalComponent, false)).expect("a spread");
        assert!(found.layers[0][0] > 0.9999 && found.layers[0][2].abs() < 1e-3, "{:?}", found.layers[0]);
    }

    #[test]
    fn orthogonal_directions_do_not_carry_the_bad_mean() {
        let good = captured(&[[4.0, 2.0, 0.0]]);
        let bad = captured(&[[2.0, 0.0, 0.0]]);
        let found =
            build(&model(), &good, &bad, &options(Method::DifferenceOfMeans, true)).expect("a difference");
        assert_eq!(found.layers[0], [0.0, 1.0, 0.0]);
    }

    #[test]
    fn equal_sets_are_refused() {
        let rows = captured(&[[4.0, 2.0, 0.0]]);
        for method in [Method::DifferenceOfMeans, Method::PrincipalComponent] {
            let error = build(&model(), &rows, &rows, &options(method, false)).expect_err("no difference");
            assert!(matches!(error, SteeringError::NoDifference { layer: 0, .. }), "{error}");
        }
        let none = Captured { layers: vec![Vec::new()] };
        let error =
            build(&model(), &rows, &none, &options(Method::DifferenceOfMeans, false)).expect_err("nothing");
        assert!(error.to_string().contains("bad prompts: none"), "{error}");
    }
}
