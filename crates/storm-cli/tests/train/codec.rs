//! Runs whose activations wait in 8 bits.

use crate::support::{Place, losses};

/// A tiny model with gated units.
const LLAMA: [&str; 8] =
    ["--model", "llama-3.2-1b", "--kv-heads", "2", "--mlp-width", "200", "--schedule", "constant"];

/// Other gradients than without, from the same first loss; resumed to the bit; and part of what the run is.
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

/// Before anything is made.
#[test]
fn a_model_without_gated_units_is_refused() {
    let place = Place::new();
    let refused = place.run("a", &["--steps", "1", "--activation-codec", "int8"]);
    refused.failed(2, &["stores what goes into gated units", "gpt2 has none"]);
    assert!(!place.run_folder("a").exists());
    let unknown = place.run("a", &["--steps", "1", "--activation-codec", "int4"]);
    unknown.failed(2, &["int4"]);
}
