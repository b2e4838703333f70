//! Copies, conversions, constants and random values.

use super::element::Element;
use super::gemm::Accumulate;
use rayon::prelude::*;
use storm_graph::BlockPlace;
use storm_graph::random::{Purpose, Seed, Stream, words};

/// Elements per task. A multiple of 4, so that a task starts on a block of random words.
const CHUNK: usize = 1 << 14;

/// Copies elements unchanged.
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

/// Fills the rows of `out`, `width` wide, with zeros, and with `part` times the factor at `place`.
pub fn place_block<A: Element, B: Element>(
    part: &[A],
    part_width: usize,
    place: BlockPlace,
    width: usize,
    out: &mut [B],
) {
    let BlockPlace { row: first, column, factor } = place;
    out.par_chunks_mut(width).enumerate().for_each(|(row, out)| {
        out.fill(B::from_f32(0.0));
        let Some(row) = row.checked_sub(first) else { return };
        let Some(part) = part.get(row * part_width..(row + 1) * part_width) else { return };
        for (out, x) in out[column..].iter_mut().zip(part) {
            *out = B::from_f32(x.to_f32() * factor);
        }
    });
}

/// Writes the block of `dy` (its elements and its width) at `place`, multiplied by its factor, to
/// `out`, or adds it there.
pub fn block_grad<A: Element, B: Element>(
    dy: (&[A], usize),
    place: BlockPlace,
    width: usize,
    accumulate: Accumulate,
    out: &mut [B],
) {
    let (dy, dy_width) = dy;
    out.par_chunks_mut(width).enumerate().for_each(|(row, out)| {
        let start = (place.row + row) * dy_width + place.column;
        for (out, dy) in out.iter_mut().zip(&dy[start..start + width]) {
            let before = match accumulate {
                Accumulate::Replace => 0.0,
                Accumulate::Add => out.to_f32(),
            };
            *out = B::from_f32(dy.to_f32() * place.factor + before);
        }
    });
}

/// Maximum number of axes of a transpose.
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

/// Normal values of mean 0 by the Box–Muller transform, which computes four values from four words.
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
