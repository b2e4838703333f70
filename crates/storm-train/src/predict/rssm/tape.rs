//! Reverse-mode differentiation of small vector programs in f32, on one core. Sums are in a fixed
//! order, so results are bit-reproducible.
//!
//! The graph ops of STORM are made for large tensors in a fixed program. This network takes a few
//! thousand multiplications in sequences of varying length alongside a run, so it has its own.

use std::ops::Range;

/// A vector on the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node {
    start: usize,
    len: usize,
}

impl Node {
    fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// A row-major matrix of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub(super) at: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// Weight of the uniform distribution mixed into every categorical one.
const UNIFORM: f32 = 0.01;

#[derive(Clone, Debug)]
enum Op {
    /// out = matrix · x.
    Linear(Matrix, Node, Node),
    /// out = x + parameters starting at this offset.
    Bias(usize, Node, Node),
    Add(Node, Node, Node),
    Multiply(Node, Node, Node),
    /// out = 1 − x.
    OneMinus(Node, Node),
    Tanh(Node, Node),
    Sigmoid(Node, Node),
    /// A categorical distribution for each group of this many logits.
    Categorical(usize, Node, Node),
    /// A sample with straight-through gradients.
    Sample(Node, Node),
    /// Loss: half the squared distance from a target, weighted.
    Squares(Node, Vec<f32>, f32),
    /// Loss: the KL divergence of two sets of distributions. The gradients of posterior and prior
    /// are weighted, and are zero where the divergence is below the free amount.
    Divergence {
        posterior: Node,
        prior: Node,
        weights: [f32; 2],
        is_free: bool,
    },
    /// Weighted loss of (mean, log variance, logit of acceptance).
    Outcome(Node, Outcome, f32),
}

/// The outcome of a jump.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Outcome {
    /// Scaled change of the log loss.
    pub(super) change: f32,
    pub(super) accepted: bool,
}

pub(super) struct Tape<'p> {
    parameters: &'p [f32],
    values: Vec<f32>,
    ops: Vec<Op>,
    loss: f32,
}

