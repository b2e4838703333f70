//! Samples longer than a row, positions that a model does not have, and warnings before a run
//! begins.

use crate::support::{Place, finish};
use std::fs;

/// Instructions of 7, 7 and 31 positions.
fn with_samples() -> Place {
    let place = Place::new();
    let sample =
        |completion: String| serde_json::json!({"prompt": "1+1=", "completion": completion});
    let lines =
        ["2".repeat(3), "3".repeat(3), "4".repeat(27)].map(|text| format!("{}\n", sample(text)));
    fs::write(place.path().join("samples.jsonl"), lines.concat()).unwrap();
    place
}

const DATA: [&str; 6] = ["--data", "samples.jsonl", "--steps", "1", "--held-out", "0"];

#[test]
fn long_samples_are_counted_before_the_first_step() {
    let place = with_samples();
    let run = |name: &str, more: &[&str]| place.run(name, &[&DATA[..], more].concat());
    let words = "1 of 3 training samples are longer than seq = 16";
    for (overlong, fate) in [
        ("drop", "are left out (overlong = drop)"),
        ("truncate", "are cut off at the end"),
        ("split", "are split into several"),
    ] {
        let done = run(overlong, &["--overlong", overlong]);
        assert!(done.stderr.contains(words) && done.stderr.contains(fate), "{}", done.stderr);
        assert!(done.stderr.contains("seq = 31 would hold all of them"), "{}", done.stderr);
        done.succeeded();
    }
    run("error", &["--overlong", "error"]).failed(4, &["1 samples", "a sequence of 31"]);
    // This is the default.
    let done = run("default", &[]);
    assert!(done.stderr.contains("overlong = drop"), "{}", done.stderr);
    done.succeeded();
    assert!(place.result("default", 1) == place.result("drop", 1));
    let done = run("long", &["--seq", "31"]);
    assert!(!done.stderr.contains("longer than seq"), "{}", done.stderr);
    done.succeeded();
    // Another choice makes different rows.
    let data = ["--data", "samples.jsonl", "--held-out", "0", "--steps", "2", "--resume"];
    place
        .run("drop", &[&data[..], &["--overlong", "split"]].concat())
        .failed(4, &["overlong was Drop and is Split now"]);
}

#[test]
fn positions_that_a_model_does_not_have_are_refused() {
    let place = Place::new();
    place.run("made", &["--steps", "1"]).succeeded();
    let model = place.run_folder("made").join("model");
    let run = |name: &str, seq: &str| finish(of_directory(&place, name, &model, seq));
    run("long", "17").failed(2, &["seq = 17 needs 17 positions, and the model has 16"]);
    run("fits", "16").succeeded();
}

/// Trains the model of a directory.
fn of_directory(
    place: &Place,
    name: &str,
    model: &std::path::Path,
    seq: &str,
) -> std::process::Command {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(["train", "--json", "--steps", "1", "--name", name]);
    command.args(["--device", "cpu", "--threads", "1", "--ram", "256MiB", "--vram", "64MiB"]);
    command.args(["--data", "text.txt", "--seq", seq, "--model"]).arg(model);
    command
}

/// Config fields without effect are skipped with a warning, and so is dropout that is not applied.
#[test]
fn what_of_a_config_is_not_used_is_said() {
    let place = Place::new();
    place.run("made", &["--steps", "1"]).succeeded();
    let model = place.run_folder("made").join("model");
    let path = model.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["n_special"] = 0.into();
    config["transformers.js_config"] = serde_json::json!({"dtype": "q4"});
    config["resid_pdrop"] = 0.1.into();
    config["attn_pdrop"] = 0.into();
    fs::write(&path, config.to_string()).unwrap();
    let done = finish(of_directory(&place, "again", &model, "16"));
    let passed_over = "`n_special`, `transformers.js_config` change nothing in this model";
    assert!(done.stderr.contains(passed_over), "{}", done.stderr);
    assert!(done.stderr.contains("asks for dropout (resid_pdrop = 0.1)"), "{}", done.stderr);
    done.succeeded();
}

/// Without a GPU, `auto` says so. A large model does not start.
#[test]
fn the_device_that_is_taken_is_said() {
    let place = Place::new();
    let run = |name: &str, flags: &[&str]| {
        let mut command = place.command(name, flags);
        // The driver shows no GPU then, whatever the machine has.
        command.env("CUDA_VISIBLE_DEVICES", "");
        finish(command)
    };
    let done = run("auto", &["--steps", "1", "--device", "auto"]);
    let words = "warning: this runs on the CPU, since no GPU can be used";
    assert!(done.stderr.contains(words) && done.stderr.contains("storm doctor"), "{}", done.stderr);
    done.succeeded();
    let large = ["--layers", "12", "--width", "4096", "--heads", "32", "--device", "auto"];
    run("large", &large).failed(2, &["no GPU can be used", "too many for a CPU", "--device cpu"]);
}
