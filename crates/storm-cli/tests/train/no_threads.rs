//! A system that allows few or no threads: every command ends with a message, and none hangs.

use crate::support::Place;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The user `nobody`, because root has no limit on its threads.
const NOBODY: u32 = 65_534;

#[test]
fn without_threads_commands_end_with_a_message() {
    let place = Place::new();
    place.run("before", &["--steps", "1"]).succeeded();
    // Where another user can run it and write.
    let storm = place.path().join("storm");
    let built = env!("CARGO_BIN_EXE_storm");
    fs::hard_link(built, &storm).or_else(|_| fs::copy(built, &storm).map(drop)).expect("a copy");
    fs::set_permissions(place.path(), Permissions::from_mode(0o777)).expect("ours");
    let is_root = rustix::process::geteuid().is_root();
    let run = |limit: usize, args: &str| {
        // The time is far more than it takes, so only a hang is ended.
        let mut command = Command::new("timeout");
        command.args(["300", "prlimit", &format!("--nproc={limit}")]).arg(&storm);
        command.args(args.split_whitespace()).current_dir(place.path());
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        let output = command.output().expect("timeout and prlimit");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let train = "train tiny.toml --data runs/before/data --runs elsewhere --steps 1 --quiet --name";
    // From no thread at all to enough for some of what a run starts.
    for limit in [1, 3, 4, 5, 6, 7, 8] {
        let (code, errors) = run(limit, &format!("{train} a{limit}"));
        assert!(!errors.contains("panicked"), "{limit}: {errors}");
        match code {
            Some(0) => {}
            Some(1) => assert!(errors.contains("error: "), "{limit}: {errors}"),
            code => panic!("{limit}: {code:?} {errors}"),
        }
    }
    for args in [
        "plan --model gpt2 --batch 1 --seq 64 --vram 4GiB --ram 8GiB --hardware reference",
        "eval runs/before/model --data runs/before/data --seq 16",
        "sample runs/before/model --tokenizer bytes --prompt 1 --tokens 2",
        "bench cpu --steps 1",
    ] {
        let (code, errors) = run(1, args);
        assert_eq!(code, Some(1), "{args}: {errors}");
        assert!(errors.contains("cannot start threads"), "{args}: {errors}");
    }
}
