//! Convolutions as products with columns. A row of columns contains the elements that a window
//! covers. Columns are in memory for some images at a time.
//!
//! Columns should stay in the second-level cache of the thread that reads them. So in the forward
//! pass and the gradient of the input, each thread has a part of the memory and processes parts of
//! the batch that fit there. The gradient of a weight adds pieces of the batch in order. All
//! threads compute a piece together, and the pieces follow from the shape alone.

use super::element::Element;
use super::gemm::{Accumulate, Bf16Products, Bias, Epilogue, Matrix, MatrixMut};
use super::shared::SharedMut;
use crate::simd_dispatch;
use rayon::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use storm_graph::Planes;

/// Maximum bytes of columns of a piece of the batch. The sums of a weight's gradient depend on it.
const PIECE_BYTES: usize = 1 << 20;

/// Bytes of columns of one thread, unless an image has more.
const PART_BYTES: usize = 1 << 19;

/// Parts of a batch per thread: enough that all threads finish at about the same time.
const PARTS_PER_THREAD: usize = 8;

/// Channels summed at a time, on the stack.
const CHANNELS: usize = 64;

/// Images (B, H, W, C), a window over them, and memory for columns.
pub struct Columns<'a, E> {
    /// The extents.
    pub planes: Planes,
    /// Room for the columns of at least one image.
    pub memory: &'a mut [E],
    /// How products of bf16 operands are summed.
    pub products: Bf16Products,
}

