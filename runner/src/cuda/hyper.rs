//! Hyper-connections on the device, (3.6): streams merged before a sub-layer, and mixed with its output behind it.

use gguf_tools::block::BlockType;

use super::backend::{CudaBackend, CudaTensor, CudaVector};
use super::driver::{Arguments, Beside, Launch, View, ViewMut};
use super::error::CudaError;
use super::matrix::Matrix;
use super::module::Gpu;
use crate::error::RunnerError;
use crate::ops::{HyperConnection, HyperConstants, Mix, SublayerInput};

/// Columns of a slice of the hyper-connections' mixer, as in the kernels.
const SLICE: usize = 256;
/// Columns of each stream that a block of `hc_turn` or `hc_turn_tokens` takes, tokens that one of the latter takes, and the
/// streams and most rows of a mixer that they are made for.
const TURNED_COLUMNS: usize = 64;
const TURNED_TOKENS: usize = 16;
const TURNED_STREAMS: usize = 4;
const TURNED_ROWS: usize = 24;
/// Tokens for which a slice of the mixer stays in registers.
const MIX_TOKENS: usize = 32;
/// Threads of `hc_pre` and of `hc_weigh`.
const MERGING_THREADS: u32 = 512;
const WEIGHING_THREADS: u32 = 256;

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

    /// Streams `[tokens, n_streams * width]` in place; `partials` `[tokens, n_mixes + 1, slices of TURNED_COLUMNS columns of
    /// every stream]`. A kernel of its own for single tokens gives the same bits.
    pub(super) fn launch(
        &self,
        gpu: &Gpu,
        single: bool,
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
            .int(n_slices);
        let (name, blocks, arguments) = if single {
            ("hc_turn", self.tokens, arguments)
        } else {
            ("hc_turn_tokens", self.tokens.div_ceil(TURNED_TOKENS), arguments.int(self.tokens))
        };
        let shape = Launch::new(n_slices, 256).by(blocks);
        gpu.launch("hyper", &format!("{name}_{}", self.mixer.0), shape, arguments)
    }
}

/// Whether there are kernels that turn such streams.
pub(super) fn turns(output: &CudaTensor, mix: &Mix<CudaBackend>, mixer: &Matrix) -> bool {
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

    /// (3.6) `hc_post`, and the products of [`CudaBackend::hyper_partials`] with what comes of it, where [`turns`].
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
            n_mixes: mixer.rows(),
        };
        let n_slices = output.width / TURNED_COLUMNS;
        let mut values = self.tensor(streams.tokens, n_slices * (mixer.rows() + 1))?;
        let single = self.single_tokens();
        turn.launch(&self.gpu, single, &streams.values.view_mut(), &values.values.view_mut())?;
        Ok(Partials { values, n_slices })
    }

    /// (3.6), (3.1) The streams merged, before and behind the norm.
    pub(super) fn merge_streams(
        &self,
        streams: &CudaTensor,
        partials: &Partials,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
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
            .write(&normed.values.view_mut())
            .int(width)
            .int(m)
            .int(weights.mixer.rows())
            .int(partials.n_slices)
            .float(constants.epsilon)
            .float(constants.rms_epsilon);
        let name = if m == 4 { "hc_pre_4" } else { "hc_pre_5" };
        self.launch("hyper", name, Launch::new(tokens, MERGING_THREADS), arguments)?;
        Ok((x, normed))
    }

    /// How the sub-layer's output will be mixed in, from the mixer's products with streams of `width` columns each.
    fn weigh_streams(
        &self,
        partials: &Partials,
        width: usize,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
    ) -> Result<Mix<Self>, RunnerError> {
        let (m, tokens) = (constants.n_streams, partials.values.tokens);
        let mut mix: Mix<Self> = Mix { post: self.tensor(tokens, m)?, comb: self.tensor(tokens, m * m)? };
        let arguments = Arguments::new()
            .read(partials.values.values.view())
            .read(weights.scale.values.view())
            .read(weights.base.values.view())
            .write(&mix.post.values.view_mut())
            .write(&mix.comb.values.view_mut())
            .int(width)
            .int(m)
            .int(partials.n_slices)
            .int(constants.sinkhorn_iterations)
            .float(constants.epsilon)
            .float(constants.rms_epsilon);
        let name = if m == 4 { "hc_weigh_4" } else { "hc_weigh_5" };
        self.launch("hyper", name, Launch::new(tokens, WEIGHING_THREADS), arguments)?;
        Ok(mix)
    }

    /// What `hc_pre` gives, from the mixer's products. The mix of single tokens is computed beside what follows: whoever
    /// needs it calls [`crate::ops::Backend::together`] first.
    pub(super) fn sublayer_input(
        &self,
        streams: &CudaTensor,
        partials: &Partials,
        weights: &HyperConnection<Self>,
        constants: HyperConstants,
        norm: &CudaVector,
    ) -> Result<SublayerInput<Self>, RunnerError> {
        let mut mix = None;
        let width = streams.width / constants.n_streams;
        self.queue_beside(Beside::Trifle, &mut || {
            mix = Some(self.weigh_streams(partials, width, weights, constants)?);
            Ok(())
        })?;
        let (merged, normed) = self.merge_streams(streams, partials, weights, constants, norm)?;
        let mix = mix.expect("computed above");
        Ok(SublayerInput { merged, normed, mix })
    }
}
