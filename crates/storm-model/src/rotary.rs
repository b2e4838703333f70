//! Rotary position embedding: the frequency of each pair of a head, with all scalings as in
//! `transformers`.

use crate::ModelError;
use crate::config::{check, limit, positive, within};
use storm_graph::RotaryFrequencies;

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    /// The base of the wavelengths.
    pub theta: f64,
    /// The part of each head that is rotated, from its first element: `partial_rotary_factor`.
    pub share: f64,
    /// How the frequencies are scaled for a longer context.
    pub scaling: RotaryScaling,
}

/// How rotary frequencies are scaled for a longer context.
#[derive(Debug, Clone, PartialEq)]
pub enum RotaryScaling {
    /// Not scaled.
    None,
    /// All wavelengths are stretched equally.
    Linear {
        /// The stretch factor.
        factor: f64,
    },
    /// The base grows with the sequence length, beyond the model's positions.
    Dynamic {
        /// How fast it grows.
        factor: f64,
    },
    /// Llama 3's rule: long wavelengths are stretched, short ones kept, and those in between
    /// blended.
    Llama3 {
        /// The stretch factor of long wavelengths.
        factor: f64,
        /// Wavelengths longer than `original_max_positions / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length of the original training.
        original_max_positions: usize,
    },
    /// YaRN: pairs with few rotations within the original context are stretched, those with many
    /// are kept.
    Yarn {
        /// The stretch factor.
        factor: f64,
        /// Factor applied to cosines and sines.
        attention_factor: f64,
        /// Pairs with more rotations than this are kept.
        beta_fast: f64,
        /// Pairs with fewer rotations than this are stretched.
        beta_slow: f64,
        /// Whether the limits of the blended range are rounded to whole pairs.
        truncate: bool,
        /// The context length of the original training.
        original_max_positions: usize,
    },
    /// LongRoPE: a separate factor for each pair, with one list for sequences up to the original
    /// context and one for longer sequences.
    LongRope {
        /// For sequences up to `original_max_positions`.
        short_factors: Vec<f64>,
        /// For longer sequences.
        long_factors: Vec<f64>,
        /// Factor applied to cosines and sines.
        attention_factor: f64,
        /// The context length of the original training.
        original_max_positions: usize,
    },
}

impl Rotary {
    /// Rotates whole heads, without scaling.
    pub fn plain(theta: f64) -> Rotary {
        Rotary { theta, share: 1.0, scaling: RotaryScaling::None }
    }

