//! What config.json may say, and what it may not.

use serde_json::{Map, Value, json};
use storm_graph::ActivationFunction;
use storm_model::{
    Family, HfConfig, ModelConfig, ModelError, RotaryScaling, SlidingWindow, end_of_text,
};
use tempfile::TempDir;

use crate::support::{Random, frugal, save_tiny, tiny, write_anew};

fn read(bytes: &[u8]) -> Result<ModelConfig, ModelError> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, bytes).unwrap();
    frugal(|| HfConfig::read(&path)).map(|config| config.model)
}

/// A small config.json as transformers 4 writes it.
fn base(family: Family) -> Map<String, Value> {
    let value = match family {
        Family::Gpt2 => json!({
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 29, "n_embd": 12,
            "n_layer": 3, "n_head": 4, "n_positions": 64, "n_ctx": 64, "activation_function": "gelu_new",
            "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        }),
        _ => json!({
            "model_type": family.model_type(), "architectures": [family.architecture()], "vocab_size": 29,
            "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 17, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "rope_scaling": null, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1,
            "eos_token_id": [2, 3], "pretraining_tp": 1, "attention_dropout": 0.0, "head_dim": 4,
        }),
    };
    let Value::Object(map) = value else { unreachable!() };
    map
}

fn with(family: Family, changes: Value) -> Result<ModelConfig, ModelError> {
    let mut map = base(family);
    map.extend(changes.as_object().unwrap().clone());
    read(Value::Object(map).to_string().as_bytes())
}

fn without(family: Family, field: &str) -> Result<ModelConfig, ModelError> {
    let mut map = base(family);
    map.remove(field).unwrap();
    read(Value::Object(map).to_string().as_bytes())
}

/// What published files have that no model reads.
#[test]
fn fields_that_change_nothing_are_passed_over() {
    let left = json!({
        "n_special": 0, "predict_special_tokens": true, "_num_labels": 2, "is_llama_config": true,
        "output_past": true, "transformers.js_config": {"dtype": "q4"}, "license": null,
        "attention_dropout": 0.1, "resid_pdrop": 0.0,
    });
    for family in Family::ALL {
        assert_eq!(with(family, left.clone()).unwrap(), with(family, json!({})).unwrap());
    }
    let mut map = base(Family::Gpt2);
    map.extend(left.as_object().unwrap().clone());
    map.remove("attn_pdrop");
    map.remove("embd_pdrop");
    let model = with(Family::Gpt2, json!({})).unwrap();
    let config = storm_model::HfConfig { model, original: map };
    assert_eq!(
        config.left_behind(),
        [
            "_num_labels",
            "is_llama_config",
            "n_special",
            "output_past",
            "predict_special_tokens",
            "transformers.js_config",
        ]
    );
    assert_eq!(config.dropout(), [("attention_dropout", 0.1)]);
    // Inside of another object nothing is known to be harmless.
    let inner = json!({"rope_scaling": {"rope_type": "default", "n_special": 1}});
    with(Family::Llama, inner).unwrap_err();
}

#[test]
fn every_family_is_read() {
    for family in Family::ALL {
        let config = with(family, json!({})).unwrap();
        assert_eq!(config.family, family);
        assert_eq!(config.qkv_bias, matches!(family, Family::Gpt2 | Family::Qwen2));
        assert_eq!(config.tied_embeddings, family == Family::Gpt2);
        assert_eq!(
            config.rotary.map(|rotary| rotary.theta),
            (family != Family::Gpt2).then_some(1e6)
        );
        // Absent means 4096 to transformers, for Mistral alone.
        let window = (family == Family::Mistral).then(|| SlidingWindow::from_layer(4096, 0, 3));
        assert_eq!(config.sliding_window, window);
        assert_eq!(config.intermediate_size, if family == Family::Gpt2 { 48 } else { 17 });
    }
}

#[test]
fn a_written_config_is_read_again() {
    for family in Family::ALL {
        let folder = TempDir::new().unwrap();
        let mut config = tiny(family);
        match family {
            Family::Qwen2 => config.sliding_window = Some(SlidingWindow::from_layer(33, 2, 3)),
            Family::Qwen3 => {
                config.sliding_window = SlidingWindow::of_layers(33, [true, false, true])
            }
            _ => {}
        }
        save_tiny(&folder.path().join("model"), &config);
        let read = HfConfig::read(&folder.path().join("model/config.json")).unwrap();
        assert_eq!(read.model, config);
    }
}

/// One token, several, none; what no token can be is passed over.
#[test]
fn the_ends_of_a_text_are_found() {
    let ends = |value: Value| {
        let mut map = base(Family::Llama);
        map.insert("eos_token_id".to_owned(), value);
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, Value::Object(map).to_string()).unwrap();
        end_of_text(folder.path(), &HfConfig::read(&path).unwrap()).unwrap()
    };
    assert_eq!(ends(json!([2, 3])), [2, 3]);
    assert_eq!(ends(json!(28)), [28]);
    for none in
        [json!(null), json!([]), json!(29), json!(-1), json!("</s>"), json!(1e300), json!([[2]])]
    {
        assert!(ends(none).is_empty());
    }
}

/// As `transformers.generate` has it: its own file first.
#[test]
fn the_generation_config_says_what_ends_a_text() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("config.json");
    let mut map = base(Family::Llama);
    map.insert("eos_token_id".to_owned(), json!(2));
    std::fs::write(&path, Value::Object(map).to_string()).unwrap();
    let config = HfConfig::read(&path).unwrap();
    let ends = |text: &str| {
        std::fs::write(folder.path().join("generation_config.json"), text).unwrap();
        end_of_text(folder.path(), &config)
    };
    assert_eq!(ends("{\"eos_token_id\": [4, 3, 99]}").unwrap(), [4, 3]);
    assert_eq!(ends("{\"eos_token_id\": null}").unwrap(), [2]);
    assert_eq!(ends("{}").unwrap(), [2]);
    assert!(ends("{").unwrap_err().to_string().contains("generation_config.json"));
}

