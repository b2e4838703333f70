//! Save and open again.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use storm_model::{
    Family, HfDirectory, IfExists, ModelConfig, ModelError, SaveOptions, WeightDtype,
    load_parameter, parameters, preset, save,
};
use tempfile::TempDir;

use crate::support::{Random, peak_bytes, save_tiny, save_values, tiny, values};

/// Arbitrary bits, NaNs with payloads included.
fn random_bits(config: &ModelConfig) -> HashMap<String, Vec<f32>> {
    let mut random = Random(3);
    parameters(config)
        .into_iter()
        .map(|spec| {
            (
                spec.name.clone(),
                (0..spec.element_count()).map(|_| f32::from_bits(random.bits() as u32)).collect(),
            )
        })
        .collect()
}

#[test]
fn bitwise_in_f32_single_and_sharded() {
    for family in Family::ALL {
        for shard_bytes in [u64::MAX, 6000] {
            let folder = TempDir::new().unwrap();
            let path = folder.path().join("model");
            let config = tiny(family);
            let values = random_bits(&config);
            let options =
                SaveOptions { dtype: WeightDtype::F32, shard_bytes, ..SaveOptions::default() };
            save::<f32, _>(&path, &config, &options, |spec, elements, dest| {
                dest.copy_from_slice(&values[&spec.name][elements]);
                Ok(())
            })
            .unwrap();
            assert_eq!(path.join("model.safetensors").exists(), shard_bytes == u64::MAX);
            let directory = HfDirectory::open(&path).unwrap();
            assert_eq!(*directory.model(), config);
            for spec in parameters(&config) {
                let mut loaded = vec![0f32; spec.element_count()];
                load_parameter(&directory, &spec, &mut loaded).unwrap();
                let bits =
                    |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&loaded), bits(&values[&spec.name]), "{}", spec.name);
            }
        }
    }
}

#[test]
fn bitwise_in_bf16_single_and_sharded() {
    for family in Family::ALL {
        for shard_bytes in [u64::MAX, 3000] {
            let folder = TempDir::new().unwrap();
            let path = folder.path().join("model");
            let config = tiny(family);
            let mut random = Random(4);
            let values: HashMap<String, Vec<bf16>> = parameters(&config)
                .into_iter()
                .map(|spec| {
                    (
                        spec.name.clone(),
                        (0..spec.element_count())
                            .map(|_| bf16::from_bits(random.bits() as u16))
                            .collect(),
                    )
                })
                .collect();
            let options =
                SaveOptions { dtype: WeightDtype::Bf16, shard_bytes, ..SaveOptions::default() };
            save::<bf16, _>(&path, &config, &options, |spec, elements, dest| {
                dest.copy_from_slice(&values[&spec.name][elements]);
                Ok(())
            })
            .unwrap();
            let directory = HfDirectory::open(&path).unwrap();
            for spec in parameters(&config) {
                let mut loaded = vec![bf16::ZERO; spec.element_count()];
                load_parameter(&directory, &spec, &mut loaded).unwrap();
                let bits = |values: &[bf16]| {
                    values.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
                };
                assert_eq!(bits(&loaded), bits(&values[&spec.name]), "{}", spec.name);
            }
        }
    }
}

#[test]
fn conversions_round_to_nearest_even() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model");
    let config = tiny(Family::Qwen3);
    let options = SaveOptions::default();
    let exact = 1.0 + 1.0 / 256.0; // Half-way between two bf16: goes to the even one, 1.0.
    save::<f32, _>(&path, &config, &options, |_, _, dest| {
        dest.fill(exact);
        Ok(())
    })
    .unwrap();
    let directory = HfDirectory::open(&path).unwrap();
    let mut loaded = vec![0f32; 12];
    directory.read("model.norm.weight", &mut loaded).unwrap();
    assert_eq!(loaded, [1.0; 12]);
}

