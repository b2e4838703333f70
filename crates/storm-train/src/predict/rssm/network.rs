//! The recurrent state-space model: a GRU with categorical latents. The posterior sees the
//! observation of a step, the prior does not. A decoder reconstructs the observation. An ensemble
//! of heads predicts how a step changes the loss, and the outcome of a jump of a given length.

use super::tape::{Matrix, Node, Outcome, Tape};
use storm_graph::random::{Purpose, Seed, Stream, words};

/// Size of an observation.
pub(super) const OBSERVED: usize = 22;
/// Size of an action, which precedes a step.
pub(super) const ACTED: usize = 3;
pub(super) const HIDDEN: usize = 32;
pub(super) const GROUPS: usize = 32;
pub(super) const CLASSES: usize = 16;
pub(super) const LATENT: usize = GROUPS * CLASSES;
pub(super) const HEAD: usize = 16;
const OUTPUTS: usize = 3;

/// Members of the ensemble. They share the dynamics, which have nearly all parameters and take
/// nearly all of the time. Each has its own heads, learns from different ticks, and samples its own
/// latents.
pub(super) const MEMBERS: usize = 8;
/// Fraction of the ticks that a member learns from.
const LEARNED: f32 = 0.8;

/// KL balancing: weights of the gradients of the posterior and the prior.
const BALANCE: [f32; 2] = [0.2, 0.8];
/// Free nats per step.
const FREE: f32 = 1.0;

/// A stream that no model parameter uses.
const STREAM: u16 = u16::MAX;

/// Purposes of random words.
pub(super) mod words_of {
    pub(in super::super) const INITIAL: u16 = 0;
    pub(in super::super) const LESSON: u16 = 1;
    pub(in super::super) const JUMP: u16 = 2;
    pub(in super::super) const ROLLOUT: u16 = 3;
    pub(in super::super) const LEARNERS: u16 = 4;
}

/// Locations of the parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Network {
    pub(super) latent_in: Matrix,
    pub(super) action_in: Matrix,
    pub(super) bias_in: usize,
    /// Weights for the input and for the state, and the bias, of reset, update and candidate.
    pub(super) gates: [(Matrix, Matrix, usize); 3],
    pub(super) prior: (Matrix, usize),
    pub(super) posterior: (Matrix, Matrix, usize),
    pub(super) trunk: (Matrix, Matrix, usize),
    decoder: (Matrix, usize),
    pub(super) members: [Member; MEMBERS],
    /// Total number of parameters.
    pub(super) parameters: usize,
}

/// The heads of a member of the ensemble.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// Predicts the outcome of a jump from trunk and length.
    pub(super) jump: (Matrix, Matrix, usize),
    pub(super) outputs: (Matrix, usize),
    /// Predicts the change of the log loss beyond its trend, from the GRU state before the step is
    /// observed and from the action.
    pub(super) step: (Matrix, Matrix, usize),
}

/// Allocates parameters.
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

/// A step: the action before it, the observation, and the outcome of the jump after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Tick {
    pub(super) action: [f32; ACTED],
    pub(super) observation: [f32; OBSERVED],
    /// Scaled change of the log loss beyond its trend and the previous jump.
    pub(super) excess: f32,
    /// Bit mask of the members that learn from it.
    pub(super) learners: u8,
    /// The length of the jump after it, as a feature, and the outcome.
    pub(super) jump: Option<(f32, Outcome)>,
}

/// The state after some ticks.
pub(super) struct State {
    pub(super) hidden: Node,
    pub(super) latent: Node,
}

