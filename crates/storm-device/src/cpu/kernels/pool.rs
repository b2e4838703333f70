//! The largest value or the mean of each window. Their gradients are gathers: each position of the
//! input reads the windows that cover it.

use super::element::Element;
use crate::simd_dispatch;
use rayon::prelude::*;
use storm_graph::Planes;

/// Channels computed together, on the stack.
const CHANNELS: usize = 64;

/// The largest value of each window, or NaN if the window contains one.
pub fn max_pool<E: Element>(planes: &Planes, x: &[E], y: &mut [E]) {
    by_row(planes, planes.output, y, |image, row, y| {
        max_row(planes, of_image(planes.input, planes, x, image), row, y);
    });
}

/// Passes the gradient of each window to its largest element, or to its last NaN.
pub fn max_pool_grad<E: Element>(planes: &Planes, dy: &[E], x: &[E], dx: &mut [E]) {
    by_row(planes, planes.input, dx, |image, row, dx| {
        let dy = of_image(planes.output, planes, dy, image);
        max_grad_row(planes, dy, of_image(planes.input, planes, x, image), row, dx);
    });
}

/// [`max_pool_grad`] for windows that do not overlap. The gradient overwrites `x`.
pub fn max_pool_grad_in_place<E: Element>(planes: &Planes, dy: &[E], x: &mut [E]) {
    debug_assert!(!planes.window.overlaps());
    let elements = planes.pixels() * planes.channels;
    x.par_chunks_mut(elements).enumerate().for_each(|(image, x)| {
        max_grad_image(planes, of_image(planes.output, planes, dy, image), x);
    });
}

/// The sum of each window, divided by the window's size. Padding counts as zeros.
pub fn average_pool<E: Element>(planes: &Planes, x: &[E], y: &mut [E]) {
    by_row(planes, planes.output, y, |image, row, y| {
        average_row(planes, of_image(planes.input, planes, x, image), row, y);
    });
}

/// The sum of the gradients of all windows that cover a position, divided by the window's size.
pub fn average_pool_grad<E: Element>(planes: &Planes, dy: &[E], dx: &mut [E]) {
    by_row(planes, planes.input, dx, |image, row, dx| {
        average_grad_row(planes, of_image(planes.output, planes, dy, image), row, dx);
    });
}

/// Calls `each(image, row, elements)` for the rows of all planes, in parallel.
fn by_row<E: Element>(
    planes: &Planes,
    [height, width]: [usize; 2],
    out: &mut [E],
    each: impl Fn(usize, usize, &mut [E]) + Sync,
) {
    let rows = out.par_chunks_mut(width * planes.channels).enumerate();
    rows.for_each(|(index, out)| each(index / height, index % height, out));
}

fn of_image<'a, E>(plane: [usize; 2], planes: &Planes, x: &'a [E], image: usize) -> &'a [E] {
    let elements = plane[0] * plane[1] * planes.channels;
    &x[image * elements..(image + 1) * elements]
}

