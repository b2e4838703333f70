//! Where the search starts: ways to place parameters, each with ways to treat activations.

use super::{Activations, GROUP_MAX, Search, by_estimate};
use crate::choice::{
    ACTIVATION_RING, ActivationChoice, Choice, FirstGroup, INPUT_RING, STATE_RING, Saving,
    StageChoice,
};
use crate::decisions::{RingMemory, SeamMemory};
use crate::estimate::Estimator;
use crate::queue::Link;
use crate::request::Placement;
use crate::tier::Tier;
use crate::{Streaming, UpdateTime};
use rayon::prelude::*;

/// How many of each placement and group size continue: those with the fastest estimate.
const OF_EACH_BASE: usize = 6;

/// Sizes of the first group to try, in multiples of the others.
const FIRST_GROUPS: [usize; 3] = [2, 3, 4];

/// What stays on the device of the stages that run once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Edges {
    Resident,
    /// Everything but their optimizer state stays.
    StateStreamed,
    Streamed,
}

impl Search<'_> {
    /// Where parameters, gradients and state may live, from all resident to all streamed.
    pub(super) fn bases(&self) -> Vec<Choice> {
        use Placement::{Resident, Streamed};
        let mut bases = Vec::new();
        // Weights, gradients and state of repeated stages. Of the other stages either everything but the
        // state stays, or nothing does and rings share memory.
        for (weights, gradients, states, edges) in [
            (Resident, Resident, Resident, Edges::Resident),
            (Resident, Resident, Streamed, Edges::Resident),
            (Resident, Resident, Streamed, Edges::StateStreamed),
            (Resident, Streamed, Resident, Edges::Resident),
            (Resident, Streamed, Streamed, Edges::StateStreamed),
            (Streamed, Resident, Resident, Edges::Resident),
            (Streamed, Resident, Streamed, Edges::StateStreamed),
            (Streamed, Streamed, Resident, Edges::Resident),
            (Streamed, Streamed, Streamed, Edges::Resident),
            (Streamed, Streamed, Streamed, Edges::StateStreamed),
            (Resident, Resident, Streamed, Edges::Streamed),
            (Resident, Streamed, Streamed, Edges::Streamed),
            (Streamed, Streamed, Streamed, Edges::Streamed),
        ] {
            let weights = self.forced.weights.unwrap_or(weights);
            let gradients = self.forced.gradients.unwrap_or(gradients);
            let states = self.forced.states.unwrap_or(states);
            let stage = |stage: usize| {
                let blocks = self.blocks(stage);
                let class = |placement: Placement| match placement {
                    Resident => Streaming::resident(blocks),
                    Streamed => Streaming { pinned: 0, ring: 2.min(blocks) },
                };
                let repeats = blocks > 1;
                let forced = |wanted: Option<Placement>| wanted == Some(Resident);
                let edge = |streams: bool, wanted: Option<Placement>| match streams {
                    true if !forced(wanted) => Streamed,
                    _ => Resident,
                };
                let all = edges == Edges::Streamed;
                let (weights, gradients, states) = match repeats {
                    true => (weights, gradients, states),
                    false => (
                        edge(all, self.forced.weights),
                        edge(all, self.forced.gradients),
                        edge(edges != Edges::Resident, self.forced.states),
                    ),
                };
                StageChoice {
                    activations: ActivationChoice {
                        kept: (0, 0),
                        offloaded: (0, 0),
                        offloads_beside: false,
                        inputs_kept: 0,
                        inputs_every: match repeats {
                            true => self.forced.checkpoint_every.unwrap_or(1),
                            false => 1,
                        },
                        inputs_resident: true,
                    },
                    weights: class(weights),
                    gradients: class(gradients),
                    states: if states == Resident { blocks } else { 0 },
                }
            };
            let mut base = Choice {
                group: 1,
                first: None,
                stages: self.stages().map(stage).collect(),
                rings: match edges {
                    Edges::Streamed => RingMemory::Shared,
                    _ => RingMemory::Separate,
                },
                update: UpdateTime::EndOfStep,
                state_ring: STATE_RING,
                activation_ring: ACTIVATION_RING,
                input_ring: INPUT_RING,
                seams: SeamMemory::Separate,
                piece_elements: self.lowering.piece_elements(),
                disk: self.disk,
            };
            self.set_update(&mut base);
            let others = self.with_other_updates(&base);
            for base in std::iter::once(base).chain(others) {
                // Forced decisions make some of them equal.
                if !bases.contains(&base) {
                    bases.push(base);
                }
            }
        }
        bases
    }

    pub(super) fn candidates(&self, activations: Activations) -> Vec<Choice> {
        let groups = self.groups();
        let with_groups = |base: Choice| {
            groups.iter().map(move |&group| Choice { group, ..base.clone() }).collect::<Vec<_>>()
        };
        let bases: Vec<Choice> = self.bases().into_iter().flat_map(with_groups).collect();
        let estimator = Estimator::new(self.lowering, &self.savings);
        let best = |base: Choice| {
            let treated = self.different(self.treated(base, activations));
            let treated = by_estimate(&estimator, treated).into_iter();
            let obeying = treated.filter(|choice| self.obeys(choice));
            obeying.filter_map(|choice| self.fitted(choice)).take(OF_EACH_BASE)
        };
        let fitting: Vec<Choice> = bases.into_par_iter().flat_map_iter(best).collect();
        let mut all = self.different(fitting);
        if activations == Activations::Free {
            all.extend(self.with_first_groups(&all));
        }
        all
    }

    /// The best of every placement and group size, with a larger first group, which gives the copies of
    /// a deferred update more time.
    fn with_first_groups(&self, choices: &[Choice]) -> Vec<Choice> {
        let estimator = Estimator::new(self.lowering, &self.savings);
        let mut best: Vec<(f64, &Choice)> = Vec::new();
        for choice in choices.iter().filter(|choice| choice.update == UpdateTime::NextStep) {
            let seconds = estimator.later_group_seconds(choice);
            let alike = |(_, known): &&mut (f64, &Choice)| {
                known.group == choice.group && known.places_alike(choice)
            };
            match best.iter_mut().find(alike) {
                Some(known) if seconds < known.0 => *known = (seconds, choice),
                Some(_) => {}
                None => best.push((seconds, choice)),
            }
        }
        let firsts = best.into_par_iter().flat_map_iter(|(_, choice)| self.first_groups(choice));
        let obeying = firsts.filter(|choice| self.obeys(choice)).collect();
        self.different(obeying)
    }

    /// The choice with first groups of several sizes, which keep as much as fits.
    pub(super) fn first_groups(&self, choice: &Choice) -> Vec<Choice> {
        let mut found = Vec::new();
        // Inputs of the larger group need some of the memory that the others may have filled.
        let mut less = choice.clone();
        for chosen in &mut less.stages {
            chosen.activations.kept.1 = chosen.activations.kept.1.saturating_sub(1);
        }
        for group in self.first_sizes(choice.group) {
            for (offloads, inputs_offloaded) in
                [(true, false), (false, false), (true, true), (false, true)]
            {
                let mut stages = choice.usual_activations();
                for chosen in &mut stages {
                    chosen.inputs_resident &= !inputs_offloaded;
                    if !offloads {
                        chosen.offloaded = (0, 0);
                        chosen.offloads_beside = false;
                    }
                }
                let kept = stages[self.main].kept;
                let kept_bytes = self.savings[self.main][kept.0].bytes;
                let with = |usual: &Choice, count: usize| {
                    let mut stages = stages.clone();
                    for (stage, chosen) in stages.iter_mut().enumerate() {
                        chosen.kept = self.alike(stage, (kept.0, count));
                    }
                    Choice { first: Some(FirstGroup { group, stages }), ..usual.clone() }
                };
                let usual = [choice, &less].into_iter().find(|usual| self.fits(&with(usual, 0)));
                if let Some(usual) = usual {
                    let most = self.most(kept.1, kept_bytes * group, |count| with(usual, count));
                    found.push(with(usual, most));
                }
            }
        }
        found
    }

    /// Sizes of a first group worth trying before groups of this size.
    pub(super) fn first_sizes(&self, group: usize) -> Vec<usize> {
        let micro_batches = self.task().lane_micro_batches();
        if self.forced.group.is_some() || self.task().training.is_none() {
            return Vec::new();
        }
        let sizes = FIRST_GROUPS.into_iter().map(|times| times * group);
        let leaves_whole_groups =
            |&size: &usize| size < micro_batches && (micro_batches - size).is_multiple_of(group);
        sizes.filter(leaves_whole_groups).filter(|&size| size <= GROUP_MAX).collect()
    }

    /// A base with a fixed policy for activations, or with every promising one.
    fn treated(&self, base: Choice, activations: Activations) -> Vec<Choice> {
        let each = |change: &dyn Fn(usize, &mut StageChoice)| {
            let mut choice = base.clone();
            for (stage, chosen) in choice.stages.iter_mut().enumerate() {
                change(stage, chosen);
            }
            vec![choice]
        };
        match activations {
            Activations::KeepAll => {
                each(&|stage, chosen| chosen.activations.kept = self.everything(stage))
            }
            Activations::RecomputeAll => vec![base],
            Activations::OffloadAll => each(&|stage, chosen| {
                chosen.activations.offloaded = self.everything(stage);
                chosen.activations.inputs_resident = false;
            }),
            Activations::SquareRoot => each(&|stage, chosen| {
                chosen.activations.inputs_every =
                    (self.blocks(stage) as f64).sqrt().ceil() as usize;
            }),
            Activations::Free => {
                let mut filled = self.filled(base.clone());
                let mut offloading = base;
                for chosen in &mut offloading.stages {
                    chosen.activations.inputs_resident = false;
                }
                filled.extend(self.filled(offloading));
                filled
            }
        }
    }

    /// All units of all blocks of a stage.
    pub(super) fn everything(&self, stage: usize) -> (usize, usize) {
        (self.savings[stage].len() - 1, self.blocks(stage))
    }

    /// The equivalent, in another stage, of a saving in some blocks of the main stage.
    fn alike(&self, stage: usize, (saving, blocks): (usize, usize)) -> (usize, usize) {
        if stage == self.main {
            return (saving, blocks);
        }
        let (last, last_main) = (self.savings[stage].len() - 1, self.savings[self.main].len() - 1);
        let scaled = (saving * last).checked_div(last_main).unwrap_or(0);
        (scaled, (blocks * self.blocks(stage)).div_ceil(self.blocks(self.main)))
    }

    /// The choice with units kept and offloaded in the main stage, and likewise in the others.
    pub(super) fn with_units(
        &self,
        base: &Choice,
        kept: (usize, usize),
        offloaded: (usize, usize),
    ) -> Choice {
        let mut choice = base.clone();
        for (stage, chosen) in choice.stages.iter_mut().enumerate() {
            chosen.activations.kept = self.alike(stage, kept);
            chosen.activations.offloaded = self.alike(stage, offloaded);
        }
        choice
    }

    /// The choice with rings shortened as needed; none if it still does not fit.
    fn fitted(&self, choice: Choice) -> Option<Choice> {
        if self.fits(&choice) {
            return Some(choice);
        }
        let tight = |state_ring: usize, input_ring: usize| {
            let mut tight = choice.clone();
            for chosen in &mut tight.stages {
                chosen.weights.ring = chosen.weights.ring.min(1);
                chosen.gradients.ring = chosen.gradients.ring.min(1);
            }
            tight.state_ring = tight.state_ring.min(state_ring);
            tight.activation_ring = 1;
            tight.input_ring = input_ring;
            tight
        };
        [tight(2, 1), tight(1, 0)].into_iter().find(|choice| self.fits(choice))
    }

    /// A base, and ways to use its remaining memory: activations kept in the last blocks, others
    /// offloaded.
    fn filled(&self, base: Choice) -> Vec<Choice> {
        let (blocks, savings) = (self.blocks(self.main), &self.savings[self.main]);
        // Rings come first: keeping more at their cost is paid for by waiting.
        let Some(base) = self.fitted(base) else { return Vec::new() };
        let mut filled = vec![base.clone()];
        for saving in 1..savings.len() {
            for share in [blocks * 3 / 4, blocks / 2, blocks / 4] {
                let kept = (saving, usize::from(!self.forced.nothing_kept));
                filled.push(self.with_units(&base, kept, (saving, share)));
            }
        }
        for offloaded in self.hidden_savings() {
            let offloads = (offloaded, blocks);
            filled.push(self.with_units(&base, (0, 0), offloads));
            if self.forced.nothing_kept {
                continue;
            }
            for (saving, kept) in savings.iter().enumerate().skip(1) {
                // Only what is better than offloading.
                if kept.recompute_seconds >= savings[offloaded].recompute_seconds {
                    continue;
                }
                let choice = |count| self.with_units(&base, (saving, count), offloads);
                let most = self.most(blocks, kept.bytes * base.group, choice);
                if most > 0 {
                    filled.push(choice(most));
                }
            }
            if offloaded > 0 {
                self.fill_beside(&base, offloaded, &mut filled);
            }
        }
        filled
    }

    /// Blocks that keep some units and offload others.
    fn fill_beside(&self, base: &Choice, offloaded: usize, filled: &mut Vec<Choice>) {
        let (blocks, savings) = (self.blocks(self.main), &self.savings[self.main]);
        for saving in 1..savings.len() {
            let adds = savings[saving].mask.iter().zip(&savings[offloaded].mask);
            if !adds.clone().any(|(&kept, &away)| kept && !away) {
                continue;
            }
            let choice = |count| {
                let mut choice = self.with_units(base, (saving, count), (offloaded, blocks));
                for chosen in &mut choice.stages {
                    chosen.activations.offloads_beside = true;
                }
                choice
            };
            let most = self.most(blocks, savings[saving].bytes * base.group, choice);
            if most > 0 {
                filled.push(choice(most));
            }
        }
    }

    /// Savings of the main stage whose units can be offloaded while their block computes; the first is
    /// empty.
    fn hidden_savings(&self) -> Vec<usize> {
        let forward = self.lowering.forward_variant(self.main).forward.seconds;
        let bandwidth = self.profile().link(Link::DEVICE_TO_HOST).bandwidth;
        let is_hidden = |saving: &&Saving| saving.bytes as f64 / bandwidth <= 1.2 * forward;
        let savings = &self.savings[self.main];
        let count = savings.iter().take_while(is_hidden).count().max(1);
        // Only a few: the largest are worthwhile.
        std::iter::once(0).chain(count.saturating_sub(4).max(1)..count).collect()
    }

    /// The largest count up to `most` for which the choice fits, if each takes about `bytes_each`.
    pub(super) fn most(
        &self,
        most: usize,
        bytes_each: usize,
        choice: impl Fn(usize) -> Choice,
    ) -> usize {
        if most == 0 {
            return 0;
        }
        let Some(bytes) = self.bytes(&choice(1)) else { return 0 };
        let Some(room) = self.limits[Tier::DEVICE].checked_sub(bytes[Tier::DEVICE]) else {
            return 0;
        };
        let guess = most.min(1 + room.checked_div(bytes_each).unwrap_or(most));
        (1..=guess).rev().find(|&count| self.fits(&choice(count))).unwrap_or(0)
    }
}
