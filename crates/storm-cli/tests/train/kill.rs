//! A run that is killed again and again ends as one that never was.

use crate::support::{Place, Running, is};
use std::fs;
use std::path::Path;

/// Runs that are killed side by side: most of the time of each goes into waiting for the disk.
const RUNS: u64 = 5;

/// Kills of all runs together; more with `STORM_LONG_TESTS=1`.
fn kill_count() -> u64 {
    if std::env::var_os("STORM_LONG_TESTS").is_some() { 1000 } else { 20 }
}

/// Steps between two checkpoints: some are made while one is written.
const SAVE_EVERY: &str = "2";

/// For runs that nobody kills.
const SAVE_RARELY: &str = "100";

/// More than the lives of a run make on average.
const STEPS_PER_KILL: u64 = 12;

/// When to kill.
#[derive(Debug)]
enum Moment {
    /// After so many events.
    Events(u64),
    /// In a save, as soon as this file is there; after so many whole saves.
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
    /// Whether it was inside a save.
    was_saving: bool,
}

/// Lets a run go until the moment, and kills it.
fn kill_at(mut run: Running, moment: &Moment, checkpoints: &Path) -> Killed {
    let mut killed = Killed { started_at: 0, saved: None, was_saving: false };
    let (mut events, mut saves) = (0, 0);
    while let Some(event) = run.next() {
        assert!(!is(&event, "checkpoint_skipped"), "{event}");
        assert!(!is(&event, "finished"), "{moment:?}: the run ended before it was killed");
        let step = event["step"].as_u64();
        match event["event"].as_str().unwrap_or_default() {
            "started" => killed.started_at = step.expect("a step"),
            "saved" => killed.saved = step,
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
    killed.was_saving = names(checkpoints).iter().any(|name| name.ends_with(".partial"));
    killed
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Until the file of an unfinished checkpoint is there, or that checkpoint or a later one is finished:
/// steps go on, and it may be deleted again already.
fn wait_for(checkpoints: &Path, step: u64, file: Option<&str>) {
    let Some(file) = file else { return };
    let partial = checkpoints.join(format!("step-{step:08}.partial")).join(file);
    let is_over = || {
        let step_of = |name: &String| name.strip_prefix("step-")?.parse::<u64>().ok();
        names(checkpoints).iter().filter_map(step_of).any(|saved| saved >= step)
    };
    while !partial.exists() && !is_over() {
        std::thread::yield_now();
    }
}

/// Kills a run so many times, lets it end, and says how many of the kills were inside a save.
fn kill_again_and_again(place: &Place, name: &str, kills: u64, flags: &[&str]) -> u64 {
    let often = [flags, &["--save-every", SAVE_EVERY, "--resume"]].concat();
    let checkpoints = place.run_folder(name).join("checkpoints");
    let mut random = Random(name.bytes().map(u64::from).sum());
    let (mut saved, mut inside) = (0, 0);
    for kill in 0..kills {
        let moment = random.moment(kill);
        let killed = kill_at(place.start(name, &often), &moment, &checkpoints);
        let kept = killed.started_at == 0 || killed.started_at >= saved;
        assert!(kept, "{name} {kill} {moment:?}: lost work");
        saved = killed.saved.unwrap_or(saved);
        inside += u64::from(killed.was_saving);
    }
    let rest = [flags, &["--save-every", SAVE_RARELY, "--resume"]].concat();
    let events = place.run(name, &rest).succeeded();
    let start = events.iter().find(|event| is(event, "started")).expect("a start");
    assert!(start["step"].as_u64().expect("a step") >= saved, "{name}: lost work at the end");
    inside
}

#[test]
fn kills_at_any_moment_change_nothing() {
    let place = Place::new();
    let kills = kill_count() / RUNS;
    let last = kills * STEPS_PER_KILL;
    let steps = last.to_string();
    let mut flags = vec!["--steps", &steps, "--eval-every", "7", "--precision", "bf16-stochastic"];
    // Measuring the CPU at every start would take most of the time.
    flags.extend(["--hardware", "reference", "--vram", "1GiB"]);
    place.run("whole", &[&flags[..], &["--save-every", SAVE_RARELY]].concat()).succeeded();
    let names: Vec<String> = (0..RUNS).map(|run| format!("killed-{run}")).collect();
    let inside: u64 = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (run, name) in names.iter().enumerate() {
            // One of them with pauses.
            let mode = if run == 0 { "pause" } else { "background" };
            let flags = [&flags[..], &["--save-mode", mode]].concat();
            let place = &place;
            threads.push(scope.spawn(move || kill_again_and_again(place, name, kills, &flags)));
        }
        let inside = threads.into_iter().map(|thread| thread.join().expect("no work was lost"));
        inside.sum()
    });
    println!("{inside} of {} kills were inside a save", kills * RUNS);
    assert!(inside > 0, "no kill was inside a save");
    for name in &names {
        assert!(place.result(name, last) == place.result("whole", last), "{name}: other weights");
    }
}
