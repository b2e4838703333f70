//! Runs that predict, as users call them.

use crate::support::{Place, is};
use std::fs;

const PREDICT: &str = "direction=\"last-update\", warm-up=3, full=4, correct=2, probe-batches=2, \
                       noise=0, margin=10";

const FLAGS: [&str; 10] = [
    "--steps",
    "24",
    "--held-out",
    "0.4",
    "--save-every",
    "3",
    "--schedule",
    "constant",
    "--predict",
    PREDICT,
];

#[test]
fn a_run_that_is_killed_in_a_prediction_goes_on_bit_by_bit() {
    let place = Place::new();
    let events = place.run("whole", &FLAGS).succeeded();
    let jumped: Vec<_> = events.iter().filter(|event| is(event, "jumped")).collect();
    let accepted = |event: &&&serde_json::Value| event["verdict"] == "accepted";
    let moved: Vec<f64> =
        jumped.iter().filter(accepted).filter_map(|event| event["distance"].as_f64()).collect();
    assert!(moved.len() >= 2 && moved.iter().all(|distance| *distance > 0.0), "{jumped:?}");
    assert!(events.iter().any(|event| is(event, "prediction_judged")));
    let of_step = |step: u64| events.iter().find(|e| is(e, "step") && e["step"] == step);
    assert_eq!(of_step(3).expect("a step")["phase"], "warm-up");
    assert_eq!(of_step(7).expect("a step")["phase"], "full");

    for event in ["jumped", "predicted", "prediction_judged", "saved"] {
        let name = format!("killed-{}", event.replace('_', "-"));
        let mut running = place.start(&name, &FLAGS);
        while !is(&running.next().expect("an event"), event) {}
        running.child.kill().expect("it runs");
        running.child.wait().expect("it ends");
        let resumed = [&FLAGS[..], &["--resume"]].concat();
        place.run(&name, &resumed).succeeded();
        assert!(place.result(&name, 24) == place.result("whole", 24), "{event}");
    }

    let run = place.run_folder("whole");
    let report = fs::read_to_string(run.join("report.html")).expect("a report");
    for part in ["class=\"band\"", "Phases, with their time", "probe, jumps accepted"] {
        assert!(report.contains(part), "{part}");
    }
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    for part in ["\"phase\":\"correct\"", "\"prediction\":{", "\"judgement\":{", "\"verdict\":"] {
        assert!(metrics.contains(part), "{part}");
    }
    let other = PREDICT.replace("full=4", "full=5");
    let changed = ["--steps", "24", "--held-out", "0.4", "--predict", &other, "--resume"];
    place.run("whole", &changed).failed(2, &["predict was", "when the run began"]);
}

#[test]
fn the_weights_of_probes_are_part_of_the_run() {
    let place = Place::new();
    let predict = format!("{PREDICT}, probe-weights=\"int8\"");
    let flags = [&FLAGS[..FLAGS.len() - 1], &[predict.as_str()]].concat();
    let events = place.run("whole", &flags).succeeded();
    let measured = |event: &serde_json::Value| event["device_bytes"].as_u64().expect("a number");
    let predicted: Vec<_> = events.iter().filter(|event| is(event, "predicted")).collect();
    assert!(predicted.len() >= 2 && predicted.iter().all(|event| measured(event) > 0));
    let mut running = place.start("killed", &flags);
    while !is(&running.next().expect("an event"), "jumped") {}
    running.child.kill().expect("it runs");
    running.child.wait().expect("it ends");
    place.run("killed", &[&flags[..], &["--resume"]].concat()).succeeded();
    assert!(place.result("killed", 24) == place.result("whole", 24));
    let changed = [&FLAGS[..], &["--resume"]].concat();
    place.run("whole", &changed).failed(2, &["predict was", "when the run began"]);
}

/// The cost is measured once. The config of the run has it as a number, and a resumed run keeps it,
/// whether it is given that config or the flags that the run began with.
#[test]
fn a_measured_cost_is_recorded() {
    let place = Place::new();
    let predict = "direction=\"difference\", controller=\"rssm\", cost=\"measured\", warm-up=3, full=2, \
                   correct=1, probe-batches=2, margin=10";
    let flags = |steps: &'static str, more: &[&'static str]| {
        let all = ["--steps", steps, "--held-out", "0.4", "--schedule", "constant"];
        [&all[..], &["--predict", predict], more].concat()
    };
    let events = place.run("a", &flags("12", &[])).succeeded();
    let cost = events.iter().find(|event| is(event, "prediction_cost")).expect("an event");
    let number = |key: &str| cost[key].as_f64().expect("a number");
    let ratio = number("seconds") / number("step_seconds");
    assert!((number("steps") / ratio - 1.0).abs() < 0.01, "{cost}");
    let config = || fs::read_to_string(place.run_folder("a").join("config.toml")).expect("one");
    let recorded = config();
    assert!(recorded.contains(&format!("cost = {}", number("steps"))), "{recorded}");
    let events = place.run("a", &flags("18", &["--resume"])).succeeded();
    assert!(!events.iter().any(|event| is(event, "prediction_cost")));
    assert!(config().contains(&format!("cost = {}", number("steps"))), "{}", config());
    let other = predict.replace("\"measured\"", "123.0");
    let changed = ["--steps", "18", "--held-out", "0.4", "--predict", &other, "--resume"];
    place.run("a", &changed).failed(2, &["predict was", "when the run began"]);
}

#[test]
fn what_cannot_predict_is_refused_before_the_first_step() {
    let place = Place::new();
    let refused = |predict: &str, more: &[&str], parts: &[&str]| {
        let flags = ["--steps", "24", "--predict", predict];
        place.run("bad", &[&flags[..], more].concat()).failed(2, parts);
        assert!(!place.run_folder("bad").join("metrics.jsonl").exists());
    };
    let held = ["--held-out", "0.4"];
    refused("direction=\"rssm\"", &held, &["rssm"]);
    refused("direction=\"last-update\", controller=\"neural\"", &held, &["neural"]);
    refused("direction=\"last-update\"", &held, &["take 75 steps", "has 24"]);
    let short = "direction=\"difference\", warm-up=1, full=2, correct=1, window=3";
    refused(short, &held, &["window is 3"]);
    let zero = "direction=\"last-update\", warm-up=1, full=2, correct=0";
    refused(zero, &held, &["correct is 0"]);
    refused(PREDICT, &["--held-out", "0.1"], &["would overlap", "probe-batches"]);
    refused(PREDICT, &["--held-out", "0"], &["0 are held out"]);
    let background = ["--held-out", "0.4", "--save-mode", "background"];
    refused(PREDICT, &background, &["save-mode"]);
}
