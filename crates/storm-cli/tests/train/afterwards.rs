//! What can be done with a trained model.

use crate::support::{Place, is};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

fn storm(place: &Place, args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(args.split_whitespace());
    command.output().expect("storm starts")
}

fn text(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// `eval` gives the same loss as the run.
#[test]
fn a_model_is_evaluated_as_in_its_run() {
    let place = Place::new();
    let flags = ["--steps", "6", "--eval-every", "6", "--eval-steps", "1000", "--precision", "f32"];
    let events = place.run("a", &flags).succeeded();
    let evaluated = events.iter().rfind(|event| is(event, "evaluated")).expect("an evaluation");
    let expected = evaluated["loss"].as_f64().expect("a loss");
    let mut found = Vec::new();
    for batch in [1, 3] {
        let args = format!("eval runs/a/model --data runs/a/data --seq 16 --batch {batch} --json");
        let object: Value = serde_json::from_str(&text(&storm(&place, &args))).expect("JSON");
        let loss = object["loss"].as_f64().expect("a loss");
        assert!((loss - expected).abs() < 1e-4, "{loss} and {expected}");
        assert!((object["perplexity"].as_f64().expect("a number") - loss.exp()).abs() < 1e-9);
        found.push(object["tokens"].as_u64());
    }
    assert_eq!(found[0], found[1], "every token once");
    let lines = text(&storm(&place, "eval runs/a/model --data runs/a/data --seq 16 --batches 1"));
    assert!(lines.contains("perplexity"), "{lines}");
    let wrong = storm(&place, "eval runs/a/model --data runs/a/model");
    assert_eq!(wrong.status.code(), Some(4));
}

/// A run is evaluated with its own settings. The loss is the same to the last digit.
#[test]
fn a_run_is_evaluated_as_it_evaluates_itself() {
    let place = Place::new();
    for (name, flags) in [
        ("f", ["--precision", "f32", "--eval-steps", "3"]),
        ("b", ["--precision", "bf16-master", "--eval-steps", "1000"]),
        ("s", ["--precision", "bf16-stochastic", "--eval-steps", "2"]),
    ] {
        let flags = [&["--steps", "5", "--eval-every", "5"][..], &flags].concat();
        let events = place.run(name, &flags).succeeded();
        let evaluated = events.iter().rfind(|event| is(event, "evaluated")).expect("an evaluation");
        let found: Value =
            serde_json::from_str(&text(&storm(&place, &format!("eval runs/{name} --json"))))
                .expect("JSON");
        assert_eq!(found["loss"], evaluated["loss"], "{flags:?}");
        // Flags override the settings of the run.
        let args = format!("eval runs/{name} --seq 8 --batches 1 --json");
        let other: Value = serde_json::from_str(&text(&storm(&place, &args))).expect("JSON");
        assert_ne!(other["loss"], evaluated["loss"]);
        assert_eq!(other["tokens"].as_u64(), Some(2 * 8));
    }
    let nothing = storm(&place, "eval runs/f/model");
    assert_eq!(nothing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&nothing.stderr).contains("--data"));
}

/// A test reads held-out rows that neither evaluations nor predictions read.
#[test]
fn a_run_is_tested_on_rows_of_their_own() {
    let place = Place::new();
    let flags = ["--steps", "6", "--held-out", "0.4", "--eval-steps", "1", "--test", "true"];
    let predict = "direction=\"random\", warm-up=2, full=2, correct=1, probe-batches=2";
    let predicts = ["--predict", predict];
    let mut ends = Vec::new();
    for (name, more, leave) in
        [("a", &["--test-leave", "8"][..], 8), ("b", &predicts, 8), ("c", &[], 0)]
    {
        let events = place.run(name, &[&flags, more].concat()).succeeded();
        let tested = events.iter().rfind(|event| is(event, "tested")).expect("a test");
        // A step reads four rows, and predictions eight.
        let args = format!("eval runs/{name} --skip-rows 4 --leave-rows {leave} --json");
        let found: Value = serde_json::from_str(&text(&storm(&place, &args))).expect("JSON");
        assert_eq!(found["loss"], tested["loss"], "{name}");
        let evaluated = events.iter().rfind(|event| is(event, "evaluated")).expect("an evaluation");
        assert_ne!(evaluated["loss"], tested["loss"], "{name}");
        assert_eq!(tested["rows"][0], 4);
        ends.push(tested["rows"][1].as_u64().expect("a row"));
    }
    // Whole steps; without rows to leave out, all of the rest.
    assert!(ends[0].is_multiple_of(4) && ends[0] == ends[1] && ends[2] >= ends[0] + 8, "{ends:?}");
    let page = fs::read_to_string(place.run_folder("a").join("report.html")).expect("a page");
    assert!(page.contains("test loss") && page.contains(" after step 6<"), "{page}");
    for (more, part) in [
        (&["--test-leave", "7", "--predict", predict][..], "last 8 held-out rows"),
        (&["--test-leave", "1000000"], "less than one step is left to test on"),
    ] {
        place.run("d", &[&flags, more].concat()).failed(2, &[part]);
    }
    let alone = ["--steps", "6", "--held-out", "0.4", "--test-leave", "8"];
    place.run("d", &alone).failed(2, &["test-leave is for test = true"]);
}

