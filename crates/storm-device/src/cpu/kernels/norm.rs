//! Layer norm and RMS norm over the width of a row, with the residual sum fused in.

use super::column_sum::finish;
use super::element::Element;
use super::gemm::Accumulate;
use super::simd::lane_sum;
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::{NormKind, ROWS_PER_PARTIAL};

/// Operands of a norm.
#[derive(Clone, Copy)]
pub struct NormInput<'a, E> {
    /// Rows to normalize.
    pub x: &'a [E],
    /// Added to `x` first.
    pub delta: Option<&'a [E]>,
    /// Scale, one per column.
    pub weight: &'a [E],
    /// Offset, one per column.
    pub bias: Option<&'a [E]>,
    /// Which norm.
    pub kind: NormKind,
    /// Added to the variance.
    pub epsilon: f32,
}

/// Outputs of a norm.
pub struct NormOutput<'a, E> {
    /// The normalized rows.
    pub y: &'a mut [E],
    /// One over the standard deviation of each row.
    pub rstd: &'a mut [f32],
    /// The mean of each row, for a layer norm.
    pub mean: Option<&'a mut [f32]>,
    /// `x + delta`.
    pub sum: Option<&'a mut [E]>,
}

simd_dispatch! {
    fn add_row[E: Element](x: &[E], delta: &[E], sum: &mut [E]) {
        for ((sum, x), delta) in sum.iter_mut().zip(x).zip(delta) {
            *sum = E::from_f32(x.to_f32() + delta.to_f32());
        }
    }

    fn norm_row[E: Element](
        x: &[E], weight: &[E], bias: Option<&[E]>, kind: NormKind, epsilon: f32, y: &mut [E],
    ) -> (f32, f32) {
        let width = x.len();
        let (mean, rstd) = statistics(x, kind, epsilon);
        let (x, weight, y) = (&x[..width], &weight[..width], &mut y[..width]);
        match bias {
            Some(bias) => {
                let bias = &bias[..width];
                for i in 0..width {
                    let normalized = (x[i].to_f32() - mean) * rstd;
                    y[i] = E::from_f32(normalized * weight[i].to_f32() + bias[i].to_f32());
                }
            }
            None => {
                for i in 0..width {
                    let normalized = (x[i].to_f32() - mean) * rstd;
                    y[i] = E::from_f32(normalized * weight[i].to_f32());
                }
            }
        }
        (mean, rstd)
    }

    fn norm_grad_row[E: Element](row: Row<'_, E>, kind: NormKind, dx: &mut [E]) {
        let width = dx.len();
        let (dy, x, weight) = (&row.dy[..width], &row.x[..width], &row.weight[..width]);
        let (mean, rstd) = (row.mean, row.rstd);
        let scale = 1.0 / width as f32;
        let along = scale * lane_sum(width, |i| {
            dy[i].to_f32() * weight[i].to_f32() * ((x[i].to_f32() - mean) * rstd)
        });
        let offset = match kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => {
                scale * lane_sum(width, |i| dy[i].to_f32() * weight[i].to_f32())
            }
        };
        let gradient = |i: usize| {
            let normalized = (x[i].to_f32() - mean) * rstd;
            (dy[i].to_f32() * weight[i].to_f32() - offset - normalized * along) * rstd
        };
        match row.addend {
            Some(addend) => {
                let addend = &addend[..width];
                for i in 0..width {
                    dx[i] = E::from_f32(gradient(i) + addend[i].to_f32());
                }
            }
            None => {
                for i in 0..width {
                    dx[i] = E::from_f32(gradient(i));
                }
            }
        }
    }

    fn add_weight_gradient[E: Element](dy: &[E], x: &[E], mean: f32, rstd: f32, sums: &mut [f32]) {
        for ((sum, dy), x) in sums.iter_mut().zip(dy).zip(x) {
            *sum += dy.to_f32() * ((x.to_f32() - mean) * rstd);
        }
    }

    fn add_bias_gradient[E: Element](dy: &[E], sums: &mut [f32]) {
        for (sum, dy) in sums.iter_mut().zip(dy) {
            *sum += dy.to_f32();
        }
    }
}

/// One row of the backward pass.
#[derive(Clone, Copy)]
struct Row<'a, E> {
    dy: &'a [E],
    x: &'a [E],
    weight: &'a [E],
    addend: Option<&'a [E]>,
    mean: f32,
    rstd: f32,
}

/// Mean (0 for an RMS norm) and reciprocal deviation of a row.
#[inline(always)]
pub(super) fn statistics<E: Element>(x: &[E], kind: NormKind, epsilon: f32) -> (f32, f32) {
    let scale = 1.0 / x.len() as f32;
    let mean = match kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => scale * lane_sum(x.len(), |i| x[i].to_f32()),
    };
    let variance = scale
        * lane_sum(x.len(), |i| {
            let centered = x[i].to_f32() - mean;
            centered * centered
        });
    (mean, 1.0 / (variance + epsilon).sqrt())
}