/// The tensors of the file against the fused parameters, by way of the reference implementation.
#[test]
fn fused_and_transposed_as_documented() {
    let folder = TempDir::new().unwrap();
    let read = |path: &Path, name: &str| -> Vec<f32> {
        let bytes = fs::read(path.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        tensors
            .tensor(name)
            .unwrap()
            .data()
            .chunks(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    };

    let llama = folder.path().join("llama");
    let config = tiny(Family::Llama);
    save_tiny(&llama, &config);
    let expected = values(&config);
    let parts = ["q", "k", "v"]
        .map(|part| read(&llama, &format!("model.layers.1.self_attn.{part}_proj.weight")));
    assert_eq!(parts.concat(), expected["layers.1.attention.qkv.weight"]);
    let parts =
        ["gate", "up"].map(|part| read(&llama, &format!("model.layers.2.mlp.{part}_proj.bias")));
    assert_eq!(parts.concat(), expected["layers.2.mlp.gate_up.bias"]);

    let gpt2 = folder.path().join("gpt2");
    let config = tiny(Family::Gpt2);
    save_tiny(&gpt2, &config);
    let stored = read(&gpt2, "transformer.h.0.mlp.c_fc.weight"); // (12, 17)
    let fused = &values(&config)["layers.0.mlp.up.weight"]; // (17, 12)
    for (input, output) in (0..12).flat_map(|input| (0..17).map(move |output| (input, output))) {
        assert_eq!(stored[input * 17 + output], fused[output * 12 + input]);
    }
}

#[test]
fn parameter_names_and_shapes() {
    let shapes = |family| -> Vec<String> {
        let specs = parameters(&tiny(family));
        let shown = specs.iter().filter(|spec| {
            !spec.name.starts_with("layers.1") && !spec.name.starts_with("layers.2")
        });
        shown.map(|spec| format!("{} {:?}", spec.name, spec.shape)).collect()
    };
    assert_eq!(
        shapes(Family::Gpt2),
        [
            "embedding.weight [29, 12]",
            "position_embedding.weight [64, 12]",
            "layers.0.attention_norm.weight [12]",
            "layers.0.attention_norm.bias [12]",
            "layers.0.attention.qkv.weight [36, 12]",
            "layers.0.attention.qkv.bias [36]",
            "layers.0.attention.output.weight [12, 12]",
            "layers.0.attention.output.bias [12]",
            "layers.0.mlp_norm.weight [12]",
            "layers.0.mlp_norm.bias [12]",
            "layers.0.mlp.up.weight [17, 12]",
            "layers.0.mlp.up.bias [17]",
            "layers.0.mlp.down.weight [12, 17]",
            "layers.0.mlp.down.bias [12]",
            "final_norm.weight [12]",
            "final_norm.bias [12]",
        ]
    );
    assert_eq!(
        shapes(Family::Qwen3),
        [
            "embedding.weight [29, 12]",
            "layers.0.attention_norm.weight [12]",
            "layers.0.attention.qkv.weight [80, 12]",
            "layers.0.attention.query_norm.weight [10]",
            "layers.0.attention.key_norm.weight [10]",
            "layers.0.attention.output.weight [12, 40]",
            "layers.0.mlp_norm.weight [12]",
            "layers.0.mlp.gate_up.weight [34, 12]",
            "layers.0.mlp.down.weight [12, 17]",
            "final_norm.weight [12]",
            "head.weight [29, 12]",
        ]
    );
}

#[test]
fn the_source_goes_along() {
    let folder = TempDir::new().unwrap();
    let (source, output) = (folder.path().join("source"), folder.path().join("output"));
    let config = tiny(Family::Llama);
    save_tiny(&source, &config);
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "generation_config.json",
        "LICENSE.txt",
    ] {
        fs::write(source.join(name), name).unwrap();
    }
    for name in
        ["README.md", "pytorch_model.bin", "modeling_evil.py", "optimizer.pt", "tokenizer.py"]
    {
        fs::write(source.join(name), name).unwrap();
    }
    let path = source.join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["eos_token_id"] = json!([7, 8]);
    json["transformers_version"] = json!("4.40.0");
    json["attention_dropout"] = json!(0.1);
    json["rms_norm_eps"] = json!(1.5e-06);
    fs::write(&path, json.to_string()).unwrap();

    let options = SaveOptions { source: Some(&source), ..SaveOptions::default() };
    save_values(&output, &config, &options);
    let mut names: Vec<_> = fs::read_dir(&output)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "LICENSE.txt",
            "config.json",
            "generation_config.json",
            "merges.txt",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    );
    assert_eq!(fs::read(output.join("tokenizer.json")).unwrap(), b"tokenizer.json");
    json["torch_dtype"] = json!("bfloat16");
    let saved: Value =
        serde_json::from_slice(&fs::read(output.join("config.json")).unwrap()).unwrap();
    assert_eq!(saved, json);

    // A changed model: its own sizes, the source's tokens.
    let changed = ModelConfig { vocab_size: 31, rotary: tiny(Family::Qwen3).rotary, ..config };
    let third = folder.path().join("third");
    save_values(&third, &changed, &options);
    let directory = HfDirectory::open(&third).unwrap();
    assert_eq!(*directory.model(), changed);
    assert_eq!(directory.config().original["eos_token_id"], json!([7, 8]));
}

