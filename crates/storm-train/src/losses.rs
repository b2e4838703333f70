/// The result of a forward pass over some micro-batches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// Mean cross-entropy over the targets that count.
    pub loss: f32,
    /// Fraction of these predicted correctly, for a classifier.
    pub accuracy: Option<f32>,
}

/// Accumulates the loss and accuracy of a model over any number of micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Losses {
    loss_sum: f64,
    correct: f64,
    /// Targets with a known prediction result.
    judged: u64,
    targets: u64,
}

impl Losses {
    /// Adds a result over this many targets.
    pub fn add(&mut self, found: Found, targets: usize) {
        self.loss_sum += f64::from(found.loss) * targets as f64;
        self.targets += targets as u64;
        if let Some(accuracy) = found.accuracy {
            self.correct += (f64::from(accuracy) * targets as f64).round();
            self.judged += targets as u64;
        }
    }

    /// The mean loss over all targets so far; `None` without any.
    pub fn loss(&self) -> Option<f64> {
        (self.targets > 0).then(|| self.loss_sum / self.targets as f64)
    }

    /// The fraction of correct predictions; `None` if the model is not a classifier.
    pub fn accuracy(&self) -> Option<f64> {
        (self.judged > 0).then(|| self.correct / self.judged as f64)
    }

    /// Number of targets.
    pub fn targets(&self) -> u64 {
        self.targets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_weigh_alike_in_batches_of_any_size() {
        let mut losses = Losses::default();
        assert_eq!((losses.loss(), losses.accuracy()), (None, None));
        losses.add(Found { loss: 1.0, accuracy: Some(1.0 / 3.0) }, 3);
        losses.add(Found { loss: 5.0, accuracy: Some(1.0) }, 1);
        assert_eq!((losses.loss(), losses.accuracy()), (Some(2.0), Some(0.5)));
        assert_eq!(losses.targets(), 4);
    }

    #[test]
    fn a_language_model_has_no_accuracy() {
        let mut losses = Losses::default();
        losses.add(Found { loss: 1.0, accuracy: None }, 3);
        assert_eq!((losses.loss(), losses.accuracy()), (Some(1.0), None));
    }
}
