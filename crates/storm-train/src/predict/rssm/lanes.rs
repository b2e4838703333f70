//! Many states of the network at once, without gradients. Lanes are the inner axis of every array,
//! so that loops over them vectorize. Results are bit-identical to those of a tape: sums are in the
//! same order, and only products with the zeros of a latent are skipped.

use super::network::{ACTED, CLASSES, GROUPS, HIDDEN, LATENT, Network, OBSERVED};
use super::tape::{Matrix, dot, mixed, sigmoid};

/// Lanes kept in registers while a matrix row is multiplied.
const BLOCK: usize = 8;

/// The matrices that multiply latents, stored by column. Latents are one-hot per group, so each
/// group selects one column.
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
        for (matrix, columns) in matrices {
            for (row, weights) in weights(matrix, parameters).chunks_exact(LATENT).enumerate() {
                for (column, weight) in columns.iter_mut().zip(weights) {
                    column[row] = *weight;
                }
            }
        }
    }
}

/// The states of N lanes, a multiple of [`BLOCK`], and scratch space.
pub(super) struct Lanes<const N: usize> {
    /// (HIDDEN, N)
    pub(super) hidden: [[f32; N]; HIDDEN],
    /// The class of each group. `None` before the first tick.
    pub(super) classes: Option<[[u8; N]; GROUPS]>,
    /// (HIDDEN, N), after [`Lanes::look`].
    pub(super) trunk: [[f32; N]; HIDDEN],
    input: [[f32; N]; HIDDEN],
    reset: [[f32; N]; HIDDEN],
    update: [[f32; N]; HIDDEN],
    candidate: [[f32; N]; HIDDEN],
    /// Terms to be added.
    other: [[f32; N]; HIDDEN],
    /// (LATENT, N)
    logits: [[f32; N]; LATENT],
}

fn weights(Matrix { at, rows, columns }: Matrix, parameters: &[f32]) -> &[f32] {
    &parameters[at..at + rows * columns]
}

/// out = matrix · x.
fn product<const N: usize>(
    matrix: Matrix,
    parameters: &[f32],
    x: &[[f32; N]],
    out: &mut [[f32; N]],
) {
    let rows = weights(matrix, parameters).chunks_exact(matrix.columns);
    for (row, out) in rows.zip(out) {
        // A few lanes at a time, with sums in registers.
        for (block, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let mut sums = [-0.0; BLOCK];
            for (weight, x) in row.iter().zip(x) {
                let x = &x.as_chunks::<BLOCK>().0[block];
                for lane in 0..BLOCK {
                    sums[lane] += weight * x[lane];
                }
            }
            *out = sums;
        }
    }
}

/// out = matrix · latent.
fn chosen<const N: usize>(
    columns: &[[f32; HIDDEN]],
    classes: Option<&[[u8; N]; GROUPS]>,
    out: &mut [[f32; N]; HIDDEN],
) {
    for lane in 0..N {
        let mut sums = [-0.0; HIDDEN];
        for (group, classes) in classes.into_iter().flatten().enumerate() {
            let column = &columns[group * CLASSES + usize::from(classes[lane])];
            sums.iter_mut().zip(column).for_each(|(sum, weight)| *sum += weight);
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| out[lane] = sum);
    }
}

/// sum ← of(sum + other + bias), elementwise.
fn add<const N: usize>(
    sum: &mut [[f32; N]],
    other: &[[f32; N]],
    bias: &[f32],
    of: impl Fn(f32) -> f32,
) {
    for ((sum, other), bias) in sum.iter_mut().zip(other).zip(bias) {
        sum.iter_mut().zip(other).for_each(|(sum, other)| *sum = of(*sum + other + bias));
    }
}

impl<const N: usize> Lanes<N> {
    pub(super) fn new() -> Lanes<N> {
        let zeros = [[0.0; N]; HIDDEN];
        Lanes {
            hidden: zeros,
            classes: None,
            trunk: zeros,
            input: zeros,
            reset: zeros,
            update: zeros,
            candidate: zeros,
            other: zeros,
            logits: [[0.0; N]; LATENT],
        }
    }

    /// Resets to the state before the first tick.
    pub(super) fn clear(&mut self) {
        self.hidden = [[0.0; N]; HIDDEN];
        self.classes = None;
    }

