//! Categorical distributions in groups of neighbors: their probabilities, samples, and divergence.

use super::element::Element;
use super::math::exp;
use super::simd::lane_sum;
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::KlBalance;
use storm_graph::random::{Purpose, Seed, Stream, unit_interval, words};

/// Elements per task.
const CHUNK: usize = 1 << 12;

/// How probabilities are made of logits.
#[derive(Clone, Copy, Debug)]
pub struct Mixture {
    /// Classes of a group.
    pub classes: usize,
    /// Weight of the uniform distribution.
    pub uniform: f32,
}

impl Mixture {
    /// Elements of whole groups per task.
    fn chunk(self) -> usize {
        (CHUNK / self.classes).max(1) * self.classes
    }
}

/// The largest logit of a group, and the sum of e to the others less it.
#[inline(always)]
fn scale_of<E: Element>(logits: &[E]) -> (f32, f32) {
    let mut most = f32::NEG_INFINITY;
    for logit in logits {
        most = most.max(logit.to_f32());
    }
    (most, lane_sum(logits.len(), |at| exp(logits[at].to_f32() - most)))
}

simd_dispatch! {
    fn categorical_chunk[E: Element](mixture: Mixture, logits: &[E], out: &mut [E]) {
        let Mixture { classes, uniform } = mixture;
        for (out, logits) in out.chunks_exact_mut(classes).zip(logits.chunks_exact(classes)) {
            let (most, sum) = scale_of(logits);
            let (scale, least) = ((1.0 - uniform) / sum, uniform / classes as f32);
            for (out, logit) in out.iter_mut().zip(logits) {
                *out = E::from_f32(exp(logit.to_f32() - most) * scale + least);
            }
        }
    }

    fn categorical_grad_chunk[E: Element](
        mixture: Mixture, dy: &[E], logits: &[E], out: &mut [E]
    ) {
        let Mixture { classes, uniform } = mixture;
        let groups = dy.chunks_exact(classes).zip(logits.chunks_exact(classes));
        for (out, (dy, logits)) in out.chunks_exact_mut(classes).zip(groups) {
            let (most, sum) = scale_of(logits);
            let share = |at: usize| exp(logits[at].to_f32() - most) / sum;
            let mean = lane_sum(classes, |at| share(at) * dy[at].to_f32());
            for (at, out) in out.iter_mut().enumerate() {
                *out = E::from_f32((1.0 - uniform) * share(at) * (dy[at].to_f32() - mean));
            }
        }
    }
}

/// The probabilities of logits.
pub fn categorical<E: Element>(mixture: Mixture, logits: &[E], out: &mut [E]) {
    let chunk = mixture.chunk();
    out.par_chunks_mut(chunk)
        .zip(logits.par_chunks(chunk))
        .for_each(|(out, logits)| categorical_chunk(mixture, logits, out));
}

/// Gradient of the logits of [`categorical`].
pub fn categorical_grad<E: Element>(mixture: Mixture, dy: &[E], logits: &[E], out: &mut [E]) {
    let chunk = mixture.chunk();
    let operands = dy.par_chunks(chunk).zip(logits.par_chunks(chunk));
    out.par_chunks_mut(chunk)
        .zip(operands)
        .for_each(|(out, (dy, logits))| categorical_grad_chunk(mixture, dy, logits, out));
}

/// The class of a group that a uniform number selects.
pub fn class_of<E: Element>(probabilities: &[E], uniform: f32) -> usize {
    let mut left = uniform;
    for (class, probability) in probabilities.iter().enumerate() {
        left -= probability.to_f32();
        if left < 0.0 {
            return class;
        }
    }
    probabilities.len() - 1
}

/// Calls `found` with each group's number and sampled class.
pub fn sample_classes<E: Element>(
    (seed, stream): (Seed, Stream),
    classes: usize,
    probabilities: &[E],
    mut found: impl FnMut(usize, usize),
) {
    for (block, four) in probabilities.chunks(4 * classes).enumerate() {
        let words = words(seed, Purpose::Sampling, stream, block as u64);
        for (at, (group, word)) in four.chunks_exact(classes).zip(words).enumerate() {
            found(4 * block + at, class_of(group, unit_interval(word)));
        }
    }
}

/// One-hot samples of probabilities.
pub fn sample<E: Element>(
    random: (Seed, Stream),
    classes: usize,
    probabilities: &[E],
    out: &mut [E],
) {
    out.fill(E::from_f32(0.0));
    sample_classes(random, classes, probabilities, |group, class| {
        out[group * classes + class] = E::from_f32(1.0);
    });
}

/// The larger of the KL divergence of each row and the amount that is free.
pub fn divergence<E: Element>(
    width: usize,
    free: f32,
    posterior: &[E],
    prior: &[E],
    out: &mut [f32],
) {
    let step = width.max(1);
    let rows = posterior.par_chunks(step).zip(prior.par_chunks(step));
    out.par_iter_mut().zip(rows).for_each(|(out, (posterior, prior))| {
        let sum = lane_sum(width, |at| {
            let (q, p) = (posterior[at].to_f32(), prior[at].to_f32());
            q * (q / p).ln()
        });
        *out = if sum < free { free } else { sum };
    });
}

/// What the gradient of [`divergence`] reads.
#[derive(Clone, Copy, Debug)]
pub struct DivergenceGradInput<'a, E> {
    /// Gradient of each row's divergence.
    pub d_divergence: &'a [f32],
    /// The divergences.
    pub divergence: &'a [f32],
    /// The posterior.
    pub posterior: &'a [E],
    /// The prior.
    pub prior: &'a [E],
    /// Divergence without a gradient.
    pub free: f32,
    /// Weights of the two gradients.
    pub balance: KlBalance,
}

/// Gradients of posterior and prior of [`divergence`].
pub fn divergence_grad<E: Element>(
    width: usize,
    input: DivergenceGradInput<'_, E>,
    d_posterior: &mut [E],
    d_prior: &mut [E],
) {
    let step = width.max(1);
    let outputs = d_posterior.par_chunks_mut(step).zip(d_prior.par_chunks_mut(step));
    outputs.enumerate().for_each(|(row, (d_posterior, d_prior))| {
        let DivergenceGradInput { balance, .. } = input;
        let is_free = input.divergence[row] <= input.free;
        let gradient = if is_free { 0.0 } else { input.d_divergence[row] };
        for at in 0..width {
            let element = row * width + at;
            let (q, p) = (input.posterior[element].to_f32(), input.prior[element].to_f32());
            let ratio = q / p;
            d_posterior[at] = E::from_f32(gradient * balance.posterior * (ratio.ln() + 1.0));
            d_prior[at] = E::from_f32(-gradient * balance.prior * ratio);
        }
    });
}