impl<E: Element> Columns<'_, E> {
    /// Elements of an image.
    fn image(&self) -> usize {
        self.planes.pixels() * self.planes.channels
    }

    /// `columns · weightᵀ + bias`, for some rows of output planes at a time.
    pub fn forward(&mut self, x: &[E], weight: &[E], bias: Option<Bias<'_>>, y: &mut [E]) {
        let (planes, products) = (self.planes, self.products);
        let ([high, wide], covered) = (planes.output, planes.covered());
        let (stride, image) = (planes.column_stride(), self.image());
        let outputs = weight.len() / covered;
        let weight = Matrix::row_major(weight, outputs, covered).transposed();
        let row = wide * outputs;
        let y = SharedMut::new(y);
        in_parts(self.memory, planes.images * high, wide * stride, |first, rows, columns| {
            for (index, columns) in columns.chunks_exact_mut(wide * stride).enumerate() {
                let index = first + index;
                fill_row(&planes, &x[index / high * image..][..image], index % high, columns);
            }
            // SAFETY: parts have disjoint rows.
            let y = unsafe { y.piece(first * row..(first + rows) * row) };
            let columns = Matrix::new(columns, rows * wide, covered, stride, 1);
            let y = MatrixMut::row_major(y, rows * wide, outputs);
            let epilogue = Epilogue { bias, ..Epilogue::default() };
            products.gemm_on_this_thread(columns, weight, y, epilogue);
        });
    }

    /// Computes `dy · weight` as columns for some images at a time. Each position of the input
    /// gathers its sum from them, then adds `addend` and, if `accumulate` says so, the old `dx`.
    pub fn input_grad(
        &mut self,
        dy: &[E],
        weight: &[E],
        addend: Option<&[E]>,
        accumulate: Accumulate,
        dx: &mut [E],
    ) {
        let (planes, products) = (self.planes, self.products);
        let (covered, stride, image) = (planes.covered(), planes.column_stride(), self.image());
        let (positions, outputs) = (planes.positions(), weight.len() / covered);
        let weight = Matrix::row_major(weight, outputs, covered);
        let (high, row) = (planes.input[0], planes.input[1] * planes.channels);
        let dx = SharedMut::new(dx);
        in_parts(self.memory, planes.images, positions * stride, |first, images, columns| {
            let rows = images * positions;
            let dy = &dy[first * positions * outputs..][..rows * outputs];
            products.gemm_on_this_thread(
                Matrix::row_major(dy, rows, outputs),
                weight,
                MatrixMut::new(columns, rows, covered, stride),
                Epilogue::default(),
            );
            // SAFETY: parts have disjoint images.
            let dx = unsafe { dx.piece(first * image..(first + images) * image) };
            let addend = addend.map(|addend| &addend[first * image..]);
            for (index, dx) in dx.chunks_exact_mut(row).enumerate() {
                let columns = &columns[index / high * positions * stride..];
                let addend = addend.map(|addend| &addend[index * row..][..row]);
                gather_row(&planes, columns, index % high, addend, accumulate, dx);
            }
        });
    }

    /// Writes the columns of some images, which have `rows` window positions together.
    fn fill(&mut self, x: &[E], rows: usize) -> Matrix<'_, E> {
        let (planes, image) = (self.planes, self.image());
        let [high, wide] = planes.output;
        let stride = planes.column_stride();
        let columns = &mut self.memory[..rows * stride];
        columns.par_chunks_mut(wide * stride).enumerate().for_each(|(index, columns)| {
            fill_row(&planes, &x[index / high * image..][..image], index % high, columns);
        });
        Matrix::new(self.memory, rows, planes.covered(), stride, 1)
    }

    /// Sums `dyᵀ · columns` in `sum` (O, column stride), piece by piece, then writes it to `out` or
    /// adds it there.
    pub fn weight_grad<G: Element>(
        &mut self,
        dy: &[E],
        x: &[E],
        accumulate: Accumulate,
        sum: &mut [f32],
        out: &mut [G],
    ) {
        let (planes, products) = (self.planes, self.products);
        let (covered, stride) = (planes.covered(), planes.column_stride());
        let outputs = out.len() / covered;
        if dy.is_empty() {
            sum.fill(0.0);
        }
        let images = planes.images_per_chunk(size_of::<E>(), PIECE_BYTES).max(1);
        let pieces = dy.chunks(images * planes.positions() * outputs);
        for (piece, (dy, x)) in pieces.zip(x.chunks(images * self.image())).enumerate() {
            let rows = dy.len() / outputs;
            let columns = self.fill(x, rows);
            let dy = Matrix::row_major(dy, rows, outputs).transposed();
            let accumulate = if piece == 0 { Accumulate::Replace } else { Accumulate::Add };
            let sum = MatrixMut::new(sum, outputs, covered, stride);
            products.gemm(dy, columns, sum, Epilogue { accumulate, ..Epilogue::default() });
        }
        out.par_chunks_mut(covered).zip(sum.par_chunks(stride)).for_each(|(out, sum)| {
            for (out, sum) in out.iter_mut().zip(sum) {
                let before = match accumulate {
                    Accumulate::Replace => 0.0,
                    Accumulate::Add => out.to_f32(),
                };
                *out = G::from_f32(sum + before);
            }
        });
    }
}

/// Calls `each(first, count, memory)` in parallel for parts of `units` units, which are images or
/// output rows. A unit has `unit` elements of columns, and `memory` has room for those of `count`
/// units. Results do not depend on which part gets which memory.
fn in_parts<E: Element>(
    memory: &mut [E],
    units: usize,
    unit: usize,
    each: impl Fn(usize, usize, &mut [E]) + Sync,
) {
    if units == 0 {
        return;
    }
    let threads = rayon::current_num_threads();
    let room = (memory.len() / unit).max(1);
    let slots = threads.min(room);
    let small = PART_BYTES / (unit * size_of::<E>());
    let even = units.div_ceil(threads * PARTS_PER_THREAD);
    let part = small.min(even).clamp(1, room / slots);
    let next = AtomicUsize::new(0);
    let slots = memory[..slots * part * unit].par_chunks_mut(part * unit).with_max_len(1);
    slots.for_each(|memory| {
        loop {
            let first = next.fetch_add(part, Ordering::Relaxed);
            if first >= units {
                return;
            }
            let count = part.min(units - first);
            each(first, count, &mut memory[..count * unit]);
        }
    });
}

