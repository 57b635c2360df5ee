//! Makes parts of a plan again, for comparison with a file.

use std::ops::Range;

use super::unit::{Importances, Unit, Wave, row_ranges};
use super::{BuildError, FallbackImportance};
use crate::importance::ImportanceSource;
use crate::plan::Plan;
use crate::source::WeightSource;

/// Computes source values and target bytes of any rows of a plan.
pub(crate) struct Regenerator<'a> {
    plan: &'a Plan,
    source: &'a dyn WeightSource,
    importances: Importances<'a>,
}

impl<'a> Regenerator<'a> {
    pub(crate) fn new(
        plan: &'a Plan,
        source: &'a dyn WeightSource,
        importance: &'a dyn ImportanceSource,
    ) -> Self {
        Self { plan, source, importances: Importances::new(plan, source, importance, true) }
    }

    /// Gets the importance of one matrix ready.
    pub(crate) fn prepare(&mut self, tensor_index: usize, matrix_index: usize) -> Result<(), BuildError> {
        let units = vec![self.unit(tensor_index, matrix_index, 0..1)];
        self.importances.prepare(&Wave { units, start_bytes: 0, end_bytes: 0 })
    }

    /// The importance of the matrix prepared last, fallbacks included.
    pub(crate) fn importance(&self, tensor_index: usize, matrix_index: usize) -> Option<&[f32]> {
        self.importances.of(tensor_index, matrix_index)
    }

    /// The ranges of rows in which one matrix is worked on.
    pub(crate) fn row_ranges(&self, tensor_index: usize) -> Vec<Range<usize>> {
        row_ranges(&self.plan.tensors[tensor_index]).collect()
    }

    /// The source's values of some rows.
    pub(crate) fn source_values(
        &self,
        tensor_index: usize,
        matrix_index: usize,
        rows: Range<usize>,
    ) -> Result<Vec<f32>, BuildError> {
        let tensor = &self.plan.tensors[tensor_index];
        let mut values = vec![0.0; rows.len() * tensor.n_columns()];
        self.source.read_rows(&tensor.spec, matrix_index, rows, &mut values)?;
        Ok(values)
    }

    /// The bytes that the plan makes of some rows of the matrix prepared last.
    pub(crate) fn bytes(
        &self,
        tensor_index: usize,
        matrix_index: usize,
        rows: Range<usize>,
    ) -> Result<Vec<u8>, BuildError> {
        let unit = self.unit(tensor_index, matrix_index, rows);
        let mut bytes = vec![0; unit.n_bytes];
        unit.compute(self.plan, self.source, &self.importances, &mut bytes)?;
        Ok(bytes)
    }

    /// Every fallback used.
    pub(crate) fn into_notes(self) -> Vec<FallbackImportance> {
        self.importances.into_notes()
    }

    fn unit(&self, tensor_index: usize, matrix_index: usize, rows: Range<usize>) -> Unit {
        let n_bytes = rows.len() * self.plan.tensors[tensor_index].row_bytes();
        Unit { tensor_index, matrix_index, rows, offset_bytes: 0, n_bytes }
    }
}
