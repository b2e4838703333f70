//! Decisions in a compact form for the search: the blocks of a stage differ only by their position.

use crate::decisions::{
    ActivationDecisions, GroupDecisions, RingMemory, SeamMemory, StageDecisions,
};
use crate::lower::Lowering;
use crate::{Decisions, Storage, Streaming, UpdateTime};
use smallvec::smallvec;

/// Which saved units of a stage are available in the backward pass, and what recomputing the others costs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Saving {
    /// One per unit.
    pub(crate) mask: Vec<bool>,
    /// Bytes of the available units, in one block and micro-batch.
    pub(crate) bytes: usize,
    /// Seconds of recomputation, in one block and micro-batch.
    pub(crate) recompute_seconds: f64,
}

/// Initial ring depths.
pub(crate) const STATE_RING: usize = 6;
pub(crate) const ACTIVATION_RING: usize = 2;
pub(crate) const INPUT_RING: usize = 2;

/// A point of the search space.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Choice {
    /// Micro-batches in a group.
    pub(crate) group: usize,
    /// The first group of a step, if it differs from the others.
    pub(crate) first: Option<FirstGroup>,
    /// One for each stage.
    pub(crate) stages: Vec<StageChoice>,
    pub(crate) rings: RingMemory,
    pub(crate) update: UpdateTime,
    pub(crate) state_ring: usize,
    pub(crate) activation_ring: usize,
    pub(crate) input_ring: usize,
    pub(crate) seams: SeamMemory,
    pub(crate) piece_elements: usize,
    pub(crate) disk: DiskChoice,
}

/// How much of the streamed optimizer state and frozen weights is on disk. A search uses one fixed value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct DiskChoice {
    /// In units of 1/[`DiskChoice::SHARES`] of one kind of state, one kind after another: once all second moments are
    /// on disk, first moments follow.
    pub(crate) share: usize,
    /// Slots of pinned memory for staging state.
    pub(crate) ring: usize,
    /// Fraction of the frozen weights, in units of 1/[`DiskChoice::SHARES`].
    pub(crate) frozen_share: usize,
    /// Slots of pinned memory for staging frozen weights.
    pub(crate) frozen_ring: usize,
}

impl DiskChoice {
    /// Units per kind of state.
    pub(crate) const SHARES: usize = 16;

    /// By block: how many kinds of its state are on disk, spread evenly over the blocks whose state is streamed.
    fn decisions(self, blocks: usize, pinned: usize) -> Vec<usize> {
        if self.share == 0 {
            return Vec::new();
        }
        let streamed = blocks.saturating_sub(pinned);
        let (all, more) = (self.share / Self::SHARES, self.share % Self::SHARES);
        let of_block = |index: usize| match index.checked_sub(pinned) {
            None => 0,
            Some(index) => all + usize::from(is_of_share(more, index, streamed)),
        };
        (0..blocks).map(of_block).collect()
    }

    /// By block: whether its frozen weights are on disk, spread evenly over the blocks whose weights are streamed.
    fn frozen_decisions(self, blocks: usize, pinned: usize) -> Vec<bool> {
        if self.frozen_share == 0 {
            return Vec::new();
        }
        let streamed = blocks.saturating_sub(pinned);
        let is_there = |index: usize| {
            let beyond = index.checked_sub(pinned);
            beyond.is_some_and(|index| is_of_share(self.frozen_share, index, streamed))
        };
        (0..blocks).map(is_there).collect()
    }

    /// How many blocks' frozen weights are on disk.
    pub(crate) fn frozen_blocks(self, blocks: usize, pinned: usize) -> usize {
        (blocks.saturating_sub(pinned) * self.frozen_share).div_ceil(Self::SHARES)
    }
}

/// Whether a block is part of a share, in units of 1/[`DiskChoice::SHARES`], spread evenly over the blocks.
fn is_of_share(share: usize, index: usize, blocks: usize) -> bool {
    let count = (blocks * share).div_ceil(DiskChoice::SHARES);
    (index + 1) * count / blocks > index * count / blocks
}

/// A first group of a different size. A larger one gives the copies of a deferred update more time; smaller
/// groups after it leave each micro-batch more memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FirstGroup {
    pub(crate) group: usize,
    /// One for each stage.
    pub(crate) stages: Vec<ActivationChoice>,
}

/// The choice for the blocks of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StageChoice {
    pub(crate) activations: ActivationChoice,
    pub(crate) weights: Streaming,
    pub(crate) gradients: Streaming,
    /// Blocks whose optimizer state stays on the device.
    pub(crate) states: usize,
}

