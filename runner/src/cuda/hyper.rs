//! Hyper-connections on the device, (3.6): streams merged before a sub-layer, and mixed with its output behind it.

use gguf_tools::block::BlockType;

use super::backend::{CudaBackend, CudaTensor, CudaVector};
use super::driver::{Arguments, Launch, View, ViewMut};
use super::error::CudaError;
use super::matrix::Matrix;
use super::module::Gpu;
use crate::error::RunnerError;
use crate::ops::{HyperConnection, HyperConstants, Mix, SublayerInput};

/// Columns of a slice of the hyper-connections' mixer, as in the kernels.
pub(super) const SLICE: usize = 256;
/// Columns of each stream and tokens that a block of `hc_turn_tokens` takes, and the streams and most rows of a mixer that it
/// is made for.
const TURNED_COLUMNS: usize = 64;
const TURNED_TOKENS: usize = 16;
const TURNED_STREAMS: usize = 4;
const TURNED_ROWS: usize = 24;
/// Tokens for which a slice of the mixer stays in registers.
const MIX_TOKENS: usize = 32;

/// What comes of the mixer before its slices are summed up.
pub(super) struct Partials {
    /// `[tokens, n + 1, slices]`, sums of squares last.
    values: CudaTensor,
    n_slices: usize,
}

/// What the kernels read that turn streams: mix a sub-layer's output into them, and multiply them with the next mixer.
pub(super) struct Turn<'a> {
    /// `[tokens, width]`.
    pub(super) output: View<'a, f32>,
    /// What is added to it, if anything.
    pub(super) second: Option<View<'a, f32>>,
    /// `[tokens, n_streams]`.
    pub(super) post: View<'a, f32>,
    /// `[tokens, n_streams * n_streams]`.
    pub(super) comb: View<'a, f32>,
    /// Name of the mixer's type, and its address.
    pub(super) mixer: (&'static str, u64),
    pub(super) tokens: usize,
    pub(super) width: usize,
    pub(super) n_streams: usize,
    /// Rows of the mixer.
    pub(super) n_mixes: usize,
}

impl Turn<'_> {
    fn arguments(&self, arguments: Arguments) -> Arguments {
        let arguments = arguments.read(self.output);
        let arguments = match self.second {
            Some(second) => arguments.read(second),
            None => arguments.null(),
        };
        arguments.read(self.post).read(self.comb)
    }

    /// To other memory: `turned` `[tokens, n_streams * width]`, `partials` `[tokens, n_mixes + 1, slices of SLICE columns]`.
    pub(super) fn launch_for_one(
        &self,
        gpu: &Gpu,
        streams: View<'_, f32>,
        turned: &ViewMut<'_, f32>,
        partials: &ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let n_slices = self.n_streams * self.width / SLICE;
        let arguments = self
            .arguments(Arguments::new().read(streams))
            .write(turned)
            .long(self.mixer.1)
            .write(partials)
            .int(self.width)
            .int(self.n_streams)
            .int(self.n_mixes)
            .int(n_slices);
        let shape = Launch::new(n_slices, 256).by(self.tokens);
        gpu.launch("hyper", &format!("hc_turn_{}", self.mixer.0), shape, arguments)
    }

    /// In place; `partials` `[tokens, n_mixes + 1, slices of TURNED_COLUMNS columns of every stream]`.
    pub(super) fn launch_for_many(
        &self,
        gpu: &Gpu,
        streams: &ViewMut<'_, f32>,
        partials: &ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let n_slices = self.width / TURNED_COLUMNS;
        let arguments = self
            .arguments(Arguments::new().write(streams))
            .long(self.mixer.1)
            .write(partials)
            .int(self.width)
            .int(self.n_mixes)
            .int(n_slices)
            .int(self.tokens);
        let shape = Launch::new(n_slices, 256).by(self.tokens.div_ceil(TURNED_TOKENS));
        gpu.launch("hyper", &format!("hc_turn_tokens_{}", self.mixer.0), shape, arguments)
    }
}

/// Whether there is a kernel that turns the streams of many tokens.
pub(super) fn turns_many(output: &CudaTensor, mix: &Mix<CudaBackend>, mixer: &Matrix) -> bool {
    output.width.is_multiple_of(TURNED_COLUMNS)
        && mix.post.width == TURNED_STREAMS
        && mixer.rows() <= TURNED_ROWS
}

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

    /// The mixer's products with each slice of the streams.
    pub(super) fn hyper_partials(
        &self,
        streams: &CudaTensor,
        mixer: &Matrix,
    ) -> Result<Partials, RunnerError> {
        let (n, width, tokens) = (mixer.rows(), streams.width, streams.tokens);
        let mut room = None;
        let (name, mixer) = self.mixer_values(mixer, &mut room)?;
        let n_slices = width.div_ceil(SLICE);
        let mut values = self.tensor(tokens, n_slices * (n + 1))?;
        let shape = Launch::new(n_slices, 256).by(tokens.div_ceil(MIX_TOKENS));
        let arguments = Arguments::new()
            .read(streams.values.view())
            .long(mixer)
            .write(&values.values.view_mut())
            .int(tokens)
            .int(width)
            .int(n)
            .int(n_slices)
            .int(MIX_TOKENS);
        let at_once = if tokens == 1 { 1 } else { 4 };
        self.launch("hyper", &format!("hc_mix_{name}_{at_once}"), shape, arguments)?;
        Ok(Partials { values, n_slices })
    }

    /// (3.6) `hc_post`, and the products of [`CudaBackend::hyper_partials`] with what comes of it: by slices of a stream for
    /// single tokens, of all four streams for many, where [`turns_many`].
    pub(super) fn turn_streams(
        &self,
        streams: &mut CudaTensor,
        output: &CudaTensor,
        second: Option<&CudaTensor>,
        mix: &Mix<Self>,
        mixer: &Matrix,
    ) -> Result<Partials, RunnerError> {
        let mut room = None;
        let turn = Turn {
            output: output.values.view(),
            second: second.map(|second| second.values.view()),
            post: mix.post.values.view(),
            comb: mix.comb.values.view(),
            mixer: self.mixer_values(mixer, &mut room)?,
            tokens: streams.tokens,
            width: output.width,
            n_streams: mix.post.width,
            n_mixes: mixer.rows(),
        };
        let one = self.single_tokens();
        let n_slices = if one { streams.width / SLICE } else { output.width / TURNED_COLUMNS };
        let mut values = self.tensor(streams.tokens, n_slices * (mixer.rows() + 1))?;
        if one {
            let mut turned = self.tensor(streams.tokens, streams.width)?;
            let (to, partials) = (turned.values.view_mut(), values.values.view_mut());
            turn.launch_for_one(&self.gpu, streams.values.view(), &to, &partials)?;
            *streams = turned;
        } else {
            turn.launch_for_many(&self.gpu, &streams.values.view_mut(), &values.values.view_mut())?;
        }
        Ok(Partials { values, n_slices })
    }

    /// (3.6), (3.1) The streams merged, before and behind the norm; `mix`: post and comb weights to be written.
    pub(super) fn merge_streams(
        &self,
        streams: &CudaTensor,
        partials: &Partials,
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
            .read(partials.values.values.view())
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
            .int(partials.n_slices)
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
        partials: &Partials,
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
