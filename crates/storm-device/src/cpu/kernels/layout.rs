//! Copies, conversions, constants and random values.

use super::element::Element;
use rayon::prelude::*;
use storm_graph::random::{Purpose, Seed, Stream, words};

/// Elements per task; a multiple of 4, so that a task starts on a block of random words.
const CHUNK: usize = 1 << 14;

/// Copies as is.
pub fn copy<T: Copy + Send + Sync>(x: &[T], out: &mut [T]) {
    out.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(out, x)| out.copy_from_slice(x));
}

/// Copies between storage types, rounding to nearest.
pub fn convert<A: Element, B: Element>(x: &[A], out: &mut [B]) {
    out.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(out, x)| {
        for (out, x) in out.iter_mut().zip(x) {
            *out = B::from_f32(x.to_f32());
        }
    });
}

/// Sets every element.
pub fn fill<E: Element>(value: f32, out: &mut [E]) {
    let value = E::from_f32(value);
    out.par_chunks_mut(CHUNK).for_each(|out| out.fill(value));
}

/// Most axes a transposition can have.
pub const MAX_AXES: usize = 8;

/// Copies `x` with its axes reordered: axis `i` of the result is axis `axes[i]` of `x`.
///
/// # Panics
/// With more than [`MAX_AXES`] axes.
pub fn transpose<T: Copy + Send + Sync>(x: &[T], extents: &[usize], axes: &[usize], out: &mut [T]) {
    let rank = axes.len();
    assert!(rank <= MAX_AXES, "a transposition has at most {MAX_AXES} axes");
    if out.is_empty() {
        return;
    }
    // Step in `x` for one step along each axis of the result.
    let mut strides = [1usize; MAX_AXES];
    for axis in 0..rank {
        strides[axis] = extents[axes[axis] + 1..].iter().product();
    }
    let inner = axes.last().map_or(1, |&axis| extents[axis]);
    let inner_stride = if rank == 0 { 1 } else { strides[rank - 1] };
    out.par_chunks_mut(inner).enumerate().for_each(|(row, out)| {
        let mut rest = row;
        let mut start = 0;
        for axis in (0..rank.saturating_sub(1)).rev() {
            let extent = extents[axes[axis]];
            start += rest % extent * strides[axis];
            rest /= extent;
        }
        for (i, out) in out.iter_mut().enumerate() {
            *out = x[start + i * inner_stride];
        }
    });
}

/// Normal values of mean 0 by the Box–Muller transform: four words give four values.
pub fn random_normal<E: Element>(seed: Seed, stream: Stream, deviation: f32, out: &mut [E]) {
    out.par_chunks_mut(CHUNK).enumerate().for_each(|(task, out)| {
        for (block, out) in out.chunks_mut(4).enumerate() {
            let block = (task * CHUNK / 4 + block) as u64;
            let words = words(seed, Purpose::Initialization, stream, block);
            let uniform = words.map(|word| (f64::from(word) + 0.5) / 4_294_967_296.0);
            let mut values = [0.0; 4];
            for pair in 0..2 {
                let radius = (-2.0 * uniform[2 * pair].ln()).sqrt();
                let (sine, cosine) = (std::f64::consts::TAU * uniform[2 * pair + 1]).sin_cos();
                values[2 * pair] = radius * cosine;
                values[2 * pair + 1] = radius * sine;
            }
            for (out, value) in out.iter_mut().zip(values) {
                *out = E::from_f32((value * f64::from(deviation)) as f32);
            }
        }
    });
}
