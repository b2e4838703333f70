//! The planner: searches for the decisions with the fastest simulated step within the budget.

mod candidates;
mod near;
mod refill;
mod smallest;

use crate::choice::{Choice, DiskChoice, Saving, StageChoice, savings};
use crate::estimate::Estimator;
use crate::lower::{Estimate, Lowering, Sketch};
use crate::request::{Forced, Placement};
use crate::tier::PerTier;
use crate::{Decisions, HardwareProfile, Plan, Simulation, Storage, Task, UpdateTime, simulate};
use foldhash::{HashMap, HashSet};
use rayon::prelude::*;
use std::sync::{PoisonError, RwLock};

/// How many choices with the fastest estimate are sketched before neighbors of the best are tried.
const FIRST_ROUND: usize = 48;

/// How many neighbors are tried from each of the best starting points.
const NEAR_EACH_START: [usize; 7] = [160, 160, 120, 120, 96, 96, 96];

/// Most starting points for each division of a step into groups.
const STARTS_OF_EACH_SHAPE: usize = 2;

/// Number of neighbors of the overall best to try.
const NEAR_THE_BEST: usize = 300;

/// Neighbors tried per turn, before the next best choice gets a turn.
const NEIGHBOURS: usize = 16;

/// Penalty per turn a choice has had, so that other choices get a turn, too.
const IMPATIENCE: f64 = 0.001;

/// Most neighbors per turn with exactly the same estimate.
const ALIKE: usize = 2;

/// Largest group to try, because plans grow with the group.
const GROUP_MAX: usize = 64;

/// Number of choices to sketch for each fixed policy.
const FIXED: usize = 4;

/// Number of choices to sketch for a rough step time.
const GUESSED: usize = 6;

/// Total items of all sketches, per block of the model. Large sketches take longer, so fewer of them are made.
const ITEMS_PER_BLOCK: usize = 400_000;

/// A climb ends after this percentage of all items without finding anything faster.
const IN_VAIN_PERCENT: usize = 6;

/// The same for the last climb, from the overall best.
const IN_VAIN_PERCENT_LAST: usize = 20;

/// Most plans to build and simulate at the end, in order of their sketches.
const FINAL: usize = 6;

/// Only plans whose sketch is at most this much slower than the fastest.
const CLOSE: f64 = 0.01;

/// Step times that differ by less than this fraction count as equal.
const ALIKE_SHARE: f64 = 1e-4;

/// Gathers of weights below this fraction of a step do not justify a deferred update, which must be applied before each
/// evaluation and each checkpoint.
const GATHERS_COUNT: f64 = 0.001;

/// Choices sketched at once; those that cannot beat the best so far are skipped.
const AT_A_TIME: usize = 8;

/// The result of a search.
pub(crate) struct Found {
    pub(crate) decisions: Decisions,
    pub(crate) plan: Plan,
    pub(crate) simulation: Simulation,
    /// How many plans were built to find it.
    pub(crate) plans_built: usize,
}

/// The state of a search. Each choice comes with its step time.
#[derive(Default)]
struct Progress {
    /// The fastest so far.
    best: Option<(Choice, f64)>,
    /// The fastest choice for each placement of parameters.
    starts: Vec<(Choice, f64)>,
    /// All that were sketched.
    seen: Vec<(Choice, f64)>,
    /// Total items of all sketches.
    items: usize,
}

/// A choice whose neighbors a climb tries.
struct Center {
    choice: Choice,
    seconds: f64,
    /// Turns it has had.
    rounds: usize,
    /// Its untried neighbors, fastest estimate last. `None` until its first turn.
    near: Option<Vec<Choice>>,
}

impl Center {
    fn new(choice: Choice, seconds: f64) -> Center {
        Center { choice, seconds, rounds: 0, near: None }
    }

    fn is_exhausted(&self) -> bool {
        self.near.as_ref().is_some_and(Vec::is_empty)
    }

    /// The priority of its next turn; the lowest value goes first.
    fn turn(&self) -> f64 {
        self.seconds * (1.0 + IMPATIENCE * self.rounds as f64)
    }
}

/// Choices already tried, with their step time; infinite if skipped.
type Known = HashMap<Choice, f64>;

/// The moves a climb may make.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Groups {
    /// Only moves that keep the division of a step into groups.
    Same,
    Any,
}

/// The limits of a climb.
struct Reach {
    groups: Groups,
    /// Number of new choices it may try.
    count: usize,
    /// Items of sketches it may spend without an improvement.
    in_vain: usize,
}

