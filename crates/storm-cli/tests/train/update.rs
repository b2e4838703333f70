//! Updates in the backward pass.

use crate::support::{Place, is, losses};

#[test]
fn updates_in_the_backward_pass_are_those_of_the_end_of_the_step() {
    let place = Place::new();
    let flags = |update: &'static str| ["--steps", "4", "--clip", "0", "--update", update];
    let end = losses(&place.run("end", &flags("end-of-step")).succeeded());
    let backward = losses(&place.run("backward", &flags("in-backward")).succeeded());
    assert_eq!(backward, end);
    assert!(place.result("backward", 4) == place.result("end", 4));
}

#[test]
fn clipping_before_the_norm_is_known_is_refused() {
    let place = Place::new();
    let clipped = place.run("clipped", &["--update", "in-backward", "--steps", "1"]);
    clipped.failed(2, &["before their norm is known", "set clip = 0"]);
    assert!(!place.run_folder("clipped").exists());
}

/// A non-finite gradient cannot cancel the updates before it. The run ends with an error, and its
/// checkpoints stay.
#[test]
fn a_step_that_is_partly_applied_is_not_saved() {
    let place = Place::new();
    let flags = ["--steps", "50", "--save-every", "1", "--clip", "0", "--update", "in-backward"];
    let wild = ["--learning-rate", "1e37", "--final-learning-rate", "1e37"];
    let done = place.run("wild", &[&flags[..], &wild].concat());
    let saved = done.events.iter().filter(|event| is(event, "saved")).count();
    assert!(saved > 0, "{:?}", done.events);
    let path = format!("step-{saved:08}");
    done.failed(1, &["so the weights are lost", "The last good checkpoint is", &path]);
    let newest = place.run_folder("wild").join("checkpoints").join(&path);
    assert!(newest.exists() && !newest.with_file_name(format!("step-{:08}", saved + 1)).exists());
}
