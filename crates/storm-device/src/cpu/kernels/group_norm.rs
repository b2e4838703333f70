//! Norms of groups of channels of each sample. Each task processes one sample.

use super::batch_norm::{
    Affine, Combine, Pair, Rows, TILE, block_gradient_sums, block_statistics, combine, mask_row,
    normalize_row, tiles,
};
use super::column_sum::finish;
use super::element::Element;
use super::gemm::Accumulate;
use crate::simd_dispatch;
use rayon::prelude::*;
use std::ops::Range;
use storm_graph::{NormActivation, STATISTICS_ROWS};

/// Operands of both directions besides the samples.
#[derive(Clone, Copy)]
pub struct Groups<'a, W> {
    /// Number of groups.
    pub count: usize,
    /// Scale of each channel.
    pub weight: &'a [W],
    /// Offset of each channel.
    pub bias: &'a [W],
    /// The activation after the norm.
    pub activation: NormActivation,
}

impl<W: Element> Groups<'_, W> {
    fn width(&self) -> usize {
        self.weight.len()
    }

    /// Channels of a group.
    fn size(&self) -> usize {
        self.width() / self.count
    }

    /// The values that normalize channels of a sample whose groups have these statistics.
    fn tile(&self, mean: &[f32], rstd: &[f32], channels: Range<usize>) -> Affine {
        let zeros = [0.0; TILE];
        let mut tile = Affine { mean: zeros, rstd: zeros, scale: zeros, bias: zeros };
        for (i, channel) in channels.enumerate() {
            let group = channel / self.size();
            tile.mean[i] = mean[group];
            tile.rstd[i] = rstd[group];
            tile.scale[i] = self.weight[channel].to_f32() * rstd[group];
            tile.bias[i] = self.bias[channel].to_f32();
        }
        tile
    }
}

simd_dispatch! {
    /// `means` has the means of the group for each channel. They are means of `weight · dz`, not of
    /// `dz`.
    fn gradient_row[E: Element](dz: &[E], x: &[E], tile: &Affine, means: &Pair<TILE>, relu: bool, dx: &mut [E]) {
        for (i, ((dx, dz), x)) in dx.iter_mut().zip(dz).zip(x).enumerate() {
            let centered = x.to_f32() - tile.mean[i];
            let is_on = !relu || centered * tile.scale[i] + tile.bias[i] > 0.0;
            let dz = if is_on { dz.to_f32() } else { 0.0 };
            let along = centered * tile.rstd[i] * means[1][i];
            *dx = E::from_f32(tile.scale[i] * dz - tile.rstd[i] * (means[0][i] + along));
        }
    }
}

/// Computes two numbers for each channel of a sample of `rows` rows. Blocks of rows are combined in
/// order.
fn of_channels(
    how: Combine,
    rows: usize,
    out: &mut [f32],
    block: impl Fn(Range<usize>, Range<usize>, &mut Pair<TILE>),
) {
    let width = out.len() / 2;
    let (left, right) = out.split_at_mut(width);
    for channels in tiles(width, TILE) {
        let mut all = [[0.0; TILE]; 2];
        for first in (0..rows).step_by(STATISTICS_ROWS) {
            let own = first..rows.min(first + STATISTICS_ROWS);
            let (mut part, count) = ([[0.0; TILE]; 2], own.len());
            block(own, channels.clone(), &mut part);
            combine(how, (&mut all, first), (&part, count));
        }
        left[channels.clone()].copy_from_slice(&all[0][..channels.len()]);
        right[channels.clone()].copy_from_slice(&all[1][..channels.len()]);
    }
}

/// Outputs and scratch of [`group_norm`].
pub struct GroupNormOutput<'a, E> {
    /// The normalized samples.
    pub y: &'a mut [E],
    /// Mean of each group of each sample.
    pub mean: &'a mut [f32],
    /// One over the standard deviation of each group of each sample.
    pub rstd: &'a mut [f32],
    /// Scratch, (B, 2 · width).
    pub partials: &'a mut [f32],
}

/// `y = f(norm(x) + addend)`.
pub fn group_norm<E: Element, W: Element>(
    groups: Groups<'_, W>,
    epsilon: f32,
    x: &[E],
    addend: Option<&[E]>,
    output: GroupNormOutput<'_, E>,
) {
    let GroupNormOutput { y, mean, rstd, partials } = output;
    let (width, size) = (groups.width(), groups.size());
    let sample = x.len() / (mean.len() / groups.count);
    let rows = sample / width;
    let relu = groups.activation == NormActivation::Relu;
    let statistics = mean.par_chunks_mut(groups.count).zip(rstd.par_chunks_mut(groups.count));
    let samples = y.par_chunks_mut(sample).zip(x.par_chunks(sample)).enumerate();
    samples.zip(statistics).zip(partials.par_chunks_mut(2 * width)).for_each(
        |(((index, (y, x)), (mean, rstd)), partials)| {
            let matrix = Rows { data: x, width };
            of_channels(Combine::Statistics, rows, partials, |rows, channels, out| {
                block_statistics(matrix, rows, channels, out);
            });
            for (group, (mean, rstd)) in mean.iter_mut().zip(rstd.iter_mut()).enumerate() {
                let mut all = [[0.0; 1]; 2];
                for (i, channel) in (group * size..(group + 1) * size).enumerate() {
                    let part = [[partials[channel]], [partials[width + channel]]];
                    combine(Combine::Statistics, (&mut all, i * rows), (&part, rows));
                }
                *mean = all[0][0];
                *rstd = 1.0 / (all[1][0] / (size * rows) as f32 + epsilon).sqrt();
            }
            let addend = addend.map(|addend| &addend[index * sample..(index + 1) * sample]);
            for tile in tiles(width, TILE) {
                let affine = groups.tile(mean, rstd, tile.clone());
                for (row, y) in y.chunks_mut(width).enumerate() {
                    let part = row * width + tile.start..row * width + tile.end;
                    let addend = addend.map(|addend| &addend[part.clone()]);
                    normalize_row(&x[part], addend, &affine, relu, &mut y[tile.clone()]);
                }
            }
        },
    );
}

