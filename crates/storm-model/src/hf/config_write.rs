//! [`ModelConfig`] → config.json, in field names that transformers 4 and 5 both read.

use serde_json::{Map, Value, json};

use super::config_json::model_config;
use super::dtype::WeightDtype;
use crate::{Family, ModelConfig, RotaryScaling};

/// Fields that [`fresh`] writes under another name; the old names must be removed.
const ALIASES: &[&str] =
    &["rope_parameters", "layer_types", "dtype", "n_ctx", "partial_rotary_factor"];

/// The config.json of a model to be saved: the original one if there is one, updated.
pub(super) fn config_json(
    model: &ModelConfig,
    original: Option<&Map<String, Value>>,
    dtype: WeightDtype,
) -> Map<String, Value> {
    let Some(original) = original else {
        return fresh(model, dtype);
    };
    let mut map = original.clone();
    if model_config(original).is_ok_and(|described| described == *model) {
        let key = if map.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        map.remove("dtype");
        map.insert(key.into(), dtype.torch_name().into());
        map.insert("architectures".into(), json!([model.family.architecture()]));
        return map;
    }
    // The model was changed since it was read: keep the token ids and the like, replace its shape.
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
    let Some(rotary) = model.rotary else {
        put("n_embd", json!(model.hidden_size));
        put("n_layer", json!(model.layer_count));
        put("n_head", json!(model.query_heads));
        put("n_inner", json!(model.intermediate_size));
        put("n_positions", json!(model.max_positions));
        put("layer_norm_epsilon", json!(model.norm_eps));
        put("activation_function", json!("gelu_new"));
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
    put("hidden_act", json!("silu"));
    put("rope_theta", json!(rotary.theta));
    put(
        "rope_scaling",
        match rotary.scaling {
            RotaryScaling::None => Value::Null,
            RotaryScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_positions,
            }),
        },
    );
    if matches!(model.family, Family::Llama | Family::Qwen3) {
        put("attention_bias", json!(model.qkv_bias));
    }
    match model.family {
        Family::Llama => put("mlp_bias", json!(model.mlp_bias)),
        Family::Mistral => put("sliding_window", json!(model.sliding_window)),
        Family::Qwen2 | Family::Qwen3 => {
            put("use_sliding_window", json!(model.sliding_window.is_some()));
            put("sliding_window", json!(model.sliding_window));
            let first = if model.sliding_window.is_some() {
                model.first_windowed_layer
            } else {
                model.layer_count
            };
            put("max_window_layers", json!(first));
        }
        Family::Gpt2 => {}
    }
    map
}
