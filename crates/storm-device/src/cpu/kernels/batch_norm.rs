//! Norms of channels over a batch: statistics, one pass forward, two passes backward.
//!
//! Sums over rows have the shape that `storm_graph`'s `ops/batch_norm.rs` describes: groups of
//! rows, a tree over the groups of a block, lanes over the blocks, a tree over the lanes.

use super::element::Element;
use super::gemm::Accumulate;
use super::shared::SharedMut;
use crate::simd_dispatch;
use rayon::prelude::*;
use std::ops::Range;
use storm_graph::{
    NormActivation, STATISTICS_GROUP, STATISTICS_GROUPS, STATISTICS_LANES, STATISTICS_ROWS,
};

/// Channels that are processed together.
pub(super) const TILE: usize = 64;
/// Channels that are finished per task.
const FINISH_TILE: usize = 16;

/// Two numbers for each channel of a tile: mean and sum of squared distances, or two sums.
pub(super) type Pair<const N: usize> = [[f32; N]; 2];

/// How partial results are combined.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Combine {
    /// Means and sums of squared distances from them.
    Statistics,
    /// Plain sums.
    Sums,
}

/// Combines `other`, of `more` rows, into `into`, of `rows` rows.
#[inline(always)]
pub(super) fn combine<const N: usize>(
    how: Combine,
    (into, rows): (&mut Pair<N>, usize),
    (other, more): (&Pair<N>, usize),
) {
    if more == 0 {
        return;
    }
    if rows == 0 {
        *into = *other;
        return;
    }
    let [first, second] = into;
    match how {
        Combine::Sums => {
            for i in 0..N {
                first[i] += other[0][i];
                second[i] += other[1][i];
            }
        }
        Combine::Statistics => {
            let share = more as f32 / (rows + more) as f32;
            let weight = rows as f32 * share;
            for i in 0..N {
                let distance = other[0][i] - first[i];
                first[i] += distance * share;
                second[i] += other[1][i] + distance * distance * weight;
            }
        }
    }
}

/// Combines neighbors, then neighboring pairs, and so on, into the first. `rows` returns the number
/// of rows that a range of parts covers.
#[inline(always)]
fn tree<const N: usize, const COUNT: usize>(
    how: Combine,
    parts: &mut [Pair<N>; COUNT],
    rows: impl Fn(Range<usize>) -> usize,
) {
    let mut stride = 1;
    while stride < COUNT {
        for first in (0..COUNT).step_by(2 * stride) {
            let (left, right) = parts.split_at_mut(first + stride);
            let counts = (rows(first..first + stride), rows(first + stride..first + 2 * stride));
            combine(how, (&mut left[first], counts.0), (&right[0], counts.1));
        }
        stride *= 2;
    }
}

/// Total rows of the blocks of a lane.
fn rows_of_lane(rows: usize, lane: usize) -> usize {
    let blocks = rows.div_ceil(STATISTICS_ROWS);
    let mut count = blocks.saturating_sub(lane).div_ceil(STATISTICS_LANES) * STATISTICS_ROWS;
    let last = blocks.saturating_sub(1);
    if count > 0 && last % STATISTICS_LANES == lane {
        count -= blocks * STATISTICS_ROWS - rows;
    }
    count
}

/// Rows of some groups of a block that has `own` rows.
fn rows_of_groups(own: usize, groups: Range<usize>) -> usize {
    own.min(groups.end * STATISTICS_GROUP) - own.min(groups.start * STATISTICS_GROUP)
}

/// The values that normalize the channels of a tile.
pub(super) struct Affine {
    pub(super) mean: [f32; TILE],
    pub(super) rstd: [f32; TILE],
    /// `weight · rstd`.
    pub(super) scale: [f32; TILE],
    pub(super) bias: [f32; TILE],
}

