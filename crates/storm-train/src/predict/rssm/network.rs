//! The recurrent state-space model: a GRU with categorical latents. The posterior sees the
//! observation of a step, the prior does not. A decoder reconstructs the observation. An ensemble
//! of heads predicts how a step changes the loss, and the outcome of a jump of a given length.

use storm_graph::KlBalance;
use storm_graph::random::{Purpose, Seed, Stream, unit_interval, words};

/// Size of an observation.
pub(super) const OBSERVED: usize = 22;
/// Size of an action, which precedes a step.
pub(super) const ACTED: usize = 3;
pub(super) const HIDDEN: usize = 32;
pub(super) const GROUPS: usize = 32;
pub(super) const CLASSES: usize = 16;
pub(super) const LATENT: usize = GROUPS * CLASSES;
pub(super) const HEAD: usize = 16;
/// Mean, log variance, logit of acceptance.
pub(super) const OUTPUTS: usize = 3;

/// Members of the ensemble. They share the dynamics, which have nearly all parameters and take
/// nearly all of the time. Each has its own heads, learns from different ticks, and samples its own
/// latents.
pub(super) const MEMBERS: usize = 8;
/// Fraction of the ticks that a member learns from.
const LEARNED: f32 = 0.8;

/// KL balancing.
pub(super) const BALANCE: KlBalance = KlBalance { posterior: 0.2, prior: 0.8 };
/// Free nats per step.
pub(super) const FREE: f32 = 1.0;
/// Weight of the uniform distribution mixed into every categorical one.
pub(super) const UNIFORM: f32 = 0.01;

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

/// A row-major matrix of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub(super) at: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
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
    pub(super) decoder: (Matrix, usize),
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

/// The outcome of a jump.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Outcome {
    /// Scaled change of the log loss.
    pub(super) change: f32,
    pub(super) accepted: bool,
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
}

/// Bit mask of the members that learn from the tick of a step.
pub(super) fn learners(seed: u64, step: u32) -> u8 {
    let learns = |member| uniform(seed, step, words_of::LEARNERS, member) < LEARNED;
    (0..MEMBERS).fold(0, |bits, member| bits | u8::from(learns(member)) << member)
}

/// A uniform number in [0, 1), from a counter-based generator.
pub(super) fn uniform(seed: u64, draw: u32, words_of: u16, index: usize) -> f32 {
    let stream = Stream { tensor: STREAM, layer: words_of };
    let seed = Seed { seed, step: draw };
    unit_interval(words(seed, Purpose::Prediction, stream, index as u64 / 4)[index % 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_learn_from_different_ticks() {
        let of_step: Vec<u8> = (0..200).map(|step| learners(3, step)).collect();
        for member in 0..MEMBERS {
            let learned = of_step.iter().filter(|bits| **bits >> member & 1 == 1).count();
            assert!((140..180).contains(&learned), "member {member}: {learned} of 200");
        }
    }
}
