//! Moments in 8 bits are part of a run: resumed bit for bit, within any memory, and never mixed
//! with others.

use crate::support::{Place, losses};

#[test]
fn moments_in_8_bits_belong_to_their_run() {
    let place = Place::new();
    let common = ["--precision", "bf16-stochastic", "--schedule", "constant"];
    let with = |more: &[&'static str]| [&common[..], &["--moments", "int8"], more].concat();
    let whole = losses(&place.run("whole", &with(&["--steps", "6"])).succeeded());
    let mut found = losses(&place.run("a", &with(&["--steps", "3"])).succeeded());
    let resume = with(&["--steps", "6", "--resume", "--optimizer-state", "streamed"]);
    found.extend(losses(&place.run("a", &resume).succeeded()));
    assert_eq!(found, whole);
    assert!(place.result("a", 6) == place.result("whole", 6));
    let full = [&common[..], &["--steps", "6"]].concat();
    let full = losses(&place.run("full", &full).succeeded());
    assert_eq!(full[0], found[0], "the first loss is before any update");
    assert_ne!(full, found);

    let other = [&common[..], &["--steps", "8", "--resume"]].concat();
    place.run("a", &other).failed(2, &["moments was int8 when the run began and is full now"]);
    let single = ["--precision", "f32", "--moments", "int8", "--steps", "1"];
    place.run("f32", &single).failed(2, &["moments", "int8 is for bf16 matrices"]);
    assert!(!place.run_folder("f32").exists());
}
