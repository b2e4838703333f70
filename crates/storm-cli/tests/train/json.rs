//! `--json`: nothing but JSON on standard output, with the keys that docs/json.md names.

use crate::support::Place;
use serde_json::{Deserializer, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Output};

/// A call of each command that has the option. Those for a GPU fail without one, and print nothing
/// on standard output.
const CALLS: [&str; 19] = [
    "train tiny.toml --name again --steps 2",
    "train tiny.toml --name other --epochs 0.1 --sample-tokens 2",
    "train tiny.toml --name other --resume --dry-run",
    "sample runs/a --prompt 7 --tokens 2",
    "eval runs/a --device cpu",
    "report runs/a",
    "model list",
    "model show runs/a/model",
    "export runs/a exported",
    "data pack text.txt --tokenizer bytes --out packed",
    "data inspect packed",
    "data pack --synthetic 20 --shape 4,5 --codec lz4 --out records",
    "data inspect records",
    "data estimate records --batch 2 --records 5000 --rate 100 --hardware reference",
    "data batches packed --seq 8 --batch 2 --count 2 --out batches.safetensors",
    "plan --model gpt2 --batch 1 --seq 64 --vram 4GiB --ram 8GiB --hardware reference",
    "doctor",
    "probe --quick",
    "verify --queues",
];

/// Not called here: they measure for seconds, and other tests read what they print. One needs a
/// GPU.
const ELSEWHERE: [&str; 9] = [
    "bench attention",
    "bench checkpoint",
    "bench cpu",
    "bench curve",
    "bench generate",
    "bench loss",
    "bench predict",
    "bench train",
    "merge",
];

fn storm(place: &Place, line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(line.split_whitespace());
    command.output().expect("storm starts")
}

/// The name of the command in a call, as in the table of options.
fn name_of(line: &str, names: &BTreeSet<String>) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let name = [words[..words.len().min(2)].join(" "), words[0].to_owned()];
    name.into_iter().find(|name| names.contains(name)).unwrap_or_else(|| panic!("{line}"))
}

/// Commands that have the option.
fn with_json(place: &Place) -> BTreeSet<String> {
    let table = storm(place, "option-table");
    let rows = Deserializer::from_slice(&table.stdout).into_iter::<Value>();
    let has_json = |row: &Value| {
        let options = row["options"].as_array().expect("options");
        options.iter().any(|option| option["flag"] == "--json")
    };
    let words = |row: Value| {
        let words = row["command"].as_array().expect("words").clone();
        words.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" ")
    };
    rows.map(|row| row.expect("JSON")).filter(has_json).map(words).collect()
}

/// Keys by command and, if it prints events, by the name of the event: rows of docs/json.md.
fn documented() -> BTreeMap<(String, String), BTreeSet<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/json.md");
    let text = std::fs::read_to_string(path).expect("docs/json.md");
    let mut found = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with("| `storm ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let names = |cell: &str| -> Vec<String> {
            cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
        };
        let command = names(cells[0])[0].trim_start_matches("storm ").to_owned();
        let event = names(cells[1]).first().cloned().unwrap_or_default();
        found.insert((command, event), names(cells[2]).into_iter().collect());
    }
    found
}

#[test]
fn every_command_prints_what_the_documentation_says() {
    let place = Place::new();
    place.run("a", &["--steps", "2", "--eval-every", "1"]).succeeded();
    let names = with_json(&place);
    let documented = documented();
    let called: BTreeSet<String> = CALLS.iter().map(|line| name_of(line, &names)).collect();
    let all: BTreeSet<String> =
        called.iter().cloned().chain(ELSEWHERE.map(str::to_owned)).collect();
    assert_eq!(all, names, "every command with --json has a call here");
    let in_document: BTreeSet<String> =
        documented.keys().map(|(command, _)| command.clone()).collect();
    assert_eq!(in_document, names, "docs/json.md has every command with --json");
    let has_gpu = Path::new("/proc/driver/nvidia").exists();
    for line in CALLS {
        let name = name_of(line, &names);
        let needs_gpu = ["probe", "verify"].contains(&name.as_str());
        if needs_gpu && has_gpu {
            continue;
        }
        let output = storm(&place, &format!("{line} --json"));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), !needs_gpu, "{line}: {errors}");
        let values: Result<Vec<Value>, _> =
            Deserializer::from_slice(&output.stdout).into_iter().collect();
        let values = values.unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(values.is_empty(), needs_gpu, "{line}: {errors}");
        for value in values {
            let keys = value.as_object().unwrap_or_else(|| panic!("{line}: {value}")).keys();
            let is_of_records = value["kind"] == "records";
            let event =
                if is_of_records { "records" } else { value["event"].as_str().unwrap_or_default() };
            let event = event.to_owned();
            let expected = documented.get(&(name.clone(), event.clone()));
            let expected = expected.unwrap_or_else(|| panic!("{line}: no row for {event} {value}"));
            assert_eq!(&keys.cloned().collect::<BTreeSet<_>>(), expected, "{line} {event}");
        }
    }
}
