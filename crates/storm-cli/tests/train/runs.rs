//! Runs that finish, are stopped, resume, or cannot start.

use crate::support::{Place, finish, is, losses};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

#[test]
fn a_run_leaves_all_that_it_should() {
    let place = Place::new();
    let flags = ["--steps", "12", "--eval-every", "4", "--save-every", "5", "--sample-tokens", "8"];
    let events = place.run("a", &flags).succeeded();
    assert_eq!(losses(&events).len(), 12);
    let names: Vec<&str> = events.iter().filter_map(|event| event["event"].as_str()).collect();
    for name in ["started", "evaluated", "saving", "saved", "finished", "sample"] {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    let run = place.run_folder("a");
    for file in ["config.toml", "metrics.jsonl", "report.html", "trace.json", "model/config.json"] {
        assert!(run.join(file).is_file(), "{file} is missing");
    }
    assert_eq!(fs::read_dir(run.join("tensorboard")).expect("a folder").count(), 1);
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    assert_eq!(metrics.lines().filter(|line| line.contains("\"loss\"")).count(), 12);
    // It learned something.
    let loss = |event: &serde_json::Value| event["loss"].as_f64().expect("a loss");
    let steps: Vec<f64> = events.iter().filter(|event| is(event, "step")).map(loss).collect();
    assert!(steps[11] < steps[0] - 0.5, "{steps:?}");
}

#[test]
fn a_run_that_goes_on_is_the_run_that_never_stopped() {
    let place = Place::new();
    for precision in ["f32", "bf16-master", "bf16-stochastic"] {
        let (whole, parts) = (format!("whole-{precision}"), format!("parts-{precision}"));
        let mut flags = vec!["--precision", precision, "--steps", "9", "--eval-every", "2"];
        // A checkpoint is often being written when the signal arrives.
        flags.extend(["--save-every", "1", "--keep-last", "9"]);
        let expected = losses(&place.run(&whole, &flags).succeeded());
        // Stopped after some step by Ctrl-C, which is not an error.
        let mut run = place.start(&parts, &flags);
        let mut found = Vec::new();
        while found.len() < 3 {
            let event = run.next().expect("more steps");
            found.extend(losses(std::slice::from_ref(&event)));
        }
        let signal = Command::new("kill").args(["-INT", &run.child.id().to_string()]).status();
        assert!(signal.expect("kill runs").success());
        let (code, events) = run.wait();
        assert_eq!(code, Some(0), "{events:?}");
        found.extend(losses(&events));
        let finished = events.iter().find(|event| is(event, "finished")).expect("an end");
        assert_eq!(finished["step"], found.len(), "saved after the last step");
        let resumed = [&flags[..], &["--resume"]].concat();
        found.extend(losses(&place.run(&parts, &resumed).succeeded()));
        assert_eq!(found, expected, "{precision}");
        assert!(place.result(&parts, 9) == place.result(&whole, 9), "{precision}: other weights");
        let metrics = fs::read_to_string(place.run_folder(&parts).join("metrics.jsonl"));
        let steps = metrics.expect("metrics").lines().filter(|l| l.contains("\"loss\"")).count();
        assert_eq!(steps, 9, "{precision}: each step once");
    }
}

/// The order is part of what a run computes.
#[test]
fn text_in_window_order_goes_on_where_it_was() {
    let place = Place::new();
    let flags = |steps, order: &[&'static str]| {
        [&["--steps", steps, "--schedule", "constant", "--data-ram", "8MiB"], order].concat()
    };
    let window = ["--order", "window"];
    let expected = losses(&place.run("whole", &flags("6", &window)).succeeded());
    let mut found = losses(&place.run("parts", &flags("3", &window)).succeeded());
    let more = [&flags("6", &window)[..], &["--resume"]].concat();
    let other = [&flags("6", &["--order", "global"])[..], &["--resume"]].concat();
    place.run("parts", &other).failed(4, &["the order was window and is global now"]);
    found.extend(losses(&place.run("parts", &more).succeeded()));
    assert_eq!(found, expected);
    assert!(place.result("parts", 6) == place.result("whole", 6));
    let global = losses(&place.run("global", &flags("6", &["--order", "global"])).succeeded());
    let usual = losses(&place.run("usual", &flags("6", &[])).succeeded());
    assert_eq!(global, usual, "text comes in global order if nothing is said");
    assert_ne!(global, expected);
}

/// Ctrl-C ends a run cleanly, with the command to resume it.
#[test]
fn a_run_that_is_stopped_says_how_it_goes_on() {
    let place = Place::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).stdout(Stdio::piped());
    command.args(["train", "tiny.toml", "--name", "a", "--steps", "1000000", "--log-every", "1"]);
    let mut child = command.spawn().expect("storm starts");
    let mut lines =
        BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    lines.find(|line| line.contains("step") && line.contains("loss")).expect("a step");
    let signal = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(signal.expect("kill runs").success());
    let rest: Vec<String> = lines.collect();
    assert!(child.wait().expect("it ends").success(), "{rest:?}");
    let resume = rest.iter().find_map(|line| line.strip_prefix("resume ")).expect("a command");
    assert_eq!(resume.trim(), "storm train runs/a/config.toml --resume");
    let mut words = resume.split_whitespace();
    assert_eq!(words.next(), Some("storm"));
    // As many steps as were made, so that it ends at once.
    let metrics = fs::read_to_string(place.run_folder("a").join("metrics.jsonl")).expect("metrics");
    let steps = metrics.lines().filter(|line| line.contains("\"loss\"")).count().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(words).args(["--json", "--steps", &steps]);
    finish(command).succeeded();
}

