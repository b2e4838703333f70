use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use storm_graph::DType;
use storm_train::{Moments, Precision};

/// Arithmetic without gradients, as people write it.
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
    /// Stored like bf16-stochastic; the projections of layers and their gradients multiply 8-bit floats (E4M3), with one scale
    /// for each tensor of a micro-batch. Needs compute capability 8.9 or newer.
    Fp8,
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

/// Storage of the optimizer's moments, as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MomentsArg {
    /// As the precision says: bf16, or f32.
    Full,
    /// Those of matrices in 8 bits with a scale for each 128 of them, rounded stochastically: about a quarter less host memory.
    /// Those of embeddings, heads, vectors and adapters stay as they are.
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
