//! Units of work: some rows of one matrix, whose bytes depend on nothing else.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use rayon::prelude::*;

use super::{BuildError, FallbackImportance};
use crate::importance::{Found, ImportanceSource, Matrix};
use crate::plan::{Conversion, Plan, PlannedTensor};
use crate::quantize::{Diagonal, MatrixQuantizer, RowByRow};
use crate::simd::Level;
use crate::source::WeightSource;
use crate::weight_energy::WeightEnergy;

/// Values that a unit holds at most, unless one row is longer: 1 MiB as f32, which stays in a core's cache.
pub(super) const VALUES_PER_UNIT: usize = 1 << 18;

/// Units a thread and wave: enough that the end of a wave leaves little idle.
const UNITS_PER_THREAD: usize = 16;

/// Some rows of one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unit {
    /// Position in the plan.
    pub(super) tensor_index: usize,
    /// Which matrix of a stacked tensor.
    pub(super) matrix_index: usize,
    /// Rows of the matrix.
    pub(super) rows: Range<usize>,
    /// Where the bytes lie in the file.
    pub(super) offset_bytes: u64,
    /// How many they are.
    pub(super) n_bytes: usize,
}

/// Units that are computed together and written together.
#[derive(Debug)]
pub(super) struct Wave {
    pub(super) units: Vec<Unit>,
    /// First byte in the file.
    pub(super) start_bytes: u64,
    /// First byte after, padding included.
    pub(super) end_bytes: u64,
}

/// The ranges of rows in which each matrix of a tensor is worked on.
pub(super) fn row_ranges(tensor: &PlannedTensor) -> impl Iterator<Item = Range<usize>> + use<> {
    let (n_rows, rows_per_unit) = (tensor.n_rows(), (VALUES_PER_UNIT / tensor.n_columns().max(1)).max(1));
    (0..n_rows).step_by(rows_per_unit).map(move |start| start..(start + rows_per_unit).min(n_rows))
}

/// Cuts a plan into waves. The cut decides memory and order of writing, never bytes.
pub(super) fn waves(plan: &Plan, n_threads: usize) -> Vec<Wave> {
    waves_of(plan, 0..plan.tensors.len(), n_threads)
}

/// [`waves`] of some tensors that follow each other.
pub(super) fn waves_of(plan: &Plan, tensors: Range<usize>, n_threads: usize) -> Vec<Wave> {
    let after = plan.tensors.get(tensors.end).map_or(plan.file_bytes(), |next| next.offset_bytes);
    let per_wave = UNITS_PER_THREAD * n_threads.max(1);
    let mut all = Vec::new();
    let mut units = Vec::new();
    let mut values = 0;
    for tensor_index in tensors {
        let tensor = &plan.tensors[tensor_index];
        let row_bytes = tensor.row_bytes();
        let mut offset_bytes = tensor.offset_bytes;
        for matrix_index in 0..tensor.n_matrices() {
            for rows in row_ranges(tensor) {
                let n_bytes = rows.len() * row_bytes;
                values += rows.len() * tensor.n_columns();
                units.push(Unit { tensor_index, matrix_index, rows, offset_bytes, n_bytes });
                offset_bytes += n_bytes as u64;
                if values >= per_wave * VALUES_PER_UNIT {
                    all.push(std::mem::take(&mut units));
                    values = 0;
                }
            }
        }
    }
    if !units.is_empty() {
        all.push(units);
    }
    let starts: Vec<u64> = all.iter().map(|units| units[0].offset_bytes).collect();
    all.into_iter()
        .enumerate()
        .map(|(i, units)| Wave {
            units,
            start_bytes: starts[i],
            end_bytes: starts.get(i + 1).copied().unwrap_or(after),
        })
        .collect()
}

impl Unit {
    /// Computes the bytes of the unit.
    pub(super) fn compute(
        &self,
        plan: &Plan,
        source: &dyn WeightSource,
        importances: &Importances<'_>,
        out: &mut [u8],
    ) -> Result<(), BuildError> {
        let tensor = &plan.tensors[self.tensor_index];
        if tensor.conversion == Conversion::Exact {
            source.copy_rows(&tensor.spec, self.matrix_index, self.rows.clone(), out)?;
        } else {
            let mut values = vec![0.0; self.rows.len() * tensor.n_columns()];
            source.read_rows(&tensor.spec, self.matrix_index, self.rows.clone(), &mut values)?;
            let quantizer = RowByRow {
                objective: plan.objective,
                scale_gain: plan.recipe.scale_gain,
                level: Level::detect(),
            };
            let curvature = Diagonal(importances.of(self.tensor_index, self.matrix_index));
            quantizer
                .quantize(tensor.target, &values, tensor.n_columns(), &curvature, out)
                .map_err(|source| BuildError::Quantize { tensor: tensor.spec.gguf_name.clone(), source })?;
        }
        match tensor.target.format().and_then(|format| format.first_bad_block(out)) {
            None => Ok(()),
            Some(bad) => Err(BuildError::BadBlock {
                tensor: tensor.spec.gguf_name.clone(),
                expert_index: self.matrix_index,
                block_index: bad.block_index,
                target: tensor.target,
                problem: bad.problem,
            }),
        }
    }
}

