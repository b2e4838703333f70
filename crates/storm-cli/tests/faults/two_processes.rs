//! Two processes on one run: the second is refused and names the first, which does not notice.

use crate::support::{Place, losses};
use std::process::Command;

const STEPS: u64 = 8;

fn signal(id: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &id.to_string()]).status();
    assert!(status.expect("kill runs").success());
}

#[test]
fn a_second_process_is_refused_and_harms_nothing() {
    let place = Place::new();
    let steps = STEPS.to_string();
    let mut flags = vec!["--steps", &steps, "--save-every", "1"];
    flags.extend(["--hardware", "reference", "--vram", "1GiB"]);
    let expected = losses(&place.run("whole", &flags).succeeded());
    for (name, more) in [("fresh", None), ("resumed", Some("--resume"))] {
        let mut first = place.start(name, &flags);
        let mut found = Vec::new();
        while found.len() < 3 {
            let event = first.next().expect("more steps");
            found.extend(losses(std::slice::from_ref(&event)));
        }
        // It is stopped, perhaps inside a save, until the second is gone.
        signal(first.child.id(), "STOP");
        let second: Vec<&str> = flags.iter().copied().chain(more).collect();
        let refused = place.run(name, &second);
        signal(first.child.id(), "CONT");
        assert_ne!(refused.code, Some(0), "{name}: two processes on one run");
        let holder = first.child.id().to_string();
        assert!(refused.stderr.contains(&holder), "{holder} is not in: {}", refused.stderr);
        let (code, events) = first.wait();
        assert_eq!(code, Some(0), "{name}: {events:?}");
        found.extend(losses(&events));
        assert_eq!(found, expected, "{name}");
        assert!(place.result(name, STEPS) == place.result("whole", STEPS), "{name}: other weights");
        let metrics = std::fs::read_to_string(place.run_folder(name).join("metrics.jsonl"));
        let of_step = |line: &&str| line.contains("\"loss\"");
        let lines = metrics.expect("metrics").lines().filter(of_step).count() as u64;
        assert_eq!(lines, STEPS, "{name}: each step once");
        // No other process is left.
        let resumed: Vec<&str> = flags.iter().copied().chain(["--resume"]).collect();
        place.run(name, &resumed).succeeded();
    }
}
