//! Files, links, shards, pickles, and tensors that do not fit.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::{Value, json};
use storm_model::{
    Family, HfDirectory, ModelError, SaveOptions, WeightDtype, load_parameter, parameters,
};
use tempfile::TempDir;

use crate::support::{entries, file_bytes, frugal, save_tiny, save_values, tiny, values};

pub(crate) fn model(family: Family) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model");
    save_tiny(&path, &tiny(family));
    (folder, path)
}

fn first_shard(path: &Path) -> String {
    let names =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.into_iter().find(|name| name.starts_with("model-00001-of-")).unwrap()
}

fn sharded() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model");
    let options =
        SaveOptions { dtype: WeightDtype::F32, shard_bytes: 10_000, ..SaveOptions::default() };
    save_values(&path, &tiny(Family::Qwen3), &options);
    (folder, path)
}

pub(crate) fn open(path: &Path) -> Result<HfDirectory, ModelError> {
    frugal(|| HfDirectory::open(path))
}

pub(crate) type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Rewrites model.safetensors with the reference implementation.
pub(crate) fn edit(path: &Path, change: impl FnOnce(&mut Tensors)) {
    let file = path.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let mut tensors: Tensors = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, view)| {
            (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        })
        .collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(file, serialize(views, None).unwrap()).unwrap();
}

fn edit_index(path: &Path, change: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let file = path.join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    change(index["weight_map"].as_object_mut().unwrap());
    fs::write(file, index.to_string()).unwrap();
}

pub(crate) fn load_all(directory: &HfDirectory) -> Result<(), ModelError> {
    let expected = values(directory.model());
    for spec in parameters(directory.model()) {
        let mut loaded = vec![0f32; spec.element_count()];
        load_parameter(directory, &spec, &mut loaded)?;
        assert_eq!(loaded, expected[&spec.name], "{}", spec.name);
    }
    Ok(())
}

