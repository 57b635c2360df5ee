//! Rotary frequencies, (3.2).

use std::f64::consts::PI;

use gguf_tools::model::HyperParameters;

use crate::ops::{Rope, SlowedPairs};

/// (3.2) Frequencies of layers without compressed rows.
pub(crate) fn plain_rope(h: &HyperParameters) -> Rope {
    let width = h.qk_rope_head_dim as usize;
    let base = f64::from(h.rope_theta);
    let frequencies = (0..width / 2).map(|i| base.powf(-2.0 * i as f64 / width as f64) as f32).collect();
    Rope { frequencies, base: h.rope_theta, slowed: None }
}

/// (3.2) Frequencies of layers with compressed rows: slow pairs are slowed further by the YaRN factor.
pub(crate) fn compressed_rope(h: &HyperParameters) -> Rope {
    let width = h.qk_rope_head_dim as f64;
    let base = f64::from(h.compress_rope_theta);
    let scaling = &h.rope_scaling;
    // The pair that makes `turns` rotations over the original context.
    let pair_of = |turns: f32| {
        let context = scaling.original_max_position_embeddings as f64;
        width * (context / (f64::from(turns) * 2.0 * PI)).ln() / (2.0 * base.ln())
    };
    let low = pair_of(scaling.beta_fast).floor().max(0.0);
    let mut high = pair_of(scaling.beta_slow).ceil().min(width - 1.0);
    if low == high {
        high += 0.001;
    }
    let frequency = |i: usize| {
        let plain = base.powf(-2.0 * i as f64 / width);
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        (plain / f64::from(scaling.factor) * ramp + plain * (1.0 - ramp)) as f32
    };
    let slowed = SlowedPairs { factor: scaling.factor, first_slowed: low as f32, all_slowed: high as f32 };
    Rope {
        frequencies: (0..width as usize / 2).map(frequency).collect(),
        base: h.compress_rope_theta,
        slowed: Some(slowed),
    }
}
