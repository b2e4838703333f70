//! Reads config.json into a [`ModelConfig`], for files of transformers 4 and 5.

use std::path::Path;

use serde_json::{Map, Value};

use super::config_fields::{Fields, dropout, left_behind, show};
use super::quantization::Quantization;
use super::rope_json;
use super::strict_json::{parse, read_capped};
use crate::BaseFormat;
use crate::error::clip;
use crate::{Family, ModelConfig, ModelError, SlidingWindow};
use storm_graph::ActivationFunction;

const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A config.json: the model and all original fields, so that saving can preserve fields that STORM
/// does not use.
#[derive(Debug, Clone)]
pub struct HfConfig {
    /// The model.
    pub model: ModelConfig,
    /// All fields of the file.
    pub original: Map<String, Value>,
}

impl HfConfig {
    /// Reads and checks a config.json.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let bytes = read_capped(path, "config.json", CONFIG_BYTES_MAX)?;
        let original: Map<String, Value> = parse(path, &bytes)?;
        Ok(Self { model: model_config(&original)?, original })
    }

    /// Ignored fields that a user may have set in order to change something.
    pub fn left_behind(&self) -> Vec<&str> {
        left_behind(&self.original)
    }

    /// The format of quantized weights. `None` if the weights are not quantized.
    pub fn quantization(&self) -> Option<Quantization> {
        Quantization::of_config(&self.original).ok().flatten()
    }

    /// The dropout fields of the config and their rates. STORM trains without dropout.
    pub fn dropout(&self) -> Vec<(&'static str, f64)> {
        dropout(&self.original)
    }
}

/// The model described by the fields of a config.json.
pub(super) fn model_config(map: &Map<String, Value>) -> Result<ModelConfig, ModelError> {
    // Rejected first, whatever the architecture.
    if map.get("auto_map").is_some_and(|value| !value.is_null()) {
        return Err(ModelError::RemoteCode { supported: supported() });
    }
    let quantization = Quantization::of_config(map)?;
    let family = family(map)?;
    if let Some(quantization) = quantization.filter(|_| family == Family::Gpt2) {
        return Err(ModelError::Quantized { method: format!("{quantization} of GPT-2") });
    }
    let fields = Fields::new(map, "", family);
    for (field, wanted) in [
        ("is_encoder_decoder", false),
        ("add_cross_attention", false),
        ("tie_encoder_decoder", false),
    ] {
        fields.must_be(field, wanted)?;
    }
    for field in ["pruned_heads", "per_layer_config"] {
        let is_empty = |value: &Value| value.as_object().is_some_and(Map::is_empty);
        if let Some(value) = fields.get(field).filter(|value| !is_empty(value)) {
            return Err(fields.refuse(field, value, "STORM needs all layers to be alike"));
        }
    }
    // Both were handled above. This marks them as known for `refuse_unknown`.
    fields.raw("auto_map");
    fields.raw("quantization_config");
    let model = match family {
        Family::Gpt2 => gpt2(&fields)?,
        _ => llama_like(&fields, family)?,
    };
    fields.refuse_unknown()?;
    model.validate()?;
    Ok(model)
}

fn supported() -> String {
    Family::ALL.map(Family::architecture).join(", ")
}

fn family(map: &Map<String, Value>) -> Result<Family, ModelError> {
    let refuse =
        |found: String| ModelError::UnsupportedArchitecture { found, supported: supported() };
    let by_type = match map.get("model_type") {
        None | Some(Value::Null) => None,
        Some(value) => {
            let known = |family: &Family| value.as_str() == Some(family.model_type());
            let family = Family::ALL.into_iter().find(known);
            Some(family.ok_or_else(|| refuse(format!("model_type {}", show(value))))?)
        }
    };
    let name = match map.get("architectures") {
        None | Some(Value::Null) => None,
        Some(Value::Array(names)) if names.is_empty() => None,
        Some(Value::Array(names)) if names.len() == 1 && names[0].is_string() => names[0].as_str(),
        Some(value) => return Err(refuse(format!("architectures ({})", show(value)))),
    };
    let by_architecture = match name {
        None => None,
        Some(name) => {
            // Models saved without a head have the same weights if embeddings are tied.
            let bare = |family: &Family| {
                let full = family.architecture();
                let stem =
                    full.strip_suffix("ForCausalLM").or_else(|| full.strip_suffix("LMHeadModel"));
                stem.is_some_and(|stem| name.strip_prefix(stem) == Some("Model"))
            };
            let known = |family: &Family| name == family.architecture() || bare(family);
            let family = Family::ALL.into_iter().find(known);
            Some(family.ok_or_else(|| refuse(format!("architecture \"{}\"", clip(name))))?)
        }
    };
    match (by_type, by_architecture) {
        (Some(a), Some(b)) if a != b => Err(refuse(format!(
            "model_type {} together with architecture {}",
            a.model_type(),
            b.architecture()
        ))),
        (Some(family), _) | (None, Some(family)) => Ok(family),
        (None, None) => Err(refuse("a file without model_type and architectures".into())),
    }
}

