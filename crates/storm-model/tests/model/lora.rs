//! Adapters: which modules they are for, and PEFT's directories in and out.

use crate::support::tiny;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use storm_model::{
    AdapterDirectory, Adapters, Family, IfExists, LoraOptions, ModelConfig, ParameterSource,
    Targets, save_adapter,
};

const FAMILIES: [Family; 6] =
    [Family::Gpt2, Family::Llama, Family::Mistral, Family::Phi3, Family::Qwen2, Family::Qwen3];

fn adapted(config: &ModelConfig, options: LoraOptions) -> ModelConfig {
    let adapters = Adapters::new(config, options).expect("adapters that fit");
    ModelConfig { adapters: Some(adapters), ..config.clone() }
}

/// Any value of a parameter, by its name and place.
fn value(name: &str, place: usize) -> f32 {
    let seed: usize = name.bytes().map(usize::from).sum();
    (seed * 31 + place * 17) as f32 % 23.0 / 7.0 - 1.5
}

fn save(config: &ModelConfig, path: &Path) {
    save_adapter(path, config, Some("base"), IfExists::Refuse, |spec, dest| {
        for (place, dest) in dest.iter_mut().enumerate() {
            *dest = value(&spec.name, place);
        }
        Ok(())
    })
    .expect("saved");
}

#[test]
fn what_is_saved_is_read_back() {
    let folder = tempfile::TempDir::new().expect("a folder");
    for family in FAMILIES {
        let base = tiny(family);
        let config = adapted(&base, LoraOptions::new(2, 3.0));
        let path = folder.path().join(format!("{family:?}"));
        save(&config, &path);
        let adapter = AdapterDirectory::open(&path).expect("an adapter");
        assert_eq!(adapter.base(), Some("base"));
        let again = adapter.apply_to(&base).expect("it fits");
        let (wanted, found) = (config.adapters.expect("some"), again.adapters.expect("some"));
        assert_eq!(found.specs(&base), wanted.specs(&base));
        for layer in 0..base.layer_count {
            assert_eq!(found.layer(layer), wanted.layer(layer));
        }
        for spec in wanted.specs(&base) {
            let mut values = vec![0f32; spec.element_count()];
            adapter.load(&spec, &mut values).expect("read");
            let is_same =
                values.iter().enumerate().all(|(place, v)| *v == value(&spec.name, place));
            assert!(is_same, "{}", spec.name);
        }
    }
}

#[test]
fn names_are_those_of_peft() {
    let config = adapted(
        &tiny(Family::Llama),
        LoraOptions {
            targets: Targets::Names(vec!["v_proj".to_owned(), "mlp.up_proj".to_owned()]),
            rank_pattern: BTreeMap::from([(r"layers\.1\..*v_proj".to_owned(), 3)]),
            ..LoraOptions::new(2, 3.0)
        },
    );
    let adapters = config.adapters.as_ref().expect("some");
    let specs = adapters.specs(&config);
    let names: Vec<&str> =
        specs.iter().take(4).flat_map(|s| &s.pieces).map(|p| p.hf_name.as_str()).collect();
    let prefix = "base_model.model.model.layers.0";
    let expected = [
        "self_attn.v_proj.lora_A",
        "self_attn.v_proj.lora_B",
        "mlp.up_proj.lora_A",
        "mlp.up_proj.lora_B",
    ]
    .map(|name| format!("{prefix}.{name}.weight"));
    assert_eq!(names, expected);
    let ranks: Vec<usize> =
        (0..3).map(|layer| adapters.layer(layer).linears[0].slices[0].rank).collect();
    assert_eq!(ranks, [2, 3, 2]);
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let base = tiny(Family::Qwen2);
    let check = |options: LoraOptions, part: &str| {
        let error = Adapters::new(&base, options).expect_err("it does not fit").to_string();
        assert!(error.contains(part), "{part} is not in: {error}");
    };
    let named = |names: &[&str]| LoraOptions {
        targets: Targets::Names(names.iter().map(|&name| name.to_owned()).collect()),
        ..LoraOptions::new(2, 3.0)
    };
    let saving = |name: &str| LoraOptions {
        modules_to_save: vec![name.to_owned()],
        ..LoraOptions::new(2, 3.0)
    };
    check(named(&["q_proj", "c_attn"]), "\"c_attn\" matches no module");
    check(named(&["c_attn"]), "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj");
    check(named(&["embed_tokens"]), "`model.embed_tokens` cannot have an adapter");
    check(named(&["input_layernorm"]), "is not a projection");
    check(LoraOptions::new(13, 3.0), "rank 13 is larger than");
    check(LoraOptions::new(0, 3.0), "rank is 0");
    check(LoraOptions::new(2, f64::NAN), "alpha is NaN");
    check(saving("embed_tokens"), "stays frozen");
    check(saving("q_proj"), "must name all of");
    check(saving("nothing"), "\"nothing\" matches no module");
    let two = BTreeMap::from([("q_proj".to_owned(), 2), (r".*_proj".to_owned(), 3)]);
    check(LoraOptions { rank_pattern: two, ..LoraOptions::new(2, 3.0) }, "two rank patterns");
    let pattern = Targets::Pattern("(?=look)".to_owned());
    check(LoraOptions { targets: pattern, ..LoraOptions::new(2, 3.0) }, "look-around");
}

