//! The planner: looks for the decisions whose simulated step is the fastest within the budget.

mod smallest;

use crate::choice::{
    ACTIVATION_RING, Choice, INPUT_RING, STATE_RING, Saving, StageChoice, savings,
};
use crate::decisions::RingMemory;
use crate::estimate::Estimator;
use crate::lower::Lowering;
use crate::queue::Link;
use crate::request::{Forced, Placement};
use crate::tier::PerTier;
use crate::{
    Decisions, HardwareProfile, Plan, Simulation, Storage, Streaming, Task, UpdateTime, simulate,
};
use rayon::prelude::*;
use std::collections::HashSet;

/// How many plans are built and simulated at most, before the ones near the best are tried.
const FIRST_ROUND: usize = 24;

/// How many are tried near each of the best.
const NEAR_THE_BEST: [usize; 3] = [90, 40, 30];

/// How many of them before the next best is known.
const NEIGHBOURS: usize = 24;

/// Larger groups are not tried: plans grow with the group.
const GROUP_MAX: usize = 64;

/// How many are simulated of each fixed policy.
const FIXED: usize = 4;

/// How many are simulated for a guess.
const GUESSED: usize = 3;

/// Instructions of all plans that are built, per block of the model: large plans take longer, so fewer of
/// them are tried.
const INSTRUCTIONS_PER_BLOCK: usize = 40_000;

/// How many are simulated before the fastest of them is known to the next ones.
const AT_A_TIME: usize = 6;

/// The best of a search.
pub(crate) struct Found {
    pub(crate) decisions: Decisions,
    pub(crate) plan: Plan,
    pub(crate) simulation: Simulation,
}

/// How far a search has come.
#[derive(Default)]
struct Progress {
    /// The fastest so far.
    best: Option<(Choice, Simulation)>,
    /// The fastest of each way to place parameters.
    starts: Vec<(Choice, Simulation)>,
    /// Of all plans that were built.
    instructions: usize,
}

/// A fixed way to treat activations, for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activations {
    /// All of them stay.
    KeepAll,
    /// Layer inputs stay, the rest is recomputed.
    RecomputeAll,
    /// All of them wait in host memory.
    OffloadAll,
    /// The inputs of every √N-th layer stay.
    SquareRoot,
    /// Whatever is best.
    Free,
}

impl Activations {
    /// Those that leave nothing to choose.
    const FIXED: [Activations; 4] = [
        Activations::KeepAll,
        Activations::RecomputeAll,
        Activations::OffloadAll,
        Activations::SquareRoot,
    ];
}

