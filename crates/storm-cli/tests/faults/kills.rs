//! Commands that are killed repeatedly end with the same result as undisturbed ones.

use crate::campaign::{self, attack};
use crate::inject::{Prepared, SCENARIOS};
use crate::random::Random;
use crate::shim::{Fault, Kind, Shim};
use crate::stock::Stock;
use crate::support::{Place, Running, is};
use std::fs;
use std::path::Path;

/// Runs that are killed in parallel. Each mostly waits for the disk.
const RUNS: u64 = 5;

/// Kills of all runs together.
fn kill_count() -> u64 {
    if campaign::is_long() { 1000 } else { 20 }
}

/// Steps between two checkpoints. Some steps run while a checkpoint is written.
const SAVE_EVERY: &str = "2";

/// For runs that are not killed.
const SAVE_RARELY: &str = "100";

/// More steps than a run makes between two kills, on average.
const STEPS_PER_KILL: u64 = 12;

/// When to kill.
#[derive(Debug)]
enum Moment {
    /// After this many events.
    Events(u64),
    /// In a save after this many complete ones, as soon as this file exists.
    Saving { saves: u64, file: Option<&'static str> },
}

impl Moment {
    fn draw(random: &mut Random, kill: u64) -> Moment {
        if kill.is_multiple_of(2) {
            return Moment::Events(random.below(16));
        }
        let files = [
            None,
            Some("parameters.safetensors"),
            Some("optimizer.safetensors"),
            Some("manifest.json"),
        ];
        Moment::Saving { saves: random.below(4), file: *random.pick(&files) }
    }
}

/// State of a run when it was killed.
struct Killed {
    started_at: u64,
    /// The step of the last checkpoint that it reported as saved.
    saved: Option<u64>,
    /// Whether it was inside a save.
    was_saving: bool,
}

/// Lets a run continue until the moment, and kills it.
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

/// Waits until the file of an unfinished checkpoint exists, or until that checkpoint or a later one
/// is finished. Steps continue, so the checkpoint may already be deleted again.
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

/// Kills a run `kills` times, lets it finish, and returns how many kills were inside a save.
fn kill_again_and_again(place: &Place, name: &str, kills: u64, flags: &[&str]) -> u64 {
    let often = [flags, &["--save-every", SAVE_EVERY, "--resume"]].concat();
    let checkpoints = place.run_folder(name).join("checkpoints");
    let of_name: u64 = name.bytes().map(u64::from).sum();
    let mut random = Random::of_case(campaign::seed(), of_name);
    let (mut saved, mut inside) = (0, 0);
    for kill in 0..kills {
        let moment = Moment::draw(&mut random, kill);
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
            // One of the runs saves with pauses.
            let mode = if run == 0 { "pause" } else { "background" };
            let flags = [&flags[..], &["--save-mode", mode]].concat();
            let place = &place;
            threads.push(scope.spawn(move || kill_again_and_again(place, name, kills, &flags)));
        }
        let inside = threads.into_iter().map(|thread| thread.join().expect("no work was lost"));
        inside.sum()
    });
    println!("kills_at_any_moment_change_nothing: {} kills, {inside} inside a save", kills * RUNS);
    assert!(inside > 0, "no kill was inside a save");
    for name in &names {
        assert!(place.result(name, last) == place.result("whole", last), "{name}: other weights");
    }
}

/// Kills of each command in the short campaign.
const SHORT_CASES: usize = 6;

/// The calls at which a kill leaves the disk in a different state.
fn kills(kind: Kind) -> &'static [Fault] {
    match kind {
        Kind::Open | Kind::Write | Kind::Positioned | Kind::Sync | Kind::Rename => &[Fault::Kill],
        Kind::Mkdir | Kind::Unlink | Kind::Truncate | Kind::Spawn | Kind::Allocate => {
            &[Fault::Kill]
        }
        Kind::Read | Kind::Map | Kind::Thread | Kind::Stat | Kind::Lock => &[],
    }
}

#[test]
fn kills_at_any_call_change_nothing() {
    let (stock, shim) = (Stock::new(), Shim::new());
    let prepared = SCENARIOS.each_ref().map(|scenario| Prepared::new(&stock, &shim, scenario));
    let cases: Vec<_> = prepared.iter().flat_map(|of| of.cases(kills, SHORT_CASES)).collect();
    attack("kills_at_any_call_change_nothing", cases, |(of, injection)| of.check(*injection));
}
