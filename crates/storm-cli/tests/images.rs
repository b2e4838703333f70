//! Image classifiers as users train them: packed pictures, runs that resume bit for bit,
//! evaluation, export, and data that does not match the model.

use serde_json::Value;
use sha2::{Digest, Sha256};
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

/// A CIFAR-10 file with some records. The class decides which channel is bright.
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

    // Stopped halfway and resumed under a small budget, it has the same bits.
    let printed = succeeded(&train("halves", &["--steps", "2"]));
    let data: Vec<&str> = printed.lines().filter(|line| line.starts_with("data ")).collect();
    assert!(data[0].contains("read once by "), "{data:?}");
    assert!(data[0].contains(" images/s (the slowest), "), "{data:?}");
    assert!(data[2].contains("data measured: trained on ") && data[2].contains(" images/s; read "));
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
    // With the label smoothing of the run, so the loss is the run's.
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
    let (page, views) = page.split_once("<details class=\"views\">").expect("earlier views");
    // All twenty held-out pictures, and as many correct ones as the evaluation found.
    assert_eq!(page.matches("<img src=\"data:image/png;base64,").count(), 20);
    let right = 20.0 * evaluated["accuracy"].as_f64().expect("a share");
    assert!(page.contains(&format!("; {} are right.", right.round())), "{right}");
    let wrong = 20 - right.round() as usize;
    assert_eq!(page.matches("<li class=\"wrong\">").count(), wrong);
    // A rebuilt page has the same pictures.
    succeeded(&storm(folder, &["report", "runs/whole"]));
    let rebuilt = fs::read_to_string(folder.join("runs/whole/report.html")).expect("a report");
    let pictures = |page: &str| -> String {
        let from = page.find("<ul class=\"pictures\">").expect("pictures");
        page[from..].split("</ul>").next().expect("an end").to_owned()
    };
    assert!(pictures(&rebuilt) == pictures(page));
    assert!(rebuilt.contains(views.split("</details>").next().expect("an end")));

    // The first pictures after each evaluation, in a resumed run as in one that never stopped.
    let views_of = |name: &str| -> Vec<(u64, Vec<Value>)> {
        let path = folder.join("runs").join(name).join("metrics.jsonl");
        let metrics = fs::read_to_string(path).expect("metrics");
        let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let views = lines.filter_map(|line| {
            Some((line["step"].as_u64()?, line.get("guesses")?.as_array()?.clone()))
        });
        views.collect()
    };
    let found = views_of("whole");
    assert_eq!(
        found.iter().map(|view| (view.0, view.1.len())).collect::<Vec<_>>(),
        [(2, 8), (4, 8)]
    );
    assert_eq!(found, views_of("halves"));
    assert_eq!(of("viewed").len(), 2);
    assert_eq!(of("viewed")[1]["guesses"].as_array(), Some(&found[1].1));
    // The last model saw the same pictures again, so the page has the same probabilities.
    let grid = pictures(page);
    let shown: Vec<&str> = grid.split("<span>").skip(1).take(8).collect();
    assert_eq!(shown.len(), 8, "{grid}");
    for (guess, shown) in found[1].1.iter().zip(shown) {
        let percent = 100.0 * guess["probability"].as_f64().expect("a share");
        assert!(shown.starts_with(&format!("{percent:.1} %")), "{guess}: {shown:.20}");
    }
    assert!(views.contains("Step 2: ") && !views.contains("Step 4: "));
}

/// A PNG of one color.
fn write_png(path: &Path, side: u32, colour: [u8; 3]) {
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    let file = fs::File::create(path).expect("a file");
    let mut encoder = png::Encoder::new(file, side, side);
    encoder.set_color(png::ColorType::Rgb);
    let pixels: Vec<u8> = (0..side * side).flat_map(|_| colour).collect();
    encoder.write_header().expect("a header").write_image_data(&pixels).expect("pixels");
}

