//! Writes a [`ModelConfig`] as config.json, with field names that transformers 4 and 5 both read.

use serde_json::{Map, Value, json};

use super::config_json::{activation_name, model_config};
use super::dtype::WeightDtype;
use super::rope_json;
use crate::{Family, ModelConfig};

/// Fields that [`fresh`] writes under another name. The old names must be removed.
const ALIASES: &[&str] =
    &["rope_parameters", "layer_types", "dtype", "n_ctx", "partial_rotary_factor"];

/// The config.json of a model to save: the original one, updated, or a new one.
pub(super) fn config_json(
    model: &ModelConfig,
    original: Option<&Map<String, Value>>,
    dtype: WeightDtype,
) -> Map<String, Value> {
    let Some(original) = original else {
        return fresh(model, dtype);
    };
    let mut map = original.clone();
    // Saved weights are never quantized, even if the original ones were.
    map.remove("quantization_config");
    if model_config(original).is_ok_and(|described| described == *model) {
        let key = if map.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        map.remove("dtype");
        map.insert(key.into(), dtype.torch_name().into());
        map.insert("architectures".into(), json!([model.family.architecture()]));
        return map;
    }
    // The model was changed after it was read: keep token IDs and similar fields, replace the rest.
    for alias in ALIASES {
        map.remove(*alias);
    }
    map.extend(fresh(model, dtype));
    map
}

fn fresh(model: &ModelConfig, dtype: WeightDtype) -> Map<String, Value> {
    let mut map = Map::new();
    let mut put = |name: &str, value: Value| {
        map.insert(name.into(), value);
    };
    put("architectures", json!([model.family.architecture()]));
    put("model_type", json!(model.family.model_type()));
    put("torch_dtype", json!(dtype.torch_name()));
    put("vocab_size", json!(model.vocab_size));
    put("initializer_range", json!(model.initializer_range));
    put("tie_word_embeddings", json!(model.tied_embeddings));
    put("use_cache", json!(true));
    let Some(rotary) = &model.rotary else {
        put("n_embd", json!(model.hidden_size));
        put("n_layer", json!(model.layer_count));
        put("n_head", json!(model.query_heads));
        put("n_inner", json!(model.intermediate_size));
        put("n_positions", json!(model.max_positions));
        put("layer_norm_epsilon", json!(model.norm_eps));
        put("activation_function", json!(activation_name(model.activation)));
        return map;
    };
    put("hidden_size", json!(model.hidden_size));
    put("num_hidden_layers", json!(model.layer_count));
    put("num_attention_heads", json!(model.query_heads));
    put("num_key_value_heads", json!(model.kv_heads));
    put("head_dim", json!(model.head_dim));
    put("intermediate_size", json!(model.intermediate_size));
    put("max_position_embeddings", json!(model.max_positions));
    put("rms_norm_eps", json!(model.norm_eps));
    put("hidden_act", json!(activation_name(model.activation)));
    if matches!(model.family, Family::Llama | Family::Qwen3) {
        put("attention_bias", json!(model.qkv_bias));
    }
    let window = model.sliding_window.as_ref();
    let tokens = json!(window.map(|window| window.tokens));
    match model.family {
        Family::Llama => put("mlp_bias", json!(model.mlp_bias)),
        Family::Mistral | Family::Phi3 => put("sliding_window", tokens),
        Family::Qwen2 | Family::Qwen3 => {
            put("use_sliding_window", json!(window.is_some()));
            put("sliding_window", tokens);
            let layers = model.layer_count;
            let first = window.map_or(Some(layers), |window| window.only_from(layers));
            put("max_window_layers", json!(first.unwrap_or(layers)));
            if let (Some(window), None) = (window, first) {
                let kind = |layer| match window.has(layer) {
                    true => "sliding_attention",
                    false => "full_attention",
                };
                put("layer_types", (0..layers).map(kind).collect());
            }
        }
        Family::Gpt2 => {}
    }
    rope_json::write(rotary, model.family, &mut map);
    map
}
