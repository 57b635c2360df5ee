//! Which experts each token was sent to: recorded as JSON lines, read back, and replayed against caches.
//!
//! The first line describes the model, `{"expert_trace": 1, "layers": 43, "experts": 256, "used": 6}`; each other line
//! is one token in one layer: `{"phase": "decode", "position": 17, "layer": 3, "ids": [...], "weights": [...]}`, ids in
//! the router's order. Lines come in the order of computing: a prefill passes all its tokens through a layer before the
//! next.

mod simulate;

use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};

use gguf_tools::model::HyperParameters;
use serde::{Deserialize, Serialize};

use crate::observe::{Observer, RouteObservation, Site};

pub use simulate::{Counted, Outcome, Policy, chart, replay};

/// Version of the lines.
const VERSION: u32 = 1;
/// Most layers and experts that a trace is believed to have: bounds the memory of a replay.
const MOST: usize = 1 << 16;

/// Whether a token was read or written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Read as part of a prompt.
    #[default]
    Prefill,
    /// Generated.
    Decode,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    expert_trace: u32,
    layers: usize,
    experts: usize,
    used: usize,
}

/// One token in one layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Visit {
    /// Whether the token was read or written.
    pub phase: Phase,
    /// Position of the token in its sequence, from 0.
    pub position: usize,
    /// The layer.
    pub layer: usize,
    /// Chosen experts, in the router's order.
    pub ids: Vec<u32>,
    /// Their weights.
    pub weights: Vec<f32>,
}

/// Records the routing of one sequence.
pub struct Tracer<W: Write + Send> {
    out: W,
    phase: Phase,
    failed: Option<io::Error>,
}

impl<W: Write + Send> Tracer<W> {
    /// Writes the first line.
    ///
    /// # Errors
    /// The system's own.
    pub fn new(mut out: W, h: &HyperParameters) -> io::Result<Self> {
        let header = Header {
            expert_trace: VERSION,
            layers: h.num_hidden_layers as usize,
            experts: h.n_routed_experts as usize,
            used: h.num_experts_per_tok as usize,
        };
        write_line(&mut out, &header)?;
        Ok(Self { out, phase: Phase::Prefill, failed: None })
    }

    /// What the tokens that follow are.
    pub fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Gives back the writer.
    ///
    /// # Errors
    /// The first error of any line.
    pub fn finish(mut self) -> io::Result<W> {
        match self.failed {
            Some(error) => Err(error),
            None => self.out.flush().map(|()| self.out),
        }
    }
}

fn write_line(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    out.write_all(b"\n")
}

impl<W: Write + Send> Observer for Tracer<W> {
    fn wants(&self, site: Site, _: Option<usize>) -> bool {
        site == Site::RouterLogits
    }

    fn routes(&mut self, seen: RouteObservation<'_>) {
        let n_used = seen.experts.len() / seen.tokens.len().max(1);
        let choices = seen.experts.chunks_exact(n_used.max(1)).zip(seen.weights.chunks_exact(n_used.max(1)));
        for (token, (ids, weights)) in seen.tokens.iter().zip(choices) {
            let visit = Visit {
                phase: self.phase,
                position: token.position,
                layer: seen.layer,
                ids: ids.to_vec(),
                weights: weights.to_vec(),
            };
            if self.failed.is_none() {
                self.failed = write_line(&mut self.out, &visit).err();
            }
        }
    }
}

/// A recorded sequence, token by token and layer by layer as decoding visits them.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Layers of the model.
    pub n_layers: usize,
    /// Routed experts of a layer.
    pub n_experts: usize,
    /// Experts of a token in a layer.
    pub n_used: usize,
    /// By position, then layer.
    pub visits: Vec<Visit>,
}

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The system refused.
    #[error("cannot read the trace")]
    Read(#[from] io::Error),
    /// A line is no part of a trace.
    #[error("line {line} of the trace: {problem}")]
    BadLine {
        /// From 1.
        line: usize,
        /// What was found and expected.
        problem: String,
    },
    /// The trace has no visits.
    #[error("the trace holds no tokens; record one with `run --trace-experts FILE`")]
    Empty,
    /// A cache smaller than what one layer needs at once.
    #[error("{slots} slots are too few: a layer uses {n_used} experts at once")]
    TooFewSlots {
        /// As asked.
        slots: usize,
        /// Experts of a token in a layer.
        n_used: usize,
    },
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    /// If reading fails, or a line is cut, wrong, out of the range that the first line gives, or there twice.
    pub fn read(lines: impl BufRead) -> Result<Self, TraceError> {
        let mut lines = (1..).zip(lines.lines());
        let (_, first) = lines.next().ok_or(TraceError::Empty)?;
        let bad = |line: usize, problem: String| TraceError::BadLine { line, problem };
        let header: Header = serde_json::from_str(&first?).map_err(|e| {
            bad(
                1,
                format!("{e}; expected the description of the model, `{{\"expert_trace\": {VERSION}, ...}}`"),
            )
        })?;
        if header.expert_trace != VERSION {
            return Err(bad(1, format!("version {}, expected {VERSION}", header.expert_trace)));
        }
        let sane = |n: usize| (1..=MOST).contains(&n);
        if !sane(header.layers) || !sane(header.experts) || !(1..=header.experts).contains(&header.used) {
            let found = format!("{} layers, {} experts, {} used", header.layers, header.experts, header.used);
            return Err(bad(
                1,
                format!("{found}; expected 1 to {MOST} layers and experts, and no more used than there are"),
            ));
        }
        let mut visits = BTreeMap::new();
        for (number, line) in lines {
            let line = line?;
            if line.trim().is_empty() {
                continue;
            }
            let visit: Visit = serde_json::from_str(&line).map_err(|e| bad(number, e.to_string()))?;
            check(&visit, &header).map_err(|problem| bad(number, problem))?;
            let place = (visit.position, visit.layer);
            if visits.insert(place, visit).is_some() {
                let problem = format!(
                    "position {} of layer {} comes a second time; record one sequence a file",
                    place.0, place.1
                );
                return Err(bad(number, problem));
            }
        }
        if visits.is_empty() {
            return Err(TraceError::Empty);
        }
        Ok(Self {
            n_layers: header.layers,
            n_experts: header.experts,
            n_used: header.used,
            visits: visits.into_values().collect(),
        })
    }

    /// Tokens recorded.
    pub fn n_tokens(&self) -> usize {
        self.visits.chunk_by(|a, b| a.position == b.position).count()
    }

    /// Different experts that were used, layers counted apart.
    pub fn n_distinct(&self) -> usize {
        let keys = self.visits.iter().flat_map(|v| v.ids.iter().map(move |&id| (v.layer, id)));
        keys.collect::<std::collections::HashSet<_>>().len()
    }
}

fn check(visit: &Visit, header: &Header) -> Result<(), String> {
    if visit.layer >= header.layers {
        return Err(format!("layer {}, but the model has {}", visit.layer, header.layers));
    }
    if visit.ids.len() != header.used || visit.weights.len() != header.used {
        let (ids, weights) = (visit.ids.len(), visit.weights.len());
        return Err(format!("{ids} ids and {weights} weights, expected {} of each", header.used));
    }
    for (i, id) in visit.ids.iter().enumerate() {
        if *id as usize >= header.experts {
            return Err(format!("expert {id}, but a layer has {}", header.experts));
        }
        if visit.ids[..i].contains(id) {
            return Err(format!("expert {id} twice in one layer"));
        }
    }
    Ok(())
}