#[test]
fn a_second_signal_harms_no_checkpoint() {
    let place = Place::new();
    let flags = ["--steps", "9", "--save-every", "1", "--keep-last", "9"];
    let expected = losses(&place.run("whole", &flags).succeeded());
    for steps in 1..6 {
        let name = format!("left-{steps}");
        let mut run = place.start(&name, &flags);
        let mut seen = Vec::new();
        while losses(&seen).len() < steps {
            seen.push(run.next().expect("more steps"));
        }
        let id = run.child.id();
        let script = format!("kill -INT {id}; kill -INT {id}");
        Command::new("sh").args(["-c", &script]).status().expect("a shell runs");
        let (code, events) = run.wait();
        // It exited at once, unless it finished before the second signal.
        assert!(matches!(code, Some(0 | 130)), "{code:?}: {events:?}");
        let resumed = [&flags[..], &["--resume"]].concat();
        let rest = losses(&place.run(&name, &resumed).succeeded());
        let saved = seen.iter().chain(&events).filter(|event| is(event, "saved"));
        let saved = saved.filter_map(|event| event["step"].as_u64()).max().unwrap_or(0);
        assert!(
            9 - rest.len() as u64 >= saved,
            "{saved} was on the disk, {} are recomputed",
            rest.len()
        );
        assert_eq!(rest, expected[9 - rest.len()..]);
        assert!(place.result(&name, 9) == place.result("whole", 9), "{name}: other weights");
    }
}

#[test]
fn a_trial_is_not_part_of_the_run() {
    let place = Place::new();
    // Runs of 50 or more steps begin with a trial.
    let run = |name: &str, steps: &str| {
        let flags = ["--steps", steps, "--schedule", "constant", "--precision", "bf16-stochastic"];
        losses(&place.run(name, &flags).succeeded())
    };
    let (tried, untried) = (run("tried", "50"), run("untried", "49"));
    assert_eq!(tried[..49], untried[..]);
}

#[test]
fn a_damaged_checkpoint_is_passed_over() {
    let place = Place::new();
    let flags = ["--steps", "8", "--save-every", "4", "--keep-best", "false"];
    place.run("whole", &flags).succeeded();
    place.run("hurt", &flags).succeeded();
    let file = place.run_folder("hurt").join("checkpoints/step-00000008/optimizer.safetensors");
    let mut bytes = fs::read(&file).expect("a checkpoint");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).expect("a file");
    let resumed = place.run("hurt", &[&flags[..], &["--resume"]].concat());
    assert!(resumed.stderr.contains("skipping the checkpoint of step 8"), "{}", resumed.stderr);
    let events = resumed.succeeded();
    assert_eq!(losses(&events).first().map(|(step, _)| *step), Some(5));
    assert!(place.result("hurt", 8) == place.result("whole", 8));
}