/// Writes the elements that the windows at the positions of an output row cover.
fn fill_row<E: Element>(planes: &Planes, x: &[E], high: usize, out: &mut [E]) {
    let Planes { input: [height, width], channels, window, .. } = *planes;
    let [_, kernel] = window.kernel;
    let inside_rows = window.inside(0, high, height);
    let run = kernel * channels;
    let zero = E::from_f32(0.0);
    for (wide, out) in out.chunks_exact_mut(planes.column_stride()).enumerate() {
        let inside = window.inside(1, wide, width);
        let first = wide * window.stride[1] + inside.start - window.padding[1];
        let taps = inside.start * channels..inside.end * channels;
        for (kh, out) in out[..planes.covered()].chunks_exact_mut(run).enumerate() {
            if !inside_rows.contains(&kh) {
                out.fill(zero);
                continue;
            }
            let row = high * window.stride[0] + kh - window.padding[0];
            let from = &x[(row * width + first) * channels..][..taps.len()];
            if taps.len() < run {
                out[..taps.start].fill(zero);
                out[taps.end..].fill(zero);
            }
            copy_run(from, &mut out[taps.clone()]);
        }
    }
}

/// Copies a run of elements. With few channels, runs are so short that a call to `memcpy` takes
/// longer than the copy.
#[inline(always)]
fn copy_run<E: Element>(from: &[E], to: &mut [E]) {
    let len = from.len();
    match len {
        16.. => to.copy_from_slice(from),
        8.. => {
            to[..8].copy_from_slice(&from[..8]);
            to[len - 8..].copy_from_slice(&from[len - 8..]);
        }
        4.. => {
            to[..4].copy_from_slice(&from[..4]);
            to[len - 4..].copy_from_slice(&from[len - 4..]);
        }
        _ => {
            for (to, from) in to.iter_mut().zip(from) {
                *to = *from;
            }
        }
    }
}

simd_dispatch! {
    /// Sums, for each position of an input row, its elements in the columns.
    fn gather_row[E: Element](
        planes: &Planes,
        columns: &[E],
        row: usize,
        addend: Option<&[E]>,
        accumulate: Accumulate,
        dx: &mut [E],
    ) {
        let Planes { output: [high, wide], channels, window, .. } = *planes;
        let stride = planes.column_stride();
        for (at, dx) in dx.chunks_exact_mut(channels).enumerate() {
            for (block, dx) in dx.chunks_mut(CHANNELS).enumerate() {
                let first = block * CHANNELS;
                let mut sums = [0.0f32; CHANNELS];
                let sums = &mut sums[..dx.len()];
                // From the last position to the first, so that taps are in ascending order.
                for oh in window.covering(0, row, high).rev() {
                    let kh = row + window.padding[0] - oh * window.stride[0];
                    for ow in window.covering(1, at, wide).rev() {
                        let kw = at + window.padding[1] - ow * window.stride[1];
                        let tap = kh * window.kernel[1] + kw;
                        let start = (oh * wide + ow) * stride + tap * channels + first;
                        for (sum, x) in sums.iter_mut().zip(&columns[start..start + dx.len()]) {
                            *sum += x.to_f32();
                        }
                    }
                }
                if let Some(addend) = addend {
                    let addend = &addend[at * channels + first..][..dx.len()];
                    for (sum, x) in sums.iter_mut().zip(addend) {
                        *sum += x.to_f32();
                    }
                }
                if accumulate == Accumulate::Add {
                    for (sum, x) in sums.iter_mut().zip(&*dx) {
                        *sum += x.to_f32();
                    }
                }
                for (dx, sum) in dx.iter_mut().zip(&*sums) {
                    *dx = E::from_f32(*sum);
                }
            }
        }
    }
}
