//! `mpirun -n N storm train`: bits depend on lanes and never on ranks, runs resume on any number of
//! ranks, and a killed rank ends all.

use crate::support::{Done, Place, finish, is, losses};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use storm_graph::random::Random;

/// An MPI launcher.
struct Mpi {
    program: PathBuf,
    options: &'static [&'static str],
}

/// Both MPIs, if `cargo xtask test` has installed them.
fn mpis() -> Vec<Mpi> {
    let open_mpi = &["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"];
    let all = [("mpi/mpich/bin/mpirun", &[][..]), ("mpi/openmpi/bin/mpirun", &open_mpi[..])];
    let found = |(path, options)| launcher(path).map(|program| Mpi { program, options });
    all.into_iter().filter_map(found).collect()
}

/// A launcher, if `cargo xtask test` has installed it.
fn launcher(path: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    let program = folder.map(|folder| folder.join(path)).filter(|program| program.is_file());
    if program.is_none() {
        let message = format!(
            "not tested: there is no {path} in VIRTUAL_ENV. `cargo xtask test` installs it"
        );
        assert!(std::env::var_os("STORM_REQUIRE_LAUNCHERS").is_none(), "{message}");
        // Bypasses the test harness, which would hide it.
        let _ = writeln!(std::io::stderr(), "{message}");
    }
    program
}

impl Mpi {
    /// `mpirun -n RANKS storm train tiny.toml`.
    fn command(&self, place: &Place, ranks: usize, name: &str, flags: &[&str]) -> Command {
        let storm = place.command(name, flags);
        let mut command = Command::new(&self.program);
        command.current_dir(place.path()).env_remove("RANK").env_remove("WORLD_SIZE");
        command.args(self.options).args(["-n", &ranks.to_string()]);
        command.arg(storm.get_program()).args(storm.get_args());
        command
    }

    fn run(&self, place: &Place, ranks: usize, name: &str, flags: &[&str]) -> Done {
        finish(self.command(place, ranks, name, flags))
    }
}

const FOUR_LANES: [&str; 6] = ["--accumulate", "4", "--lanes", "4", "--schedule", "constant"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&FOUR_LANES[..], more].concat()
}

#[test]
fn ranks_change_no_bit() {
    let mpis = mpis();
    let place = Place::new();
    for precision in ["f32", "bf16-stochastic"] {
        let flags = with(&["--steps", "20", "--precision", precision]);
        let alone = format!("alone-{precision}");
        let expected = losses(&place.run(&alone, &flags).succeeded());
        for (number, mpi) in mpis.iter().enumerate() {
            let ranks = if (precision == "f32") == (number == 0) { 4 } else { 2 };
            let name = format!("{precision}-{number}");
            let found = losses(&mpi.run(&place, ranks, &name, &flags).succeeded());
            assert_eq!(found, expected, "{precision} on {ranks} ranks");
            assert!(place.result(&name, 20) == place.result(&alone, 20), "{name}");
        }
    }
}