/// A finished run that is resumed is tested again only on other rows, or after other steps.
#[test]
fn a_test_is_made_once() {
    let place = Place::new();
    let flags = ["--held-out", "0.4", "--eval-steps", "1", "--test", "true", "--steps"];
    let tests = || {
        let metrics = fs::read_to_string(place.run_folder("a").join("metrics.jsonl"));
        metrics.expect("metrics").lines().filter(|line| line.contains("test_loss")).count()
    };
    place.run("a", &[&flags[..], &["4"]].concat()).succeeded();
    for (more, made, all) in [
        (&["4", "--resume"][..], 0, 1),
        (&["4", "--resume", "--test-leave", "8"], 1, 2),
        (&["4", "--resume", "--test-leave", "8"], 0, 2),
        (&["6", "--resume", "--test-leave", "8"], 1, 3),
    ] {
        let events = place.run("a", &[&flags[..], more].concat()).succeeded();
        let tested = events.iter().filter(|event| is(event, "tested")).count();
        assert_eq!((tested, tests()), (made, all), "{more:?}");
    }
}

/// Rows that evaluations read chose the best checkpoint, so no later test may read them.
#[test]
fn rows_that_evaluations_read_are_never_tested_on() {
    let place = Place::new();
    let run = |steps: &str, eval_steps: &str, more: &[&str]| {
        let flags = ["--held-out", "0.4", "--steps", steps, "--eval-steps", eval_steps];
        place.run("a", &[&flags[..], more].concat())
    };
    run("4", "2", &[]).succeeded();
    let parts = ["rows of 2 steps, and eval-steps is 1 now", "chose the best checkpoint"];
    run("4", "1", &["--resume", "--test", "true"]).failed(2, &parts);
    run("6", "1", &["--resume"]).succeeded();
    // The run remembers it.
    run("6", "1", &["--resume", "--test", "true"]).failed(2, &parts);
    run("6", "3", &["--resume", "--test", "true"]).succeeded();
}

/// Here, the rows of the test are gone when it begins. The model and the report are written anyway.
#[test]
fn a_test_that_fails_costs_only_itself() {
    let place = Place::new();
    let text: String = (0..40_000).map(|i| format!("{} and {}; ", i * 7 % 100, i % 13)).collect();
    fs::write(place.path().join("long.txt"), text).expect("a file");
    let flags = ["--data", "long.txt", "--held-out", "0.5", "--eval-steps", "1", "--steps", "100"];
    let mut command = place.command("a", &[&flags[..], &["--test", "true"]].concat());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = command.spawn().expect("storm starts");
    let mut lines = BufReader::new(running.stdout.take().expect("a pipe")).lines();
    let is_step = |line: &String| line.contains("\"event\":\"step\"");
    assert!(lines.by_ref().any(|line| line.as_ref().is_ok_and(is_step)), "there is no step");
    let folder = place.run_folder("a");
    let shard = folder.join("data/shard-00000.storm");
    let file = fs::OpenOptions::new().write(true).open(&shard).expect("a shard");
    let bytes = file.metadata().expect("its size").len();
    file.set_len(bytes / 4 * 3).expect("it is cut");
    let rest: Vec<String> = lines.map(|line| line.expect("text")).collect();
    let ended = running.wait_with_output().expect("it ends");
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(4), "{errors}");
    assert!(errors.contains("the run was not tested; its model was saved"), "{errors}");
    assert!(rest.iter().all(|line| !line.contains("\"event\":\"tested\"")), "{rest:?}");
    for made in ["model/model.safetensors", "report.html"] {
        assert!(folder.join(made).exists(), "{made}");
    }
}

#[test]
fn a_model_writes_the_same_text_again() {
    let place = Place::new();
    place.run("a", &["--steps", "4"]).succeeded();
    let sample = |more: &str| {
        let args = "sample runs/a/model --tokenizer bytes --prompt 12 --tokens 20 --seq 16";
        storm(&place, &format!("{args} {more}"))
    };
    let one = text(&sample("--seed 3"));
    assert!(one.starts_with("12") && one.ends_with('\n'), "{one}");
    assert_eq!(one, text(&sample("--seed 3")));
    let greedy = text(&sample("--temperature 0 --seed 1"));
    assert_eq!(greedy, text(&sample("--top-k 1 --seed 2")));
    assert!(text(&sample("--dtype bf16")).starts_with("12"));
    let on_cpu = text(&sample("--temperature 0 --device cpu"));
    assert_eq!(on_cpu, text(&sample("--temperature 0 --device cpu --vram 64MiB --ram 256MiB")));
    assert_eq!(sample("--device cpu --ram 1KiB").status.code(), Some(2));
    let timed = sample("--timing");
    assert!(String::from_utf8_lossy(&timed.stderr).contains("tokens/s"));
    let unprompted = text(&storm(&place, "sample runs/a/model --tokenizer bytes --tokens 3"));
    assert!(unprompted.ends_with('\n'), "{unprompted}");
    assert_eq!(sample("--top-p 0").status.code(), Some(2));
    assert_eq!(sample("--top-k 0").status.code(), Some(2));
}