/// Parameters of the normalization. Slices have one value per channel.
#[derive(Clone, Copy)]
pub struct Channels<'a, W> {
    /// Mean of the batch, or running mean.
    pub mean: &'a [f32],
    /// Variance of the batch, or running variance.
    pub variance: &'a [f32],
    /// Scale.
    pub weight: &'a [W],
    /// Offset.
    pub bias: &'a [W],
    /// Added to the variance.
    pub epsilon: f32,
    /// The activation after the norm.
    pub activation: NormActivation,
}

impl<W: Element> Channels<'_, W> {
    fn tile(&self, channels: Range<usize>) -> Affine {
        let mut tile =
            Affine { mean: [0.0; TILE], rstd: [0.0; TILE], scale: [0.0; TILE], bias: [0.0; TILE] };
        for (i, channel) in channels.enumerate() {
            tile.mean[i] = self.mean[channel];
            tile.rstd[i] = 1.0 / (self.variance[channel] + self.epsilon).sqrt();
            tile.scale[i] = self.weight[channel].to_f32() * tile.rstd[i];
            tile.bias[i] = self.bias[channel].to_f32();
        }
        tile
    }
}

/// A matrix of rows × width. A task reads some rows and a tile of channels of it.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, E> {
    pub(super) data: &'a [E],
    pub(super) width: usize,
}

impl<'a, E> Rows<'a, E> {
    #[inline(always)]
    fn part(&self, row: usize, channels: &Range<usize>) -> &'a [E] {
        &self.data[row * self.width + channels.start..row * self.width + channels.end]
    }
}