pub(crate) struct Search<'a> {
    lowering: &'a Lowering<'a>,
    /// By stage.
    savings: Vec<Vec<Saving>>,
    /// The stage whose blocks compute the most, of those that save anything.
    main: usize,
    /// Bytes that a plan may take, of the device beyond what the process holds anyway.
    limits: PerTier<usize>,
    forced: &'a Forced,
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        lowering: &'a Lowering<'a>,
        limits: PerTier<usize>,
        forced: &'a Forced,
    ) -> Self {
        let program = lowering.task.program();
        let seconds = |&stage: &usize| {
            let saves = usize::from(!lowering.units[stage].is_empty());
            let blocks = program.stages()[stage].repeat as f64;
            (saves, blocks * lowering.forward_variant(stage).forward.seconds)
        };
        let compare = |a: &usize, b: &usize| {
            let (a, b) = (seconds(a), seconds(b));
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
        };
        let main = (0..program.stages().len()).max_by(compare).unwrap_or(0);
        Search { lowering, savings: savings(lowering), main, limits, forced }
    }

    fn task(&self) -> &'a Task {
        self.lowering.task
    }

    fn profile(&self) -> &'a HardwareProfile {
        self.lowering.profile
    }

    /// The fastest plan that fits; none if nothing does. `smallest` is where to begin if nothing else
    /// that is tried first fits.
    pub(crate) fn run(&self, smallest: &Choice) -> Option<Found> {
        let mut progress = Progress::default();
        let free = self.first_round(self.candidates(Activations::Free));
        let (first, others) = free.split_at(free.len().min(AT_A_TIME));
        self.consider(first, &mut progress);
        // All that the fixed policies would try, so that none of them is ever faster.
        for activations in Activations::FIXED {
            self.consider(&self.fixed(activations), &mut progress);
        }
        self.consider_until_enough(others, &mut progress);
        if progress.best.is_none() {
            self.consider(std::slice::from_ref(smallest), &mut progress);
        }
        if progress.best.as_ref().is_some_and(|(best, _)| self.does_the_least(best)) {
            return self.found(progress);
        }
        let mut starts = std::mem::take(&mut progress.starts);
        starts.sort_by(|a, b| a.1.step_seconds.total_cmp(&b.1.step_seconds));
        let mut tried: Vec<Choice> = Vec::new();
        for (start, count) in starts.into_iter().zip(NEAR_THE_BEST) {
            let mut near = Progress { best: Some(start), ..Progress::default() };
            near.instructions = progress.instructions;
            self.climb(&mut near, count, &mut tried);
            progress.instructions = near.instructions;
            if let Some((choice, simulation)) = near.best {
                self.compare(&choice, simulation, &mut progress);
            }
        }
        self.found(progress)
    }

    /// Whether nothing moves and nothing is recomputed, so that no plan is faster.
    fn does_the_least(&self, choice: &Choice) -> bool {
        self.stages().zip(&choice.stages).all(|(stage, chosen)| {
            let blocks = self.blocks(stage);
            let pinned = [chosen.weights.pinned, chosen.gradients.pinned, chosen.states];
            let keeps = chosen.kept.1 * usize::from(chosen.kept.0 + 1 == self.savings[stage].len());
            let keeps_all = self.savings[stage].len() == 1 || keeps == blocks;
            pinned == [blocks; 3] && keeps_all && chosen.inputs_resident && chosen.inputs_every == 1
        })
    }

    /// Goes from the best to a better one near it for as long as there is one, over at most `count` plans.
    fn climb(&self, progress: &mut Progress, count: usize, tried: &mut Vec<Choice>) {
        let mut left = count;
        while let Some((center, _)) = &progress.best {
            let mut near = self.neighbours(center);
            near.retain(|choice| !tried.contains(choice) && self.fits(choice));
            near = self.most_promising(near, left.min(NEIGHBOURS));
            if near.is_empty() || self.is_enough(progress) {
                return;
            }
            self.consider_until_enough(&near, progress);
            left -= near.len();
            tried.extend(near);
        }
    }

    /// The fastest plan with a fixed treatment of activations; none if none fits.
    pub(crate) fn run_fixed(&self, activations: Activations) -> Option<Found> {
        let mut progress = Progress::default();
        self.consider(&self.fixed(activations), &mut progress);
        self.found(progress)
    }

    /// About how fast the fastest plan is, from few simulations; none if nothing fits.
    pub(crate) fn guess(&self) -> Option<Simulation> {
        let mut progress = Progress::default();
        let candidates = self.candidates(Activations::Free);
        self.consider(&self.most_promising(candidates, GUESSED), &mut progress);
        progress.best.map(|(_, simulation)| simulation)
    }

    /// The most promising choices of a fixed policy.
    fn fixed(&self, activations: Activations) -> Vec<Choice> {
        self.most_promising(self.candidates(activations), FIXED)
    }

    fn consider_until_enough(&self, choices: &[Choice], progress: &mut Progress) {
        for some in choices.chunks(AT_A_TIME) {
            if self.is_enough(progress) {
                return;
            }
            self.consider(some, progress);
        }
    }

    /// Builds and simulates choices, several at a time, and keeps the fastest so far. Which one that
    /// is does not depend on the number of threads.
    fn consider(&self, choices: &[Choice], progress: &mut Progress) {
        let estimator = Estimator::new(self.lowering, &self.savings);
        let limit = progress.best.as_ref().map_or(f64::MAX, |(_, best)| best.step_seconds);
        let hopeful: Vec<&Choice> =
            choices.iter().filter(|choice| estimator.least_seconds(choice) < limit).collect();
        let simulated: Vec<_> = hopeful.par_iter().map(|choice| self.simulate(choice)).collect();
        for (choice, simulated) in hopeful.into_iter().zip(simulated) {
            let Some((simulation, instructions)) = simulated else { continue };
            progress.instructions += instructions;
            self.compare(choice, simulation, progress);
        }
    }

    /// Keeps a simulated choice if it is the fastest so far, of all or of those that place parameters alike.
    fn compare(&self, choice: &Choice, simulation: Simulation, progress: &mut Progress) {
        let is_better = |(known, best): &(Choice, Simulation)| {
            // At equal speed the simpler plan: nothing moves that does not have to.
            let gain = (best.step_seconds - simulation.step_seconds) / best.step_seconds;
            gain > 1e-4 || (gain > -1e-6 && simpler(choice, known))
        };
        match progress.starts.iter_mut().find(|(known, _)| known.places_alike(choice)) {
            Some(known) if is_better(known) => *known = (choice.clone(), simulation.clone()),
            Some(_) => {}
            None => progress.starts.push((choice.clone(), simulation.clone())),
        }
        if progress.best.as_ref().is_none_or(is_better) {
            progress.best = Some((choice.clone(), simulation));
        }
    }

    fn is_enough(&self, progress: &Progress) -> bool {
        progress.instructions >= INSTRUCTIONS_PER_BLOCK * self.lowering.blocks.count()
    }

    /// What a choice would do, and how long its plan is; none if it does not fit.
    fn simulate(&self, choice: &Choice) -> Option<(Simulation, usize)> {
        let plan = self.lowering.lower_step(&self.decisions(choice)).ok()?;
        let fits = plan.bytes.fits(&self.limits);
        fits.then(|| (simulate(&plan, self.profile()), plan.instructions.len()))
    }

    fn found(&self, progress: Progress) -> Option<Found> {
        let (choice, _) = progress.best?;
        let decisions = self.decisions(&choice);
        let plan = self.lowering.lower_with_evaluation(&decisions).ok()?;
        let simulation = simulate(&plan, self.profile());
        Some(Found { decisions, plan, simulation })
    }

    /// What a choice stands for.
    pub(crate) fn decisions(&self, choice: &Choice) -> Decisions {
        choice.decisions(self.lowering, &self.savings)
    }

    fn fits(&self, choice: &Choice) -> bool {
        let bytes = self.lowering.memory(&self.decisions(choice));
        bytes.is_ok_and(|bytes| bytes.fits(&self.limits))
    }

    /// Those that look fastest at a glance, at most `count`.
    fn most_promising(&self, choices: Vec<Choice>, count: usize) -> Vec<Choice> {
        let mut sorted = self.by_estimate(choices);
        sorted.truncate(count);
        sorted
    }

    /// Those that look fastest, and the one that looks fastest of every way to place parameters: a glance
    /// compares plans that place them alike better than others.
    fn first_round(&self, choices: Vec<Choice>) -> Vec<Choice> {
        let mut sorted = self.by_estimate(choices);
        let others = sorted.split_off(sorted.len().min(FIRST_ROUND));
        for choice in others {
            if !sorted.iter().any(|known| known.places_alike(&choice)) {
                sorted.push(choice);
            }
        }
        sorted
    }

    /// The fastest at a glance comes first.
    fn by_estimate(&self, choices: Vec<Choice>) -> Vec<Choice> {
        let estimator = Estimator::new(self.lowering, &self.savings);
        let mut guessed: Vec<(f64, Choice)> =
            choices.into_iter().map(|choice| (estimator.step_seconds(&choice), choice)).collect();
        guessed.sort_by(|a, b| a.0.total_cmp(&b.0));
        guessed.into_iter().map(|(_, choice)| choice).collect()
    }

    /// Group sizes worth trying.
    fn groups(&self) -> Vec<usize> {
        let micro_batches = self.task().micro_batches;
        if let Some(group) = self.forced.group {
            return vec![group];
        }
        let sizes = 1..=micro_batches.min(GROUP_MAX);
        sizes.filter(|group| micro_batches.is_multiple_of(*group)).collect()
    }

    /// How many blocks a stage has.
    fn blocks(&self, stage: usize) -> usize {
        self.task().program().stages()[stage].repeat
    }

    fn stages(&self) -> std::ops::Range<usize> {
        0..self.task().program().stages().len()
    }

    /// Where parameters, gradients and state may live, from all resident to all streamed.
    fn bases(&self) -> Vec<Choice> {
        use Placement::{Resident, Streamed};
        let mut bases = Vec::new();
        // Weights, gradients and state of repeated stages; of the others all but their state stays, or
        // nothing does and rings share memory.
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
                    kept: (0, 0),
                    offloaded: (0, 0),
                    offloads_beside: false,
                    inputs_kept: 0,
                    inputs_every: match repeats {
                        true => self.forced.checkpoint_every.unwrap_or(1),
                        false => 1,
                    },
                    inputs_resident: true,
                    weights: class(weights),
                    gradients: class(gradients),
                    states: if states == Resident { blocks } else { 0 },
                }
            };
            let mut base = Choice {
                group: 1,
                stages: self.stages().map(stage).collect(),
                rings: match edges {
                    Edges::Streamed => RingMemory::Shared,
                    _ => RingMemory::Separate,
                },
                update: UpdateTime::EndOfStep,
                state_ring: STATE_RING,
                activation_ring: ACTIVATION_RING,
                input_ring: INPUT_RING,
                piece_elements: self.lowering.piece_elements(),
            };
            self.set_update(&mut base);
            // What is forced makes some of them the same.
            if !bases.contains(&base) {
                bases.push(base);
            }
        }
        bases
    }

    /// Updates wait for the next step where anything that they need streams.
    fn set_update(&self, choice: &mut Choice) {
        let is_resident = |(stage, chosen): (usize, &StageChoice)| {
            let blocks = self.blocks(stage);
            chosen.weights.pinned == blocks
                && chosen.gradients.pinned == blocks
                && chosen.states == blocks
        };
        choice.update = match choice.stages.iter().enumerate().all(is_resident) {
            true => UpdateTime::EndOfStep,
            false => UpdateTime::NextStep,
        };
        if let Some(update) = self.forced.update {
            choice.update = update;
        }
    }

    fn candidates(&self, activations: Activations) -> Vec<Choice> {
        let groups = self.groups();
        let with_groups = |base: Choice| {
            groups.iter().map(move |&group| Choice { group, ..base.clone() }).collect::<Vec<_>>()
        };
        let bases: Vec<Choice> = self.bases().into_iter().flat_map(with_groups).collect();
        let candidates =
            bases.into_par_iter().flat_map_iter(|base| self.treated(base, activations));
        let obeying = candidates.filter(|choice| self.obeys(choice));
        let fitting: Vec<Choice> = obeying.filter_map(|choice| self.fitted(choice)).collect();
        self.different(fitting)
    }

    /// A base with activations treated in a fixed way, or in all ways that look good.
    fn treated(&self, base: Choice, activations: Activations) -> Vec<Choice> {
        let each = |change: &dyn Fn(usize, &mut StageChoice)| {
            let mut choice = base.clone();
            for (stage, chosen) in choice.stages.iter_mut().enumerate() {
                change(stage, chosen);
            }
            vec![choice]
        };
        match activations {
            Activations::KeepAll => each(&|stage, chosen| chosen.kept = self.everything(stage)),
            Activations::RecomputeAll => vec![base],
            Activations::OffloadAll => each(&|stage, chosen| {
                chosen.offloaded = self.everything(stage);
                chosen.inputs_resident = false;
            }),
            Activations::SquareRoot => each(&|stage, chosen| {
                chosen.inputs_every = (self.blocks(stage) as f64).sqrt().ceil() as usize;
            }),
            Activations::Free => {
                let mut filled = self.filled(base.clone());
                let mut offloading = base;
                for chosen in &mut offloading.stages {
                    chosen.inputs_resident = false;
                }
                filled.extend(self.filled(offloading));
                filled
            }
        }
    }

    /// All units of all blocks of a stage.
    fn everything(&self, stage: usize) -> (usize, usize) {
        (self.savings[stage].len() - 1, self.blocks(stage))
    }

    /// What corresponds in a stage to a saving of some blocks of the main stage.
    fn alike(&self, stage: usize, (saving, blocks): (usize, usize)) -> (usize, usize) {
        if stage == self.main {
            return (saving, blocks);
        }
        let (last, last_main) = (self.savings[stage].len() - 1, self.savings[self.main].len() - 1);
        let scaled = (saving * last).checked_div(last_main).unwrap_or(0);
        (scaled, (blocks * self.blocks(stage)).div_ceil(self.blocks(self.main)))
    }

    /// The choice with units kept and offloaded in the main stage, and in the others alike.
    fn with_units(&self, base: &Choice, kept: (usize, usize), offloaded: (usize, usize)) -> Choice {
        let mut choice = base.clone();
        for (stage, chosen) in choice.stages.iter_mut().enumerate() {
            chosen.kept = self.alike(stage, kept);
            chosen.offloaded = self.alike(stage, offloaded);
        }
        choice
    }

    /// The choice, with rings as short as need be; none if it does not fit even so.
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

    /// A base, and ways to use the memory it leaves: activations kept in the last blocks, others
    /// offloaded.
    fn filled(&self, base: Choice) -> Vec<Choice> {
        let (blocks, savings) = (self.blocks(self.main), &self.savings[self.main]);
        // Rings come first: what is kept at their cost is paid for by waiting.
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
                // Only what is worth more than waiting in host memory.
                if kept.recompute_seconds >= savings[offloaded].recompute_seconds {
                    continue;
                }
                let choice = |count| self.with_units(&base, (saving, count), offloads);
                let most = self.most(blocks, choice);
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
                    chosen.offloads_beside = true;
                }
                choice
            };
            let most = self.most(blocks, choice);
            if most > 0 {
                filled.push(choice(most));
            }
        }
    }

    /// Savings of the main stage whose units can leave while their block computes; the first is nothing.
    fn hidden_savings(&self) -> Vec<usize> {
        let forward = self.lowering.forward_variant(self.main).forward.seconds;
        let bandwidth = self.profile().link(Link::DEVICE_TO_HOST).bandwidth;
        let is_hidden = |saving: &&Saving| saving.bytes as f64 / bandwidth <= 1.2 * forward;
        let savings = &self.savings[self.main];
        let count = savings.iter().take_while(is_hidden).count().max(1);
        // Few of them: the largest are the ones that pay.
        std::iter::once(0).chain(count.saturating_sub(4).max(1)..count).collect()
    }

    /// The largest count up to `most` for which the choice fits.
    fn most(&self, most: usize, choice: impl Fn(usize) -> Choice) -> usize {
        let (mut fits, mut too_many) = (0, most + 1);
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            match self.fits(&choice(middle)) {
                true => fits = middle,
                false => too_many = middle,
            }
        }
        fits
    }

    /// Whether a choice respects what the user insists on.
    fn obeys(&self, choice: &Choice) -> bool {
        let decisions = self.decisions(choice);
        let forced = self.forced;
        for (stage, chosen) in choice.stages.iter().enumerate() {
            let blocks = self.blocks(stage);
            // Streaming is asked for where there are several blocks to stream.
            let placed = |wanted: Option<Placement>, pinned: usize| match wanted {
                Some(Placement::Resident) => pinned == blocks,
                Some(Placement::Streamed) => pinned == 0 || blocks == 1,
                None => true,
            };
            let every = |every: usize| {
                blocks == 1 || (every == chosen.inputs_every && chosen.inputs_kept == 0)
            };
            if !placed(forced.weights, chosen.weights.pinned)
                || !placed(forced.gradients, chosen.gradients.pinned)
                || !placed(forced.states, chosen.states)
                || !forced.checkpoint_every.is_none_or(every)
            {
                return false;
            }
        }
        let saved = || decisions.stages.iter().flat_map(|stage| stage.saved.iter().flatten());
        let inputs = || {
            (0..self.lowering.blocks.count()).filter_map(|block| {
                let has_input = self.lowering.blocks.seams[block].slab.size_bytes > 0;
                self.lowering.input_storage(&decisions, block).filter(|_| has_input)
            })
        };
        let keeps = |storage: Storage| storage == Storage::Keep;
        if forced.nothing_kept && (saved().copied().any(keeps) || inputs().any(keeps)) {
            return false;
        }
        let obeys_inputs = match forced.layer_inputs {
            None => true,
            Some(Placement::Resident) => !inputs().any(|storage| storage == Storage::Offload),
            Some(Placement::Streamed) => !inputs().any(keeps),
        };
        forced.update.is_none_or(|update| update == choice.update)
            && forced.group.is_none_or(|group| group == choice.group)
            && forced.activations.is_none_or(|wanted| saved().all(|&s| s == wanted))
            && obeys_inputs
    }

    /// Choices that differ in one respect.
    fn neighbours(&self, center: &Choice) -> Vec<Choice> {
        let mut near = Vec::new();
        for stage in self.stages() {
            self.stage_neighbours(center, stage, &mut near);
        }
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
        // Stages that run once go together: half of a move may gain nothing.
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
        near.retain(|choice| self.obeys(choice));
        near = self.different(near);
        near.retain(|choice| choice != center);
        near
    }

    /// Each choice once.
    fn different(&self, choices: Vec<Choice>) -> Vec<Choice> {
        let repeats: Vec<usize> = self.stages().map(|stage| self.blocks(stage)).collect();
        let mut seen = HashSet::new();
        let normalized = choices.into_iter().map(|choice| choice.normalized(&repeats));
        normalized.filter(|choice| seen.insert(choice.clone())).collect()
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
        let around = |count: usize| -> Vec<usize> {
            let steps = [1, 2, 4, 8];
            let more = steps.iter().map(|step| (count + step).min(blocks));
            let fewer = steps.iter().map(|step| count.saturating_sub(*step));
            let mut all: Vec<usize> = more.chain(fewer).collect();
            all.sort_unstable();
            all.dedup();
            all
        };
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
            for count in around(chosen.kept.1) {
                add(&|chosen| chosen.kept.1 = count);
                add(&|chosen| chosen.inputs_kept = count);
                // What is kept may wait in host memory instead, and the other way round.
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
}

/// What stays of the stages that run once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Edges {
    Resident,
    /// All but their optimizer state stays.
    StateStreamed,
    Streamed,
}

/// Fewer things move.
fn simpler(a: &Choice, b: &Choice) -> bool {
    let moving = |choice: &Choice| {
        let sum = |f: fn(&StageChoice) -> usize| choice.stages.iter().map(f).sum::<usize>();
        let pinned = sum(|chosen| chosen.weights.pinned + chosen.gradients.pinned + chosen.states);
        (
            sum(|chosen| chosen.offloaded.1 + usize::from(chosen.offloads_beside)),
            sum(|chosen| usize::from(!chosen.inputs_resident)),
            usize::MAX - pinned,
            choice.group,
        )
    };
    moving(a) < moving(b)
}
