//! Importance matrix files and their coverage.
