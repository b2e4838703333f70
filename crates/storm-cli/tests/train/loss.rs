//! `storm bench loss`: compares variants of a run.

use crate::support::{Done, Place, finish, tree};
use std::fs;
use std::process::Command;

/// `storm bench loss` of a short run.
fn compare(place: &Place, flags: &[&str]) -> Done {
    let tiny = fs::read_to_string(place.path().join("tiny.toml")).expect("a config");
    let short = format!("{tiny}steps = 4\neval-every = 2\n");
    fs::write(place.path().join("short.toml"), short).expect("a file");
    let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
    command.current_dir(place.path()).args(["bench", "loss", "short.toml", "--json"]).args(flags);
    finish(command)
}

#[test]
fn a_change_is_measured_and_none_is_none() {
    let place = Place::new();
    // Another budget changes the plan but no bit. Another learning rate changes what is learned.
    let flags = ["--change", "--vram 48MiB", "--change", "--learning-rate 1e-4", "--seeds", "2"];
    let flags = [&flags[..], &["--svg", "loss.svg"]].concat();
    let lines = compare(&place, &flags).succeeded();
    assert_eq!(lines.len(), 3, "{lines:?}");
    let number = |line: usize, key: &str| lines[line][key].as_f64().expect("a number");
    assert_eq!(lines[1]["variant"], "vram 48MiB");
    let curve = ["smoothed_curve_above_max", "smoothed_curve_below_max"];
    for key in [&["difference", "difference_of_first_loss"], &curve[..]].concat() {
        assert_eq!(number(1, key), 0.0, "{key}");
    }
    // The first loss is computed before the first update.
    assert_eq!(number(2, "difference_of_first_loss"), 0.0);
    assert!(number(2, "difference") > 1e-3, "{lines:?}");
    let each = lines[2]["difference_of_each_seed"].as_array().expect("a list");
    let each: Vec<f64> = each.iter().filter_map(serde_json::Value::as_f64).collect();
    assert!(each.len() == 2 && each[0] != each[1], "{each:?}");
    assert!(number(0, "seeds_differ") > 0.0);
    let svg = fs::read_to_string(place.path().join("loss.svg")).expect("a picture");
    assert!(svg.contains("learning-rate 1e-4"), "{svg}");

    // Finished runs are not repeated.
    let runs = |place: &Place| tree(&place.path().join("runs/loss"));
    let metrics = |place: &Place| -> Vec<_> {
        let files = runs(place).into_iter();
        files.filter(|(path, _)| path.ends_with("metrics.jsonl")).collect()
    };
    let before = metrics(&place);
    assert_eq!(before.len(), 6);
    let again = compare(&place, &flags).succeeded();
    assert_eq!(again, lines);
    assert_eq!(metrics(&place), before);

    // Parallel runs give the same.
    let at_once = [&flags[..], &["--runs", "runs/at-once", "--at-once", "3"]].concat();
    assert_eq!(compare(&place, &at_once).succeeded(), lines);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let place = Place::new();
    let refused = |flags: &[&str], words: &str| {
        let done = compare(&place, flags);
        assert_ne!(done.code, Some(0));
        assert!(done.stderr.contains(words), "{}", done.stderr);
    };
    refused(&["--change", "--lerning-rate 1"], "--lerning-rate");
    refused(&["--change", " "], "is empty or repeats another");
    refused(&["--change", "--beta1 0.8", "--change", "--beta1 0.8"], "is empty or repeats another");
    refused(&["--seeds", "1", "--change", "--steps 6"], "differ in their steps");
}
