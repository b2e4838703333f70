//! The states of all members at once, without gradients: a member is a row of every array. Results
//! have the bits of the graph's ops. Products with the zeros of a latent, which is one-hot per
//! group, are skipped: they would add nothing.

use super::network::{
    ACTED, CLASSES, GROUPS, HIDDEN, LATENT, MEMBERS, Matrix, Network, OBSERVED, UNIFORM, words_of,
};
use storm_device::cpu::kernels::categorical::{Mixture, sample_logits};
use storm_device::cpu::kernels::elementwise::hyperbolic_tangent;
pub(super) use storm_device::cpu::kernels::projection::Onto;
use storm_device::cpu::kernels::projection::project;
use storm_device::cpu::kernels::recurrent::{gru_reset, gru_state};
use storm_graph::random::{Seed, Stream};

/// The matrices that multiply latents, stored by column: each group selects one column.
pub(super) struct Columns {
    latent_in: Vec<[f32; HIDDEN]>,
    trunk: Vec<[f32; HIDDEN]>,
}

impl Columns {
    pub(super) fn new() -> Columns {
        let zeros = vec![[0.0; HIDDEN]; LATENT];
        Columns { latent_in: zeros.clone(), trunk: zeros }
    }

    pub(super) fn fill(&mut self, network: &Network, parameters: &[f32]) {
        let matrices =
            [(network.latent_in, &mut self.latent_in), (network.trunk.1, &mut self.trunk)];
        for (Matrix { at, .. }, columns) in matrices {
            let rows = parameters[at..at + HIDDEN * LATENT].chunks_exact(LATENT);
            for (row, weights) in rows.enumerate() {
                for (column, weight) in columns.iter_mut().zip(weights) {
                    column[row] = *weight;
                }
            }
        }
    }
}

/// A number per member and hidden unit.
type Hidden = [[f32; HIDDEN]; MEMBERS];

/// A number per member and class.
type Latent = [[f32; LATENT]; MEMBERS];

/// The states, and scratch space.
pub(super) struct Lanes {
    pub(super) hidden: Hidden,
    /// The class of each group. `None` before the first tick.
    pub(super) classes: Option<[[u8; GROUPS]; MEMBERS]>,
    /// After [`Lanes::look`].
    pub(super) trunk: Hidden,
    input: Hidden,
    /// Gates before their activation.
    gates: [Hidden; 3],
    other: Hidden,
    logits: Latent,
    probabilities: Latent,
}

/// out = x · matrixᵀ, for each row of x, added to something.
pub(super) fn product(
    Matrix { at, rows, columns }: Matrix,
    parameters: &[f32],
    x: &[f32],
    onto: Onto<'_>,
    out: &mut [f32],
) {
    project(columns, x, &parameters[at..at + rows * columns], onto, out);
}

/// out = matrix · latent.
fn chosen(columns: &[[f32; HIDDEN]], classes: Option<&[[u8; GROUPS]; MEMBERS]>, out: &mut Hidden) {
    *out = [[0.0; HIDDEN]; MEMBERS];
    for (classes, sums) in classes.into_iter().flatten().zip(out) {
        for (group, class) in classes.iter().enumerate() {
            let column = &columns[group * CLASSES + usize::from(*class)];
            sums.iter_mut().zip(column).for_each(|(sum, weight)| *sum += weight);
        }
    }
}

impl Lanes {
    pub(super) fn new() -> Lanes {
        let zeros = [[0.0; HIDDEN]; MEMBERS];
        Lanes {
            hidden: zeros,
            classes: None,
            trunk: zeros,
            input: zeros,
            gates: [zeros; 3],
            other: zeros,
            logits: [[0.0; LATENT]; MEMBERS],
            probabilities: [[0.0; LATENT]; MEMBERS],
        }
    }

    /// Resets to the state before the first tick.
    pub(super) fn clear(&mut self) {
        self.hidden = [[0.0; HIDDEN]; MEMBERS];
        self.classes = None;
    }

