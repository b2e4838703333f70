//! Augmentation of training images, as a function of the run's seed, the epoch and the sample.

use crate::random::{PhaseWords, Purpose, Seed, Stream, words};
use std::sync::Arc;

/// Words of a sample: the low and high half of its ID, and its epoch.
pub const SAMPLE_WORDS: usize = 3;

/// Settings of [`Op::Augment`](crate::Op::Augment).
#[derive(Clone, Debug, PartialEq)]
pub struct AugmentSettings {
    /// Mean of each channel, where 255 is 1.
    pub mean: Arc<[f32]>,
    /// Standard deviation of each channel, where 255 is 1.
    pub deviation: Arc<[f32]>,
    /// Whether images are mirrored.
    pub flip: Flip,
    /// Pixels of padding on each side before a random crop to the original size.
    pub padding: usize,
    /// The content of the padding.
    pub border: Border,
    /// Side of a square around a random pixel that is set to 0 after normalization. 0 for none. The
    /// square is clipped at the edges of the image.
    pub cutout: usize,
}

/// Whether images are mirrored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flip {
    /// Never.
    Never,
    /// Left to right, with probability 1/2.
    Horizontal,
}

/// The content of the padding around an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Border {
    /// Pixels of value 0 before normalization.
    Black,
    /// The image, mirrored at its outermost pixels.
    Reflect,
}

/// The augmentation of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Whether it is mirrored.
    pub flips: bool,
    /// First row of the crop in the padded image. A value equal to the padding means no shift.
    pub top: usize,
    /// First column of the crop, likewise.
    pub left: usize,
    /// The center of the cutout: row and column.
    pub hole: [usize; 2],
}

impl AugmentSettings {
    /// Maximum number of channels.
    pub const CHANNELS_MAX: usize = 4;
    /// Maximum side of an image, because positions are drawn with 16 bits.
    pub const SIDE_MAX: usize = 1 << 15;

    /// The (factor, summand) that normalize a channel: one product and one sum, each rounded to
    /// f32.
    pub fn normalization(&self, channel: usize) -> (f32, f32) {
        let (mean, deviation) = (f64::from(self.mean[channel]), f64::from(self.deviation[channel]));
        ((1.0 / (255.0 * deviation)) as f32, (-mean / deviation) as f32)
    }

    /// The augmentation of a sample of `height` by `width` pixels. `None` in an evaluation.
    pub fn change(
        &self,
        phase: PhaseWords,
        sample: [i32; SAMPLE_WORDS],
        [height, width]: [usize; 2],
    ) -> Option<Change> {
        let [low, high, epoch] = sample.map(|word| word as u32);
        let seed = Seed { seed: phase.seed, step: epoch };
        let id = u64::from(low) | u64::from(high) << 32;
        let drawn = words(seed, Purpose::Augmentation, Stream { tensor: 0, layer: 0 }, id);
        // A random word times a range, shifted right by the word's bits, is less than the range.
        let offset = |word: u32| ((u64::from(word) * (2 * self.padding as u64 + 1)) >> 32) as usize;
        let place = |bits: u32, range: usize| (bits as usize * range) >> 16;
        phase.training.then_some(Change {
            flips: self.flip == Flip::Horizontal && drawn[0] >> 31 == 1,
            top: offset(drawn[1]),
            left: offset(drawn[2]),
            hole: [place(drawn[3] >> 16, height), place(drawn[3] & 0xffff, width)],
        })
    }
}

impl Change {
    /// Whether a pixel of the result is in the cutout, a square with side `cutout`.
    #[inline]
    pub fn cuts(&self, cutout: usize, row: usize, column: usize) -> bool {
        let within = |at: usize, middle: usize| {
            let from_first = at + cutout / 2;
            from_first >= middle && from_first - middle < cutout
        };
        within(row, self.hole[0]) && within(column, self.hole[1])
    }
}

impl Border {
    /// The source index of position `at` on an axis with `count` pixels and `padding` before the
    /// first. `None` if it is black.
    #[inline]
    pub fn pixel(self, at: usize, padding: usize, count: usize) -> Option<usize> {
        let place = at as isize - padding as isize;
        let last = count as isize - 1;
        match self {
            _ if (0..=last).contains(&place) => Some(place as usize),
            Border::Black => None,
            Border::Reflect if place < 0 => Some(-place as usize),
            Border::Reflect => Some((2 * last - place) as usize),
        }
    }
}