impl<'p> Tape<'p> {
    pub(super) fn new(parameters: &'p [f32]) -> Tape<'p> {
        Tape { parameters, values: Vec::new(), ops: Vec::new(), loss: 0.0 }
    }

    /// Sum of all losses.
    pub(super) fn loss(&self) -> f32 {
        self.loss
    }

    pub(super) fn value(&self, node: Node) -> &[f32] {
        &self.values[node.range()]
    }

    pub(super) fn input(&mut self, values: &[f32]) -> Node {
        let node = Node { start: self.values.len(), len: values.len() };
        self.values.extend_from_slice(values);
        node
    }

    fn output(&mut self, values: Vec<f32>) -> Node {
        self.input(&values)
    }

    pub(super) fn linear(&mut self, matrix: Matrix, x: Node) -> Node {
        let Matrix { at, rows, columns } = matrix;
        debug_assert_eq!(columns, x.len);
        let weights = &self.parameters[at..at + rows * columns];
        let input = self.value(x);
        let values = products(weights, input);
        let out = self.output(values);
        self.ops.push(Op::Linear(matrix, x, out));
        out
    }

    pub(super) fn bias(&mut self, at: usize, x: Node) -> Node {
        let bias = &self.parameters[at..at + x.len];
        let values = self.value(x).iter().zip(bias).map(|(x, b)| x + b).collect();
        let out = self.output(values);
        self.ops.push(Op::Bias(at, x, out));
        out
    }

    pub(super) fn add(&mut self, a: Node, b: Node) -> Node {
        let values = self.value(a).iter().zip(self.value(b)).map(|(a, b)| a + b).collect();
        let out = self.output(values);
        self.ops.push(Op::Add(a, b, out));
        out
    }

    pub(super) fn multiply(&mut self, a: Node, b: Node) -> Node {
        let values = self.value(a).iter().zip(self.value(b)).map(|(a, b)| a * b).collect();
        let out = self.output(values);
        self.ops.push(Op::Multiply(a, b, out));
        out
    }

    fn each(&mut self, x: Node, of: fn(f32) -> f32) -> Node {
        let values = self.value(x).iter().map(|&x| of(x)).collect();
        self.output(values)
    }

    pub(super) fn one_minus(&mut self, x: Node) -> Node {
        let out = self.each(x, |x| 1.0 - x);
        self.ops.push(Op::OneMinus(x, out));
        out
    }

    pub(super) fn tanh(&mut self, x: Node) -> Node {
        let out = self.each(x, f32::tanh);
        self.ops.push(Op::Tanh(x, out));
        out
    }

    pub(super) fn sigmoid(&mut self, x: Node) -> Node {
        let out = self.each(x, sigmoid);
        self.ops.push(Op::Sigmoid(x, out));
        out
    }

    pub(super) fn categorical(&mut self, classes: usize, logits: Node) -> Node {
        let mut values = Vec::with_capacity(logits.len);
        for group in self.value(logits).chunks_exact(classes) {
            values.extend(softmax(group).map(|p| mixed(p, classes)));
        }
        let out = self.output(values);
        self.ops.push(Op::Categorical(classes, logits, out));
        out
    }

    pub(super) fn sample(&mut self, probabilities: Node, sample: &[f32]) -> Node {
        let out = self.input(sample);
        self.ops.push(Op::Sample(probabilities, out));
        out
    }

    pub(super) fn squares(&mut self, x: Node, target: &[f32], weight: f32) {
        let squares = self.value(x).iter().zip(target).map(|(x, t)| 0.5 * (x - t).powi(2));
        self.loss += weight * squares.sum::<f32>();
        self.ops.push(Op::Squares(x, target.to_vec(), weight));
    }

    pub(super) fn divergence(
        &mut self,
        posterior: Node,
        prior: Node,
        weights: [f32; 2],
        free: f32,
    ) {
        let pairs = self.value(posterior).iter().zip(self.value(prior));
        let divergence: f32 = pairs.map(|(q, p)| q * (q / p).ln()).sum();
        let is_free = divergence < free;
        self.loss += if is_free { free } else { divergence };
        self.ops.push(Op::Divergence { posterior, prior, weights, is_free });
    }

    pub(super) fn outcome(&mut self, heads: Node, outcome: Outcome, weight: f32) {
        let [mean, log_variance, logit] = [0, 1, 2].map(|at| self.value(heads)[at]);
        let off = outcome.change - mean;
        self.loss += weight * 0.5 * (log_variance + off * off * (-log_variance).exp());
        // ln(1 + e^x), without overflow.
        let softplus = logit.max(0.0) + (-logit.abs()).exp().ln_1p();
        self.loss += weight * (softplus - if outcome.accepted { logit } else { 0.0 });
        self.ops.push(Op::Outcome(heads, outcome, weight));
    }

    /// Gradients of the sum of all losses with respect to the parameters.
    pub(super) fn gradients(&self) -> Vec<f32> {
        let mut of_parameters = vec![0.0; self.parameters.len()];
        let mut of = vec![0.0; self.values.len()];
        for op in self.ops.iter().rev() {
            self.backward(op, &mut of, &mut of_parameters);
        }
        of_parameters
    }

    fn backward(&self, op: &Op, of: &mut [f32], of_parameters: &mut [f32]) {
        match *op {
            Op::Linear(Matrix { at, rows, columns }, x, out) => {
                for row in 0..rows {
                    let gradient = of[out.start + row];
                    if gradient == 0.0 {
                        continue;
                    }
                    let weights = &self.parameters[at + row * columns..at + (row + 1) * columns];
                    let of_weights =
                        &mut of_parameters[at + row * columns..at + (row + 1) * columns];
                    let of_x = &mut of[x.range()];
                    let values = &self.values[x.range()];
                    for column in 0..columns {
                        of_weights[column] += gradient * values[column];
                        of_x[column] += gradient * weights[column];
                    }
                }
            }
            Op::Bias(at, x, out) => {
                for index in 0..x.len {
                    let gradient = of[out.start + index];
                    of_parameters[at + index] += gradient;
                    of[x.start + index] += gradient;
                }
            }
            Op::Add(a, b, out) => {
                for index in 0..out.len {
                    let gradient = of[out.start + index];
                    of[a.start + index] += gradient;
                    of[b.start + index] += gradient;
                }
            }
            Op::Multiply(a, b, out) => {
                for index in 0..out.len {
                    let gradient = of[out.start + index];
                    of[a.start + index] += gradient * self.values[b.start + index];
                    of[b.start + index] += gradient * self.values[a.start + index];
                }
            }
            Op::OneMinus(x, out) => self.through(x, out, of, |_| -1.0),
            Op::Tanh(x, out) => self.through(x, out, of, |y| 1.0 - y * y),
            Op::Sigmoid(x, out) => self.through(x, out, of, |y| y * (1.0 - y)),
            Op::Categorical(classes, x, out) => {
                for group in (0..x.len).step_by(classes) {
                    let logits = &self.values[x.start + group..x.start + group + classes];
                    let probabilities: Vec<f32> = softmax(logits).collect();
                    let above = &of[out.start + group..out.start + group + classes];
                    let mean = dot(&probabilities, above);
                    let gradients: Vec<f32> = probabilities
                        .iter()
                        .zip(above)
                        .map(|(p, g)| (1.0 - UNIFORM) * p * (g - mean))
                        .collect();
                    let below = &mut of[x.start + group..x.start + group + classes];
                    below.iter_mut().zip(gradients).for_each(|(below, g)| *below += g);
                }
            }
            Op::Sample(x, out) => self.through(x, out, of, |_| 1.0),
            Op::Squares(x, ref target, weight) => {
                for (index, target) in target.iter().enumerate() {
                    of[x.start + index] += weight * (self.values[x.start + index] - target);
                }
            }
            Op::Divergence { is_free: true, .. } => {}
            Op::Divergence { posterior, prior, weights, .. } => {
                for index in 0..posterior.len {
                    let q = self.values[posterior.start + index];
                    let p = self.values[prior.start + index];
                    of[posterior.start + index] += weights[0] * ((q / p).ln() + 1.0);
                    of[prior.start + index] -= weights[1] * q / p;
                }
            }
            Op::Outcome(heads, outcome, weight) => {
                let [mean, log_variance, logit] = [0, 1, 2].map(|at| self.values[heads.start + at]);
                let (off, precision) = (outcome.change - mean, (-log_variance).exp());
                of[heads.start] -= weight * off * precision;
                of[heads.start + 1] += weight * 0.5 * (1.0 - off * off * precision);
                let accepted = if outcome.accepted { 1.0 } else { 0.0 };
                of[heads.start + 2] += weight * (sigmoid(logit) - accepted);
            }
        }
    }

    /// Adds the gradient of `out`, times a factor that depends on its value, to the gradient of
    /// `x`.
    fn through(&self, x: Node, out: Node, of: &mut [f32], factor: fn(f32) -> f32) {
        for index in 0..x.len {
            of[x.start + index] += of[out.start + index] * factor(self.values[out.start + index]);
        }
    }
}

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The product of each row with a vector. Four rows at a time, to hide the latency of dependent
/// additions.
fn products(rows: &[f32], x: &[f32]) -> Vec<f32> {
    let fours = rows.chunks_exact(4 * x.len());
    let rest = fours.remainder().chunks_exact(x.len()).map(|row| dot(row, x));
    let of_four = |rows: &[f32]| {
        let rows: [&[f32]; 4] = std::array::from_fn(|row| &rows[row * x.len()..][..x.len()]);
        let mut sums = [-0.0; 4];
        for (at, x) in x.iter().enumerate() {
            sums.iter_mut().zip(rows).for_each(|(sum, row)| *sum += row[at] * x);
        }
        sums
    };
    fours.flat_map(of_four).chain(rest).collect()
}

fn softmax(logits: &[f32]) -> impl Iterator<Item = f32> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().map(|logit| (logit - most).exp()).sum();
    logits.iter().map(move |logit| (logit - most).exp() / sum)
}

