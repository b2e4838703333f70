//! A quick guess of a plan's step time, to decide which plans are worth building: each pass takes as
//! long as the busiest of compute and the two copy queues.

use crate::choice::{Choice, Saving, StageChoice};
use crate::decisions::RingMemory;
use crate::lower::{Lowering, Sizes};
use crate::queue::Link;
use crate::{Storage, Streaming, UpdateTime};

/// Times and sizes of a task that all guesses share.
pub(crate) struct Estimator<'a> {
    lowering: &'a Lowering<'a>,
    savings: &'a [Vec<Saving>],
    stages: Vec<Times>,
}

/// One block of a stage, in one micro-batch.
struct Times {
    blocks: f64,
    forward: f64,
    /// Without what is recomputed. Of the last stage, both passes.
    backward: f64,
    sizes: Sizes,
    /// Passes of a group in which its weights are read.
    passes: f64,
}

/// Bytes of a step, or of one of its passes.
#[derive(Clone, Copy, Default)]
struct Traffic {
    weights: f64,
    gradients: f64,
    inputs_out: f64,
    activations_out: f64,
    states: f64,
    update_gradients: f64,
    updated_weights: f64,
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
        Estimator { lowering, savings, stages }
    }

    /// Less than any plan of this choice takes: one queue without a pause.
    pub(crate) fn least_seconds(&self, choice: &Choice) -> f64 {
        let micro_batches = self.lowering.task.micro_batches as f64;
        let computed: f64 = self.stages.iter().map(|t| t.blocks * (t.forward + t.backward)).sum();
        // The first micro-batch adds to no gradient, which is a little quicker.
        let compute = 0.999 * micro_batches * (computed + self.recompute_seconds(choice));
        let groups = micro_batches / choice.group as f64;
        let (mut weights_in, mut gradients_out) = (0.0, 0.0);
        for (times, chosen) in self.stages.iter().zip(&choice.stages) {
            let beyond = |streaming: Streaming| (times.blocks - streaming.slots() as f64).max(0.0);
            weights_in += times.passes * beyond(chosen.weights) * times.sizes.weights as f64;
            gradients_out += beyond(chosen.gradients) * times.sizes.gradients as f64;
        }
        let profile = self.lowering.profile;
        compute
            .max(groups * weights_in / profile.link(Link::HOST_TO_DEVICE).bandwidth)
            .max(groups * gradients_out / profile.link(Link::DEVICE_TO_HOST).bandwidth)
    }

    /// What is recomputed, in one micro-batch.
    fn recompute_seconds(&self, choice: &Choice) -> f64 {
        let stages = choice.stages.iter().enumerate();
        stages.map(|(stage, chosen)| self.stage_recompute_seconds(stage, chosen)).sum()
    }

    fn stage_recompute_seconds(&self, stage: usize, chosen: &StageChoice) -> f64 {
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

    /// What a group moves.
    fn traffic(&self, choice: &Choice) -> Traffic {
        let mut traffic = Traffic::default();
        let shared = choice.rings == RingMemory::Shared;
        let group = choice.group as f64;
        for (stage, (times, chosen)) in self.stages.iter().zip(&choice.stages).enumerate() {
            let beyond = |streaming: Streaming| times.blocks - streaming.pinned as f64;
            let misses = |streaming: Streaming| match shared {
                true => beyond(streaming),
                false => (times.blocks - streaming.slots() as f64).max(0.0),
            };
            let sizes = &times.sizes;
            traffic.weights += misses(chosen.weights) * sizes.weights as f64;
            let moving = match misses(chosen.gradients) > 0.0 {
                true => beyond(chosen.gradients),
                false => 0.0,
            };
            traffic.gradients += moving * sizes.gradients as f64;
            traffic.update_gradients += misses(chosen.gradients) * sizes.gradients as f64;
            traffic.updated_weights += beyond(chosen.weights) * sizes.weights as f64;
            traffic.states += (times.blocks - chosen.states as f64) * sizes.states as f64;
            if times.passes < 2.0 {
                continue;
            }
            let kept = (chosen.kept.1 as f64).min(times.blocks);
            let offloaded = (chosen.offloaded.1 as f64).min(times.blocks - kept);
            let savings = &self.savings[stage];
            let bytes = savings[chosen.offloaded.0].bytes as f64;
            let beside = match chosen.offloads_beside {
                true => (bytes - savings[chosen.kept.0].bytes as f64).max(0.0),
                false => 0.0,
            };
            traffic.activations_out += group * (offloaded * bytes + kept * beside);
            if !chosen.inputs_resident {
                let every = chosen.inputs_every.max(1) as f64;
                let stored = (times.blocks - chosen.inputs_kept as f64).max(0.0) / every;
                traffic.inputs_out += group * stored * sizes.input as f64;
            }
        }
        traffic
    }

    /// Seconds of a step.
    pub(crate) fn step_seconds(&self, choice: &Choice) -> f64 {
        let group = choice.group as f64;
        let groups = self.lowering.task.micro_batches as f64 / group;
        let profile = self.lowering.profile;
        let pass = |compute: f64, into: f64, out: f64| {
            let into = into / profile.link(Link::HOST_TO_DEVICE).bandwidth;
            let out = out / profile.link(Link::DEVICE_TO_HOST).bandwidth;
            compute.max(into).max(out)
        };
        let traffic = self.traffic(choice);
        let forward: f64 = self.stages.iter().map(|t| group * t.blocks * t.forward).sum();
        let plain_forward =
            pass(forward, traffic.weights, traffic.inputs_out + traffic.activations_out);
        if self.lowering.task.training.is_none() {
            return groups * pass(forward, traffic.weights, 0.0);
        }
        let backward: f64 = self.stages.iter().map(|t| t.blocks * t.backward).sum();
        let backward = group * (backward + self.recompute_seconds(choice));
        let activations = traffic.inputs_out + traffic.activations_out;
        let gradients = traffic.gradients;
        let first_backward = pass(backward, traffic.weights + activations, gradients);
        let later_backward = pass(backward, traffic.weights + activations + gradients, gradients);
        let mut seconds = first_backward + (groups - 1.0) * later_backward;
        seconds += (groups - 1.0) * plain_forward;
        let update_in = traffic.states + traffic.update_gradients;
        let update_out = traffic.states + traffic.updated_weights;
        seconds += match choice.update {
            UpdateTime::NextStep => {
                pass(forward, traffic.weights + update_in, activations + update_out)
            }
            UpdateTime::EndOfStep => {
                let stages = self.stages.iter().map(|t| (t.blocks, &t.sizes));
                let all: f64 = stages
                    .map(|(blocks, s)| blocks * (2 * s.weights + s.gradients + 2 * s.states) as f64)
                    .sum();
                plain_forward
                    + pass(all / profile.memory_bandwidth, update_in + traffic.weights, update_out)
            }
        };
        seconds + self.exposed_seconds(choice, groups, &traffic)
    }

    /// With a single slot, what comes in waits for what it replaces: about half is not hidden.
    fn exposed_seconds(&self, choice: &Choice, groups: f64, traffic: &Traffic) -> f64 {
        let profile = self.lowering.profile;
        let any_has_one_slot = |class: fn(&StageChoice) -> Streaming| {
            let mut stages = self.stages.iter().zip(&choice.stages);
            stages.any(|(times, chosen)| {
                let streaming = class(chosen);
                times.blocks > 1.0 && (streaming.pinned as f64) < times.blocks && streaming.ring < 2
            })
        };
        let mut alone = 0.0;
        if any_has_one_slot(|chosen| chosen.weights) {
            alone += groups * traffic.weights / profile.link(Link::HOST_TO_DEVICE).bandwidth;
        }
        if any_has_one_slot(|chosen| chosen.gradients) {
            alone +=
                groups * traffic.gradients / profile.link(Link::DEVICE_TO_HOST).bandwidth / 2.0;
        }
        if choice.activation_ring < 2 {
            let activations = traffic.inputs_out + traffic.activations_out;
            alone += groups * activations / profile.link(Link::HOST_TO_DEVICE).bandwidth / 2.0;
        }
        alone
    }
}
