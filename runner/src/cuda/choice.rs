//! Which kernels are loaded, where there is a choice.

/// Which of the sources of compiled kernels to use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Origin {
    /// The first that is there.
    #[default]
    Any,
    /// The run-time compiler, without the cache.
    Compiler,
    /// The embedded PTX.
    Ptx,
}

impl Origin {
    /// Every choice with the name users type.
    pub const NAMES: [(&'static str, Self); 3] =
        [("any", Self::Any), ("nvrtc", Self::Compiler), ("ptx", Self::Ptx)];
}

/// Shared memory that a block may have on every chip: what compute capability 12.0 and 12.1 allow (CUDA C++ Programming
/// Guide, technical specifications per compute capability).
pub const PORTABLE_SHARED_BYTES: u32 = 99 << 10;

/// Which kernels to load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KernelChoice {
    /// Where they come from.
    pub origin: Origin,
    /// Whether only instructions are used that every chip has, and no more shared memory than [`PORTABLE_SHARED_BYTES`]: an
    /// H100 or H200 then runs what an RTX 50 or GB10 does.
    pub portable: bool,
}