/// Mixes a uniform distribution into a probability.
pub(super) fn mixed(probability: f32, classes: usize) -> f32 {
    (1.0 - UNIFORM) * probability + UNIFORM / classes as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program with every op, and its loss.
    fn program<'p>(parameters: &'p [f32]) -> Tape<'p> {
        let mut tape = Tape::new(parameters);
        let x = tape.input(&[0.3, -0.7, 0.5]);
        let first = tape.linear(Matrix { at: 0, rows: 6, columns: 3 }, x);
        let first = tape.bias(18, first);
        let (a, b) = (tape.tanh(first), tape.sigmoid(first));
        let c = tape.one_minus(b);
        let d = tape.multiply(a, c);
        let e = tape.add(d, b);
        let posterior = tape.categorical(3, e);
        let f = tape.linear(Matrix { at: 24, rows: 6, columns: 6 }, posterior);
        let prior = tape.categorical(3, f);
        tape.divergence(posterior, prior, [1.0, 1.0], 0.0);
        // If the sample equals the distribution, the straight-through gradient is exact.
        let values = tape.value(prior).to_vec();
        let sample = tape.sample(prior, &values);
        let heads = tape.linear(Matrix { at: 60, rows: 3, columns: 6 }, sample);
        tape.squares(heads, &[0.1, 0.2, -0.3], 0.75);
        tape.outcome(heads, Outcome { change: 0.4, accepted: true }, 1.0);
        tape.outcome(heads, Outcome { change: -0.2, accepted: false }, 0.5);
        tape
    }

    #[test]
    fn gradients_are_those_of_finite_differences() {
        let parameters: Vec<f32> =
            (0..78).map(|index| ((index * 37 % 29) as f32 / 29.0 - 0.5) * 1.2).collect();
        let gradients = program(&parameters).gradients();
        let mut largest = 0.0_f32;
        for index in 0..parameters.len() {
            let at = |by: f32| {
                let mut moved = parameters.clone();
                moved[index] += by;
                program(&moved).loss()
            };
            let step = 1e-2;
            let expected =
                (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
            let found = gradients[index];
            assert!((found - expected).abs() < 1e-3, "{index}: {found} is not {expected}");
            largest = largest.max(found.abs());
        }
        assert!(largest > 0.1, "{largest}");
    }

    #[test]
    fn products_have_the_bits_of_sums_in_order() {
        let values: Vec<f32> = (0..99).map(|at| ((at * 37 % 29) as f32 - 14.0) / 7.0).collect();
        for (rows, columns) in [(1, 9), (4, 9), (7, 9), (11, 1), (3, 33), (0, 5)] {
            let (rows, x) = (&values[..rows * columns], &values[99 - columns..]);
            let expected: Vec<f32> = rows.chunks_exact(columns).map(|row| dot(row, x)).collect();
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(bits(products(rows, x)), bits(expected));
        }
    }

    #[test]
    fn a_divergence_below_the_free_amount_has_no_gradient() {
        let parameters = [0.2, -0.1, 0.4, 0.0];
        let of = |free: f32, weights: [f32; 2]| {
            let mut tape = Tape::new(&parameters);
            let one = tape.input(&[1.0]);
            let q = tape.linear(Matrix { at: 0, rows: 2, columns: 1 }, one);
            let p = tape.linear(Matrix { at: 2, rows: 2, columns: 1 }, one);
            let (q, p) = (tape.categorical(2, q), tape.categorical(2, p));
            tape.divergence(q, p, weights, free);
            tape.gradients()
        };
        assert_eq!(of(1.0, [1.0, 1.0]), [0.0; 4]);
        let [both, half] = [of(0.0, [1.0, 1.0]), of(0.0, [0.5, 0.0])];
        assert!(both.iter().all(|gradient| gradient.abs() > 1e-3), "{both:?}");
        assert_eq!(half[2..], [0.0, 0.0], "the prior is held");
        assert_eq!(half[0], 0.5 * both[0]);
    }
}
