use crate::forward::{Forward, forward_bytes};
use crate::{MicroBatch, TrainError, Trainer, weights};
use half::bf16;
use storm_device::PlanDevice;
use storm_device::cpu::CpuDevice;
use storm_graph::DType;
use storm_model::{AnyModel, BuildOptions, ModelOutput, ParameterSource};

/// A model that only looks forward: logits of whole sequences, or of pictures.
pub struct Inference {
    forward: Forward<CpuDevice>,
    vocabulary: usize,
    dtype: DType,
}

impl Inference {
    /// Loads a model for batches of this size; `options.output` is taken as logits.
    ///
    /// # Errors
    /// The sizes do not fit the model, the files do not hold it, or the memory cannot be had.
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

    /// Loads the weights of a model of the same config.
    pub(crate) fn load_weights(
        &mut self,
        model: &AnyModel,
        source: &impl ParameterSource,
    ) -> Result<(), TrainError> {
        weights::load(self.forward.weights(), model, source)
    }

    /// Without weights, which [`Inference::take_weights`] then copies.
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

    /// Bytes that a model takes for batches of this size, with its weights.
    pub(crate) fn memory_bytes(
        model: &AnyModel,
        options: &BuildOptions,
    ) -> Result<usize, TrainError> {
        forward_bytes(model, of_logits(options))
    }

    /// Takes over the weights that a trainer has now, in f32.
    pub(crate) fn take_weights<D: PlanDevice>(
        &mut self,
        trainer: &mut Trainer<D>,
    ) -> Result<(), TrainError> {
        trainer.copy_weights(self.forward.weights())
    }

    /// Tokens that a sequence has.
    pub fn sequence(&self) -> usize {
        self.forward.options.sequence
    }

    /// Tokens or classes that there are.
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
