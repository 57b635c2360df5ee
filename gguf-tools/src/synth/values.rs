//! How each tensor of a synthetic checkpoint is stored, and its bytes row by row.

use std::sync::LazyLock;

use super::random::{Counter, normal_codes};
use crate::checkpoint::SourcePrecision;
use crate::model::{Family, HyperParameters, TensorSpec};

/// Standard deviation of the E4M3 codes; the largest is 3.4 times that and must stay below 448.
const FP8_DEVIATION: f64 = 128.0;
/// Standard deviation of the E2M1 codes; the largest is 3.4 times that and about 6.
const FP4_DEVIATION: f64 = 1.75;
/// Edge of the square of FP8 values with one scale.
pub(super) const FP8_TILE: u64 = 128;
/// FP4 values with one scale.
const FP4_GROUP: u64 = 32;

static FP8_CODES: LazyLock<[u8; 256]> = LazyLock::new(|| {
    let values: Vec<f64> = (0..127_u32)
        .map(|code| match (code >> 3, f64::from(code & 7)) {
            (0, mantissa) => mantissa / 512.0,
            (exponent, mantissa) => (8.0 + mantissa) * f64::from(1_u32 << exponent) / 1024.0,
        })
        .collect();
    normal_codes(&values, 0x80, FP8_DEVIATION)
});
static FP4_CODES: LazyLock<[u8; 256]> =
    LazyLock::new(|| normal_codes(&[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], 8, FP4_DEVIATION));

/// What a stored row is filled with.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fill {
    /// E4M3 codes, one a byte.
    Fp8,
    /// E2M1 codes, two a byte.
    Fp4,
    /// E8M0 scales around `2^exponent`, up to a factor of 2 apart.
    Scales { exponent: i32 },
    /// Nearly normal numbers in single precision.
    F32 { mean: f32, deviation: f32 },
    /// Nearly normal numbers in bfloat16.
    Bf16 { mean: f32, deviation: f32 },
    /// Distinct expert ids.
    ExpertIds { n_experts: u64 },
}

/// One stored tensor.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) name: String,
    pub(super) dtype: &'static str,
    /// Stored shape, outermost first.
    pub(super) shape: Vec<u64>,
    row_bytes: u64,
    fill: Fill,
    counter: Counter,
}

impl Stored {
    fn new(seed: u64, name: String, dtype: &'static str, shape: Vec<u64>, fill: Fill) -> Self {
        let value_bytes = match dtype {
            "F32" => 4,
            "BF16" => 2,
            "I64" => 8,
            _ => 1,
        };
        let row_bytes = shape.last().copied().unwrap_or(1) * value_bytes;
        let counter = Counter::new(seed, &name);
        Self { name, dtype, shape, row_bytes, fill, counter }
    }

    /// The stored tensors (weight and scales) of one source matrix of a tensor.
    pub(super) fn of_source(spec: &TensorSpec, name: &str, model: &HyperParameters, seed: u64) -> Vec<Self> {
        let shape = spec.source_shape().to_vec();
        let columns = spec.columns();
        // Inputs have unit variance; a weight of variance 1 / columns keeps it so. As a power of two: 2^exponent.
        let exponent = -(columns.ilog2() as i32 / 2);
        let deviation = 1.0 / (columns as f32).sqrt();
        let plain = |dtype, fill| vec![Self::new(seed, name.to_owned(), dtype, shape.clone(), fill)];
        let with_scales = |dtype, stored, fill, grid, exponent| {
            let scales = name.replace(".weight", ".scale");
            vec![
                Self::new(seed, name.to_owned(), dtype, stored, fill),
                Self::new(seed, scales, "F8_E8M0", grid, Fill::Scales { exponent }),
            ]
        };
        match spec.family {
            Family::RoutedGate | Family::RoutedUp | Family::RoutedDown => {
                let grid = vec![shape[0], columns / FP4_GROUP];
                with_scales("I8", vec![shape[0], columns / 2], Fill::Fp4, grid, exponent - 1)
            }
            Family::Attention | Family::SharedExpert => {
                let grid = vec![shape[0].div_ceil(FP8_TILE), columns.div_ceil(FP8_TILE)];
                with_scales("F8_E4M3", shape, Fill::Fp8, grid, exponent - 7)
            }
            Family::Indexer if name.ends_with("indexer.wq_b.weight") => {
                let grid = vec![shape[0].div_ceil(FP8_TILE), columns.div_ceil(FP8_TILE)];
                with_scales("F8_E4M3", shape, Fill::Fp8, grid, exponent - 7)
            }
            Family::RoutingTable => plain("I64", Fill::ExpertIds { n_experts: model.n_routed_experts }),
            Family::HyperConnection => plain("F32", Fill::F32 { mean: 0.0, deviation }),
            Family::Embedding => plain("BF16", Fill::Bf16 { mean: 0.0, deviation: 1.0 }),
            Family::Norm if name.ends_with("norm.weight") => {
                plain("BF16", Fill::Bf16 { mean: 1.0, deviation: 0.1 })
            }
            // Factors of the hyper-connections are around 1; biases, sinks and position offsets around 0.
            Family::Norm if name.ends_with("_scale") => plain("F32", Fill::F32 { mean: 1.0, deviation: 0.1 }),
            Family::Norm => plain("F32", Fill::F32 { mean: 0.0, deviation: 0.1 }),
            Family::Compressor | Family::Indexer if name.ends_with("compressor.ape") => {
                plain("F32", Fill::F32 { mean: 0.0, deviation: 0.1 })
            }
            Family::Compressor | Family::Indexer | Family::Router | Family::Output => {
                plain("BF16", Fill::Bf16 { mean: 0.0, deviation })
            }
        }
    }

