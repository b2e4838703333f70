use storm_graph::{DType, Rounding};
use storm_model::Products;

/// How parameters, gradients and optimizer state are stored, and how layers multiply. Part of the semantics of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Everything in f32.
    F32,
    /// bf16 parameters and activations; f32 master weights, moments and gradients.
    Bf16Master,
    /// bf16 throughout, no master: updates and moments are rounded stochastically.
    Bf16Stochastic,
    /// Stored as with [`Precision::Bf16Stochastic`]; the projections of layers multiply 8-bit floats.
    Fp8,
}

impl Precision {
    /// How one parameter is trained: one that is kept in f32 beside bf16 weights, such as an adapter, has everything in
    /// f32.
    pub fn of_parameter(self, dtype: DType) -> Precision {
        if dtype == DType::F32 { Precision::F32 } else { self }
    }

    /// Storage of parameters and activations.
    pub fn compute(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16Master | Precision::Bf16Stochastic | Precision::Fp8 => DType::BF16,
        }
    }

    /// Storage of parameter gradients.
    pub fn gradients(self) -> DType {
        match self {
            Precision::F32 | Precision::Bf16Master => DType::F32,
            Precision::Bf16Stochastic | Precision::Fp8 => DType::BF16,
        }
    }

    /// What layers multiply.
    pub fn products(self) -> Products {
        match self {
            Precision::F32 | Precision::Bf16Master | Precision::Bf16Stochastic => {
                Products::AsStored
            }
            Precision::Fp8 => Products::Fp8,
        }
    }

    /// Storage of the optimizer's moments.
    pub fn moments(self) -> DType {
        self.gradients()
    }

    /// Whether there is an f32 copy of the parameters.
    pub fn has_master(self) -> bool {
        self == Precision::Bf16Master
    }

    /// How parameters are rounded after an update.
    pub fn rounding(self) -> Rounding {
        match self {
            Precision::F32 | Precision::Bf16Master => Rounding::Nearest,
            Precision::Bf16Stochastic | Precision::Fp8 => Rounding::Stochastic,
        }
    }
}