/// Four ranks as two machines of two. Each machine adds up a group of two lanes, and only the sums
/// go between machines. The files are those of one rank, and a run resumes with another exchange.
#[test]
fn two_levels_change_no_bit() {
    let place = Place::new();
    let grouped = ["--accumulate", "4", "--lanes", "2x2", "--schedule", "constant"];
    let of_steps =
        |steps, more: &[&'static str]| [&grouped[..], &["--steps", steps], more].concat();
    let expected = losses(&place.run("alone", &of_steps("6", &[])).succeeded());
    for (number, mpi) in mpis().iter().enumerate() {
        let name = format!("two-levels-{number}");
        let run = |ranks: usize, machine: &str, flags: &[&str]| {
            let mut command = mpi.command(&place, ranks, &name, flags);
            command.env("STORM_MACHINE_RANKS", machine);
            finish(command)
        };
        let levels = |ranks: usize, machine: &str| {
            let events = run(ranks, machine, &of_steps("6", &["--dry-run"])).succeeded();
            events[0]["plan"]["ranks"]["exchange_levels"].as_u64()
        };
        assert_eq!((levels(4, "2"), levels(4, "4"), levels(2, "1")), (Some(2), Some(1), Some(1)));
        let mut found = losses(&run(4, "2", &of_steps("3", &[])).succeeded());
        found.extend(losses(&run(4, "4", &of_steps("4", &["--resume"])).succeeded()));
        found.extend(losses(&run(4, "2", &of_steps("6", &["--resume"])).succeeded()));
        assert_eq!(found, expected);
        assert!(place.result(&name, 6) == place.result("alone", 6), "{name}");
        let refused = run(4, "3", &of_steps("6", &[]));
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        let problem = "STORM_MACHINE_RANKS is `3`";
        assert_eq!(refused.stderr.matches(problem).count(), 1, "{}", refused.stderr);
    }
}

/// `mpirun -n 2 storm probe`: the profile has the link between ranks, which plans and runs then
/// use.
#[test]
fn the_link_between_ranks_is_measured_and_used() {
    let Some(mpi) = mpis().into_iter().next() else { return };
    let place = Place::new();
    let probe = |more: &[&str]| {
        let storm = place.command("a", &[]);
        let mut command = Command::new(&mpi.program);
        command.current_dir(place.path()).env_remove("RANK").env_remove("WORLD_SIZE");
        command.env("CUDA_VISIBLE_DEVICES", "");
        command.args(mpi.options).args(["-n", "2"]).arg(storm.get_program()).arg("probe");
        finish_command(command.args(more))
    };
    let (code, printed, errors) = probe(&["--out", "profile.json", "--device", "cpu", "--json"]);
    assert_eq!(code, Some(0), "{errors}");
    let text = std::fs::read_to_string(place.path().join("profile.json")).expect("a profile");
    let profile: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(serde_json::from_str::<Value>(&printed).expect("one rank prints"), profile);
    let link = &profile["ranks"];
    assert_eq!((&link["ranks"], &link["machines"]), (&Value::from(2), &Value::Null));
    let bandwidth = link["bandwidth"].as_f64().expect("a number");
    assert!(bandwidth > 0.0 && link["latency_seconds"].as_f64() >= Some(0.0), "{link}");
    // A run says which link it assumes. Without the profile, it says that it knows of none.
    let dry = |more: &[&str]| {
        let flags = [&FOUR_LANES[..], &["--steps", "1", "--dry-run"], more].concat();
        let events = mpi.run(&place, 2, "a", &flags).succeeded();
        events[0]["plan"]["ranks"].clone()
    };
    let (linked, unknown) = (dry(&["--hardware", "profile.json"]), dry(&[]));
    assert_eq!(linked["link"], *link);
    assert!(linked["collective_seconds"].as_f64() > Some(0.0), "{linked}");
    assert_eq!(unknown["link"], Value::Null);
    assert_eq!(unknown["collective_seconds"].as_f64(), Some(0.0));
    // What cannot be measured or written is refused before measuring, by one rank.
    for (flags, problem) in [
        (["--device", "cuda"], "rank 0 ended the run: "),
        (["--device=cuda", "--gpu=1"], "--gpu is for one rank"),
        (["--device=cpu", "--out=no-folder/profile.json"], "cannot write no-folder/profile.json"),
    ] {
        let (code, _, errors) = probe(&flags);
        assert_ne!(code, Some(0), "{errors}");
        assert_eq!(errors.matches(problem).count(), 1, "{errors}");
        assert!(!errors.contains("measuring"), "{errors}");
    }
}

fn finish_command(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().expect("mpirun");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Metrics and report have the time and memory of every rank.
#[test]
fn metrics_hold_every_rank() {
    let Some(mpi) = mpis().into_iter().next() else { return };
    let place = Place::new();
    let events = mpi.run(&place, 4, "a", &with(&["--steps", "2"])).succeeded();
    let told = events.iter().find(|event| is(event, "ranks")).expect("an event of ranks");
    let metrics = std::fs::read_to_string(place.run_folder("a").join("metrics.jsonl"));
    let metrics = metrics.expect("metrics");
    let lines: Vec<Value> =
        metrics.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let line = lines.iter().find(|line| line.get("ranks").is_some()).expect("a line of ranks");
    assert_eq!(line["ranks"], told["ranks"]);
    let ranks = line["ranks"].as_array().expect("a list");
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!(rank["rank"], number);
        let seconds = rank["seconds"].as_f64().expect("a number");
        let in_collectives = rank["collective_seconds"].as_f64().expect("a number");
        assert!(0.0 < in_collectives && in_collectives < seconds, "{rank}");
        assert!(rank["process_bytes"].as_u64() > Some(1 << 20), "{rank}");
    }
    assert_eq!(ranks.len(), 4);
    let report = std::fs::read_to_string(place.run_folder("a").join("report.html")).expect("one");
    for part in ["rank 3", "exchange", "gather"] {
        assert!(report.contains(part), "{part}");
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let Some(mpi) = mpis().into_iter().next() else { return };
    let place = Place::new();
    let whole = losses(&place.run("whole", &with(&["--steps", "8"])).succeeded());
    let mut found = losses(&place.run("a", &with(&["--steps", "2"])).succeeded());
    for (ranks, steps) in [(2, "4"), (4, "6")] {
        // The lanes are those of the run.
        let flags = ["--accumulate", "4", "--schedule", "constant", "--resume", "--steps", steps];
        found.extend(losses(&mpi.run(&place, ranks, "a", &flags).succeeded()));
    }
    found.extend(losses(&place.run("a", &with(&["--steps", "8", "--resume"])).succeeded()));
    assert_eq!(found, whole);
    assert!(place.result("a", 8) == place.result("whole", 8));
}

/// How often a test looks for processes before it reports that they remain. Each look takes some
/// milliseconds.
const LOOKS: usize = 2_000;

/// Processes of a run, by rank.
fn processes(folder: &Path) -> BTreeMap<usize, i32> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").expect("a system with /proc").flatten() {
        let Ok(process) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
        let is_here = std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd == folder);
        let command = String::from_utf8_lossy(&read("cmdline")).into_owned();
        let is_storm = command.split('\0').next().is_some_and(|name| name.ends_with("/storm"));
        if !is_here || !is_storm {
            continue;
        }
        let environment = String::from_utf8_lossy(&read("environ")).into_owned();
        let rank = environment.split('\0').find_map(|variable| {
            let (name, value) = variable.split_once('=')?;
            ["PMI_RANK", "OMPI_COMM_WORLD_RANK"].contains(&name).then(|| value.parse().ok())?
        });
        if let Some(rank) = rank {
            found.insert(rank, process);
        }
    }
    found
}

