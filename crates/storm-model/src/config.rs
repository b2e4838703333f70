//! The description of a language model: one plain struct for every family.

use crate::ModelError;

/// The architectures that STORM has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// GPT-2: learned positions, layer norm, GELU, biases everywhere.
    Gpt2,
    /// Llama 1 to 3.x: rotary positions, RMS norm, SwiGLU.
    Llama,
    /// Mistral: Llama with an optional sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: Llama with a bias on query, key and value.
    Qwen2,
    /// Qwen3: Llama with RMS norm on each query and key head.
    Qwen3,
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 5] = [Self::Gpt2, Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// `model_type` in config.json.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Gpt2 => "gpt2",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The class in `architectures` of config.json.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Gpt2 => "GPT2LMHeadModel",
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// Whether each query and key head is normalized before attention.
    pub fn has_query_key_norm(self) -> bool {
        self == Self::Qwen3
    }
}

/// Rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rotary {
    /// The base of the wavelengths.
    pub theta: f64,
    /// How the frequencies are changed for a longer context.
    pub scaling: RotaryScaling,
}

/// How rotary frequencies are changed for a longer context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RotaryScaling {
    /// As they are.
    None,
    /// Llama 3's rule: long wavelengths are stretched, short ones kept, those between blended.
    Llama3 {
        /// By how much long wavelengths are stretched.
        factor: f64,
        /// Wavelengths longer than `original_max_positions / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original_max_positions / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length of the first training.
        original_max_positions: usize,
    },
}

/// A language model, whatever its family. Call [`ModelConfig::validate`] before use: past it, no
/// product of sizes of one tensor, and no byte count of the model, overflows 64 bits.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub family: Family,
    /// V: rows of the embedding.
    pub vocab_size: usize,
    /// C: width of the residual stream.
    pub hidden_size: usize,
    /// L: how often the layer is repeated.
    pub layer_count: usize,
    /// Hq: query heads.
    pub query_heads: usize,
    /// Hkv: key and value heads; divides `query_heads`.
    pub kv_heads: usize,
    /// D: size of one head; not always `hidden_size / query_heads`.
    pub head_dim: usize,
    /// F: width inside the MLP.
    pub intermediate_size: usize,
    /// The longest sequence; for GPT-2 the rows of the position embedding.
    pub max_positions: usize,
    /// Added to the variance (or mean square) in every norm.
    pub norm_eps: f64,
    /// Whether the head is the embedding.
    pub tied_embeddings: bool,
    /// Rotary positions; `None` for GPT-2, which learns its positions.
    pub rotary: Option<Rotary>,
    /// Whether query, key and value have a bias.
    pub qkv_bias: bool,
    /// Whether the projection after attention has a bias.
    pub attention_output_bias: bool,
    /// Whether the projections of the MLP have a bias.
    pub mlp_bias: bool,
    /// The window that is active on some layer: a token sees this many, itself included. Sequences
    /// not longer than it are computed as full attention.
    pub sliding_window: Option<usize>,
    /// With a window: the first layer that uses it, as Qwen's `max_window_layers`. Otherwise 0.
    pub first_windowed_layer: usize,
    /// Standard deviation of fresh weights.
    pub initializer_range: f64,
}

/// Hard limits, about a power of two above anything that exists.
mod limit {
    pub(super) const LAYERS: usize = 65_535;
    pub(super) const HIDDEN: usize = 1 << 20;
    pub(super) const INTERMEDIATE: usize = 1 << 22;
    pub(super) const VOCAB: usize = 1 << 24;
    pub(super) const HEADS: usize = 1 << 12;
    pub(super) const HEAD_DIM: usize = 256;
    pub(super) const POSITIONS: usize = 1 << 27;
    pub(super) const PARAMETERS: u128 = 1 << 48;
}

