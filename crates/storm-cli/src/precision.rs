use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use storm_train::Precision;

/// Storage of parameters, gradients and optimizer state, as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PrecisionArg {
    /// Everything in f32.
    F32,
    /// bf16 with f32 master weights, moments and gradients.
    Bf16Master,
    /// bf16 throughout, rounded stochastically.
    Bf16Stochastic,
}

impl From<PrecisionArg> for Precision {
    fn from(precision: PrecisionArg) -> Precision {
        match precision {
            PrecisionArg::F32 => Precision::F32,
            PrecisionArg::Bf16Master => Precision::Bf16Master,
            PrecisionArg::Bf16Stochastic => Precision::Bf16Stochastic,
        }
    }
}