/// Sends a signal to one rank of a run.
fn signal(folder: &Path, rank: usize, signal: rustix::process::Signal) {
    let ranks = processes(folder);
    assert_eq!(ranks.len(), 4, "{ranks:?}");
    let process = rustix::process::Pid::from_raw(ranks[&rank]).expect("a process");
    rustix::process::kill_process(process, signal).expect("it runs");
}

/// SIGTERM or Ctrl-C on any rank, the first or another: all save after the same step and exit with
/// 0, and the run resumes as if it had never stopped.
#[test]
fn a_stop_of_one_rank_stops_all() {
    use rustix::process::Signal;
    let place = Place::new();
    let folder = std::fs::canonicalize(place.path()).expect("a path");
    let whole = losses(&place.run("whole", &with(&["--steps", "30"])).succeeded());
    for (number, mpi) in mpis().iter().enumerate() {
        let name = format!("stopped-{number}");
        let mut found = BTreeMap::new();
        // More steps than any run makes before its signal arrives.
        for (rank, sent) in [(2, Signal::TERM), (0, Signal::TERM), (3, Signal::INT)] {
            let flags = with(&["--steps", "1000000", "--resume"]);
            let flags = if found.is_empty() { &flags[..flags.len() - 1] } else { &flags };
            let mut command = mpi.command(&place, 4, &name, flags);
            let mut child =
                command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun");
            let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
            let (mut events, mut is_sent) = (Vec::new(), false);
            for line in lines.map_while(Result::ok).filter(|line| line.starts_with('{')) {
                let event: Value = serde_json::from_str(&line).expect("an event");
                if is(&event, "step") && !is_sent {
                    signal(&folder, rank, sent);
                    is_sent = true;
                }
                events.push(event);
            }
            let output = child.wait_with_output().expect("it ends");
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{errors}");
            let last = events.iter().find(|event| is(event, "finished")).expect("it finishes");
            assert_eq!(last["reason"], "stopped as asked", "{last}");
            let stops = events.iter().find(|event| is(event, "stop_on_rank"));
            assert_eq!(stops.map(|stop| stop["rank"].clone()), (rank > 0).then(|| rank.into()));
            assert_eq!(errors.contains(&format!("rank {rank} was told to stop")), rank > 0);
            found.extend(losses(&events));
        }
        let found: Vec<_> = found.into_iter().take(whole.len()).collect();
        assert_eq!(found, whole[..found.len()]);
    }
}

