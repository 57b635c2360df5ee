//! What a layer keeps of a sequence on the device, (5.1).
//!
//! The window is a ring of a power of two of slots, at least the window and the most tokens of a piece together: a piece
//! is appended before its first query is attended to. Compressed rows grow geometrically. Rows are `f16` where rounding
//! has made them coarser anyway ([`crate::Numerics::Official`]), otherwise `f32`.

use std::ops::Range;

use super::driver::Device;
use super::error::CudaError;
use super::pool::{Pool, PoolBuffer};
use crate::ops::{CacheShape, CompressedRows};

/// Tokens that the first allocation of compressed rows has room for.
const FIRST_TOKENS: usize = 4096;

/// Rows of the cache.
pub(super) enum Rows {
    Half(PoolBuffer<u16>),
    Float(PoolBuffer<f32>),
}

impl Rows {
    fn new(pool: &Pool, halves: bool, n_values: usize) -> Result<Self, CudaError> {
        let what = "the key-value cache";
        Ok(if halves {
            Self::Half(pool.take(n_values, what)?)
        } else {
            Self::Float(pool.take(n_values, what)?)
        })
    }

    /// End of the names of kernels for this storage.
    pub(super) fn suffix(&self) -> &'static str {
        match self {
            Self::Half(_) => "half",
            Self::Float(_) => "float",
        }
    }

    fn n_bytes(&self) -> usize {
        match self {
            Self::Half(values) => values.n_bytes(),
            Self::Float(values) => values.n_bytes(),
        }
    }

    /// Copies the first `n` values of `from`, which stores them the same way.
    fn copy_from(&mut self, device: &Device, from: &Self, n: usize) -> Result<(), CudaError> {
        self.copy_range(device, 0, from, 0..n)
    }

    /// Copies some values of `from`, which stores them the same way, to those from `first` on.
    fn copy_range(
        &mut self,
        device: &Device,
        first: usize,
        from: &Self,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        let to_range = first..first + range.len();
        match (self, from) {
            (Self::Half(to), Self::Half(from)) => device.copy(from.slice(range), &mut to.slice_mut(to_range)),
            (Self::Float(to), Self::Float(from)) => {
                device.copy(from.slice(range), &mut to.slice_mut(to_range))
            }
            _ => unreachable!("all caches of a backend store alike"),
        }
    }
}

/// A compressor on its way through a sequence, and the rows it has emitted.
pub(super) struct CompressorStore {
    /// Values of the latest tokens, `[n_slots, token_width]`; token `t` is in slot `t % n_slots`.
    pub(super) values: PoolBuffer<f32>,
    /// Their gates, without position bias.
    pub(super) gates: PoolBuffer<f32>,
    /// `[capacity, width]`.
    pub(super) rows: Rows,
    /// Rows there is room for.
    pub(super) capacity: usize,
    /// Values a row.
    pub(super) width: usize,
    /// Tokens kept: those of a window, or of two where windows overlap.
    pub(super) n_slots: usize,
}

impl CompressorStore {
    fn new(
        pool: &Pool,
        halves: bool,
        ratio: usize,
        width: usize,
        capacity: usize,
    ) -> Result<Self, CudaError> {
        let doubled = if overlapping(ratio) { 2 } else { 1 };
        let (n_slots, token_width) = (doubled * ratio, doubled * width);
        let state = || pool.take(n_slots * token_width, "the state of a compressor");
        let rows = Rows::new(pool, halves, capacity * width)?;
        Ok(Self { values: state()?, gates: state()?, rows, capacity, width, n_slots })
    }

    fn n_bytes(&self) -> usize {
        self.values.n_bytes() + self.gates.n_bytes() + self.rows.n_bytes()
    }

    fn state(&self) -> [&PoolBuffer<f32>; 2] {
        [&self.values, &self.gates]
    }

    fn copy_from(&mut self, device: &Device, from: &Self, n_rows: usize) -> Result<(), CudaError> {
        device.copy(from.values.view(), &mut self.values.view_mut())?;
        device.copy(from.gates.view(), &mut self.gates.view_mut())?;
        self.rows.copy_from(device, &from.rows, n_rows * self.width)
    }
}

/// Whether windows of this ratio overlap.
pub(super) fn overlapping(ratio: usize) -> bool {
    ratio == 4
}

/// Everything of a cache that has room.
pub(super) struct Stores {
    /// `[ring_slots, head_dim]`.
    pub(super) window: Rows,
    attention: Option<CompressorStore>,
    indexer: Option<CompressorStore>,
}

impl Stores {
    fn compressors(&self) -> impl Iterator<Item = &CompressorStore> {
        self.attention.iter().chain(&self.indexer)
    }
}