/// Operands of [`group_norm_grad`].
#[derive(Clone, Copy)]
pub struct GroupNormGradInput<'a, E> {
    /// Gradient of the output.
    pub dy: &'a [E],
    /// What was normalized.
    pub x: &'a [E],
    /// Given if there are an addend and a ReLU.
    pub addend: Option<&'a [E]>,
    /// From the forward pass.
    pub mean: &'a [f32],
    /// From the forward pass.
    pub rstd: &'a [f32],
}

/// Outputs and scratch of [`group_norm_grad`].
pub struct GroupNormGradOutput<'a, E, G> {
    /// Gradient of `x`.
    pub dx: &'a mut [E],
    /// Gradients of weight and bias, if they are trained.
    pub parameters: Option<[(&'a mut [G], Accumulate); 2]>,
    /// Scratch, (B, 2 · width + 2 · groups).
    pub partials: &'a mut [f32],
    /// Gradient of the addend.
    pub d_addend: Option<&'a mut [E]>,
}

/// Gradients of [`group_norm`].
pub fn group_norm_grad<E: Element, W: Element, G: Element>(
    groups: Groups<'_, W>,
    input: GroupNormGradInput<'_, E>,
    output: GroupNormGradOutput<'_, E, G>,
) {
    let GroupNormGradOutput { dx, parameters, partials, d_addend } = output;
    let (width, size) = (groups.width(), groups.size());
    let sample = input.x.len() / (input.mean.len() / groups.count);
    let rows = sample / width;
    let tile_of = |index: usize, tile: Range<usize>| {
        let own = index * groups.count..(index + 1) * groups.count;
        groups.tile(&input.mean[own.clone()], &input.rstd[own], tile)
    };
    let (dz, relu): (&[E], bool) = match (input.addend, d_addend) {
        (Some(addend), Some(d_addend)) => {
            d_addend.par_chunks_mut(sample).enumerate().for_each(|(index, out)| {
                for tile in tiles(width, TILE) {
                    let affine = tile_of(index, tile.clone());
                    for (row, out) in out.chunks_mut(width).enumerate() {
                        let first = index * sample + row * width;
                        let part = first + tile.start..first + tile.end;
                        let (dy, x) = (&input.dy[part.clone()], &input.x[part.clone()]);
                        mask_row(dy, x, &addend[part], &affine, &mut out[tile.clone()]);
                    }
                }
            });
            (d_addend, false)
        }
        _ => (input.dy, groups.activation == NormActivation::Relu),
    };
    let partial_width = 2 * (width + groups.count);
    let samples = dx.par_chunks_mut(sample).zip(partials.par_chunks_mut(partial_width)).enumerate();
    samples.for_each(|(index, (dx, partials))| {
        let own = index * sample..(index + 1) * sample;
        let (dz, x) = (&dz[own.clone()], &input.x[own]);
        let (dz_rows, x_rows) = (Rows { data: dz, width }, Rows { data: x, width });
        let (channels, of_groups) = partials.split_at_mut(2 * width);
        of_channels(Combine::Sums, rows, channels, |rows, tile, out| {
            let affine = tile_of(index, tile.clone());
            block_gradient_sums(dz_rows, x_rows, rows, tile, &affine, relu, out);
        });
        for (part, sums) in of_groups.chunks_mut(groups.count).enumerate() {
            for (group, sum) in sums.iter_mut().enumerate() {
                *sum = 0.0;
                for channel in group * size..(group + 1) * size {
                    *sum += groups.weight[channel].to_f32() * channels[part * width + channel];
                }
            }
        }
        let count = (size * rows) as f32;
        for tile in tiles(width, TILE) {
            let affine = tile_of(index, tile.clone());
            let mut means = [[0.0; TILE]; 2];
            for (part, means) in means.iter_mut().enumerate() {
                for (mean, channel) in means.iter_mut().zip(tile.clone()) {
                    *mean = of_groups[part * groups.count + channel / size] / count;
                }
            }
            for (row, dx) in dx.chunks_mut(width).enumerate() {
                let part = row * width + tile.start..row * width + tile.end;
                let (dz, x) = (&dz[part.clone()], &x[part]);
                gradient_row(dz, x, &affine, &means, relu, &mut dx[tile.clone()]);
            }
        }
    });
    if let Some([d_weight, d_bias]) = parameters {
        finish(partials, partial_width, width, d_weight.1, d_weight.0);
        finish(partials, partial_width, 0, d_bias.1, d_bias.0);
    }
}
