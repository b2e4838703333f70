//! Runs whose bf16 products are summed as by AMX.

use crate::support::{Place, losses};

/// The sums change losses. The run resumes bit for bit under another budget and is evaluated as it
/// computes, and the sums are part of it.
#[test]
fn sums_of_products_belong_to_their_run() {
    let place = Place::new();
    // Wide enough that sums are rounded.
    let constant = ["--width", "64", "--schedule", "constant", "--save-every", "3"];
    let amx = ["--cpu-products", "amx", "--precision", "bf16-stochastic"];
    let train = |name: &str, more: &[&[&'static str]]| {
        place.run(name, &[&constant, &*more.concat()].concat())
    };
    let whole = losses(&train("whole", &[&amx, &["--steps", "6", "--threads", "1"]]).succeeded());
    let mut parts = losses(&train("parts", &[&amx, &["--steps", "3"]]).succeeded());
    let resume = ["--steps", "6", "--resume", "--vram", "32MiB", "--threads", "3"];
    parts.extend(losses(&train("parts", &[&amx, &resume]).succeeded()));
    assert_eq!(parts, whole);
    assert!(place.result("parts", 6) == place.result("whole", 6));

    let bf16 = ["--precision", "bf16-stochastic"];
    let plain = losses(&train("plain", &[&bf16, &["--steps", "6"]]).succeeded());
    assert_ne!(plain, whole);

    let other = train("parts", &[&bf16, &["--steps", "8", "--resume", "--cpu-products", "fma"]]);
    other.failed(2, &["cpu-products was amx when the run began and is fma now"]);
    let other = train("plain", &[&bf16, &["--steps", "8", "--resume", "--cpu-products", "amx"]]);
    other.failed(2, &["cpu-products was fma when the run began and is amx now"]);
}

/// It is refused before anything is created.
#[test]
fn sums_that_would_change_nothing_are_refused() {
    let place = Place::new();
    let refused = place.run("a", &["--steps", "1", "--precision", "f32", "--cpu-products", "amx"]);
    refused.failed(2, &["is for products of bf16", "precision = \"f32\" has none"]);
    assert!(!place.run_folder("a").exists());
    place.run("a", &["--steps", "1", "--cpu-products", "exact"]).failed(2, &["exact"]);
}
