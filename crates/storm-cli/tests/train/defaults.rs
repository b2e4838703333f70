//! Defaults of a run. It reports them, and keeps them when it resumes.

use crate::support::Place;
use std::fs;
use std::process::{Command, Output};

/// The shortest possible config: no length, no learning rate.
const CONFIG: &str = r#"
data = "text.txt"
tokenizer = "bytes"
batch = 1
device = "cpu"
threads = 1
vram = "256MiB"
ram = "1GiB"
"#;

fn place() -> Place {
    let place = Place::new();
    fs::write(place.path().join("short.toml"), CONFIG).expect("a file");
    fs::write(place.path().join("text.txt"), "one, two and three; ".repeat(400)).expect("a file");
    place
}

fn train(place: &Place, flags: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(["train", "short.toml"]);
    command.args(flags.split_whitespace()).output().expect("storm starts")
}

#[track_caller]
fn said(output: Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{errors}");
    String::from_utf8(output.stdout).expect("text") + &errors
}

fn config(place: &Place, run: &str) -> String {
    fs::read_to_string(place.run_folder(run).join("config.toml")).expect("a config")
}

#[test]
fn the_learning_rate_follows_from_what_is_trained() {
    let place = place();
    let small = "--layers 1 --width 16 --heads 2 --steps 1";
    let fresh = said(train(&place, &format!("--name fresh --model gpt2 {small}")));
    assert!(fresh.contains("learning rate 3e-4, the default for fresh weights"), "{fresh}");
    let model = "--model runs/fresh/model --steps 2 --save-every 1";
    let further = said(train(&place, &format!("--name further {model}")));
    assert!(further.contains("learning rate 2e-5, the default to train"), "{further}");
    assert!(config(&place, "further").contains("learning-rate = 0.00002"));
    let adapter = said(train(&place, &format!("--name adapter {model} --lora rank=2")));
    assert!(adapter.contains("learning rate 2e-4, the default for adapters"), "{adapter}");
    let given = said(train(&place, &format!("--name given {model} --learning-rate 1e-3")));
    assert!(!given.contains("the default"), "{given}");
    // The default length is that of `storm plan` and `storm eval`.
    assert!(config(&place, "fresh").contains("seq = 1024"));
}

#[test]
fn a_resumed_run_keeps_what_it_began_with() {
    let place = place();
    let model = "--model gpt2 --layers 1 --width 16 --heads 2 --save-every 1";
    said(train(&place, &format!("--name run {model} --steps 1 --seq 32 --learning-rate 1e-3")));
    let resumed = said(train(&place, &format!("--name run {model} --steps 2 --resume")));
    assert!(
        !resumed.contains("the default") && !resumed.contains("learning-rate was"),
        "{resumed}"
    );
    let config = config(&place, "run");
    assert!(config.contains("seq = 32") && config.contains("learning-rate = 0.001"), "{config}");
}
