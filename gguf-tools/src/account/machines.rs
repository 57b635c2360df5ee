//! Machines by the rate at which they read memory: what bounds decoding when every weight is resident.

use serde::Serialize;

/// A machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Name in tables.
    pub name: String,
    /// Bytes read from memory a second.
    pub bandwidth: f64,
    /// Whether that is a measurement of reads; else the maker's figure, which nothing reaches.
    pub measured: bool,
    /// Bytes of the memory that holds the weights; `None` if it is not known.
    pub memory_bytes: Option<u64>,
}

/// The machines that ceilings are computed for.
///
/// Sources: GB10 and RTX 5080 by their makers' data sheets; 231 GB/s is the middle of published read tests on GB10 (227 to
/// 249); 4549 GB/s was measured on an H200 with a kernel that only reads.
pub fn known_machines() -> Vec<Machine> {
    let machine = |name: &str, gigabytes_a_second: f64, measured: bool, gigabytes: u64| Machine {
        name: name.to_owned(),
        bandwidth: gigabytes_a_second * 1e9,
        measured,
        memory_bytes: Some(gigabytes * 1_000_000_000),
    };
    vec![
        machine("GB10", 273.0, false, 128),
        machine("GB10", 231.0, true, 128),
        machine("RTX 5080", 960.0, false, 16),
        machine("H200", 4549.0, true, 141),
    ]
}

/// Most tokens a second that memory allows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ceiling {
    /// The machine.
    #[serde(flatten)]
    pub machine: Machine,
    /// Whether weights and caches fit its memory at the longest context; `None` if its memory is not known.
    pub fits: Option<bool>,
    /// Tokens a second at each context of the account, one sequence at a time.
    pub tokens_per_second: Vec<f64>,
}
