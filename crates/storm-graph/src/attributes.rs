//! What ops are told besides their operands.

use std::sync::Arc;

/// A target that costs nothing: padding, prompts.
pub const IGNORE_INDEX: i32 = -100;

/// Where a matrix lies in a larger one, and what it is multiplied by there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockPlace {
    /// First row.
    pub row: usize,
    /// First column.
    pub column: usize,
    /// Of every element.
    pub factor: f32,
}

/// How heads lie in a packed row of queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadLayout {
    /// Number of query heads, a multiple of `key_value_heads`.
    pub query_heads: usize,
    /// Number of key heads, and of value heads.
    pub key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
}

impl HeadLayout {
    /// Width of a row: queries, then keys, then values.
    pub fn qkv_width(&self) -> usize {
        (self.query_heads + 2 * self.key_value_heads) * self.head_dim
    }

    /// Width of the queries, and of the attention's result.
    pub fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Width of the keys and values, as a cache holds them.
    pub fn key_value_width(&self) -> usize {
        2 * self.key_value_heads * self.head_dim
    }

    /// Number of heads that are rotated and normalized: queries and keys.
    pub fn query_key_heads(&self) -> usize {
        self.query_heads + self.key_value_heads
    }
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Those at its own position and before.
    Causal,
    /// All.
    Full,
    /// Those at its own position and before, so many in all at most.
    Sliding {
        /// How many keys a query sees, its own included.
        window: usize,
    },
}

impl Mask {
    /// Whether keys after their query are hidden.
    pub fn is_causal(self) -> bool {
        self != Mask::Full
    }

    /// How many keys a query sees at most, its own included; none if there is no such limit.
    pub fn window(self) -> Option<usize> {
        match self {
            Mask::Sliding { window } => Some(window),
            Mask::Causal | Mask::Full => None,
        }
    }
}

/// Elementwise nonlinearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationFunction {
    /// `x/2 · (1 + erf(x/√2))`.
    Gelu,
    /// `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
    /// `x` where it is positive, else 0.
    Relu,
    /// `x · sigmoid(x)`.
    Silu,
}

/// What a norm subtracts and divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Mean and standard deviation.
    Layer,
    /// Root mean square.
    Rms,
}

/// What a norm of channels applies to its result, in the same pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormActivation {
    /// Nothing.
    None,
    /// Negative values become 0.
    Relu,
}

/// Whether a backward op also makes the gradients of its parameters. Frozen ones skip them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterGradients {
    /// Make them.
    Compute,
    /// Leave them out.
    Skip,
}

/// Which way [`Op::Rotary`](crate::Op::Rotary) turns; its backward is the other way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RotaryDirection {
    /// By the position's angle.
    Forward,
    /// Back by it.
    Inverse,
}

impl RotaryDirection {
    /// The other way.
    pub fn reversed(self) -> RotaryDirection {
        match self {
            RotaryDirection::Forward => RotaryDirection::Inverse,
            RotaryDirection::Inverse => RotaryDirection::Forward,
        }
    }
}

/// What a rotary table is made of. How the angles come about is the model's business.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryFrequencies {
    /// Angle per position of each pair.
    pub inverse_wavelengths: Arc<[f32]>,
    /// Cosines and sines are multiplied by this.
    pub factor: f32,
}

impl RotaryFrequencies {
    /// Wavelengths in a geometric series with base `theta`, for all `head_dim / 2` pairs of a head; rounded to
    /// f32 where `transformers` rounds, so that positions in the thousands give the same angles.
    pub fn plain(theta: f64, head_dim: usize) -> RotaryFrequencies {
        let angle = |pair: usize| {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            1.0 / (theta.powf(f64::from(exponent)) as f32)
        };
        let inverse_wavelengths = (0..head_dim / 2).map(angle).collect();
        RotaryFrequencies { inverse_wavelengths, factor: 1.0 }
    }

    /// How many pairs of a head are turned.
    pub fn pairs(&self) -> usize {
        self.inverse_wavelengths.len()
    }
}

/// How the backward pass sees an activation that the forward pass made. It is part of what a step computes, so it
/// depends on no decision about memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ActivationCodec {
    /// As it was made.
    #[default]
    None,
    /// Rounded to 8 bits in groups of [`QUANTIZED_GROUP`](crate::QUANTIZED_GROUP), see
    /// [`QuantizedRow`](crate::QuantizedRow).
    Int8,
}

