//! Files as other programs leave them: wide weights, wrapped names, adapters, no head.

use std::fs;

use safetensors::tensor::Dtype;
use storm_model::{
    Family, HfDirectory, ModelError, ParameterSource, Remark, load_parameter, parameters,
};

use crate::directory::{Tensors, edit, load_all, model, open};

fn rename(tensors: &mut Tensors, name: impl Fn(&str) -> String) {
    *tensors =
        std::mem::take(tensors).into_iter().map(|(key, tensor)| (name(&key), tensor)).collect();
}

fn said(directory: &HfDirectory) -> String {
    directory.remarks().iter().map(|remark| format!("{remark}\n")).collect()
}

#[test]
fn f64_weights_are_read() {
    for family in [Family::Gpt2, Family::Mistral] {
        let (_folder, path) = model(family);
        let mut count = 0;
        edit(&path, |tensors| {
            count = tensors.len();
            for (dtype, _, data) in tensors.values_mut() {
                let values = data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                // Too little to matter in f32.
                let wide = values.map(|value| f64::from(value) * (1.0 + 1e-12));
                *data = wide.flat_map(f64::to_le_bytes).collect();
                *dtype = Dtype::F64;
            }
        });
        let directory = open(&path).unwrap();
        load_all(&directory).unwrap();
        assert_eq!(directory.remarks(), [Remark::WideWeights { tensors: count }]);
        assert!(said(&directory).contains("rounded once"));
    }
}

#[test]
fn what_wrappers_put_into_names_is_left_out() {
    let deep = |name: &str| name.replace(".h.", "._orig_mod.h.").replace("mlp.", "mlp._orig_mod.");
    type Wrap = Box<dyn Fn(&str) -> String>;
    let wraps: [(Wrap, &str); 5] = [
        (Box::new(|name| format!("_orig_mod.{name}")), "torch.compile"),
        (Box::new(deep), "torch.compile"),
        (Box::new(|name| format!("base_model.model.{name}")), "PEFT"),
        (Box::new(|name| format!("_orig_mod.base_model.model.{name}")), "PEFT"),
        (Box::new(|name| format!("base_model.model._orig_mod.{name}")), "torch.compile"),
    ];
    for family in [Family::Gpt2, Family::Qwen3] {
        for (wrap, by) in &wraps {
            let (_folder, path) = model(family);
            edit(&path, |tensors| rename(tensors, wrap));
            let directory = open(&path).unwrap();
            load_all(&directory).unwrap();
            assert!(said(&directory).contains(by), "{}", said(&directory));
        }
    }
    // The same tensor with and without is ambiguous.
    let (_folder, path) = model(Family::Qwen3);
    edit(&path, |tensors| {
        let tensor = tensors["lm_head.weight"].clone();
        tensors.insert("_orig_mod.lm_head.weight".into(), tensor);
    });
    assert!(matches!(open(&path), Err(ModelError::Index { .. })));
    let (_folder, path) = model(Family::Qwen3);
    assert_eq!(open(&path).unwrap().remarks(), []);
}

#[test]
fn adapters_are_refused_in_words() {
    let refused = |path: &std::path::Path| {
        let error = open(path).unwrap_err();
        assert!(matches!(error, ModelError::Adapter { .. }), "{error}");
        assert!(error.to_string().contains("storm merge"), "{error}");
        error.to_string()
    };
    for part in ["lora_A.default", "lora_B", "base_layer"] {
        let (_folder, path) = model(Family::Llama);
        let tensor = format!("base_model.model.model.layers.0.self_attn.q_proj.{part}.weight");
        edit(&path, |tensors| {
            tensors.insert(tensor.clone(), (Dtype::F32, vec![1], vec![0; 4]));
        });
        assert!(refused(&path).contains(&tensor));
    }
    // Beside a model it would change what transformers computes; alone it is none.
    let (_folder, path) = model(Family::Llama);
    fs::write(path.join("adapter_config.json"), "{}").unwrap();
    refused(&path);
    fs::remove_file(path.join("config.json")).unwrap();
    fs::rename(path.join("model.safetensors"), path.join("adapter_model.safetensors")).unwrap();
    refused(&path);
}

#[test]
fn a_model_without_a_head_can_only_be_trained() {
    let (_folder, path) = model(Family::Qwen3);
    edit(&path, |tensors| drop(tensors.remove("lm_head.weight").unwrap()));
    let directory = open(&path).unwrap();
    assert!(!directory.has_head());
    assert_eq!(directory.remarks(), [Remark::NoHead]);
    let mut fresh = Vec::new();
    for spec in parameters(directory.model()) {
        let mut values = vec![0f32; spec.element_count()];
        match directory.starts_fresh(&spec) {
            false => load_parameter(&directory, &spec, &mut values).unwrap(),
            true => {
                let error = load_parameter(&directory, &spec, &mut values).unwrap_err();
                assert!(matches!(error, ModelError::NoHead { .. }), "{error}");
                fresh.push(spec.name);
            }
        }
    }
    assert_eq!(fresh, ["head.weight"]);
    // What else is missing still is.
    edit(&path, |tensors| drop(tensors.remove("model.embed_tokens.weight").unwrap()));
    assert!(matches!(open(&path), Err(ModelError::Tensors { .. })));
    // A tied model has its head in the embedding.
    let (_folder, path) = model(Family::Qwen2);
    assert!(open(&path).unwrap().has_head());
}
