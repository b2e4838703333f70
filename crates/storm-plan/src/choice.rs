//! Decisions in few numbers, for a search: layers are treated alike except for where they stand.

use crate::lower::Lowering;
use crate::{Decisions, Storage, Streaming, UpdateTime};

/// Which saved units are at hand in the backward pass, and what making the others again costs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Saving {
    /// One per unit.
    pub(crate) mask: Vec<bool>,
    /// Of the units at hand, in one layer and micro-batch.
    pub(crate) bytes: usize,
    /// Of what is made again, in one layer and micro-batch.
    pub(crate) again_seconds: f64,
}

/// A point of the search space.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Choice {
    pub(crate) group: usize,
    /// The last `kept.1` layers keep the units of saving `kept.0`.
    pub(crate) kept: (usize, usize),
    /// The `offloaded.1` layers before those offload the units of saving `offloaded.0`.
    pub(crate) offloaded: (usize, usize),
    /// The last layers that keep their input.
    pub(crate) inputs_kept: usize,
    /// The other layers: every n-th offloads (or keeps) its input, those between run again.
    pub(crate) inputs_every: usize,
    /// Whether inputs that are stored, and not among the last ones, stay on the device as well.
    pub(crate) inputs_resident: bool,
    pub(crate) weights: Streaming,
    pub(crate) gradients: Streaming,
    pub(crate) states: Streaming,
    pub(crate) edge_states_resident: bool,
    pub(crate) update: UpdateTime,
    pub(crate) activation_ring: usize,
    pub(crate) boundary_ring: usize,
    pub(crate) piece_elements: usize,
}

impl Choice {
    pub(crate) fn decisions(&self, lowering: &Lowering<'_>, savings: &[Saving]) -> Decisions {
        let layers = lowering.task.layer_count();
        let units = lowering.units.len();
        let kept_from = layers - self.kept.1.min(layers);
        let offloaded_from = kept_from - self.offloaded.1.min(kept_from);
        let mut saved = vec![vec![Storage::Recompute; units]; layers];
        for (layer, saved) in saved.iter_mut().enumerate() {
            let (saving, storage) = if layer >= kept_from {
                (self.kept.0, Storage::Keep)
            } else if layer >= offloaded_from {
                (self.offloaded.0, Storage::Offload)
            } else {
                continue;
            };
            for (unit, &at_hand) in savings[saving].mask.iter().enumerate() {
                if at_hand {
                    saved[unit] = storage;
                }
            }
        }
        let inputs_kept_from = layers - self.inputs_kept.min(layers);
        let boundary = (0..layers)
            .map(|layer| {
                if layer >= inputs_kept_from {
                    Storage::Keep
                } else if !layer.is_multiple_of(self.inputs_every.max(1)) {
                    Storage::Recompute
                } else if self.inputs_resident {
                    Storage::Keep
                } else {
                    Storage::Offload
                }
            })
            .collect();
        Decisions {
            group: self.group,
            saved,
            boundary,
            weights: self.weights,
            gradients: self.gradients,
            states: self.states,
            edge_states_resident: self.edge_states_resident,
            update: self.update,
            activation_ring: self.activation_ring,
            boundary_ring: self.boundary_ring,
            piece_elements: self.piece_elements,
        }
    }
}

/// All choices of units to have at hand that no other beats in both bytes and time, fewest bytes
/// first. The first has nothing at hand; the last needs nothing made again.
pub(crate) fn savings(lowering: &Lowering<'_>) -> Vec<Saving> {
    let units = &lowering.units;
    // Few units matter; with many, the smallest are always made again or at hand with the rest.
    let mut by_size: Vec<usize> = (0..units.len()).collect();
    by_size.sort_by_key(|&unit| std::cmp::Reverse(units[unit].size_bytes));
    let choosable = &by_size[..units.len().min(8)];
    let mut all = Vec::new();
    for bits in 0..1usize << choosable.len() {
        let mut mask = vec![false; units.len()];
        for (bit, &unit) in choosable.iter().enumerate() {
            mask[unit] = bits >> bit & 1 == 1;
        }
        all.push(saving(lowering, mask));
    }
    all.push(saving(lowering, vec![true; units.len()]));
    all.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.again_seconds.total_cmp(&b.again_seconds)));
    let mut best: Vec<Saving> = Vec::new();
    for saving in all {
        // Worth its bytes only if it saves a measurable share.
        let beaten = best
            .last()
            .is_some_and(|known| saving.again_seconds >= known.again_seconds * 0.999 - 1e-12);
        if !beaten {
            best.push(saving);
        }
    }
    best
}

fn saving(lowering: &Lowering<'_>, mask: Vec<bool>) -> Saving {
    let at_hand = lowering.units.iter().zip(&mask).filter(|&(_, &at_hand)| at_hand);
    let bytes = at_hand.map(|(unit, _)| unit.size_bytes).sum();
    Saving { again_seconds: lowering.again_seconds(&mask), bytes, mask }
}
