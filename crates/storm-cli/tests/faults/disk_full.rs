//! Full disks: the one with a run's state, at the beginning or when others fill it later, and the
//! one with its checkpoints. The run ends with the space it needs or the commands that resume it,
//! its checkpoints are complete, and the resumed run gives the same result.

use crate::made::Made;
use crate::outcome::{Call, Verdict};
use crate::shim::{ENOSPC, Injection, Kind, Shim};
use crate::stock::Stock;
use tempfile::TempDir;

const LINE: &str = "train tiny.toml --json --name new --steps 4 --optimizer-state streamed --on-disk moments --disk scratch \
                    --disk-space 2MiB";
const NEEDS: [&str; 3] = ["tiny.toml", "data", "scratch/mine.txt"];

/// A run, and the calls that fail in it.
struct Attack<'a> {
    stock: &'a Stock,
    shim: &'a Shim,
    more: &'a str,
    kind: Kind,
    /// Only calls on files with this in their path count.
    path: Option<&'static str>,
}

/// A run that ended.
struct Ended {
    folder: TempDir,
    verdict: Verdict,
    stderr: String,
    /// Number of calls of the attack's kind.
    calls: u64,
}

impl Ended {
    fn made(&self) -> Made {
        Made::at(&self.folder.path().join("runs/new"))
    }

    /// Runs a command that recovers from the failure. Afterwards, all is as if nothing had failed.
    fn make_up(&self, command: &str, expected: &Made) {
        let done = Call::of(command).succeed(self.folder.path());
        done.unwrap_or_else(|problem| panic!("{problem}"));
        assert_eq!(self.made().difference(expected), None, "{}", self.stderr);
        let left = std::fs::read_dir(self.folder.path().join("scratch")).expect("a folder").count();
        assert_eq!(left, 1, "only what was there before");
    }

    fn says(&self, words: &[&str]) {
        for words in words {
            assert!(self.stderr.contains(words), "{words}: {}", self.stderr);
        }
    }

    /// The printed command that contains these words, without `storm`.
    fn command(&self, words: &str) -> &str {
        let command = self.stderr.lines().find(|line| line.contains(words)).expect("a command");
        let command = command.trim().strip_prefix("storm ").expect("a command of storm");
        command.split("   ").next().expect("the command")
    }
}

impl Attack<'_> {
    /// Runs without io_uring, whose writes the shim does not see. Nothing fails if `at` is `None`.
    fn run(&self, at: Option<u64>) -> Ended {
        let folder = self.stock.copy(&NEEDS);
        let counts = folder.path().join("counts");
        let line = format!("{LINE} {}", self.more);
        let mut call = Call::of(&line).env("STORM_SCRATCH", "direct");
        if let Some(path) = self.path {
            call = call.env("STORM_SHIM_PATH", path);
        }
        let injection = at.map(|at| Injection { kind: self.kind, at, fault: ENOSPC });
        let outcome = self.shim.load(call, &counts, injection).run(folder.path());
        let counted = Shim::counts(&counts);
        assert_eq!(counted.was_injected(), at.is_some(), "{}", outcome.stderr);
        std::fs::remove_file(&counts).expect("counts");
        let (verdict, stderr, calls) = (outcome.verdict, outcome.stderr, counted.of(self.kind));
        Ended { folder, verdict, stderr, calls }
    }

    /// Runs without a failure.
    fn undisturbed(&self) -> Ended {
        let ended = self.run(None);
        assert_eq!(ended.verdict, Verdict::Success, "{}", ended.stderr);
        ended
    }
}

#[test]
fn a_disk_that_is_full_during_a_run_ends_it_cleanly() {
    let (stock, shim) = (&Stock::new(), &Shim::new());
    let attack = Attack { stock, shim, more: "", kind: Kind::Positioned, path: None };
    let undisturbed = attack.undisturbed();
    // In the middle of the run and at its last write.
    for at in [undisturbed.calls * 3 / 4, undisturbed.calls] {
        let ended = attack.run(Some(at));
        assert_eq!(ended.verdict, Verdict::ErrorInWords(1), "{at}: {}", ended.stderr);
        ended.says(&[
            "the disk is full, although the space was allocated",
            "The last checkpoint is that of step ",
            "To resume from it:",
            "once there is room in scratch",
            "without a disk: ",
        ]);
        ended.make_up(ended.command("--no-disk"), &undisturbed.made());
    }
}

/// Scratch space is refused while the disk is measured, and when the plan is committed.
#[test]
fn a_disk_without_room_for_scratch_space_is_said_before_the_first_step() {
    let (stock, shim) = (&Stock::new(), &Shim::new());
    let attack = Attack { stock, shim, more: "", kind: Kind::Allocate, path: None };
    let undisturbed = attack.undisturbed();
    assert!(undisturbed.calls >= 2, "{} files", undisturbed.calls);
    for at in 1..=undisturbed.calls {
        let ended = attack.run(Some(at));
        assert_eq!(ended.verdict, Verdict::ErrorInWords(3), "{at}: {}", ended.stderr);
        let needed =
            if at == 1 { "2.00 MiB are needed in scratch" } else { "of disk memory are needed" };
        ended.says(&[needed, "free some, or name a folder on another disk"]);
        ended.make_up(LINE, &undisturbed.made());
    }
}

/// The folder of the checkpoints fills up, while scratch space is on a disk.
#[test]
fn a_disk_without_room_for_a_checkpoint_ends_the_run_with_the_command_to_resume() {
    let (stock, shim) = (&Stock::new(), &Shim::new());
    for more in ["--save-mode pause", "--save-mode background"] {
        let path = Some("/checkpoints/");
        let attack = Attack { stock, shim, more, kind: Kind::Write, path };
        let undisturbed = attack.undisturbed();
        // In one of four saves, and at the last write.
        for at in [undisturbed.calls * 5 / 8, undisturbed.calls] {
            let ended = attack.run(Some(at));
            assert_eq!(ended.verdict, Verdict::ErrorInWords(1), "{at}: {}", ended.stderr);
            ended.says(&[
                "the disk is full; free some space",
                "The last checkpoint is that of step ",
                "To resume from it:",
            ]);
            ended.make_up(ended.command("once there is room in runs/new"), &undisturbed.made());
        }
    }
}
