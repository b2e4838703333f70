//! Which tokenizer a run uses for text, and data from another tokenizer.

use crate::support::{Place, finish};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

/// A tokenizer with this many numbers as words.
pub(crate) fn words(count: usize) -> Value {
    let mut vocabulary: serde_json::Map<String, Value> =
        (0..count).map(|number| (number.to_string(), json!(number + 2))).collect();
    vocabulary.insert("?".to_owned(), json!(0));
    vocabulary.insert("</s>".to_owned(), json!(1));
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    })
}

/// A place with a model of 257 tokens in `model`.
fn with_model() -> Place {
    let place = Place::new();
    place.run("made", &["--steps", "1"]).succeeded();
    fs::rename(place.run_folder("made").join("model"), place.path().join("model")).unwrap();
    place
}

/// Runs `storm` in the place. Returns its exit code and outputs.
fn storm(place: &Place, line: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    let output = command.current_dir(place.path()).args(line.split_whitespace()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

const TRAIN: &str = "train --model model --data text.txt --seq 16 --steps 1 --device cpu --threads 1 --vram 64MiB \
                     --ram 256MiB --name";

fn vocabulary_of(place: &Place, run: &str) -> u64 {
    let path = place.run_folder(run).join("data/dataset.json");
    let manifest: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    manifest["tokenizer"]["vocabulary"].as_u64().unwrap()
}

#[test]
fn text_is_packed_with_the_tokenizer_of_the_model() {
    let place = with_model();
    // Without a file, 257 tokens mean bytes.
    let (code, out, err) = storm(&place, &format!("{TRAIN} bytes"));
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("tokenizer bytes, the model's own"), "{out}");
    assert_eq!(vocabulary_of(&place, "bytes"), 257);
    fs::write(place.path().join("model/tokenizer.json"), words(100).to_string()).unwrap();
    let (code, out, err) = storm(&place, &format!("{TRAIN} words"));
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("tokenizer model/tokenizer.json, the model's own"), "{out}");
    assert_eq!(vocabulary_of(&place, "words"), 102);
    // It resumes with the tokenizer that it began with.
    let (code, _, err) =
        storm(&place, &format!("{TRAIN} words --steps 2 --resume").replace("--steps 1 ", ""));
    assert_eq!(code, Some(0), "{err}");
    // A preset has none of its own.
    let (code, out, err) = storm(&place, "train tiny.toml --name preset --steps 1");
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("tokenizer bytes, a preset has none of its own"), "{out}");
}

#[test]
fn a_model_without_a_tokenizer_asks_for_one() {
    let place = Place::new();
    let weights = place.path().join("words");
    fs::write(place.path().join("words.json"), words(100).to_string()).unwrap();
    finish(place.command("words", &["--steps", "1", "--tokenizer", "words.json"])).succeeded();
    fs::rename(place.run_folder("words").join("model"), &weights).unwrap();
    let line = TRAIN.replace("--model model", "--model words");
    let (code, _, err) = storm(&place, &format!("{line} none"));
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("words has no tokenizer.json: give --tokenizer"), "{err}");
    assert!(!place.run_folder("none").join("data").exists());
}

