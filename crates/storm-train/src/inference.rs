use crate::forward::{Forward, forward_bytes};
use crate::{MicroBatch, TrainError, Trainer, weights};
use half::bf16;
use storm_device::PlanDevice;
use storm_device::cpu::CpuDevice;
use storm_graph::DType;
use storm_model::{AnyModel, BuildOptions, ModelOutput, ParameterSource};

/// A model for inference only: logits of whole sequences, or of images.
pub struct Inference {
    forward: Forward<CpuDevice>,
    vocabulary: usize,
    dtype: DType,
}

impl Inference {
    /// Loads a model for batches of this size; `options.output` is ignored and set to logits.
    ///
    /// # Errors
    /// The sizes do not fit the model, the files do not contain it, or there is not enough memory.
    pub fn load(
        model: impl Into<AnyModel>,
        options: &BuildOptions,
        source: &impl ParameterSource,
    ) -> Result<Inference, TrainError> {
        let model = model.into();
        let mut inference = Inference::without_weights(&model, options)?;
        inference.load_weights(&model, source)?;
        Ok(inference)
    }

    /// Loads other weights of the same config.
    pub(crate) fn load_weights(
        &mut self,
        model: &AnyModel,
        source: &impl ParameterSource,
    ) -> Result<(), TrainError> {
        weights::load(self.forward.weights(), model, source)
    }

    /// Creates the model with uninitialized weights, for [`Inference::take_weights`].
    pub(crate) fn without_weights(
        model: &AnyModel,
        options: &BuildOptions,
    ) -> Result<Inference, TrainError> {
        let vocabulary = match model {
            AnyModel::Language(config) => config.vocab_size,
            AnyModel::Image(config) => config.classes,
        };
        let forward = Forward::new(model, of_logits(options), CpuDevice::new)?;
        Ok(Inference { forward, vocabulary, dtype: options.dtype })
    }

    /// Memory of a model for batches of this size, including its weights.
    pub(crate) fn memory_bytes(
        model: &AnyModel,
        options: &BuildOptions,
    ) -> Result<usize, TrainError> {
        forward_bytes(model, of_logits(options))
    }

    /// Copies a trainer's current weights, in f32.
    pub(crate) fn take_weights<D: PlanDevice>(
        &mut self,
        trainer: &mut Trainer<D>,
    ) -> Result<(), TrainError> {
        trainer.copy_weights(self.forward.weights())
    }

    /// Tokens per sequence.
    pub fn sequence(&self) -> usize {
        self.forward.options.sequence
    }

    /// Number of tokens in the vocabulary, or of classes.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The logits of a batch, (B, T, V) or (B, classes), widened to f32.
    ///
    /// # Errors
    /// The batch does not fit.
    pub fn logits(&mut self, batch: &impl MicroBatch) -> Result<Vec<f32>, TrainError> {
        self.forward.run(batch)?;
        let BuildOptions { batch, sequence, .. } = self.forward.options;
        let elements = batch * sequence * self.vocabulary;
        Ok(match self.dtype {
            DType::BF16 => {
                let mut logits = vec![bf16::ZERO; elements];
                self.forward.result("logits", &mut logits)?;
                logits.into_iter().map(bf16::to_f32).collect()
            }
            _ => {
                let mut logits = vec![0.0; elements];
                self.forward.result("logits", &mut logits)?;
                logits
            }
        })
    }
}

fn of_logits(options: &BuildOptions) -> BuildOptions {
    BuildOptions { output: ModelOutput::Logits, ..options.clone() }
}
