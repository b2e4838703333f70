//! Attributes of ops.

use std::sync::Arc;

/// A target that does not count in the loss: padding, prompts.
pub const IGNORE_INDEX: i32 = -100;

/// The place of a matrix in a larger one, and its factor there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockPlace {
    /// First row.
    pub row: usize,
    /// First column.
    pub column: usize,
    /// Factor of every element.
    pub factor: f32,
}

/// The layout of heads in a packed row of queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadLayout {
    /// Number of query heads, a multiple of `key_value_heads`.
    pub query_heads: usize,
    /// Number of key heads, which equals that of value heads.
    pub key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
}

impl HeadLayout {
    /// Width of a row: queries, then keys, then values.
    pub fn qkv_width(&self) -> usize {
        (self.query_heads + 2 * self.key_value_heads) * self.head_dim
    }

    /// Width of the queries, and of the attention output.
    pub fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Width of the keys and values, as stored in a cache.
    pub fn key_value_width(&self) -> usize {
        2 * self.key_value_heads * self.head_dim
    }

    /// Number of heads that are rotated and normalized: queries and keys.
    pub fn query_key_heads(&self) -> usize {
        self.query_heads + self.key_value_heads
    }
}

/// Which keys a query attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Those at its own position and before.
    Causal,
    /// All.
    Full,
    /// Those at its own position and before, up to a maximum number.
    Sliding {
        /// Maximum number of keys, including its own.
        window: usize,
    },
}

impl Mask {
    /// Whether keys after their query are masked.
    pub fn is_causal(self) -> bool {
        self != Mask::Full
    }

    /// Maximum number of keys of a query, including its own. `None` if unlimited.
    pub fn window(self) -> Option<usize> {
        match self {
            Mask::Sliding { window } => Some(window),
            Mask::Causal | Mask::Full => None,
        }
    }
}

/// Weights of the gradients of a KL divergence. With a larger weight of the prior, the prior follows
/// the posterior more than the posterior follows the prior.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlBalance {
    /// Weight of the gradient of the posterior.
    pub posterior: f32,
    /// Weight of the gradient of the prior.
    pub prior: f32,
}

/// Elementwise nonlinearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationFunction {
    /// `x/2 · (1 + erf(x/√2))`.
    Gelu,
    /// `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `x · sigmoid(x)`.
    Silu,
}

/// The statistics that a norm uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Mean and standard deviation.
    Layer,
    /// Root mean square.
    Rms,
}

/// The activation that a norm of channels applies to its result, in the same pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NormActivation {
    /// Nothing.
    None,
    /// `max(x, 0)`.
    Relu,
}

/// Whether a backward op also computes the gradients of its parameters. Frozen parameters skip
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterGradients {
    /// Compute them.
    Compute,
    /// Skip them.
    Skip,
}

/// The direction of [`Op::Rotary`](crate::Op::Rotary). Its backward uses the opposite one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RotaryDirection {
    /// Rotates by the position's angle.
    Forward,
    /// Rotates back by that angle.
    Inverse,
}

impl RotaryDirection {
    /// The opposite direction.
    pub fn reversed(self) -> RotaryDirection {
        match self {
            RotaryDirection::Forward => RotaryDirection::Inverse,
            RotaryDirection::Inverse => RotaryDirection::Forward,
        }
    }
}

/// The frequencies of a rotary table. The model computes them.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryFrequencies {
    /// Angle per position of each pair.
    pub inverse_wavelengths: Arc<[f32]>,
    /// Factor applied to cosines and sines.
    pub factor: f32,
}

impl RotaryFrequencies {
    /// Wavelengths in a geometric series with base `theta`, for all `head_dim / 2` pairs of a head.
    /// They are rounded to f32 where `transformers` rounds, so that angles match even for positions
    /// in the thousands.
    pub fn plain(theta: f64, head_dim: usize) -> RotaryFrequencies {
        let angle = |pair: usize| {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            1.0 / (theta.powf(f64::from(exponent)) as f32)
        };
        let inverse_wavelengths = (0..head_dim / 2).map(angle).collect();
        RotaryFrequencies { inverse_wavelengths, factor: 1.0 }
    }

