//! The places in a layer that a direction can belong to.

use runner::observe::Site;
use serde::Serialize;

/// A row of the hidden width in each layer. The first two are where steering acts; the others can be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Component {
    /// What the FFN, shared expert included, writes into the residual streams.
    FfnOut,
    /// What attention writes into the residual streams.
    AttnOut,
    /// What router and experts read.
    FfnIn,
    /// What attention reads.
    AttnIn,
    /// The weighted sum of the routed experts.
    RoutedOut,
    /// What the shared expert writes.
    SharedOut,
}

impl Component {
    /// Every component with the name that users type and files store.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("ffn_out", Self::FfnOut),
        ("attn_out", Self::AttnOut),
        ("ffn_in", Self::FfnIn),
        ("attn_in", Self::AttnIn),
        ("routed_out", Self::RoutedOut),
        ("shared_out", Self::SharedOut),
    ];

    /// The name that users type and files store.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    /// The component of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, component)| component)
    }

    /// Whether the runner can take a direction out here.
    pub fn can_be_steered(self) -> bool {
        matches!(self, Self::FfnOut | Self::AttnOut)
    }

    /// The hook name of GLP files (GGUF layer projection), for the places where steering acts.
    pub(crate) fn hook(self) -> Option<&'static str> {
        match self {
            Self::FfnOut => Some("ffn_out_pre_residual"),
            Self::AttnOut => Some("attn_out_pre_residual"),
            _ => None,
        }
    }

    /// The component of a GLP hook.
    pub(crate) fn from_hook(hook: &str) -> Option<Self> {
        [Self::FfnOut, Self::AttnOut].into_iter().find(|component| component.hook() == Some(hook))
    }

    /// Where the forward pass shows it.
    pub(crate) fn site(self) -> Site {
        match self {
            Self::FfnOut => Site::FfnOutput,
            Self::AttnOut => Site::AttentionOutput,
            Self::FfnIn => Site::FfnInput,
            Self::AttnIn => Site::AttentionInput,
            Self::RoutedOut => Site::RoutedOutput,
            Self::SharedOut => Site::SharedOutput,
        }
    }
}