    /// Advances the GRU.
    pub(super) fn step(
        &mut self,
        network: &Network,
        parameters: &[f32],
        columns: &Columns,
        action: &[[f32; N]; ACTED],
    ) {
        let Lanes { hidden, classes, input, reset, update, candidate, other, .. } = self;
        let bias = |at: usize| &parameters[at..at + HIDDEN];
        chosen(&columns.latent_in, classes.as_ref(), input);
        product(network.action_in, parameters, action, other);
        add(input, other, bias(network.bias_in), f32::tanh);
        let gates = &network.gates;
        for ((of_input, of_hidden, at), gate) in gates[..2].iter().zip([&mut *reset, &mut *update])
        {
            product(*of_input, parameters, input, gate);
            product(*of_hidden, parameters, hidden, other);
            add(gate, other, bias(*at), sigmoid);
        }
        for (reset, hidden) in reset.iter_mut().zip(&*hidden) {
            reset.iter_mut().zip(hidden).for_each(|(reset, hidden)| *reset *= hidden);
        }
        let (of_input, of_hidden, at) = gates[2];
        product(of_input, parameters, input, candidate);
        product(of_hidden, parameters, reset, other);
        add(candidate, other, bias(at), f32::tanh);
        for ((hidden, update), candidate) in hidden.iter_mut().zip(update).zip(candidate) {
            for ((hidden, update), candidate) in hidden.iter_mut().zip(update).zip(candidate) {
                *hidden = *update * *hidden + (1.0 - *update) * *candidate;
            }
        }
    }

    /// Samples latents from the prior.
    pub(super) fn imagine(
        &mut self,
        network: &Network,
        parameters: &[f32],
        uniforms: &[[f32; N]; GROUPS],
    ) {
        let (of_hidden, bias) = network.prior;
        product(of_hidden, parameters, &self.hidden, &mut self.logits);
        for (logits, bias) in self.logits.iter_mut().zip(&parameters[bias..bias + LATENT]) {
            logits.iter_mut().for_each(|logit| *logit += bias);
        }
        self.draw(uniforms);
    }

    /// Samples latents from the posterior of an observation that all lanes share.
    pub(super) fn observe(
        &mut self,
        network: &Network,
        parameters: &[f32],
        observation: &[f32; OBSERVED],
        uniforms: &[[f32; N]; GROUPS],
    ) {
        let (of_hidden, of_observation, bias) = network.posterior;
        product(of_hidden, parameters, &self.hidden, &mut self.logits);
        let rows = weights(of_observation, parameters).chunks_exact(OBSERVED);
        let biases = &parameters[bias..bias + LATENT];
        for ((logits, row), bias) in self.logits.iter_mut().zip(rows).zip(biases) {
            let seen = dot(row, observation);
            logits.iter_mut().for_each(|logit| *logit = *logit + seen + bias);
        }
        self.draw(uniforms);
    }

    /// Samples one class per group from the softmax of its logits.
    fn draw(&mut self, uniforms: &[[f32; N]; GROUPS]) {
        let classes = self.classes.get_or_insert([[0; N]; GROUPS]);
        let groups = self.logits.chunks_exact_mut(CLASSES).zip(uniforms).zip(classes);
        for ((logits, uniforms), class) in groups {
            let mut most = [f32::NEG_INFINITY; N];
            for logits in &*logits {
                most.iter_mut().zip(logits).for_each(|(most, logit)| *most = most.max(*logit));
            }
            let mut sums = [-0.0; N];
            for logits in &mut *logits {
                for ((logit, most), sum) in logits.iter_mut().zip(&most).zip(&mut sums) {
                    *logit = (*logit - most).exp();
                    *sum += *logit;
                }
            }
            // Probabilities are positive, so once `left` is negative it stays negative for later
            // classes.
            let mut left = *uniforms;
            *class = [0; N];
            for exponentials in &logits[..CLASSES - 1] {
                for lane in 0..N {
                    left[lane] -= mixed(exponentials[lane] / sums[lane], CLASSES);
                    class[lane] += if left[lane] < 0.0 { 0 } else { 1 };
                }
            }
        }
    }

    /// Computes the input of the heads.
    pub(super) fn look(&mut self, network: &Network, parameters: &[f32], columns: &Columns) {
        let (of_hidden, _, bias) = network.trunk;
        product(of_hidden, parameters, &self.hidden, &mut self.trunk);
        chosen(&columns.trunk, self.classes.as_ref(), &mut self.other);
        add(&mut self.trunk, &self.other, &parameters[bias..bias + HIDDEN], f32::tanh);
    }
}
