//! One token's queries, and what it adds to a layer's cache, in one kernel, (4.4.2), (4.4.3), (4.5), (4.6.1).

use bytemuck::{Pod, Zeroable};

use super::attention::{EMITTING_THREADS, WARPS, hadamard_factor, rounding_of};
use super::backend::{CudaBackend, CudaRope};
use super::cache::{CompressorStore, CudaCache, Rows, overlapping};
use super::driver::{Arguments, Launch};
use crate::error::RunnerError;
use crate::ops::{NewCompressed, NewRows, Numerics, Piece, Queries, RowPlaces};

/// Threads of a block, of which each norms four values of a row.
const THREADS: usize = EMITTING_THREADS;

/// Compressors of a layer, at most.
const MOST_COMPRESSORS: usize = 2;

/// A compressor and what is behind it, as the kernel declares it.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Compressing {
    values: u64,
    gates: u64,
    kept_values: u64,
    kept_gates: u64,
    position_bias: u64,
    norm: u64,
    rows: u64,
    /// Values a token has.
    width: u32,
    rounding: u32,
    hadamard_factor: f32,
    unused: u32,
}

impl Rows {
    fn address(&mut self) -> u64 {
        match self {
            Self::Half(values) => values.view_mut().address(),
            Self::Float(values) => values.view_mut().address(),
        }
    }
}

impl CompressorStore {
    fn address_all(&mut self) -> [u64; 3] {
        [self.values.view_mut().address(), self.gates.view_mut().address(), self.rows.address()]
    }
}

impl CudaBackend {
    /// See [`crate::ops::Backend::finish_at_once`]: for the only token of a batch, where its row fits into a block.
    #[expect(clippy::too_many_arguments, reason = "the operation's arguments")]
    pub(super) fn finish_token(
        &self,
        queries: Queries<'_, Self>,
        cache: &mut CudaCache,
        new: &NewRows<'_, Self>,
        piece: &Piece,
        places: &RowPlaces<'_, Self>,
        rope: &CudaRope,
        numerics: Numerics,
    ) -> Result<bool, RunnerError> {
        let (width, ratio) = (new.key_value.width, cache.shape.ratio);
        let in_fours = |width: usize| width.is_multiple_of(4);
        let fits = in_fours(width)
            && width <= 4 * THREADS
            && new.compressed.len() <= MOST_COMPRESSORS
            && new.compressed.iter().all(|new| in_fours(new.values.width));
        if !self.single_tokens() || queries.heads.tokens != 1 || !fits {
            return Ok(false);
        }
        let n_heads = queries.heads.width / queries.head_dim;
        let (index, n_index_heads, index_width) = match queries.index {
            Some((index, width)) => (index.values.view_mut().address(), index.width / width, width),
            None => (0, 0, 0),
        };
        let mut compressors = [Compressing::zeroed(); MOST_COMPRESSORS];
        for (compressing, new) in compressors.iter_mut().zip(&new.compressed) {
            let NewCompressed { target, weights, values, gates } = new;
            let store = cache.compressor_mut(*target);
            let [kept_values, kept_gates, rows] = store.address_all();
            *compressing = Compressing {
                values: values.rows(&piece.rows).address(),
                gates: gates.rows(&piece.rows).address(),
                kept_values,
                kept_gates,
                position_bias: weights.position_bias.values.view().address(),
                norm: weights.norm.values.view().address(),
                rows,
                width: values.width as u32,
                rounding: rounding_of(numerics, *target),
                hadamard_factor: hadamard_factor(store.width),
                unused: 0,
            };
        }
        let window = &mut cache.stores_mut().window;
        let name = format!("finish_token_{}", window.suffix());
        let arguments = Arguments::new()
            .write(&queries.heads.values.view_mut())
            .long(index)
            .int(n_heads)
            .int(queries.head_dim)
            .int(n_index_heads)
            .int(index_width)
            .float(hadamard_factor(index_width.max(1)))
            .float(queries.epsilon)
            .read(new.key_value.rows(&piece.rows))
            .read(new.norm.values.view())
            .long(window.address())
            .structure(&compressors)
            .int(new.compressed.len())
            .read(rope.frequencies.view())
            .read(places.positions())
            .int(width)
            .int(self.storage.ring_slots - 1)
            .int(ratio)
            .int(usize::from(overlapping(ratio)))
            .int(rope.frequencies.len())
            .float(new.epsilon)
            .int(usize::from(numerics == Numerics::Official));
        let row = new.compressed.iter().map(|new| cache.compressor(new.target).width).fold(width, usize::max);
        let blocks = 1 + new.compressed.len() + (n_heads + n_index_heads).div_ceil(WARPS);
        let shape = Launch::new(blocks, THREADS as u32).shared((row * size_of::<f32>()) as u32);
        self.launch("compressor", &name, shape, arguments)?;
        Ok(true)
    }
}