simd_dispatch! {
    /// Mean and sum of squared distances of a block of rows.
    pub(super) fn block_statistics[E: Element](
        x: Rows<'_, E>, rows: Range<usize>, channels: Range<usize>, out: &mut Pair<TILE>,
    ) {
        let mut groups: [Pair<TILE>; STATISTICS_GROUPS] =
            [[[0.0; TILE]; 2]; STATISTICS_GROUPS];
        for (group, parts) in groups.iter_mut().enumerate() {
            let first = rows.start + group * STATISTICS_GROUP;
            let end = rows.end.min(first + STATISTICS_GROUP);
            if first >= end {
                break;
            }
            let start = x.part(first, &channels);
            let [sums, squares] = parts;
            for row in first + 1..end {
                let row = x.part(row, &channels);
                for (i, (x, start)) in row.iter().zip(start).enumerate() {
                    let distance = x.to_f32() - start.to_f32();
                    sums[i] += distance;
                    squares[i] += distance * distance;
                }
            }
            let count = (end - first) as f32;
            for (i, start) in start.iter().enumerate() {
                let shift = sums[i] / count;
                // Rounding may make this negative.
                let left = squares[i] - sums[i] * shift;
                squares[i] = if left < 0.0 { 0.0 } else { left };
                sums[i] = start.to_f32() + shift;
            }
        }
        let own = rows.len();
        tree(Combine::Statistics, &mut groups, |range| rows_of_groups(own, range));
        *out = groups[0];
    }

    /// Sums of `dz` and of `dz · x̂` over a block of rows.
    pub(super) fn block_gradient_sums[E: Element](
        dy: Rows<'_, E>, x: Rows<'_, E>, rows: Range<usize>, channels: Range<usize>, tile: &Affine, relu: bool,
        out: &mut Pair<TILE>,
    ) {
        let mut groups: [Pair<TILE>; STATISTICS_GROUPS] =
            [[[0.0; TILE]; 2]; STATISTICS_GROUPS];
        for (group, parts) in groups.iter_mut().enumerate() {
            let first = rows.start + group * STATISTICS_GROUP;
            let end = rows.end.min(first + STATISTICS_GROUP);
            let [sums, products] = parts;
            for row in first..end {
                let (dy, x) = (dy.part(row, &channels), x.part(row, &channels));
                for (i, (dy, x)) in dy.iter().zip(x).enumerate() {
                    let centered = x.to_f32() - tile.mean[i];
                    let is_on = !relu || centered * tile.scale[i] + tile.bias[i] > 0.0;
                    let dz = if is_on { dy.to_f32() } else { 0.0 };
                    sums[i] += dz;
                    products[i] += dz * (centered * tile.rstd[i]);
                }
            }
        }
        let own = rows.len();
        tree(Combine::Sums, &mut groups, |range| rows_of_groups(own, range));
        *out = groups[0];
    }

    pub(super) fn normalize_row[E: Element](x: &[E], addend: Option<&[E]>, tile: &Affine, relu: bool, y: &mut [E]) {
        let value = |i: usize, x: f32| (x - tile.mean[i]) * tile.scale[i] + tile.bias[i];
        // A NaN must reach the loss.
        let active = |value: f32| if relu && value < 0.0 { 0.0 } else { value };
        match addend {
            None => {
                for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
                    *y = E::from_f32(active(value(i, x.to_f32())));
                }
            }
            Some(addend) => {
                for (i, ((y, x), addend)) in y.iter_mut().zip(x).zip(addend).enumerate() {
                    *y = E::from_f32(active(value(i, x.to_f32()) + addend.to_f32()));
                }
            }
        }
    }

    /// Writes the gradient in place of `x`.
    fn gradient_row[E: Element](dy: &[E], tile: &Affine, means: &Pair<TILE>, relu: bool, x: &mut [E]) {
        for (i, (x, dy)) in x.iter_mut().zip(dy).enumerate() {
            let centered = x.to_f32() - tile.mean[i];
            let is_on = !relu || centered * tile.scale[i] + tile.bias[i] > 0.0;
            let dz = if is_on { dy.to_f32() } else { 0.0 };
            let along = centered * tile.rstd[i] * means[1][i];
            *x = E::from_f32(tile.scale[i] * (dz - means[0][i] - along));
        }
    }

    pub(super) fn mask_row[E: Element](dy: &[E], x: &[E], addend: &[E], tile: &Affine, out: &mut [E]) {
        for (i, ((out, dy), (x, addend))) in out.iter_mut().zip(dy).zip(x.iter().zip(addend)).enumerate() {
            let value = (x.to_f32() - tile.mean[i]) * tile.scale[i] + tile.bias[i];
            let is_on = value + addend.to_f32() > 0.0;
            *out = E::from_f32(if is_on { dy.to_f32() } else { 0.0 });
        }
    }
}

/// The tiles of `width` channels.
pub(super) fn tiles(width: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..width).step_by(size).map(move |start| start..width.min(start + size))
}

/// Fills `partials` (blocks × 2 · width) with one row per block of rows.
fn block_partials(
    rows: usize,
    width: usize,
    partials: &mut [f32],
    block: impl Fn(Range<usize>, Range<usize>, &mut Pair<TILE>) + Sync,
) {
    partials.par_chunks_mut(2 * width).enumerate().for_each(|(index, out)| {
        let first = index * STATISTICS_ROWS;
        let (left, right) = out.split_at_mut(width);
        for channels in tiles(width, TILE) {
            let mut pair = [[0.0; TILE]; 2];
            block(first..rows.min(first + STATISTICS_ROWS), channels.clone(), &mut pair);
            let count = channels.len();
            left[channels.clone()].copy_from_slice(&pair[0][..count]);
            right[channels].copy_from_slice(&pair[1][..count]);
        }
    });
}

