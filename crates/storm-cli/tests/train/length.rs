//! The length of a run and its learning rate: epochs, cooldown, a dry run.

use crate::support::{Place, finish, is, losses, tree};
use serde_json::Value;
use std::fs;
use std::process::Command;

fn rates(events: &[Value]) -> Vec<f64> {
    let steps = events.iter().filter(|event| is(event, "step"));
    steps.map(|event| event["learning_rate"].as_f64().expect("a rate")).collect()
}

fn event<'a>(events: &'a [Value], name: &str) -> &'a Value {
    events.iter().find(|event| is(event, name)).unwrap_or_else(|| panic!("no {name}: {events:?}"))
}

#[test]
fn epochs_are_passes_over_the_rows() {
    let place = Place::new();
    let whole = place.run("whole", &["--epochs", "0.25"]).succeeded();
    let said = event(&whole, "epochs");
    let count = |key: &str| said[key].as_u64().unwrap_or_else(|| panic!("{key}: {said}"));
    let (rows, steps) = (count("rows_per_epoch"), count("steps"));
    assert_eq!(count("rows_per_step"), 4);
    assert_eq!(steps, rows.div_ceil(4).div_ceil(4), "a quarter of {rows} rows, 4 a step");
    assert_eq!(losses(&whole).len() as u64, steps);
    assert_eq!(event(&whole, "started")["steps"], steps);
    // The same number of steps, given by hand, is the same run.
    let by_hand = place.run("by-hand", &["--steps", &steps.to_string()]).succeeded();
    assert_eq!(losses(&by_hand), losses(&whole));
    let config =
        fs::read_to_string(place.run_folder("whole").join("config.toml")).expect("a config");
    assert!(config.contains("epochs = 0.25") && !config.contains("\nsteps"), "{config}");
    // Stopped halfway, it continues to the same end, from its own config.
    let half = steps / 2;
    let flags = ["--epochs", "0.25", "--save-every", &half.to_string(), "--keep-last", "9"];
    place.run("parts", &flags).succeeded();
    fs::remove_dir_all(place.run_folder("parts").join(format!("checkpoints/step-{steps:08}")))
        .expect("the last checkpoint");
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path());
    command.args(["train", "runs/parts/config.toml", "--resume", "--json"]);
    let resumed = finish(command).succeeded();
    assert_eq!(
        losses(&resumed)[..],
        losses(&whole)[losses(&whole).len() - losses(&resumed).len()..]
    );
    assert!(place.result("parts", steps) == place.result("whole", steps));
    // A flag overrides the key of the config.
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path());
    let more = (steps + 1).to_string();
    command.args(["train", "runs/parts/config.toml", "--resume", "--json", "--steps", &more]);
    assert_eq!(losses(&finish(command).succeeded()).len(), 1);
}

#[test]
fn a_cooldown_is_the_same_after_a_resume() {
    let place = Place::new();
    let wsd = ["--schedule", "wsd", "--warmup", "2", "--cooldown", "0.3", "--steps", "10"];
    let flags = [&wsd[..], &["--save-every", "8", "--keep-last", "9"]].concat();
    let whole = place.run("whole", &flags).succeeded();
    let all = rates(&whole);
    assert!(all[1..7].iter().all(|rate| (rate - 1e-2).abs() < 1e-9), "{all:?}");
    assert!(all[0] < all[1] && all[7] < all[6] && (all[9] - 1e-3).abs() < 1e-9, "{all:?}");
    place.run("parts", &flags).succeeded();
    fs::remove_dir_all(place.run_folder("parts").join("checkpoints/step-00000010")).expect("gone");
    let resumed = place.run("parts", &[&flags[..], &["--resume"]].concat()).succeeded();
    assert_eq!(rates(&resumed), all[8..]);
    assert_eq!(losses(&resumed)[..], losses(&whole)[8..]);
    assert!(place.result("parts", 10) == place.result("whole", 10));
}

#[test]
fn a_dry_run_says_all_and_writes_nothing() {
    let place = Place::new();
    let before = tree(place.path());
    let flags = ["--dry-run", "--epochs", "2", "--keep-last", "3"];
    let events = place.run("dry", &flags).succeeded();
    let [said] = &events[..] else { panic!("one object: {events:?}") };
    assert_eq!(said["event"], "dry_run");
    let count = |key: &str| said[key].as_u64().unwrap_or_else(|| panic!("{key}: {said}"));
    assert_eq!(count("steps"), (2 * count("rows_per_epoch")).div_ceil(4));
    assert_eq!(count("tokens"), count("steps") * 4 * 16);
    assert_eq!(count("disk_bytes"), 5 * said["plan"]["checkpoint"]["disk_bytes"].as_u64().unwrap());
    assert!(said["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{said}");
    assert!(count("train_tokens") > count("held_tokens"), "{said}");
    assert!(tree(place.path()) == before, "a dry run left something");
    // The output without `--json`.
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(["train", "tiny.toml", "--dry-run"]);
    let output = command.output().expect("storm starts");
    let text = String::from_utf8(output.stdout).expect("text");
    for part in ["peak", "data ", "run ", "time ", "memory ", "disk ", "nothing was written"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert!(tree(place.path()) == before, "a dry run left something");
    // The run does what the dry run says.
    let run = place.run("dry", &["--epochs", "2", "--log-every", "100"]).succeeded();
    assert_eq!(losses(&run).len() as u64, count("steps"));
    // Every check of the run applies, and an existing run is refused.
    place.run("dry", &["--dry-run"]).failed(2, &["has checkpoints already"]);
    place.run("other", &["--dry-run", "--vram", "10KB"]).failed(3, &["no plan fits"]);
    let resumed = place.run("dry", &["--dry-run", "--resume", "--epochs", "3"]).succeeded();
    assert_eq!(resumed[0]["event"], "dry_run");
}

#[test]
fn a_config_is_planned_as_it_is_run() {
    let place = Place::new();
    let plan = |flags: &[&str]| -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
        command.current_dir(place.path()).args(["plan", "tiny.toml", "--json"]).args(flags);
        let output = command.output().expect("storm starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let planned = plan(&["--hardware", "reference", "--vram", "1GiB"]);
    let run =
        place.run("a", &["--dry-run", "--hardware", "reference", "--vram", "1GiB"]).succeeded();
    for key in [
        "parameters",
        "vram_bytes",
        "ram_bytes",
        "vram_peak_bytes",
        "ram_peak_bytes",
        "step_seconds",
        "batch",
        "accumulate",
        "sequence",
        "decisions",
        "checkpoint",
    ] {
        assert_eq!(planned[key], run[0]["plan"][key], "{key}");
    }
    assert_eq!(planned["hardware"], "reference");
    // Flags override the file, even if they say it in another way.
    let other = plan(&["--seq", "32", "--tokens-per-step", "256"]);
    assert_eq!((&other["sequence"], &other["tokens_per_step"]), (&32.into(), &256.into()));
    // Without `--hardware`, it plans for the CPU of the config.
    assert!(plan(&[])["hardware"].as_str().is_some_and(|name| name != "h200"));
}
