//! Containers, block formats, quantizers, plans and builds for GGUF files of DeepSeek V4.
//!
//! Data flows one way and the types show it: [`checkpoint::Checkpoint`] (headers only) ->
//! [`plan::Plan`] (every tensor, type, offset and the final size; no data read) ->
//! [`build`] (streams, resumes) -> [`gguf::Gguf`].

pub mod account;
pub mod block;
pub mod build;
pub mod checkpoint;
pub mod compare;
pub mod diff;
pub mod feedback;
pub mod gguf;
pub mod importance;
pub mod inspect;
pub mod model;
pub mod plan;
pub mod plot;
pub mod progress;
pub mod quantize;
pub mod rewrite;
pub mod simd;
pub mod source;
pub mod synth;
pub mod verify;
pub mod weight_energy;