/// Combines the blocks of each channel, and passes the result to `finish(channel, pair)`.
fn combine_blocks(
    how: Combine,
    rows: usize,
    width: usize,
    partials: &[f32],
    finish: impl Fn(usize, [f32; 2]) + Sync,
) {
    let blocks = rows.div_ceil(STATISTICS_ROWS);
    let tile_count = width.div_ceil(FINISH_TILE);
    (0..tile_count).into_par_iter().for_each(|tile| {
        let channels = tile * FINISH_TILE..width.min((tile + 1) * FINISH_TILE);
        let mut lanes: [Pair<FINISH_TILE>; STATISTICS_LANES] =
            [[[0.0; FINISH_TILE]; 2]; STATISTICS_LANES];
        for block in 0..blocks {
            let mut pair = [[0.0; FINISH_TILE]; 2];
            for (part, values) in pair.iter_mut().enumerate() {
                let row = &partials[(2 * block + part) * width..(2 * block + part + 1) * width];
                values[..channels.len()].copy_from_slice(&row[channels.clone()]);
            }
            let own = rows.min((block + 1) * STATISTICS_ROWS) - block * STATISTICS_ROWS;
            let before = block / STATISTICS_LANES * STATISTICS_ROWS;
            combine(how, (&mut lanes[block % STATISTICS_LANES], before), (&pair, own));
        }
        tree(how, &mut lanes, |range| range.map(|lane| rows_of_lane(rows, lane)).sum());
        for (i, channel) in channels.enumerate() {
            finish(channel, [lanes[0][0][i], lanes[0][1][i]]);
        }
    });
}

/// Outputs of [`batch_statistics`], one value per channel.
pub struct StatisticsOutput<'a> {
    /// Mean.
    pub mean: &'a mut [f32],
    /// Variance for the normalization: divided by the number of rows.
    pub variance: &'a mut [f32],
    /// Variance for the running average: divided by the number of rows minus 1.
    pub unbiased: &'a mut [f32],
}

/// Mean and variance of each channel of `x` (rows × width). `partials` (blocks × 2 · width) is
/// scratch.
pub fn batch_statistics<E: Element>(x: &[E], partials: &mut [f32], out: StatisticsOutput<'_>) {
    let width = out.mean.len();
    let rows = x.len() / width;
    let matrix = Rows { data: x, width };
    block_partials(rows, width, partials, |rows, channels, out| {
        block_statistics(matrix, rows, channels, out);
    });
    let StatisticsOutput { mean, variance, unbiased } = out;
    let outputs = [mean, variance, unbiased].map(SharedMut::new);
    combine_blocks(Combine::Statistics, rows, width, partials, |channel, [mean, squares]| {
        let values = [mean, squares / rows as f32, squares / rows.saturating_sub(1).max(1) as f32];
        for (output, value) in outputs.iter().zip(values) {
            // SAFETY: each channel belongs to one task.
            unsafe { output.piece(channel..channel + 1) }.fill(value);
        }
    });
}

/// `y = f(norm(x) + addend)`.
pub fn batch_norm<E: Element, W: Element>(
    channels: Channels<'_, W>,
    x: &[E],
    addend: Option<&[E]>,
    y: &mut [E],
) {
    let width = channels.mean.len();
    let relu = channels.activation == NormActivation::Relu;
    let block = STATISTICS_ROWS * width;
    y.par_chunks_mut(block).enumerate().for_each(|(index, y)| {
        let range = index * block..index * block + y.len();
        let (x, addend) = (&x[range.clone()], addend.map(|addend| &addend[range]));
        for tile in tiles(width, TILE) {
            let affine = channels.tile(tile.clone());
            for (row, y) in y.chunks_mut(width).enumerate() {
                let part = row * width + tile.start..row * width + tile.end;
                let addend = addend.map(|addend| &addend[part.clone()]);
                normalize_row(&x[part], addend, &affine, relu, &mut y[tile.clone()]);
            }
        }
    });
}

