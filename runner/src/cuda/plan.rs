//! What a model takes of the device's memory, in numbers, before anything is allocated.

use super::driver::Device;
use super::error::CudaError;
use crate::ops::{ActivationPrecision, Numerics};
use crate::session::Options;
use crate::weights::{WeightSource, host_memory};
use gguf_tools::model::TensorTable;

/// Bytes that a model takes on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Matrices and vectors.
    pub weights: u64,
    /// Caches of a sequence of [`Plan::tokens`].
    pub cache: u64,
    /// Activations of a batch.
    pub scratch: u64,
    /// What stays free.
    pub reserve: u64,
    /// Tokens that the caches are planned for. They grow beyond, if there is room then.
    pub tokens: u64,
}

/// Bytes that a model may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// At most so many.
    pub bytes: u64,
    /// Why no more.
    pub why: &'static str,
}

impl Room {
    /// That of a device. `budget`: what the caller allows at most.
    ///
    /// # Errors
    /// If the device does not answer.
    pub fn of(device: &Device, budget: Option<u64>) -> Result<Self, CudaError> {
        let (free, _) = device.memory()?;
        let host = if device.facts().integrated { host_memory() } else { None };
        let (bytes, why) = room(budget, free as u64, host);
        Ok(Self { bytes, why })
    }
}

/// Tokens that caches are planned for if no context was asked for.
const PLANNED_TOKENS: u64 = 8192;
/// Bytes that stay free.
const RESERVE: u64 = 256 << 20;

/// Whether key-value and index rows are kept in halves: where they are rounded to FP8 and FP4 anyway, and inputs to halves.
/// Only the rotary part loses by it.
pub(super) fn halved_rows(options: &Options) -> bool {
    options.numerics == Numerics::Official && options.activations == ActivationPrecision::Mixed
}

impl Plan {
    /// Adds up what the model of a source takes.
    pub fn new(source: &dyn WeightSource, options: &Options) -> Self {
        let h = source.hyper_parameters();
        let specs = TensorTable::new(h);
        let bytes_of = |name: &str, n_values: u64, columns: u64| {
            let block_type = source.find(name).and_then(|found| {
                source
                    .generated(found.index)
                    .map(|rows| rows.block_type)
                    .or_else(|| source.block_type(found.index))
            });
            let row_bytes = block_type.and_then(|block_type| block_type.row_bytes(columns));
            row_bytes
                .map_or(n_values.saturating_mul(4), |bytes| bytes.saturating_mul(n_values / columns.max(1)))
        };
        let weights = specs
            .specs()
            .iter()
            .map(|spec| bytes_of(&spec.gguf_name, spec.n_values(), spec.shape.last().copied().unwrap_or(1)))
            .fold(0, u64::saturating_add);
        let value_bytes = if halved_rows(options) { 2 } else { 4 };
        let tokens = options.context_limit.map_or(PLANNED_TOKENS, |n| n as u64);
        // The window once more, and states twice: what a batch that fails has overwritten.
        let ring = (h.sliding_window + options.attention_tokens as u64).next_power_of_two() * h.head_dim
            + h.sliding_window * h.head_dim;
        let cache = (0..h.num_hidden_layers as u32)
            .map(|layer| match u64::from(h.compress_ratio(layer)) {
                0 => ring * value_bytes,
                ratio => {
                    let doubled = if ratio == 4 { 2 } else { 1 };
                    let widths = h.head_dim + if ratio == 4 { h.index_head_dim } else { 0 };
                    let state = 2 * 2 * doubled * doubled * ratio * widths * 4;
                    (ring + tokens / ratio * widths) * value_bytes + state
                }
            })
            .fold(0, u64::saturating_add);
        let (batch, part) = (options.batch_tokens as u64, options.attention_tokens as u64);
        let d = h.hidden_size;
        let routed = h.num_experts_per_tok * (2 * h.moe_intermediate_size + d);
        let heads = 2 * h.num_attention_heads * h.head_dim + h.index_n_heads * h.index_head_dim;
        let scratch = 4 * (batch * (h.hc_mult * d + 6 * d + routed) + part * heads + 64 * h.vocab_size);
        Self { weights, cache, scratch, reserve: RESERVE, tokens }
    }

    /// Sum of all parts.
    pub fn total(&self) -> u64 {
        [self.weights, self.cache, self.scratch, self.reserve].into_iter().fold(0, u64::saturating_add)
    }

    /// Refuses what does not fit, with the arithmetic. `budget`: what the caller allows at most.
    pub(super) fn check(&self, device: &Device, budget: Option<u64>) -> Result<(), CudaError> {
        // What another model of this process has given back counts as free.
        device.trim()?;
        let (_, total) = device.memory()?;
        let Room { bytes: room, why } = Room::of(device, budget)?;
        if self.total() <= room {
            return Ok(());
        }
        let gib = |bytes: u64| format!("{:.2}", bytes as f64 / (1_u64 << 30) as f64);
        Err(CudaError::TooLarge {
            name: device.facts().name.clone(),
            need: gib(self.total()),
            parts: format!(
                "weights {} + cache {} ({} tokens) + scratch {} + reserve {}",
                gib(self.weights),
                gib(self.cache),
                self.tokens,
                gib(self.scratch),
                gib(self.reserve)
            ),
            room: format!("{} ({why})", gib(room)),
            total: gib(total as u64),
        })
    }
}

/// What stays free for the system where host and device share one memory: if it runs out there, the machine stands still.
const SYSTEM_BYTES: u64 = 12 << 30;

/// Bytes that a model may take, and why no more. `host`: all and available memory of a machine whose device shares it. What
/// the driver calls free there moves with the system's cache and is not looked at.
fn room(budget: Option<u64>, free: u64, host: Option<(u64, u64)>) -> (u64, &'static str) {
    let limits = match host {
        None => vec![(free, "free on the device")],
        Some((total, available)) => vec![
            (total.saturating_sub(SYSTEM_BYTES), "all memory less 12 GiB for the system"),
            (available, "memory that is available"),
        ],
    };
    let asked = budget.map(|budget| (budget, "the limit that was set"));
    limits.into_iter().chain(asked).min_by_key(|&(bytes, _)| bytes).unwrap_or((free, "free on the device"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_budget_only_lowers_what_a_device_has() {
        assert_eq!(room(None, 15 * GIB, None).0, 15 * GIB);
        assert_eq!(room(Some(14 * GIB), 15 * GIB, None), (14 * GIB, "the limit that was set"));
        assert_eq!(room(Some(16 * GIB), 15 * GIB, None).0, 15 * GIB);
    }

    #[test]
    fn shared_memory_keeps_room_for_the_system_whatever_the_driver_calls_free() {
        let spark = |available| room(None, 30 * GIB, Some((119 * GIB, available))).0;
        assert_eq!(spark(115 * GIB), 107 * GIB);
        assert_eq!(spark(90 * GIB), 90 * GIB);
        assert_eq!(room(Some(85 * GIB), 0, Some((119 * GIB, 115 * GIB))).0, 85 * GIB);
    }
}
