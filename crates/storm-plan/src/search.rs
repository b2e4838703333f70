//! The planner: looks for the decisions whose simulated step is the fastest within the budget.

mod smallest;

use crate::choice::{Choice, Saving, savings};
use crate::estimate::Estimator;
use crate::lower::Lowering;
use crate::request::{Forced, Placement};
use crate::{
    Decisions, HardwareProfile, Plan, Simulation, Storage, Streaming, Task, UpdateTime, simulate,
};
use rayon::prelude::*;

/// How many plans are built and simulated at most, before the ones near the best are tried.
const FIRST_ROUND: usize = 24;

/// How many are tried near the best.
const NEAR_THE_BEST: usize = 150;

/// Larger groups are not tried: plans grow with the group.
const GROUP_MAX: usize = 64;

/// How many are simulated of each fixed policy.
const FIXED: usize = 4;

/// How many are simulated for a guess.
const GUESSED: usize = 3;

/// Instructions of all plans that are built, per layer of the model: large plans take longer, so
/// fewer of them are tried.
const INSTRUCTIONS_PER_LAYER: usize = 40_000;

/// How many are simulated before the fastest of them is known to the next ones.
const AT_A_TIME: usize = 6;

/// Bytes that a plan may take: of the device beyond what the process holds anyway, and of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) device_bytes: usize,
    pub(crate) host_bytes: usize,
}

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
    /// Of all plans that were built.
    instructions: usize,
}

/// A fixed way to treat activations, for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activations {
    /// All of them stay.
    KeepAll,
    /// Layer inputs stay, the rest is made again.
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
    savings: Vec<Saving>,
    limits: Limits,
    forced: &'a Forced,
}

