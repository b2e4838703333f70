//! Layer norm and RMS norm over the width of a row, with the residual sum fused in.

use super::column_sum::finish;
use super::element::Element;
use super::gemm::Accumulate;
use super::simd::lane_sum;
use crate::simd_dispatch;
use rayon::iter::{Either, repeat_n};
use rayon::prelude::*;
use storm_graph::{NormKind, norm_rows_per_partial};

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
        let along = scale
            * lane_sum([dy, weight, x], |[dy, weight, x]| dy * weight * ((x - mean) * rstd));
        let offset = match kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => scale * lane_sum([dy, weight], |[dy, weight]| dy * weight),
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
        NormKind::Layer => scale * lane_sum([x], |[x]| x),
    };
    let variance = scale
        * lane_sum([x], |[x]| {
            let centered = x - mean;
            centered * centered
        });
    (mean, 1.0 / (variance + epsilon).sqrt())
}

/// Rows that a thread normalizes at a time.
const ROWS: usize = 32;

/// Normalizes each row of `x + delta`.
pub fn norm<E: Element>(input: NormInput<'_, E>, output: NormOutput<'_, E>) {
    let width = input.weight.len();
    let block = ROWS * width;
    let NormOutput { y, rstd, mean, sum } = output;
    let blocks = y.len().div_ceil(block);
    y.par_chunks_mut(block)
        .zip(rstd.par_chunks_mut(ROWS))
        .zip(blocks_of(mean, ROWS, blocks))
        .zip(blocks_of(sum, block, blocks))
        .enumerate()
        .for_each(|(task, (((y, rstd), mut mean), mut sum))| {
            for (i, (y, rstd)) in y.chunks_mut(width).zip(rstd).enumerate() {
                let first = task * block + i * width;
                let mut x = &input.x[first..first + width];
                // A sum is stored before it is normalized, so that the norm uses it as rounded.
                if let (Some(delta), Some(sum)) = (input.delta, &mut sum) {
                    let sum = &mut sum[i * width..(i + 1) * width];
                    add_row(x, &delta[first..first + width], sum);
                    x = sum;
                }
                let row_mean;
                (row_mean, *rstd) =
                    norm_row(x, input.weight, input.bias, input.kind, input.epsilon, y);
                if let Some(mean) = &mut mean {
                    mean[i] = row_mean;
                }
            }
        });
}

/// The blocks of an output, `size` elements each, or `count` times none if there is no such output.
fn blocks_of<T: Send>(
    output: Option<&mut [T]>,
    size: usize,
    count: usize,
) -> impl IndexedParallelIterator<Item = Option<&mut [T]>> {
    match output {
        Some(output) => Either::Left(output.par_chunks_mut(size).map(Some)),
        None => Either::Right(repeat_n((), count).map(|()| None)),
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

/// The gradients of weight and bias, and what becomes of their old contents.
pub struct NormParameterGrads<'a, G> {
    /// Blocks of rows × columns of both. Scratch.
    pub partials: &'a mut [f32],
    /// Of the weight.
    pub d_weight: (&'a mut [G], Accumulate),
    /// Of the bias, if the norm has one.
    pub d_bias: Option<(&'a mut [G], Accumulate)>,
}

/// `dx = gradient + addend`, row by row, and the gradients of the parameters if they are wanted.
pub fn norm_grad<E: Element, G: Element>(
    input: NormGradInput<'_, E>,
    dx: &mut [E],
    parameters: Option<NormParameterGrads<'_, G>>,
) {
    let width = input.weight.len();
    let rows_per_block = norm_rows_per_partial(dx.len() / width);
    let rows = |task: usize, dx: &mut [E], sums: Option<&mut [f32]>| {
        let mut sums = sums.map(|sums| {
            sums.fill(0.0);
            sums.split_at_mut(width)
        });
        for (i, dx) in dx.chunks_mut(width).enumerate() {
            let row = input.row(task * rows_per_block + i);
            norm_grad_row(row, input.kind, dx);
            if let Some((weight_sums, bias_sums)) = &mut sums {
                add_weight_gradient(row.dy, row.x, row.mean, row.rstd, weight_sums);
                add_bias_gradient(row.dy, bias_sums);
            }
        }
    };
    let blocks = dx.par_chunks_mut(rows_per_block * width);
    let Some(NormParameterGrads { partials, d_weight, d_bias }) = parameters else {
        blocks.enumerate().for_each(|(task, dx)| rows(task, dx, None));
        return;
    };
    let columns = if d_bias.is_some() { 2 * width } else { width };
    blocks
        .zip(partials.par_chunks_mut(columns))
        .enumerate()
        .for_each(|(task, (dx, sums))| rows(task, dx, Some(sums)));
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
