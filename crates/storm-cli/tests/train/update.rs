//! Updates in the backward pass.

use crate::support::{Place, losses};

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