#[test]
fn data_of_another_tokenizer_are_refused() {
    let place = with_model();
    fs::write(place.path().join("model/tokenizer.json"), words(100).to_string()).unwrap();
    fs::write(place.path().join("other.json"), words(90).to_string()).unwrap();
    for (name, tokenizer) in [("own", "model"), ("other", "other.json"), ("bytes", "bytes")] {
        let line =
            format!("data pack text.txt --tokenizer {tokenizer} --held-out 0.1 --out {name}");
        assert_eq!(storm(&place, &line).0, Some(0));
    }
    let train = |data: &str, more: &str| {
        let line = TRAIN.replace("--data text.txt", &format!("--data {data}"));
        storm(&place, &format!("{line} {data}{} {more}", more.len()))
    };
    let eval = |data: &str, more: &str| {
        storm(&place, &format!("eval model --device cpu --data {data} --seq 16 --batches 1 {more}"))
    };
    for (code, _, err) in [train("own", ""), eval("own", "")] {
        assert_eq!((code, err.contains("warning")), (Some(0), false), "{err}");
    }
    for data in ["other", "bytes"] {
        let made = match data {
            "bytes" => {
                "bytes was made with the tokenizer of bytes, and model has a tokenizer.json with SHA-256 "
            }
            _ => "other was made with a tokenizer.json with SHA-256 ",
        };
        for (code, _, err) in [train(data, ""), eval(data, "")] {
            assert_eq!(code, Some(2), "{err}");
            assert!(err.contains(made) && err.contains("--other-tokenizer"), "{err}");
        }
        for (code, _, err) in [train(data, "--other-tokenizer"), eval(data, "--other-tokenizer")] {
            assert_eq!(code, Some(0), "{err}");
        }
    }
    // Text is refused before it is packed.
    let (code, _, err) = storm(&place, &format!("{TRAIN} text --tokenizer bytes"));
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("the text is to be packed with the tokenizer of bytes"), "{err}");
    assert!(!place.run_folder("text").join("data").exists());
}

/// The tokenizer has no unknown token, so text outside its vocabulary is an error, but a special
/// token is not.
#[test]
fn prompts_have_special_tokens_unless_they_are_text() {
    let place = with_model();
    let mut tokenizer = words(100);
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    vocabulary.remove("?");
    vocabulary.insert("a".to_owned(), json!(0));
    tokenizer["added_tokens"] = json!([{
        "id": 200, "content": "<turn>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    }]);
    fs::write(place.path().join("model/tokenizer.json"), tokenizer.to_string()).unwrap();
    let sample =
        |more: &str| storm(&place, &format!("sample model --tokens 2 --prompt <turn>7 {more}"));
    let (code, out, err) = sample("");
    assert_eq!(code, Some(0), "{err}");
    assert!(out.starts_with("<turn>7"), "{out}");
    let (code, _, err) = sample("--plain-text");
    assert_eq!(code, Some(4), "{err}");
    assert!(err.contains("tokenizer.json"), "{err}");
}

/// A dataset that does not say which tokenizer.json made it can be read, and its report says so.
#[test]
fn an_unknown_tokenizer_is_said() {
    let place = with_model();
    fs::write(place.path().join("model/tokenizer.json"), words(100).to_string()).unwrap();
    assert_eq!(storm(&place, "data pack text.txt --tokenizer model --out data").0, Some(0));
    let path = |name: &str| place.path().join("data").join(name);
    let mut manifest: Value =
        serde_json::from_slice(&fs::read(path("dataset.json")).unwrap()).unwrap();
    manifest["tokenizer"].as_object_mut().unwrap().remove("sha256");
    let json = manifest.to_string();
    fs::write(path("dataset.json"), &json).unwrap();
    let hash = Command::new("sha256sum").arg(path("dataset.json")).output().unwrap().stdout;
    let hash = String::from_utf8(hash).unwrap();
    let hash = hash.split_whitespace().next().unwrap();
    fs::write(path("dataset.sha256"), format!("{hash}  dataset.json\n")).unwrap();
    let (code, out, err) = storm(&place, "data inspect data --verify");
    assert_eq!(code, Some(0), "{err}");
    assert!(
        out.contains("unknown: the dataset does not say which tokenizer.json made it"),
        "{out}"
    );
    let line = TRAIN.replace("--data text.txt", "--data data");
    let (code, _, err) = storm(&place, &format!("{line} run"));
    assert_eq!(code, Some(0), "{err}");
    let warning =
        "warning: data was made with an unknown tokenizer, and model has a tokenizer.json";
    assert!(err.contains(warning), "{err}");
}
