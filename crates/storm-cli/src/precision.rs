use crate::UsageError;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use storm_graph::{DType, FP8_MULTIPLE};
use storm_model::{AnyModel, fp8_projections};
use storm_train::{Moments, Precision, StepSize, TrainOptions};

/// Arithmetic without gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    F32,
    Bf16,
}

impl From<DtypeArg> for DType {
    fn from(dtype: DtypeArg) -> DType {
        match dtype {
            DtypeArg::F32 => DType::F32,
            DtypeArg::Bf16 => DType::BF16,
        }
    }
}

/// Number formats of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PrecisionArg {
    /// Everything in f32.
    F32,
    /// bf16 weights and products, with f32 master weights, moments and gradients.
    Bf16Master,
    /// Everything in bf16, with stochastic rounding.
    Bf16Stochastic,
    /// Stored like bf16-stochastic; the projections of layers and their gradients multiply 8-bit floats (E4M3) with one
    /// scale per tensor and micro-batch. A GPU needs compute capability 8.9 or newer.
    Fp8,
}

/// Refuses fp8 if no projection of the model supports it at this micro-batch size.
pub(crate) fn check_fp8(
    model: &AnyModel,
    options: &TrainOptions,
    step: StepSize,
) -> Result<(), UsageError> {
    if options.precision != Precision::Fp8 {
        return Ok(());
    }
    let Some(config) = model.language() else {
        return Err(UsageError(format!(
            "precision = \"fp8\" is for the projections of language models, and a model of the family {} has none; use \
             bf16-stochastic",
            model.type_name()
        )));
    };
    let tokens = match step {
        StepSize::MicroBatches(_) => options.batch.saturating_mul(options.sequence),
        // The planner may choose any micro-batch size.
        StepSize::Tokens(_) => FP8_MULTIPLE,
    };
    if fp8_projections(config, tokens).iter().any(|(_, suits)| *suits) {
        return Ok(());
    }
    Err(UsageError(format!(
        "precision = \"fp8\" needs tokens of a micro-batch and widths of projections that are multiples of {FP8_MULTIPLE}; with \
         micro-batches of {} × {} tokens, no projection of this model would be in fp8",
        options.batch, options.sequence
    )))
}

impl From<PrecisionArg> for Precision {
    fn from(precision: PrecisionArg) -> Precision {
        match precision {
            PrecisionArg::F32 => Precision::F32,
            PrecisionArg::Bf16Master => Precision::Bf16Master,
            PrecisionArg::Bf16Stochastic => Precision::Bf16Stochastic,
            PrecisionArg::Fp8 => Precision::Fp8,
        }
    }
}

/// Storage of the optimizer's moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MomentsArg {
    /// In bf16, or in f32 with precisions f32 and bf16-master.
    Full,
    /// Moments of matrices in 8 bits with a scale for each 128 values, rounded stochastically: about a quarter less
    /// host memory. Moments of embeddings, heads, vectors and adapters are not quantized.
    Int8,
}

impl From<MomentsArg> for Moments {
    fn from(moments: MomentsArg) -> Moments {
        match moments {
            MomentsArg::Full => Moments::Full,
            MomentsArg::Int8 => Moments::Int8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use storm_model::preset;

    #[test]
    fn fp8_without_a_projection_that_it_suits_is_refused() {
        let model = AnyModel::from(preset("qwen2.5-0.5b").unwrap());
        let check = |batch, sequence, precision, step| {
            check_fp8(&model, &TrainOptions::new(batch, sequence, precision), step)
        };
        let one = StepSize::MicroBatches(1);
        assert!(check(1, 1024, Precision::Fp8, one).is_ok());
        let error = check(1, 1000, Precision::Fp8, one).unwrap_err().to_string();
        assert!(error.contains("multiples of 16") && error.contains("1 × 1000"), "{error}");
        assert!(check(1, 1000, Precision::Bf16Stochastic, one).is_ok());
        assert!(check(2, 1000, Precision::Fp8, one).is_ok());
        assert!(check(1, 1000, Precision::Fp8, StepSize::Tokens(16_000)).is_ok());
    }
}
