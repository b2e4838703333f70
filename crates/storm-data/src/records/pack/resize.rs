//! Resizes images, with bit-identical results on every machine.
//!
//! The filter is bilinear with antialiasing: when downscaling, its support grows with the scale so
//! that it averages all source pixels. It runs over rows and then over columns, and rounds to 8
//! bits after each. Weights have 22 fractional bits, and sums are integers. The results equal those
//! of Pillow's `Image.resize` with `BILINEAR` to the new width and then to the new height. Pillow
//! itself chooses which comes first.

use super::image::Image;

/// Fractional bits of a weight, so that sums of 8-bit values fit in 32 bits.
const PRECISION_BITS: u32 = 22;

/// The source pixels that contribute to one pixel of the result, and their weights.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// Resizes an image of shape (height, width, channels).
///
/// # Panics
/// If the number of pixels does not match the shape.
pub fn resize_image(pixels: Vec<u8>, shape: [usize; 3], size: [usize; 2]) -> Vec<u8> {
    let [height, width, channels] = shape;
    assert_eq!(pixels.len(), height * width * channels, "pixels of an image of {shape:?}");
    Image { height, width, channels, pixels }.resized(size).pixels
}

impl Image {
    /// The image in another size. The aspect ratio may change.
    pub(super) fn resized(self, [height, width]: [usize; 2]) -> Image {
        let Image { height: rows, width: columns, channels, pixels } = self;
        let pixels = match width == columns {
            true => pixels,
            false => {
                let taps = taps(columns, width);
                let mut resized = vec![0; rows * width * channels];
                let lines = pixels.chunks_exact(columns * channels);
                for (line, to) in lines.zip(resized.chunks_exact_mut(width * channels)) {
                    for (pixel, taps) in to.chunks_exact_mut(channels).zip(&taps) {
                        for (channel, value) in pixel.iter_mut().enumerate() {
                            *value = taps.apply(|at| line[at * channels + channel]);
                        }
                    }
                }
                resized
            }
        };
        let pixels = match height == rows {
            true => pixels,
            false => {
                let taps = taps(rows, height);
                let stride = width * channels;
                let mut resized = vec![0; height * stride];
                for (to, taps) in resized.chunks_exact_mut(stride).zip(&taps) {
                    for (column, value) in to.iter_mut().enumerate() {
                        *value = taps.apply(|at| pixels[at * stride + column]);
                    }
                }
                resized
            }
        };
        Image { height, width, channels, pixels }
    }
}

impl Taps {
    fn apply(&self, value: impl Fn(usize) -> u8) -> u8 {
        let mut sum = 1 << (PRECISION_BITS - 1);
        for (number, weight) in self.weights.iter().enumerate() {
            sum += i32::from(value(self.first + number)) * weight;
        }
        (sum >> PRECISION_BITS).clamp(0, 255) as u8
    }
}

/// For each pixel of a line of length `to`, its taps in a line of length `from`. Uses only basic
/// f64 arithmetic, whose results are the same everywhere.
fn taps(from: usize, to: usize) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let width = scale.max(1.0);
    let taps = |at: usize| {
        let center = (at as f64 + 0.5) * scale;
        let first = ((center - width + 0.5) as i64).max(0) as usize;
        let end = ((center + width + 0.5) as usize).min(from);
        let inverse = 1.0 / width;
        let weights: Vec<f64> = (first..end)
            .map(|pixel| {
                let distance = ((pixel as f64 - center + 0.5) * inverse).abs();
                if distance < 1.0 { 1.0 - distance } else { 0.0 }
            })
            .collect();
        let sum: f64 = weights.iter().fold(0.0, |sum, weight| sum + weight);
        let one = f64::from(1 << PRECISION_BITS);
        let weights = weights.into_iter().map(|weight| (0.5 + weight / sum * one) as i32).collect();
        Taps { first, weights }
    };
    (0..to).map(taps).collect()
}
