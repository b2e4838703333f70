use storm_graph::{DType, Rounding};
use storm_model::Products;

/// Number formats of parameters, gradients and optimizer state, and of products in layers. Part of the semantics of a
/// run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Everything in f32.
    F32,
    /// bf16 parameters and activations; f32 master weights, moments and gradients.
    Bf16Master,
    /// bf16 throughout, without master weights: updates and moments are rounded stochastically.
    Bf16Stochastic,
    /// Stored like [`Precision::Bf16Stochastic`]; the projections of layers multiply 8-bit floats.
    Fp8,
}

impl Precision {
    /// The precision for one parameter. A parameter in f32 among bf16 weights, such as an adapter, is trained entirely
    /// in f32.
    pub fn of_parameter(self, dtype: DType) -> Precision {
        if dtype == DType::F32 { Precision::F32 } else { self }
    }

    /// Data type of parameters and activations.
    pub fn compute(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16Master | Precision::Bf16Stochastic | Precision::Fp8 => DType::BF16,
        }
    }

    /// Data type of parameter gradients.
    pub fn gradients(self) -> DType {
        match self {
            Precision::F32 | Precision::Bf16Master => DType::F32,
            Precision::Bf16Stochastic | Precision::Fp8 => DType::BF16,
        }
    }

    /// How layers multiply.
    pub fn products(self) -> Products {
        match self {
            Precision::F32 | Precision::Bf16Master | Precision::Bf16Stochastic => {
                Products::AsStored
            }
            Precision::Fp8 => Products::Fp8,
        }
    }

    /// Data type of the optimizer's moments.
    pub fn moments(self) -> DType {
        self.gradients()
    }

    /// Whether parameters have an f32 master copy.
    pub fn has_master(self) -> bool {
        self == Precision::Bf16Master
    }

    /// Rounding of parameters after an update.
    pub fn rounding(self) -> Rounding {
        match self {
            Precision::F32 | Precision::Bf16Master => Rounding::Nearest,
            Precision::Bf16Stochastic | Precision::Fp8 => Rounding::Stochastic,
        }
    }
}
