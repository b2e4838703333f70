//! Categorical distributions, one for each group of neighbors: probabilities, samples, and
//! divergence.

use super::element::Element;
use super::math::exp;
use super::simd::{LANES, lane_sum};
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::KlBalance;
use storm_graph::random::{Purpose, Seed, Stream, unit_interval, words};

/// Elements per task.
const CHUNK: usize = 1 << 12;

/// How probabilities are computed from logits.
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

/// Up to [`LANES`] values, then `fill`. A whole block has a separate path, whose length the
/// compiler knows, so that its loop vectorizes.
#[inline(always)]
fn block_of<E: Element>(values: &[E], fill: f32) -> [f32; LANES] {
    let mut block = [fill; LANES];
    match <&[E; LANES]>::try_from(values) {
        Ok(values) => {
            for (to, value) in block.iter_mut().zip(values) {
                *to = value.to_f32();
            }
        }
        Err(_) => {
            for (to, value) in block.iter_mut().zip(values) {
                *to = value.to_f32();
            }
        }
    }
    block
}

/// The exponentials of up to [`LANES`] logits minus the largest of their group, then zeros.
#[inline(always)]
fn exponentials<E: Element>(logits: &[E], most: f32) -> [f32; LANES] {
    let mut block = block_of(logits, f32::NEG_INFINITY);
    for x in &mut block {
        *x = exp(*x - most);
    }
    block
}

/// The larger of two values. If either is NaN, the second.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The largest logit of a group, and the sum of [`exponentials`].
#[inline(always)]
fn scale_of<E: Element>(logits: &[E]) -> (f32, f32) {
    let mut largest = [f32::NEG_INFINITY; LANES];
    for logits in logits.chunks(LANES) {
        let block = block_of(logits, f32::NEG_INFINITY);
        for (most, x) in largest.iter_mut().zip(&block) {
            *most = larger(*x, *most);
        }
    }
    let mut most = f32::NEG_INFINITY;
    for x in &largest {
        most = larger(*x, most);
    }
    let mut sums = [0.0; LANES];
    for logits in logits.chunks(LANES) {
        let terms = exponentials(logits, most);
        for (sum, term) in sums.iter_mut().zip(&terms) {
            *sum += term;
        }
    }
    (most, total(&sums))
}

/// The sum of the lanes, in the order of [`lane_sum`].
#[inline(always)]
fn total(lanes: &[f32; LANES]) -> f32 {
    lane_sum([&lanes[..]], |[lane]| lane)
}

simd_dispatch! {
    fn categorical_chunk[E: Element](mixture: Mixture, logits: &[E], out: &mut [E]) {
        let Mixture { classes, uniform } = mixture;
        for (out, logits) in out.chunks_exact_mut(classes).zip(logits.chunks_exact(classes)) {
            let (most, sum) = scale_of(logits);
            let (scale, least) = ((1.0 - uniform) / sum, uniform / classes as f32);
            for (out, logits) in out.chunks_mut(LANES).zip(logits.chunks(LANES)) {
                let terms = exponentials(logits, most);
                for (out, term) in out.iter_mut().zip(&terms) {
                    *out = E::from_f32(term * scale + least);
                }
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
            let mut products = [0.0; LANES];
            for (dy, logits) in dy.chunks(LANES).zip(logits.chunks(LANES)) {
                let (terms, dy) = (exponentials(logits, most), block_of(dy, 0.0));
                for ((product, term), dy) in products.iter_mut().zip(&terms).zip(&dy) {
                    *product += term * dy;
                }
            }
            let (mean, scale) = (total(&products) / sum, (1.0 - uniform) / sum);
            let parts = dy.chunks(LANES).zip(logits.chunks(LANES));
            for (out, (dy, logits)) in out.chunks_mut(LANES).zip(parts) {
                let (terms, dy) = (exponentials(logits, most), block_of(dy, 0.0));
                for ((out, term), dy) in out.iter_mut().zip(&terms).zip(&dy) {
                    *out = E::from_f32(scale * term * (dy - mean));
                }
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
fn class_of<E: Element>(probabilities: &[E], uniform: f32) -> usize {
    let mut left = uniform;
    for (class, probability) in probabilities.iter().enumerate() {
        left -= probability.to_f32();
        if left < 0.0 {
            return class;
        }
    }
    probabilities.len() - 1
}

/// The class that is sampled from each group.
fn sampled<E: Element>(
    (seed, stream): (Seed, Stream),
    classes: usize,
    probabilities: &[E],
) -> impl Iterator<Item = usize> {
    let blocks = probabilities.chunks(4 * classes).enumerate();
    blocks.flat_map(move |(block, four)| {
        let words = words(seed, Purpose::Sampling, stream, block as u64);
        let groups = four.chunks_exact(classes).zip(words);
        groups.map(|(group, word)| class_of(group, unit_interval(word)))
    })
}

/// One-hot samples of probabilities.
pub fn sample<E: Element>(
    random: (Seed, Stream),
    classes: usize,
    probabilities: &[E],
    out: &mut [E],
) {
    let of_groups = out.chunks_exact_mut(classes);
    for (out, class) in of_groups.zip(sampled(random, classes, probabilities)) {
        out.fill(E::from_f32(0.0));
        out[class] = E::from_f32(1.0);
    }
}

/// [`categorical`], and the class that [`sample`] selects in each group, for kernels that need no
/// gradient.
pub fn sample_logits(
    mixture: Mixture,
    random: (Seed, Stream),
    logits: &[f32],
    probabilities: &mut [f32],
    classes: &mut [u8],
) {
    categorical(mixture, logits, probabilities);
    let found = sampled(random, mixture.classes, probabilities);
    classes.iter_mut().zip(found).for_each(|(to, class)| *to = class as u8);
}

/// The KL divergence of each row, or `free` if that is larger.
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
        let sum = lane_sum([posterior, prior], |[q, p]| q * (q / p).ln());
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
    /// Amount of divergence that has no gradient.
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