    /// Number of rotated pairs of a head.
    pub fn pairs(&self) -> usize {
        self.inverse_wavelengths.len()
    }
}

/// How the backward pass reads an activation of the forward pass. It affects the results of a step,
/// so it never depends on decisions about memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ActivationCodec {
    /// Unchanged.
    #[default]
    None,
    /// Rounded to 8 bits in groups of [`QUANTIZED_GROUP`](crate::QUANTIZED_GROUP), see
    /// [`QuantizedRow`](crate::QuantizedRow).
    Int8,
}

/// Whether the gradient of a gated unit also computes the unit's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnitOutput {
    /// The backward pass reads it.
    Compute,
    /// It is not read, because the projection after the unit is frozen.
    Skip,
}

/// How an updated f32 value is rounded to a narrower parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest, ties to even.
    Nearest,
    /// Up or down at random, in proportion, so that small updates have an effect on average.
    Stochastic,
}

/// The hyperparameters of AdamW, without the learning rate, which changes by step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWParameters {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the square root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f32,
}

/// The hyperparameters of stochastic gradient descent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdParameters {
    /// Momentum factor. 0 means no momentum and no state.
    pub momentum: f32,
    /// The direction of a step.
    pub direction: MomentumDirection,
    /// Weight decay: this times the parameter is added to the gradient. Without momentum, this
    /// equals decoupled weight decay.
    pub weight_decay: f32,
}

impl SgdParameters {
    /// SGD without momentum.
    pub fn plain(weight_decay: f32) -> SgdParameters {
        SgdParameters { momentum: 0.0, direction: MomentumDirection::Momentum, weight_decay }
    }

    /// Whether it uses momentum.
    pub fn has_momentum(&self) -> bool {
        self.momentum != 0.0
    }
}

/// The direction of a step of [`Op::Sgd`](crate::Op::Sgd) with momentum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MomentumDirection {
    /// The momentum.
    Momentum,
    /// Nesterov: the gradient plus the decayed momentum.
    Nesterov,
}

/// Whether a loss also computes which rows are correct.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accuracy {
    /// Compute it.
    Compute,
    /// Skip it.
    Skip,
}

/// The per-step scalars that optimizer ops read. They are in device memory, so that a prepared
/// instruction can be reused for every step.
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

    /// No update: parameters and state stay unchanged, whatever the gradients.
    pub const NONE: StepScalars =
        StepScalars { learning_rate: 0.0, first_correction: 0.0, second_correction: 0.0 };

    /// Whether this is `NONE`. No other value has a correction of zero.
    pub fn is_none(&self) -> bool {
        self.first_correction == 0.0
    }

    /// Scalars of AdamW for update number `update` (the first is 1).
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

    /// Scalars of [`Op::Sgd`](crate::Op::Sgd), which has no bias correction.
    pub fn sgd(learning_rate: f32) -> StepScalars {
        StepScalars { learning_rate, first_correction: 1.0, second_correction: 1.0 }
    }

    /// The values in the order of the device tensor.
    pub fn to_array(self) -> [f32; StepScalars::LEN] {
        [self.learning_rate, self.first_correction, self.second_correction]
    }
}

/// How attention over a cache is split into independent parts. It depends only on the cache size,
/// so that a result does not depend on how many positions are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheParts {
    /// Number of parts.
    pub count: usize,
    /// Positions per part. The last one may have fewer.
    pub keys: usize,
}

impl CacheParts {
    /// Maximum number of parts, because their sums take memory.
    pub const MAX: usize = 64;
    /// The positions per part are a multiple of this.
    const UNIT: usize = 64;

    /// The parts of a cache with this many positions.
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