#[test]
fn pictures_are_normalized_by_their_own_statistics() {
    let place = place();
    let folder = place.path();
    for number in 0..6u8 {
        let (class, side) = (["day", "night"][usize::from(number % 2)], 8 + u32::from(number));
        let colour = [200 * (number % 2), 100, 10 * number];
        write_png(&folder.join(format!("own/{class}/{number}.png")), side, colour);
    }
    let unpacked = storm(folder, &["train", "pictures.toml", "--name", "own", "--data", "own"]);
    assert_eq!(unpacked.status.code(), Some(4), "{unpacked:?}");
    let problem = String::from_utf8_lossy(&unpacked.stderr).into_owned();
    assert!(problem.contains("give --size 8x8 to resize all that differ"), "{problem}");
    assert!(problem.contains("storm data pack own --out DATASET"), "{problem}");
    assert!(!folder.join("runs/own/data").exists());
    let pack = ["data", "pack", "own", "--size", "8", "--held-out", "0.34", "--out", "packed"];
    succeeded(&storm(folder, &pack));
    let train = |name: &str, data: &str| {
        let flags =
            ["--name", name, "--data", data, "--steps", "1", "--crop", "0", "--accumulate", "1"];
        let printed =
            succeeded(&storm(folder, &[&["train", "pictures.toml"], &flags[..]].concat()));
        let config = folder.join("runs").join(name).join("model/config.json");
        let config: Value =
            serde_json::from_slice(&fs::read(config).expect("a config")).expect("JSON");
        (printed, config)
    };
    let (printed, config) = train("own", "packed");
    assert!(printed.contains("the statistics of the training part"), "{printed}");
    let manifest: Value =
        serde_json::from_slice(&fs::read(folder.join("packed/dataset.json")).expect("a manifest"))
            .expect("JSON");
    let statistics = &manifest["statistics"];
    let pixels = statistics["pixels"].as_f64().expect("a number");
    for channel in 0..3 {
        let sum = statistics["sums"][channel].as_f64().expect("a number");
        let squares = statistics["squares"][channel].as_f64().expect("a number");
        let mean = sum / pixels / 255.0;
        assert!((config["mean"][channel].as_f64().expect("a mean") - mean).abs() < 1e-12);
        let variance = squares / pixels / 65025.0 - mean * mean;
        let std = config["std"][channel].as_f64().expect("a deviation");
        // The green channel is the same everywhere.
        let expected = if channel == 1 { 1.0 } else { variance.sqrt() };
        assert!((std - expected).abs() < 1e-6, "{std} and {expected}");
    }
    let published = serde_json::json!([0.4914, 0.4822, 0.4465]);
    let (printed, config) = train("cifar", "pictures");
    assert!(printed.contains("the published statistics of CIFAR-10"), "{printed}");
    assert_eq!(config["mean"], published);
    // A dataset packed by an older version.
    let old = folder.join("packed/dataset.json");
    let mut manifest = manifest.clone();
    manifest.as_object_mut().expect("an object").remove("statistics");
    let json = serde_json::to_vec(&manifest).expect("JSON");
    let digest: String = Sha256::digest(&json).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(&old, json).expect("written");
    fs::write(folder.join("packed/dataset.sha256"), format!("{digest}  dataset.json\n"))
        .expect("written");
    let (printed, config) = train("old", "packed");
    assert!(printed.contains("because the dataset has none of its own"), "{printed}");
    assert_eq!(config["mean"], published);
}

