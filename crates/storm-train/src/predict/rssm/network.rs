//! The recurrent state-space model: a GRU whose state is joined by categorical latents. The posterior sees the observation of a
//! step, the prior does not. From both states come the observation again, and what would become of a jump of some length.

use super::tape::{Matrix, Node, Outcome, Tape, sigmoid};
use storm_graph::random::{Purpose, Seed, Stream, words};

/// Numbers of an observation.
pub(super) const OBSERVED: usize = 22;
/// Numbers that say what was done before a step.
pub(super) const ACTED: usize = 3;
const HIDDEN: usize = 32;
const GROUPS: usize = 32;
const CLASSES: usize = 16;
const LATENT: usize = GROUPS * CLASSES;
const HEAD: usize = 16;
const OUTPUTS: usize = 3;

/// Shares of the divergence that pull the posterior and the prior.
const BALANCE: [f32; 2] = [0.2, 0.8];
/// A divergence that costs nothing, in nats of a step.
const FREE: f32 = 1.0;

/// No parameter of a model has this stream.
const STREAM: u16 = u16::MAX;

/// Where parameters are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Network {
    latent_in: Matrix,
    action_in: Matrix,
    bias_in: usize,
    /// Of the input and of the state, for reset, update and candidate.
    gates: [(Matrix, Matrix, usize); 3],
    prior: (Matrix, usize),
    posterior: (Matrix, Matrix, usize),
    trunk: (Matrix, Matrix, usize),
    decoder: (Matrix, usize),
    head: (Matrix, Matrix, usize),
    outputs: (Matrix, usize),
    /// Of all.
    pub(super) parameters: usize,
}

/// Hands out places for parameters.
struct Places(usize);

impl Places {
    fn matrix(&mut self, rows: usize, columns: usize) -> Matrix {
        let matrix = Matrix { at: self.0, rows, columns };
        self.0 += rows * columns;
        matrix
    }

    fn bias(&mut self, len: usize) -> usize {
        self.0 += len;
        self.0 - len
    }
}

/// What a jump would come to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Expected {
    /// Of the logarithm of the loss, scaled.
    pub(super) change: f32,
    pub(super) deviation: f32,
    /// Probability that it is accepted.
    pub(super) acceptance: f32,
}

/// A step: what was done before it, what was seen, and what became of the jump after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tick {
    pub(super) action: [f32; ACTED],
    pub(super) observation: [f32; OBSERVED],
    /// The length of a jump after it, as a feature, and what became of it.
    pub(super) jump: Option<(f32, Outcome)>,
}

/// The state after some ticks.
struct State {
    hidden: Node,
    latent: Node,
}

impl Network {
    pub(super) fn new() -> Network {
        let mut places = Places(0);
        let latent_in = places.matrix(HIDDEN, LATENT);
        let action_in = places.matrix(HIDDEN, ACTED);
        let bias_in = places.bias(HIDDEN);
        let gates = [(); 3].map(|()| {
            let of_input = places.matrix(HIDDEN, HIDDEN);
            (of_input, places.matrix(HIDDEN, HIDDEN), places.bias(HIDDEN))
        });
        let prior = (places.matrix(LATENT, HIDDEN), places.bias(LATENT));
        let posterior =
            (places.matrix(LATENT, HIDDEN), places.matrix(LATENT, OBSERVED), places.bias(LATENT));
        let trunk =
            (places.matrix(HIDDEN, HIDDEN), places.matrix(HIDDEN, LATENT), places.bias(HIDDEN));
        let decoder = (places.matrix(OBSERVED, HIDDEN), places.bias(OBSERVED));
        let head = (places.matrix(HEAD, HIDDEN), places.matrix(HEAD, 2), places.bias(HEAD));
        let outputs = (places.matrix(OUTPUTS, HEAD), places.bias(OUTPUTS));
        Network {
            latent_in,
            action_in,
            bias_in,
            gates,
            prior,
            posterior,
            trunk,
            decoder,
            head,
            outputs,
            parameters: places.0,
        }
    }

    /// Uniform, by the number of inputs; biases are zero.
    pub(super) fn initial(&self, seed: u64) -> Vec<f32> {
        let mut parameters = vec![0.0; self.parameters];
        let mut matrices = vec![self.latent_in, self.action_in];
        matrices.extend(self.gates.iter().flat_map(|&(a, b, _)| [a, b]));
        matrices.extend([self.prior.0, self.posterior.0, self.posterior.1]);
        matrices.extend([self.trunk.0, self.trunk.1, self.decoder.0]);
        matrices.extend([self.head.0, self.head.1, self.outputs.0]);
        for Matrix { at, rows, columns } in matrices {
            // Of a latent, one class of each group is in.
            let inputs = if columns == LATENT { GROUPS } else { columns };
            let scale = 1.0 / (inputs as f32).sqrt();
            let of_matrix = parameters[at..at + rows * columns].iter_mut();
            for (index, parameter) in of_matrix.enumerate() {
                *parameter = scale * (2.0 * uniform(seed, 0, 0, at + index) - 1.0);
            }
        }
        parameters
    }