#[test]
fn a_number_that_is_none_ends_the_run_before_the_update() {
    let place = Place::new();
    let flags = ["--steps", "50", "--save-every", "1", "--clip", "0", "--learning-rate", "1e37"];
    let done = place.run("wild", &[&flags[..], &["--final-learning-rate", "1e37"]].concat());
    let saved = done.events.iter().filter(|event| is(event, "saved")).count();
    assert!(saved > 0, "{:?}", done.events);
    let path = format!("step-{saved:08}");
    done.failed(1, &["Nothing was updated", "The last good checkpoint is", &path]);
}

#[test]
fn how_checkpoints_are_saved_is_said_and_changes_nothing() {
    let place = Place::new();
    let flags = ["--steps", "6", "--save-every", "2", "--keep-every", "4"];
    let saved = |name: &str, more: &[&str]| {
        let events = place.run(name, &[&flags[..], more].concat()).succeeded();
        let said =
            events.iter().find(|event| is(event, "checkpoints")).expect("it is said").clone();
        let saves: Vec<u64> =
            events.iter().filter(|e| is(e, "saved")).filter_map(|e| e["step"].as_u64()).collect();
        assert_eq!(saves, [2, 4, 6], "{name}");
        said
    };
    let auto = saved("auto", &[]);
    assert_eq!(auto["saved"], "background");
    assert_eq!(auto["snapshot_bytes"], auto["bytes"]);
    // The two newest, the best, one that is a multiple of 4, and one that is being written.
    let bytes = auto["bytes"].as_u64().expect("a number");
    assert_eq!(auto["disk_bytes"], 5 * bytes);
    let pause = saved("pause", &["--save-mode", "pause"]);
    assert_eq!((&pause["saved"], &pause["snapshot_bytes"]), (&"pause".into(), &0.into()));
    assert!(pause["predicted_pause_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0));
    assert!(place.result("auto", 6) == place.result("pause", 6));
    place
        .run("none", &["--save-mode", "background", "--ram", "6020KB"])
        .failed(3, &["no plan fits"]);
}

#[test]
fn early_stopping_stops() {
    let place = Place::new();
    let flags = ["--steps", "60", "--eval-every", "1", "--patience", "2", "--learning-rate", "0"];
    let events = place.run("still", &flags).succeeded();
    let finished = events.iter().find(|event| is(event, "finished")).expect("an end");
    assert_eq!(finished["reason"], "stopped for lack of gain");
    assert_eq!(finished["step"], 3);
}

#[test]
fn mistakes_are_explained() {
    let place = Place::new();
    place.run("a", &["--steps", "1"]).succeeded();
    place.run("a", &["--steps", "1"]).failed(2, &["has checkpoints already", "--resume"]);
    let other = ["--steps", "2", "--resume", "--seed", "6"];
    place.run("a", &other).failed(2, &["seed was 5", "6 now"]);
    place.run("../b", &[]).failed(2, &["not a valid name for a run"]);
    place.run("b", &["--vram", "10KB"]).failed(3, &["no plan fits"]);
    place.run("b", &["--learning-rate=-1"]).failed(2, &["learning-rate"]);
    place.run("b", &["--data", "missing.txt"]).failed(4, &["missing.txt"]);
    place.run("b", &["--model", "gpt-5"]).failed(4, &["gpt-5"]);
    let config = place.path().join("slip.toml");
    fs::write(&config, "learning_rate = 1\n").expect("a file");
    let slip = finish(place.command_of("slip.toml", "b", &[]));
    slip.failed(4, &["slip.toml", "did you mean `learning-rate`?"]);
}
