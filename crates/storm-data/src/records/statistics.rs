//! Mean and standard deviation of image channels, from exact sums.

use super::column::{Column, ColumnKind, ColumnType};
use serde::{Deserialize, Serialize};

/// The column that is summed.
const IMAGES: &str = "images";
/// With more channels it is not an image.
const CHANNELS_MAX: usize = 16;

/// Sums over all pixels of the training part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageStatistics {
    /// Pixels summed.
    pub pixels: u64,
    /// For each channel: the sum of its values, which are 0 to 255.
    pub sums: Vec<u64>,
    /// For each channel: the sum of its squared values.
    pub squares: Vec<u64>,
}

impl ImageStatistics {
    /// The index of the image column, and zeroed sums. `None` if the records have no images.
    pub(super) fn of_columns(columns: &[Column]) -> Option<(usize, ImageStatistics)> {
        let at = columns.iter().position(|column| column.name == IMAGES)?;
        let Column { kind, dtype, shape, .. } = &columns[at];
        let is_image = *kind == ColumnKind::Fixed && *dtype == ColumnType::U8 && shape.len() == 3;
        let channels = *shape.last()?;
        let is_known = is_image && (1..=CHANNELS_MAX).contains(&channels);
        let zeros = || vec![0; channels];
        is_known.then(|| (at, ImageStatistics { pixels: 0, sums: zeros(), squares: zeros() }))
    }

    /// Adds the pixels of an image.
    pub(super) fn add(&mut self, image: &[u8]) {
        let channels = self.sums.len();
        for pixel in image.chunks_exact(channels) {
            for (channel, &value) in pixel.iter().enumerate() {
                self.sums[channel] += u64::from(value);
                self.squares[channel] += u64::from(value) * u64::from(value);
            }
        }
        self.pixels += (image.len() / channels) as u64;
    }

    /// Whether the sums are plausible.
    pub(super) fn is_sound(&self, channels: usize) -> bool {
        let most = |value: u64| self.pixels.checked_mul(value);
        let within = |sums: &[u64], value| {
            sums.len() == channels
                && most(value).is_some_and(|most| sums.iter().all(|&sum| sum <= most))
        };
        self.pixels > 0 && within(&self.sums, 255) && within(&self.squares, 255 * 255)
    }

    /// The mean of each channel, on a scale of 0 to 1.
    pub fn mean(&self) -> Vec<f64> {
        let pixels = self.pixels as f64;
        self.sums.iter().map(|&sum| sum as f64 / pixels / 255.0).collect()
    }

    /// The standard deviation of each channel, on a scale of 0 to 1.
    pub fn standard_deviation(&self) -> Vec<f64> {
        let pixels = u128::from(self.pixels);
        let deviation = |(&sum, &squares): (&u64, &u64)| {
            let (sum, squares) = (u128::from(sum), u128::from(squares));
            // The variance times the squared number of pixels, computed exactly.
            let scaled = (pixels * squares).saturating_sub(sum * sum);
            (scaled as f64).sqrt() / self.pixels as f64 / 255.0
        };
        self.sums.iter().zip(&self.squares).map(deviation).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_those_of_the_values() {
        let columns = [Column::fixed(IMAGES, ColumnType::U8, &[1, 2, 2])];
        let (at, mut statistics) = ImageStatistics::of_columns(&columns).unwrap();
        assert_eq!(at, 0);
        statistics.add(&[0, 255, 0, 255]);
        statistics.add(&[255, 255, 255, 255]);
        assert!(statistics.is_sound(2) && !statistics.is_sound(3));
        assert_eq!(statistics.mean(), [0.5, 1.0]);
        assert_eq!(statistics.standard_deviation(), [0.5, 0.0]);
        let labels = [Column::label("targets", 3)];
        assert_eq!(ImageStatistics::of_columns(&labels), None);
    }
}