#[test]
fn files_carried_along_must_lie_in_the_source() {
    let folder = TempDir::new().unwrap();
    let source = folder.path().join("source");
    let config = tiny(Family::Gpt2);
    save_tiny(&source, &config);
    fs::write(folder.path().join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink("../secret", source.join("tokenizer.json")).unwrap();
    let options = SaveOptions { source: Some(&source), ..SaveOptions::default() };
    let result = save::<f32, _>(&folder.path().join("output"), &config, &options, |_, _, _| Ok(()));
    assert!(matches!(result, Err(ModelError::UnsafePath { .. })));
    assert_eq!(left_over(folder.path()), ["secret", "source"]);
}

fn left_over(path: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(path)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn an_existing_directory_is_safe() {
    let folder = TempDir::new().unwrap();
    let config = tiny(Family::Gpt2);
    let path = folder.path().join("model");
    let replace = SaveOptions { if_exists: IfExists::Replace, ..SaveOptions::default() };
    let try_save = |path: &PathBuf, options: &SaveOptions<'_>| {
        save::<f32, _>(path, &config, options, |_, _, _| Ok(()))
    };
    // An empty one is as good as none.
    fs::create_dir(&path).unwrap();
    try_save(&path, &SaveOptions::default()).unwrap();
    let before = fs::read(path.join("model.safetensors")).unwrap();
    assert!(matches!(try_save(&path, &SaveOptions::default()), Err(ModelError::Output { .. })));
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), before);
    // A failure half-way leaves the old model.
    let result = save::<f32, _>(&path, &config, &replace, |spec, _, _| {
        if spec.name == "final_norm.weight" { Err("no".into()) } else { Ok(()) }
    });
    assert!(matches!(result, Err(ModelError::Provider { .. })));
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), before);
    // In place, from itself.
    fs::write(path.join("tokenizer.json"), "t").unwrap();
    let in_place = SaveOptions { source: Some(&path), ..replace.clone() };
    save_values(&path, &config, &in_place);
    assert_ne!(fs::read(path.join("model.safetensors")).unwrap(), before);
    assert_eq!(fs::read(path.join("tokenizer.json")).unwrap(), b"t");
    // Not a model directory: never deleted.
    for precious in [folder.path().join("home"), path.clone()] {
        fs::create_dir_all(precious.join("work")).unwrap();
        assert!(matches!(try_save(&precious, &replace), Err(ModelError::Output { .. })));
        assert!(precious.join("work").is_dir());
    }
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(matches!(try_save(&file, &replace), Err(ModelError::Output { .. })));
    assert_eq!(left_over(folder.path()), ["file", "home", "model"]);
    // Folders on the way are made.
    try_save(&folder.path().join("a/b/c"), &SaveOptions::default()).unwrap();
}

/// 26 MB tensors in and out with a few megabytes of memory beside them.
#[test]
fn memory_does_not_grow_with_the_model() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model");
    let llama = ModelConfig {
        vocab_size: 50_000,
        hidden_size: 128,
        intermediate_size: 1000,
        ..tiny(Family::Llama)
    };
    let options = SaveOptions { dtype: WeightDtype::F32, ..SaveOptions::default() };
    let (result, peak) = peak_bytes(|| {
        save::<f32, _>(&path, &llama, &options, |_, _, dest| {
            dest.fill(1.0);
            Ok(())
        })
    });
    result.unwrap();
    assert!(peak < 12 << 20, "saving allocated {peak} bytes");
    let directory = HfDirectory::open(&path).unwrap();
    let spec = &parameters(&llama)[0];
    let mut dest = vec![0f32; spec.element_count()];
    let (result, peak) = peak_bytes(|| load_parameter(&directory, spec, &mut dest));
    result.unwrap();
    assert!(peak < 5 << 20, "loading allocated {peak} bytes");
    assert!(dest.iter().all(|value| *value == 1.0));
}

/// Transposed matrices of more than one chunk.
#[test]
fn large_transposed_matrices() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model");
    let config = ModelConfig {
        hidden_size: 1500,
        query_heads: 10,
        kv_heads: 10,
        head_dim: 150,
        layer_count: 1,
        intermediate_size: 801,
        max_positions: 2,
        vocab_size: 2,
        ..tiny(Family::Gpt2)
    };
    config.validate().unwrap();
    let value = |element: usize| (element % 8191) as f32;
    save::<f32, _>(
        &path,
        &config,
        &SaveOptions { dtype: WeightDtype::F32, ..SaveOptions::default() },
        |_, elements, dest| {
            for (element, dest) in elements.zip(dest) {
                *dest = value(element);
            }
            Ok(())
        },
    )
    .unwrap();
    let directory = HfDirectory::open(&path).unwrap();
    for name in ["layers.0.mlp.up.weight", "layers.0.mlp.down.weight"] {
        let spec = parameters(&config).into_iter().find(|spec| spec.name == name).unwrap();
        let mut loaded = vec![0f32; spec.element_count()];
        load_parameter(&directory, &spec, &mut loaded).unwrap();
        assert!(
            loaded.iter().enumerate().all(|(element, loaded)| *loaded == value(element)),
            "{name}"
        );
    }
}

#[test]
fn a_layout_costs_the_same_for_any_number_of_layers() {
    let mut config = preset("llama-2-7b").unwrap();
    config.layer_count = 65_535;
    let (layout, peak) = peak_bytes(|| storm_model::ParameterLayout::new(&config));
    assert_eq!(layout.layer_count, 65_535);
    assert!(peak < 1 << 16, "allocated {peak} bytes");
}
