//! What is summed: one row of `f64` a matrix and column, and the observer that fills it.
//!
//! Every row of activations is added by itself, in the order of the tokens, so the totals do not depend on how
//! prompts were batched. Adding partial sums of batches would.

use gguf_tools::model::{HyperParameters, TensorTable};
use runner::observe::{ExpertObservation, Observation, Observer, Site};

use crate::Entry;

/// Which row is squared for a routed down projection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DownInput {
    /// The activated row times the route weight: what enters the sum of the experts, as ds4 collects it.
    #[default]
    Weighted,
    /// The activated row alone, as llama.cpp collects it.
    Unweighted,
}

impl DownInput {
    /// Every choice with the name users type.
    pub const NAMES: [(&'static str, Self); 2] =
        [("weighted", Self::Weighted), ("unweighted", Self::Unweighted)];
}

/// The dense matrices of a layer by the site whose rows they read. Those of the hyper-connections read the raw streams
/// and stay F32 in every recipe; they are left out.
const DENSE: [(Site, &[&str]); 6] = [
    (
        Site::AttentionInput,
        &[
            "attn_q_a",
            "attn_kv",
            "attn_compressor_kv",
            "attn_compressor_gate",
            "indexer_compressor_kv",
            "indexer_compressor_gate",
            "indexer.proj",
        ],
    ),
    (Site::QueryLora, &["attn_q_b", "indexer.attn_q_b"]),
    (Site::HeadsOutput, &["attn_output_a"]),
    (Site::OutputLora, &["attn_output_b"]),
    (Site::FfnInput, &["ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp"]),
    (Site::SharedMid, &["ffn_down_shexp"]),
];

/// Sums of squares of the inputs of some matrices of one width.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sums {
    pub(super) n_columns: usize,
    /// `[matrices, n_columns]`.
    pub(super) squares: Vec<f64>,
    /// Rows summed, `[matrices]`.
    pub(super) counts: Vec<u64>,
}

impl Sums {
    fn new(n_matrices: usize, n_columns: usize) -> Self {
        Self { n_columns, squares: vec![0.0; n_matrices * n_columns], counts: vec![0; n_matrices] }
    }

    /// Adds the squares of one row, multiplied by `scale` in `f32` as the model does.
    fn add(&mut self, matrix: usize, row: &[f32], scale: f32) {
        let squares = &mut self.squares[matrix * self.n_columns..][..self.n_columns];
        for (sum, &value) in squares.iter_mut().zip(row) {
            let value = f64::from(value * scale);
            *sum += value * value;
        }
        self.counts[matrix] += 1;
    }

    fn entry(&self, name: String) -> Entry {
        let sums: Vec<f32> = self.squares.iter().map(|&sum| sum as f32).collect();
        let counts = self.counts.iter().map(|&count| count as f64).collect();
        Entry::from_sums(name, self.n_columns, &sums, counts)
    }
}

/// The dense matrices that read one site of one layer. A site of several groups counts one row for each.
#[derive(Debug, Clone, PartialEq)]
struct Dense {
    site: Site,
    layer: Option<usize>,
    names: Vec<String>,
    sums: Sums,
}

/// Everything that is summed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Totals {
    down_input: DownInput,
    /// Each layer's routed experts: inputs of gate and up, inputs of down.
    routed: Vec<(Sums, Sums)>,
    dense: Vec<Dense>,
}

impl Totals {
    pub(super) fn new(h: &HyperParameters, dense: bool, down_input: DownInput) -> Self {
        let n_experts = h.n_routed_experts as usize;
        let of_layer = || {
            let (input, mid) = (h.hidden_size as usize, h.moe_intermediate_size as usize);
            (Sums::new(n_experts, input), Sums::new(n_experts, mid))
        };
        let routed = (0..h.num_hidden_layers).map(|_| of_layer()).collect();
        let dense = if dense { dense_matrices(h) } else { Vec::new() };
        Self { down_input, routed, dense }
    }