impl ModelConfig {
    /// Checks every number against hard limits and the rules of the family.
    pub fn validate(&self) -> Result<(), ModelError> {
        within("layer_count", self.layer_count, limit::LAYERS)?;
        within("hidden_size", self.hidden_size, limit::HIDDEN)?;
        within("intermediate_size", self.intermediate_size, limit::INTERMEDIATE)?;
        within("vocab_size", self.vocab_size, limit::VOCAB)?;
        within("query_heads", self.query_heads, limit::HEADS)?;
        within("kv_heads", self.kv_heads, limit::HEADS)?;
        within("head_dim", self.head_dim, limit::HEAD_DIM)?;
        within("max_positions", self.max_positions, limit::POSITIONS)?;
        check(self.query_heads.is_multiple_of(self.kv_heads), "kv_heads", self.kv_heads, || {
            format!("a divisor of query_heads ({})", self.query_heads)
        })?;
        positive("norm_eps", self.norm_eps, 1.0)?;
        check(
            (0.0..=1.0).contains(&self.initializer_range),
            "initializer_range",
            self.initializer_range,
            || "from 0 to 1".into(),
        )?;
        self.validate_window()?;
        self.validate_rotary()?;
        self.validate_family()?;
        let count = self.parameter_count_wide();
        check(count <= limit::PARAMETERS, "parameter count", count, || {
            format!("at most {}", limit::PARAMETERS)
        })
    }

    fn validate_window(&self) -> Result<(), ModelError> {
        let has_window = matches!(self.family, Family::Mistral | Family::Qwen2 | Family::Qwen3);
        let Some(window) = self.sliding_window else {
            return check(
                self.first_windowed_layer == 0,
                "first_windowed_layer",
                self.first_windowed_layer,
                || "0 without a sliding window".into(),
            );
        };
        within("sliding_window", window, limit::POSITIONS)?;
        check(has_window, "sliding_window", window, || {
            format!("none for {}", self.family.model_type())
        })?;
        // Mistral has one window for all layers.
        let first_max = if self.family == Family::Mistral { 0 } else { self.layer_count - 1 };
        check(
            self.first_windowed_layer <= first_max,
            "first_windowed_layer",
            self.first_windowed_layer,
            || format!("at most {first_max}"),
        )
    }

