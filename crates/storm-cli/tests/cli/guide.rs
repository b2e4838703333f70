//! docs/guide.md matches `storm plan`.

use serde_json::Value;
use std::process::Command;
use tempfile::TempDir;

/// Two digits are shown, and machines round differently. A better planner changes more than that.
const TOLERANCE: f64 = 0.1;

/// The cell of a card, a model and a column of RAM, as tokens per second.
fn cell(guide: &str, card: &str, model: &str, column: usize) -> f64 {
    let table = guide.split("### A card with ").find(|part| part.contains(&format!("`{card}`\n")));
    let row = table
        .and_then(|table| table.lines().find(|line| line.starts_with(&format!("| `{model}` |"))));
    let cell = row.and_then(|row| row.split('|').nth(2 + column));
    let cell = cell.unwrap_or_else(|| panic!("no {model} on {card} in docs/guide.md"));
    let digits = cell.split(" tok/s").next().unwrap_or_default().trim().replace(',', "");
    digits.parse().unwrap_or_else(|error| panic!("{cell}: {error}"))
}

#[test]
fn the_guide_shows_what_plans_say() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide.md");
    let guide = std::fs::read_to_string(path).expect("the guide");
    let said = cell(&guide, "rtx-4060", "qwen2.5-0.5b", 0);
    // Without measurements of this machine, which would replace the data sheet.
    let cache = TempDir::new().expect("a folder");
    let line =
        "plan --model qwen2.5-0.5b --tokens-per-step 32768 --hardware rtx-4060 --ram 12GiB --json";
    let mut storm = Command::new(env!("CARGO_BIN_EXE_storm"));
    let output = storm.args(line.split(' ')).env("STORM_CACHE", cache.path()).output().unwrap();
    let object: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let planned = object["tokens_per_second"].as_f64().expect("a speed");
    assert!(
        (planned / said - 1.0).abs() < TOLERANCE,
        "docs/guide.md says {said} tokens/s, a plan {planned}: run `cargo xtask guide`"
    );
}