/// The importance of the matrices of a wave: from the source, or the fallback.
pub(super) struct Importances<'a> {
    plan: &'a Plan,
    source: &'a dyn WeightSource,
    importance: &'a dyn ImportanceSource,
    fallback_allowed: bool,
    ready: HashMap<(usize, usize), Option<Vec<f32>>>,
    notes: Vec<FallbackImportance>,
    noted: HashSet<(usize, usize)>,
}

/// What to do for one matrix.
enum Choice {
    Values(Vec<f32>),
    Energy,
    Nothing,
}

impl<'a> Importances<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        source: &'a dyn WeightSource,
        importance: &'a dyn ImportanceSource,
        fallback_allowed: bool,
    ) -> Self {
        let (ready, notes, noted) = (HashMap::new(), Vec::new(), HashSet::new());
        Self { plan, source, importance, fallback_allowed, ready, notes, noted }
    }

    /// The weights of one matrix of the wave last prepared.
    pub(super) fn of(&self, tensor_index: usize, matrix_index: usize) -> Option<&[f32]> {
        self.ready.get(&(tensor_index, matrix_index))?.as_deref()
    }

    /// Gets the weights of every matrix of a wave ready; drops those of the wave before.
    pub(super) fn prepare(&mut self, wave: &Wave) -> Result<(), BuildError> {
        let wanted = self.matrices(wave);
        self.ready.retain(|key, _| wanted.contains(key));
        let mut energies = Vec::new();
        for key in wanted {
            if self.ready.contains_key(&key) {
                continue;
            }
            match self.choose(key)? {
                Choice::Values(values) => drop(self.ready.insert(key, Some(values))),
                Choice::Nothing => drop(self.ready.insert(key, None)),
                Choice::Energy => energies.push(key),
            }
        }
        let (plan, source) = (self.plan, self.source);
        let computed = energies
            .into_par_iter()
            .map(|key| Ok((key, energy(&plan.tensors[key.0], key.1, source)?)))
            .collect::<Result<Vec<_>, BuildError>>()?;
        self.ready.extend(computed);
        Ok(())
    }

    /// Records the fallbacks of a wave that an earlier run wrote, so that the report is whole.
    pub(super) fn note_done(&mut self, wave: &Wave) {
        for key in self.matrices(wave) {
            // What cannot be used stopped the earlier run too, so there is no error to report here.
            drop(self.choose(key));
        }
    }

    /// Every fallback used, in file order.
    pub(super) fn into_notes(self) -> Vec<FallbackImportance> {
        self.notes
    }

    fn matrices(&self, wave: &Wave) -> Vec<(usize, usize)> {
        let mut keys: Vec<_> = wave
            .units
            .iter()
            .filter(|u| self.plan.tensors[u.tensor_index].conversion == Conversion::Quantize)
            .map(|u| (u.tensor_index, u.matrix_index))
            .collect();
        keys.dedup();
        keys
    }

    fn choose(&mut self, key: (usize, usize)) -> Result<Choice, BuildError> {
        let tensor = &self.plan.tensors[key.0];
        let Some(format) = tensor.target.format().filter(|f| f.uses_importance()) else {
            return Ok(Choice::Nothing);
        };
        let name = &tensor.spec.gguf_name;
        let matrix = Matrix {
            tensor: name,
            source: tensor.spec.sources.get(key.1).map(String::as_str),
            expert_index: key.1,
            n_experts: tensor.n_matrices(),
            n_columns: tensor.n_columns(),
        };
        let reason = match self.importance.importance(&matrix) {
            Found::Values(values) => return Ok(Choice::Values(values.into_owned())),
            Found::Unusable(problem) => return Err(self.refuse(key, problem)),
            Found::NoEntry => "no entry in the importance matrix",
            Found::Unseen => "never reached in calibration",
        };
        let given = self.importance.provenance().is_some();
        if given && !self.fallback_allowed {
            return Err(self.refuse(key, reason.to_owned()));
        }
        let energy = format.needs_importance();
        let first_time = self.noted.insert(key);
        if first_time && (given || energy) {
            self.notes.push(FallbackImportance {
                tensor: name.clone(),
                expert_index: key.1,
                reason: if given { reason.to_owned() } else { "no importance matrix given".to_owned() },
                used: if energy { "weight energy" } else { "none" },
            });
        }
        Ok(if energy { Choice::Energy } else { Choice::Nothing })
    }

    fn refuse(&self, key: (usize, usize), problem: String) -> BuildError {
        let tensor = &self.plan.tensors[key.0];
        BuildError::Importance {
            tensor: tensor.spec.gguf_name.clone(),
            expert_index: key.1,
            target: tensor.target,
            problem,
        }
    }
}

/// The energy of the columns of one matrix: what stands in for importance. `[columns]`; `None` if all weights are 0.
fn energy(
    tensor: &PlannedTensor,
    matrix_index: usize,
    source: &dyn WeightSource,
) -> Result<Option<Vec<f32>>, BuildError> {
    let columns = tensor.n_columns();
    let mut energy = WeightEnergy::new(columns);
    let mut values = Vec::new();
    for rows in row_ranges(tensor) {
        values.resize(rows.len() * columns, 0.0);
        source.read_rows(&tensor.spec, matrix_index, rows, &mut values)?;
        energy.add_rows(&values);
    }
    Ok(energy.finish())
}