#[test]
fn rotary_parameters_of_both_versions() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32});
    let old = with(Family::Llama, json!({"rope_scaling": llama3})).unwrap().rotary.unwrap();
    let mut parameters = llama3.as_object().unwrap().clone();
    parameters.insert("rope_theta".into(), json!(5e5));
    let new = with(Family::Llama, json!({"rope_parameters": parameters})).unwrap().rotary.unwrap();
    assert_eq!((old.theta, new.theta), (1e6, 5e5));
    assert_eq!(old.scaling, new.scaling);
    assert!(matches!(old.scaling, RotaryScaling::Llama3 { original_max_positions: 32, .. }));
    let plain = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 777}});
    assert_eq!(with(Family::Qwen3, plain).unwrap().rotary.unwrap().theta, 777.0);
}

#[test]
fn every_scaling_is_read_and_written() {
    let long = json!({"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2, 4], "factor": 4.0,
        "original_max_position_embeddings": 16});
    let su = json!({"type": "su", "short_factor": [1.0], "long_factor": [2.0]});
    for (family, scaling, more) in [
        (Family::Llama, json!({"type": "linear", "factor": 2}), json!({})),
        (Family::Qwen2, json!({"rope_type": "dynamic", "factor": 2.5}), json!({})),
        (Family::Mistral, json!({"rope_type": "yarn", "factor": 4.0}), json!({})),
        (
            Family::Qwen3,
            json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": false,
                "mscale": 0.7, "mscale_all_dim": 1.2, "original_max_position_embeddings": 16}),
            json!({}),
        ),
        (Family::Llama, long.clone(), json!({})),
        (
            Family::Phi3,
            su,
            json!({"partial_rotary_factor": 0.5, "original_max_position_embeddings": 16}),
        ),
    ] {
        let mut changes = more.as_object().unwrap().clone();
        changes.insert("rope_scaling".into(), scaling.clone());
        let config = with(family, Value::Object(changes)).unwrap();
        let rotary = config.rotary.clone().unwrap();
        assert_ne!(rotary.scaling, RotaryScaling::None, "{scaling}");
        let folder = TempDir::new().unwrap();
        save_tiny(&folder.path().join("model"), &config);
        let read = HfConfig::read(&folder.path().join("model/config.json")).unwrap();
        assert_eq!(read.model, config, "{scaling}");
    }
    // Without a factor for cosines and sines, the one that transformers works out.
    let config = with(Family::Llama, json!({"rope_scaling": long})).unwrap();
    let rotary = config.rotary.as_ref().unwrap();
    let RotaryScaling::LongRope { attention_factor, .. } = rotary.scaling else { panic!() };
    assert_eq!(attention_factor, (1.0 + 4f64.ln() / 16f64.ln()).sqrt());
    // Short factors to 16, and no text beyond.
    assert!(config.rotary_words(16).unwrap().contains("short factors"));
    assert!(config.rotary_words(17).unwrap().contains("long factors"));
    assert_eq!((config.text_positions(), config.max_positions), (16, 64));
    let plain = with(Family::Llama, json!({})).unwrap();
    assert_eq!((plain.rotary_words(17), plain.text_positions()), (None, 64));
}

