//! Sums over all elements: partial sums of fixed blocks, then the blocks in order.

use super::element::Element;
use super::simd::lane_sum;
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::SUM_BLOCK;

simd_dispatch! {
    fn sum_block[E: Element](x: &[E]) -> f32 {
        lane_sum([x], |[x]| x)
    }

    fn square_block[E: Element](x: &[E]) -> f32 {
        lane_sum([x], |[x]| x * x)
    }
}

fn reduce<E: Element>(x: &[E], partials: &mut [f32], block: impl Fn(&[E]) -> f32 + Sync) -> f32 {
    partials.par_iter_mut().zip(x.par_chunks(SUM_BLOCK)).for_each(|(sum, x)| *sum = block(x));
    sum_of_partials(partials)
}

/// Sum of the partial sums of blocks, in order.
pub fn sum_of_partials(partials: &[f32]) -> f32 {
    partials.iter().fold(0.0f64, |sum, &part| sum + f64::from(part)) as f32
}

/// Sum of all elements.
pub fn sum<E: Element>(x: &[E], partials: &mut [f32]) -> f32 {
    reduce(x, partials, sum_block)
}

/// Sum of all squares.
pub fn sum_of_squares<E: Element>(x: &[E], partials: &mut [f32]) -> f32 {
    reduce(x, partials, square_block)
}

/// Root of the sum of `parts`, in order.
pub fn global_norm(parts: impl Iterator<Item = f32>) -> f32 {
    parts.fold(0.0f64, |sum, part| sum + f64::from(part)).sqrt() as f32
}

/// The factor that limits the norm of gradients to `max_norm`. For a non-finite norm it is 0, which
/// cancels the update.
pub fn clip_scale(norm: f32, max_norm: f32) -> f32 {
    if !norm.is_finite() {
        0.0
    } else if norm > max_norm {
        max_norm / norm
    } else {
        1.0
    }
}
