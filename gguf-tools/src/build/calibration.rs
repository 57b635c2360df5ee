//! What a calibrated build asks of whoever runs calibration text through the source.

use std::collections::BTreeSet;
use std::error::Error;

use crate::model::MatrixInput;
use crate::plan::{Plan, PlannedTensor};
use crate::quantize::Curvature;

/// Second moments of what one matrix reads.
#[derive(Debug, Clone, PartialEq)]
pub struct MatrixMoments {
    /// `[columns, columns]`, mixed as the settings say.
    pub moments: Vec<f32>,
    /// `[columns]`: its diagonal.
    pub diagonal: Vec<f32>,
    /// Tokens that it reads.
    pub n_tokens: usize,
    /// Where the inputs are not those of the source: the mean of the source's times these, `[columns, columns]`, and the second moments
    /// of these as they are.
    pub cross: Option<(Vec<f32>, Vec<f32>)>,
}

impl Curvature for MatrixMoments {
    fn diagonal(&self) -> Option<&[f32]> {
        Some(&self.diagonal)
    }

    fn second_moments(&self) -> Option<&[f32]> {
        Some(&self.moments)
    }
}

/// Any error of a calibration.
pub type CalibrationError = Box<dyn Error + Send + Sync>;

/// The finished tensors of a layer, as they are in the file.
pub trait LayerBytes: Sync {
    /// The bytes of a tensor of the layer that was left last; the place is that in the plan.
    ///
    /// # Errors
    /// The system's own.
    fn read(&self, tensor: &PlannedTensor) -> std::io::Result<Vec<u8>>;
}

/// Whose second moments will be asked for in a layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Those of the routed experts.
    pub experts: bool,
    /// Inputs of dense matrices.
    pub dense: BTreeSet<MatrixInput>,
}

impl Wanted {
    /// What the matrices of some tensors read.
    pub fn by<'a>(tensors: impl IntoIterator<Item = &'a PlannedTensor>) -> Self {
        let mut wanted = Self::default();
        for tensor in tensors {
            if tensor.spec.family.is_routed() {
                wanted.experts = true;
            } else {
                wanted.dense.extend(tensor.spec.reads);
            }
        }
        wanted
    }

    /// Whether nothing will be asked for.
    pub fn is_empty(&self) -> bool {
        !self.experts && self.dense.is_empty()
    }
}

/// Gives second moments, one layer after another.
pub trait Calibration: Sync {
    /// The first layer that can be entered: those before are done for good.
    fn ready_layer(&self) -> usize;

    /// Forgets everything kept of an earlier run: layer 0 is the next to be entered.
    fn restart(&mut self);

    /// Runs the calibration tokens through a layer of the source and keeps what its matrices read.
    /// Layers come in order, the first being [`Calibration::ready_layer`]. `wanted`: whose moments will be asked for.
    ///
    /// # Errors
    /// If the layer cannot be computed.
    fn enter(&mut self, layer: usize, wanted: &Wanted) -> Result<(), CalibrationError>;

    /// Behind the last layer: gathers what the output matrix reads, [`MatrixInput::Final`].
    ///
    /// # Errors
    /// If it cannot be computed.
    fn enter_head(&mut self) -> Result<(), CalibrationError>;

    /// Second moments of what the matrices of an expert of the layer entered last read.
    ///
    /// # Errors
    /// If they cannot be formed.
    fn moments(&self, input: MatrixInput, expert: usize) -> Result<MatrixMoments, CalibrationError>;

    /// Second moments of what dense matrices with an input read, or one group of their rows.
    ///
    /// # Errors
    /// If they were not wanted.
    fn dense_moments(&self, input: MatrixInput, group: usize) -> Result<MatrixMoments, CalibrationError>;

    /// [`Calibration::moments`] of an expert's mids when its gate and up projections are these instead of the source's,
    /// each `[inner, hidden]`.
    ///
    /// # Errors
    /// If they cannot be formed.
    fn mid_moments(&self, expert: usize, gate: &[f32], up: &[f32])
    -> Result<MatrixMoments, CalibrationError>;

    /// The layer entered last is in the file for good: the next one can be entered, and so it can after an interruption.
    ///
    /// # Errors
    /// If activations cannot be computed or kept.
    fn leave(&mut self, layer: usize, plan: &Plan, bytes: &dyn LayerBytes) -> Result<(), CalibrationError>;

    /// The file is finished: nothing has to be kept.
    fn finish(&mut self);
}
