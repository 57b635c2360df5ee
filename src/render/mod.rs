//! How results look on a terminal: tables, sizes, bars. Results go to stdout, everything else to stderr.

pub(crate) mod download;
pub(crate) mod progress;
pub(crate) mod table;
pub(crate) mod units;