#[test]
fn missing_extra_and_wrong_tensors_are_one_report() {
    let (_folder, path) = model(Family::Llama);
    edit(&path, |tensors| {
        tensors.remove("model.norm.weight").unwrap();
        tensors.remove("model.layers.1.mlp.down_proj.weight").unwrap();
        tensors.insert(
            "model.layers.3.mlp.down_proj.weight".into(),
            (Dtype::F32, vec![1], vec![0; 4]),
        );
        tensors.insert("score\u{1b}.weight".into(), (Dtype::F32, vec![1], vec![0; 4]));
        tensors.get_mut("lm_head.weight").unwrap().1 = vec![12, 29];
        tensors.get_mut("model.layers.0.input_layernorm.weight").unwrap().0 = Dtype::I32;
    });
    let error = open(&path).unwrap_err();
    let message = error.to_string();
    let ModelError::Tensors { report, .. } = error else { panic!("{message}") };
    assert_eq!(report.missing.first, ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"]);
    assert_eq!(report.extra.first, ["model.layers.3.mlp.down_proj.weight", "score\\u{1b}.weight"]);
    assert_eq!(report.wrong_shape.first, ["lm_head.weight: found [12, 29], expected [29, 12]"]);
    assert_eq!(report.wrong_dtype.first, ["model.layers.0.input_layernorm.weight: I32"]);
    for part in
        ["missing (2)", "not part of the model (2)", "wrong shape (1)", "unsupported type (1)"]
    {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn long_reports_are_capped() {
    let (_folder, path) = model(Family::Gpt2);
    let config = path.join("config.json");
    let text = fs::read_to_string(&config).unwrap().replace("\"n_layer\": 3", "\"n_layer\": 60000");
    fs::write(config, text).unwrap();
    let error = open(&path).unwrap_err();
    let message = error.to_string();
    let ModelError::Tensors { report, .. } = error else { panic!("{message}") };
    assert_eq!((report.missing.first.len(), report.missing.count), (20, 59_997 * 12));
    assert!(message.contains("and 719944 more"), "{message}");
}

#[test]
fn names_with_and_without_prefix_and_saved_constants() {
    for (family, prefix, constants) in [
        (Family::Gpt2, "transformer.", ["h.0.attn.bias", "h.2.attn.masked_bias"]),
        (
            Family::Qwen3,
            "model.",
            ["layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"],
        ),
    ] {
        let (_folder, path) = model(family);
        edit(&path, |tensors| {
            *tensors = std::mem::take(tensors)
                .into_iter()
                .map(|(name, tensor)| {
                    (name.strip_prefix(prefix).unwrap_or(&name).to_owned(), tensor)
                })
                .collect();
            for name in constants {
                tensors.insert(name.into(), (Dtype::U8, vec![1, 1, 3], vec![0; 3]));
            }
        });
        let directory = open(&path).unwrap();
        load_all(&directory).unwrap();
        assert!(directory.names().any(|name| name.starts_with(prefix)));
        // The same tensor under both names is ambiguous.
        edit(&path, |tensors| {
            let name = if family == Family::Gpt2 { "wte.weight" } else { "norm.weight" };
            let tensor = tensors[name].clone();
            tensors.insert(format!("{prefix}{name}"), tensor);
        });
        assert!(matches!(open(&path), Err(ModelError::Index { .. })));
    }
}

#[test]
fn a_tied_head_may_be_stored_if_it_is_the_embedding() {
    let (_folder, path) = model(Family::Qwen2);
    let embedding = "model.embed_tokens.weight";
    edit(&path, |tensors| {
        let tensor = tensors[embedding].clone();
        tensors.insert("lm_head.weight".into(), tensor);
    });
    load_all(&open(&path).unwrap()).unwrap();
    edit(&path, |tensors| tensors.get_mut("lm_head.weight").unwrap().2[5] ^= 1);
    assert!(matches!(load_all(&open(&path).unwrap()), Err(ModelError::TiedWeightsDiffer { .. })));
    // Only the head: transformers takes it for the embedding.
    edit(&path, |tensors| {
        let tensor = tensors.remove(embedding).unwrap();
        tensors.insert("lm_head.weight".into(), tensor);
    });
    load_all(&open(&path).unwrap()).unwrap();
}

#[test]
fn index_entries_must_be_plain_names_inside() {
    let (_folder, path) = sharded();
    for entry in [
        "../model/model-00001-of-00002.safetensors",
        "..",
        ".",
        "",
        "/etc/passwd",
        "sub/file.safetensors",
        "./model-00001-of-00002.safetensors",
        "model-00001-of-00002.safetensors/",
        "..\\file",
        "C:file",
        "a\0b",
    ] {
        edit_index(&path, |map| drop(map.insert("model.norm.weight".into(), json!(entry))));
        let error = open(&path).unwrap_err();
        assert!(matches!(error, ModelError::UnsafePath { .. }), "{entry:?}: {error}");
    }
}

#[test]
fn an_index_that_disagrees_with_the_shards() {
    for (name, shard, expected) in [
        ("model.norm.weight", Some("model-00099-of-00099.safetensors"), "is missing"),
        ("model.nothing.weight", None, "is not in the shard"),
        ("model.norm.weight", None, "is not in the shard"),
    ] {
        let (_folder, path) = sharded();
        let shard = shard.map_or_else(|| first_shard(&path), str::to_owned);
        edit_index(&path, |map| drop(map.insert(name.into(), json!(shard))));
        let error = open(&path).unwrap_err();
        assert!(matches!(error, ModelError::Index { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let (_folder, path) = sharded();
    edit_index(&path, |map| drop(map.insert("model.norm.weight".into(), json!(7))));
    assert!(matches!(open(&path), Err(ModelError::Json { .. })));

    let (_folder, path) = sharded();
    let index = path.join("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}"#).unwrap();
    assert!(open(&path).unwrap_err().to_string().contains("occurs twice"));
    for text in ["", "{}", "[]", r#"{"weight_map":[]}"#] {
        fs::write(&index, text).unwrap();
        assert!(matches!(open(&path), Err(ModelError::Json { .. })), "{text}");
    }
    fs::File::options().write(true).open(&index).unwrap().set_len(10_000_000_000).unwrap();
    assert!(matches!(open(&path), Err(ModelError::TooLarge { .. })));

    // Two shards with the same tensor.
    let (_folder, path) = sharded();
    fs::copy(path.join(first_shard(&path)), path.join("copy.safetensors")).unwrap();
    edit_index(&path, |map| {
        drop(map.insert("model.norm.weight".into(), json!("copy.safetensors")))
    });
    assert!(open(&path).unwrap_err().to_string().contains("in two shards"));
}

#[test]
fn links_must_stay_inside() {
    for name in ["config.json", "model.safetensors"] {
        let (folder, path) = model(Family::Gpt2);
        let outside = folder.path().join("outside");
        fs::rename(path.join(name), &outside).unwrap();
        symlink(&outside, path.join(name)).unwrap();
        assert!(matches!(open(&path), Err(ModelError::UnsafePath { .. })), "{name}");
        fs::remove_file(path.join(name)).unwrap();
        symlink("../outside", path.join(name)).unwrap();
        assert!(matches!(open(&path), Err(ModelError::UnsafePath { .. })), "{name}");
        // Inside is fine.
        fs::remove_file(path.join(name)).unwrap();
        fs::rename(&outside, path.join("other")).unwrap();
        symlink("other", path.join(name)).unwrap();
        open(&path).unwrap();
        // Nowhere, and in a circle.
        fs::remove_file(path.join("other")).unwrap();
        assert!(matches!(open(&path), Err(ModelError::Io { .. })));
        symlink(name, path.join("other")).unwrap();
        assert!(matches!(open(&path), Err(ModelError::Io { .. })));
    }
}

#[test]
fn a_model_directory_may_itself_be_a_link() {
    let (folder, path) = model(Family::Gpt2);
    let link = folder.path().join("link");
    symlink(&path, &link).unwrap();
    load_all(&open(&link).unwrap()).unwrap();
}

#[test]
fn the_hugging_face_cache() {
    let (folder, path) = model(Family::Mistral);
    let repository = folder.path().join("models--storm--tiny");
    let (blobs, snapshot) = (repository.join("blobs"), repository.join("snapshots/0123abcd"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for (name, hash) in [("config.json", "c0ffee"), ("model.safetensors", "deadbeef")] {
        fs::rename(path.join(name), blobs.join(hash)).unwrap();
        symlink(format!("../../blobs/{hash}"), snapshot.join(name)).unwrap();
    }
    load_all(&open(&snapshot).unwrap()).unwrap();
    // Any other place of the cache is outside.
    fs::rename(blobs.join("deadbeef"), repository.join("deadbeef")).unwrap();
    fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    symlink("../../deadbeef", snapshot.join("model.safetensors")).unwrap();
    assert!(matches!(open(&snapshot), Err(ModelError::UnsafePath { .. })));
    // A blobs folder that is a link to anywhere is no blobs folder.
    fs::rename(&blobs, folder.path().join("elsewhere")).unwrap();
    symlink("../elsewhere", &blobs).unwrap();
    assert!(matches!(open(&snapshot), Err(ModelError::UnsafePath { .. })));
}

#[test]
fn things_that_are_not_files() {
    let (_folder, path) = model(Family::Gpt2);
    let weights = path.join("model.safetensors");
    fs::remove_file(&weights).unwrap();
    fs::create_dir(&weights).unwrap();
    assert!(matches!(open(&path), Err(ModelError::UnsafePath { .. })));
    fs::remove_dir(&weights).unwrap();
    // Opening a pipe would wait for ever.
    assert!(Command::new("mkfifo").arg(&weights).status().unwrap().success());
    assert!(matches!(open(&path), Err(ModelError::UnsafePath { .. })));
    fs::remove_file(&weights).unwrap();
    symlink("/dev/zero", &weights).unwrap();
    assert!(matches!(open(&path), Err(ModelError::UnsafePath { .. })));
}

#[test]
fn pickles_in_place_of_weights() {
    for name in ["pytorch_model.bin", "model.pt", "last.ckpt", "model.safetensors", "weights"] {
        let (_folder, path) = model(Family::Gpt2);
        fs::remove_file(path.join("model.safetensors")).unwrap();
        fs::write(path.join(name), b"\x80\x02}q\x00X\x04\x00\x00\x00evil.").unwrap();
        let error = open(&path).unwrap_err();
        assert!(matches!(error, ModelError::Pickle { .. }), "{name}: {error}");
        assert!(error.to_string().contains(name), "{error}");
        // Given as the model itself.
        assert!(matches!(open(&path.join(name)), Err(ModelError::Pickle { .. })));
    }
}

#[test]
fn nothing_to_load() {
    let folder = TempDir::new().unwrap();
    assert!(matches!(
        open(folder.path()),
        Err(ModelError::NotAModel { missing: "config.json", .. })
    ));
    assert!(matches!(open(&folder.path().join("absent")), Err(ModelError::Io { .. })));
    let (_folder, path) = model(Family::Gpt2);
    assert!(matches!(
        open(&path.join("config.json")),
        Err(ModelError::NotAModel { missing: "directory", .. })
    ));
    fs::remove_file(path.join("model.safetensors")).unwrap();
    assert!(matches!(open(&path), Err(ModelError::NotAModel { missing: "model.safetensors", .. })));
}

#[test]
fn wrong_buffers_and_names() {
    let (_folder, path) = model(Family::Gpt2);
    let directory = open(&path).unwrap();
    let spec = &parameters(directory.model())[0];
    assert!(matches!(
        load_parameter(&directory, spec, &mut [0f32; 3]),
        Err(ModelError::WrongLength { .. })
    ));
    assert!(matches!(
        directory.read("nothing", &mut [0f32; 3]),
        Err(ModelError::NoSuchTensor { .. })
    ));
    assert!(matches!(
        directory.read("transformer.wte.weight", &mut [0f32; 3]),
        Err(ModelError::WrongLength { .. })
    ));
    // A specification of another model.
    for other in parameters(&tiny(Family::Llama)) {
        let mut dest = vec![0f32; other.element_count()];
        assert!(load_parameter(&directory, &other, &mut dest).is_err());
    }
    let mut odd = spec.clone();
    odd.pieces[0].rows = 5..spec.shape[0] + 5;
    let mut dest = vec![0f32; spec.element_count()];
    assert!(matches!(
        load_parameter(&directory, &odd, &mut dest),
        Err(ModelError::WrongLength { .. })
    ));
}

/// A directory with these shards and an index that names them and these tensors.
fn hostile_shards(headers: &[String], weight_map: &str) -> (TempDir, PathBuf) {
    let (folder, path) = model(Family::Gpt2);
    fs::remove_file(path.join("model.safetensors")).unwrap();
    for (i, header) in headers.iter().enumerate() {
        fs::write(path.join(format!("{i}.safetensors")), file_bytes(header.as_bytes(), 0)).unwrap();
    }
    let index = format!("{{\"weight_map\":{{{weight_map}}}}}");
    fs::write(path.join("model.safetensors.index.json"), index).unwrap();
    (folder, path)
}

/// Each shard is within the limits of one file; all of them together are not.
#[test]
fn limits_hold_for_all_shards_together() {
    let weight_map = |count: usize| {
        let one = |i| format!("\"t{i}\":\"{i}.safetensors\"");
        (0..count).map(one).collect::<Vec<_>>().join(",")
    };
    let many: Vec<String> = (0..20).map(|i| entries(10_000, &format!("_{i}"), "0")).collect();
    let (_folder, path) = hostile_shards(&many, &weight_map(20));
    let error = open(&path).unwrap_err();
    assert!(matches!(error, ModelError::Safetensors { .. }), "{error}");
    assert!(error.to_string().contains("more than 131072 entries"), "{error}");

    let tail = "a".repeat(4000);
    let long: Vec<String> = (0..8).map(|i| entries(600, &format!("{tail}{i}"), "0")).collect();
    let (_folder, path) = hostile_shards(&long, &weight_map(8));
    let error = open(&path).unwrap_err();
    assert!(matches!(error, ModelError::TooLarge { .. }), "{error}");
    assert!(error.to_string().contains("with those of the shards before it"), "{error}");
}

/// The largest index and the largest shards that are read.
#[test]
fn the_most_that_is_read_is_little() {
    let tail = "a".repeat(50);
    for shards in [1, 2] {
        let count = (1 << 17) / shards;
        let headers: Vec<String> =
            (0..shards).map(|i| entries(count, &format!("{tail}{i}"), "0,1,1,1,1,1,1,1")).collect();
        let name = |i| format!("\"{i:x}{tail}{tail}\":\"{}.safetensors\"", i % shards);
        let index = (0..120_000).map(name).collect::<Vec<_>>().join(",");
        let (_folder, path) = hostile_shards(&headers, &index);
        assert!(matches!(open(&path), Err(ModelError::Index { .. })));
    }
    let header = entries(1 << 17, &tail, "0,1,1,1,1,1,1,1");
    let (_folder, path) = hostile_shards(&[], "");
    fs::write(path.join("model.safetensors"), file_bytes(header.as_bytes(), 0)).unwrap();
    assert!(matches!(open(&path), Err(ModelError::Tensors { .. })));
}

#[test]
fn an_index_full_of_one_thing() {
    let long = "a".repeat((16 << 20) - 200);
    let escapes = "\\n".repeat((8 << 20) - 100);
    let medium = "a".repeat(5000);
    let many: Vec<String> = (0..(1 << 17) + 1).map(|i| format!("\"{i}\":\"a\"")).collect();
    let text = |text: &str| [format!("\"{text}\":\"a\""), format!("\"a\":\"{text}\"")];
    let cases = [text(&long), text(&escapes), text(&medium), [many.join(","), "\"a\":{".into()]];
    for weight_map in cases.as_flattened() {
        let (_folder, path) = hostile_shards(&[], weight_map);
        let error = open(&path).unwrap_err();
        assert!(matches!(error, ModelError::Json { .. }), "{error}");
        assert!(error.to_string().len() < 1000);
    }
    let (_folder, path) = hostile_shards(&[], &format!("{long}{long}"));
    assert!(matches!(open(&path), Err(ModelError::TooLarge { .. })));
}