#[test]
fn activations_of_gated_units() {
    for (name, activation) in [
        ("silu", ActivationFunction::Silu),
        ("gelu", ActivationFunction::Gelu),
        ("gelu_pytorch_tanh", ActivationFunction::GeluTanh),
        ("relu", ActivationFunction::Relu),
    ] {
        for family in [Family::Llama, Family::Phi3] {
            let config = with(family, json!({"hidden_act": name})).unwrap();
            assert_eq!(config.activation, activation);
            let folder = TempDir::new().unwrap();
            save_tiny(&folder.path().join("model"), &config);
            let read = HfConfig::read(&folder.path().join("model/config.json")).unwrap();
            assert_eq!(read.model, config);
        }
    }
}

#[test]
fn activations_of_gpt2() {
    for (name, activation) in [
        ("gelu", ActivationFunction::Gelu),
        ("relu", ActivationFunction::Relu),
        ("silu", ActivationFunction::Silu),
        ("gelu_fast", ActivationFunction::GeluTanh),
    ] {
        let config = with(Family::Gpt2, json!({"activation_function": name})).unwrap();
        assert_eq!(config.activation, activation);
        let folder = TempDir::new().unwrap();
        save_tiny(&folder.path().join("model"), &config);
        let read = HfConfig::read(&folder.path().join("model/config.json")).unwrap();
        assert_eq!(read.model, config);
    }
}

#[test]
fn absent_fields_mean_what_they_mean_to_transformers() {
    assert_eq!(without(Family::Llama, "num_key_value_heads").unwrap().kv_heads, 4);
    assert_eq!(without(Family::Llama, "rope_theta").unwrap().rotary.unwrap().theta, 10_000.0);
    assert_eq!(without(Family::Llama, "max_position_embeddings").unwrap().max_positions, 2048);
    assert_eq!(without(Family::Qwen2, "head_dim").unwrap().head_dim, 4);
    assert_eq!(without(Family::Qwen3, "head_dim").unwrap().head_dim, 128);
    assert_eq!(with(Family::Qwen2, json!({"num_key_value_heads": null})).unwrap().kv_heads, 4);
    assert_eq!(
        with(Family::Mistral, json!({"sliding_window": null})).unwrap().sliding_window,
        None
    );
    assert_eq!(with(Family::Gpt2, json!({"n_inner": 20})).unwrap().intermediate_size, 20);
    assert_eq!(without(Family::Llama, "architectures").unwrap().family, Family::Llama);
    assert_eq!(without(Family::Llama, "model_type").unwrap().family, Family::Llama);
    assert_eq!(
        with(Family::Gpt2, json!({"architectures": ["GPT2Model"]})).unwrap().family,
        Family::Gpt2
    );
}

