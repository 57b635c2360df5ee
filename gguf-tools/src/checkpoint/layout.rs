//! How a matrix lies in a checkpoint: its precision, logical size and the grid of its scales.

use safetensors::Dtype;

use super::SourceTensor;

/// Edge of the square of FP8 values that share a scale in the official releases.
const FP8_SCALE_EDGE: u64 = 128;
/// Consecutive FP4 values of a row that share a scale.
pub(super) const FP4_SCALE_VALUES: u64 = 32;

/// How the values of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SourcePrecision {
    /// E4M3 bytes with one scale for a rectangle of values.
    Fp8,
    /// Two E2M1 codes a byte with one scale for 32 values of a row.
    Fp4,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// 64-bit integers.
    I64,
    /// 32-bit integers.
    I32,
}

impl SourcePrecision {
    /// The name that users read.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "FP8",
            Self::Fp4 => "FP4",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
            Self::I64 => "I64",
            Self::I32 => "I32",
        }
    }

    /// Whether the values are numbers of a weight, as opposed to integers of a table.
    pub fn is_float(self) -> bool {
        !matches!(self, Self::I64 | Self::I32)
    }

    /// The precision that a stored type stands for in this layout, if it is understood.
    fn of(dtype: Dtype) -> Option<Self> {
        Some(match dtype {
            Dtype::F8_E4M3 => Self::Fp8,
            // The releases store packed FP4 as plain bytes; newer exports name the type.
            Dtype::F4 | Dtype::I8 | Dtype::U8 => Self::Fp4,
            Dtype::BF16 => Self::Bf16,
            Dtype::F16 => Self::F16,
            Dtype::F32 => Self::F32,
            Dtype::I64 => Self::I64,
            Dtype::I32 => Self::I32,
            _ => return None,
        })
    }
}

/// A matrix as its values lie. A vector is a matrix of one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MatrixLayout {
    pub(super) precision: SourcePrecision,
    /// Logical shape as the model sees it.
    pub(super) shape: Vec<u64>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Rows and columns that share one scale; `None` without scales.
    pub(super) scale: Option<ScaleGrid>,
}

/// Which scale belongs to which value: `scale[row / block_rows, column / block_columns]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ScaleGrid {
    pub(super) block_rows: usize,
    pub(super) block_columns: usize,
    /// Scales in one row of the grid.
    pub(super) columns: usize,
    /// Whether a scale is an E8M0 byte; else it is an F32.
    pub(super) is_exponent: bool,
}

impl MatrixLayout {
    /// The layout of a tensor, or what does not fit.
    pub(super) fn of(tensor: &SourceTensor, scale: Option<&SourceTensor>) -> Result<Self, String> {
        let precision = SourcePrecision::of(tensor.dtype).ok_or_else(|| {
            format!(
                "has dtype {}; understood are F8_E4M3, FP4 (as F4, I8 or U8), BF16, F16, F32, I64 and I32",
                tensor.dtype
            )
        })?;
        let mut shape = tensor.shape.clone();
        let packed = matches!(tensor.dtype, Dtype::I8 | Dtype::U8);
        if packed && let Some(width) = shape.last_mut() {
            *width *= 2;
        }
        let columns = shape.last().copied().unwrap_or(1);
        let rows: u64 = shape.iter().rev().skip(1).product();
        let grid = match precision {
            SourcePrecision::Fp8 => Some(fp8_grid(rows, columns, needed(scale)?)?),
            SourcePrecision::Fp4 => Some(fp4_grid(rows, columns, needed(scale)?)?),
            _ => None,
        };
        Ok(Self { precision, shape, rows: rows as usize, columns: columns as usize, scale: grid })
    }
}

fn needed(scale: Option<&SourceTensor>) -> Result<&SourceTensor, String> {
    scale.ok_or_else(|| "has no scales: neither `.scale` nor `.weight_scale_inv` exists beside it".to_owned())
}

/// Rows and columns of a grid of scales, and whether they are exponent bytes.
fn scale_shape(scale: &SourceTensor) -> Result<(u64, u64, bool), String> {
    let is_exponent = match scale.dtype {
        Dtype::F8_E8M0 | Dtype::U8 => true,
        Dtype::F32 => false,
        other => {
            return Err(format!("scales `{}` have dtype {other}, expected F8_E8M0, U8 or F32", scale.name));
        }
    };
    match scale.shape.as_slice() {
        &[rows, columns] if rows > 0 && columns > 0 => Ok((rows, columns, is_exponent)),
        other => Err(format!("scales `{}` have shape {other:?}, expected two dimensions", scale.name)),
    }
}

fn fp8_grid(rows: u64, columns: u64, scale: &SourceTensor) -> Result<ScaleGrid, String> {
    let (grid_rows, grid_columns, is_exponent) = scale_shape(scale)?;
    match (edge(rows, grid_rows), edge(columns, grid_columns)) {
        (Some(block_rows), Some(block_columns)) => Ok(ScaleGrid {
            block_rows: block_rows as usize,
            block_columns: block_columns as usize,
            columns: grid_columns as usize,
            is_exponent,
        }),
        _ => Err(format!(
            "scales `{}` have shape [{grid_rows}, {grid_columns}], which does not divide [{rows}, {columns}]; \
             expected [{}, {}] (one for {FP8_SCALE_EDGE}x{FP8_SCALE_EDGE} values)",
            scale.name,
            rows.div_ceil(FP8_SCALE_EDGE),
            columns.div_ceil(FP8_SCALE_EDGE)
        )),
    }
}

/// Values along one edge of a scale's rectangle: 128 with a shorter last one, or an exact division.
fn edge(values: u64, scales: u64) -> Option<u64> {
    if values.div_ceil(FP8_SCALE_EDGE) == scales {
        Some(FP8_SCALE_EDGE)
    } else {
        (values > 0 && values.is_multiple_of(scales)).then(|| values / scales)
    }
}

fn fp4_grid(rows: u64, columns: u64, scale: &SourceTensor) -> Result<ScaleGrid, String> {
    let (grid_rows, grid_columns, is_exponent) = scale_shape(scale)?;
    if !columns.is_multiple_of(FP4_SCALE_VALUES) {
        return Err(format!(
            "has rows of {columns} FP4 values ({} packed bytes), expected a multiple of {FP4_SCALE_VALUES} values",
            columns.div_ceil(2)
        ));
    }
    if (grid_rows, grid_columns) != (rows, columns / FP4_SCALE_VALUES) {
        return Err(format!(
            "scales `{}` have shape [{grid_rows}, {grid_columns}], expected [{rows}, {}] (one for {FP4_SCALE_VALUES} values)",
            scale.name,
            columns / FP4_SCALE_VALUES
        ));
    }
    Ok(ScaleGrid {
        block_rows: 1,
        block_columns: FP4_SCALE_VALUES as usize,
        columns: grid_columns as usize,
        is_exponent,
    })
}