    /// Advances the GRU. All members take the same action.
    pub(super) fn step(
        &mut self,
        network: &Network,
        parameters: &[f32],
        columns: &Columns,
        action: &[f32; ACTED],
    ) {
        let Lanes { hidden, classes, input, gates: [reset, update, candidate], other, .. } = self;
        let bias = |at: usize| Onto::Output { bias: &parameters[at..at + HIDDEN] };
        chosen(&columns.latent_in, classes.as_ref(), other);
        let actions = [*action; MEMBERS];
        let onto = bias(network.bias_in);
        product(
            network.action_in,
            parameters,
            actions.as_flattened(),
            onto,
            other.as_flattened_mut(),
        );
        hyperbolic_tangent(other.as_flattened(), input.as_flattened_mut());
        let gate = |number: usize, hidden: &Hidden, out: &mut Hidden| {
            let (of_input, of_hidden, at) = network.gates[number];
            let out = out.as_flattened_mut();
            product(of_hidden, parameters, hidden.as_flattened(), Onto::Zero, out);
            product(of_input, parameters, input.as_flattened(), bias(at), out);
        };
        gate(0, hidden, reset);
        gate(1, hidden, update);
        let kept = other;
        gru_reset(reset.as_flattened(), hidden.as_flattened(), kept.as_flattened_mut());
        gate(2, kept, candidate);
        let old = *hidden;
        let [update, candidate, old] = [&*update, candidate, &old].map(|x| x.as_flattened());
        gru_state(update, candidate, old, hidden.as_flattened_mut());
    }

    /// Samples latents from the prior.
    pub(super) fn imagine(
        &mut self,
        network: &Network,
        parameters: &[f32],
        bits: (u64, u32),
        place: usize,
    ) {
        let (weights, at) = network.prior;
        let onto = Onto::Bias(&parameters[at..at + LATENT]);
        let logits = self.logits.as_flattened_mut();
        product(weights, parameters, self.hidden.as_flattened(), onto, logits);
        self.draw(bits, place);
    }

    /// Samples latents from the posterior of an observation that all members share.
    pub(super) fn observe(
        &mut self,
        network: &Network,
        parameters: &[f32],
        observation: &[f32; OBSERVED],
        bits: (u64, u32),
        place: usize,
    ) {
        let (of_hidden, of_observation, at) = network.posterior;
        let (first, rest) = self.logits.split_at_mut(1);
        product(of_observation, parameters, observation, Onto::Zero, &mut first[0]);
        rest.fill(first[0]);
        let onto = Onto::Output { bias: &parameters[at..at + LATENT] };
        let logits = self.logits.as_flattened_mut();
        product(of_hidden, parameters, self.hidden.as_flattened(), onto, logits);
        self.draw(bits, place);
    }

    /// Samples one class per group. Each place in a sequence has its own random bits.
    fn draw(&mut self, (seed, step): (u64, u32), place: usize) {
        let Lanes { classes, logits, probabilities, .. } = self;
        let mixture = Mixture { classes: CLASSES, uniform: UNIFORM };
        let stream = Stream { tensor: place as u16, layer: words_of::ROLLOUT };
        let classes = classes.get_or_insert([[0; GROUPS]; MEMBERS]);
        sample_logits(
            mixture,
            (Seed { seed, step }, stream),
            logits.as_flattened(),
            probabilities.as_flattened_mut(),
            classes.as_flattened_mut(),
        );
    }

    /// Computes the input of the heads.
    pub(super) fn look(&mut self, network: &Network, parameters: &[f32], columns: &Columns) {
        let (of_hidden, _, at) = network.trunk;
        chosen(&columns.trunk, self.classes.as_ref(), &mut self.other);
        let onto = Onto::Output { bias: &parameters[at..at + HIDDEN] };
        let sums = self.other.as_flattened_mut();
        product(of_hidden, parameters, self.hidden.as_flattened(), onto, sums);
        hyperbolic_tangent(sums, self.trunk.as_flattened_mut());
    }
}
