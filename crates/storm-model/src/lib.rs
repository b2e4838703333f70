//! storm-model
