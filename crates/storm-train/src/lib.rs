//! storm-train