/// Normalizes each row of `x + delta`.
pub fn norm<E: Element>(input: NormInput<'_, E>, output: NormOutput<'_, E>) {
    let width = input.weight.len();
    let block = ROWS_PER_PARTIAL * width;
    let NormOutput { y, rstd, mean, sum } = output;
    // The sums are stored first, so that the norm uses the stored, rounded sums.
    let x: &[E] = match (input.delta, sum) {
        (Some(delta), Some(sum)) => {
            sum.par_chunks_mut(block)
                .zip(input.x.par_chunks(block))
                .zip(delta.par_chunks(block))
                .for_each(|((sum, x), delta)| add_row(x, delta, sum));
            sum
        }
        _ => input.x,
    };
    let row =
        |y: &mut [E], x: &[E]| norm_row(x, input.weight, input.bias, input.kind, input.epsilon, y);
    let blocks =
        y.par_chunks_mut(block).zip(x.par_chunks(block)).zip(rstd.par_chunks_mut(ROWS_PER_PARTIAL));
    match mean {
        Some(mean) => {
            blocks.zip(mean.par_chunks_mut(ROWS_PER_PARTIAL)).for_each(|(((y, x), rstd), mean)| {
                let rows = y.chunks_mut(width).zip(x.chunks(width));
                for ((y, x), (rstd, mean)) in rows.zip(rstd.iter_mut().zip(mean)) {
                    (*mean, *rstd) = row(y, x);
                }
            });
        }
        None => blocks.for_each(|((y, x), rstd)| {
            for ((y, x), rstd) in y.chunks_mut(width).zip(x.chunks(width)).zip(rstd) {
                (_, *rstd) = row(y, x);
            }
        }),
    }
}

/// Operands of the backward pass of a norm.
#[derive(Clone, Copy)]
pub struct NormGradInput<'a, E> {
    /// Gradient of the normalized rows.
    pub dy: &'a [E],
    /// The rows that were normalized.
    pub x: &'a [E],
    /// Scale, one per column.
    pub weight: &'a [E],
    /// From the forward pass.
    pub rstd: &'a [f32],
    /// From the forward pass of a layer norm.
    pub mean: Option<&'a [f32]>,
    /// Added to the result.
    pub addend: Option<&'a [E]>,
    /// Which norm.
    pub kind: NormKind,
}

/// `dx = gradient + addend`, row by row.
pub fn norm_grad<E: Element>(input: NormGradInput<'_, E>, dx: &mut [E]) {
    let width = input.weight.len();
    let block = ROWS_PER_PARTIAL * width;
    dx.par_chunks_mut(block).enumerate().for_each(|(task, dx)| {
        for (i, dx) in dx.chunks_mut(width).enumerate() {
            norm_grad_row(input.row(task * ROWS_PER_PARTIAL + i), input.kind, dx);
        }
    });
}

/// Gradients of weight and bias. `partials` (blocks × columns of both) is scratch.
pub fn norm_parameter_grads<E: Element, G: Element>(
    input: NormGradInput<'_, E>,
    partials: &mut [f32],
    d_weight: (&mut [G], Accumulate),
    d_bias: Option<(&mut [G], Accumulate)>,
) {
    let width = input.weight.len();
    let rows = input.rstd.len();
    let columns = if d_bias.is_some() { 2 * width } else { width };
    partials.par_chunks_mut(columns).enumerate().for_each(|(task, sums)| {
        sums.fill(0.0);
        let (weight_sums, bias_sums) = sums.split_at_mut(width);
        for row in task * ROWS_PER_PARTIAL..rows.min((task + 1) * ROWS_PER_PARTIAL) {
            let row = input.row(row);
            add_weight_gradient(row.dy, row.x, row.mean, row.rstd, weight_sums);
            add_bias_gradient(row.dy, bias_sums);
        }
    });
    finish(partials, columns, 0, d_weight.1, d_weight.0);
    if let Some((d_bias, accumulate)) = d_bias {
        finish(partials, columns, width, accumulate, d_bias);
    }
}

impl<'a, E> NormGradInput<'a, E> {
    fn row(&self, row: usize) -> Row<'a, E> {
        let width = self.weight.len();
        let range = row * width..(row + 1) * width;
        Row {
            dy: &self.dy[range.clone()],
            x: &self.x[range.clone()],
            weight: self.weight,
            addend: self.addend.map(|addend| &addend[range]),
            mean: self.mean.map_or(0.0, |mean| mean[row]),
            rstd: self.rstd[row],
        }
    }
}