#[test]
fn the_active_window_is_found() {
    let window = |changes: Value| with(Family::Qwen2, changes).unwrap().sliding_window;
    let sliding = |first: usize| -> Vec<&str> {
        (0..3)
            .map(|layer| if layer < first { "full_attention" } else { "sliding_attention" })
            .collect()
    };
    let from = |first| Some(SlidingWindow::from_layer(9, first, 3));
    assert_eq!(window(json!({"sliding_window": 9, "use_sliding_window": false})), None);
    assert_eq!(window(json!({"sliding_window": 9, "use_sliding_window": true})), None);
    assert_eq!(
        window(json!({"sliding_window": 9, "use_sliding_window": true, "max_window_layers": 1})),
        from(1)
    );
    let typed = json!({"sliding_window": 9, "use_sliding_window": true, "layer_types": sliding(2)});
    assert_eq!(window(typed), from(2));
    let full = json!({"sliding_window": 9, "use_sliding_window": true, "max_window_layers": 0, "layer_types": sliding(3)});
    assert_eq!(window(full), None);
    let mixed = ["sliding_attention", "full_attention", "sliding_attention"];
    let mixed = json!({"sliding_window": 9, "use_sliding_window": true, "layer_types": mixed});
    let found = window(mixed).unwrap();
    assert_eq!((found.tokens, found.layers), (9, vec![0..1, 2..3]));
    let all = json!({"sliding_window": 9, "layer_types": sliding(0)});
    assert_eq!(with(Family::Mistral, all).unwrap().sliding_window, from(0));
    assert_eq!(with(Family::Phi3, json!({"sliding_window": 9})).unwrap().sliding_window, from(0));
}

