//! Classifies held-out images after every evaluation.

use crate::{Inference, NamedInputs, TrainError, Trainer};
use serde::{Deserialize, Serialize};
use storm_device::PlanDevice;
use storm_graph::DType;
use storm_model::{AnyModel, BuildOptions, ImageConfig, ParameterSource};

/// The class that a model predicts for an image.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guess {
    /// Class index.
    pub class: u32,
    /// The model's probability of that class.
    pub probability: f32,
}

impl Guess {
    /// The class with the highest score; of equals, the first.
    fn of_logits(logits: &[f32]) -> Guess {
        let mut best = 0;
        for (class, &logit) in logits.iter().enumerate() {
            if logit > logits[best] {
                best = class;
            }
        }
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - logits[best]).exp()).sum();
        Guess { class: best as u32, probability: (1.0 / sum) as f32 }
    }
}

/// Some images, and a copy of the model in f32 on the CPU: the device may have no memory to spare.
pub struct Viewer {
    model: AnyModel,
    inference: Inference,
    pictures: NamedInputs,
}

impl Viewer {
    /// For these `count` images.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn new(
        config: &ImageConfig,
        count: usize,
        pictures: NamedInputs,
    ) -> Result<Viewer, TrainError> {
        let model = AnyModel::from(config);
        let inference = Inference::without_weights(&model, &options(count))?;
        Ok(Viewer { model, inference, pictures })
    }

    /// Host memory for this many images and the copy of the model.
    ///
    /// # Errors
    /// The model is invalid.
    pub fn memory_bytes(config: &ImageConfig, count: usize) -> Result<u64, TrainError> {
        let [height, width] = config.image_size;
        let pictures = count * height * width * config.channels;
        let inference = Inference::memory_bytes(&AnyModel::from(config), &options(count))?;
        Ok((inference + pictures) as u64)
    }

    /// Classifies the images with a model in training.
    ///
    /// # Errors
    /// From the device.
    pub fn look<D: PlanDevice>(
        &mut self,
        trainer: &mut Trainer<D>,
    ) -> Result<Vec<Guess>, TrainError> {
        self.inference.take_weights(trainer)?;
        self.guesses()
    }

    /// Classifies the images with a saved model.
    ///
    /// # Errors
    /// The files do not contain the model.
    pub fn look_with(&mut self, source: &impl ParameterSource) -> Result<Vec<Guess>, TrainError> {
        self.inference.load_weights(&self.model, source)?;
        self.guesses()
    }

    fn guesses(&mut self) -> Result<Vec<Guess>, TrainError> {
        let logits = self.inference.logits(&self.pictures)?;
        Ok(logits.chunks(self.inference.vocabulary()).map(Guess::of_logits).collect())
    }
}

fn options(count: usize) -> BuildOptions {
    BuildOptions::training(count, 1, DType::F32)
}

#[cfg(test)]
mod tests {
    use super::Guess;

    #[test]
    fn the_first_of_the_highest_scores_is_taken() {
        let of = Guess::of_logits;
        assert_eq!(of(&[1.0, 3.0, 3.0, -90.0]).class, 1);
        assert!((of(&[0.0, 0.0]).probability - 0.5).abs() < 1e-6);
        assert!((of(&[1000.0, 0.0]).probability - 1.0).abs() < 1e-6);
    }
}