/// What a batch overwrites though its own tokens need it: the window before it, and states of compressors. Compressed rows
/// are only added.
struct Kept {
    n_tokens: usize,
    /// Rows of the window, the oldest first.
    window: Rows,
    /// Of [`CompressorStore::state`] of all compressors.
    states: Vec<PoolBuffer<f32>>,
}

/// How caches of a backend store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Storage {
    /// Whether rows are `f16`.
    pub(super) halves: bool,
    /// Slots of the window's ring, a power of two.
    pub(super) ring_slots: usize,
}

/// One layer's cache of one sequence on the device.
pub struct CudaCache {
    pub(super) shape: CacheShape,
    /// Tokens there is room for.
    capacity: usize,
    /// None before the first token.
    stores: Option<Stores>,
    /// None before the first batch that continues a sequence.
    kept: Option<Kept>,
}

impl CudaCache {
    pub(super) fn new(shape: CacheShape) -> Self {
        Self { shape, capacity: 0, stores: None, kept: None }
    }

    pub(super) fn n_bytes(&self) -> usize {
        self.stores.as_ref().map_or(0, |stores| {
            stores.window.n_bytes() + stores.compressors().map(CompressorStore::n_bytes).sum::<usize>()
        }) + self.kept.as_ref().map_or(0, |kept| {
            kept.window.n_bytes() + kept.states.iter().map(PoolBuffer::n_bytes).sum::<usize>()
        })
    }

    fn n_rows(&self, n_tokens: usize) -> usize {
        n_tokens.checked_div(self.shape.ratio).unwrap_or(0)
    }

    fn stores_for(&self, pool: &Pool, storage: Storage, n_tokens: usize) -> Result<Stores, CudaError> {
        let CacheShape { ratio, head_dim, index_head_dim, .. } = self.shape;
        let capacity = self.n_rows(n_tokens).max(1);
        let compressor = |width| CompressorStore::new(pool, storage.halves, ratio, width, capacity);
        Ok(Stores {
            window: Rows::new(pool, storage.halves, storage.ring_slots * head_dim)?,
            attention: (ratio != 0).then(|| compressor(head_dim)).transpose()?,
            indexer: overlapping(ratio).then(|| compressor(index_head_dim)).transpose()?,
        })
    }

    /// Makes room for `n_tokens` in all; what is there is kept. Says whether addresses changed.
    pub(super) fn reserve(
        &mut self,
        device: &Device,
        pool: &Pool,
        storage: Storage,
        n_tokens: usize,
    ) -> Result<bool, CudaError> {
        if n_tokens <= self.capacity {
            return Ok(false);
        }
        // A layer without compressed rows never grows.
        let grown = n_tokens.max(2 * self.capacity).max(FIRST_TOKENS).next_multiple_of(FIRST_TOKENS);
        let capacity = if self.shape.ratio == 0 { usize::MAX } else { grown };
        let mut stores = self.stores_for(pool, storage, grown)?;
        if let Some(old) = &self.stores {
            let n_rows = self.n_rows(self.capacity);
            copy_stores(device, old, &mut stores, storage.ring_slots * self.shape.head_dim, n_rows)?;
        }
        (self.stores, self.capacity) = (Some(stores), capacity);
        Ok(true)
    }

    /// A copy that has room for the `n_tokens` that went into this cache and no more.
    pub(super) fn copy(
        &self,
        device: &Device,
        pool: &Pool,
        storage: Storage,
        n_tokens: usize,
    ) -> Result<Self, CudaError> {
        let mut copy = Self::new(self.shape);
        if let Some(stores) = &self.stores {
            let mut new = self.stores_for(pool, storage, n_tokens)?;
            let ring = storage.ring_slots * self.shape.head_dim;
            copy_stores(device, stores, &mut new, ring, self.n_rows(n_tokens))?;
            (copy.stores, copy.capacity) = (Some(new), n_tokens);
        }
        Ok(copy)
    }

    /// Takes over a copy. Says whether addresses changed.
    pub(super) fn restore(
        &mut self,
        device: &Device,
        pool: &Pool,
        storage: Storage,
        copy: &Self,
        n_tokens: usize,
    ) -> Result<bool, CudaError> {
        let moved = self.reserve(device, pool, storage, n_tokens)?;
        if let (Some(from), Some(to)) = (&copy.stores, &mut self.stores) {
            let n_rows = n_tokens.checked_div(self.shape.ratio).unwrap_or(0);
            copy_stores(device, from, to, storage.ring_slots * self.shape.head_dim, n_rows)?;
        }
        Ok(moved)
    }

