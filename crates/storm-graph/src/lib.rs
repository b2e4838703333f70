//! storm-graph