/// A saved adapter with some fields of its config changed.
fn changed(fields: Value) -> Result<ModelConfig, String> {
    let folder = tempfile::TempDir::new().expect("a folder");
    let base = tiny(Family::Llama);
    let path = folder.path().join("adapter");
    save(&adapted(&base, LoraOptions::new(2, 3.0)), &path);
    let file = path.join("adapter_config.json");
    let text = fs::read_to_string(&file).expect("a config");
    let mut config: Value = serde_json::from_str(&text).expect("an object");
    for (name, value) in fields.as_object().expect("fields") {
        config[name] = value.clone();
    }
    fs::write(&file, config.to_string()).expect("a config");
    let adapter = AdapterDirectory::open(&path).map_err(|error| error.to_string())?;
    adapter.apply_to(&base).map_err(|error| error.to_string())
}

#[test]
fn fields_that_change_the_result_are_refused_by_name() {
    for fields in [
        json!({"use_dora": true}),
        json!({"peft_type": "IA3"}),
        json!({"task_type": "SEQ_CLS"}),
        json!({"bias": "all"}),
        json!({"lora_bias": true}),
        json!({"layers_to_transform": [0]}),
        json!({"layer_replication": [[0, 2]]}),
        json!({"exclude_modules": ["q_proj"]}),
        json!({"init_lora_weights": "pissa"}),
        json!({"target_parameters": ["x"]}),
        json!({"some_new_thing": 3}),
        json!({"r": "four"}),
        json!({"r": -1}),
        json!({"lora_alpha": null}),
        json!({"target_modules": [1]}),
        json!({"target_modules": null}),
        json!({"rank_pattern": []}),
    ] {
        let error = changed(fields.clone()).expect_err("refused");
        let name = fields.as_object().and_then(|o| o.keys().next().cloned()).expect("a name");
        assert!(error.contains(&format!("`{name}` is")), "{fields}: {error}");
    }
}

#[test]
fn fields_without_effect_are_ignored() {
    for fields in [
        json!({"peft_version": "9.9", "revision": "main", "inference_mode": false}),
        json!({"lora_dropout": 0.1, "init_lora_weights": "gaussian", "loftq_config": {"a": 1}}),
        json!({"use_dora": false, "layers_to_transform": null, "new_thing": null, "other": {}}),
        json!({"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "c_attn"]}),
    ] {
        changed(fields.clone()).unwrap_or_else(|error| panic!("{fields}: {error}"));
    }
}

#[test]
fn adapters_of_other_models_are_refused() {
    for (fields, part) in [
        (json!({"r": 3}), "is it for another base?"),
        (json!({"target_modules": ["q_proj"]}), "has no place for"),
        (json!({"modules_to_save": ["lm_head"]}), "it has no tensor"),
        (json!({"target_modules": ["c_attn"]}), "matches no module"),
    ] {
        let error = changed(fields).expect_err("refused");
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    let folder = tempfile::TempDir::new().expect("a folder");
    let path = folder.path().join("adapter");
    save(&adapted(&tiny(Family::Llama), LoraOptions::new(2, 3.0)), &path);
    let adapter = AdapterDirectory::open(&path).expect("an adapter");
    adapter.apply_to(&tiny(Family::Gpt2)).expect_err("another family");
    fs::rename(path.join("adapter_model.safetensors"), path.join("adapter_model.bin"))
        .expect("renamed");
    let error = AdapterDirectory::open(&path).expect_err("a pickle").to_string();
    assert!(error.contains("adapter_model.bin"), "{error}");
}
