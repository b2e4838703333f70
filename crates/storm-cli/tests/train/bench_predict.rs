//! `storm bench predict`: runs that are made once, controls without a gain, and what is written.

use crate::support::Place;
use serde_json::{Deserializer, Value};
use std::fs;
use std::process::{Command, Output};

/// With enough held-out rows for validation, predictions and a test.
fn place() -> Place {
    let place = Place::new();
    let config = fs::read_to_string(place.path().join("tiny.toml")).expect("a config");
    let more = "held-out = 0.4\neval-steps = 1\nsteps = 20\nkeep-best = false\n";
    fs::write(place.path().join("short.toml"), config + more).expect("a file");
    place
}

fn bench(place: &Place, flags: &[&str]) -> Output {
    bench_with(place, "2", flags)
}

fn bench_with(place: &Place, probe_batches: &str, flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(["bench", "predict", "short.toml"]);
    command.args(["--full", "3", "--correct", "1", "--runs", "r"]);
    command.args(["--probe-batches", probe_batches]);
    command.args(flags).output().expect("storm starts")
}

fn printed(output: &Output) -> Vec<Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    let values: Result<Vec<Value>, _> =
        Deserializer::from_slice(&output.stdout).into_iter().collect();
    values.expect("JSON")
}

#[test]
fn runs_are_made_once_and_compared() {
    let place = place();
    let few = ["--rates", "1", "--seeds", "1", "--methods", "null,lookahead,rssm", "--json"];
    let none = [&few[..], &["--within", "0"]].concat();
    assert!(printed(&bench(&place, &none)).is_empty(), "there is no time for any");
    let first = bench(&place, &few);
    let lines = printed(&first);
    let names: Vec<&str> = lines.iter().filter_map(|line| line["method"].as_str()).collect();
    assert_eq!(names, ["plain", "null", "lookahead", "rssm"]);
    let [plain, null, lookahead, rssm] = [0, 1, 2, 3].map(|at| &lines[at]);
    assert_eq!(plain["test_loss"]["mean"], null["test_loss"], "no jump changes nothing");
    assert_eq!(null["loss_at_equal_steps"]["mean"], 0.0);
    assert!(null["in_steps"]["cost"].as_f64().expect("a number") > 20.0, "{null}");
    assert!(lookahead["accepted"].as_u64().expect("a number") > 2, "{lookahead}");
    assert!(lookahead["distance_min"].as_f64().expect("a number") > 0.0, "{lookahead}");
    assert_ne!(lookahead["test_loss"], null["test_loss"]);
    assert!(rssm["brier"].is_f64(), "{rssm}");
    assert!(rssm["cost"].as_f64().expect("it was measured") > 0.0, "{rssm}");
    assert!(null["cost"].is_null(), "{null}");
    let records = place.path().join("r/finished.jsonl");
    let text = fs::read_to_string(&records).expect("a file");
    assert_eq!(text.lines().count(), 1 + 5 + 3);
    assert_eq!(fs::read_dir(place.path().join("r")).expect("a folder").count(), 1, "no run stays");

    // No runs are left: the same result at once, with a page and a table.
    let document =
        "before\n<!-- storm bench predict: short -->\nold\n<!-- end of short -->\nafter\n";
    fs::write(place.path().join("page.md"), document).expect("a file");
    let more = ["--page", "page.html", "--document", "page.md"];
    let again = bench(&place, &[&few[..], &more].concat());
    assert_eq!(printed(&again), lines);
    assert!(!String::from_utf8_lossy(&again.stderr).contains("run 1"), "it was there");
    assert_eq!(fs::read_to_string(&records).expect("a file"), text);
    let html = fs::read_to_string(place.path().join("page.html")).expect("a page");
    assert!(html.contains("<svg") && html.contains("lookahead"), "{html}");
    let document = fs::read_to_string(place.path().join("page.md")).expect("a document");
    assert!(document.contains("`lookahead`") && !document.contains("old"), "{document}");
    assert!(document.starts_with("before\n") && document.ends_with("after\n"), "{document}");

    // With another probe, tests read other rows, so none of these runs count.
    let other = bench_with(&place, "3", &none);
    assert!(printed(&other).is_empty(), "{}", String::from_utf8_lossy(&other.stdout));

    // A table that is not full says what is missing.
    let without = |part: &str| -> String {
        text.lines().filter(|line| !line.contains(part)).map(|line| format!("{line}\n")).collect()
    };
    fs::write(&records, without("rssm")).expect("a file");
    let partly = ["--seeds", "2", "--rates", "1", "--methods", "null,rssm", "--within", "0"];
    let partly = bench(&place, &partly);
    let [table, errors] =
        [&partly.stdout, &partly.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(table.contains("| plain training, tuned (1 of 2 seeds) |"), "{table}");
    assert!(table.contains("no jump, all costs (1 of 2 seeds) |"), "{table}");
    assert!(table.contains("a learned model chooses | not run yet |"), "{table}");
    assert!(errors.contains("8 runs are left, which will take about "), "{errors}");
    fs::write(&records, &text).expect("a file");

    // A control with another loss is an error.
    let line = text.lines().find(|line| line.contains("direction=\\\"none\\\"")).expect("null");
    let loss = line.split("\"test_loss\":").nth(1).and_then(|rest| rest.split(',').next());
    let loss = format!("\"test_loss\":{}", loss.expect("a loss"));
    let forged = text.replace(line, &line.replace(&loss, "\"test_loss\":1.5"));
    fs::write(&records, forged).expect("a file");
    let wrong = bench(&place, &few);
    let errors = String::from_utf8_lossy(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(1), "{errors}");
    assert!(errors.contains("this measurement is wrong") && errors.contains("`null`"), "{errors}");
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let place = place();
    let refused = |flags: &[&str], part: &str| {
        let output = bench(&place, flags);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        assert!(errors.contains(part), "{errors}");
    };
    refused(&["--methods", "magic"], "known are null");
    refused(&["--steps", "4"], "runs have 4");
    refused(&["--rates", "0"], "above 0");
    fs::write(place.path().join("other.md"), "no marks\n").expect("a file");
    refused(&["--document", "other.md"], "storm bench predict: short");
    assert!(!place.path().join("r").exists(), "nothing was begun");
}
