//! Runs with adapters: resumed bit for bit, on a base that must stay the same, and used by every
//! command.

use crate::support::{Place, finish, is, losses};
use serde_json::Value;
use std::fs;
use std::process::{Command, Output};

const CONFIG: &str = r#"
model = "runs/base/model"
lora = { rank = 2, targets = ["c_attn", "mlp.c_proj"], modules-to-save = ["ln_f"] }
data = "text.txt"
tokenizer = "bytes"
seq = 16
batch = 2
accumulate = 2
learning-rate = 1e-2
schedule = "constant"
seed = 5
device = "cpu"
threads = 1
vram = "64MiB"
ram = "256MiB"
save-every = 2
keep-last = 9
"#;

/// A place with a base model.
fn place() -> Place {
    let place = Place::new();
    place.run("base", &["--steps", "3", "--precision", "f32"]).succeeded();
    fs::write(place.path().join("lora.toml"), CONFIG).expect("a file");
    place
}

fn run(place: &Place, name: &str, flags: &[&str]) -> crate::support::Done {
    finish(place.command_of("lora.toml", name, flags))
}

fn storm(place: &Place, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(args).output().expect("storm starts")
}

#[track_caller]
fn json(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    serde_json::from_slice(&output.stdout).expect("an object")
}

/// What training resumes from, and the saved adapter.
fn result(place: &Place, name: &str) -> Vec<Vec<u8>> {
    let run = place.run_folder(name);
    ["parameters", "optimizer"]
        .map(|part| format!("checkpoints/step-00000006/{part}.safetensors"))
        .into_iter()
        .chain(["adapter/adapter_model.safetensors".to_owned()])
        .map(|file| fs::read(run.join(&file)).unwrap_or_else(|error| panic!("{file}: {error}")))
        .collect()
}

