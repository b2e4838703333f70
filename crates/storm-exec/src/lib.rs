//! storm-exec