#[test]
fn a_killed_rank_ends_all_and_the_run_goes_on() {
    let place = Place::new();
    let mpis = mpis();
    if mpis.is_empty() {
        return;
    }
    let kills = if std::env::var_os("STORM_LONG_TESTS").is_some() { 100 } else { 10 };
    // A run makes a few more steps before its rank is found and killed.
    let steps = (10 * kills).to_string();
    let flags = with(&["--steps", &steps, "--save-every", "2"]);
    let whole = losses(&place.run("whole", &flags).succeeded());
    let folder = std::fs::canonicalize(place.path()).expect("a path");
    let mut found = BTreeMap::new();
    let mut random = Random(19);
    // Times until all processes of a run are gone.
    let mut times = Vec::new();
    for kill in 0..kills {
        let resumed = [&flags[..], &["--resume"]].concat();
        let flags = if kill == 0 { &flags } else { &resumed };
        let mpi = &mpis[kill % mpis.len()];
        let mut command = mpi.command(&place, 4, "a", flags);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let (mut made, mut killed) = (0, None);
        // Launchers also print there when a rank is killed.
        for line in lines.map_while(Result::ok).filter(|line| line.starts_with('{')) {
            let event: Value = serde_json::from_str(&line).expect("an event");
            found.extend(losses(std::slice::from_ref(&event)));
            made += u32::from(is(&event, "step"));
            if made == 5 {
                signal(&folder, random.below(4), rustix::process::Signal::KILL);
                killed = Some(Instant::now());
                made += 1;
            }
        }
        let output = child.wait_with_output().expect("it ends");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "kill {kill} after {} steps: {errors}", found.len());
        // No process may be left. A launcher may end a moment before the last of them.
        let mut left = processes(&folder);
        for _ in 0..LOOKS {
            if left.is_empty() {
                break;
            }
            std::thread::yield_now();
            left = processes(&folder);
        }
        assert_eq!(left, BTreeMap::new(), "kill {kill}");
        times.extend(killed.map(|killed| killed.elapsed().as_secs_f64()));
    }
    assert_eq!(times.len(), kills);
    times.sort_by(f64::total_cmp);
    // Bypasses the test harness, which would hide it.
    let _ = writeln!(
        std::io::stderr(),
        "{kills} kills of a random rank of 4: all ranks gone after {:.2} s in the median, {:.2} s at most",
        times[kills / 2],
        times[kills - 1]
    );
    let resumed = [&flags[..], &["--resume"]].concat();
    found.extend(losses(&mpis[0].run(&place, 2, "a", &resumed).succeeded()));
    assert_eq!(found.into_iter().collect::<Vec<_>>(), whole);
    let last = steps.parse().expect("a number");
    assert!(place.result("a", last) == place.result("whole", last));
}

#[test]
fn ranks_that_do_not_fit_are_refused() {
    let Some(mpi) = mpis().into_iter().next() else { return };
    let place = Place::new();
    let refused = |ranks: usize, flags: &[&str], parts: &[&str]| {
        let done = mpi.run(&place, ranks, "a", flags);
        assert_eq!(done.code, Some(2), "{}", done.stderr);
        for part in parts {
            assert_eq!(done.stderr.matches(part).count(), 1, "{part}: {}", done.stderr);
        }
        assert!(!place.run_folder("a").exists());
    };
    refused(3, &FOUR_LANES, &["3 ranks cannot share the 4 lanes of a step evenly"]);
    refused(2, &["--accumulate", "1"], &["lanes is 2; it must divide"]);
    let in_backward = "updates in the backward pass come before all 2 lanes of a step are summed";
    refused(2, &["--update", "in-backward", "--clip", "0"], &[in_backward]);
    refused(2, &["--disk", "."], &["disk is for runs on one rank"]);
    refused(2, &["--predict", "direction=\"last-update\""], &["predict is for runs on one rank"]);
    refused(2, &["--model", "resnet-18"], &["2 ranks train language models only"]);
    refused(2, &["--beta1", "7"], &["beta1"]);
    // Ranks that were started with different settings.
    let mut command = mpi.command(&place, 1, "a", &FOUR_LANES);
    let other = mpi.command(&place, 1, "a", &with(&["--seed", "6"]));
    command.arg(":").args(other.get_args().skip(mpi.options.len()));
    let done = finish(command);
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    let problem = "rank 1 was started with another version or with other settings than rank 0";
    assert_eq!(done.stderr.matches(problem).count(), 1, "{}", done.stderr);
}