impl State {
    /// Before the first tick.
    pub(super) fn zeros(tape: &mut Tape<'_>) -> State {
        State { hidden: tape.input(&[0.0; HIDDEN]), latent: tape.input(&[0.0; LATENT]) }
    }
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
        let members = [(); MEMBERS].map(|()| Member {
            jump: (places.matrix(HEAD, HIDDEN), places.matrix(HEAD, 2), places.bias(HEAD)),
            outputs: (places.matrix(OUTPUTS, HEAD), places.bias(OUTPUTS)),
            step: (places.matrix(1, HIDDEN), places.matrix(1, ACTED), places.bias(1)),
        });
        Network {
            latent_in,
            action_in,
            bias_in,
            gates,
            prior,
            posterior,
            trunk,
            decoder,
            members,
            parameters: places.0,
        }
    }

    /// Uniform, scaled by the number of inputs. Biases and the heads of steps are zero, so an
    /// untrained model expects the loss to follow its trend.
    pub(super) fn initial(&self, seed: u64) -> Vec<f32> {
        let mut parameters = vec![0.0; self.parameters];
        let mut matrices = vec![self.latent_in, self.action_in];
        matrices.extend(self.gates.iter().flat_map(|&(a, b, _)| [a, b]));
        matrices.extend([self.prior.0, self.posterior.0, self.posterior.1]);
        matrices.extend([self.trunk.0, self.trunk.1, self.decoder.0]);
        for Member { jump, outputs, .. } in &self.members {
            matrices.extend([jump.0, jump.1, outputs.0]);
        }
        for Matrix { at, rows, columns } in matrices {
            // Latents are one-hot per group.
            let inputs = if columns == LATENT { GROUPS } else { columns };
            let scale = 1.0 / (inputs as f32).sqrt();
            let of_matrix = parameters[at..at + rows * columns].iter_mut();
            for (index, parameter) in of_matrix.enumerate() {
                *parameter = scale * (2.0 * uniform(seed, 0, words_of::INITIAL, at + index) - 1.0);
            }
        }
        parameters
    }

    /// Advances the GRU.
    pub(super) fn step(&self, tape: &mut Tape<'_>, state: &State, action: &[f32]) -> Node {
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

    pub(super) fn prior(&self, tape: &mut Tape<'_>, hidden: Node) -> Node {
        let logits = tape.linear(self.prior.0, hidden);
        let logits = tape.bias(self.prior.1, logits);
        tape.categorical(CLASSES, logits)
    }

    pub(super) fn posterior(&self, tape: &mut Tape<'_>, hidden: Node, observation: &[f32]) -> Node {
        let (of_hidden, of_observation, bias) = self.posterior;
        let observation = tape.input(observation);
        let a = tape.linear(of_hidden, hidden);
        let b = tape.linear(of_observation, observation);
        let sum = tape.add(a, b);
        let logits = tape.bias(bias, sum);
        tape.categorical(CLASSES, logits)
    }

    pub(super) fn trunk(&self, tape: &mut Tape<'_>, state: &State) -> Node {
        let (of_hidden, of_latent, bias) = self.trunk;
        let a = tape.linear(of_hidden, state.hidden);
        let b = tape.linear(of_latent, state.latent);
        let sum = tape.add(a, b);
        let sum = tape.bias(bias, sum);
        tape.tanh(sum)
    }

    /// A member's prediction for a jump of some length: mean, log variance, logit of acceptance.
    pub(super) fn jump(tape: &mut Tape<'_>, member: &Member, trunk: Node, length: f32) -> Node {
        let (of_trunk, of_length, bias) = member.jump;
        let length = tape.input(&[length, length * length]);
        let a = tape.linear(of_trunk, trunk);
        let b = tape.linear(of_length, length);
        let sum = tape.add(a, b);
        let sum = tape.bias(bias, sum);
        let hidden = tape.tanh(sum);
        let outputs = tape.linear(member.outputs.0, hidden);
        tape.bias(member.outputs.1, outputs)
    }

    /// A member's prediction of how a step changes the loss.
    pub(super) fn excess(
        tape: &mut Tape<'_>,
        member: &Member,
        hidden: Node,
        action: &[f32; ACTED],
    ) -> Node {
        let (of_hidden, of_action, bias) = member.step;
        let action = tape.input(action);
        let a = tape.linear(of_hidden, hidden);
        let b = tape.linear(of_action, action);
        let sum = tape.add(a, b);
        tape.bias(bias, sum)
    }

    /// Mean loss per tick, and its gradients. The initial state is zero. Latents are sampled with
    /// random words of (seed, draw).
    pub(super) fn learn(
        &self,
        parameters: &[f32],
        ticks: &[Tick],
        (seed, draw): (u64, u32),
    ) -> (f32, Vec<f32>) {
        let mut tape = Tape::new(parameters);
        let mut state = State::zeros(&mut tape);
        for (place, tick) in ticks.iter().enumerate() {
            let hidden = self.step(&mut tape, &state, &tick.action);
            let prior = self.prior(&mut tape, hidden);
            let posterior = self.posterior(&mut tape, hidden, &tick.observation);
            tape.divergence(posterior, prior, BALANCE, FREE);
            let drawn = drawn(tape.value(posterior), |group| {
                uniform(seed, draw, words_of::LESSON, place * GROUPS + group)
            });
            let latent = tape.sample(posterior, &drawn);
            state = State { hidden, latent };
            let trunk = self.trunk(&mut tape, &state);
            let decoded = tape.linear(self.decoder.0, trunk);
            let decoded = tape.bias(self.decoder.1, decoded);
            tape.squares(decoded, &tick.observation, 1.0);
            self.teach(&mut tape, hidden, trunk, tick);
        }
        let count = ticks.len().max(1) as f32;
        let mut gradients = tape.gradients();
        gradients.iter_mut().for_each(|gradient| *gradient /= count);
        (tape.loss() / count, gradients)
    }

    /// Adds the losses of the members that learn from a tick.
    fn teach(&self, tape: &mut Tape<'_>, hidden: Node, trunk: Node, tick: &Tick) {
        const WEIGHT: f32 = 1.0 / MEMBERS as f32;
        for (number, member) in self.members.iter().enumerate() {
            if tick.learners >> number & 1 == 0 {
                continue;
            }
            let excess = Network::excess(tape, member, hidden, &tick.action);
            tape.squares(excess, &[tick.excess], WEIGHT);
            if let Some((length, outcome)) = tick.jump {
                let jump = Network::jump(tape, member, trunk, length);
                tape.outcome(jump, outcome, WEIGHT);
            }
        }
    }
}