    fn step(&self, tape: &mut Tape<'_>, state: &State, action: &[f32]) -> Node {
        let action = tape.input(action);
        let of_latent = tape.linear(self.latent_in, state.latent);
        let of_action = tape.linear(self.action_in, action);
        let sum = tape.add(of_latent, of_action);
        let sum = tape.bias(self.bias_in, sum);
        let input = tape.tanh(sum);
        let gate = |tape: &mut Tape<'_>, number: usize, hidden: Node| {
            let (of_input, of_hidden, bias) = self.gates[number];
            let a = tape.linear(of_input, input);
            let b = tape.linear(of_hidden, hidden);
            let sum = tape.add(a, b);
            tape.bias(bias, sum)
        };
        let reset = gate(tape, 0, state.hidden);
        let reset = tape.sigmoid(reset);
        let update = gate(tape, 1, state.hidden);
        let update = tape.sigmoid(update);
        let kept = tape.multiply(reset, state.hidden);
        let candidate = gate(tape, 2, kept);
        let candidate = tape.tanh(candidate);
        let rest = tape.one_minus(update);
        let old = tape.multiply(update, state.hidden);
        let new = tape.multiply(rest, candidate);
        tape.add(old, new)
    }

    fn posterior(&self, tape: &mut Tape<'_>, hidden: Node, observation: &[f32]) -> Node {
        let (of_hidden, of_observation, bias) = self.posterior;
        let observation = tape.input(observation);
        let a = tape.linear(of_hidden, hidden);
        let b = tape.linear(of_observation, observation);
        let sum = tape.add(a, b);
        let logits = tape.bias(bias, sum);
        tape.categorical(CLASSES, logits)
    }

    fn trunk(&self, tape: &mut Tape<'_>, state: &State) -> Node {
        let (of_hidden, of_latent, bias) = self.trunk;
        let a = tape.linear(of_hidden, state.hidden);
        let b = tape.linear(of_latent, state.latent);
        let sum = tape.add(a, b);
        let sum = tape.bias(bias, sum);
        tape.tanh(sum)
    }

    fn heads(&self, tape: &mut Tape<'_>, trunk: Node, length: f32) -> Node {
        let (of_trunk, of_length, bias) = self.head;
        let length = tape.input(&[length, length * length]);
        let a = tape.linear(of_trunk, trunk);
        let b = tape.linear(of_length, length);
        let sum = tape.add(a, b);
        let sum = tape.bias(bias, sum);
        let hidden = tape.tanh(sum);
        let outputs = tape.linear(self.outputs.0, hidden);
        tape.bias(self.outputs.1, outputs)
    }

    /// Runs through ticks, from a state of zeros. Latents are drawn with bits of (seed, draw).
    fn unroll<'p>(
        &self,
        parameters: &'p [f32],
        ticks: &[Tick],
        (seed, draw): (u64, u32),
    ) -> (Tape<'p>, State) {
        let mut tape = Tape::new(parameters);
        let (hidden, latent) = (tape.input(&[0.0; HIDDEN]), tape.input(&[0.0; LATENT]));
        let mut state = State { hidden, latent };
        for (place, tick) in ticks.iter().enumerate() {
            let hidden = self.step(&mut tape, &state, &tick.action);
            let logits = tape.linear(self.prior.0, hidden);
            let logits = tape.bias(self.prior.1, logits);
            let prior = tape.categorical(CLASSES, logits);
            let posterior = self.posterior(&mut tape, hidden, &tick.observation);
            tape.divergence(posterior, prior, BALANCE, FREE);
            let drawn = drawn(tape.value(posterior), (seed, draw), place);
            let latent = tape.sample(posterior, &drawn);
            state = State { hidden, latent };
            let trunk = self.trunk(&mut tape, &state);
            let decoded = tape.linear(self.decoder.0, trunk);
            let decoded = tape.bias(self.decoder.1, decoded);
            tape.squares(decoded, &tick.observation);
            if let Some((length, outcome)) = tick.jump {
                let heads = self.heads(&mut tape, trunk, length);
                tape.outcome(heads, outcome);
            }
        }
        (tape, state)
    }

    /// Mean loss of a tick, and its gradients.
    pub(super) fn learn(
        &self,
        parameters: &[f32],
        ticks: &[Tick],
        bits: (u64, u32),
    ) -> (f32, Vec<f32>) {
        let (tape, _) = self.unroll(parameters, ticks, bits);
        let count = ticks.len().max(1) as f32;
        let mut gradients = tape.gradients();
        gradients.iter_mut().for_each(|gradient| *gradient /= count);
        (tape.loss() / count, gradients)
    }

    /// What jumps of these lengths after the last tick would come to.
    pub(super) fn expect(
        &self,
        parameters: &[f32],
        ticks: &[Tick],
        bits: (u64, u32),
        lengths: &[f32],
    ) -> Vec<Expected> {
        let (mut tape, state) = self.unroll(parameters, ticks, bits);
        let trunk = self.trunk(&mut tape, &state);
        let of = |&length: &f32| {
            let heads = self.heads(&mut tape, trunk, length);
            let [change, log_variance, logit] = [0, 1, 2].map(|at| tape.value(heads)[at]);
            Expected { change, deviation: (0.5 * log_variance).exp(), acceptance: sigmoid(logit) }
        };
        lengths.iter().map(of).collect()
    }
}