/// The activations of GPT-2 by their transformers names. The first is the default.
const GPT2_ACTIVATIONS: &[(&str, ActivationFunction)] = &[
    ("gelu_new", ActivationFunction::GeluTanh),
    ("gelu_pytorch_tanh", ActivationFunction::GeluTanh),
    ("gelu_fast", ActivationFunction::GeluTanh),
    ("gelu", ActivationFunction::Gelu),
    ("relu", ActivationFunction::Relu),
    ("silu", ActivationFunction::Silu),
    ("swish", ActivationFunction::Silu),
];

/// The activations of gated units. The first is the default.
const GATED_ACTIVATIONS: &[(&str, ActivationFunction)] = &[
    ("silu", ActivationFunction::Silu),
    ("swish", ActivationFunction::Silu),
    ("gelu", ActivationFunction::Gelu),
    ("gelu_new", ActivationFunction::GeluTanh),
    ("gelu_pytorch_tanh", ActivationFunction::GeluTanh),
    ("gelu_fast", ActivationFunction::GeluTanh),
    ("relu", ActivationFunction::Relu),
];

/// The name of an activation in a saved config.
pub(super) fn activation_name(activation: ActivationFunction) -> &'static str {
    let name = GPT2_ACTIVATIONS.iter().find(|(_, known)| *known == activation);
    name.map_or("silu", |(name, _)| name)
}

fn gpt2(fields: &Fields<'_>) -> Result<ModelConfig, ModelError> {
    fields.must_be("scale_attn_weights", true)?;
    fields.must_be("scale_attn_by_inverse_layer_idx", false)?;
    fields.must_be("reorder_and_upcast_attn", false)?;
    let hidden_size = fields.needed_size("n_embd")?;
    let query_heads = fields.needed_size("n_head")?;
    Ok(ModelConfig {
        family: Family::Gpt2,
        vocab_size: fields.needed_size("vocab_size")?,
        hidden_size,
        layer_count: fields.needed_size("n_layer")?,
        query_heads,
        kv_heads: query_heads,
        head_dim: implied_head_dim(hidden_size, query_heads)?,
        // Saturated values fail validation.
        intermediate_size: fields.size("n_inner")?.unwrap_or(hidden_size.saturating_mul(4)),
        max_positions: fields.size("n_positions")?.unwrap_or(1024),
        norm_eps: fields.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        tied_embeddings: fields.flag("tie_word_embeddings", true)?,
        rotary: None,
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        activation: fields.one_of("activation_function", GPT2_ACTIVATIONS)?,
        sliding_window: None,
        initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
        adapters: None,
        base: BaseFormat::Computed,
    })
}

fn llama_like(fields: &Fields<'_>, family: Family) -> Result<ModelConfig, ModelError> {
    let activation = fields.one_of("hidden_act", GATED_ACTIVATIONS)?;
    // Leftovers in published files from other variants of these families.
    fields.must_be("use_mrope", false)?;
    fields.must_be("rope_interleaved", false)?;
    let hidden_size = fields.needed_size("hidden_size")?;
    let query_heads = fields.needed_size("num_attention_heads")?;
    let max_positions = fields.size("max_position_embeddings")?.unwrap_or(match family {
        Family::Llama => 2048,
        Family::Mistral => 131_072,
        Family::Phi3 => 4096,
        _ => 32_768,
    });
    // transformers' default for an absent field differs by family. Null always means all heads.
    let kv_heads =
        match (fields.size("num_key_value_heads")?, fields.raw("num_key_value_heads"), family) {
            (Some(heads), ..) => heads,
            (None, Some(_), _) | (None, None, Family::Llama | Family::Phi3) => query_heads,
            (None, None, Family::Mistral) => 8,
            (None, None, _) => 32,
        };
    let head_dim = match (fields.size("head_dim")?, family) {
        (Some(head_dim), _) => head_dim,
        (None, Family::Qwen3) => 128,
        (None, _) => implied_head_dim(hidden_size, query_heads)?,
    };
    let has_attention_bias = matches!(family, Family::Llama | Family::Qwen3);
    let attention_bias = has_attention_bias && fields.flag("attention_bias", false)?;
    match family {
        Family::Mistral | Family::Phi3 => fields.must_be("attention_bias", false)?,
        // Its bias is not optional, and transformers ignores the field.
        Family::Qwen2 => drop(fields.raw("attention_bias")),
        _ => {}
    }
    let mlp_bias = family == Family::Llama && fields.flag("mlp_bias", false)?;
    if family != Family::Llama {
        fields.must_be("mlp_bias", false)?;
    }
    let layer_count = fields.needed_size("num_hidden_layers")?;
    let norm_eps = if family == Family::Phi3 { 1e-5 } else { 1e-6 };
    Ok(ModelConfig {
        family,
        vocab_size: fields.needed_size("vocab_size")?,
        hidden_size,
        layer_count,
        query_heads,
        kv_heads,
        head_dim,
        intermediate_size: fields.needed_size("intermediate_size")?,
        max_positions,
        norm_eps: fields.number("rms_norm_eps")?.unwrap_or(norm_eps),
        tied_embeddings: fields.flag("tie_word_embeddings", false)?,
        rotary: Some(rope_json::read(fields, family, max_positions)?),
        qkv_bias: attention_bias || family == Family::Qwen2,
        attention_output_bias: attention_bias,
        mlp_bias,
        activation,
        sliding_window: sliding_window(fields, family, layer_count)?,
        initializer_range: fields.number("initializer_range")?.unwrap_or(0.02),
        adapters: None,
        base: BaseFormat::Computed,
    })
}

