//! The config of a language model: one plain struct for all families.

use crate::BaseFormat;
use crate::{Adapters, ModelError, Rotary, SlidingWindow};
use storm_graph::ActivationFunction;

/// The supported architectures.
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
    /// Phi 3 and 4: Llama with an optional sliding window, and rotary positions on part of each
    /// head.
    Phi3,
}

/// Which layers of a family may have a sliding window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowKind {
    /// None.
    None,
    /// All of them, or none.
    AllLayers,
    /// Any of them.
    EachLayer,
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 6] =
        [Self::Gpt2, Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Phi3];

    /// `model_type` in config.json.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Gpt2 => "gpt2",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Phi3 => "phi3",
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
            Self::Phi3 => "Phi3ForCausalLM",
        }
    }

    /// Whether each query and key head is normalized before attention.
    pub fn has_query_key_norm(self) -> bool {
        self == Self::Qwen3
    }

    /// Whether its MLP is a gated unit, see [`Op::SwiGlu`](storm_graph::Op::SwiGlu).
    pub fn has_gated_units(self) -> bool {
        self != Self::Gpt2
    }

    pub(crate) fn window(self) -> WindowKind {
        match self {
            Self::Gpt2 | Self::Llama => WindowKind::None,
            Self::Mistral | Self::Phi3 => WindowKind::AllLayers,
            Self::Qwen2 | Self::Qwen3 => WindowKind::EachLayer,
        }
    }
}

/// A language model of any family. Call [`ModelConfig::validate`] before use. After that, no
/// product of the sizes of one tensor and no byte count of the model overflows 64 bits.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture.
    pub family: Family,
    /// V: rows of the embedding.
    pub vocab_size: usize,
    /// C: width of the residual stream.
    pub hidden_size: usize,
    /// L: number of layers.
    pub layer_count: usize,
    /// Hq: query heads.
    pub query_heads: usize,
    /// Hkv: key and value heads. Divides `query_heads`.
    pub kv_heads: usize,
    /// D: size of one head. Not always `hidden_size / query_heads`.
    pub head_dim: usize,
    /// F: width inside the MLP.
    pub intermediate_size: usize,
    /// Maximum sequence length. For GPT-2, the rows of the position embedding.
    pub max_positions: usize,
    /// Added to the variance (or mean square) in every norm.
    pub norm_eps: f64,
    /// Whether the head shares the embedding's weight.
    pub tied_embeddings: bool,
    /// Rotary positions. `None` for GPT-2, which learns its positions.
    pub rotary: Option<Rotary>,
    /// Whether query, key and value have a bias.
    pub qkv_bias: bool,
    /// Whether the projection after attention has a bias.
    pub attention_output_bias: bool,
    /// Whether the projections of the MLP have a bias.
    pub mlp_bias: bool,
    /// The activation of the MLP, or of its gate if it has one.
    pub activation: ActivationFunction,
    /// The sliding window of some layers. Sequences that fit in it use full attention.
    pub sliding_window: Option<SlidingWindow>,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// LoRA adapters. The other weights are then frozen.
    pub adapters: Option<Adapters>,
    /// The storage format of frozen projections.
    pub base: BaseFormat,
}

/// Hard limits, above any existing model.
pub(crate) mod limit {
    pub(super) const LAYERS: usize = 65_535;
    pub(super) const HIDDEN: usize = 1 << 20;
    pub(super) const INTERMEDIATE: usize = 1 << 22;
    pub(super) const VOCAB: usize = 1 << 24;
    pub(super) const HEADS: usize = 1 << 12;
    pub(super) const HEAD_DIM: usize = 256;
    pub(crate) const POSITIONS: usize = 1 << 27;
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
        if let Some(rotary) = &self.rotary {
            rotary.validate(self.head_dim)?;
        }
        self.validate_family()?;
        let count = self.parameter_count_wide();
        check(count <= limit::PARAMETERS, "parameter count", count, || {
            format!("at most {}", limit::PARAMETERS)
        })
    }

    fn validate_window(&self) -> Result<(), ModelError> {
        let Some(window) = &self.sliding_window else {
            return Ok(());
        };
        window.validate(self.layer_count)?;
        let family = self.family;
        check(family.window() != WindowKind::None, "sliding_window", window.tokens, || {
            format!("none for {}", family.model_type())
        })?;
        let is_of_all = window.only_from(self.layer_count) == Some(0);
        check(
            family.window() != WindowKind::AllLayers || is_of_all,
            "layers with a sliding window",
            format!("{:?}", window.layers),
            || format!("all layers for {}", family.model_type()),
        )
    }

    /// Checks the values that transformers fixes for each family. Other values could not be saved.
    fn validate_family(&self) -> Result<(), ModelError> {
        let family = self.family;
        let fixed = |field, value: bool, wanted: bool| {
            check(value == wanted, field, value, || format!("{wanted} for {}", family.model_type()))
        };
        fixed("rotary", self.rotary.is_some(), family != Family::Gpt2)?;
        let share = self.rotary.as_ref().map_or(1.0, |rotary| rotary.share);
        check(share == 1.0 || family == Family::Phi3, "rotary share", share, || {
            format!("1 for {}", family.model_type())
        })?;
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
                // transformers requires this even if head_dim is given.
                check(
                    self.hidden_size.is_multiple_of(self.query_heads),
                    "hidden_size",
                    self.hidden_size,
                    || format!("a multiple of query_heads ({}) for llama", self.query_heads),
                )
            }
            Family::Mistral | Family::Phi3 => {
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

    /// Maximum length of generated text: up to this length, positions are independent of the
    /// sequence length.
    pub fn text_positions(&self) -> usize {
        let rotary = self.rotary.as_ref();
        let steady = rotary.and_then(|rotary| rotary.steady_positions(self.max_positions));
        steady.unwrap_or(self.max_positions).min(self.max_positions)
    }

    /// A message about the frequencies used for sequences of this many tokens, if they depend on
    /// the length.
    pub fn rotary_words(&self, sequence: usize) -> Option<String> {
        self.rotary.as_ref()?.words(self.max_positions, sequence)
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
        // `validate` limits every factor, so this stays far below 2^64.
        self.layer_parameter_count_wide() as u64
    }

    /// Number of parameters. Tied parameters count once. For a validated config.
    pub fn parameter_count(&self) -> u64 {
        u64::try_from(self.parameter_count_wide()).unwrap_or(u64::MAX)
    }

    fn layer_parameter_count_wide(&self) -> u128 {
        let [hidden, inner] = [self.hidden_size, self.intermediate_size].map(|size| size as u128);
        let head_dim = self.head_dim as u128;
        let query = self.query_heads as u128 * head_dim;
        let qkv = query + 2 * self.kv_heads as u128 * head_dim;
        // GPT-2's MLP has up and down projections. The others also have a gate.
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

pub(crate) fn check(
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

pub(crate) fn within(field: &'static str, value: usize, max: usize) -> Result<(), ModelError> {
    check((1..=max).contains(&value), field, value, || format!("from 1 to {max}"))
}

pub(crate) fn positive(field: &'static str, value: f64, max: f64) -> Result<(), ModelError> {
    // NaN fails both comparisons.
    check(value > 0.0 && value <= max, field, value, || format!("greater than 0 and at most {max}"))
}
