//! A quick estimate of a plan's step time, to decide which plans are worth building: each pass takes as long as its
//! busiest queue: compute, the two copy queues, or the queue between ranks.

use crate::choice::{ActivationChoice, Choice, Saving, StageChoice};
use crate::decisions::RingMemory;
use crate::lower::{Communication, Lowering, Sizes};
use crate::queue::Link;
use crate::{Storage, Streaming, UpdateTime};

/// Even the busiest copy queue has gaps: it waits for slots.
const COPIES_WAIT: f64 = 1.1;

/// Times and sizes of a task that all estimates share.
pub(crate) struct Estimator<'a> {
    lowering: &'a Lowering<'a>,
    savings: &'a [Vec<Saving>],
    stages: Vec<Times>,
    ranks: Communication,
}

/// One block of a stage, in one micro-batch.
struct Times {
    blocks: f64,
    forward: f64,
    /// Without recomputation. For the last stage, both passes.
    backward: f64,
    sizes: Sizes,
    /// Passes of a group in which its weights are read.
    passes: f64,
}

/// Bytes of parameters, gradients and state copied in a pass of a group, or with the update.
#[derive(Clone, Copy, Default)]
struct ParameterTraffic {
    weights: f64,
    /// The part of the weights that comes from disk.
    from_disk: f64,
    gradients: f64,
    states: f64,
    update_gradients: f64,
    updated_weights: f64,
    /// Sums of lanes, each copied in and out for every lane but the first.
    sums: f64,
}

/// A group of micro-batches: its costs besides parameters.
struct GroupTimes {
    forward: f64,
    /// Including recomputation.
    backward: f64,
    /// Bytes that leave in the forward pass and return in the backward pass.
    offloaded: f64,
}

