//! The folder of a run: one process at a time, and nothing in it is lost silently.

use crate::support::{Place, finish, is, losses, tree};
use std::fs;
use std::path::Path;
use std::process::Command;
use storm_files::FolderLock;

/// Adds a profile, so that nothing is measured.
fn fast<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    [flags, &["--hardware", "reference", "--vram", "1GiB"]].concat()
}

/// Flips a bit of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).expect("a file");
}

#[test]
fn a_start_that_is_refused_changes_nothing() {
    let place = Place::new();
    let flags = fast(&["--steps", "4", "--save-every", "2"]);
    place.run("a", &flags).succeeded();
    let folder = place.run_folder("a");
    // As left by another process that is saving.
    fs::create_dir(folder.join("checkpoints/step-00000006.partial")).expect("a folder");
    let before = tree(&folder);
    place.run("a", &flags).failed(2, &["has checkpoints already", "--resume", "--begin-anew"]);
    assert!(tree(&folder) == before, "there is a run already");
    let lock = FolderLock::acquire(&folder).expect("a lock");
    let before = tree(&folder);
    let holder = format!("is in use by process {} on ", std::process::id());
    for start in [&[][..], &["--resume"], &["--begin-anew"]] {
        let flags = fast(&[&["--steps", "6"], start].concat());
        place.run("a", &flags).failed(1, &["runs/a", &holder]);
        assert!(tree(&folder) == before, "{start:?}: somebody else is there");
    }
    drop(lock);
    place.run("a", &fast(&["--steps", "6", "--resume"])).succeeded();
    assert!(!folder.join(FolderLock::FILE_NAME).exists());
    assert!(!folder.join("checkpoints/step-00000006.partial").exists());
}

#[test]
fn two_processes_never_share_a_run() {
    let place = Place::new();
    // More steps than it will ever make.
    let mut first = place.start("a", &fast(&["--steps", "1000000", "--save-every", "1"]));
    while !is(&first.next().expect("more steps"), "saving") {}
    let holder = format!("is in use by process {} on ", first.child.id());
    let resumed = fast(&["--steps", "1", "--resume"]);
    place.run("a", &resumed).failed(1, &[&holder]);
    // SIGKILL: the lock is released with the process, and its file stays.
    first.child.kill().expect("it can be killed");
    first.child.wait().expect("it ends");
    assert!(place.run_folder("a").join(FolderLock::FILE_NAME).exists());
    let resumed = place.run("a", &resumed);
    assert!(!resumed.stderr.contains("was left by"), "{}", resumed.stderr);
    resumed.succeeded();
}

#[test]
fn a_lock_that_another_machine_left_is_taken_over_with_a_warning() {
    let place = Place::new();
    let folder = place.run_folder("a");
    fs::create_dir_all(&folder).expect("a folder");
    let text = "process 4711\nhost far-away\nsince 1763238263\n";
    fs::write(folder.join(FolderLock::FILE_NAME), text).expect("a file");
    let done = place.run("a", &fast(&["--steps", "1"]));
    assert!(done.stderr.contains("left by process 4711 on far-away"), "{}", done.stderr);
    done.succeeded();
}

#[test]
fn a_run_whose_checkpoints_are_all_damaged_begins_anew_only_if_told_to() {
    let place = Place::new();
    let flags = fast(&["--steps", "6", "--save-every", "2", "--keep-best", "false"]);
    let expected = losses(&place.run("a", &flags).succeeded());
    let folder = place.run_folder("a");
    for step in ["step-00000004", "step-00000006"] {
        damage(&folder.join("checkpoints").join(step).join("optimizer.safetensors"));
    }
    let before = tree(&folder);
    let resumed = place.run("a", &[&flags[..], &["--resume"]].concat());
    let skipped = resumed.events.iter().filter(|event| is(event, "checkpoint_skipped")).count();
    assert_eq!(skipped, 2);
    resumed.failed(4, &["none of the 2 checkpoints", "--begin-anew"]);
    assert!(tree(&folder) == before);
    let both = [&flags[..], &["--resume", "--begin-anew"]].concat();
    place.run("a", &both).failed(2, &["cannot be used with"]);
    let anew = place.run("a", &[&flags[..], &["--begin-anew"]].concat());
    assert!(anew.stderr.contains("before-1"), "{}", anew.stderr);
    assert_eq!(losses(&anew.succeeded()), expected);
    // All of it is still there.
    let aside = tree(&folder.join("before-1"));
    assert!(aside == before);
}

#[test]
fn a_run_that_was_killed_before_its_report_gets_one() {
    let place = Place::new();
    let flags = fast(&["--steps", "4", "--eval-every", "2"]);
    place.run("a", &flags).succeeded();
    let folder = place.run_folder("a");
    let result = place.result("a", 4);
    let report = folder.join("report.html");
    let charts = |text: String| text.split("The last plan").next().map(str::to_owned);
    let before = charts(fs::read_to_string(&report).expect("a report"));
    for file in ["report.html", "trace.json", "model/config.json"] {
        fs::remove_file(folder.join(file)).expect("a file");
    }
    fs::remove_dir_all(folder.join("model")).expect("a folder");
    let events = place.run("a", &[&flags[..], &["--resume"]].concat()).succeeded();
    assert!(losses(&events).is_empty(), "no step is left");
    assert!(folder.join("trace.json").is_file());
    assert_eq!(charts(fs::read_to_string(&report).expect("a report")), before);
    assert!(place.result("a", 4) == result);
}