/// The choice for the activations of a stage's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ActivationChoice {
    /// The last `kept.1` blocks keep the units of saving `kept.0`.
    pub(crate) kept: (usize, usize),
    /// The `offloaded.1` blocks before those offload the units of saving `offloaded.0`.
    pub(crate) offloaded: (usize, usize),
    /// Whether blocks that keep some units offload those of `offloaded.0` that they do not keep.
    pub(crate) offloads_beside: bool,
    /// The last blocks that keep their input.
    pub(crate) inputs_kept: usize,
    /// For the other blocks: every n-th stores its input, and those between are rerun.
    pub(crate) inputs_every: usize,
    /// Whether stored inputs outside the last `inputs_kept` blocks also stay on the device.
    pub(crate) inputs_resident: bool,
}

impl ActivationChoice {
    fn decisions(&self, blocks: usize, units: usize, savings: &[Saving]) -> ActivationDecisions {
        let kept_from = blocks - self.kept.1.min(blocks);
        let offloaded_from = kept_from - self.offloaded.1.min(kept_from);
        let mut saved = vec![smallvec![Storage::Recompute; units]; blocks];
        for (block, saved) in saved.iter_mut().enumerate() {
            let keeps = block >= kept_from;
            let offloads = match keeps {
                true => self.offloads_beside,
                false => block >= offloaded_from,
            };
            for (unit, storage) in saved.iter_mut().enumerate() {
                if keeps && savings[self.kept.0].mask[unit] {
                    *storage = Storage::Keep;
                } else if offloads && savings[self.offloaded.0].mask[unit] {
                    *storage = Storage::Offload;
                }
            }
        }
        let inputs_kept_from = blocks - self.inputs_kept.min(blocks);
        let inputs = (0..blocks)
            .map(|block| {
                if block >= inputs_kept_from {
                    Storage::Keep
                } else if !block.is_multiple_of(self.inputs_every.max(1)) {
                    Storage::Recompute
                } else if self.inputs_resident {
                    Storage::Keep
                } else {
                    Storage::Offload
                }
            })
            .collect();
        ActivationDecisions { saved, inputs }
    }

    /// Units available in blocks that keep some.
    pub(crate) fn mask_of_kept(&self, savings: &[Saving]) -> Vec<bool> {
        let kept = &savings[self.kept.0].mask;
        let beside = &savings[self.offloaded.0].mask;
        let both = kept.iter().zip(beside).map(|(&k, &o)| k || (self.offloads_beside && o));
        both.collect()
    }

    /// The same decisions in canonical form.
    fn normalize(&mut self, blocks: usize) {
        self.kept.1 = self.kept.1.min(blocks);
        if self.kept.0 == 0 || self.kept.1 == 0 {
            self.kept = (0, 0);
            self.offloads_beside = false;
        }
        self.offloaded.1 = self.offloaded.1.min(blocks - self.kept.1);
        if self.offloaded.0 == 0 || (self.offloaded.1 == 0 && !self.offloads_beside) {
            self.offloaded = (0, 0);
            self.offloads_beside = false;
        }
        self.inputs_kept = self.inputs_kept.min(blocks);
        if self.inputs_resident && self.inputs_every == 1 {
            self.inputs_kept = 0;
        }
    }
}

impl Choice {
    /// The same decisions in canonical form: whatever has no effect is reset, so equal choices compare
    /// equal.
    pub(crate) fn normalized(mut self, repeats: &[usize]) -> Choice {
        let mut streams_state = false;
        for (chosen, &blocks) in self.stages.iter_mut().zip(repeats) {
            chosen.activations.normalize(blocks);
            streams_state |= chosen.states < blocks || chosen.gradients.pinned < blocks;
        }
        if let Some(first) = &mut self.first {
            for (chosen, &blocks) in first.stages.iter_mut().zip(repeats) {
                chosen.normalize(blocks);
            }
            let usual = self.stages.iter().map(|chosen| &chosen.activations);
            if first.group == self.group && first.stages.iter().eq(usual) {
                self.first = None;
            }
        }
        let any = |test: fn(&ActivationChoice) -> bool| {
            let first = self.first.iter().flat_map(|first| &first.stages);
            self.stages.iter().map(|chosen| &chosen.activations).chain(first).any(test)
        };
        let offloads = any(|chosen| chosen.offloaded.0 > 0);
        let offloads_inputs = any(|chosen| !chosen.inputs_resident);
        let mut groups = self.first.iter().map(|first| first.group).chain([self.group]);
        if !groups.any(|group| group == 1) {
            self.seams = SeamMemory::Separate;
        }
        self.state_ring = if streams_state { self.state_ring } else { STATE_RING };
        self.activation_ring = if offloads { self.activation_ring } else { ACTIVATION_RING };
        self.input_ring = if offloads_inputs { self.input_ring } else { INPUT_RING };
        self
    }

    /// Whether the same parameters, gradients and state stay on the device.
    pub(crate) fn places_alike(&self, other: &Choice) -> bool {
        let pinned =
            |chosen: &StageChoice| (chosen.weights.pinned, chosen.gradients.pinned, chosen.states);
        self.stages.iter().map(pinned).eq(other.stages.iter().map(pinned))
    }

    /// Micro-batches in a group, and in the first one if it differs.
    pub(crate) fn group_sizes(&self) -> (usize, Option<usize>) {
        (self.group, self.first.as_ref().map(|first| first.group))
    }