/// Outputs and scratch of [`batch_norm_grad`].
pub struct BatchNormGradOutput<'a, E, G> {
    /// The operand of the norm, which its gradient overwrites.
    pub x: &'a mut [E],
    /// Gradients of weight and bias, if they are trained.
    pub parameters: Option<[(&'a mut [G], Accumulate); 2]>,
    /// Scratch, (blocks + 1) × 2 · width. The last row has the sums.
    pub partials: &'a mut [f32],
    /// Gradient of the addend.
    pub d_addend: Option<&'a mut [E]>,
}

/// Gradients of a norm that uses the statistics of its own operand. `addend` is given if there are
/// an addend and a ReLU.
pub fn batch_norm_grad<E: Element, W: Element, G: Element>(
    channels: Channels<'_, W>,
    dy: &[E],
    addend: Option<&[E]>,
    output: BatchNormGradOutput<'_, E, G>,
) {
    let BatchNormGradOutput { x, parameters, partials, d_addend } = output;
    let width = channels.mean.len();
    let (rows, block) = (x.len() / width, STATISTICS_ROWS * width);
    let (dy, relu): (&[E], bool) = match (addend, d_addend) {
        (Some(addend), Some(d_addend)) => {
            d_addend.par_chunks_mut(block).enumerate().for_each(|(index, out)| {
                let start = index * block;
                for tile in tiles(width, TILE) {
                    let affine = channels.tile(tile.clone());
                    for (row, out) in out.chunks_mut(width).enumerate() {
                        let first = start + row * width;
                        let part = first + tile.start..first + tile.end;
                        let (dy, x) = (&dy[part.clone()], &x[part.clone()]);
                        mask_row(dy, x, &addend[part], &affine, &mut out[tile.clone()]);
                    }
                }
            });
            (d_addend, false)
        }
        _ => (dy, channels.activation == NormActivation::Relu),
    };
    let (partials, sums) = partials.split_at_mut(partials.len() - 2 * width);
    let (dy_rows, x_rows) = (Rows { data: dy, width }, Rows { data: &*x, width });
    block_partials(rows, width, partials, |rows, tile, out| {
        let affine = channels.tile(tile.clone());
        block_gradient_sums(dy_rows, x_rows, rows, tile, &affine, relu, out);
    });
    let shared = SharedMut::new(&mut *sums);
    combine_blocks(Combine::Sums, rows, width, partials, |channel, totals| {
        for (part, total) in totals.into_iter().enumerate() {
            let place = part * width + channel;
            // SAFETY: each channel belongs to one task.
            unsafe { shared.piece(place..place + 1) }.fill(total);
        }
    });
    if let Some([d_weight, d_bias]) = parameters {
        let (bias_sums, weight_sums) = sums.split_at(width);
        for ((out, accumulate), sums) in [(d_weight, weight_sums), (d_bias, bias_sums)] {
            for (out, sum) in out.iter_mut().zip(sums) {
                let before = match accumulate {
                    Accumulate::Replace => 0.0,
                    Accumulate::Add => out.to_f32(),
                };
                *out = G::from_f32(sum + before);
            }
        }
    }
    let sums = &*sums;
    x.par_chunks_mut(block).enumerate().for_each(|(index, x)| {
        let dy = &dy[index * block..index * block + x.len()];
        for tile in tiles(width, TILE) {
            let affine = channels.tile(tile.clone());
            let mut means = [[0.0; TILE]; 2];
            for (part, means) in means.iter_mut().enumerate() {
                let sums = &sums[part * width..][tile.clone()];
                for (mean, sum) in means.iter_mut().zip(sums) {
                    *mean = sum / rows as f32;
                }
            }
            for (row, x) in x.chunks_mut(width).enumerate() {
                let part = row * width + tile.start..row * width + tile.end;
                gradient_row(&dy[part], &affine, &means, relu, &mut x[tile.clone()]);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_have_all_rows_once() {
        for rows in [1, 255, 256, 257, 300 * 256 + 7, 128 * 256, 128 * 256 + 1] {
            let lanes: usize = (0..STATISTICS_LANES).map(|lane| rows_of_lane(rows, lane)).sum();
            assert_eq!(lanes, rows);
        }
    }
}
