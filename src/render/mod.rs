//! How results look on a terminal: tables, sizes, bars. Results go to stdout, everything else to stderr.

pub mod progress;
pub mod table;
pub mod units;
