//! `optimizer = "sgd"`: resumed bit for bit, within any memory. Incompatible options are refused.

use crate::support::{Place, losses};

#[test]
fn sgd_is_part_of_a_run() {
    let place = Place::new();
    let common = ["--schedule", "constant", "--learning-rate", "0.05"];
    let sgd = ["--optimizer", "sgd", "--momentum", "0.8", "--nesterov", "true"];
    let with = |more: &[&'static str]| [&common[..], &sgd[..], more].concat();
    let whole = losses(&place.run("whole", &with(&["--steps", "6"])).succeeded());
    let mut found = losses(&place.run("a", &with(&["--steps", "3"])).succeeded());
    let resume = with(&["--steps", "6", "--resume", "--optimizer-state", "streamed"]);
    found.extend(losses(&place.run("a", &resume).succeeded()));
    assert_eq!(found, whole);
    assert!(place.result("a", 6) == place.result("whole", 6));

    let other = [&common[..], &["--steps", "8", "--resume"]].concat();
    place.run("a", &other).failed(2, &["optimizer was sgd when the run began and is adamw now"]);
}

#[test]
fn what_does_not_go_with_an_optimizer_is_refused() {
    let place = Place::new();
    let refused = |flags: &[&str], part: &str| place.run("bad", flags).failed(2, &[part]);
    refused(&["--momentum", "0.9"], "for optimizer = \"sgd\"");
    refused(&["--nesterov", "true"], "for optimizer = \"sgd\"");
    refused(&["--optimizer", "sgd", "--momentum", "1"], "momentum must be at least 0");
    let still = ["--optimizer", "sgd", "--momentum", "0", "--nesterov", "true"];
    refused(&still, "nesterov needs a momentum");
    let coded = ["--optimizer", "sgd", "--moments", "int8"];
    refused(&coded, "is for optimizer = \"adamw\"");
    assert!(!place.run_folder("bad").exists());
}