impl<'a> Search<'a> {
    pub(crate) fn new(lowering: &'a Lowering<'a>, limits: Limits, forced: &'a Forced) -> Self {
        Search { lowering, savings: savings(lowering), limits, forced }
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
        let free = self.most_promising(self.candidates(Activations::Free), FIRST_ROUND);
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
        let mut tried: Vec<Choice> = Vec::new();
        while let Some((center, _)) = &progress.best {
            let mut near = self.neighbours(center);
            near.retain(|choice| !tried.contains(choice) && self.fits(choice));
            let left = NEAR_THE_BEST.saturating_sub(tried.len());
            near = self.most_promising(near, left.min(30));
            if near.is_empty() || self.is_enough(&progress) {
                break;
            }
            self.consider_until_enough(&near, &mut progress);
            tried.extend(near);
        }
        self.found(progress)
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
            let is_better = progress.best.as_ref().is_none_or(|(known, best)| {
                // At equal speed the simpler plan: nothing moves that does not have to.
                let gain = (best.step_seconds - simulation.step_seconds) / best.step_seconds;
                gain > 1e-4 || (gain > -1e-6 && simpler(choice, known))
            });
            if is_better {
                progress.best = Some((choice.clone(), simulation));
            }
        }
    }

    fn is_enough(&self, progress: &Progress) -> bool {
        progress.instructions >= INSTRUCTIONS_PER_LAYER * self.task().layer_count()
    }

    /// What a choice would do, and how long its plan is; none if it does not fit.
    fn simulate(&self, choice: &Choice) -> Option<(Simulation, usize)> {
        let plan = self.lowering.lower(&self.decisions(choice)).ok()?;
        let fits = plan.device_bytes <= self.limits.device_bytes
            && plan.host_bytes <= self.limits.host_bytes;
        fits.then(|| (simulate(&plan, self.profile()), plan.instructions.len()))
    }

    fn found(&self, progress: Progress) -> Option<Found> {
        let (choice, simulation) = progress.best?;
        let decisions = self.decisions(&choice);
        let plan = self.lowering.lower(&decisions).ok()?;
        Some(Found { decisions, plan, simulation })
    }

    /// What a choice stands for.
    pub(crate) fn decisions(&self, choice: &Choice) -> Decisions {
        choice.decisions(self.lowering, &self.savings)
    }

    fn fits(&self, choice: &Choice) -> bool {
        self.lowering.memory(&self.decisions(choice)).is_ok_and(|(device, host)| {
            device <= self.limits.device_bytes && host <= self.limits.host_bytes
        })
    }

    /// Those that look fastest at a glance, at most `count`.
    fn most_promising(&self, choices: Vec<Choice>, count: usize) -> Vec<Choice> {
        let estimator = Estimator::new(self.lowering, &self.savings);
        let mut guessed: Vec<(f64, Choice)> =
            choices.into_iter().map(|choice| (estimator.step_seconds(&choice), choice)).collect();
        guessed.sort_by(|a, b| a.0.total_cmp(&b.0));
        guessed.truncate(count);
        guessed.into_iter().map(|(_, choice)| choice).collect()
    }

    /// Group sizes worth trying.
    fn groups(&self) -> Vec<usize> {
        let micro_batches = self.task().micro_batches;
        if let Some(group) = self.forced.group {
            return vec![group];
        }
        if self.task().is_tied() {
            return vec![1];
        }
        let sizes = 1..=micro_batches.min(GROUP_MAX);
        sizes.filter(|group| micro_batches.is_multiple_of(*group)).collect()
    }

    /// Where parameters, gradients and state may live, from all resident to all streamed.
    fn bases(&self) -> Vec<Choice> {
        let layers = self.task().layer_count();
        let resident = Streaming::resident(layers);
        let streamed = Streaming { pinned: 0, ring: 2.min(layers) };
        let states_streamed = Streaming { pinned: 0, ring: 6 };
        let mut bases = Vec::new();
        for (weights, gradients, states, edge_states_resident) in [
            (resident, resident, resident, true),
            (resident, resident, states_streamed, true),
            (resident, resident, states_streamed, false),
            (resident, streamed, resident, true),
            (resident, streamed, states_streamed, false),
            (streamed, resident, resident, true),
            (streamed, resident, states_streamed, false),
            (streamed, streamed, resident, true),
            (streamed, streamed, states_streamed, true),
            (streamed, streamed, states_streamed, false),
        ] {
            let weights = as_forced(self.forced.weights, weights, [resident, streamed]);
            let gradients = as_forced(self.forced.gradients, gradients, [resident, streamed]);
            let states = as_forced(self.forced.states, states, [resident, states_streamed]);
            let edge_states_resident =
                edge_states_resident || self.forced.states == Some(Placement::Resident);
            let all_resident = weights == resident && gradients == resident && states == resident;
            let update = match all_resident {
                true => UpdateTime::EndOfStep,
                false => UpdateTime::NextStep,
            };
            let base = Choice {
                group: 1,
                kept: (0, 0),
                offloaded: (0, 0),
                inputs_kept: 0,
                inputs_every: self.forced.checkpoint_every.unwrap_or(1),
                inputs_resident: true,
                weights,
                gradients,
                states,
                edge_states_resident,
                update: self.forced.update.unwrap_or(update),
                activation_ring: 2,
                boundary_ring: 2,
                piece_elements: self.lowering.piece_elements(),
            };
            // What is forced makes some of them the same.
            if !bases.contains(&base) {
                bases.push(base);
            }
        }
        bases
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
        obeying.filter_map(|choice| self.fitted(choice)).collect()
    }

    /// A base with activations treated in a fixed way, or in all ways that look good.
    fn treated(&self, base: Choice, activations: Activations) -> Vec<Choice> {
        let layers = self.task().layer_count();
        let all = self.savings.len() - 1;
        match activations {
            Activations::KeepAll => vec![Choice { kept: (all, layers), ..base }],
            Activations::RecomputeAll => vec![base],
            Activations::OffloadAll => {
                vec![Choice { offloaded: (all, layers), inputs_resident: false, ..base }]
            }
            Activations::SquareRoot => {
                let every = (layers as f64).sqrt().ceil() as usize;
                vec![Choice { inputs_every: every, ..base }]
            }
            Activations::Free => {
                let inputs = [true, false].into_iter();
                let bases =
                    inputs.map(|inputs_resident| Choice { inputs_resident, ..base.clone() });
                bases.flat_map(|base| self.filled(base)).collect()
            }
        }
    }

    /// The choice, with rings as short as need be; none if it does not fit even so.
    fn fitted(&self, choice: Choice) -> Option<Choice> {
        if self.fits(&choice) {
            return Some(choice);
        }
        let short = |streaming: Streaming, ring: usize| Streaming {
            ring: streaming.ring.min(ring),
            ..streaming
        };
        let tight = |state_pieces: usize, boundary_ring: usize| Choice {
            weights: short(choice.weights, 1),
            gradients: short(choice.gradients, 1),
            states: short(choice.states, state_pieces),
            activation_ring: 1,
            boundary_ring,
            ..choice.clone()
        };
        [tight(2, 1), tight(1, 0)].into_iter().find(|choice| self.fits(choice))
    }

    /// A base, and ways to use the memory it leaves: activations kept in the last layers, others
    /// offloaded.
    fn filled(&self, base: Choice) -> Vec<Choice> {
        let layers = self.task().layer_count();
        // Rings come first: what is kept at their cost is paid for by waiting.
        let Some(base) = self.fitted(base) else { return Vec::new() };
        let mut filled = vec![base.clone()];
        for saving in 1..self.savings.len() {
            for share in [layers * 3 / 4, layers / 2, layers / 4] {
                filled.push(Choice {
                    offloaded: (saving, share),
                    kept: (saving, usize::from(!self.forced.nothing_kept)),
                    ..base.clone()
                });
            }
        }
        for offloaded in self.hidden_savings() {
            let base = Choice { offloaded: (offloaded, layers), ..base.clone() };
            filled.push(base.clone());
            if self.forced.nothing_kept {
                continue;
            }
            for saving in 1..self.savings.len() {
                // Only what is worth more than waiting in host memory.
                if self.savings[saving].again_seconds >= self.savings[offloaded].again_seconds {
                    continue;
                }
                let kept =
                    self.most(layers, |count| Choice { kept: (saving, count), ..base.clone() });
                if kept > 0 {
                    filled.push(Choice { kept: (saving, kept), ..base.clone() });
                }
            }
        }
        filled
    }

    /// Savings whose units can leave while their layer computes; the first is nothing.
    fn hidden_savings(&self) -> Vec<usize> {
        let [_, layer] = self.lowering.layer(&vec![Storage::Keep; self.lowering.units.len()]);
        let bandwidth = self.profile().device_to_host_bandwidth;
        let is_hidden =
            |saving: &&Saving| saving.bytes as f64 / bandwidth <= 1.2 * layer.forward.seconds;
        let count = self.savings.iter().take_while(is_hidden).count().max(1);
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
        let layers = self.task().layer_count();
        let placed = |wanted: Option<Placement>, streaming: Streaming| match wanted {
            None => true,
            Some(Placement::Resident) => streaming.pinned == layers,
            Some(Placement::Streamed) => streaming.pinned == 0,
        };
        let decisions = self.decisions(choice);
        let mut stored = decisions.saved.iter().flatten().chain(&decisions.boundary);
        if self.forced.nothing_kept && stored.any(|&storage| storage == Storage::Keep) {
            return false;
        }
        let saved = |wanted: Storage| decisions.saved.iter().flatten().all(|&s| s == wanted);
        let activations = self.forced.activations.is_none_or(saved);
        let inputs = match self.forced.layer_inputs {
            None => true,
            Some(Placement::Resident) => !decisions.boundary.contains(&Storage::Offload),
            Some(Placement::Streamed) => !decisions.boundary.contains(&Storage::Keep),
        };
        placed(self.forced.weights, choice.weights)
            && placed(self.forced.gradients, choice.gradients)
            && placed(self.forced.states, choice.states)
            && self.forced.update.is_none_or(|update| update == choice.update)
            && self.forced.group.is_none_or(|group| group == choice.group)
            && self
                .forced
                .checkpoint_every
                .is_none_or(|every| every == choice.inputs_every && choice.inputs_kept == 0)
            && activations
            && inputs
    }

    /// Choices that differ in one respect.
    fn neighbours(&self, center: &Choice) -> Vec<Choice> {
        let layers = self.task().layer_count();
        let mut near = Vec::new();
        let mut add = |change: &dyn Fn(&mut Choice)| {
            let mut choice = center.clone();
            change(&mut choice);
            if choice != *center {
                near.push(choice);
            }
        };
        let around = |count: usize| -> Vec<usize> {
            let steps = [1, 2, 4, 8];
            let more = steps.iter().map(|step| (count + step).min(layers));
            let fewer = steps.iter().map(|step| count.saturating_sub(*step));
            more.chain(fewer).collect()
        };
        for saving in 0..self.savings.len() {
            add(&|choice| choice.kept.0 = saving);
            add(&|choice| choice.offloaded.0 = saving);
            if center.kept.1 == 0 {
                add(&|choice| choice.kept = (saving, 2.min(layers)));
            }
            if center.offloaded.1 == 0 {
                add(&|choice| choice.offloaded = (saving, layers / 2));
            }
        }
        for count in around(center.kept.1) {
            add(&|choice| choice.kept.1 = count);
            add(&|choice| choice.inputs_kept = count);
        }
        for count in around(center.offloaded.1) {
            add(&|choice| choice.offloaded.1 = count);
        }
        for count in around(center.inputs_kept) {
            add(&|choice| choice.inputs_kept = count);
        }
        // What is kept may wait in host memory instead, and the other way round.
        for count in around(center.kept.1) {
            add(&|choice| {
                choice.kept.1 = count;
                choice.offloaded = (choice.kept.0, layers);
            });
        }
        add(&|choice| choice.inputs_resident = !choice.inputs_resident);
        add(&|choice| choice.edge_states_resident = !choice.edge_states_resident);
        if center.inputs_every != 1 && self.forced.checkpoint_every.is_none() {
            add(&|choice| choice.inputs_every = 1);
        }
        let classes: [fn(&mut Choice) -> &mut Streaming; 2] =
            [|choice| &mut choice.weights, |choice| &mut choice.gradients];
        for class in classes {
            let current = *class(&mut center.clone());
            for pinned in around(current.pinned) {
                add(&|choice| {
                    let class = class(choice);
                    class.pinned = pinned;
                    class.ring = if pinned == layers { 0 } else { class.ring.max(2) };
                });
            }
            for ring in [2, 3, 4] {
                add(&|choice| {
                    let class = class(choice);
                    class.ring = if class.pinned == layers { 0 } else { ring };
                });
            }
        }
        for pinned in around(center.states.pinned) {
            add(&|choice| choice.states.pinned = pinned);
        }
        for ring in [3, 4, 6, 8, 12, 16] {
            add(&|choice| choice.states.ring = ring);
        }
        for ring in [1, 2, 3, 4] {
            add(&|choice| choice.activation_ring = ring);
            add(&|choice| choice.boundary_ring = ring);
        }
        for group in self.groups() {
            add(&|choice| choice.group = group);
        }
        for choice in &mut near {
            let resident = choice.weights.pinned == layers
                && choice.gradients.pinned == layers
                && choice.states.pinned == layers
                && choice.edge_states_resident;
            if self.forced.update.is_none() && resident {
                choice.update = UpdateTime::EndOfStep;
            } else if self.forced.update.is_none() {
                choice.update = UpdateTime::NextStep;
            }
        }
        near.retain(|choice| self.obeys(choice));
        near
    }
}

/// A class of per-layer tensors, moved to where the user wants it.
fn as_forced(
    wanted: Option<Placement>,
    usual: Streaming,
    [resident, streamed]: [Streaming; 2],
) -> Streaming {
    match wanted {
        None => usual,
        Some(Placement::Resident) => resident,
        Some(Placement::Streamed) => streamed,
    }
}

/// Fewer things move.
fn simpler(a: &Choice, b: &Choice) -> bool {
    let moving = |choice: &Choice| {
        let pinned = choice.weights.pinned + choice.gradients.pinned + choice.states.pinned;
        (
            choice.offloaded.1,
            usize::from(!choice.inputs_resident),
            usize::MAX - pinned,
            choice.group,
        )
    };
    moving(a) < moving(b)
}