/// Bit mask of the members that learn from the tick of a step.
pub(super) fn learners(seed: u64, step: u32) -> u8 {
    let learns = |member| uniform(seed, step, words_of::LEARNERS, member) < LEARNED;
    (0..MEMBERS).fold(0, |bits, member| bits | u8::from(learns(member)) << member)
}

/// Samples one class per group, given a uniform number per group.
pub(super) fn drawn(probabilities: &[f32], uniform: impl Fn(usize) -> f32) -> Vec<f32> {
    let mut sample = vec![0.0; probabilities.len()];
    for (group, of_group) in probabilities.chunks_exact(CLASSES).enumerate() {
        let mut left = uniform(group);
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

/// A uniform number in [0, 1), from a counter-based generator.
pub(super) fn uniform(seed: u64, draw: u32, words_of: u16, index: usize) -> f32 {
    uniforms(seed, draw, words_of, index / 4)[index % 4]
}

/// The uniform numbers at indices 4·block to 4·block + 3.
pub(super) fn uniforms(seed: u64, draw: u32, words_of: u16, block: usize) -> [f32; 4] {
    let stream = Stream { tensor: STREAM, layer: words_of };
    let words = words(Seed { seed, step: draw }, Purpose::Prediction, stream, block as u64);
    words.map(|word| (word >> 8) as f32 / (1 << 24) as f32)
}

#[cfg(test)]
mod tests {
    use super::super::adam::Adam;
    use super::super::rollout::{LENGTHS, Question, Rollouts};
    use super::*;

    fn tick(number: usize, jump: Option<(f32, Outcome)>) -> Tick {
        let value = |at: usize| ((number * 7 + at * 3) % 11) as f32 / 11.0 - 0.5;
        Tick {
            action: std::array::from_fn(value),
            observation: std::array::from_fn(|at| value(at + 5)),
            excess: 0.5 * value(5),
            learners: learners(5, number as u32),
            jump,
        }
    }

    #[test]
    fn draws_follow_their_probabilities() {
        let mut probabilities = vec![0.1 / 15.0; LATENT];
        probabilities.iter_mut().step_by(CLASSES).for_each(|p| *p = 0.9);
        let count = |draw: u32| -> f32 {
            let sample = drawn(&probabilities, |group| uniform(3, draw, words_of::LESSON, group));
            assert_eq!(sample.iter().sum::<f32>(), GROUPS as f32, "one of each group");
            sample.iter().step_by(CLASSES).sum()
        };
        let total: f32 = (0..50).map(count).sum();
        assert!((0.87..0.93).contains(&(total / 1600.0)), "{total}");
        let last = drawn(&probabilities, |_| 1.0 - f32::EPSILON);
        assert_eq!(last[CLASSES - 1], 1.0);
    }

    #[test]
    fn members_learn_from_different_ticks() {
        let of_step: Vec<u8> = (0..200).map(|step| learners(3, step)).collect();
        for member in 0..MEMBERS {
            let learned = of_step.iter().filter(|bits| **bits >> member & 1 == 1).count();
            assert!((140..180).contains(&learned), "member {member}: {learned} of 200");
        }
        let network = Network::new();
        let parameters = network.initial(5);
        let outcome = Outcome { change: 0.5, accepted: true };
        let one = Tick { learners: 0b100, ..tick(1, Some((0.5, outcome))) };
        let (_, gradients) = network.learn(&parameters, &[one], (5, 0));
        for (number, member) in network.members.iter().enumerate() {
            let Matrix { at, rows, columns } = member.outputs.0;
            let of_jump = gradients[at..at + rows * columns].iter().any(|g| *g != 0.0);
            let of_step = gradients[member.step.2] != 0.0;
            assert_eq!((of_jump, of_step), (number == 2, number == 2), "member {number}");
        }
    }

    /// Longer jumps are refused, and shorter ones lower the loss.
    #[test]
    fn what_becomes_of_jumps_is_learned() {
        let network = Network::new();
        let mut adam = Adam::new(network.initial(5));
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
            let (loss, gradients) = network.learn(adam.parameters(), &ticks, (5, draw));
            losses.push(loss);
            adam.step(&gradients);
        }
        assert!(losses[399] < losses[0] - 1.0, "{} to {}", losses[0], losses[399]);
        let ticks = [tick(1, None), tick(2, None)];
        let mut lengths = [1.0; LENGTHS];
        lengths[0] = -1.0;
        let question = Question { lengths, correct: 0, horizon: 0, bits: (5, 999) };
        let found = Rollouts::new().imagine(&network, adam.parameters(), ticks.iter(), &question);
        for (short, long) in found.jumps[0].iter().zip(&found.jumps[1]) {
            assert!(short.acceptance > 0.8 && long.acceptance < 0.2, "{short:?} {long:?}");
            assert!(short.change < -0.2 && long.change > 0.4, "{short:?} {long:?}");
        }
    }
}
