//! Runs with optimizer state on disk: the same bytes as without, even after kills, and no files
//! left.

use crate::support::{Place, finish};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use storm_files::FolderLock;
use storm_graph::random::Random;
use tempfile::TempDir;

const STEPS: u64 = 8;

/// A folder on a disk, because the system's temporary folder may be in memory.
fn scratch() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

/// Flags of a run with state on disk.
fn flags(folder: &Path, what: &str) -> Vec<String> {
    let flags = format!(
        "--hardware reference --vram 1GiB --optimizer-state streamed --on-disk {what} --disk-space 2MiB --save-every 2 --disk {}",
        folder.display()
    );
    flags.split(' ').map(str::to_owned).collect()
}

fn run(place: &Place, name: &str, flags: &[String], more: &[&str]) -> Command {
    let all: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
    place.command(name, &all)
}

#[test]
fn state_on_disk_changes_no_bit_and_leaves_nothing() {
    let (place, folder) = (Place::new(), scratch());
    let plain = ["--hardware", "reference", "--vram", "1GiB", "--steps", "8", "--save-every", "2"];
    place.run("plain", &plain).succeeded();
    for what in ["second-moments", "moments"] {
        let events = finish(run(&place, what, &flags(folder.path(), what), &["--steps", "8"]));
        let events = events.succeeded();
        assert_eq!(place.result(what, STEPS), place.result("plain", STEPS));
        assert_eq!(names(folder.path()), Vec::<String>::new());
        let disk = events.iter().find(|event| event["event"] == "disk").expect("an event");
        let number = |key: &str| disk[key].as_u64().unwrap_or_else(|| panic!("{key} in {disk}"));
        assert!(number("peak_bytes") > 0 && number("peak_bytes") <= number("space_bytes"));
        // Slots hold some of it, so less is read than written.
        let (read, written) = (number("read_bytes_per_step"), number("written_bytes_per_step"));
        assert!(0 < read && read <= written && written <= number("peak_bytes"), "{disk}");
        assert!(disk["written_bytes_per_day"].as_f64().unwrap() > 0.0, "{disk}");
        assert_eq!(disk["directory"], Value::from(folder.path().to_str().unwrap()));
    }
}

/// Every way to access the disk gives the same bits, and the output names it.
#[test]
fn the_way_to_the_disk_is_named() {
    let (place, folder) = (Place::new(), scratch());
    let flags = flags(folder.path(), "moments");
    let mut first = None;
    for (way, words) in [
        ("io_uring", ["O_DIRECT", "the page cache"]),
        ("direct", ["O_DIRECT without io_uring", "the page cache"]),
        ("cached", ["the page cache", "the page cache"]),
    ] {
        let mut command = run(&place, way, &flags, &["--steps", "3"]);
        command.env("STORM_SCRATCH", way);
        let events = finish(command).succeeded();
        let disk = events.iter().find(|event| event["event"] == "disk").expect("an event");
        let path = disk["path"].as_str().unwrap_or_else(|| panic!("{disk}"));
        assert!(words.iter().any(|words| path.contains(words)), "{way}: {path}");
        let result = place.result(way, 3);
        assert_eq!(&result, first.get_or_insert_with(|| result.clone()), "{way}");
        let saved = events.iter().find(|event| event["event"] == "checkpoints").expect("an event");
        let read = saved["read_from_disk_bytes"].as_u64().unwrap();
        assert!(0 < read && read < saved["bytes"].as_u64().unwrap(), "{saved}");
        assert!(saved["predicted_pause_seconds"].as_f64().unwrap() > 0.0, "{saved}");
    }
    let mut command = run(&place, "wrong", &flags, &["--steps", "1"]);
    command.env("STORM_SCRATCH", "fast");
    finish(command).failed(2, &["STORM_SCRATCH", "io_uring, direct, cached"]);
}

/// A run with state on disk resumes without a disk from its own config, and uses none from then on.
#[test]
fn a_run_is_resumed_without_its_disk() {
    let (place, folder) = (Place::new(), scratch());
    // With another schedule, the first steps would depend on the total number of steps.
    let constant = ["--schedule", "constant", "--save-every", "2"];
    let plain = ["--hardware", "reference", "--vram", "1GiB", "--steps", "8"];
    place.run("plain", &[plain.as_slice(), &constant].concat()).succeeded();
    let with_disk = flags(folder.path(), "moments");
    let first = ["--steps", "4", constant[0], constant[1]];
    finish(run(&place, "both", &with_disk, &first)).succeeded();
    let config = place.run_folder("both").join("config.toml");
    assert!(fs::read_to_string(&config).unwrap().contains("on-disk"));
    let config = config.to_str().unwrap();
    let resumed = place.command_of(config, "both", &["--resume", "--no-disk", "--steps", "8"]);
    let events = finish(resumed).succeeded();
    assert!(!events.iter().any(|event| event["event"] == "disk"));
    assert_eq!(place.result("both", STEPS), place.result("plain", STEPS));
    assert!(!fs::read_to_string(config).unwrap().contains("disk"));
    let both = ["--no-disk", "--disk", "."];
    finish(place.command("neither", &both)).failed(2, &["--no-disk"]);
}