simd_dispatch! {
    fn max_row[E: Element](planes: &Planes, x: &[E], row: usize, y: &mut [E]) {
        let Planes { input: [height, width], channels, window, .. } = *planes;
        for (wide, y) in y.chunks_exact_mut(channels).enumerate() {
            let mut is_first = true;
            for kh in window.inside(0, row, height) {
                for kw in window.inside(1, wide, width) {
                    let h = row * window.stride[0] + kh - window.padding[0];
                    let w = wide * window.stride[1] + kw - window.padding[1];
                    let x = &x[(h * width + w) * channels..][..channels];
                    if is_first {
                        y.copy_from_slice(x);
                        is_first = false;
                    }
                    for (y, x) in y.iter_mut().zip(x) {
                        *y = if beats(x.to_f32(), y.to_f32()) { *x } else { *y };
                    }
                }
            }
        }
    }

    fn max_grad_row[E: Element](planes: &Planes, dy: &[E], x: &[E], row: usize, dx: &mut [E]) {
        let Planes { input: [height, width], output: [high, wide], channels, window, .. } = *planes;
        for (at, dx) in dx.chunks_exact_mut(channels).enumerate() {
            for (block, dx) in dx.chunks_mut(CHANNELS).enumerate() {
                let first = block * CHANNELS;
                let mut sums = [0.0f32; CHANNELS];
                for oh in window.covering(0, row, high) {
                    for ow in window.covering(1, at, wide) {
                        let mut largest = [f32::NEG_INFINITY; CHANNELS];
                        let mut winner = [0u32; CHANNELS];
                        let mut is_first = true;
                        for kh in window.inside(0, oh, height) {
                            for kw in window.inside(1, ow, width) {
                                let h = oh * window.stride[0] + kh - window.padding[0];
                                let w = ow * window.stride[1] + kw - window.padding[1];
                                let place = (h * width + w) as u32;
                                let x = &x[place as usize * channels + first..][..dx.len()];
                                let states = largest.iter_mut().zip(&mut winner);
                                for ((largest, winner), x) in states.zip(x) {
                                    let x = x.to_f32();
                                    let wins = is_first | beats(x, *largest);
                                    *largest = if wins { x } else { *largest };
                                    *winner = if wins { place } else { *winner };
                                }
                                is_first = false;
                            }
                        }
                        let me = (row * width + at) as u32;
                        let dy = &dy[(oh * wide + ow) * channels + first..][..dx.len()];
                        for ((sum, winner), dy) in sums.iter_mut().zip(&winner).zip(dy) {
                            *sum += if *winner == me { dy.to_f32() } else { 0.0 };
                        }
                    }
                }
                for (dx, sum) in dx.iter_mut().zip(&sums) {
                    *dx = E::from_f32(*sum);
                }
            }
        }
    }

    fn max_grad_image[E: Element](planes: &Planes, dy: &[E], x: &mut [E]) {
        let Planes { input: [height, width], output: [high, wide], channels, window, .. } = *planes;
        for row in 0..window.cells(0, height) {
            for column in 0..window.cells(1, width) {
                let rows = window.cell(0, row, height);
                let columns = window.cell(1, column, width);
                let place = |h: usize, w: usize| (h * width + w) * channels;
                let has_window = row < high && column < wide;
                let inside = |h: usize, w: usize| {
                    has_window
                        && h + window.padding[0] < row * window.stride[0] + window.kernel[0]
                        && w + window.padding[1] < column * window.stride[1] + window.kernel[1]
                };
                for first in (0..channels).step_by(CHANNELS) {
                    let count = CHANNELS.min(channels - first);
                    let mut largest = [0.0f32; CHANNELS];
                    let mut winner = [0u32; CHANNELS];
                    let mut tap = 0;
                    for h in rows.clone() {
                        for w in columns.clone().filter(|&w| inside(h, w)) {
                            let x = &x[place(h, w) + first..][..count];
                            let states = largest.iter_mut().zip(&mut winner);
                            for ((largest, winner), x) in states.zip(x) {
                                let x = x.to_f32();
                                let wins = (tap == 0) | beats(x, *largest);
                                *largest = if wins { x } else { *largest };
                                *winner = if wins { tap } else { *winner };
                            }
                            tap += 1;
                        }
                    }
                    tap = 0;
                    for h in rows.clone() {
                        for w in columns.clone() {
                            let x = &mut x[place(h, w) + first..][..count];
                            if !inside(h, w) {
                                x.fill(E::from_f32(0.0));
                                continue;
                            }
                            let dy = &dy[(row * wide + column) * channels + first..][..count];
                            for ((x, winner), dy) in x.iter_mut().zip(&winner).zip(dy) {
                                let gradient = if *winner == tap { dy.to_f32() } else { 0.0 };
                                *x = E::from_f32(0.0 + gradient);
                            }
                            tap += 1;
                        }
                    }
                }
            }
        }
    }

    fn average_row[E: Element](planes: &Planes, x: &[E], row: usize, y: &mut [E]) {
        let Planes { input: [height, width], channels, window, .. } = *planes;
        let size = window.taps() as f32;
        for (wide, y) in y.chunks_exact_mut(channels).enumerate() {
            for (block, y) in y.chunks_mut(CHANNELS).enumerate() {
                let mut sums = [0.0f32; CHANNELS];
                for kh in window.inside(0, row, height) {
                    for kw in window.inside(1, wide, width) {
                        let h = row * window.stride[0] + kh - window.padding[0];
                        let w = wide * window.stride[1] + kw - window.padding[1];
                        let x = &x[(h * width + w) * channels + block * CHANNELS..][..y.len()];
                        for (sum, x) in sums.iter_mut().zip(x) {
                            *sum += x.to_f32();
                        }
                    }
                }
                for (y, sum) in y.iter_mut().zip(&sums) {
                    *y = E::from_f32(sum / size);
                }
            }
        }
    }

    fn average_grad_row[E: Element](planes: &Planes, dy: &[E], row: usize, dx: &mut [E]) {
        let Planes { output: [high, wide], channels, window, .. } = *planes;
        let size = window.taps() as f32;
        for (at, dx) in dx.chunks_exact_mut(channels).enumerate() {
            for (block, dx) in dx.chunks_mut(CHANNELS).enumerate() {
                let mut sums = [0.0f32; CHANNELS];
                for oh in window.covering(0, row, high) {
                    for ow in window.covering(1, at, wide) {
                        let place = (oh * wide + ow) * channels + block * CHANNELS;
                        for (sum, dy) in sums.iter_mut().zip(&dy[place..place + dx.len()]) {
                            *sum += dy.to_f32();
                        }
                    }
                }
                for (dx, sum) in dx.iter_mut().zip(&sums) {
                    *dx = E::from_f32(sum / size);
                }
            }
        }
    }
}

/// Whether a later element of a window replaces the largest so far. As in PyTorch, the first of
/// equal values wins, and the last NaN wins.
#[inline(always)]
fn beats(x: f32, largest: f32) -> bool {
    (x > largest) | x.is_nan()
}
