//! Reading rows of tensors.

use std::ops::Range;

use super::decode::{self, MXFP4_BLOCK_BYTES};
use super::layout::{MatrixLayout, SourcePrecision};
use super::{Checkpoint, CheckpointError, SourceTensor};
use crate::model::{Family, SourceRole, TensorSpec};

/// A matrix that is about to be read.
struct Source<'a> {
    name: &'a str,
    layout: MatrixLayout,
    bytes: &'a [u8],
    scale_bytes: &'a [u8],
}

impl Checkpoint {
    /// How the values of a tensor of the model are stored.
    ///
    /// # Errors
    /// If a source is absent or not understood, or the experts of a stacked tensor are not all stored alike.
    pub fn source_precision(&self, spec: &TensorSpec) -> Result<SourcePrecision, CheckpointError> {
        let mut first = None;
        for name in &spec.sources {
            let tensor = self.tensor(name).ok_or_else(|| CheckpointError::NoSuchTensor(name.clone()))?;
            let precision = self.layout(tensor)?.precision;
            let wanted = *first.get_or_insert(precision);
            if precision != wanted {
                let problem = format!(
                    "is stored as {}, but {} as {}",
                    precision.name(),
                    spec.sources[0],
                    wanted.name()
                );
                return Err(CheckpointError::Undecodable { tensor: name.clone(), problem });
            }
        }
        first.ok_or_else(|| CheckpointError::NoSuchTensor(spec.gguf_name.clone()))
    }

    /// Reads rows of a matrix (a vector is one row) as `f32`, scales applied; exact.
    ///
    /// `out`: `rows.len()` times the row length, overwritten. Only these rows are touched in the file.
    ///
    /// # Errors
    /// If the tensor is absent or not of a floating type, or a value is not finite (with its row and column).
    ///
    /// # Panics
    /// If `rows` or the length of `out` do not fit the tensor's shape: they come from a checked plan.
    pub fn read_rows_f32(
        &self,
        name: &str,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let source = self.source(name)?;
        let columns = source.layout.columns;
        assert!(
            rows.end <= source.layout.rows && out.len() == rows.len() * columns,
            "rows within the tensor"
        );
        if !source.layout.precision.is_float() {
            return Err(
                source.undecodable(format!("holds {} integers, not weights", source.layout.precision.name()))
            );
        }
        let mut scales = vec![0.0; source.layout.scale.map_or(0, |grid| grid.columns)];
        let mut grid_row = None;
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.max(1))) {
            if let Some(grid) = source.layout.scale
                && grid_row != Some(row / grid.block_rows)
            {
                grid_row = Some(row / grid.block_rows);
                decode::scales(grid, source.scales_of_row(row), &mut scales);
            }
            source.decode_row(row, &scales, out);
            if let Some(column) = decode::first_not_finite(out) {
                return Err(source.not_finite(row, column));
            }
        }
        Ok(())
    }

    /// Repacks a whole FP4 matrix (one expert) as MXFP4 blocks, without loss.
    ///
    /// `out`: 17 bytes for every 32 values, overwritten.
    ///
    /// # Errors
    /// If the tensor is absent, is not FP4 with exponent scales, or has a scale of 255 or values beyond `f32`.
    ///
    /// # Panics
    /// If the length of `out` does not fit the tensor's shape: it comes from a checked plan.
    pub fn read_fp4_as_mxfp4(&self, name: &str, out: &mut [u8]) -> Result<(), CheckpointError> {
        let source = self.source(name)?;
        let layout = &source.layout;
        let Some(grid) =
            layout.scale.filter(|grid| layout.precision == SourcePrecision::Fp4 && grid.is_exponent)
        else {
            return Err(source.undecodable(format!(
                "is stored as {}; only FP4 with exponent scales (F8_E8M0 or U8) repacks to MXFP4 without loss",
                layout.precision.name()
            )));
        };
        let row_bytes = grid.columns * MXFP4_BLOCK_BYTES;
        assert_eq!(out.len(), layout.rows * row_bytes, "blocks of the whole tensor");
        for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            let scales = source.scales_of_row(row);
            if let Some(column) = source.first_beyond_f32(row, scales) {
                return Err(source.not_finite(row, column));
            }
            decode::fp4_row_to_mxfp4(source.row_bytes(row), scales, out);
        }
        Ok(())
    }

    /// Reads rows of an integer table as 32-bit integers, refusing values out of range: expert ids of a routing table
    /// must be below the number of experts, others must fit 32 bits.
    ///
    /// # Errors
    /// If the tensor is absent or not of an integer type, or a value is out of range (with its row and column).
    ///
    /// # Panics
    /// If `rows` or the length of `out` do not fit the tensor's shape: they come from a checked plan.
    pub fn read_i64_as_i32(
        &self,
        name: &str,
        rows: Range<usize>,
        out: &mut [i32],
    ) -> Result<(), CheckpointError> {
        let source = self.source(name)?;
        let columns = source.layout.columns;
        assert!(
            rows.end <= source.layout.rows && out.len() == rows.len() * columns,
            "rows within the tensor"
        );
        let wide = match source.layout.precision {
            SourcePrecision::I64 => true,
            SourcePrecision::I32 => false,
            other => {
                return Err(source.undecodable(format!("is stored as {}, expected I64 or I32", other.name())));
            }
        };
        let allowed = self.integer_range(name);
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.max(1))) {
            let bytes = source.row_bytes(row);
            for (column, out) in out.iter_mut().enumerate() {
                let value = integer(bytes, column, wide);
                *out = i32::try_from(value).ok().filter(|_| allowed.contains(&value)).ok_or_else(|| {
                    CheckpointError::BadValue {
                        tensor: name.to_owned(),
                        row,
                        column,
                        problem: format!(
                            "found {value}, expected a number from {} to {}",
                            allowed.start,
                            allowed.end - 1
                        ),
                    }
                })?;
            }
        }
        Ok(())
    }

    /// Values that an integer tensor may hold.
    fn integer_range(&self, name: &str) -> Range<i64> {
        match self.table().role(name) {
            SourceRole::Weight(spec, _) if spec.family == Family::RoutingTable => {
                0..self.hyper_parameters().n_routed_experts as i64
            }
            _ => i64::from(i32::MIN)..i64::from(i32::MAX) + 1,
        }
    }

    /// The layout of a tensor, scales included.
    pub(super) fn layout(&self, tensor: &SourceTensor) -> Result<MatrixLayout, CheckpointError> {
        MatrixLayout::of(tensor, self.scale_of(&tensor.name))
            .map_err(|problem| CheckpointError::Undecodable { tensor: tensor.name.clone(), problem })
    }

    fn source<'a>(&'a self, name: &'a str) -> Result<Source<'a>, CheckpointError> {
        let tensor = self.tensor(name).ok_or_else(|| CheckpointError::NoSuchTensor(name.to_owned()))?;
        let layout = self.layout(tensor)?;
        let scale_bytes = match self.scale_of(name) {
            Some(scale) if layout.scale.is_some() => self.shards[scale.shard].bytes(scale),
            _ => &[],
        };
        Ok(Source { name, layout, bytes: self.shards[tensor.shard].bytes(tensor), scale_bytes })
    }
}