/// 10 kills, or 300 with `STORM_LONG_TESTS=1`, each at a seeded event. The run resumes each time.
#[test]
fn kills_lose_nothing_but_time() {
    let kills = if std::env::var_os("STORM_LONG_TESTS").is_some() { 300 } else { 10 };
    let (place, folder) = (Place::new(), scratch());
    let steps = kills + STEPS;
    let count = steps.to_string();
    let plain =
        ["--hardware", "reference", "--vram", "1GiB", "--steps", &count, "--save-every", "2"];
    place.run("plain", &plain).succeeded();
    let flags = flags(folder.path(), "moments");
    let mut random = Random(20);
    for kill in 0..kills {
        if kill > 0 && kill.is_multiple_of(50) {
            eprintln!("{kill} of {kills} kills");
        }
        let resume = ["--steps", count.as_str(), "--resume"];
        let more = if kill == 0 { &resume[..2] } else { &resume[..] };
        let mut running = place.watch(run(&place, "killed", &flags, more));
        // From before the first step of this process to a few steps later.
        let events = 1 + random.below(8);
        for _ in 0..events {
            if running.next().is_none() {
                break;
            }
        }
        running.child.kill().ok();
        running.child.wait().expect("it ended");
        let left = names(folder.path());
        let known = ["storm.lock", "storm.scratch"];
        assert!(left.iter().all(|name| known.contains(&name.as_str())), "{left:?}");
        if !place.run_folder("killed").join("config.toml").exists() {
            // Killed before it began, so there is nothing to resume.
            fs::remove_dir_all(place.run_folder("killed")).ok();
            finish(run(&place, "killed", &flags, &["--steps", "1"])).succeeded();
        }
    }
    finish(run(&place, "killed", &flags, &["--steps", &count, "--resume"])).succeeded();
    assert_eq!(place.result("killed", steps), place.result("plain", steps));
    assert_eq!(names(folder.path()), Vec::<String>::new());
}

#[test]
fn what_a_dead_run_left_is_removed_and_said() {
    let (place, folder) = (Place::new(), scratch());
    fs::write(folder.path().join("storm.scratch"), vec![0; 3 << 20]).unwrap();
    fs::write(folder.path().join("mine.txt"), "mine").unwrap();
    let done = finish(run(&place, "new", &flags(folder.path(), "moments"), &["--steps", "1"]));
    assert!(done.stderr.contains("removed 3.00 MiB of scratch space"), "{}", done.stderr);
    done.succeeded();
    assert_eq!(names(folder.path()), ["mine.txt"]);
}

#[test]
fn disks_that_cannot_be_used_are_explained() {
    let (place, folder) = (Place::new(), scratch());
    let refused = |flags: &[String], code: i32, words: &[&str]| {
        let done = finish(run(&place, "refused", flags, &["--steps", "1"]));
        assert_eq!(done.code, Some(code), "{flags:?}: {}", done.stderr);
        for words in words {
            assert!(done.stderr.contains(words), "{flags:?}: {}", done.stderr);
        }
    };
    let of = |text: &str| -> Vec<String> { text.split(' ').map(str::to_owned).collect() };
    refused(&of("--disk /nonexistent/scratch"), 2, &["is no folder"]);
    refused(&of("--disk tiny.toml"), 2, &["is no folder"]);
    refused(&of("--disk-space 1GB"), 2, &["give --disk"]);
    refused(&of("--on-disk moments"), 2, &["on-disk needs disk"]);
    let here = format!("--hardware reference --vram 1GiB --disk {}", folder.path().display());
    refused(&of(&format!("{here} --disk-space 100000TB")), 3, &["--disk-space is", "free"]);
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() {
        refused(
            &of("--hardware reference --vram 1GiB --disk /dev/shm"),
            2,
            &["is in memory", "tmpfs"],
        );
    }
    if Path::new("/sys").is_dir() {
        refused(&of("--disk /sys"), 2, &["/sys cannot be written to", "where you may write"]);
    }
    let lock = FolderLock::acquire(folder.path()).expect("a free folder");
    refused(&of(&here), 2, &["scratch space of another run", "a folder of its own"]);
    drop(lock);
    // All of this is checked before data is packed.
    assert!(!place.run_folder("refused").exists());
    let little = format!("{here} --disk-space 4KiB --optimizer-state streamed --on-disk moments");
    refused(&of(&little), 3, &["on disk; given are", "What would work:\n  --disk-space 1MiB\n"]);
    let worn = format!("{here} --optimizer-state streamed --on-disk moments --disk-endurance 1MB");
    let much = "of what the drive is rated for";
    refused(&of(&worn), 2, &[much, "--accept-wear true"]);
    let accepted = of(&format!("{worn} --accept-wear true"));
    let done = finish(run(&place, "worn", &accepted, &["--steps", "1"]));
    assert!(done.stderr.contains("warning: the run writes"), "{}", done.stderr);
    assert!(done.stderr.contains(much), "{}", done.stderr);
    done.succeeded();
}
