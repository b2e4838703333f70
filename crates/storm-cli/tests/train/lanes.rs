//! Lanes are part of a run. It resumes bit for bit under another plan, and its lanes never change.

use crate::support::{Place, losses};

#[test]
fn lanes_belong_to_their_run() {
    let place = Place::new();
    let common = ["--accumulate", "4", "--schedule", "constant"];
    let with = |more: &[&'static str]| [&common[..], &["--lanes", "2"], more].concat();
    let whole = losses(&place.run("whole", &with(&["--steps", "6"])).succeeded());
    let mut found = losses(&place.run("a", &with(&["--steps", "3"])).succeeded());
    let resume = with(&["--steps", "6", "--resume", "--gradients", "streamed"]);
    found.extend(losses(&place.run("a", &resume).succeeded()));
    assert_eq!(found, whole);
    assert!(place.result("a", 6) == place.result("whole", 6));

    // Without the flag, a run keeps them.
    let silent = [&common[..], &["--steps", "7", "--resume"]].concat();
    place.run("a", &silent).succeeded();
    let other = [&common[..], &["--steps", "8", "--resume", "--lanes", "1"]].concat();
    place.run("a", &other).failed(2, &["lanes was 2 when the run began and is 1 now"]);
}

/// Groups are as much a part of a run as the number of lanes.
#[test]
fn groups_of_lanes_belong_to_their_run() {
    let place = Place::new();
    let common = ["--accumulate", "4", "--schedule", "constant"];
    let with = |more: &[&'static str]| [&common[..], &["--lanes", "2x2"], more].concat();
    let whole = losses(&place.run("whole", &with(&["--steps", "6"])).succeeded());
    let mut found = losses(&place.run("a", &with(&["--steps", "3"])).succeeded());
    // Without the flag, a run keeps them, under another plan.
    let silent = [&common[..], &["--steps", "6", "--resume", "--gradients", "streamed"]].concat();
    found.extend(losses(&place.run("a", &silent).succeeded()));
    assert_eq!(found, whole);
    assert!(place.result("a", 6) == place.result("whole", 6));
    let other = [&common[..], &["--steps", "8", "--resume", "--lanes", "4"]].concat();
    place.run("a", &other).failed(2, &["lanes was 2x2 when the run began and is 4 now"]);
}

#[test]
fn lanes_that_do_not_divide_a_step_are_refused() {
    let place = Place::new();
    let problem = ["lanes is 3; it must divide the micro-batches of a step evenly"];
    place.run("a", &["--lanes", "3", "--accumulate", "4"]).failed(2, &problem);
    let groups = ["lanes is 6 (2x3); it must divide the micro-batches of a step evenly"];
    place.run("a", &["--lanes", "2x3", "--accumulate", "4"]).failed(2, &groups);
    for text in ["2x", "0x4", "0", "x2", "2x2x2"] {
        place.run("a", &["--lanes", text, "--accumulate", "4"]).failed(2, &["such as 2x8", text]);
    }
    let backward = ["--lanes", "2", "--update", "in-backward", "--clip", "0"];
    place.run("a", &backward).failed(2, &["use one lane"]);
    assert!(!place.run_folder("a").exists());
}
