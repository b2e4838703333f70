//! Addresses in the work area.

use crate::schedule::Home;
use storm_plan::{Lifetime, pack};

/// Offsets of the work values, and the size of the area.
pub(crate) struct WorkLayout {
    /// By value; unused for slots.
    pub(crate) offsets: Vec<usize>,
    pub(crate) size_bytes: usize,
}

/// Packs the values of a schedule's work area by their lifetimes.
pub(crate) fn lay_out(values: &[Home]) -> WorkLayout {
    let mut indices = Vec::new();
    let mut lifetimes = Vec::new();
    for (index, value) in values.iter().enumerate() {
        if let Home::Work { size_bytes, made, last_read } = *value {
            indices.push(index);
            lifetimes.push(Lifetime { size_bytes, made, last_use: last_read });
        }
    }
    let packing = pack(&lifetimes);
    let mut offsets = vec![0; values.len()];
    for (index, offset) in indices.into_iter().zip(packing.offsets) {
        offsets[index] = offset;
    }
    WorkLayout { offsets, size_bytes: packing.size_bytes }
}