    fn validate_rotary(&self) -> Result<(), ModelError> {
        let Some(rotary) = &self.rotary else {
            return Ok(());
        };
        check(self.head_dim.is_multiple_of(2), "head_dim", self.head_dim, || {
            "even, since rotary positions rotate pairs".into()
        })?;
        positive("rotary theta", rotary.theta, 1e30)?;
        let RotaryScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_positions,
        } = rotary.scaling
        else {
            return Ok(());
        };
        positive("rotary factor", factor, 1e6)?;
        check(factor >= 1.0, "rotary factor", factor, || "at least 1".into())?;
        positive("rotary low_freq_factor", low_freq_factor, 1e6)?;
        positive("rotary high_freq_factor", high_freq_factor, 1e6)?;
        check(
            high_freq_factor > low_freq_factor,
            "rotary high_freq_factor",
            high_freq_factor,
            || format!("greater than low_freq_factor ({low_freq_factor})"),
        )?;
        within("rotary original_max_positions", original_max_positions, limit::POSITIONS)
    }

    /// What transformers fixes for each family. Any other config could not be saved.
    fn validate_family(&self) -> Result<(), ModelError> {
        let family = self.family;
        let fixed = |field, value: bool, wanted: bool| {
            check(value == wanted, field, value, || format!("{wanted} for {}", family.model_type()))
        };
        fixed("rotary", self.rotary.is_some(), family != Family::Gpt2)?;
        match family {
            Family::Gpt2 => {
                fixed("qkv_bias", self.qkv_bias, true)?;
                fixed("attention_output_bias", self.attention_output_bias, true)?;
                fixed("mlp_bias", self.mlp_bias, true)?;
                check(self.kv_heads == self.query_heads, "kv_heads", self.kv_heads, || {
                    format!("query_heads ({}) for gpt2", self.query_heads)
                })?;
                check(
                    self.query_heads * self.head_dim == self.hidden_size,
                    "head_dim",
                    self.head_dim,
                    || {
                        format!(
                            "hidden_size / query_heads ({} / {}) for gpt2",
                            self.hidden_size, self.query_heads
                        )
                    },
                )
            }
            Family::Llama => {
                fixed("attention_output_bias", self.attention_output_bias, self.qkv_bias)?;
                // transformers asks for this even where head_dim is given.
                check(
                    self.hidden_size.is_multiple_of(self.query_heads),
                    "hidden_size",
                    self.hidden_size,
                    || format!("a multiple of query_heads ({}) for llama", self.query_heads),
                )
            }
            Family::Mistral => {
                fixed("qkv_bias", self.qkv_bias, false)?;
                fixed("attention_output_bias", self.attention_output_bias, false)?;
                fixed("mlp_bias", self.mlp_bias, false)
            }
            Family::Qwen2 => {
                fixed("qkv_bias", self.qkv_bias, true)?;
                fixed("attention_output_bias", self.attention_output_bias, false)?;
                fixed("mlp_bias", self.mlp_bias, false)
            }
            Family::Qwen3 => {
                fixed("attention_output_bias", self.attention_output_bias, self.qkv_bias)?;
                fixed("mlp_bias", self.mlp_bias, false)
            }
        }
    }

    /// Rows of the query part of `attention.qkv`: Hq × D.
    pub fn query_rows(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Rows of the key part, and of the value part, of `attention.qkv`: Hkv × D.
    pub fn kv_rows(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Rows of `attention.qkv`: (Hq + 2·Hkv) × D.
    pub fn qkv_rows(&self) -> usize {
        self.query_rows() + 2 * self.kv_rows()
    }

    /// Parameters of one layer. For a validated config.
    pub fn layer_parameter_count(&self) -> u64 {
        // Every factor is capped by `validate`, so that this stays far below 2^64.
        self.layer_parameter_count_wide() as u64
    }

    /// Parameters of the model; tied ones count once. For a validated config.
    pub fn parameter_count(&self) -> u64 {
        u64::try_from(self.parameter_count_wide()).unwrap_or(u64::MAX)
    }

    fn layer_parameter_count_wide(&self) -> u128 {
        let [hidden, inner] = [self.hidden_size, self.intermediate_size].map(|size| size as u128);
        let head_dim = self.head_dim as u128;
        let query = self.query_heads as u128 * head_dim;
        let qkv = query + 2 * self.kv_heads as u128 * head_dim;
        // GPT-2's MLP goes up and down; the others have a gate as well.
        let up = if self.family == Family::Gpt2 { inner } else { 2 * inner };
        let norm = if self.family == Family::Gpt2 { 2 * hidden } else { hidden };
        let when = |condition: bool, count: u128| if condition { count } else { 0 };
        qkv * hidden
            + hidden * query
            + (up + inner) * hidden
            + 2 * norm
            + when(self.qkv_bias, qkv)
            + when(self.attention_output_bias, hidden)
            + when(self.mlp_bias, up + hidden)
            + when(self.family.has_query_key_norm(), 2 * head_dim)
    }

    fn parameter_count_wide(&self) -> u128 {
        let hidden = self.hidden_size as u128;
        let embedding = self.vocab_size as u128 * hidden;
        let (positions, norm) = match self.family {
            Family::Gpt2 => (self.max_positions as u128 * hidden, 2 * hidden),
            _ => (0, hidden),
        };
        let head = if self.tied_embeddings { 0 } else { embedding };
        embedding
            + positions
            + self.layer_count as u128 * self.layer_parameter_count_wide()
            + norm
            + head
    }
}

fn check(
    holds: bool,
    field: &'static str,
    value: impl ToString,
    rule: impl FnOnce() -> String,
) -> Result<(), ModelError> {
    if holds {
        return Ok(());
    }
    Err(ModelError::InvalidConfig { field, value: value.to_string(), rule: rule() })
}

fn within(field: &'static str, value: usize, max: usize) -> Result<(), ModelError> {
    check((1..=max).contains(&value), field, value, || format!("from 1 to {max}"))
}

fn positive(field: &'static str, value: f64, max: f64) -> Result<(), ModelError> {
    // NaN fails both comparisons.
    check(value > 0.0 && value <= max, field, value, || format!("greater than 0 and at most {max}"))
}