impl<'a> Estimator<'a> {
    pub(crate) fn new(lowering: &'a Lowering<'a>, savings: &'a [Vec<Saving>]) -> Estimator<'a> {
        let trains = lowering.task.training.is_some();
        let program = lowering.task.program();
        let last = program.stages().len() - 1;
        let mut stages = Vec::new();
        for (stage, s) in program.stages().iter().enumerate() {
            let (mut forward, mut backward) =
                (lowering.forward_variant(stage).forward.seconds, 0.0);
            let is_reached = trains && program.is_reached(stage);
            if is_reached {
                let all = vec![Storage::Keep; lowering.units[stage].len()];
                let [_, variant] = lowering.training_variants(stage, &all);
                (forward, backward) = (variant.forward.seconds, variant.backward.seconds);
            }
            stages.push(Times {
                blocks: s.repeat as f64,
                forward,
                backward,
                sizes: lowering.sizes(stage),
                passes: if is_reached && stage != last { 2.0 } else { 1.0 },
            });
        }
        Estimator { lowering, savings, stages, ranks: lowering.communication() }
    }

    /// A lower bound for every plan of this choice: the time of the busiest queue without gaps.
    pub(crate) fn least_seconds(&self, choice: &Choice) -> f64 {
        let (lanes, after_first) = self.counts(choice);
        let [first, usual] = self.groups(choice);
        // The first micro-batch adds to no gradient, which is slightly faster.
        let compute = |group: &GroupTimes| 0.999 * (group.forward + group.backward);
        let compute = lanes * compute(&first) + after_first * compute(&usual);
        let (mut weights_in, mut gradients_out) = (0.0, 0.0);
        for (times, chosen) in self.stages.iter().zip(&choice.stages) {
            let beyond = |streaming: Streaming| (times.blocks - streaming.slots() as f64).max(0.0);
            weights_in += times.passes * beyond(chosen.weights) * times.sizes.weights as f64;
            if choice.update != UpdateTime::InBackward {
                gradients_out += beyond(chosen.gradients) * times.sizes.gradients as f64;
            }
        }
        let (profile, groups) = (self.lowering.profile, lanes + after_first);
        compute
            .max(groups * weights_in / profile.link(Link::HOST_TO_DEVICE).bandwidth)
            .max(groups * gradients_out / profile.link(Link::DEVICE_TO_HOST).bandwidth)
            .max(self.ranks.busy_seconds(lanes))
    }

    /// Lanes of a step, each of which begins with the first group, and how many groups of a step follow these.
    fn counts(&self, choice: &Choice) -> (f64, f64) {
        let task = self.lowering.task;
        let after_first = choice.groups_after_first(task.lane_micro_batches());
        (task.lanes as f64, (task.lanes * after_first) as f64)
    }

    /// The first group of a choice, and those after it.
    fn groups(&self, choice: &Choice) -> [GroupTimes; 2] {
        let usual = self.group(choice.group, &choice.usual_activations());
        let first = match &choice.first {
            Some(first) => self.group(first.group, &first.stages),
            None => GroupTimes { ..usual },
        };
        [first, usual]
    }

    fn group(&self, micro_batches: usize, chosen: &[ActivationChoice]) -> GroupTimes {
        let (mut forward, mut backward, mut offloaded) = (0.0, 0.0, 0.0);
        for (stage, (times, chosen)) in self.stages.iter().zip(chosen).enumerate() {
            forward += times.blocks * times.forward;
            backward += times.blocks * times.backward + self.recompute_seconds(stage, chosen);
            offloaded += self.offloaded_bytes(stage, chosen);
        }
        let count = micro_batches as f64;
        GroupTimes {
            forward: count * forward,
            backward: count * backward,
            offloaded: count * offloaded,
        }
    }

    /// Time a stage spends on recomputation in one micro-batch.
    fn recompute_seconds(&self, stage: usize, chosen: &ActivationChoice) -> f64 {
        let (times, savings) = (&self.stages[stage], &self.savings[stage]);
        let kept = (chosen.kept.1 as f64).min(times.blocks);
        let offloaded = (chosen.offloaded.1 as f64).min(times.blocks - kept);
        let of_kept = match chosen.offloads_beside {
            false => savings[chosen.kept.0].recompute_seconds,
            true => self.lowering.recompute_seconds(stage, &chosen.mask_of_kept(savings)),
        };
        let below = (times.blocks as usize).saturating_sub(chosen.inputs_kept);
        let replayed = (below - below.div_ceil(chosen.inputs_every.max(1))) as f64;
        let replayed = if times.passes > 1.0 { replayed } else { 0.0 };
        kept * of_kept
            + offloaded * savings[chosen.offloaded.0].recompute_seconds
            + (times.blocks - kept - offloaded) * savings[0].recompute_seconds
            + replayed * times.forward
    }

    /// Bytes a stage offloads in one micro-batch.
    fn offloaded_bytes(&self, stage: usize, chosen: &ActivationChoice) -> f64 {
        let (times, savings) = (&self.stages[stage], &self.savings[stage]);
        if times.passes < 2.0 {
            return 0.0;
        }
        let kept = (chosen.kept.1 as f64).min(times.blocks);
        let offloaded = (chosen.offloaded.1 as f64).min(times.blocks - kept);
        let bytes = savings[chosen.offloaded.0].bytes as f64;
        let beside = match chosen.offloads_beside {
            true => self.bytes_beside(stage, chosen),
            false => 0.0,
        };
        let inputs = match chosen.inputs_resident {
            true => 0.0,
            false => {
                let every = chosen.inputs_every.max(1) as f64;
                let stored = (times.blocks - chosen.inputs_kept as f64).max(0.0) / every;
                stored * times.sizes.input as f64
            }
        };
        offloaded * bytes + kept * beside + inputs
    }

    /// Bytes offloaded by a block that keeps some units.
    fn bytes_beside(&self, stage: usize, chosen: &ActivationChoice) -> f64 {
        let savings = &self.savings[stage];
        let (kept, away) = (&savings[chosen.kept.0].mask, &savings[chosen.offloaded.0].mask);
        let units = self.lowering.units[stage].iter().zip(kept.iter().zip(away));
        let leaves = units.filter(|(_, (kept, away))| **away && !**kept);
        leaves.map(|(unit, _)| unit.size_bytes as f64).sum()
    }

    /// The traffic of parameters, gradients and state.
    fn traffic(&self, choice: &Choice) -> ParameterTraffic {
        let mut traffic = ParameterTraffic::default();
        let shared = choice.rings == RingMemory::Shared;
        for (times, chosen) in self.stages.iter().zip(&choice.stages) {
            let beyond = |streaming: Streaming| times.blocks - streaming.pinned as f64;
            let misses = |streaming: Streaming| match shared {
                true => beyond(streaming),
                false => (times.blocks - streaming.slots() as f64).max(0.0),
            };
            let sizes = &times.sizes;
            traffic.weights += misses(chosen.weights) * sizes.weights as f64;
            let (pinned, blocks) = (chosen.weights.pinned, times.blocks as usize);
            let on_disk = choice.disk.frozen_blocks(blocks, pinned) as f64;
            let share = on_disk / beyond(chosen.weights).max(1.0);
            traffic.from_disk += share * misses(chosen.weights) * sizes.frozen as f64;
            let last = choice.update != UpdateTime::InBackward;
            let moving = match last && misses(chosen.gradients) > 0.0 {
                true => beyond(chosen.gradients),
                false => 0.0,
            };
            traffic.gradients += moving * sizes.gradients as f64;
            if last {
                traffic.update_gradients += misses(chosen.gradients) * sizes.gradients as f64;
            }
            traffic.sums += beyond(chosen.gradients) * sizes.sums as f64;
            traffic.updated_weights += beyond(chosen.weights) * sizes.weights as f64;
            traffic.states += (times.blocks - chosen.states as f64) * sizes.states as f64;
        }
        traffic
    }

    /// The time of a pass, which is that of its busiest queue. `into` includes the weights of `traffic`.
    fn pass(&self, compute: f64, into: f64, out: f64, traffic: &ParameterTraffic) -> f64 {
        let profile = self.lowering.profile;
        let disk = profile.find_link(Link::DISK_TO_HOST);
        let disk = disk.map_or(0.0, |link| traffic.from_disk / link.bandwidth);
        let into = into / profile.link(Link::HOST_TO_DEVICE).bandwidth;
        let out = out / profile.link(Link::DEVICE_TO_HOST).bandwidth;
        compute.max(COPIES_WAIT * into).max(COPIES_WAIT * out).max(COPIES_WAIT * disk)
    }

    /// Seconds of a step.
    pub(crate) fn step_seconds(&self, choice: &Choice) -> f64 {
        let (lanes, after_first) = self.counts(choice);
        let traffic = self.traffic(choice);
        let [first, usual] = self.groups(choice);
        if self.lowering.task.training.is_none() {
            return self.pass(first.forward, traffic.weights, 0.0, &traffic)
                + after_first * self.pass(usual.forward, traffic.weights, 0.0, &traffic);
        }
        let gradients = traffic.gradients;
        let into = |group: &GroupTimes| traffic.weights + group.offloaded;
        let update_in = traffic.states + traffic.update_gradients;
        let update_out = traffic.states + traffic.updated_weights;
        let (more_in, more_out) = match choice.update {
            UpdateTime::InBackward => (update_in, update_out),
            _ => (0.0, 0.0),
        };
        let seconds = self.usual_group_seconds(&usual, &traffic) * after_first
            + self.pass(first.backward, into(&first) + more_in, gradients + more_out, &traffic);
        let first_forward = match choice.update {
            UpdateTime::NextStep => {
                let (into, out) = (traffic.weights + update_in, first.offloaded + update_out);
                self.pass(first.forward, into, out, &traffic)
            }
            UpdateTime::InBackward => {
                self.pass(first.forward, traffic.weights, first.offloaded, &traffic)
            }
            UpdateTime::EndOfStep => {
                let stages = self.stages.iter().map(|t| (t.blocks, &t.sizes));
                let all: f64 = stages
                    .map(|(blocks, s)| blocks * (2 * s.weights + s.gradients + 2 * s.states) as f64)
                    .sum();
                let update = all / self.lowering.profile.memory_bandwidth;
                self.pass(first.forward, traffic.weights, first.offloaded, &traffic)
                    + self.pass(update, update_in + traffic.weights, update_out, &traffic)
            }
        };
        let summed = |bytes: f64| bytes + traffic.sums;
        let later_lane = self.pass(first.forward, traffic.weights, first.offloaded, &traffic)
            + self.pass(first.backward, summed(into(&first)), summed(gradients), &traffic);
        seconds
            + first_forward
            + (lanes - 1.0) * later_lane
            + self.exposed_seconds(choice, after_first + lanes - 1.0, &traffic)
            + self.waiting_for_ranks(
                choice,
                &first,
                if after_first > 0.0 { &usual } else { &first },
            )
    }

    /// Time of the queue between ranks that kernels do not hide. Exchanges overlap with the backward pass of the last
    /// group of a lane, except for the last exchange. Gathers overlap with the next forward pass if updates are
    /// deferred.
    fn waiting_for_ranks(&self, choice: &Choice, first: &GroupTimes, ending: &GroupTimes) -> f64 {
        let Communication { exchange, last_exchange, gather, squares } = self.ranks;
        let exchanges = last_exchange + (exchange - last_exchange - ending.backward).max(0.0);
        let gathers = match choice.update {
            UpdateTime::NextStep => (gather - first.forward).max(0.0),
            UpdateTime::EndOfStep | UpdateTime::InBackward => gather,
        };
        self.lowering.task.lanes as f64 * exchanges + gathers + squares
    }

    /// Time of a group that applies no update and starts no gradients.
    pub(crate) fn later_group_seconds(&self, choice: &Choice) -> f64 {
        let [_, usual] = self.groups(choice);
        self.usual_group_seconds(&usual, &self.traffic(choice))
    }

    fn usual_group_seconds(&self, group: &GroupTimes, traffic: &ParameterTraffic) -> f64 {
        let (weights, gradients) = (traffic.weights, traffic.gradients);
        self.pass(group.forward, weights, group.offloaded, traffic)
            + self.pass(group.backward, weights + group.offloaded + gradients, gradients, traffic)
    }

    /// With a single slot, incoming data waits for the data it replaces: about half of the copy time is not hidden.
    fn exposed_seconds(
        &self,
        choice: &Choice,
        after_first: f64,
        traffic: &ParameterTraffic,
    ) -> f64 {
        let profile = self.lowering.profile;
        let any_has_one_slot = |class: fn(&StageChoice) -> Streaming| {
            let mut stages = self.stages.iter().zip(&choice.stages);
            stages.any(|(times, chosen)| {
                let streaming = class(chosen);
                times.blocks > 1.0 && (streaming.pinned as f64) < times.blocks && streaming.ring < 2
            })
        };
        let into = profile.link(Link::HOST_TO_DEVICE).bandwidth;
        let out = profile.link(Link::DEVICE_TO_HOST).bandwidth;
        let groups = 1.0 + after_first;
        let mut alone = 0.0;
        if any_has_one_slot(|chosen| chosen.weights) {
            alone += groups * traffic.weights / into;
        }
        if any_has_one_slot(|chosen| chosen.gradients) {
            alone += groups * traffic.gradients / out / 2.0;
        }
        if choice.activation_ring < 2 {
            let [first, usual] = self.groups(choice);
            alone += (first.offloaded + after_first * usual.offloaded) / into / 2.0;
        }
        alone
    }
}