/// A fixed policy for activations, for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activations {
    /// Keep all of them.
    KeepAll,
    /// Keep layer inputs and recompute the rest.
    RecomputeAll,
    /// Offload all of them.
    OffloadAll,
    /// Keep the inputs of every √N-th layer.
    SquareRoot,
    /// Whatever is fastest.
    Free,
}

impl Activations {
    /// The policies that leave nothing to choose.
    const FIXED: [Activations; 4] = [
        Activations::KeepAll,
        Activations::RecomputeAll,
        Activations::OffloadAll,
        Activations::SquareRoot,
    ];
}

pub(crate) struct Search<'a> {
    lowering: &'a Lowering<'a>,
    sketch: Sketch<'a>,
    /// The savings of each stage.
    savings: Vec<Vec<Saving>>,
    /// The stage whose blocks compute most, among those that save anything.
    main: usize,
    /// Memory limits of a plan, without the process's overhead on the device.
    limits: PerTier<usize>,
    /// How much is on disk.
    disk: DiskChoice,
    forced: &'a Forced,
    /// Whether the user forces anything that a choice decides.
    forces: bool,
    /// Whether updates may be deferred just to hide gathers from other ranks.
    defers_gathers: bool,
    /// Memory of known choices; `None` for contradictory ones.
    measured: RwLock<HashMap<Choice, Option<PerTier<usize>>>>,
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        lowering: &'a Lowering<'a>,
        limits: PerTier<usize>,
        forced: &'a Forced,
        disk: DiskChoice,
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
        let sketch = Sketch::new(lowering, lowering.piece_elements());
        // What is on disk is fixed by `disk`.
        let forces = Forced { on_disk: None, ..forced.clone() } != Forced::default();
        Search {
            lowering,
            sketch,
            savings: savings(lowering),
            main,
            limits,
            disk,
            forced,
            forces,
            defers_gathers: gathers_count(lowering),
            measured: RwLock::default(),
        }
    }

    fn task(&self) -> &'a Task {
        self.lowering.task
    }

    fn profile(&self) -> &'a HardwareProfile {
        self.lowering.profile
    }

    /// Finds the fastest plan that fits; `None` if nothing does. Starts from `smallest` if none of the first candidates
    /// fits.
    pub(crate) fn run(&self, smallest: &Choice) -> Option<Found> {
        let mut progress = Progress::default();
        let free = self.first_round(self.candidates(Activations::Free));
        let (first, others) = free.split_at(free.len().min(AT_A_TIME));
        self.consider(first, &mut progress);
        // Also consider everything the fixed policies would try, so that none of them can be faster.
        for activations in Activations::FIXED {
            self.consider(&self.fixed(activations), &mut progress);
        }
        self.consider_until_enough(others, &mut progress);
        if progress.best.is_none() {
            self.consider(std::slice::from_ref(smallest), &mut progress);
        }
        let least = progress.best.as_ref().map(|(best, _)| best);
        if let Some(least) = least.filter(|best| self.does_the_least(best)).cloned() {
            // Only the time of the update is left to choose.
            self.consider(&self.with_other_updates(&least), &mut progress);
            return self.found(progress);
        }
        let mut starts = std::mem::take(&mut progress.starts);
        starts.sort_by(|a, b| a.1.total_cmp(&b.1));
        // Keep a few for each division of a step into groups, each with a different placement of parameters: no single
        // move from one to another is an improvement by itself.
        let mut shapes: HashMap<_, usize> = HashMap::default();
        starts.retain(|(choice, _)| {
            let of_shape = shapes.entry(choice.group_sizes()).or_default();
            *of_shape += 1;
            *of_shape <= STARTS_OF_EACH_SHAPE
        });
        let mut known = Known::default();
        for (start, count) in starts.into_iter().zip(NEAR_EACH_START) {
            let in_vain = self.items_max() * IN_VAIN_PERCENT / 100;
            let reach = Reach { groups: Groups::Same, count, in_vain };
            self.climb_from(start, &reach, &mut known, &mut progress);
        }
        if let Some(best) = progress.best.clone() {
            let in_vain = self.items_max() * IN_VAIN_PERCENT_LAST / 100;
            let reach = Reach { groups: Groups::Any, count: NEAR_THE_BEST, in_vain };
            self.climb_from(best, &reach, &mut known, &mut progress);
        }
        self.found(progress)
    }

    /// Whether nothing is copied and nothing recomputed, so that plans can differ only in the time of their updates.
    fn does_the_least(&self, choice: &Choice) -> bool {
        self.stages().zip(&choice.stages).all(|(stage, chosen)| {
            let blocks = self.blocks(stage);
            let pinned = [chosen.weights.pinned, chosen.gradients.pinned, chosen.states];
            let keeps = chosen.activations.kept.1
                * usize::from(chosen.activations.kept.0 + 1 == self.savings[stage].len());
            let keeps_all = self.savings[stage].len() == 1 || keeps == blocks;
            pinned == [blocks; 3]
                && keeps_all
                && chosen.activations.inputs_resident
                && chosen.activations.inputs_every == 1
        })
    }

    /// Climbs from a choice, and records what it finds.
    fn climb_from(
        &self,
        start: (Choice, f64),
        reach: &Reach,
        known: &mut Known,
        progress: &mut Progress,
    ) {
        let mut near = Progress { best: Some(start), items: progress.items, ..Progress::default() };
        self.climb(&mut near, reach, known);
        progress.items = near.items;
        progress.seen.append(&mut near.seen);
        if let Some((choice, seconds)) = near.best {
            self.compare(&choice, seconds, progress);
        }
    }

    /// Tries neighbors of the best choice, then of the best result, and so on, within its limits. Each turn of a choice
    /// lowers its priority.
    fn climb(&self, progress: &mut Progress, reach: &Reach, known: &mut Known) {
        let mut left = reach.count;
        // The fastest so far, and when it was found.
        let mut last = (f64::MAX, progress.items);
        let mut open: Vec<Center> = Vec::new();
        open.extend(progress.best.clone().map(|(choice, seconds)| Center::new(choice, seconds)));
        while left > 0 && !self.is_enough(progress) {
            let least = progress.best.as_ref().map_or(f64::MAX, |&(_, seconds)| seconds);
            if least < last.0 {
                last = (least, progress.items);
            } else if progress.items - last.1 > reach.in_vain {
                return;
            }
            let open_now = open.iter_mut().filter(|center| !center.is_exhausted());
            let next = open_now.min_by(|a, b| a.turn().total_cmp(&b.turn()));
            let Some(center) = next else { return };
            let count = left.min(NEIGHBOURS);
            let near = center.near.get_or_insert_with(|| self.near(&center.choice, reach.groups));
            let some = self.next_kinds(near, count, known, progress);
            center.rounds += 1;
            left -= some.len();
            known.extend(some.iter().map(|choice| (choice.clone(), f64::INFINITY)));
            for some in some.chunks(AT_A_TIME) {
                for (choice, seconds) in self.consider(some, progress) {
                    known.insert(choice.clone(), seconds);
                    open.push(Center::new(choice, seconds));
                }
            }
        }
    }

    /// Neighbors of a choice that fit, with as much kept as fits; fastest estimate last.
    fn near(&self, center: &Choice, groups: Groups) -> Vec<Choice> {
        let with_refilled = |choice: Choice| {
            let fits = self.fits(&choice);
            self.refilled(&choice).into_iter().chain(fits.then_some(choice))
        };
        let mut near = self.neighbours(center);
        near.retain(|choice| groups == Groups::Any || choice.groups_alike(center));
        let near = near.into_par_iter().flat_map_iter(with_refilled);
        let mut near = self.different(near.collect());
        near.retain(|choice| choice != center);
        let mut sorted = by_estimate(&Estimator::new(self.lowering, &self.savings), near);
        sorted.reverse();
        sorted
    }

    /// Takes the new choices with the fastest estimate from a list, but only a few with exactly the same estimate:
    /// differences that the estimate cannot see must not crowd out moves that it can. The others stay for later.
    fn next_kinds(
        &self,
        near: &mut Vec<Choice>,
        count: usize,
        known: &Known,
        progress: &mut Progress,
    ) -> Vec<Choice> {
        let estimator = Estimator::new(self.lowering, &self.savings);
        let mut alike: HashMap<u64, usize> = HashMap::default();
        let (mut taken, mut waiting) = (Vec::new(), Vec::new());
        while let Some(choice) = near.pop().filter(|_| taken.len() < count) {
            // Already sketched by another climb, so it costs nothing.
            if let Some(&seconds) = known.get(&choice) {
                self.compare(&choice, seconds, progress);
                continue;
            }
            let seen = alike.entry(estimator.step_seconds(&choice).to_bits()).or_default();
            *seen += 1;
            if *seen <= ALIKE { taken.push(choice) } else { waiting.push(choice) }
        }
        near.extend(waiting.into_iter().rev());
        taken
    }

    /// The fastest plan with a fixed policy for activations; none if none fits.
    pub(crate) fn run_fixed(&self, activations: Activations) -> Option<Found> {
        let mut progress = Progress::default();
        self.consider(&self.fixed(activations), &mut progress);
        self.found(progress)
    }

    /// A rough step time of the fastest plan, from a few sketches; `None` if nothing fits.
    pub(crate) fn guess(&self) -> Option<f64> {
        let mut progress = Progress::default();
        let candidates = self.candidates(Activations::Free);
        self.consider(&self.most_promising(candidates, GUESSED), &mut progress);
        progress.best.map(|(_, seconds)| seconds)
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

    /// Sketches choices in parallel, and records the fastest so far; the result does not depend on the number of
    /// threads. Skips choices that cannot beat the best so far. Returns the sketched ones.
    fn consider(&self, choices: &[Choice], progress: &mut Progress) -> Vec<(Choice, f64)> {
        let estimator = Estimator::new(self.lowering, &self.savings);
        let limit = progress.best.as_ref().map_or(f64::MAX, |&(_, seconds)| seconds);
        let hopeful: Vec<&Choice> =
            choices.iter().filter(|choice| estimator.least_seconds(choice) < limit).collect();
        let simulated: Vec<_> = hopeful.par_iter().map(|choice| self.sketched(choice)).collect();
        let mut found = Vec::new();
        for (choice, simulated) in hopeful.into_iter().zip(simulated) {
            let Some(Estimate { seconds, items }) = simulated else { continue };
            progress.items += items;
            self.compare(choice, seconds, progress);
            progress.seen.push((choice.clone(), seconds));
            found.push((choice.clone(), seconds));
        }
        found
    }

    /// Records a sketched choice if it is the fastest so far, overall or among those of its kind.
    fn compare(&self, choice: &Choice, seconds: f64, progress: &mut Progress) {
        let is_better =
            |(known, least): &(Choice, f64)| is_preferred((choice, seconds), (known, *least));
        match progress.starts.iter_mut().find(|(known, _)| known.is_of_a_kind_with(choice)) {
            Some(known) if is_better(known) => *known = (choice.clone(), seconds),
            Some(_) => {}
            None => progress.starts.push((choice.clone(), seconds)),
        }
        if progress.best.as_ref().is_none_or(is_better) {
            progress.best = Some((choice.clone(), seconds));
        }
    }

    fn is_enough(&self, progress: &Progress) -> bool {
        progress.items >= self.items_max()
    }

    /// Limit on the total items of all sketches.
    fn items_max(&self) -> usize {
        ITEMS_PER_BLOCK * self.lowering.blocks.count()
    }

    /// Sketches a choice; `None` if it does not fit.
    fn sketched(&self, choice: &Choice) -> Option<Estimate> {
        let decisions = self.decisions(choice);
        let layout = self.lowering.layout(&decisions).ok()?;
        let fits = layout.bytes().fits(&self.limits);
        fits.then(|| self.sketch.step_seconds(&decisions, &layout))
    }

    /// Simulates the plans with the fastest sketches, and takes the fastest.
    fn found(&self, mut progress: Progress) -> Option<Found> {
        let (best, least) = progress.best?;
        progress.seen.sort_by(|a, b| a.1.total_cmp(&b.1));
        let is_close = |(choice, seconds): &&(Choice, f64)| {
            *seconds <= least * (1.0 + CLOSE) && *choice != best
        };
        let others = progress.seen.iter().filter(is_close).take(FINAL - 1);
        let finals: Vec<&Choice> = std::iter::once(&best).chain(others.map(|(c, _)| c)).collect();
        let plans_built = finals.len();
        let lowered = |(at, choice): (usize, &&Choice)| self.lowered(choice, at == 0);
        let lowered: Vec<_> = finals.par_iter().enumerate().map(lowered).collect();
        let mut fastest: Option<(&Choice, Simulation, Option<Plan>)> = None;
        for (choice, lowered) in finals.into_iter().zip(lowered) {
            let Some((simulation, plan)) = lowered else { continue };
            let seconds = simulation.step_seconds;
            let is_better = |(known, least, _): &(&Choice, Simulation, Option<Plan>)| {
                is_preferred((choice, seconds), (known, least.step_seconds))
            };
            if fastest.as_ref().is_none_or(is_better) {
                fastest = Some((choice, simulation, plan));
            }
        }
        let (choice, simulation, plan) = fastest?;
        let decisions = self.decisions(choice);
        if let Some(plan) = plan {
            return Some(Found { decisions, plan, simulation, plans_built });
        }
        let plan = self.lowering.lower_with_evaluation(&decisions).ok()?;
        let simulation = simulate(&plan, self.profile());
        Some(Found { decisions, plan, simulation, plans_built })
    }

    /// Builds and simulates a choice's plan; `None` if it does not fit. Returns the plan if `is_whole`; otherwise
    /// builds only its step.
    fn lowered(&self, choice: &Choice, is_whole: bool) -> Option<(Simulation, Option<Plan>)> {
        let decisions = self.decisions(choice);
        let plan = match is_whole {
            true => self.lowering.lower_with_evaluation(&decisions),
            false => self.lowering.lower_step(&decisions),
        };
        let plan = plan.ok().filter(|plan| plan.bytes.fits(&self.limits))?;
        let simulation = simulate(&plan, self.profile());
        Some((simulation, is_whole.then_some(plan)))
    }

    /// The decisions of a choice.
    pub(crate) fn decisions(&self, choice: &Choice) -> Decisions {
        choice.decisions(self.lowering, &self.savings)
    }

    fn fits(&self, choice: &Choice) -> bool {
        self.bytes(choice).is_some_and(|bytes| bytes.fits(&self.limits))
    }

    /// Memory of a choice; `None` if it is contradictory.
    fn bytes(&self, choice: &Choice) -> Option<PerTier<usize>> {
        // The map is consistent even if a thread panicked while holding the lock.
        let known = self.measured.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&bytes) = known.get(choice) {
            return bytes;
        }
        drop(known);
        let bytes = self.lowering.memory(&self.decisions(choice)).ok();
        let mut known = self.measured.write().unwrap_or_else(PoisonError::into_inner);
        known.insert(choice.clone(), bytes);
        bytes
    }

    /// Those with the fastest estimate, at most `count`.
    fn most_promising(&self, choices: Vec<Choice>, count: usize) -> Vec<Choice> {
        let mut sorted = by_estimate(&Estimator::new(self.lowering, &self.savings), choices);
        sorted.truncate(count);
        sorted
    }

    /// Those with the fastest estimate, plus the fastest for each placement of parameters and for each division into
    /// groups: the estimate is better at comparing plans that agree in these.
    fn first_round(&self, choices: Vec<Choice>) -> Vec<Choice> {
        let mut sorted = by_estimate(&Estimator::new(self.lowering, &self.savings), choices);
        let others = sorted.split_off(sorted.len().min(FIRST_ROUND));
        for choice in others {
            let is_new = |alike: &dyn Fn(&Choice) -> bool| !sorted.iter().any(alike);
            if is_new(&|known| known.places_alike(&choice))
                || is_new(&|known| known.groups_alike(&choice))
            {
                sorted.push(choice);
            }
        }
        sorted
    }

    /// Group sizes worth trying.
    fn groups(&self) -> Vec<usize> {
        let micro_batches = self.task().lane_micro_batches();
        if let Some(group) = self.forced.group {
            return vec![group];
        }
        if self.forced.update == Some(UpdateTime::InBackward) {
            return vec![micro_batches];
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

    /// Whether updates stream nothing.
    fn updates_in_place(&self, choice: &Choice) -> bool {
        choice.stages.iter().enumerate().all(|(stage, chosen)| {
            let blocks = self.blocks(stage);
            chosen.weights.pinned == blocks
                && chosen.gradients.pinned == blocks
                && chosen.states == blocks
        })
    }

    /// Defers updates to the next step if they stream anything. Otherwise both times are possible only where other
    /// ranks send updated weights, which the next forward pass may hide.
    fn set_update(&self, choice: &mut Choice) {
        choice.update = match (self.updates_in_place(choice), self.defers_gathers) {
            (true, false) => UpdateTime::EndOfStep,
            (true, true) => choice.update,
            (false, _) => UpdateTime::NextStep,
        };
        if let Some(update) = self.forced.update {
            choice.update = update;
        }
    }

    /// The same choice with other update times, where there is a choice.
    fn with_other_updates(&self, choice: &Choice) -> Vec<Choice> {
        if !self.defers_gathers || !self.updates_in_place(choice) {
            return Vec::new();
        }
        let mut others = Vec::new();
        for update in [UpdateTime::EndOfStep, UpdateTime::NextStep] {
            let mut other = Choice { update, ..choice.clone() };
            self.set_update(&mut other);
            if other != *choice {
                others.push(other);
            }
        }
        others
    }

    /// Whether a choice respects the user's forced decisions.
    fn obeys(&self, choice: &Choice) -> bool {
        if !self.forces {
            return true;
        }
        let decisions = self.decisions(choice);
        let forced = self.forced;
        for (stage, chosen) in choice.stages.iter().enumerate() {
            let blocks = self.blocks(stage);
            // A request for streaming applies only to stages with several blocks.
            let placed = |wanted: Option<Placement>, pinned: usize| match wanted {
                Some(Placement::Resident) => pinned == blocks,
                Some(Placement::Streamed) => pinned == 0 || blocks == 1,
                None => true,
            };
            let first = choice.first.as_ref().map(|first| &first.stages[stage]);
            let every = |every: usize| {
                let mut groups = std::iter::once(&chosen.activations).chain(first);
                blocks == 1
                    || groups.all(|group| group.inputs_every == every && group.inputs_kept == 0)
            };
            if !placed(forced.weights, chosen.weights.pinned)
                || !placed(forced.gradients, chosen.gradients.pinned)
                || !placed(forced.states, chosen.states)
                || !forced.checkpoint_every.is_none_or(every)
            {
                return false;
            }
        }
        let stages = || decisions.groups.iter().flat_map(|group| &group.stages);
        let saved = || stages().flat_map(|stage| stage.saved.iter().flatten());
        let inputs = || {
            decisions.groups.iter().flat_map(|group| {
                (0..self.lowering.blocks.count()).filter_map(move |block| {
                    let has_input = self.lowering.blocks.seams[block].slab.size_bytes > 0;
                    self.lowering.input_storage(group, block).filter(|_| has_input)
                })
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

    /// Removes duplicates.
    fn different(&self, choices: Vec<Choice>) -> Vec<Choice> {
        let repeats: Vec<usize> = self.stages().map(|stage| self.blocks(stage)).collect();
        let mut seen = HashSet::default();
        let normalized = choices.into_iter().map(|choice| choice.normalized(&repeats));
        normalized.filter(|choice| seen.insert(choice.clone())).collect()
    }
}

/// Whether gathers of weights take a relevant fraction of a step, whose kernels take about three forward passes.
fn gathers_count(lowering: &Lowering<'_>) -> bool {
    let stages = lowering.task.program().stages().iter().enumerate();
    let forward: f64 = stages
        .map(|(stage, s)| s.repeat as f64 * lowering.forward_variant(stage).forward.seconds)
        .sum();
    let kernels = 3.0 * lowering.task.micro_batches as f64 * forward;
    lowering.communication().gather > GATHERS_COUNT * kernels
}

/// Sorts choices by estimate, fastest first.
fn by_estimate(estimator: &Estimator<'_>, choices: Vec<Choice>) -> Vec<Choice> {
    let guesses = choices.iter().map(|choice| estimator.step_seconds(choice));
    let mut order: Vec<(f64, usize)> = guesses.zip(0..).collect();
    // Sorts indices, because choices are large.
    order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut choices: Vec<Option<Choice>> = choices.into_iter().map(Some).collect();
    order.into_iter().filter_map(|(_, at)| choices[at].take()).collect()
}

/// Whether a choice is better than another. At about the same speed, the simpler one is: copies that gain nothing still
/// use power and bus bandwidth.
fn is_preferred((choice, seconds): (&Choice, f64), (known, least): (&Choice, f64)) -> bool {
    let gain = (least - seconds) / least;
    gain > ALIKE_SHARE || (gain > -ALIKE_SHARE && simpler(choice, known))
}

/// Whether less is copied.
fn simpler(a: &Choice, b: &Choice) -> bool {
    let moving = |choice: &Choice| {
        let sum = |f: fn(&StageChoice) -> usize| choice.stages.iter().map(f).sum::<usize>();
        let pinned = sum(|chosen| chosen.weights.pinned + chosen.gradients.pinned + chosen.states);
        (
            sum(|chosen| {
                chosen.activations.offloaded.1 + usize::from(chosen.activations.offloads_beside)
            }),
            sum(|chosen| usize::from(!chosen.activations.inputs_resident)),
            usize::MAX - pinned,
            choice.group,
        )
    };
    moving(a) < moving(b)
}
