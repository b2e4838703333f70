//! What ops are told besides their operands.

/// A target that costs nothing: padding, prompts.
pub const IGNORE_INDEX: i32 = -100;

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
}

/// Elementwise nonlinearity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationFunction {
    /// `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
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

/// Angles per position of rotary embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryFrequencies {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How long contexts stretch it.
    pub scaling: RotaryScaling,
}

/// Changes to the frequencies for contexts longer than those trained first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// None.
    Plain,
    /// Llama 3's: long wavelengths divided by `factor`, short ones kept, smooth in between.
    Llama3 {
        /// Divisor of the lowest frequencies.
        factor: f64,
        /// Wavelengths above `original_positions / low_frequency_factor` are scaled in full.
        low_frequency_factor: f64,
        /// Wavelengths below `original_positions / high_frequency_factor` are kept.
        high_frequency_factor: f64,
        /// Context length of the first training.
        original_positions: usize,
    },
}

impl RotaryFrequencies {
    /// Angle per position of each of the `head_dim / 2` pairs, rounded to f32 where `transformers`
    /// rounds, so that positions in the thousands give the same angles.
    pub fn inverse_wavelengths(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|pair| {
                let exponent = (2 * pair) as f32 / head_dim as f32;
                let plain = 1.0 / (self.theta.powf(f64::from(exponent)) as f32);
                match self.scaling {
                    RotaryScaling::Plain => plain,
                    RotaryScaling::Llama3 {
                        factor,
                        low_frequency_factor,
                        high_frequency_factor,
                        original_positions,
                    } => {
                        let plain = f64::from(plain);
                        let original = original_positions as f64;
                        let wavelength = 2.0 * std::f64::consts::PI / plain;
                        let scaled = if wavelength > original / low_frequency_factor {
                            plain / factor
                        } else if wavelength < original / high_frequency_factor {
                            plain
                        } else {
                            let smooth = (original / wavelength - low_frequency_factor)
                                / (high_frequency_factor - low_frequency_factor);
                            (1.0 - smooth) * plain / factor + smooth * plain
                        };
                        scaled as f32
                    }
                }
            })
            .collect()
    }
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

    /// No update: with these AdamW leaves everything as it is, whatever the gradients are.
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
