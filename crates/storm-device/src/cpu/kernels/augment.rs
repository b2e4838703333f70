//! Random changes of images, and their normalization.

use super::element::Element;
use rayon::prelude::*;
use storm_graph::random::PhaseWords;
use storm_graph::{AugmentSettings, ImageChange, SAMPLE_WORDS};

/// Changes and normalizes `images`, each of `axes` (height, width, channels).
pub fn augment<E: Element>(
    settings: &AugmentSettings,
    phase: PhaseWords,
    axes: [usize; 3],
    images: &[u8],
    samples: &[i32],
    out: &mut [E],
) {
    let [height, width, channels] = axes;
    let size = height * width * channels;
    let mut factors = [(0.0, 0.0); AugmentSettings::CHANNELS_MAX];
    for (channel, factors) in factors[..channels].iter_mut().enumerate() {
        *factors = settings.normalization(channel);
    }
    let normalized = |value: u8, channel: usize| {
        let (factor, summand) = factors[channel];
        E::from_f32(f32::from(value) * factor + summand)
    };
    let samples = samples.par_chunks(SAMPLE_WORDS);
    out.par_chunks_mut(size).zip(images.par_chunks(size)).zip(samples).for_each(
        |((out, image), sample)| {
            let sample = sample.try_into().expect("its shape");
            let Some(change) = settings.change(phase, sample, [height, width]) else {
                for (i, (out, &value)) in out.iter_mut().zip(image).enumerate() {
                    *out = normalized(value, i % channels);
                }
                return;
            };
            for (i, out) in out.chunks_mut(channels).enumerate() {
                let (row, column) = (i / width, i % width);
                if change.cuts(settings.cutout, row, column) {
                    out.fill(E::from_f32(0.0));
                    continue;
                }
                let from = source(settings, change, [height, width], row, column);
                for (channel, out) in out.iter_mut().enumerate() {
                    let value = from.map_or(0, |pixel| image[pixel * channels + channel]);
                    *out = normalized(value, channel);
                }
            }
        },
    );
}

/// The source pixel for a place in the result. None in a black border.
fn source(
    settings: &AugmentSettings,
    change: ImageChange,
    [height, width]: [usize; 2],
    row: usize,
    column: usize,
) -> Option<usize> {
    let AugmentSettings { padding, border, .. } = *settings;
    let column = if change.flips { width - 1 - column } else { column };
    let row = border.pixel(row + change.top, padding, height)?;
    let column = border.pixel(column + change.left, padding, width)?;
    Some(row * width + column)
}
