//! storm-device
