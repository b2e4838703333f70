use crate::forward::Forward;
use crate::{MicroBatch, TrainError};
use half::bf16;
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
        let (model, dtype) = (model.into(), options.dtype);
        let vocabulary = match &model {
            AnyModel::Language(config) => config.vocab_size,
            AnyModel::Image(config) => config.classes,
        };
        let options = BuildOptions { output: ModelOutput::Logits, ..options.clone() };
        let forward = Forward::load(&model, options, source, CpuDevice::new)?;
        Ok(Inference { forward, vocabulary, dtype })
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
