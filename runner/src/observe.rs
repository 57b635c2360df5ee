//! Named places in the forward pass where a caller may look on.

use std::fmt;

macro_rules! sites {
    ($( $(#[$doc:meta])* $variant:ident = $name:literal; )*) => {
        /// A named place in the forward pass. Widths in the model's terms: `D` hidden size, `M` streams, `H` heads.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Site { $( $(#[$doc])* $variant, )* }

        impl Site {
            /// Every site with its name.
            pub const NAMES: &[(&str, Site)] = &[$(($name, Site::$variant)),*];
        }
    };
}

sites! {
    /// Attention input before its norm: the streams merged by the hyper-connection, `[D]`.
    AttentionCollapsed = "attention collapsed";
    /// Attention input, `[D]`.
    AttentionInput = "attention input";
    /// Weights with which the attention output enters the streams, `[M]`.
    AttentionPost = "attention post weights";
    /// Mixing matrix of the streams around attention, `[M * M]`, `[old, new]`.
    AttentionComb = "attention stream mix";
    /// Low-rank query after its norm, `[q_lora_rank]`.
    QueryLora = "low-rank query";
    /// Key-value row after its norm, before rotation, `[head_dim]`.
    KeyValueNorm = "key-value row";
    /// Key-value row as it enters the window, `[head_dim]`.
    WindowRow = "window row";
    /// Indexer scores of all compressed rows so far; invisible ones are minus infinity.
    IndexScores = "index scores";
    /// Attention output of all heads after the inverse rotation, `[H * head_dim]`.
    HeadsOutput = "heads output";
    /// Grouped low-rank attention output, `[o_groups * o_lora_rank]`.
    OutputLora = "low-rank attention output";
    /// Attention output before it enters the streams, `[D]`.
    AttentionOutput = "attention output";
    /// FFN input before its norm, `[D]`.
    FfnCollapsed = "FFN collapsed";
    /// FFN input: what router, routed and shared experts read, `[D]`.
    FfnInput = "FFN input";
    /// Weights with which the FFN output enters the streams, `[M]`.
    FfnPost = "FFN post weights";
    /// Mixing matrix of the streams around the FFN, `[M * M]`, `[old, new]`.
    FfnComb = "FFN stream mix";
    /// Router logits, `[n_routed_experts]`.
    RouterLogits = "router logits";
    /// Input of a routed down projection, before the route weight, `[moe_intermediate_size]`.
    RoutedMid = "routed mid";
    /// Weighted sum of the routed experts, `[D]`.
    RoutedOutput = "routed output";
    /// Input of the shared expert's down projection, `[n_shared_experts * moe_intermediate_size]`.
    SharedMid = "shared mid";
    /// Output of the shared expert, `[D]`.
    SharedOutput = "shared output";
    /// FFN output before it enters the streams, `[D]`.
    FfnOutput = "FFN output";
    /// The residual streams behind a layer, `[M * D]`.
    Streams = "streams";
    /// The streams merged for the output, `[D]`.
    HeadCollapsed = "head collapsed";
    /// Input of the output matrix, `[D]`.
    FinalNorm = "final norm";
    /// Logits, `[vocab_size]`.
    Logits = "logits";
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, site)| site == self).map_or("", |(name, _)| name);
        f.pad(name)
    }
}

/// Which token a row belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenPlace {
    /// Index of the sequence in the batch.
    pub sequence: usize,
    /// Position in the sequence, from 0.
    pub position: usize,
    /// Token id.
    pub token: u32,
}

/// Rows seen at a site, one for each token of the batch (or part of it).
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// Where.
    pub site: Site,
    /// Layer; `None` behind the layers.
    pub layer: Option<usize>,
    /// The tokens, in order.
    pub tokens: &'a [TokenPlace],
    /// `[tokens, width]`.
    pub values: &'a [f32],
}

/// Which experts the router chose for each token.
#[derive(Debug, Clone, Copy)]
pub struct RouteObservation<'a> {
    /// Layer.
    pub layer: usize,
    /// The tokens, in order.
    pub tokens: &'a [TokenPlace],
    /// Experts of each token, `[tokens, num_experts_per_tok]`, in the router's order.
    pub experts: &'a [u32],
    /// Their weights, scaling factor included, same shape.
    pub weights: &'a [f32],
}

/// What one routed expert computed for the tokens that came to it.
#[derive(Debug, Clone, Copy)]
pub struct ExpertObservation<'a> {
    /// Layer.
    pub layer: usize,
    /// The expert.
    pub expert: usize,
    /// Rows of [`RouteObservation::tokens`] that came to it, ascending.
    pub rows: &'a [usize],
    /// Route weight of each.
    pub weights: &'a [f32],
    /// Input of the gate and up projections, `[rows, D]`.
    pub inputs: &'a [f32],
    /// Input of the down projection **before** the route weight, `[rows, moe_intermediate_size]`.
    pub mids: &'a [f32],
}

/// Compressed rows that the indexer chose for each token of a part of the batch.
#[derive(Debug, Clone, Copy)]
pub struct IndexObservation<'a> {
    /// Layer.
    pub layer: usize,
    /// The tokens, in order.
    pub tokens: &'a [TokenPlace],
    /// Chosen rows of each token, ascending.
    pub chosen: &'a [Vec<u32>],
}

/// Looks on at the sites it asks for. Methods are called from one thread, in the order of the forward pass.
///
/// Tokens of one sequence come in ascending order at each site, whatever the batch, so sums that an observer
/// forms token by token do not depend on how prompts were batched.
pub trait Observer: Send {
    /// Whether [`Observer::rows`] (or the method of its own) is to be called for `site` of `layer`.
    fn wants(&self, site: Site, layer: Option<usize>) -> bool;

    /// Rows of activations at a site.
    fn rows(&mut self, observation: Observation<'_>) {
        let _ = observation;
    }

    /// The router's choice, if [`Site::RouterLogits`] is wanted.
    fn routes(&mut self, observation: RouteObservation<'_>) {
        let _ = observation;
    }

    /// One routed expert, if [`Site::RoutedMid`] is wanted; experts ascending.
    fn expert(&mut self, observation: ExpertObservation<'_>) {
        let _ = observation;
    }

    /// The indexer's choice, if [`Site::IndexScores`] is wanted.
    fn index(&mut self, observation: IndexObservation<'_>) {
        let _ = observation;
    }
}

/// Sees nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn wants(&self, _: Site, _: Option<usize>) -> bool {
        false
    }
}