    /// How the values are stored; `None` for scales.
    pub(super) fn precision(&self) -> Option<SourcePrecision> {
        Some(match self.fill {
            Fill::Fp8 => SourcePrecision::Fp8,
            Fill::Fp4 => SourcePrecision::Fp4,
            Fill::Scales { .. } => return None,
            Fill::F32 { .. } => SourcePrecision::F32,
            Fill::Bf16 { .. } => SourcePrecision::Bf16,
            Fill::ExpertIds { .. } => SourcePrecision::I64,
        })
    }

    /// Rows; a vector is one.
    pub(super) fn rows(&self) -> u64 {
        self.shape.iter().rev().skip(1).product()
    }

    /// Stored bytes.
    pub(super) fn n_bytes(&self) -> u64 {
        self.rows() * self.row_bytes
    }

    /// Replaces `out` by the bytes of one row.
    pub(super) fn row(&self, row: u64, out: &mut Vec<u8>) {
        out.clear();
        let columns = self.shape.last().copied().unwrap_or(1);
        match self.fill {
            Fill::Fp8 => self.bytes_of(row, out, |random| random.map(|byte| FP8_CODES[byte as usize])),
            Fill::Fp4 => self.bytes_of(row, out, |random| {
                // Two codes a stored byte; the second from a mixture of two random bytes, which is again uniform.
                std::array::from_fn(|i| {
                    let low = FP4_CODES[random[i] as usize];
                    let high = FP4_CODES[(random[i] ^ random[(i + 3) % 8]) as usize];
                    low | (high << 4)
                })
            }),
            Fill::Scales { exponent } => out.extend((0..columns).map(|column| {
                let spread = (self.counter.at(row * columns + column) % 3) as i32 - 1;
                (127 + exponent + spread) as u8
            })),
            Fill::F32 { mean, deviation } => out.extend((0..columns).flat_map(|column| {
                (mean + deviation * self.counter.normal(row * columns + column)).to_le_bytes()
            })),
            Fill::Bf16 { mean, deviation } => out.extend((0..columns).flat_map(|column| {
                let value = mean + deviation * self.counter.normal(row * columns + column);
                half::bf16::from_f32(value).to_le_bytes()
            })),
            Fill::ExpertIds { n_experts } => {
                let random = self.counter.at(row);
                let first = (random >> 32) % n_experts;
                // Steps so small that no id comes twice.
                let step =
                    1 + (random & 0xffff_ffff) % ((n_experts - 1) / columns.saturating_sub(1).max(1)).max(1);
                out.extend(
                    (0..columns).flat_map(|i| (((first + i * step) % n_experts) as i64).to_le_bytes()),
                );
            }
        }
    }

    /// Fills `out` with a row of bytes, eight random ones at a time.
    fn bytes_of(&self, row: u64, out: &mut Vec<u8>, code: impl Fn([u8; 8]) -> [u8; 8]) {
        let chunks = self.row_bytes.div_ceil(8);
        for chunk in 0..chunks {
            out.extend(code(self.counter.at(row * chunks + chunk).to_le_bytes()));
        }
        out.truncate(self.row_bytes as usize);
    }
}