/// Whether the gradient of a gated unit also yields what the unit made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnitOutput {
    /// The backward pass reads it.
    Compute,
    /// Nothing does, as with a frozen projection behind the unit.
    Skip,
}

/// How an updated f32 value is stored in a narrower parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest, ties to even.
    Nearest,
    /// Up or down at random, in proportion, so that small updates count on average.
    Stochastic,
}

/// The constants of AdamW; the learning rate changes by step and is not among them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWParameters {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay, times the learning rate.
    pub weight_decay: f32,
}

/// The constants of stochastic gradient descent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdParameters {
    /// How much of the momentum a step keeps; 0 is none, and no state.
    pub momentum: f32,
    /// What a step follows.
    pub direction: MomentumDirection,
    /// Added to the gradient, times the parameter. Without momentum that is decoupled weight decay.
    pub weight_decay: f32,
}

impl SgdParameters {
    /// Without momentum.
    pub fn plain(weight_decay: f32) -> SgdParameters {
        SgdParameters { momentum: 0.0, direction: MomentumDirection::Momentum, weight_decay }
    }

    /// Whether there is a momentum to keep.
    pub fn has_momentum(&self) -> bool {
        self.momentum != 0.0
    }
}

/// What a step of [`Op::Sgd`](crate::Op::Sgd) with momentum follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MomentumDirection {
    /// The momentum.
    Momentum,
    /// The gradient and the momentum as the next step would keep it.
    Nesterov,
}

/// Whether a loss also says which rows are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accuracy {
    /// It does.
    Compute,
    /// It does not.
    Skip,
}

/// The per-step scalars that optimizer ops read: they live in device memory, so that a prepared
/// instruction serves every step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepScalars {
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// `1 - beta1^t`.
    pub first_correction: f32,
    /// `1 - beta2^t`.
    pub second_correction: f32,
}

impl StepScalars {
    /// Number of f32 elements in the device tensor.
    pub const LEN: usize = 3;

    /// No update: with these an update leaves everything as it is, whatever the gradients are.
    pub const NONE: StepScalars =
        StepScalars { learning_rate: 0.0, first_correction: 0.0, second_correction: 0.0 };

    /// Whether these are of no update. A correction of zero occurs in no other.
    pub fn is_none(&self) -> bool {
        self.first_correction == 0.0
    }

    /// For update number `update` (the first is 1).
    pub fn adamw(learning_rate: f32, hyper: &AdamWParameters, update: u32) -> StepScalars {
        let correction = |beta: f32| {
            (1.0 - f64::from(beta).powi(i32::try_from(update).unwrap_or(i32::MAX))) as f32
        };
        StepScalars {
            learning_rate,
            first_correction: correction(hyper.beta1),
            second_correction: correction(hyper.beta2),
        }
    }

    /// For [`Op::Sgd`](crate::Op::Sgd), which corrects nothing.
    pub fn sgd(learning_rate: f32) -> StepScalars {
        StepScalars { learning_rate, first_correction: 1.0, second_correction: 1.0 }
    }

    /// In the order of the device tensor.
    pub fn to_array(self) -> [f32; StepScalars::LEN] {
        [self.learning_rate, self.first_correction, self.second_correction]
    }
}

/// How attention over a cache may be computed in parts, each by itself: a function of the positions that there are, so
/// that a result does not depend on how many of them are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheParts {
    /// How many parts there are.
    pub count: usize,
    /// Positions of a part; the last may have fewer.
    pub keys: usize,
}

impl CacheParts {
    /// The most parts that there are: their sums take memory.
    pub const MAX: usize = 64;
    /// Positions of a part are a multiple of this.
    const UNIT: usize = 64;

    /// For a cache of so many positions.
    pub fn of(window: usize) -> CacheParts {
        let keys = window.div_ceil(Self::UNIT * Self::MAX).max(1) * Self::UNIT;
        CacheParts { count: window.div_ceil(keys), keys }
    }
}

#[cfg(test)]
mod tests {
    use super::CacheParts;

    #[test]
    fn parts_cover_every_position_and_stay_few() {
        for window in [1, 63, 64, 65, 4095, 4096, 4097, 32_768, 131_072, 1_000_001] {
            let CacheParts { count, keys } = CacheParts::of(window);
            assert!(count * keys >= window && (count - 1) * keys < window, "{window}");
            assert!(count <= CacheParts::MAX && keys % 64 == 0, "{window}");
        }
    }
}
