use crate::forward::Forward;
use crate::{Batch, TrainError};
use storm_device::{Device, DeviceError};
use storm_model::{BuildOptions, HfDirectory, ModelConfig, ModelOutput};

/// A model whose losses are looked at: no gradients, no updates.
pub struct Evaluation<D: Device> {
    forward: Forward<D>,
    loss_sum: f64,
    targets: u64,
}

impl<D: Device> Evaluation<D> {
    /// Loads a model for batches of this size.
    ///
    /// # Errors
    /// The sizes do not fit the model, the files do not hold it, or the memory cannot be had.
    pub fn load(
        config: &ModelConfig,
        options: &BuildOptions,
        directory: &HfDirectory,
        open: impl FnOnce(usize) -> Result<D, DeviceError>,
    ) -> Result<Evaluation<D>, TrainError> {
        let output = match options.output {
            ModelOutput::Logits => {
                ModelOutput::Loss { chunk_rows: storm_model::DEFAULT_CHUNK_ROWS }
            }
            loss => loss,
        };
        let options = BuildOptions { output, ..options.clone() };
        let forward = Forward::load(config, options, directory, open)?;
        Ok(Evaluation { forward, loss_sum: 0.0, targets: 0 })
    }

    /// Counts a batch in. One in which no target counts changes nothing.
    ///
    /// # Errors
    /// The batch does not fit, a loss is not finite, or from the device.
    pub fn add(&mut self, batch: &Batch) -> Result<(), TrainError> {
        self.add_step(std::slice::from_ref(batch))
    }

    /// Counts the micro-batches of a step in, rounded as [`Trainer::evaluate`](crate::Trainer::evaluate) rounds them.
    ///
    /// # Errors
    /// As [`Evaluation::add`].
    pub fn add_step(&mut self, batches: &[Batch]) -> Result<(), TrainError> {
        batches.iter().try_for_each(|batch| self.forward.size.check_inputs(batch))?;
        let valid: usize = batches.iter().map(Batch::valid_tokens).sum();
        if valid == 0 {
            return Ok(());
        }
        let mut sum = 0.0f32;
        for batch in batches {
            self.forward.run(batch, valid as f32)?;
            let mut loss = [0.0f32];
            self.forward.result("loss", &mut loss)?;
            sum += loss[0];
        }
        if !sum.is_finite() {
            return Err(TrainError::NonFiniteResult { what: "loss", value: sum });
        }
        self.loss_sum += f64::from(sum) * valid as f64;
        self.targets += valid as u64;
        Ok(())
    }

    /// The mean loss of all targets so far; none before the first.
    pub fn loss(&self) -> Option<f64> {
        (self.targets > 0).then(|| self.loss_sum / self.targets as f64)
    }

    /// Targets that were counted.
    pub fn targets(&self) -> u64 {
        self.targets
    }
}