    /// Whether both divide a step into the same groups.
    pub(crate) fn groups_alike(&self, other: &Choice) -> bool {
        self.group_sizes() == other.group_sizes()
    }

    /// Whether both agree in groups and in placement.
    pub(crate) fn is_of_a_kind_with(&self, other: &Choice) -> bool {
        self.groups_alike(other) && self.places_alike(other)
    }

    /// Activations of the groups after the first.
    pub(crate) fn usual_activations(&self) -> Vec<ActivationChoice> {
        self.stages.iter().map(|chosen| chosen.activations).collect()
    }

    /// How many groups of a lane follow the first.
    pub(crate) fn groups_after_first(&self, micro_batches: usize) -> usize {
        let first = self.first.as_ref().map_or(self.group, |first| first.group);
        micro_batches.saturating_sub(first) / self.group.max(1)
    }

    pub(crate) fn decisions(&self, lowering: &Lowering<'_>, savings: &[Vec<Saving>]) -> Decisions {
        let program = lowering.task.program();
        let group = |micro_batches: usize, times: usize, chosen: &[ActivationChoice]| {
            let stages = chosen.iter().zip(program.stages()).enumerate();
            let stages = stages.map(|(stage, (chosen, s))| {
                chosen.decisions(s.repeat, lowering.units[stage].len(), &savings[stage])
            });
            GroupDecisions {
                micro_batches,
                times,
                stages: stages.collect(),
                activation_ring: self.activation_ring,
                input_ring: self.input_ring,
                // Of one micro-batch at a time.
                seams: if micro_batches == 1 { self.seams } else { SeamMemory::Separate },
            }
        };
        let micro_batches = lowering.task.lane_micro_batches();
        let usual = self.usual_activations();
        let groups = match &self.first {
            None => {
                let times = micro_batches / self.group.max(1);
                vec![group(self.group, times, &usual)]
            }
            Some(first) => {
                let mut groups = vec![group(first.group, 1, &first.stages)];
                match self.groups_after_first(micro_batches) {
                    0 => {}
                    times => groups.push(group(self.group, times, &usual)),
                }
                groups
            }
        };
        let stages = self.stages.iter().zip(program.stages()).map(|(chosen, s)| StageDecisions {
            weights: chosen.weights,
            gradients: chosen.gradients,
            states_pinned: chosen.states,
            on_disk: self.disk.decisions(s.repeat, chosen.states),
            frozen_on_disk: self.disk.frozen_decisions(s.repeat, chosen.weights.pinned),
        });
        Decisions {
            groups,
            stages: stages.collect(),
            rings: self.rings,
            update: self.update,
            state_ring: self.state_ring,
            disk_ring: self.disk.ring,
            frozen_ring: self.disk.frozen_ring,
            piece_elements: self.piece_elements,
        }
    }
}

/// By stage, the Pareto-optimal sets of units to have available, by bytes and time, fewest bytes first. The
/// first set is empty; with the last, nothing is recomputed.
pub(crate) fn savings(lowering: &Lowering<'_>) -> Vec<Vec<Saving>> {
    (0..lowering.units.len()).map(|stage| savings_of(lowering, stage)).collect()
}

fn savings_of(lowering: &Lowering<'_>, stage: usize) -> Vec<Saving> {
    let units = &lowering.units[stage];
    // Only a few units matter. If there are many, the smallest are recomputed unless all units are
    // available.
    let mut by_size: Vec<usize> = (0..units.len()).collect();
    by_size.sort_by_key(|&unit| std::cmp::Reverse(units[unit].size_bytes));
    let choosable = &by_size[..units.len().min(8)];
    let mut all = Vec::new();
    for bits in 0..1usize << choosable.len() {
        let mut mask = vec![false; units.len()];
        for (bit, &unit) in choosable.iter().enumerate() {
            mask[unit] = bits >> bit & 1 == 1;
        }
        all.push(saving(lowering, stage, mask));
    }
    all.push(saving(lowering, stage, vec![true; units.len()]));
    let time = |saving: &Saving| saving.recompute_seconds;
    all.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(time(a).total_cmp(&time(b))));
    let mut best: Vec<Saving> = Vec::new();
    for saving in all {
        // Worth its bytes only if it saves a measurable share.
        let is_beaten =
            best.last().is_some_and(|known| time(&saving) >= time(known) * 0.999 - 1e-12);
        if !is_beaten {
            best.push(saving);
        }
    }
    best
}

fn saving(lowering: &Lowering<'_>, stage: usize, mask: Vec<bool>) -> Saving {
    let at_hand = lowering.units[stage].iter().zip(&mask).filter(|&(_, &at_hand)| at_hand);
    let bytes = at_hand.map(|(unit, _)| unit.size_bytes).sum();
    Saving { recompute_seconds: lowering.recompute_seconds(stage, &mask), bytes, mask }
}