    /// Keeps what a batch behind `n_tokens` tokens overwrites.
    pub(super) fn keep(
        &mut self,
        device: &Device,
        pool: &Pool,
        storage: Storage,
        n_tokens: usize,
    ) -> Result<(), CudaError> {
        let CacheShape { head_dim, window, .. } = self.shape;
        let Some(stores) = &self.stores else { return Ok(()) };
        let kept = match &mut self.kept {
            Some(kept) => kept,
            none => {
                let what = "what a batch overwrites of a cache";
                let states = stores.compressors().flat_map(CompressorStore::state);
                none.insert(Kept {
                    n_tokens,
                    window: Rows::new(pool, storage.halves, window * head_dim)?,
                    states: states.map(|state| pool.take(state.len(), what)).collect::<Result<_, _>>()?,
                })
            }
        };
        kept.n_tokens = n_tokens;
        for (slots, first) in window_slots(n_tokens, window, storage.ring_slots) {
            let values = slots.start * head_dim..slots.end * head_dim;
            kept.window.copy_range(device, first * head_dim, &stores.window, values)?;
        }
        let states = stores.compressors().flat_map(CompressorStore::state);
        for (state, kept) in states.zip(&mut kept.states) {
            device.copy(state.view(), &mut kept.view_mut())?;
        }
        Ok(())
    }

    /// Makes the cache what it was at the latest [`CudaCache::keep`].
    pub(super) fn return_to_kept(&mut self, device: &Device, storage: Storage) -> Result<(), CudaError> {
        let CacheShape { head_dim, window, .. } = self.shape;
        let (Some(stores), Some(kept)) = (&mut self.stores, &self.kept) else { return Ok(()) };
        for (slots, first) in window_slots(kept.n_tokens, window, storage.ring_slots) {
            let values = first * head_dim..(first + slots.len()) * head_dim;
            stores.window.copy_range(device, slots.start * head_dim, &kept.window, values)?;
        }
        let states = stores
            .attention
            .iter_mut()
            .chain(&mut stores.indexer)
            .flat_map(|store| [&mut store.values, &mut store.gates]);
        for (state, kept) in states.zip(&kept.states) {
            device.copy(kept.view(), &mut state.view_mut())?;
        }
        Ok(())
    }

    /// # Panics
    /// If no room was reserved.
    pub(super) fn stores(&self) -> &Stores {
        self.stores.as_ref().expect("room is reserved before a pass")
    }

    pub(super) fn stores_mut(&mut self) -> &mut Stores {
        self.stores.as_mut().expect("room is reserved before a pass")
    }

    /// # Panics
    /// If this layer has no such rows.
    pub(super) fn compressor(&self, which: CompressedRows) -> &CompressorStore {
        let stores = self.stores();
        match which {
            CompressedRows::Attention => stores.attention.as_ref(),
            CompressedRows::Indexer => stores.indexer.as_ref(),
        }
        .expect("the layer compresses")
    }

    pub(super) fn compressor_mut(&mut self, which: CompressedRows) -> &mut CompressorStore {
        let stores = self.stores_mut();
        match which {
            CompressedRows::Attention => stores.attention.as_mut(),
            CompressedRows::Indexer => stores.indexer.as_mut(),
        }
        .expect("the layer compresses")
    }
}

/// Slots of the ring with the latest `window` of `n_tokens` tokens in at most two pieces, the oldest first, each with the
/// number of its first token among them.
fn window_slots(
    n_tokens: usize,
    window: usize,
    ring_slots: usize,
) -> impl Iterator<Item = (Range<usize>, usize)> {
    let n = n_tokens.min(window);
    let first = (n_tokens - n) % ring_slots;
    let n_first = n.min(ring_slots - first);
    [(first..first + n_first, 0), (0..n - n_first, n_first)]
        .into_iter()
        .filter(|(slots, _)| !slots.is_empty())
}

/// Copies the window's ring and the first compressed rows.
fn copy_stores(
    device: &Device,
    from: &Stores,
    to: &mut Stores,
    ring_values: usize,
    n_rows: usize,
) -> Result<(), CudaError> {
    to.window.copy_from(device, &from.window, ring_values)?;
    for (from, to) in from.compressors().zip(to.attention.iter_mut().chain(&mut to.indexer)) {
        to.copy_from(device, from, n_rows.min(from.capacity))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::window_slots;

    #[test]
    fn slots_of_the_window_are_those_of_its_tokens() {
        for n_tokens in 0..100_usize {
            let found: Vec<usize> = window_slots(n_tokens, 8, 32).flat_map(|(slots, _)| slots).collect();
            let expected: Vec<usize> =
                (n_tokens.saturating_sub(8)..n_tokens).map(|token| token % 32).collect();
            assert_eq!(found, expected, "{n_tokens}");
            let mut next = 0;
            for (slots, first) in window_slots(n_tokens, 8, 32) {
                assert_eq!(first, next);
                next += slots.len();
            }
        }
    }
}