    /// Elements of a head used to compute the frequencies. An odd number adds one pair.
    fn dim(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.share) as usize
    }

    /// P: number of rotated pairs of a head.
    pub fn pairs(&self, head_dim: usize) -> usize {
        self.dim(head_dim).div_ceil(2)
    }

    /// The maximum length up to which all sequences have the same frequencies. `None` if all
    /// lengths do.
    pub fn steady_positions(&self, max_positions: usize) -> Option<usize> {
        match &self.scaling {
            RotaryScaling::Dynamic { .. } => Some(max_positions),
            RotaryScaling::LongRope { original_max_positions, .. } => Some(*original_max_positions),
            _ => None,
        }
    }

    /// A message about the frequencies used for sequences of this many positions, if they depend on
    /// the length.
    pub(crate) fn words(&self, max_positions: usize, positions: usize) -> Option<String> {
        let limit = self.steady_positions(max_positions)?;
        let is_long = positions > limit;
        let (kind, taken) = match (&self.scaling, is_long) {
            (RotaryScaling::Dynamic { .. }, false) => ("dynamic", "the unscaled frequencies"),
            (RotaryScaling::Dynamic { .. }, true) => {
                ("dynamic", "frequencies scaled for that length")
            }
            (_, false) => ("longrope", "the short factors"),
            (_, true) => ("longrope", "the long factors"),
        };
        let reach = if is_long { "longer than" } else { "not longer than" };
        Some(format!(
            "rotary scaling `{kind}`: sequences of {positions} tokens are {reach} {limit}, so {taken} are taken"
        ))
    }

    /// The frequencies for sequences of `positions` tokens, rounded to f32 where `transformers`
    /// rounds, so that angles match even for positions in the thousands.
    pub(crate) fn frequencies(
        &self,
        head_dim: usize,
        max_positions: usize,
        positions: usize,
    ) -> RotaryFrequencies {
        let dim = self.dim(head_dim);
        let pairs = 0..self.pairs(head_dim);
        let powers_of = |theta: f64| -> Vec<f32> {
            let exponent = |pair: usize| f64::from((2 * pair) as f32 / dim as f32);
            pairs.clone().map(|pair| theta.powf(exponent(pair)) as f32).collect()
        };
        let powers = powers_of(self.theta);
        let inverse = |powers: &[f32]| powers.iter().map(|power| 1.0 / power).collect();
        let mut factor = 1.0;
        let inverse_wavelengths: Vec<f32> = match &self.scaling {
            RotaryScaling::None => inverse(&powers),
            RotaryScaling::Linear { factor } => {
                powers.iter().map(|power| 1.0 / power / *factor as f32).collect()
            }
            RotaryScaling::Dynamic { factor } => {
                let theta = dynamic_theta(self.theta, *factor, dim, max_positions, positions);
                inverse(&powers_of(theta))
            }
            &RotaryScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_positions,
            } => {
                let original = original_max_positions as f64;
                let scaled = |power: &f32| llama3(1.0 / power, factor, (low, high), original);
                powers.iter().map(scaled).collect()
            }
            RotaryScaling::Yarn { factor: stretch, attention_factor, .. } => {
                factor = *attention_factor as f32;
                let kept = self.yarn_kept(dim);
                let blend = |(power, kept): (&f32, f32)| {
                    let (stretched, plain) = (1.0 / (*stretch as f32 * power), 1.0 / power);
                    stretched * (1.0 - kept) + plain * kept
                };
                powers.iter().zip(kept).map(blend).collect()
            }
            RotaryScaling::LongRope {
                short_factors,
                long_factors,
                attention_factor,
                original_max_positions,
            } => {
                factor = *attention_factor as f32;
                let is_long = positions > *original_max_positions;
                let factors = if is_long { long_factors } else { short_factors };
                let scaled = |(power, factor): (&f32, &f64)| 1.0 / (*factor as f32 * power);
                powers.iter().zip(factors).map(scaled).collect()
            }
        };
        RotaryFrequencies { inverse_wavelengths: inverse_wavelengths.into(), factor }
    }

    /// YaRN: the share of the plain frequency that each pair keeps.
    fn yarn_kept(&self, dim: usize) -> Vec<f32> {
        let RotaryScaling::Yarn { beta_fast, beta_slow, truncate, original_max_positions, .. } =
            self.scaling
        else {
            return Vec::new();
        };
        // The pair with this many rotations within the original context.
        let pair_of = |turns: f64| {
            let wavelength = original_max_positions as f64 / (turns * 2.0 * std::f64::consts::PI);
            dim as f64 * wavelength.ln() / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let stretched =
            |pair: usize| ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        (0..dim.div_ceil(2)).map(|pair| 1.0 - stretched(pair)).collect()
    }

    pub(crate) fn validate(&self, head_dim: usize) -> Result<(), ModelError> {
        positive("rotary theta", self.theta, 1e30)?;
        positive("rotary share", self.share, 1.0)?;
        let pairs = self.pairs(head_dim);
        check(pairs > 0 && 2 * pairs <= head_dim, "head_dim", head_dim, || {
            "even, unless only a part of it is rotated, since rotary positions rotate pairs".into()
        })?;
        let at_least_one = |factor: f64| {
            positive("rotary factor", factor, 1e6)?;
            check(factor >= 1.0, "rotary factor", factor, || "at least 1".into())
        };
        let original =
            |positions| within("rotary original_max_positions", positions, limit::POSITIONS);
        match &self.scaling {
            RotaryScaling::None => Ok(()),
            RotaryScaling::Linear { factor } => at_least_one(*factor),
            RotaryScaling::Dynamic { factor } => {
                at_least_one(*factor)?;
                check(self.dim(head_dim) > 2, "head_dim", head_dim, || {
                    "more than 2 for dynamic rotary scaling".into()
                })
            }
            &RotaryScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            } => {
                at_least_one(factor)?;
                positive("rotary low_freq_factor", low_freq_factor, 1e6)?;
                positive("rotary high_freq_factor", high_freq_factor, 1e6)?;
                check(
                    high_freq_factor > low_freq_factor,
                    "rotary high_freq_factor",
                    high_freq_factor,
                    || format!("greater than low_freq_factor ({low_freq_factor})"),
                )?;
                original(original_max_positions)
            }
            &RotaryScaling::Yarn {
                factor,
                attention_factor,
                beta_fast,
                beta_slow,
                original_max_positions,
                ..
            } => {
                at_least_one(factor)?;
                positive("rotary attention_factor", attention_factor, 1e6)?;
                positive("rotary beta_fast", beta_fast, 1e6)?;
                positive("rotary beta_slow", beta_slow, 1e6)?;
                // The logarithm of the base is a divisor.
                check(self.theta > 1.0, "rotary theta", self.theta, || {
                    "more than 1 for yarn".into()
                })?;
                original(original_max_positions)
            }
            RotaryScaling::LongRope {
                short_factors,
                long_factors,
                attention_factor,
                original_max_positions,
            } => {
                for (name, factors) in
                    [("rotary short_factor", short_factors), ("rotary long_factor", long_factors)]
                {
                    check(
                        factors.len() == pairs,
                        name,
                        format!("a list of {}", factors.len()),
                        || format!("a list of {pairs}, one for each pair that is rotated"),
                    )?;
                    for factor in factors {
                        positive(name, *factor, 1e6)?;
                    }
                }
                positive("rotary attention_factor", *attention_factor, 1e6)?;
                original(*original_max_positions)
            }
        }
    }
}

/// The base of dynamic (NTK) scaling. If the sequence is longer than the model's positions,
/// `transformers` has the length as a tensor and therefore computes in f32.
fn dynamic_theta(
    theta: f64,
    factor: f64,
    dim: usize,
    max_positions: usize,
    positions: usize,
) -> f64 {
    let exponent = dim as f64 / (dim as f64 - 2.0);
    if positions <= max_positions {
        return theta * (factor - (factor - 1.0)).powf(exponent);
    }
    let ratio = factor as f32 * positions as f32 / max_positions as f32 - (factor - 1.0) as f32;
    let growth = f64::from(ratio).powf(f64::from(exponent as f32)) as f32;
    f64::from(theta as f32 * growth)
}

fn llama3(plain: f32, factor: f64, (low, high): (f64, f64), original: f64) -> f32 {
    let plain = f64::from(plain);
    let wavelength = 2.0 * std::f64::consts::PI / plain;
    let scaled = if wavelength > original / low {
        plain / factor
    } else if wavelength < original / high {
        plain
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * plain / factor + smooth * plain
    };
    scaled as f32
}
