//! The GGUF container: reading (memory-mapped, headers only until data is asked for, split sets opened by
//! any shard) and laying out for writing.
//!
//! Format: GGUF versions 2 and 3, little-endian. Shapes are outermost first everywhere but in the file itself.

mod error;
mod header;
mod layout;
mod magic;
mod map;
mod read;
mod regions;
mod residency;
mod split;
mod value;

pub use error::{GgufError, RegionProblem};
pub use header::{Header, HeaderTensor, parse_header, read_header};
pub use layout::{Layout, NewTensor, PlacedTensor};
pub use read::{Gguf, ShardInfo, TensorInfo};
pub use split::SplitPlace;
pub(crate) use split::shard_paths;
pub use value::{Array, Metadata, Value};

/// First four bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Key by which the shards of one build know each other: another plan makes other tensors under the same names.
pub const PART_PLAN_KEY: &str = "ggsmith.part.plan";

/// Alignment of tensor data where `general.alignment` is absent.
pub const DEFAULT_ALIGNMENT: u32 = 32;

/// Allowed alignments: powers of two in this range.
pub const ALIGNMENTS: std::ops::RangeInclusive<u32> = 8..=65536;

/// Most dimensions that a tensor may have.
pub const MAX_DIMENSIONS: u32 = 4;

/// Longest header that is read. Real ones take 5 to 20 MB; the bound keeps the memory that a hostile header can make
/// a reader take to a small multiple of it, however large the file is.
pub const MAX_HEADER_BYTES: usize = 256 << 20;
