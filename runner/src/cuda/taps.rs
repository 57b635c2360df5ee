//! What taps are shown.

use std::collections::BTreeMap;

use crate::ops::{ExpertTap, Routing};

/// Shows each expert's work, experts ascending, rows ascending within. `inputs`: `[tokens, width]`;
/// `mids`: `[tokens, n_used, inner]`.
pub(super) fn show_experts(
    tap: &mut ExpertTap<'_>,
    routing: &Routing,
    inputs: &[f32],
    width: usize,
    mids: &[f32],
    inner: usize,
) {
    let mut slots_of: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (slot, &expert) in routing.experts.iter().enumerate() {
        slots_of.entry(expert).or_default().push(slot);
    }
    for (expert, slots) in slots_of {
        let rows: Vec<usize> = slots.iter().map(|slot| slot / routing.n_used).collect();
        let weights: Vec<f32> = slots.iter().map(|&slot| routing.weights[slot]).collect();
        let gathered: Vec<f32> =
            rows.iter().flat_map(|row| &inputs[row * width..][..width]).copied().collect();
        let mids: Vec<f32> = slots.iter().flat_map(|slot| &mids[slot * inner..][..inner]).copied().collect();
        tap(expert as usize, &rows, &weights, &gathered, &mids);
    }
}