#[test]
fn a_damaged_best_checkpoint_takes_nothing_but_the_best_model() {
    let place = Place::new();
    // Nothing is learned, so the first evaluation stays the best.
    let flags = fast(&["--steps", "4", "--eval-every", "1", "--learning-rate", "0"]);
    let events = place.run("a", &flags).succeeded();
    let finished = events.iter().find(|event| is(event, "finished")).expect("an end");
    let best = finished["best"]["step"].as_u64().expect("a best");
    assert!(best < 4, "the best is the last: {finished}");
    let folder = place.run_folder("a");
    damage(&folder.join(format!("checkpoints/step-{best:08}/parameters.safetensors")));
    for file in ["report.html", "model/model.safetensors"] {
        fs::remove_file(folder.join(file)).expect("a file");
    }
    let resumed = place.run("a", &[&flags[..], &["--resume"]].concat());
    let problem = format!("step-{best:08}/parameters.safetensors is damaged");
    resumed.failed(4, &["model-best was not written", &problem]);
    assert!(
        folder.join("report.html").is_file() && folder.join("model/model.safetensors").is_file()
    );
}

#[test]
fn a_run_that_ignores_hangups_outlives_its_terminal() {
    let place = Place::new();
    for (name, shell, steps, reason) in [
        ("ignored", "trap '' HUP; exec \"$0\" \"$@\"", "300", "completed"),
        // More steps than it will ever make.
        ("heard", "exec env --default-signal=HUP \"$0\" \"$@\"", "1000000", "stopped as asked"),
    ] {
        let direct = place.command(name, &fast(&["--steps", steps]));
        let mut command = Command::new("sh");
        command.current_dir(place.path()).args(["-c", shell]);
        command.arg(direct.get_program()).args(direct.get_args());
        let mut run = place.watch(command);
        let mut events = Vec::new();
        while losses(&events).is_empty() {
            events.push(run.next().expect("more steps"));
        }
        let id = run.child.id().to_string();
        assert!(Command::new("kill").args(["-HUP", &id]).status().expect("kill runs").success());
        let (code, rest) = run.wait();
        events.extend(rest);
        assert_eq!(code, Some(0), "{name}");
        let finished = events.iter().find(|event| is(event, "finished")).expect("an end");
        assert_eq!(finished["reason"], reason, "{name}");
    }
}

/// A FIFO or an endless device replaces each file that a start reads or writes.
#[test]
fn special_files_are_refused_at_once() {
    let place = Place::new();
    let flags = fast(&["--steps", "2", "--save-every", "1"]);
    place.run("a", &flags).succeeded();
    let folder = place.run_folder("a");
    let resumed = [&flags[..], &["--resume"]].concat();
    // Files of the run's folder, and the exit code without them.
    let files = [
        ("config.toml", 1),
        ("metrics.jsonl", 1),
        ("report.html", 1),
        ("trace.json", 1),
        (FolderLock::FILE_NAME, 1),
        ("data/dataset.json", 4),
        // The previous checkpoint is used.
        ("checkpoints/step-00000002/manifest.json", 0),
        ("checkpoints/step-00000002/parameters.safetensors", 0),
    ];
    for (file, code) in files {
        let path = folder.join(file);
        let whole = fs::read(&path).ok();
        for kind in ["fifo", "/dev/zero"] {
            fs::remove_file(&path).ok();
            special(&path, kind);
            let done = finish(limited(&place.command("a", &resumed)));
            assert_eq!(done.code, Some(code), "{file} as {kind}: {}", done.stderr);
            let named = if code == 4 { "data" } else { file };
            assert!(done.stderr.contains(named), "{file} as {kind}: {}", done.stderr);
            fs::remove_file(&path).ok();
            whole.iter().for_each(|bytes| fs::write(&path, bytes).expect("a file"));
        }
    }
}

#[test]
fn special_files_of_the_user_are_refused_at_once() {
    let place = Place::new();
    for kind in ["fifo", "/dev/zero"] {
        let path = place.path().join("special");
        special(&path, kind);
        for arguments in [
            "train special --name b",
            "train tiny.toml --name b --hardware special",
            "train tiny.toml --name b --model special",
            "plan --model gpt2 --batch 1 --vram 1GiB --hardware special",
            "model show special",
        ] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_storm"));
            command.current_dir(place.path()).args(arguments.split_whitespace());
            let output = limited(&command).output().expect("storm starts");
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(4), "{arguments} of {kind}: {errors}");
            assert!(errors.contains("special"), "{arguments} of {kind}: {errors}");
        }
        fs::remove_file(&path).expect("a file");
    }
}

/// The same command, killed after a minute. It takes a moment, or hangs.
fn limited(command: &Command) -> Command {
    let mut limited = Command::new("timeout");
    limited.args(["-s", "KILL", "60"]).arg(command.get_program()).args(command.get_args());
    limited.current_dir(command.get_current_dir().expect("a folder"));
    limited
}

fn special(path: &Path, kind: &str) {
    if kind == "fifo" {
        let made = Command::new("mkfifo").arg(path).status();
        assert!(made.expect("mkfifo runs").success());
    } else {
        std::os::unix::fs::symlink(kind, path).expect("a link");
    }
}
