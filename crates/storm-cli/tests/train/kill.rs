//! A run that is killed again and again ends as one that never was.

use crate::support::{Place, Running, is};
use std::path::Path;

/// Kills; more with `STORM_LONG_TESTS=1`.
fn kill_count() -> u64 {
    if std::env::var_os("STORM_LONG_TESTS").is_some() { 1000 } else { 20 }
}

/// When to kill.
#[derive(Debug)]
enum Moment {
    /// After so many events.
    Events(u64),
    /// In a save, as soon as this file is there.
    Saving { saves: u64, file: Option<&'static str> },
}

/// A small seeded generator (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    fn moment(&mut self, kill: u64) -> Moment {
        if kill.is_multiple_of(2) {
            return Moment::Events(self.below(16));
        }
        let files = [
            None,
            Some("parameters.safetensors"),
            Some("optimizer.safetensors"),
            Some("manifest.json"),
        ];
        Moment::Saving { saves: self.below(4), file: files[self.below(4) as usize] }
    }
}

/// What a run had come to when it was killed.
struct Killed {
    started_at: u64,
    /// The last step whose checkpoint it said was saved.
    saved: Option<u64>,
    has_finished: bool,
}

/// Lets a run go until the moment, and kills it.
fn kill_at(mut run: Running, moment: &Moment, checkpoints: &Path) -> Killed {
    let mut killed = Killed { started_at: 0, saved: None, has_finished: false };
    let (mut events, mut saves) = (0, 0);
    while let Some(event) = run.next() {
        assert!(!is(&event, "checkpoint_skipped"), "{event}");
        let step = event["step"].as_u64();
        match event["event"].as_str().unwrap_or_default() {
            "started" => killed.started_at = step.expect("a step"),
            "saved" => killed.saved = step,
            "finished" => killed.has_finished = true,
            _ => {}
        }
        events += 1;
        match moment {
            Moment::Events(count) if events > *count => break,
            Moment::Saving { saves: before, file } if is(&event, "saving") => {
                saves += 1;
                if saves > *before {
                    wait_for(checkpoints, step.expect("a step"), *file);
                    break;
                }
            }
            _ => {}
        }
    }
    // SIGKILL on Unix.
    run.child.kill().expect("it can be killed");
    run.child.wait().expect("it ends");
    killed
}

/// Until the file of an unfinished checkpoint is there, or the checkpoint is finished.
fn wait_for(checkpoints: &Path, step: u64, file: Option<&str>) {
    let Some(file) = file else { return };
    let finished = checkpoints.join(format!("step-{step:08}"));
    let partial = checkpoints.join(format!("step-{step:08}.partial")).join(file);
    while !partial.exists() && !finished.exists() {
        std::hint::spin_loop();
    }
}

#[test]
fn kills_at_any_moment_change_nothing() {
    let place = Place::new();
    let kills = kill_count();
    let steps = (kills * 6).to_string();
    let flags = ["--steps", &steps, "--eval-every", "7", "--precision", "bf16-stochastic"];
    let whole = [&flags[..], &["--save-every", "50"]].concat();
    place.run("whole", &whole).succeeded();

    let often = [&flags[..], &["--save-every", "1", "--resume"]].concat();
    let checkpoints = place.run_folder("killed").join("checkpoints");
    let mut random = Random(42);
    let mut saved = 0;
    for kill in 0..kills {
        let moment = random.moment(kill);
        let killed = kill_at(place.start("killed", &often), &moment, &checkpoints);
        assert!(
            killed.started_at == 0 || killed.started_at >= saved,
            "{kill} {moment:?}: lost work"
        );
        saved = killed.saved.unwrap_or(saved);
        assert!(!killed.has_finished, "the run ended before it was killed {kills} times");
    }
    let events = place.run("killed", &often).succeeded();
    let start = events.iter().find(|event| is(event, "started")).expect("a start");
    assert!(start["step"].as_u64().expect("a step") >= saved, "lost work at the end");
    let last = kills * 6;
    assert!(place.result("killed", last) == place.result("whole", last), "other weights");
}
