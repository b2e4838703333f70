//! What happens to the pictures of a training step, as a function of the run's seed, the epoch and the sample.

use crate::random::{PhaseWords, Purpose, Seed, Stream, words};
use std::sync::Arc;

/// Words of a sample: low and high half of its id, and its epoch.
pub const SAMPLE_WORDS: usize = 3;

/// How [`Op::Augment`](crate::Op::Augment) changes pictures.
#[derive(Clone, Debug, PartialEq)]
pub struct AugmentSettings {
    /// Of each channel, where 255 is 1.
    pub mean: Arc<[f32]>,
    /// Of each channel, where 255 is 1.
    pub deviation: Arc<[f32]>,
    /// Whether pictures are mirrored.
    pub flip: Flip,
    /// Pixels that are added on each side before the picture is cut out again, anywhere.
    pub padding: usize,
    /// What they show.
    pub border: Border,
    /// Side of a square around a random pixel that becomes 0 after normalizing; 0 for none. What is outside of the picture is
    /// lost.
    pub cutout: usize,
}

/// Whether pictures are mirrored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flip {
    /// Never.
    Never,
    /// Left to right, every second one at random.
    Horizontal,
}

/// What lies beyond the edge of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Border {
    /// Pixels of value 0 before normalizing.
    Black,
    /// The picture, mirrored at its outermost pixels.
    Reflect,
}

/// What happens to one picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Whether it is mirrored.
    pub flips: bool,
    /// Where in the padded picture the first row is cut out; the padding is in the middle.
    pub top: usize,
    /// Likewise, the first column.
    pub left: usize,
    /// The pixel that is cut out with those around it: row and column.
    pub hole: [usize; 2],
}

impl AugmentSettings {
    /// More channels are refused.
    pub const CHANNELS_MAX: usize = 4;
    /// Larger pictures are refused: places are drawn with 16 bits.
    pub const SIDE_MAX: usize = 1 << 15;

    /// Normalizing is one product and one sum, each rounded to f32: (factor, summand) of a channel.
    pub fn normalization(&self, channel: usize) -> (f32, f32) {
        let (mean, deviation) = (f64::from(self.mean[channel]), f64::from(self.deviation[channel]));
        ((1.0 / (255.0 * deviation)) as f32, (-mean / deviation) as f32)
    }

    /// What happens to a sample of `height` by `width` pixels; an evaluation changes nothing.
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
        // The upper bits of a word times a range, without the lower 32 or 16 bits, is below the range.
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
    /// Whether a pixel of the result is in the square of side `cutout`.
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
    /// The pixel that is shown at `at` places after `padding` places before the first of `count`; none if it is black.
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