/// Every refusal names the field and says what is supported or what to do.
#[test]
fn refusals() {
    use Family::{Gpt2, Llama, Mistral, Phi3, Qwen2, Qwen3};
    let cases: Vec<(Family, Value, &str)> = vec![
        (Llama, json!({"model_type": "mamba"}), "Qwen3ForCausalLM"),
        (Llama, json!({"model_type": 7}), "model_type 7 is not supported"),
        (
            Llama,
            json!({"architectures": ["MambaForCausalLM"]}),
            "supported architectures: GPT2LMHeadModel",
        ),
        (Llama, json!({"architectures": ["LlamaForSequenceClassification"]}), "LlamaForCausalLM"),
        (Llama, json!({"architectures": ["LlamaForCausalLM", "LlamaModel"]}), "a list of 2"),
        (Llama, json!({"architectures": ["Qwen2ForCausalLM"]}), "together with"),
        (Llama, json!({"auto_map": {"AutoModel": "modeling.Evil"}}), "never does"),
        (Gpt2, json!({"auto_map": "x"}), "auto_map"),
        (Llama, json!({"quantization_config": {"quant_method": "gptq"}}), "gptq"),
        (Llama, json!({"attention_sinks": 4}), "unknown field `attention_sinks`"),
        (Gpt2, json!({"hidden_size": 4}), "unknown field `hidden_size`"),
        (Llama, json!({"a\u{1b}[2J": 4}), "unknown field `a\\u{1b}[2J`"),
        (Llama, json!({"num_hidden_layers": 1_000_000_000}), "layer_count is 1000000000"),
        (Gpt2, json!({"n_layer": 1_000_000_000}), "from 1 to 65535"),
        (Llama, json!({"num_hidden_layers": 0}), "from 1 to"),
        (Llama, json!({"num_hidden_layers": -1}), "whole number"),
        (Llama, json!({"num_hidden_layers": 3.5}), "whole number"),
        (Llama, json!({"num_hidden_layers": "3"}), "\"3\""),
        (Llama, json!({"num_hidden_layers": null}), "missing"),
        (Llama, json!({"num_hidden_layers": u64::MAX}), "from 1 to"),
        (Llama, json!({"num_attention_heads": 0}), "query_heads is 0"),
        (Llama, json!({"num_attention_heads": 0, "head_dim": null}), "query_heads is 0"),
        (Llama, json!({"num_key_value_heads": 0}), "kv_heads is 0"),
        (Gpt2, json!({"n_head": 0}), "query_heads is 0"),
        (Gpt2, json!({"n_head": 5}), "a multiple of the number of heads (5)"),
        (Llama, json!({"num_key_value_heads": 3}), "a divisor of query_heads"),
        (Llama, json!({"hidden_size": 18}), "a multiple of query_heads"),
        (Qwen2, json!({"hidden_size": 18, "head_dim": null}), "where head_dim is not given"),
        (Llama, json!({"hidden_size": 1_u64 << 62}), "hidden_size"),
        (Gpt2, json!({"n_embd": u64::MAX - 3}), "hidden_size"),
        (Llama, json!({"vocab_size": 1_u64 << 40}), "vocab_size"),
        (Llama, json!({"intermediate_size": 0}), "intermediate_size"),
        (Qwen3, json!({"head_dim": 7}), "even"),
        (Qwen3, json!({"head_dim": 258}), "from 1 to 256"),
        (Llama, json!({"rms_norm_eps": 0.0}), "norm_eps"),
        (Llama, json!({"rms_norm_eps": -1e-6}), "norm_eps"),
        (Llama, json!({"rms_norm_eps": "1e-6"}), "must be a number"),
        (Llama, json!({"rope_theta": 0}), "theta"),
        (Llama, json!({"initializer_range": 2.0}), "initializer_range"),
        (Llama, json!({"max_position_embeddings": 1_u64 << 50}), "max_positions"),
        (Llama, json!({"tie_word_embeddings": "yes"}), "true or false"),
        (Llama, json!({"rope_scaling": {"rope_type": "proportional"}}), "\"proportional\""),
        (Llama, json!({"rope_scaling": {"type": "linear"}}), "`factor` is missing"),
        (Llama, json!({"rope_scaling": {"type": "dynamic", "factor": 0.5}}), "at least 1"),
        (
            Llama,
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}}),
            "max_position_embeddings, or left out",
        ),
        (
            Llama,
            json!({"rope_scaling": {"type": "yarn", "factor": 2.0, "attn_factor": 1.0}}),
            "rope_scaling.attn_factor",
        ),
        (
            Llama,
            json!({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0]}}),
            "a list of 2, one for each pair",
        ),
        (
            Llama,
            json!({"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}}),
            "a list of numbers",
        ),
        (
            Llama,
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            "rope_parameters.full_attention",
        ),
        (Phi3, json!({"rope_scaling": {"type": "linear", "factor": 2.0}}), "default and longrope"),
        (Phi3, json!({"partial_rotary_factor": 0.1}), "even, unless"),
        (Llama, json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), "whole heads"),
        (Llama, json!({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}), "low_freq_factor"),
        (
            Llama,
            json!({"rope_scaling": {"rope_type": "default", "mystery": 4.0}}),
            "rope_scaling.mystery",
        ),
        (Llama, json!({"rope_scaling": [1]}), "must be an object"),
        (
            Llama,
            json!({"rope_parameters": {"rope_type": "llama3", "factor": 0.5, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0}}),
            "at least 1",
        ),
        (
            Llama,
            json!({"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0,
            "high_freq_factor": 4.0}}),
            "greater than low_freq_factor",
        ),
        (Llama, json!({"partial_rotary_factor": 0.5}), "whole heads"),
        (Llama, json!({"hidden_act": "quick_gelu"}), "silu, swish, gelu, gelu_new"),
        (Gpt2, json!({"activation_function": "quick_gelu"}), "gelu_new, gelu_pytorch_tanh"),
        (Gpt2, json!({"scale_attn_weights": false}), "only true"),
        (Gpt2, json!({"scale_attn_by_inverse_layer_idx": true}), "only false"),
        (Gpt2, json!({"reorder_and_upcast_attn": true}), "only false"),
        (Gpt2, json!({"add_cross_attention": true}), "only false"),
        (Llama, json!({"is_encoder_decoder": true}), "only false"),
        (Llama, json!({"pruned_heads": {"0": [1]}}), "alike"),
        (Llama, json!({"per_layer_config": {"0": {"hidden_size": 8}}}), "alike"),
        (Llama, json!({"sliding_window": 9}), "set it to null"),
        (Mistral, json!({"attention_bias": true}), "only false"),
        (Mistral, json!({"sliding_window": 0}), "sliding_window is 0"),
        (Qwen3, json!({"mlp_bias": true}), "only false"),
        (Qwen2, json!({"layer_types": ["full_attention"]}), "one type for each layer"),
        (Qwen2, json!({"layer_types": ["a", "b", "c"]}), "full_attention and sliding_attention"),
        (
            Qwen2,
            json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
            "there is no window",
        ),
        (
            Mistral,
            json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
            "that of all layers",
        ),
        (
            Mistral,
            json!({"sliding_window": null, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
            "no `sliding_window`",
        ),
        (Qwen2, json!({"layer_types": 3}), "must be a list"),
        // Each size is within its limit, the model is not: 2^48 parameters are the most.
        (
            Llama,
            json!({"num_hidden_layers": 65_535, "hidden_size": 1 << 20, "intermediate_size": 1 << 22}),
            "parameter count",
        ),
    ];
    for (family, changes, expected) in cases {
        let shown = changes.to_string();
        let message = with(family, changes).expect_err(&shown).to_string();
        assert!(message.contains(expected), "{shown}\n  says: {message}\n  lacks: {expected}");
        assert!(!message.contains('\u{1b}'), "{message:?}");
    }
    assert!(matches!(with(Llama, json!({"auto_map": {}})), Err(ModelError::RemoteCode { .. })));
    assert!(matches!(with(Llama, json!({"x": 1})), Err(ModelError::UnknownFields { .. })));
    assert!(matches!(
        with(Llama, json!({"model_type": "x"})),
        Err(ModelError::UnsupportedArchitecture { .. })
    ));
    for field in [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    ] {
        assert!(matches!(without(Llama, field), Err(ModelError::MissingField { .. })), "{field}");
    }
}