/// With the base on disk, a run has the same bytes, even if it resumes without the disk.
#[test]
fn a_base_on_disk_changes_no_bit() {
    // More layers than slots.
    let place = Place::new();
    place.run("base", &["--steps", "3", "--precision", "f32", "--layers", "5"]).succeeded();
    fs::write(place.path().join("lora.toml"), CONFIG).expect("a file");
    let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let start = ["--steps", "6", "--hardware", "reference", "--vram", "1GiB"];
    run(&place, "plain", &start).succeeded();
    let scratch = folder.path().to_str().expect("UTF-8");
    let there = ["--weights", "streamed", "--on-disk", "frozen-weights", "--disk", scratch];
    let events = run(&place, "there", &[&start[..], &there[..]].concat()).succeeded();
    assert_eq!(result(&place, "there"), result(&place, "plain"));
    let disk = events.iter().find(|event| is(event, "disk")).expect("an event");
    assert_eq!(disk["written_bytes_per_step"], 0, "{disk}");
    assert_eq!(disk["contents"][0]["name"], "frozen weights", "{disk}");
    assert!(disk["read_bytes_per_step"].as_u64().is_some_and(|read| read > 0), "{disk}");

    let part = ["--steps", "2", "--hardware", "reference", "--vram", "1GiB"];
    run(&place, "mixed", &[&part[..], &there[..]].concat()).succeeded();
    run(&place, "mixed", &[&start[..], &["--resume"][..]].concat()).succeeded();
    assert_eq!(result(&place, "mixed"), result(&place, "plain"));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

#[test]
fn a_resumed_run_of_adapters_equals_one_that_never_stopped() {
    let place = place();
    for precision in ["f32", "bf16-master", "bf16-stochastic"] {
        let flags = ["--precision", precision];
        let whole = format!("whole-{precision}");
        let expected = run(&place, &whole, &[&flags[..], &["--steps", "6"]].concat()).succeeded();
        let parts = format!("parts-{precision}");
        let mut found =
            losses(&run(&place, &parts, &[&flags[..], &["--steps", "3"]].concat()).succeeded());
        let resume = [&flags[..], &["--steps", "6", "--resume", "--vram", "32MiB"]].concat();
        found.extend(losses(&run(&place, &parts, &resume).succeeded()));
        assert_eq!(found, losses(&expected), "{precision}");
        assert!(result(&place, &parts) == result(&place, &whole), "{precision}");
        // The base is not in the checkpoint, which is far smaller.
        let header = String::from_utf8_lossy(&result(&place, &whole)[0][8..]).into_owned();
        assert!(header.contains("layers.0.attention.qkv.lora_A"), "{header}");
        assert!(!header.contains("attention.qkv.weight") && !header.contains("embedding"));
    }
}

#[test]
fn another_base_is_refused_when_a_run_goes_on() {
    let place = place();
    run(&place, "a", &["--steps", "2"]).succeeded();
    fs::rename(place.run_folder("base"), place.run_folder("old")).expect("renamed");
    place.run("base", &["--steps", "4", "--precision", "f32"]).succeeded();
    let resumed = run(&place, "a", &["--steps", "4", "--resume"]);
    resumed.failed(4, &["are not those that this run's adapters were trained on"]);
}

/// A base in 8 bits: other losses than in f32, resumed bit for bit, and evaluated as the run
/// computes.
#[test]
fn a_base_in_8_bits_belongs_to_its_run() {
    let place = place();
    let flags =
        ["--precision", "f32", "--base", "int8", "--eval-every", "6", "--eval-steps", "1000"];
    let whole = run(&place, "whole", &[&flags[..], &["--steps", "6"]].concat()).succeeded();
    let mut found =
        losses(&run(&place, "a", &[&flags[..], &["--steps", "3"]].concat()).succeeded());
    let resume = [&flags[..], &["--steps", "6", "--resume", "--vram", "32MiB"]].concat();
    found.extend(losses(&run(&place, "a", &resume).succeeded()));
    assert_eq!(found, losses(&whole));
    assert!(result(&place, "a") == result(&place, "whole"));
    let wide = ["--precision", "f32", "--steps", "6"];
    let wide = losses(&run(&place, "wide", &wide).succeeded());
    assert_ne!(wide[0], found[0]);

    let held_out = whole.iter().rfind(|event| is(event, "evaluated")).expect("an evaluation");
    let evaluated = json(&storm(&place, &["eval", "runs/a", "--json"]));
    assert_eq!(evaluated["loss"], held_out["loss"], "{evaluated}");

    let other = run(&place, "a", &["--precision", "f32", "--steps", "8", "--resume"]);
    other.failed(2, &["base was int8 when the run began and is bf16 now"]);
    let full = place.run("full", &["--steps", "1", "--base", "int8"]);
    full.failed(2, &["is for weights that are not trained"]);
}

/// With a base in 4 bits, the saved adapter records that. A merge onto the weights of the run is
/// closer to it than one onto the original weights.
#[test]
fn an_adapter_knows_how_its_base_was_stored() {
    let place = place();
    run(&place, "a", &["--steps", "6", "--precision", "f32", "--base", "nf4"]).succeeded();
    run(&place, "wide", &["--steps", "1", "--precision", "f32"]).succeeded();
    let eval = |model: &str| {
        let args = ["eval", model, "--data", "runs/a/data", "--seq", "16", "--batch", "4"];
        let more = ["--batches", "20", "--device", "cpu", "--json", "--dtype", "f32"];
        storm(&place, &[&args[..], &more[..]].concat())
    };
    let loss = |model: &str| json(&eval(model))["loss"].as_f64().expect("a loss");
    let said = String::from_utf8_lossy(&eval("runs/a/adapter").stderr).into_owned();
    assert!(said.contains("its base is stored as nf4"), "{said}");
    let trained = loss("runs/a");
    assert_eq!(loss("runs/a/adapter"), trained);
    for (onto, out) in [("original", "far"), ("dequantized", "near")] {
        let merged =
            storm(&place, &["merge", "runs/a/adapter", "--out", out, "--onto", onto, "--json"]);
        json(&merged);
    }
    assert!((loss("near") - trained).abs() < 1e-5, "{} and {trained}", loss("near"));
    assert!((loss("far") - trained).abs() > 1e-4, "{} and {trained}", loss("far"));
    let refused =
        storm(&place, &["merge", "runs/wide/adapter", "--out", "x", "--onto", "dequantized"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("leave it out"));
}

/// With dropout, a run learns something else, resumes bit for bit under another plan, and its
/// adapter records it for PEFT.
#[test]
fn dropout_belongs_to_a_run() {
    let place = place();
    let flags = ["--precision", "f32", "--lora", "rank=2, dropout=0.4"];
    let whole = run(&place, "whole", &[&flags[..], &["--steps", "6"]].concat()).succeeded();
    let mut found =
        losses(&run(&place, "a", &[&flags[..], &["--steps", "3"]].concat()).succeeded());
    let resume = [&flags[..], &["--steps", "6", "--resume", "--vram", "32MiB"]].concat();
    found.extend(losses(&run(&place, "a", &resume).succeeded()));
    assert_eq!(found, losses(&whole));
    assert!(result(&place, "a") == result(&place, "whole"));
    let without = ["--precision", "f32", "--lora", "rank=2", "--steps", "6"];
    let without = losses(&run(&place, "without", &without).succeeded());
    // B begins at zero, so the first step computes the same.
    assert_eq!(without[0], found[0]);
    assert_ne!(without[2..], found[2..]);
    let config = place.run_folder("a").join("adapter/adapter_config.json");
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(config).expect("a config")).expect("JSON");
    assert_eq!(config["lora_dropout"], 0.4);
}

/// The run, its saved adapter, that adapter exported again and the merged model are the same model.
#[test]
fn every_command_takes_an_adapter() {
    let place = place();
    run(&place, "a", &["--steps", "6", "--precision", "f32"]).succeeded();
    let eval = |model: &str| {
        let data = place.run_folder("a").join("data");
        let data = data.to_str().expect("text");
        let args = ["eval", model, "--data", data, "--seq", "16", "--batch", "4", "--dtype", "f32"];
        let args = [&args[..], &["--batches", "20", "--device", "cpu", "--json"]].concat();
        json(&storm(&place, &args))["loss"].as_f64().expect("a loss")
    };
    let loss = eval("runs/a");
    assert_eq!(eval("runs/a/adapter"), loss);
    assert_eq!(eval("runs/a/checkpoints/step-00000006"), loss);
    json(&storm(&place, &["export", "runs/a", "again", "--json"]));
    let file = "adapter_model.safetensors";
    let read = |folder: &str| fs::read(place.path().join(folder).join(file)).expect("weights");
    assert!(read("again") == read("runs/a/adapter"));

    let merge = ["merge", "runs/a/adapter", "--out", "merged", "--json", "--seq", "16"];
    let merge = [&merge[..], &["--data", "runs/a/data", "--batches", "20"]].concat();
    let losses = json(&storm(&place, &merge))["losses"].clone();
    let of = |name: &str| losses[name].as_f64().expect("a loss");
    assert_eq!((of("adapter"), of("base")), (loss, eval("runs/base/model")));
    assert!((of("merged") - loss).abs() < 1e-5, "{losses}");
    assert!(loss < of("base") - 0.01, "{losses}");
    assert_eq!(eval("merged"), of("merged"));

    let sample = ["sample", "--prompt", "12", "--tokens", "8", "--device", "cpu", "--json"];
    let sample = [&sample[..], &["--temperature", "0", "--tokenizer", "bytes"]].concat();
    let text =
        |model: &str| json(&storm(&place, &[&sample[..], &[model]].concat()))["text"].clone();
    assert_eq!(text("runs/a"), text("runs/a/adapter"));

    // A run continues with an adapter: its first loss is the one that the other run ended with.
    let fresh = place.path().join("more.toml");
    let config = CONFIG.lines().filter(|line| !line.starts_with("lora")).collect::<Vec<_>>();
    fs::write(&fresh, config.join("\n")).expect("a file");
    let more = place.command_of("more.toml", "b", &["--steps", "1", "--adapter", "again"]);
    finish(more).succeeded();
    let plan = ["plan", "--model", "runs/base/model", "--lora", "rank=2", "--batch", "2", "--json"];
    let plan = [&plan[..], &["--seq", "16", "--hardware", "h200", "--ram", "1GiB"]].concat();
    json(&storm(&place, &plan));
}

#[test]
fn what_cannot_be_adapted_is_refused_before_anything_is_made() {
    let place = place();
    for (lora, code, part) in [
        ("rank=2, targets=[\"q_proj\"]", 4, "transformer.h.0.attn.c_attn"),
        ("rank=2, targets=\".*nothing.*\"", 4, "matches no module"),
        ("rank=2, targets=\"(\"", 4, "cannot be used"),
        ("rank=2, targets=\"lm_head\"", 4, "matches no module"),
        ("rank=2, targets=\"wte\"", 4, "`transformer.wte` cannot have an adapter"),
        ("rank=17", 4, "take a rank of at most 16"),
        ("rank=2, alpha=-1", 4, "alpha is -1"),
        ("rank=2, dropout=1.0", 4, "less than 1"),
        ("rank=2, modules-to-save=[\"wte\"]", 4, "stays frozen"),
        ("rank=2, rank-pattern={ nothing = 3 }", 4, "nothing"),
        ("rank=2, unknown=1", 2, "unknown"),
    ] {
        run(&place, "bad", &["--steps", "1", "--lora", lora]).failed(code, &[part]);
    }
    let preset = place.run("bad", &["--steps", "1", "--lora", "rank=2"]);
    preset.failed(2, &["is a preset without any"]);
    assert!(!place.run_folder("bad").exists());
}

#[test]
fn an_adapter_for_another_base_is_refused() {
    let place = place();
    run(&place, "a", &["--steps", "1"]).succeeded();
    place.run("wide", &["--steps", "1", "--width", "32"]).succeeded();
    let data = ["--data", "runs/a/data", "--seq", "16", "--device", "cpu"];
    let eval = |model: &str, base: &str| {
        storm(&place, &[&["eval", model, "--base-model", base], &data[..]].concat())
    };
    let refused = |output: Output, part: &str| {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{errors}");
        assert!(errors.contains(part), "{part} is not in: {errors}");
    };
    refused(eval("runs/a/adapter", "runs/wide/model"), "is it for another base?");
    refused(eval("runs/a", "runs/wide/model"), "in the model");
    refused(eval("runs/a/adapter", "nowhere"), "give --base-model");

    // NaN in the last bytes of the file.
    let file = place.run_folder("a").join("adapter/adapter_model.safetensors");
    let mut bytes = fs::read(&file).expect("weights");
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).expect("weights");
    refused(eval("runs/a/adapter", "runs/base/model"), "holds NaN");
}
