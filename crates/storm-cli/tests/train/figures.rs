//! What a summary compares: the part of a run that one plan covers.

use crate::support::{Place, is};
use std::process::Command;

/// What `storm train` prints without `--json`.
fn shown(place: &Place, flags: &[&str]) -> Option<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(["train", "tiny.toml", "--name", "a"]).args(flags);
    let output = command.output().expect("storm starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => Some(String::from_utf8(output.stdout).expect("text")),
        Some(3) => None,
        code => panic!("{code:?}: {errors}"),
    }
}

/// The words of the last line that begins like this.
fn line<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let line = text.lines().rfind(|line| line.starts_with(start));
    line.unwrap_or_else(|| panic!("no line `{start}` in {text}")).split_whitespace().collect()
}

#[test]
fn a_resumed_run_is_compared_with_its_own_budget() {
    let place = Place::new();
    let events = place.run("a", &["--steps", "3", "--eval-every", "3"]).succeeded();
    let step = events.iter().rfind(|event| is(event, "step")).expect("a step");
    let peak_bytes = step["device_bytes"].as_u64().expect("bytes");
    // The smallest of these budgets that works is less than what the first part took.
    let text = [3, 4, 5, 6, 7]
        .into_iter()
        .find_map(|eighths| {
            let vram = format!("{}KiB", (peak_bytes * eighths / 8) >> 10);
            let flags = ["--resume", "--steps", "6", "--eval-every", "3", "--vram", &vram];
            shown(&place, &flags)
        })
        .expect("some less is enough");
    let device = line(&text, "device ");
    assert_eq!(device.last(), Some(&"within"), "{text}");
    // Progress line and summary show the same speed.
    let tokens = line(&text, "tokens ");
    let progress = line(&text, "step 6/6 ");
    let unit = progress.iter().position(|word| *word == "tok/s").expect("a speed");
    let speed = format!("{}/s", progress[unit - 1].replace(',', ""));
    assert_eq!(tokens.last(), Some(&speed.as_str()), "{text}");
    // What the speed leaves out is named.
    let time = line(&text, "time ").join(" ");
    assert!(time.contains("for 3 steps") && time.contains("evaluation"), "{time}");
}