    /// Every block of sums, in the order of a state file.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Sums> {
        self.routed.iter().flat_map(|(inputs, mids)| [inputs, mids]).chain(self.dense.iter().map(|d| &d.sums))
    }

    pub(super) fn blocks_mut(&mut self) -> impl Iterator<Item = &mut Sums> {
        let routed = self.routed.iter_mut().flat_map(|(inputs, mids)| [inputs, mids]);
        routed.chain(self.dense.iter_mut().map(|d| &mut d.sums))
    }

    /// One entry a tensor: gate, up and down of each layer, then the dense ones.
    pub(super) fn entries(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        for (layer, (inputs, mids)) in self.routed.iter().enumerate() {
            entries.push(inputs.entry(routed_name(layer, "gate")));
            entries.push(inputs.entry(routed_name(layer, "up")));
            entries.push(mids.entry(routed_name(layer, "down")));
        }
        for dense in &self.dense {
            entries.extend(dense.names.iter().map(|name| dense.sums.entry(name.clone())));
        }
        entries
    }

    /// The first sum that is not finite: tensor, expert, column, value.
    pub(super) fn first_not_finite(&self) -> Option<(String, usize, usize, f64)> {
        let routed = self.routed.iter().enumerate().flat_map(|(layer, (inputs, mids))| {
            [(routed_name(layer, "gate"), inputs), (routed_name(layer, "down"), mids)]
        });
        let dense = self.dense.iter().map(|d| (d.names[0].clone(), &d.sums));
        routed.chain(dense).find_map(|(name, block)| {
            // Entries are `f32`, so a sum beyond their range is as lost as an infinite one.
            let index = block.squares.iter().position(|&sum| !(sum as f32).is_finite())?;
            Some((name, index / block.n_columns, index % block.n_columns, block.squares[index]))
        })
    }

    /// For each layer the share of routed experts that were reached.
    pub(super) fn shares_seen(&self) -> Vec<f64> {
        let share = |counts: &[u64]| {
            counts.iter().filter(|&&count| count > 0).count() as f64 / counts.len().max(1) as f64
        };
        self.routed.iter().map(|(inputs, _)| share(&inputs.counts)).collect()
    }
}

fn routed_name(layer: usize, projection: &str) -> String {
    format!("blk.{layer}.ffn_{projection}_exps.weight")
}

fn dense_matrices(h: &HyperParameters) -> Vec<Dense> {
    let table = TensorTable::new(h);
    let dense = |site, layer, names: Vec<String>| {
        let names: Vec<_> = names.into_iter().filter(|name| table.by_gguf_name(name).is_some()).collect();
        let n_columns = table.by_gguf_name(names.first()?)?.columns() as usize;
        Some(Dense { site, layer, names, sums: Sums::new(1, n_columns) })
    };
    let in_layers = (0..h.num_hidden_layers as usize).flat_map(|layer| {
        DENSE.map(|(site, names)| {
            let names = names.iter().map(|name| format!("blk.{layer}.{name}.weight"));
            (site, Some(layer), names.collect())
        })
    });
    let head = (Site::FinalNorm, None, vec!["output.weight".to_owned()]);
    in_layers.chain([head]).filter_map(|(site, layer, names)| dense(site, layer, names)).collect()
}

impl Observer for Totals {
    fn wants(&self, site: Site, layer: Option<usize>) -> bool {
        site == Site::RoutedMid || self.dense.iter().any(|d| d.site == site && d.layer == layer)
    }

    fn rows(&mut self, seen: Observation<'_>) {
        for dense in self.dense.iter_mut().filter(|d| d.site == seen.site && d.layer == seen.layer) {
            for row in seen.values.chunks_exact(dense.sums.n_columns) {
                dense.sums.add(0, row, 1.0);
            }
        }
    }

    fn expert(&mut self, seen: ExpertObservation<'_>) {
        let (inputs, mids) = &mut self.routed[seen.layer];
        let rows = seen.inputs.chunks_exact(inputs.n_columns).zip(seen.mids.chunks_exact(mids.n_columns));
        for ((input, mid), &weight) in rows.zip(seen.weights) {
            inputs.add(seen.expert, input, 1.0);
            let scale = if self.down_input == DownInput::Weighted { weight } else { 1.0 };
            mids.add(seen.expert, mid, scale);
        }
    }
}
