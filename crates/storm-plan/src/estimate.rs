//! A quick guess of a plan's step time, to decide which plans are worth building: each pass takes as
//! long as the busiest of compute and the two copy queues.

use crate::choice::{Choice, Saving};
use crate::lower::Lowering;
use crate::{Storage, Streaming, UpdateTime};

/// Times and sizes of a task that all guesses share, for one micro-batch.
pub(crate) struct Estimator<'a> {
    lowering: &'a Lowering<'a>,
    savings: &'a [Saving],
    layer_forward: f64,
    layer_backward: f64,
    edges: f64,
    boundary_bytes: f64,
    weights_bytes: f64,
    gradients_bytes: f64,
    states_bytes: f64,
    edge_states_bytes: f64,
}

impl<'a> Estimator<'a> {
    pub(crate) fn new(lowering: &'a Lowering<'a>, savings: &'a [Saving]) -> Estimator<'a> {
        let full = vec![Storage::Keep; lowering.units.len()];
        let [_, layer] = lowering.layer(&full);
        let sizes = lowering.sizes();
        Estimator {
            layer_forward: layer.forward.seconds,
            layer_backward: layer.backward.seconds,
            edges: lowering.edge_seconds(),
            boundary_bytes: sizes.boundary as f64,
            weights_bytes: sizes.layer_weights as f64,
            gradients_bytes: sizes.layer_gradients as f64,
            states_bytes: sizes.layer_states as f64,
            edge_states_bytes: sizes.edge_states as f64,
            lowering,
            savings,
        }
    }

    /// Less than any plan of this choice takes: one queue without a pause.
    pub(crate) fn least_seconds(&self, choice: &Choice) -> f64 {
        let task = self.lowering.task;
        let micro_batches = task.micro_batches as f64;
        let layer = self.layer_forward + self.layer_backward;
        let made = task.layer_count() as f64 * layer + self.again_seconds(choice) + self.edges;
        // The first micro-batch adds to no gradient, which is a little quicker.
        let compute = 0.999 * micro_batches * made;
        let layers_beyond = |slots: usize| task.layer_count().saturating_sub(slots) as f64;
        let groups = micro_batches / choice.group as f64;
        let weights_in = 2.0 * groups * layers_beyond(choice.weights.slots()) * self.weights_bytes;
        let gradients_out = groups * layers_beyond(choice.gradients.slots()) * self.gradients_bytes;
        let profile = self.lowering.profile;
        compute
            .max(weights_in / profile.host_to_device_bandwidth)
            .max(gradients_out / profile.device_to_host_bandwidth)
    }

    /// What is made again, in one micro-batch.
    fn again_seconds(&self, choice: &Choice) -> f64 {
        let layers = self.lowering.task.layer_count() as f64;
        let kept = choice.kept.1 as f64;
        let offloaded = (choice.offloaded.1 as f64).min(layers - kept);
        let below = self.lowering.task.layer_count().saturating_sub(choice.inputs_kept);
        let replayed = (below - below.div_ceil(choice.inputs_every.max(1))) as f64;
        kept * self.savings[choice.kept.0].again_seconds
            + offloaded * self.savings[choice.offloaded.0].again_seconds
            + (layers - kept - offloaded) * self.savings[0].again_seconds
            + replayed * self.layer_forward
    }

    /// Seconds of a step.
    pub(crate) fn step_seconds(&self, choice: &Choice) -> f64 {
        let task = self.lowering.task;
        let (layers, group) = (task.layer_count() as f64, choice.group as f64);
        let groups = task.micro_batches as f64 / group;
        let profile = self.lowering.profile;
        let pass = |compute: f64, into: f64, out: f64| {
            let into = into / profile.host_to_device_bandwidth;
            let out = out / profile.device_to_host_bandwidth;
            compute.max(into).max(out)
        };
        let misses = |streaming: Streaming| {
            (task.layer_count() - streaming.slots().min(task.layer_count())) as f64
        };
        let beyond = |streaming: Streaming| layers - streaming.pinned as f64;
        let kept = choice.kept.1 as f64;
        let offloaded = (choice.offloaded.1 as f64).min(layers - kept);
        let every = choice.inputs_every.max(1) as f64;
        let stored = (layers - choice.inputs_kept as f64).max(0.0) / every;
        let inputs_out = if choice.inputs_resident { 0.0 } else { stored * self.boundary_bytes };
        let activations_out =
            group * (inputs_out + offloaded * self.savings[choice.offloaded.0].bytes as f64);
        let forward = group * layers * self.layer_forward;
        let backward = group * (layers * self.layer_backward + self.again_seconds(choice));
        let weights_in = misses(choice.weights) * self.weights_bytes;
        let edge_states = if choice.edge_states_resident { 0.0 } else { self.edge_states_bytes };
        let states = beyond(choice.states) * self.states_bytes;
        let update_in = states + misses(choice.gradients) * self.gradients_bytes;
        let update_out = states + beyond(choice.weights) * self.weights_bytes;
        let gradients = beyond(choice.gradients) * self.gradients_bytes;
        let compute = groups * group * self.edges;
        let plain_forward = pass(forward, weights_in, activations_out);
        let first_backward = pass(backward, weights_in + activations_out, gradients);
        let later_backward = pass(backward, weights_in + activations_out + gradients, gradients);
        let mut seconds = compute + first_backward + (groups - 1.0) * later_backward;
        seconds += (groups - 1.0) * plain_forward;
        seconds += match choice.update {
            UpdateTime::NextStep => {
                pass(0.0, edge_states / 2.0, 0.0)
                    + pass(forward, weights_in + update_in + edge_states / 2.0, {
                        activations_out + update_out + edge_states
                    })
            }
            UpdateTime::EndOfStep => {
                let all = layers
                    * (2.0 * self.weights_bytes + self.gradients_bytes + 2.0 * self.states_bytes);
                plain_forward
                    + pass(
                        all / profile.memory_bandwidth,
                        update_in + weights_in + edge_states,
                        update_out + edge_states,
                    )
            }
        };
        // With a single slot, what comes in waits for what it replaces: about half is not hidden.
        let has_one_slot =
            |streaming: Streaming| streaming.pinned < task.layer_count() && streaming.ring < 2;
        let mut alone = 0.0;
        if has_one_slot(choice.weights) {
            alone += groups * weights_in / profile.host_to_device_bandwidth;
        }
        if has_one_slot(choice.gradients) {
            alone += groups * gradients / profile.device_to_host_bandwidth / 2.0;
        }
        if choice.activation_ring < 2 {
            alone += groups * activations_out / profile.host_to_device_bandwidth / 2.0;
        }
        seconds + alone
    }
}