/// Two ranks. The second runs in its own folder, as on another machine.
fn apart(mpi: &Mpi, place: &Place, other: &Path, name: &str, flags: &[&str]) -> Done {
    after(mpi, place, "cd \"$0\"", other, name, flags)
}

/// Two ranks. The second runs after a shell command, which gets a folder as `$0`.
fn after(mpi: &Mpi, place: &Place, first: &str, other: &Path, name: &str, flags: &[&str]) -> Done {
    let mut command = mpi.command(place, 1, name, flags);
    let storm = place.command(name, flags);
    let script = format!("{first} && exec \"$@\"");
    command.arg(":").args(["-n", "1", "sh", "-c", &script]).arg(other);
    command.arg(storm.get_program()).args(storm.get_args());
    finish(command)
}

/// Other ranks need only the config: no data and no folder of the run, and they create none. Each
/// process has its own `/proc/self/cwd`, so the folder of the run is not the same for both.
#[test]
fn other_ranks_need_neither_data_nor_the_folder_of_the_run() {
    let place = Place::new();
    let flags = with(&["--steps", "3"]);
    place.run("alone", &flags).succeeded();
    for mpi in mpis() {
        let other = tempfile::tempdir().expect("a folder");
        let config = "tiny.toml";
        std::fs::copy(place.path().join(config), other.path().join(config)).expect("a copy");
        let own = [&flags[..], &["--runs", "/proc/self/cwd/runs"]].concat();
        for (name, flags, expected) in [("shared", &flags, 2), ("own", &own, 1)] {
            let name = format!("{name}-{}", mpi.options.len());
            let events = apart(&mpi, &place, other.path(), &name, flags).succeeded();
            assert_eq!(writers(&events), expected, "{name}");
            assert!(place.result(&name, 3) == place.result("alone", 3));
            let left: Vec<_> = std::fs::read_dir(other.path()).expect("a folder").collect();
            assert_eq!(left.len(), 1, "{left:?}");
        }
    }
}

/// The number of processes that write a checkpoint.
fn writers(events: &[Value]) -> u64 {
    let event = events.iter().find(|event| is(event, "checkpoints")).expect("an event");
    event["writers"].as_u64().expect("a number")
}

/// The files in the manifest of a checkpoint.
fn files(place: &Place, name: &str, step: u64) -> Value {
    let path = place.run_folder(name).join(format!("checkpoints/step-{step:08}/manifest.json"));
    let text = std::fs::read_to_string(path).expect("a manifest");
    let manifest: Value = serde_json::from_str(&text).expect("JSON");
    manifest["manifest"]["files"].clone()
}

/// A model in which ranks own whole blocks of files.
const WIDE: [&str; 4] = ["--width", "128", "--heads", "4"];

/// A checkpoint that ranks write together equals the one that a single process writes, as does its
/// hash.
#[test]
fn every_rank_writes_what_it_owns_of_a_checkpoint() {
    let place = Place::new();
    for precision in ["f32", "bf16-stochastic"] {
        let flags = [&with(&["--steps", "2", "--precision", precision])[..], &WIDE].concat();
        let alone = format!("alone-{precision}");
        assert_eq!(writers(&place.run(&alone, &flags).succeeded()), 1);
        for (number, mpi) in mpis().iter().enumerate() {
            let ranks = if (precision == "f32") == (number == 0) { 4 } else { 2 };
            let name = format!("{precision}-{number}");
            let events = mpi.run(&place, ranks, &name, &flags).succeeded();
            assert_eq!(writers(&events), ranks as u64);
            assert!(place.result(&name, 2) == place.result(&alone, 2), "{name}");
            assert_eq!(files(&place, &name, 2), files(&place, &alone, 2));
        }
    }
    let Some(mpi) = mpis().into_iter().next() else { return };
    let flags = [&with(&["--steps", "2", "--save-mode", "background"])[..], &WIDE].concat();
    assert_eq!(writers(&mpi.run(&place, 2, "collected", &flags).succeeded()), 1);
    place.run("alone", &flags).succeeded();
    assert_eq!(files(&place, "collected", 2), files(&place, "alone", 2));
}