fn implied_head_dim(hidden_size: usize, query_heads: usize) -> Result<usize, ModelError> {
    match hidden_size.checked_rem(query_heads) {
        Some(0) => Ok(hidden_size / query_heads),
        Some(_) => Err(ModelError::InvalidConfig {
            field: "hidden_size",
            value: hidden_size.to_string(),
            rule: format!(
                "a multiple of the number of heads ({query_heads}) where head_dim is not given"
            ),
        }),
        None => Err(ModelError::InvalidConfig {
            field: "query_heads",
            value: "0".into(),
            rule: "at least 1".into(),
        }),
    }
}

/// The active window and its layers.
fn sliding_window(
    fields: &Fields<'_>,
    family: Family,
    layer_count: usize,
) -> Result<Option<SlidingWindow>, ModelError> {
    let given = fields.size("sliding_window")?;
    let is_absent = fields.raw("sliding_window").is_none();
    let types = layer_types(fields, layer_count)?;
    let refuse_types = |advice| {
        let value = fields.raw("layer_types").unwrap_or(&Value::Null);
        Err(fields.refuse("layer_types", value, advice))
    };
    match family {
        Family::Mistral | Family::Phi3 => {
            // transformers uses 4096 for Mistral if the field is absent. Null disables the window.
            let window = if is_absent && family == Family::Mistral { Some(4096) } else { given };
            let is_windowed = |types: &Vec<bool>| types.iter().all(|sliding| *sliding);
            if types.as_ref().is_some_and(|types| window.is_some() && !is_windowed(types)) {
                return refuse_types("the window of these models is that of all layers");
            }
            if types.is_some_and(|types| window.is_none() && types.contains(&true)) {
                return refuse_types("there is no `sliding_window` for it");
            }
            Ok(window.map(|tokens| SlidingWindow::from_layer(tokens, 0, layer_count)))
        }
        Family::Qwen2 | Family::Qwen3 => {
            let is_on = fields.flag("use_sliding_window", false)?;
            let first = fields.size("max_window_layers")?.unwrap_or(28);
            let window = if is_absent { Some(4096) } else { given }.filter(|_| is_on);
            match (window, types) {
                (None, Some(types)) if types.contains(&true) => refuse_types(
                    "there is no window: `use_sliding_window` is false or `sliding_window` null",
                ),
                (None, _) => Ok(None),
                (Some(tokens), Some(types)) => Ok(SlidingWindow::of_layers(tokens, types)),
                (Some(tokens), None) if first < layer_count => {
                    Ok(Some(SlidingWindow::from_layer(tokens, first, layer_count)))
                }
                (Some(_), None) => Ok(None),
            }
        }
        Family::Llama | Family::Gpt2 => {
            if given.is_some() {
                let value = fields.raw("sliding_window").unwrap_or(&Value::Null);
                let advice = "llama models have none; remove it or set it to null";
                return Err(fields.refuse("sliding_window", value, advice));
            }
            if types.is_some_and(|types| types.contains(&true)) {
                return refuse_types("llama models have full attention only");
            }
            Ok(None)
        }
    }
}

/// From `layer_types`: whether each layer has a window. `None` if the field is absent.
fn layer_types(fields: &Fields<'_>, layer_count: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(value) = fields.get("layer_types") else {
        return Ok(None);
    };
    let refuse = |advice| Err(fields.refuse("layer_types", value, advice));
    let Some(types) = value.as_array() else {
        return refuse("it must be a list");
    };
    if types.len() != layer_count {
        return refuse("it must name one type for each layer");
    }
    let is_windowed = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => Some(true),
        Some("full_attention") => Some(false),
        _ => None,
    };
    match types.iter().map(is_windowed).collect() {
        Some(types) => Ok(Some(types)),
        None => refuse("STORM supports full_attention and sliding_attention"),
    }
}
