//! Copies blocks of vectors between the packed buffers and scratch memory.

use super::super::element::Element;
use crate::simd_dispatch;

simd_dispatch! {
    /// Copies `rows` vectors of `dim` elements, `stride` apart, into f32 rows `target_stride`
    /// apart, multiplied by `factor`.
    pub(super) fn load[T: Element](
        source: &[T],
        stride: usize,
        rows: usize,
        dim: usize,
        factor: f32,
        target: &mut [f32],
        target_stride: usize,
    ) {
        for row in 0..rows {
            let from = &source[row * stride..][..dim];
            let to = &mut target[row * target_stride..][..dim];
            for (to, from) in to.iter_mut().zip(from) {
                *to = from.to_f32() * factor;
            }
        }
    }

    /// Writes one vector, multiplied by `factor`, in its storage type.
    pub(super) fn store[T: Element](source: &[f32], factor: f32, target: &mut [T]) {
        for (to, from) in target.iter_mut().zip(source) {
            *to = T::from_f32(*from * factor);
        }
    }

    /// Multiplies all values by `factor`.
    pub(super) fn scale(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }
}
