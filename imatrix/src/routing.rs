//! How evenly a calibration reached the routed experts, layer by layer.

use gguf_tools::plot::{HeatMap, PlotError};

use crate::entry::State;
use crate::{CountUnit, Entry, Imatrix, ImatrixError};

/// What a file shows about the routing of one layer.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct LayerRouting {
    /// The layer.
    pub layer: usize,
    /// Rows that reached each expert; `None` in files that do not count them.
    pub rows: Option<Vec<f64>>,
    /// Whether each expert was reached.
    pub seen: Vec<bool>,
}

/// Figures of one layer.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct RoutingFigures {
    /// The layer.
    pub layer: usize,
    /// Routed experts.
    pub n_experts: usize,
    /// Experts that were never reached.
    pub n_unseen: usize,
    /// Fewest rows of an expert.
    pub min: Option<f64>,
    /// Rows of the lower middle expert.
    pub median: Option<f64>,
    /// Most rows of an expert.
    pub max: Option<f64>,
    /// Entropy of the experts' shares of the rows, in bits; `log2(n_experts)` when all are used alike.
    pub entropy_bits: Option<f64>,
    /// Two to the power of the entropy: how many experts, used alike, would spread the rows as evenly.
    pub effective_experts: Option<f64>,
}

impl LayerRouting {
    /// The figures of this layer.
    pub fn figures(&self) -> RoutingFigures {
        let sorted = self.rows.as_ref().map(|rows| {
            let mut sorted = rows.clone();
            sorted.sort_by(f64::total_cmp);
            sorted
        });
        let entropy_bits = self.rows.as_ref().and_then(|rows| entropy_bits(rows));
        RoutingFigures {
            layer: self.layer,
            n_experts: self.seen.len(),
            n_unseen: self.seen.iter().filter(|seen| !**seen).count(),
            min: sorted.as_ref().and_then(|s| s.first().copied()),
            median: sorted.as_ref().and_then(|s| s.get(s.len().saturating_sub(1) / 2).copied()),
            max: sorted.as_ref().and_then(|s| s.last().copied()),
            entropy_bits,
            effective_experts: entropy_bits.map(f64::exp2),
        }
    }
}

/// `-sum p log2 p` of the shares; `None` if nothing was counted.
fn entropy_bits(rows: &[f64]) -> Option<f64> {
    let total: f64 = rows.iter().sum();
    let shares = rows.iter().map(|n| n / total).filter(|&share| share > 0.0);
    (total > 0.0).then(|| shares.map(|share| -share * share.log2()).sum::<f64>().max(0.0))
}

impl Imatrix {
    /// The routing of every layer that has an entry for its routed gate projections, layers ascending.
    /// `n_experts` gives the number of experts where the file does not store it (legacy files).
    ///
    /// # Errors
    /// If an entry's shape does not fit that number, or values cannot be read.
    pub fn routing(&self, n_experts: Option<usize>) -> Result<Vec<LayerRouting>, ImatrixError> {
        let mut layers = Vec::new();
        for entry in self.entries() {
            if let Some(layer) = layer_of_gate(entry.name()) {
                layers.push(self.layer_routing(layer, entry, n_experts)?);
            }
        }
        layers.sort_by_key(|layer| layer.layer);
        Ok(layers)
    }

    fn layer_routing(
        &self,
        layer: usize,
        entry: &Entry,
        n_experts: Option<usize>,
    ) -> Result<LayerRouting, ImatrixError> {
        let stored = entry.n_columns().map(|n_columns| entry.n_values() / n_columns.max(1));
        let Some(n_experts) = stored.or(n_experts).filter(|&n| n > 0 && entry.n_values().is_multiple_of(n))
        else {
            return Err(ImatrixError::ExpertsNeeded {
                entry: entry.name().to_owned(),
                file_name: self.file_name(),
                n_values: entry.n_values(),
            });
        };
        let n_columns = entry.n_values() / n_experts;
        let state = |expert| entry.state(expert, n_columns);
        let seen = (0..n_experts).map(|expert| matches!(state(expert), State::Seen(_))).collect();
        let counted = entry.count_unit() == CountUnit::Rows && entry.counts().len() == n_experts;
        Ok(LayerRouting { layer, rows: counted.then(|| entry.counts().to_vec()), seen })
    }
}

fn layer_of_gate(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.strip_suffix(".ffn_gate_exps.weight")?.parse().ok()
}

/// A picture of which experts the calibration reached, and how often.
///
/// # Errors
/// If there are no layers, or their numbers of experts differ.
pub fn picture(title: &str, layers: &[LayerRouting]) -> Result<String, PlotError> {
    let n_columns = layers.first().map_or(0, |layer| layer.seen.len());
    let counted = layers.iter().all(|layer| layer.rows.is_some());
    let cells = layers.iter().flat_map(|layer| {
        layer.seen.iter().enumerate().map(|(expert, &seen)| {
            let rows = layer.rows.as_ref().map_or(1.0, |rows| rows[expert]);
            (seen && rows > 0.0).then(|| rows.log2())
        })
    });
    HeatMap {
        title: title.to_owned(),
        x_label: "routed expert".to_owned(),
        y_label: "layer".to_owned(),
        value_label: if counted { "rows, log2" } else { "reached (rows not counted)" }.to_owned(),
        missing_label: "never reached".to_owned(),
        n_rows: layers.len(),
        n_columns,
        values: cells.collect(),
    }
    .to_svg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_is_that_of_the_shares() {
        assert_eq!(entropy_bits(&[5.0, 5.0, 5.0, 5.0]), Some(2.0));
        assert_eq!(entropy_bits(&[7.0, 0.0]), Some(0.0));
        assert_eq!(entropy_bits(&[0.0, 0.0]), None);
        let halves = entropy_bits(&[2.0, 1.0, 1.0]).unwrap();
        assert!((halves - 1.5).abs() < 1e-12, "{halves}");
    }

    #[test]
    fn figures_count_unseen_experts_and_the_lower_middle() {
        let layer = LayerRouting {
            layer: 3,
            rows: Some(vec![0.0, 8.0, 2.0, 6.0]),
            seen: vec![false, true, true, true],
        };
        let figures = layer.figures();
        assert_eq!(
            (figures.n_unseen, figures.min, figures.median, figures.max),
            (1, Some(0.0), Some(2.0), Some(8.0))
        );
        assert!(picture("coverage", &[layer]).unwrap().contains("never reached"));
    }
}