/// Files of the second rank are limited to 10 MiB, so it cannot write what it owns. The first rank
/// says so, and leaves nothing half-done.
#[test]
fn a_rank_that_cannot_write_its_part_is_named() {
    let Some(mpi) = mpis().into_iter().next() else { return };
    let place = Place::new();
    let wide = ["--width", "384", "--layers", "3", "--vram", "300MiB", "--ram", "800MiB"];
    let flags = [&with(&["--steps", "1"])[..], &wide].concat();
    let limit = "trap '' XFSZ && ulimit -f 20480";
    let done = after(&mpi, &place, limit, place.path(), "a", &flags);
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    let problem = "error: rank 1 ended the run: cannot write ";
    assert_eq!(done.stderr.matches(problem).count(), 1, "{}", done.stderr);
    assert_eq!(done.stderr.matches("error: ").count(), 1, "{}", done.stderr);
    let left = std::fs::read_dir(place.run_folder("a").join("checkpoints")).expect("a folder");
    assert_eq!(left.count(), 0);
}

/// Killed ranks leave a checkpoint unfinished, and the previous one complete.
#[test]
fn a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before() {
    let place = Place::new();
    let wide = ["--width", "256", "--heads", "4", "--layers", "4"];
    let flags = [&with(&["--steps", "5", "--save-every", "2"])[..], &wide].concat();
    place.run("whole", &flags).succeeded();
    let folder = std::fs::canonicalize(place.path()).expect("a path");
    let mut inside = 0;
    let kills = if std::env::var_os("STORM_LONG_TESTS").is_some() { 20 } else { 1 };
    for (number, mpi) in (0..kills).zip(mpis().iter().cycle()) {
        let victim = 1 + number % 3;
        let name = format!("a{number}");
        let checkpoint =
            |rest: &str| place.run_folder(&name).join(format!("checkpoints/step-{rest}"));
        let mut command = mpi.command(&place, 4, &name, &flags);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let mut ranks = BTreeMap::new();
        for line in lines.map_while(Result::ok).filter(|line| line.starts_with('{')) {
            let event: Value = serde_json::from_str(&line).expect("an event");
            if is(&event, "step") && event["step"] == 3 {
                ranks = processes(&folder);
            }
            if is(&event, "step") && event["step"] == 4 {
                // It waits for the first rank, which now begins to save, or for its disk. While it
                // is stopped, saving cannot finish.
                let process = rustix::process::Pid::from_raw(ranks[&victim]).expect("a process");
                let signal = |signal| rustix::process::kill_process(process, signal);
                signal(rustix::process::Signal::STOP).expect("it runs");
                for _ in 0..LOOKS {
                    if checkpoint("00000004.partial").exists() {
                        break;
                    }
                    processes(&folder);
                }
                inside += usize::from(checkpoint("00000004.partial").exists());
                signal(rustix::process::Signal::KILL).expect("it is stopped");
            }
        }
        assert!(!child.wait().expect("it ends").success());
        assert!(checkpoint("00000002").is_dir());
        let resumed = [&flags[..], &["--resume"]].concat();
        mpi.run(&place, 2, &name, &resumed).succeeded();
        assert!(place.result(&name, 5) == place.result("whole", 5));
        assert!(!checkpoint("00000004.partial").exists());
    }
    assert!(mpis().is_empty() || inside > 0, "no rank was killed while it saved");
}

