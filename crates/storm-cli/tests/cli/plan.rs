//! `storm plan`.

use crate::{Done, Tiny, storm, words};
use serde_json::Value;
use std::fs;
use storm_plan::HardwareProfile;
use tempfile::TempDir;

/// A model that is planned quickly.
const SMALL: &str = "plan --model qwen2.5-0.5b --seq 512 --ram 16GiB --hardware reference";

fn plan(rest: &str) -> Done {
    words(&format!("{SMALL} {rest}"))
}

fn json(rest: &str) -> Value {
    let text = plan(&format!("{rest} --json")).succeeded();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn a_table_for_people() {
    let text = plan("--batch 4 --accumulate 2 --vram 3GiB").succeeded();
    for part in [
        "weights",
        "gradients",
        "optimizer state",
        "activations",
        "layer inputs",
        "peak",
        "budget",
        "this plan",
        "keep-all",
        "recompute-all",
        "offload-all",
        "sqrt-n",
        "Limited by",
        "snapshot",
        "A checkpoint takes",
    ] {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
}

#[test]
fn an_object_for_programs() {
    let object = json("--batch 4 --accumulate 2 --vram 3GiB");
    assert_eq!(object["feasible"], true);
    let number = |key: &str| object[key].as_f64().unwrap_or_else(|| panic!("{key}: {object:#}"));
    assert!(number("vram_peak_bytes") <= 3.0 * f64::from(1 << 30));
    assert!(number("vram_min_bytes") <= number("vram_peak_bytes"));
    for key in ["ram_peak_bytes", "step_seconds", "tokens_per_second", "h2d_bytes", "d2h_bytes"] {
        assert!(number(key) > 0.0, "{key}: {object:#}");
    }
    for key in ["compute_busy", "recompute_fraction"] {
        assert!((0.0..=1.0).contains(&number(key)), "{key}: {object:#}");
    }
    let tokens = number("tokens_per_second") * number("step_seconds");
    assert!((tokens - 4.0 * 2.0 * 512.0).abs() < 1.0, "{tokens}");
    assert_eq!(object["policies"].as_array().map(Vec::len), Some(4), "{object:#}");
}

#[test]
fn checkpoints_are_in_the_plan() {
    let start = "plan --model qwen2.5-0.5b --seq 512 --batch 4 --vram 3GiB --hardware reference";
    let object = |rest: &str| -> Value {
        let text = words(&format!("{start} {rest} --json")).succeeded();
        serde_json::from_str(&text).expect("JSON")
    };
    let bytes = |object: &Value| object.as_u64().unwrap_or_else(|| panic!("{object:#}"));
    let ample = object("--ram 16GiB");
    // Three bf16 values per parameter.
    let needed = 6 * bytes(&ample["parameters"]);
    let expected = |saved: &str, snapshot: u64| serde_json::json!({"disk_bytes": needed, "snapshot_bytes": snapshot, "saved": saved});
    assert_eq!(ample["checkpoint"], expected("background", needed));
    assert_eq!(object("--ram 16GiB --save-mode pause")["checkpoint"], expected("pause", 0));
    // The plan comes first, and leaves one byte too little.
    let peak = bytes(&ample["ram_peak_bytes"]);
    let tight = format!("--ram {}B", peak + needed - 1);
    let paused = object(&tight);
    assert_eq!(bytes(&paused["ram_peak_bytes"]), peak);
    assert_eq!(paused["checkpoint"], expected("pause", 0));
    let text = words(&format!("{start} {tight}")).succeeded();
    assert!(text.contains("steps pause while it is written, because"), "{text}");
    // Unless it must leave enough.
    let forced = object(&format!("{tight} --save-mode background"));
    assert!(bytes(&forced["ram_peak_bytes"]) < peak, "{forced:#}");
    assert_eq!(forced["checkpoint"], expected("background", needed));
    let nothing = format!("{start} --ram {needed}B --save-mode background");
    words(&nothing).failed(3, &["no plan fits", "--ram"]);
}

#[test]
fn tokens_instead_of_batches() {
    let object = json("--tokens-per-step 8192 --vram 4GiB");
    let count = |key: &str| object[key].as_u64().unwrap_or_else(|| panic!("{key}: {object:#}"));
    assert_eq!(count("batch") * count("accumulate") * 512, 8192);
    plan("--tokens-per-step 1000 --vram 4GiB").failed(2, &["1000", "512"]);
}

#[test]
fn what_does_not_fit_says_what_would() {
    let done = plan("--batch 16 --vram 1GiB");
    let least = "--vram ";
    done.failed(3, &["no plan fits", "holds on the device", "What would work", least, "--batch"]);
    let done = plan("--batch 16 --vram 1GiB --json");
    let object: Value = serde_json::from_str(&done.stdout).expect("JSON");
    assert_eq!(object["feasible"], false);
    assert!(object["vram_min_bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 30), "{object:#}");
    // The figure works as given.
    let bytes = object["vram_min_bytes"].as_u64().unwrap_or_default();
    plan(&format!("--batch 16 --vram {bytes}B")).succeeded();
}

/// If host memory is short, a plan shows what a disk would do. The flags that it shows work.
#[test]
fn a_disk_on_paper() {
    let start =
        "plan --model qwen2.5-0.5b --batch 2 --seq 128 --vram 2GB --ram 2500MiB --hardware h200";
    let done = words(start);
    let said = done.stderr.clone();
    done.failed(3, &["--disk FOLDER --disk-space", "a step, ", "on disk, because host memory"]);
    let space = said.split("--disk-space ").nth(1).and_then(|rest| rest.split(' ').next());
    let space = space.expect("how much space");
    let planned = |flags: &str| -> Value {
        let done = words(&format!("{start} --json --disk-space {space} {flags}")).succeeded();
        serde_json::from_str(&done).expect("JSON")
    };
    let (one, four) = (planned(""), planned("--disk-drives 4"));
    let seconds = |object: &Value| object["step_seconds"].as_f64().expect("a time");
    assert!(seconds(&four) < 0.5 * seconds(&one), "{} s, {} s", seconds(&four), seconds(&one));
    assert_eq!(one["limited_by"], "disk");
    let contents = one["disk"]["contents"].as_array().expect("what is on disk");
    assert_eq!(contents[0]["name"], "second moments");
    let shown = words(&format!("{start} --disk-space {space} --disk-endurance 600TB")).succeeded();
    let shown = shown.replace("\ndisk                ", " ");
    assert!(shown.contains("Limited by the disk"), "{shown}");
    assert!(shown.contains("days until the 600.0 TB that the drive is rated for"), "{shown}");
    words(&format!("{start} --disk-drives 4")).failed(2, &["--disk-space"]);
    words(&format!("{start} --disk . --disk-space 1GB --disk-drives 4"))
        .failed(2, &["--disk-drives"]);
    words(&format!("{start} --disk-space 1GB --disk-drives 0")).failed(2, &["--disk-drives"]);
    // With a config, the flags mean the same.
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("run.toml");
    let text: String = (start.split(" --").skip(1))
        .map(|flag| flag.split_once(' ').expect("a value"))
        .map(|(key, value)| match value.parse::<u64>() {
            Ok(number) => format!("{key} = {number}\n"),
            Err(_) => format!("{key} = \"{value}\"\n"),
        })
        .collect();
    fs::write(&config, text).unwrap();
    // A run also reads data, so it gets more memory.
    let more = "--ram 4GiB --optimizer-state streamed --on-disk moments --disk-space 1TB --json";
    for (flags, expected) in [("", &one), ("--disk-drives 4", &four)] {
        let line = format!("plan {} {more} {flags}", config.display());
        let found: Value = serde_json::from_str(&words(&line).succeeded()).expect("JSON");
        let rate = |object: &Value| object["disk"]["read_bytes_per_second"].clone();
        assert_eq!(rate(&found), rate(expected), "{line}");
        assert!(found["disk"]["peak_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{line}");
    }
}

/// A little more host memory becomes slots for state on disk, and steps wait less for the disk.
#[test]
fn host_memory_that_is_left_hides_the_disk() {
    let seconds = |ram: &str| {
        let line = format!(
            "plan --model qwen2.5-7b --hardware h200 --seq 1024 --batch 32 --accumulate 10 --vram 16GB --ram {ram} \
             --update in-backward --disk-space 50GB --on-disk moments --json"
        );
        let plan: Value = serde_json::from_str(&words(&line).succeeded()).expect("an object");
        plan["step_seconds"].as_f64().expect("a number")
    };
    let (little, more) = (seconds("74.8GiB"), seconds("76GiB"));
    assert!(more < 0.97 * little, "{more} s and {little} s");
}

#[test]
fn what_is_forced_is_done_or_refused() {
    let object = json("--batch 2 --vram 8GiB --activations offload --update end-of-step");
    assert_eq!(object["recompute_fraction"], 0.0);
    let object = json("--batch 2 --accumulate 2 --vram 8GiB --group 2");
    assert_eq!(object["group"], 2);
    plan("--batch 2 --accumulate 2 --vram 8GiB --group 3")
        .failed(2, &["groups of 3", "2 micro-batches"]);
    plan("--batch 2 --vram 8GiB --activations sometimes").failed(2, &["sometimes"]);
    plan("--batch 2 --vram 8parsecs").failed(2, &["parsecs"]);
    plan("--vram 8GiB").failed(2, &["--batch"]);
}

#[test]
fn hardware_by_name_or_file() {
    let list = words("plan --hardware list").succeeded();
    for card in HardwareProfile::builtin_names() {
        assert!(list.contains(card), "{card} is not in:\n{list}");
    }
    assert!(list.contains("data sheet, ±30 %") && list.contains("measured"), "{list}");
    let start = "plan --model qwen2.5-0.5b --batch 1 --seq 128 --vram 4GiB --ram 8GiB";
    words(&format!("{start} --hardware h201")).failed(4, &["h201", "h200", "rtx-5090", "l40s"]);
    let caution = "from data sheet, not measured: expect step times within ±30 %";
    let shown = |card: &str| words(&format!("{start} --hardware {card}")).succeeded();
    assert!(shown("rtx-4070").contains(caution) && !shown("h200").contains(caution));
    assert!(words("plan --help").succeeded().contains("rtx-4060-ti-16gb"));
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("card.json");
    fs::write(&path, "{\"name\": 7}").expect("a file");
    let named = |path: &std::path::Path| format!("{start} --hardware {}", path.display());
    words(&named(&path)).failed(4, &["not a hardware profile"]);
    words(&named(folder.path())).failed(4, &["not a plain file"]);
}

#[test]
fn a_directory_and_a_trace() {
    let tiny = Tiny::new();
    let (model, trace) = (tiny.path("model"), tiny.path("step.json"));
    let start = ["plan", "--batch", "2", "--seq", "16", "--vram", "1GiB", "--ram", "1GiB"];
    let mut args: Vec<_> = start.into_iter().map(std::ffi::OsString::from).collect();
    args.extend(["--model".into(), model.into(), "--trace".into(), trace.clone().into()]);
    storm(args).succeeded();
    let text = fs::read_to_string(trace).expect("a trace");
    let trace: Value = serde_json::from_str(&text).expect("JSON");
    assert!(trace["traceEvents"].as_array().is_some_and(|events| events.len() > 50));
}
