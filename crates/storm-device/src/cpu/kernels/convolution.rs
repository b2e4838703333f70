//! Convolutions as products with columns: the rows that windows cover, side by side in memory for some images at a time.
//!
//! Pieces are smaller than the chunks that a card works with, so that columns stay in the second-level cache. They follow
//! from the shape alone, since a weight gradient adds them up one after another.

use super::element::Element;
use super::gemm::{Accumulate, Bias, Epilogue, Matrix, MatrixMut, gemm};
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::Planes;

/// Most bytes of columns at a time.
const PIECE_BYTES: usize = 1 << 20;

/// Channels summed at a time, on the stack.
const CHANNELS: usize = 64;

/// Images (B, H, W, C), a window over them, and memory for columns.
pub struct Columns<'a, E> {
    /// The extents.
    pub planes: Planes,
    /// For the columns of at least one image.
    pub memory: &'a mut [E],
}

impl<E: Element> Columns<'_, E> {
    fn images_per_piece(&self) -> usize {
        self.planes.images_per_chunk(size_of::<E>(), PIECE_BYTES).max(1)
    }

    /// Elements of an image.
    fn image(&self) -> usize {
        self.planes.pixels() * self.planes.channels
    }

    fn matrix(&self, rows: usize) -> Matrix<'_, E> {
        Matrix::new(self.memory, rows, self.planes.covered(), self.planes.column_stride(), 1)
    }

    /// Writes the columns of some images.
    fn fill(&mut self, x: &[E]) {
        let Planes { output: [high, wide], .. } = self.planes;
        let planes = self.planes;
        let (row, image) = (wide * planes.column_stride(), self.image());
        let rows = x.len() / image * high;
        self.memory[..rows * row].par_chunks_mut(row).enumerate().for_each(|(index, out)| {
            let x = &x[index / high * image..][..image];
            fill_row(&planes, x, index % high, out);
        });
    }

    /// `columns · weightᵀ + bias`.
    pub fn forward(&mut self, x: &[E], weight: &[E], bias: Option<Bias<'_>>, y: &mut [E]) {
        let planes = self.planes;
        let outputs = weight.len() / planes.covered();
        let weight = Matrix::row_major(weight, outputs, planes.covered()).transposed();
        let images = self.images_per_piece();
        let pieces = x.chunks(images * self.image());
        for (x, y) in pieces.zip(y.chunks_mut(images * planes.positions() * outputs)) {
            self.fill(x);
            let rows = y.len() / outputs;
            let y = MatrixMut::row_major(y, rows, outputs);
            gemm(self.matrix(rows), weight, y, Epilogue { bias, ..Epilogue::default() });
        }
    }

    /// `dy · weight` as columns, which each position of the input gathers.
    pub fn input_grad(&mut self, dy: &[E], weight: &[E], addend: Option<&[E]>, dx: &mut [E]) {
        let planes = self.planes;
        let (covered, stride) = (planes.covered(), planes.column_stride());
        let outputs = weight.len() / covered;
        let weight = Matrix::row_major(weight, outputs, covered);
        let (images, image) = (self.images_per_piece(), self.image());
        let row = planes.input[1] * planes.channels;
        let pieces = dy.chunks(images * planes.positions() * outputs);
        for (piece, (dy, dx)) in pieces.zip(dx.chunks_mut(images * image)).enumerate() {
            let rows = dy.len() / outputs;
            let columns = MatrixMut::new(self.memory, rows, covered, stride);
            gemm(Matrix::row_major(dy, rows, outputs), weight, columns, Epilogue::default());
            let columns = &*self.memory;
            let addend = addend.map(|addend| &addend[piece * images * image..]);
            dx.par_chunks_mut(row).enumerate().for_each(|(index, dx)| {
                let high = planes.input[0];
                let columns = &columns[index / high * planes.positions() * stride..];
                let addend = addend.map(|addend| &addend[index * row..][..row]);
                gather_row(&planes, columns, index % high, addend, dx);
            });
        }
    }

    /// `dyᵀ · columns` into `sum` (O, column stride), piece by piece, and from there into or onto `out`.
    pub fn weight_grad<G: Element>(
        &mut self,
        dy: &[E],
        x: &[E],
        accumulate: Accumulate,
        sum: &mut [f32],
        out: &mut [G],
    ) {
        let planes = self.planes;
        let (covered, stride) = (planes.covered(), planes.column_stride());
        let outputs = out.len() / covered;
        if dy.is_empty() {
            sum.fill(0.0);
        }
        let images = self.images_per_piece();
        let pieces = dy.chunks(images * planes.positions() * outputs);
        for (piece, (dy, x)) in pieces.zip(x.chunks(images * self.image())).enumerate() {
            self.fill(x);
            let rows = dy.len() / outputs;
            let dy = Matrix::row_major(dy, rows, outputs).transposed();
            let accumulate = if piece == 0 { Accumulate::Replace } else { Accumulate::Add };
            let sum = MatrixMut::new(sum, outputs, covered, stride);
            gemm(dy, self.matrix(rows), sum, Epilogue { accumulate, ..Epilogue::default() });
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

/// What the windows at the positions of an output row cover.
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
            out[..taps.start].fill(zero);
            out[taps.end..].fill(zero);
            out[taps.clone()].copy_from_slice(from);
        }
    }
}

simd_dispatch! {
    /// Adds up, for each position of an input row, what columns hold of it.
    fn gather_row[E: Element](
        planes: &Planes,
        columns: &[E],
        row: usize,
        addend: Option<&[E]>,
        dx: &mut [E],
    ) {
        let Planes { output: [high, wide], channels, window, .. } = *planes;
        let stride = planes.column_stride();
        for (at, dx) in dx.chunks_exact_mut(channels).enumerate() {
            for (block, dx) in dx.chunks_mut(CHANNELS).enumerate() {
                let first = block * CHANNELS;
                let mut sums = [0.0f32; CHANNELS];
                let sums = &mut sums[..dx.len()];
                // From the last position to the first, so that taps come in their order.
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
                for (dx, sum) in dx.iter_mut().zip(&*sums) {
                    *dx = E::from_f32(*sum);
                }
            }
        }
    }
}
