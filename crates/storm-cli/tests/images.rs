//! Image classifiers as users train them: packed pictures, runs that resume to the bit, evaluation, export, and data of
//! another kind than the model's.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use storm_graph::random::Random;
use tempfile::TempDir;

const CONFIG: &str = r#"
model = "small-cnn"
data = "pictures"
batch = 8
accumulate = 2
optimizer = "sgd"
learning-rate = 0.02
schedule = "constant"
label-smoothing = 0.1
flip = true
crop = 2
seed = 3
device = "cpu"
threads = 2
precision = "f32"
eval-every = 2
save-every = 2
keep-last = 9
data-ram = "16MiB"
"#;

/// A file of CIFAR-10 with some records; pictures of a class are brighter in one channel or another.
fn write_batch(path: &Path, records: usize, seed: u64) {
    let mut random = Random(seed);
    let mut bytes = Vec::new();
    for record in 0..records {
        let label = record % 10;
        bytes.push(label as u8);
        for channel in 0..3 {
            let bright = if label % 3 == channel { 120 } else { 10 * label as u64 };
            bytes.extend((0..1024).map(|_| (bright + random.bits() % 100) as u8));
        }
    }
    fs::write(path, bytes).expect("a file");
}

fn storm(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(folder).args(args).output().expect("storm starts")
}

#[track_caller]
fn succeeded(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

#[track_caller]
fn refused(output: &Output, part: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains(part), "{errors}");
}

/// A place with packed pictures, some text, and a config.
fn place() -> TempDir {
    let place = TempDir::new().expect("a folder");
    let folder = place.path();
    fs::create_dir(folder.join("cifar")).expect("a folder");
    write_batch(&folder.join("cifar/data_batch_1.bin"), 60, 1);
    write_batch(&folder.join("cifar/test_batch.bin"), 20, 2);
    succeeded(&storm(folder, &["data", "pack", "cifar", "--out", "pictures"]));
    fs::write(folder.join("pictures.toml"), CONFIG).expect("a file");
    fs::write(folder.join("text.txt"), "a text to learn ".repeat(100)).expect("a file");
    place
}

fn checkpoint(folder: &Path, run: &str) -> Vec<Vec<u8>> {
    [
        "checkpoints/step-00000004/parameters.safetensors",
        "checkpoints/step-00000004/optimizer.safetensors",
        "model/model.safetensors",
    ]
    .map(|file| fs::read(folder.join("runs").join(run).join(file)).expect(file))
    .into()
}

#[test]
fn a_run_is_resumed_evaluated_and_exported() {
    let place = place();
    let folder = place.path();
    let train = |name: &str, flags: &[&str]| {
        storm(folder, &[&["train", "pictures.toml", "--name", name], flags].concat())
    };
    let printed = succeeded(&train("whole", &["--steps", "4", "--json"]));
    let events: Vec<Value> =
        printed.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
    let of = |name: &str| -> Vec<&Value> {
        events.iter().filter(|event| event["event"] == name).collect()
    };
    assert_eq!(of("step").len(), 4);
    assert!(of("step").iter().all(|step| step["images_per_second"].is_f64()
        && step["accuracy"].is_f64()
        && step.get("tokens").is_none()));
    assert_eq!(of("step")[3]["images"], 64);
    assert!(of("evaluated").iter().all(|event| event["accuracy"].is_f64()));

    // Stopped half-way and resumed under a small budget: the same bits.
    let printed = succeeded(&train("halves", &["--steps", "2"]));
    let data: Vec<&str> = printed.lines().filter(|line| line.starts_with("data ")).collect();
    assert!(data[0].contains("read by ") && data[0].contains("the slowest is "), "{data:?}");
    assert!(data[2].contains("data measured: ") && data[2].contains(" batches"), "{data:?}");
    let config = folder.join("runs/halves/config.toml");
    let resumed = fs::read_to_string(&config).expect("a config");
    assert!(resumed.contains("small-cnn"), "{resumed}");
    let budget = ["--steps", "4", "--resume", "--vram", "24MiB", "--ram", "512MiB"];
    succeeded(&train("halves", &budget));
    assert!(checkpoint(folder, "halves") == checkpoint(folder, "whole"), "resumed to other bits");

    let evaluated: Value =
        serde_json::from_str(&succeeded(&storm(folder, &["eval", "runs/whole", "--json"])))
            .expect("an object");
    assert_eq!((&evaluated["images"], evaluated["accuracy"].is_f64()), (&Value::from(20), true));
    // With the label smoothing of the run, so the loss is the run's own.
    let last = of("evaluated").pop().expect("an evaluation");
    assert_eq!((last["step"].as_u64(), &last["loss"]), (Some(4), &evaluated["loss"]));
    assert!(evaluated["label_smoothing"].is_f64());
    succeeded(&storm(folder, &["export", "runs/whole", "exported"]));
    let exported = fs::read(folder.join("exported/model.safetensors")).expect("weights");
    assert!(exported == checkpoint(folder, "whole")[2], "exported as it was saved");
    let of_export =
        storm(folder, &["eval", "exported", "--data", "pictures", "--device", "cpu", "--json"]);
    let of_export: Value = serde_json::from_str(&succeeded(&of_export)).expect("an object");
    assert_eq!(of_export["accuracy"], evaluated["accuracy"]);
    succeeded(&train("further", &["--model", "exported", "--steps", "1"]));
    let page = fs::read_to_string(folder.join("runs/whole/report.html")).expect("a report");
    assert!(page.contains("Accuracy") && page.contains("Images per second"));
    assert!(page.contains("data predicted") && page.contains("data measured"));
}

#[test]
fn data_of_another_kind_is_refused() {
    let place = place();
    let folder = place.path();
    let train = |flags: &[&str]| {
        storm(folder, &[&["train", "pictures.toml", "--name", "a", "--steps", "1"], flags].concat())
    };
    refused(&train(&["--model", "gpt2"]), "gpt2 reads text, and the dataset holds pictures");
    refused(&train(&["--data", "text.txt"]), "small-cnn reads pictures, and the data is text");
    refused(&train(&["--tokens-per-step", "8"]), "tokens-per-step is for language models");
    refused(&train(&["--seq", "8"]), "seq is for language models");
    refused(&train(&["--width", "8"]), "for language models");
    assert!(!folder.join("runs/a").exists(), "nothing was written");
    succeeded(&train(&[]));
    let sample = storm(folder, &["sample", "runs/a", "--prompt", "a"]);
    let errors = String::from_utf8_lossy(&sample.stderr);
    assert!(errors.contains("is an image classifier"), "{errors}");
}
