//! Normalization of a dataset's images.

use storm_data::records::RecordManifest;
use storm_model::ImageConfig;

/// The known statistics of a dataset's images.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Normalization {
    /// The images are CIFAR-10, whose statistics are published.
    Cifar10,
    /// Statistics of the training part.
    Measured { mean: Vec<f64>, std: Vec<f64> },
    /// No statistics: the dataset is not packed yet, or was packed before STORM stored them.
    Unknown,
}

impl Normalization {
    pub(super) fn of_records(manifest: &RecordManifest) -> Normalization {
        if manifest.is_cifar10() {
            return Normalization::Cifar10;
        }
        let Some(statistics) = &manifest.statistics else { return Normalization::Unknown };
        let (mean, std) = (statistics.mean(), statistics.standard_deviation());
        let (published_mean, published_std) = ImageConfig::CIFAR10;
        match is_rounded(&published_mean, &mean) && is_rounded(&published_std, &std) {
            true => Normalization::Cifar10,
            false => {
                // Only shift a constant channel: dividing by its std of 0 would not be finite.
                let std = std.into_iter().map(|std| if std > 0.0 { std } else { 1.0 }).collect();
                Normalization::Measured { mean, std }
            }
        }
    }

    /// Sets the normalization of a fresh model whose shape already fits the images.
    pub(super) fn apply(&self, mut config: ImageConfig) -> ImageConfig {
        match self {
            // Keep the config's own normalization.
            Normalization::Cifar10 | Normalization::Unknown => {}
            Normalization::Measured { mean, std } => {
                (config.mean, config.std) = (mean.clone(), std.clone());
            }
        }
        config
    }

    /// Describes the normalization for the run's output.
    pub(super) fn words(&self, config: &ImageConfig) -> String {
        let shown = |values: &[f64]| {
            values.iter().map(|value| format!("{value:.4}")).collect::<Vec<_>>().join(", ")
        };
        let why = match self {
            Normalization::Cifar10 => "the published statistics of CIFAR-10",
            Normalization::Measured { .. } => "the statistics of the training part",
            Normalization::Unknown if config.channels == 3 => {
                "the statistics of CIFAR-10, because the dataset has none of its own; pack it again for them"
            }
            Normalization::Unknown => {
                "to values from -1 to 1, because the dataset has no statistics; pack it again for them"
            }
        };
        format!("normalized  mean {}; deviation {}: {why}", shown(&config.mean), shown(&config.std))
    }
}

/// Whether these are the published values rounded to four digits.
fn is_rounded(published: &[f64], values: &[f64]) -> bool {
    published.len() == values.len()
        && published
            .iter()
            .zip(values)
            .all(|(published, value)| (published - value).abs() <= 0.5e-4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_statistics_are_rounded_ones() {
        // Of the 50,000 pictures.
        let mean = [0.491_399_68, 0.482_158_41, 0.446_530_91];
        let std = [0.247_032_23, 0.243_485_13, 0.261_587_84];
        let (published_mean, published_std) = ImageConfig::CIFAR10;
        assert!(is_rounded(&published_mean, &mean) && is_rounded(&published_std, &std));
        assert!(!is_rounded(&published_mean, &[0.4915, 0.482, 0.4465]));
        assert!(!is_rounded(&published_mean, &mean[..1]));
    }
}