/// One integer of a row.
fn integer(bytes: &[u8], column: usize, wide: bool) -> i64 {
    if wide {
        i64::from_le_bytes(bytes.as_chunks::<8>().0[column])
    } else {
        i64::from(i32::from_le_bytes(bytes.as_chunks::<4>().0[column]))
    }
}

impl<'a> Source<'a> {
    /// Stored bytes of one row.
    fn row_bytes(&self, row: usize) -> &'a [u8] {
        let n = match self.layout.precision {
            SourcePrecision::Fp8 => self.layout.columns,
            SourcePrecision::Fp4 => self.layout.columns / 2,
            SourcePrecision::Bf16 | SourcePrecision::F16 => 2 * self.layout.columns,
            SourcePrecision::F32 | SourcePrecision::I32 => 4 * self.layout.columns,
            SourcePrecision::I64 => 8 * self.layout.columns,
        };
        &self.bytes[row * n..(row + 1) * n]
    }

    /// Stored bytes of the scales of one row.
    fn scales_of_row(&self, row: usize) -> &'a [u8] {
        self.layout.scale.map_or(&[], |grid| {
            let n = grid.columns * if grid.is_exponent { 1 } else { 4 };
            let grid_row = row / grid.block_rows;
            &self.scale_bytes[grid_row * n..(grid_row + 1) * n]
        })
    }

    fn decode_row(&self, row: usize, scales: &[f32], out: &mut [f32]) {
        let bytes = self.row_bytes(row);
        match self.layout.precision {
            SourcePrecision::Fp8 => {
                let block_columns = self.layout.scale.map_or(out.len(), |grid| grid.block_columns);
                decode::fp8_row(bytes, scales, block_columns, out);
            }
            SourcePrecision::Fp4 => decode::fp4_row(bytes, scales, out),
            SourcePrecision::Bf16 => decode::bf16s(bytes, out),
            SourcePrecision::F16 => decode::f16s(bytes, out),
            SourcePrecision::F32 => decode::f32s(bytes, out),
            SourcePrecision::I64 | SourcePrecision::I32 => {
                unreachable!("integers are refused before rows are decoded")
            }
        }
    }

    /// The first column of a FP4 row whose value is no `f32`: its scale is 255, or so large that the code overflows.
    fn first_beyond_f32(&self, row: usize, scale_bytes: &[u8]) -> Option<usize> {
        // 6 * 2^(252 - 127) still fits.
        const LARGEST_ALWAYS_FINITE: u8 = 252;
        if scale_bytes.iter().all(|&byte| byte <= LARGEST_ALWAYS_FINITE) {
            return None;
        }
        let grid = self.layout.scale?;
        let mut scales = vec![0.0; grid.columns];
        decode::scales(grid, scale_bytes, &mut scales);
        let mut values = vec![0.0; self.layout.columns];
        decode::fp4_row(self.row_bytes(row), &scales, &mut values);
        decode::first_not_finite(&values)
    }

    fn undecodable(&self, problem: String) -> CheckpointError {
        CheckpointError::Undecodable { tensor: self.name.to_owned(), problem }
    }

    /// Says why a decoded value is not finite: its own code, its scale, or their product.
    fn not_finite(&self, row: usize, column: usize) -> CheckpointError {
        let bad_scale = self.layout.scale.and_then(|grid| {
            let bytes = self.scales_of_row(row);
            let at = column / grid.block_columns;
            if grid.is_exponent {
                (bytes[at] == 255).then(|| "scale byte 255 (no number)".to_owned())
            } else {
                let scale = f32::from_le_bytes(bytes.as_chunks::<4>().0[at]);
                (!scale.is_finite()).then(|| format!("scale {scale}"))
            }
        });
        let bytes = self.row_bytes(row);
        let problem = bad_scale.unwrap_or_else(|| match self.layout.precision {
            SourcePrecision::Fp8 if bytes[column] & 0x7f == 0x7f => {
                format!("FP8 code {:#04x} (NaN)", bytes[column])
            }
            SourcePrecision::Fp8 | SourcePrecision::Fp4 => {
                "value times scale exceeds the f32 range".to_owned()
            }
            _ => "NaN or infinite value".to_owned(),
        });
        CheckpointError::BadValue { tensor: self.name.to_owned(), row, column, problem }
    }
}