#[test]
fn files_that_are_not_a_config() {
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    for bytes in [
        b"".as_slice(),
        b"null",
        b"[]",
        b"{",
        b"{\"model_type\":",
        b"{\"rms_norm_eps\": NaN}",
        b"{\"rms_norm_eps\": 1e999}",
        b"\xff\xfe{}",
        b"{\"model_type\": \"\xff\"}",
        deep.as_bytes(),
    ] {
        assert!(
            matches!(read(bytes), Err(ModelError::Json { .. })),
            "{:?}",
            String::from_utf8_lossy(&bytes[..bytes.len().min(40)])
        );
    }
    assert!(matches!(read(b"{}"), Err(ModelError::UnsupportedArchitecture { .. })));
    let huge = vec![b' '; (1 << 20) + 1];
    assert!(matches!(read(&huge), Err(ModelError::TooLarge { .. })));
}

#[test]
fn mutated_configs_never_panic() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("config.json");
    let mut random = Random(1);
    for round in 0..2000 {
        let mut bytes = Value::Object(base(Family::ALL[round % 6])).to_string().into_bytes();
        for _ in 0..=random.below(4) {
            let place = random.below(bytes.len());
            bytes[place] = b"0123456789-.e\"{}[],:ntf\xff\0"[random.below(25)];
        }
        write_anew(&path, &bytes);
        if let Ok(config) = HfConfig::read(&path) {
            config.model.validate().unwrap();
        }
    }
}
