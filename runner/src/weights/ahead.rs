//! Reading a file that is larger than memory, layer by layer: while a layer is computed, the next one is read, and
//! the one before is given back.

use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{JoinHandle, spawn};

use gguf_tools::model::{Family, TensorTable};

use super::WeightSource;

/// Bytes that are asked for at a time: enough that the disk is never idle, little beside a layer.
const WINDOW_BYTES: usize = 16 << 20;
/// At most the size of a page on every system.
const PAGE_BYTES: usize = 4096;

/// Reads weights ahead of the computation.
#[derive(Clone)]
pub(crate) struct ReadAhead {
    source: Arc<dyn WeightSource>,
    /// Tensors of each layer, and last those of the head.
    layers: Arc<[Vec<usize>]>,
    /// Fewer tokens leave many experts unread, so that reading all of them ahead would cost more than it saves.
    least_tokens: usize,
    /// Whether layers are given back.
    release: bool,
}

impl ReadAhead {
    /// `release`: give layers back that are done with; right where the weights do not fit memory together.
    pub(crate) fn new(source: &Arc<dyn WeightSource>, release: bool) -> Self {
        let h = source.hyper_parameters();
        let n_layers = h.num_hidden_layers as usize;
        let mut layers = vec![Vec::new(); n_layers + 1];
        // Of the embedding a batch reads a few rows.
        for spec in TensorTable::new(h).specs().iter().filter(|spec| spec.family != Family::Embedding) {
            if let Some(found) = source.find(&spec.gguf_name) {
                layers[spec.layer.map_or(n_layers, |layer| layer as usize)].push(found.index);
            }
        }
        let least_tokens = (h.n_routed_experts / h.num_experts_per_tok.max(1)) as usize;
        Self { source: source.clone(), layers: layers.into(), least_tokens, release }
    }

    /// Begins a pass of `n_tokens` tokens through all layers; nothing for too few.
    pub(crate) fn begin(&self, n_tokens: usize) -> Option<Reading> {
        if n_tokens < self.least_tokens {
            return None;
        }
        let (sender, entered) = channel::<usize>();
        let stop = Arc::new(AtomicBool::new(false));
        let (reader, stopped) = (self.clone(), stop.clone());
        let thread = spawn(move || {
            reader.read(0, &stopped);
            let mut kept = 0;
            for layer in entered {
                reader.give_back(kept..layer);
                kept = layer;
                reader.read(layer + 1, &stopped);
            }
            reader.give_back(kept..reader.layers.len());
        });
        Some(Reading { entered: Some(sender), stop, thread: Some(thread) })
    }

    /// Brings a layer into memory, one window asked for ahead of the one that is waited for.
    fn read(&self, layer: usize, stop: &AtomicBool) {
        let Some(tensors) = self.layers.get(layer) else { return };
        let windows = |&tensor: &usize| {
            let n_bytes = self.source.mapped(tensor).len();
            let starts = (0..n_bytes).step_by(WINDOW_BYTES);
            starts.map(move |start| (tensor, start..n_bytes.min(start + WINDOW_BYTES)))
        };
        let mut ahead = tensors.iter().flat_map(windows);
        let mut ask = || {
            if let Some((tensor, range)) = ahead.next() {
                self.source.read_ahead(tensor, range);
            }
        };
        ask();
        for (tensor, range) in tensors.iter().flat_map(windows) {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            ask();
            let bytes = self.source.mapped(tensor);
            range.step_by(PAGE_BYTES).for_each(|at| _ = black_box(bytes[at]));
        }
    }

    fn give_back(&self, layers: Range<usize>) {
        if self.release {
            self.layers[layers].iter().flatten().for_each(|&tensor| self.source.release(tensor));
        }
    }
}

/// A pass under way. Dropping it ends the reading.
pub(crate) struct Reading {
    entered: Option<Sender<usize>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reading {
    /// The computation has come to this layer; the head counts as one behind the last.
    pub(crate) fn enter(&self, layer: usize) {
        if let Some(entered) = &self.entered {
            // It cannot fail while the thread lives, and without it weights are read when they are used.
            let _ = entered.send(layer);
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.entered = None;
        if let Some(thread) = self.thread.take() {
            // It only reads; had it failed, the computation would have read for itself.
            let _ = thread.join();
        }
    }
}
