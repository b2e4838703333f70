use crate::forward::Forward;
use crate::{Batch, TrainError};
use half::bf16;
use storm_device::cpu::CpuDevice;
use storm_graph::DType;
use storm_model::{BuildOptions, ModelConfig, ModelOutput, ParameterSource};

/// A model that only looks forward: logits of whole sequences.
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
        config: &ModelConfig,
        options: &BuildOptions,
        source: &impl ParameterSource,
    ) -> Result<Inference, TrainError> {
        let (vocabulary, dtype) = (config.vocab_size, options.dtype);
        let options = BuildOptions { output: ModelOutput::Logits, ..options.clone() };
        let forward = Forward::load(config, options, source, CpuDevice::new)?;
        Ok(Inference { forward, vocabulary, dtype })
    }

    /// Tokens that a sequence has.
    pub fn sequence(&self) -> usize {
        self.forward.options.sequence
    }

    /// Tokens that there are.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The logits of a batch, (B, T, V), widened to f32.
    ///
    /// # Errors
    /// The batch does not fit.
    pub fn logits(&mut self, batch: &Batch) -> Result<Vec<f32>, TrainError> {
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
