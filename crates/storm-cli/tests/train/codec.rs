//! Runs with activations in 8 bits.

use crate::support::{Place, losses};
use serde_json::Value;
use std::process::Command;

/// A tiny model with gated units.
const LLAMA: [&str; 8] =
    ["--model", "llama-3.2-1b", "--kv-heads", "2", "--mlp-width", "200", "--schedule", "constant"];

/// The codec changes gradients but not the first loss. The run resumes bit for bit, and the codec
/// is part of it.
#[test]
fn a_codec_belongs_to_its_run() {
    let place = Place::new();
    let with = |more: &[&'static str]| [&LLAMA[..], more].concat();
    let coded = ["--activation-codec", "int8", "--save-every", "3"];
    let train = |name: &str, more: &[&'static str]| place.run(name, &with(more));
    let whole = losses(&train("whole", &[&coded[..], &["--steps", "6"]].concat()).succeeded());
    let mut parts = losses(&train("parts", &[&coded[..], &["--steps", "3"]].concat()).succeeded());
    let resume = [&coded[..], &["--steps", "6", "--resume", "--vram", "32MiB"]].concat();
    parts.extend(losses(&train("parts", &resume).succeeded()));
    assert_eq!(parts, whole);
    assert!(place.result("parts", 6) == place.result("whole", 6));

    let plain = losses(&train("plain", &["--steps", "6"]).succeeded());
    assert_eq!(plain[0], whole[0]);
    assert_ne!(plain, whole);

    let other = train("parts", &["--steps", "8", "--resume"]);
    other.failed(2, &["activation-codec was int8 when the run began and is none now"]);
    let other = train("plain", &["--steps", "8", "--resume", "--activation-codec", "int8"]);
    other.failed(2, &["activation-codec was none when the run began and is int8 now"]);
}

/// It is refused before anything is created.
#[test]
fn a_model_without_gated_units_is_refused() {
    let place = Place::new();
    let refused = place.run("a", &["--steps", "1", "--activation-codec", "int8"]);
    refused.failed(2, &["compresses the inputs of gated units", "gpt2 has none"]);
    assert!(!place.run_folder("a").exists());
    let unknown = place.run("a", &["--steps", "1", "--activation-codec", "int4"]);
    unknown.failed(2, &["int4"]);
}

/// A plan says what 8 bits would gain if asked, but not for options in use.
#[test]
fn a_plan_says_what_8_bits_would_gain() {
    let place = Place::new();
    let options = |flags: &[&str]| -> Vec<String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
        command.current_dir(place.path()).args(["plan", "--model", "qwen2.5-0.5b", "--json"]);
        command.args(["--batch", "4", "--seq", "512", "--vram", "3GiB", "--ram", "16GiB"]);
        let output =
            command.args(["--hardware", "h200"]).args(flags).output().expect("storm starts");
        let plan: Value = serde_json::from_slice(&output.stdout).expect("an object");
        let others = plan["what_if"].as_array().expect("a list");
        // It is planned for the same memory, so it is not slower.
        let seconds = |of: &Value| of["step_seconds"].as_f64().expect("seconds");
        assert!(others.iter().all(|o| seconds(o) <= 1.001 * seconds(&plan)), "{others:?}");
        let name = |other: &Value| other["option"].as_str().expect("a name").to_owned();
        others.iter().map(name).collect()
    };
    assert!(options(&[]).is_empty());
    let [codec, moments] = ["activation-codec = \"int8\"", "moments = \"int8\""];
    assert_eq!(options(&["--what-if"]), [codec, moments]);
    assert_eq!(options(&["--what-if", "--activation-codec", "int8"]), [moments]);
    assert!(options(&["--what-if", "--precision", "f32", "--activation-codec", "int8"]).is_empty());
}
