//! Parts of a plan, for machines or runs that each make their share of one file.

use sha2::{Digest, Sha256};

use super::{Plan, PlanError, PlannedTensor, hex};
use crate::gguf::{Layout, Metadata, NewTensor, PART_PLAN_KEY};
use crate::rewrite::{LayerPart, MAX_SHARDS, Place, layer_count, shard_metadata};

/// Which part of the whole file a plan makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanPart {
    /// A ds4 layer file: an ordinary file with all metadata and the tensors of some layers.
    Layers(LayerPart),
    /// A shard of a split set by llama.cpp's convention.
    Shard {
        /// Number of the shard, from 0.
        index: usize,
        /// Shards of the set.
        n_shards: usize,
    },
}

/// The hashes of the source files: only the shard that carries the metadata needs to know them.
const SOURCE_SUMS: &str = "ggsmith.source.sha256";

impl PlanPart {
    /// Whether the file of this part names the hashes of its source files.
    pub fn names_source_sums(&self) -> bool {
        !matches!(self, Self::Shard { index, .. } if *index > 0)
    }
}

impl Plan {
    /// The part of this plan that a machine makes. Merging the files of all parts gives the bytes of the whole file.
    ///
    /// # Errors
    /// [`PlanError::Part`] for layers that the model has not, and for more shards than tensors.
    pub fn part(&self, part: PlanPart) -> Result<Self, PlanError> {
        match part {
            PlanPart::Layers(layers) => self.of_layers(layers),
            PlanPart::Shard { index, n_shards } => self.shard(index, n_shards),
        }
    }

    fn of_layers(&self, part: LayerPart) -> Result<Self, PlanError> {
        let n_layers = layer_count(self.layout.metadata()).map_err(|e| PlanError::Part(e.to_string()))?;
        if part.last.or(part.first).is_some_and(|layer| layer >= n_layers) {
            let last = n_layers.saturating_sub(1);
            return Err(PlanError::Part(format!("layers {part}: the model has layers 0 to {last}")));
        }
        let held = |t: &&PlannedTensor| {
            let place = match t.spec.layer {
                Some(layer) => Some(Place::Layer(layer)),
                None => Place::of(&t.spec.gguf_name, n_layers),
            };
            place.is_some_and(|place| part.holds(place))
        };
        let tensors = self.tensors.iter().filter(held).cloned().collect();
        self.with_tensors(tensors, self.layout.metadata().clone(), PlanPart::Layers(part))
    }

    fn shard(&self, index: usize, n_shards: usize) -> Result<Self, PlanError> {
        let n_tensors = self.tensors.len();
        if n_shards == 0 || index >= n_shards || n_shards > n_tensors.min(MAX_SHARDS) {
            return Err(PlanError::Part(format!(
                "shard {} of {n_shards}: expected 1 to N of at most {}, the number of tensors",
                index + 1,
                n_tensors.min(MAX_SHARDS)
            )));
        }
        let tensors = self.tensors[shard_range(&self.tensors, index, n_shards)].to_vec();
        let whole = self.layout.metadata();
        let mut metadata = shard_metadata(whole, index, n_shards, n_tensors, self.layout.alignment());
        metadata.set(PART_PLAN_KEY, self.decisions()?);
        self.with_tensors(tensors, metadata, PlanPart::Shard { index, n_shards })
    }

    /// SHA-256 of everything that the plan decides; every machine with the same recipe and checkpoint has the same.
    fn decisions(&self) -> Result<String, PlanError> {
        let mut metadata = self.layout.metadata().clone();
        metadata.remove(SOURCE_SUMS);
        let layout = Layout::new(metadata, new_tensors(&self.tensors), self.layout.alignment())?;
        Ok(hex(&Sha256::digest(layout.header_bytes())))
    }

    fn with_tensors(
        &self,
        mut tensors: Vec<PlannedTensor>,
        metadata: Metadata,
        part: PlanPart,
    ) -> Result<Self, PlanError> {
        let layout = Layout::new(metadata, new_tensors(&tensors), self.layout.alignment())?;
        for (tensor, placed) in tensors.iter_mut().zip(layout.tensors()) {
            tensor.offset_bytes = placed.offset_bytes;
        }
        let fallbacks =
            self.fallbacks.iter().filter(|f| tensors.iter().any(|t| t.spec.gguf_name == f.tensor));
        Ok(Self {
            fallbacks: fallbacks.cloned().collect(),
            tensors,
            layout,
            part: Some(part),
            ..self.clone()
        })
    }
}

fn new_tensors(tensors: &[PlannedTensor]) -> Vec<NewTensor> {
    let new = |t: &PlannedTensor| NewTensor {
        name: t.spec.gguf_name.clone(),
        block_type: t.target,
        shape: t.spec.shape.clone(),
    };
    tensors.iter().map(new).collect()
}

/// The tensors of a shard: consecutive ones, with about the same number of values in every shard, since values, not
/// bytes, are what quantizing takes time for; at least one tensor each.
fn shard_range(tensors: &[PlannedTensor], index: usize, n_shards: usize) -> std::ops::Range<usize> {
    let total: u128 = tensors.iter().map(|t| u128::from(t.spec.n_values())).sum();
    let mut ends = Vec::with_capacity(n_shards);
    let (mut values, mut next) = (0_u128, 0);
    for shard in 1..=n_shards {
        let (least, most) = (next + 1, tensors.len() - (n_shards - shard));
        let wanted = total * shard as u128 / n_shards as u128;
        while next < most {
            let with_next = values + u128::from(tensors[next].spec.n_values());
            // The tensor across the boundary goes where it disturbs the balance less.
            if next >= least && with_next.saturating_sub(wanted) > wanted.saturating_sub(values) {
                break;
            }
            values = with_next;
            next += 1;
        }
        ends.push(next);
    }
    let start = if index == 0 { 0 } else { ends[index - 1] };
    start..ends[index]
}
