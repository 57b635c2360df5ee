//! Hyper-connections on the device, (3.6): streams merged before a sub-layer, and mixed with its output behind it.

use gguf_tools::block::BlockType;

use super::backend::{CudaBackend, CudaTensor, CudaVector};
use super::driver::{Arguments, Launch};
use super::matrix::Matrix;
use crate::error::RunnerError;
use crate::ops::{HyperConnection, HyperConstants, Mix, SublayerInput};

/// Columns of a slice of the hyper-connections' mixer, as in the kernels.
pub(super) const SLICE: usize = 256;
/// Tokens for which a slice of the mixer stays in registers.
const MIX_TOKENS: usize = 32;

impl CudaBackend {
    /// The mixer as the kernels take it: name of the type, and where it is; widened into `room` where it must be.
    pub(super) fn mixer_values(
        &self,
        mixer: &Matrix,
        room: &mut Option<CudaTensor>,
    ) -> Result<(&'static str, u64), RunnerError> {
        let (n, width) = (mixer.rows(), mixer.columns());
        let values = match mixer.block_type() {
            BlockType::F16 => return Ok(("F16", mixer.values_as_stored().address())),
            BlockType::F32 => return Ok(("F32", mixer.values_as_stored().address())),
            _ => room.insert(self.tensor(n, width)?),
        };
        mixer.take_rows(&self.gpu, self.counting.slice(0..n), 1, &mut values.values.view_mut())?;
        Ok(("F32", values.values.view().address()))
    }

    /// The mixer's products with each slice of the streams, `[tokens, n + 1, slices]`, sums of squares last.
    pub(super) fn hyper_partials(
        &self,
        streams: &CudaTensor,
        mixer: &Matrix,
    ) -> Result<CudaTensor, RunnerError> {
        let (n, width, tokens) = (mixer.rows(), streams.width, streams.tokens);
        let mut room = None;
        let (name, mixer) = self.mixer_values(mixer, &mut room)?;
        let n_slices = width.div_ceil(SLICE);
        let mut partials = self.tensor(tokens, n_slices * (n + 1))?;
        let shape = Launch::new(n_slices, 256).by(tokens.div_ceil(MIX_TOKENS));
        let arguments = Arguments::new()
            .read(streams.values.view())
            .long(mixer)
            .write(&partials.values.view_mut())
            .int(tokens)
            .int(width)
            .int(n)
            .int(n_slices)
            .int(MIX_TOKENS);
        let at_once = if tokens == 1 { 1 } else { 4 };
        self.launch("hyper", &format!("hc_mix_{name}_{at_once}"), shape, arguments)?;
        Ok(partials)
    }

    /// (3.6) `hc_post`, and the products of [`CudaBackend::hyper_partials`] with what comes of it.
    pub(super) fn turn_streams(
        &self,
        streams: &mut CudaTensor,
        output: &CudaTensor,
        second: Option<&CudaTensor>,
        mix: &Mix<Self>,
        mixer: &Matrix,
    ) -> Result<CudaTensor, RunnerError> {
        let (n, m, tokens) = (mixer.rows(), mix.post.width, streams.tokens);
        let mut room = None;
        let (name, mixer) = self.mixer_values(mixer, &mut room)?;
        let n_slices = streams.width / SLICE;
        let mut partials = self.tensor(tokens, n_slices * (n + 1))?;
        let mut turned = self.tensor(tokens, streams.width)?;
        let shape = Launch::new(n_slices, 256).by(tokens);
        let arguments = Arguments::new().read(streams.values.view()).read(output.values.view());
        let arguments = match second {
            Some(second) => arguments.read(second.values.view()),
            None => arguments.null(),
        };
        let arguments = arguments
            .read(mix.post.values.view())
            .read(mix.comb.values.view())
            .write(&turned.values.view_mut())
            .long(mixer)
            .write(&partials.values.view_mut())
            .int(output.width)
            .int(m)
            .int(n)
            .int(n_slices);
        self.launch("hyper", &format!("hc_turn_{name}"), shape, arguments)?;
        *streams = turned;
        Ok(partials)
    }

    /// (3.6), (3.1) The streams merged, before and behind the norm; `mix`: post and comb weights to be written.
    pub(super) fn merge_streams(
        &self,
        streams: &CudaTensor,
        partials: &CudaTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
        mix: Option<(&mut CudaTensor, &mut CudaTensor)>,
    ) -> Result<(CudaTensor, CudaTensor), RunnerError> {
        let (m, tokens) = (constants.n_streams, streams.tokens);
        let width = streams.width / m;
        let mut x = self.tensor(tokens, width)?;
        let mut normed = self.tensor(tokens, width)?;
        let arguments = Arguments::new()
            .read(streams.values.view())
            .read(partials.values.view())
            .read(weights.scale.values.view())
            .read(weights.base.values.view())
            .read(norm.values.view())
            .write(&x.values.view_mut())
            .write(&normed.values.view_mut());
        let arguments = match mix {
            Some((post, comb)) => arguments.write(&post.values.view_mut()).write(&comb.values.view_mut()),
            None => arguments.null().null(),
        };
        let arguments = arguments
            .int(width)
            .int(m)
            .int(streams.width.div_ceil(SLICE))
            .int(constants.sinkhorn_iterations)
            .float(constants.epsilon)
            .float(constants.rms_epsilon);
        self.launch("hyper", "hc_pre", Launch::new(tokens, 544), arguments)?;
        Ok((x, normed))
    }

    /// What `hc_pre` gives, from the mixer's products.
    pub(super) fn sublayer_input(
        &self,
        streams: &CudaTensor,
        partials: &CudaTensor,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
    ) -> Result<SublayerInput<Self>, RunnerError> {
        let (m, tokens) = (constants.n_streams, streams.tokens);
        let mut post = self.tensor(tokens, m)?;
        let mut comb = self.tensor(tokens, m * m)?;
        let parts = Some((&mut post, &mut comb));
        let (merged, normed) = self.merge_streams(streams, partials, weights, constants, norm, parts)?;
        Ok(SublayerInput { merged, normed, mix: Mix { post, comb } })
    }
}