#[test]
fn pictures_are_packed_on_first_use() {
    let place = place();
    let folder = place.path();
    let train = |name: &str, flags: &[&str]| {
        storm(folder, &[&["train", "pictures.toml", "--name", name], flags].concat())
    };
    succeeded(&train("packed", &["--steps", "4"]));
    let printed = succeeded(&train("raw", &["--steps", "2", "--data", "cifar"]));
    assert!(printed.contains("packed 80 pictures into runs/raw/data"), "{printed}");
    assert!(printed.contains("20 of them held out: the test part"), "{printed}");
    // The packed data is enough to resume.
    fs::rename(folder.join("cifar"), folder.join("elsewhere")).expect("renamed");
    succeeded(&train("raw", &["--steps", "4", "--data", "cifar", "--resume"]));
    assert!(checkpoint(folder, "raw") == checkpoint(folder, "packed"), "the same bits");
    let evaluated = succeeded(&storm(folder, &["eval", "runs/raw"]));
    assert!(evaluated.contains("of 20 held-out images"), "{evaluated}");

    let raw = ["--steps", "1", "--data", "elsewhere"];
    let printed = succeeded(&train("dry", &[&raw[..], &["--dry-run"]].concat()));
    assert!(printed.contains("60 images; 20 images held out"), "{printed}");
    assert!(!folder.join("runs/dry").exists());
    let held = train("held", &[&raw[..], &["--held-out", "0.1"]].concat());
    refused(&held, "held-out is for data without a part for evaluation");
    refused(&train("text", &[&raw[..], &["--model", "gpt2"]].concat()), "gpt2 reads text");
    assert!(!folder.join("runs/held").exists() && !folder.join("runs/text").exists());

    // Without a test part, a share is held out.
    for number in 0..20u8 {
        let class = ["day", "night"][usize::from(number % 2)];
        let colour = [200 * (number % 2), 100, 10 * number];
        write_png(&folder.join(format!("own/{class}/{number}.png")), 8, colour);
    }
    let own = ["--steps", "1", "--data", "own", "--crop", "0", "--accumulate", "1"];
    let printed = succeeded(&train("own", &[&own[..], &["--held-out", "0.2"]].concat()));
    assert!(printed.contains("packed 20 pictures into runs/own/data"), "{printed}");
    assert!(printed.contains("4 of them held out: held-out = 0.2"), "{printed}");
    assert!(printed.contains("the statistics of the training part"), "{printed}");
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

#[test]
fn a_classifier_predicts_and_what_is_refused_leaves_every_bit() {
    let place = place();
    let folder = place.path();
    let train = |name: &str, predict: Option<&str>| -> Vec<Value> {
        let flags =
            ["train", "pictures.toml", "--name", name, "--json", "--steps", "8", "--batch", "2"];
        let more = ["--accumulate", "1", "--eval-steps", "1"];
        let predict = predict.map_or(Vec::new(), |predict| vec!["--predict", predict]);
        let printed = succeeded(&storm(folder, &[&flags[..], &more, &predict].concat()));
        printed.lines().map(|line| serde_json::from_str(line).expect("an object")).collect()
    };
    let bytes = |name: &str| {
        let of = |file: &str| {
            let path = folder.join("runs").join(name).join("checkpoints/step-00000008").join(file);
            fs::read(path).expect(file)
        };
        ["parameters.safetensors", "optimizer.safetensors"].map(of)
    };
    let jumps = |events: &[Value], verdict: &str| -> usize {
        let is_it = |e: &&Value| e["event"] == "jumped" && e["verdict"] == verdict;
        events.iter().filter(is_it).count()
    };
    let predict = |more: &str| {
        format!(
            "direction=\"difference\", warm-up=2, full=2, correct=1, probe-batches=2, margin=10, {more}"
        )
    };
    train("plain", None);
    let unmoved = train("refused", Some(&predict("noise=1e9")));
    assert!(jumps(&unmoved, "refused") >= 2 && jumps(&unmoved, "accepted") == 0, "{unmoved:?}");
    assert!(bytes("refused") == bytes("plain"), "the statistics of its norms too");
    let moved = train("moved", Some(&predict("tau=0.1, noise=0")));
    assert!(jumps(&moved, "accepted") > 0, "{moved:?}");
    assert!(bytes("moved") != bytes("plain"));

    let int8 = predict("probe-weights=\"int8\"");
    let flags = ["train", "pictures.toml", "--name", "int8", "--steps", "8", "--predict", &int8];
    refused(&storm(folder, &flags), "have no form in 8 bits");

    // The pictures between those for evaluations and those for predictions.
    let rows = ["eval", "runs/moved", "--json", "--skip-rows", "2", "--leave-rows", "8"];
    let tested: Value = serde_json::from_str(&succeeded(&storm(folder, &rows))).expect("an object");
    assert_eq!(tested["images"], 10);
    let all = ["eval", "runs/moved", "--skip-rows", "12", "--leave-rows", "8"];
    refused(&storm(folder, &all), "leave nothing to evaluate");
}