/// One class of each group, by its probability.
fn drawn(probabilities: &[f32], (seed, draw): (u64, u32), place: usize) -> Vec<f32> {
    let mut sample = vec![0.0; probabilities.len()];
    for (group, of_group) in probabilities.chunks_exact(CLASSES).enumerate() {
        let mut left = uniform(seed, draw, 1, place * GROUPS + group);
        let mut class = CLASSES - 1;
        for (at, probability) in of_group.iter().enumerate() {
            left -= probability;
            if left < 0.0 {
                class = at;
                break;
            }
        }
        sample[group * CLASSES + class] = 1.0;
    }
    sample
}

/// From 0 to 1, by counters alone.
pub(super) fn uniform(seed: u64, draw: u32, layer: u16, index: usize) -> f32 {
    let stream = Stream { tensor: STREAM, layer };
    let block = words(Seed { seed, step: draw }, Purpose::Prediction, stream, index as u64 / 4);
    (block[index % 4] >> 8) as f32 / (1 << 24) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tick(number: usize, jump: Option<(f32, Outcome)>) -> Tick {
        let value = |at: usize| ((number * 7 + at * 3) % 11) as f32 / 11.0 - 0.5;
        let mut tick = Tick { action: [0.0; ACTED], observation: [0.0; OBSERVED], jump };
        tick.action.iter_mut().enumerate().for_each(|(at, v)| *v = value(at));
        tick.observation.iter_mut().enumerate().for_each(|(at, v)| *v = value(at + 5));
        tick
    }

    #[test]
    fn draws_follow_their_probabilities_and_counters() {
        let mut probabilities = vec![0.1 / 15.0; LATENT];
        probabilities.iter_mut().step_by(CLASSES).for_each(|p| *p = 0.9);
        let count = |draw: u32| -> f32 {
            let sample = drawn(&probabilities, (3, draw), 0);
            assert_eq!(sample.iter().sum::<f32>(), GROUPS as f32, "one of each group");
            sample.iter().step_by(CLASSES).sum()
        };
        let total: f32 = (0..50).map(count).sum();
        assert!((0.87..0.93).contains(&(total / 1600.0)), "{total}");
        assert_eq!(drawn(&probabilities, (3, 7), 2), drawn(&probabilities, (3, 7), 2));
        assert_ne!(drawn(&probabilities, (3, 7), 2), drawn(&probabilities, (3, 8), 2));
        assert_ne!(drawn(&probabilities, (3, 7), 2), drawn(&probabilities, (4, 7), 2));
    }

    /// Jumps that are longer are refused, and shorter ones lower the loss.
    #[test]
    fn what_becomes_of_jumps_is_learned() {
        let network = Network::new();
        let mut parameters = network.initial(5);
        let mut losses = Vec::new();
        for draw in 0..400_u32 {
            let ticks: Vec<Tick> = (0..4)
                .map(|place| {
                    let length = if (draw as usize + place).is_multiple_of(2) { -1.0 } else { 1.0 };
                    let accepted = length < 0.0;
                    let change = if accepted { -0.5 } else { 0.8 };
                    tick(draw as usize + place, Some((length, Outcome { change, accepted })))
                })
                .collect();
            let (loss, gradients) = network.learn(&parameters, &ticks, (5, draw));
            losses.push(loss);
            for (parameter, gradient) in parameters.iter_mut().zip(gradients) {
                *parameter -= 0.05 * gradient;
            }
        }
        assert!(losses[399] < losses[0] - 1.0, "{} to {}", losses[0], losses[399]);
        let ticks = [tick(1, None), tick(2, None)];
        let found = network.expect(&parameters, &ticks, (5, 999), &[-1.0, 1.0]);
        assert!(found[0].acceptance > 0.8 && found[1].acceptance < 0.2, "{found:?}");
        assert!(found[0].change < -0.2 && found[1].change > 0.4, "{found:?}");
    }
}