/// Each rank reads the config of a model. One where it is missing or differs is refused.
#[test]
fn a_model_that_differs_between_ranks_is_refused() {
    let Some(mpi) = mpis().into_iter().next() else { return };
    let place = Place::new();
    place.run("first", &["--steps", "1"]).succeeded();
    let model = place.path().join("model");
    std::fs::rename(place.run_folder("first").join("model"), &model).expect("a model");
    let mut config = std::fs::read_to_string(place.path().join("tiny.toml")).expect("a config");
    for key in ["model", "layers", "width", "heads"] {
        let line = config.lines().find(|line| line.starts_with(&format!("{key} = ")));
        config = config.replace(line.expect("a line"), "");
    }
    std::fs::write(place.path().join("tiny.toml"), format!("model = \"model\"\n{config}"))
        .expect("a config");
    let flags = with(&["--steps", "1"]);
    let other = tempfile::tempdir().expect("a folder");
    let copy = |file: &str| {
        std::fs::copy(place.path().join(file), other.path().join(file)).expect("a copy");
    };
    copy("tiny.toml");
    let refused = |name: &str, code: i32, problem: &str| {
        let done = apart(&mpi, &place, other.path(), name, &flags);
        assert_eq!(done.code, Some(code), "{}", done.stderr);
        assert_eq!(done.stderr.matches(problem).count(), 1, "{}", done.stderr);
        assert_eq!(done.stderr.matches("error").count(), 1, "{}", done.stderr);
        assert!(!done.events.iter().any(|event| is(event, "step")));
    };
    refused("a", 1, "rank 1 ended the run: ");
    std::fs::create_dir(other.path().join("model")).expect("a folder");
    copy("model/config.json");
    copy("model/model.safetensors");
    apart(&mpi, &place, other.path(), "b", &flags).succeeded();
    // All shapes are the same, so plans match.
    let config = std::fs::read_to_string(model.join("config.json")).expect("a config");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["layer_norm_epsilon"] = Value::from(1e-2);
    std::fs::write(other.path().join("model/config.json"), config.to_string()).expect("a config");
    refused("c", 2, "model: rank 1 has another config of it than rank 0");
}

/// Ranks under Slurm meet at a port. If it is in use, the first rank names it, and says how to
/// choose another.
#[test]
fn a_port_in_use_is_named() {
    let place = Place::new();
    let listener = std::net::TcpListener::bind("0.0.0.0:0").expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    let mut command = place.command("a", &["--device", "auto"]);
    command.envs([("SLURM_JOB_ID", "4711"), ("SLURM_STEP_ID", "0"), ("SLURM_NODEID", "0")]);
    command.envs([("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_STEP_NUM_TASKS", "2")]);
    command.envs([("SLURM_STEP_TASKS_PER_NODE", "2"), ("SLURM_STEP_NODELIST", "localhost")]);
    command.envs([("SLURMD_NODENAME", "localhost"), ("STORM_RENDEZVOUS_PORT", &port)]);
    let problem = format!(
        "port {port} on localhost, which follows from Slurm's job and step, cannot be used"
    );
    finish(command).failed(2, &[&problem, "STORM_RENDEZVOUS_PORT"]);
    assert!(!place.run_folder("a").exists());
}

/// Launchers other than mpirun do not connect ranks without GPUs. Ranks that are not connected each
/// say so, since a launcher may kill the others before they can.
#[test]
fn other_launchers_are_refused() {
    let place = Place::new();
    let torchrun = |rank: &'static str| {
        let mut command = place.command("a", &[]);
        command.envs([("TORCHELASTIC_RUN_ID", "none"), ("RANK", rank), ("WORLD_SIZE", "2")]);
        command.envs([("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "2")]);
        command
    };
    for rank in ["0", "1"] {
        let problem = format!("started 2 ranks, and rank {rank} cannot join the others");
        finish(torchrun(rank)).failed(2, &[&problem, "mpirun -n"]);
    }
    assert!(!place.run_folder("a").exists());
}

/// Ranks under a real torchrun are connected by sockets. Without a GPU, only the first one says why
/// the run ends, and all exit alike.
#[test]
fn ranks_of_torchrun_are_refused_together() {
    let Some(torchrun) = launcher("bin/torchrun") else { return };
    let place = Place::new();
    let storm = place.command("a", &["--device", "auto"]);
    let mut command = Command::new(torchrun);
    command.current_dir(place.path()).env_remove("RANK").env_remove("WORLD_SIZE");
    command.env("OMP_NUM_THREADS", "1").env("CUDA_VISIBLE_DEVICES", "");
    command.args(["--standalone", "--nproc-per-node=2", "--no-python"]);
    command.arg(storm.get_program()).args(storm.get_args());
    let done = finish(command);
    assert_eq!(done.stderr.matches("mpirun -n 2 storm train").count(), 1, "{}", done.stderr);
    // torchrun names the first rank that failed.
    assert!(done.stderr.contains("exitcode  : 2"), "{}", done.stderr);
    assert!(!place.run_folder("a").exists());
}
