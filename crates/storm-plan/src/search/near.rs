//! Neighbors: choices that are one move apart.

use super::Search;
use crate::choice::{ActivationChoice, Choice, FirstGroup, StageChoice};
use crate::decisions::{RingMemory, SeamMemory};
use crate::{Streaming, UpdateTime};

/// Counts of blocks near another.
fn around(count: usize, blocks: usize) -> Vec<usize> {
    let steps = [1, 2, 4, 8];
    let more = steps.iter().map(|step| (count + step).min(blocks));
    let fewer = steps.iter().map(|step| count.saturating_sub(*step));
    let mut all: Vec<usize> = more.chain(fewer).collect();
    all.sort_unstable();
    all.dedup();
    all
}

impl Search<'_> {
    /// Choices that differ in one respect.
    pub(super) fn neighbours(&self, center: &Choice) -> Vec<Choice> {
        let mut near = Vec::new();
        for stage in self.stages() {
            self.stage_neighbours(center, stage, &mut near);
        }
        self.first_neighbours(center, &mut near);
        let mut add = |change: &dyn Fn(&mut Choice)| {
            let mut choice = center.clone();
            change(&mut choice);
            if choice != *center {
                near.push(choice);
            }
        };
        for rings in [RingMemory::Separate, RingMemory::Shared] {
            add(&|choice| choice.rings = rings);
        }
        // Stages that run once change together: half of such a move may gain nothing.
        let blocks: Vec<usize> = self.stages().map(|stage| self.blocks(stage)).collect();
        let edges = |choice: &mut Choice, change: &dyn Fn(&mut StageChoice)| {
            for (chosen, &blocks) in choice.stages.iter_mut().zip(&blocks) {
                if blocks == 1 {
                    change(chosen);
                }
            }
        };
        for pinned in [0, 1] {
            let streaming = Streaming { pinned, ring: 1 - pinned };
            add(&|choice| edges(choice, &|chosen| chosen.states = pinned));
            add(&|choice| edges(choice, &|chosen| chosen.gradients = streaming));
            add(&|choice| edges(choice, &|chosen| chosen.weights = streaming));
        }
        for seams in [SeamMemory::Separate, SeamMemory::Shared] {
            add(&|choice| choice.seams = seams);
        }
        for ring in [3, 4, 6, 8, 12, 16] {
            add(&|choice| choice.state_ring = ring);
        }
        for ring in [1, 2, 3, 4] {
            add(&|choice| choice.activation_ring = ring);
            add(&|choice| choice.input_ring = ring);
        }
        for group in self.groups() {
            add(&|choice| choice.group = group);
        }
        for choice in &mut near {
            self.set_update(choice);
        }
        near.extend(self.with_other_updates(center));
        near.retain(|choice| self.obeys(choice));
        near = self.different(near);
        near.retain(|choice| choice != center);
        near
    }

    /// Choices whose first group differs.
    fn first_neighbours(&self, center: &Choice, near: &mut Vec<Choice>) {
        let Some(first) = &center.first else {
            if center.update == UpdateTime::NextStep {
                near.extend(self.first_groups(center));
            }
            return;
        };
        near.push(Choice { first: None, ..center.clone() });
        let mut add = |group: usize, stages: Vec<ActivationChoice>| {
            let first = Some(FirstGroup { group, stages });
            near.push(Choice { first, ..center.clone() });
        };
        for size in self.first_sizes(center.group) {
            add(size, first.stages.clone());
        }
        for stage in self.stages() {
            for chosen in self.activation_neighbours(stage, &first.stages[stage]) {
                let mut stages = first.stages.clone();
                stages[stage] = chosen;
                add(first.group, stages);
            }
        }
    }

    /// Choices that differ in one respect of one stage.
    fn stage_neighbours(&self, center: &Choice, stage: usize, near: &mut Vec<Choice>) {
        let blocks = self.blocks(stage);
        let chosen = &center.stages[stage];
        let mut add = |change: &dyn Fn(&mut StageChoice)| {
            let mut choice = center.clone();
            change(&mut choice.stages[stage]);
            if choice != *center {
                near.push(choice);
            }
        };
        let around = |count: usize| around(count, blocks);
        for activations in self.activation_neighbours(stage, &chosen.activations) {
            add(&|chosen| chosen.activations = activations);
        }
        let classes: [fn(&mut StageChoice) -> &mut Streaming; 2] =
            [|chosen| &mut chosen.weights, |chosen| &mut chosen.gradients];
        for class in classes {
            let current = *class(&mut chosen.clone());
            for pinned in around(current.pinned) {
                add(&|chosen| {
                    let class = class(chosen);
                    class.pinned = pinned;
                    class.ring = if pinned == blocks { 0 } else { class.ring.max(2.min(blocks)) };
                });
            }
            for ring in [2, 3, 4] {
                add(&|chosen| {
                    let class = class(chosen);
                    class.ring = if class.pinned == blocks { 0 } else { ring.min(blocks) };
                });
            }
        }
        for pinned in around(chosen.states) {
            add(&|chosen| chosen.states = pinned);
        }
    }

    /// Ways to treat the activations of a stage that differ in one respect.
    fn activation_neighbours(
        &self,
        stage: usize,
        center: &ActivationChoice,
    ) -> Vec<ActivationChoice> {
        let blocks = self.blocks(stage);
        let mut near = Vec::new();
        let mut add = |change: &dyn Fn(&mut ActivationChoice)| {
            let mut chosen = *center;
            change(&mut chosen);
            if chosen != *center {
                near.push(chosen);
            }
        };
        let around = |count: usize| around(count, blocks);
        let chosen = center;
        if !self.lowering.units[stage].is_empty() {
            for saving in 0..self.savings[stage].len() {
                add(&|chosen| chosen.kept.0 = saving);
                add(&|chosen| chosen.offloaded.0 = saving);
                if chosen.kept.1 == 0 {
                    add(&|chosen| chosen.kept = (saving, 2.min(blocks)));
                }
                if chosen.offloaded.1 == 0 {
                    add(&|chosen| chosen.offloaded = (saving, blocks / 2));
                }
            }
            add(&|chosen| chosen.offloads_beside = !chosen.offloads_beside);
            // All blocks at once: a single block that recomputes more than the others determines the
            // size of the work area.
            for saving in 1..self.savings[stage].len() {
                for beside in [false, true] {
                    add(&|chosen| {
                        chosen.offloaded = (saving, blocks);
                        chosen.offloads_beside = beside;
                    });
                }
            }
            for count in around(chosen.kept.1) {
                add(&|chosen| chosen.kept.1 = count);
                add(&|chosen| chosen.inputs_kept = count);
                // What is kept may be offloaded instead, and the reverse.
                add(&|chosen| {
                    chosen.kept.1 = count;
                    chosen.offloaded = (chosen.kept.0, blocks);
                });
            }
            for count in around(chosen.offloaded.1) {
                add(&|chosen| chosen.offloaded.1 = count);
            }
        }
        if self.lowering.sizes(stage).input > 0 && stage + 1 < self.stages().end {
            for count in around(chosen.inputs_kept) {
                add(&|chosen| chosen.inputs_kept = count);
            }
            add(&|chosen| chosen.inputs_resident = !chosen.inputs_resident);
            if chosen.inputs_every != 1 && self.forced.checkpoint_every.is_none() {
                add(&|chosen| chosen.inputs_every = 1);
            }
        }
        near
    }
}
